//! `make run-cluster`: two Envoys on a Redis Cluster of six nodes in front of the demo payments service. A primary is
//! killed, and its replica takes its place. Every answer and every count of executions is checked; one that differs
//! makes the exit status 1.
#![allow(clippy::disallowed_methods, reason = "the demo runs in real time")]
#![allow(clippy::indexing_slicing, reason = "lists of six nodes, two Envoys and thirty payments")]

#[allow(dead_code, reason = "the other demos use the rest")]
#[path = "../demo/client.rs"]
mod client;
#[allow(dead_code, reason = "the other demos use the rest")]
#[path = "../demo/page.rs"]
mod page;
#[allow(dead_code, reason = "the demo on one Redis uses the rest")]
#[path = "../redis_demo/processes.rs"]
mod processes;
#[allow(dead_code, reason = "the other demos use the rest")]
#[path = "../demo/service.rs"]
mod service;
#[path = "../demo/signals.rs"]
mod signals;
#[path = "../demo/wire.rs"]
mod wire;

use std::error::Error;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use client::{Answer, Call, Client, HOST};
use page::Page;
use processes::Process;
use service::Service;

type Fallible<T> = Result<T, Box<dyn Error + Send + Sync>>;

const ACCOUNT: &str = "alice";
const PAYMENTS: u32 = 30;
const PRIMARIES: usize = 3;
const PATIENCE: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("cluster_demo: {error}");
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
    let start_it_with_make = "ENVOY_PATH is not set: start the demo with `make run-cluster`, which knows it";
    let envoy_binary = setting("ENVOY_PATH").ok_or(start_it_with_make)?;
    let redis_binary = setting("REDIS_PATH").unwrap_or_else(|| "redis-server".to_owned());
    let once = setting("ONCE").is_some_and(|once| once != "0");

    // Before any thread and any child: both inherit which signals are blocked.
    signals::block()?;
    let directory = tempfile::Builder::new().prefix("idempotency-cluster-demo-").tempdir()?;
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
    let [a, a_admin, b, b_admin] = processes::free_ports()?;
    let ports: [u16; 12] = processes::free_ports()?;
    let mut nodes = Vec::new();
    for pair in ports.chunks_exact(2) {
        let [port, bus] = <[u16; 2]>::try_from(pair)?;
        let mut process = processes::cluster_node(&redis_binary, directory.path(), [port, bus])?;
        process.start(|| processes::say_to_redis(port, "PING").is_ok())?;
        nodes.push(Node { process, port });
    }
    form_cluster(&nodes)?;
    let usual = [7001, 7002, 7003];
    let known: Vec<(u16, u16)> = usual.into_iter().zip(nodes.iter().map(|node| node.port)).collect();
    let start = |port, admin| -> Fallible<Envoy> {
        let ports = [port, admin, service.port()];
        let configuration = "envoy/redis-cluster.yaml";
        let mut process = processes::envoy(&envoy_binary, directory.path(), configuration, ports, &known)?;
        process.start(|| processes::envoy_is_ready(admin))?;
        Ok(Envoy { process, client: Client::new(port), port, admin })
    };
    let envoys = [start(a, a_admin)?, start(b, b_admin)?];

    let mut story = Story { envoys, nodes, service, page: Page::new(), runs: 0 };
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
        while story.envoys.iter_mut().all(|envoy| envoy.process.is_running()) {
            std::thread::sleep(Duration::from_millis(500));
        }
        return Err("an Envoy stopped by itself".into());
    }
    Ok(as_told)
}

/// Slots and replicas, as `redis-cli --cluster create` deals them out.
fn form_cluster(nodes: &[Node]) -> Fallible<()> {
    let made = Command::new("redis-cli")
        .args(["--cluster", "create"])
        .args(nodes.iter().map(|node| format!("127.0.0.1:{}", node.port)))
        .args(["--cluster-replicas", "1", "--cluster-yes"])
        .output()
        .map_err(|error| format!("redis-cli: {error}"))?;
    if !made.status.success() {
        return Err(format!("no cluster: {}", String::from_utf8_lossy(&made.stdout)).into());
    }
    wait("every replica has its primary", || {
        let in_sync = |node: &Node| {
            let says = |command: &str| processes::say_to_redis(node.port, command).unwrap_or_default();
            let replication = says("INFO replication");
            says("CLUSTER INFO").contains("cluster_state:ok")
                && (replication.contains("master_link_status:up")
                    || replication.contains("connected_slaves:1"))
        };
        nodes.iter().all(in_sync)
    })
}

