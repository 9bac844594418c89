//! `idempotency explain`: what the filter would do with a request.
//!
//! The request goes through the filter's own code: rules, key, scope, store key and fingerprint, and then an exchange
//! for each thing the store may answer. Nothing of it is worked out here.

mod report;

use std::path::PathBuf;
use std::rc::Rc;

use idempotency::clock::Timestamp;
use idempotency::config::{
    self, Config, Execution, HostPattern, Matcher, Mode, OnAbandoned, PathMatcher, Plugin, Rule, StoreConfig,
};
use idempotency::exchange::{Effect, Event, Exchange, Gate, StoreAnswer, StoreOp, Worker};
use idempotency::fingerprint::Fingerprint;
use idempotency::headers::{Attributes, HeaderBlock, RequestHead};
use idempotency::policy::{Bypass, Coverage, RouteOverride, decide_coverage, protocol_bypass};
use idempotency::record::codec::ResponseEncoder;
use idempotency::record::{Owner, Reason};
use idempotency::store::redis::script::Call;
use idempotency::store::redis::{Operation, SCRIPTS};
use idempotency::store::{Claim, ClaimReply, StoreError};

use self::report::{Answer, Refusal, Report, RuleVerdict, Verdict};
use crate::exit::{Exit, Failure};
use crate::manifest::{Content, File, Role};
use crate::output::Output;

/// Explain what the filter does with a request.
///
/// Says which rule covers the request and why the others don't, how its key and scope are read, its fingerprint, the
/// key of its record, what the client gets for each state of that record, and what becomes of the upstream's answer.
/// Nothing is sent anywhere.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  \
    idempotency explain plugin.json --method POST --path /payments --authority api.example.com \\\n      \
    -H 'Idempotency-Key: order-1' -H 'x-account-id: alice' --data '{\"amount\":100}'\n\n\
    Exit code 0: the request would be forwarded; 1: it would be refused; 2: wrong usage, or a configuration with mistakes.")]
pub struct Args {
    /// A plugin configuration, or a file with one: see `validate`.
    file: PathBuf,
    /// Which filter, where the file has several.
    #[arg(long, value_name = "NAME")]
    filter: Option<String>,
    #[arg(short = 'X', long, default_value = "POST")]
    method: String,
    /// Path and query as the client sends them.
    #[arg(long)]
    path: String,
    /// The host that the client asks for; it is part of the fingerprint by default.
    #[arg(long, default_value = "localhost")]
    authority: String,
    /// A header line; may be repeated.
    #[arg(short = 'H', long = "header", value_name = "NAME: VALUE")]
    headers: Vec<String>,
    /// A file with the body; - is standard input.
    #[arg(long, value_name = "FILE")]
    body: Option<PathBuf>,
    /// The body itself.
    #[arg(long, value_name = "TEXT", conflicts_with = "body")]
    data: Option<String>,
    /// A claim that jwt_authn verified, for a scope with `jwt_claim`.
    #[arg(long = "claim", value_name = "NAME=VALUE")]
    claims: Vec<String>,
    /// A field of the client's certificate (uri_san, subject, sha256), for a scope with `peer_certificate`.
    #[arg(long = "certificate", value_name = "FIELD=VALUE")]
    certificates: Vec<String>,
    /// An Envoy attribute, its path with slashes, for a scope with `property`.
    #[arg(long = "property", value_name = "PATH=VALUE")]
    properties: Vec<String>,
    /// The rule that the route's metadata names.
    #[arg(long, value_name = "NAME")]
    route_rule: Option<String>,
    /// The route's metadata switches the filter off.
    #[arg(long, conflicts_with = "route_rule")]
    route_off: bool,
}

pub fn run(args: &Args, output: &Output) -> Result<Exit, Failure> {
    let config = load(args)?;
    let request = Request::new(args)?;
    let report = explain(config, &request);
    if output.json {
        output.print_json(&report.to_json());
    } else {
        output.print(&report.to_text());
    }
    Ok(if report.is_forwarded() { Exit::Ok } else { Exit::Findings })
}

