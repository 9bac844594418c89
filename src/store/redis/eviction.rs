//! Whether Redis evicts keys when its memory is full, asked for now and then.
//!
//! An evicted claim or record is as if it had never been: the same key runs again. Every record has an expiry, so the
//! `volatile-*` policies evict it as the `allkeys-*` ones do. Redis is asked in a callout of its own, since an answer
//! that stays away says nothing about any operation. `CONFIG` does not pass `redis_proxy`; a script's `INFO` does.

use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use super::envelope;
use super::fault::CalloutFault;
use super::resp::Value;
use super::transport::{Encoded, Transport};
use crate::clock::Timestamp;

const SCRIPT: &str = include_str!("scripts/eviction.lua");
/// Of the key that leads the script to a shard; nothing is ever stored under it.
const KEY: &str = "eviction-check";
/// A check that was not answered is made again after so long.
const RETRY_PAUSE: Duration = Duration::from_secs(10);
const LONGEST_POLICY: usize = 32;

/// What Redis does when its memory is full.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Eviction {
    /// It drops keys.
    Drops {
        /// `maxmemory-policy`.
        policy: String,
        /// `maxmemory`, which is not 0.
        maxmemory: u64,
    },
    /// It drops nothing: the policy is `noeviction`, or memory has no bound.
    Keeps,
    /// It does not say.
    Unknown,
}

impl fmt::Display for Eviction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Drops { policy, maxmemory } => write!(
                f,
                "it evicts records when its memory is full (maxmemory {maxmemory}, maxmemory-policy {policy}), and a key \
                 whose record was evicted runs again: set maxmemory-policy noeviction, on a Redis that holds nothing else"
            ),
            Self::Keeps => f.write_str("it evicts nothing"),
            Self::Unknown => f.write_str(
                "whether it evicts records can't be told: its ACL lets scripts not call INFO; maxmemory-policy has to be \
                 noeviction",
            ),
        }
    }
}

/// When to ask, and what is known.
#[derive(Debug)]
pub struct EvictionWatch {
    pause: Duration,
    next: Timestamp,
    known: Option<Eviction>,
}

impl EvictionWatch {
    /// Asks at once, and again each time `pause` has passed.
    #[must_use]
    pub const fn new(pause: Duration) -> Self {
        Self { pause, next: Timestamp::from_millis(0), known: None }
    }

    /// A callout, when it is time for one. The next one follows once this is answered, or a pause later.
    pub fn poll(&mut self, key_prefix: &str, transport: Transport, now: Timestamp) -> Option<Encoded> {
        if now < self.next {
            return None;
        }
        self.next = now.after(self.pause);
        let key = [key_prefix, KEY].concat();
        let command = ["EVAL", SCRIPT, "1", &key].map(|word| Cow::Borrowed(word.as_bytes()));
        Some(transport.encode(&[command.into()]))
    }

    /// The callout ended. Gives what it says if that is new, but for a Redis that keeps everything from the start.
    pub fn on_reply(&mut self, reply: Result<&[u8], CalloutFault>, now: Timestamp) -> Option<Eviction> {
        let Some(found) = reply.ok().and_then(read) else {
            self.next = now.after(self.pause.min(RETRY_PAUSE));
            return None;
        };
        let is_new = self.known.as_ref().unwrap_or(&Eviction::Keeps) != &found;
        self.known = Some(found.clone());
        is_new.then_some(found)
    }

    /// The host refused the callout.
    pub fn on_refused(&mut self, now: Timestamp) {
        self.next = now.after(self.pause.min(RETRY_PAUSE));
    }

    /// Whether Redis is known to evict.
    #[must_use]
    pub const fn is_evicting(&self) -> bool {
        matches!(self.known, Some(Eviction::Drops { .. }))
    }
}

/// `None` where nobody answered that runs scripts.
fn read(answer: &[u8]) -> Option<Eviction> {
    let values = envelope::open(answer, 1)?;
    let [Value::Array(words)] = values.as_slice() else { return None };
    Some(match words.as_slice() {
        [Value::Bulk(b"memory"), Value::Bulk(maxmemory), Value::Bulk(policy)] => judge(maxmemory, policy),
        // Lua ends a list before what was not found.
        [Value::Bulk(b"memory" | b"unknown"), ..] => Eviction::Unknown,
        _ => return None,
    })
}

