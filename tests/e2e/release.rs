//! What `make dist` packs: the image layout, taken apart by other tools and run; the bill of materials; the licences.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::support::envoy::config::repository;
use crate::support::prometheus::run;
use crate::support::*;

fn script(name: &str) -> Command {
    let mut command = Command::new("python3");
    command.arg(repository().join("scripts").join(name));
    command
}

/// A release of the module under test.
fn packed(change: impl FnOnce(&mut Command)) -> tempfile::TempDir {
    let out = tempfile::tempdir().unwrap();
    let mut command = script("dist.py");
    command.arg("pack").arg("--wasm").arg(Wasm::Dist.path()).arg("--out").arg(out.path());
    change(&mut command);
    run(&mut command);
    out
}

fn digest(data: &[u8]) -> String {
    let hex: String = Sha256::digest(data).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}

fn json_of(data: &[u8]) -> Value {
    serde_json::from_slice(data).unwrap()
}

/// What a descriptor leads to, with its digest and size checked.
fn blob(image: &Path, descriptor: &Value) -> Vec<u8> {
    let name = descriptor["digest"].as_str().unwrap();
    let data = std::fs::read(image.join("blobs").join(name.replace(':', "/"))).unwrap();
    assert_eq!((digest(&data).as_str(), json!(data.len())), (name, descriptor["size"].clone()));
    data
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_image_holds_a_module_that_runs_and_nothing_else() {
    let out = packed(|_| ());
    let image = out.path().join("image");
    let read = |name: &str| std::fs::read(image.join(name)).unwrap();
    assert_eq!(json_of(&read("oci-layout")), json!({"imageLayoutVersion": "1.0.0"}));
    let index = json_of(&read("index.json"));
    assert_eq!(index["mediaType"], "application/vnd.oci.image.index.v1+json");
    let [described] = index["manifests"].as_array().unwrap().as_slice() else { panic!("{index}") };
    assert_eq!(described["annotations"]["org.opencontainers.image.ref.name"], env!("CARGO_PKG_VERSION"));
    assert_eq!(described["mediaType"], "application/vnd.oci.image.manifest.v1+json");

    // The "compat" kind: one layer of OCI's own media type, and the annotation that goes with that.
    let manifest = json_of(&blob(&image, described));
    assert_eq!(manifest["mediaType"], described["mediaType"]);
    assert_eq!(manifest["annotations"]["module.wasm.image/variant"], "compat");
    assert_eq!(manifest["config"]["mediaType"], "application/vnd.oci.image.config.v1+json");
    let [layer] = manifest["layers"].as_array().unwrap().as_slice() else { panic!("{manifest}") };
    assert_eq!(layer["mediaType"], "application/vnd.oci.image.layer.v1.tar+gzip");
    let blobs = std::fs::read_dir(image.join("blobs/sha256")).unwrap().count();
    assert_eq!(blobs, 3, "manifest, configuration, layer");

    let gzipped = blob(&image, layer);
    // gzip, deflate, no flags, time 0.
    assert_eq!(gzipped[..8], [0x1f, 0x8b, 8, 0, 0, 0, 0, 0]);
    let unpacked = tempfile::tempdir().unwrap();
    let at = |name: &str| unpacked.path().join(name);
    std::fs::write(at("layer.tar.gz"), &gzipped).unwrap();
    let listed = run(Command::new("tar")
        .args(["--numeric-owner", "--full-time", "-tvzf"])
        .arg(at("layer.tar.gz"))
        .env("TZ", "UTC"));
    let shipped = std::fs::read(Wasm::Dist.path()).unwrap();
    let listed: Vec<&str> = listed.split_whitespace().collect();
    let size = shipped.len().to_string();
    assert_eq!(listed, ["-rw-r--r--", "0/0", size.as_str(), "1970-01-01", "00:00:00", "plugin.wasm"]);
    run(Command::new("gzip").args(["-dk"]).arg(at("layer.tar.gz")));
    let config = json_of(&blob(&image, &manifest["config"]));
    let tar = std::fs::read(at("layer.tar")).unwrap();
    assert_eq!(config["rootfs"], json!({"type": "layers", "diff_ids": [digest(&tar)]}));
    run(Command::new("tar").arg("-xf").arg(at("layer.tar")).arg("-C").arg(unpacked.path()));
    assert!(std::fs::read(at("plugin.wasm")).unwrap() == shipped);

    let origin = Origin::start().await;
    let envoy = Envoy::builder()
        .wasm(Wasm::File(at("plugin.wasm")))
        .plugin(plugin_with(json!({})))
        .origin_addr(origin.addr())
        .start()
        .await;
    let key = unique_key();
    let request = Request::post("/pay").key(&key).body("amount=1");
    let first = ask(&envoy, Protocol::Http1, &request).await;
    let retry = ask(&envoy, Protocol::Http1, &request).await;
    assert_eq!((first.status, retry.is_replay(), origin.executions_of(&key)), (200, true, 1));
}

/// Every worker of every Envoy compiles the module.
#[test]
fn the_module_is_small() {
    let bytes = std::fs::metadata(Wasm::Dist.path()).unwrap().len();
    assert!(bytes <= 600 * 1024, "{bytes} B, and 600 KiB are {}", 600 * 1024);
}

#[test]
fn two_runs_give_the_same_bytes_and_every_file_is_in_the_sums() {
    let [one, two] = [packed(|_| ()), packed(|_| ())];
    let sums = std::fs::read_to_string(one.path().join("SHA256SUMS")).unwrap();
    assert_eq!(sums, std::fs::read_to_string(two.path().join("SHA256SUMS")).unwrap());
    let check = |folder: &Path| {
        Command::new("sha256sum")
            .args(["--check", "--strict", "--quiet"])
            .arg("SHA256SUMS")
            .current_dir(folder)
            .output()
    };
    for out in [&one, &two] {
        assert!(check(out.path()).unwrap().status.success());
    }
    let listed: BTreeSet<String> =
        sums.lines().map(|line| line.split_once("  ").unwrap().1.to_owned()).collect();
    let found = run(Command::new("find")
        .args([".", "-type", "f", "!", "-name", "SHA256SUMS", "-printf", "%P\\n"])
        .current_dir(one.path()));
    assert_eq!(listed, found.lines().map(str::to_owned).collect());
    for name in ["idempotency.wasm", "sbom.cdx.json", "observability/alerts.yaml", "THIRD-PARTY-LICENSES.txt"]
    {
        assert!(listed.contains(name), "{name}");
    }
    // The sums tell a byte that was changed.
    let notes = one.path().join("RELEASE-NOTES.md");
    std::fs::write(&notes, std::fs::read_to_string(&notes).unwrap() + " ").unwrap();
    assert!(!check(one.path()).unwrap().status.success());
}

#[test]
fn runbooks_can_be_published_elsewhere_and_a_schema_goes_along() {
    let schema = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(schema.path(), r#"{"type": "object"}"#).unwrap();
    let out = packed(|command| {
        command.args(["--runbooks", "https://ops.example/run/"]).arg("--schema").arg(schema.path());
    });
    let alerts = std::fs::read_to_string(out.path().join("observability/alerts.yaml")).unwrap();
    assert!(alerts.contains("runbook_url: https://ops.example/run/store-unreachable.md\n"));
    assert!(!alerts.contains("runbook_url: docs/"));
    let shipped = std::fs::read(out.path().join("idempotency.schema.json")).unwrap();
    assert_eq!(json_of(&shipped), json!({"type": "object"}));
}

/// The crates in the module, told by `cargo tree`.
fn crates_in_the_module() -> BTreeSet<String> {
    let tree = run(Command::new("cargo")
        .args(["tree", "--locked", "--target", "wasm32-wasip1", "--edges", "normal,no-proc-macro"])
        .args(["--prefix", "none", "--format", "{p}"])
        .current_dir(repository()));
    tree.lines()
        .filter_map(|line| line.split_once(" v"))
        .map(|(name, version)| format!("{name}@{}", version.split_whitespace().next().unwrap()))
        .filter(|each| !each.starts_with("envoy-idempotency@"))
        .collect()
}

#[test]
fn the_bill_of_materials_is_valid_and_names_every_crate_of_the_module() {
    let out = packed(|_| ());
    let path = out.path().join("sbom.cdx.json");
    let packages = run(&mut Command::new(repository().join("scripts/install-cyclonedx.sh")));
    let check =
        |path: &Path| script("check-sbom.py").arg(path).env("PYTHONPATH", packages.trim()).output().unwrap();
    let checked = check(&path);
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
    let bom = json_of(&std::fs::read(&path).unwrap());
    // The check can fail.
    let mut broken = bom.clone();
    broken["components"][0]["scope"] = json!("needed");
    std::fs::write(out.path().join("broken.json"), broken.to_string()).unwrap();
    assert!(!check(&out.path().join("broken.json")).status.success());

    let module = std::fs::read(Wasm::Dist.path()).unwrap();
    let hash = json!([{"alg": "SHA-256", "content": digest(&module).trim_start_matches("sha256:")}]);
    assert_eq!(bom["metadata"]["component"]["hashes"], hash);
    let of_scope = |scope: &str| -> BTreeSet<String> {
        let all = bom["components"].as_array().unwrap().iter();
        all.filter(|each| each["scope"] == scope)
            .map(|each| each["purl"].as_str().unwrap().trim_start_matches("pkg:cargo/").to_owned())
            .collect()
    };
    let linked = of_scope("required");
    assert!(linked.len() > 10, "{linked:?}");
    assert_eq!(linked, crates_in_the_module());
    // What only the compiler runs is there, but told apart.
    assert!(of_scope("excluded").iter().any(|each| each.starts_with("serde_derive@")));
    let lock = std::fs::read_to_string(repository().join("Cargo.lock")).unwrap();
    for component in bom["components"].as_array().unwrap() {
        let checksum = component["hashes"][0]["content"].as_str().unwrap();
        let entry = format!("name = {}\nversion = {}\n", component["name"], component["version"]);
        let (_, rest) = lock.split_once(&entry).unwrap_or_else(|| panic!("{entry}"));
        assert!(rest.split("\n\n").next().unwrap().contains(checksum), "{component}");
    }
    // Edges lead to what is listed.
    let edges = bom["dependencies"].as_array().unwrap();
    let refs: Vec<&Value> = edges.iter().map(|each| &each["ref"]).collect();
    for edge in edges {
        assert!(edge["dependsOn"].as_array().unwrap().iter().all(|each| refs.contains(&each)), "{edge}");
    }
}

#[test]
fn every_crate_of_the_module_is_under_an_allowed_licence_whose_text_is_shipped() {
    let allowed =
        |expression: &str| script("dist.py").args(["licence", expression]).output().unwrap().status.success();
    for (expression, expected) in [
        ("MIT", true),
        ("MIT/Apache-2.0", true),
        ("GPL-3.0-only OR MIT", true),
        ("(GPL-3.0-only OR MIT) AND Unicode-3.0", true),
        ("Apache-2.0 WITH LLVM-exception", true),
        ("GPL-3.0-only", false),
        ("MIT AND GPL-3.0-only", false),
        ("MIT OR Apache-2.0 AND", false),
        ("GPL-3.0-only WITH Classpath-exception-2.0", false),
        ("", false),
    ] {
        assert_eq!(allowed(expression), expected, "{expression:?}");
    }
    let out = packed(|_| ());
    let bom = json_of(&std::fs::read(out.path().join("sbom.cdx.json")).unwrap());
    let texts = std::fs::read_to_string(out.path().join("THIRD-PARTY-LICENSES.txt")).unwrap();
    let mut expressions = BTreeSet::new();
    for component in bom["components"].as_array().unwrap() {
        let text = |field: &str| component[field].as_str().unwrap();
        expressions.insert(component["licenses"][0]["expression"].as_str().unwrap());
        if component["scope"] == "required" {
            // Once in the list, and at least once above a text.
            let named = format!("{} {}", text("name"), text("version"));
            assert!(
                texts.contains(&format!("\n{named}: ")) && texts.contains(&format!("\n{named} (")),
                "{named}"
            );
        }
    }
    for expression in expressions {
        assert!(allowed(expression), "{expression}");
    }
    for phrase in
        ["Permission is hereby granted, free of charge", "TERMS AND CONDITIONS FOR USE, REPRODUCTION"]
    {
        assert!(texts.contains(phrase), "{phrase}");
    }
}
