//! What others have for the same work. Each is first made to prove that it does it: 20 duplicates, one execution, the same
//! answer again. One that can't be run or doesn't prove it is reported with the reason, and not measured.

use std::collections::BTreeMap;
use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Barrier;
use std::time::Duration;

use serde_json::{Value, json};

use crate::envoy::{Action, Around, Envoy, Filter, Redis, Variant, embedded, free_address, on_redis, plugin};
use crate::load::{Counter, Expected, Keys, Setting, Subject};
use crate::process::{Process, wait_until};
use crate::turns::take_turns;
use crate::{Bench, Fallible, http, upstream};

/// The simple form: the key is set if it isn't there, the answer put in its place, and sent to whoever comes later.
const WEBDIS: &str = r#"
local function redis(handle, command)
  local headers, answer = handle:httpCall("webdis",
    {[":method"] = "POST", [":path"] = "/", [":authority"] = "webdis"}, command, 2000)
  return headers[":status"], answer
end
function envoy_on_request(handle)
  local given = handle:headers():get("idempotency-key")
  if given == nil then return handle:respond({[":status"] = "400"}, "no key") end
  local key = "lua-" .. handle:headers():get("x-account-id") .. "-" .. given
  local status, answer = redis(handle, "SET/" .. key .. "/in-flight/NX/EX/3600")
  if status ~= "200" then return handle:respond({[":status"] = "503"}, "no store") end
  if string.find(answer, "OK", 1, true) then
    handle:streamInfo():dynamicMetadata():set("bench", "key", key)
    return
  end
  status, answer = redis(handle, "GET/" .. key)
  local kept = string.match(answer or "", '^{"GET":"(.*)"}$')
  if kept == "in-flight" then return handle:respond({[":status"] = "409"}, "in flight") end
  if kept == nil then return handle:respond({[":status"] = "503"}, "no store") end
  handle:respond({[":status"] = "200", ["content-type"] = "text/plain", ["idempotent-replayed"] = "true"}, kept)
end
function envoy_on_response(handle)
  local mark = handle:streamInfo():dynamicMetadata():get("bench")
  if mark == nil then return end
  local body = handle:body()
  redis(handle, "SET/" .. mark["key"] .. "/" .. body:getBytes(0, body:length()) .. "/XX/EX/3600")
end
"#;

/// One program that does this project's work.
struct Peer {
    name: &'static str,
    /// Which of this project's subjects has the same store.
    like: &'static str,
    lacks: &'static str,
    start: fn(&Bench, SocketAddr) -> Fallible<Running>,
}

struct Running {
    /// First executions.
    first: Subject,
    /// The same without the peer's work, where that can be had of the same program.
    bare: Option<Subject>,
    _process: Process,
}

const PEERS: [Peer; 5] = [
    Peer {
        name: "express-idempotency",
        like: "redis_first",
        lacks: "reads and then writes, so that duplicates that come together may all execute; no lease, no scope; keeps the content type only; stores after it has answered",
        start: |bench, redis| node(bench, redis, "express-idempotency", None),
    },
    Peer {
        name: "node-idempotency",
        like: "redis_first",
        lacks: "one time to live for claim and record, so a crash wedges the key; no owner, no scope; an error of the handler leaves the claim",
        start: |bench, redis| node(bench, redis, "node-idempotency", Some("idempotency-replayed: true")),
    },
    Peer {
        name: "axum-idempotent-memory",
        like: "embedded_first",
        lacks: "no claim, so that duplicates that come together all execute; no fingerprint with a key; needs a session of the caller; this process only",
        start: |bench, redis| axum(bench, redis, "memory"),
    },
    Peer {
        name: "axum-idempotent-redis",
        like: "redis_first",
        lacks: "as in memory, but for the store",
        start: |bench, redis| axum(bench, redis, "redis"),
    },
    Peer {
        name: "idempotent-proxy-server",
        like: "redis_first",
        lacks: "no fingerprint, no owner; one time to live (REQUEST_TIMEOUT) for claim and record; duplicates poll, each on one of 10 connections to Redis: 10 of them leave the execution none to store its answer by",
        start: idempotent_proxy,
    },
];

