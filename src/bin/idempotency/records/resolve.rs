//! `idempotency resolve`: says how an execution of unknown outcome ended.

use std::io::Read as _;
use std::path::PathBuf;

use idempotency::config::{Mode, Rule, StatusMeaning};
use idempotency::headers::HeaderBlock;
use idempotency::record::codec::ResponseEncoder;
use idempotency::reply::fit_a_reply;
use idempotency::reply::replay::kept_headers;
use serde_json::json;

use super::change::{Change, apply};
use super::confirm::confirm;
use super::forget::shown;
use super::link::Link;
use super::record::{self, State};
use super::target::Target;
use super::{link, show, target};
use crate::exit::{Exit, Failure};
use crate::output::Output;

/// Record how an execution of unknown outcome ended.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    It was done: retries get this answer, and nothing runs.\n    \
        idempotency resolve --redis redis://127.0.0.1 --config filter.json --rule payments \\\n        \
            --scope x-account-id=alice --key order-1 \\\n        \
            --status 201 --header 'content-type: application/json' --body paid.json\n  \
    It was not done: the next retry runs.\n    \
        idempotency resolve --redis redis://127.0.0.1 --redis-key idem:eb19… --release")]
pub struct Args {
    /// It was done, and this is the status to answer with. Needs --config, for the rule says what is kept.
    #[arg(long, value_name = "STATUS", requires = "config", required_unless_present = "release")]
    status: Option<u16>,
    /// A line of the answer; those that the filter does not keep are left out.
    #[arg(long, value_name = "NAME: VALUE", requires = "status")]
    header: Vec<String>,
    /// The body of the answer; - for standard input.
    #[arg(long, value_name = "FILE", requires = "status")]
    body: Option<PathBuf>,
    /// It was not done, and may run again.
    #[arg(long, conflicts_with_all = ["status", "header", "body"])]
    release: bool,
    /// Don't ask.
    #[arg(long)]
    yes: bool,
    /// Only while the record has this owner, such as an earlier `list --json` showed.
    #[arg(long, value_name = "OWNER")]
    owner: Option<String>,
    #[command(flatten)]
    target: target::Args,
    #[command(flatten)]
    link: link::Args,
}

pub fn run(args: &Args, output: &Output) -> Result<Exit, Failure> {
    let target = args.target.locate()?;
    let answer = if args.release { None } else { Some(Answer::of(args, &target)?) };
    let mut node = Link::open(&args.link)?.into_node_of(&target.redis_key)?;
    let found =
        shown(record::read_one(&mut node, &target.redis_key)?, &target, args.owner.as_deref(), output)?;
    match &found.state {
        State::Failed { .. } | State::Abandoned { .. } => {}
        State::InFlight { remaining } => {
            return Err(Failure::refused(format!(
                "its lease holds for {} more: the request is executing, or its lease has yet to run out",
                show::span(*remaining)
            )));
        }
        State::Completed | State::Unreadable { .. } => {
            return Err(Failure::refused(
                "it is completed: there is nothing to resolve. `forget` removes it",
            ));
        }
    }
    let Some(answer) = answer else {
        confirm("Was it not done, and may a retry run it?", args.yes)?;
        apply(&mut node, &found, &Change::Forget { force: false })?;
        if output.json {
            output.print_json(&json!({ "done": "released", "was": show::to_json(&found, false) }));
        } else {
            output.print("Released. The next request with this key runs.\n");
        }
        return Ok(Exit::Ok);
    };
    for name in &answer.left_out {
        eprintln!("warning: {name}: not kept by the rule, left out");
    }
    let question = format!(
        "Answer retries with status {}, {} header lines and a body of {} bytes?",
        answer.status, answer.lines, answer.body_bytes
    );
    confirm(&question, args.yes)?;
    let change = Change::Complete {
        owner: new_owner()?,
        record_ttl: answer.rule.record_ttl,
        response: &answer.encoded,
    };
    apply(&mut node, &found, &change)?;
    if output.json {
        output.print_json(&json!({
            "done": "resolved",
            "was": show::to_json(&found, false),
            "status": answer.status,
            "body_bytes": answer.body_bytes,
            "left_out": answer.left_out,
        }));
    } else {
        output.print("Resolved. Retries with this key get this answer.\n");
    }
    Ok(Exit::Ok)
}

