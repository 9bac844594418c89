//! A copy of the host's header map, read in place, and the view of a request's head that decisions take.
//!
//! Values are bytes: field values may hold obs-text (RFC 9110 section 5.5) and need not be UTF-8. Repeated
//! lines stay apart and in order, so a caller decides itself what a second line means.

use std::fmt;
use std::iter::FusedIterator;

/// Bytes of one entry of the size table: name length and value length, `u32` each.
const SIZES: usize = 8;

/// A header map as the host serializes it: `u32` count, then the count's pairs of `u32` sizes, then each name
/// and value followed by a NUL; all integers little endian (proxy-wasm ABI 0.2.1, "Serialization").
#[derive(Clone, PartialEq, Eq)]
pub struct HeaderBlock {
    bytes: Vec<u8>,
    len: usize,
}

/// The host's bytes are not a header map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MalformedHeaders;

impl fmt::Display for MalformedHeaders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the header map's sizes do not add up")
    }
}

impl std::error::Error for MalformedHeaders {}

impl HeaderBlock {
    /// Takes over a serialized header map. No bytes at all are the empty map, which the host writes so.
    ///
    /// # Errors
    ///
    /// Refuses whatever [`serialize_pairs`] can't have written: a short table, sizes that don't add up to
    /// exactly the rest, a missing NUL.
    pub fn parse(bytes: Vec<u8>) -> Result<HeaderBlock, MalformedHeaders> {
        let len = count_pairs(&bytes).ok_or(MalformedHeaders)?;
        Ok(HeaderBlock { bytes, len })
    }

    /// A map of these lines, in this order.
    pub fn from_pairs<N, V>(pairs: impl IntoIterator<Item = (N, V)>) -> HeaderBlock
    where
        N: AsRef<[u8]>,
        V: AsRef<[u8]>,
    {
        let pairs: Vec<(N, V)> = pairs.into_iter().collect();
        HeaderBlock { bytes: serialize_pairs(&pairs), len: pairs.len() }
    }

    /// Every line, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        let (sizes, data) = split_tables(&self.bytes).unwrap_or_default();
        Pairs { sizes, data }.map_while(|pair| pair)
    }

    /// The values of every line of this name, in order; names compare without case (RFC 9110 section 5.1).
    pub fn lines(&self, name: &str) -> impl Iterator<Item = &[u8]> {
        self.iter()
            .filter(move |(found, _)| found.eq_ignore_ascii_case(name.as_bytes()))
            .map(|(_, value)| value)
    }

    /// The value of the first line of this name.
    #[must_use]
    pub fn first(&self, name: &str) -> Option<&[u8]> {
        self.lines(name).next()
    }

    /// How many lines there are, pseudo-headers included.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no line.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The map as the host reads it.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// Headers carry keys, scopes and credentials: only their number is shown.
impl fmt::Debug for HeaderBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HeaderBlock({} lines)", self.len)
    }
}

/// Writes header lines the way the host reads them; [`HeaderBlock::parse`] is the inverse.
#[must_use]
pub fn serialize_pairs<N: AsRef<[u8]>, V: AsRef<[u8]>>(pairs: &[(N, V)]) -> Vec<u8> {
    let data: usize = pairs.iter().map(|(name, value)| name.as_ref().len() + value.as_ref().len() + 2).sum();
    let mut bytes = Vec::with_capacity(4 + SIZES * pairs.len() + data);
    bytes.extend_from_slice(&size(pairs.len()));
    for (name, value) in pairs {
        bytes.extend_from_slice(&size(name.as_ref().len()));
        bytes.extend_from_slice(&size(value.as_ref().len()));
    }
    for (name, value) in pairs {
        for text in [name.as_ref(), value.as_ref()] {
            bytes.extend_from_slice(text);
            bytes.push(0);
        }
    }
    bytes
}

/// A field value without the optional whitespace around it (RFC 9110 section 5.5), and where it begins.
///
/// Envoy's HTTP/1 codec removes that whitespace; elsewhere it may arrive, and means nothing there either.
#[must_use]
pub fn trim_ows(value: &[u8]) -> (usize, &[u8]) {
    let is_ows = |byte: &u8| matches!(byte, b' ' | b'\t');
    let begin = value.iter().take_while(|byte| is_ows(byte)).count();
    let rest = value.get(begin..).unwrap_or_default();
    let end = rest.len() - rest.iter().rev().take_while(|byte| is_ows(byte)).count();
    (begin, rest.get(..end).unwrap_or_default())
}