pub fn measure(bench: &Bench) -> Fallible<Value> {
    let redis = Redis::start(&bench.tools)?;
    let webdis = start_webdis(bench, redis.address);
    let around = Around {
        upstream: bench.upstream,
        redis: redis.address,
        webdis: match &webdis {
            Ok((_, address)) => *address,
            Err(_) => free_address()?,
        },
    };
    let ours = [
        Variant::plain(),
        Variant::first("embedded_first", plugin(embedded(), json!({}))),
        Variant::first("redis_first", plugin(on_redis("bench:", json!({}), 2), json!({}))),
    ];
    let lua = Variant {
        name: "lua-webdis",
        filter: Filter::Lua(WEBDIS.to_owned()),
        action: Action::Forward,
        ..Variant::plain()
    };
    let all: Vec<Variant> = ours.iter().chain([&lua]).cloned().collect();
    let envoy = Envoy::start(&bench.tools, 1, around, &all)?;
    let mut report = Vec::new();
    let (mut firsts, mut replays) = (envoy.subjects(&ours)?, Vec::new());
    for subject in firsts.clone().into_iter().skip(1) {
        let together = at_once(&subject)?;
        report.push(admit(&subject, "", "", &together, &mut replays)?);
    }
    match &webdis {
        Ok((process, _)) => {
            let mut subject = envoy.subject(&lua)?;
            subject.processes.push(process.id());
            let lacks = "no fingerprint, no owner, one time to live, the body only and as text; needs Webdis beside Envoy";
            let together = at_once(&subject)?;
            report.push(try_out(
                "lua-webdis",
                "redis_first",
                lacks,
                &together,
                subject,
                &mut firsts,
                &mut replays,
            ));
        }
        Err(error) => report.push(json!({"name": "lua-webdis", "error": error.to_string()})),
    }
    let mut running = Vec::new();
    for peer in &PEERS {
        // What duplicates that come together leave behind must not weigh on the measurement.
        let together = (peer.start)(bench, redis.address).and_then(|started| at_once(&started.first));
        match together.and_then(|together| Ok((together, (peer.start)(bench, redis.address)?))) {
            Ok((together, started)) => {
                let first = started.first.clone();
                let outcome =
                    try_out(peer.name, peer.like, peer.lacks, &together, first, &mut firsts, &mut replays);
                if outcome.get("error").is_none() {
                    firsts.extend(started.bare.clone());
                }
                report.push(outcome);
                running.push(started);
            }
            Err(error) => report.push(json!({"name": peer.name, "error": error.to_string()})),
        }
    }
    for peer in &report {
        println!("  {peer}");
    }
    let mut settings = Vec::new();
    let connections: &[u32] = if bench.full { &[1, 32, 128] } else { &[1, 32] };
    for &connections in connections {
        let subjects: Vec<Subject> = firsts.iter().chain(&replays).cloned().collect();
        let setting = Setting { workers: 1, connections, body: 200 };
        settings.push(take_turns(&subjects, setting, bench.effort)?.json());
    }
    Ok(json!({
        "peers": report, "settings": settings,
        "not_on_npm": ["hono-idempotency", "actor-ts", "node-idempotency (its packages are @node-idempotency/*)"],
    }))
}

/// Among the measured, if it does its work.
fn try_out(
    name: &str,
    like: &str,
    lacks: &str,
    together: &Value,
    first: Subject,
    firsts: &mut Vec<Subject>,
    replays: &mut Vec<Subject>,
) -> Value {
    match admit(&first, like, lacks, together, replays) {
        Ok(proved) => {
            firsts.push(first);
            proved
        }
        Err(error) => json!({"name": name, "error": error.to_string()}),
    }
}

