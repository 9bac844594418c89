//! `idempotency inspect`: one record, in full.

use crate::exit::{Exit, Failure};
use crate::output::Output;

/// Show the record of a key.
#[derive(Debug, clap::Args)]
pub struct Args {}

pub fn run(_args: &Args, _output: &Output) -> Result<Exit, Failure> {
    Err(Failure::usage("`inspect` is not in this build"))
}
