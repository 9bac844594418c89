//! Which record is meant: the one of a request, told by rule, scope and key, or a key in Redis.
//!
//! The filter's own code reads the key header, takes the scope and derives the store key.

use std::path::PathBuf;
use std::rc::Rc;

use idempotency::config::{self, CertificateField, Config, RedisConfig, Rule, Scope, ScopePart, StoreConfig};
use idempotency::headers::{Attributes, HeaderBlock, RequestHead};
use idempotency::key::{StoreKey, parse_key};
use idempotency::scope::{attribute_path, label, resolve_scope};

use crate::exit::Failure;

/// Which record.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Which record")]
#[group(skip)]
pub struct Args {
    /// The filter's configuration: the JSON of the plugin.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The rule that covers the request; not needed where there is only one.
    #[arg(long, value_name = "NAME", requires = "config")]
    rule: Option<String>,
    /// A part of the rule's scope, once for each but constants. NAME is the header, the claim, the part of the
    /// certificate or the property (joined with dots); NAME:number, NAME:integer or NAME:boolean where it is no text.
    #[arg(long, value_name = "NAME=VALUE", requires = "config", conflicts_with = "redis_key")]
    scope: Vec<String>,
    /// The same with the value in a file, for credentials.
    #[arg(long, value_name = "NAME=FILE", requires = "config", conflicts_with = "redis_key")]
    scope_file: Vec<String>,
    /// The key header's value, as the client sent it.
    #[arg(long, value_name = "KEY", required_unless_present = "redis_key", requires = "config")]
    key: Option<String>,
    /// The record's key in Redis, such as `list` shows.
    #[arg(long, value_name = "KEY", conflicts_with = "key")]
    redis_key: Option<String>,
}

/// A record's place.
pub struct Target {
    pub redis_key: String,
    pub settings: Option<Settings>,
}

/// What a configuration says of it.
pub struct Settings {
    pub redis: RedisConfig,
    /// `None` where it was not said, and there are several.
    pub rule: Option<Rc<Rule>>,
}

impl Args {
    /// Finds the place; Redis is not asked.
    pub fn locate(&self) -> Result<Target, Failure> {
        let settings = self.settings()?;
        if let Some(redis_key) = &self.redis_key {
            if let Some(settings) = &settings
                && !redis_key.starts_with(&settings.redis.key_prefix)
            {
                return Err(Failure::usage(format!(
                    "--redis-key: it does not begin with the configuration's key_prefix {:?}",
                    settings.redis.key_prefix
                )));
            }
            return Ok(Target { redis_key: redis_key.clone(), settings });
        }
        // clap has seen to both.
        let (Some(settings), Some(key)) = (settings, &self.key) else {
            return Err(Failure::usage("--config and --key, or --redis-key"));
        };
        let Some(rule) = &settings.rule else { return Err(Failure::usage("--rule: there are several")) };
        let key = parse_key([key.as_bytes()], &rule.key)
            .map_err(|error| Failure::usage(format!("--key: {error}")))?
            .ok_or_else(|| Failure::usage("--key: the key is empty"))?;
        let given = self.given(rule)?;
        let headers = HeaderBlock::from_pairs(given.headers.iter().map(|(name, value)| (name, value)));
        let head = RequestHead { headers: &headers, attributes: &given };
        let scope = resolve_scope(rule, &head).map_err(|error| {
            Failure::usage(format!("--scope: {error}; needed: {}", needed(rule).join(", ")))
        })?;
        let redis_key = [&*settings.redis.key_prefix, &StoreKey::under(rule, &scope, &key).hex()].concat();
        Ok(Target { redis_key, settings: Some(settings) })
    }

    fn settings(&self) -> Result<Option<Settings>, Failure> {
        let Some(file) = &self.config else { return Ok(None) };
        let config = load(file)?;
        let StoreConfig::Redis(redis) = config.store else {
            return Err(Failure::usage(format!(
                "{}: its store is shared_data: those records live in the Envoy process, where nobody else can read them",
                file.display()
            )));
        };
        let names = || config.rules.iter().map(|rule| rule.name.as_str()).collect::<Vec<_>>().join(", ");
        let rule = match (&self.rule, config.rules.as_slice()) {
            (Some(name), rules) => {
                let rule = rules.iter().find(|rule| rule.name == *name);
                Some(Rc::clone(rule.ok_or_else(|| {
                    Failure::usage(format!(
                        "--rule: {} has no rule of this name, but {}",
                        file.display(),
                        names()
                    ))
                })?))
            }
            (None, [only]) => Some(Rc::clone(only)),
            (None, _) if self.key.is_some() => {
                return Err(Failure::usage(format!("--rule is needed: one of {}", names())));
            }
            (None, _) => None,
        };
        Ok(Some(Settings { redis, rule }))
    }

