//! HTTP/1.1 messages as bytes: enough for the demo's service behind Envoy and its client in front, no more.

use std::io::{self, BufRead, Read, Write};

/// A request or a response.
pub struct Message {
    /// The request line or the status line.
    pub first_line: String,
    /// Lower-case names, values as they came.
    pub headers: Vec<(String, String)>,
    /// The body, without its framing.
    pub body: Vec<u8>,
}

impl Message {
    /// The first value of a header.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(candidate, _)| candidate == name).map(|(_, value)| value.as_str())
    }

    /// Reads one message; `None` where the peer closed before it began.
    pub fn read(reader: &mut impl BufRead) -> io::Result<Option<Message>> {
        let Some(first_line) = read_line(reader)? else { return Ok(None) };
        let mut headers = Vec::new();
        loop {
            let line = read_line(reader)?.ok_or_else(cut_off)?;
            if line.is_empty() {
                break;
            }
            let (name, value) =
                line.split_once(':').ok_or_else(|| malformed("a header line without a colon"))?;
            headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
        let mut message = Message { first_line, headers, body: Vec::new() };
        message.body = message.read_body(reader)?;
        Ok(Some(message))
    }

    fn read_body(&self, reader: &mut impl BufRead) -> io::Result<Vec<u8>> {
        if self.header("transfer-encoding").is_some_and(|coding| coding.eq_ignore_ascii_case("chunked")) {
            return read_chunks(reader);
        }
        let length = match self.header("content-length") {
            Some(length) => length.parse().map_err(|_| malformed("content-length is not a number"))?,
            None => 0,
        };
        let mut body = vec![0; length];
        reader.read_exact(&mut body)?;
        Ok(body)
    }
}

fn read_line(reader: &mut impl BufRead) -> io::Result<Option<String>> {
    let mut line = Vec::new();
    if reader.read_until(b'\n', &mut line)? == 0 {
        return Ok(None);
    }
    Ok(Some(String::from_utf8_lossy(&line).trim_end().to_owned()))
}

fn read_chunks(reader: &mut impl BufRead) -> io::Result<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let line = read_line(reader)?.ok_or_else(cut_off)?;
        let digits = line.split(';').next().unwrap_or_default().trim();
        let length = u64::from_str_radix(digits, 16).map_err(|_| malformed("a chunk without a size"))?;
        if length == 0 {
            // Trailers, and the empty line after them.
            while !read_line(reader)?.ok_or_else(cut_off)?.is_empty() {}
            return Ok(body);
        }
        reader.take(length).read_to_end(&mut body)?;
        read_line(reader)?;
    }
}

/// Writes a message with its length.
pub fn write(
    writer: &mut impl Write,
    first_line: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> io::Result<()> {
    let mut bytes = format!("{first_line}\r\ncontent-length: {}\r\n", body.len());
    for (name, value) in headers {
        bytes.push_str(&format!("{name}: {value}\r\n"));
    }
    bytes.push_str("\r\n");
    let mut bytes = bytes.into_bytes();
    bytes.extend_from_slice(body);
    writer.write_all(&bytes)
}

fn cut_off() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "the message was cut off")
}

fn malformed(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}
