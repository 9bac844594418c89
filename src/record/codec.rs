//! The bytes a kept response is stored as: versioned, with a total decoder.
//!
//! ```text
//! version u8 = 1 | flags u8 | status u16 | header count u16 | origin length u32 | body length u64
//! origin bytes | per header: name length u16, value length u32, name, value | body
//! ```
//! Numbers are little-endian. The body is last, so that a capture appends to the encoding as chunks arrive and
//! never copies them again. `flags` bit 0: the body was not kept (a tombstone).

use std::fmt;

/// The format this build writes.
pub const FORMAT_VERSION: u8 = 1;

const TOMBSTONE: u8 = 1;
const FIXED: usize = 18;
const BODY_LENGTH_AT: usize = 10;

/// Why bytes are no kept response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DecodeError {
    /// A format this build does not know.
    Version(u8),
    /// Too short, too long, or lengths that don't add up.
    Malformed,
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Version(version) => write!(f, "kept response of unknown format {version}"),
            Self::Malformed => f.write_str("kept response is malformed"),
        }
    }
}

/// A response on its way into the store: the head is encoded at once, the body appended as it arrives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResponseEncoder {
    bytes: Vec<u8>,
    head: usize,
}

impl ResponseEncoder {
    /// Encodes the head. `origin` is the request's `Origin` where CORS headers are kept for it.
    ///
    /// `None` if a name, a value or their number is beyond the format (65,535 lines, 64 KiB a name, 4 GiB a value).
    #[must_use]
    pub fn begin<'a>(
        status: u16,
        headers: impl IntoIterator<Item = (&'a [u8], &'a [u8])>,
        origin: Option<&[u8]>,
    ) -> Option<Self> {
        let mut bytes = Vec::with_capacity(512);
        bytes.extend_from_slice(&[FORMAT_VERSION, 0]);
        bytes.extend_from_slice(&status.to_le_bytes());
        bytes.extend_from_slice(&[0; 2]);
        let origin = origin.unwrap_or_default();
        bytes.extend_from_slice(&u32::try_from(origin.len()).ok()?.to_le_bytes());
        bytes.extend_from_slice(&[0; 8]);
        bytes.extend_from_slice(origin);
        let mut count: u16 = 0;
        for (name, value) in headers {
            count = count.checked_add(1)?;
            bytes.extend_from_slice(&u16::try_from(name.len()).ok()?.to_le_bytes());
            bytes.extend_from_slice(&u32::try_from(value.len()).ok()?.to_le_bytes());
            bytes.extend_from_slice(name);
            bytes.extend_from_slice(value);
        }
        bytes.get_mut(4..6)?.copy_from_slice(&count.to_le_bytes());
        let head = bytes.len();
        Some(Self { bytes, head })
    }

    /// The whole encoding of a response whose body was not kept.
    #[must_use]
    pub fn tombstone<'a>(
        status: u16,
        headers: impl IntoIterator<Item = (&'a [u8], &'a [u8])>,
    ) -> Option<Vec<u8>> {
        let mut bytes = Self::begin(status, headers, None)?.finish();
        *bytes.get_mut(1)? |= TOMBSTONE;
        Some(bytes)
    }

    /// The whole encoding of the same response without its body, and with the lines that `keeps` names.
    #[must_use]
    pub fn to_tombstone(&self, keeps: impl Fn(&[u8]) -> bool) -> Vec<u8> {
        let head = self.bytes.get(..self.head).unwrap_or_default();
        let Ok(response) = StoredResponse::decode(head) else { return Vec::new() };
        let lines = response.headers.iter().copied().filter(|(name, _)| keeps(name));
        Self::tombstone(response.status, lines).unwrap_or_default()
    }

    /// Appends body bytes.
    pub fn push(&mut self, chunk: &[u8]) {
        self.bytes.extend_from_slice(chunk);
    }

    /// Body bytes so far.
    #[must_use]
    pub fn body_len(&self) -> usize {
        self.bytes.len().saturating_sub(self.head)
    }

    /// Body bytes so far.
    #[must_use]
    pub fn body(&self) -> &[u8] {
        self.bytes.get(self.head..).unwrap_or_default()
    }

    /// Bytes held, head included.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        self.bytes.capacity()
    }

    /// The encoding.
    #[must_use]
    pub fn finish(mut self) -> Vec<u8> {
        let length = (self.body_len() as u64).to_le_bytes();
        if let Some(field) = self.bytes.get_mut(BODY_LENGTH_AT..FIXED) {
            field.copy_from_slice(&length);
        }
        self.bytes
    }
}

/// A kept response, read in place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredResponse<'a> {
    /// The exact status.
    pub status: u16,
    /// Lines in order, with repeats.
    pub headers: Vec<(&'a [u8], &'a [u8])>,
    /// The Origin that the kept `access-control-*` lines answer.
    pub origin: Option<&'a [u8]>,
    /// The body, or `None` for a tombstone.
    pub body: Option<&'a [u8]>,
}

