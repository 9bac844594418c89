//! `idempotency resolve`: says how an execution of unknown outcome ended.

use crate::exit::{Exit, Failure};
use crate::output::Output;

/// Record how an execution of unknown outcome ended.
#[derive(Debug, clap::Args)]
pub struct Args {}

pub fn run(_args: &Args, _output: &Output) -> Result<Exit, Failure> {
    Err(Failure::usage("`resolve` is not in this build"))
}
