//! Why Redis, or what lies between, gave no answer that can be used.

use super::resp::Value;
use crate::store::StoreError;

/// What is wrong with one operation's answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Redis does not know the script by its name: nothing was executed, send its text.
    NoScript,
    /// No answer that can be used. The operation may have been executed.
    Unavailable(Cause),
    /// The key holds something this version can't read.
    Unreadable,
}

impl Fault {
    /// Reads a `-` reply. No script says anything by one.
    #[must_use]
    pub fn of_error(error: &[u8]) -> Self {
        // Redis 6 puts what a command within a script said behind words of its own.
        let says = |word: &[u8]| error.windows(word.len()).any(|window| window == word);
        if error.starts_with(b"NOSCRIPT") {
            Self::NoScript
        } else if says(b"WRONGTYPE") {
            Self::Unreadable
        } else {
            let known = WORDS.iter().find(|(word, _)| says(word));
            Self::Unavailable(known.map_or(Cause::OtherError, |(_, cause)| *cause))
        }
    }

    /// A value of a shape that no script answers.
    #[must_use]
    pub fn of_unexpected(value: &Value<'_>) -> Self {
        match value {
            Value::Error(error) => Self::of_error(error),
            Value::Simple(_) | Value::Integer(_) | Value::Bulk(_) | Value::Null | Value::Array(_) => {
                Self::Unavailable(Cause::UnexpectedReply)
            }
        }
    }
}

impl From<Fault> for StoreError {
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::NoScript | Fault::Unavailable(_) => Self::Unavailable,
            Fault::Unreadable => Self::Unreadable,
        }
    }
}

/// What the errors of Redis and of Envoy's `redis_proxy` begin with, or hold.
const WORDS: &[(&[u8], Cause)] = &[
    (b"OOM ", Cause::OutOfMemory),
    (b"READONLY", Cause::ReadOnly),
    (b"MISCONF", Cause::Misconfigured),
    (b"LOADING", Cause::Loading),
    (b"MASTERDOWN", Cause::Loading),
    (b"CLUSTERDOWN", Cause::ClusterDown),
    (b"CROSSSLOT", Cause::ClusterDown),
    (b"TRYAGAIN", Cause::ClusterDown),
    (b"MOVED ", Cause::Redirected),
    (b"ASK ", Cause::Redirected),
    (b"NOAUTH", Cause::NotAllowed),
    (b"WRONGPASS", Cause::NotAllowed),
    (b"NOPERM", Cause::NotAllowed),
    (b"DENIED", Cause::NotAllowed),
    (b"NOREPLICAS", Cause::NoReplicas),
    (b"BUSY ", Cause::Busy),
    (b"max number of clients", Cause::Busy),
    (b"no upstream host", Cause::NoUpstreamHost),
    (b"upstream failure", Cause::UpstreamFailure),
    (b"upstream protocol error", Cause::UpstreamFailure),
    // `redis_proxy` where it can't reach Redis with the password it has, or not at all.
    (b"operation timed out", Cause::UpstreamFailure),
];

