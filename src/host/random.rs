//! Random owners, of which the host gives many in one call: a call for each took longer than the hash of a key.

use std::cell::RefCell;

use super::hostcalls;
use crate::record::Owner;

/// Owners taken at once.
const OWNERS: usize = 16;
const SIZE: usize = 16;

/// Owners that nobody has had yet.
#[derive(Default)]
pub struct RandomOwners(RefCell<Vec<[u8; SIZE]>>);

impl RandomOwners {
    /// One of them; `None` when the host gives no random bytes.
    pub fn take(&self) -> Option<Owner> {
        let mut owners = self.0.try_borrow_mut().ok()?;
        if owners.is_empty() {
            let bytes = hostcalls::random_bytes::<{ OWNERS * SIZE }>()?;
            owners.extend_from_slice(bytes.as_chunks::<SIZE>().0);
        }
        owners.pop().map(Owner::from_bytes)
    }
}
