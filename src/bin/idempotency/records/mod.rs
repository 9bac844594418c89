//! The subcommands that read and change records in Redis.
//!
//! A change is fenced like the filter's own writes: one script compares the record with the one that was shown and
//! writes in the same step. Reading takes plain commands, so a user of Redis who may only read can `inspect` and `list`.

mod change;
mod confirm;
mod link;
mod record;
mod show;
mod target;

pub mod forget;
pub mod inspect;
pub mod list;
pub mod resolve;
