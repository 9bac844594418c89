//! Owns the verdict over a storm: an independent reading of the guarantees, with no knowledge of the filter's insides.
//!
//! Every run of the upstream after a key's first needs a licence of its own:
//!
//! | licence | what has to have happened between the two runs |
//! |---|---|
//! | released | the run before gave a status that means "not processed" |
//! | unknown | the run before failed in any way, under a rule that releases failures |
//! | taken over | its worker trapped (as far as can be told) or its Envoy was killed, or Redis was away for a good part of a lease; the lease is over; the upstream was told the attempt; and no client had seen the whole answer while the store was up |
//! | taken over untold | the same, but another try that was never forwarded took over first and gave its claim back, and with it the attempt (decision 4) |
//! | forgotten | embedded store only: its Envoy process ended |
//!
//! Under `on_abandoned: retain` there is no takeover, so on Redis nothing but a release licenses a second run.

use std::collections::BTreeMap;
use std::fmt;

use super::history::{
    Answer, Body, Execution, Fault, Got, History, KeyHistory, Life, Millis, Rest, Rule, Store, Try,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Licence {
    Released,
    Unknown,
    TakenOver,
    Untold,
    Forgotten,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// The upstream ran once more without a licence.
    RanTwice,
    /// The upstream ran though a client had been told how the key ended.
    RanAfterItsEnd,
    /// Bytes that no run for this key and body made.
    ForeignBytes,
    /// A first answer that is another try's.
    NotItsOwnRun,
    /// Two replays that differ.
    ReplaysDiffer,
    /// A key that was settled was answered otherwise later.
    Unsettled,
    /// A refusal for which there is no cause.
    UnjustRefusal,
    /// A status that nobody may give.
    StrangeAnswer,
    /// Only 409 or 503 for longer than a lease.
    Wedged,
    /// A gauge that is not back at zero, or a counter that only a bug moves.
    Metric,
    Memory,
    Crash,
}

#[derive(Clone, Debug)]
pub struct Finding {
    pub kind: Kind,
    pub what: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.kind, self.what)
    }
}

#[derive(Debug, Default)]
pub struct Verdict {
    pub findings: Vec<Finding>,
    pub licences: BTreeMap<Licence, usize>,
}

/// What a process may gain after its warm-up, beside what its store holds.
const RSS_SLACK: u64 = 64 << 20;
/// The default bound of what is kept of Redis in an Envoy.
const NEAR_CACHE: u64 = 32 << 20;
/// How long the filter waits for Redis before it lets a response's end go unwritten, and the noise of a busy machine.
const UNWRITTEN: Millis = 2500;

pub fn audit(history: &History) -> Verdict {
    let mut verdict = Verdict::default();
    for (name, key) in &history.keys {
        KeyAudit { history, name, key, verdict: &mut verdict }.run();
    }
    for crash in &history.crashes {
        verdict.find(Kind::Crash, crash.clone());
    }
    for rest in &history.rests {
        rest_is_quiet(rest, &mut verdict);
    }
    for life in &history.lives {
        memory_is_bounded(history, life, &mut verdict);
    }
    verdict
}

impl Verdict {
    fn find(&mut self, kind: Kind, what: String) {
        self.findings.push(Finding { kind, what });
    }
}

fn rest_is_quiet(rest: &Rest, verdict: &mut Verdict) {
    // What VMs that trapped had counted stays, but nothing is added to it once they trap no more.
    if rest.traps > 0 && rest.in_flight > rest.in_flight_before {
        let what = format!("Envoy {}: in_flight {} -> {}", rest.envoy, rest.in_flight_before, rest.in_flight);
        verdict.find(Kind::Metric, what);
    }
    if rest.traps == 0 && (rest.in_flight, rest.outbox) != (0, 0) {
        let what = format!("Envoy {}: in_flight {}, outbox {}", rest.envoy, rest.in_flight, rest.outbox);
        verdict.find(Kind::Metric, what);
    }
    for (name, count) in rest.anomalies.iter().filter(|(_, count)| **count > 0) {
        verdict.find(Kind::Metric, format!("Envoy {}: {name} {count}", rest.envoy));
    }
}

fn memory_is_bounded(history: &History, life: &Life, verdict: &mut Verdict) {
    let during = |run: &&Execution| (life.from..=life.until).contains(&run.start);
    let runs = history.keys.values().flat_map(|key| &key.executions).filter(during);
    // A record's body, its entry, and the host's own copy of both.
    let records: u64 = runs.map(|run| 2 * (run.length.min(history.largest_kept) as u64 + 256)).sum();
    let records = match history.store {
        Store::SharedData => records,
        Store::Redis => records.min(NEAR_CACHE),
    };
    let grown = life.rss_end.saturating_sub(life.rss_begin);
    if grown > RSS_SLACK + records {
        let what = format!(
            "Envoy {}: {} MiB more after {} s, with {} MiB of records and {} traps",
            life.envoy,
            grown >> 20,
            (life.until - life.from) / 1000,
            records >> 20,
            life.traps
        );
        verdict.find(Kind::Memory, what);
    }
}

