//! Owns the raw upstream: a TCP server whose answer is exact bytes and a chosen way to end.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use super::origin::{Recorder, Seen};

/// What happens to the connection after the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The next request may follow on it.
    KeepOpen,
    Close,
    /// A TCP reset; bytes that the kernel has not sent yet are lost.
    Reset,
    /// Open, and silent.
    HangForever,
}

/// Exact bytes, then an end.
#[derive(Clone, Debug)]
pub struct RawReply {
    pub bytes: Vec<u8>,
    pub end: End,
}

impl RawReply {
    pub fn new(bytes: impl AsRef<[u8]>, end: End) -> RawReply {
        RawReply { bytes: bytes.as_ref().to_vec(), end }
    }

    pub fn reset_before_response() -> RawReply {
        Self::new("", End::Reset)
    }

    pub fn close_before_response() -> RawReply {
        Self::new("", End::Close)
    }

    pub fn hang() -> RawReply {
        Self::new("", End::HangForever)
    }

    /// A 200 that announces `length` bytes of body and gives only `body`.
    pub fn truncated(length: usize, body: &[u8], end: End) -> RawReply {
        let mut bytes = format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n").into_bytes();
        bytes.extend_from_slice(body);
        RawReply { bytes, end }
    }

    /// A whole, ordinary response on a connection that stays open.
    pub fn whole(status: u16, headers: &[(&str, &[u8])], body: &[u8]) -> RawReply {
        let mut bytes =
            format!("HTTP/1.1 {status} Status\r\ncontent-length: {}\r\n", body.len()).into_bytes();
        for (name, value) in headers {
            for part in [name.as_bytes(), b": ", value, b"\r\n"] {
                bytes.extend_from_slice(part);
            }
        }
        bytes.extend_from_slice(b"\r\n");
        bytes.extend_from_slice(body);
        Self::new(bytes, End::KeepOpen)
    }
}

type Answer = Arc<dyn Fn(&Seen, usize) -> RawReply + Send + Sync>;

/// The raw upstream; HTTP/1.1 only. It stops when it is dropped.
pub struct RawOrigin {
    addr: SocketAddr,
    recorder: Recorder,
    answer: Arc<Mutex<Answer>>,
    accept: JoinHandle<()>,
}

impl Drop for RawOrigin {
    fn drop(&mut self) {
        self.accept.abort();
    }
}

impl RawOrigin {
    /// Gives every request the same reply.
    pub async fn start(reply: RawReply) -> RawOrigin {
        Self::start_with(move |_, _| reply.clone()).await
    }

    /// `answer` gets the request and which execution of its key and path it is, from 1.
    pub async fn start_with(answer: impl Fn(&Seen, usize) -> RawReply + Send + Sync + 'static) -> RawOrigin {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let addr = listener.local_addr().unwrap();
        let recorder = Recorder::default();
        let answer: Arc<Mutex<Answer>> = Arc::new(Mutex::new(Arc::new(answer)));
        let (for_server, for_requests) = (recorder.clone(), answer.clone());
        let accept = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, for_server.clone(), for_requests.clone()));
            }
        });
        RawOrigin { addr, recorder, answer, accept }
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    pub fn set(&self, reply: RawReply) {
        *self.answer.lock().unwrap() = Arc::new(move |_, _| reply.clone());
    }

    pub fn requests(&self) -> Vec<Seen> {
        self.recorder.requests()
    }

    pub fn executions(&self, which: impl Fn(&Seen) -> bool) -> usize {
        self.recorder.executions(which)
    }

    pub fn executions_of(&self, key: &str) -> usize {
        self.recorder.executions_of(key)
    }
}

async fn serve(stream: TcpStream, recorder: Recorder, answer: Arc<Mutex<Answer>>) {
    let _ = stream.set_nodelay(true);
    let mut connection = Connection { stream, unread: vec![] };
    while let Some(mut seen) = connection.read_request().await {
        let nth = recorder.record(&mut seen);
        if !seen.complete {
            return;
        }
        let answer = answer.lock().unwrap().clone();
        let reply = answer(&seen, nth);
        if connection.stream.write_all(&reply.bytes).await.is_err() {
            return;
        }
        match reply.end {
            End::KeepOpen => {}
            End::Close => return,
            End::Reset => {
                let _ = connection.stream.set_zero_linger();
                return;
            }
            End::HangForever => {
                // Reading notices the peer's close, so that the socket doesn't outlive the test.
                while matches!(connection.fill().await, Some(n) if n > 0) {}
                return;
            }
        }
    }
}

struct Connection {
    stream: TcpStream,
    unread: Vec<u8>,
}

impl Connection {
    /// None if no request came, or none that can be read.
    async fn read_request(&mut self) -> Option<Seen> {
        let head = self.take_through(b"\r\n\r\n").await?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let mut head_lines = head.split(|&b| b == b'\n').map(|line| line.strip_suffix(b"\r").unwrap_or(line));
        let start = text(head_lines.next()?);
        let mut start = start.split(' ');
        let mut seen = Seen {
            method: start.next()?.to_owned(),
            path: start.next()?.to_owned(),
            authority: String::new(),
            headers: vec![],
            body: vec![],
            trailers: vec![],
            complete: true,
            seq: 0,
        };
        seen.headers = head_lines.filter_map(header_line).collect();
        seen.authority = seen.header("host").unwrap_or_default().to_owned();
        let length = seen.header("content-length").and_then(|value| value.parse().ok()).unwrap_or(0);
        let chunked = seen.header("transfer-encoding").is_some_and(|value| value.contains("chunked"));
        let whole = if chunked {
            self.read_chunked(&mut seen).await
        } else {
            self.read_length(&mut seen, length).await
        };
        seen.complete = whole.is_some();
        Some(seen)
    }

    async fn read_length(&mut self, seen: &mut Seen, length: usize) -> Option<()> {
        while self.unread.len() < length {
            if self.fill().await? == 0 {
                return None;
            }
        }
        seen.body = self.unread.drain(..length).collect();
        Some(())
    }

    async fn read_chunked(&mut self, seen: &mut Seen) -> Option<()> {
        loop {
            let line = self.take_through(b"\r\n").await?;
            let digits = std::str::from_utf8(&line).ok()?.split(';').next()?.trim().to_owned();
            let size = usize::from_str_radix(&digits, 16).ok()?;
            if size == 0 {
                break;
            }
            while self.unread.len() < size + 2 {
                if self.fill().await? == 0 {
                    return None;
                }
            }
            seen.body.extend(self.unread.drain(..size));
            self.unread.drain(..2);
        }
        loop {
            let line = self.take_through(b"\r\n").await?;
            match header_line(line.trim_ascii_end()) {
                Some(trailer) => seen.trailers.push(trailer),
                None => return Some(()),
            }
        }
    }

    async fn take_through(&mut self, mark: &[u8]) -> Option<Vec<u8>> {
        loop {
            if let Some(at) = self.unread.windows(mark.len()).position(|window| window == mark) {
                return Some(self.unread.drain(..at + mark.len()).collect());
            }
            if self.fill().await? == 0 {
                return None;
            }
        }
    }

    async fn fill(&mut self) -> Option<usize> {
        self.stream.read_buf(&mut self.unread).await.ok()
    }
}

fn header_line(line: &[u8]) -> Option<(String, Vec<u8>)> {
    let colon = line.iter().position(|&b| b == b':')?;
    let name = String::from_utf8_lossy(&line[..colon]).to_ascii_lowercase();
    Some((name, line[colon + 1..].trim_ascii().to_vec()))
}
