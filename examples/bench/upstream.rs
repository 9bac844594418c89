//! The service behind the proxies: takes any request, counts it, and answers the same 200 bytes at once, unless told to
//! take its time.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::Fallible;

/// The length of each answer's body, in bytes.
pub const ANSWER: usize = 200;

/// A request with this header waits for [`release`].
pub const HOLD: &str = "x-hold";
/// A request with this header takes so many milliseconds.
pub const WORK: &str = "x-work-ms";

static EXECUTED: AtomicU64 = AtomicU64::new(0);
static HELD: AtomicU64 = AtomicU64::new(0);

/// How often it ran.
pub fn executed() -> u64 {
    EXECUTED.load(Ordering::SeqCst)
}

/// How many requests wait.
pub fn held() -> u64 {
    HELD.load(Ordering::SeqCst)
}

/// Lets all that wait go.
pub fn release() {
    barrier().send_modify(|passed| *passed += 1);
}

fn barrier() -> &'static watch::Sender<u64> {
    static BARRIER: OnceLock<watch::Sender<u64>> = OnceLock::new();
    BARRIER.get_or_init(|| watch::Sender::new(0))
}

/// Starts it on a thread of its own, which ends with the process.
pub fn start() -> Fallible<SocketAddr> {
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || -> Fallible<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            let listener = TcpListener::bind("127.0.0.1:0").await?;
            sender.send(listener.local_addr()?)?;
            loop {
                let (stream, _) = listener.accept().await?;
                stream.set_nodelay(true)?;
                tokio::spawn(
                    hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service_fn(answer)),
                );
            }
        })
    });
    Ok(receiver.recv()?)
}

async fn answer(request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    static BODY: [u8; ANSWER] = [b'a'; ANSWER];
    EXECUTED.fetch_add(1, Ordering::SeqCst);
    let waits = request.headers().contains_key(HOLD);
    let work = request.headers().get(WORK).and_then(|value| value.to_str().ok()?.parse().ok());
    // The whole request is taken before it is answered; one that breaks off has nobody to answer.
    let _ = request.into_body().collect().await;
    if waits {
        let mut passed = barrier().subscribe();
        passed.mark_unchanged();
        HELD.fetch_add(1, Ordering::SeqCst);
        let _ = passed.changed().await;
        HELD.fetch_sub(1, Ordering::SeqCst);
    }
    if let Some(millis) = work {
        tokio::time::sleep(Duration::from_millis(millis)).await;
    }
    let mut response = Response::new(Full::new(Bytes::from_static(&BODY)));
    response.headers_mut().insert("content-type", http::HeaderValue::from_static("text/plain"));
    Ok(response)
}
