//! An operation as a command, and its reply as what the contract knows.

use std::borrow::Cow;
use std::time::Duration;

use super::fault::{Cause, Fault};
use super::resp::Value;
use super::script::{Call, Script, Scripts};
use crate::config::OnAbandoned;
use crate::fingerprint::{FINGERPRINT_VERSION, Fingerprint};
use crate::key::hex;
use crate::record::Reason;
use crate::store::{Claim, ClaimReply, Hold, Write, WriteReply};

/// One operation of the contract.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Operation {
    /// Try to become the one that executes.
    Claim(Claim),
    /// Carry out a fenced operation.
    Write(Hold, Write),
}

/// A claim's reply, and what only a store with a life of its own can say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimAnswer {
    /// What the claim comes to.
    pub reply: ClaimReply,
    /// How long a completed record lives on: a copy of it must not live longer. Zero for any other reply.
    pub life: Duration,
}

/// Longest life Redis is given. One it can't add to its clock would leave the record without an end.
const LONGEST: Duration = Duration::from_secs(100 * 366 * 24 * 3_600);

impl Operation {
    /// The command, one key in it.
    #[must_use]
    pub fn argv<'a>(&'a self, key_prefix: &str, scripts: &Scripts, call: Call) -> Vec<Cow<'a, [u8]>> {
        let (command, script) = self.script(scripts).called(call);
        let mut argv = Vec::with_capacity(10);
        argv.extend([text(command), text(script), text("1"), owned(self.key(key_prefix))]);
        match self {
            Self::Claim(claim) => push_claim(&mut argv, claim),
            Self::Write(hold, write) => push_write(&mut argv, hold, write),
        }
        argv
    }

    /// The key's name in Redis.
    #[must_use]
    pub fn key(&self, key_prefix: &str) -> String {
        let key = match self {
            Self::Claim(claim) => &claim.key,
            Self::Write(hold, _) => &hold.key,
        };
        [key_prefix, &key.hex()].concat()
    }

    /// Bytes of the command, roughly, and no less than it has.
    #[must_use]
    pub fn weight(&self, key_prefix: &str, scripts: &Scripts, call: Call) -> usize {
        const FIXED: usize = 640;
        let (_, script) = self.script(scripts).called(call);
        let response = self.response().len();
        FIXED.saturating_add(key_prefix.len()).saturating_add(script.len()).saturating_add(response)
    }

    /// The response that a completion keeps, the last word of its command; nothing for the others.
    #[must_use]
    pub fn response(&self) -> &[u8] {
        match self {
            Self::Write(_, Write::Complete { response, .. }) => response,
            Self::Claim(_) | Self::Write(_, Write::Renew { .. } | Write::Fail { .. } | Write::Release) => &[],
        }
    }

    /// Whether it is a claim.
    #[must_use]
    pub const fn is_claim(&self) -> bool {
        match self {
            Self::Claim(_) => true,
            Self::Write(..) => false,
        }
    }

    const fn script<'a>(&self, scripts: &'a Scripts) -> &'a Script {
        match self {
            Self::Claim(_) => &scripts.claim,
            Self::Write(_, Write::Renew { .. }) => &scripts.renew,
            Self::Write(_, Write::Complete { .. }) => &scripts.complete,
            Self::Write(_, Write::Fail { .. }) => &scripts.fail,
            Self::Write(_, Write::Release) => &scripts.release,
        }
    }
}

fn push_claim(argv: &mut Vec<Cow<'_, [u8]>>, claim: &Claim) {
    let terms = &claim.terms;
    let on_abandoned = match terms.on_abandoned {
        OnAbandoned::Takeover => "takeover",
        OnAbandoned::Retain => "retain",
    };
    argv.extend([
        owned(hex(terms.owner.bytes())),
        owned(hex(terms.fingerprint.bytes())),
        owned(FINGERPRINT_VERSION.to_string()),
        millis(terms.lock_ttl),
        millis(terms.record_ttl.max(terms.lock_ttl)),
        text(on_abandoned),
    ]);
}