fn load(args: &Args) -> Result<Config, Failure> {
    let file = File::read(&args.file)?;
    let json = match file.content()? {
        Content::Plugin => file.bytes.clone(),
        Content::Manifest(manifest) => {
            let filters: Vec<_> = manifest
                .filters
                .iter()
                .filter(|filter| filter.role == Role::Filter)
                .filter(|filter| args.filter.as_ref().is_none_or(|name| *name == filter.name))
                .collect();
            match filters.as_slice() {
                [filter] => filter.configuration.clone(),
                [] => return Err(Failure::usage(format!("{}: no such filter in it", file.name))),
                all => {
                    let names: Vec<&str> = all.iter().map(|filter| filter.name.as_str()).collect();
                    let message = format!(
                        "{}: several filters, choose one with --filter: {}",
                        file.name,
                        names.join(", ")
                    );
                    return Err(Failure::usage(message));
                }
            }
        }
    };
    match config::load_plugin(&json) {
        Ok(Plugin::Filter(config)) => Ok(*config),
        Ok(Plugin::RequestEndHold) => Err(Failure::usage(format!(
            "{}: it has the role request_end_hold, and does nothing with requests",
            file.name
        ))),
        Err(errors) => Err(Failure::usage(format!("{}:\n{errors}", file.name))),
    }
}

/// The request as the filter would see it.
struct Request {
    headers: HeaderBlock,
    body: Vec<u8>,
    attributes: Given,
    route: RouteOverride,
}

/// Attributes from the command line.
#[derive(Debug, Default)]
struct Given {
    claims: Vec<(String, String)>,
    certificates: Vec<(String, String)>,
    properties: Vec<(Vec<String>, String)>,
}

impl Attributes for Given {
    fn attribute(&self, path: &[&str]) -> Option<Vec<u8>> {
        let find = |list: &[(String, String)], wanted: &dyn Fn(&str) -> bool| {
            list.iter().find(|(name, _)| wanted(name)).map(|(_, value)| value.clone().into_bytes())
        };
        let named = match path {
            ["metadata", .., claim] => find(&self.claims, &|name| name == *claim),
            // connection.uri_san_peer_certificate and the like
            ["connection", field] => find(&self.certificates, &|name| field.starts_with(name)),
            _ => None,
        };
        named.or_else(|| {
            let wanted = |given: &[String]| given.iter().map(String::as_str).eq(path.iter().copied());
            self.properties
                .iter()
                .find(|(given, _)| wanted(given))
                .map(|(_, value)| value.clone().into_bytes())
        })
    }
}

impl Request {
    fn new(args: &Args) -> Result<Self, Failure> {
        let body = match (&args.body, &args.data) {
            (Some(path), _) => File::read(path)?.bytes,
            (None, Some(text)) => text.clone().into_bytes(),
            (None, None) => Vec::new(),
        };
        let mut authority = args.authority.clone();
        let mut lines = Vec::new();
        for line in &args.headers {
            let (name, value) = line
                .split_once(':')
                .filter(|(name, _)| !name.is_empty())
                .ok_or_else(|| Failure::usage(format!("-H {line:?}: expected NAME: VALUE")))?;
            let (name, value) = (name.trim().to_ascii_lowercase(), value.trim().to_owned());
            if name == "host" {
                authority = value;
            } else {
                lines.push((name, value));
            }
        }
        let says_length =
            |(name, _): &(String, String)| name == "content-length" || name == "transfer-encoding";
        if !body.is_empty() && !lines.iter().any(says_length) {
            lines.push(("content-length".to_owned(), body.len().to_string()));
        }
        let pseudo = [(":method", &args.method), (":authority", &authority), (":path", &args.path)];
        let all = pseudo.map(|(name, value)| (name.to_owned(), value.clone())).into_iter().chain(lines);
        Ok(Self {
            headers: HeaderBlock::from_pairs(all),
            body,
            attributes: Given {
                claims: pairs("--claim", &args.claims)?,
                certificates: pairs("--certificate", &args.certificates)?,
                properties: pairs("--property", &args.properties)?
                    .into_iter()
                    .map(|(path, value)| (path.split('/').map(str::to_owned).collect(), value))
                    .collect(),
            },
            route: match &args.route_rule {
                Some(name) => RouteOverride::Rule(name.clone().into_bytes()),
                None if args.route_off => RouteOverride::Off,
                None => RouteOverride::None,
            },
        })
    }

