//! Every input under `fuzz/corpus/`, and what is left of it when it is cut or a byte of it changes, keeps the properties
//! that `make fuzz` looks for exceptions from.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    missing_docs,
    reason = "clippy.toml allows them only inside test functions"
)]

#[path = "../fuzz/properties/mod.rs"]
mod properties;

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use properties::TARGETS;

fn fuzz() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz")
}

fn names(folder: &Path) -> BTreeSet<String> {
    let stem = |path: PathBuf| path.file_stem().and_then(OsStr::to_str).unwrap().to_owned();
    fs::read_dir(folder).unwrap().map(|entry| stem(entry.unwrap().path())).collect()
}

fn inputs(target: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let files = fs::read_dir(fuzz().join("corpus").join(target)).unwrap();
    files.map(|file| file.unwrap().path()).map(|path| (path.clone(), fs::read(path).unwrap())).collect()
}

#[test]
fn every_property_has_its_target_and_its_corpus() {
    let targets: BTreeSet<String> = TARGETS.iter().map(|(name, _)| (*name).to_owned()).collect();
    assert_eq!(names(&fuzz().join("fuzz_targets")), targets);
    assert_eq!(names(&fuzz().join("corpus")), targets);
    for target in &targets {
        let text = fs::read_to_string(fuzz().join("fuzz_targets").join(target).with_extension("rs")).unwrap();
        assert!(text.contains(&format!("properties::{target}(data)")), "{target}");
        assert!(inputs(target).len() >= 5, "{target}");
    }
}

#[test]
fn every_input_of_the_corpus_keeps_its_property() {
    let mut broken = Vec::new();
    for (target, property) in TARGETS {
        for (path, bytes) in inputs(target) {
            broken.extend(run(property, &bytes, &path));
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

/// A seeded walk around each input, so that what is just beside it is seen without the engine, too.
#[test]
fn neighbours_of_the_corpus_keep_its_properties() {
    const SPECIAL: &[u8] = b"\0\xff\r\n\t \"\\,;:=&?%$*+-019az{}[]";
    let mut broken = Vec::new();
    for (target, property) in TARGETS {
        let mut random = 0x9e37_79b9_7f4a_7c15_u64;
        let mut draw = |below: usize| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            usize::try_from(random % (below as u64).max(1)).unwrap()
        };
        for (path, bytes) in inputs(target) {
            for _ in 0..60 {
                let mut other = bytes.clone();
                for _ in 0..=draw(3) {
                    let at = draw(other.len());
                    let special = SPECIAL[draw(SPECIAL.len())];
                    match draw(5) {
                        0 => other.truncate(at),
                        1 => other.insert(at, special),
                        2 if !other.is_empty() => drop(other.remove(at)),
                        3 if !other.is_empty() => other[at] = special,
                        _ if !other.is_empty() => other[at] ^= 1 << draw(8),
                        _ => {}
                    }
                }
                broken.extend(run(property, &other, &path));
            }
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

/// What became of a property that did not hold, and of which bytes.
fn run(property: fn(&[u8]), bytes: &[u8], path: &Path) -> Option<String> {
    let panic = catch_unwind(AssertUnwindSafe(|| property(bytes))).err()?;
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic");
    Some(format!("{}: {}\n  {text}", path.display(), bytes.escape_ascii()))
}
