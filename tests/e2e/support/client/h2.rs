//! Owns the HTTP/2 client: prior knowledge, chosen DATA frame sizes, trailers, and resets.

use std::net::SocketAddr;

use ::h2::client::{ResponseFuture, SendRequest};
use ::h2::{Reason, RecvStream, SendStream};
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};
use tokio::net::TcpStream;
use tokio::task::AbortHandle;

use super::Result;
use super::message::{ClientError, Framing, Head, HeaderLine, Request, Response};

const WINDOW: u32 = 16 * 1024 * 1024;

/// One connection; `send` may run several times at once on it. It closes after its last clone and stream.
#[derive(Clone)]
pub struct H2 {
    sender: SendRequest<Bytes>,
    driver: AbortHandle,
}

impl H2 {
    pub async fn connect(addr: SocketAddr) -> Result<H2> {
        let stream = TcpStream::connect(addr).await.map_err(|e| ClientError::Closed(e.to_string()))?;
        stream.set_nodelay(true).expect("TCP_NODELAY");
        let (sender, connection) = ::h2::client::Builder::new()
            .initial_window_size(WINDOW)
            .initial_connection_window_size(WINDOW)
            .handshake(stream)
            .await
            .map_err(closed)?;
        let driver = tokio::spawn(async move {
            // The streams report what ended the connection.
            let _ = connection.await;
        });
        Ok(H2 { sender, driver: driver.abort_handle() })
    }

    pub async fn send(&self, request: &Request) -> Result<Response> {
        let mut stream = self.open(request, false).await?;
        // A server may answer before it has read everything, so the answer counts more than the rest of the body.
        let sent = stream.send_rest(request).await;
        match stream.response().await {
            Err(ClientError::Closed(why)) => Err(sent.err().unwrap_or(ClientError::Closed(why))),
            answer => answer,
        }
    }

    /// Sends the request's head only; `held` keeps the stream open even if there is no body to follow.
    pub async fn open(&self, request: &Request, held: bool) -> Result<H2Stream> {
        let mut head = http::Request::builder()
            .method(request.method.as_bytes())
            .uri(format!("http://{}{}", request.authority, request.path))
            .body(())
            .map_err(|e| ClientError::Malformed(e.to_string()))?;
        *head.headers_mut() = header_map(&request.headers)?;
        if request.framing == Framing::Length && !head.headers().contains_key("content-length") {
            head.headers_mut().insert("content-length", request.body.len().into());
        }
        let bodyless = request.body.is_empty() && request.trailers.is_empty();
        let chunked = matches!(request.framing, Framing::Chunks(_));
        let end = bodyless && !chunked && !held;
        let mut sender = self.sender.clone().ready().await.map_err(closed)?;
        let (answer, body) = sender.send_request(head, end).map_err(closed)?;
        Ok(H2Stream {
            send: body,
            send_ended: end,
            answer: Some(answer),
            receive: None,
            partial: Response::default(),
            ended: false,
        })
    }

    /// Drops the whole TCP connection, with every stream on it.
    pub fn abort(self) {
        self.driver.abort();
    }
}

/// One stream whose request head is sent.
pub struct H2Stream {
    send: SendStream<Bytes>,
    send_ended: bool,
    answer: Option<ResponseFuture>,
    receive: Option<RecvStream>,
    partial: Response,
    ended: bool,
}

impl H2Stream {
    /// One DATA frame, within the peer's frame size; waits for window.
    pub async fn send_data(&mut self, data: &[u8], end: bool) -> Result<()> {
        let mut rest = data;
        while !rest.is_empty() {
            self.send.reserve_capacity(rest.len());
            let room = std::future::poll_fn(|cx| self.send.poll_capacity(cx)).await;
            let room =
                room.ok_or_else(|| ClientError::Closed("the stream was closed".into()))?.map_err(closed)?;
            let (now, later) = rest.split_at(room.min(rest.len()));
            self.send.send_data(Bytes::copy_from_slice(now), end && later.is_empty()).map_err(closed)?;
            rest = later;
        }
        if data.is_empty() {
            self.send.send_data(Bytes::new(), end).map_err(closed)?;
        }
        self.send_ended |= end;
        Ok(())
    }

    pub fn send_trailers(&mut self, trailers: &[HeaderLine]) -> Result<()> {
        self.send_ended = true;
        self.send.send_trailers(header_map(trailers)?).map_err(closed)
    }

    /// Body and trailers of `request`, up to its end.
    pub async fn send_rest(&mut self, request: &Request) -> Result<()> {
        if self.send_ended {
            return Ok(());
        }
        let pieces = request.pieces();
        let last = pieces.len().saturating_sub(1);
        for (at, piece) in pieces.iter().enumerate() {
            self.send_data(piece, at == last && request.trailers.is_empty()).await?;
        }
        if !request.trailers.is_empty() {
            self.send_trailers(&request.trailers)
        } else if pieces.is_empty() {
            self.send_data(b"", true).await
        } else {
            Ok(())
        }
    }

    pub async fn head(&mut self) -> Result<Head> {
        let answer = self.answer.take().expect("the head was already read");
        let (parts, body) = answer.await.map_err(closed)?.into_parts();
        let head = Head { status: parts.status.as_u16(), headers: header_lines(&parts.headers) };
        self.partial = Response { status: head.status, headers: head.headers.clone(), ..Response::default() };
        self.receive = Some(body);
        Ok(head)
    }

    pub async fn chunk(&mut self) -> Result<Option<Vec<u8>>> {
        let body = self.receive.as_mut().expect("read the head first");
        if self.ended {
            return Ok(None);
        }
        let failure = match body.data().await {
            Some(Ok(data)) => {
                // The stream may be closed already; then there is no window left to give back.
                let _ = body.flow_control().release_capacity(data.len());
                self.partial.body.extend_from_slice(&data);
                return Ok(Some(data.to_vec()));
            }
            Some(Err(e)) => e,
            None => match body.trailers().await {
                Ok(trailers) => {
                    self.partial.trailers = trailers.map(|map| header_lines(&map));
                    self.ended = true;
                    return Ok(None);
                }
                Err(e) => e,
            },
        };
        Err(ClientError::Truncated(Box::new(std::mem::take(&mut self.partial)), failure.to_string()))
    }

    /// The rest of the response.
    pub async fn response(&mut self) -> Result<Response> {
        if self.receive.is_none() {
            self.head().await?;
        }
        while self.chunk().await?.is_some() {}
        Ok(std::mem::take(&mut self.partial))
    }

    /// Hangs up with RST_STREAM(CANCEL); the connection lives on for its other streams.
    pub fn reset(mut self) {
        self.send.send_reset(Reason::CANCEL);
    }
}

fn header_map(lines: &[HeaderLine]) -> Result<HeaderMap> {
    let mut map = HeaderMap::new();
    for (name, value) in lines {
        let name = HeaderName::from_bytes(name).map_err(|e| ClientError::Malformed(e.to_string()))?;
        let value = HeaderValue::from_bytes(value).map_err(|e| ClientError::Malformed(e.to_string()))?;
        map.append(name, value);
    }
    Ok(map)
}

fn header_lines(map: &HeaderMap) -> Vec<HeaderLine> {
    map.iter().map(|(name, value)| (name.as_str().into(), value.as_bytes().into())).collect()
}

fn closed(error: ::h2::Error) -> ClientError {
    ClientError::Closed(error.to_string())
}
