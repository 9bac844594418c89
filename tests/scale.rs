//! The simulation of docs/scale.md against what was measured.

#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, missing_docs)]

#[path = "../examples/simulate/model.rs"]
mod model;
#[path = "../examples/simulate/tables.rs"]
mod tables;

use serde_json::Value;

use model::{Costs, run};

fn kept(name: &str) -> Value {
    let path = format!("{}/bench/results/{name}.json", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// With the usual number of batches; docs/scale.md says what of the others is farther off.
#[test]
fn what_was_measured_comes_out_within_a_fifth() {
    let (_, compared) = tables::compare(&kept("redis")).unwrap();
    let most = compared.iter().map(|row| row.measured.connections).max().unwrap();
    let mut predicted = 0;
    for row in compared.iter().filter(|row| row.measured.batches == 2) {
        predicted += usize::from(row.is_predicted(most));
        let (connections, error) = (row.measured.connections, row.error());
        assert!(error.abs() <= 0.2, "{connections} connections: off by {error:.2}");
        let latency = row.simulated.p50 / row.measured.p50 - 1.0;
        assert!(latency.abs() <= 0.2, "{connections} connections: the median is off by {latency:.2}");
    }
    assert!(predicted >= 1, "nothing was predicted");
}

const COSTS: Costs = Costs { request: 160.0, callout: 550.0, elsewhere: 160.0, way: 40.0, operation: 20.0 };

#[test]
fn a_seed_gives_the_same_run_again() {
    assert_eq!(run(COSTS, 32, 2, 3e5, 7), run(COSTS, 32, 2, 3e5, 7));
    assert_ne!(run(COSTS, 32, 2, 3e5, 7), run(COSTS, 32, 2, 3e5, 8));
}

/// Little's law: what is open at a time is what comes per second times how long it stays.
#[test]
fn no_request_is_lost() {
    for connections in [1, 8, 64] {
        let outcome = run(COSTS, connections, 2, 1e6, 1);
        let cycle = outcome.mean + COSTS.elsewhere / 2.0;
        let expected = outcome.per_second / 1e6 * cycle;
        assert!((expected / connections as f64 - 1.0).abs() < 0.05, "{connections}: {expected}");
        assert!(outcome.open <= connections && outcome.busy <= 1.01, "{outcome:?}");
    }
}

#[test]
fn more_batches_carry_less_each_and_a_dear_callout_costs_throughput() {
    let carried = |batches| run(COSTS, 32, batches, 3e5, 1).operations_per_callout;
    assert!(carried(1) > carried(2) && carried(2) > carried(4));
    let dear = Costs { callout: 1100.0, ..COSTS };
    assert!(run(dear, 1, 2, 3e5, 1).per_second < run(COSTS, 1, 2, 3e5, 1).per_second * 0.7);
}

/// `UPDATE_SCALE=1` writes them anew.
#[test]
fn the_page_has_the_tables_of_the_simulation() {
    const BEGIN: &str = "<!-- simulated -->\n";
    const END: &str = "<!-- end of simulated -->";
    let path = format!("{}/docs/scale.md", env!("CARGO_MANIFEST_DIR"));
    let page = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = page.split_once(BEGIN).unwrap();
    let (found, after) = rest.split_once(END).unwrap();
    let tables = tables::tables(&kept("redis"), &kept("memory")).unwrap();
    if std::env::var_os("UPDATE_SCALE").is_some() {
        std::fs::write(&path, format!("{before}{BEGIN}{tables}{END}{after}")).unwrap();
    } else {
        assert_eq!(found, tables, "UPDATE_SCALE=1 cargo test --test scale");
    }
}
