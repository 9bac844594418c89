//! Owns the raw HTTP/1.1 client: exact bytes out, header lines in order and unaltered in.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::Result;
use super::message::{ClientError, Framing, Head, HeaderLine, Request, Response};

/// What is left of the response being read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rest {
    Head,
    Length(usize),
    ChunkSize,
    Chunk(usize),
    UntilClose,
    Done,
}

pub struct H1 {
    stream: TcpStream,
    unread: Vec<u8>,
    rest: Rest,
    head_only: bool,
    partial: Response,
}

impl H1 {
    pub async fn connect(addr: SocketAddr) -> Result<H1> {
        let stream = TcpStream::connect(addr).await.map_err(|e| ClientError::Closed(e.to_string()))?;
        stream.set_nodelay(true).expect("TCP_NODELAY");
        Ok(H1 { stream, unread: vec![], rest: Rest::Head, head_only: false, partial: Response::default() })
    }

    pub fn local_addr(&self) -> SocketAddr {
        self.stream.local_addr().expect("a bound socket")
    }

    /// Sends the request and reads its response. A connection that stays open can be used again.
    pub async fn send(&mut self, request: &Request) -> Result<Response> {
        // A server may answer and close before it has read everything, so the answer counts more than the write.
        let written = self.write_request(request).await;
        match self.read_response().await {
            Err(ClientError::Closed(why)) => Err(written.err().unwrap_or(ClientError::Closed(why))),
            answer => answer,
        }
    }

    pub async fn write_request(&mut self, request: &Request) -> Result<()> {
        self.head_only = request.method == "HEAD";
        self.write_raw(&encode(request)).await
    }

    pub async fn write_raw(&mut self, bytes: &[u8]) -> Result<()> {
        self.stream.write_all(bytes).await.map_err(|e| ClientError::Closed(format!("writing: {e}")))
    }

    /// Ends the sending side only.
    pub async fn half_close(&mut self) -> Result<()> {
        self.stream.shutdown().await.map_err(|e| ClientError::Closed(e.to_string()))
    }

    /// The head of the next response that isn't interim (1xx).
    pub async fn read_head(&mut self) -> Result<Head> {
        assert_eq!(self.rest, Rest::Head, "the head was already read");
        loop {
            let head = self.read_one_head().await?;
            if head.status >= 200 || head.status == 101 {
                self.rest = self.body_framing(&head)?;
                self.partial =
                    Response { status: head.status, headers: head.headers.clone(), ..Response::default() };
                return Ok(head);
            }
        }
    }

    /// The next piece of the body; `None` at its end.
    pub async fn read_chunk(&mut self) -> Result<Option<Vec<u8>>> {
        loop {
            match self.rest {
                Rest::Head => panic!("read the head first"),
                Rest::Done | Rest::Length(0) => {
                    self.rest = Rest::Done;
                    return Ok(None);
                }
                Rest::Length(left) => {
                    let piece = self.take_some(left).await?;
                    self.rest = Rest::Length(left - piece.len());
                    return Ok(Some(piece));
                }
                Rest::UntilClose => {
                    if self.unread.is_empty() && !self.fill().await? {
                        self.rest = Rest::Done;
                        continue;
                    }
                    let piece = std::mem::take(&mut self.unread);
                    self.partial.body.extend_from_slice(&piece);
                    return Ok(Some(piece));
                }
                Rest::ChunkSize => {
                    let line = self.take_line().await?;
                    let digits = line.split(|&b| b == b';').next().unwrap_or_default();
                    let size = std::str::from_utf8(digits)
                        .ok()
                        .and_then(|digits| usize::from_str_radix(digits.trim(), 16).ok())
                        .ok_or_else(|| ClientError::Malformed(format!("chunk size {line:?}")))?;
                    if size == 0 {
                        self.read_trailers().await?;
                        self.rest = Rest::Done;
                    } else {
                        self.rest = Rest::Chunk(size);
                    }
                }
                Rest::Chunk(0) => {
                    self.take_line().await?;
                    self.rest = Rest::ChunkSize;
                }
                Rest::Chunk(left) => {
                    let piece = self.take_some(left).await?;
                    self.rest = Rest::Chunk(left - piece.len());
                    return Ok(Some(piece));
                }
            }
        }
    }

    /// The rest of the response; afterwards the connection is ready for the next request.
    pub async fn read_response(&mut self) -> Result<Response> {
        if self.rest == Rest::Head {
            self.read_head().await?;
        }
        while self.read_chunk().await?.is_some() {}
        self.rest = Rest::Head;
        Ok(std::mem::take(&mut self.partial))
    }

    /// Whether the server has closed the connection, waiting for it if it hasn't.
    pub async fn closed(&mut self) -> bool {
        matches!(self.fill().await, Ok(false) | Err(_))
    }

    /// Hangs up with a reset.
    pub fn abort(self) {
        self.stream.set_zero_linger().expect("SO_LINGER");
    }

    fn body_framing(&self, head: &Head) -> Result<Rest> {
        if self.head_only || head.status == 204 || head.status == 304 {
            return Ok(Rest::Done);
        }
        if head.header("transfer-encoding").is_some_and(|v| v.to_ascii_lowercase().ends_with("chunked")) {
            return Ok(Rest::ChunkSize);
        }
        match head.header("content-length") {
            Some(length) => length
                .parse()
                .map(Rest::Length)
                .map_err(|_| ClientError::Malformed(format!("content-length {length}"))),
            None => Ok(Rest::UntilClose),
        }
    }

