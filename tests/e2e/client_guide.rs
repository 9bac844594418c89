//! The code of the client's guide (`docs/clients.md`), taken from the page and run: against the filter in a real Envoy,
//! and against an upstream that speaks every refusal. What counts is how often the service executed.
//!
//! Python and JavaScript run as they stand on the page; the page's Rust is `client_guide/send.rs`, compiled here. Go
//! needs a toolchain of its own: `make clients` sets `GO_PATH` to it, and the tests below include it.

mod send;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::process::Command;

use crate::support::*;
use send::Failure;

/// The last block of this language in the guide's section of this name.
fn code(section: &str, fence: &str) -> String {
    let page = std::fs::read_to_string(repository().join("docs/clients.md")).unwrap();
    let section = page.split(&format!("\n### {section}\n")).nth(1).unwrap();
    let block = section.split(&format!("\n```{fence}\n")).nth(1).unwrap();
    format!("{}\n", block.split("\n```").next().unwrap())
}

fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// One intent that a client sends until it is settled, or its patience ends.
#[derive(Clone)]
struct Intent {
    to: SocketAddr,
    path: String,
    key: String,
    body: &'static str,
    account: Option<&'static str>,
    timeout: Duration,
    patience: Duration,
    resent: bool,
}

impl Intent {
    fn new(to: SocketAddr, path: impl Into<String>) -> Intent {
        Intent {
            to,
            path: path.into(),
            key: unique_key(),
            body: "amount=1",
            account: Some("alice"),
            timeout: PATIENCE,
            patience: Duration::from_secs(60),
            resent: false,
        }
    }

    fn to_json(&self) -> Value {
        let headers = self.account.map(|account| json!({"x-account-id": account}));
        json!({
            "url": format!("http://{}{}", self.to, self.path),
            "key": self.key,
            "body": self.body,
            "headers": headers.unwrap_or_else(|| json!({})),
            "timeout_ms": self.timeout.as_millis() as u64,
            "patience_ms": self.patience.as_millis() as u64,
            "resent": self.resent,
        })
    }
}

/// A language of the guide, ready to run.
#[derive(Clone)]
enum Language {
    /// The name, and the command but for its last argument.
    Program(&'static str, PathBuf, Vec<PathBuf>),
    Rust,
}

impl Language {
    fn name(&self) -> &'static str {
        match self {
            Language::Program(name, ..) => name,
            Language::Rust => "Rust",
        }
    }

    async fn send(&self, intent: &Intent) -> Value {
        self.send_all(std::slice::from_ref(intent)).await.pop().unwrap()
    }

    /// Sends them all at once. What came of each: `{"answer": status, "content": …, "replayed": …}`,
    /// `{"rejected": why}` or `{"unsettled": why}`.
    async fn send_all(&self, intents: &[Intent]) -> Vec<Value> {
        match self {
            Language::Program(name, program, arguments) => {
                let intents = Value::Array(intents.iter().map(Intent::to_json).collect());
                let mut command = Command::new(program);
                command.args(arguments).arg(intents.to_string()).env("NO_PROXY", "*").kill_on_drop(true);
                let output = command.output().await.unwrap();
                let error = String::from_utf8_lossy(&output.stderr);
                assert!(output.status.success(), "{name}: {error}");
                serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{name}: {e}: {error}"))
            }
            Language::Rust => {
                all_at_once(intents.iter().map(async |intent| {
                    let intent = intent.clone();
                    tokio::task::spawn_blocking(move || send_by_rust(&intent)).await.unwrap()
                }))
                .await
            }
        }
    }
}

