//! What the command prints: text for people, JSON for programs; colour only where it is read by people.

use std::io::{self, Write};

use anstream::{AutoStream, ColorChoice};
use anstyle::{AnsiColor, Style};
use clap::ValueEnum;

use crate::exit::{Exit, Failure};

/// When to colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Color {
    /// Where standard output is a terminal and NO_COLOR is not set.
    Auto,
    Always,
    Never,
}

pub const ERROR: Style = AnsiColor::Red.on_default().bold();
pub const WARNING: Style = AnsiColor::Yellow.on_default().bold();
pub const GOOD: Style = AnsiColor::Green.on_default().bold();
pub const STRONG: Style = Style::new().bold();
pub const DIM: Style = Style::new().dimmed();

/// Where a subcommand prints, and how.
#[derive(Debug)]
pub struct Output {
    pub json: bool,
    color: ColorChoice,
}

impl Output {
    pub fn new(json: bool, color: Color) -> Self {
        let color = match color {
            Color::Auto => ColorChoice::Auto,
            Color::Always => ColorChoice::Always,
            Color::Never => ColorChoice::Never,
        };
        Self { json, color }
    }

    /// Standard output. Escapes written to it are removed where there is to be no colour.
    pub fn stdout(&self) -> impl Write {
        AutoStream::new(io::stdout(), self.color)
    }

    /// Prints `value` as JSON, indented.
    pub fn print_json(&self, value: &serde_json::Value) {
        self.print(&format!("{value:#}\n"));
    }

    /// Prints `text`; a reader who left (`| head`) is no failure.
    pub fn print(&self, text: &str) {
        let mut stdout = self.stdout();
        let _ = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
    }

    /// Reports a failure and gives its code.
    pub fn failure(&self, failure: &Failure) -> Exit {
        if self.json {
            self.print_json(&serde_json::json!({ "error": failure.message }));
        } else {
            let mut stderr = AutoStream::new(io::stderr(), self.color);
            let _ = writeln!(stderr, "{ERROR}error:{ERROR:#} {failure}");
        }
        failure.exit
    }
}
