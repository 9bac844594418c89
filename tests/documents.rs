//! What the documents name exists: files, make targets, tests, cases. `pages.rs` looks at links, code and tables.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, missing_docs)]

use std::path::{Path, PathBuf};

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
fn every_file_that_is_named_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for (path, text) in documents() {
        for word in text.split('`').skip(1).step_by(2) {
            let is_file = ["src/", "tests/", "envoy/", "docs/", "scripts/", "examples/"]
                .iter()
                .any(|folder| word.starts_with(folder));
            if is_file && !word.contains([' ', '*', '<', '$']) {
                let file = word.split("::").next().unwrap();
                assert!(root.join(file).exists(), "{}: {word}", path.display());
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

/// The tests that a text names, as `file::function`.
fn named_tests(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.split('`').skip(1).step_by(2).filter_map(|word| {
        let (file, name) = word.split_once("::")?;
        file.ends_with(".rs").then_some((file, name))
    })
}

#[test]
fn every_test_that_is_named_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut count = 0;
    for (path, text) in documents() {
        for (file, name) in named_tests(&text) {
            let source = std::fs::read_to_string(root.join(file)).unwrap();
            let here = format!("{}: {file}::{name}", path.display());
            let at =
                source.find(&format!("fn {name}(")).unwrap_or_else(|| panic!("{here}: no such function"));
            // A test, or a case of the list that the store contract runs.
            let attributes = source[..at].rsplit("\n\n").next().unwrap();
            let is_case = source.contains("cases![") && source.contains(&format!("    {name},\n"));
            let is_test = ["#[test]", "#[tokio::test("].iter().any(|mark| attributes.contains(mark));
            assert!(is_test || is_case, "{here}: no test");
            assert!(!attributes.contains("#[ignore"), "{here}: ignored");
            count += 1;
        }
    }
    assert!(count > 200, "only {count} tests are named");
}

/// The public failure cases: how many there are of each letter's numbers.
const CASES: [(char, &[u8]); 10] = [
    ('A', &[1, 2, 4, 5, 7, 8, 10, 11, 12, 14, 15, 17, 18, 20]),
    ('B', &[1, 2, 4, 5, 7, 8, 10, 11, 12, 14, 15]),
    ('C', &[1, 2, 4, 5, 6, 8, 9, 11, 12, 14, 15, 16, 18, 19, 21, 22]),
    ('D', &[2, 3, 4, 6, 7, 9, 10, 12, 13]),
    ('E', &[1, 3, 4, 6, 7, 9, 10, 11, 13]),
    ('F', &[1, 3, 4, 6, 7, 8, 10, 11, 13, 14, 16, 17, 18]),
    ('G', &[2, 3, 5, 6, 8, 9, 10, 12, 13, 15, 16, 18, 19, 20, 22, 23]),
    ('H', &[1, 2, 4, 5, 6, 8, 9, 11, 12, 14, 15]),
    ('I', &[1, 3, 4, 6]),
    ('J', &[1, 3, 4, 5, 7, 8, 10]),
];

#[test]
fn every_public_case_is_there_once_with_a_test() {
    let text = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/cases.md")).unwrap();
    let rows: Vec<Vec<&str>> = text
        .lines()
        .filter(|line| line.starts_with('|') && !line.starts_with("| id |") && !line.starts_with("|---"))
        .map(|line| line.trim_matches('|').split(" | ").map(str::trim).collect())
        .collect();
    let expected: Vec<String> = CASES
        .iter()
        .flat_map(|(letter, numbers)| numbers.iter().map(move |number| format!("{letter}{number:02}")))
        .collect();
    assert_eq!(expected.len(), 110);
    assert_eq!(rows.iter().map(|row| row[0]).collect::<Vec<_>>(), expected);
    for row in rows {
        let [id, holds, source, tests] = row.as_slice() else { panic!("{row:?}: four columns") };
        assert!(holds.len() > 20 && holds.ends_with(['.', ')']) && !source.is_empty(), "{id}: {holds}");
        assert!(named_tests(tests).count() > 0, "{id} names no test");
    }
}

/// Each cell of the truth table names a test, and each situation has each event.
#[test]
fn every_row_of_the_truth_table_names_a_test() {
    let text =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/guarantees.md")).unwrap();
    let tables: Vec<&str> = text.split("\n\n").filter(|part| part.starts_with("| event")).collect();
    assert_eq!(tables.len(), 8);
    for table in tables {
        let rows: Vec<&str> = table.lines().skip(2).collect();
        for event in [
            "duplicate",
            "crash after claim",
            "crash after commit",
            "client gone",
            "write lost",
            "lease over",
        ] {
            let begins = format!("| {event}");
            assert_eq!(rows.iter().filter(|row| row.starts_with(&begins)).count(), 1, "{event} in {table}");
        }
        for row in rows {
            let test = row.trim_end_matches([' ', '|']).rsplit(" | ").next().unwrap();
            assert!(named_tests(test).count() > 0, "{row}");
        }
    }
}

/// No proxy can promise that.
#[test]
fn no_document_promises_one_execution_for_certain() {
    for (path, text) in documents() {
        let words = text.to_lowercase().split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(!words.contains("exactly once") && !words.contains("exactly-once"), "{}", path.display());
    }
}
