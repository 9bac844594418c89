//! A client that sends one request on a connection of its own.

use std::io::{self, BufReader};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::Duration;

use crate::wire::{self, Message};

/// Longer than anything in the story takes.
const PATIENCE: Duration = Duration::from_secs(30);
/// The host that clients call, whichever Envoy and port they reach: it is part of a request's fingerprint.
pub const HOST: &str = "payments.example";

/// A request of the story.
#[derive(Clone)]
pub struct Call {
    /// Path and query.
    pub path: &'static str,
    /// The Idempotency-Key, if any.
    pub key: Option<&'static str>,
    /// Who calls.
    pub account: &'static str,
    /// A JSON body.
    pub body: &'static str,
}

impl Call {
    /// A call with a key.
    pub const fn new(
        path: &'static str,
        key: &'static str,
        account: &'static str,
        body: &'static str,
    ) -> Self {
        Self { path, key: Some(key), account, body }
    }
}

/// The response to a call.
pub struct Answer {
    /// The status.
    pub status: u16,
    /// The whole response.
    pub message: Message,
}

impl Answer {
    /// Whether the filter replayed it.
    pub fn replayed(&self) -> bool {
        self.message.header("idempotent-replayed") == Some("true")
    }

    /// The meaning of the filter's refusal, if it is one.
    pub fn refusal(&self) -> Option<&str> {
        self.message.header("x-idempotency-refusal")
    }
}

/// Where calls go.
#[derive(Clone, Copy)]
pub struct Client {
    address: SocketAddr,
}

impl Client {
    /// Calls go to this port of this machine.
    pub fn new(port: u16) -> Self {
        Self { address: SocketAddr::from((Ipv4Addr::LOCALHOST, port)) }
    }

    /// Sends the call and hands over the connection, without waiting for the answer.
    pub fn send(&self, call: &Call) -> io::Result<TcpStream> {
        let mut stream = TcpStream::connect_timeout(&self.address, PATIENCE)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut headers = vec![("host", HOST), ("content-type", "application/json"), ("connection", "close")];
        headers.push(("x-account-id", call.account));
        if let Some(key) = call.key {
            headers.push(("idempotency-key", key));
        }
        wire::write(&mut stream, &format!("POST {} HTTP/1.1", call.path), &headers, call.body.as_bytes())?;
        Ok(stream)
    }

    /// Sends the call and reads its answer.
    pub fn call(&self, call: &Call) -> io::Result<Answer> {
        read_answer(self.send(call)?)
    }

    /// A plain GET.
    pub fn get(&self, path: &str) -> io::Result<Answer> {
        let mut stream = TcpStream::connect_timeout(&self.address, PATIENCE)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let headers = [("host", HOST), ("connection", "close")];
        wire::write(&mut stream, &format!("GET {path} HTTP/1.1"), &headers, b"")?;
        read_answer(stream)
    }
}

fn read_answer(stream: TcpStream) -> io::Result<Answer> {
    let closed =
        || io::Error::new(io::ErrorKind::UnexpectedEof, "the connection was closed without an answer");
    let message = Message::read(&mut BufReader::new(stream))?.ok_or_else(closed)?;
    let status = message.first_line.split(' ').nth(1).and_then(|status| status.parse().ok());
    let status =
        status.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no status in the status line"))?;
    Ok(Answer { status, message })
}