fn wait(what: &str, mut holds: impl FnMut() -> bool) -> Fallible<()> {
    let end = Instant::now() + PATIENCE;
    while !holds() {
        if Instant::now() > end {
            return Err(format!("not in time: {what}").into());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

struct Node {
    process: Process,
    port: u16,
}

impl Node {
    fn records(&self) -> u32 {
        let size = processes::say_to_redis(self.port, "DBSIZE").unwrap_or_default();
        size.trim_start_matches(':').lines().next().and_then(|size| size.parse().ok()).unwrap_or_default()
    }
}

struct Envoy {
    process: Process,
    client: Client,
    port: u16,
    admin: u16,
}

struct Story {
    envoys: [Envoy; 2],
    nodes: Vec<Node>,
    service: Service,
    page: Page,
    /// How often the service has to have run.
    runs: u32,
}

fn payment(number: u32) -> Call {
    // The story's calls live as long as the story.
    Call::new("/payments", format!("order-{number}").leak(), ACCOUNT, r#"{"amount":100}"#)
}

impl Story {
    fn introduce(&self) {
        let [a, b] = &self.envoys;
        let ports: Vec<String> = self.nodes.iter().map(|node| node.port.to_string()).collect();
        self.page.say(&format!("Envoy A           http://127.0.0.1:{}", a.port));
        self.page.say(&format!("Envoy B           http://127.0.0.1:{}", b.port));
        self.page.say(&format!(
            "Redis Cluster     127.0.0.1: primaries {}, replicas {}",
            ports[..PRIMARIES].join(" "),
            ports[PRIMARIES..].join(" ")
        ));
        self.page.say(&format!("payments service  http://127.0.0.1:{}", self.service.port()));
        self.page.say("configuration     copies of envoy/redis-cluster.yaml with these ports");
    }

    fn invite(&self) {
        self.page.say("\nEverything that was not killed stays up. Try it yourself:\n");
        for envoy in &self.envoys {
            let (url, more) =
                (format!("http://127.0.0.1:{}/payments", envoy.port), "-H 'x-account-id: me' -d '{}'");
            self.page.say(&format!("  curl -i {url} -H 'Host: {HOST}' -H 'Idempotency-Key: mine' {more}"));
        }
        let port = self.nodes[1].port;
        self.page.say(&format!("  redis-cli -p {port} CLUSTER NODES\n\nCtrl-C stops everything."));
    }

    /// What the filters of both Envoys counted.
    fn counters(&self) -> Vec<(String, u64)> {
        let mut sums = std::collections::BTreeMap::new();
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
        self.page.chapter(&format!("{PAYMENTS} payments through Envoy A: their records are on all shards"));
        let calls: Vec<Call> = (1..=PAYMENTS).map(payment).collect();
        let mut firsts = Vec::new();
        for call in &calls {
            firsts.push(self.envoys[0].client.call(call)?);
        }
        self.show("Envoy A", &calls[0], &firsts[0]);
        let all_ran = firsts.iter().all(|answer| answer.status == 201 && !answer.replayed());
        self.runs += PAYMENTS;
        self.count("every payment should be answered with 201", all_ran);
        let records: Vec<u32> = self.nodes[..PRIMARIES].iter().map(Node::records).collect();
        let spread = records.iter().all(|records| *records > 0) && records.iter().sum::<u32>() == PAYMENTS;
        let difference = (!spread).then(|| "every primary should hold some of them".to_owned());
        self.page.verdict(&format!("records on the primaries: {records:?}"), difference.as_slice());

        self.page.chapter("Ten of them again, through Envoy B");
        self.replay(&calls[..10], &firsts[..10])?;

        let replica = self.replica_of_the_first()?;
        wait("the replica has every record", || self.nodes[replica].records() == records[0])?;
        self.page.chapter(
            "A primary is killed: its keys are refused until its replica takes over, all others go on",
        );
        self.nodes[0].process.kill();
        let killed = Instant::now();
        let new: Vec<Call> = (101..=100 + PAYMENTS).map(payment).collect();
        let mut refused = Vec::new();
        let mut shown: Option<Answer> = None;
        for (nth, call) in new.iter().enumerate() {
            let answer = self.envoys[nth % 2].client.call(call)?;
            if answer.status == 201 {
                self.runs += 1;
            } else {
                refused.push((nth, call.clone()));
                shown.get_or_insert(answer);
            }
        }
        if let Some(answer) = &shown {
            self.show("either Envoy", &refused[0].1, answer);
        }
        let only_its_own = !refused.is_empty()
            && refused.len() < new.len()
            && shown.is_some_and(|answer| answer.refusal() == Some("store-unavailable"));
        self.page.event(&format!("({} × 201, {} × 503)", new.len() - refused.len(), refused.len()));
        self.count("some should have run, and the others have been refused", only_its_own);
        for (nth, call) in &refused {
            let client = self.envoys[nth % 2].client;
            wait("a refused payment runs", || client.call(call).is_ok_and(|answer| answer.status == 201))?;
            self.runs += 1;
        }
        self.page.event(&format!(
            "(all of them ran, the last one {:.1} s after the kill)",
            killed.elapsed().as_secs_f32()
        ));
        self.count("every payment should have run once", true);

        self.page.chapter("What the dead primary had acknowledged is on its replica");
        self.replay(&calls[10..], &firsts[10..])
    }

    fn replica_of_the_first(&self) -> Fallible<usize> {
        let of = format!("master_port:{}", self.nodes[0].port);
        let is_replica = |node: &Node| {
            processes::say_to_redis(node.port, "INFO replication").is_ok_and(|text| text.contains(&of))
        };
        self.nodes.iter().position(is_replica).ok_or_else(|| "the first node has no replica".into())
    }

    /// Envoy B gives the answers that Envoy A gave.
    fn replay(&mut self, calls: &[Call], firsts: &[Answer]) -> Fallible<()> {
        let mut same = true;
        for (nth, (call, first)) in calls.iter().zip(firsts).enumerate() {
            let answer = self.envoys[1].client.call(call)?;
            same &= answer.replayed() && answer.message.body == first.message.body;
            if nth == 0 {
                self.show("Envoy B", call, &answer);
            }
        }
        self.page.event(&format!("({} in all)", calls.len()));
        self.count("each should be the replay of the first answer", same);
        Ok(())
    }

    fn show(&self, through: &str, call: &Call, answer: &Answer) {
        self.page.say(&format!("    through {through}"));
        self.page.request(call, 1);
        self.page.answer(answer);
    }

    fn count(&mut self, wanted: &str, holds: bool) {
        let found = self.service.total_runs();
        let mut differences = Vec::new();
        if !holds {
            differences.push(wanted.to_owned());
        }
        if found != self.runs {
            differences.push(format!("the service should have run {} × in all", self.runs));
        }
        self.page.verdict(&format!("service runs: {found} in all"), &differences);
    }
}
