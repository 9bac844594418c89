//! `idempotency schema`: what a plugin configuration may hold, for editors and people.

mod settings;

use std::fmt::Write as _;

use serde_json::{Map, Value, json};

use self::settings::{GROUPS, SCOPE_HEADERS, Setting, Shape};
use crate::exit::{Exit, Failure};
use crate::manifest::camel_case;
use crate::output::Output;

/// Print the JSON Schema of the plugin configuration.
///
/// A JSON Schema (2020-12) with every setting, its meaning, default and bounds: for editors, and for pipelines that
/// have no filter at hand. It can't compare settings with each other; `validate` does.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Print the tables of docs/configuration.md instead.
    #[arg(long, hide = true)]
    markdown: bool,
}

pub fn run(args: &Args, output: &Output) -> Result<Exit, Failure> {
    if args.markdown {
        output.print(&GROUPS.map(|(name, settings)| table(name, settings)).join("\n"));
    } else {
        output.print_json(&schema());
    }
    Ok(Exit::Ok)
}

/// A table, between the marks that the page has it in.
fn table(name: &str, settings: &[Setting]) -> String {
    let mut text = format!("<!-- settings: {name} -->\n");
    if name == "statuses" {
        text.push_str("| field | default | the refusal |\n|---|---|---|\n");
    } else {
        text.push_str("| field | type | default | meaning | allowed |\n|---|---|---|---|---|\n");
    }
    for Setting { name: field, shape, default, meaning, allowed } in settings {
        let mut cells = vec![format!("`{field}`")];
        if name != "statuses" {
            cells.push(shape.type_name().to_owned());
        }
        cells.extend([(*default).to_owned(), (*meaning).to_owned()]);
        if name != "statuses" {
            cells.push((*allowed).to_owned());
        }
        for cell in cells {
            let cell = cell.replace('|', "\\|");
            let _ = if cell.is_empty() { write!(text, "| ") } else { write!(text, "| {cell} ") };
        }
        text.push_str("|\n");
    }
    text + "<!-- end of settings -->\n"
}

fn schema() -> Value {
    let mut root = object("top");
    set(&mut root, "$schema", json!("https://json-schema.org/draft/2020-12/schema"));
    set(&mut root, "title", json!("envoy-idempotency plugin configuration"));
    set(
        &mut root,
        "$comment",
        json!("Durations have bounds that a pattern can't hold; they are in the descriptions."),
    );
    set(&mut root, "if", json!({ "required": ["role"] }));
    set(&mut root, "then", json!({ "maxProperties": 1 }));
    // Who the caller is has to be said somewhere.
    let everywhere = json!({ "properties": { "rules": { "items": { "required": ["scope"] } } } });
    let in_defaults =
        json!({ "required": ["defaults"], "properties": { "defaults": { "required": ["scope"] } } });
    set(&mut root, "else", json!({ "required": ["store", "rules"], "anyOf": [in_defaults, everywhere] }));
    set(
        &mut root,
        "$defs",
        json!({
            "duration": {
                "type": "string",
                "pattern": "^0*[1-9][0-9]*(ms|s|m|h)$",
                "examples": ["250ms", "60s", "15m", "24h"],
            },
            "rule": rule(true),
            "defaults": rule(false),
            "scope": scope(),
        }),
    );
    root
}

/// Sets a member of an object.
fn set(schema: &mut Value, name: &str, value: Value) {
    if let Value::Object(members) = schema {
        members.insert(name.to_owned(), value);
    }
}

fn group(name: &str) -> &'static [Setting] {
    GROUPS.iter().find(|(known, _)| *known == name).map_or(&[], |(_, settings)| settings)
}

fn rule(whole: bool) -> Value {
    let mut members = Members::default();
    for setting in group("rule") {
        if whole || (setting.name != "name" && setting.name != "match") {
            members.add(setting.name, setting);
        }
    }
    let mut rule = members.into_schema();
    if whole {
        set(&mut rule, "required", json!(["name"]));
    }
    rule
}

/// The object of a group.
fn object(name: &str) -> Value {
    let mut members = Members::default();
    for setting in group(name) {
        members.add(setting.name, setting);
    }
    let mut schema = members.into_schema();
    if name == "store" {
        set(&mut schema, "minProperties", json!(1));
        set(&mut schema, "maxProperties", json!(1));
    }
    schema
}

/// Members of an object on their way to a schema.
#[derive(Debug, Default)]
struct Members(Vec<(&'static str, Option<&'static Setting>, Members)>);

