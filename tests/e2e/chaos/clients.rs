//! Owns the clients of a storm: what they ask for, how they retry, when they hang up. All they see goes into the ledger.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::history::{Answer, Body, Got, Rule, Try};
use super::ledger::Ledger;
use super::upstream::{EXECUTION_HEADER, mix};
use crate::support::*;

pub const TRY_HEADER: &str = "x-chaos-try";
pub const ENVOY_HEADER: &str = "x-chaos-envoy";

/// A client gives an operation up after so long.
const OPERATION: Duration = Duration::from_secs(12);
/// How long a client waits for one answer: longer than the slowest run, and what a trapped VM leaves hanging.
const PATIENT: Duration = Duration::from_secs(6);
/// How many of its old keys a client asks for again.
const REMEMBERED: usize = 40;

pub struct Crowd {
    pub seed: u64,
    pub ledger: Arc<Ledger>,
    pub envoys: Vec<SocketAddr>,
    pub stop: AtomicBool,
}

/// A request without a body.
const BARE: u8 = 2;
pub const VARIANTS: [u8; 3] = [0, 1, BARE];

/// The body of a key's requests: variants of which only one can be the key's.
pub fn request_body(key: &str, variant: u8) -> Vec<u8> {
    if variant == BARE {
        return vec![];
    }
    format!("variant={variant}&key={key}").into_bytes()
}

/// What one try is to be.
#[derive(Clone, Copy)]
struct Shape {
    envoy: usize,
    variant: u8,
    protocol: Protocol,
    leaves: Leaves,
}

#[derive(Clone, Copy)]
enum Leaves {
    Never,
    BeforeItsBody,
    After(Duration),
}

impl Crowd {
    /// One client, until the storm is over.
    pub async fn client(self: Arc<Self>, number: usize) {
        let mut rng = Rng::new(mix(self.seed, &format!("client {number}")));
        let mut connections = Connections::default();
        let mut old: VecDeque<(String, Rule)> = VecDeque::new();
        for nth in 0.. {
            if self.stop.load(Ordering::Relaxed) {
                return;
            }
            if !old.is_empty() && rng.one_in(6) {
                let (key, rule) = old[rng.below(old.len())].clone();
                let shape = self.shape(&mut rng);
                self.attempt(&key, rule, shape, Some(&mut connections)).await;
                continue;
            }
            let key = format!("chaos-{:x}-{number}-{nth}", self.seed);
            let rule = rng.pick(&[
                Rule::Takeover,
                Rule::Takeover,
                Rule::Wait,
                Rule::Retain,
                Rule::Atomic,
                Rule::Detached,
            ]);
            self.ledger.register(&key, rule);
            self.operation(&key, rule, &mut rng, &mut connections).await;
            old.push_back((key, rule));
            if old.len() > REMEMBERED {
                old.pop_front();
            }
        }
    }

    async fn operation(
        self: &Arc<Self>,
        key: &str,
        rule: Rule,
        rng: &mut Rng,
        connections: &mut Connections,
    ) {
        let mut beside = Vec::new();
        if rng.one_in(3) {
            for _ in 0..=rng.below(3) {
                beside.push(self.spawn(key, rule, 0, Rng::new(rng.next())));
            }
        }
        if rng.one_in(10) {
            beside.push(self.spawn(key, rule, 1, Rng::new(rng.next())));
        }
        if rng.one_in(5) {
            let leaves = match rng.below(3) {
                0 => Leaves::BeforeItsBody,
                1 => Leaves::After(Duration::ZERO),
                _ => Leaves::After(Duration::from_millis(rng.below(150) as u64)),
            };
            let shape = Shape { leaves, ..self.shape(rng) };
            self.attempt(key, rule, shape, None).await;
        }
        self.until_final(key, rule, 0, rng, connections).await;
        for variant in [0, 1] {
            if rng.one_in(3) {
                let shape = Shape { variant, ..self.shape(rng) };
                self.attempt(key, rule, shape, Some(connections)).await;
            }
        }
        for task in beside {
            task.await.expect("a client");
        }
    }

    fn shape(&self, rng: &mut Rng) -> Shape {
        Shape {
            envoy: rng.below(self.envoys.len()),
            variant: 0,
            protocol: rng.pick(&Protocol::BOTH),
            leaves: Leaves::Never,
        }
    }

    /// Another client with the same key, which retries like the first: past the lease of a slow run, too.
    fn spawn(
        self: &Arc<Self>,
        key: &str,
        rule: Rule,
        variant: u8,
        mut rng: Rng,
    ) -> tokio::task::JoinHandle<()> {
        let (crowd, key) = (Arc::clone(self), key.to_owned());
        tokio::spawn(async move {
            let mut connections = Connections::default();
            crowd.until_final(&key, rule, variant, &mut rng, &mut connections).await;
        })
    }

    async fn until_final(
        &self,
        key: &str,
        rule: Rule,
        variant: u8,
        rng: &mut Rng,
        connections: &mut Connections,
    ) {
        let begun = Instant::now();
        loop {
            let shape = Shape { variant, ..self.shape(rng) };
            let got = self.attempt(key, rule, shape, Some(&mut *connections)).await;
            if is_final(&got) || begun.elapsed() > OPERATION || self.stop.load(Ordering::Relaxed) {
                return;
            }
            // The client's own back-off.
            tokio::time::sleep(Duration::from_millis(20 + rng.below(200) as u64)).await;
        }
    }

