//! The story: what is sent, what must come back, and how often the service must have run by then.

use std::collections::BTreeMap;
use std::sync::{Arc, Barrier, mpsc};
use std::time::{Duration, Instant};

use crate::Fallible;
use crate::client::{Answer, Call, Client};
use crate::envoy::WORKERS;
use crate::page::Page;
use crate::service::Service;

const DUPLICATES: usize = 50;
const PATIENCE: Duration = Duration::from_secs(30);

/// What an answer must be.
enum Expected {
    /// The service's own answer, made for this request.
    Executed(u16),
    /// The answer of an earlier request, byte for byte.
    Replayed(u16, Vec<u8>),
    /// The filter's refusal, with its meaning and, if any, its reason.
    Refused(u16, &'static str, Option<&'static str>),
}

/// The teller.
pub struct Story<'a> {
    client: &'a Client,
    service: &'a Service,
    page: &'a mut Page,
    /// How often each caller's key has run.
    runs: BTreeMap<(&'static str, &'static str), u32>,
}

impl<'a> Story<'a> {
    /// A story about this service, told by this client.
    pub fn new(client: &'a Client, service: &'a Service, page: &'a mut Page) -> Self {
        Self { client, service, page, runs: BTreeMap::new() }
    }

    /// Plays it from the beginning.
    pub fn tell(&mut self) -> Fallible<()> {
        let order = Call::new("/payments", "order-1", "alice", r#"{"amount":1200}"#);
        let first = self.first_call_and_retry(&order)?;
        self.misuses(&order)?;
        self.another_caller(&order, &first)?;
        self.duplicates()?;
        self.transient_error()?;
        self.failure_after_the_charge()?;
        self.failure_that_undid_everything()?;
        self.client_that_hangs_up()?;
        self.client_that_hangs_up_on_a_detached_rule()
    }

    fn first_call_and_retry(&mut self, order: &Call) -> Fallible<Answer> {
        self.page.chapter("The first call reaches the service");
        let first = self.play(order, &Expected::Executed(201), 1)?;

        self.page.chapter("A retry gets the same answer, and the service does not run");
        self.play(order, &Expected::Replayed(201, first.message.body.clone()), 1)?;
        Ok(first)
    }

    fn misuses(&mut self, order: &Call) -> Fallible<()> {
        self.page.chapter("The same key with another body is refused");
        let other = Call { body: r#"{"amount":9900}"#, ..order.clone() };
        self.play(&other, &Expected::Refused(422, "mismatch", None), 1)?;

        self.page.chapter("No key at all is refused");
        let keyless = Call { key: None, ..order.clone() };
        self.play(&keyless, &Expected::Refused(400, "missing-key", None), 0)?;
        Ok(())
    }

    fn another_caller(&mut self, order: &Call, first: &Answer) -> Fallible<()> {
        self.page.chapter("The same key from another caller is another payment");
        let bobs = Call { account: "bob", ..order.clone() };
        let answer = self.play(&bobs, &Expected::Executed(201), 1)?;
        if answer.message.body == first.message.body {
            self.page.verdict("whose payment is it?", &["bob got the answer that was alice's".to_owned()]);
        }
        Ok(())
    }

    fn transient_error(&mut self) -> Fallible<()> {
        self.page.chapter("A 503 says \"not processed\": the retry runs again, and its success is kept");
        let flaky = Call::new("/payments/flaky", "order-3", "alice", r#"{"amount":300}"#);
        self.play(&flaky, &Expected::Executed(503), 1)?;
        let second = self.play(&flaky, &Expected::Executed(201), 2)?;
        self.play(&flaky, &Expected::Replayed(201, second.message.body), 2)?;
        Ok(())
    }

    fn failure_after_the_charge(&mut self) -> Fallible<()> {
        self.page.chapter("A handler charges and then fails: the retry must not charge again");
        let failing = Call::new("/payments/charge-then-fail", "order-4", "alice", r#"{"amount":400}"#);
        self.play(&failing, &Expected::Executed(500), 1)?;
        self.play(&failing, &Expected::Refused(424, "failed", Some("status")), 1)?;
        Ok(())
    }

    fn failure_that_undid_everything(&mut self) -> Fallible<()> {
        self.page
            .chapter("An atomic handler fails, under a rule with on_failure: release: the retry runs again");
        let atomic = Call::new("/atomic/payments", "order-5", "alice", r#"{"amount":500}"#);
        self.play(&atomic, &Expected::Executed(500), 1)?;
        self.play(&atomic, &Expected::Executed(201), 2)?;
        Ok(())
    }

    fn client_that_hangs_up(&mut self) -> Fallible<()> {
        self.page
            .chapter("A client hangs up while the service works: nobody knows the outcome, so no second run");
        let slow = Call::new("/payments/slow?ms=10000", "order-6", "alice", r#"{"amount":600}"#);
        self.page.request(&slow, 1);
        let connection = self.client.send(&slow)?;
        self.service.wait_for_run("alice", "order-6")?;
        drop(connection);
        self.service.wait_for_hang_ups(1)?;
        self.page.event("(the client hung up after the service had charged)");
        self.count(&slow, 1, Vec::new());
        self.play(&slow, &Expected::Refused(424, "failed", Some("client_gone")), 1)?;
        Ok(())
    }

    fn client_that_hangs_up_on_a_detached_rule(&mut self) -> Fallible<()> {
        self.page.chapter(
            "The same under a rule with execution: detached: the service ends its work, the retry gets its answer",
        );
        let order = Call::new("/detached/payments", "order-7", "alice", r#"{"amount":700}"#);
        self.page.request(&order, 1);
        self.service.hold();
        let connection = self.client.send(&order)?;
        self.service.wait_for_run("alice", "order-7")?;
        drop(connection);
        self.page.event("(the client hung up after the service had charged)");
        self.count(&order, 1, Vec::new());
        let refused = self.play(&order, &Expected::Refused(409, "in-flight", None), 1);
        self.service.let_go();
        refused?;
        let end = Instant::now() + PATIENCE;
        let replay = loop {
            let answer = self.client.call(&order)?;
            if answer.refusal() != Some("in-flight") {
                break answer;
            }
            if Instant::now() > end {
                return Err("the detached execution never ended".into());
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        self.play(&order, &Expected::Replayed(201, replay.message.body), 1)?;
        Ok(())
    }

    /// The service keeps its answer back until the first duplicate was refused, so they do meet.
    fn duplicates(&mut self) -> Fallible<()> {
        self.page.chapter(&format!("{DUPLICATES} duplicates at once, on {WORKERS} workers: one runs"));
        let order = Call::new("/payments", "order-2", "alice", r#"{"amount":200}"#);
        self.page.request(&order, DUPLICATES);
        self.service.hold();
        let answers = self.send_duplicates(&order);
        self.service.let_go();
        let answers = answers?;

        let executed: Vec<&Answer> = answers.iter().filter(|a| a.status == 201 && !a.replayed()).collect();
        let replayed: Vec<&Answer> = answers.iter().filter(|a| a.status == 201 && a.replayed()).collect();
        let refused: Vec<&Answer> =
            answers.iter().filter(|a| a.status == 409 && a.refusal() == Some("in-flight")).collect();
        for group in [&executed, &refused, &replayed] {
            if let Some(answer) = group.first() {
                self.page.answers(&format!("{:>2} × ", group.len()), answer);
            }
        }

        let mut differences = Vec::new();
        if executed.len() != 1 {
            differences.push(format!("{} answers were the service's own, not 1", executed.len()));
        }
        if refused.is_empty() {
            differences.push("no duplicate was refused with 409 in-flight".to_owned());
        }
        let others = answers.len().saturating_sub(executed.len() + refused.len() + replayed.len());
        if others > 0 {
            differences.push(format!("{others} answers were neither executed nor replayed nor in-flight"));
        }
        let body = executed.first().map(|answer| answer.message.body.clone()).unwrap_or_default();
        if replayed.iter().any(|answer| answer.message.body != body) {
            differences.push("a replay has other bytes than the answer".to_owned());
        }
        self.count(&order, 1, differences);
        self.play(&order, &Expected::Replayed(201, body), 1)?;
        Ok(())
    }

    fn send_duplicates(&self, order: &Call) -> Fallible<Vec<Answer>> {
        let start = Arc::new(Barrier::new(DUPLICATES));
        let (sender, receiver) = mpsc::channel();
        for _ in 0..DUPLICATES {
            let (start, sender, client, order) =
                (Arc::clone(&start), sender.clone(), *self.client, order.clone());
            std::thread::spawn(move || {
                start.wait();
                // The receiver is gone only where the story has failed already.
                let _ = sender.send(client.call(&order));
            });
        }
        let mut answers = Vec::new();
        while answers.len() < DUPLICATES {
            let answer = receiver
                .recv_timeout(PATIENCE)
                .map_err(|_| format!("only {} of {DUPLICATES} duplicates were answered", answers.len()))??;
            if answer.status == 409 {
                self.service.let_go();
            }
            answers.push(answer);
        }
        Ok(answers)
    }

    /// Sends a call, shows it, and checks its answer and how often its key has run by then.
    fn play(&mut self, call: &Call, expected: &Expected, runs: u32) -> Fallible<Answer> {
        self.page.request(call, 1);
        let answer = self.client.call(call)?;
        self.page.answer(&answer);
        let differences = differences(&answer, expected);
        self.count(call, runs, differences);
        Ok(answer)
    }

    /// Shows and checks how often the service ran.
    fn count(&mut self, call: &Call, runs: u32, mut differences: Vec<String>) {
        let key = call.key.unwrap_or("-");
        let (found, found_total) = (self.service.runs(call.account, key), self.service.total_runs());
        let others: u32 =
            self.runs.iter().filter(|(run, _)| **run != (call.account, key)).map(|(_, count)| count).sum();
        if found != runs {
            differences.push(format!("the service should have run {runs} × for this key"));
        } else if found_total != others + runs {
            differences.push(format!("the service should have run {} × in all", others + runs));
        }
        // What was found, so that one difference is told once.
        self.runs.insert((call.account, key), found);
        let count = format!("service runs: {found} for this key, {found_total} in all");
        self.page.verdict(&count, &differences);
    }
}

fn differences(answer: &Answer, expected: &Expected) -> Vec<String> {
    let mut differences = Vec::new();
    let mut demand = |met: bool, otherwise: String| {
        if !met {
            differences.push(otherwise);
        }
    };
    let (status, replayed, refusal) = match expected {
        Expected::Executed(status) => (*status, false, None),
        Expected::Replayed(status, _) => (*status, true, None),
        Expected::Refused(status, refusal, _) => (*status, false, Some(*refusal)),
    };
    demand(answer.status == status, format!("the status should be {status}"));
    demand(
        answer.replayed() == replayed,
        format!("it should {}be a replay", if replayed { "" } else { "not " }),
    );
    demand(answer.refusal() == refusal, format!("the refusal should be {}", refusal.unwrap_or("none")));
    match expected {
        Expected::Executed(_) => {}
        Expected::Replayed(_, body) => {
            demand(answer.message.body == *body, "the body should be the first answer's".to_owned());
        }
        Expected::Refused(_, refusal, reason) => {
            let problem: serde_json::Value = serde_json::from_slice(&answer.message.body).unwrap_or_default();
            let text = |name: &str| problem.get(name).and_then(serde_json::Value::as_str);
            let kind = text("type").and_then(|kind| kind.rsplit('/').next());
            demand(kind == Some(refusal), format!("the problem's type should end in {refusal}"));
            demand(text("reason") == *reason, format!("the reason should be {}", reason.unwrap_or("none")));
        }
    }
    differences
}
