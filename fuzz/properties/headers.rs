//! Header maps as the host hands them over, and what becomes of a response's head.

use idempotency::headers::{HeaderBlock, serialize_pairs, trim_ows};
use idempotency::policy::{is_grpc, is_upgrade};
use idempotency::record::codec::{ResponseEncoder, StoredResponse};
use idempotency::reply::put_right;
use idempotency::reply::replay::{kept_headers, replay, tombstone_headers};

type Pairs = Vec<(Vec<u8>, Vec<u8>)>;

/// Bytes that are said to be a header map.
pub fn header_map(data: &[u8]) {
    let _ = (is_grpc(&text_block(data)), is_upgrade(&text_block(data)));
    let (begin, trimmed) = trim_ows(data);
    assert_eq!(&data[begin..begin + trimmed.len()], trimmed);
    assert_eq!(trim_ows(trimmed), (0, trimmed));

    let parsed = HeaderBlock::parse(data.to_vec());
    let reference = reference_parse(data);
    assert_eq!(parsed.as_ref().ok().map(pairs_of), reference);
    let Ok(block) = parsed else { return };
    let pairs = pairs_of(&block);
    assert_eq!((block.len(), block.is_empty()), (pairs.len(), pairs.is_empty()));
    if !data.is_empty() {
        assert_eq!(serialize_pairs(&pairs), data);
    }
    assert_eq!(pairs_of(&HeaderBlock::from_pairs(borrowed(&pairs))), pairs);
    for (name, value) in &pairs {
        let Ok(name) = std::str::from_utf8(name) else { continue };
        assert!(block.lines(name).any(|line| line == value));
        let count = pairs.iter().filter(|(other, _)| other.eq_ignore_ascii_case(name.as_bytes())).count();
        assert_eq!(block.lines(&name.to_ascii_uppercase()).count(), count);
    }
    for cut in [data.len() / 2, data.len().saturating_sub(1)] {
        assert!(cut == data.len() || cut == 0 || HeaderBlock::parse(data[..cut].to_vec()).is_err());
    }
}

fn pairs_of(block: &HeaderBlock) -> Pairs {
    block.iter().map(|(name, value)| (name.to_vec(), value.to_vec())).collect()
}

fn borrowed(pairs: &Pairs) -> Vec<(&[u8], &[u8])> {
    pairs.iter().map(|(name, value)| (name.as_slice(), value.as_slice())).collect()
}

/// The format by its description, one integer at a time.
fn reference_parse(data: &[u8]) -> Option<Pairs> {
    if data.is_empty() {
        return Some(Pairs::new());
    }
    let integer = |at: usize| {
        Some(u32::from_le_bytes([*data.get(at)?, *data.get(at + 1)?, *data.get(at + 2)?, *data.get(at + 3)?]))
    };
    let count = integer(0)? as usize;
    if count > data.len() {
        return None;
    }
    let mut at = 4 + 8 * count;
    let mut text = |length: u32| {
        let text = data.get(at..at + length as usize)?.to_vec();
        at += length as usize + 1;
        (*data.get(at - 1)? == 0).then_some(text)
    };
    let mut pairs = Pairs::new();
    for pair in 0..count {
        let (name, value) = (integer(4 + 8 * pair)?, integer(8 + 8 * pair)?);
        pairs.push((text(name)?, text(value)?));
    }
    (at == data.len()).then_some(pairs)
}

/// `name: value` lines as a header map.
pub(super) fn text_block(data: &[u8]) -> HeaderBlock {
    let lines = data.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    HeaderBlock::from_pairs(lines.map(|line| super::split_once(line, b": ").unwrap_or((line, b""))))
}

/// The `name: value` lines of a response that is kept, a line `---`, and those that Envoy made of its replay.
pub fn response_head(data: &[u8]) {
    let (response, made) = super::split_once(data, b"\n---\n").unwrap_or((data, b""));
    let (response, made) = (text_block(response), text_block(made));
    let config = super::plugin(
        r#""scope": "shared", "keep_response_headers": ["set-cookie"], "drop_response_headers": ["x-drop"]"#,
    );
    let rule = &config.rules[0];

    let kept: Vec<(&[u8], &[u8])> = kept_headers(&response, rule).collect();
    let options: Vec<Vec<u8>> = response
        .lines("connection")
        .flat_map(|line| line.split(|byte| *byte == b','))
        .map(|option| option.trim_ascii().to_ascii_lowercase())
        .collect();
    for (name, value) in &kept {
        assert!(response.iter().any(|line| line == (*name, *value)));
        assert!(!name.starts_with(b":") && !name.starts_with(b"x-envoy-") && *name != b"x-drop");
        assert!(![&b"connection"[..], b"transfer-encoding", b"content-length", b"te"].contains(name));
        assert!(*name == b"set-cookie" || !options.contains(&name.to_ascii_lowercase()));
    }
    let cookies = response.iter().filter(|(name, _)| *name == b"set-cookie").count();
    assert_eq!(kept.iter().filter(|(name, _)| *name == b"set-cookie").count(), cookies);
    for (name, _) in tombstone_headers(&response, rule) {
        assert!([&b"location"[..], b"etag"].contains(&name));
    }

    let Some(mut encoder) = ResponseEncoder::begin(201, kept.iter().copied(), None) else { return };
    encoder.push(b"body");
    let bytes = encoder.finish();
    let stored = StoredResponse::decode(&bytes).expect("what was encoded");
    assert_eq!((stored.status, &stored.headers, stored.body), (201, &kept, Some(&b"body"[..])));
    let reply = replay(&stored, bytes.len() - 4, rule, None);
    let own = HeaderBlock::parse(reply.headers).expect("a header map");
    assert_eq!(own.first("idempotent-replayed"), Some(&b"true"[..]));

    match put_right(&own, &made) {
        None => assert_same_lines(&own, &made, &own),
        Some(head) => {
            let head = HeaderBlock::parse(head).expect("a header map");
            assert_same_lines(&own, &head, &own);
            let is_own = |name: &[u8]| name == b"content-type" || own.iter().any(|(known, _)| known == name);
            let others = |block: &HeaderBlock| -> Pairs {
                pairs_of(block).into_iter().filter(|(name, _)| !is_own(name)).collect()
            };
            assert_eq!(others(&head), others(&made));
        }
    }
}

/// Of the names that `own` has, `head` has the lines of `expected`.
fn assert_same_lines(own: &HeaderBlock, head: &HeaderBlock, expected: &HeaderBlock) {
    let lines = |block: &HeaderBlock| -> Pairs {
        let is_own = |name: &[u8]| name == b"content-type" || own.iter().any(|(known, _)| known == name);
        pairs_of(block).into_iter().filter(|(name, _)| is_own(name)).collect()
    };
    assert_eq!(lines(head), lines(expected));
}