fn send_by_rust(intent: &Intent) -> Value {
    let mut request = Request::post(&intent.path).key(&intent.key).body(intent.body).without("x-account-id");
    request = request.authority(&intent.to.to_string());
    if let Some(account) = intent.account {
        request = request.account(account);
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let post = || -> Result<http::Response<String>, String> {
        runtime.block_on(async {
            let answer = send_once(intent.to, Protocol::Http1, &request);
            let answer =
                tokio::time::timeout(intent.timeout, answer).await.map_err(|late| late.to_string())?;
            let answer = answer.map_err(|error| format!("{error:?}"))?;
            let mut response = http::Response::builder().status(answer.status);
            for (name, value) in &answer.headers {
                response = response.header(name.as_slice(), value.as_slice());
            }
            response.body(answer.text()).map_err(|error| error.to_string())
        })
    };
    match send::send(intent.patience, intent.resent, post) {
        Ok(answer) => json!({
            "answer": answer.status().as_u16(),
            "replayed": answer.headers().get("idempotent-replayed").is_some_and(|value| value == "true"),
            "content": answer.into_body(),
        }),
        Err(Failure::Rejected(why)) => json!({"rejected": why}),
        Err(Failure::Unsettled(why)) => json!({"unsettled": why}),
    }
}

/// The guide's languages; the programs live in `folder`.
fn languages(folder: &Path) -> Vec<Language> {
    let place = |name: &str, text: &str| {
        let path = folder.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, text).unwrap();
        path
    };
    let program = |name: &str, package: &str| {
        let found = std::env::split_paths(&std::env::var_os("PATH").unwrap())
            .map(|folder| folder.join(name))
            .find(|path| path.is_file());
        found.unwrap_or_else(|| panic!("no {name}: apt-get install {package}"))
    };
    place("intent.py", &code("Python", "python"));
    place("intent.mjs", &code("JavaScript", "js"));
    let python = place("driver.py", include_str!("client_guide/driver.py"));
    let node = place("driver.mjs", include_str!("client_guide/driver.mjs"));
    let mut languages = vec![
        Language::Program("Python", program("python3", "python3"), vec!["-B".into(), python]),
        Language::Program("JavaScript", program("node", "nodejs"), vec![node]),
        Language::Rust,
    ];
    if let Some(go) = std::env::var_os("GO_PATH") {
        place("go.mod", "module guide\n\ngo 1.21\n");
        place("intent/intent.go", &code("Go", "go"));
        place("main.go", include_str!("client_guide/driver.go"));
        let binary = folder.join("guide");
        let run = |program: &str, arguments: &[&str]| {
            let mut command = std::process::Command::new(Path::new(&go).with_file_name(program));
            let output = command.args(arguments).current_dir(folder).output().unwrap();
            let error = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{program} {arguments:?}: {error}");
            String::from_utf8(output.stdout).unwrap()
        };
        run("go", &["vet", "./..."]);
        assert_eq!(run("gofmt", &["-l", "."]), "", "gofmt would change these");
        run("go", &["build", "-o", binary.to_str().unwrap(), "."]);
        languages.push(Language::Program("Go", binary, vec![]));
    }
    languages
}

/// The filter before a service whose paths misbehave; below `/detached` its executions outlive their clients.
async fn payments(origin: &Origin) -> Envoy {
    let rule = |name: &str, patch: Value| {
        let mut rule = json!({
            "name": name,
            "match": {"methods": ["POST"], "path": {"prefix": format!("/{name}")}},
            "scope": [{"header": "x-account-id"}],
            "max_response_body_bytes": 64,
        });
        deep_merge(&mut rule, &patch);
        rule
    };
    let plugin = json!({
        "store": {"shared_data": {}},
        "execute_cluster": "idempotency-execute",
        "rules": [
            rule("detached", json!({"execution": "detached", "execute_timeout": "30s"})),
            rule("inline", json!({})),
        ],
    });
    let builder = Envoy::builder().workers(2).plugin(plugin).origin_addr(origin.addr());
    with_execution(builder, &default_routes()).start().await
}

fn answered(outcome: &Value) -> (u64, bool) {
    (outcome["answer"].as_u64().unwrap_or_default(), outcome["replayed"] == true)
}

