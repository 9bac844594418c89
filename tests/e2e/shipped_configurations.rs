//! The configurations of `envoy/` and `deploy/`, run as they are shipped.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tempfile::TempDir;

use crate::support::envoy::config::repository;
use crate::support::*;

const REDIS_NAME: &str = "redis.example.com";
/// The commands that envoy/redis-tls.yaml grants.
const GRANTED: &str = "+eval +evalsha +time +hmget +hget +exists +hset +hdel +del +pexpire +pttl";

fn bootstrap_of(path: &str) -> Value {
    documents_of(path).remove(0)
}

/// So long that a busy machine is no store failure, and the link's socket is this Envoy's own.
fn unhurried_link(bootstrap: &mut Value) {
    replace_text(bootstrap, "\"timeout\": \"250ms\"", "\"timeout\": \"8s\"");
    replace_text(bootstrap, "@idempotency-redis", &format!("@idempotency-test-{}", unique_key()));
    let listeners = bootstrap["static_resources"]["listeners"].as_array_mut().unwrap();
    let proxy = listeners.iter_mut().find(|listener| listener["name"] == "redis_proxy").unwrap();
    let settings = &mut proxy["filter_chains"][0]["filters"][0]["typed_config"]["settings"];
    assert_eq!(settings["op_timeout"], "0.1s");
    settings["op_timeout"] = json!("3s");
}

/// One keyed request twice: the upstream runs once, the second answer is the first one's replay.
async fn runs_once(addr: SocketAddr, origin: &Origin, path: &str) {
    let key = unique_key();
    let request = Request::post(path).key(&key).body("amount=1");
    let first = send_once(addr, Protocol::Http1, &request).await.unwrap();
    assert_eq!((first.status, first.header("idempotent-replayed")), (200, None), "{first:?}");
    let retry = send_once(addr, Protocol::Http1, &request).await.unwrap();
    assert_eq!((retry.status, retry.header("idempotent-replayed")), (200, Some("true")), "{retry:?}");
    assert_eq!(retry.body, first.body);
    assert_eq!(origin.executions_of(&key), 1);
}

