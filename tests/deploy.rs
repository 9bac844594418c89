//! What is deployed besides the filter is well-formed: mesh resources, the compose file, the systemd unit, every plugin configuration.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, missing_docs)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use idempotency::config;
use serde_json::{Value, json};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: impl AsRef<Path>) -> String {
    let path = root().join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn documents_of(path: &Path) -> Vec<Value> {
    serde_saphyr::from_multiple(&read(path)).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The YAML files of these folders, subfolders not included.
fn yaml_files(folders: &[&str]) -> Vec<PathBuf> {
    let mut files = vec![];
    for folder in folders {
        for entry in std::fs::read_dir(root().join(folder)).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "yaml") {
                files.push(path.strip_prefix(root()).unwrap().to_owned());
            }
        }
    }
    files.sort();
    files
}

struct Validator {
    schemas: boon::Schemas,
    index: boon::SchemaIndex,
}

fn validator(path: &str) -> Validator {
    let mut schema: Value = serde_json::from_str(&read(path)).unwrap();
    // One schema names its dialect by an address that nobody knows.
    schema.as_object_mut().unwrap().remove("$schema");
    let mut compiler = boon::Compiler::new();
    compiler.add_resource("schema.json", schema).unwrap();
    let mut schemas = boon::Schemas::new();
    let index = compiler.compile("schema.json", &mut schemas).unwrap_or_else(|e| panic!("{path}: {e:#}"));
    Validator { schemas, index }
}

fn mistakes(validator: &Validator, document: &Value) -> Vec<String> {
    match validator.schemas.validate(document, validator.index) {
        Ok(()) => Vec::new(),
        Err(error) => vec![format!("{error:#}")],
    }
}

const MESHES: [&str; 2] = ["istio", "envoy-gateway"];

#[test]
fn mesh_resources_match_their_schemas() {
    let mut kinds = BTreeSet::new();
    for mesh in MESHES {
        for path in yaml_files(&[&format!("envoy/{mesh}")]) {
            for document in documents_of(&path) {
                let kind = document["kind"].as_str().unwrap();
                let validator = validator(&format!("tests/schemas/{mesh}/{kind}.json"));
                assert_eq!(
                    mistakes(&validator, &document),
                    Vec::<String>::new(),
                    "{}: {kind}",
                    path.display()
                );
                // The schemas are closed and typed: a field of another name and one of another type are found.
                let mut misspelt = document.clone();
                misspelt["spec"]["tragetRefs"] = json!([]);
                assert!(!mistakes(&validator, &misspelt).is_empty(), "{kind} takes a misspelt field");
                let fields = document["spec"].as_object().unwrap();
                for name in fields.keys() {
                    let mut mistyped = document.clone();
                    mistyped["spec"][name] = json!(7);
                    assert!(!mistakes(&validator, &mistyped).is_empty(), "{kind} takes a number as {name}");
                }
                kinds.insert(kind.to_owned());
            }
        }
    }
    let expected = [
        "EnvoyExtensionPolicy",
        "EnvoyFilter",
        "EnvoyPatchPolicy",
        "EnvoyProxy",
        "TrafficExtension",
        "VirtualService",
        "WasmPlugin",
    ];
    assert_eq!(kinds, expected.map(str::to_owned).into());
}

