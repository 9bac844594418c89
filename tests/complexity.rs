//! No parser of foreign bytes takes quadratic time: four times the input takes about four times as long.
//!
//! Both sizes are timed in turn within one run, by the thread's own time on the processor, and the shortest of several
//! times counts: a busy machine makes no difference. Between 4 (linear) and 16 (quadratic) the bound leaves room for a
//! cache that is left and for a sort.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    missing_docs,
    reason = "clippy.toml allows them only inside test functions"
)]

use std::hint::black_box;
use std::rc::Rc;
use std::time::Duration;

use idempotency::clock::Timestamp;
use idempotency::config::{Config, KeyFormat, KeyPolicy, KeySyntax, load, load_plugin};
use idempotency::fingerprint::Fingerprint;
use idempotency::fingerprint::FingerprintHasher;
use idempotency::headers::{Attributes, HeaderBlock, RequestHead};
use idempotency::key::{StoreKey, parse_key};
use idempotency::outcome::is_intermediary_failure;
use idempotency::policy::{RouteOverride, decide_coverage, is_upgrade};
use idempotency::record::Owner;
use idempotency::record::codec::{ResponseEncoder, StoredResponse};
use idempotency::reply::put_right;
use idempotency::reply::replay::kept_headers;
use idempotency::scope::resolve_scope;
use idempotency::store::outbox::Outbox;
use idempotency::store::redis::resp::{decode, encode_command};
use idempotency::store::redis::{CalloutAnswer, Transport, envelope};
use idempotency::store::{Claim, ClaimReply, Hold, Store, StoreError, Write, WriteReply};
use prost::Message as _;

const BOUND: f64 = 10.0;
const REPEATS: u32 = 4;
/// Below this a time says more about the clock and the caches than about the work.
const SHORTEST: Duration = Duration::from_micros(50);

/// `prepare` makes an input of a size, and `work` is timed on it. Sizes grow until there is something to measure.
fn assert_linear<I>(what: &str, start: usize, prepare: impl Fn(usize) -> I, work: impl Fn(&I)) {
    let mut size = start;
    loop {
        let (small, large) = (prepare(size), prepare(4 * size));
        let time = |input: &I| {
            let begin = thread_time();
            work(input);
            thread_time().saturating_sub(begin)
        };
        let (mut shortest, mut longest) = (Duration::MAX, Duration::MAX);
        for _ in 0..REPEATS {
            shortest = shortest.min(time(&small));
            longest = longest.min(time(&large));
            // A blatant case needs no repeats.
            if longest > Duration::from_secs(5) {
                break;
            }
        }
        let ratio = longest.as_secs_f64() / shortest.as_secs_f64().max(1e-9);
        if shortest < SHORTEST && ratio < BOUND && size < start << 6 {
            size *= 2;
            continue;
        }
        println!("{what}: {shortest:?} at {size}, {longest:?} at {}: {ratio:.1} times", 4 * size);
        assert!(ratio < BOUND, "{what}: {shortest:?} at {size}, {longest:?} at {}", 4 * size);
        return;
    }
}

/// What this thread had of the processor so far.
fn thread_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: it writes the one value it is given.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) }, 0);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap())
}

struct NoAttributes;

impl Attributes for NoAttributes {
    fn attribute(&self, _path: &[&str]) -> Option<Vec<u8>> {
        None
    }
}

