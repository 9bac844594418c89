//! `idempotency validate`: is a configuration, and what stands around it, right?

mod execution;
mod link;
mod order;
mod routes;
mod surroundings;

use std::fmt::Write as _;
use std::path::PathBuf;

use idempotency::config::{self, Config, Plugin, StoreConfig};
use serde_json::json;

use crate::exit::{Exit, Failure};
use crate::manifest::{Content, File, Filter, Manifest, Node, Role};
use crate::output::{DIM, ERROR, GOOD, Output, STRONG, WARNING};

/// Check a plugin configuration, or a whole Envoy, Istio or Envoy Gateway file.
///
/// A file is a plugin configuration (JSON), or holds some: an Envoy bootstrap or xDS file, EnvoyFilter, WasmPlugin,
/// EnvoyExtensionPolicy, EnvoyPatchPolicy, or a ConfigMap with one of them, with any number of documents. Each
/// configuration is read by the filter's own loader. In the whole of a file everything that the filter relies on is
/// checked too: how it is loaded, what stands before and after it, the link to Redis, the execution listener, and
/// what copies requests below it. What is not in the file can't be checked, and is a warning where it matters.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Exit code 0: no errors; 1: errors, or warnings with --strict; 2: a file can't be read.\n\
    The codes in brackets are explained in docs/command.md."
)]
pub struct Args {
    /// What to check; - is standard input.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Take warnings for errors.
    #[arg(long)]
    strict: bool,
}

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    Error,
    Warning,
}

impl Severity {
    fn as_str(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warning => "warning",
        }
    }
}

/// Something to be changed, or at least known.
#[derive(Debug, Clone)]
pub struct Finding {
    severity: Severity,
    /// Stable, for filters and suppressions.
    code: &'static str,
    path: String,
    line: Option<usize>,
    message: String,
    /// What to do.
    advice: String,
}

/// What one file comes to.
#[derive(Debug, Default)]
pub struct Report {
    findings: Vec<Finding>,
    filters: Vec<Found>,
    holds: usize,
}

/// A filter of a file.
#[derive(Debug)]
struct Found {
    name: String,
    path: String,
    /// `None` where its configuration is wrong.
    config: Option<Summary>,
}

#[derive(Debug)]
struct Summary {
    rules: Vec<String>,
    sustained: Option<f64>,
}

impl Report {
    fn add(
        &mut self,
        severity: Severity,
        code: &'static str,
        at: (&str, usize),
        message: impl Into<String>,
        advice: impl Into<String>,
    ) {
        let (path, line) = (at.0.to_owned(), (at.1 > 0).then_some(at.1));
        let finding = Finding { severity, code, path, line, message: message.into(), advice: advice.into() };
        // Two filters on one link find the same.
        let is_same = |other: &Finding| {
            (other.code, &other.path, &other.message) == (finding.code, &finding.path, &finding.message)
        };
        if !self.findings.iter().any(is_same) {
            self.findings.push(finding);
        }
    }

    pub fn error(
        &mut self,
        code: &'static str,
        at: (&str, usize),
        message: impl Into<String>,
        advice: impl Into<String>,
    ) {
        self.add(Severity::Error, code, at, message, advice);
    }

    pub fn warn(
        &mut self,
        code: &'static str,
        at: (&str, usize),
        message: impl Into<String>,
        advice: impl Into<String>,
    ) {
        self.add(Severity::Warning, code, at, message, advice);
    }

    /// An error where the file is all there is, and a warning where the rest may be elsewhere.
    pub fn missing(
        &mut self,
        manifest: &Manifest,
        code: &'static str,
        at: (&str, usize),
        message: impl Into<String>,
        advice: impl Into<String>,
    ) {
        if manifest.is_closed {
            self.error(code, at, message, advice);
        } else {
            let message =
                format!("{}; this file is not all there is, so it may be elsewhere", message.into());
            self.warn(code, at, message, advice);
        }
    }

    fn count(&self, severity: Severity) -> usize {
        self.findings.iter().filter(|finding| finding.severity == severity).count()
    }
}

pub fn run(args: &Args, output: &Output) -> Result<Exit, Failure> {
    let mut reports = Vec::new();
    for path in &args.files {
        let file = File::read(path)?;
        let report = check(&file)?;
        reports.push((file.name, report));
    }
    let errors: usize = reports.iter().map(|(_, report)| report.count(Severity::Error)).sum();
    let warnings: usize = reports.iter().map(|(_, report)| report.count(Severity::Warning)).sum();
    if output.json {
        output.print_json(&to_json(&reports));
    } else {
        output.print(&reports.iter().map(|(name, report)| to_text(name, report)).collect::<String>());
    }
    Ok(if errors > 0 || (args.strict && warnings > 0) { Exit::Findings } else { Exit::Ok })
}

