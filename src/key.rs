//! The client's key, from header lines to [`IdempotencyKey`], and the [`StoreKey`] that stands for it in a store.
//!
//! A key is a String Item (RFC 9651 sections 3.3 and 3.3.3, as draft-ietf-httpapi-idempotency-key-header
//! section 2.1 has it) or, leniently, a bare token that means the same. It is opaque: compared byte for byte,
//! no case folded, nothing normalized. No error and no `Debug` output holds a byte of it.

use std::fmt;

use sha2::{Digest, Sha256};

use crate::config::{KeyFormat, KeyPolicy, KeySyntax, Mode, Rule};
use crate::headers::trim_ows;
use crate::scope::ScopeValues;

/// Names what a store key is the hash of; a change of the framing changes it.
const STORE_KEY_DOMAIN: &[u8] = b"envoy-idempotency store key 1";

/// No configured namespace has a control character, so no enforced store key is a shadow's.
const SHADOW_NAMESPACE: &str = "\u{1}shadow:";

/// A key as the client meant it: decoded, never empty, visible ASCII only.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct IdempotencyKey(Box<[u8]>);

impl IdempotencyKey {
    /// The decoded value.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for IdempotencyKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "IdempotencyKey({} bytes)", self.0.len())
    }
}

/// Which rule a key header broke. Indexes count bytes of the field line's value from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyError {
    /// The header comes on more than one line.
    SeveralLines,
    /// A comma outside quotes: a list, or lines that a proxy joined (RFC 9110 section 5.3).
    List {
        /// Where the comma is.
        index: usize,
    },
    /// No value, or the empty String.
    Empty,
    /// Strict syntax, and no String.
    NotAString {
        /// Where the value begins.
        index: usize,
    },
    /// It begins like another structured type: a Boolean or a Byte Sequence (RFC 9651 sections 3.3.5, 3.3.6).
    OtherType {
        /// Where the value begins.
        index: usize,
    },
    /// A character that a bare token can't have: `"`, `;`, `\`, `(` or `)`.
    ForbiddenCharacter {
        /// Where it is.
        index: usize,
    },
    /// A space within the key.
    Space {
        /// Where it is.
        index: usize,
    },
    /// A control character within the key.
    ControlCharacter {
        /// Where it is.
        index: usize,
    },
    /// A byte beyond ASCII within the key.
    NonAscii {
        /// Where it is.
        index: usize,
    },
    /// A backslash before something other than `"` or `\` (RFC 9651 section 4.2.5).
    InvalidEscape {
        /// Where the backslash is.
        index: usize,
    },
    /// A String without its closing quote.
    Unterminated {
        /// Where the String begins.
        index: usize,
    },
    /// Parameters that RFC 9651 section 4.2.3.2 can't parse.
    InvalidParameter {
        /// Where parsing failed.
        index: usize,
    },
    /// Something other than parameters after the String.
    TrailingCharacters {
        /// Where it begins.
        index: usize,
    },
    /// The decoded value is over `max_length`.
    TooLong {
        /// The bound.
        max_length: usize,
    },
    /// The rule wants a UUID, and this is none.
    NotAUuid,
}

impl KeyError {
    /// A name for metrics and logs.
    #[must_use]
    pub fn as_str(&self) -> &'static str {
        match self {
            KeyError::SeveralLines => "several_lines",
            KeyError::List { .. } => "list",
            KeyError::Empty => "empty",
            KeyError::NotAString { .. } => "not_a_string",
            KeyError::OtherType { .. } => "other_type",
            KeyError::ForbiddenCharacter { .. } => "forbidden_character",
            KeyError::Space { .. } => "space",
            KeyError::ControlCharacter { .. } => "control_character",
            KeyError::NonAscii { .. } => "non_ascii",
            KeyError::InvalidEscape { .. } => "invalid_escape",
            KeyError::Unterminated { .. } => "unterminated",
            KeyError::InvalidParameter { .. } => "invalid_parameter",
            KeyError::TrailingCharacters { .. } => "trailing_characters",
            KeyError::TooLong { .. } => "too_long",
            KeyError::NotAUuid => "not_a_uuid",
        }
    }
}