    fn head(&self) -> RequestHead<'_> {
        RequestHead { headers: &self.headers, attributes: &self.attributes }
    }

    fn covered_by<'c>(&self, rules: &'c [Rc<Rule>], route: &RouteOverride) -> Coverage<'c> {
        let head = self.head();
        decide_coverage(rules, head.method(), head.authority(), head.path_and_query(), route)
    }
}

fn pairs(option: &str, given: &[String]) -> Result<Vec<(String, String)>, Failure> {
    given
        .iter()
        .map(|pair| {
            let (name, value) = pair
                .split_once('=')
                .ok_or_else(|| Failure::usage(format!("{option} {pair:?}: expected NAME=VALUE")))?;
            Ok((name.to_owned(), value.to_owned()))
        })
        .collect()
}

fn explain(config: Config, request: &Request) -> Report {
    let rules = judge_rules(&config, request);
    let worker = Rc::new(Worker::new(config));
    let covered = match request.covered_by(&worker.config.rules, &request.route) {
        Coverage::Covered(rule) => match protocol_bypass(&request.headers) {
            Some(bypass) => Err(Verdict::Bypassed(bypass.as_str(), why_bypassed(bypass))),
            None => Ok(Rc::clone(rule)),
        },
        Coverage::Bypass(bypass) => Err(Verdict::Bypassed(bypass.as_str(), why_bypassed(bypass))),
        Coverage::Misconfigured => {
            let mut exchange = Exchange::new(Rc::clone(&worker));
            let step = exchange.handle(Event::RouteMisconfigured, Timestamp::default());
            Err(refusal(&step.effects).map_or(Verdict::Unknown, Verdict::Refused))
        }
    };
    let rule = match covered {
        Ok(rule) => rule,
        Err(verdict) => return Report::uncovered(rules, verdict),
    };
    let mut report = Report::covered(rules, &rule, request);
    let (effects, _) = drive(&worker, &rule, request, None);
    let claim = effects.iter().find_map(|effect| {
        if let Effect::Store(StoreOp::Claim(claim)) = effect { Some(claim.clone()) } else { None }
    });
    match claim {
        Some(claim) => {
            report.verdict = Verdict::Claims;
            report.claimed(&claim, redis_key(&worker.config, &claim));
            if rule.mode == Mode::Enforce {
                report.answers = answers(&worker, &rule, request, &claim);
            }
            report.outcomes = report::outcomes(&rule);
        }
        None => {
            report.verdict = match refusal(&effects) {
                Some(refusal) => Verdict::Refused(refusal),
                None if rule.mode == Mode::Shadow => Verdict::Bypassed(
                    "shadow",
                    "the rule is in shadow: the request passes, and what enforce would have refused is counted".to_owned(),
                ),
                None => Verdict::Bypassed(Bypass::NoKey.as_str(), why_bypassed(Bypass::NoKey)),
            };
        }
    }
    report
}

/// Feeds the request, and an answer of the store, to an exchange of its own: what it asks for, and what it holds.
fn drive(
    worker: &Rc<Worker>,
    rule: &Rc<Rule>,
    request: &Request,
    answer: Option<Result<ClaimReply, StoreError>>,
) -> (Vec<Effect>, Gate) {
    let now = Timestamp::default();
    let mut exchange = Exchange::new(Rc::clone(worker));
    let head = request.head();
    let end = request.body.is_empty();
    let owner = Owner::from_bytes([0; 16]);
    let mut effects =
        exchange.handle(Event::RequestHead { rule: Rc::clone(rule), head: &head, end, owner }, now).effects;
    if !end {
        let event = Event::RequestBody { chunk: &request.body, end: true };
        effects.extend(exchange.handle(event, now).effects);
    }
    if let Some(answer) = answer {
        effects = exchange.handle(Event::StoreAnswered(StoreAnswer::Claim(answer)), now).effects;
    }
    (effects, exchange.gate())
}