fn plugin(rule: &str) -> Config {
    let json = format!(r#"{{"store": {{"shared_data": {{}}}}, "rules": [{{"name": "r", {rule}}}]}}"#);
    load(json.as_bytes()).unwrap_or_else(|errors| panic!("{errors}"))
}

fn lines(count: usize, line: impl Fn(usize) -> (String, String)) -> HeaderBlock {
    HeaderBlock::from_pairs((0..count).map(line))
}

#[test]
fn the_key_header() {
    let policy = KeyPolicy { max_length: usize::MAX, format: KeyFormat::Any, syntax: KeySyntax::Lenient };
    for (what, piece) in [
        ("a key", "a"),
        ("a String", "\\\""),
        ("parameters", "\";a=1;b=\"x"),
        ("spaces", " "),
        ("display strings", "\";a=%\"%c3%bc\";b=\""),
    ] {
        let prepare = |size: usize| format!("\"k{}\"", piece.repeat(size)).into_bytes();
        assert_linear(what, 1_000, prepare, |line| drop(black_box(parse_key([line.as_slice()], &policy))));
    }
    assert_linear(
        "key lines",
        1_000,
        |size| vec![&b"k"[..]; size],
        |lines| drop(black_box(parse_key(lines.iter().copied(), &policy))),
    );
}

#[test]
fn requests() {
    let config = plugin(
        r#""scope": [{"header": "x-account"}], "max_scope_length": 255, "fingerprint": {"headers": ["x-part"]},
           "match": {"path": {"regex": "/(a|b|[^?]+/)*(c+)+d"}}"#,
    );
    let rule = &config.rules[0];
    let take = |headers: &HeaderBlock| {
        let head = RequestHead { headers, attributes: &NoAttributes };
        let mut hasher = FingerprintHasher::start(rule, &head);
        hasher.update_body(b"x");
        black_box(hasher.finish());
        let _ = black_box(resolve_scope(rule, &head));
        black_box(is_upgrade(headers));
        let authority = head.authority();
        black_box(decide_coverage(
            &config.rules,
            b"POST",
            authority,
            head.path_and_query(),
            &RouteOverride::None,
        ));
    };
    let target = |path: String| HeaderBlock::from_pairs([(":path", path)]);
    assert_linear("one name", 1_000, |size| target(format!("/p?{}", "a=1&".repeat(size))), take);
    let descending = |size: usize| (0..size).rev().map(|at| format!("n{at:07}=1&")).collect::<String>();
    assert_linear("many names", 1_000, |size| target(format!("/p?{}", descending(size))), take);
    assert_linear("empty pairs", 1_000, |size| target(format!("/p?{}", "&".repeat(size))), take);
    assert_linear("a path that nearly matches", 300, |size| target(format!("/{}", "c".repeat(size))), take);
    assert_linear("segments", 300, |size| target(format!("/{}e", "a/".repeat(size))), take);
    assert_linear("lines", 300, |size| lines(size, |at| ("x-part".to_owned(), at.to_string())), take);
    let scopes = |size| HeaderBlock::from_pairs([("x-account", "a".repeat(size))]);
    assert_linear("a scope", 10_000, scopes, take);
    let options =
        |size| HeaderBlock::from_pairs([("connection", "a,".repeat(size)), ("upgrade", "x".into())]);
    assert_linear("connection options", 1_000, options, take);
    let authority = |size| HeaderBlock::from_pairs([(":authority", format!("a{}", ":1".repeat(size)))]);
    assert_linear("an authority", 10_000, authority, take);
}

#[test]
fn header_maps_and_response_heads() {
    let config = plugin(r#""scope": "shared", "keep_response_headers": ["set-cookie"]"#);
    let bytes = |size| lines(size, |at| (format!("n{at}"), String::new())).as_bytes().to_vec();
    assert_linear("a header map", 300, bytes, |bytes| {
        black_box(HeaderBlock::parse(bytes.clone()).is_ok());
    });
    let keep = |headers: &HeaderBlock| _ = black_box(kept_headers(headers, &config.rules[0]).count());
    assert_linear("a response's lines", 800, |size| lines(size, |at| (format!("n{at}"), "v".into())), keep);
    let named = |size: usize| {
        let options: Vec<String> = (0..size).map(|at| format!("m{at}")).collect();
        let options = [("connection".to_owned(), options.join(","))];
        HeaderBlock::from_pairs(
            options.into_iter().chain((0..size).map(|at| (format!("n{at}"), String::new()))),
        )
    };
    assert_linear("lines and connection options", 800, named, keep);
    let heads = |size| {
        let of = |value: &str| lines(size, |at| (format!("n{at:07}"), value.to_owned()));
        (of("own"), of("made"))
    };
    assert_linear("a replay's head", 800, heads, |(own, made)| drop(black_box(put_right(own, made))));
}

#[test]
fn kept_responses() {
    let encoded = |size: usize| {
        let name = b"n";
        let mut encoder =
            ResponseEncoder::begin(200, (0..size.min(60_000)).map(|_| (&name[..], &b"v"[..])), None).unwrap();
        (0..size).for_each(|_| encoder.push(b"chunk"));
        encoder.finish()
    };
    assert_linear("decoding", 1_000, encoded, |bytes| _ = black_box(StoredResponse::decode(bytes).is_ok()));
    assert_linear("encoding", 300, |size| size, |size| drop(black_box(encoded(*size))));
    let body =
        |size| format!("upstream connect error or disconnect/reset before headers{}", ". ".repeat(size));
    assert_linear(
        "a proxy's text",
        100_000,
        |size| vec![body(9); size / 100],
        |bodies| {
            bodies.iter().for_each(|body| _ = black_box(is_intermediary_failure(body.as_bytes())));
        },
    );
}

#[test]
fn redis_answers() {
    for (what, piece) in [
        ("integers", ":1\r\n"),
        ("bulks", "$3\r\nabc\r\n"),
        ("arrays", "*2\r\n:1\r\n*1\r\n+a\r\n"),
        ("errors", "-ERR no\r\n"),
        ("ended lines", "+\r"),
    ] {
        assert_linear(
            what,
            300,
            |size: usize| format!("{}+OK\r\n", piece.repeat(size)).into_bytes(),
            |body| {
                let operations = body.len() / piece.len();
                black_box(envelope::open(body, operations).is_some());
                let transport = Transport::Link;
                let is_early = true;
                let answer =
                    CalloutAnswer { headers: 3, status: Some(503), body, operations, is_early, transport };
                black_box(answer.diagnose());
            },
        );
    }
    assert_linear(
        "a long line",
        10_000,
        |size| [b"+".to_vec(), vec![b'a'; size]].concat(),
        |bytes| {
            black_box(decode(bytes).is_ok());
        },
    );
    assert_linear(
        "a command",
        300,
        |size| vec![b"argument"; size],
        |argv| {
            encode_command(&mut Vec::new(), argv);
        },
    );
}

#[test]
fn configurations() {
    let member = |at: usize| format!("\"unknown{at}\": {at}");
    let join =
        |size: usize, piece: &dyn Fn(usize) -> String| (0..size).map(piece).collect::<Vec<_>>().join(",");
    let rule = r#""name": "r", "scope": "shared""#;
    let with_list = |name: &str, items: &str| {
        format!(r#"{{"store": {{"shared_data": {{}}}}, "rules": [{{{rule}, {name}: [{items}]}}]}}"#)
    };
    let load = |json: &String| drop(black_box(load_plugin(json.as_bytes())));
    assert_linear("unknown members", 1_000, |size| format!("{{{}}}", join(size, &member)), load);
    let strange = |at: usize| format!("\"{}{at}\": 1", "\\u00e9".repeat(10));
    assert_linear("members of strange names", 100, |size| format!("{{{}}}", join(size, &strange)), load);
    let text = |at: usize| format!("\"x-{at}\"");
    assert_linear(
        "header names",
        1_000,
        |size| with_list("\"drop_response_headers\"", &join(size, &text)),
        load,
    );
    assert_linear(
        "header names twice",
        1_000,
        |size| {
            let names = join(size, &text);
            let kept = format!("[{names}], \"keep_response_headers\"");
            format!(
                r#"{{"store": {{"shared_data": {{}}}}, "rules": [{{{rule}, "drop_response_headers": {kept}: [{names}]}}]}}"#
            )
        },
        load,
    );
    let part = |at: usize| format!("{{\"header\": \"x-{at}\"}}");
    assert_linear(
        "scope parts",
        1_000,
        |size| {
            format!(
                r#"{{"store": {{"shared_data": {{}}}}, "rules": [{{"name": "r", "scope": [{}]}}]}}"#,
                join(size, &part)
            )
        },
        load,
    );
    let host = |at: usize| format!("\"h{at}.example\"");
    assert_linear(
        "hosts",
        1_000,
        |size| {
            with_list("\"match\": {\"methods\": [\"POST\"]}, \"headers\"", &join(size, &host))
                .replace("\"match\": {\"methods\": [\"POST\"]}, \"headers\": [", "\"match\": {\"hosts\": [")
                .replacen("]}]}", "]}}]}", 1)
        },
        load,
    );
    let rules = |at: usize| {
        format!(r#"{{"name": "r{at}", "scope": "shared", "match": {{"path": {{"exact": "/{at}"}}}}}}"#)
    };
    assert_linear(
        "rules",
        1_500,
        |size| format!(r#"{{"store": {{"shared_data": {{}}}}, "rules": [{}]}}"#, join(size, &rules)),
        load,
    );
    let wrong = |at: usize| format!(r#"{{"name": "r{at}", "scope": {at}, "nme": 1, "lock_ttl": {at}}}"#);
    assert_linear(
        "rules with mistakes",
        200,
        |size| format!(r#"{{"store": {{"shared_data": {{}}}}, "rules": [{}]}}"#, join(size, &wrong)),
        load,
    );
    assert_linear("brackets", 300, |size| "[".repeat(size), load);
    assert_linear("a long text", 10_000, |size| format!("{{\"store\": \"{}\"}}", "\\n".repeat(size)), load);
    let tree = |size: usize| {
        let value = |at: usize| prost_types::Value {
            kind: Some(prost_types::value::Kind::NumberValue(f64::from(u32::try_from(at).unwrap()))),
        };
        let fields = (0..size).map(|at| (format!("unknown{at}"), value(at))).collect();
        prost_types::Struct { fields }.encode_to_vec()
    };
    let load_bytes = |bytes: &Vec<u8>| {
        let errors = load_plugin(bytes).unwrap_err();
        assert!(errors.0.len() > 1_000, "it was read: {errors}");
    };
    assert_linear("a struct", 1_000, tree, load_bytes);
}

/// Takes no write.
struct Down;

impl Store for Down {
    fn claim(&mut self, _claim: &Claim, _now: Timestamp) -> Result<ClaimReply, StoreError> {
        Err(StoreError::Unavailable)
    }

    fn write(&mut self, _hold: &Hold, _write: &Write, _now: Timestamp) -> Result<WriteReply, StoreError> {
        Err(StoreError::Unavailable)
    }
}

#[test]
fn outboxes() {
    let config = plugin(r#""scope": "shared""#);
    let now = Timestamp::from_millis(1_000);
    let spilled = |size: usize| {
        let mut outbox = Outbox::new(1 << 20);
        for at in 0..size {
            let [low, high, ..] = at.to_le_bytes();
            let mut key = [0; 32];
            (key[0], key[1]) = (low, high);
            let hold = Hold {
                key: StoreKey::from_bytes(key),
                owner: Owner::from_bytes([1; 16]),
                fingerprint: Fingerprint::from_bytes([2; 32]),
                attempt: 1,
            };
            outbox.push(hold, Write::Release, &Rc::clone(&config.rules[0]), now, &mut |_| {});
        }
        outbox.spill(usize::MAX, now, &mut |_| {}).unwrap()
    };
    assert_linear("what an outbox left", 3_000, spilled, |bytes| {
        let mut outbox = Outbox::new(1 << 20);
        outbox.adopt(bytes, now, &mut |_| {});
        outbox.flush(&mut Down, now, &mut |_| {});
        assert!(outbox.take_due(now).is_none());
        // Out, and no answer yet.
        let later = now.after(Duration::from_secs(1));
        let mut out = 0;
        while outbox.take_due(later).is_some() {
            out += 1;
        }
        assert_eq!(out, outbox.len());
    });
}
