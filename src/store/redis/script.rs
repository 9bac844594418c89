//! The five transitions of a record as Lua, and the two ways to call them.

/// A script: what it says, and the name Redis knows it by once it has run it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Script {
    /// Its text, for EVAL.
    pub source: &'static str,
    /// SHA-1 of the text in hexadecimal, for EVALSHA. A wrong one costs an EVAL each time, and nothing else.
    pub sha1: &'static str,
}

/// How a script is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    /// EVALSHA: by name.
    Name,
    /// EVAL: with its text, where Redis does not know the name.
    Text,
}

/// One script for each operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scripts {
    /// Makes a claim.
    pub claim: Script,
    /// Extends a lease.
    pub renew: Script,
    /// Keeps a response.
    pub complete: Script,
    /// Keeps a failure.
    pub fail: Script,
    /// Gives a claim back.
    pub release: Script,
}

macro_rules! script {
    ($file:literal, $sha1:literal) => {
        Script {
            source: concat!(include_str!("scripts/record.lua"), include_str!(concat!("scripts/", $file))),
            sha1: $sha1,
        }
    };
}

/// The scripts of this version.
///
/// `tests/redis_store` asks a real Redis for the names and prints the right ones when a script was changed.
pub const SCRIPTS: Scripts = Scripts {
    claim: script!("claim.lua", "4195e89495bbcf31559f34d46e952186ed8c1fbc"),
    renew: script!("renew.lua", "5c0e291a46069277713c368b88188850674d821c"),
    complete: script!("complete.lua", "7326d905e7ba1027212fcbe64ec091fb71148b92"),
    fail: script!("fail.lua", "4e9bf08103cec6bae6eebc3714f673cd34af78bd"),
    release: script!("release.lua", "8459ccc6493802adf7286156629f9802393cb586"),
};

impl Script {
    /// The command word, and how the script is named behind it.
    #[must_use]
    pub const fn called(&self, call: Call) -> (&'static str, &'static str) {
        match call {
            Call::Name => ("EVALSHA", self.sha1),
            Call::Text => ("EVAL", self.source),
        }
    }
}
