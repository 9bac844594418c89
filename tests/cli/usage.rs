//! What every subcommand has in common.

use crate::command::{command, run};
use crate::{Scratch, project};

#[test]
fn a_wrong_argument_is_a_usage_error_and_help_is_none() {
    run(&["validate"]).expect(2, "FILE");
    run(&["frobnicate"]).expect(2, "frobnicate");
    run(&["validate", "/nowhere/at/all.json"]).expect(2, "/nowhere/at/all.json");
    run(&["--version"]).expect(0, env!("CARGO_PKG_VERSION"));
    let help = run(&["--help"]).expect(0, "Exit codes:").out;
    for name in [
        "validate",
        "envoy-snippet",
        "schema",
        "explain",
        "inspect",
        "list",
        "forget",
        "resolve",
        "completions",
    ] {
        assert!(help.lines().any(|line| line.trim_start().starts_with(name)), "{name}");
        run(&[name, "--help"]).expect(0, "Usage:");
    }
}

#[test]
fn a_failure_is_json_where_json_was_asked_for() {
    let failed = run(&["--json", "validate", "/nowhere.json"]).expect(2, "");
    assert!(failed.json()["error"].as_str().unwrap().contains("/nowhere.json"));
}

#[test]
fn a_pipe_has_no_colour_unless_it_is_asked_for() {
    let file = project("tests/config/good/minimal.json");
    let file = file.to_str().unwrap();
    assert!(!run(&["validate", file]).expect(0, "ok").out.contains('\u{1b}'));
    assert!(run(&["--color", "always", "validate", file]).expect(0, "ok").out.contains('\u{1b}'));
    let output =
        command(&["validate", file]).env("NO_COLOR", "1").env("CLICOLOR_FORCE", "0").output().unwrap();
    assert!(!output.stdout.contains(&0x1b));
}

#[test]
fn completions_know_the_subcommands() {
    for shell in ["bash", "zsh", "fish"] {
        run(&["completions", shell]).expect(0, "envoy-snippet");
    }
}

#[test]
fn every_exit_code_and_every_finding_is_in_the_page() {
    let page = crate::read("docs/command.md");
    for code in 0..=6 {
        assert!(page.contains(&format!("| {code} |")), "exit code {code}");
    }
    let mut sources = String::new();
    for file in ["mod", "surroundings", "order", "link", "execution", "routes"] {
        sources.push_str(&crate::read(&format!("src/bin/idempotency/validate/{file}.rs")));
    }
    let mut codes = std::collections::BTreeSet::new();
    for call in ["report.error(", "report.warn(", "report.missing("] {
        for rest in sources.split(call).skip(1) {
            let code = rest.split('"').nth(1).unwrap();
            codes.insert(code.to_owned());
        }
    }
    assert!(codes.len() > 25, "{codes:?}");
    for code in codes {
        assert!(page.contains(&format!("`{code}`")), "docs/command.md does not explain {code}");
    }
}

#[test]
fn a_file_that_is_neither_json_nor_yaml_is_a_usage_error() {
    let scratch = Scratch::new();
    let file = scratch.put("x.yaml", "a: [1, 2\nb: }");
    run(&["validate", &file]).expect(2, "neither JSON nor YAML");
}
