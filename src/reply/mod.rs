//! What the filter itself sends to a client: refusals and replays.

pub mod problem;
pub mod replay;

/// A reply made by the filter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalReply {
    /// The `:status`.
    pub status: u16,
    /// Header lines, serialized as the host takes them.
    pub headers: Vec<u8>,
    /// Holds the body.
    pub content: Vec<u8>,
    /// Where the body starts in `content`: a replay sends its body out of the record without copying it.
    pub body_at: usize,
    /// `response.code_details`.
    pub code_details: &'static str,
    /// What has to be put right once Envoy has made its response of it.
    pub content_type: ContentType,
}

impl LocalReply {
    /// The body.
    #[must_use]
    pub fn body(&self) -> &[u8] {
        self.content.get(self.body_at..).unwrap_or_default()
    }
}

/// Envoy adds `text/plain` to a local reply with a body and no content-type, and removes the content-type of one
/// without a body (`source/common/http/utility.cc`, `prepareLocalReply`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ContentType {
    /// As Envoy leaves it.
    Kept,
    /// The kept response had none.
    Absent,
    /// The kept response had this one, and no body.
    Exactly(Vec<u8>),
}

/// Whether these lines fit one reply. The host takes at most 1024 of them and 1 MiB serialized, and drops *all* of
/// them without a word beyond that (proxy-wasm-cpp-host `include/proxy-wasm/limits.h`). A little is left for what
/// the filter adds.
#[must_use]
pub fn fit_a_reply<'a>(lines: impl IntoIterator<Item = (&'a [u8], &'a [u8])>) -> bool {
    const MOST_LINES: usize = 1000;
    const MOST_BYTES: usize = (1024 - 16) * 1024;
    /// Two sizes and two NULs.
    const FRAMING: usize = 10;
    let (mut count, mut bytes) = (0_usize, 0_usize);
    for (name, value) in lines {
        count = count.saturating_add(1);
        bytes = bytes.saturating_add(name.len()).saturating_add(value.len()).saturating_add(FRAMING);
    }
    count <= MOST_LINES && bytes <= MOST_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_host_would_drop_does_not_fit() {
        let line = |length: usize| (b"n".as_slice(), vec![b'v'; length]);
        for (count, length, fits) in
            [(0, 0, true), (1000, 10, true), (1001, 0, false), (1, 1_000_000, true), (2, 600_000, false)]
        {
            let lines = vec![line(length); count];
            let lines = lines.iter().map(|(name, value)| (*name, value.as_slice()));
            assert_eq!(fit_a_reply(lines), fits, "{count} lines of {length} bytes");
        }
    }
}