fn push_write<'a>(argv: &mut Vec<Cow<'a, [u8]>>, hold: &Hold, write: &'a Write) {
    argv.push(owned(hex(hold.owner.bytes())));
    let re_creation = [
        owned(hex(hold.fingerprint.bytes())),
        owned(FINGERPRINT_VERSION.to_string()),
        owned(hold.attempt.to_string()),
    ];
    match write {
        Write::Renew { lock_ttl, record_ttl } => {
            argv.extend(re_creation);
            argv.extend([millis(*lock_ttl), millis(*record_ttl.max(lock_ttl))]);
        }
        Write::Complete { response, record_ttl } => {
            argv.extend(re_creation);
            argv.extend([millis(*record_ttl), Cow::Borrowed(&**response)]);
        }
        Write::Fail { reason, failed_ttl } => {
            argv.extend(re_creation);
            argv.extend([millis(*failed_ttl), text(reason.as_str())]);
        }
        Write::Release => {}
    }
}

const fn text(text: &'static str) -> Cow<'static, [u8]> {
    Cow::Borrowed(text.as_bytes())
}

fn owned(text: String) -> Cow<'static, [u8]> {
    Cow::Owned(text.into_bytes())
}

fn millis(duration: Duration) -> Cow<'static, [u8]> {
    owned(duration.min(LONGEST).as_millis().to_string())
}

/// Reads the reply to a claim. It takes nothing but what `claim.lua` says.
///
/// # Errors
/// [`Fault`] for anything else.
pub fn read_claim(value: &Value<'_>) -> Result<ClaimAnswer, Fault> {
    let unexpected = || Fault::Unavailable(Cause::UnexpectedReply);
    let (word, rest) = words(value)?;
    let mut life = Duration::ZERO;
    let reply = match (word, rest) {
        (b"claimed", [attempt]) => {
            let attempt = number(attempt).and_then(|attempt| u32::try_from(attempt).ok());
            ClaimReply::Claimed { attempt: attempt.ok_or_else(unexpected)? }
        }
        (b"in_flight", [Value::Bulk(hex), elapsed, remaining]) => {
            let (elapsed, remaining) = (number(elapsed), number(remaining));
            ClaimReply::InFlight {
                fingerprint: fingerprint(hex)?,
                elapsed: elapsed.and_then(duration).ok_or_else(unexpected)?,
                remaining: remaining.and_then(duration).ok_or_else(unexpected)?,
            }
        }
        (b"abandoned", [Value::Bulk(hex)]) => ClaimReply::Abandoned { fingerprint: fingerprint(hex)? },
        (b"completed", [Value::Bulk(hex), left, Value::Bulk(response)]) => {
            let left = number(left).ok_or_else(unexpected)?;
            // -1: somebody made the record persist.
            life = if left == -1 { LONGEST } else { duration(left).unwrap_or_default() };
            ClaimReply::Completed { fingerprint: fingerprint(hex)?, response: response.to_vec() }
        }
        (b"failed", [Value::Bulk(hex), Value::Bulk(word)]) => {
            let mut reasons = Reason::ALL.into_iter();
            let reason = reasons.find(|reason| reason.as_str().as_bytes() == *word);
            ClaimReply::Failed {
                fingerprint: fingerprint(hex)?,
                // A later version's reason, perhaps.
                reason: reason.ok_or(Fault::Unreadable)?,
            }
        }
        (b"unreadable", []) => return Err(Fault::Unreadable),
        _ => return Err(unexpected()),
    };
    Ok(ClaimAnswer { reply, life })
}

/// Reads the reply to a fenced operation. It takes nothing but what the scripts say.
///
/// # Errors
/// [`Fault`] for anything else.
pub fn read_write(value: &Value<'_>) -> Result<WriteReply, Fault> {
    match words(value)? {
        (b"applied", []) => Ok(WriteReply::Applied),
        (b"stale", []) => Ok(WriteReply::Stale),
        (b"unreadable", []) => Err(Fault::Unreadable),
        _ => Err(Fault::Unavailable(Cause::UnexpectedReply)),
    }
}