/// Proves that it does its work.
fn admit(
    first: &Subject,
    like: &str,
    lacks: &str,
    together: &Value,
    replays: &mut Vec<Subject>,
) -> Fallible<Value> {
    let before = first.counter.read()?;
    let answers: Vec<http::Answer> =
        (0..20).map(|_| first.ask("one-by-one", 200, &[])).collect::<Fallible<_>>()?;
    let executed = first.counter.read()? - before;
    let same = answers.iter().all(|answer| answer.status == 200 && answer.body == answers[0].body);
    if executed != 1 || !same {
        let statuses: Vec<u16> = answers.iter().map(|answer| answer.status).collect();
        return Err(format!(
            "{} ran {executed} times for 20 duplicates one by one: {statuses:?}",
            first.name
        )
        .into());
    }
    let replay = Subject {
        name: format!("{}:replay", first.name),
        keys: Keys::Executed,
        expected: Expected::NoExecutions,
        ..first.clone()
    };
    replays.push(Subject { against: first.name.clone(), ..replay });
    Ok(json!({
        "name": first.name, "like": like, "lacks": lacks, "executions_of_20_one_by_one": executed,
        "20_at_once": together,
    }))
}

/// What comes of 20 duplicates that are sent together, and of one later.
fn at_once(first: &Subject) -> Fallible<Value> {
    let before = first.counter.read()?;
    let together = Barrier::new(20);
    let mut statuses: BTreeMap<String, u32> = BTreeMap::new();
    std::thread::scope(|scope| {
        let ask = || {
            together.wait();
            first.ask_within(Duration::from_secs(5), "at-once", 200, &[(upstream::WORK, "200")])
        };
        let asked: Vec<_> = (0..20).map(|_| scope.spawn(ask)).collect();
        for answer in asked {
            let status = match answer.join() {
                Ok(Ok(answer)) => answer.status.to_string(),
                Ok(Err(_)) => "none within 5 s".to_owned(),
                Err(_) => "a thread broke".to_owned(),
            };
            *statuses.entry(status).or_default() += 1;
        }
    });
    Ok(json!({"executions": first.counter.read()? - before, "answers": statuses}))
}

/// What has to be installed for a peer; the path of its program.
fn install(bench: &Bench, name: &str) -> Fallible<PathBuf> {
    let output = Command::new(bench.tools.root.join("bench/peers/install.sh")).arg(name).output()?;
    if output.status.success() {
        return Ok(PathBuf::from(String::from_utf8_lossy(&output.stdout).trim()));
    }
    let text = String::from_utf8_lossy(&output.stderr);
    let last: Vec<&str> = text.lines().rev().take(5).collect();
    Err(format!("not installed: {}", last.into_iter().rev().collect::<Vec<_>>().join(" / ")).into())
}

/// Starts a program that listens on `address`.
fn start(command: &mut Command, address: SocketAddr, log: &Path) -> Fallible<Process> {
    let file = File::create(log)?;
    let mut process = Process::start(command.stdout(Stdio::null()).stderr(file))?;
    wait_until("the peer", Duration::from_secs(20), || {
        if let Some(status) = process.ended()? {
            let text = std::fs::read_to_string(log)?;
            return Err(format!(
                "it ended ({status}): {}",
                text.lines().rev().take(3).collect::<Vec<_>>().join(" / ")
            )
            .into());
        }
        Ok(std::net::TcpStream::connect(address).is_ok())
    })?;
    Ok(process)
}

fn log(bench: &Bench, name: &str) -> PathBuf {
    bench.tools.root.join("target/peers").join(format!("{name}.log"))
}

fn start_webdis(bench: &Bench, redis: SocketAddr) -> Fallible<(Process, SocketAddr)> {
    let program = install(bench, "webdis")?;
    let address = free_address()?;
    let settings = log(bench, "webdis").with_extension("json");
    let text = json!({
        "redis_host": "127.0.0.1", "redis_port": redis.port(), "http_host": "127.0.0.1", "http_port": address.port(),
        "threads": 1, "pool_size": 10, "daemonize": false, "database": 0, "verbosity": 0,
        "http_max_request_size": 1_048_576, "logfile": log(bench, "webdis"),
    });
    std::fs::write(&settings, text.to_string())?;
    let process = start(Command::new(program).arg(settings), address, &log(bench, "webdis-out"))?;
    Ok((process, address))
}

