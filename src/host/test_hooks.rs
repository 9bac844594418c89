//! Faults that the end-to-end tests ask for by a header. Not in a release build.

use crate::headers::HeaderBlock;

/// `x-test-fault: trap` kills this worker's VM at once. On a request without a body its claim is made by then and
/// nothing is forwarded; on a response the upstream has executed and nothing is stored.
pub fn trap_if_asked(headers: &HeaderBlock) {
    if headers.first("x-test-fault") == Some(b"trap") {
        log::warn!("test fault: trap");
        std::process::abort();
    }
}
