//! What must hold for every input, whoever wrote it: each function takes bytes and panics where a property is broken.
//!
//! The fuzz targets look for inputs that break one, and `tests/corpus.rs` runs the inputs found so far in the ordinary
//! tests. Where the product is compared with a reference, the reference is a library, or written for its simplicity
//! without a look at the product.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, missing_docs)]

mod config;
mod headers;
mod key;
mod outcome;
mod redis;
mod request;
mod stored;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use idempotency::config::Config;

pub use config::{config, config_struct, path_match};
pub use headers::{header_map, response_head};
pub use key::{key_header, problem_detail};
pub use outcome::outcome;
pub use redis::{redis_reply, resp};
pub use request::{fingerprint, query, scope};
pub use stored::{near_cache, outbox_spill, record_codec};

/// A property, by the name of its target and its corpus.
pub type Target = (&'static str, fn(&[u8]));

/// Every one.
pub const TARGETS: [Target; 16] = [
    ("config", config),
    ("config_struct", config_struct),
    ("fingerprint", fingerprint),
    ("header_map", header_map),
    ("key_header", key_header),
    ("near_cache", near_cache),
    ("outbox_spill", outbox_spill),
    ("outcome", outcome),
    ("path_match", path_match),
    ("problem_detail", problem_detail),
    ("query", query),
    ("record_codec", record_codec),
    ("redis_reply", redis_reply),
    ("resp", resp),
    ("response_head", response_head),
    ("scope", scope),
];

/// Up to `N` lines; the last one has the rest, line feeds and all.
fn lines<const N: usize>(data: &[u8]) -> [&[u8]; N] {
    let mut lines = data.splitn(N, |byte| *byte == b'\n');
    std::array::from_fn(|_| lines.next().unwrap_or_default())
}

/// Both sides of the first `separator`.
fn split_once<'a>(data: &'a [u8], separator: &[u8]) -> Option<(&'a [u8], &'a [u8])> {
    let at = data.windows(separator.len()).position(|window| window == separator)?;
    Some((&data[..at], &data[at + separator.len()..]))
}

/// A configuration whose only rule has these settings beside its name. Each is loaded once.
fn plugin(rule: &'static str) -> Rc<Config> {
    thread_local! { static LOADED: RefCell<BTreeMap<&'static str, Rc<Config>>> = RefCell::default(); }
    LOADED.with_borrow_mut(|loaded| {
        let load = || {
            let json = format!(r#"{{"store": {{"shared_data": {{}}}}, "rules": [{{"name": "r", {rule}}}]}}"#);
            let config = idempotency::config::load(json.as_bytes());
            Rc::new(config.unwrap_or_else(|errors| panic!("{errors}")))
        };
        Rc::clone(loaded.entry(rule).or_insert_with(load))
    })
}