fn check(file: &File) -> Result<Report, Failure> {
    let mut report = Report::default();
    match file.content()? {
        Content::Plugin => {
            load(&file.bytes, "", 0, &mut report).map_or_else(
                || report.filters.push(Found { name: String::new(), path: String::new(), config: None }),
                |_| {},
            );
        }
        Content::Manifest(manifest) => check_manifest(&manifest, &mut report),
    }
    report.findings.sort_by_key(|finding| finding.severity);
    Ok(report)
}

fn check_manifest(manifest: &Manifest, report: &mut Report) {
    let mut loaded = Vec::new();
    for filter in &manifest.filters {
        if let Some(Plugin::Filter(config)) = load_filter(filter, report) {
            surroundings::check(manifest, filter, &config, report);
            order::check(manifest, filter, &config, report);
            routes::check(manifest, filter, &config, report);
            if let StoreConfig::Redis(redis) = &config.store {
                link::check(manifest, filter, redis, report);
            }
            execution::check(manifest, filter, &config, report);
            loaded.push((filter, *config));
        }
    }
    order::check_pairs(&loaded, report);
    if manifest.filters.iter().all(|filter| filter.role == Role::Hold) {
        report.error(
            "no-filter",
            ("", 0),
            "there is no idempotency filter in this file",
            "a filter is found by its configuration (store and rules), or by \"idempotency\" in its name, root_id or \
             module",
        );
    }
}

fn load_filter(filter: &Filter, report: &mut Report) -> Option<Plugin> {
    if filter.role == Role::Hold {
        report.holds += 1;
    }
    let before = report.filters.len();
    let plugin = load(&filter.configuration, &filter.path, filter.line, report);
    if plugin.is_none() && filter.role == Role::Filter {
        report.filters.push(Found { name: String::new(), path: String::new(), config: None });
    }
    for found in report.filters.iter_mut().skip(before) {
        found.name.clone_from(&filter.name);
        found.path.clone_from(&filter.path);
    }
    plugin
}

/// Reads a plugin configuration with the filter's own loader; what it says is said here word for word.
fn load(json: &[u8], path: &str, line: usize, report: &mut Report) -> Option<Plugin> {
    let at = |inner: &str| match (path, inner) {
        ("", inner) => inner.to_owned(),
        (path, "") => path.to_owned(),
        (path, inner) => format!("{path}: {inner}"),
    };
    match config::load_plugin(json) {
        Ok(plugin) => {
            if let Plugin::Filter(config) = &plugin {
                for warning in &config.warnings {
                    let (inner, message) = warning.split_once(": ").unwrap_or(("", warning));
                    report.warn("config", (&at(inner), line), message, "");
                }
                report.filters.push(Found {
                    name: String::new(),
                    path: String::new(),
                    config: Some(Summary {
                        rules: config.rules.iter().map(|rule| rule.name.clone()).collect(),
                        sustained: config.sustained_keys_per_100_seconds().map(|keys| keys as f64 / 100.0),
                    }),
                });
            }
            Some(plugin)
        }
        Err(errors) => {
            for error in errors.0 {
                report.error("config", (&at(&error.path), line), error.message, "");
            }
            None
        }
    }
}

/// The rules that do something.
pub fn active(config: &Config) -> impl Iterator<Item = &config::Rule> {
    config.rules.iter().map(|rule| &**rule).filter(|rule| rule.mode != config::Mode::Off)
}

/// The address of a socket or a pipe, to be compared.
pub fn address_of(node: &Node) -> Option<String> {
    if let Some(path) = node.at(&["pipe", "path"]).and_then(Node::text) {
        return Some(path.to_owned());
    }
    let socket = node.get("socket_address")?;
    let host = socket.text_of("address")?;
    Some(format!("{host}:{}", socket.get("port_value").and_then(Node::integer)?))
}

/// The addresses of a cluster's endpoints.
pub fn endpoint_addresses(cluster: &Node) -> impl Iterator<Item = &Node> {
    let assignment = cluster.get("load_assignment");
    let localities = assignment.map_or(&[][..], |assignment| assignment.list("endpoints"));
    let endpoints = localities.iter().flat_map(|locality| locality.list("lb_endpoints"));
    endpoints.filter_map(|endpoint| endpoint.at(&["endpoint", "address"]))
}

