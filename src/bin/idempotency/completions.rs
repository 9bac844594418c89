//! `idempotency completions`: what a shell needs to complete the command.

use clap::CommandFactory;
use clap_complete::Shell;

use crate::Cli;
use crate::exit::{Exit, Failure};
use crate::output::Output;

/// Print the completions for a shell.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: idempotency completions bash > /etc/bash_completion.d/idempotency")]
pub struct Args {
    /// Which shell.
    shell: Shell,
}

pub fn run(args: &Args, output: &Output) -> Result<Exit, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "idempotency", &mut script);
    output.print(&String::from_utf8_lossy(&script));
    Ok(Exit::Ok)
}