    async fn read_one_head(&mut self) -> Result<Head> {
        let end = loop {
            if let Some(at) = find(&self.unread, b"\r\n\r\n") {
                break at + 2;
            }
            let had = self.unread.len();
            match self.fill().await {
                Ok(true) => {}
                Ok(false) if had == 0 => return Err(ClientError::Closed("end of stream".into())),
                Ok(false) => return Err(ClientError::Malformed("the head was cut off".into())),
                Err(ClientError::Truncated(_, why)) => return Err(ClientError::Closed(why)),
                Err(other) => return Err(other),
            }
        };
        let bytes: Vec<u8> = self.unread.drain(..end + 2).collect();
        parse_head(&bytes[..end])
    }

    async fn read_trailers(&mut self) -> Result<()> {
        loop {
            let line = self.take_line().await?;
            if line.is_empty() {
                return Ok(());
            }
            self.partial.trailers.get_or_insert_default().push(parse_line(&line)?);
        }
    }

    async fn take_line(&mut self) -> Result<Vec<u8>> {
        loop {
            if let Some(at) = find(&self.unread, b"\r\n") {
                let mut line: Vec<u8> = self.unread.drain(..at + 2).collect();
                line.truncate(at);
                return Ok(line);
            }
            self.fill_or_truncated().await?;
        }
    }

    async fn take_some(&mut self, limit: usize) -> Result<Vec<u8>> {
        if self.unread.is_empty() {
            self.fill_or_truncated().await?;
        }
        let piece: Vec<u8> = self.unread.drain(..limit.min(self.unread.len())).collect();
        self.partial.body.extend_from_slice(&piece);
        Ok(piece)
    }

    async fn fill_or_truncated(&mut self) -> Result<()> {
        if self.fill().await? { Ok(()) } else { Err(self.truncated("end of stream")) }
    }

    /// Reads more bytes; false at the end of the stream.
    async fn fill(&mut self) -> Result<bool> {
        match self.stream.read_buf(&mut self.unread).await {
            Ok(n) => Ok(n > 0),
            Err(e) => Err(self.truncated(&e.to_string())),
        }
    }

    fn truncated(&mut self, why: &str) -> ClientError {
        ClientError::Truncated(Box::new(std::mem::take(&mut self.partial)), why.to_owned())
    }
}

/// The request's bytes on the wire.
pub fn encode(request: &Request) -> Vec<u8> {
    let mut out = format!("{} {} HTTP/1.1\r\n", request.method, request.path).into_bytes();
    let given = |name: &str| request.headers.iter().any(|(n, _)| n.eq_ignore_ascii_case(name.as_bytes()));
    if !given("host") {
        push_line(&mut out, b"host", request.authority.as_bytes());
    }
    for (name, value) in &request.headers {
        push_line(&mut out, name, value);
    }
    let chunked = matches!(request.framing, Framing::Chunks(_));
    if chunked {
        push_line(&mut out, b"transfer-encoding", b"chunked");
    } else if !given("content-length") && (request.framing == Framing::Length || !request.body.is_empty()) {
        push_line(&mut out, b"content-length", request.body.len().to_string().as_bytes());
    }
    out.extend_from_slice(b"\r\n");
    for piece in request.pieces() {
        if chunked {
            out.extend_from_slice(format!("{:x}\r\n", piece.len()).as_bytes());
            out.extend_from_slice(piece);
            out.extend_from_slice(b"\r\n");
        } else {
            out.extend_from_slice(piece);
        }
    }
    if chunked {
        out.extend_from_slice(b"0\r\n");
        for (name, value) in &request.trailers {
            push_line(&mut out, name, value);
        }
        out.extend_from_slice(b"\r\n");
    }
    out
}

fn push_line(out: &mut Vec<u8>, name: &[u8], value: &[u8]) {
    for part in [name, b": ", value, b"\r\n"] {
        out.extend_from_slice(part);
    }
}

fn parse_head(bytes: &[u8]) -> Result<Head> {
    let mut head = Head::default();
    let mut rest = bytes;
    while let Some(at) = find(rest, b"\r\n") {
        let line = &rest[..at];
        rest = &rest[at + 2..];
        if head.status > 0 {
            head.headers.push(parse_line(line)?);
            continue;
        }
        head.status = std::str::from_utf8(line)
            .ok()
            .filter(|line| line.starts_with("HTTP/1."))
            .and_then(|line| line.split(' ').nth(1)?.parse().ok())
            .ok_or_else(|| ClientError::Malformed(String::from_utf8_lossy(line).into_owned()))?;
    }
    Ok(head)
}

fn parse_line(line: &[u8]) -> Result<HeaderLine> {
    let colon = line
        .iter()
        .position(|&b| b == b':')
        .ok_or_else(|| ClientError::Malformed(String::from_utf8_lossy(line).into_owned()))?;
    Ok((line[..colon].to_vec(), line[colon + 1..].trim_ascii().to_vec()))
}

fn find(bytes: &[u8], what: &[u8]) -> Option<usize> {
    bytes.windows(what.len()).position(|window| window == what)
}
