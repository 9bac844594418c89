//! Owns a deployment with each kind of store: one Envoy with the embedded store, or two Envoys on one Redis.

use std::net::SocketAddr;

use serde_json::{Value, json};

use super::envoy::{Builder, Envoy};
use super::{Origin, PATIENCE, Protocol, Redis, Request, Response, poll_until, send_once, with_link};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Store {
    SharedData,
    Redis,
}

impl Store {
    pub const EACH: [Store; 2] = [Store::SharedData, Store::Redis];
}

/// How long the store in Redis may take in all, and the link's `redis_proxy` for one command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    timeout: &'static str,
    op_timeout: &'static str,
}

impl Pace {
    /// So long that a busy machine is no store failure; a lease is 32 s or more.
    pub const PATIENT: Pace = Pace { timeout: "8s", op_timeout: "3s" };
    /// For leases of 4.8 s or more.
    pub const STEADY: Pace = Pace { timeout: "1200ms", op_timeout: "0.5s" };
    /// For leases of 1.6 s or more.
    pub const BRISK: Pace = Pace { timeout: "400ms", op_timeout: "0.15s" };
    /// A quarter, as in envoy/redis-cluster.yaml. For leases of 3.2 s or more.
    pub const CLUSTER: Pace = Pace { timeout: "800ms", op_timeout: "0.2s" };

    pub const fn op_timeout(self) -> &'static str {
        self.op_timeout
    }
}

/// The plugin on a Redis reached through the link; no near cache, so that every answer is Redis's.
pub fn on_redis(mut plugin: Value, pace: Pace) -> Value {
    plugin["store"] =
        json!({"redis": {"cluster": "redis-link", "timeout": pace.timeout, "near_cache": false}});
    plugin
}

/// The link to a Redis for a plugin of this pace.
pub fn linked(builder: Builder, redis: SocketAddr, pace: Pace) -> Builder {
    with_link(builder, redis, &json!({"settings": {"op_timeout": pace.op_timeout}}))
}

pub struct Deployment {
    pub redis: Option<Redis>,
    pub origin: Origin,
    pub envoys: Vec<Envoy>,
}

impl Deployment {
    /// `change` is applied to each Envoy's options.
    pub async fn start(store: Store, plugin: Value, change: impl Fn(Builder) -> Builder) -> Deployment {
        let origin = Origin::start().await;
        let builder = |plugin| change(Envoy::builder().workers(2).plugin(plugin).origin_addr(origin.addr()));
        match store {
            Store::SharedData => {
                let envoy = builder(plugin).start().await;
                Deployment { redis: None, origin, envoys: vec![envoy] }
            }
            Store::Redis => {
                let redis = Redis::start().await;
                let start =
                    || linked(builder(on_redis(plugin.clone(), Pace::PATIENT)), redis.addr(), Pace::PATIENT);
                let (one, two) = tokio::join!(start().start(), start().start());
                Deployment { redis: Some(redis), origin, envoys: vec![one, two] }
            }
        }
    }

    pub fn first(&self) -> &Envoy {
        &self.envoys[0]
    }

    /// The other Envoy, where there are two.
    pub fn other(&self) -> &Envoy {
        self.envoys.last().expect("an Envoy")
    }

    /// All Envoys together.
    pub async fn metric(&self, name: &str) -> u64 {
        let mut sum = 0;
        for envoy in &self.envoys {
            sum += envoy.metric(name).await;
        }
        sum
    }

    pub async fn wait_metric(&self, name: &str, at_least: u64) {
        poll_until(PATIENCE, &format!("{name} >= {at_least}"), async || {
            (self.metric(name).await >= at_least).then_some(())
        })
        .await;
    }

    /// Nothing is in flight any more, nothing waits to be written, and nothing happened that can't.
    pub async fn settled(&self) {
        poll_until(PATIENCE, "gauges back at zero", async || {
            (self.metric("in_flight").await + self.metric("outbox").await == 0).then_some(())
        })
        .await;
        for name in ["unexpected_events", "host_errors"] {
            assert_eq!(self.metric(name).await, 0, "{name}");
        }
    }
}

/// One request, answered.
pub async fn ask(envoy: &Envoy, proto: Protocol, request: &Request) -> Response {
    let answer = send_once(envoy.addr(), proto, request).await;
    answer.unwrap_or_else(|e| panic!("{proto:?} {} {}: {e:?}", request.method, request.path))
}

/// The first answer that is not "in flight", and how many of those came before it.
pub async fn ask_until_decided(envoy: &Envoy, proto: Protocol, request: &Request) -> (Response, usize) {
    let mut refused = 0;
    let decided = poll_until(PATIENCE, "an answer but in-flight", async || {
        let answer = ask(envoy, proto, request).await;
        if answer.kind() != (409, Some("in-flight".to_owned())) {
            return Some(answer);
        }
        refused += 1;
        None
    })
    .await;
    (decided, refused)
}