/// The plugin configurations in a document: the texts that are JSON objects, and what meshes have as YAML.
fn plugin_configurations(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::String(text) if text.trim_start().starts_with('{') => found.push(text.clone()),
        Value::Array(items) => items.iter().for_each(|item| plugin_configurations(item, found)),
        Value::Object(fields) => {
            for (name, field) in fields {
                match name.as_str() {
                    "pluginConfig" => found.push(field.to_string()),
                    "config" if field["rules"].is_array() => found.push(field.to_string()),
                    _ => plugin_configurations(field, found),
                }
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

#[test]
fn every_plugin_configuration_that_is_shipped_loads() {
    let files = yaml_files(&["envoy", "envoy/ecds", "envoy/istio", "envoy/envoy-gateway", "deploy"]);
    let (mut rules, mut holds) = (0, 0);
    for path in files {
        let mut found = vec![];
        documents_of(&path).iter().for_each(|document| plugin_configurations(document, &mut found));
        for text in found {
            let loaded = config::load_plugin(text.as_bytes());
            assert!(loaded.is_ok(), "{}: {}", path.display(), loaded.unwrap_err());
            if text.contains("request_end_hold") { holds += 1 } else { rules += 1 }
        }
    }
    assert!(rules >= 12 && holds >= 5, "{rules} with rules, {holds} holds");
}

/// Behind a sidecar a 503 or 408 may be the sidecar's own, of a request that ran: neither is "not processed", nor an answer to keep.
#[test]
fn meshes_take_no_503_and_no_408_for_not_processed() {
    for path in MESHES.iter().flat_map(|mesh| yaml_files(&[&format!("envoy/{mesh}")])) {
        let mut found = vec![];
        documents_of(&path).iter().for_each(|document| plugin_configurations(document, &mut found));
        let with_rules = found.iter().filter(|text| text.contains("rules"));
        assert_eq!(with_rules.clone().count(), 1, "{}", path.display());
        for text in with_rules {
            let defaults = &serde_json::from_str::<Value>(text).unwrap()["defaults"];
            let released = defaults["release_statuses"].as_array().unwrap();
            let replayed = defaults["replay_statuses"].as_array().unwrap();
            for status in [408, 503] {
                assert!(
                    !released.contains(&json!(status)) && !replayed.contains(&json!(status)),
                    "{}",
                    path.display()
                );
            }
            assert!(
                !replayed.contains(&json!("4xx")) && !replayed.contains(&json!("5xx")),
                "{}",
                path.display()
            );
        }
    }
}

#[test]
fn the_compose_file_is_of_the_specification_and_what_it_mounts_exists() {
    let compose = documents_of(Path::new("deploy/compose.yaml")).remove(0);
    let validator = validator("tests/schemas/compose-spec.json");
    assert_eq!(mistakes(&validator, &compose), Vec::<String>::new());
    let mut misspelt = compose.clone();
    misspelt["services"]["envoy"]["volume"] = json!([]);
    assert!(!mistakes(&validator, &misspelt).is_empty());

    let version = read(".envoy-version");
    let services = compose["services"].as_object().unwrap();
    assert_eq!(services["envoy"]["image"], format!("envoyproxy/envoy:v{}", version.trim()));
    let mut mounted = BTreeSet::new();
    for (name, service) in services {
        for volume in service["volumes"].as_array().into_iter().flatten() {
            let (source, target) = volume.as_str().unwrap().split_once(':').unwrap();
            let Some(file) = source
                .strip_prefix("./")
                .map(|file| format!("deploy/{file}"))
                .or_else(|| source.strip_prefix("../").map(str::to_owned))
            else {
                assert!(compose["volumes"][source].is_object(), "{name}: no volume {source}");
                continue;
            };
            mounted.insert(file.clone());
            // What is built is no file of the project: the Makefile makes it.
            let is_built =
                file == "dist/idempotency.wasm" && read("Makefile").contains("dist/idempotency.wasm");
            assert!(is_built || root().join(&file).is_file(), "{name}: no file {file}");
            assert!(target.ends_with(":ro"), "{name}: {volume} can be written");
        }
        for other in service["depends_on"].as_object().into_iter().flatten() {
            assert!(services.contains_key(other.0), "{name}: no service {}", other.0);
        }
    }
    let expected = ["deploy/envoy.yaml", "deploy/payments.py", "dist/idempotency.wasm"];
    assert_eq!(mounted, expected.map(str::to_owned).into());
    // The configuration finds the services by their names, and the module below the folder that it is mounted in.
    let envoy = read("deploy/envoy.yaml");
    for name in
        ["address: payments,", "address: redis,", "filename: dist/idempotency.wasm", "port_value: 10000"]
    {
        assert!(envoy.contains(name), "{name}");
    }
    assert_eq!(services["envoy"]["working_dir"], "/etc/envoy");
    // An evicted record would run again.
    assert!(services["redis"]["command"].as_array().unwrap().contains(&json!("noeviction")));
}

/// `key=value` lines by section.
fn unit_lines(text: &str) -> Vec<(String, String, String)> {
    let (mut section, mut lines) = (String::new(), vec![]);
    for line in text.lines().filter(|line| !line.trim().is_empty() && !line.starts_with('#')) {
        if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            name.clone_into(&mut section);
            continue;
        }
        let (key, value) = line.split_once('=').unwrap_or_else(|| panic!("no assignment: {line}"));
        assert!(key.chars().all(|c| c.is_ascii_alphanumeric()) && !section.is_empty(), "{line}");
        lines.push((section.clone(), key.to_owned(), value.to_owned()));
    }
    lines
}

#[test]
fn the_systemd_unit_is_valid_and_hardened() {
    let text = read("deploy/envoy-idempotency.service");
    let lines = unit_lines(&text);
    let service = |key: &str| -> Vec<&str> {
        lines.iter().filter(|line| line.0 == "Service" && line.1 == key).map(|line| line.2.as_str()).collect()
    };
    assert_eq!(
        lines.iter().map(|line| line.0.as_str()).collect::<BTreeSet<_>>(),
        ["Install", "Service", "Unit"].into()
    );
    for (key, value) in [
        ("DynamicUser", "yes"),
        ("NoNewPrivileges", "yes"),
        ("ProtectSystem", "strict"),
        ("CapabilityBoundingSet", ""),
        ("SystemCallFilter", "@system-service"),
        // With it V8 could not compile the filter.
        ("MemoryDenyWriteExecute", "no"),
    ] {
        assert_eq!(service(key), [value], "{key}");
    }
    // A bad configuration never replaces a running one, and a misspelt field is no warning.
    assert!(service("ExecStartPre")[0].contains("--mode validate"));
    assert!(service("ExecStart")[0].contains("--reject-unknown-dynamic-fields"));
    assert!(service("ExecStop")[0].contains("/drain_listeners?inboundonly"));

    let Ok(version) = Command::new("systemd-analyze").arg("--version").output() else {
        // No systemd on this machine: the file's form and settings were checked above.
        return;
    };
    assert!(version.status.success());
    // It looks for the binaries; Envoy may be elsewhere here.
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("envoy-idempotency.service");
    let verify = |text: &str| {
        let text = text.replace("/usr/bin/envoy", "/bin/sh").replace("/usr/bin/curl", "/bin/sh");
        std::fs::write(&copy, text).unwrap();
        let output =
            Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&copy).output().unwrap();
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    assert_eq!(verify(&text), (true, String::new()));
    let (_, complaint) = verify(&text.replace("ProtectSystem=strict", "ProtectSystme=strict"));
    assert!(complaint.contains("ProtectSystme"), "{complaint}");
}
