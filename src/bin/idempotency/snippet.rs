//! `idempotency envoy-snippet`: the filter, the links and the clusters for a plugin configuration.
//!
//! The pieces are cut out of the project's own envoy/*.yaml, comments included, so the link is written down once.

use std::net::IpAddr;
use std::path::PathBuf;

use idempotency::config::{self, Config, Execution, Mode, Plugin, StoreConfig};

use crate::exit::{Exit, Failure};
use crate::manifest::{Content, File};
use crate::output::Output;

const EMBEDDED: &str = include_str!("../../../envoy/embedded.yaml");
const REDIS: &str = include_str!("../../../envoy/redis.yaml");
const DETACHED: &str = include_str!("../../../envoy/detached.yaml");

/// Print the Envoy configuration that a plugin configuration needs.
///
/// Without --whole: one YAML document with the parts to paste, under http_filters, bootstrap_extensions, listeners and
/// clusters. With --whole: a bootstrap that runs by itself, in front of one service.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    idempotency envoy-snippet plugin.json --redis redis.internal:6379 --tls\n  \
    idempotency envoy-snippet plugin.json --whole --upstream 127.0.0.1:8080 > envoy.yaml && envoy -c envoy.yaml")]
pub struct Args {
    /// The plugin configuration (JSON); - is standard input.
    file: PathBuf,
    /// Where the records are; by default what the configuration's store says.
    #[arg(long, value_enum)]
    topology: Option<Topology>,
    /// An address of Redis; several for a Redis Cluster.
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:6379")]
    redis: Vec<String>,
    /// Speak TLS to Redis.
    #[arg(long)]
    tls: bool,
    /// Who may have signed the certificate of Redis.
    #[arg(long, value_name = "FILE", default_value = "/etc/ssl/certs/ca-certificates.crt")]
    ca: String,
    /// A file that holds the password of Redis.
    #[arg(long, value_name = "FILE")]
    password_file: Option<String>,
    /// The user of Redis, beside --password-file.
    #[arg(long, value_name = "NAME", requires = "password_file")]
    user: Option<String>,
    /// Where redis_proxy listens: a path, or an abstract name of this Envoy's own.
    #[arg(long, value_name = "PATH", default_value = "@idempotency-redis")]
    socket: String,
    /// The module, as Envoy finds it.
    #[arg(long, value_name = "FILE", default_value = "dist/idempotency.wasm")]
    module: String,
    /// A bootstrap that runs by itself.
    #[arg(long)]
    whole: bool,
    /// The service behind --whole.
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:8080")]
    upstream: String,
    /// Where clients reach --whole.
    #[arg(long, default_value_t = 10000)]
    port: u16,
    /// The admin interface of --whole.
    #[arg(long, default_value_t = 9901)]
    admin_port: u16,
}

/// Where the records are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Topology {
    /// In the Envoy process.
    Embedded,
    /// In one Redis or Valkey.
    Redis,
    /// In a Redis Cluster.
    RedisCluster,
}

pub fn run(args: &Args, output: &Output) -> Result<Exit, Failure> {
    let file = File::read(&args.file)?;
    if let Content::Manifest(_) = file.content()? {
        return Err(Failure::usage(format!(
            "{}: expected a plugin configuration (JSON) by itself",
            file.name
        )));
    }
    let config = match config::load_plugin(&file.bytes) {
        Ok(Plugin::Filter(config)) => *config,
        Ok(Plugin::RequestEndHold) => {
            return Err(Failure::usage(format!("{}: expected the filter's configuration", file.name)));
        }
        Err(errors) => return Err(Failure::usage(format!("{}:\n{errors}", file.name))),
    };
    let snippet = Snippet::new(args, &config, &String::from_utf8_lossy(&file.bytes))?;
    let text = if args.whole { snippet.whole(args, &config)? } else { snippet.parts() };
    if output.json {
        output.print_json(&serde_json::json!({ "yaml": text }));
    } else {
        output.print(&text);
    }
    Ok(Exit::Ok)
}

/// The parts, each a piece of YAML without indentation.
#[derive(Debug, Default)]
struct Snippet {
    filter: String,
    extension: Option<String>,
    listeners: Vec<String>,
    clusters: Vec<String>,
}

