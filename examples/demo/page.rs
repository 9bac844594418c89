//! How the story looks: one block per request, and a mark that says whether it went as told.

use std::io::IsTerminal as _;

use serde_json::Value;

use crate::client::{Answer, Call};

/// Headers worth reading.
const SHOWN: [&str; 4] = ["location", "idempotent-replayed", "x-idempotency-refusal", "retry-after"];

/// The story's output.
pub struct Page {
    colour: bool,
    chapters: u32,
    differences: Vec<String>,
}

impl Page {
    /// Coloured on a terminal, unless NO_COLOR is set.
    pub fn new() -> Self {
        let colour = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
        Self { colour, chapters: 0, differences: Vec::new() }
    }

    /// A plain line.
    pub fn say(&self, text: &str) {
        println!("{text}");
    }

    /// A new part of the story.
    pub fn chapter(&mut self, title: &str) {
        self.chapters += 1;
        println!("\n{}", self.paint("1", &format!("{:>2}  {title}", self.chapters)));
    }

    /// What is sent; `times` tells how often.
    pub fn request(&self, call: &Call, times: usize) {
        let key = call.key.unwrap_or("(none)");
        let times = if times > 1 { format!("   × {times}") } else { String::new() };
        println!(
            "    > POST {path:<28} key {key:<12} account {account:<7} {body}{times}",
            path = call.path,
            account = call.account,
            body = call.body
        );
    }

    /// What came back.
    pub fn answer(&self, answer: &Answer) {
        self.answers("", answer);
    }

    /// What came back, with a count before it.
    pub fn answers(&self, count: &str, answer: &Answer) {
        let headers: Vec<String> = SHOWN
            .iter()
            .filter_map(|name| Some(format!("{name}: {}", answer.message.header(name)?)))
            .collect();
        let tint = if answer.status < 400 { "32" } else { "33" };
        println!(
            "    < {count}{status}  {headers:<53}  {body}",
            status = self.paint(tint, &answer.status.to_string()),
            headers = headers.join("  "),
            body = summary(&answer.message.body)
        );
    }

    /// What happened instead of an answer.
    pub fn event(&self, text: &str) {
        println!("    < {text}");
    }

    /// Whether a block went as told: its count, or every difference.
    pub fn verdict(&mut self, count: &str, differences: &[String]) {
        if differences.is_empty() {
            println!("    {} {count}", self.paint("32", "✓"));
            return;
        }
        println!("    {} {count}", self.paint("31", "✗"));
        for difference in differences {
            println!("      {}", self.paint("31", difference));
            self.differences.push(format!("{}: {difference}", self.chapters));
        }
    }

    /// The story could not be told to its end.
    pub fn fail(&mut self, why: &str) {
        println!("\n{} {why}", self.paint("31", "✗"));
    }

    /// The end; whether everything went as told.
    pub fn conclude(&self, counters: &[(String, u64)]) -> bool {
        let counters: Vec<String> = counters.iter().map(|(name, value)| format!("{name} {value}")).collect();
        println!("\nThe filter counted: {}.", counters.join(", "));
        if self.differences.is_empty() {
            println!("{}", self.paint("32", "Every answer and every count was as told."));
            return true;
        }
        println!("{}", self.paint("31", "Not as told:"));
        for difference in &self.differences {
            println!("  chapter {difference}");
        }
        false
    }

    fn paint(&self, code: &str, text: &str) -> String {
        if self.colour { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }
}

/// A problem's title and reason, or the body itself.
fn summary(body: &[u8]) -> String {
    let text = String::from_utf8_lossy(body);
    let problem: Value = serde_json::from_slice(body).unwrap_or_default();
    let Some(title) = problem.get("title").and_then(Value::as_str) else {
        return text.chars().take(120).collect();
    };
    match problem.get("reason").and_then(Value::as_str) {
        Some(reason) => format!("{title} (reason: {reason})"),
        None => title.to_owned(),
    }
}