fn service(name: &str, against: &str, address: SocketAddr, path: &str, process: &Process) -> Subject {
    Subject {
        name: name.to_owned(),
        against: against.to_owned(),
        port: address.port(),
        path: path.to_owned(),
        keys: Keys::New,
        expected: Expected::Executions,
        counter: Counter::Own(address.port()),
        headers: String::new(),
        replay_mark: None,
        processes: vec![process.id()],
    }
}

fn node(
    bench: &Bench,
    redis: SocketAddr,
    name: &str,
    replay_mark: Option<&'static str>,
) -> Fallible<Running> {
    let folder = install(bench, "node")?;
    let address = free_address()?;
    let process = start(
        Command::new("node")
            .arg(folder.join(format!("{name}.js")))
            .env("NODE_ENV", "production")
            .env("PORT", address.port().to_string())
            .env("REDIS_URL", format!("redis://{redis}")),
        address,
        &log(bench, name),
    )?;
    let bare_name = format!("{name}:bare");
    let bare = service(&bare_name, &bare_name, address, "/bare", &process);
    let first = Subject { replay_mark, ..service(name, &bare_name, address, "/pay", &process) };
    Ok(Running { first, bare: Some(bare), _process: process })
}

fn axum(bench: &Bench, redis: SocketAddr, store: &str) -> Fallible<Running> {
    let program = install(bench, "axum")?;
    let address = free_address()?;
    let name = format!("axum-idempotent-{store}");
    let process = start(
        Command::new(program)
            .env("PORT", address.port().to_string())
            .env("STORE", store)
            .env("REDIS_URL", format!("redis://{redis}")),
        address,
        &log(bench, &name),
    )?;
    let begun = http::send(address.port(), "POST", "/session", &[("host", "bench")], b"")?;
    let mut lines = begun.head.lines().filter_map(|line| line.split_once(": "));
    let cookie = lines.find(|(name, _)| name.eq_ignore_ascii_case("set-cookie")).map(|(_, cookie)| cookie);
    let cookie = cookie.and_then(|cookie| cookie.split(';').next());
    let cookie = cookie.ok_or_else(|| {
        let detail = if store == "redis" { " (its store needs Redis 7.4 or newer, for HEXPIRE)" } else { "" };
        format!("it begins no session: {}{detail}", begun.text())
    })?;
    let bare_name = format!("{name}:bare");
    let bare = service(&bare_name, &bare_name, address, "/bare", &process);
    let first = Subject {
        headers: format!("cookie: {cookie}\r\n"),
        replay_mark: Some("idempotency-replayed: true"),
        ..service(&name, &bare_name, address, "/pay", &process)
    };
    Ok(Running { first, bare: Some(bare), _process: process })
}

fn idempotent_proxy(bench: &Bench, redis: SocketAddr) -> Fallible<Running> {
    let program = install(bench, "idempotent-proxy-server")?;
    let address = free_address()?;
    let folder = bench.tools.root.join("target/peers/idempotent-proxy");
    std::fs::create_dir_all(&folder)?;
    // It doesn't start without one.
    std::fs::write(folder.join(".env"), "")?;
    let process = start(
        Command::new(program)
            .current_dir(&folder)
            .env("SERVER_ADDR", address.to_string())
            .env("REDIS_URL", format!("redis://{redis}"))
            .env("REQUEST_TIMEOUT", "600000")
            .env("LOG_LEVEL", "error")
            .env("TOKIO_WORKER_THREADS", "1")
            .env("URL_PAY", format!("http://{}/pay", bench.upstream)),
        address,
        &log(bench, "idempotent-proxy-server"),
    )?;
    let first = Subject {
        counter: Counter::Upstream,
        ..service("idempotent-proxy-server", "plain", address, "/URL_PAY", &process)
    };
    Ok(Running { first, bare: None, _process: process })
}
