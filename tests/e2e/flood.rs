//! Floods of distinct keys: bounded memory, no wrong answer, and room for what the configuration promises.

use std::io::{BufRead, BufReader, Read, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::*;

const CONNECTIONS: usize = 24;
const PIPELINED: usize = 50;
const BODY: &str = "paid-paid-paid-paid-paid-paid-paid-paid-paid-paid-paid-paid-paid-paid-paid-paid-";

/// A pipelining client: many requests in one write, and no more parsing than it takes to know each answer's status.
struct Pipe {
    stream: BufReader<TcpStream>,
    requests: Vec<u8>,
    line: Vec<u8>,
}

impl Pipe {
    fn connect(addr: SocketAddr) -> Pipe {
        let stream = TcpStream::connect(addr).expect("Envoy");
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Pipe { stream: BufReader::with_capacity(64 * 1024, stream), requests: vec![], line: vec![] }
    }

    fn send_to(&mut self, path: &str, keys: std::ops::Range<u64>, salt: &str) {
        self.requests.clear();
        for key in keys {
            write!(
                self.requests,
                "POST {path} HTTP/1.1\r\nhost: a\r\nx-account-id: a\r\nidempotency-key: {salt}{key}\r\n\
                 content-length: 0\r\n\r\n"
            )
            .unwrap();
        }
        self.stream.get_mut().write_all(&self.requests).expect("Envoy reads");
    }

    /// Reads an answer; whether it is the upstream's.
    fn receive(&mut self) -> bool {
        let mut length = 0;
        let mut lines = 0;
        let mut fine = true;
        loop {
            self.line.clear();
            let count = self.stream.read_until(b'\n', &mut self.line).expect("Envoy answers");
            assert!(count > 0, "Envoy hung up");
            if lines == 0 {
                fine = self.line == b"HTTP/1.1 200 OK\r\n";
            } else if self.line == b"\r\n" {
                break;
            } else if let Some(value) = self.line.strip_prefix(b"content-length: ") {
                length = std::str::from_utf8(value).unwrap().trim().parse().unwrap();
            }
            lines += 1;
        }
        self.line.resize(length, 0);
        self.stream.read_exact(&mut self.line).expect("the body");
        fine && self.line == BODY.as_bytes()
    }
}

/// Sends `count` distinct keys; how many got the upstream's answer, and how long that took.
async fn flood(addr: SocketAddr, salt: &'static str, count: u64) -> (u64, Duration) {
    tokio::task::spawn_blocking(move || {
        let started = Instant::now();
        let mut pipes: Vec<Pipe> = (0..CONNECTIONS).map(|_| Pipe::connect(addr)).collect();
        let (mut next, mut fine) = (0, 0);
        let mut out = vec![0; pipes.len()];
        loop {
            for (pipe, out) in pipes.iter_mut().zip(&mut out) {
                for _ in 0..std::mem::take(out) {
                    fine += u64::from(pipe.receive());
                }
                let until = (next + PIPELINED as u64).min(count);
                if until > next {
                    pipe.send_to("/flood", next..until, salt);
                    *out = until - next;
                    next = until;
                }
            }
            if next == count && out.iter().all(|out| *out == 0) {
                return (fine, started.elapsed());
            }
        }
    })
    .await
    .unwrap()
}

/// The cheapest HTTP/2 upstream there can be: it answers 200 to whatever ends a stream, and reads no header. (Anything
/// dearer takes most of the machine, and the flood minutes.)
fn answering() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let addr = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let stream = stream.expect("a connection");
            std::thread::spawn(move || answer_all(stream));
        }
    });
    addr
}

/// One frame (RFC 9113, section 4.1).
fn frame(out: &mut Vec<u8>, kind: u8, flags: u8, stream: [u8; 4], payload: &[u8]) {
    let [_, length @ ..] = u32::try_from(payload.len()).unwrap().to_be_bytes();
    out.extend_from_slice(&length);
    out.extend_from_slice(&[kind, flags]);
    out.extend_from_slice(&stream);
    out.extend_from_slice(payload);
}

