//! Subjects that take turns, round after round; what counts are medians, and their ratios within one run.

use std::time::Duration;

use serde_json::{Value, json};

use crate::Fallible;
use crate::load::{Sample, Setting, Subject};

/// How long, and how often.
#[derive(Debug, Clone, Copy)]
pub struct Effort {
    pub rounds: u32,
    pub time: Duration,
}

/// Every subject under one setting, as medians over the rounds.
pub struct Measured {
    pub setting: Setting,
    rows: Vec<(Subject, Sample)>,
}

/// Measures all subjects under one setting.
pub fn take_turns(subjects: &[Subject], setting: Setting, effort: Effort) -> Fallible<Measured> {
    println!(
        "\n{} worker(s), {} connection(s), bodies of {} B",
        setting.workers, setting.connections, setting.body
    );
    let mut samples: Vec<Vec<Sample>> = subjects.iter().map(|_| Vec::new()).collect();
    for subject in subjects {
        subject.prepare(setting.body)?;
        // Warms up.
        subject.run(setting, Duration::from_secs(1))?;
    }
    for _ in 0..effort.rounds {
        for (subject, samples) in subjects.iter().zip(&mut samples) {
            samples.push(subject.run(setting, effort.time)?);
        }
    }
    let rows = subjects.iter().cloned().zip(samples.iter().map(|samples| medians(samples))).collect();
    let measured = Measured { setting, rows };
    print!("{}", measured.table());
    Ok(measured)
}

fn medians(samples: &[Sample]) -> Sample {
    let middle = |part: fn(&Sample) -> f64| median(samples.iter().map(part).collect());
    Sample {
        requests: middle(|sample| sample.requests),
        rate: middle(|sample| sample.rate),
        p50: middle(|sample| sample.p50),
        p99: middle(|sample| sample.p99),
        cpu: middle(|sample| sample.cpu),
    }
}

/// The middle one; of an even number the upper of the two.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

impl Measured {
    /// A subject's medians.
    pub fn of(&self, name: &str) -> Option<&Sample> {
        self.rows.iter().find(|(subject, _)| subject.name == name).map(|(_, sample)| sample)
    }

    fn share(&self, subject: &Subject) -> f64 {
        let of = |name| self.of(name).map_or(f64::NAN, |sample| sample.rate);
        of(&subject.name) / of(&subject.against)
    }

    /// For the screen.
    fn table(&self) -> String {
        let mut text = format!(
            "  {:<28} {:>10} {:>9} {:>9} {:>8}   {}\n",
            "", "requests/s", "p50 µs", "p99 µs", "cpu µs", "share of"
        );
        for (subject, sample) in &self.rows {
            text += &format!(
                "  {:<28} {:>10.0} {:>9.0} {:>9.0} {:>8.0}   {:.2} of {}\n",
                subject.name,
                sample.rate,
                sample.p50,
                sample.p99,
                sample.cpu,
                self.share(subject),
                subject.against
            );
        }
        text
    }

    pub fn json(&self) -> Value {
        let rows: Vec<Value> = self
            .rows
            .iter()
            .map(|(subject, sample)| {
                json!({
                    "name": subject.name, "requests_per_second": sample.rate.round(),
                    "p50_us": sample.p50, "p99_us": sample.p99, "cpu_us": round(sample.cpu, 1),
                    "share": round(self.share(subject), 3), "share_of": subject.against,
                })
            })
            .collect();
        json!({
            "workers": self.setting.workers, "connections": self.setting.connections, "body_bytes": self.setting.body,
            "subjects": rows,
        })
    }
}

/// To so many places.
pub fn round(value: f64, places: i32) -> f64 {
    let factor = 10f64.powi(places);
    (value * factor).round() / factor
}
