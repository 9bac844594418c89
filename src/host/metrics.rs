//! The filter's metrics in Envoy: defined once per root, counted by id.

use super::hostcalls::{self, MetricKind};
use crate::metrics::{Counter, Gauge, Histogram};

const PREFIX: &str = "idempotency.";

/// The ids of the metrics of one root.
#[derive(Debug, Default)]
pub struct Metrics {
    counters: Vec<Option<u32>>,
    gauges: Vec<Option<u32>>,
    histograms: Vec<Option<u32>>,
}

impl Metrics {
    /// Defines them all. One that can't be defined is not counted.
    pub fn define() -> Self {
        let define = |kind, name: &str| hostcalls::define_metric(kind, &format!("{PREFIX}{name}")).ok();
        Self {
            counters: Counter::ALL.iter().map(|each| define(MetricKind::Counter, each.name())).collect(),
            gauges: Gauge::ALL.iter().map(|each| define(MetricKind::Gauge, each.name())).collect(),
            histograms: Histogram::ALL
                .iter()
                .map(|each| define(MetricKind::Histogram, each.name()))
                .collect(),
        }
    }

    /// Counts one.
    pub fn count(&self, counter: Counter) {
        self.count_many(counter, 1);
    }

    /// Counts `many`.
    pub fn count_many(&self, counter: Counter, many: u64) {
        let offset = i64::try_from(many).unwrap_or(i64::MAX);
        if let Some(Some(id)) = self.counters.get(counter.index())
            && offset > 0
        {
            // A metric that can't be counted is no reason to fail a request.
            let _ = hostcalls::increment_metric(*id, offset);
        }
    }

    /// Moves a gauge.
    pub fn shift(&self, gauge: Gauge, by: i64) {
        if let Some(Some(id)) = self.gauges.get(gauge.index())
            && by != 0
        {
            let _ = hostcalls::increment_metric(*id, by);
        }
    }

    /// Records a sample.
    pub fn record(&self, histogram: Histogram, value: u64) {
        if let Some(Some(id)) = self.histograms.get(histogram.index()) {
            let _ = hostcalls::record_metric(*id, value);
        }
    }
}
