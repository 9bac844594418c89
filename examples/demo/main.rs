//! `make run`: a demo payments service, a real Envoy with the filter in front of it, and the story of what the
//! filter does. Every answer and every count of executions is checked; one that differs makes the exit status 1.
//!
//! | file | owns |
//! |---|---|
//! | `service` | the payments service, which knows nothing of idempotency and counts its executions |
//! | `envoy` | the Envoy process, its ports and its end |
//! | `client` | one HTTP request, as a client sends it |
//! | `wire` | HTTP/1.1 messages as bytes |
//! | `story` | what is sent, and what must come back |
//! | `page` | how it looks |
#![allow(clippy::disallowed_methods, reason = "the demo runs in real time")]

mod client;
mod envoy;
mod page;
mod service;
mod signals;
mod story;
mod wire;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use client::Client;
use envoy::Envoy;
use page::Page;
use service::Service;
use story::Story;

type Fallible<T> = Result<T, Box<dyn Error + Send + Sync>>;

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("demo: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Whether everything was as the story says.
fn run() -> Fallible<bool> {
    let root = std::env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| PathBuf::from("."), PathBuf::from);
    let binary = setting("ENVOY_PATH")
        .ok_or("ENVOY_PATH is not set: start the demo with `make run`, which knows where Envoy is")?;
    let port = match setting("PORT") {
        Some(port) => Some(port.parse().map_err(|_| format!("PORT={port}: not a port number"))?),
        None => None,
    };
    let once = setting("ONCE").is_some_and(|once| once != "0");

    // Before any thread and before Envoy: both inherit which signals are blocked.
    signals::block()?;
    let service = Service::start()?;
    let envoy = Arc::new(Envoy::start(&root, binary.as_ref(), port, service.port())?);
    let stage = Arc::new(Stage::default());
    {
        // Weak, so that a panic of this thread ends Envoy too.
        let (envoy, stage) = (Arc::downgrade(&envoy), Arc::clone(&stage));
        signals::on_stop(move || {
            stage.stopped.store(true, Ordering::Relaxed);
            if let Some(envoy) = envoy.upgrade() {
                envoy.stop();
            }
            if stage.told.load(Ordering::Relaxed) { 0 } else { 130 }
        })?;
    }

    let mut page = Page::new();
    introduce(&page, &envoy, &service);
    let client = Client::new(envoy.port());
    let result = Story::new(&client, &service, &mut page).tell();
    if stage.stopped.load(Ordering::Relaxed) {
        leave_it_to_the_signal();
    }
    let told = match &result {
        Ok(()) => page.conclude(&envoy.counters()),
        Err(error) => {
            page.fail(&error.to_string());
            false
        }
    };
    if !told {
        eprintln!("\nThe end of Envoy's log:\n{}", envoy.log_tail());
    } else if !once {
        stage.told.store(true, Ordering::Relaxed);
        invite(&page, &envoy);
        while envoy.is_running() {
            std::thread::sleep(Duration::from_millis(500));
        }
        if stage.stopped.load(Ordering::Relaxed) {
            leave_it_to_the_signal();
        }
        return Err(format!("Envoy stopped by itself; the end of its log:\n{}", envoy.log_tail()).into());
    }
    Ok(told)
}

/// How far the demo has come.
#[derive(Default)]
struct Stage {
    told: AtomicBool,
    stopped: AtomicBool,
}

/// The signal's thread is about to end the process.
fn leave_it_to_the_signal() -> ! {
    loop {
        std::thread::park();
    }
}

/// An environment variable that is set and not empty.
fn setting(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

fn introduce(page: &Page, envoy: &Envoy, service: &Service) {
    page.say(&format!("Envoy             http://127.0.0.1:{}  (admin: {})", envoy.port(), envoy.admin()));
    page.say(&format!("payments service  http://127.0.0.1:{}", service.port()));
    page.say(&format!("configuration     {}", envoy.configuration()));
    if envoy.moved() {
        page.say(
            "Some of the usual ports (10000, 8080, 9901) were taken or overridden: mind the ones above.",
        );
    }
}

fn invite(page: &Page, envoy: &Envoy) {
    let url = format!("http://127.0.0.1:{}", envoy.port());
    page.say("\nEnvoy stays up. Try it yourself, and run each line twice:\n");
    for (path, key, body) in [
        ("/payments", "my-first", r#"{"amount":500}"#),
        ("/payments/slow?ms=5000", "my-slow", r#"{"amount":500}"#),
        ("/detached/payments/slow?ms=5000", "my-detached", r#"{"amount":500}"#),
        ("/payments/flaky", "my-flaky", r#"{"amount":500}"#),
        ("/payments/charge-then-fail", "my-failing", r#"{"amount":500}"#),
        ("/atomic/payments", "my-atomic", r#"{"amount":500}"#),
    ] {
        page.say(&format!(
            "  curl -i '{url}{path}' -H 'Idempotency-Key: {key}' -H 'x-account-id: me' -d '{body}'"
        ));
    }
    page.say(&format!("\n  curl '{url}/runs'    how often the service ran each key"));
    page.say(&format!("  curl '{}/stats?filter=wasmcustom'    what the filter counted", envoy.admin()));
    page.say(&format!("  tail -f '{}'    Envoy's log with the access log", envoy.log().display()));
    page.say("\nCtrl-C stops everything.");
}
