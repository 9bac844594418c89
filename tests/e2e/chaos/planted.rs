//! Shows that the audit can fail: histories made by hand, each with one fault, and the finding it has to give.

use std::collections::BTreeMap;

use super::audit::{Kind, Licence, Verdict, audit};
use super::history::{
    Answer, Body, Execution, Fault, Got, Happened, History, KeyHistory, Life, Millis, Rest, Rule, Store, Try,
    made_body, mark,
};

const KEY: &str = "chaos-0-0-0";

fn run(nth: usize, by: u64, start: Millis) -> Execution {
    let (answered, status, length) = (Some(start + 10), 200, 100);
    Execution { nth, attempt: 1, by, variant: 0, start, answered, status, length, broken: false }
}

fn try_of(id: u64, sent: Millis, got: Got) -> Try {
    Try { id, envoy: 0, variant: 0, sent, ended: sent + 20, got }
}

fn made(nth: usize, replayed: bool) -> Got {
    let body = Body::Made { key: KEY.into(), nth, variant: 0, length: 100 };
    Got::Whole(Answer { status: 200, replayed, problem: None, body })
}

fn refused(status: u16, kind: &str, reason: Option<&str>) -> Got {
    let problem = Some((kind.to_owned(), reason.map(str::to_owned)));
    Got::Whole(Answer { status, replayed: false, problem, body: Body::Own })
}

fn history(store: Store, rule: Rule, executions: Vec<Execution>, tries: Vec<Try>) -> History {
    let key = KeyHistory { rule, executions, tries, wedged: None };
    History {
        store,
        lock_ttl: 2000,
        largest_kept: 1000,
        keys: BTreeMap::from([(KEY.to_owned(), key)]),
        faults: vec![],
        lives: vec![],
        rests: vec![],
        traps_logged: 0,
        crashes: vec![],
    }
}

/// Executed once, refused meanwhile, replayed afterwards.
fn healthy() -> History {
    let tries = vec![
        try_of(1, 1000, made(1, false)),
        try_of(2, 1005, refused(409, "in-flight", None)),
        try_of(3, 1100, made(1, true)),
        try_of(4, 1200, made(1, true)),
    ];
    history(Store::Redis, Rule::Takeover, vec![run(1, 1, 1005)], tries)
}

/// Its Envoy is killed while the upstream works; taken over as attempt 2 when the lease is over.
fn taken_over(store: Store, rule: Rule) -> History {
    let lost = Execution { answered: None, ..run(1, 1, 1005) };
    let second = Execution { attempt: 2, ..run(2, 2, 3100) };
    let tries =
        vec![try_of(1, 1000, Got::Lost), try_of(2, 3090, made(2, false)), try_of(3, 3200, made(2, true))];
    let mut history = history(store, rule, vec![lost, second], tries);
    history.faults.push(Happened { fault: Fault::EnvoyKilled(0), from: 1010, until: 1011 });
    history
}

fn key(history: &mut History) -> &mut KeyHistory {
    history.keys.get_mut(KEY).unwrap()
}

fn kinds(verdict: &Verdict) -> Vec<Kind> {
    let mut kinds: Vec<Kind> = verdict.findings.iter().map(|finding| finding.kind).collect();
    kinds.dedup();
    kinds
}

/// The history, spoiled, has findings of this kind.
fn spoiled(what: &str, mut history: History, kind: Kind, spoil: impl FnOnce(&mut History)) {
    let before = audit(&history);
    assert!(before.findings.is_empty(), "{what}: {:?}", before.findings);
    spoil(&mut history);
    let verdict = audit(&history);
    assert!(kinds(&verdict).contains(&kind), "{what}: {:?}", verdict.findings);
}

#[test]
fn audit_finds_nothing_in_histories_that_the_guarantees_allow() {
    let licences = |history: &History| {
        let verdict = audit(history);
        assert!(verdict.findings.is_empty(), "{:?}", verdict.findings);
        verdict.licences.into_iter().collect::<Vec<_>>()
    };
    assert_eq!(licences(&healthy()), []);
    assert_eq!(licences(&taken_over(Store::Redis, Rule::Takeover)), [(Licence::TakenOver, 1)]);
    assert_eq!(licences(&taken_over(Store::SharedData, Rule::Takeover)), [(Licence::Forgotten, 1)]);
    let mut released = healthy();
    let busy = Execution { status: 503, ..run(1, 1, 1005) };
    key(&mut released).executions = vec![busy, run(2, 3, 1101)];
    let busy = Answer {
        status: 503,
        replayed: false,
        problem: None,
        body: Body::Made { key: KEY.into(), nth: 1, variant: 0, length: 100 },
    };
    key(&mut released).tries[0].got = Got::Whole(busy);
    key(&mut released).tries[2].got = made(2, false);
    key(&mut released).tries[3].got = made(2, true);
    assert_eq!(licences(&released), [(Licence::Released, 1)]);
}