impl Members {
    fn add(&mut self, name: &'static str, setting: &'static Setting) {
        let (own, rest) = name.split_once('.').map_or((name, None), |(own, rest)| (own, Some(rest)));
        let index = self.0.iter().position(|(known, ..)| *known == own).unwrap_or_else(|| {
            self.0.push((own, None, Self::default()));
            self.0.len() - 1
        });
        let Some((_, described, inner)) = self.0.get_mut(index) else { return };
        match rest {
            Some(rest) => inner.add(rest, setting),
            None => *described = Some(setting),
        }
    }

    fn into_schema(self) -> Value {
        let mut properties = Map::new();
        let mut exclusive = Map::new();
        let mut required = Vec::new();
        for (name, setting, inner) in self.0 {
            let mut value = match setting {
                Some(setting) => described(setting, inner),
                None => inner.into_schema(),
            };
            if name == "path" {
                set(&mut value, "minProperties", json!(1));
                set(&mut value, "maxProperties", json!(1));
            }
            // What is required of the whole configuration depends on its role, and a scope may stand in defaults.
            if setting.is_some_and(|setting| setting.default == "**required**")
                && (name == "cluster" || name == "dialect")
            {
                required.push(name);
            }
            let camel = camel_case(name);
            if camel != name {
                exclusive.insert(camel.clone(), json!({ "not": { "required": [name] } }));
                properties.insert(camel, value.clone());
            }
            properties.insert(name.to_owned(), value);
        }
        let mut schema = json!({ "type": "object", "properties": properties, "additionalProperties": false });
        if !exclusive.is_empty() {
            set(&mut schema, "dependentSchemas", Value::Object(exclusive));
        }
        if !required.is_empty() {
            set(&mut schema, "required", json!(required));
        }
        schema
    }
}

/// A setting's value with what is known of it.
fn described(setting: &Setting, inner: Members) -> Value {
    let mut value = shaped(setting.shape, inner);
    let mut description = plain(setting.meaning);
    if let Shape::Duration(least, most) = setting.shape {
        set(&mut value, "x-minimum", json!(least));
        set(&mut value, "x-maximum", json!(most));
    }
    if !setting.allowed.is_empty() && !setting.allowed.starts_with("see [") {
        let _ = write!(description, ". Allowed: {}", plain(setting.allowed));
    }
    set(&mut value, "description", json!(description));
    if let Some(default) = default(setting) {
        set(&mut value, "default", default);
    }
    value
}

/// The default, where it is one value whatever else is set.
fn default(setting: &Setting) -> Option<Value> {
    let text = setting.default.strip_prefix('`')?.strip_suffix('`')?;
    serde_json::from_str(text).ok()
}

/// Markdown as text.
fn plain(markdown: &str) -> String {
    let mut text = String::new();
    let mut rest = markdown;
    while let Some((before, link)) = rest.split_once('[') {
        let Some((label, (_, after))) =
            link.split_once("](").and_then(|(label, target)| Some((label, target.split_once(')')?)))
        else {
            break;
        };
        text.push_str(before);
        text.push_str(label);
        rest = after;
    }
    text.push_str(rest);
    text.replace("**", "").replace("`` ", "").replace(" ``", "")
}

