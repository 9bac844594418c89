//! Time as the core sees it: a number that somebody else read off a clock.

use std::time::Duration;

/// A moment on the store's own clock, in milliseconds.
///
/// For shared data it is the process's monotonic clock, for Redis it is Redis's `TIME`. Moments of different
/// stores are never compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Timestamp(u64);

impl Timestamp {
    /// The moment `millis` milliseconds after the clock's zero.
    #[must_use]
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis)
    }

    /// Milliseconds since the clock's zero.
    #[must_use]
    pub const fn as_millis(self) -> u64 {
        self.0
    }

    /// This moment and `duration` more; the end of time at the most.
    #[must_use]
    pub fn after(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)))
    }

    /// How long ago `earlier` was; zero if it lies ahead.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0))
    }
}
