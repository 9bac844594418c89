//! The schema and the reference say what the loader does.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::time::Duration;

use idempotency::config::{Config, load, load_plugin};
use serde_json::{Map, Value, json};

use crate::command::run;
use crate::{project, read};

fn schema() -> Value {
    run(&["schema"]).expect(0, "").json()
}

/// Says for each document whether the schema accepts it.
fn judge() -> impl Fn(&Value) -> bool {
    let mut compiler = boon::Compiler::new();
    compiler.set_default_draft(boon::Draft::V2020_12);
    compiler.add_resource("plugin.json", schema()).unwrap();
    let mut schemas = boon::Schemas::new();
    let index = compiler.compile("plugin.json", &mut schemas).unwrap();
    move |document| schemas.validate(document, index).is_ok()
}

fn files(folder: &str) -> Vec<(String, String)> {
    let mut files: Vec<_> = std::fs::read_dir(project(folder))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension() == Some(OsStr::new("json")))
        .map(|path| {
            let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
            (name, std::fs::read_to_string(path).unwrap())
        })
        .collect();
    files.sort();
    files
}

#[test]
fn the_schema_accepts_every_good_configuration() {
    let accepts = judge();
    let good = files("tests/config/good");
    assert!(good.len() > 20);
    for (name, text) in good {
        assert!(accepts(&serde_json::from_str(&text).unwrap()), "{name}");
    }
    for text in [
        r#"{"role": "request_end_hold"}"#,
        r#"{"store": {"sharedData": {}}, "rules": [{"name": "a", "scope": "shared"}]}"#,
    ] {
        assert!(load_plugin(text.as_bytes()).is_ok());
        assert!(accepts(&serde_json::from_str(text).unwrap()), "{text}");
    }
}

/// What a schema can't say: settings compared with each other, durations' bounds, regular expressions, items that differ
/// in case only, and members given twice, which a JSON value has lost. A role is wrong only for who loads a filter.
const BEYOND_A_SCHEMA: &[&str] = &[
    "defaults_do_not_fit_rule",
    "detached_body",
    "detached_room",
    "duplicate_member",
    "duplicate_rules",
    "execution_detached",
    "failed_ttl_below_lock_ttl",
    "fingerprint_headers",
    "lock_ttl_above_default_ttls",
    "lock_ttl_below_store_timeout",
    "lock_ttl_below_store_timeout_in_defaults",
    "lock_ttl_overflow",
    "lock_ttl_short",
    "match_hosts_twice",
    "match_path_regex",
    "match_path_regex_large",
    "match_path_regex_unbalanced",
    "record_ttl_above",
    "record_ttl_below_lock_ttl",
    "response_headers_in_both",
    "role_request_end_hold",
    "rule_name_twice",
    "scope_header_is_chosen_key_header",
    "scope_header_is_key_header",
    "scope_twice",
    "statuses_in_both",
    "statuses_in_both_by_default",
    "store_index_does_not_fit",
    "store_index_does_not_fit_default",
    "store_index_just_does_not_fit",
    "store_redis_near_cache_room",
    "store_redis_near_cache_room_default",
    "store_redis_near_cache_ttl",
    "store_redis_timeout_above",
    "store_redis_timeout_below",
    "store_timeout_above_default_lock_ttl",
    "store_timeout_above_default_wait_timeout",
    "wait_timeout_above",
    "wait_timeout_below",
    "wait_timeout_below_store_timeout",
];

#[test]
fn the_schema_refuses_every_bad_configuration_that_a_schema_can_refuse() {
    let accepts = judge();
    let mut accepted = Vec::new();
    for (name, text) in files("tests/config/bad") {
        // What is no JSON at all is no question for a schema.
        let Ok(document) = serde_json::from_str::<Value>(&text) else { continue };
        if accepts(&document) {
            accepted.push(name);
        }
    }
    assert_eq!(accepted, BEYOND_A_SCHEMA);
}