impl fmt::Display for KeyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KeyError::SeveralLines => f.write_str("the header comes on more than one line"),
            KeyError::List { index } => write!(f, "a list of keys: comma outside quotes at byte {index}"),
            KeyError::Empty => f.write_str("the key is empty"),
            KeyError::NotAString { index } => {
                write!(f, "not a quoted string (RFC 9651 section 3.3.3) at byte {index}")
            }
            KeyError::OtherType { index } => {
                write!(f, "begins like another structured field type at byte {index}")
            }
            KeyError::ForbiddenCharacter { index } => {
                write!(f, "a character that an unquoted key can't have at byte {index}")
            }
            KeyError::Space { index } => write!(f, "a space within the key at byte {index}"),
            KeyError::ControlCharacter { index } => write!(f, "a control character at byte {index}"),
            KeyError::NonAscii { index } => write!(f, "a byte beyond ASCII at byte {index}"),
            KeyError::InvalidEscape { index } => write!(f, "an invalid escape at byte {index}"),
            KeyError::Unterminated { index } => write!(f, "the quote at byte {index} is never closed"),
            KeyError::InvalidParameter { index } => write!(f, "an invalid parameter at byte {index}"),
            KeyError::TrailingCharacters { index } => {
                write!(f, "something other than parameters after the key at byte {index}")
            }
            KeyError::TooLong { max_length } => write!(f, "the key is longer than {max_length} bytes"),
            KeyError::NotAUuid => f.write_str("the key is not a UUID of 36 characters"),
        }
    }
}

impl std::error::Error for KeyError {}

/// Reads the key out of all lines of the key header; no line is no key.
///
/// # Errors
///
/// The first rule that the header breaks, reading from the left.
pub fn parse_key<'a>(
    lines: impl IntoIterator<Item = &'a [u8]>,
    policy: &KeyPolicy,
) -> Result<Option<IdempotencyKey>, KeyError> {
    let mut lines = lines.into_iter();
    let Some(line) = lines.next() else { return Ok(None) };
    if lines.next().is_some() {
        return Err(KeyError::SeveralLines);
    }
    let key = parse_line(line, policy)?;
    if policy.format == KeyFormat::Uuid && !is_uuid(&key) {
        return Err(KeyError::NotAUuid);
    }
    Ok(Some(IdempotencyKey(key.into_boxed_slice())))
}

fn parse_line(line: &[u8], policy: &KeyPolicy) -> Result<Vec<u8>, KeyError> {
    let mut cursor = Cursor::new(line);
    let index = cursor.at();
    let key = match (cursor.peek(), policy.syntax) {
        (None, _) => return Err(KeyError::Empty),
        (Some(b'"'), _) => {
            let key = parse_string(&mut cursor, policy.max_length)?;
            skip_parameters(&mut cursor)?;
            key
        }
        (Some(_), KeySyntax::Strict) => return Err(KeyError::NotAString { index }),
        (Some(b'?' | b':'), KeySyntax::Lenient) => return Err(KeyError::OtherType { index }),
        (Some(_), KeySyntax::Lenient) => parse_bare(&mut cursor, policy.max_length)?,
    };
    if key.is_empty() { Err(KeyError::Empty) } else { Ok(key) }
}

/// A String (RFC 9651 section 4.2.5) whose content is fit for a key.
fn parse_string(cursor: &mut Cursor<'_>, max_length: usize) -> Result<Vec<u8>, KeyError> {
    let begin = cursor.at();
    cursor.bump();
    let mut key = Vec::new();
    loop {
        let index = cursor.at();
        let byte = match cursor.bump() {
            None => return Err(KeyError::Unterminated { index: begin }),
            Some(b'"') => return Ok(key),
            Some(b'\\') => match cursor.bump() {
                None => return Err(KeyError::Unterminated { index: begin }),
                Some(escaped @ (b'"' | b'\\')) => escaped,
                Some(_) => return Err(KeyError::InvalidEscape { index }),
            },
            Some(byte) => check_visible(byte, index)?,
        };
        push(&mut key, byte, max_length)?;
    }
}

fn parse_bare(cursor: &mut Cursor<'_>, max_length: usize) -> Result<Vec<u8>, KeyError> {
    let mut key = Vec::new();
    loop {
        let index = cursor.at();
        let byte = match cursor.bump() {
            None => return Ok(key),
            Some(b',') => return Err(KeyError::List { index }),
            Some(b'"' | b';' | b'\\' | b'(' | b')') => return Err(KeyError::ForbiddenCharacter { index }),
            Some(byte) => check_visible(byte, index)?,
        };
        push(&mut key, byte, max_length)?;
    }
}

