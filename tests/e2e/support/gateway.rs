//! HTTP gateways in front of a Redis: Debian's Webdis, and a server that speaks the REST dialect of Upstash.

use std::net::{SocketAddr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use idempotency::store::redis::resp::{Value as Resp, decode, encode_command};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use super::envoy::Builder;
use super::wait::{PATIENCE, poll_until};

/// The cluster `redis-gateway` at this address.
pub fn with_gateway(builder: Builder, gateway: SocketAddr) -> Builder {
    builder.extra_cluster(json!({
        "name": "redis-gateway",
        "connect_timeout": "1s",
        "load_assignment": {"cluster_name": "redis-gateway", "endpoints": [{"lb_endpoints": [{"endpoint": {"address":
            {"socket_address": {"address": gateway.ip().to_string(), "port_value": gateway.port()}}}}]}]},
    }))
}

/// A `webdis`, killed when dropped.
pub struct Webdis {
    process: Child,
    addr: SocketAddr,
    _directory: TempDir,
}

impl Webdis {
    pub async fn start(redis: SocketAddr) -> Webdis {
        let addr = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let directory = tempfile::tempdir().unwrap();
        let settings = json!({
            "redis_host": redis.ip().to_string(), "redis_port": redis.port(), "http_host": "127.0.0.1",
            "http_port": addr.port(), "threads": 2, "daemonize": false, "database": 0, "verbosity": 0,
            "logfile": "webdis.log",
        });
        std::fs::write(directory.path().join("webdis.json"), settings.to_string()).unwrap();
        let process = Command::new("webdis")
            .arg("webdis.json")
            .current_dir(&directory)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("webdis is missing: `make setup-webdis`, or `apt-get install webdis`");
        let webdis = Webdis { process, addr, _directory: directory };
        poll_until(PATIENCE, "webdis listens", async || TcpStream::connect(addr).await.ok().map(drop)).await;
        webdis
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }
}

impl Drop for Webdis {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

pub const TOKEN: &str = "AXXXASQgN2Y5Zg==";

/// A server that speaks the REST dialect as <https://upstash.com/docs/redis/features/restapi> says it: a bearer token;
/// `POST /pipeline` with an array of commands; a command in the path with its last word as the body; answers in JSON,
/// with `Upstash-Encoding: base64`, or with `Upstash-Response-Format: resp2`, but not both. Anything else is refused.
pub struct Upstash {
    addr: SocketAddr,
    task: JoinHandle<()>,
    pipelined: Arc<AtomicUsize>,
}

impl Drop for Upstash {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Upstash {
    pub async fn start(redis: SocketAddr) -> Upstash {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let pipelined = Arc::new(AtomicUsize::new(0));
        let most = Arc::clone(&pipelined);
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let most = Arc::clone(&most);
                tokio::spawn(async move {
                    let service =
                        hyper::service::service_fn(move |request| serve(request, redis, Arc::clone(&most)));
                    let _ = hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service)
                        .await;
                });
            }
        });
        Upstash { addr, task, pipelined }
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The most commands that came in one pipeline.
    pub fn most_pipelined(&self) -> usize {
        self.pipelined.load(Ordering::Relaxed)
    }
}

type Answer = hyper::Response<Full<Bytes>>;

fn answer(status: u16, body: impl Into<Bytes>) -> Answer {
    hyper::Response::builder().status(status).body(Full::new(body.into())).unwrap()
}

fn refusal(status: u16, error: &str) -> Answer {
    answer(status, json!({"error": error}).to_string())
}