fn judge(maxmemory: &[u8], policy: &[u8]) -> Eviction {
    let number = |text: &[u8]| std::str::from_utf8(text).ok()?.parse::<u64>().ok();
    let is_word = |byte: &u8| byte.is_ascii_lowercase() || *byte == b'-';
    match (number(maxmemory), policy) {
        (Some(0), _) | (Some(_), b"noeviction") => Eviction::Keeps,
        (Some(maxmemory), policy)
            if (1..=LONGEST_POLICY).contains(&policy.len()) && policy.iter().all(is_word) =>
        {
            Eviction::Drops { policy: String::from_utf8_lossy(policy).into_owned(), maxmemory }
        }
        (_, _) => Eviction::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::super::resp::decode;
    use super::super::resp::encode_command;
    use super::*;

    const PAUSE: Duration = Duration::from_secs(600);

    fn answer(words: &[&str]) -> Vec<u8> {
        let mut bytes = Vec::new();
        encode_command(&mut bytes, words);
        bytes.extend(b"+OK\r\n");
        bytes
    }

    fn drops(policy: &str) -> Eviction {
        Eviction::Drops { policy: policy.to_owned(), maxmemory: 1_048_576 }
    }

    fn at(seconds: u64) -> Timestamp {
        Timestamp::from_millis(seconds * 1_000)
    }

    #[test]
    fn only_a_bound_and_a_policy_that_drops_evict() {
        for (words, expected) in [
            (&["memory", "1048576", "allkeys-lru"][..], Some(drops("allkeys-lru"))),
            (&["memory", "1048576", "volatile-ttl"], Some(drops("volatile-ttl"))),
            (&["memory", "1048576", "noeviction"], Some(Eviction::Keeps)),
            (&["memory", "0", "allkeys-lru"], Some(Eviction::Keeps)),
            (&["memory", "0", "noeviction"], Some(Eviction::Keeps)),
            (&["memory", "1048576"], Some(Eviction::Unknown)),
            (&["memory"], Some(Eviction::Unknown)),
            (&["unknown"], Some(Eviction::Unknown)),
            (&["memory", "1048576", "a\r\nb"], Some(Eviction::Unknown)),
            (&["memory", "1048576", ""], Some(Eviction::Unknown)),
            (&["memory", "-1", "allkeys-lru"], Some(Eviction::Unknown)),
            (&["applied"], None),
        ] {
            assert_eq!(read(&answer(words)), expected, "{words:?}");
        }
        for bytes in
            [&b"-NOPERM this user has no permissions\r\n+OK\r\n"[..], b"-upstream failure\r\n+OK\r\n", b""]
        {
            assert_eq!(read(bytes), None);
        }
    }

    #[test]
    fn it_asks_at_once_and_then_now_and_then() {
        let mut watch = EvictionWatch::new(PAUSE);
        let body = watch.poll("idem:", Transport::Link, at(5)).unwrap();
        let (command, rest) = decode(&body.body).unwrap();
        let Value::Array(argv) = command else { panic!("no command") };
        assert_eq!(argv[2..], [Value::Bulk(b"1"), Value::Bulk(b"idem:eviction-check")]);
        assert_eq!(rest, b"*1\r\n$4\r\nQUIT\r\n");
        assert_eq!(watch.poll("idem:", Transport::Link, at(6)), None);
        assert_eq!(watch.on_reply(Ok(&answer(&["memory", "0", "noeviction"])), at(6)), None);
        assert_eq!(watch.poll("idem:", Transport::Link, at(604)), None);
        assert!(watch.poll("idem:", Transport::Link, at(605)).is_some());
    }

    #[test]
    fn what_is_new_is_told_once() {
        let mut watch = EvictionWatch::new(PAUSE);
        let evicting = answer(&["memory", "1048576", "allkeys-lru"]);
        let other = answer(&["memory", "1048576", "volatile-lfu"]);
        let keeping = answer(&["memory", "1048576", "noeviction"]);
        for (reply, told, is_evicting) in [
            (&keeping, None, false),
            (&evicting, Some(drops("allkeys-lru")), true),
            (&evicting, None, true),
            (&other, Some(drops("volatile-lfu")), true),
            (&answer(&["unknown"]), Some(Eviction::Unknown), false),
            (&answer(&["unknown"]), None, false),
            (&evicting, Some(drops("allkeys-lru")), true),
            (&keeping, Some(Eviction::Keeps), false),
        ] {
            assert_eq!((watch.on_reply(Ok(reply), at(1)), watch.is_evicting()), (told, is_evicting));
        }
    }

    #[test]
    fn a_check_without_an_answer_changes_nothing_and_comes_again_soon() {
        let mut watch = EvictionWatch::new(PAUSE);
        let evicting = answer(&["memory", "1048576", "allkeys-lru"]);
        assert!(watch.on_reply(Ok(&evicting), at(0)).is_some());
        for reply in [Err(CalloutFault::NoAnswer), Err(CalloutFault::Status), Ok(&b"-ERR\r\n+OK\r\n"[..])] {
            watch.poll("idem:", Transport::Link, at(600));
            assert_eq!((watch.on_reply(reply, at(600)), watch.is_evicting()), (None, true));
            assert_eq!(watch.poll("idem:", Transport::Link, at(609)), None);
            assert!(watch.poll("idem:", Transport::Link, at(610)).is_some());
            watch.on_refused(at(580));
        }
    }
}
