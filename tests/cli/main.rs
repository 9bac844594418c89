//! The `idempotency` command's side of the configuration: schema, reference, `validate`, `explain`, `envoy-snippet`.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::disallowed_methods,
    missing_docs
)]

#[allow(dead_code, reason = "tests/cli_records uses the rest")]
#[path = "../cli_records/command.rs"]
mod command;
mod explain;
mod schema;
mod snippet;
#[path = "../e2e/support/mod.rs"]
mod support;
mod usage;
mod validate;

use std::path::{Path, PathBuf};

/// A file of the project.
pub fn project(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

pub fn read(path: &str) -> String {
    std::fs::read_to_string(project(path)).unwrap()
}

/// A file of a test's own.
pub struct Scratch(tempfile::TempDir);

impl Default for Scratch {
    fn default() -> Self {
        Self(tempfile::tempdir().unwrap())
    }
}

impl Scratch {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn put(&self, name: &str, text: &str) -> String {
        let path = self.0.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    }
}
