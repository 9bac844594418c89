//! `idempotency validate`: is a configuration, and what stands around it, right?

use crate::exit::{Exit, Failure};
use crate::output::Output;

/// Check a plugin configuration, or a whole Envoy, Istio or Envoy Gateway file.
#[derive(Debug, clap::Args)]
pub struct Args {}

pub fn run(_args: &Args, _output: &Output) -> Result<Exit, Failure> {
    Err(Failure::usage("`validate` is not in this build"))
}
