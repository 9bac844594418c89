//! Owns the table that a storm ends in.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::audit::{Kind, Licence, Verdict};
use super::history::{Answer, Body, Execution, Fault, Got, History};

/// Counts by name, in the order of the names.
pub type Counts = BTreeMap<&'static str, usize>;

#[derive(Debug, Default)]
pub struct Summary {
    pub faults: Counts,
    pub tries: Counts,
    pub answers: Counts,
    pub keys: usize,
    pub executions: usize,
    pub attempts_beyond_first: usize,
    /// Runs that began while the run before was still going on.
    pub overlapping: usize,
}

impl Summary {
    pub fn of(history: &History) -> Summary {
        let mut summary = Summary { keys: history.keys.len(), ..Summary::default() };
        for it in &history.faults {
            let name = match it.fault {
                Fault::EnvoyKilled(_) => "envoy killed and restarted",
                Fault::TrapAtRequest(_) => "vm trapped at a request",
                Fault::TrapAtResponse(_) => "vm trapped at a response",
                Fault::Reloaded(_) => "listener reloaded",
                Fault::RedisPaused => "redis paused",
                Fault::RedisRestarted => "redis killed and restarted",
            };
            *summary.faults.entry(name).or_default() += 1;
        }
        for key in history.keys.values() {
            summary.executions += key.executions.len();
            summary.attempts_beyond_first += key.executions.iter().filter(|run| run.attempt > 1).count();
            let overlaps = |pair: &&[Execution]| pair[0].answered.is_some_and(|at| at > pair[1].start);
            summary.overlapping += key.executions.windows(2).filter(overlaps).count();
            for one in &key.tries {
                let name = match &one.got {
                    Got::Whole(answer) => {
                        *summary.answers.entry(answer_name(answer)).or_default() += 1;
                        "answered"
                    }
                    Got::Cut(_) => "cut off",
                    Got::Lost => "connection lost",
                    Got::HungUp => "client hung up",
                };
                *summary.tries.entry(name).or_default() += 1;
            }
        }
        summary
    }

    pub fn fault(&self, name: &str) -> usize {
        self.faults.get(name).copied().unwrap_or(0)
    }

    pub fn answer(&self, name: &str) -> usize {
        self.answers.get(name).copied().unwrap_or(0)
    }
}

fn answer_name(answer: &Answer) -> &'static str {
    match &answer.problem {
        Some((kind, _)) => match kind.as_str() {
            "in-flight" => "409 in-flight",
            "response-not-kept" => "409 response-not-kept",
            "mismatch" => "422 mismatch",
            "failed" => "424 failed",
            "abandoned" => "424 abandoned",
            "store-unavailable" => "503 store-unavailable",
            _ => "other refusals",
        },
        None if answer.replayed => "replayed",
        None if matches!(answer.body, Body::Made { .. }) => "first answers",
        None => "Envoy's own 503",
    }
}

pub fn table(title: &str, history: &History, summary: &Summary, verdict: &Verdict) -> String {
    let mut text = format!("\n{title}\n");
    let mut section = |name: &str, lines: &mut dyn Iterator<Item = (String, String)>| {
        let mut first = true;
        for (what, count) in lines {
            let _ = writeln!(text, "  {:<10} {what:<42} {count:>9}", if first { name } else { "" });
            first = false;
        }
    };
    let counts = |counts: &Counts| {
        counts.iter().map(|(name, count)| ((*name).to_owned(), count.to_string())).collect::<Vec<_>>()
    };
    section("broken", &mut counts(&summary.faults).into_iter());
    section(
        "asked",
        &mut [("keys".to_owned(), summary.keys.to_string())].into_iter().chain(counts(&summary.tries)),
    );
    section("answers", &mut counts(&summary.answers).into_iter());
    section(
        "upstream",
        &mut [
            ("runs".to_owned(), summary.executions.to_string()),
            ("runs told an attempt beyond the first".to_owned(), summary.attempts_beyond_first.to_string()),
            ("runs beside one that was still alive".to_owned(), summary.overlapping.to_string()),
        ]
        .into_iter(),
    );
    section(
        "licences",
        &mut [
            (Licence::Released, "released: a status said \"not processed\""),
            (Licence::Unknown, "unknown: the rule releases failures"),
            (Licence::TakenOver, "taken over after the lease"),
            (Licence::Untold, "the same, attempt given back (decision 4)"),
            (Licence::Forgotten, "forgotten with the Envoy process"),
        ]
        .into_iter()
        .map(|(licence, name)| {
            (name.to_owned(), verdict.licences.get(&licence).copied().unwrap_or(0).to_string())
        }),
    );
    section(
        "memory",
        &mut history.lives.iter().map(|life| {
            let what =
                format!("Envoy {}, {} s, {} traps", life.envoy, (life.until - life.from) / 1000, life.traps);
            (what, format!("{} -> {} MiB", life.rss_begin >> 20, life.rss_end >> 20))
        }),
    );
    section(
        "at rest",
        &mut history.rests.iter().map(|rest| {
            let what = format!("Envoy {}, {} traps in its life: in_flight, outbox", rest.envoy, rest.traps);
            (what, format!("{}, {}", rest.in_flight, rest.outbox))
        }),
    );
    let mut kinds: BTreeMap<Kind, usize> = BTreeMap::new();
    for finding in &verdict.findings {
        *kinds.entry(finding.kind).or_default() += 1;
    }
    section(
        "found",
        &mut std::iter::once(("findings".to_owned(), verdict.findings.len().to_string()))
            .chain(kinds.into_iter().map(|(kind, count)| (format!("{kind:?}"), count.to_string()))),
    );
    text
}
