//! The table on the screen and the JSON in `bench/results/`.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::envoy::Variant;
use crate::load::Sample;
use crate::{Fallible, Setting};

/// Every variant under one setting, as medians over the rounds.
pub struct Measured {
    setting: Setting,
    rows: Vec<(Variant, Sample)>,
}

impl Measured {
    /// `samples` are those of [`Variant::ALL`], in its order.
    pub fn new(setting: Setting, samples: Vec<Vec<Sample>>) -> Self {
        let middle = |samples: &[Sample], part: fn(&Sample) -> f64| {
            let mut values: Vec<f64> = samples.iter().map(part).collect();
            values.sort_by(f64::total_cmp);
            values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
        };
        let rows = Variant::ALL
            .into_iter()
            .zip(samples)
            .map(|(variant, samples)| {
                let sample = Sample {
                    rate: middle(&samples, |sample| sample.rate),
                    p50: middle(&samples, |sample| sample.p50),
                    p99: middle(&samples, |sample| sample.p99),
                };
                (variant, sample)
            })
            .collect();
        Self { setting, rows }
    }

    fn of(&self, variant: Variant) -> Option<&Sample> {
        self.rows.iter().find(|(candidate, _)| *candidate == variant).map(|(_, sample)| sample)
    }

    fn share(&self, variant: Variant) -> f64 {
        let of = |variant| self.of(variant).map_or(f64::NAN, |sample| sample.rate);
        of(variant) / of(variant.against())
    }

    /// For the screen.
    pub fn table(&self) -> String {
        let mut text =
            format!("  {:<22} {:>10} {:>9} {:>9}   {}\n", "", "requests/s", "p50 µs", "p99 µs", "share of");
        for (variant, sample) in &self.rows {
            text += &format!(
                "  {:<22} {:>10.0} {:>9.0} {:>9.0}   {:.2} of {}\n",
                variant.name(),
                sample.rate,
                sample.p50,
                sample.p99,
                self.share(*variant),
                variant.against().name()
            );
        }
        text
    }

    fn json(&self) -> Value {
        let rows: Vec<Value> = self
            .rows
            .iter()
            .map(|(variant, sample)| {
                json!({
                    "variant": variant.name(), "requests_per_second": sample.rate.round(),
                    "p50_us": sample.p50, "p99_us": sample.p99,
                    "share": (self.share(*variant) * 1000.0).round() / 1000.0, "share_of": variant.against().name(),
                })
            })
            .collect();
        json!({
            "workers": self.setting.workers, "connections": self.setting.connections, "body_bytes": self.setting.body,
            "variants": rows,
        })
    }
}

/// A whole run.
pub struct Report {
    rounds: u32,
    seconds: u32,
    measured: Vec<Measured>,
}

impl Report {
    /// Nothing measured yet.
    pub const fn new(rounds: u32, seconds: u32) -> Self {
        Self { rounds, seconds, measured: Vec::new() }
    }

    /// One setting more.
    pub fn add(&mut self, measured: Measured) {
        self.measured.push(measured);
    }

    /// Writes the JSON.
    pub fn write(&self, folder: &Path) -> Fallible<PathBuf> {
        let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let cpu = cpu.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or("unknown");
        let cores = std::thread::available_parallelism().map_or(0, usize::from);
        let report = json!({
            "rounds": self.rounds, "seconds_each": self.seconds, "cores": cores,
            "cpu": cpu.trim_start_matches([' ', '\t', ':']),
            "settings": self.measured.iter().map(Measured::json).collect::<Vec<_>>(),
        });
        fs::create_dir_all(folder)?;
        let file = folder.join("latest.json");
        fs::write(&file, format!("{report:#}\n"))?;
        Ok(file)
    }
}
