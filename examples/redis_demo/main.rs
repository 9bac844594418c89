//! `make run-redis`: two Envoys on one Redis in front of the demo payments service. One Envoy is killed while its
//! request runs, and Redis is stopped. Every answer and every count of executions is checked; one that differs makes
//! the exit status 1.
#![allow(clippy::disallowed_methods, reason = "the demo runs in real time")]

#[path = "../demo/client.rs"]
mod client;
#[path = "../demo/page.rs"]
mod page;
#[allow(dead_code, reason = "the cluster's demo uses the rest")]
mod processes;
#[path = "../demo/service.rs"]
mod service;
#[path = "../demo/signals.rs"]
mod signals;
#[path = "../demo/wire.rs"]
mod wire;

use std::collections::BTreeMap;
use std::error::Error;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier, mpsc};
use std::time::{Duration, Instant};

use client::{Answer, Call, Client, HOST};
use page::Page;
use processes::{LOCK_TTL, Process};
use service::Service;

type Fallible<T> = Result<T, Box<dyn Error + Send + Sync>>;

const DUPLICATES: usize = 40;
const ACCOUNT: &str = "alice";

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("redis_demo: {error}");
            ExitCode::FAILURE
        }
    }
}

/// An environment variable that is set and not empty.
fn setting(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// Whether everything was as the story says.
fn run() -> Fallible<bool> {
    let start_it_with_make = "ENVOY_PATH is not set: start the demo with `make run-redis`, which knows it";
    let envoy_binary = setting("ENVOY_PATH").ok_or(start_it_with_make)?;
    let redis_binary = setting("REDIS_PATH").unwrap_or_else(|| "redis-server".to_owned());
    let once = setting("ONCE").is_some_and(|once| once != "0");

    // Before any thread and any child: both inherit which signals are blocked.
    signals::block()?;
    let directory = tempfile::Builder::new().prefix("idempotency-redis-demo-").tempdir()?;
    let told = Arc::new(AtomicBool::new(false));
    {
        let (path, told) = (directory.path().to_owned(), Arc::clone(&told));
        // The children end with this process.
        signals::on_stop(move || {
            let _ = std::fs::remove_dir_all(path);
            if told.load(Ordering::Relaxed) { 0 } else { 130 }
        })?;
    }
    let service = Service::start()?;
    let [redis_port, a, a_admin, b, b_admin] = processes::free_ports()?;
    let mut redis = processes::redis(&redis_binary, directory.path(), redis_port);
    redis.start(|| redis_answers(redis_port))?;
    let start = |port, admin| -> Fallible<Envoy> {
        let ports = [port, admin, service.port()];
        let redis = [(6379, redis_port)];
        let mut process =
            processes::envoy(&envoy_binary, directory.path(), "envoy/redis.yaml", ports, &redis)?;
        process.start(|| processes::envoy_is_ready(admin))?;
        Ok(Envoy { process, client: Client::new(port), port, admin })
    };
    let envoys = [start(a, a_admin)?, start(b, b_admin)?];

    let mut story = Story {
        envoys,
        redis,
        redis_port,
        service,
        page: Page::new(),
        runs: BTreeMap::new(),
        first: Vec::new(),
    };
    story.introduce();
    let result = story.tell();
    if let Err(error) = &result {
        story.page.fail(&error.to_string());
    }
    let as_told = result.is_ok() && story.page.conclude(&story.counters());
    if !as_told {
        for envoy in &story.envoys {
            eprintln!("\nThe log of the Envoy on {}:\n{}", envoy.port, envoy.process.log_text());
        }
    } else if !once {
        told.store(true, Ordering::Relaxed);
        story.invite();
        while story.redis.is_running() && story.envoys.iter_mut().all(|envoy| envoy.process.is_running()) {
            std::thread::sleep(Duration::from_millis(500));
        }
        return Err("Redis or an Envoy stopped by itself".into());
    }
    Ok(as_told)
}

fn redis_answers(port: u16) -> bool {
    processes::ask_redis(port, "KEYS none").is_ok()
}

struct Envoy {
    process: Process,
    client: Client,
    port: u16,
    admin: u16,
}

/// Which Envoy.
#[derive(Clone, Copy)]
enum Via {
    A,
    B,
}

/// What an answer must be.
#[derive(Clone, Copy)]
enum Expected {
    /// The service's own.
    Executed,
    /// The bytes of the last executed one.
    Replayed,
    /// The filter's refusal.
    Refused(u16, &'static str),
}

struct Story {
    envoys: [Envoy; 2],
    redis: Process,
    redis_port: u16,
    service: Service,
    page: Page,
    /// How often each key has run.
    runs: BTreeMap<&'static str, u32>,
    /// The body of the last executed answer.
    first: Vec<u8>,
}

impl Story {
    fn envoy(&mut self, via: Via) -> &mut Envoy {
        let [a, b] = &mut self.envoys;
        match via {
            Via::A => a,
            Via::B => b,
        }
    }

    fn introduce(&self) {
        let [a, b] = &self.envoys;
        self.page.say(&format!("Envoy A           http://127.0.0.1:{}", a.port));
        self.page.say(&format!("Envoy B           http://127.0.0.1:{}", b.port));
        self.page.say(&format!(
            "Redis             127.0.0.1:{}  (of its own, with appendfsync always)",
            self.redis_port
        ));
        self.page.say(&format!("payments service  http://127.0.0.1:{}", self.service.port()));
        let lease = LOCK_TTL.as_secs();
        self.page.say(&format!(
            "configuration     copies of envoy/redis.yaml with these ports, a socket for each, and lock_ttl {lease} s, not 60"
        ));
    }

    fn invite(&self) {
        self.page.say("\nEverything stays up. Try it yourself; the host is the same, as it is part of the fingerprint:\n");
        for envoy in &self.envoys {
            let (url, more) =
                (format!("http://127.0.0.1:{}/payments", envoy.port), "-H 'x-account-id: me' -d '{}'");
            self.page.say(&format!("  curl -i {url} -H 'Host: {HOST}' -H 'Idempotency-Key: mine' {more}"));
        }
        self.page
            .say(&format!("  redis-cli -p {} KEYS 'idem:*'\n\nCtrl-C stops everything.", self.redis_port));
    }

    /// What the filters of both Envoys counted.
    fn counters(&self) -> Vec<(String, u64)> {
        let mut sums = BTreeMap::new();
        for envoy in &self.envoys {
            let path = "/stats?filter=^wasmcustom\\.idempotency\\.&usedonly";
            let Ok(answer) = Client::new(envoy.admin).get(path) else { continue };
            for line in String::from_utf8_lossy(&answer.message.body).lines() {
                let Some((name, value)) = line.split_once(": ") else { continue };
                let name = name.trim_start_matches("wasmcustom.idempotency.").to_owned();
                *sums.entry(name).or_default() += value.trim().parse::<u64>().unwrap_or(0);
            }
        }
        sums.into_iter().filter(|(_, sum)| *sum > 0).collect()
    }

    fn tell(&mut self) -> Fallible<()> {
        let order = Call::new("/payments", "order-1", ACCOUNT, r#"{"amount":1200}"#);
        self.page.chapter("The first call reaches the service");
        self.play(Via::A, &order, Expected::Executed, 1)?;
        let first = self.first.clone();
        self.page.chapter("Its retry through the other Envoy gets the same answer");
        self.play(Via::B, &order, Expected::Replayed, 1)?;
        self.page.chapter("The same key with another body is refused there, too");
        let other = Call { body: r#"{"amount":9900}"#, ..order.clone() };
        self.play(Via::B, &other, Expected::Refused(422, "mismatch"), 1)?;
        self.duplicates()?;
        self.killed_envoy()?;

        self.page.chapter("Redis is stopped: nothing is forwarded that could not be protected");
        self.redis.kill();
        let later = Call::new("/payments", "order-4", ACCOUNT, r#"{"amount":400}"#);
        self.play(Via::A, &later, Expected::Refused(503, "store-unavailable"), 0)?;
        self.play(Via::B, &later, Expected::Refused(503, "store-unavailable"), 0)?;
        self.page.chapter(
            "Redis is started again: what was refused runs, and what it had acknowledged is still there",
        );
        let port = self.redis_port;
        self.redis.start(|| redis_answers(port))?;
        self.play_after(Via::B, &later, (503, "store-unavailable"), 1)?;
        self.play(Via::A, &later, Expected::Replayed, 1)?;
        self.first = first;
        self.play(Via::A, &order, Expected::Replayed, 1)
    }

    /// The service keeps its answer back until the first duplicate was refused, so they do meet.
    fn duplicates(&mut self) -> Fallible<()> {
        self.page.chapter(&format!("{DUPLICATES} duplicates at once, half through each Envoy: one runs"));
        let order = Call::new("/payments", "order-2", ACCOUNT, r#"{"amount":200}"#);
        self.page.request(&order, DUPLICATES);
        self.service.hold();
        let start = Arc::new(Barrier::new(DUPLICATES));
        let (sender, receiver) = mpsc::channel();
        let [a, b] = &self.envoys;
        for client in [a.client, b.client].into_iter().cycle().take(DUPLICATES) {
            let (start, sender, order) = (Arc::clone(&start), sender.clone(), order.clone());
            std::thread::spawn(move || {
                start.wait();
                // The receiver is gone only where the story has failed already.
                let _ = sender.send(client.call(&order));
            });
        }
        let (mut executed, mut refused, mut replayed, mut others) = (vec![], vec![], vec![], 0);
        for _ in 0..DUPLICATES {
            let answer = receiver.recv_timeout(Duration::from_secs(30))??;
            if answer.status == 409 {
                self.service.let_go();
            }
            match (answer.status, answer.replayed(), answer.refusal()) {
                (201, false, None) => executed.push(answer),
                (201, true, None) => replayed.push(answer),
                (409, false, Some("in-flight")) => refused.push(answer),
                _ => others += 1,
            }
        }
        for group in [&executed, &refused, &replayed] {
            if let Some(answer) = group.first() {
                self.page.answers(&format!("{:>2} × ", group.len()), answer);
            }
        }
        let mut differences = Vec::new();
        if executed.len() != 1 || refused.is_empty() || others > 0 {
            differences
                .push("one should be executed, and the others refused as in-flight or replayed".to_owned());
        }
        self.first = executed.pop().map(|answer| answer.message.body).unwrap_or_default();
        if replayed.iter().any(|answer| answer.message.body != self.first) {
            differences.push("a replay has other bytes than the answer".to_owned());
        }
        self.count(&order, 1, differences);
        Ok(())
    }

    fn killed_envoy(&mut self) -> Fallible<()> {
        self.page.chapter(
            "Envoy A is killed while its request runs: Envoy B waits for the lease, then runs attempt 2",
        );
        let slow = Call::new("/payments/slow?ms=1500", "order-3", ACCOUNT, r#"{"amount":300}"#);
        let before = processes::ask_redis(self.redis_port, "KEYS idem:*")?;
        self.request(Via::A, &slow);
        let connection = self.envoy(Via::A).client.send(&slow)?;
        self.service.wait_for_run(ACCOUNT, "order-3")?;
        self.envoy(Via::A).process.kill();
        drop(connection);
        self.service.wait_for_hang_ups(1)?;
        let killed = Instant::now();
        self.page.event("(SIGKILL for Envoy A; the service had charged, nobody heard its answer)");
        self.count(&slow, 1, Vec::new());
        let mut records = processes::ask_redis(self.redis_port, "KEYS idem:*")?;
        records.retain(|record| !before.contains(record));
        let record = String::from_utf8(records.pop().ok_or("Redis has no record of the claim")?)?;
        self.show_record(&record, "in_flight", "1")?;

        self.play_after(Via::B, &slow, (409, "in-flight"), 2)?;
        let runs = Client::new(self.service.port()).get("/runs")?;
        let runs: serde_json::Value = serde_json::from_slice(&runs.message.body)?;
        let mut runs = runs.as_array().into_iter().flatten();
        let run = runs.find(|run| run.get("key").is_some_and(|key| key == "order-3"));
        let attempt = run.and_then(|run| run.get("x-idempotency-attempt")?.as_str()).unwrap_or("none");
        let mut differences = Vec::new();
        if attempt != "2" || killed.elapsed() > LOCK_TTL * 3 {
            differences.push("it should be attempt 2, soon after the lease".to_owned());
        }
        self.page.verdict(&format!("the service saw x-idempotency-attempt: {attempt}"), &differences);
        self.play(Via::B, &slow, Expected::Replayed, 2)?;
        self.show_record(&record, "completed", "2")?;

        self.page.say(
            "    (Envoy A is started again, knowing nothing but what is in Redis; it counts from 0 again)",
        );
        let admin = self.envoy(Via::A).admin;
        self.envoy(Via::A).process.start(|| processes::envoy_is_ready(admin))?;
        self.play(Via::A, &slow, Expected::Replayed, 2)
    }

    /// Shows a record as `redis-cli HGETALL` does, and that neither the key nor the caller is in it.
    fn show_record(&mut self, record: &str, state: &str, attempt: &str) -> Fallible<()> {
        self.page.say(&format!("    redis> HGETALL {record}"));
        let fields = processes::ask_redis(self.redis_port, &format!("HGETALL {record}"))?;
        let mut found = BTreeMap::new();
        let mut raw = false;
        for field in fields.chunks_exact(2) {
            let [name, value] = field else { continue };
            let text = String::from_utf8_lossy(value);
            raw |= text.contains("order-") || text.contains(ACCOUNT);
            let shown =
                if name == b"response" { format!("({} bytes)", value.len()) } else { text.into_owned() };
            found.insert(String::from_utf8_lossy(name).into_owned(), shown);
        }
        for (name, value) in &found {
            self.page.say(&format!("             {name:<19} {value}"));
        }
        let is = |name: &str, wanted: &str| found.get(name).is_some_and(|value| value == wanted);
        let mut differences = Vec::new();
        if !is("state", state) || !is("attempt", attempt) || raw {
            differences.push(format!("it should be {state}, attempt {attempt}, with neither key nor caller"));
        }
        self.page.verdict("neither the key nor the caller is in it", &differences);
        Ok(())
    }

    fn request(&self, via: Via, call: &Call) {
        self.page.say(match via {
            Via::A => "    through Envoy A",
            Via::B => "    through Envoy B",
        });
        self.page.request(call, 1);
    }

    /// Sends a call, shows it, and checks its answer and how often its key has run by then.
    fn play(&mut self, via: Via, call: &Call, expected: Expected, runs: u32) -> Fallible<()> {
        self.request(via, call);
        let answer = self.envoy(via).client.call(call)?;
        self.check(call, answer, expected, runs);
        Ok(())
    }

    /// Sends a call until it is not refused in this way any more.
    fn play_after(&mut self, via: Via, call: &Call, refusal: (u16, &str), runs: u32) -> Fallible<()> {
        let start = Instant::now();
        let mut refusals = 0;
        self.request(via, call);
        loop {
            let sent = start.elapsed();
            let answer = self.envoy(via).client.call(call)?;
            if (answer.status, answer.refusal()) != (refusal.0, Some(refusal.1)) || sent > LOCK_TTL * 4 {
                if refusals > 1 {
                    self.page.event(&format!(
                        "({refusals} × in all; the next one after {:.1} s)",
                        sent.as_secs_f32()
                    ));
                }
                self.check(call, answer, Expected::Executed, runs);
                return Ok(());
            }
            if refusals == 0 {
                self.page.answer(&answer);
            }
            refusals += 1;
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    fn check(&mut self, call: &Call, answer: Answer, expected: Expected, runs: u32) {
        self.page.answer(&answer);
        let wanted = match expected {
            Expected::Executed => (201, false, None),
            Expected::Replayed => (201, true, None),
            Expected::Refused(status, refusal) => (status, false, Some(refusal)),
        };
        let mut differences = Vec::new();
        if (answer.status, answer.replayed(), answer.refusal()) != wanted {
            differences.push(format!("status, replayed and refusal should be {wanted:?}"));
        }
        match expected {
            Expected::Executed => self.first = answer.message.body,
            Expected::Replayed if answer.message.body != self.first => {
                differences.push("the body should be the first answer's".to_owned());
            }
            Expected::Replayed | Expected::Refused(..) => {}
        }
        self.count(call, runs, differences);
    }

    /// Shows and checks how often the service ran.
    fn count(&mut self, call: &Call, runs: u32, mut differences: Vec<String>) {
        let key = call.key.unwrap_or("-");
        let (found, total) = (self.service.runs(call.account, key), self.service.total_runs());
        self.runs.insert(key, runs);
        if found != runs || total != self.runs.values().sum::<u32>() {
            differences.push(format!("the service should have run {runs} × for this key, and for no other"));
        }
        self.page.verdict(&format!("service runs: {found} for this key, {total} in all"), &differences);
    }
}