/// A busy machine: the upstream sees the request after others were told that its client had left.
#[test]
fn audit_allows_a_run_that_was_on_its_way_when_its_client_left() {
    let gone = refused(424, "failed", Some("client_gone"));
    let tries = vec![try_of(1, 1000, Got::HungUp), try_of(2, 1030, gone)];
    let late = Execution { answered: None, ..run(1, 1, 1060) };
    let verdict = audit(&history(Store::Redis, Rule::Retain, vec![late], tries));
    assert!(verdict.findings.is_empty(), "{:?}", verdict.findings);
}

#[test]
fn audit_finds_a_run_without_a_licence() {
    spoiled("nothing was broken", healthy(), Kind::RanTwice, |it| {
        key(it).executions.push(run(2, 3, 1101));
    });
    let takeover = || taken_over(Store::Redis, Rule::Takeover);
    spoiled("nobody was killed", takeover(), Kind::RanTwice, |it| it.faults.clear());
    spoiled("another Envoy was killed", takeover(), Kind::RanTwice, |it| {
        it.faults[0].fault = Fault::EnvoyKilled(1);
    });
    spoiled("a reload is no licence", takeover(), Kind::RanTwice, |it| {
        it.faults[0].fault = Fault::Reloaded(0);
    });
    spoiled("within the lease", takeover(), Kind::RanTwice, |it| {
        key(it).executions[1].start = 2900;
        key(it).tries[1].sent = 2890;
    });
    spoiled("the attempt is not told", takeover(), Kind::RanTwice, |it| key(it).executions[1].attempt = 1);
    spoiled("under retain", takeover(), Kind::RanTwice, |it| key(it).rule = Rule::Retain);
    spoiled("though the client had its answer", takeover(), Kind::RanTwice, |it| {
        key(it).executions[0].answered = Some(1007);
        key(it).tries[0].got = made(1, false);
        key(it).tries[0].ended = 1009;
    });
    spoiled("another worker's VM trapped", takeover(), Kind::RanTwice, |it| {
        it.faults[0].fault = Fault::TrapAtRequest(0);
        key(it).executions[0].answered = Some(4000);
        key(it).tries[0] = Try { ended: 4010, ..try_of(1, 1000, made(1, false)) };
    });
    let mut forgotten = taken_over(Store::SharedData, Rule::Retain);
    key(&mut forgotten).executions[1].attempt = 1;
    spoiled("the embedded store's process lived on", forgotten, Kind::RanTwice, |it| it.faults.clear());
    spoiled(
        "the client left, that frees no key",
        taken_over(Store::Redis, Rule::Takeover),
        Kind::RanTwice,
        |it| {
            it.faults.clear();
            key(it).tries[0].got = Got::HungUp;
            key(it).executions[1] = run(2, 2, 1101);
        },
    );
}

#[test]
fn audit_finds_answers_that_are_not_the_keys() {
    let body = |key: &str, nth, variant, length| Body::Made { key: key.into(), nth, variant, length };
    let replay = |body| Got::Whole(Answer { status: 200, replayed: true, problem: None, body });
    for (what, body) in [
        ("another key's bytes", body("chaos-0-0-1", 1, 0, 100)),
        ("an answer to another body", body(KEY, 1, 1, 100)),
        ("a run that never was", body(KEY, 7, 0, 100)),
        ("cut short", body(KEY, 1, 0, 99)),
    ] {
        spoiled(what, healthy(), Kind::ForeignBytes, |it| key(it).tries[2].got = replay(body));
    }
    spoiled("another body came to the upstream", healthy(), Kind::ForeignBytes, |it| {
        key(it).executions[0].variant = 1;
        key(it).tries.iter_mut().for_each(|one| one.got = Got::Lost);
    });
    spoiled("another status", healthy(), Kind::ForeignBytes, |it| key(it).executions[0].status = 201);
    spoiled("a refusal with a key's bytes", healthy(), Kind::ForeignBytes, |it| {
        let Got::Whole(answer) = &mut key(it).tries[1].got else { panic!("a refusal") };
        answer.body = Body::Strange("chaos-0-0-1".into());
    });
    spoiled("mixed bytes", healthy(), Kind::StrangeAnswer, |it| {
        key(it).tries[2].got = replay(Body::Strange(String::new()));
    });
    spoiled("somebody else's first answer", healthy(), Kind::NotItsOwnRun, |it| {
        key(it).tries[3].got = made(1, false);
    });
    spoiled("replays of two runs", taken_over(Store::Redis, Rule::Takeover), Kind::ReplaysDiffer, |it| {
        key(it).tries.push(try_of(4, 3190, made(1, true)));
    });
}