/// The name of the record in Redis, as the filter's own command has it.
fn redis_key(config: &Config, claim: &Claim) -> Option<String> {
    let StoreConfig::Redis(redis) = &config.store else { return None };
    let operation = Operation::Claim(claim.clone());
    let argv = operation.argv(&redis.key_prefix, &SCRIPTS, Call::Name);
    argv.get(3).map(|key| String::from_utf8_lossy(key).into_owned())
}

fn refusal(effects: &[Effect]) -> Option<Refusal> {
    effects
        .iter()
        .find_map(|effect| if let Effect::Reply(reply) = effect { Some(Refusal::of(reply)) } else { None })
}

/// What the client gets for everything that the store may say.
fn answers(worker: &Rc<Worker>, rule: &Rc<Rule>, request: &Request, claim: &Claim) -> Vec<Answer> {
    let fingerprint = claim.terms.fingerprint;
    let mut other = *fingerprint.bytes();
    other[0] ^= 1;
    let other = Fingerprint::from_bytes(other);
    let response = ResponseEncoder::begin(201, [], None).map(ResponseEncoder::finish).unwrap_or_default();
    let in_flight = |fingerprint| ClaimReply::InFlight {
        fingerprint,
        elapsed: std::time::Duration::ZERO,
        remaining: rule.lock_ttl,
    };
    let abandoned = match claim.terms.on_abandoned {
        OnAbandoned::Takeover => ClaimReply::Claimed { attempt: 2 },
        OnAbandoned::Retain => ClaimReply::Abandoned { fingerprint },
    };
    let mut cases = vec![
        ("no record", Ok(ClaimReply::Claimed { attempt: 1 })),
        ("in flight, its lease holds", Ok(in_flight(fingerprint))),
        ("in flight, its lease ran out", Ok(abandoned)),
        ("completed (with 201, say)", Ok(ClaimReply::Completed { fingerprint, response: response.clone() })),
        ("failed", Ok(ClaimReply::Failed { fingerprint, reason: Reason::Status })),
        ("any, of another request", Ok(ClaimReply::Completed { fingerprint: other, response })),
        ("the store gives no answer", Err(StoreError::Unavailable)),
    ];
    if matches!(worker.config.store, StoreConfig::SharedData(_)) {
        cases.push(("no record, and the table is full", Err(StoreError::Full)));
    }
    cases
        .into_iter()
        .map(|(record, answer)| {
            let (effects, gate) = drive(worker, rule, request, Some(answer));
            Answer { record, what: what_happens(rule, &effects, gate) }
        })
        .collect()
}

fn what_happens(rule: &Rule, effects: &[Effect], gate: Gate) -> String {
    if let Some(refusal) = refusal(effects) {
        return refusal.to_string();
    }
    let executes = effects.iter().find_map(|effect| {
        if let Effect::Execute { timeout, attempt, protected, .. } = effect {
            Some((*timeout, *attempt, *protected))
        } else {
            None
        }
    });
    if let Some((timeout, attempt, protected)) = executes {
        let protected = if protected { "" } else { ", unprotected" };
        return format!(
            "executed detached as attempt {attempt}{protected}, for at most {}",
            report::shown(timeout)
        );
    }
    if gate == Gate::HoldRequest {
        return format!(
            "waits for the first to end, at most {}, and gets its answer",
            report::shown(rule.wait_timeout)
        );
    }
    let attempt = effects.iter().find_map(|effect| {
        if let Effect::SetRequestHeader("x-idempotency-attempt", value) = effect { Some(value) } else { None }
    });
    let held = effects.iter().any(|effect| matches!(effect, Effect::ClaimHeld));
    match (held, attempt) {
        (true, Some(attempt)) => format!("forwarded with x-idempotency-attempt: {attempt}"),
        (true, None) => "forwarded; the claim is this request's".to_owned(),
        (false, _) => "forwarded without protection, marked idempotency-protection: none".to_owned(),
    }
}

