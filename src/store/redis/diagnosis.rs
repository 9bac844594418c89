//! What a callout's answer says about the way to Redis: whether to read it, and which mistake it looks like.
//!
//! The shapes were seen on Envoy 1.40.0, each with the mistake made on purpose. Some mistakes look alike: the sentence
//! then names each that it may be.

use std::fmt;

use super::envelope;
use super::fault::CalloutFault;
use super::transport::Transport;

/// A callout's answer as the host gives it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CalloutAnswer<'a> {
    /// How many headers the host says it has. With none, no header may be asked for.
    pub headers: usize,
    /// `:status`, if there is one.
    pub status: Option<u16>,
    /// The body.
    pub body: &'a [u8],
    /// How many operations were sent.
    pub operations: usize,
    /// Whether it came well before the callout's timeout.
    pub is_early: bool,
    /// Who was to answer.
    pub transport: Transport,
}

impl<'a> CalloutAnswer<'a> {
    /// The bytes that Redis and `redis_proxy` answered.
    ///
    /// # Errors
    /// [`CalloutFault`] where somebody else answered, or nobody.
    pub const fn replies(&self) -> Result<&'a [u8], CalloutFault> {
        match (self.headers, self.status) {
            (0, _) => Err(CalloutFault::NoAnswer),
            (_, Some(status)) if self.transport.reads(status) => Ok(self.body),
            (_, _) => Err(CalloutFault::Status),
        }
    }

    /// What the answer looks like, unless it is as it should be.
    #[must_use]
    pub fn diagnose(&self) -> Option<Trap> {
        if self.transport != Transport::Link {
            return self.diagnose_gateway();
        }
        let says = |text: &[u8]| self.body.windows(text.len()).any(|window| window == text);
        match (self.headers, self.status) {
            (0, _) if self.is_early => Some(Trap::Reset),
            (0, _) => Some(Trap::NoEnd),
            (_, Some(200)) if self.body.is_empty() => Some(Trap::NoHold),
            (_, Some(200)) if !looks_like_resp(self.body) => Some(Trap::HttpService),
            (_, Some(200)) => envelope::open(self.body, self.operations).is_none().then_some(Trap::CutShort),
            (_, Some(502 | 503)) if says(b"reset reason: protocol error") => Some(Trap::NotATunnel),
            (_, Some(503)) if says(b"reset reason: connection termination") => Some(Trap::RedisItself),
            (_, Some(503 | 504)) if says(b"connection failure") || says(b"connection timeout") => {
                Some(Trap::NobodyListens)
            }
            (_, Some(503)) if says(b"no healthy upstream") => Some(Trap::NobodyListens),
            (_, Some(504)) => Some(Trap::NoEnd),
            (_, Some(404)) if self.body.is_empty() => Some(Trap::NoRoute),
            (_, _) => Some(Trap::HttpService),
        }
    }

    fn diagnose_gateway(&self) -> Option<Trap> {
        if matches!(self.status, Some(401 | 403)) {
            return Some(Trap::GatewayRefuses);
        }
        let is_whole = |answer| {
            envelope::open(&self.transport.as_of_link(answer, self.operations), self.operations).is_some()
        };
        (!self.replies().is_ok_and(is_whole)).then_some(Trap::GatewayFails)
    }
}

const fn looks_like_resp(body: &[u8]) -> bool {
    matches!(body.first(), Some(b'+' | b'-' | b':' | b'$' | b'*'))
}

