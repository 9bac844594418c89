//! What `observability/` and its documents say agrees with the source, and with each other.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, missing_docs)]

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use idempotency::metrics::{Counter, Gauge, Histogram};
use serde_json::Value;

fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Name and type of every metric of the filter.
fn metrics() -> BTreeMap<&'static str, &'static str> {
    let counters = Counter::ALL.iter().map(|each| (each.name(), "counter"));
    let gauges = Gauge::ALL.iter().map(|each| (each.name(), "gauge"));
    let histograms = Histogram::ALL.iter().map(|each| (each.name(), "histogram"));
    counters.chain(gauges).chain(histograms).collect()
}

fn in_prometheus(name: &str) -> String {
    format!("idempotency_{}", name.replace('.', "_"))
}

/// The names that a query may use.
fn series() -> BTreeSet<String> {
    let mut names: BTreeSet<String> =
        ["success", "failure", "backoff"].map(|end| format!("envoy_wasm_idempotency_vm_reload_{end}")).into();
    names.insert("envoy_wasm_idempotency_vm_reload".to_owned());
    for (name, kind) in metrics() {
        if kind == "histogram" {
            names.extend(["bucket", "sum", "count"].map(|end| format!("{}_{end}", in_prometheus(name))));
        } else {
            names.insert(in_prometheus(name));
        }
    }
    names
}

fn names_in(expr: &str) -> BTreeSet<String> {
    expr.split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
        .filter(|word| word.starts_with("idempotency_") || word.starts_with("envoy_"))
        .map(str::to_owned)
        .collect()
}

/// What the source says of each metric.
fn said_in_the_source() -> BTreeMap<String, String> {
    let (mut said, mut comment) = (BTreeMap::new(), vec![]);
    for line in read("src/metrics.rs").lines().map(str::trim) {
        if let Some(text) = line.strip_prefix("/// ") {
            comment.push(text.to_owned());
            continue;
        }
        let name = line.split_once(" = \"").and_then(|(_, rest)| rest.strip_suffix("\","));
        if let Some(name) = name {
            said.insert(name.to_owned(), comment.join(" "));
        }
        comment.clear();
    }
    said
}

#[test]
fn the_reference_has_every_metric_with_its_type_and_what_the_source_says_of_it() {
    let document = read("docs/observability.md");
    let mut rows: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for line in document.lines().filter(|line| line.starts_with("| `") && line.contains(" | `idempotency_")) {
        let cells: Vec<String> =
            line.trim_matches('|').split(" | ").map(|cell| cell.trim().to_owned()).collect();
        assert_eq!(cells.len(), 4, "{line}");
        let name = cells[0].trim_matches('`').to_owned();
        assert!(rows.insert(name, cells).is_none(), "twice: {line}");
    }
    let said = said_in_the_source();
    assert_eq!(
        rows.keys().map(String::as_str).collect::<Vec<_>>(),
        metrics().into_keys().collect::<Vec<_>>()
    );
    for (name, kind) in metrics() {
        let row = &rows[name];
        assert_eq!((row[1].as_str(), row[2].as_str()), (format!("`{}`", in_prometheus(name)).as_str(), kind));
        assert_eq!(row[3], said[name], "{name}");
    }
}

struct Alert {
    name: String,
    severity: String,
    runbook: String,
    text: String,
}

fn alerts() -> Vec<Alert> {
    let rules = read("observability/alerts.yaml");
    let alerts: Vec<Alert> = rules
        .split("  - alert: ")
        .skip(1)
        .map(|text| {
            let after = |mark: &str| {
                let rest = text.split_once(mark).unwrap_or_else(|| panic!("{mark} in {text}")).1;
                rest.split([' ', '\n', ',']).next().unwrap().to_owned()
            };
            Alert {
                name: text.lines().next().unwrap().to_owned(),
                severity: after("severity: "),
                runbook: after("runbook_url: docs/runbooks/"),
                text: text.to_owned(),
            }
        })
        .collect();
    assert!(alerts.len() >= 18);
    alerts
}

