//! The service behind Envoy: takes any request and answers the same 200 bytes at once.

use std::convert::Infallible;
use std::net::SocketAddr;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;

use crate::Fallible;

/// The length of each answer's body, in bytes.
pub const ANSWER: usize = 200;

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
    // The whole request is taken before it is answered; one that breaks off has nobody to answer.
    let _ = request.into_body().collect().await;
    let mut response = Response::new(Full::new(Bytes::from_static(&BODY)));
    response.headers_mut().insert("content-type", http::HeaderValue::from_static("text/plain"));
    Ok(response)
}
