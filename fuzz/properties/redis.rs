//! What comes back from Redis, or from whoever else answered.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use idempotency::clock::Timestamp;
use idempotency::config::OnAbandoned;
use idempotency::fingerprint::Fingerprint;
use idempotency::key::StoreKey;
use idempotency::record::{ClaimTerms, Owner};
use idempotency::store::redis::operation::{read_claim, read_write};
use idempotency::store::redis::resp::{DecodeError, Value, decode, encode_command};
use idempotency::store::redis::{
    Answer, BatchSettings, Batcher, CalloutAnswer, Eviction, EvictionWatch, Operation, Priority, SCRIPTS,
    Transport, envelope,
};
use idempotency::store::{Claim, ClaimReply, Hold, StoreError, Write, WriteReply};

/// Bytes that are said to begin with a RESP value.
pub fn resp(data: &[u8]) {
    let argv: Vec<&[u8]> = data.split(|byte| *byte == b' ').take(60).collect();
    let mut command = Vec::new();
    encode_command(&mut command, &argv);
    let bulks = Value::Array(argv.iter().map(|argument| Value::Bulk(argument)).collect());
    assert_eq!(decode(&command), Ok((bulks, &b""[..])));

    let decoded = decode(data);
    let (value, rest) = match &decoded {
        Ok(decoded) => decoded,
        Err(error) => {
            // What only ended too early is found whole or wrong once there is more, and never sooner.
            if *error == DecodeError::Malformed {
                assert_eq!(decode(&[data, b"\r\n:1\r\n"].concat()), Err(DecodeError::Malformed));
            }
            return;
        }
    };
    let used = data.len() - rest.len();
    assert!(data.ends_with(rest) && used > 0);
    for cut in (0..used).rev().take(64).chain(0..used.min(64)) {
        assert_eq!(decode(&data[..cut]), Err(DecodeError::Incomplete), "cut at {cut}");
    }
    let mut again = Vec::new();
    encode(value, &mut again);
    assert_eq!(decode(&again), Ok((value.clone(), &b""[..])));
    assert_eq!(read(data, 4).map(|(_, end)| end), Some(used), "a reader of its own");
    let _ = (read_claim(value), read_write(value));
}

fn encode(value: &Value<'_>, out: &mut Vec<u8>) {
    match value {
        Value::Simple(text) => out.extend([b"+", *text, b"\r\n"].concat()),
        Value::Error(text) => out.extend([b"-", *text, b"\r\n"].concat()),
        Value::Integer(number) => out.extend(format!(":{number}\r\n").bytes()),
        Value::Bulk(bytes) => {
            out.extend([format!("${}\r\n", bytes.len()).as_bytes(), bytes, b"\r\n"].concat());
        }
        Value::Null => out.extend(b"$-1\r\n"),
        Value::Array(values) => {
            out.extend(format!("*{}\r\n", values.len()).bytes());
            values.iter().for_each(|value| encode(value, out));
        }
    }
}

/// How many values, and where the first one ends.
fn read(data: &[u8], depth: usize) -> Option<(usize, usize)> {
    let line = data.windows(2).position(|window| window == b"\r\n")?;
    let number = || std::str::from_utf8(&data[1..line]).ok()?.parse::<i64>().ok();
    match data[0] {
        b'+' | b'-' | b':' => Some((1, line + 2)),
        b'$' => match usize::try_from(number()?) {
            Ok(length) => Some((1, line + 2 + length + 2)),
            Err(_) => Some((1, line + 2)),
        },
        b'*' => {
            let (mut values, mut end) = (1, line + 2);
            for _ in 0..number()? {
                let (more, length) = read(&data[end..], depth.checked_sub(1)?)?;
                (values, end) = (values + more, end + length);
            }
            (values <= 64).then_some((values, end))
        }
        _ => None,
    }
}

/// A status and the number of operations in the first line, then a callout's body.
pub fn redis_reply(data: &[u8]) {
    let [head, body] = super::lines(data);
    let mut numbers = head.split(|byte| *byte == b' ').map(|number| {
        std::str::from_utf8(number).ok().and_then(|number| number.parse::<u16>().ok()).unwrap_or_default()
    });
    let status = numbers.next().filter(|status| *status > 0);
    let operations = usize::from(numbers.next().unwrap_or_default().clamp(1, 20));
    let answer = CalloutAnswer {
        headers: if status.is_some() { 3 } else { 0 },
        status,
        body,
        operations,
        is_early: body.len() % 2 == 0,
        transport: Transport::Link,
    };
    let is_whole = answer.replies().is_ok_and(|body| envelope::open(body, operations).is_some());
    assert_eq!(answer.diagnose().is_none(), is_whole);
    if is_whole {
        assert!(status == Some(200) && body.ends_with(b"+OK\r\n"));
        for cut in 0..body.len().min(64) {
            assert!(envelope::open(&body[..cut], operations).is_none());
        }
        assert!(envelope::open(body, operations + 1).is_none());
        assert!(envelope::open(&[body, b"\n"].concat(), operations).is_none());
    }
    judge_batches(&answer, operations, is_whole);
    judge_gateways(body, operations);
    judge_eviction(&answer);
}