macro_rules! causes {
    ($($(#[$doc:meta])* $name:ident = $word:literal),* $(,)?) => {
        /// What kept an answer away, for logs and metrics.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Cause { $($(#[$doc])* $name),* }

        impl Cause {
            /// Every cause.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// The word used in logs and metrics.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$name => $word),* }
            }
        }
    };
}

causes! {
    /// `-OOM`: `maxmemory` is reached.
    OutOfMemory = "out_of_memory",
    /// `-READONLY`: a replica.
    ReadOnly = "read_only",
    /// `-MISCONF`: Redis can't save to its disk.
    Misconfigured = "misconf",
    /// `-LOADING`, `-MASTERDOWN`: it starts, or has lost its primary.
    Loading = "loading",
    /// `-CLUSTERDOWN` and its like.
    ClusterDown = "cluster_down",
    /// `-MOVED`, `-ASK`: Envoy's cluster does not follow redirections.
    Redirected = "redirected",
    /// `-NOAUTH`, `-WRONGPASS`, `-NOPERM`, `-DENIED`.
    NotAllowed = "not_allowed",
    /// `-NOREPLICAS`: `min-replicas-to-write`.
    NoReplicas = "no_replicas",
    /// `-BUSY`, or too many clients.
    Busy = "busy",
    /// Envoy's Redis cluster has no host.
    NoUpstreamHost = "no_upstream_host",
    /// Envoy's `redis_proxy` got no answer from Redis.
    UpstreamFailure = "upstream_failure",
    /// Any other `-` reply.
    OtherError = "other_error",
    /// A reply of a shape that no script answers.
    UnexpectedReply = "unexpected_reply",
    /// The callout's answer does not hold exactly the expected replies.
    BrokenEnvelope = "broken_envelope",
    /// The callout ended without an answer: timed out, or reset.
    NoAnswer = "no_answer",
    /// The callout was answered by something that is not the link.
    NotTheLink = "not_the_link",
    /// The host refused the callout.
    Refused = "refused",
    /// No answer within the store's timeout.
    TimedOut = "timed_out",
}

impl Cause {
    /// Whether the same operation may fare better a moment later.
    ///
    /// A connection that Redis closed while it was idle fails the first command sent over it.
    #[must_use]
    pub const fn is_transient(self) -> bool {
        match self {
            Self::UpstreamFailure
            | Self::NoUpstreamHost
            | Self::Loading
            | Self::ClusterDown
            | Self::Redirected
            | Self::Busy
            | Self::BrokenEnvelope
            | Self::NoAnswer
            | Self::NotTheLink
            | Self::Refused => true,
            Self::OutOfMemory
            | Self::ReadOnly
            | Self::Misconfigured
            | Self::NotAllowed
            | Self::NoReplicas
            | Self::OtherError
            | Self::UnexpectedReply
            | Self::TimedOut => false,
        }
    }
}

/// Why a callout brought no answer from Redis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CalloutFault {
    /// No headers: it timed out, or was reset.
    NoAnswer,
    /// Something that is not the link answered, or Envoy itself.
    Status,
}

impl CalloutFault {
    /// What the batch's operations failed of.
    #[must_use]
    pub const fn cause(self) -> Cause {
        match self {
            Self::NoAnswer => Cause::NoAnswer,
            Self::Status => Cause::NotTheLink,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_error_reply_is_a_fault() {
        for (error, fault) in [
            ("NOSCRIPT No matching script. Please use EVAL.", Fault::NoScript),
            ("WRONGTYPE Operation against a key holding the wrong kind of value", Fault::Unreadable),
            (
                "OOM command not allowed when used memory > 'maxmemory'.",
                Fault::Unavailable(Cause::OutOfMemory),
            ),
            (
                "ERR Error running script (call to f_00): @user_script:9: @user_script: 9: -OOM command not \
                 allowed when used memory > 'maxmemory'.",
                Fault::Unavailable(Cause::OutOfMemory),
            ),
            ("READONLY You can't write against a read only replica.", Fault::Unavailable(Cause::ReadOnly)),
            ("MISCONF Redis is configured to save RDB snapshots", Fault::Unavailable(Cause::Misconfigured)),
            ("LOADING Redis is loading the dataset in memory", Fault::Unavailable(Cause::Loading)),
            ("CLUSTERDOWN The cluster is down", Fault::Unavailable(Cause::ClusterDown)),
            ("MOVED 3999 127.0.0.1:6381", Fault::Unavailable(Cause::Redirected)),
            ("NOAUTH Authentication required.", Fault::Unavailable(Cause::NotAllowed)),
            ("upstream failure", Fault::Unavailable(Cause::UpstreamFailure)),
            ("no upstream host", Fault::Unavailable(Cause::NoUpstreamHost)),
            ("ERR unknown command", Fault::Unavailable(Cause::OtherError)),
            ("", Fault::Unavailable(Cause::OtherError)),
        ] {
            assert_eq!(Fault::of_error(error.as_bytes()), fault, "{error}");
        }
    }

    #[test]
    fn words_are_told_apart() {
        let words: std::collections::BTreeSet<&str> = Cause::ALL.iter().map(|cause| cause.as_str()).collect();
        assert_eq!(words.len(), Cause::ALL.len());
    }
}