fn shaped(shape: Shape, inner: Members) -> Value {
    let text = |pattern: &str| json!({ "type": "string", "pattern": pattern });
    let list = |items: Value| json!({ "type": "array", "items": items, "uniqueItems": true });
    let some = |mut list: Value| {
        set(&mut list, "minItems", json!(1));
        list
    };
    match shape {
        Shape::Boolean => json!({ "type": "boolean" }),
        Shape::Integer(least, most) => json!({ "type": "integer", "minimum": least, "maximum": most }),
        Shape::Duration(..) => json!({ "$ref": "#/$defs/duration" }),
        Shape::Words(words) => json!({ "type": "string", "enum": words }),
        Shape::Text(least, most) => json!({
            "type": "string", "minLength": least, "maxLength": most, "pattern": r"^[^\u0000-\u001f\u007f-\u009f]*$",
        }),
        Shape::Name => text("^[A-Za-z0-9_.-]{1,64}$"),
        Shape::Cluster => text("^[!-~]{1,255}$"),
        Shape::KeyPrefix => text("^[!-z|~]{0,64}$"),
        Shape::ProblemTypeBase => json!({
            "type": "string",
            "maxLength": 512,
            "pattern": r"^https?://[!$-.0->@-Z\[\]_a-z~][!$-;=?-Z\[\]_a-z~]*[/#]$|^https?://[!$-.0->@-Z\[\]_a-z~][/#]$",
        }),
        Shape::Header(refused) => header(refused),
        Shape::Headers(refused) => list(header(refused)),
        Shape::Methods => {
            let mut method = text("^[!#$%&'*+.^_`|~0-9A-Z-]{1,64}$");
            set(&mut method, "not", json!({ "enum": ["GET", "HEAD", "OPTIONS", "TRACE", "CONNECT"] }));
            some(list(method))
        }
        Shape::Hosts => some(list(text(
            r"^(\*|(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*(:[0-9]{1,5})?|\[[0-9A-Fa-f:.]+\](:[0-9]{1,5})?)$",
        ))),
        Shape::Path => text(r#"^/[!"$->@-~]*$"#),
        Shape::Regex => json!({ "type": "string", "minLength": 1, "maxLength": 4096 }),
        Shape::ReplayStatuses => list(json!({ "anyOf": [
            { "type": "integer", "minimum": 200, "maximum": 599 },
            { "enum": ["2xx", "3xx", "4xx", "5xx"] },
        ] })),
        Shape::ReleaseStatuses => list(json!({ "type": "integer", "minimum": 200, "maximum": 599 })),
        Shape::Scope => json!({ "$ref": "#/$defs/scope" }),
        Shape::Rules => json!({ "type": "array", "minItems": 1, "items": { "$ref": "#/$defs/rule" } }),
        Shape::Defaults => json!({ "$ref": "#/$defs/defaults" }),
        Shape::Object("") => inner.into_schema(),
        Shape::Object(name) => object(name),
        Shape::ObjectOrFalse => json!({ "anyOf": [{ "const": false }, inner.into_schema()] }),
    }
}

/// A header's name that is none of these, in any case.
fn header(refused: &[&str]) -> Value {
    let mut name = json!({ "type": "string", "pattern": "^[!#$%&'+.^_`|~0-9A-Za-z-]{1,256}$" });
    if !refused.is_empty() {
        let any_case = |text: &str| {
            text.chars().fold(String::new(), |mut pattern, c| {
                match c {
                    '*' => pattern.push_str(".*"),
                    'a'..='z' => _ = write!(pattern, "[{}{c}]", c.to_ascii_uppercase()),
                    other => pattern.push(other),
                }
                pattern
            })
        };
        let patterns: Vec<String> = refused.iter().map(|text| any_case(text)).collect();
        set(&mut name, "not", json!({ "pattern": format!("^({})$", patterns.join("|")) }));
    }
    name
}

fn scope() -> Value {
    let text = || json!({ "type": "string", "minLength": 1, "maxLength": 256, "pattern": r"^[^\u0000-\u001f\u007f-\u009f]*$" });
    let sources = [
        ("header", header(SCOPE_HEADERS), "The one line of this request header."),
        ("authorization", json!({ "const": true }), "A hash of the Authorization header."),
        ("jwt_claim", text(), "A claim that jwt_authn verified; goes with metadata_key."),
        (
            "peer_certificate",
            json!({ "enum": ["uri_san", "subject", "sha256"] }),
            "A field of the client's verified certificate.",
        ),
        (
            "property",
            json!({ "type": "array", "minItems": 1, "items": text() }),
            "Any Envoy attribute, by its path.",
        ),
        ("constant", text(), "The same for every caller of the rule."),
    ];
    let mut properties = Map::new();
    let mut choices = Vec::new();
    let mut add = |name: &str, mut value: Value, description: &str| {
        set(&mut value, "description", json!(description));
        let camel = camel_case(name);
        let either = if camel == name {
            json!({ "required": [name] })
        } else {
            properties.insert(camel.clone(), value.clone());
            json!({ "anyOf": [{ "required": [name] }, { "required": [camel] }] })
        };
        properties.insert(name.to_owned(), value);
        either
    };
    for (name, value, description) in sources {
        choices.push(add(name, value, description));
    }
    let with_key = add("metadata_key", text(), "The name that payload_in_metadata of jwt_authn gives.");
    let with_claim = json!({ "anyOf": [{ "required": ["jwt_claim"] }, { "required": ["jwtClaim"] }] });
    json!({
        "description": "Who the caller is: \"shared\", or parts that count together.",
        "anyOf": [
            { "const": "shared" },
            {
                "type": "array",
                "minItems": 1,
                "uniqueItems": true,
                "items": {
                    "type": "object",
                    "properties": properties,
                    "additionalProperties": false,
                    "oneOf": choices,
                    "dependentSchemas": {
                        "jwt_claim": with_key,
                        "jwtClaim": with_key,
                        "metadata_key": with_claim,
                        "metadataKey": with_claim,
                    },
                    "maxProperties": 2,
                },
            },
        ],
    })
}