fn check_visible(byte: u8, index: usize) -> Result<u8, KeyError> {
    match byte {
        b' ' => Err(KeyError::Space { index }),
        0x21..=0x7e => Ok(byte),
        0x80..=0xff => Err(KeyError::NonAscii { index }),
        0x00..=0x1f | 0x7f => Err(KeyError::ControlCharacter { index }),
    }
}

fn push(key: &mut Vec<u8>, byte: u8, max_length: usize) -> Result<(), KeyError> {
    if key.len() >= max_length {
        return Err(KeyError::TooLong { max_length });
    }
    key.push(byte);
    Ok(())
}

/// Everything after the String: parameters (RFC 9651 section 4.2.3.2), which mean nothing here, and the end.
fn skip_parameters(cursor: &mut Cursor<'_>) -> Result<(), KeyError> {
    while cursor.eat(b';') {
        cursor.skip(|byte| byte == b' ');
        let index = cursor.at();
        let begins_name = |byte: u8| byte.is_ascii_lowercase() || byte == b'*';
        if !cursor.bump().is_some_and(begins_name) {
            return Err(KeyError::InvalidParameter { index });
        }
        cursor.skip(|byte| begins_name(byte) || byte.is_ascii_digit() || matches!(byte, b'_' | b'-' | b'.'));
        if cursor.eat(b'=') {
            skip_bare_item(cursor).ok_or(KeyError::InvalidParameter { index: cursor.at() })?;
        }
    }
    let index = cursor.at();
    cursor.skip(|byte| matches!(byte, b' ' | b'\t'));
    match cursor.peek() {
        None => Ok(()),
        Some(b',') => Err(KeyError::List { index: cursor.at() }),
        Some(_) => Err(KeyError::TrailingCharacters { index }),
    }
}

/// A Bare Item (RFC 9651 section 4.2.3.1); `None` if it isn't one, with the cursor near the reason.
fn skip_bare_item(cursor: &mut Cursor<'_>) -> Option<()> {
    match cursor.peek()? {
        b'-' | b'0'..=b'9' => skip_number(cursor).map(|_| ()),
        b'"' => skip_string(cursor),
        b'*' | b'A'..=b'Z' | b'a'..=b'z' => {
            cursor.skip(|byte| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~:/".contains(&byte));
            Some(())
        }
        b':' => {
            cursor.bump();
            cursor.skip(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/' | b'='));
            cursor.eat(b':').then_some(())
        }
        b'?' => {
            cursor.bump();
            (cursor.eat(b'0') || cursor.eat(b'1')).then_some(())
        }
        b'@' => {
            cursor.bump();
            matches!(skip_number(cursor)?, Number::Integer).then_some(())
        }
        b'%' => skip_display_string(cursor),
        _ => None,
    }
}

enum Number {
    Integer,
    Decimal,
}

/// RFC 9651 section 4.2.4: at most 15 digits, or 12 before and 3 after the point.
fn skip_number(cursor: &mut Cursor<'_>) -> Option<Number> {
    cursor.eat(b'-');
    let whole = cursor.skip(|byte| byte.is_ascii_digit());
    if cursor.peek() == Some(b'.') {
        if !(1..=12).contains(&whole) {
            return None;
        }
        cursor.bump();
        let fraction = cursor.skip(|byte| byte.is_ascii_digit());
        return (1..=3).contains(&fraction).then_some(Number::Decimal);
    }
    (1..=15).contains(&whole).then_some(Number::Integer)
}

/// RFC 9651 section 4.2.5; unlike in a key, spaces may be in it.
fn skip_string(cursor: &mut Cursor<'_>) -> Option<()> {
    cursor.bump();
    loop {
        match cursor.bump()? {
            b'"' => return Some(()),
            b'\\' => matches!(cursor.bump()?, b'"' | b'\\').then_some(())?,
            0x20..=0x7e => {}
            _ => return None,
        }
    }
}

/// RFC 9651 section 4.2.10: percent-encoded UTF-8 in quotes.
fn skip_display_string(cursor: &mut Cursor<'_>) -> Option<()> {
    cursor.bump();
    cursor.eat(b'"').then_some(())?;
    let mut text = Vec::new();
    loop {
        match cursor.bump()? {
            b'"' => return std::str::from_utf8(&text).ok().map(|_| ()),
            b'%' => {
                let high = lower_hex_value(cursor.bump()?)?;
                let low = lower_hex_value(cursor.bump()?)?;
                text.push(high << 4 | low);
            }
            byte @ 0x20..=0x7e => text.push(byte),
            _ => return None,
        }
    }
}

fn lower_hex_value(byte: u8) -> Option<u8> {
    match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    }
}

/// 36 characters, hexadecimal in either case (RFC 9562 section 4); the case stays part of the key.
fn is_uuid(key: &[u8]) -> bool {
    key.len() == 36
        && key.iter().enumerate().all(|(at, byte)| match at {
            8 | 13 | 18 | 23 => *byte == b'-',
            _ => byte.is_ascii_hexdigit(),
        })
}

/// Reads a field line's value from the left; the whitespace around it is no part of it.
struct Cursor<'a> {
    rest: &'a [u8],
    /// Index just past the value.
    end: usize,
}