fn words<'v, 'a>(value: &'v Value<'a>) -> Result<(&'a [u8], &'v [Value<'a>]), Fault> {
    if let Value::Array(values) = value
        && let [Value::Bulk(word), rest @ ..] = values.as_slice()
    {
        return Ok((word, rest));
    }
    Err(Fault::of_unexpected(value))
}

/// Webdis gives the integers within an array as text.
fn number(value: &Value<'_>) -> Option<i64> {
    match value {
        Value::Integer(number) => Some(*number),
        Value::Bulk(text) => std::str::from_utf8(text).ok()?.parse().ok(),
        Value::Simple(_) | Value::Error(_) | Value::Null | Value::Array(_) => None,
    }
}

fn duration(millis: i64) -> Option<Duration> {
    u64::try_from(millis).ok().map(Duration::from_millis)
}

/// A record whose fingerprint is none was written by somebody else.
fn fingerprint(hex: &[u8]) -> Result<Fingerprint, Fault> {
    let (pairs, []) = hex.as_chunks::<2>() else { return Err(Fault::Unreadable) };
    let mut bytes = [0; 32];
    if pairs.len() != bytes.len() {
        return Err(Fault::Unreadable);
    }
    for (byte, [high, low]) in bytes.iter_mut().zip(pairs) {
        *byte = digit(*high)? << 4 | digit(*low)?;
    }
    Ok(Fingerprint::from_bytes(bytes))
}

const fn digit(digit: u8) -> Result<u8, Fault> {
    match digit {
        b'0'..=b'9' => Ok(digit - b'0'),
        b'a'..=b'f' => Ok(digit - b'a' + 10),
        _ => Err(Fault::Unreadable),
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use proptest::prelude::*;

    use super::super::resp::{self, encode_command};
    use super::super::script::SCRIPTS;
    use super::*;
    use crate::key::StoreKey;
    use crate::record::{ClaimTerms, Owner};

    fn hold() -> Hold {
        Hold {
            key: StoreKey::from_bytes([0xab; 32]),
            owner: Owner::from_bytes([0xcd; 16]),
            fingerprint: Fingerprint::from_bytes([0xef; 32]),
            attempt: 2,
        }
    }

    fn claim(lock_ttl: Duration, record_ttl: Duration) -> Operation {
        let Hold { key, owner, fingerprint, .. } = hold();
        let on_abandoned = OnAbandoned::Takeover;
        Operation::Claim(Claim {
            key,
            terms: ClaimTerms { owner, fingerprint, lock_ttl, record_ttl, on_abandoned },
        })
    }

    fn argv(operation: &Operation) -> Vec<String> {
        let argv = operation.argv("idem:", &SCRIPTS, Call::Name);
        argv.iter().map(|argument| String::from_utf8(argument.to_vec()).unwrap()).collect()
    }

    #[test]
    fn a_claim_names_one_key_and_nothing_raw() {
        let operation = claim(Duration::from_secs(60), Duration::from_secs(1));
        let (key, owner, fingerprint) = ("ab".repeat(32), "cd".repeat(16), "ef".repeat(32));
        let key = format!("idem:{key}");
        assert_eq!(
            argv(&operation),
            [
                "EVALSHA",
                SCRIPTS.claim.sha1,
                "1",
                &key,
                &owner,
                &fingerprint,
                "1",
                "60000",
                "60000",
                "takeover"
            ]
        );
        let text = operation.argv("idem:", &SCRIPTS, Call::Text);
        assert_eq!((&*text[0], &*text[1]), (&b"EVAL"[..], SCRIPTS.claim.source.as_bytes()));
    }

    #[test]
    fn each_write_names_its_script() {
        let life = Duration::from_millis(1_500);
        for (write, script, last) in [
            (Write::Renew { lock_ttl: life, record_ttl: Duration::ZERO }, SCRIPTS.renew, "1500"),
            (Write::Complete { response: Rc::from(*b"kept"), record_ttl: life }, SCRIPTS.complete, "kept"),
            (Write::Fail { reason: Reason::ClientGone, failed_ttl: life }, SCRIPTS.fail, "client_gone"),
            (Write::Release, SCRIPTS.release, &*"cd".repeat(16)),
        ] {
            let argv = argv(&Operation::Write(hold(), write));
            assert_eq!((&*argv[1], argv.last().unwrap().as_str()), (script.sha1, last));
        }
    }

    #[test]
    fn no_life_is_beyond_what_redis_can_add_to_its_clock() {
        let argv = argv(&claim(Duration::MAX, Duration::MAX));
        assert_eq!(argv[7], (100u64 * 366 * 24 * 3_600_000).to_string());
    }

    proptest! {
        #[test]
        fn a_command_is_no_longer_than_its_weight(length in 0usize..3_000, seconds: u64, text: bool) {
            let life = Duration::from_secs(seconds);
            let call = if text { Call::Text } else { Call::Name };
            for operation in [
                claim(life, life),
                Operation::Write(hold(), Write::Release),
                Operation::Write(Hold { attempt: u32::MAX, ..hold() }, Write::Complete { response: vec![0; length].into(), record_ttl: life }),
            ] {
                let mut command = Vec::new();
                encode_command(&mut command, &operation.argv("idem:", &SCRIPTS, call));
                prop_assert!(command.len() <= operation.weight("idem:", &SCRIPTS, call));
            }
        }

        #[test]
        fn any_value_is_read_or_a_fault(words in proptest::collection::vec(prop_oneof![
            "claimed|in_flight|abandoned|completed|failed|applied|unreadable|[0-9a-f]{64}|status".prop_map(|word| format!("${}\r\n{word}\r\n", word.len())),
            any::<i64>().prop_map(|number| format!(":{number}\r\n")),
            Just("$-1\r\n".to_owned()),
        ], 0..5)) {
            let reply = format!("*{}\r\n{}", words.len(), words.concat());
            let (value, _) = resp::decode(reply.as_bytes()).unwrap();
            let _ = (read_claim(&value), read_write(&value));
        }
    }

    fn value<'a>(word: &'a str, rest: &[Value<'a>]) -> Value<'a> {
        Value::Array([&[Value::Bulk(word.as_bytes())], rest].concat())
    }

    // H08: nothing but what a script says is an answer.
    #[test]
    fn another_shape_is_no_answer() {
        let unexpected = Err(Fault::Unavailable(Cause::UnexpectedReply));
        for value in [
            Value::Null,
            Value::Integer(1),
            Value::Simple(b"OK"),
            Value::Bulk(b"claimed"),
            Value::Array(vec![]),
            value("claimed", &[]),
            value("claimed", &[Value::Integer(-1)]),
            value("claimed", &[Value::Integer(1), Value::Integer(1)]),
            value("completed", &[Value::Null]),
            value("stale", &[]),
        ] {
            assert_eq!(read_claim(&value), unexpected, "{value:?}");
        }
        assert_eq!(
            read_write(&value("claimed", &[Value::Integer(1)])),
            Err(Fault::Unavailable(Cause::UnexpectedReply))
        );
    }

    #[test]
    fn a_record_of_another_version_is_unreadable() {
        let hex = "ef".repeat(32);
        let fingerprint = Value::Bulk(hex.as_bytes());
        for value in [
            value("unreadable", &[]),
            value("failed", &[fingerprint, Value::Bulk(b"haunted")]),
            value("abandoned", &[Value::Bulk(b"EF")]),
        ] {
            assert_eq!(read_claim(&value), Err(Fault::Unreadable), "{value:?}");
        }
    }

    #[test]
    fn a_completed_record_says_how_long_it_lives() {
        let hex = "ef".repeat(32);
        for (left, life) in [(1_500, Duration::from_millis(1_500)), (-1, LONGEST), (-2, Duration::ZERO)] {
            let rest = [Value::Bulk(hex.as_bytes()), Value::Integer(left), Value::Bulk(b"kept")];
            let fingerprint = hold().fingerprint;
            let reply = ClaimReply::Completed { fingerprint, response: b"kept".to_vec() };
            assert_eq!(read_claim(&value("completed", &rest)), Ok(ClaimAnswer { reply, life }));
        }
    }
}
