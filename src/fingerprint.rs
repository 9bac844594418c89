//! What makes two requests the same request: an incremental SHA-256 over the framed head and body.
//!
//! The framing is injective: every piece follows its length and every list its count, so different requests
//! hash different bytes. Nothing is decoded or normalized but the case of the authority and the order of
//! query parameters of different names: `%7E` is not `~`, and `%2f` is not `%2F`, although RFC 3986 section
//! 6.2.2 lets them be. The cost of a spelling that changed between two attempts is a 422, never a wrong replay.

use std::fmt;

use sha2::{Digest, Sha256};

use crate::config::Rule;
use crate::headers::{RequestHead, trim_ows};
use crate::key::{ShortHex, frame_length, update_framed};
use crate::sorted::sorted_positions;

/// Of the framing; records carry it, since fingerprints of different versions can't be compared.
pub const FINGERPRINT_VERSION: u8 = 1;

/// The hash of a request.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint([u8; 32]);

impl Fingerprint {
    /// A fingerprint that was taken earlier, or elsewhere.
    #[must_use]
    pub fn from_bytes(bytes: [u8; 32]) -> Fingerprint {
        Fingerprint(bytes)
    }

    /// The whole hash.
    #[must_use]
    pub fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fingerprint({})", ShortHex::of(&self.0))
    }
}

/// Takes a request's fingerprint as the request arrives.
#[derive(Clone)]
pub struct FingerprintHasher {
    hasher: Sha256,
    body: Body,
}

#[derive(Clone, Copy)]
enum Body {
    Counted { length: u64 },
    Ignored,
}

impl FingerprintHasher {
    /// Hashes everything of the head that counts under this rule.
    #[must_use]
    pub fn start(rule: &Rule, head: &RequestHead<'_>) -> FingerprintHasher {
        let policy = &rule.fingerprint;
        let mut hasher = Sha256::new();
        hasher.update([FINGERPRINT_VERSION]);
        update_framed(&mut hasher, head.method());
        if policy.authority {
            hasher.update([1]);
            update_framed(&mut hasher, &head.authority().to_ascii_lowercase());
        } else {
            hasher.update([0]);
        }
        update_target(&mut hasher, head.path_and_query());
        update_headers(&mut hasher, &policy.headers, head);
        hasher.update([u8::from(policy.body)]);
        FingerprintHasher {
            hasher,
            body: if policy.body { Body::Counted { length: 0 } } else { Body::Ignored },
        }
    }

    /// Hashes the next bytes of the body; how it is cut into chunks makes no difference.
    pub fn update_body(&mut self, chunk: &[u8]) {
        match &mut self.body {
            Body::Counted { length } => {
                *length = length.wrapping_add(chunk.len() as u64);
                self.hasher.update(chunk);
            }
            Body::Ignored => {}
        }
    }

    /// The fingerprint, once the body is over. No body is the same as an empty one.
    #[must_use]
    pub fn finish(mut self) -> Fingerprint {
        match self.body {
            // The body's length isn't known before its end, so it follows: all before the body frames itself.
            Body::Counted { length } => self.hasher.update(length.to_le_bytes()),
            Body::Ignored => {}
        }
        Fingerprint(self.hasher.finalize().into())
    }
}

impl fmt::Debug for FingerprintHasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FingerprintHasher(..)")
    }
}

/// The path, then the query: no query is not the empty one (RFC 3986 section 6.2.3).
fn update_target(hasher: &mut Sha256, target: &[u8]) {
    let mut parts = target.splitn(2, |byte| *byte == b'?');
    update_framed(hasher, parts.next().unwrap_or_default());
    match parts.next() {
        None => hasher.update([0]),
        Some(query) => {
            hasher.update([1]);
            update_query(hasher, query);
        }
    }
}

