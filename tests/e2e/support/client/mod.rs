//! Owns the tests' HTTP clients: one `Request` and `Response` over raw HTTP/1.1 and over HTTP/2.

pub mod h1;
pub mod h2;
pub mod message;

use std::net::SocketAddr;
use std::time::Duration;

pub use self::h1::H1;
pub use self::h2::{H2, H2Stream};
pub use self::message::{ClientError, Framing, Head, Request, Response};

/// The longest a client waits for anything before it reports `ClientError::TimedOut`.
pub const CLIENT_TIMEOUT: Duration = Duration::from_secs(30);

pub type Result<T> = std::result::Result<T, ClientError>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    Http1,
    Http2,
}

impl Protocol {
    pub const BOTH: [Protocol; 2] = [Protocol::Http1, Protocol::Http2];
}

/// One connection, of either protocol.
pub enum Client {
    Http1(H1),
    Http2(H2),
}

impl Client {
    pub async fn connect(addr: SocketAddr, protocol: Protocol) -> Client {
        Self::try_connect(addr, protocol).await.expect("connecting to the proxy")
    }

    pub async fn try_connect(addr: SocketAddr, protocol: Protocol) -> Result<Client> {
        Ok(match protocol {
            Protocol::Http1 => Client::Http1(H1::connect(addr).await?),
            Protocol::Http2 => Client::Http2(H2::connect(addr).await?),
        })
    }

    pub async fn send(&mut self, request: &Request) -> Result<Response> {
        self.send_within(request, CLIENT_TIMEOUT).await
    }

    pub async fn send_within(&mut self, request: &Request, limit: Duration) -> Result<Response> {
        within(limit, async {
            match self {
                Client::Http1(client) => client.send(request).await,
                Client::Http2(client) => client.send(request).await,
            }
        })
        .await
    }

    /// Sends the whole request and leaves the response to be read piece by piece, or the exchange to be given up.
    pub async fn start(self, request: &Request) -> Result<Pending> {
        within(CLIENT_TIMEOUT, async {
            Ok(match self {
                Client::Http1(mut client) => {
                    client.write_request(request).await?;
                    Pending::Http1(client)
                }
                Client::Http2(client) => {
                    let mut stream = client.open(request, false).await?;
                    stream.send_rest(request).await?;
                    Pending::Http2(stream)
                }
            })
        })
        .await
    }
}

/// An exchange whose request is sent.
pub enum Pending {
    Http1(H1),
    Http2(H2Stream),
}

impl Pending {
    /// The response's head, as soon as it is there.
    pub async fn head(&mut self) -> Result<Head> {
        within(CLIENT_TIMEOUT, async {
            match self {
                Pending::Http1(client) => client.read_head().await,
                Pending::Http2(stream) => stream.head().await,
            }
        })
        .await
    }

    /// The next bytes of the body as they arrive; `None` at its proper end. Only after `head`.
    pub async fn chunk(&mut self) -> Result<Option<Vec<u8>>> {
        within(CLIENT_TIMEOUT, async {
            match self {
                Pending::Http1(client) => client.read_chunk().await,
                Pending::Http2(stream) => stream.chunk().await,
            }
        })
        .await
    }

    /// Reads until so many more bytes of the body are there, however they are cut. Only after `head`.
    pub async fn read_exactly(&mut self, length: usize) -> Result<Vec<u8>> {
        let mut got = Vec::new();
        while got.len() < length {
            got.extend(self.chunk().await?.ok_or_else(|| ClientError::Closed("the end of the body".into()))?);
        }
        Ok(got)
    }

    /// The whole response, what was already read included.
    pub async fn finish(self) -> Result<Response> {
        within(CLIENT_TIMEOUT, async {
            match self {
                Pending::Http1(mut client) => client.read_response().await,
                Pending::Http2(mut stream) => stream.response().await,
            }
        })
        .await
    }

    /// Hangs up: a TCP reset on HTTP/1.1, RST_STREAM on HTTP/2.
    pub fn abort(self) {
        match self {
            Pending::Http1(client) => client.abort(),
            Pending::Http2(stream) => stream.reset(),
        }
    }
}

/// One request on a connection of its own.
pub async fn send_once(addr: SocketAddr, protocol: Protocol, request: &Request) -> Result<Response> {
    Client::try_connect(addr, protocol).await?.send(request).await
}

/// Sends all requests at the same time, each on a connection of its own that is open before the first is sent.
/// The answers come back in the order of the requests.
pub async fn burst(addr: SocketAddr, protocol: Protocol, requests: Vec<Request>) -> Vec<Result<Response>> {
    let gate = std::sync::Arc::new(tokio::sync::Barrier::new(requests.len()));
    let sends: Vec<_> = requests
        .into_iter()
        .map(|request| {
            let gate = gate.clone();
            tokio::spawn(async move {
                let client = Client::try_connect(addr, protocol).await;
                gate.wait().await;
                client?.send(&request).await
            })
        })
        .collect();
    let mut answers = Vec::new();
    for send in sends {
        answers.push(send.await.expect("a client task"));
    }
    answers
}

async fn within<T>(limit: Duration, work: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::time::timeout(limit, work).await.unwrap_or(Err(ClientError::TimedOut))
}