#[test]
fn every_alert_has_its_runbook_and_its_row_and_asks_for_metrics_that_exist() {
    let (known, document, index) = (series(), read("docs/observability.md"), read("docs/runbooks/README.md"));
    let mut pages = BTreeSet::from(["README.md".to_owned()]);
    for alert in alerts() {
        let Alert { name, severity, runbook, text } = &alert;
        let page = read(&format!("docs/runbooks/{runbook}"));
        assert!(page.contains(&format!("`{name}`")), "{runbook} does not name {name}");
        for section in ["What it means", "What to check", "What to do", "What not to do"] {
            let (_, rest) = page
                .split_once(&format!("\n## {section}\n"))
                .unwrap_or_else(|| panic!("{runbook}: {section}"));
            assert!(rest.split("\n## ").next().unwrap().trim().len() > 40, "{runbook}: {section}");
        }
        assert!(index.contains(&format!("({runbook})")) && index.contains(&format!("`{name}`")), "{name}");
        let row = document.lines().find(|line| line.starts_with(&format!("| `{name}` | {severity} |")));
        assert!(row.is_some_and(|row| row.contains(&format!("(runbooks/{runbook})"))), "{name}");
        assert!(["critical", "warning"].contains(&severity.as_str()), "{name}: {severity}");
        let unknown: Vec<_> = names_in(text).difference(&known).cloned().collect();
        assert!(unknown.is_empty(), "{name}: {unknown:?}");
        pages.insert(runbook.clone());
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/runbooks");
    let there =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert_eq!(there.collect::<BTreeSet<_>>(), pages);
}

#[test]
fn the_alert_on_failed_records_adds_up_every_reason() {
    let alert = alerts().into_iter().find(|alert| alert.name == "IdempotencyFailedRecordsRising").unwrap();
    for (name, _) in metrics().into_iter().filter(|(name, _)| name.starts_with("retained.")) {
        let term = format!("increase({}[10m])", in_prometheus(name));
        assert_eq!(alert.text.matches(&term).count(), 2, "{term}: in the share, and in the number");
    }
}

#[test]
fn the_dashboard_is_tied_to_no_data_source_and_shows_every_metric() {
    let dashboard: Value = serde_json::from_str(&read("observability/dashboard.json")).unwrap();
    assert!(
        dashboard.get("uid").is_none() && dashboard.get("id").is_none(),
        "an import must not replace another's"
    );
    let variables = dashboard["templating"]["list"].as_array().unwrap();
    assert_eq!((&variables[0]["name"], &variables[0]["type"]), (&"datasource".into(), &"datasource".into()));
    assert_eq!(variables[0]["query"], "prometheus");

    // Wherever a data source is named, it is the variable.
    fn sources<'a>(value: &'a Value, found: &mut Vec<&'a Value>) {
        match value {
            Value::Object(fields) => {
                found.extend(fields.get("datasource"));
                fields.values().for_each(|field| sources(field, found));
            }
            Value::Array(items) => items.iter().for_each(|item| sources(item, found)),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
        }
    }
    let mut found = vec![];
    sources(&dashboard, &mut found);
    assert!(found.len() > 60);
    assert!(found.iter().all(|source| source["uid"] == "${datasource}"), "{found:?}");

    for variable in &variables[1..] {
        let names = names_in(variable["query"]["query"].as_str().unwrap());
        assert!(!names.is_empty() && names.is_subset(&series()), "{variable}");
    }
    let panels = dashboard["panels"].as_array().unwrap();
    let ids: BTreeSet<u64> = panels.iter().map(|panel| panel["id"].as_u64().unwrap()).collect();
    assert_eq!(ids.len(), panels.len());
    let mut cells = BTreeSet::new();
    let (known, mut shown) = (series(), BTreeSet::new());
    for panel in panels {
        let title = panel["title"].as_str().unwrap();
        let side = |name: &str| panel["gridPos"][name].as_u64().unwrap();
        assert!(side("x") + side("w") <= 24, "{title}");
        for x in side("x")..side("x") + side("w") {
            for y in side("y")..side("y") + side("h") {
                assert!(cells.insert((x, y)), "{title} lies on another panel");
            }
        }
        for target in panel["targets"].as_array().into_iter().flatten() {
            let expr = target["expr"].as_str().unwrap();
            let names = names_in(expr);
            assert!(!names.is_empty() && names.is_subset(&known), "{title}: {expr}");
            let selectors = expr.matches("{job=~\"$job\",instance=~\"$instance\"}").count();
            assert_eq!(selectors, expr.matches('{').count(), "{title}: {expr}");
            assert!(panel["description"].as_str().is_some_and(|text| text.len() > 10), "{title}");
            shown.extend(names);
        }
    }
    for (name, kind) in metrics() {
        let name = in_prometheus(name);
        let name = if kind == "histogram" { format!("{name}_bucket") } else { name };
        assert!(shown.contains(&name), "{name} is on no panel");
    }
}
