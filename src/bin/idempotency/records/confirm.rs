//! The question before a change.

use std::io::{self, IsTerminal as _, Write as _};

use crate::exit::Failure;

/// Asks on standard error, unless `yes` has answered already. Only the whole word is a yes.
pub fn confirm(question: &str, yes: bool) -> Result<(), Failure> {
    if yes {
        return Ok(());
    }
    if !io::stdin().is_terminal() {
        return Err(Failure::unconfirmed(
            "standard input is no terminal, so nobody can confirm: --yes says that nobody needs to. Nothing was changed",
        ));
    }
    let mut stderr = io::stderr();
    let _ = write!(stderr, "{question} Type yes: ").and_then(|()| stderr.flush());
    let mut answer = String::new();
    let _ = io::stdin().read_line(&mut answer);
    if answer.trim() == "yes" {
        return Ok(());
    }
    Err(Failure::unconfirmed("not confirmed. Nothing was changed"))
}
