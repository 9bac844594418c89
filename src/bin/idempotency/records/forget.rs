//! `idempotency forget`: removes a record.

use crate::exit::{Exit, Failure};
use crate::output::Output;

/// Remove a record, so that its key may run again.
#[derive(Debug, clap::Args)]
pub struct Args {}

pub fn run(_args: &Args, _output: &Output) -> Result<Exit, Failure> {
    Err(Failure::usage("`forget` is not in this build"))
}