/// A configuration in which `value` stands at a place of the schema, where `*` is the first item.
fn with(place: &[&str], value: Value) -> Value {
    let rule = json!({"name": "r", "scope": "shared"});
    let mut config = json!({"store": {"shared_data": {}}, "rules": [rule]});
    if place.first() == Some(&"store") {
        config["store"] = if place.get(2) == Some(&"gateway") {
            json!({"redis": {"cluster": "c", "gateway": {"dialect": "upstash_resp2"}}})
        } else if place.get(1) == Some(&"redis") {
            json!({"redis": {"cluster": "c"}})
        } else {
            json!({"shared_data": {}})
        };
    }
    let mut at = &mut config;
    for (index, name) in place.iter().enumerate() {
        let is_last = index + 1 == place.len();
        at = if *name == "*" {
            if !at.is_array() {
                *at = json!([{}]);
            }
            &mut at[0]
        } else {
            if !at.is_object() {
                *at = json!({});
            }
            &mut at[*name]
        };
        if is_last {
            break;
        }
    }
    if let (Value::Object(known), Value::Object(more)) = (&mut *at, &value) {
        known.extend(more.clone());
    } else {
        *at = value;
    }
    config
}

fn refusals(config: &Value) -> Vec<(String, String)> {
    match load(config.to_string().as_bytes()) {
        Ok(_) => Vec::new(),
        Err(errors) => errors.0.into_iter().map(|error| (error.path, error.message)).collect(),
    }
}

/// Every object of the schema with its place, `$ref`s followed.
fn objects(schema: &Value) -> Vec<(Vec<String>, Map<String, Value>)> {
    let mut found = Vec::new();
    let mut open = vec![(Vec::new(), schema.clone())];
    while let Some((place, node)) = open.pop() {
        let node = resolve(schema, node);
        for branch in node["anyOf"].as_array().into_iter().flatten().filter(|_| place.last().is_some()) {
            open.push((place.clone(), branch.clone()));
        }
        if node["items"].is_object() {
            let mut place = place.clone();
            place.push("*".to_owned());
            open.push((place, node["items"].clone()));
        }
        if let Some(properties) = node["properties"].as_object().filter(|_| node["type"] == "object") {
            for (name, value) in properties.iter().filter(|(name, _)| !name.contains(char::is_uppercase)) {
                let mut place = place.clone();
                place.push(name.clone());
                open.push((place, value.clone()));
            }
            found.push((place, properties.clone()));
        }
    }
    found
}

fn resolve(schema: &Value, node: Value) -> Value {
    let Some(target) = node["$ref"].as_str() else { return node };
    let mut resolved = schema.pointer(target.trim_start_matches('#')).unwrap().clone();
    for (name, value) in node.as_object().unwrap() {
        if name != "$ref" {
            resolved[name] = value.clone();
        }
    }
    resolved
}

#[test]
fn the_schema_names_exactly_the_fields_that_the_loader_knows() {
    let schema = schema();
    let objects = objects(&schema);
    assert!(objects.len() > 12, "{}", objects.len());
    for (place, properties) in objects {
        let names: Vec<&str> = place.iter().map(String::as_str).collect();
        let config = with(&names, json!({"quite_another_name": 1}));
        let refusals = refusals(&config);
        let known = refusals
            .iter()
            .find_map(|(path, message)| {
                message
                    .strip_prefix("unknown field, expected one of: ")
                    .filter(|_| path.ends_with("quite_another_name"))
            })
            .unwrap_or_else(|| panic!("{place:?}: {refusals:?}"));
        let known: BTreeSet<&str> = known.split(", ").collect();
        let described: BTreeSet<&str> =
            properties.keys().map(String::as_str).filter(|name| !name.contains(char::is_uppercase)).collect();
        assert_eq!(described, known, "{place:?}");
        let camel = properties.len() - described.len();
        assert_eq!(camel, known.iter().filter(|name| name.contains('_')).count(), "{place:?}");
    }
}

/// The settings with their places.
fn settings() -> Vec<(Vec<String>, Value)> {
    let schema = schema();
    let mut all = Vec::new();
    for (place, properties) in objects(&schema) {
        for (name, value) in properties.into_iter().filter(|(name, _)| !name.contains(char::is_uppercase)) {
            let mut place = place.clone();
            place.push(name);
            all.push((place, resolve(&schema, value)));
        }
    }
    all
}

/// Whether the loader refuses the value for itself, and not beside another.
fn is_refused(place: &[String], value: Value) -> bool {
    let names: Vec<&str> = place.iter().map(String::as_str).collect();
    let own = [
        "expected an integer from",
        "expected a status from",
        "expected a whole number and a unit",
        "expected \"",
    ];
    let name = place.last().unwrap();
    refusals(&with(&names, value))
        .iter()
        .any(|(path, message)| path.ends_with(name.as_str()) && own.iter().any(|own| message.contains(own)))
}