impl<'a> StoredResponse<'a> {
    /// Reads an encoding.
    ///
    /// # Errors
    /// [`DecodeError`] for anything that [`ResponseEncoder`] did not write.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, DecodeError> {
        let mut rest = Reader(bytes);
        let [version] = *rest.array::<1>()?;
        if version != FORMAT_VERSION {
            return Err(DecodeError::Version(version));
        }
        let [flags] = *rest.array::<1>()?;
        if flags & !TOMBSTONE != 0 {
            return Err(DecodeError::Malformed);
        }
        let status = u16::from_le_bytes(*rest.array()?);
        let count = u16::from_le_bytes(*rest.array()?);
        let origin_length = u32::from_le_bytes(*rest.array()?);
        let body_length = u64::from_le_bytes(*rest.array()?);
        let origin = rest.take(origin_length as usize)?;
        // A count is a claim, not a fact: a header takes six bytes at the least.
        let mut headers = Vec::with_capacity(usize::from(count).min(rest.0.len() / 6));
        for _ in 0..count {
            let name_length = u16::from_le_bytes(*rest.array()?);
            let value_length = u32::from_le_bytes(*rest.array()?);
            let name = rest.take(usize::from(name_length))?;
            let value = rest.take(value_length as usize)?;
            headers.push((name, value));
        }
        if rest.0.len() as u64 != body_length {
            return Err(DecodeError::Malformed);
        }
        let tombstone = flags & TOMBSTONE != 0;
        if tombstone && (body_length != 0 || origin_length != 0) {
            return Err(DecodeError::Malformed);
        }
        Ok(Self {
            status,
            headers,
            origin: (!origin.is_empty()).then_some(origin),
            body: (!tombstone).then_some(rest.0),
        })
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, length: usize) -> Result<&'a [u8], DecodeError> {
        let (head, rest) = self.0.split_at_checked(length).ok_or(DecodeError::Malformed)?;
        self.0 = rest;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<&'a [u8; N], DecodeError> {
        let (head, rest) = self.0.split_first_chunk::<N>().ok_or(DecodeError::Malformed)?;
        self.0 = rest;
        Ok(head)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn encode(status: u16, headers: &[(Vec<u8>, Vec<u8>)], origin: Option<&[u8]>, body: &[u8]) -> Vec<u8> {
        let lines = headers.iter().map(|(name, value)| (name.as_slice(), value.as_slice()));
        let mut encoder = ResponseEncoder::begin(status, lines, origin).unwrap();
        for chunk in body.chunks(7) {
            encoder.push(chunk);
        }
        encoder.finish()
    }

    proptest! {
        #[test]
        fn what_was_encoded_is_what_is_decoded(
            status in 100u16..600,
            headers in proptest::collection::vec((".{0,20}", proptest::collection::vec(any::<u8>(), 0..50)), 0..20),
            origin in proptest::option::of("[a-z]{1,20}"),
            body in proptest::collection::vec(any::<u8>(), 0..300),
        ) {
            let headers: Vec<_> = headers.into_iter().map(|(n, v)| (n.into_bytes(), v)).collect();
            let bytes = encode(status, &headers, origin.as_deref().map(str::as_bytes), &body);
            let decoded = StoredResponse::decode(&bytes).unwrap();
            prop_assert_eq!(decoded.status, status);
            prop_assert_eq!(decoded.origin, origin.as_deref().map(str::as_bytes));
            prop_assert_eq!(decoded.body, Some(body.as_slice()));
            let lines: Vec<_> = decoded.headers.iter().map(|(n, v)| (n.to_vec(), v.to_vec())).collect();
            prop_assert_eq!(lines, headers);
        }

        #[test]
        fn any_bytes_decode_or_are_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = StoredResponse::decode(&bytes);
        }

        #[test]
        fn a_prefix_is_never_a_response(cut in 0usize..60) {
            let bytes = encode(201, &[(b"location".to_vec(), b"/pay/1".to_vec())], None, b"0123456789");
            prop_assume!(cut < bytes.len());
            prop_assert_eq!(StoredResponse::decode(&bytes[..cut]), Err(DecodeError::Malformed));
        }
    }

    #[test]
    fn a_tombstone_keeps_status_and_chosen_headers_only() {
        let bytes = ResponseEncoder::tombstone(201, [(&b"location"[..], &b"/pay/1"[..])]).unwrap();
        let decoded = StoredResponse::decode(&bytes).unwrap();
        assert_eq!((decoded.status, decoded.body), (201, None));
        assert_eq!(decoded.headers, vec![(&b"location"[..], &b"/pay/1"[..])]);
    }

    #[test]
    fn another_version_is_named() {
        let mut bytes = encode(200, &[], None, b"");
        bytes[0] = 9;
        assert_eq!(StoredResponse::decode(&bytes), Err(DecodeError::Version(9)));
    }
}