impl Snippet {
    fn new(args: &Args, config: &Config, plugin: &str) -> Result<Self, Failure> {
        let mut snippet = Self { filter: filter(plugin, &args.module)?, ..Self::default() };
        let topology = topology(args, config)?;
        if let (StoreConfig::Redis(redis), Topology::Redis | Topology::RedisCluster) =
            (&config.store, topology)
        {
            let op_timeout = format!("op_timeout: {}s", redis.timeout.as_secs_f64() * 0.4);
            let module = module_of(&args.module);
            snippet.listeners.push(piece(REDIS, "- name: redis_link")?.replace(MODULE, &module));
            let proxy = piece(REDIS, "- name: redis_proxy")?;
            snippet.listeners.push(
                replaced(&proxy, "op_timeout: 0.1s", &op_timeout)?
                    .replace("path: \"@idempotency-redis\"", &format!("path: {:?}", args.socket)),
            );
            let link = piece(REDIS, "- name: redis-link")?;
            snippet.clusters.push(link.replace("redis-link", &redis.cluster));
            let proxy = piece(REDIS, "- name: redis-proxy")?;
            let socket = format!("path: {:?}", args.socket);
            snippet.clusters.push(replaced(&proxy, "path: \"@idempotency-redis\"", &socket)?);
            snippet.clusters.push(redis_cluster(args, topology)?);
        }
        if let (Some(cluster), Some(longest)) = (&config.execute_cluster, longest_execution(config)) {
            let routes = piece(DETACHED, "virtual_hosts: &payments_hosts")?;
            let routes = routes.replace("virtual_hosts: &payments_hosts", "virtual_hosts:");
            let listener = piece(DETACHED, "- name: idempotency_execute")?;
            let listener = replaced(&listener, "stream_idle_timeout: 40s", &idle(longest))?;
            let mut lines = Vec::new();
            for line in listener.lines() {
                match line.find("virtual_hosts: *payments_hosts") {
                    Some(depth) => {
                        let note =
                            "# These have to be the routes of the main listener: use an alias, or RDS.\n";
                        lines.push(indented(&format!("{note}{routes}"), depth).trim_end().to_owned());
                    }
                    None => lines.push(line.to_owned()),
                }
            }
            snippet.listeners.push(lines.join("\n") + "\n");
            let own = piece(DETACHED, "- name: idempotency-execute")?;
            snippet.clusters.push(own.replace("idempotency-execute", cluster));
        }
        if !snippet.listeners.is_empty() {
            snippet.extension = Some(piece(REDIS, "bootstrap_extensions:")?);
        }
        Ok(snippet)
    }

    /// One document, to be taken apart by whoever pastes it.
    fn parts(&self) -> String {
        let mut text = String::from(
            "# In the chain of every listener whose requests are to be protected: behind authentication and\n\
             # authorization, before the router.\nhttp_filters:\n",
        );
        text.push_str(&self.filter);
        if let Some(extension) = &self.extension {
            text.push_str("\n# At the top level of the bootstrap.\n");
            text.push_str(extension);
        }
        for (name, pieces) in [("listeners", &self.listeners), ("clusters", &self.clusters)] {
            if !pieces.is_empty() {
                text.push_str(&format!("\n{name}:\n{}", pieces.join("\n")));
            }
        }
        text
    }

    fn whole(&self, args: &Args, config: &Config) -> Result<String, Failure> {
        let (host, port) = host_and_port(&args.upstream)?;
        let mut text = replaced(EMBEDDED, "port_value: 10000", &format!("port_value: {}", args.port))?;
        text = replaced(&text, "port_value: 9901", &format!("port_value: {}", args.admin_port))?;
        text = replaced(
            &text,
            "socket_address: { address: 127.0.0.1, port_value: 8080 }",
            &format!("socket_address: {{ address: {host}, port_value: {port} }}"),
        )?;
        if host.parse::<IpAddr>().is_err() {
            text = replaced(&text, "type: STATIC", "type: STRICT_DNS")?;
        }
        if let Some(longest) = longest_execution(config) {
            text = replaced(&text, "stream_idle_timeout: 20s", &idle(longest))?;
        }
        let largest = config.rules.iter().map(|rule| rule.max_request_body_bytes).max().unwrap_or(0);
        if largest >= 2_097_152 {
            let buffer = format!("per_connection_buffer_limit_bytes: {}", largest.saturating_mul(2));
            text = replaced(&text, "per_connection_buffer_limit_bytes: 2097152", &buffer)?;
        }
        let own = raw_piece(&text, "- name: idempotency")?;
        text = text.replace(own.text, &indented(&self.filter, own.depth));
        let whole = || unexpected("admin: and clusters:");
        let body = text.find("\nadmin:\n").and_then(|admin| text.get(admin..)).ok_or_else(whole)?;
        let (listeners, clusters) = body.split_once("\n  clusters:\n").ok_or_else(whole)?;
        let all = |pieces: &[String]| -> String {
            pieces.iter().map(|piece| format!("\n{}", indented(piece, 2))).collect()
        };
        Ok(format!(
            "# Made by `idempotency envoy-snippet --whole`: Envoy 1.36 or newer with the idempotency filter.\n\n{}{}\n{}\n  clusters:\n{}{}",
            self.extension.as_deref().unwrap_or_default(),
            listeners,
            all(&self.listeners),
            clusters,
            all(&self.clusters),
        ))
    }
}

