//! What the documents name exists: files, links, make targets, configuration examples.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, missing_docs)]

use std::path::{Path, PathBuf};

use idempotency::config;

fn documents() -> Vec<(PathBuf, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut folders = vec![root.join("docs")];
    let mut files: Vec<PathBuf> =
        ["README.md", "CHANGELOG.md", "CONTRIBUTING.md"].map(|name| root.join(name)).to_vec();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "md") {
                files.push(path);
            }
        }
    }
    assert!(files.len() > 6, "{files:?}");
    files.into_iter().map(|path| (path.clone(), std::fs::read_to_string(path).unwrap())).collect()
}

#[test]
fn every_link_leads_somewhere() {
    for (path, text) in documents() {
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let target = link.split('#').next().unwrap();
            if target.is_empty() || target.contains("://") {
                continue;
            }
            let target = path.parent().unwrap().join(target);
            assert!(target.exists(), "{}: {link}", path.display());
        }
    }
}

#[test]
fn every_file_that_is_named_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for (path, text) in documents() {
        for word in text.split('`').skip(1).step_by(2) {
            let is_file = ["src/", "tests/", "envoy/", "docs/", "scripts/", "examples/"]
                .iter()
                .any(|folder| word.starts_with(folder));
            if is_file && !word.contains([' ', '*', '<', '$']) {
                assert!(root.join(word).exists(), "{}: {word}", path.display());
            }
        }
    }
}

#[test]
fn every_make_target_that_is_named_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let makefile = std::fs::read_to_string(root.join("Makefile")).unwrap();
    for (path, text) in documents() {
        for command in text.split("`make ").skip(1).filter_map(|rest| rest.split('`').next()) {
            let target = command.split_whitespace().next().unwrap();
            let defined = makefile.lines().any(|line| line.starts_with(&format!("{target}:")));
            assert!(defined, "{}: make {command}", path.display());
        }
    }
}

#[test]
fn the_readmes_configuration_is_accepted() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let readme = std::fs::read_to_string(root.join("README.md")).unwrap();
    let example = readme.split("value: |").nth(1).unwrap().split("```").next().unwrap();
    let loaded = config::load(example.as_bytes());
    assert!(loaded.is_ok(), "{}", loaded.unwrap_err());
    assert!(!readme.contains("@@"), "a placeholder is left");
}
