//! A `google.protobuf.Struct` as Envoy hands it over: serialized, not as JSON (seen on 1.40.0).

use super::json::Json;

/// Deeper nesting is refused; serde_json's own limit for JSON.
const MAX_DEPTH: u32 = 128;

/// Reads a serialized `google.protobuf.Struct` (`google/protobuf/struct.proto`). `None` for anything else.
pub(super) fn parse_struct(bytes: &[u8]) -> Option<Json> {
    read_struct(bytes, MAX_DEPTH)
}

fn read_struct(bytes: &[u8], depth: u32) -> Option<Json> {
    let depth = depth.checked_sub(1)?;
    let mut rest = bytes;
    let mut members = Vec::new();
    while !rest.is_empty() {
        let Field { number: 1, value: Wire::Bytes(entry) } = take_field(&mut rest)? else { return None };
        let (name, value) = read_entry(entry, depth)?;
        members.push((name, value));
    }
    Some(Json::Object(members))
}

fn read_entry(bytes: &[u8], depth: u32) -> Option<(String, Json)> {
    let mut rest = bytes;
    // Absent fields have their default: an empty name, and a value of no kind, which JSON writes as null.
    let (mut name, mut value) = (String::new(), Json::Null);
    while !rest.is_empty() {
        match take_field(&mut rest)? {
            Field { number: 1, value: Wire::Bytes(text) } => name = String::from_utf8(text.to_vec()).ok()?,
            Field { number: 2, value: Wire::Bytes(inner) } => value = read_value(inner, depth)?,
            Field { .. } => return None,
        }
    }
    Some((name, value))
}

fn read_value(bytes: &[u8], depth: u32) -> Option<Json> {
    let mut rest = bytes;
    let mut value = Json::Null;
    while !rest.is_empty() {
        value = match take_field(&mut rest)? {
            Field { number: 1, value: Wire::Varint(_) } => Json::Null,
            Field { number: 2, value: Wire::Fixed64(bits) } => Json::Float(f64::from_bits(bits)),
            Field { number: 3, value: Wire::Bytes(text) } => {
                Json::Text(String::from_utf8(text.to_vec()).ok()?)
            }
            Field { number: 4, value: Wire::Varint(truth) } => Json::Bool(truth != 0),
            Field { number: 5, value: Wire::Bytes(inner) } => read_struct(inner, depth)?,
            Field { number: 6, value: Wire::Bytes(inner) } => read_list(inner, depth)?,
            Field { .. } => return None,
        };
    }
    Some(value)
}

fn read_list(bytes: &[u8], depth: u32) -> Option<Json> {
    let depth = depth.checked_sub(1)?;
    let mut rest = bytes;
    let mut items = Vec::new();
    while !rest.is_empty() {
        let Field { number: 1, value: Wire::Bytes(item) } = take_field(&mut rest)? else { return None };
        items.push(read_value(item, depth)?);
    }
    Some(Json::List(items))
}

struct Field<'a> {
    number: u64,
    value: Wire<'a>,
}

enum Wire<'a> {
    Varint(u64),
    Fixed64(u64),
    Bytes(&'a [u8]),
}

fn take_field<'a>(rest: &mut &'a [u8]) -> Option<Field<'a>> {
    let tag = take_varint(rest)?;
    let value = match tag & 7 {
        0 => Wire::Varint(take_varint(rest)?),
        1 => {
            let (bits, after) = rest.split_first_chunk::<8>()?;
            *rest = after;
            Wire::Fixed64(u64::from_le_bytes(*bits))
        }
        2 => {
            let length = usize::try_from(take_varint(rest)?).ok()?;
            let (bytes, after) = rest.split_at_checked(length)?;
            *rest = after;
            Wire::Bytes(bytes)
        }
        _ => return None,
    };
    Some(Field { number: tag >> 3, value })
}

fn take_varint(rest: &mut &[u8]) -> Option<u64> {
    let mut value = 0_u64;
    for shift in (0..64).step_by(7) {
        let (byte, after) = rest.split_first()?;
        *rest = after;
        value |= u64::from(byte & 0x7f).checked_shl(shift)?;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_struct_seen_from_envoy_is_read() {
        // {"v":[1,"x"]}, as Envoy 1.40.0 hands it over.
        let bytes = [
            0x0a, 0x17, 0x0a, 0x01, 0x76, 0x12, 0x12, 0x32, 0x10, 0x0a, 0x09, 0x11, 0, 0, 0, 0, 0, 0, 0xf0,
            0x3f, 0x0a, 0x03, 0x1a, 0x01, 0x78,
        ];
        let list = Json::List(vec![Json::Float(1.0), Json::Text("x".to_owned())]);
        assert_eq!(parse_struct(&bytes), Some(Json::Object(vec![("v".to_owned(), list)])));
    }

    #[test]
    fn deep_nesting_is_refused() {
        let mut bytes = vec![0x08, 0x00];
        for _ in 0..200 {
            let mut list = vec![0x0a];
            push_length(&mut list, bytes.len());
            list.extend(&bytes);
            bytes = vec![0x32];
            push_length(&mut bytes, list.len());
            bytes.extend(&list);
        }
        assert_eq!(read_value(&bytes, MAX_DEPTH), None);
    }

    fn push_length(out: &mut Vec<u8>, mut length: usize) {
        while length > 0x7f {
            out.push(u8::try_from(length & 0x7f).unwrap() | 0x80);
            length >>= 7;
        }
        out.push(u8::try_from(length).unwrap());
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse_struct(&bytes);
        }
    }
}