fn topology(args: &Args, config: &Config) -> Result<Topology, Failure> {
    let asked = args.topology;
    match (&config.store, asked) {
        (StoreConfig::SharedData(_), None | Some(Topology::Embedded)) => Ok(Topology::Embedded),
        (StoreConfig::Redis(_), None) if args.redis.len() > 1 => Ok(Topology::RedisCluster),
        (StoreConfig::Redis(_), None) => Ok(Topology::Redis),
        (StoreConfig::Redis(_), Some(topology @ (Topology::Redis | Topology::RedisCluster))) => Ok(topology),
        (StoreConfig::SharedData(_), Some(_)) => Err(Failure::usage(
            "the configuration's store is shared_data, and the topology asked for needs store.redis",
        )),
        (StoreConfig::Redis(_), Some(Topology::Embedded)) => Err(Failure::usage(
            "the configuration's store is redis, and the topology asked for needs store.shared_data",
        )),
    }
}

fn longest_execution(config: &Config) -> Option<u64> {
    let detached =
        config.rules.iter().filter(|rule| rule.mode != Mode::Off).filter_map(|rule| match rule.execution {
            Execution::Inline => None,
            Execution::Detached { timeout } => Some(timeout.as_millis().div_ceil(1000)),
        });
    detached.max().and_then(|seconds| u64::try_from(seconds).ok())
}

fn idle(longest: u64) -> String {
    format!("stream_idle_timeout: {}s", longest.saturating_add(10).max(20))
}

const MODULE: &str = "filename: dist/idempotency.wasm";

fn module_of(path: &str) -> String {
    format!("filename: {path:?}")
}

/// The filter with this plugin configuration in it.
fn filter(plugin: &str, module: &str) -> Result<String, Failure> {
    let piece = piece(EMBEDDED, "- name: idempotency")?;
    let at = piece.find("value: |\n").ok_or_else(|| unexpected("value: |"))?;
    let (head, _) = piece.split_at_checked(at).ok_or_else(|| unexpected("value: |"))?;
    let depth = head.lines().last().map_or(0, str::len);
    let plugin = indented(plugin.trim(), depth + 2);
    Ok(format!("{}value: |\n{}\n", replaced(head, MODULE, &module_of(module))?, plugin.trim_end()))
}