impl<'a> Cursor<'a> {
    fn new(line: &'a [u8]) -> Cursor<'a> {
        let (begin, rest) = trim_ows(line);
        Cursor { rest, end: begin + rest.len() }
    }

    fn at(&self) -> usize {
        self.end - self.rest.len()
    }

    fn peek(&self) -> Option<u8> {
        self.rest.first().copied()
    }

    fn bump(&mut self) -> Option<u8> {
        let (first, rest) = self.rest.split_first()?;
        self.rest = rest;
        Some(*first)
    }

    fn eat(&mut self, byte: u8) -> bool {
        let found = self.peek() == Some(byte);
        if found {
            self.bump();
        }
        found
    }

    /// Skips as long as `wanted` holds; says how many bytes that were.
    fn skip(&mut self, wanted: impl Fn(u8) -> bool) -> usize {
        let mut skipped = 0;
        while self.peek().is_some_and(&wanted) {
            self.bump();
            skipped += 1;
        }
        skipped
    }
}

/// What a store sees of a key: SHA-256 over length-prefixed namespace, scope parts and key.
///
/// Raw text never gets there: it could carry a store's own syntax, and a caller's name or key would rest in it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StoreKey([u8; 32]);

impl StoreKey {
    /// The one store key of this key, for this caller, under this namespace.
    #[must_use]
    pub fn derive(namespace: &str, scope: &ScopeValues, key: &IdempotencyKey) -> StoreKey {
        let mut hasher = Sha256::new();
        update_framed(&mut hasher, STORE_KEY_DOMAIN);
        update_framed(&mut hasher, namespace.as_bytes());
        hasher.update(scope.framed());
        update_framed(&mut hasher, key.as_bytes());
        StoreKey(hasher.finalize().into())
    }

    /// The store key of this key, for this caller, under this rule. What `shadow` keeps, `enforce` never obeys.
    #[must_use]
    pub fn under(rule: &Rule, scope: &ScopeValues, key: &IdempotencyKey) -> StoreKey {
        match rule.mode {
            Mode::Shadow => Self::derive(&[SHADOW_NAMESPACE, &rule.namespace].concat(), scope, key),
            Mode::Enforce | Mode::Off => Self::derive(&rule.namespace, scope, key),
        }
    }

    /// A store key that was derived earlier, or elsewhere.
    #[must_use]
    pub fn from_bytes(bytes: [u8; 32]) -> StoreKey {
        StoreKey(bytes)
    }

    /// The whole hash.
    #[must_use]
    pub fn bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The whole hash in 64 lower-case hexadecimal digits.
    #[must_use]
    pub fn hex(&self) -> String {
        hex(&self.0)
    }

    /// The first 8 digits of [`hex`](Self::hex), which logs show.
    #[must_use]
    pub fn short_hex(&self) -> ShortHex {
        ShortHex::of(&self.0)
    }

    /// The first 16 bytes: a tag within a table that holds fingerprints beside it.
    #[must_use]
    pub fn tag(&self) -> [u8; 16] {
        self.0.first_chunk().copied().unwrap_or_default()
    }
}

impl fmt::Debug for StoreKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StoreKey({})", self.short_hex())
    }
}

/// The first 8 hexadecimal digits of a hash.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ShortHex([u8; 8]);

impl ShortHex {
    /// Of this hash.
    #[must_use]
    pub fn of(hash: &[u8; 32]) -> ShortHex {
        let mut digits = [b'0'; 8];
        for (digit, hex) in digits.iter_mut().zip(hash.iter().flat_map(|byte| hex_digits(*byte))) {
            *digit = hex;
        }
        ShortHex(digits)
    }

    /// The digits.
    #[must_use]
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.0).unwrap_or_default()
    }
}

impl fmt::Display for ShortHex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Debug for ShortHex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Hashes a piece after its length, so that no two sequences of pieces hash the same bytes.
pub(crate) fn update_framed(hasher: &mut Sha256, piece: &[u8]) {
    hasher.update(frame_length(piece.len()));
    hasher.update(piece);
}

