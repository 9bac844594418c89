//! The harness of the end-to-end tests: a real Envoy, recording upstreams, exact clients.

// Each test file uses its own part of the harness.
#![allow(dead_code, unused_imports)]

pub mod client;
pub mod deployment;
pub mod envoy;
pub mod execution;
pub mod gateway;
pub mod merge;
pub mod origin;
pub mod prometheus;
pub mod raw_origin;
pub mod redis;
pub mod redis_cluster;
pub mod relay;
pub mod rng;
pub mod shipped;
pub mod wait;

use std::hash::{BuildHasher, Hasher, RandomState};

use serde_json::{Value, json};

pub use client::{
    Client, ClientError, H1, H2, H2Stream, Pending, Protocol, Request, Response, burst, send_once,
};
pub use deployment::{Deployment, Pace, Store, ask, ask_until_decided, linked, on_redis};
pub use envoy::{Envoy, FilterSpec, ListenerSpec, Wasm};
pub use execution::{
    default_routes, execution_cluster, execution_listener, with_changed_execution, with_execution,
};
pub use gateway::{TOKEN, Upstash, Webdis, with_gateway};
pub use merge::deep_merge;
pub use origin::{Barrier, Behaviour, Origin, RefusedPort, Reply, Seen};
pub use raw_origin::{End, RawOrigin, RawReply};
pub use redis::{Redis, with_changed_link, with_link};
pub use redis_cluster::{RedisCluster, linked_to_cluster};
pub use relay::Relay;
pub use rng::Rng;
pub use shipped::{Shipped, documents_of, move_cluster, replace_text};
pub use wait::{PATIENCE, all_at_once, poll_until};

/// A key no other test uses, in the form of a UUID.
pub fn unique_key() -> String {
    let random = || RandomState::new().build_hasher().finish();
    let (high, low) = (random(), random());
    format!(
        "{:08x}-{:04x}-4{:03x}-a{:03x}-{:012x}",
        high >> 32,
        (high >> 16) & 0xffff,
        high & 0xfff,
        low >> 52,
        low & 0xffff_ffff_ffff
    )
}

/// The smallest useful plugin configuration: the embedded store and one rule for every POST and PATCH.
pub fn default_plugin() -> Value {
    json!({
        "store": {"shared_data": {}},
        "rules": [{
            "name": "payments",
            "match": {"methods": ["POST", "PATCH"], "path": {"prefix": "/"}},
            "scope": [{"header": "x-account-id"}]
        }]
    })
}

/// The default configuration with `rule_patch` merged into its rule.
pub fn plugin_with(rule_patch: Value) -> Value {
    let mut plugin = default_plugin();
    deep_merge(&mut plugin["rules"][0], &rule_patch);
    plugin
}
