//! The seam to a map of versioned values: Envoy's shared data, or a fake of it.

/// What is under a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Slot {
    /// Never written.
    Absent,
    /// Written, and empty: the host cannot delete.
    Emptied {
        /// The version seen.
        cas: u32,
    },
    /// A value.
    Present {
        /// The value.
        bytes: Vec<u8>,
        /// The version seen.
        cas: u32,
    },
}

/// The version a [`Cas::swap`] builds on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seen {
    /// The name was never written.
    Absent,
    /// This version.
    Version(u32),
}

impl Slot {
    /// The version that was seen.
    #[must_use]
    pub const fn seen(&self) -> Seen {
        match self {
            Self::Absent => Seen::Absent,
            Self::Emptied { cas } | Self::Present { cas, .. } => Seen::Version(*cas),
        }
    }

    /// The value; empty where there is none.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        match self {
            Self::Absent | Self::Emptied { .. } => &[],
            Self::Present { bytes, .. } => bytes,
        }
    }
}

/// Why a [`Cas`] call did nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CasError {
    /// Somebody wrote since: read again.
    Lost,
    /// The host refused.
    Host,
}

/// A map of versioned values with compare-and-swap; the host can neither delete nor expire.
pub trait Cas {
    /// Reads a name.
    ///
    /// # Errors
    /// [`CasError::Host`].
    fn load(&self, name: &str) -> Result<Slot, CasError>;

    /// Writes a name if nobody wrote it since `seen`.
    ///
    /// The host's `cas = None` overwrites unconditionally; no implementation ever passes it.
    ///
    /// # Errors
    /// [`CasError::Lost`] when somebody did; [`CasError::Host`].
    fn swap(&self, name: &str, seen: Seen, value: &[u8]) -> Result<(), CasError>;
}