/// What retries are to get.
struct Answer<'a> {
    rule: &'a Rule,
    status: u16,
    lines: usize,
    body_bytes: usize,
    encoded: Vec<u8>,
    left_out: Vec<String>,
}

impl<'a> Answer<'a> {
    /// The answer as the filter would have kept it, had the upstream given it.
    fn of(args: &Args, target: &'a Target) -> Result<Self, Failure> {
        let rule = target.settings.as_ref().and_then(|settings| settings.rule.as_deref());
        let rule =
            rule.ok_or_else(|| Failure::usage("--rule is needed: it says what is kept, and how long"))?;
        if rule.mode == Mode::Shadow {
            return Err(Failure::refused("the rule is in shadow: nothing of it is ever replayed"));
        }
        let status = args.status.unwrap_or_default();
        if !(200..=599).contains(&status) || rule.statuses.meaning(status) != StatusMeaning::Replay {
            return Err(Failure::usage(format!(
                "--status: {status} is not one that rule {:?} replays: see its replay_statuses and release_statuses",
                rule.name
            )));
        }
        let body = args.read_body()?;
        if matches!(status, 204 | 205 | 304) && !body.is_empty() {
            return Err(Failure::usage(format!("--body: a response with status {status} has none")));
        }
        if body.len() as u64 > rule.max_response_body_bytes {
            return Err(Failure::usage(format!(
                "--body: {} bytes, and the rule keeps no more than its max_response_body_bytes, {}",
                body.len(),
                rule.max_response_body_bytes
            )));
        }
        let given = args.header.iter().map(|line| parse_line(line)).collect::<Result<Vec<_>, _>>()?;
        let block = HeaderBlock::from_pairs(given.iter().map(|(name, value)| (name, value)));
        // Lines for another site's scripts are kept with the request's Origin, and nobody knows it any more.
        let kept: Vec<(&[u8], &[u8])> =
            kept_headers(&block, rule).filter(|(name, _)| !name.starts_with(b"access-control-")).collect();
        let left_out = given.iter().map(|(name, _)| name);
        let left_out =
            left_out.filter(|name| !kept.iter().any(|(kept, _)| *kept == name.as_bytes())).cloned().collect();
        let too_large = || Failure::usage("--header: more than one reply can have");
        if !fit_a_reply(kept.iter().copied()) {
            return Err(too_large());
        }
        let mut encoder = ResponseEncoder::begin(status, kept.iter().copied(), None).ok_or_else(too_large)?;
        encoder.push(&body);
        let (lines, body_bytes) = (kept.len(), body.len());
        Ok(Self { rule, status, lines, body_bytes, encoded: encoder.finish(), left_out })
    }
}

impl Args {
    fn read_body(&self) -> Result<Vec<u8>, Failure> {
        let Some(file) = &self.body else { return Ok(Vec::new()) };
        if file.as_os_str() == "-" {
            if !self.yes {
                return Err(Failure::usage("--body -: standard input can't confirm too, so add --yes"));
            }
            let mut body = Vec::new();
            return std::io::stdin()
                .read_to_end(&mut body)
                .map(|_| body)
                .map_err(|error| Failure::usage(format!("--body -: {error}")));
        }
        std::fs::read(file).map_err(|error| Failure::usage(format!("--body: {}: {error}", file.display())))
    }
}

/// A field line (RFC 9110 sections 5.1 and 5.5), its name in lower case as Envoy has it.
fn parse_line(line: &str) -> Result<(String, String), Failure> {
    let refused = || Failure::usage("--header: expected 'name: value', without control characters");
    let (name, value) = line.split_once(':').ok_or_else(refused)?;
    let is_token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    let value = value.trim_matches([' ', '\t']);
    if name.is_empty() || !name.bytes().all(is_token) || value.chars().any(|c| c.is_control() && c != '\t') {
        return Err(refused());
    }
    Ok((name.to_ascii_lowercase(), value.to_owned()))
}

/// The kernel's randomness: owners are fencing tokens.
fn new_owner() -> Result<[u8; 16], Failure> {
    let mut owner = [0; 16];
    std::fs::File::open("/dev/urandom")
        .and_then(|mut random| random.read_exact(&mut owner))
        .map_err(|error| Failure::usage(format!("/dev/urandom: {error}")))?;
    Ok(owner)
}
