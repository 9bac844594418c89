//! `idempotency envoy-snippet`: the filter, the link and the clusters for a plugin configuration.

use crate::exit::{Exit, Failure};
use crate::output::Output;

/// Print the Envoy configuration that a plugin configuration needs.
#[derive(Debug, clap::Args)]
pub struct Args {}

pub fn run(_args: &Args, _output: &Output) -> Result<Exit, Failure> {
    Err(Failure::usage("`envoy-snippet` is not in this build"))
}
