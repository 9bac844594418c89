//! The subcommands that read and change records in Redis.

pub mod forget;
pub mod inspect;
pub mod list;
pub mod resolve;
