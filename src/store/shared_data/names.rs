//! The host's names for a table's parts: two namespaces never share one.

use std::fmt::Write as _;

use sha2::{Digest as _, Sha256};

use super::geometry::Geometry;

/// Longest namespace that is spelt out in a name.
const LONGEST_SPELT: usize = 64;

/// Spells names into one buffer that is used again and again.
#[derive(Debug)]
pub(super) struct Names {
    buffer: String,
    prefix: usize,
}

impl Names {
    pub(super) fn of(namespace: &str, geometry: &Geometry) -> Self {
        let mut buffer = String::with_capacity(128);
        // Writing into a String doesn't fail.
        let _ = write!(buffer, "idem:{}:{}x{}:", spelt(namespace), geometry.buckets(), geometry.ways());
        let prefix = buffer.len();
        Self { buffer, prefix }
    }

    /// Under this name a namespace says what table it holds.
    pub(super) fn geometry(namespace: &str) -> String {
        format!("idem:{}:geometry", spelt(namespace))
    }

    pub(super) fn bucket(&mut self, bucket: u32) -> &str {
        self.buffer.truncate(self.prefix);
        let _ = write!(self.buffer, "b{bucket:x}");
        &self.buffer
    }

    pub(super) fn slot(&mut self, bucket: u32, slot: u8) -> &str {
        self.buffer.truncate(self.prefix);
        let _ = write!(self.buffer, "s{bucket:x}.{slot:x}");
        &self.buffer
    }

    pub(super) fn ledger(&mut self, group: u32) -> &str {
        self.buffer.truncate(self.prefix);
        let _ = write!(self.buffer, "l{group:x}");
        &self.buffer
    }
}

/// Injective: letters, digits, `_`, `.` and `-` stand for themselves, other bytes are escaped as `%XX`; what is
/// too long is `~` and its SHA-256, and `~` itself is always escaped.
fn spelt(namespace: &str) -> String {
    let mut spelt = String::with_capacity(namespace.len().min(LONGEST_SPELT) + 1);
    for byte in namespace.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'-') {
            spelt.push(char::from(byte));
        } else {
            let _ = write!(spelt, "%{byte:02X}");
        }
        if spelt.len() > LONGEST_SPELT {
            spelt.clear();
            spelt.push('~');
            for byte in Sha256::digest(namespace.as_bytes()) {
                let _ = write!(spelt, "{byte:02x}");
            }
            break;
        }
    }
    spelt
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn namespaces_never_share_a_name() {
        let long = "n".repeat(100);
        let longer = "n".repeat(101);
        let hashed = spelt(&long);
        let namespaces =
            ["", "a", "a:b", "a%3Ab", "a%3ab", "a:geometry", "é", "%", "~", &long, &longer, &hashed];
        let names: BTreeSet<String> = namespaces.iter().map(|namespace| Names::geometry(namespace)).collect();
        assert_eq!(names.len(), namespaces.len(), "{names:?}");
        assert!(
            names.iter().all(|name| name.is_ascii() && name.len() < 90 && name.matches(':').count() == 2)
        );
    }

    #[test]
    fn parts_of_a_table_have_different_names() {
        let mut names = Names::of("a", &Geometry::for_records(1_000));
        let mut seen = BTreeSet::new();
        for bucket in 0..40 {
            assert!(seen.insert(names.bucket(bucket).to_owned()));
            assert!(seen.insert(names.ledger(bucket).to_owned()));
            for slot in 0..64 {
                assert!(seen.insert(names.slot(bucket, slot).to_owned()));
            }
        }
    }
}
