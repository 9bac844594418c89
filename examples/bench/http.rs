//! One request on a connection of its own: for what is asked and proved between the measurements.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use crate::Fallible;

/// An answer.
pub struct Answer {
    pub status: u16,
    /// The status line and the headers, as they came.
    pub head: String,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

/// Sends it, and reads the whole answer.
pub fn send(port: u16, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Fallible<Answer> {
    send_within(Some(Duration::from_secs(30)), port, method, path, headers, body)
}

/// The same; without a limit of time it waits for ever.
pub fn send_within(
    limit: Option<Duration>,
    port: u16,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> Fallible<Answer> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(limit)?;
    let mut request =
        format!("{method} {path} HTTP/1.1\r\nconnection: close\r\ncontent-length: {}\r\n", body.len());
    for (name, value) in headers {
        request += &format!("{name}: {value}\r\n");
    }
    stream.write_all(format!("{request}\r\n").as_bytes())?;
    stream.write_all(body)?;
    // The end is told by the answer: Envoy closes only a second after it.
    let mut bytes = Vec::new();
    let mut part = [0; 16 << 10];
    while !is_whole(&bytes) {
        match stream.read(&mut part)? {
            0 => break,
            count => bytes.extend_from_slice(&part[..count]),
        }
    }
    let end = bytes.windows(4).position(|window| window == b"\r\n\r\n");
    let end = end.ok_or_else(|| format!("port {port} answered {:?}", String::from_utf8_lossy(&bytes)))?;
    let head = String::from_utf8_lossy(&bytes[..end]).into_owned();
    let status = head.split(' ').nth(1).and_then(|text| text.parse().ok()).unwrap_or(0);
    let rest = &bytes[end + 4..];
    let body = if head.to_lowercase().contains("transfer-encoding: chunked") {
        join_chunks(rest)?
    } else {
        rest.to_vec()
    };
    Ok(Answer { status, head, body })
}

/// The body of a GET that must succeed.
pub fn get(port: u16, path: &str) -> Fallible<String> {
    let answer = send(port, "GET", path, &[("host", "bench")], b"")?;
    if answer.status != 200 {
        return Err(format!("GET {path} on port {port}: {}", answer.status).into());
    }
    Ok(answer.text())
}

fn is_whole(bytes: &[u8]) -> bool {
    let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") else { return false };
    let head = String::from_utf8_lossy(&bytes[..end]).to_lowercase();
    let length =
        head.lines().find_map(|line| line.strip_prefix("content-length: ")?.trim().parse::<usize>().ok());
    length.is_some_and(|length| bytes.len() >= end + 4 + length)
        || head.contains("transfer-encoding: chunked") && bytes.ends_with(b"\r\n0\r\n\r\n")
}

fn join_chunks(mut rest: &[u8]) -> Fallible<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let line = rest.windows(2).position(|window| window == b"\r\n").ok_or("a chunk without a size")?;
        let size = usize::from_str_radix(std::str::from_utf8(&rest[..line])?.trim(), 16)?;
        if size == 0 {
            return Ok(body);
        }
        let chunk = rest.get(line + 2..line + 2 + size).ok_or("a chunk that breaks off")?;
        body.extend_from_slice(chunk);
        rest = rest.get(line + 4 + size..).unwrap_or_default();
    }
}
