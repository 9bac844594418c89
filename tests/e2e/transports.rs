//! The store contract on every way to Redis: each sends the very requests that the filter sends, on virtual time.

use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use idempotency::clock::Timestamp;
use idempotency::store::redis::script::{Script, Scripts};
use idempotency::store::redis::{
    Answer, BatchSettings, Batcher, CalloutAnswer, Encoded, Operation, Priority, SCRIPTS, Transport, envelope,
};
use idempotency::store::{Claim, ClaimReply, Hold, StoreError, Write, WriteReply};
use serde_json::{Value, json};

use crate::contract::suite;
use crate::support::redis::link_on_port;
use crate::support::redis_cluster::{SHARDS, SLOTS, slot_of};
use crate::support::*;

const PREFIX: &str = "idem:";

/// The scripts under a clock of each record's own, in the record's slot: a cluster has no key that every shard has. Redis
/// knows none of their names, so each operation is sent twice, by name and with its text.
fn on_virtual_time() -> Scripts {
    let clock = include_str!("../redis_store/virtual_time.lua")
        .replace("'clock'", "'{' .. KEYS[1] .. '}clock'")
        .replace("'deadlines'", "'{' .. KEYS[1] .. '}deadlines'");
    let script = |script: Script| Script {
        source: Box::leak([clock.as_str(), script.source].concat().into_boxed_str()),
        sha1: "0000000000000000000000000000000000000000",
    };
    let Scripts { claim, renew, complete, fail, release } = SCRIPTS;
    Scripts {
        claim: script(claim),
        renew: script(renew),
        complete: script(complete),
        fail: script(fail),
        release: script(release),
    }
}

/// A worker whose callouts are made by hand.
struct Way {
    runtime: tokio::runtime::Handle,
    addr: SocketAddr,
    transport: Transport,
    batcher: Batcher,
    now: Timestamp,
    clock: u64,
    ticket: u64,
    keys: Vec<String>,
}

impl Way {
    fn new(addr: SocketAddr, transport: Transport) -> Way {
        let settings = BatchSettings {
            key_prefix: PREFIX.to_owned(),
            timeout: Duration::from_secs(8),
            max_in_flight_batches: 2,
            max_response_body_bytes: 1 << 20,
            transport,
        };
        Way {
            runtime: tokio::runtime::Handle::current(),
            addr,
            transport,
            batcher: Batcher::new(settings, on_virtual_time()),
            now: Timestamp::from_millis(1_000),
            clock: 1_790_000_000_123,
            ticket: 0,
            keys: Vec::new(),
        }
    }

    fn call(&self, encoded: &Encoded) -> Response {
        let mut request = Request::new("POST", &encoded.path).body(&encoded.body);
        for (name, value) in encoded.headers {
            request = request.header(name, value);
        }
        if !matches!(self.transport, Transport::Link | Transport::Webdis) {
            request = request.header("authorization", format!("Bearer {TOKEN}"));
        }
        self.runtime.block_on(send_once(self.addr, Protocol::Http1, &request)).expect("an answer")
    }

    fn set_clock(&mut self, key: &str) {
        let (name, now) = (format!("{{{key}}}clock"), self.clock.to_string());
        let set = "redis.call('SET', KEYS[1], ARGV[1]) return {'set'}";
        let command = ["EVAL", set, "1", &name, &now].map(|word| word.as_bytes().to_vec().into());
        let response = self.call(&self.transport.encode(&[command.into()]));
        let answer = self.transport.as_of_link(&response.body, 1);
        let values = envelope::open(&answer, 1).unwrap_or_else(|| panic!("{response:?}"));
        assert!(!format!("{values:?}").contains("Error"), "{values:?}");
        self.keys.push(key.to_owned());
    }

    fn run(&mut self, operation: Operation) -> Answer {
        self.set_clock(&operation.key(PREFIX));
        self.ticket += 1;
        self.batcher.submit(self.ticket, operation, Priority::Normal, self.now);
        while let Some(dispatch) = self.batcher.poll(self.now) {
            let response = self.call(&dispatch.request);
            let answer = CalloutAnswer {
                headers: 1,
                status: Some(response.status),
                body: &response.body,
                operations: dispatch.operations,
                is_early: true,
                transport: self.transport,
            };
            assert_eq!(answer.diagnose(), None, "{response:?}");
            self.batcher.on_reply(dispatch.batch, answer.replies(), self.now);
        }
        let (ticket, answer) = self.batcher.next_answer().expect("an answer");
        assert_eq!(ticket, self.ticket);
        answer
    }
}

impl suite::Subject for Way {
    fn claim(&mut self, claim: &Claim) -> Result<ClaimReply, StoreError> {
        match self.run(Operation::Claim(claim.clone())) {
            Answer::Claim(answer) => answer.map(|claimed| claimed.reply),
            answer @ (Answer::Write(_) | Answer::NotSent) => panic!("{answer:?}"),
        }
    }

