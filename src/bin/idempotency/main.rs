//! The `idempotency` command: checks and explains configurations, and looks after the records in Redis.
//!
//! It owns the arguments and the output; what a setting, a key or a record means is the library's, so the command
//! and the filter can't disagree.

mod completions;
mod exit;
mod explain;
mod manifest;
mod output;
mod records;
mod schema;
mod snippet;
mod validate;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::output::{Color, Output};

/// Checks and explains configurations of the envoy-idempotency filter, and looks after its records in Redis.
#[derive(Debug, Parser)]
#[command(version, max_term_width = 100, after_help = exit::HELP)]
struct Cli {
    /// Print JSON instead of text.
    #[arg(long, global = true)]
    json: bool,
    /// When to colour the text; `auto` respects NO_COLOR and a pipe.
    #[arg(long, global = true, value_enum, default_value_t = Color::Auto, value_name = "WHEN")]
    color: Color,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Validate(validate::Args),
    EnvoySnippet(snippet::Args),
    Schema(schema::Args),
    Explain(explain::Args),
    Inspect(records::inspect::Args),
    List(records::list::Args),
    Forget(records::forget::Args),
    Resolve(records::resolve::Args),
    Completions(completions::Args),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let output = Output::new(cli.json, cli.color);
    let ended = match &cli.command {
        Command::Validate(args) => validate::run(args, &output),
        Command::EnvoySnippet(args) => snippet::run(args, &output),
        Command::Schema(args) => schema::run(args, &output),
        Command::Explain(args) => explain::run(args, &output),
        Command::Inspect(args) => records::inspect::run(args, &output),
        Command::List(args) => records::list::run(args, &output),
        Command::Forget(args) => records::forget::run(args, &output),
        Command::Resolve(args) => records::resolve::run(args, &output),
        Command::Completions(args) => completions::run(args, &output),
    };
    ended.unwrap_or_else(|failure| output.failure(&failure)).into()
}
