//! `idempotency forget`: removes a record.

use std::time::Duration;

use serde_json::json;

use super::change::{Change, apply};
use super::confirm::confirm;
use super::link::Link;
use super::record::{self, Found, State};
use super::target::{Settings, Target};
use super::{link, show, target};
use crate::exit::{Exit, Failure};
use crate::output::Output;

/// Remove a record, so that its key may run again.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  \
    idempotency forget --redis redis://127.0.0.1 --redis-key idem:eb19…")]
pub struct Args {
    /// Don't ask.
    #[arg(long)]
    yes: bool,
    /// Only while the record has this owner, such as an earlier `list --json` showed.
    #[arg(long, value_name = "OWNER")]
    owner: Option<String>,
    /// Even while a lease holds: the request may be executing, and a retry then runs beside it.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    target: target::Args,
    #[command(flatten)]
    link: link::Args,
}

pub fn run(args: &Args, output: &Output) -> Result<Exit, Failure> {
    let target = args.target.locate()?;
    let mut node = Link::open(&args.link)?.into_node_of(&target.redis_key)?;
    let found =
        shown(record::read_one(&mut node, &target.redis_key)?, &target, args.owner.as_deref(), output)?;
    if let State::InFlight { remaining } = found.state
        && !args.force
    {
        return Err(Failure::refused(format!(
            "its lease holds for {} more: the request may be executing. --force removes it all the same",
            show::span(remaining)
        )));
    }
    let near = near_cache(&found, target.settings.as_ref());
    if let Some(near) = &near {
        eprintln!("warning: {near}");
    }
    confirm("Remove this record, so that a retry with its key runs again?", args.yes)?;
    apply(&mut node, &found, &Change::Forget { force: args.force })?;
    if output.json {
        output.print_json(
            &json!({ "done": "forgotten", "was": show::to_json(&found, false), "warning": near }),
        );
    } else {
        output.print("Removed. The next request with this key runs.\n");
    }
    Ok(Exit::Ok)
}

/// Shows the record that is to be changed, and refuses one that nobody can change safely.
pub fn shown(
    found: Option<Found>,
    target: &Target,
    owner: Option<&str>,
    output: &Output,
) -> Result<Found, Failure> {
    let Some(found) = found else {
        return Err(Failure { exit: Exit::Findings, message: format!("{}: no record", target.redis_key) });
    };
    if owner.is_some_and(|owner| owner != found.owner) {
        return Err(Failure::changed("changed meanwhile: the record has another owner. Nothing was changed"));
    }
    if let State::Unreadable { why } = &found.state {
        return Err(Failure::refused(format!(
            "{}: unreadable: {why}. A newer version may have written it, so this one changes nothing",
            found.redis_key
        )));
    }
    // The question is about what is shown, and standard output is a program's.
    let text = show::to_text(&found, false);
    if output.json {
        anstream::eprint!("{text}");
    } else {
        output.print(&text);
    }
    Ok(found)
}

/// What Envoys may hold of a record that is removed. Only completed ones are ever near.
fn near_cache(found: &Found, settings: Option<&Settings>) -> Option<String> {
    if found.state != State::Completed {
        return None;
    }
    let ttl = match settings {
        Some(settings) => {
            settings.redis.near_cache.as_ref()?.ttl.min(found.expires_in.unwrap_or(Duration::MAX))
        }
        None => {
            return Some(
                "Envoys that have it in their near cache replay it until near_cache.ttl is over".to_owned(),
            );
        }
    };
    Some(format!("Envoys that have it in their near cache replay it for up to {} more", show::span(ttl)))
}
