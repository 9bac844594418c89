//! RESP2 on the wire: commands out, values in.
//!
//! The decoder is total and reads in place. It takes what the scripts answer and no more: a reply nested deeper or
//! with more elements is malformed, so that no reply costs more memory than its own bytes and a little.

/// How deep arrays may lie in each other.
const MAX_DEPTH: u8 = 4;
/// Values that one reply may be made of.
const MAX_VALUES: usize = 64;
/// Digits of the longest number, its sign included.
const MAX_DIGITS: usize = 20;

/// A reply, or a part of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value<'a> {
    /// `+…`
    Simple(&'a [u8]),
    /// `-…`
    Error(&'a [u8]),
    /// `:…`
    Integer(i64),
    /// `$…`
    Bulk(&'a [u8]),
    /// `$-1` or `*-1`
    Null,
    /// `*…`
    Array(Vec<Value<'a>>),
}

/// Why bytes are no value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DecodeError {
    /// They end too early.
    Incomplete,
    /// They are no RESP2, or more than is taken.
    Malformed,
}

/// Appends a command.
pub fn encode_command<T: AsRef<[u8]>>(out: &mut Vec<u8>, argv: &[T]) {
    push_length(out, b'*', argv.len());
    for argument in argv {
        push_bulk(out, argument.as_ref());
    }
}

/// Appends a bulk string.
pub fn push_bulk(out: &mut Vec<u8>, bulk: &[u8]) {
    push_length(out, b'$', bulk.len());
    out.extend_from_slice(bulk);
    out.extend_from_slice(b"\r\n");
}

/// Appends what begins a value that has a length.
pub fn push_length(out: &mut Vec<u8>, kind: u8, length: usize) {
    out.push(kind);
    out.extend_from_slice(length.to_string().as_bytes());
    out.extend_from_slice(b"\r\n");
}

/// Reads the first value, and says what follows it.
///
/// # Errors
/// [`DecodeError`]: no byte of the value is to be trusted.
pub fn decode(bytes: &[u8]) -> Result<(Value<'_>, &[u8]), DecodeError> {
    let mut decoder = Decoder { rest: bytes, values: MAX_VALUES };
    let value = decoder.value(MAX_DEPTH)?;
    Ok((value, decoder.rest))
}

struct Decoder<'a> {
    rest: &'a [u8],
    /// How many values the reply may still have.
    values: usize,
}

impl<'a> Decoder<'a> {
    fn value(&mut self, depth: u8) -> Result<Value<'a>, DecodeError> {
        self.values = self.values.checked_sub(1).ok_or(DecodeError::Malformed)?;
        let (kind, rest) = self.rest.split_first().ok_or(DecodeError::Incomplete)?;
        self.rest = rest;
        match kind {
            b'+' => self.line().map(Value::Simple),
            b'-' => self.line().map(Value::Error),
            b':' => self.number().map(Value::Integer),
            b'$' => self.bulk(),
            b'*' => self.array(depth),
            _ => Err(DecodeError::Malformed),
        }
    }

    fn bulk(&mut self) -> Result<Value<'a>, DecodeError> {
        let Some(length) = self.length()? else { return Ok(Value::Null) };
        let (bulk, rest) = self.rest.split_at_checked(length).ok_or(DecodeError::Incomplete)?;
        self.rest = match rest {
            [b'\r', b'\n', rest @ ..] => rest,
            [] | [b'\r'] => return Err(DecodeError::Incomplete),
            _ => return Err(DecodeError::Malformed),
        };
        Ok(Value::Bulk(bulk))
    }

    fn array(&mut self, depth: u8) -> Result<Value<'a>, DecodeError> {
        let Some(length) = self.length()? else { return Ok(Value::Null) };
        // Said before a byte of it is read: a length alone allocates nothing.
        if length > self.values {
            return Err(DecodeError::Malformed);
        }
        let depth = depth.checked_sub(1).ok_or(DecodeError::Malformed)?;
        (0..length).map(|_| self.value(depth)).collect::<Result<_, _>>().map(Value::Array)
    }

    /// `None` for the length of nothing, -1.
    fn length(&mut self) -> Result<Option<usize>, DecodeError> {
        match self.number()? {
            -1 => Ok(None),
            length => usize::try_from(length).map(Some).map_err(|_| DecodeError::Malformed),
        }
    }

    fn number(&mut self) -> Result<i64, DecodeError> {
        let near = self.rest.get(..MAX_DIGITS + 2).unwrap_or(self.rest);
        let Some(end) = near.iter().position(|byte| *byte == b'\r') else {
            let is_cut = near.len() == self.rest.len() && near.iter().all(is_of_number);
            return Err(if is_cut { DecodeError::Incomplete } else { DecodeError::Malformed });
        };
        let digits = near.get(..end).unwrap_or_default();
        if !digits.iter().all(is_of_number) {
            return Err(DecodeError::Malformed);
        }
        let text = std::str::from_utf8(digits).map_err(|_| DecodeError::Malformed)?;
        let number = text.parse().map_err(|_| DecodeError::Malformed)?;
        self.line()?;
        Ok(number)
    }

    fn line(&mut self) -> Result<&'a [u8], DecodeError> {
        let end = self.rest.iter().position(|byte| *byte == b'\r').ok_or(DecodeError::Incomplete)?;
        let (line, rest) = self.rest.split_at_checked(end).ok_or(DecodeError::Incomplete)?;
        self.rest = match rest {
            [b'\r', b'\n', rest @ ..] => rest,
            [b'\r'] => return Err(DecodeError::Incomplete),
            _ => return Err(DecodeError::Malformed),
        };
        Ok(line)
    }
}