/// The length prefix of a piece, or a count: `u64` little endian on every target.
pub(crate) fn frame_length(length: usize) -> [u8; 8] {
    (length as u64).to_le_bytes()
}

/// Two lower-case hexadecimal digits for each byte.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().flat_map(|byte| hex_digits(*byte)).map(char::from).collect()
}

fn hex_digits(byte: u8) -> [u8; 2] {
    [byte >> 4, byte & 0xf].map(|nibble| if nibble < 10 { b'0' + nibble } else { b'a' + nibble - 10 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Scope, ScopePart};
    use crate::policy::fixture;
    use crate::scope::resolve_scope;
    use proptest::prelude::*;

    const LENIENT: KeyPolicy =
        KeyPolicy { max_length: 255, format: KeyFormat::Any, syntax: KeySyntax::Lenient };
    const STRICT: KeyPolicy = KeyPolicy { syntax: KeySyntax::Strict, ..LENIENT };
    const UUID: KeyPolicy = KeyPolicy { format: KeyFormat::Uuid, ..LENIENT };

    fn parse(line: &[u8]) -> Result<Vec<u8>, KeyError> {
        parse_with(line, &LENIENT)
    }

    fn parse_with(line: &[u8], policy: &KeyPolicy) -> Result<Vec<u8>, KeyError> {
        parse_key([line], policy).map(|key| key.unwrap().as_bytes().to_vec())
    }

    /// D07
    #[test]
    fn no_line_is_no_key() {
        assert_eq!(parse_key([], &LENIENT), Ok(None));
        assert_eq!(parse_key([], &STRICT), Ok(None));
    }

    /// D02
    #[test]
    fn two_lines_are_refused_in_either_order_even_when_equal() {
        for lines in [[&b"a"[..], b"b"], [b"b", b"a"], [b"a", b"a"], [b"a", b""], [b"", b"a"]] {
            assert_eq!(parse_key(lines, &LENIENT), Err(KeyError::SeveralLines));
            assert_eq!(parse_key(lines, &STRICT), Err(KeyError::SeveralLines));
        }
    }

    /// D02: joined lines are a list.
    #[test]
    fn a_comma_is_a_list_only_outside_quotes() {
        for (line, index) in [
            (&b"a,b"[..], 1),
            (b"a, b", 1),
            (b",a", 0),
            (b"a,", 1),
            (b"\"a\",\"b\"", 3),
            (b"\"a\" , \"b\"", 4),
            (b"\"a\";v=1,\"b\"", 7),
            (b"\"a\";v=\"x,y\", b", 11),
        ] {
            assert_eq!(parse(line), Err(KeyError::List { index }), "{}", line.escape_ascii());
        }
        assert_eq!(parse(b"\"a,b\""), Ok(b"a,b".to_vec()));
        assert_eq!(parse(b"\"a\";v=\"x,y\""), Ok(b"a".to_vec()));
    }

    /// D03
    #[test]
    fn a_string_and_a_bare_token_are_the_same_key_unless_strict() {
        for key in ["abc", "ord.1", "a/b?c#d%+:*", "8e03978e-40d5-43e8-bc93-6894a57f9324", "@1", "a=b", "'k'"]
        {
            let quoted = format!("\"{key}\"");
            assert_eq!(parse(key.as_bytes()), Ok(key.as_bytes().to_vec()));
            assert_eq!(parse(quoted.as_bytes()), Ok(key.as_bytes().to_vec()));
            assert_eq!(parse_with(quoted.as_bytes(), &STRICT), Ok(key.as_bytes().to_vec()));
            assert_eq!(parse_with(key.as_bytes(), &STRICT), Err(KeyError::NotAString { index: 0 }));
        }
        assert_eq!(parse_with(b" k", &STRICT), Err(KeyError::NotAString { index: 1 }));
    }

    /// D04
    #[test]
    fn the_corners_of_the_string_grammar() {
        for (line, expected) in [
            (&br#""a\"b""#[..], Ok(&br#"a"b"#[..])),
            (br#""a\\b""#, Ok(br"a\b")),
            (b"\"k\" ", Ok(b"k")),
            (b"\t \"k\"\t", Ok(b"k")),
            (b"\"(;:?)\"", Ok(b"(;:?)")),
            (b"\"k", Err(KeyError::Unterminated { index: 0 })),
            (b" \"", Err(KeyError::Unterminated { index: 1 })),
            (br#""k\"#, Err(KeyError::Unterminated { index: 0 })),
            (br#""k\""#, Err(KeyError::Unterminated { index: 0 })),
            (br#""k\n""#, Err(KeyError::InvalidEscape { index: 2 })),
            (b":YQ==:", Err(KeyError::OtherType { index: 0 })),
            (b"?1", Err(KeyError::OtherType { index: 0 })),
            (b"(\"a\" \"b\")", Err(KeyError::ForbiddenCharacter { index: 0 })),
            (b"%\"a\"", Err(KeyError::ForbiddenCharacter { index: 1 })),
            (b"k;v=1", Err(KeyError::ForbiddenCharacter { index: 1 })),
            (b"k\\", Err(KeyError::ForbiddenCharacter { index: 1 })),
            (b"k)", Err(KeyError::ForbiddenCharacter { index: 1 })),
            (b"k\"k\"", Err(KeyError::ForbiddenCharacter { index: 1 })),
            (b"\"k\"k", Err(KeyError::TrailingCharacters { index: 3 })),
            (b"\"k\" ;v", Err(KeyError::TrailingCharacters { index: 3 })),
            (b"\"k\"\"k\"", Err(KeyError::TrailingCharacters { index: 3 })),
            (b"\"k\";v=1\t", Ok(b"k")),
        ] {
            assert_eq!(parse(line), expected.map(<[u8]>::to_vec), "{}", line.escape_ascii());
        }
    }

    /// D04, RFC 9651 sections 4.2.3.1 and 4.2.3.2
    #[test]
    fn well_formed_parameters_are_ignored() {
        for parameters in [
            ";v",
            ";v=1",
            ";  a;*b;c-d_e.f*9",
            ";v=-0",
            ";v=-999999999999999",
            ";v=123456789012.123",
            ";v=\"x \\\" \\\\ ;,\"",
            ";v=*a/b:c",
            ";v=Tok!#$%&'*+-.^_`|~",
            ";v=:YQ==:",
            ";v=:YQ:",
            ";v=::",
            ";v=?0",
            ";v=?1",
            ";v=@1659578233",
            ";v=@-1",
            ";v=%\"f%c3%bc\"",
            ";v=%\"\"",
            ";a=1;a=2",
        ] {
            assert_eq!(parse(format!("\"k\"{parameters}").as_bytes()), Ok(b"k".to_vec()), "{parameters}");
        }
        let many = format!("\"k\"{}", ";p=1".repeat(10_000));
        assert_eq!(parse(many.as_bytes()), Ok(b"k".to_vec()));
    }

    /// D04, RFC 9651 sections 4.2.3.1 and 4.2.3.2
    #[test]
    fn malformed_parameters_are_refused() {
        for parameters in [
            ";",
            "; ",
            ";;v",
            ";V=1",
            ";1=1",
            ";-v",
            ";\tv",
            ";v=",
            ";v=-",
            ";v=1.",
            ";v=1.2345",
            ";v=.5",
            ";v=1234567890123456",
            ";v=1234567890123.1",
            ";v=\"x",
            ";v=\"\\x\"",
            ";v=\"\x7f\"",
            ";v=:Y Q:",
            ";v=:YQ",
            ";v=?2",
            ";v=?",
            ";v=@1.5",
            ";v=@",
            ";v=%x",
            ";v=%\"%C3%BC\"",
            ";v=%\"%c3\"",
            ";v=%\"%c\"",
            ";v=%\"a",
            ";v=(1)",
            ";v= 1",
            ";v=,",
        ] {
            let parsed = parse(format!("\"k\"{parameters}").as_bytes());
            assert!(matches!(parsed, Err(KeyError::InvalidParameter { .. })), "{parameters}: {parsed:?}");
        }
        for parameters in [";v=1x", ";v=?1?", ";v=@1.", ";v=1.2.3", ";v\t=1"] {
            assert!(parse(format!("\"k\"{parameters}").as_bytes()).is_err(), "{parameters}");
        }
    }

    /// D06
    #[test]
    fn a_blank_key_is_an_error_never_a_value() {
        for line in [&b""[..], b" ", b"\t", b" \t ", b"\"\"", b" \"\" ", b"\"\";v=1"] {
            assert_eq!(parse(line), Err(KeyError::Empty), "{}", line.escape_ascii());
        }
        assert_eq!(parse_with(b"", &STRICT), Err(KeyError::Empty));
        assert_eq!(parse(b"\" \""), Err(KeyError::Space { index: 1 }));
    }

    /// H01: what could mean something to a store or a log is no part of a key.
    #[test]
    fn spaces_controls_and_non_ascii_are_refused_bare_and_quoted() {
        for byte in (0..=0x20).chain(0x7f..=0xff) {
            let expected = match byte {
                b' ' => KeyError::Space { index: 2 },
                0x80.. => KeyError::NonAscii { index: 2 },
                _ => KeyError::ControlCharacter { index: 2 },
            };
            assert_eq!(parse(&[b'a', b'b', byte, b'c']), Err(expected), "bare {byte:#x}");
            assert_eq!(parse(&[b'"', b'b', byte, b'c', b'"']), Err(expected), "quoted {byte:#x}");
        }
    }

    /// D09
    #[test]
    fn keys_are_opaque_bytes() {
        assert_ne!(parse(b"K").unwrap(), parse(b"k").unwrap());
        assert_eq!(parse(b"\"k \""), Err(KeyError::Space { index: 2 }));
        let uuid = b"8E03978E-40d5-43e8-bc93-6894a57f9324";
        assert_eq!(parse_with(uuid, &UUID), Ok(uuid.to_vec()));
        assert_ne!(parse_with(uuid, &UUID), parse_with(&uuid.to_ascii_lowercase(), &UUID));
    }

    #[test]
    fn only_a_36_character_uuid_is_a_uuid() {
        for line in [
            "8e03978e40d543e8bc936894a57f9324",
            "{8e03978e-40d5-43e8-bc93-6894a57f9324}",
            "8e03978e-40d5-43e8-bc93-6894a57f932",
            "8e03978e-40d5-43e8-bc93-6894a57f93240",
            "8e03978e-40d5-43e8-bc93_6894a57f9324",
            "8e03978e-40d5-43e8-bc93-6894a57f932g",
            "8e03978-e40d5-43e8-bc93-6894a57f9324",
        ] {
            assert_eq!(parse_with(line.as_bytes(), &UUID), Err(KeyError::NotAUuid), "{line}");
        }
        assert!(parse_with(b"\"8e03978e-40d5-43e8-bc93-6894a57f9324\"", &UUID).is_ok());
    }

    #[test]
    fn the_length_is_that_of_the_decoded_value() {
        let policy = KeyPolicy { max_length: 3, ..LENIENT };
        assert_eq!(parse_with(b"abc", &policy), Ok(b"abc".to_vec()));
        assert_eq!(parse_with(b"abcd", &policy), Err(KeyError::TooLong { max_length: 3 }));
        assert_eq!(parse_with(br#""\"\\\"""#, &policy), Ok(br#""\""#.to_vec()));
        assert_eq!(parse_with(br#""\"\\\"\\""#, &policy), Err(KeyError::TooLong { max_length: 3 }));
        assert_eq!(parse_with(b"\"abc\";v=\"longer than that\"", &policy), Ok(b"abc".to_vec()));
    }

    /// E09: no error and no debug output gives the key away.
    #[test]
    fn errors_and_debug_output_hold_no_byte_of_the_key() {
        for line in
            [&b"ZZZ ZZZ"[..], b"ZZZ,ZZZ", b"\"ZZZ", b"\"Z\\Z\"", b"\"Z\"Z", b"\"Z\";Z", b"Z\x7fZ", b"?Z"]
        {
            let error = parse(line).unwrap_err();
            assert!(!format!("{error} {error:?} {}", error.as_str()).contains('Z'), "{error:?}");
        }
        let key = parse_key([&b"ZZZ"[..]], &LENIENT).unwrap().unwrap();
        assert_eq!(format!("{key:?}"), "IdempotencyKey(3 bytes)");
    }

    #[test]
    fn messages_name_the_rule_and_the_index() {
        assert_eq!(parse(b"a b").unwrap_err().to_string(), "a space within the key at byte 1");
        assert_eq!(
            parse_key([&b"a"[..], b"b"], &LENIENT).unwrap_err().to_string(),
            "the header comes on more than one line"
        );
    }

    fn key(value: &str) -> IdempotencyKey {
        IdempotencyKey(value.as_bytes().into())
    }

    fn constant_scope(values: &[&str]) -> ScopeValues {
        let mut rule = fixture::rule();
        rule.scope =
            Scope::Parts(values.iter().map(|value| ScopePart::Constant((*value).to_owned())).collect());
        resolve_scope(&rule, &fixture::Request::new().head()).unwrap()
    }

    /// H01, E11
    #[test]
    fn store_keys_differ_where_namespace_scope_or_key_does() {
        let derived = [
            StoreKey::derive("", &constant_scope(&["a"]), &key("ord.1")),
            StoreKey::derive("", &constant_scope(&["a"]), &key("ord.2")),
            StoreKey::derive("n", &constant_scope(&["a"]), &key("ord.1")),
            StoreKey::derive("", &constant_scope(&["a", "b"]), &key("ord.1")),
            StoreKey::derive("", &constant_scope(&["ab"]), &key("ord.1")),
            StoreKey::derive("", &constant_scope(&["b", "a"]), &key("ord.1")),
            StoreKey::derive("", &constant_scope(&["a"]), &key("aord.1")),
            StoreKey::derive("a", &constant_scope(&["a"]), &key("ord.1")),
        ];
        for (at, one) in derived.iter().enumerate() {
            assert_eq!(derived.iter().filter(|other| *other == one).count(), 1, "number {at}");
        }
    }

    /// H01: whatever the key, the store sees hexadecimal digits.
    #[test]
    fn a_store_key_is_a_fixed_hash_in_hexadecimal() {
        let store_key = StoreKey::derive("", &constant_scope(&["tenant-a"]), &key("a/b?c#d%+:*"));
        let hex = store_key.hex();
        assert_eq!(hex.len(), 64);
        assert!(hex.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f')));
        assert_eq!(store_key.short_hex().as_str(), &hex[..8]);
        assert_eq!(format!("{store_key:?}"), format!("StoreKey({})", &hex[..8]));
        assert_eq!(store_key.tag(), store_key.bytes()[..16]);
        assert_eq!(StoreKey::from_bytes(*store_key.bytes()), store_key);
    }

    /// J07: records outlive a deploy, so what is derived must not change with the code.
    #[test]
    fn the_derivation_of_store_keys_is_frozen() {
        let store_key = StoreKey::derive("ns", &constant_scope(&["tenant-a"]), &key("k"));
        let mut input = Vec::new();
        for piece in [STORE_KEY_DOMAIN, b"ns"] {
            input.extend((piece.len() as u64).to_le_bytes());
            input.extend(piece);
        }
        input.push(1);
        input.extend(1_u64.to_le_bytes());
        input.push(6);
        input.extend(0_u64.to_le_bytes());
        input.extend(b"\x08\0\0\0\0\0\0\0tenant-a\x01\0\0\0\0\0\0\0k");
        assert_eq!(store_key.bytes()[..], Sha256::digest(&input)[..]);
        assert_eq!(store_key.short_hex().as_str(), "8e9650ff");
    }

    proptest! {
        #[test]
        fn any_line_is_parsed_or_refused(line in proptest::collection::vec(any::<u8>(), 0..64)) {
            for policy in [LENIENT, STRICT, UUID] {
                if let Ok(Some(key)) = parse_key([&line[..]], &policy) {
                    prop_assert!(!key.as_bytes().is_empty());
                    prop_assert!(key.as_bytes().iter().all(u8::is_ascii_graphic));
                }
            }
        }

        #[test]
        fn any_line_of_structured_field_characters_is_parsed_or_refused(
            line in "[ \t\"\\\\;:?@%=(),.*a-c0-9-]{0,40}",
        ) {
            let quoted = format!("\"k\"{line}");
            for line in [line.as_bytes(), quoted.as_bytes()] {
                let _ = parse_key([line], &LENIENT);
                if parse_key([line], &STRICT).is_ok() {
                    prop_assert_eq!(parse_key([line], &STRICT), parse_key([line], &LENIENT));
                }
            }
        }

        /// D03
        #[test]
        fn quoting_a_bare_key_does_not_change_it(bare in "[!#-'*-+./0-9<->@-\\[\\]-~][!#-'*-+./0-:<-\\[\\]-~]{0,40}") {
            let quoted = format!(" \"{bare}\" ");
            prop_assert_eq!(parse(bare.as_bytes()), Ok(bare.clone().into_bytes()));
            prop_assert_eq!(parse(quoted.as_bytes()), Ok(bare.into_bytes()));
        }

        #[test]
        fn decoding_reverses_escaping(key in "[!-~]{1,40}") {
            let quoted = format!("\"{}\"", key.replace('\\', "\\\\").replace('"', "\\\""));
            prop_assert_eq!(parse_with(quoted.as_bytes(), &STRICT), Ok(key.into_bytes()));
        }
    }
}