/// A gateway's answer becomes as many values as there were commands, or none; nothing is made of nothing.
fn judge_gateways(body: &[u8], operations: usize) {
    for transport in [Transport::Webdis, Transport::UpstashResp2, Transport::UpstashBase64] {
        let rewritten = transport.as_of_link(body, operations);
        if envelope::open(&rewritten, operations).is_some() {
            let values = rewritten.strip_suffix(b"+OK\r\n").expect("the QUIT's answer");
            assert!(!body.is_empty() && (transport == Transport::UpstashBase64 || body.ends_with(values)));
        }
    }
}

/// Redis is said to evict only by its own word.
fn judge_eviction(answer: &CalloutAnswer<'_>) {
    let mut watch = EvictionWatch::new(Duration::from_secs(600));
    let now = Timestamp::from_millis(1_000);
    let told = watch.on_reply(answer.replies(), now);
    assert_eq!(watch.is_evicting(), matches!(told, Some(Eviction::Drops { .. })));
    assert!(told.is_none() || answer.status == Some(200) && answer.body.ends_with(b"+OK\r\n"));
    if let Some(found) = told {
        assert!(!found.to_string().contains(char::is_control));
        if let Eviction::Drops { policy, maxmemory } = &found {
            assert!(*maxmemory > 0 && policy != "noeviction");
            assert!(answer.body.windows(policy.len().max(1)).any(|window| window == policy.as_bytes()));
        }
        assert_eq!(watch.on_reply(answer.replies(), now), None, "told once");
    }
}

/// Every ticket is answered once, in time, by its own kind; and nothing is believed of an answer that is not whole.
fn judge_batches(answer: &CalloutAnswer<'_>, operations: usize, is_whole: bool) {
    let timeout = Duration::from_millis(100);
    let settings = BatchSettings {
        key_prefix: "p:".to_owned(),
        timeout,
        max_in_flight_batches: 2,
        max_response_body_bytes: 1_000,
        transport: Transport::Link,
    };
    let mut batcher = Batcher::new(settings, SCRIPTS);
    let mut now = Timestamp::from_millis(1_000);
    for ticket in 0..operations {
        batcher.submit(ticket as u64, operation(ticket), Priority::Normal, now);
    }
    let mut answers: BTreeMap<u64, Answer> = BTreeMap::new();
    for _ in 0..50 {
        while let Some(dispatch) = batcher.poll(now) {
            assert!(dispatch.operations <= operations);
            batcher.on_reply(dispatch.batch, answer.replies(), now);
            // An answer counts once.
            batcher.on_reply(dispatch.batch, answer.replies(), now);
        }
        while let Some((ticket, answer)) = batcher.next_answer() {
            assert!(answers.insert(ticket, answer).is_none(), "{ticket} was answered twice");
        }
        now = now.after(timeout / 20);
        batcher.on_tick(now);
    }
    assert!(batcher.is_idle());
    assert!(answers.keys().copied().eq(0..operations as u64));
    for (ticket, answered) in &answers {
        let is_believed = match answered {
            Answer::Claim(result) => {
                assert!(is_claim(*ticket as usize));
                if let Ok(claimed) = result
                    && matches!(claimed.reply, ClaimReply::Claimed { .. })
                {
                    assert!(answer.body.windows(7).any(|window| window == b"claimed"));
                }
                result.is_ok() || *result == Err(StoreError::Unreadable)
            }
            Answer::Write(result) => {
                assert!(!is_claim(*ticket as usize));
                if *result == Ok(WriteReply::Applied) {
                    assert!(answer.body.windows(7).any(|window| window == b"applied"));
                }
                result.is_ok() || *result == Err(StoreError::Unreadable)
            }
            Answer::NotSent => panic!("it was sent"),
        };
        assert!(is_whole || !is_believed);
    }
}

fn is_claim(ticket: usize) -> bool {
    ticket % 3 != 1
}

fn operation(ticket: usize) -> Operation {
    let (key, owner) = (StoreKey::from_bytes([ticket as u8; 32]), Owner::from_bytes([7; 16]));
    let fingerprint = Fingerprint::from_bytes([9; 32]);
    let second = Duration::from_secs(1);
    if is_claim(ticket) {
        let on_abandoned = OnAbandoned::Takeover;
        let terms = ClaimTerms { owner, fingerprint, lock_ttl: second, record_ttl: second, on_abandoned };
        return Operation::Claim(Claim { key, terms });
    }
    let write = Write::Complete { response: Rc::from(&b"kept"[..]), record_ttl: second };
    Operation::Write(Hold { key, owner, fingerprint, attempt: 1 }, write)
}
