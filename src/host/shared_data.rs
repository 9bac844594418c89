//! Envoy's shared data as the embedded store's [`Cas`].

use super::hostcalls::{self, CAS_MISMATCH};
use crate::store::shared_data::cas::{Cas, CasError, Seen, Slot};

/// The process-wide map of this VM id.
#[derive(Debug, Clone, Copy)]
pub struct HostCas;

/// On a name never written the host ignores the version and inserts, so a version that no value can plausibly have
/// makes an atomic create-if-absent: the second one meets a mismatch.
const CREATE: u32 = u32::MAX;

impl Cas for HostCas {
    fn load(&self, name: &str) -> Result<Slot, CasError> {
        match hostcalls::shared_data(name) {
            Ok(None) => Ok(Slot::Absent),
            Ok(Some((bytes, cas))) if bytes.is_empty() => Ok(Slot::Emptied { cas }),
            Ok(Some((bytes, cas))) => Ok(Slot::Present { bytes, cas }),
            Err(_) => Err(CasError::Host),
        }
    }

    fn swap(&self, name: &str, seen: Seen, value: &[u8]) -> Result<(), CasError> {
        let cas = match seen {
            Seen::Absent => CREATE,
            // The host takes zero as "overwrite whatever is there".
            Seen::Version(0) => return Err(CasError::Host),
            Seen::Version(cas) => cas,
        };
        match hostcalls::set_shared_data(name, value, cas) {
            Ok(()) => Ok(()),
            Err(error) if error.0 == CAS_MISMATCH => Err(CasError::Lost),
            Err(_) => Err(CasError::Host),
        }
    }
}