macro_rules! traps {
    ($($(#[$doc:meta])* $name:ident = $sentence:literal),* $(,)?) => {
        /// A mistake in the configuration, or what looks like one.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Trap { $($(#[$doc])* $name),* }

        impl Trap {
            /// Every trap.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// What the operator should look at.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$name => $sentence),* }
            }
        }
    };
}

traps! {
    /// The host knows no such cluster.
    UnknownCluster = "Envoy has no cluster of the name in store.redis.cluster",
    /// 502 "protocol error".
    NotATunnel = "the link speaks HTTP to redis_proxy instead of tunnelling to it: its route needs upgrade_configs \
        with upgrade_type CONNECT and connect_config.allow_post: true; or store.redis.cluster names redis_proxy's own \
        listener instead of the link",
    /// 503 "connection termination".
    RedisItself = "store.redis.cluster leads straight to Redis, which was spoken to in HTTP and hung up: it has to name \
        the link's cluster",
    /// Another status, or another body.
    HttpService = "store.redis.cluster leads to an HTTP service: it has to name the link's cluster",
    /// 404, empty.
    NoRoute = "the link has no route for this request: it needs domains [\"*\"] and prefix \"/\"",
    /// 503 "connection failure", or "no healthy upstream".
    NobodyListens = "nobody listens behind the link: is the redis_proxy listener there, under the address that its \
        cluster names?",
    /// 200, empty.
    NoHold = "the link ended before redis_proxy answered: it needs two request_end_hold filters in a row before its \
        router",
    /// 200, and not what was asked for.
    CutShort = "the answer does not hold what was asked for, no more and no less: Redis or redis_proxy went away in the \
        middle, the link lacks its two request_end_hold filters, or store.redis.cluster is not the link",
    /// No headers, at once.
    Reset = "the link was reset before it had answered: its cluster to redis_proxy needs max_requests_per_connection: 1, \
        and redis_proxy has to listen on a unix socket, not on an internal listener",
    /// 401 or 403.
    GatewayRefuses = "the gateway refuses what it is sent: is the token that of this database, and may it write and run \
        scripts?",
    /// Anything else but an answer of the gateway's dialect.
    GatewayFails = "the gateway gives no answer of its dialect in time: is it up, and Redis behind it, and does \
        store.redis.cluster lead to it, with the dialect that store.redis.gateway says?",
    /// No headers at the timeout, or 504. A `redis_proxy` on an internal listener looks so too: its close resets the
    /// answer, and the link's connection lives on for its `delayed_close_timeout` of 1 s.
    NoEnd = "no answer in time: Redis is down or slow; or op_timeout of redis_proxy is not below half of \
        store.redis.timeout; or redis_proxy is on an internal listener, where it has to listen on a unix socket",
}

impl fmt::Display for Trap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(status: Option<u16>, body: &[u8]) -> CalloutAnswer<'_> {
        let headers = status.map_or(0, |_| 3);
        CalloutAnswer { headers, status, body, operations: 1, is_early: true, transport: Transport::Link }
    }

    #[test]
    fn each_mistake_is_told_by_its_answer() {
        const ENVOY: &str = "upstream connect error or disconnect/reset before headers. reset reason: ";
        let envoy = |reason: &str| [ENVOY, reason].concat().into_bytes();
        for (status, body, trap) in [
            (Some(200), b":1\r\n+OK\r\n".to_vec(), None),
            (Some(200), b"".to_vec(), Some(Trap::NoHold)),
            (Some(200), b":1\r\n".to_vec(), Some(Trap::CutShort)),
            (Some(200), b":1\r\n:1\r\n+OK\r\n".to_vec(), Some(Trap::CutShort)),
            (Some(200), b"<!DOCTYPE html>".to_vec(), Some(Trap::HttpService)),
            (Some(200), b"{\"EVAL\": []}".to_vec(), Some(Trap::HttpService)),
            (Some(405), b"".to_vec(), Some(Trap::HttpService)),
            (Some(404), b"not found".to_vec(), Some(Trap::HttpService)),
            (Some(404), b"".to_vec(), Some(Trap::NoRoute)),
            (Some(502), envoy("protocol error"), Some(Trap::NotATunnel)),
            (Some(503), envoy("connection termination"), Some(Trap::RedisItself)),
            (Some(503), envoy("remote connection failure"), Some(Trap::NobodyListens)),
            (Some(503), envoy("connection timeout"), Some(Trap::NobodyListens)),
            (Some(503), b"no healthy upstream".to_vec(), Some(Trap::NobodyListens)),
            (Some(504), b"upstream request timeout".to_vec(), Some(Trap::NoEnd)),
            (None, b"".to_vec(), Some(Trap::Reset)),
        ] {
            assert_eq!(answer(status, &body).diagnose(), trap, "{status:?} {}", body.escape_ascii());
        }
        assert_eq!(CalloutAnswer { is_early: false, ..answer(None, b"") }.diagnose(), Some(Trap::NoEnd));
    }

    #[test]
    fn only_the_tunnels_200_is_read() {
        assert_eq!(answer(Some(200), b"+OK\r\n").replies(), Ok(&b"+OK\r\n"[..]));
        assert_eq!(answer(Some(503), b"+OK\r\n").replies(), Err(CalloutFault::Status));
        assert_eq!(answer(None, b"+OK\r\n").replies(), Err(CalloutFault::NoAnswer));
        assert_eq!(
            CalloutAnswer { status: None, ..answer(Some(200), b"") }.replies(),
            Err(CalloutFault::Status)
        );
    }
}