async fn serve(
    request: hyper::Request<Incoming>,
    redis: SocketAddr,
    most: Arc<AtomicUsize>,
) -> Result<Answer, std::io::Error> {
    let (head, body) = request.into_parts();
    let Ok(body) = body.collect().await else { return Ok(refusal(400, "ERR broken body")) };
    let body = body.to_bytes();
    let header = |name: &str| head.headers.get(name).map(|value| value.to_str().unwrap_or("?"));
    if header("authorization") != Some(&format!("Bearer {TOKEN}")) {
        return Ok(refusal(401, "WRONGPASS invalid or missing auth token"));
    }
    let is_base64 = header("upstash-encoding") == Some("base64");
    let is_resp2 = match header("upstash-response-format") {
        None | Some("json") => false,
        Some("resp2") if !is_base64 => true,
        Some(_) => return Ok(refusal(400, "ERR unsupported response format")),
    };
    let is_pipeline = head.uri.path() == "/pipeline";
    let commands: Vec<Vec<Vec<u8>>> = if is_pipeline {
        let Ok(commands) = serde_json::from_slice::<Vec<Vec<String>>>(&body) else {
            return Ok(refusal(400, "ERR failed to parse pipeline request"));
        };
        most.fetch_max(commands.len(), Ordering::Relaxed);
        commands.into_iter().map(|words| words.into_iter().map(String::into_bytes).collect()).collect()
    } else {
        let mut words: Vec<Vec<u8>> = head.uri.path()[1..].split('/').map(percent_decoded).collect();
        if !body.is_empty() {
            words.push(body.to_vec());
        }
        vec![words]
    };
    let Ok(replies) = ask_redis(redis, &commands).await else { return Ok(refusal(503, "ERR no database")) };
    let mut rest = replies.as_slice();
    let mut results = Vec::new();
    for _ in &commands {
        let (value, after) = decode(rest).expect("Redis's replies");
        results.push(value);
        rest = after;
    }
    let failed = !is_pipeline && matches!(results[0], Resp::Error(_));
    let status = if failed { 400 } else { 200 };
    if is_resp2 {
        return Ok(answer(status, replies.clone()));
    }
    let results: Vec<Value> = results.iter().map(|result| result_of(result, is_base64)).collect();
    let body = if is_pipeline { json!(results) } else { results[0].clone() };
    Ok(answer(status, body.to_string()))
}

async fn ask_redis(redis: SocketAddr, commands: &[Vec<Vec<u8>>]) -> std::io::Result<Vec<u8>> {
    let mut out = Vec::new();
    commands.iter().for_each(|argv| encode_command(&mut out, argv));
    encode_command(&mut out, &["QUIT"]);
    let mut stream = TcpStream::connect(redis).await?;
    stream.write_all(&out).await?;
    let mut replies = Vec::new();
    stream.read_to_end(&mut replies).await?;
    match replies.strip_suffix(b"+OK\r\n") {
        Some(replies) => Ok(replies.to_vec()),
        None => Err(std::io::ErrorKind::UnexpectedEof.into()),
    }
}

fn percent_decoded(word: &str) -> Vec<u8> {
    let mut bytes = word.bytes();
    let mut decoded = Vec::new();
    while let Some(byte) = bytes.next() {
        decoded.push(if byte == b'%' {
            let digits = [bytes.next().unwrap(), bytes.next().unwrap()];
            u8::from_str_radix(std::str::from_utf8(&digits).unwrap(), 16).unwrap()
        } else {
            byte
        });
    }
    decoded
}

fn result_of(result: &Resp<'_>, is_base64: bool) -> Value {
    if let Resp::Error(error) = result {
        return json!({"error": String::from_utf8_lossy(error)});
    }
    json!({"result": json_of(result, is_base64)})
}

fn json_of(value: &Resp<'_>, is_base64: bool) -> Value {
    match value {
        // The status OK stays as it is, says the documentation.
        Resp::Simple(text) if *text == b"OK" || !is_base64 => json!(String::from_utf8_lossy(text)),
        Resp::Simple(text) | Resp::Bulk(text) if is_base64 => json!(base64(text)),
        Resp::Simple(text) | Resp::Bulk(text) => json!(String::from_utf8_lossy(text)),
        Resp::Integer(number) => json!(number),
        Resp::Null => Value::Null,
        Resp::Array(values) => values.iter().map(|value| json_of(value, is_base64)).collect(),
        Resp::Error(text) => json!(String::from_utf8_lossy(text)),
    }
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for group in bytes.chunks(3) {
        let bits = group.iter().fold(0_usize, |bits, byte| bits << 8 | usize::from(*byte))
            << (8 * (3 - group.len()));
        for at in 0..4 {
            let digit = DIGITS[bits >> (18 - 6 * at) & 63];
            text.push(if at > group.len() { '=' } else { char::from(digit) });
        }
    }
    text
}