    fn write(&mut self, hold: &Hold, write: &Write) -> Result<WriteReply, StoreError> {
        match self.run(Operation::Write(*hold, write.clone())) {
            Answer::Write(reply) => reply,
            answer @ (Answer::Claim(_) | Answer::NotSent) => panic!("{answer:?}"),
        }
    }

    fn advance(&mut self, by: Duration) {
        self.clock += u64::try_from(by.as_millis()).unwrap();
    }
}

/// Runs the whole suite; the keys it used.
async fn keeps_the_contract(addr: SocketAddr, transport: Transport) -> Vec<String> {
    tokio::task::spawn_blocking(move || {
        let mut way = Way::new(addr, transport);
        suite::run_all(&mut way);
        way.keys
    })
    .await
    .unwrap()
}

/// An Envoy with nothing but a link, and the port that leads into it.
async fn link(change: impl FnOnce(envoy::Builder) -> envoy::Builder) -> (Envoy, SocketAddr) {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let builder = change(Envoy::builder().without_filter()).extra_listener(link_on_port(port.port()));
    (builder.start().await, port)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_contract_holds_over_the_link() {
    let redis = Redis::start().await;
    let (_envoy, addr) = link(|builder| linked(builder, redis.addr(), Pace::PATIENT)).await;
    keeps_the_contract(addr, Transport::Link).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_contract_holds_over_the_link_with_tls_and_a_password() {
    let tls = Tls::new();
    let arguments = [tls.arguments(), vec!["--requirepass".to_owned(), "secret".to_owned()]].concat();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let _redis = Redis::start_with(&arguments).await;
    let (envoy, addr) = link(|builder| {
        let patch = json!({"settings": {"op_timeout": "3s"}, "redis_cluster": {
            "transport_socket": tls.socket(),
            "typed_extension_protocol_options": {"envoy.filters.network.redis_proxy": {
                "@type": "type.googleapis.com/envoy.extensions.filters.network.redis_proxy.v3.RedisProtocolOptions",
                "auth_password": {"inline_string": "secret"},
            }},
        }});
        with_link(builder, tls.addr, &patch)
    })
    .await;
    keeps_the_contract(addr, Transport::Link).await;
    assert!(envoy.stat("cluster.redis.ssl.handshake").await >= 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_contract_holds_over_a_redis_cluster() {
    let cluster = RedisCluster::start(&[]).await;
    let (_envoy, addr) = link(|builder| linked_to_cluster(builder, &cluster.addrs(), Pace::PATIENT)).await;
    let keys = keeps_the_contract(addr, Transport::Link).await;
    for shard in 0..SHARDS {
        let range = shard * SLOTS / SHARDS..(shard + 1) * SLOTS / SHARDS;
        assert!(keys.iter().any(|key| range.contains(&slot_of(key.as_bytes()))), "no key in shard {shard}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_contract_holds_over_webdis() {
    let redis = Redis::start().await;
    let webdis = Webdis::start(redis.addr()).await;
    keeps_the_contract(webdis.addr(), Transport::Webdis).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_contract_holds_over_the_rest_dialect_of_upstash() {
    let redis = Redis::start().await;
    let upstash = Upstash::start(redis.addr()).await;
    for transport in [Transport::UpstashResp2, Transport::UpstashBase64] {
        keeps_the_contract(upstash.addr(), transport).await;
    }
}

/// A certificate, and a port for it.
struct Tls {
    directory: tempfile::TempDir,
    addr: SocketAddr,
}

impl Tls {
    fn new() -> Tls {
        let directory = tempfile::tempdir().unwrap();
        let addr = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let tls = Tls { directory, addr };
        let made = std::process::Command::new("openssl")
            .args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"])
            .args(["-days", "2", "-subj", "/CN=redis", "-addext", "subjectAltName=IP:127.0.0.1"])
            .args(["-keyout", &tls.file("redis.key"), "-out", &tls.file("redis.crt")])
            .output()
            .expect("openssl is missing");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        tls
    }

    fn file(&self, name: &str) -> String {
        self.directory.path().join(name).to_str().unwrap().to_owned()
    }

    fn arguments(&self) -> Vec<String> {
        let port = self.addr.port().to_string();
        let (certificate, key) = (self.file("redis.crt"), self.file("redis.key"));
        let arguments = [
            "--tls-port",
            &port,
            "--tls-cert-file",
            &certificate,
            "--tls-key-file",
            &key,
            "--tls-auth-clients",
            "no",
            "--tls-ca-cert-file",
            &certificate,
        ];
        arguments.map(str::to_owned).into()
    }

    fn socket(&self) -> Value {
        json!({"name": "envoy.transport_sockets.tls", "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
            "common_tls_context": {"validation_context": {"trusted_ca": {"filename": self.file("redis.crt")}}},
        }})
    }
}
