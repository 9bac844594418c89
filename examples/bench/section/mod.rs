//! The sections of `make bench`.

mod callgrind;
mod filter;
mod growth;
mod memory;
mod peers;
mod redis;

use serde_json::Value;

use crate::{Bench, Fallible};

type Measure = fn(&Bench) -> Fallible<Value>;

/// All, in the order in which they run.
pub const ALL: &[(&str, Measure)] = &[
    ("filter", filter::measure),
    ("redis", redis::measure),
    ("peers", peers::measure),
    ("growth", growth::measure),
    ("memory", memory::measure),
    ("callgrind", callgrind::measure),
];
