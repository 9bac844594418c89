//! Owns the book that clients, upstream and storm write into while the storm is on.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use super::history::{Clock, Execution, Fault, Happened, KeyHistory, Millis, Rule, Try, TryId};

pub struct Ledger {
    pub clock: Clock,
    next_try: AtomicU64,
    keys: Mutex<BTreeMap<String, KeyHistory>>,
    faults: Mutex<Vec<Happened>>,
}

impl Ledger {
    pub fn new() -> Ledger {
        Ledger {
            clock: Clock::start(),
            next_try: AtomicU64::new(1),
            keys: Mutex::default(),
            faults: Mutex::default(),
        }
    }

    pub fn register(&self, key: &str, rule: Rule) {
        let history = KeyHistory { rule, executions: vec![], tries: vec![], wedged: None };
        assert!(self.keys().insert(key.to_owned(), history).is_none(), "{key} is not new");
    }

    pub fn next_try(&self) -> TryId {
        self.next_try.fetch_add(1, Ordering::Relaxed)
    }

    pub fn ran(&self, key: &str, execution: Execution) {
        self.key(key, |it| it.executions.push(execution));
    }

    pub fn answered(&self, key: &str, nth: usize) {
        let now = self.clock.now();
        self.key(key, |it| {
            if let Some(run) = it.executions.iter_mut().find(|run| run.nth == nth) {
                run.answered = Some(now);
            }
        });
    }

    pub fn tried(&self, key: &str, one: Try) {
        self.key(key, |it| it.tries.push(one));
    }

    pub fn wedged(&self, key: &str, after: Millis) {
        self.key(key, |it| it.wedged = Some(after));
    }

    pub fn happened(&self, fault: Fault, from: Millis) {
        let until = self.clock.now();
        self.faults.lock().unwrap().push(Happened { fault, from, until });
    }

    pub fn faults(&self) -> Vec<Happened> {
        self.faults.lock().unwrap().clone()
    }

    pub fn keys(&self) -> MutexGuard<'_, BTreeMap<String, KeyHistory>> {
        self.keys.lock().unwrap()
    }

    fn key(&self, key: &str, change: impl FnOnce(&mut KeyHistory)) {
        change(self.keys().get_mut(key).unwrap_or_else(|| panic!("{key} was not registered")));
    }
}
