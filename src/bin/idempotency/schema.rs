//! `idempotency schema`: what a plugin configuration may hold, for editors and people.

use crate::exit::{Exit, Failure};
use crate::output::Output;

/// Print the JSON Schema of the plugin configuration.
#[derive(Debug, clap::Args)]
pub struct Args {}

pub fn run(_args: &Args, _output: &Output) -> Result<Exit, Failure> {
    Err(Failure::usage("`schema` is not in this build"))
}
