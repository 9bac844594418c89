//! Checks a plugin configuration with the loader that the filter uses: `make check-config FILE.json`.

use std::io::Read as _;
use std::process::ExitCode;

use idempotency::config::{self, Config, Plugin};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [file] = arguments.as_slice() else {
        eprintln!("usage: check_config FILE.json, or - for standard input");
        return ExitCode::from(2);
    };
    let json = match read(file) {
        Ok(json) => json,
        Err(error) => {
            eprintln!("{file}: {error}");
            return ExitCode::from(2);
        }
    };
    match config::load_plugin(&json) {
        Ok(Plugin::Filter(config)) => {
            report(file, &config);
            ExitCode::SUCCESS
        }
        Ok(Plugin::RequestEndHold) => {
            println!("{file}: ok, role request_end_hold");
            ExitCode::SUCCESS
        }
        Err(errors) => {
            for error in &errors.0 {
                eprintln!("{file}: {error}");
            }
            let count = errors.0.len();
            eprintln!("{file}: {count} {}", if count == 1 { "mistake" } else { "mistakes" });
            ExitCode::FAILURE
        }
    }
}

fn read(file: &str) -> std::io::Result<Vec<u8>> {
    if file == "-" {
        let mut json = Vec::new();
        std::io::stdin().read_to_end(&mut json)?;
        return Ok(json);
    }
    std::fs::read(file)
}

fn report(file: &str, config: &Config) {
    for warning in &config.warnings {
        println!("{file}: warning: {warning}");
    }
    if let Some(rate) = config.sustained_keys_per_second() {
        println!("{file}: the embedded store sustains {rate:.1} new keys per second");
    }
    let names: Vec<&str> = config.rules.iter().map(|rule| rule.name.as_str()).collect();
    println!("{file}: ok, {} {}", if names.len() == 1 { "rule" } else { "rules" }, names.join(", "));
}