    /// What the request would have brought.
    fn given(&self, rule: &Rule) -> Result<Given, Failure> {
        let parts = match &rule.scope {
            Scope::Shared => &[],
            Scope::Parts(parts) => parts.as_slice(),
        };
        let mut open: Vec<&ScopePart> =
            parts.iter().filter(|part| !matches!(part, ScopePart::Constant(_))).collect();
        let mut given = Given::default();
        let values = self.scope.iter().map(|argument| ("--scope", argument));
        let files = self.scope_file.iter().map(|argument| ("--scope-file", argument));
        for (option, argument) in values.chain(files) {
            let found = open.iter().enumerate().find_map(|(at, part)| {
                let (kind, value) = value_of(&name_of(part), argument)?;
                Some((at, kind, value))
            });
            let Some((at, kind, value)) = found else {
                return Err(Failure::usage(format!(
                    "{option}: expected NAME=VALUE, each once, of {}",
                    needed(rule).join(", ")
                )));
            };
            let value = if option == "--scope-file" {
                let mut value = std::fs::read(value)
                    .map_err(|error| Failure::usage(format!("--scope-file: {value}: {error}")))?;
                while value.pop_if(|last| matches!(last, b'\r' | b'\n')).is_some() {}
                value
            } else {
                value.as_bytes().to_vec()
            };
            given.put(open.remove(at), kind, value)?;
        }
        Ok(given)
    }
}

/// A plugin configuration, checked by the filter's own loader.
pub fn load(file: &std::path::Path) -> Result<Config, Failure> {
    let json = std::fs::read(file).map_err(|error| Failure::usage(format!("{}: {error}", file.display())))?;
    config::load(&json).map_err(|errors| {
        let lines: Vec<String> =
            errors.0.iter().map(|error| format!("{}: {error}", file.display())).collect();
        Failure::usage(lines.join("\n"))
    })
}

fn name_of(part: &ScopePart) -> String {
    match part {
        ScopePart::Header(name) => name.clone(),
        ScopePart::Authorization => "authorization".to_owned(),
        ScopePart::JwtClaim { claim, .. } => claim.clone(),
        ScopePart::PeerCertificate(CertificateField::UriSan) => "uri_san".to_owned(),
        ScopePart::PeerCertificate(CertificateField::Subject) => "subject".to_owned(),
        ScopePart::PeerCertificate(CertificateField::Sha256) => "sha256".to_owned(),
        ScopePart::Property(path) => path.join("."),
        ScopePart::Constant(_) => String::new(),
    }
}

/// What has to be said of a rule's scope.
fn needed(rule: &Rule) -> Vec<String> {
    let Scope::Parts(parts) = &rule.scope else { return vec!["nothing: the scope is shared".to_owned()] };
    let named = parts.iter().filter(|part| !matches!(part, ScopePart::Constant(_)));
    let needed: Vec<String> =
        named.map(|part| format!("{}=VALUE ({})", name_of(part), label(part))).collect();
    if needed.is_empty() { vec!["nothing: the scope is constant".to_owned()] } else { needed }
}

/// How the host serializes a value.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Text,
    Number,
    Integer,
    Boolean,
}

fn value_of<'a>(name: &str, argument: &'a str) -> Option<(Kind, &'a str)> {
    let (begin, rest) = argument.split_at_checked(name.len())?;
    if !begin.eq_ignore_ascii_case(name) {
        return None;
    }
    [
        ("=", Kind::Text),
        (":number=", Kind::Number),
        (":integer=", Kind::Integer),
        (":boolean=", Kind::Boolean),
    ]
    .into_iter()
    .find_map(|(mark, kind)| Some((kind, rest.strip_prefix(mark)?)))
}

#[derive(Default)]
struct Given {
    headers: Vec<(String, Vec<u8>)>,
    attributes: Vec<(Vec<String>, Vec<u8>)>,
}

impl Given {
    fn put(&mut self, part: &ScopePart, kind: Kind, value: Vec<u8>) -> Result<(), Failure> {
        let path = attribute_path(part);
        if path.is_empty() {
            if kind != Kind::Text {
                return Err(Failure::usage(format!("--scope: {} is text", label(part))));
            }
            self.headers.push((name_of(part), value));
            return Ok(());
        }
        let text = || std::str::from_utf8(&value).ok();
        let bytes = match kind {
            Kind::Text => Some(value.clone()),
            Kind::Number => text().and_then(|text| Some(text.parse::<f64>().ok()?.to_le_bytes().to_vec())),
            Kind::Integer => text().and_then(|text| Some(text.parse::<i64>().ok()?.to_le_bytes().to_vec())),
            Kind::Boolean => text().and_then(|text| Some(vec![u8::from(text.parse::<bool>().ok()?)])),
        };
        let bytes = bytes.ok_or_else(|| {
            Failure::usage(format!("--scope: the value of {} is not of that kind", label(part)))
        })?;
        self.attributes.push((path.into_iter().map(str::to_owned).collect(), bytes));
        Ok(())
    }
}

impl Attributes for Given {
    fn attribute(&self, path: &[&str]) -> Option<Vec<u8>> {
        self.attributes.iter().find(|(known, _)| known == path).map(|(_, value)| value.clone())
    }
}