/// How a key ended, as an answer tells it. What an answer says that is not replayed may not have been written.
#[derive(Clone, Debug, PartialEq, Eq)]
enum End {
    Replay(usize),
    NotKept,
    Failed(Option<String>),
}

struct KeyAudit<'a> {
    history: &'a History,
    name: &'a str,
    key: &'a KeyHistory,
    verdict: &'a mut Verdict,
}

impl KeyAudit<'_> {
    fn run(mut self) {
        let mut runs: Vec<&Execution> = self.key.executions.iter().collect();
        runs.sort_by_key(|run| (run.start, run.nth));
        for pair in runs.windows(2) {
            self.needs_a_licence(pair[0], pair[1]);
        }
        for run in &runs {
            self.run_is_as_asked(run);
            self.attempt_is_earned(run);
        }
        for one in &self.key.tries {
            match &one.got {
                Got::Whole(answer) => self.answer_is_just(one, answer),
                Got::Cut(body) => self.bytes_are_its_own(one, body, None),
                Got::Lost | Got::HungUp => {}
            }
        }
        self.settled_stays_settled();
        if let Some(after) = self.key.wedged {
            self.find(Kind::Wedged, format!("no answer but 409 and 503 for {after} ms after the storm"));
        }
    }

    fn find(&mut self, kind: Kind, what: String) {
        let mut what = format!("{} ({:?}): {what}", self.name, self.key.rule);
        if self.verdict.findings.len() < 5 {
            what.push_str(&self.story());
        }
        self.verdict.find(kind, what);
    }

    /// All that is known of the key, in the order of time.
    fn story(&self) -> String {
        let mut lines: Vec<(Millis, String)> = Vec::new();
        for run in &self.key.executions {
            lines.push((run.start, format!("{run:?}")));
        }
        for one in &self.key.tries {
            lines.push((one.sent, format!("{one:?}")));
        }
        let begin = lines.iter().map(|line| line.0).min().unwrap_or(0);
        let end = self.key.tries.iter().map(|one| one.ended).max().unwrap_or(0);
        for happened in self.history.faults.iter().filter(|it| it.until >= begin && it.from <= end) {
            lines.push((happened.from, format!("{happened:?}")));
        }
        lines.sort();
        lines.iter().map(|(at, line)| format!("\n    {at:>7} {line}")).collect()
    }

    fn needs_a_licence(&mut self, before: &Execution, next: &Execution) {
        // A run whose client had left before it began was on its way meanwhile: it may be the earlier one.
        let late = self.left_at(next).filter(|at| *at < next.start);
        let swapped = || self.licence(&Execution { start: late?, ..next.clone() }, before);
        match self.licence(before, next).or_else(swapped) {
            Some(licence) => *self.verdict.licences.entry(licence).or_default() += 1,
            None => {
                let what = format!("run {} after run {} has no licence", next.nth, before.nth);
                self.find(Kind::RanTwice, what);
            }
        }
    }

    /// When the client of the run left, if it did.
    fn left_at(&self, run: &Execution) -> Option<Millis> {
        let own = self.key.tries.iter().find(|one| one.id == run.by)?;
        matches!(own.got, Got::HungUp | Got::Lost).then_some(own.ended)
    }

    fn licence(&self, before: &Execution, next: &Execution) -> Option<Licence> {
        let own = self.key.tries.iter().find(|one| one.id == before.by);
        let heard = own.and_then(|own| match &own.got {
            Got::Whole(Answer { body: Body::Made { nth, .. }, .. }) if *nth == before.nth => Some(own.ended),
            Got::Whole(_) | Got::Cut(_) | Got::Lost | Got::HungUp => None,
        });
        let answered = !before.broken && before.answered.is_some_and(|at| at <= next.start);
        if answered && is_released(self.key.rule, before.status) {
            return Some(Licence::Released);
        }
        if self.key.rule == Rule::Atomic && heard.is_none() {
            return Some(Licence::Unknown);
        }
        if self.forgot(before.start, next.start) {
            return Some(Licence::Forgotten);
        }
        let own = own?;
        let lease_over = next.start >= own.sent + self.history.lock_ttl;
        let told = next.attempt > before.attempt;
        let written = heard.is_some_and(|at| self.redis_away(at.saturating_sub(UNWRITTEN), at) == 0);
        if self.key.rule.retains() || !lease_over || written {
            return None;
        }
        let between = |one: &&Try| {
            let forwarded = self.key.executions.iter().any(|run| run.by == one.id);
            !forwarded && one.id != next.by && one.ended >= own.sent && one.sent <= next.start
        };
        let given_back = self.key.tries.iter().filter(between).any(|one| match &one.got {
            Got::Whole(answer) => answer.is("store-unavailable"),
            Got::Cut(_) | Got::Lost | Got::HungUp => true,
        });
        if !told && !given_back {
            return None;
        }
        // An answer that came after the fault shows that it struck another worker.
        let died = self.history.faults.iter().any(|it| {
            let in_time = it.until >= own.sent && it.from <= next.start;
            kills(it.fault) == Some(own.envoy) && in_time && heard.is_none_or(|at| at <= it.until)
        });
        let away = self.redis_away(own.sent, next.start) >= self.history.lock_ttl / 3;
        (died || away).then_some(if told { Licence::TakenOver } else { Licence::Untold })
    }

    /// The upstream got what the try sent.
    fn run_is_as_asked(&mut self, run: &Execution) {
        let asked = |one: &Try| one.id == run.by && one.variant == run.variant && one.sent <= run.start;
        if !self.key.tries.iter().any(asked) {
            self.find(Kind::ForeignBytes, format!("nobody asked for {run:?}"));
        }
    }

    /// An attempt beyond the first is told only where something was abandoned.
    fn attempt_is_earned(&mut self, run: &Execution) {
        if run.attempt == 1 {
            return;
        }
        let begin = self.key.tries.iter().map(|one| one.sent).min().unwrap_or(0);
        if self.key.rule.retains() || !self.was_disturbed(begin, run.start) {
            self.find(Kind::StrangeAnswer, format!("run {} was told attempt {}", run.nth, run.attempt));
        }
    }

    fn answer_is_just(&mut self, one: &Try, answer: &Answer) {
        let Answer { status, replayed, problem, body } = answer;
        let Some((kind, reason)) = problem else {
            // Envoy's own: the upstream broke the connection, or a VM is being loaded anew.
            if *body == Body::Own && matches!(status, 503) && !replayed {
                return;
            }
            return self.bytes_are_its_own(one, body, Some(answer));
        };
        let others = || self.key.tries.iter().any(|it| it.variant != one.variant && it.sent <= one.ended);
        let begin = self.key.tries.iter().map(|one| one.sent).min().unwrap_or(0);
        let unheard = || self.key.tries.iter().any(|it| !matches!(it.got, Got::Whole(_)));
        let broken = || self.key.executions.iter().any(|run| run.broken);
        let just = match (status, kind.as_str()) {
            (409, "in-flight") => self.key.tries.iter().any(|it| it.id != one.id && it.sent <= one.ended),
            (409, "response-not-kept") => {
                self.key.executions.iter().any(|run| run.length > self.history.largest_kept)
            }
            (422, "mismatch") => others(),
            (424, "abandoned") => self.key.rule.retains() && self.was_disturbed(begin, one.ended),
            (424, "failed") => match reason.as_deref() {
                Some("status") => self.key.executions.iter().any(|run| run.status == 500),
                // The upstream may close a connection at the moment that Envoy picks it; a listener that goes cuts
                // what it executes detached.
                Some("reset") => true,
                Some("truncated") => broken() || unheard(),
                Some("client_gone") => unheard(),
                _ => false,
            },
            (503, "store-unavailable") => true,
            // The answer of a detached execution was cut off, or its listener was not there.
            (502, "failed") => self.key.rule == Rule::Detached && reason.as_deref() == Some("reset"),
            (503, "execution-unavailable") => self.key.rule == Rule::Detached,
            _ => false,
        };
        if !just {
            self.find(Kind::UnjustRefusal, format!("{answer:?}"));
        }
        if *body != Body::Own || *replayed {
            self.find(Kind::ForeignBytes, format!("{answer:?}"));
        }
    }

    /// `whole`: none for a response that broke off.
    fn bytes_are_its_own(&mut self, one: &Try, body: &Body, whole: Option<&Answer>) {
        let Body::Made { key, nth, variant, length } = body else {
            if whole.is_some() || matches!(body, Body::Strange(_)) {
                self.find(Kind::StrangeAnswer, format!("{one:?}"));
            }
            return;
        };
        let run = self.key.executions.iter().find(|run| run.nth == *nth && run.variant == *variant);
        let Some(run) = run.filter(|_| key == self.name && *variant == one.variant) else {
            return self.find(Kind::ForeignBytes, format!("{one:?}"));
        };
        let Some(answer) = whole else {
            if *length > run.length {
                self.find(Kind::ForeignBytes, format!("{one:?}"));
            }
            return;
        };
        if answer.status != run.status || *length != run.length || run.broken {
            self.find(Kind::ForeignBytes, format!("{one:?} is not what {run:?} gave"));
        } else if answer.replayed && is_released(self.key.rule, run.status) {
            self.find(Kind::UnjustRefusal, format!("a status that is not kept was replayed: {one:?}"));
        } else if !answer.replayed && run.by != one.id {
            self.find(Kind::NotItsOwnRun, format!("{one:?} got the first answer of {run:?}"));
        }
    }

    /// Once a client was told how the key ended, everybody is told the same, and nothing runs.
    fn settled_stays_settled(&mut self) {
        let key = self.key;
        let ends: Vec<(&Try, End)> = key.tries.iter().filter_map(|one| Some((one, end_of(one)?))).collect();
        for (at, (first, end)) in ends.iter().enumerate() {
            for run in key.executions.iter().filter(|run| run.start > first.ended) {
                let on_its_way = self.left_at(run).is_some_and(|at| at <= first.ended);
                if !on_its_way && !self.forgot(first.sent, run.start) {
                    self.find(Kind::RanAfterItsEnd, format!("run {} after {end:?}", run.nth));
                }
            }
            for (other, also) in ends.iter().skip(at + 1) {
                let both = first.sent.min(other.sent)..first.ended.max(other.ended);
                let replays = matches!((end, also), (End::Replay(_), End::Replay(_)));
                let ordered = other.sent > first.ended || first.sent > other.ended;
                if end != also && (replays || ordered) && !self.forgot(both.start, both.end) {
                    let kind = if replays { Kind::ReplaysDiffer } else { Kind::Unsettled };
                    self.find(kind, format!("{end:?}, and {also:?}"));
                }
            }
            for later in key.tries.iter().filter(|later| later.sent > first.ended) {
                let Got::Whole(answer) = &later.got else { continue };
                let undone = match later.variant == first.variant {
                    true => answer.is("in-flight") || answer.is("abandoned") || answer.is("mismatch"),
                    false => answer.problem.is_none() && answer.body != Body::Own,
                };
                if undone && !self.forgot(first.sent, later.ended) {
                    self.find(Kind::Unsettled, format!("{end:?}, later {answer:?}"));
                }
            }
        }
    }

    /// The embedded store's process ended in that time.
    fn forgot(&self, from: Millis, until: Millis) -> bool {
        let ended = |it: &Fault| matches!(it, Fault::EnvoyKilled(_));
        self.history.store == Store::SharedData
            && self.history.faults.iter().any(|it| ended(&it.fault) && it.until >= from && it.from <= until)
    }

    /// Something that can lose a claim happened in that time.
    fn was_disturbed(&self, from: Millis, until: Millis) -> bool {
        self.history.faults.iter().any(|it| {
            let loses =
                kills(it.fault).is_some() || matches!(it.fault, Fault::RedisPaused | Fault::RedisRestarted);
            loses && it.until >= from && it.from <= until
        })
    }

    /// How much of that time Redis did not answer.
    fn redis_away(&self, from: Millis, until: Millis) -> Millis {
        let away = self
            .history
            .faults
            .iter()
            .filter(|it| matches!(it.fault, Fault::RedisPaused | Fault::RedisRestarted));
        away.map(|it| it.until.min(until).saturating_sub(it.from.max(from))).sum()
    }
}

/// The Envoy whose claims it may lose.
fn kills(fault: Fault) -> Option<usize> {
    match fault {
        Fault::EnvoyKilled(envoy) | Fault::TrapAtRequest(envoy) | Fault::TrapAtResponse(envoy) => Some(envoy),
        Fault::Reloaded(_) | Fault::RedisPaused | Fault::RedisRestarted => None,
    }
}

fn is_released(rule: Rule, status: u16) -> bool {
    matches!(status, 429 | 503) || rule == Rule::Atomic && status == 500
}

fn end_of(one: &Try) -> Option<End> {
    let Got::Whole(answer) = &one.got else { return None };
    match (&answer.body, &answer.problem) {
        (Body::Made { nth, .. }, None) if answer.replayed => Some(End::Replay(*nth)),
        (_, Some((kind, _))) if kind == "response-not-kept" => Some(End::NotKept),
        (_, Some((kind, reason))) if kind == "failed" && answer.status == 424 => {
            Some(End::Failed(reason.clone()))
        }
        _ => None,
    }
}
