//! What the exchanges of one worker share: the configuration, byte budgets, and what they learned about time.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use super::budget::Budget;
use crate::config::{Config, Rule};

/// Shared by every exchange of a worker. It lives in one thread, so cells do.
#[derive(Debug)]
pub struct Worker {
    /// The plugin configuration.
    pub config: Config,
    /// Bytes of response captures.
    pub captured: Rc<Budget>,
    /// Bytes of detached executions: their bodies, and the room for their responses.
    pub detached: Rc<Budget>,
    saw_body: Cell<bool>,
    waiters: Cell<u32>,
    usual_millis: Vec<Cell<u64>>,
}

const FIRST_USUAL_MILLIS: u64 = 1000;

impl Worker {
    /// A worker that has seen nothing yet.
    #[must_use]
    pub fn new(config: Config) -> Self {
        let usual_millis = config.rules.iter().map(|_| Cell::new(FIRST_USUAL_MILLIS)).collect();
        let captured = Budget::new(config.limits.captured_bytes);
        let detached = Budget::new(config.limits.detached_bytes);
        Self { config, captured, detached, saw_body: Cell::new(false), waiters: Cell::new(0), usual_millis }
    }

    /// Takes a place among the duplicates that wait; `None` when all are taken.
    #[must_use]
    pub fn begin_wait(self: &Rc<Self>) -> Option<WaiterPlace> {
        let waiters = self.waiters.get();
        if waiters >= self.config.limits.waiters {
            return None;
        }
        self.waiters.set(waiters.saturating_add(1));
        Some(WaiterPlace(Rc::clone(self)))
    }

    /// A body callback came while its request was held: `allow_on_headers_stop_iteration` is set.
    pub fn note_body_seen(&self) {
        self.saw_body.set(true);
    }

    /// Whether a body callback ever came while its request was held.
    #[must_use]
    pub fn has_seen_body(&self) -> bool {
        self.saw_body.get()
    }

    /// How long an execution under `rule` usually takes.
    #[must_use]
    pub fn usual_time(&self, rule: &Rule) -> Duration {
        Duration::from_millis(self.usual_cell(rule).map_or(FIRST_USUAL_MILLIS, Cell::get))
    }

    /// Learns from an execution that took `elapsed`: a smoothed mean of weight 1/8.
    pub fn learn_time(&self, rule: &Rule, elapsed: Duration) {
        if let Some(cell) = self.usual_cell(rule) {
            let sample = u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX / 8);
            cell.set(cell.get().saturating_mul(7).saturating_add(sample) / 8);
        }
    }

    fn usual_cell(&self, rule: &Rule) -> Option<&Cell<u64>> {
        let index = self.config.rules.iter().position(|candidate| std::ptr::eq(&**candidate, rule))?;
        self.usual_millis.get(index)
    }
}

/// A place among the duplicates that wait; given back when dropped.
#[derive(Debug)]
pub struct WaiterPlace(Rc<Worker>);

impl Drop for WaiterPlace {
    fn drop(&mut self) {
        self.0.waiters.set(self.0.waiters.get().saturating_sub(1));
    }
}