/// The pairs between `&`, sorted by name. The sort is stable: the order of equal names has a meaning.
///
/// An empty pair, as in `a&&b`, is one with an empty name, and counts.
fn update_query(hasher: &mut Sha256, query: &[u8]) {
    let pairs: Vec<(&[u8], Option<&[u8]>)> = query.split(|byte| *byte == b'&').map(split_pair).collect();
    let at = |position: usize| pairs.get(position).copied().unwrap_or_default();
    hasher.update(frame_length(pairs.len()));
    for position in sorted_positions(pairs.len(), &mut |a, b| at(a).0.cmp(at(b).0)) {
        let (name, value) = at(position);
        update_framed(hasher, name);
        match value {
            None => hasher.update([0]),
            Some(value) => {
                hasher.update([1]);
                update_framed(hasher, value);
            }
        }
    }
}

/// Name and value; `a` has none, `a=` an empty one.
fn split_pair(pair: &[u8]) -> (&[u8], Option<&[u8]>) {
    let mut parts = pair.splitn(2, |byte| *byte == b'=');
    (parts.next().unwrap_or_default(), parts.next())
}

/// The listed headers, each with the number of its lines: an absent header is not an empty one.
fn update_headers(hasher: &mut Sha256, names: &[String], head: &RequestHead<'_>) {
    hasher.update(frame_length(names.len()));
    for name in names {
        update_framed(hasher, name.as_bytes());
        hasher.update(frame_length(head.headers.lines(name).count()));
        for line in head.headers.lines(name) {
            let (_, value) = trim_ows(line);
            update_framed(hasher, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::FingerprintPolicy;
    use crate::policy::fixture::{self, Request};
    use proptest::collection::vec;
    use proptest::prelude::*;

    const DEFAULT: FingerprintPolicy = FingerprintPolicy { authority: true, headers: Vec::new(), body: true };

    fn take(policy: &FingerprintPolicy, request: &Request, chunks: &[&[u8]]) -> Fingerprint {
        let mut rule = fixture::rule();
        rule.fingerprint = policy.clone();
        let mut hasher = FingerprintHasher::start(&rule, &request.head());
        for chunk in chunks {
            hasher.update_body(chunk);
        }
        hasher.finish()
    }

    fn of_target(target: impl AsRef<[u8]>) -> Fingerprint {
        take(&DEFAULT, &Request::new().target(target), &[])
    }

    fn of_body(chunks: &[&[u8]]) -> Fingerprint {
        take(&DEFAULT, &Request::new(), chunks)
    }

    fn listing(headers: &[&str]) -> FingerprintPolicy {
        FingerprintPolicy { headers: headers.iter().map(|name| (*name).to_owned()).collect(), ..DEFAULT }
    }

    fn assert_all_differ(targets: &[&str]) {
        for (at, one) in targets.iter().enumerate() {
            for other in &targets[at + 1..] {
                assert_ne!(of_target(one), of_target(other), "{one} and {other}");
            }
        }
    }

    /// C01
    #[test]
    fn the_query_counts() {
        assert_all_differ(&["/p", "/p?dry=1", "/p?to=a", "/p?to=b"]);
    }

    /// C02
    #[test]
    fn no_separator_can_move_between_pieces() {
        assert_all_differ(&[
            "/p?a=&a=b&c=",
            "/p?a=&b=c&b=",
            "/p?a=&a=b",
            "/p?a=a%3Db",
            "/p?a=%26a=b",
            "/p?a==b",
            "/p?a%00=b",
            "/p?a=%00b",
            "/p?a%1F=b",
            "/p?a%0A=b",
            "/pa=b?",
        ]);
        let host = Request::new().authority("a.example/p").target("");
        let path = Request::new().authority("a.example").target("/p");
        assert_ne!(take(&DEFAULT, &host, &[]), take(&DEFAULT, &path, &[]));
        assert_ne!(
            take(&DEFAULT, &Request::new().target("/p?a"), &[b"b"]),
            take(&DEFAULT, &Request::new().target("/p?ab"), &[])
        );
    }

    /// C04
    #[test]
    fn bodyless_requests_to_two_paths_differ() {
        assert_ne!(of_target("/carts/1/cancel"), of_target("/carts/2/cancel"));
        assert_ne!(of_target("/carts/1/cancel"), of_target("/carts/1/Cancel"));
    }

    #[test]
    fn the_method_counts_as_it_is_written() {
        let methods =
            ["POST", "PATCH", "post"].map(|method| take(&DEFAULT, &Request::new().method(method), &[]));
        assert!(methods[0] != methods[1] && methods[0] != methods[2]);
    }

    /// E11
    #[test]
    fn the_authority_counts_without_case_unless_switched_off() {
        let off = FingerprintPolicy { authority: false, ..DEFAULT };
        let of = |policy: &FingerprintPolicy, host: &str| take(policy, &Request::new().authority(host), &[]);
        assert_eq!(of(&DEFAULT, "A.Example"), of(&DEFAULT, "a.example"));
        assert_ne!(of(&DEFAULT, "a.example"), of(&DEFAULT, "b.example"));
        assert_eq!(of(&off, "a.example"), of(&off, "b.example"));
        assert_ne!(of(&off, ""), of(&DEFAULT, ""));
    }

    /// C05
    #[test]
    fn only_parameters_of_different_names_may_change_places() {
        assert_eq!(of_target("/p?a=1&b=2"), of_target("/p?b=2&a=1"));
        assert_eq!(of_target("/p?c&a=1&b=2&a=2"), of_target("/p?b=2&a=1&a=2&c"));
        assert_ne!(of_target("/p?a=1&a=2"), of_target("/p?a=2&a=1"));
        assert_ne!(of_target("/p?a=2&b&a=1"), of_target("/p?a=1&b&a=2"));
    }

    /// C05, with more pairs than an unstable sort keeps in order by chance.
    #[test]
    fn repeated_names_keep_their_order_among_many() {
        let run = |name: &str| (0..500).map(|n| format!("{name}={n}")).collect::<Vec<_>>();
        let (a, b) = (run("a"), run("b"));
        let interleaved: Vec<String> = b.iter().zip(&a).flat_map(|(b, a)| [b.clone(), a.clone()]).collect();
        let grouped = of_target(format!("/p?{}&{}", a.join("&"), b.join("&")));
        assert_eq!(of_target(format!("/p?{}", interleaved.join("&"))), grouped);
    }

    /// C06: no normalization, not even the equivalences that RFC 3986 section 6.2.2 offers.
    #[test]
    fn escapes_are_compared_as_they_are_written() {
        assert_all_differ(&["/~u", "/%7Eu", "/%7eu", "/a/b", "/a%2Fb", "/a%2fb", "/p?a+b", "/p?a%20b"]);
    }

    /// C08
    #[test]
    fn degenerate_queries_are_all_different() {
        assert_all_differ(&[
            "",
            "?",
            "/p",
            "/p?",
            "/p?a",
            "/p?a=",
            "/p?&",
            "/p?&&",
            "/p?=x",
            "/p?=",
            "/p?a&a",
            "/p?a&",
            "/p??",
            "/p?a=1&b=2",
            "/p?a=1&&b=2",
        ]);
        assert_eq!(of_target("/p?&a"), of_target("/p?a&"));
    }

    /// C09
    #[test]
    fn malformed_targets_are_hashed_byte_by_byte() {
        assert_all_differ(&["/p?%zz", "/p?%", "/p?%C3%28", "/p?%00", "/p#frag", "/p", "/p#f?a", "/p?a#f"]);
        assert_ne!(of_target(b"/\xff"), of_target(b"/\xfe"));
        assert_ne!(of_target(b"/p?\xff"), of_target("/p?\u{fffd}"));
    }

    /// C09: one name 5,000 times, 5,000 names in descending order, a long common prefix.
    #[test]
    fn large_queries_are_hashed() {
        let descending: Vec<String> = (0..5000).rev().map(|n| format!("a{n:05}={n}")).collect();
        let ascending: Vec<String> = descending.iter().rev().cloned().collect();
        assert_eq!(
            of_target(format!("/p?{}", descending.join("&"))),
            of_target(format!("/p?{}", ascending.join("&")))
        );
        assert_ne!(
            of_target(format!("/p?{}", "a=1&".repeat(5000))),
            of_target(format!("/p?{}", "a=1&".repeat(4999)))
        );
        assert_ne!(
            of_target(format!("/p?{}a", "x".repeat(16384))),
            of_target(format!("/p?{}b", "x".repeat(16384)))
        );
        assert_ne!(
            of_target(format!("/p?{}", "&".repeat(16384))),
            of_target(format!("/p?{}", "&".repeat(16383)))
        );
    }

    /// C14
    #[test]
    fn the_last_byte_of_a_large_body_counts() {
        let mut body = vec![7; 64 * 1024];
        body.push(1);
        let one = of_body(&[&body]);
        *body.last_mut().unwrap() = 2;
        assert_ne!(of_body(&[&body]), one);
        body.pop();
        assert_ne!(of_body(&[&body]), one);
    }

    /// C18
    #[test]
    fn every_way_to_have_no_body_is_one_fingerprint() {
        let none = of_body(&[]);
        assert_eq!(of_body(&[b""]), none);
        assert_eq!(of_body(&[b"", b""]), none);
        let length_zero = Request::new().line("content-length", "0");
        assert_eq!(take(&DEFAULT, &length_zero, &[]), none);
        let chunked = Request::new().line("transfer-encoding", "chunked");
        assert_eq!(take(&DEFAULT, &chunked, &[b""]), none);
    }

    /// C11, C22: a body is bytes, not the JSON it may be.
    #[test]
    fn a_body_spelled_differently_is_another_request() {
        assert_ne!(of_body(&[br#"{"a":1,"b":2}"#]), of_body(&[br#"{"b":2,"a":1}"#]));
        assert_ne!(of_body(&[b"{}"]), of_body(&[b"{ }"]));
    }

    #[test]
    fn without_body_only_the_head_counts() {
        let head_only = FingerprintPolicy { body: false, ..DEFAULT };
        let request = Request::new();
        assert_eq!(take(&head_only, &request, &[b"x"]), take(&head_only, &request, &[]));
        assert_ne!(take(&head_only, &request, &[]), take(&DEFAULT, &request, &[]));
    }

    /// C16, C19, E10
    #[test]
    fn listed_headers_count_and_others_do_not() {
        let policy = listing(&["x-http-method-override", "content-type"]);
        let plain = Request::new();
        let overridden = Request::new().line("X-HTTP-Method-Override", "DELETE");
        assert_ne!(take(&policy, &plain, &[]), take(&policy, &overridden, &[]));
        assert_eq!(take(&DEFAULT, &plain, &[]), take(&DEFAULT, &overridden, &[]));
        let json = Request::new().line("content-type", "application/json");
        let text = Request::new().line("content-type", "text/plain");
        assert_ne!(take(&policy, &json, &[b"1"]), take(&policy, &text, &[b"1"]));
        assert_ne!(take(&policy, &json, &[b"1"]), take(&policy, &plain, &[b"1"]));
    }

    #[test]
    fn lines_of_listed_headers_do_not_run_into_each_other() {
        let policy = listing(&["a", "b"]);
        let requests = [
            Request::new(),
            Request::new().line("a", ""),
            Request::new().line("a", "").line("a", ""),
            Request::new().line("a", "x"),
            Request::new().line("b", "x"),
            Request::new().line("a", "x").line("a", "y"),
            Request::new().line("a", "y").line("a", "x"),
            Request::new().line("a", "x").line("b", "y"),
            Request::new().line("a", "xy"),
            Request::new().line("a", "x, y"),
        ];
        for (at, one) in requests.iter().enumerate() {
            for other in &requests[at + 1..] {
                assert_ne!(take(&policy, one, &[]), take(&policy, other, &[]));
            }
        }
        let order = Request::new().line("b", "y").line("a", "x");
        assert_eq!(take(&policy, &order, &[]), take(&policy, &requests[7], &[]));
        assert_eq!(take(&policy, &Request::new().line("a", " x\t"), &[]), take(&policy, &requests[3], &[]));
    }

    /// J07: a change of the framing needs a new version.
    #[test]
    fn the_framing_of_this_version_is_frozen() {
        let request = Request::new().method("POST").authority("A").target("/p?b&a=1").line("h", "v");
        let mut expected = vec![FINGERPRINT_VERSION];
        let mut piece = |bytes: &[u8], flags: &[u8]| {
            expected.extend((bytes.len() as u64).to_le_bytes());
            expected.extend(bytes);
            expected.extend(flags);
        };
        piece(b"POST", &[1]);
        piece(b"a", &[]);
        piece(b"/p", &[1, 2, 0, 0, 0, 0, 0, 0, 0]);
        piece(b"a", &[1]);
        piece(b"1", &[]);
        piece(b"b", &[0, 1, 0, 0, 0, 0, 0, 0, 0]);
        piece(b"h", &[1, 0, 0, 0, 0, 0, 0, 0]);
        piece(b"v", &[1]);
        expected.extend(b"body\x04\0\0\0\0\0\0\0");
        let fingerprint = take(&listing(&["h"]), &request, &[b"bo", b"dy"]);
        assert_eq!(fingerprint.bytes()[..], Sha256::digest(&expected)[..]);
        assert_eq!(Fingerprint::from_bytes(*fingerprint.bytes()), fingerprint);
    }

    #[test]
    fn debug_output_is_short() {
        assert_eq!(format!("{:?}", Fingerprint::from_bytes([0xa5; 32])), "Fingerprint(a5a5a5a5)");
    }

    /// What a request is, independently of how it is hashed.
    type Meaning = (String, String, Option<Vec<(String, Vec<Option<String>>)>>, Vec<u8>);

    fn meaning(method: &str, target: &str, body: &[u8]) -> Meaning {
        let (path, query) = match target.split_once('?') {
            None => (target, None),
            Some((path, query)) => {
                let mut by_name = std::collections::BTreeMap::<String, Vec<Option<String>>>::new();
                for pair in query.split('&') {
                    let (name, value) = match pair.split_once('=') {
                        None => (pair, None),
                        Some((name, value)) => (name, Some(value.to_owned())),
                    };
                    by_name.entry(name.to_owned()).or_default().push(value);
                }
                (path, Some(by_name.into_iter().collect()))
            }
        };
        (method.to_owned(), path.to_owned(), query, body.to_vec())
    }

    proptest! {
        #[test]
        fn requests_have_one_fingerprint_exactly_if_they_mean_the_same(
            one in ("(POST|PUT)", "/a?[?&=ab]{0,6}", vec(0_u8..2, 0..3)),
            other in ("(POST|PUT)", "/a?[?&=ab]{0,6}", vec(0_u8..2, 0..3)),
        ) {
            let of = |(method, target, body): &(String, String, Vec<u8>)| {
                take(&DEFAULT, &Request::new().method(method).target(target), &[body])
            };
            let same = meaning(&one.0, &one.1, &one.2) == meaning(&other.0, &other.1, &other.2);
            prop_assert_eq!(of(&one) == of(&other), same);
        }

        #[test]
        fn shuffled_queries_have_one_fingerprint_exactly_if_they_mean_the_same(
            pairs in vec("[ab]?=?[01]?", 1..6),
            shuffled in any::<proptest::sample::Index>(),
        ) {
            let mut other = pairs.clone();
            let at = shuffled.index(pairs.len());
            other.rotate_left(at);
            let (one, other) = (format!("/?{}", pairs.join("&")), format!("/?{}", other.join("&")));
            let same = meaning("POST", &one, b"") == meaning("POST", &other, b"");
            prop_assert_eq!(of_target(one) == of_target(other), same);
        }

        /// C15
        #[test]
        fn chunking_makes_no_difference(
            body in vec(any::<u8>(), 0..300),
            cuts in vec(any::<proptest::sample::Index>(), 0..6),
        ) {
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(body.len() + 1)).collect();
            cuts.sort_unstable();
            let mut chunks = Vec::new();
            let mut begin = 0;
            for cut in cuts {
                chunks.push(&body[begin..cut]);
                begin = cut;
            }
            chunks.push(&body[begin..]);
            prop_assert_eq!(of_body(&chunks), of_body(&[&body]));
        }

        #[test]
        fn any_target_is_hashed(target in vec(any::<u8>(), 0..128)) {
            let _ = of_target(&target);
        }
    }
}