    /// One request without a body that traps the VM which claims for it.
    pub async fn trap(&self, key: &str, envoy: usize) {
        // The fault is looked for once the claim is made, and that is at the head if there is no body.
        let shape = Shape { envoy, variant: BARE, protocol: Protocol::Http1, leaves: Leaves::Never };
        self.ledger.register(key, Rule::Takeover);
        let limit = Duration::from_secs(1);
        self.recorded(key, shape, async |id| {
            let request = self.request(key, Rule::Takeover, shape, id).header("x-test-fault", "trap");
            let answer =
                async { Client::try_connect(self.envoys[envoy], shape.protocol).await?.send(&request).await };
            tokio::time::timeout(limit, answer).await.map_or(Got::HungUp, got)
        })
        .await;
    }

    /// After the storm: the key's answer, or what it gave when the time was over.
    pub async fn probe(&self, key: &str, rule: Rule, variant: u8, envoy: usize) -> Got {
        let shape = Shape { envoy, variant, protocol: Protocol::BOTH[key.len() % 2], leaves: Leaves::Never };
        self.attempt(key, rule, shape, None).await
    }

    async fn attempt(
        &self,
        key: &str,
        rule: Rule,
        shape: Shape,
        connections: Option<&mut Connections>,
    ) -> Got {
        self.recorded(key, shape, async |id| {
            let request = self.request(key, rule, shape, id);
            let addr = self.envoys[shape.envoy];
            match (shape.leaves, connections) {
                (Leaves::Never, Some(connections)) => {
                    let kept = connections.0.remove(&(shape.envoy, shape.protocol == Protocol::Http2));
                    let client = match kept {
                        Some(client) => Ok(client),
                        None => Client::try_connect(addr, shape.protocol).await,
                    };
                    let Ok(mut client) = client else { return Got::Lost };
                    let answer = client.send_within(&request, PATIENT).await;
                    if answer.is_ok() {
                        connections.0.insert((shape.envoy, shape.protocol == Protocol::Http2), client);
                    }
                    got(answer)
                }
                (Leaves::Never, None) => match Client::try_connect(addr, shape.protocol).await {
                    Ok(mut client) => got(client.send_within(&request, PATIENT).await),
                    Err(_) => Got::Lost,
                },
                (Leaves::BeforeItsBody, _) => leave_before_the_body(addr, shape.protocol, &request).await,
                (Leaves::After(moment), _) => {
                    let Ok(client) = Client::try_connect(addr, shape.protocol).await else {
                        return Got::Lost;
                    };
                    let Ok(pending) = client.start(&request).await else { return Got::Lost };
                    tokio::time::sleep(moment).await;
                    pending.abort();
                    Got::HungUp
                }
            }
        })
        .await
    }

    fn request(&self, key: &str, rule: Rule, shape: Shape, id: u64) -> Request {
        Request::post(&format!("/{}", rule.name()))
            .key(key)
            .header(TRY_HEADER, id.to_string())
            .header(ENVOY_HEADER, shape.envoy.to_string())
            .body(request_body(key, shape.variant))
    }

    async fn recorded(&self, key: &str, shape: Shape, send: impl AsyncFnOnce(u64) -> Got) -> Got {
        let (id, sent) = (self.ledger.next_try(), self.ledger.clock.now());
        let got = send(id).await;
        let ended = self.ledger.clock.now();
        let Shape { envoy, variant, .. } = shape;
        self.ledger.tried(key, Try { id, envoy, variant, sent, ended, got: got.clone() });
        got
    }
}

/// What a client keeps open, by Envoy and whether it is HTTP/2.
#[derive(Default)]
struct Connections(BTreeMap<(usize, bool), Client>);

async fn leave_before_the_body(addr: SocketAddr, protocol: Protocol, request: &Request) -> Got {
    match protocol {
        Protocol::Http1 => {
            let Ok(mut client) = H1::connect(addr).await else { return Got::Lost };
            let bytes = client::h1::encode(request);
            let _ = client.write_raw(&bytes[..bytes.len() - 5]).await;
            client.abort();
        }
        Protocol::Http2 => {
            let Ok(client) = H2::connect(addr).await else { return Got::Lost };
            let Ok(mut stream) = client.open(request, true).await else { return Got::Lost };
            let _ = stream.send_data(&request.body[..5], false).await;
            stream.reset();
        }
    }
    Got::HungUp
}

/// Whether a client stops retrying.
pub fn is_final(got: &Got) -> bool {
    let Got::Whole(answer) = got else { return false };
    !answer.is("in-flight") && !matches!(answer.status, 429 | 503)
}

fn got(answer: Result<Response, ClientError>) -> Got {
    let body = |response: &Response| Body::read(&response.body, response.header(EXECUTION_HEADER));
    match answer {
        Ok(response) => {
            let problem = response.problem_type().map(|kind| {
                let reason = response.json()["reason"].as_str().map(str::to_owned);
                (kind, reason)
            });
            Got::Whole(Answer {
                status: response.status,
                replayed: response.header_lines("idempotent-replayed") == [b"true"],
                problem,
                body: body(&response),
            })
        }
        Err(ClientError::Truncated(response, _)) => Got::Cut(body(&response)),
        Err(ClientError::Closed(_)) => Got::Lost,
        // A client that has waited enough leaves.
        Err(ClientError::TimedOut) => Got::HungUp,
        Err(ClientError::Malformed(what)) => Got::Cut(Body::Strange(what)),
    }
}