fn answer_all(stream: TcpStream) {
    const DATA: u8 = 0;
    const HEADERS: u8 = 1;
    const SETTINGS: u8 = 4;
    const PING: u8 = 6;
    const END_STREAM: u8 = 1;
    const ACK: u8 = 1;
    const END_HEADERS: u8 = 4;
    stream.set_nodelay(true).unwrap();
    let mut stream = BufReader::with_capacity(256 * 1024, stream);
    let mut head = [0; 24];
    let mut out = Vec::new();
    let mut payload = Vec::new();
    // The client's preface; ours are empty settings.
    if stream.read_exact(&mut head).is_err() {
        return;
    }
    frame(&mut out, SETTINGS, 0, [0; 4], &[]);
    loop {
        // What was asked at once is answered at once.
        if stream.buffer().is_empty() && !out.is_empty() {
            if stream.get_mut().write_all(&out).is_err() {
                return;
            }
            out.clear();
        }
        let mut head = [0; 9];
        if stream.read_exact(&mut head).is_err() {
            return;
        }
        let [a, b, c, kind, flags, id @ ..] = head;
        payload.resize(u32::from_be_bytes([0, a, b, c]) as usize, 0);
        if stream.read_exact(&mut payload).is_err() {
            return;
        }
        match kind {
            SETTINGS if flags & ACK == 0 => frame(&mut out, SETTINGS, ACK, [0; 4], &[]),
            PING if flags & ACK == 0 => frame(&mut out, PING, ACK, [0; 4], &payload),
            HEADERS | DATA if flags & END_STREAM != 0 => {
                // `:status 200` and `content-length: 80` by the static table (RFC 7541, appendix A).
                frame(&mut out, HEADERS, END_HEADERS, id, b"\x88\x0f\x0d\x0280");
                frame(&mut out, DATA, END_STREAM, id, BODY.as_bytes());
            }
            _ => {}
        }
    }
}

fn plugin(store: Value, rule: Value) -> Value {
    let mut plugin = plugin_with(rule);
    plugin["store"]["shared_data"] = store;
    plugin
}

/// `/flood` goes to the cheapest upstream, the rest to `origin`.
async fn flooded(plugin: Value, origin: &Origin) -> Envoy {
    let flood = |prefix: &str| json!({"match": {"prefix": prefix}, "route": {"cluster": "answering"}});
    let rest = json!({"match": {"prefix": "/"}, "route": {"cluster": "origin", "timeout": "900s"}});
    Envoy::builder()
        .plugin(plugin)
        .component_log_level("wasm:warning")
        .hcm_patch(json!({"access_log": null, "generate_request_id": false, "stream_idle_timeout": "900s"}))
        .routes(vec![flood("/flood"), rest])
        .extra_cluster(envoy::config::cluster("answering", answering(), true))
        .origin_addr(origin.addr())
        .start()
        .await
}

/// G16. Over HTTP/1.1, since pipelining is what makes so many requests bearable; the claims that live through it came
/// over both protocols.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn floods_of_distinct_keys_leave_memory_bounded_and_live_claims_alone() {
    const MAX_RECORDS: u64 = 20_000;
    // The table is full after some 30,000 keys. From then on nothing may grow: not over the 750,000 keys that end the
    // first flood, nor over the second flood.
    const PARTS: [(&str, u64); 3] =
        [("the first quarter", 250_000), ("the first flood", 750_000), ("the second flood", 150_000)];
    let origin = Origin::start().await;
    let store = json!({"max_records": MAX_RECORDS, "when_full": "evict_completed"});
    let envoy = flooded(plugin(store, json!({"lock_ttl": "1s"})), &origin).await;
    let barrier = Barrier::new();
    origin.on("/held", Behaviour::BarrierEcho(barrier.clone()));
    let mut live = Vec::new();
    for proto in Protocol::BOTH {
        let key = unique_key();
        let request = Request::post("/held").key(&key).body("amount=1");
        let (addr, sent) = (envoy.addr(), request.clone());
        // Longer than a client of the harness would wait.
        let pending = Client::connect(addr, proto).await.start(&sent).await.unwrap();
        live.push((proto, key, request, pending));
    }
    barrier.wait_arrived(live.len(), PATIENCE).await;

    let mut sent = 0;
    let mut memory = Vec::new();
    for (number, (name, count)) in PARTS.into_iter().enumerate() {
        let (fine, took) = flood(envoy.addr(), ["a", "b", "c"][number], count).await;
        assert_eq!(fine, count, "{name}: every request is answered by the upstream");
        sent += count;
        let rss = envoy.rss_bytes();
        println!(
            "{name}: {count} keys in {took:.1?}, {:.0}/s; evictions {}, RSS {:.1} MiB",
            count as f64 / took.as_secs_f64(),
            envoy.metric("evictions").await,
            rss as f64 / f64::from(1 << 20)
        );
        memory.push(rss);
        for (proto, key, request, _) in &live {
            let duplicate = send_once(envoy.addr(), *proto, request).await.unwrap();
            let got = (duplicate.status, duplicate.problem_type());
            assert_eq!(got, (409, Some("in-flight".to_owned())), "{name}, {proto:?}: {duplicate:?}");
            assert_eq!(origin.executions_of(key), 1);
        }
    }
    assert_eq!(envoy.metric("executed").await, sent + 2);
    assert_eq!(envoy.metric("store_full").await, 0);
    assert_eq!(envoy.metric("stale_writes").await, 0);
    let evictions = envoy.metric("evictions").await;
    assert!((sent - 2 * MAX_RECORDS..sent).contains(&evictions), "{evictions} evictions of {sent}");
    for later in &memory[1..] {
        assert!(*later <= memory[0] + memory[0] / 25, "memory grows: {memory:?}");
    }

    barrier.open();
    for (proto, key, request, pending) in live {
        let answer = pending.finish().await.unwrap();
        assert_eq!((answer.status, answer.header("idempotent-replayed")), (200, None), "{proto:?}");
        let replay = send_once(envoy.addr(), proto, &request).await.unwrap();
        assert_eq!(replay.header("idempotent-replayed"), Some("true"), "{proto:?}: {replay:?}");
        assert_eq!(replay.body, answer.body);
        assert_eq!(origin.executions_of(&key), 1);
    }
}