/// What the host knows about a request beside its headers.
pub trait Attributes {
    /// The Envoy attribute at this path as the host serializes it (strings raw, numbers 8 bytes little endian,
    /// booleans one byte); `None` if there is none or it is empty.
    fn attribute(&self, path: &[&str]) -> Option<Vec<u8>>;
}

/// A request's head, as decisions see it.
#[derive(Clone, Copy)]
pub struct RequestHead<'a> {
    /// All header lines, pseudo-headers first.
    pub headers: &'a HeaderBlock,
    /// Where attributes are looked up.
    pub attributes: &'a dyn Attributes,
}

impl<'a> RequestHead<'a> {
    /// `:method` (RFC 9113 section 8.3.1); empty if absent, as are the others.
    #[must_use]
    pub fn method(&self) -> &'a [u8] {
        self.headers.first(":method").unwrap_or_default()
    }

    /// `:authority`, which Envoy fills from `Host` on HTTP/1.
    #[must_use]
    pub fn authority(&self) -> &'a [u8] {
        self.headers.first(":authority").unwrap_or_default()
    }

    /// `:path`: the path and, from the first `?`, the query.
    #[must_use]
    pub fn path_and_query(&self) -> &'a [u8] {
        self.headers.first(":path").unwrap_or_default()
    }
}

impl fmt::Debug for RequestHead<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RequestHead({:?})", self.headers)
    }
}

/// Walks the size table and the data side by side; `Some(None)` is a pair that doesn't fit.
struct Pairs<'a> {
    sizes: &'a [u8],
    data: &'a [u8],
}

impl<'a> Iterator for Pairs<'a> {
    type Item = Option<(&'a [u8], &'a [u8])>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.sizes.is_empty() {
            return None;
        }
        Some(self.pair())
    }
}

impl FusedIterator for Pairs<'_> {}

impl<'a> Pairs<'a> {
    fn pair(&mut self) -> Option<(&'a [u8], &'a [u8])> {
        let name_len = read_size(&mut self.sizes)?;
        let value_len = read_size(&mut self.sizes)?;
        let name = self.text(name_len)?;
        let value = self.text(value_len)?;
        Some((name, value))
    }

    fn text(&mut self, len: usize) -> Option<&'a [u8]> {
        let (text, rest) = self.data.split_at_checked(len)?;
        self.data = rest.strip_prefix(b"\0")?;
        Some(text)
    }
}

/// The number of pairs, if every one of them fits and nothing is left over.
fn count_pairs(bytes: &[u8]) -> Option<usize> {
    let (sizes, data) = split_tables(bytes)?;
    let mut pairs = Pairs { sizes, data };
    let mut len = 0;
    for pair in pairs.by_ref() {
        pair?;
        len += 1;
    }
    pairs.data.is_empty().then_some(len)
}

/// The size table and the data after it.
fn split_tables(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    if bytes.is_empty() {
        return Some((&[], &[]));
    }
    let mut rest = bytes;
    let table = read_size(&mut rest)?.checked_mul(SIZES)?;
    rest.split_at_checked(table)
}

fn read_size(bytes: &mut &[u8]) -> Option<usize> {
    let (size, rest) = bytes.split_first_chunk::<4>()?;
    *bytes = rest;
    usize::try_from(u32::from_le_bytes(*size)).ok()
}

