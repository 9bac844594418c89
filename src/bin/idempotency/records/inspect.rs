//! `idempotency inspect`: one record, in full.

use serde_json::json;

use super::link::Link;
use super::{link, record, show, target};
use crate::exit::{Exit, Failure};
use crate::output::Output;

/// Show the record of a key.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    idempotency inspect --redis redis://127.0.0.1 --config filter.json --rule payments \\\n      \
        --scope x-account-id=alice --key order-1\n  \
    idempotency inspect --redis redis://127.0.0.1 --redis-key idem:eb19… --show-body")]
pub struct Args {
    /// Show the kept body too. It may hold anything the upstream answers.
    #[arg(long)]
    show_body: bool,
    #[command(flatten)]
    target: target::Args,
    #[command(flatten)]
    link: link::Args,
}

pub fn run(args: &Args, output: &Output) -> Result<Exit, Failure> {
    let target = args.target.locate()?;
    let mut node = Link::open(&args.link)?.into_node_of(&target.redis_key)?;
    let found = record::read_one(&mut node, &target.redis_key)?;
    let Some(found) = found else {
        if output.json {
            output.print_json(&json!({ "redis_key": target.redis_key, "state": "absent" }));
        } else {
            output.print(&format!("{}\n  no record\n", target.redis_key));
        }
        return Ok(Exit::Findings);
    };
    if output.json {
        output.print_json(&show::to_json(&found, args.show_body));
    } else {
        output.print(&show::to_text(&found, args.show_body));
    }
    Ok(Exit::Ok)
}