/// Why each rule covers the request or doesn't. A part of a matcher is judged by a rule that has only that part.
fn judge_rules(config: &Config, request: &Request) -> Vec<RuleVerdict> {
    let chosen = match request.covered_by(&config.rules, &request.route) {
        Coverage::Covered(rule) => Some(Rc::clone(rule)),
        Coverage::Bypass(_) | Coverage::Misconfigured => None,
    };
    let mut earlier: Option<String> = None;
    config
        .rules
        .iter()
        .map(|rule| {
            let why = if chosen.as_ref().is_some_and(|chosen| Rc::ptr_eq(chosen, rule)) {
                None
            } else {
                Some(why_not(rule, request, earlier.as_deref()))
            };
            let matches = mismatch(rule, request).is_none();
            if matches && earlier.is_none() {
                earlier = Some(rule.name.clone());
            }
            RuleVerdict { name: rule.name.clone(), why_not: why }
        })
        .collect()
}

fn why_not(rule: &Rc<Rule>, request: &Request, earlier: Option<&str>) -> String {
    match &request.route {
        RouteOverride::Off => return "the route switches the filter off".to_owned(),
        RouteOverride::Rule(name) if rule.name.as_bytes() != name.as_slice() => {
            return "the route names another rule".to_owned();
        }
        RouteOverride::Rule(_) | RouteOverride::None => {}
    }
    if let Coverage::Bypass(bypass @ (Bypass::SafeMethod | Bypass::Upgrade)) =
        request.covered_by(&[], &RouteOverride::None)
    {
        return why_bypassed(bypass);
    }
    if let Some(mismatch) = mismatch(rule, request) {
        return mismatch;
    }
    match earlier {
        Some(name) => format!("it matches, but {name} comes first"),
        None => "it matches, and its mode is off".to_owned(),
    }
}

/// The parts of the rule's matcher that don't match.
fn mismatch(rule: &Rc<Rule>, request: &Request) -> Option<String> {
    let head = request.head();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let alone = |methods: Vec<String>, hosts: Vec<HostPattern>, path: PathMatcher| {
        let rule =
            Rule { matcher: Matcher { methods, hosts, path }, mode: Mode::Enforce, ..(**rule).clone() };
        matches!(request.covered_by(&[Rc::new(rule)], &RouteOverride::None), Coverage::Covered(_))
    };
    let any_method = || vec![text(head.method())];
    let Matcher { methods, hosts, path } = &rule.matcher;
    let mut reasons = Vec::new();
    if !alone(methods.clone(), Vec::new(), PathMatcher::Any) {
        reasons.push(format!("method {} is not one of {}", text(head.method()), methods.join(", ")));
    }
    if !alone(any_method(), hosts.clone(), PathMatcher::Any) {
        let hosts: Vec<String> = hosts.iter().map(report::host).collect();
        reasons.push(format!("host {} is not one of {}", text(head.authority()), hosts.join(", ")));
    }
    if !alone(any_method(), Vec::new(), path.clone()) {
        reasons.push(format!("path {} does not match {}", text(head.path_and_query()), report::path(path)));
    }
    (!reasons.is_empty()).then(|| reasons.join("; "))
}

fn why_bypassed(bypass: Bypass) -> String {
    match bypass {
        Bypass::SafeMethod => "a safe method changes nothing: it always passes",
        Bypass::Upgrade => "a tunnel or another protocol has no one response to keep",
        Bypass::NotCovered => "no rule matches",
        Bypass::RuleOff => "the rule that matches is off",
        Bypass::RouteOff => "the route switches the filter off",
        Bypass::Grpc => "gRPC carries its outcome in trailers: it passes unprotected, and is counted",
        Bypass::NoKey => "the rule lets requests without a key pass",
    }
    .to_owned()
}

/// Who sends a claimed request on.
fn execution(rule: &Rule) -> String {
    match rule.execution {
        Execution::Inline => "inline".to_owned(),
        Execution::Detached { timeout } => format!("detached, for at most {}", report::shown(timeout)),
    }
}