/// No map reaches the 4 GiB at which this would saturate: the host refuses one over 1 MiB.
fn size(len: usize) -> [u8; 4] {
    u32::try_from(len).unwrap_or(u32::MAX).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    #[test]
    fn a_block_has_the_layout_of_the_abi() {
        let block = HeaderBlock::from_pairs([("a", "xy"), ("bc", "")]);
        assert_eq!(block.as_bytes(), b"\x02\0\0\0\x01\0\0\0\x02\0\0\0\x02\0\0\0\0\0\0\0a\0xy\0bc\0\0");
    }

    /// D02: every line is there, whatever the case of its name, and in order.
    #[test]
    fn repeated_lines_stay_apart_and_in_order() {
        let block = HeaderBlock::from_pairs([("k", "1"), ("other", "x"), ("K", "2"), ("k", "")]);
        assert_eq!(block.lines("k").collect::<Vec<_>>(), [&b"1"[..], b"2", b""]);
        assert_eq!(block.first("K"), Some(&b"1"[..]));
        assert_eq!(block.first("absent"), None);
        assert_eq!(block.len(), 4);
    }

    #[test]
    fn no_bytes_are_the_empty_map() {
        for bytes in [vec![], vec![0, 0, 0, 0]] {
            let block = HeaderBlock::parse(bytes).unwrap();
            assert!(block.is_empty());
            assert_eq!(block.iter().count(), 0);
        }
    }

    #[test]
    fn blocks_whose_sizes_do_not_add_up_are_refused() {
        let good = HeaderBlock::from_pairs([("a", "xy"), ("b", "z")]).as_bytes().to_vec();
        for cut in 1..good.len() {
            assert_eq!(HeaderBlock::parse(good[..cut].to_vec()), Err(MalformedHeaders), "cut at {cut}");
        }
        let mut longer = good.clone();
        longer.push(0);
        assert_eq!(HeaderBlock::parse(longer), Err(MalformedHeaders));
        let mut no_nul = good.clone();
        *no_nul.last_mut().unwrap() = b'!';
        assert_eq!(HeaderBlock::parse(no_nul), Err(MalformedHeaders));
        for count in [3, 0x2000_0000, u32::MAX] {
            let mut more = good.clone();
            more[..4].copy_from_slice(&count.to_le_bytes());
            assert_eq!(HeaderBlock::parse(more), Err(MalformedHeaders), "{count} pairs");
        }
        let mut huge = good;
        huge[4..8].copy_from_slice(&[0xff; 4]);
        assert_eq!(HeaderBlock::parse(huge), Err(MalformedHeaders));
    }

    #[test]
    fn optional_whitespace_around_a_value_is_no_part_of_it() {
        for (value, expected) in [
            (&b"a"[..], (0, &b"a"[..])),
            (b" \ta b\t ", (2, b"a b")),
            (b"", (0, b"")),
            (b" \t", (2, b"")),
            (b"\xa0a", (0, b"\xa0a")),
        ] {
            assert_eq!(trim_ows(value), expected);
        }
    }

    #[test]
    fn a_head_without_pseudo_headers_is_empty_not_absent() {
        struct NoAttributes;
        impl Attributes for NoAttributes {
            fn attribute(&self, _: &[&str]) -> Option<Vec<u8>> {
                None
            }
        }
        let headers = HeaderBlock::from_pairs([(":method", "POST")]);
        let head = RequestHead { headers: &headers, attributes: &NoAttributes };
        assert_eq!(
            (head.method(), head.authority(), head.path_and_query()),
            (&b"POST"[..], &b""[..], &b""[..])
        );
    }

    #[test]
    fn debug_output_holds_no_header() {
        let block = HeaderBlock::from_pairs([("authorization", "secret")]);
        assert_eq!(format!("{block:?}"), "HeaderBlock(1 lines)");
    }

    proptest! {
        #[test]
        fn parsing_reverses_serializing(
            pairs in vec((vec(any::<u8>(), 0..12), vec(any::<u8>(), 0..24)), 0..12),
        ) {
            let block = HeaderBlock::parse(serialize_pairs(&pairs)).unwrap();
            let read: Vec<_> = block.iter().map(|(name, value)| (name.to_vec(), value.to_vec())).collect();
            prop_assert_eq!(block.len(), pairs.len());
            prop_assert_eq!(read, pairs);
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in vec(any::<u8>(), 0..96), count in 0_u8..4) {
            let mut plausible = bytes.clone();
            for (at, byte) in plausible.iter_mut().enumerate().take(4 + 8 * usize::from(count)) {
                *byte = match at { 0 => count, _ if at >= 4 && at % 4 == 0 => *byte % 8, _ => 0 };
            }
            for bytes in [bytes, plausible] {
                if let Ok(block) = HeaderBlock::parse(bytes.clone()) {
                    let pairs: Vec<_> = block.iter().collect();
                    prop_assert_eq!(pairs.len(), block.len());
                    if !bytes.is_empty() {
                        prop_assert_eq!(serialize_pairs(&pairs), bytes);
                    }
                }
            }
        }
    }
}
