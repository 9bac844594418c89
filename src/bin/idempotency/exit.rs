//! How the command ends: one code for each thing a script may want to tell apart.

use std::fmt;
use std::process::ExitCode;

/// What `--help` says of the codes; docs/command.md has the same.
pub const HELP: &str = "Exit codes:\n  \
    0  done, nothing to object to\n  \
    1  done, and there are findings: a wrong configuration, a record that isn't there\n  \
    2  wrong usage: an unknown argument, a file that can't be read\n  \
    3  the store can't be reached, or didn't answer\n  \
    4  refused: what was asked for would be unsafe, and nothing was changed\n  \
    5  not confirmed: nobody said yes, and nothing was changed\n  \
    6  changed meanwhile: the record is not the one that was shown, and nothing was changed";

/// A code of [`HELP`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    Ok = 0,
    Findings = 1,
    Usage = 2,
    StoreUnreachable = 3,
    Refused = 4,
    Unconfirmed = 5,
    Changed = 6,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// Why a subcommand could not do what it was asked for.
#[derive(Debug)]
pub struct Failure {
    pub exit: Exit,
    pub message: String,
}

impl Failure {
    pub fn usage(message: impl Into<String>) -> Self {
        Self { exit: Exit::Usage, message: message.into() }
    }

    pub fn store(message: impl Into<String>) -> Self {
        Self { exit: Exit::StoreUnreachable, message: message.into() }
    }

    pub fn refused(message: impl Into<String>) -> Self {
        Self { exit: Exit::Refused, message: message.into() }
    }

    pub fn unconfirmed(message: impl Into<String>) -> Self {
        Self { exit: Exit::Unconfirmed, message: message.into() }
    }

    pub fn changed(message: impl Into<String>) -> Self {
        Self { exit: Exit::Changed, message: message.into() }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}