/// A keyed request is refused, and the upstream does not run.
async fn refuses(addr: SocketAddr, origin: &Origin) -> Response {
    let key = unique_key();
    let answer = send_once(addr, Protocol::Http1, &Request::post("/pay").key(&key).body("x")).await.unwrap();
    assert!(answer.status >= 500, "{answer:?}");
    assert_eq!(origin.executions_of(&key), 0);
    answer
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_configurations_that_need_no_more_run_a_key_once() {
    let (origin, redis) = (Origin::start().await, Redis::start().await);
    for file in ["embedded", "detached", "detached-rds", "redis"] {
        let mut bootstrap = bootstrap_of(&format!("envoy/{file}.yaml"));
        move_cluster(&mut bootstrap, "payments", origin.addr());
        if file == "redis" {
            unhurried_link(&mut bootstrap);
            move_cluster(&mut bootstrap, "redis", redis.addr());
        }
        let envoy = Shipped::start(bootstrap, &[]).await;
        for path in ["/pay", "/atomic/pay", "/detached/pay"] {
            runs_once(envoy.addr(), &origin, path).await;
        }
        let detached = envoy.stat("wasmcustom.idempotency.detached").await;
        assert_eq!(detached, u64::from(file.starts_with("detached")), "{file}");
    }
    assert!(redis.command("KEYS *").await.contains("idem:"));
}

fn openssl(folder: &Path, arguments: &str) {
    let mut command = Command::new("openssl");
    command.current_dir(folder).args(arguments.split(' '));
    let output = command.output().expect("openssl is missing: `apt-get install openssl`");
    assert!(output.status.success(), "openssl {arguments}: {}", String::from_utf8_lossy(&output.stderr));
}

/// A CA (`ca.pem`) and a certificate of it for `name` (`cert.pem`, `key.pem`).
fn certificates(name: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let curve = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2";
    openssl(folder.path(), &format!("req -x509 {curve} -keyout ca.key -out ca.pem -subj /CN=ca"));
    openssl(
        folder.path(),
        &format!(
            "req -x509 {curve} -keyout key.pem -out cert.pem -subj /CN=redis -CA ca.pem -CAkey ca.key -addext subjectAltName=DNS:{name}"
        ),
    );
    folder
}

/// A Redis that speaks TLS, with the user that the documents name; and its TLS address.
async fn tls_redis(certificates: &TempDir) -> (Redis, SocketAddr) {
    let file = |name: &str| certificates.path().join(name).to_str().unwrap().to_owned();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let (cert, key, ca) = (file("cert.pem"), file("key.pem"), file("ca.pem"));
    let tls_port = port.to_string();
    let redis = Redis::start_with(&[
        "--tls-port",
        &tls_port,
        "--tls-cert-file",
        &cert,
        "--tls-key-file",
        &key,
        "--tls-ca-cert-file",
        &ca,
        "--tls-auth-clients",
        "no",
    ])
    .await;
    let text = std::fs::read_to_string(repository().join("envoy/redis-tls.yaml")).unwrap();
    assert!(text.contains(GRANTED), "the user of this test is not the one that the file names");
    let user = format!("ACL SETUSER idempotency on >s3cret resetkeys ~idem:* resetchannels -@all {GRANTED}");
    assert_eq!(redis.command(&user).await.lines().next(), Some("+OK"));
    // Nothing works without it.
    assert_eq!(
        redis.command("ACL SETUSER default -@all +ping +acl +auth +quit +keys allkeys").await.lines().next(),
        Some("+OK")
    );
    (redis, ([127, 0, 0, 1], port).into())
}

async fn tls_envoy(redis: SocketAddr, origin: &Origin, ca: &Path, password: &str) -> Shipped {
    let mut bootstrap = bootstrap_of("envoy/redis-tls.yaml");
    unhurried_link(&mut bootstrap);
    move_cluster(&mut bootstrap, "payments", origin.addr());
    move_cluster(&mut bootstrap, "redis", redis);
    replace_text(&mut bootstrap, "/etc/ssl/certs/ca-certificates.crt", ca.to_str().unwrap());
    Shipped::start(bootstrap, &[("REDIS_PASSWORD", password)]).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis_over_tls_with_a_password_runs_a_key_once() {
    let (ours, origin) = (certificates(REDIS_NAME), Origin::start().await);
    let (redis, addr) = tls_redis(&ours).await;
    let envoy = tls_envoy(addr, &origin, &ours.path().join("ca.pem"), "s3cret").await;
    runs_once(envoy.addr(), &origin, "/pay").await;
    assert!(envoy.stat("cluster.redis.ssl.handshake").await > 0, "no TLS");
    // The record is Redis's, and not only this Envoy's near cache's.
    assert!(redis.command("KEYS *").await.contains("idem:"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_that_is_not_the_one_meant_or_a_wrong_password_refuses() {
    let origin = Origin::start().await;
    let (ours, foreign) = (certificates(REDIS_NAME), certificates(REDIS_NAME));
    let other_name = certificates("other.example.com");
    let (redis, addr) = tls_redis(&ours).await;
    let (_other, other_addr) = tls_redis(&other_name).await;
    for (what, addr, ca, password) in [
        ("another CA", addr, foreign.path(), "s3cret"),
        ("another name", other_addr, other_name.path(), "s3cret"),
        ("another password", addr, ours.path(), "wrong"),
    ] {
        let envoy = tls_envoy(addr, &origin, &ca.join("ca.pem"), password).await;
        let answer = refuses(envoy.addr(), &origin).await;
        assert_eq!(answer.kind(), (503, Some("store-unavailable".to_owned())), "{what}");
    }
    assert!(!redis.command("KEYS *").await.contains("idem:"));
}

fn module() -> Vec<u8> {
    std::fs::read(Wasm::Dist.path()).unwrap()
}

fn hex(bytes: impl AsRef<[u8]>) -> String {
    bytes.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// `envoy/remote-code.yaml` with this digest, fetching from `artifacts`.
fn remote_code(artifacts: SocketAddr, origin: &Origin, digest: &str) -> Value {
    let mut bootstrap = bootstrap_of("envoy/remote-code.yaml");
    move_cluster(&mut bootstrap, "payments", origin.addr());
    move_cluster(&mut bootstrap, "artifacts", artifacts);
    replace_text(&mut bootstrap, &"0".repeat(64), digest);
    // The tests of a failing fetch would wait for the retries.
    let filters = "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config/http_filters/0";
    let remote = format!("{filters}/typed_config/config/vm_config/code/remote/retry_policy");
    let retries = bootstrap.pointer_mut(&remote).unwrap();
    assert_eq!(retries["num_retries"], 5);
    *retries =
        json!({"num_retries": 1, "retry_back_off": {"base_interval": "0.01s", "max_interval": "0.02s"}});
    bootstrap
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_module_fetched_over_http_runs_a_key_once() {
    let (artifacts, origin) = (Origin::start().await, Origin::start().await);
    artifacts.on("/envoy-idempotency/", Behaviour::Respond(Reply::ok(module())));
    let envoy =
        Shipped::start(remote_code(artifacts.addr(), &origin, &hex(Sha256::digest(module()))), &[]).await;
    assert_eq!(artifacts.requests().len(), 1);
    runs_once(envoy.addr(), &origin, "/pay").await;
}

/// The digest is another's, the server has nothing, nobody listens: requests are refused, those that no rule covers too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_module_that_is_not_fetched_lets_nothing_pass() {
    let (artifacts, origin) = (Origin::start().await, Origin::start().await);
    artifacts.on("/", Behaviour::Respond(Reply::status(404)));
    let wrong = Origin::start().await;
    wrong.on("/", Behaviour::Respond(Reply::ok(module())));
    let digest = hex(Sha256::digest(module()));
    let nobody = RefusedPort::new();
    for (what, addr, digest) in [
        ("another digest", wrong.addr(), hex(Sha256::digest(b"another"))),
        ("not found", artifacts.addr(), digest.clone()),
        ("nobody listens", nobody.addr(), digest),
    ] {
        let envoy = Shipped::start(remote_code(addr, &origin, &digest), &[]).await;
        refuses(envoy.addr(), &origin).await;
        let uncovered = send_once(envoy.addr(), Protocol::Http1, &Request::get("/")).await.unwrap();
        assert!(uncovered.status >= 500, "{what}: {uncovered:?}");
    }
    assert!(!wrong.requests().is_empty() && !artifacts.requests().is_empty());
    assert_eq!(origin.requests().len(), 0);
}

/// The ECDS file of this test's Envoy, in a folder of its own.
struct Ecds {
    folder: TempDir,
    pushes: usize,
}

impl Ecds {
    fn file(&self) -> std::path::PathBuf {
        self.folder.path().join("idempotency.yaml")
    }

    /// Moves a new version into place, as the document says.
    fn push(&mut self, resources: &Value) {
        self.pushes += 1;
        let draft = self.folder.path().join(format!("draft-{}", self.pushes));
        std::fs::write(&draft, resources.to_string()).unwrap();
        std::fs::rename(draft, self.file()).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_filter_from_ecds_runs_a_key_once_and_keeps_it_over_an_update() {
    let origin = Origin::start().await;
    let mut ecds = Ecds { folder: tempfile::tempdir().unwrap(), pushes: 0 };
    std::fs::copy(repository().join("envoy/ecds/idempotency.yaml"), ecds.file()).unwrap();
    let mut bootstrap = bootstrap_of("envoy/ecds.yaml");
    move_cluster(&mut bootstrap, "payments", origin.addr());
    replace_text(&mut bootstrap, "envoy/ecds", ecds.folder.path().to_str().unwrap());
    let envoy = Shipped::start(bootstrap, &[]).await;
    let (key, count) = (unique_key(), "extension_config_discovery.http_filter.idempotency");
    let request = Request::post("/pay").key(&key).body("amount=1");
    let first = send_once(envoy.addr(), Protocol::Http1, &request).await.unwrap();
    assert_eq!((first.status, first.header("idempotent-replayed")), (200, None), "{first:?}");
    let updated = envoy.stat(&format!("{count}.config_reload")).await;

    // A configuration that the filter refuses changes nothing.
    let shipped = documents_of("envoy/ecds/idempotency.yaml").remove(0);
    let mut refused = shipped.clone();
    replace_text(&mut refused, "\"on_failure\": \"retain\"", "\"on_failure\": \"maybe\"");
    ecds.push(&refused);
    poll_until(PATIENCE, "the refusal", async || {
        (envoy.stat(&format!("{count}.update_rejected")).await
            + envoy.stat(&format!("{count}.config_fail")).await
            > 0)
        .then_some(())
    })
    .await;
    assert!(envoy.log_text().contains("maybe"), "the log names the mistake");
    runs_once(envoy.addr(), &origin, "/pay").await;

    // One that it takes is used at once, and what was executed stays executed.
    let mut changed = shipped;
    replace_text(
        &mut changed,
        "\"record_ttl\": \"24h\"",
        "\"record_ttl\": \"24h\", \"replay_header\": \"x-again\"",
    );
    ecds.push(&changed);
    let replay = poll_until(PATIENCE, "the new configuration", async || {
        let answer = send_once(envoy.addr(), Protocol::Http1, &request).await.unwrap();
        answer.header("x-again").is_some().then_some(answer)
    })
    .await;
    assert!(envoy.stat(&format!("{count}.config_reload")).await > updated);
    assert_eq!((replay.status, &replay.body), (200, &first.body));
    assert_eq!(origin.executions_of(&key), 1);
}

/// Without the file the listener does not open; nothing passes unprotected.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_filter_that_ecds_does_not_have_lets_nothing_pass() {
    let origin = Origin::start().await;
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("idempotency.yaml"), json!({"resources": []}).to_string()).unwrap();
    let mut bootstrap = bootstrap_of("envoy/ecds.yaml");
    move_cluster(&mut bootstrap, "payments", origin.addr());
    replace_text(&mut bootstrap, "envoy/ecds", folder.path().to_str().unwrap());
    let listener = "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config/http_filters/0";
    let source = &mut bootstrap.pointer_mut(listener).unwrap()["config_discovery"];
    assert!(source["default_config"].is_null());
    source["config_source"]["initial_fetch_timeout"] = json!("0.5s");
    let envoy = Shipped::start(bootstrap, &[]).await;
    refuses(envoy.addr(), &origin).await;
    assert_eq!(origin.requests().len(), 0);
}

/// What `deploy/compose.yaml` starts, without containers: its Envoy, its demo service, and a Redis with its arguments.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_compose_starts_takes_one_payment_for_two_requests() {
    let compose = documents_of("deploy/compose.yaml").remove(0);
    let command = compose["services"]["redis"]["command"].as_array().unwrap();
    let command: Vec<&str> = command.iter().skip(1).map(|word| word.as_str().unwrap()).collect();
    let redis = Redis::start_with(&command).await;
    let service = DemoService::start().await;
    let mut bootstrap = bootstrap_of("deploy/envoy.yaml");
    unhurried_link(&mut bootstrap);
    move_cluster(&mut bootstrap, "payments", service.addr);
    move_cluster(&mut bootstrap, "redis", redis.addr());
    let envoy = Shipped::start(bootstrap, &[]).await;
    let key = unique_key();
    let request = Request::post("/payments").key(&key).body("{}");
    let first = send_once(envoy.addr(), Protocol::Http1, &request).await.unwrap();
    assert_eq!((first.status, first.text().as_str()), (201, "{\"id\": \"pay-1\"}"));
    let retry = send_once(envoy.addr(), Protocol::Http1, &request).await.unwrap();
    assert_eq!((retry.status, retry.header("idempotent-replayed")), (201, Some("true")), "{retry:?}");
    let count = send_once(envoy.addr(), Protocol::Http1, &Request::get("/count")).await.unwrap();
    assert_eq!(count.text(), "{\"payments\": 1}");
}

/// `deploy/payments.py`, killed when dropped.
struct DemoService {
    process: std::process::Child,
    addr: SocketAddr,
}

impl DemoService {
    async fn start() -> DemoService {
        let addr = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let process = Command::new("python3")
            .arg(repository().join("deploy/payments.py"))
            .env("ADDRESS", "127.0.0.1")
            .env("PORT", addr.port().to_string())
            .stderr(std::process::Stdio::null())
            .spawn()
            .expect("python3");
        let service = DemoService { process, addr };
        poll_until(PATIENCE, "the demo service", async || {
            tokio::net::TcpStream::connect(addr).await.ok().map(drop)
        })
        .await;
        service
    }
}

impl Drop for DemoService {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