#[test]
fn the_guides_rust_is_what_is_compiled_here() {
    assert_eq!(code("Rust", "rust"), include_str!("client_guide/send.rs"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_guides_clients_run_an_intent_at_most_once() {
    let folder = tempfile::tempdir().unwrap();
    let origin = Origin::start().await;
    let created = || Reply::status(201).chunk("paid");
    let fails = |status| Behaviour::Sequence(vec![Reply::status(status), created()]);
    origin.on("/inline/plain", Behaviour::Respond(created()));
    origin.on("/inline/busy", fails(503));
    origin.on("/inline/broken", fails(500));
    origin.on("/inline/large", Behaviour::Respond(Reply::status(201).chunk(vec![b'x'; 100])));
    let held = |path: &str| {
        let barrier = Barrier::new();
        origin.on(path, Behaviour::Barrier(barrier.clone(), created()));
        barrier
    };
    let stuck = held("/stuck");
    let envoy = payments(&origin).await;
    let languages = languages(folder.path());

    let tell = async |language: &Language| {
        let at = |path: &str| Intent::new(envoy.addr(), path);
        let runs = |intent: &Intent| origin.executions_of(&intent.key);
        let name = language.name();
        let (plain, busy, broken, large) =
            (at("/inline/plain"), at("/inline/busy"), at("/inline/broken"), at("/inline/large"));
        let nobody = Intent { account: None, ..at("/inline/plain") };

        let first = [&plain, &busy, &broken, &large, &nobody].map(Intent::clone);
        let first = language.send_all(&first).await;
        assert_eq!(answered(&first[0]), (201, false), "{name}");
        // A 503 was not processed: it ran again. A 500 may have been: it didn't.
        assert_eq!((answered(&first[1]), runs(&busy)), ((201, false), 2), "{name}");
        assert_eq!((&first[2], runs(&broken)), (&json!({"unsettled": "failed"}), 1), "{name}");
        assert_eq!(answered(&first[3]), (201, false), "{name}");
        assert_eq!((&first[4], runs(&nobody)), (&json!({"rejected": "invalid-scope"}), 0), "{name}");

        // The same after a crash of the client; and its key for another body, which is a mistake of the client, unless
        // it can't know what it sent.
        let again = Intent { resent: true, ..plain.clone() };
        let other = Intent { body: "amount=2", ..plain.clone() };
        let unsure = Intent { resent: true, ..other.clone() };
        let second = language.send_all(&[again, other, unsure, large.clone()]).await;
        assert_eq!((answered(&second[0]), &second[0]["content"]), ((201, true), &json!("paid")), "{name}");
        assert_eq!(second[1], json!({"rejected": "mismatch"}), "{name}");
        assert_eq!(second[2], json!({"unsettled": "mismatch"}), "{name}");
        assert_eq!(second[3], json!({"unsettled": "response-not-kept"}), "{name}");
        assert_eq!((runs(&plain), runs(&large)), (1, 1), "{name}");
    };
    let refused = async |intent: &Intent, status: &str| {
        let line = |line: &str| line.starts_with(status) && line.ends_with(&intent.path);
        envoy.wait_access_log(line, PATIENCE).await;
    };
    let wait = async |language: &Language| {
        let name = language.name();
        // The first request is another process's, and still runs.
        let intent = Intent::new(envoy.addr(), format!("/inline/held/{name}"));
        let barrier = held(&intent.path);
        let first = Request::post(&intent.path).authority(&intent.to.to_string());
        let first = vec![first.key(&intent.key).body(intent.body)];
        let first = tokio::spawn(burst(intent.to, Protocol::Http1, first));
        origin.wait_executions_of(&intent.key, 1, PATIENCE).await;
        let (outcome, ()) = tokio::join!(language.send(&intent), async {
            refused(&intent, "409 ").await;
            barrier.open();
        });
        assert_eq!(answered(&outcome), (201, true), "{name}");
        assert_eq!(first.await.unwrap().pop().unwrap().unwrap().status, 201, "{name}");
        assert_eq!(origin.executions_of(&intent.key), 1, "{name}");
    };
    let leave = async |language: &Language, path: &str, status: &str| {
        let path = format!("{path}/{}", language.name());
        let barrier = held(&path);
        let intent = Intent { timeout: Duration::from_millis(700), ..Intent::new(envoy.addr(), &path) };
        let outcome = tokio::join!(language.send(&intent), async {
            // By then its first try is over.
            refused(&intent, status).await;
            barrier.open();
        });
        assert_eq!(origin.executions_of(&intent.key), 1, "{} {path}", language.name());
        outcome.0
    };
    let give_up = async |language: &Language| {
        let (timeout, patience) = (Duration::from_millis(300), Duration::from_millis(2500));
        let intent = Intent { timeout, patience, ..Intent::new(origin.addr(), "/stuck") };
        let begin = Instant::now();
        assert_eq!(language.send(&intent).await, json!({"unsettled": "no answer"}), "{}", language.name());
        // Nothing in front of this service protects it: each try runs.
        assert!(origin.executions_of(&intent.key) >= 2, "{}: gave up at once", language.name());
        assert!(begin.elapsed() < PATIENCE, "{}: did not give up", language.name());
    };

    all_at_once(languages.iter().map(async |language| {
        let (inline, detached, ..) = tokio::join!(
            leave(language, "/inline/slow", "424 "),
            leave(language, "/detached/slow", "409 "),
            wait(language),
            give_up(language),
            tell(language),
        );
        assert_eq!(inline, json!({"unsettled": "failed"}), "{}", language.name());
        assert_eq!(answered(&detached), (201, true), "{}", language.name());
    }))
    .await;
    stuck.open();
}

/// Unmarked answers after which the guide's clients send again, and those which they hand on.
const AGAIN: [u16; 8] = [408, 425, 429, 500, 502, 503, 504, 599];
const FINAL: [u16; 11] = [200, 204, 303, 400, 401, 403, 404, 407, 409, 422, 424];

/// What the guide says about a refusal, by its table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Advice {
    Again,
    Reject,
    Reconcile,
}

fn refusals() -> Vec<(String, u16, Advice)> {
    let page = std::fs::read_to_string(repository().join("docs/clients.md")).unwrap();
    let table = page.split("\n## What each refusal means\n").nth(1).unwrap();
    let rows = table.lines().filter(|line| line.starts_with("| `")).skip(1);
    let rows = rows.take_while(|line| line.split('|').count() == 7);
    let rows = rows.map(|row| {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let kind = cells[1].trim_matches('`').to_owned();
        let advice = match (cells[4], cells[5]) {
            ("not by this request", does) if does.contains("same key") && !does.contains("operator") => {
                Advice::Again
            }
            ("the first request is running", _) => Advice::Again,
            ("not by this request", _) => Advice::Reject,
            _ => Advice::Reconcile,
        };
        (kind, cells[2].parse().unwrap(), advice)
    });
    rows.collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_guides_clients_do_what_its_table_says() {
    let folder = tempfile::tempdir().unwrap();
    let origin = Origin::start().await;
    let table = refusals();
    assert_eq!(table.len(), 14);
    for (kind, status, _) in &table {
        let refusal = Reply::status(*status).header("x-idempotency-refusal", kind);
        origin.on(&format!("/{kind}/"), Behaviour::Sequence(vec![refusal, Reply::status(201)]));
    }
    // When each request for a path came.
    let arrivals: Arc<Mutex<HashMap<String, Vec<Instant>>>> = Arc::default();
    let log = Arc::clone(&arrivals);
    let asked = Behaviour::func(move |seen, nth| {
        log.lock().unwrap().entry(seen.path).or_default().push(Instant::now());
        let refusal =
            Reply::status(409).header("x-idempotency-refusal", "in-flight").header("retry-after", "1");
        async move { if nth == 1 { refusal } else { Reply::status(201) } }
    });
    origin.on("/asked/", asked);
    origin.on(
        "/unknown/",
        Behaviour::Respond(Reply::status(400).header("x-idempotency-refusal", "of-tomorrow")),
    );
    for status in AGAIN {
        origin
            .on(&format!("/{status}/"), Behaviour::Sequence(vec![Reply::status(status), Reply::status(201)]));
    }
    for status in FINAL {
        origin.on(
            &format!("/{status}/"),
            Behaviour::Respond(Reply::status(status).header("location", "/200/")),
        );
    }
    let at = |path: String| Intent::new(origin.addr(), path);
    let tried = |intent: &Intent| origin.executions_of(&intent.key);
    all_at_once(languages(folder.path()).iter().map(async |language| {
        let name = language.name();
        let mut intents = vec![];
        let mut expected: Vec<(Value, usize)> = vec![];
        let mut expect = |intent, outcome, tries| {
            intents.push(intent);
            expected.push((outcome, tries));
        };
        let answer = |status: u16| json!({"answer": status, "content": "", "replayed": false});
        for (kind, _, advice) in &table {
            let (outcome, tries) = match advice {
                Advice::Again => (answer(201), 2),
                Advice::Reject => (json!({"rejected": kind}), 1),
                Advice::Reconcile => (json!({"unsettled": kind}), 1),
            };
            expect(at(format!("/{kind}/{name}")), outcome, tries);
        }
        expect(at("/unknown/".to_owned()), json!({"unsettled": "of-tomorrow"}), 1);
        for status in AGAIN {
            expect(at(format!("/{status}/{name}")), answer(201), 2);
        }
        // `fetch` hides a 407: to JavaScript it is no answer.
        let hidden = |status| status == 407 && name == "JavaScript";
        for status in FINAL.into_iter().filter(|status| !hidden(*status)) {
            expect(at(format!("/{status}/{name}")), answer(status), 1);
        }
        for status in [401, 403, 407].into_iter().filter(|status| !hidden(*status)) {
            let intent = Intent { resent: true, ..at(format!("/{status}/{name}")) };
            expect(intent, json!({"unsettled": format!("status {status}")}), 1);
        }
        expect(at(format!("/asked/{name}")), answer(201), 2);
        let outcomes = language.send_all(&intents).await;
        for ((intent, outcome), expected) in intents.iter().zip(outcomes).zip(expected) {
            assert_eq!((outcome, tried(intent)), expected, "{name} {}", intent.path);
        }
        // The random part of a first pause is at most half a second.
        let waited = {
            let arrivals = arrivals.lock().unwrap();
            let times = &arrivals[&format!("/asked/{name}")];
            times[1] - times[0]
        };
        assert!(waited >= Duration::from_secs(1), "{name}: Retry-After, {waited:?}");
    }))
    .await;
}
