//! `idempotency explain`: what the filter would do with a request.

use crate::exit::{Exit, Failure};
use crate::output::Output;

/// Explain what the filter does with a request.
#[derive(Debug, clap::Args)]
pub struct Args {}

pub fn run(_args: &Args, _output: &Output) -> Result<Exit, Failure> {
    Err(Failure::usage("`explain` is not in this build"))
}