/// Fills the store over one connection, so that the order is known.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn max_records_fit_before_the_first_refusal_and_expiry_makes_room() {
    const MAX_RECORDS: u64 = 5_000;
    const LONG_LIVED: u64 = 4_000;
    let rule = |name: &str, prefix: &str, record_ttl: &str| {
        json!({
            "name": name,
            "match": {"methods": ["POST"], "path": {"prefix": prefix}},
            "scope": [{"header": "x-account-id"}],
            "lock_ttl": "1s",
            "record_ttl": record_ttl,
        })
    };
    let plugin = json!({
        "store": {"shared_data": {"max_records": MAX_RECORDS}},
        "rules": [rule("short", "/flood/short", "8s"), rule("long", "/", "24h")],
    });
    let origin = Origin::start().await;
    let envoy = flooded(plugin, &origin).await;
    let addr = envoy.addr();
    let refused = tokio::task::spawn_blocking(move || {
        let mut pipe = Pipe::connect(addr);
        let mut next = 0;
        loop {
            let until = next + PIPELINED as u64;
            pipe.send_to(if next < LONG_LIVED { "/flood/long" } else { "/flood/short" }, next..until, "k");
            let answers: Vec<bool> = (next..until).map(|_| pipe.receive()).collect();
            if let Some(at) = answers.iter().position(|fine| !fine) {
                return next + at as u64;
            }
            next = until;
        }
    })
    .await
    .unwrap();
    println!("{refused} records fitted, max_records {MAX_RECORDS}");
    assert!((MAX_RECORDS..2 * MAX_RECORDS).contains(&refused), "{refused}");

    // The same caller and key as the refused request.
    let key = format!("k{refused}");
    let request = Request::post("/pay").account("a").key(&key).body("amount=1");
    let before = envoy.metric("store_full").await;
    assert!(before >= 1);
    for proto in Protocol::BOTH {
        let answer = send_once(addr, proto, &request).await.unwrap();
        assert_eq!(
            (answer.status, answer.problem_type().as_deref()),
            (503, Some("store-full")),
            "{answer:?}"
        );
        assert!(answer.header("retry-after").is_some(), "{answer:?}");
        // What is in the store is still answered.
        let known = Request::post("/flood/long").authority("a").account("a").key("k0");
        let replay = send_once(addr, proto, &known).await.unwrap();
        assert_eq!(replay.header("idempotent-replayed"), Some("true"), "{replay:?}");
    }
    assert_eq!(envoy.metric("store_full").await, before + 2);
    assert_eq!(origin.executions_of(&key), 0);
    assert_eq!(envoy.metric("evictions").await, 0);

    let run = poll_until(PATIENCE, "room for one more", async || {
        let answer = send_once(addr, Protocol::Http2, &request).await.unwrap();
        (answer.status != 503).then_some(answer)
    })
    .await;
    assert_eq!((run.status, run.header("idempotent-replayed")), (200, None), "{run:?}");
    for proto in Protocol::BOTH {
        let replay = send_once(addr, proto, &request).await.unwrap();
        assert_eq!((replay.header("idempotent-replayed"), &replay.body), (Some("true"), &run.body));
    }
    assert_eq!(origin.executions_of(&key), 1);
}
