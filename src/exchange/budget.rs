//! Bounds of one worker's memory, shared by its exchanges.

use std::cell::Cell;
use std::rc::Rc;

/// So many bytes, of which exchanges take their part.
#[derive(Debug)]
pub struct Budget {
    limit: u64,
    taken: Cell<u64>,
}

impl Budget {
    /// A budget of `limit` bytes, none taken.
    #[must_use]
    pub fn new(limit: u64) -> Rc<Self> {
        Rc::new(Self { limit, taken: Cell::new(0) })
    }

    /// Bytes in use.
    #[must_use]
    pub fn taken(&self) -> u64 {
        self.taken.get()
    }

    /// Takes `bytes`; `None` when there is no room.
    #[must_use]
    pub fn reserve(self: &Rc<Self>, bytes: u64) -> Option<Reservation> {
        let mut reservation = Reservation { budget: Rc::clone(self), bytes: 0 };
        reservation.grow(bytes).then_some(reservation)
    }
}

/// A part of a budget; given back when dropped.
#[derive(Debug)]
pub struct Reservation {
    budget: Rc<Budget>,
    bytes: u64,
}

impl Reservation {
    /// Takes `bytes` more; `false` and nothing taken when there is no room.
    pub fn grow(&mut self, bytes: u64) -> bool {
        let taken = self.budget.taken.get().saturating_add(bytes);
        if taken > self.budget.limit {
            return false;
        }
        self.budget.taken.set(taken);
        self.bytes = self.bytes.saturating_add(bytes);
        true
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.budget.taken.set(self.budget.taken.get().saturating_sub(self.bytes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_taken_comes_back_and_never_exceeds_the_limit() {
        let budget = Budget::new(100);
        let mut first = budget.reserve(60).unwrap();
        assert!(budget.reserve(41).is_none());
        let second = budget.reserve(40).unwrap();
        assert!(!first.grow(1));
        assert_eq!((budget.taken(), first.bytes), (100, 60));
        drop(second);
        assert!(first.grow(40));
        drop(first);
        assert_eq!(budget.taken(), 0);
        assert!(budget.reserve(u64::MAX).is_none());
    }
}
