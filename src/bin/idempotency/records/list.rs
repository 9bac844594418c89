//! `idempotency list`: the records of a store.

use crate::exit::{Exit, Failure};
use crate::output::Output;

/// List records.
#[derive(Debug, clap::Args)]
pub struct Args {}

pub fn run(_args: &Args, _output: &Output) -> Result<Exit, Failure> {
    Err(Failure::usage("`list` is not in this build"))
}
