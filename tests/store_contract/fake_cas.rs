//! Envoy's shared data as the table sees it, shared by any number of workers, with seams for races and faults.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::rc::Rc;

use idempotency::store::shared_data::cas::{Cas, CasError, Seen, Slot};

/// What a worker is about to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    Load,
    Swap,
}

type Hook = Box<dyn FnMut(Step, &str)>;

/// A handle on the one map; a clone is another worker's handle on the same map.
#[derive(Clone, Default)]
pub struct FakeCas {
    map: Rc<Map>,
    fault: Rc<Fault>,
}

#[derive(Default)]
struct Map {
    values: RefCell<BTreeMap<String, (Vec<u8>, u32)>>,
    last_cas: Cell<u32>,
    bytes: Cell<u64>,
    peak: Cell<u64>,
}

/// What goes wrong at this handle's steps.
#[derive(Default)]
struct Fault {
    before: RefCell<Option<Hook>>,
    steps: Cell<usize>,
    lost: RefCell<BTreeSet<usize>>,
    dies_at: Cell<Option<usize>>,
}

impl fmt::Debug for FakeCas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FakeCas({} keys)", self.keys())
    }
}

impl FakeCas {
    /// Another worker: the same map, without this handle's faults.
    pub fn another_worker(&self) -> Self {
        Self { map: Rc::clone(&self.map), fault: Rc::default() }
    }

    /// Runs before each step of this handle, whose own steps inside it are not hooked.
    pub fn before_each_step(&self, hook: impl FnMut(Step, &str) + 'static) {
        *self.fault.before.borrow_mut() = Some(Box::new(hook));
    }

    /// Counts this handle's steps from zero again, without faults.
    pub fn reset(&self) {
        *self.fault.before.borrow_mut() = None;
        self.fault.steps.set(0);
        self.fault.lost.borrow_mut().clear();
        self.fault.dies_at.set(None);
    }

    /// Steps since the last reset.
    pub fn steps(&self) -> usize {
        self.fault.steps.get()
    }

    /// That step, if it is a swap, is lost, as if another worker had written the same value.
    pub fn lose_at(&self, step: usize) {
        self.fault.lost.borrow_mut().insert(step);
    }

    /// From that step on nothing happens any more: the worker's VM trapped.
    pub fn die_at(&self, step: usize) {
        self.fault.dies_at.set(Some(step));
    }

    pub fn keys(&self) -> usize {
        self.map.values.borrow().len()
    }

    /// The sum of all values' sizes.
    pub fn bytes(&self) -> u64 {
        self.map.bytes.get()
    }

    /// The largest sum there ever was.
    pub fn peak_bytes(&self) -> u64 {
        self.map.peak.get()
    }

    pub fn names(&self) -> Vec<String> {
        self.map.values.borrow().keys().cloned().collect()
    }

    pub fn get(&self, name: &str) -> Option<Vec<u8>> {
        self.map.values.borrow().get(name).map(|(value, _)| value.clone())
    }

    /// Writes as somebody outside the table would.
    pub fn overwrite(&self, name: &str, value: &[u8]) {
        self.map.insert(name, value);
    }

    /// A step begins: says whether it is lost.
    fn begin(&self, step: Step, name: &str) -> Result<bool, CasError> {
        let number = self.fault.steps.get();
        self.fault.steps.set(number + 1);
        if self.fault.dies_at.get().is_some_and(|dies_at| number >= dies_at) {
            return Err(CasError::Host);
        }
        let hook = self.fault.before.borrow_mut().take();
        if let Some(mut hook) = hook {
            hook(step, name);
            *self.fault.before.borrow_mut() = Some(hook);
        }
        Ok(self.fault.lost.borrow().contains(&number))
    }
}

impl Map {
    fn insert(&self, name: &str, value: &[u8]) {
        self.last_cas.set(self.last_cas.get() + 1);
        let old = self.values.borrow_mut().insert(name.to_owned(), (value.to_vec(), self.last_cas.get()));
        let bytes = self.bytes.get() + value.len() as u64 - old.map_or(0, |(old, _)| old.len() as u64);
        self.bytes.set(bytes);
        self.peak.set(self.peak.get().max(bytes));
    }
}

impl Cas for FakeCas {
    fn load(&self, name: &str) -> Result<Slot, CasError> {
        self.begin(Step::Load, name)?;
        Ok(match self.map.values.borrow().get(name) {
            None => Slot::Absent,
            Some((value, cas)) if value.is_empty() => Slot::Emptied { cas: *cas },
            Some((value, cas)) => Slot::Present { bytes: value.clone(), cas: *cas },
        })
    }

    fn swap(&self, name: &str, seen: Seen, value: &[u8]) -> Result<(), CasError> {
        if self.begin(Step::Swap, name)? {
            if let Some(value) = self.get(name) {
                self.map.insert(name, &value);
            }
            return Err(CasError::Lost);
        }
        // As the host's binding passes it on; an absent name is inserted whatever the cas.
        let cas = match seen {
            Seen::Absent => u32::MAX,
            Seen::Version(cas) => cas,
        };
        if self.map.values.borrow().get(name).is_some_and(|(_, current)| *current != cas) {
            return Err(CasError::Lost);
        }
        self.map.insert(name, value);
        Ok(())
    }
}