/// The internal listener that a cluster leads to.
pub fn internal_target(cluster: &Node) -> Option<&str> {
    endpoint_addresses(cluster)
        .find_map(|address| address.at(&["envoy_internal_address", "server_listener_name"])?.text())
}

/// A cluster's `HttpProtocolOptions`.
pub fn http_options(cluster: &Node) -> Option<&Node> {
    let options = cluster.get("typed_extension_protocol_options")?;
    options.members().iter().find(|(name, _)| name.ends_with("HttpProtocolOptions")).map(|(_, node)| node)
}

/// The network filters of a listener.
pub fn network_filters(listener: &Node) -> impl Iterator<Item = &Node> {
    let chains = listener.list("filter_chains").iter().chain(listener.get("default_filter_chain"));
    chains.flat_map(|chain| chain.list("filters"))
}

fn to_json(reports: &[(String, Report)]) -> serde_json::Value {
    let files: Vec<_> = reports
        .iter()
        .map(|(name, report)| {
            let filters: Vec<_> = report
                .filters
                .iter()
                .map(|found| {
                    let config = found.config.as_ref();
                    json!({
                        "name": found.name,
                        "path": found.path,
                        "valid": config.is_some(),
                        "rules": config.map(|config| &config.rules),
                        "sustained_keys_per_second": config.and_then(|config| config.sustained),
                    })
                })
                .collect();
            let findings: Vec<_> = report
                .findings
                .iter()
                .map(|finding| {
                    json!({
                        "severity": finding.severity.as_str(),
                        "code": finding.code,
                        "path": finding.path,
                        "line": finding.line,
                        "message": finding.message,
                        "advice": finding.advice,
                    })
                })
                .collect();
            json!({
                "file": name,
                "filters": filters,
                "link_filters": report.holds,
                "errors": report.count(Severity::Error),
                "warnings": report.count(Severity::Warning),
                "findings": findings,
            })
        })
        .collect();
    json!({ "files": files })
}

fn to_text(file: &str, report: &Report) -> String {
    let mut text = String::new();
    let count = |count: usize, one: &str| format!("{count} {one}{}", if count == 1 { "" } else { "s" });
    let names: Vec<&str> =
        report.filters.iter().map(|found| found.name.as_str()).filter(|name| !name.is_empty()).collect();
    let named = if names.is_empty() { String::new() } else { format!(": {}", names.join(", ")) };
    let holds = if report.holds > 0 {
        format!(", and {} of links to Redis", count(report.holds, "filter"))
    } else {
        String::new()
    };
    let _ = writeln!(
        text,
        "{STRONG}{file}{STRONG:#}: found {}{named}{holds}",
        count(report.filters.len(), "filter")
    );
    for finding in &report.findings {
        let style = match finding.severity {
            Severity::Error => ERROR,
            Severity::Warning => WARNING,
        };
        let line = finding.line.map(|line| format!("line {line}, ")).unwrap_or_default();
        let _ = writeln!(
            text,
            "{style}{}[{}]{style:#} {DIM}{line}{DIM:#}{}: {}",
            finding.severity.as_str(),
            finding.code,
            if finding.path.is_empty() { "the file" } else { &finding.path },
            finding.message
        );
        if !finding.advice.is_empty() {
            let _ = writeln!(text, "  {DIM}->{DIM:#} {}", finding.advice);
        }
    }
    for found in &report.filters {
        let Some(config) = &found.config else { continue };
        if let Some(rate) = config.sustained {
            let _ = writeln!(text, "{file}: the embedded store sustains {rate:.1} new keys per second");
        }
    }
    let (errors, warnings) = (report.count(Severity::Error), report.count(Severity::Warning));
    let rules: Vec<&str> = report
        .filters
        .iter()
        .filter_map(|found| found.config.as_ref())
        .flat_map(|config| &config.rules)
        .map(String::as_str)
        .collect();
    let rules = match rules.as_slice() {
        [] => String::new(),
        [one] => format!(", rule {one}"),
        all => format!(", rules {}", all.join(", ")),
    };
    if errors == 0 {
        let warned = if warnings > 0 { format!(", {}", count(warnings, "warning")) } else { String::new() };
        let _ = writeln!(text, "{file}: {GOOD}ok{GOOD:#}{rules}{warned}");
    } else {
        let _ = writeln!(
            text,
            "{file}: {ERROR}{}{ERROR:#}, {}",
            count(errors, "error"),
            count(warnings, "warning")
        );
    }
    text
}