const fn is_of_number(byte: &u8) -> bool {
    byte.is_ascii_digit() || *byte == b'-'
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone)]
    enum Owned {
        Simple(String),
        Error(String),
        Integer(i64),
        Bulk(Vec<u8>),
        Null,
        Array(Vec<Owned>),
    }

    fn encode(value: &Owned, out: &mut Vec<u8>) {
        match value {
            Owned::Simple(text) => out.extend(format!("+{text}\r\n").bytes()),
            Owned::Error(text) => out.extend(format!("-{text}\r\n").bytes()),
            Owned::Integer(number) => out.extend(format!(":{number}\r\n").bytes()),
            Owned::Bulk(bytes) => {
                push_length(out, b'$', bytes.len());
                out.extend(bytes);
                out.extend(b"\r\n");
            }
            Owned::Null => out.extend(b"$-1\r\n"),
            Owned::Array(values) => {
                push_length(out, b'*', values.len());
                values.iter().for_each(|value| encode(value, out));
            }
        }
    }

    fn borrowed(value: &Owned) -> Value<'_> {
        match value {
            Owned::Simple(text) => Value::Simple(text.as_bytes()),
            Owned::Error(text) => Value::Error(text.as_bytes()),
            Owned::Integer(number) => Value::Integer(*number),
            Owned::Bulk(bytes) => Value::Bulk(bytes),
            Owned::Null => Value::Null,
            Owned::Array(values) => Value::Array(values.iter().map(borrowed).collect()),
        }
    }

    fn any_value() -> impl Strategy<Value = Owned> {
        let leaf = prop_oneof![
            "[ -~]{0,30}".prop_map(Owned::Simple),
            "[ -~]{0,30}".prop_map(Owned::Error),
            any::<i64>().prop_map(Owned::Integer),
            proptest::collection::vec(any::<u8>(), 0..60).prop_map(Owned::Bulk),
            Just(Owned::Null),
        ];
        // At most 1 + 3 × (1 + 3 × (1 + 3)) values, and three arrays in each other.
        leaf.prop_recursive(3, 40, 3, |inner| proptest::collection::vec(inner, 0..=3).prop_map(Owned::Array))
    }

    /// Bytes that look more like RESP than random ones.
    fn near_resp() -> impl Strategy<Value = Vec<u8>> {
        let token = prop_oneof![
            Just(b"*3\r\n".to_vec()),
            Just(b"$5\r\n".to_vec()),
            Just(b"hello\r\n".to_vec()),
            Just(b":1\r\n".to_vec()),
            Just(b"$-1\r\n".to_vec()),
            Just(b"*-1\r\n".to_vec()),
            Just(b"$99999999999999999999\r\n".to_vec()),
            Just(b"\r".to_vec()),
            proptest::collection::vec(any::<u8>(), 0..4),
        ];
        proptest::collection::vec(token, 0..20).prop_map(|tokens| tokens.concat())
    }

    proptest! {
        #[test]
        fn what_was_encoded_is_what_is_decoded(value in any_value(), rest in proptest::collection::vec(any::<u8>(), 0..9)) {
            let mut bytes = Vec::new();
            encode(&value, &mut bytes);
            bytes.extend(&rest);
            prop_assert_eq!(decode(&bytes), Ok((borrowed(&value), rest.as_slice())));
        }

        #[test]
        fn every_prefix_is_incomplete(value in any_value()) {
            let mut bytes = Vec::new();
            encode(&value, &mut bytes);
            for cut in 0..bytes.len() {
                prop_assert_eq!(decode(&bytes[..cut]), Err(DecodeError::Incomplete), "cut at {}", cut);
            }
        }

        #[test]
        fn any_bytes_decode_or_are_refused(bytes in prop_oneof![proptest::collection::vec(any::<u8>(), 0..200), near_resp()]) {
            if let Ok((_, rest)) = decode(&bytes) {
                prop_assert!(bytes.ends_with(rest) && rest.len() < bytes.len());
            }
        }

        #[test]
        fn a_command_is_an_array_of_bulks(argv in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..40), 1..12)) {
            let mut bytes = b"before".to_vec();
            encode_command(&mut bytes, &argv);
            let expected = Value::Array(argv.iter().map(|argument| Value::Bulk(argument)).collect());
            prop_assert_eq!(decode(&bytes[6..]), Ok((expected, &b""[..])));
        }
    }

    #[test]
    fn what_is_no_resp_is_malformed() {
        for bytes in [
            &b"HTTP/1.1 400 Bad Request\r\n"[..],
            b"<html>",
            b"$3\r\nabcde\r\n",
            b"$-2\r\n",
            b"*-2\r\n",
            b":1x\r\n",
            b":\r\n",
            b":+1\r\n",
            b":1\rx",
            b"+a\rb\r\n",
            b"$99999999999999999999999\r\n",
            b"_\r\n",
        ] {
            assert_eq!(decode(bytes), Err(DecodeError::Malformed), "{}", bytes.escape_ascii());
        }
    }

    #[test]
    fn neither_depth_nor_lengths_cost_anything() {
        assert_eq!(decode(&b"*1\r\n".repeat(1_000_000)), Err(DecodeError::Malformed));
        assert_eq!(decode(b"*1000000000\r\n"), Err(DecodeError::Malformed));
        assert_eq!(decode(b"$1000000000\r\n"), Err(DecodeError::Incomplete));
        let flat = [b"*64\r\n".to_vec(), b":1\r\n".repeat(64)].concat();
        assert_eq!(decode(&flat), Err(DecodeError::Malformed));
        let (value, _) = decode(b"*1\r\n*1\r\n*1\r\n*1\r\n:1\r\n").unwrap();
        assert!(matches!(value, Value::Array(_)));
    }

    #[test]
    fn a_kept_response_is_read_in_place() {
        let response = vec![0x0d; 8 << 20];
        let mut bytes = Vec::new();
        encode(&Owned::Bulk(response.clone()), &mut bytes);
        let (Value::Bulk(read), _) = decode(&bytes).unwrap() else { panic!("no bulk") };
        assert_eq!(read, response);
        assert!(bytes.as_ptr_range().contains(&read.as_ptr()));
    }

    // A scan of the rest at each value would take minutes.
    #[test]
    fn many_values_are_read_in_one_pass() {
        let bytes = b":1\r\n".repeat(1_000_000);
        let mut rest = bytes.as_slice();
        let mut count = 0;
        while let Ok((_, after)) = decode(rest) {
            (rest, count) = (after, count + 1);
        }
        assert_eq!((rest.len(), count), (0, 1_000_000));
    }
}