fn redis_cluster(args: &Args, topology: Topology) -> Result<String, Failure> {
    let mut endpoints = String::new();
    let mut is_named = false;
    for redis in &args.redis {
        let (host, port) = host_and_port(redis)?;
        is_named |= host.parse::<IpAddr>().is_err();
        endpoints.push_str(&format!(
            "      - endpoint:\n          address:\n            socket_address: {{ address: {host}, port_value: {port} }}\n"
        ));
    }
    let kind = match (topology, is_named) {
        (Topology::RedisCluster, _) => {
            "  lb_policy: CLUSTER_PROVIDED\n  cluster_type:\n    name: envoy.clusters.redis\n    typed_config:\n      \
             \"@type\": type.googleapis.com/envoy.extensions.clusters.redis.v3.RedisClusterConfig\n      \
             cluster_refresh_rate: 5s\n      cluster_refresh_timeout: 1s\n      redirect_refresh_interval: 1s\n      \
             redirect_refresh_threshold: 1\n"
        }
        (Topology::Embedded | Topology::Redis, true) => "  type: STRICT_DNS\n",
        (Topology::Embedded | Topology::Redis, false) => "  type: STATIC\n",
    };
    let mut text = format!("- name: redis\n{kind}  connect_timeout: 1s\n");
    if let Some(file) = &args.password_file {
        let user =
            args.user.as_ref().map(|user| format!("      auth_username: {{ inline_string: {user:?} }}\n"));
        text.push_str(&format!(
            "  typed_extension_protocol_options:\n    envoy.filters.network.redis_proxy:\n      \"@type\": \
             type.googleapis.com/envoy.extensions.filters.network.redis_proxy.v3.RedisProtocolOptions\n{}      \
             auth_password: {{ filename: {file:?} }}\n",
            user.unwrap_or_default()
        ));
    }
    if args.tls {
        let (host, _) = host_and_port(args.redis.first().map_or("", String::as_str))?;
        let sni = if host.parse::<IpAddr>().is_ok() { String::new() } else { format!("      sni: {host}\n") };
        text.push_str(&format!(
            "  transport_socket:\n    name: envoy.transport_sockets.tls\n    typed_config:\n      \"@type\": \
             type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext\n{sni}      \
             common_tls_context:\n        validation_context:\n          trusted_ca: {{ filename: {:?} }}\n",
            args.ca
        ));
    }
    text.push_str(&format!(
        "  load_assignment:\n    cluster_name: redis\n    endpoints:\n    - lb_endpoints:\n{endpoints}"
    ));
    Ok(text)
}

fn host_and_port(address: &str) -> Result<(&str, u16), Failure> {
    address
        .rsplit_once(':')
        .and_then(|(host, port)| Some((host.trim_matches(['[', ']']), port.parse().ok()?)))
        .filter(|(host, _)| !host.is_empty() && !host.contains(char::is_whitespace))
        .ok_or_else(|| Failure::usage(format!("{address:?}: expected HOST:PORT")))
}

/// A part of a file as it stands there.
struct Piece<'a> {
    text: &'a str,
    depth: usize,
}

/// The mapping or list item that begins with the line `first`, without the comments before it, up to its end.
fn raw_piece<'a>(text: &'a str, first: &str) -> Result<Piece<'a>, Failure> {
    let depth_of = |line: &str| line.len() - line.trim_start().len();
    let mut begin = None;
    let mut at = 0;
    for line in text.split_inclusive('\n') {
        let content = line.trim_end();
        match begin {
            None if content.trim_start() == first => begin = Some((at, depth_of(content))),
            // An item ends where something of its own depth begins; members of a key's list may stand at the key's depth.
            Some((start, depth)) if !content.is_empty() => {
                let is_list_of_key = first.ends_with(':') || first.contains(": &");
                let same =
                    depth_of(content) == depth && !(is_list_of_key && content.trim_start().starts_with("- "));
                if depth_of(content) < depth || same {
                    return text
                        .get(start..at)
                        .map(|text| Piece { text, depth })
                        .ok_or_else(|| unexpected(first));
                }
            }
            None | Some(_) => {}
        }
        at += line.len();
    }
    let (start, depth) = begin.ok_or_else(|| unexpected(first))?;
    text.get(start..).map(|text| Piece { text, depth }).ok_or_else(|| unexpected(first))
}

/// The same without its indentation.
fn piece(text: &str, first: &str) -> Result<String, Failure> {
    let piece = raw_piece(text, first)?;
    let lines =
        piece.text.trim_end().lines().map(|line| line.get(piece.depth..).unwrap_or_default().trim_end());
    let mut lines: Vec<&str> = lines.collect();
    while lines.last().is_some_and(|line| line.is_empty() || line.starts_with('#')) {
        lines.pop();
    }
    Ok(lines.join("\n") + "\n")
}

fn indented(text: &str, depth: usize) -> String {
    text.lines().fold(String::new(), |mut all, line| {
        if !line.is_empty() {
            all.extend(std::iter::repeat_n(' ', depth));
            all.push_str(line);
        }
        all.push('\n');
        all
    })
}

/// `text` with its one `from` replaced.
fn replaced(text: &str, from: &str, to: &str) -> Result<String, Failure> {
    if text.contains(from) { Ok(text.replacen(from, to, 1)) } else { Err(unexpected(from)) }
}

/// The files are part of the binary, and the tests make every snippet: this is for who edits them.
fn unexpected(what: &str) -> Failure {
    Failure::usage(format!("this build's envoy/*.yaml has no {what:?}"))
}
