//! Which table a namespace holds: the value under its geometry name, made once and compared ever after.
//!
//! ```text
//! "IDMG" | table format u32 | buckets u32 | ways u32 | groups u32 | max_records u32
//! ```
//! Numbers are little-endian. `max_records` is the creator's, kept for the message to an operator only.

use std::fmt;

use super::cas::{Cas, CasError, Seen, Slot};
use super::geometry::Geometry;
use super::names::Names;
use super::{TRIES, bucket};

/// Why a table can't be opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OpenError {
    /// The namespace holds a table of another geometry.
    OtherGeometry {
        /// The namespace.
        namespace: String,
        /// What it holds, and the `max_records` it was made for.
        held: (Geometry, u32),
        /// What this configuration makes, and its `max_records`.
        wanted: (Geometry, u32),
    },
    /// The namespace holds something this build can't read.
    Unreadable {
        /// The namespace.
        namespace: String,
    },
    /// The index alone takes more than `max_bytes`.
    TooFewBytes {
        /// As configured.
        max_bytes: u64,
        /// As configured.
        max_records: u32,
        /// What the index of so many records takes.
        index_bytes: u64,
    },
    /// The host refused.
    Host,
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OtherGeometry { namespace, held, wanted } => write!(
                f,
                "namespace \"{namespace}\" holds a table for max_records {} ({}), this configuration's max_records \
                 {} needs another ({}); starting empty would run live keys again: restart Envoy, choose a new \
                 `namespace`, or go back to max_records {}",
                held.1, held.0, wanted.1, wanted.0, held.1
            ),
            Self::Unreadable { namespace } => write!(
                f,
                "namespace \"{namespace}\" holds a table of a format this build can't read; starting empty would \
                 run live keys again: restart Envoy, or choose a new `namespace`"
            ),
            Self::TooFewBytes { max_bytes, max_records, index_bytes } => write!(
                f,
                "max_bytes {max_bytes} is too little: the index of max_records {max_records} alone takes \
                 {index_bytes}, and response bodies need room beside it"
            ),
            Self::Host => f.write_str("the host refused to read or write shared data"),
        }
    }
}

impl std::error::Error for OpenError {}

/// Bytes of the value.
pub(super) const BYTES: usize = 24;

const MAGIC: [u8; 4] = *b"IDMG";

/// Writes the geometry under the namespace's name, or compares it with the one that is there.
pub(super) fn hold_namespace<C: Cas>(
    cas: &C,
    namespace: &str,
    wanted: Geometry,
    max_records: u32,
) -> Result<(), OpenError> {
    let name = Names::geometry(namespace);
    let unreadable = || OpenError::Unreadable { namespace: namespace.to_owned() };
    for _ in 0..TRIES {
        match cas.load(&name).map_err(|_| OpenError::Host)? {
            Slot::Absent => match cas.swap(&name, Seen::Absent, &encode(&wanted, max_records)) {
                Ok(()) => return Ok(()),
                Err(CasError::Lost) => {}
                Err(CasError::Host) => return Err(OpenError::Host),
            },
            Slot::Emptied { .. } => return Err(unreadable()),
            Slot::Present { bytes, .. } => {
                let held = decode(&bytes).ok_or_else(unreadable)?;
                if held.0 == wanted {
                    return Ok(());
                }
                let namespace = namespace.to_owned();
                return Err(OpenError::OtherGeometry { namespace, held, wanted: (wanted, max_records) });
            }
        }
    }
    Err(OpenError::Host)
}

fn encode(geometry: &Geometry, max_records: u32) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(BYTES);
    bytes.extend_from_slice(&MAGIC);
    for number in [
        u32::from(bucket::FORMAT_VERSION),
        geometry.buckets(),
        u32::from(geometry.ways()),
        geometry.groups(),
        max_records,
    ] {
        bytes.extend_from_slice(&number.to_le_bytes());
    }
    bytes
}

/// The table and the `max_records` it was made for; `None` if this build can't read such a table.
fn decode(bytes: &[u8]) -> Option<(Geometry, u32)> {
    let (numbers, []) = bytes.strip_prefix(&MAGIC)?.as_chunks::<4>() else { return None };
    let &[format, buckets, ways, groups, max_records] = numbers else { return None };
    let number = u32::from_le_bytes;
    if number(format) != u32::from(bucket::FORMAT_VERSION) {
        return None;
    }
    Some((Geometry::from_parts(number(buckets), number(ways), number(groups))?, number(max_records)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_encoded_is_what_is_decoded() {
        for max_records in [1, 64, 65, 131_072, 1_000_000] {
            let geometry = Geometry::for_records(max_records);
            let bytes = encode(&geometry, max_records);
            assert_eq!(bytes.len(), BYTES);
            assert_eq!(decode(&bytes), Some((geometry, max_records)));
            assert_eq!(decode(&bytes[1..]), None);
        }
    }

    #[test]
    fn another_format_is_not_read() {
        let mut bytes = encode(&Geometry::for_records(9), 9);
        bytes[4] = 200;
        assert_eq!(decode(&bytes), None);
    }
}
