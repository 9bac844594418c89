//! Owns the network between Envoy and Redis: a TCP relay that a test can cut, silence, or lead to another server.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Road {
    To(SocketAddr),
    /// Requests arrive, and their replies are lost.
    Mute(SocketAddr),
    Cut,
}

/// One relay. It is gone, with its connections, when it is dropped.
pub struct Relay {
    addr: SocketAddr,
    road: watch::Sender<Road>,
    accept: JoinHandle<()>,
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.accept.abort();
    }
}

impl Relay {
    pub async fn to(target: SocketAddr) -> Relay {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let addr = listener.local_addr().unwrap();
        let road = watch::Sender::new(Road::To(target));
        let roads = road.subscribe();
        let accept = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(carry(client, roads.clone()));
            }
        });
        Relay { addr, road, accept }
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Ends every connection; new ones end at once.
    pub fn cut(&self) {
        self.road.send_replace(Road::Cut);
    }

    /// Ends every connection; new ones lead to `target`.
    pub fn lead_to(&self, target: SocketAddr) {
        self.road.send_replace(Road::To(target));
    }

    /// Connections stay, and what is asked arrives at `target`; nothing comes back any more.
    pub fn mute(&self, target: SocketAddr) {
        self.road.send_replace(Road::Mute(target));
    }
}

async fn carry(client: TcpStream, mut roads: watch::Receiver<Road>) {
    let target = match *roads.borrow_and_update() {
        Road::To(target) | Road::Mute(target) => target,
        Road::Cut => return,
    };
    let Ok(server) = TcpStream::connect(target).await else { return };
    let (_, _) = (client.set_nodelay(true), server.set_nodelay(true));
    let ((mut from_client, mut to_client), (mut from_server, mut to_server)) =
        (client.into_split(), server.into_split());
    let asks = tokio::io::copy(&mut from_client, &mut to_server);
    let replies_on = roads.clone();
    let replies = async {
        let mut buffer = vec![0; 64 * 1024];
        while let Ok(length @ 1..) = from_server.read(&mut buffer).await {
            let muted = matches!(*replies_on.borrow(), Road::Mute(_));
            if !muted && to_client.write_all(&buffer[..length]).await.is_err() {
                return;
            }
        }
    };
    let led_elsewhere =
        roads.wait_for(|road| !matches!(road, Road::To(to) | Road::Mute(to) if *to == target));
    tokio::select! {
        _ = asks => {}
        () = replies => {}
        _ = led_elsewhere => {}
    }
}
