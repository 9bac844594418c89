//! What is wrong with a configuration, and what is merely worth saying about it.

use std::fmt;

use crate::sorted::repeats;

/// One mistake in a configuration.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ConfigError {
    /// Where it is, as in `rules[0].lock_ttl`; `configuration` for the whole.
    pub path: String,
    /// The value given and what is allowed.
    pub message: String,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path, self.message)
    }
}

impl std::error::Error for ConfigError {}

/// Every mistake in a configuration; never empty. Displayed as one line each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigErrors(pub Vec<ConfigError>);

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, error) in self.0.iter().enumerate() {
            if index > 0 {
                f.write_str("\n")?;
            }
            error.fmt(f)?;
        }
        Ok(())
    }
}

impl std::error::Error for ConfigErrors {}

/// Gathers errors and warnings while a configuration is read. The same one twice is one: what is wrong in
/// `defaults` is found again in every rule that takes it from there.
#[derive(Debug, Default)]
pub(super) struct Problems {
    errors: Vec<ConfigError>,
    warnings: Vec<String>,
}

impl Problems {
    pub(super) fn refuse(&mut self, path: &str, message: impl Into<String>) {
        let path = if path.is_empty() { "configuration" } else { path };
        self.errors.push(ConfigError { path: path.to_owned(), message: message.into() });
    }

    pub(super) fn warn(&mut self, path: &str, message: impl fmt::Display) {
        self.warnings.push(format!("{path}: {message}"));
    }

    /// The warnings, or the errors if there is any.
    pub(super) fn into_warnings(self) -> Result<Vec<String>, ConfigErrors> {
        if self.errors.is_empty() { Ok(once(self.warnings)) } else { Err(ConfigErrors(once(self.errors))) }
    }
}

/// Each once, where it stands first.
fn once<T: Ord>(all: Vec<T>) -> Vec<T> {
    let mut repeats = repeats(all.len(), &mut |a, b| all.get(a).cmp(&all.get(b))).into_iter().peekable();
    let first = |(at, item)| {
        let repeated = repeats.next_if(|(repeat, _)| *repeat == at).is_some();
        (!repeated).then_some(item)
    };
    all.into_iter().enumerate().filter_map(first).collect()
}
