//! What the filter itself sends to a client: refusals and replays.

pub mod problem;
pub mod replay;

use crate::headers::{HeaderBlock, serialize_pairs};
use crate::sorted::NameSet;

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
}

impl LocalReply {
    /// The body.
    #[must_use]
    pub fn body(&self) -> &[u8] {
        self.content.get(self.body_at..).unwrap_or_default()
    }
}

/// The head that has to be sent in place of the one that Envoy made of the filter's own lines; `None` if that is
/// right as it is.
///
/// Envoy adds `text/plain` to a local reply with a body and no content-type, and removes the content-type of one
/// without a body (`source/common/http/utility.cc`, `prepareLocalReply`). Routes, virtual hosts and later filters add
/// their lines to every response, so to a replay of one that was kept with them. A name that the filter sends has the
/// filter's lines only; the others are of this response.
#[must_use]
pub fn put_right(own: &HeaderBlock, made: &HeaderBlock) -> Option<Vec<u8>> {
    let names = NameSet::new(&own.iter().map(|(name, _)| name).collect::<Vec<_>>());
    let is_own = |name: &[u8]| name == b"content-type" || names.has(name);
    if made.iter().filter(|(name, _)| is_own(name)).eq(own.iter()) {
        return None;
    }
    let others = made.iter().filter(|(name, _)| !is_own(name));
    Some(serialize_pairs(&others.chain(own.iter()).collect::<Vec<_>>()))
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
    fn what_others_added_to_a_reply_goes_unless_the_filter_sends_that_name() {
        let put_right = |own: &[(&str, &str)], made: &[(&str, &str)]| {
            let lines =
                put_right(&HeaderBlock::from_pairs(own.to_vec()), &HeaderBlock::from_pairs(made.to_vec()))?;
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            let lines = HeaderBlock::parse(lines).unwrap();
            Some(
                lines
                    .iter()
                    .map(|(name, value)| text(name) + "=" + &text(value))
                    .collect::<Vec<_>>()
                    .join(" "),
            )
        };
        let own = [("content-type", "a/b"), ("x", "1"), ("y", "1"), ("x", "2")];
        let made =
            [(":status", "201"), ("content-type", "a/b"), ("x", "1"), ("z", "0"), ("y", "1"), ("x", "2")];
        assert_eq!(put_right(&own, &made), None);
        assert_eq!(put_right(&[], &[(":status", "204"), ("z", "0")]), None);
        let doubled = [(":status", "200"), ("x", "1"), ("z", "0"), ("content-length", "2"), ("x", "1")];
        assert_eq!(put_right(&[("x", "1")], &doubled).unwrap(), ":status=200 z=0 content-length=2 x=1");
        let joined = [(":status", "200"), ("cache-control", "private,no-store")];
        let no_store = [("cache-control", "no-store")];
        assert_eq!(put_right(&no_store, &joined).unwrap(), ":status=200 cache-control=no-store");
        let invented = [(":status", "200"), ("content-type", "text/plain")];
        assert_eq!(put_right(&[], &invented).unwrap(), ":status=200");
        let removed = [(":status", "201")];
        assert_eq!(put_right(&[("content-type", "a/b")], &removed).unwrap(), ":status=201 content-type=a/b");
    }

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