#[test]
fn bytes_of_two_runs_are_strange() {
    let one = made_body(&mark(KEY, 1, 0), 100);
    let header = mark(KEY, 1, 0);
    assert_eq!(
        Body::read(&one, Some(&header)),
        Body::Made { key: KEY.into(), nth: 1, variant: 0, length: 100 }
    );
    let other = mark("chaos-0-0-1", 1, 0);
    let mut mixed = one.clone();
    mixed.extend(made_body(&other, 100));
    for (bytes, header) in [
        (mixed.as_slice(), Some(header.as_str())),
        (one.as_slice(), Some(other.as_str())),
        (one.as_slice(), None),
        (b"no such line\n".as_slice(), Some(header.as_str())),
    ] {
        assert!(matches!(Body::read(bytes, header), Body::Strange(_)), "{header:?}");
    }
    assert_eq!(Body::read(b"upstream connect error", None), Body::Own);
}

#[test]
fn audit_finds_a_key_that_does_not_stay_settled() {
    spoiled("in flight after a replay", healthy(), Kind::Unsettled, |it| {
        key(it).tries.push(try_of(5, 1300, refused(409, "in-flight", None)));
    });
    spoiled("failed after a replay", healthy(), Kind::Unsettled, |it| {
        key(it).executions[0].broken = true;
        key(it).tries.push(try_of(5, 1300, refused(424, "failed", Some("reset"))));
    });
    spoiled("a run after a replay", healthy(), Kind::RanAfterItsEnd, |it| {
        key(it).executions.push(run(2, 5, 1301));
    });
    spoiled("another body is answered after a replay", healthy(), Kind::Unsettled, |it| {
        key(it).tries.push(Try { variant: 1, ..try_of(5, 1300, made(1, true)) });
    });
}

#[test]
fn audit_finds_refusals_without_a_cause() {
    for (what, got) in [
        ("a mismatch with nothing", refused(422, "mismatch", None)),
        ("abandoned though nothing broke", refused(424, "abandoned", Some("abandoned"))),
        ("failed though the upstream was well", refused(424, "failed", Some("status"))),
        ("the client is there", refused(424, "failed", Some("client_gone"))),
        ("small enough to be kept", refused(409, "response-not-kept", None)),
        ("a refusal that nobody asked for", refused(400, "invalid-key", None)),
    ] {
        spoiled(what, healthy(), Kind::UnjustRefusal, |it| key(it).tries[2].got = got);
    }
    spoiled("a second attempt though nothing broke", healthy(), Kind::StrangeAnswer, |it| {
        key(it).executions[0].attempt = 2;
    });
}

#[test]
fn audit_finds_what_is_left_behind() {
    spoiled("a wedge", healthy(), Kind::Wedged, |it| key(it).wedged = Some(9000));
    spoiled("a crash", healthy(), Kind::Crash, |it| it.crashes.push("Envoy 0".into()));
    let quiet = Rest::default();
    spoiled("a claim in the gauge", healthy(), Kind::Metric, |it| {
        it.rests.push(Rest { in_flight: 1, ..quiet.clone() });
    });
    spoiled("a claim more than a VM that trapped had", healthy(), Kind::Metric, |it| {
        it.rests.push(Rest { traps: 1, in_flight: 8, in_flight_before: 7, ..quiet.clone() });
    });
    spoiled("a write in the outbox", healthy(), Kind::Metric, |it| {
        it.rests.push(Rest { outbox: 1, ..quiet.clone() });
    });
    spoiled("a host call that failed", healthy(), Kind::Metric, |it| {
        let anomalies = BTreeMap::from([("host_errors".to_owned(), 1)]);
        it.rests.push(Rest { anomalies, ..quiet.clone() });
    });
    spoiled("a leak", healthy(), Kind::Memory, |it| {
        let (rss_begin, rss_end) = (100 << 20, 200 << 20);
        it.lives.push(Life { envoy: 0, from: 0, until: 9000, rss_begin, rss_end, traps: 0 });
    });
}
