//! Owns what the clients send and receive: requests, responses, and the ways an exchange fails.

use std::fmt;

use serde_json::Value;

pub type HeaderLine = (Vec<u8>, Vec<u8>);

/// How a request's body is cut on the wire.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Framing {
    /// `content-length` on HTTP/1.1 and HTTP/2, one piece.
    Length,
    /// The same without a `content-length` where the protocol allows it: HTTP/2, or a request without a body.
    NoLength,
    /// Chunks (HTTP/1.1) or DATA frames (HTTP/2) of these sizes; the last size repeats.
    Chunks(Vec<usize>),
}

#[derive(Clone, Debug)]
pub struct Request {
    pub method: String,
    pub path: String,
    pub authority: String,
    pub headers: Vec<HeaderLine>,
    pub body: Vec<u8>,
    pub framing: Framing,
    pub trailers: Vec<HeaderLine>,
}

impl Request {
    /// A request for `api.example.com` by the account `alice`.
    pub fn new(method: &str, path: &str) -> Request {
        Request {
            method: method.into(),
            path: path.into(),
            authority: "api.example.com".into(),
            headers: vec![(b"x-account-id".to_vec(), b"alice".to_vec())],
            body: Vec::new(),
            framing: Framing::Length,
            trailers: Vec::new(),
        }
    }

    pub fn post(path: &str) -> Request {
        Self::new("POST", path)
    }

    pub fn get(path: &str) -> Request {
        let request = Self::new("GET", path);
        Request { framing: Framing::NoLength, ..request }
    }

    pub fn method(mut self, method: &str) -> Request {
        self.method = method.into();
        self
    }

    pub fn authority(mut self, authority: &str) -> Request {
        self.authority = authority.into();
        self
    }

    pub fn key(self, key: impl AsRef<[u8]>) -> Request {
        self.header("idempotency-key", key)
    }

    pub fn account(self, account: impl AsRef<[u8]>) -> Request {
        self.without("x-account-id").header("x-account-id", account)
    }

    /// Adds a header line; the same name again makes a second line.
    pub fn header(mut self, name: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Request {
        self.headers.push((name.as_ref().to_vec(), value.as_ref().to_vec()));
        self
    }

    pub fn without(mut self, name: &str) -> Request {
        self.headers.retain(|(line, _)| !line.eq_ignore_ascii_case(name.as_bytes()));
        self
    }

    pub fn body(mut self, body: impl AsRef<[u8]>) -> Request {
        self.body = body.as_ref().to_vec();
        self
    }

    pub fn json(self, body: &Value) -> Request {
        self.header("content-type", "application/json").body(body.to_string())
    }

    pub fn chunked(mut self, sizes: &[usize]) -> Request {
        self.framing = Framing::Chunks(sizes.to_vec());
        self
    }

    pub fn no_content_length(mut self) -> Request {
        self.framing = Framing::NoLength;
        self
    }

    /// A trailer line; HTTP/1.1 sends trailers only with `chunked`.
    pub fn trailer(mut self, name: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Request {
        self.trailers.push((name.as_ref().to_vec(), value.as_ref().to_vec()));
        self
    }

    /// The body in the pieces that `framing` asks for.
    pub fn pieces(&self) -> Vec<&[u8]> {
        let Framing::Chunks(sizes) = &self.framing else {
            return if self.body.is_empty() { vec![] } else { vec![&self.body] };
        };
        let mut rest = self.body.as_slice();
        let mut sizes = sizes.iter().copied();
        let mut size = rest.len();
        let mut pieces = Vec::new();
        while !rest.is_empty() {
            size = sizes.next().unwrap_or(size).clamp(1, rest.len());
            let (piece, after) = rest.split_at(size);
            pieces.push(piece);
            rest = after;
        }
        pieces
    }
}

/// Status and header lines, in the order of the wire. (HTTP/2: the lines of one name stand together.)
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Head {
    pub status: u16,
    pub headers: Vec<HeaderLine>,
}

#[derive(Clone, Default, PartialEq, Eq)]
pub struct Response {
    pub status: u16,
    pub headers: Vec<HeaderLine>,
    pub body: Vec<u8>,
    pub trailers: Option<Vec<HeaderLine>>,
}

impl Head {
    pub fn header(&self, name: &str) -> Option<&str> {
        first_value(&self.headers, name)
    }
}

impl Response {
    /// The first line of that name, if it is UTF-8.
    pub fn header(&self, name: &str) -> Option<&str> {
        first_value(&self.headers, name)
    }

    /// All values of that name, in order, as bytes.
    pub fn header_lines(&self, name: &str) -> Vec<&[u8]> {
        lines_of(&self.headers, name).collect()
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("not JSON ({e}): {:?}", self.text()))
    }

    /// The origin's `execution` number of its default echo.
    pub fn execution(&self) -> u64 {
        self.json()["execution"]
            .as_u64()
            .unwrap_or_else(|| panic!("not the origin's echo: {:?}", self.text()))
    }

    /// The last path segment of the `type` member, if this is an `application/problem+json`.
    pub fn problem_type(&self) -> Option<String> {
        if !self.header("content-type")?.starts_with("application/problem+json") {
            return None;
        }
        let problem = self.json();
        let kind = problem["type"].as_str()?;
        Some(kind.trim_end_matches('/').rsplit(['/', '#']).next()?.to_owned())
    }
}

impl Response {
    /// The status and, of a refusal, its type.
    pub fn kind(&self) -> (u16, Option<String>) {
        (self.status, self.problem_type())
    }

    pub fn is_replay(&self) -> bool {
        self.header_lines("idempotent-replayed") == [b"true"]
    }
}

/// Readable in a failed assertion: text where it is text.
impl fmt::Debug for Response {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let line = |(name, value): &HeaderLine| format!("{}: {}", name.escape_ascii(), value.escape_ascii());
        let lines = |lines: &[HeaderLine]| lines.iter().map(line).collect::<Vec<_>>();
        let shown = &self.body[..self.body.len().min(1000)];
        f.debug_struct("Response")
            .field("status", &self.status)
            .field("headers", &lines(&self.headers))
            .field("body_length", &self.body.len())
            .field("body", &format_args!("{}", String::from_utf8_lossy(shown)))
            .field("trailers", &self.trailers.as_deref().map(lines))
            .finish()
    }
}

fn lines_of<'a>(headers: &'a [HeaderLine], name: &str) -> impl Iterator<Item = &'a [u8]> {
    headers
        .iter()
        .filter(move |(line, _)| line.eq_ignore_ascii_case(name.as_bytes()))
        .map(|(_, v)| v.as_slice())
}

fn first_value<'a>(headers: &'a [HeaderLine], name: &str) -> Option<&'a str> {
    lines_of(headers, name).next().and_then(|value| std::str::from_utf8(value).ok())
}

/// Why there is no whole response.
#[derive(Debug)]
pub enum ClientError {
    /// The connection or stream ended before a response began.
    Closed(String),
    /// The response began and was cut off: what came of it, and how it ended.
    Truncated(Box<Response>, String),
    /// Bytes that are no HTTP response, or a request that can't be expressed.
    Malformed(String),
    TimedOut,
}

impl ClientError {
    pub fn is_truncated(&self) -> bool {
        matches!(self, ClientError::Truncated(..))
    }
}