fn millis(text: &str) -> u64 {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap();
    let unit = match &text[end..] {
        "ms" => 1,
        "s" => 1000,
        "m" => 60_000,
        "h" => 3_600_000,
        other => panic!("{other}"),
    };
    text[..end].parse::<u64>().unwrap() * unit
}

#[test]
fn the_schemas_bounds_and_words_are_the_loaders() {
    let (mut integers, mut durations, mut choices) = (0, 0, 0);
    for (place, setting) in settings() {
        if let (Some(least), Some(most)) = (setting["minimum"].as_u64(), setting["maximum"].as_u64()) {
            integers += 1;
            for (value, refused) in [
                (json!(least), false),
                (json!(most), false),
                (json!(most + 1), true),
                (json!(i128::from(least) as i64 - 1), true),
            ] {
                assert_eq!(is_refused(&place, value.clone()), refused, "{place:?} {value}");
            }
        }
        if let (Some(least), Some(most)) = (setting["x-minimum"].as_str(), setting["x-maximum"].as_str()) {
            durations += 1;
            let (below, above) = (millis(least) - 1, millis(most) + 1);
            for (value, refused) in [
                (least.to_owned(), false),
                (most.to_owned(), false),
                (format!("{below}ms"), true),
                (format!("{above}ms"), true),
            ] {
                assert_eq!(is_refused(&place, json!(value)), refused, "{place:?} {value}");
            }
        }
        if let Some(words) =
            setting["enum"].as_array().filter(|_| setting["type"] == "string" && place != ["role"])
        {
            choices += 1;
            for word in words {
                assert!(!is_refused(&place, word.clone()), "{place:?} {word}");
            }
            let names: Vec<&str> = place.iter().map(String::as_str).collect();
            let listed = refusals(&with(&names, json!("quite another word")));
            let words: BTreeSet<&str> = words.iter().map(|word| word.as_str().unwrap()).collect();
            let (_, message) =
                listed.iter().find(|(_, message)| message.contains("quite another word")).unwrap();
            let expected = message.split("expected ").nth(1).unwrap();
            let known: BTreeSet<&str> = expected.split('"').skip(1).step_by(2).collect();
            assert_eq!(words, known, "{place:?}");
        }
    }
    assert!(integers > 25 && durations > 10 && choices > 15, "{integers} {durations} {choices}");
}

#[test]
fn a_default_that_is_written_out_changes_nothing() {
    let loaded = |config: &Value| -> Config {
        let mut config =
            load(config.to_string().as_bytes()).unwrap_or_else(|errors| panic!("{config}: {errors}"));
        config.warnings.clear();
        config
    };
    let mut count = 0;
    for (place, setting) in settings() {
        let Some(default) = setting.get("default") else { continue };
        // A rule's settings are the same in `defaults`, but for those of a path that matches nothing by itself.
        let names: Vec<&str> = place.iter().map(String::as_str).collect();
        let (holder, name) = names.split_at(names.len() - 1);
        let without = loaded(&if holder.is_empty() { with(&[], json!({})) } else { with(holder, json!({})) });
        let written = loaded(&with(holder, json!({ name[0]: default })));
        assert_eq!(format!("{without:?}"), format!("{written:?}"), "{place:?}");
        count += 1;
    }
    assert!(count > 50, "{count}");
    assert_eq!(
        Duration::from_secs(60),
        load(br#"{"store": {"shared_data": {}}, "rules": [{"name": "a", "scope": "shared"}]}"#)
            .unwrap()
            .rules[0]
            .lock_ttl
    );
}

/// With `UPDATE_REFERENCE=1` the page is written anew.
#[test]
fn the_pages_tables_are_those_of_the_settings() {
    const END: &str = "<!-- end of settings -->\n";
    let tables = run(&["schema", "--markdown"]).expect(0, "").out;
    let mut page = read("docs/configuration.md");
    let before = page.clone();
    let mut count = 0;
    for table in tables.split_inclusive(END).map(str::trim_start) {
        let mark = table.lines().next().unwrap();
        let begin = page.find(mark).unwrap_or_else(|| panic!("docs/configuration.md has no {mark}"));
        let end = begin + page[begin..].find(END).unwrap() + END.len();
        page.replace_range(begin..end, table);
        count += 1;
    }
    assert_eq!(count, 6);
    if std::env::var_os("UPDATE_REFERENCE").is_some() {
        std::fs::write(project("docs/configuration.md"), &page).unwrap();
    } else {
        assert!(
            page == before,
            "docs/configuration.md has drifted: UPDATE_REFERENCE=1 cargo test --features cli --test cli"
        );
    }
}
