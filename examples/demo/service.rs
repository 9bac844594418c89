//! The demo payments service. It knows nothing of idempotency: whatever reaches it is executed, and counted by the
//! caller and key it came with.

use std::collections::BTreeMap;
use std::io::{self, BufReader};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::Fallible;
use crate::wire::{self, Message};

const USUAL_PORT: u16 = 8080;
/// How long `/payments` waits for [`Service::let_go`] at most.
const LONGEST_HOLD: Duration = Duration::from_secs(20);
/// How often a waiting handler looks whether its caller is still there.
const GLANCE: Duration = Duration::from_millis(20);

/// The running service; its threads end with the process.
pub struct Service {
    state: Arc<State>,
    port: u16,
}

#[derive(Default)]
struct State {
    books: Mutex<Books>,
    changed: Condvar,
}

/// What the service remembers.
#[derive(Default)]
struct Books {
    /// Executions by account and key.
    runs: BTreeMap<(String, String), u32>,
    /// The last `x-idempotency-attempt` by account and key: the filter sets it where an earlier attempt was abandoned.
    attempts: BTreeMap<(String, String), String>,
    payments: u32,
    held: bool,
    hang_ups: u32,
}

impl Service {
    /// Listens on the usual port, or on a free one where that is taken.
    pub fn start() -> Fallible<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, USUAL_PORT))
            .or_else(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)))
            .map_err(|error| format!("no port for the payments service: {error}"))?;
        let port = listener.local_addr()?.port();
        let state = Arc::new(State::default());
        let shared = Arc::clone(&state);
        std::thread::Builder::new().name("payments".to_owned()).spawn(move || {
            for stream in listener.incoming().flatten() {
                let state = Arc::clone(&shared);
                // A connection that breaks concerns only its caller.
                std::thread::spawn(move || state.serve(stream));
            }
        })?;
        Ok(Self { state, port })
    }

    /// Where it listens.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// How often this caller's key was executed.
    pub fn runs(&self, account: &str, key: &str) -> u32 {
        self.state.books().runs.get(&(account.to_owned(), key.to_owned())).copied().unwrap_or(0)
    }

    /// How often anything was executed.
    pub fn total_runs(&self) -> u32 {
        self.state.books().runs.values().sum()
    }

    /// From here on `/payments` charges and then keeps its answer back.
    pub fn hold(&self) {
        self.state.books().held = true;
    }

    /// Lets the answers go.
    pub fn let_go(&self) {
        self.state.books().held = false;
        self.state.changed.notify_all();
    }

    /// Waits until this caller's key was executed.
    pub fn wait_for_run(&self, account: &str, key: &str) -> Fallible<()> {
        let wanted = (account.to_owned(), key.to_owned());
        self.state.wait("the request never reached the service", |books| books.runs.contains_key(&wanted))
    }

    /// Waits until this many callers went away while their request was executed.
    pub fn wait_for_hang_ups(&self, count: u32) -> Fallible<()> {
        self.state.wait("the service never saw its caller go away", |books| books.hang_ups >= count)
    }
}

impl State {
    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait(&self, otherwise: &str, reached: impl Fn(&Books) -> bool) -> Fallible<()> {
        let patience = Duration::from_secs(10);
        let (_books, result) = self
            .changed
            .wait_timeout_while(self.books(), patience, |books| !reached(books))
            .unwrap_or_else(PoisonError::into_inner);
        if result.timed_out() { Err(otherwise.into()) } else { Ok(()) }
    }

    fn serve(&self, stream: TcpStream) -> io::Result<()> {
        stream.set_nodelay(true)?;
        let mut reader = BufReader::new(stream);
        while let Some(request) = Message::read(&mut reader)? {
            let Some(response) = self.answer(&request, reader.get_ref())? else { return Ok(()) };
            response.write(reader.get_mut())?;
        }
        Ok(())
    }

    /// The response, or `None` where nobody waits for it any more.
    fn answer(&self, request: &Message, caller: &TcpStream) -> io::Result<Option<Response>> {
        let mut words = request.first_line.split(' ');
        let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        match (method, path) {
            ("GET", "/runs") => Ok(Some(self.report())),
            ("POST", "/payments" | "/detached/payments") => {
                let (payment, _) = self.execute(request);
                drop(self.changed.wait_timeout_while(self.books(), LONGEST_HOLD, |books| books.held));
                Ok(Some(payment))
            }
            ("POST", "/payments/slow" | "/detached/payments/slow") => {
                let (payment, _) = self.execute(request);
                let millis = query.strip_prefix("ms=").and_then(|millis| millis.parse().ok()).unwrap_or(1000);
                self.linger(caller, Duration::from_millis(millis), payment)
            }
            ("POST", "/payments/hang") => {
                let (payment, _) = self.execute(request);
                self.linger(caller, Duration::from_secs(3600), payment)
            }
            ("POST", "/payments/flaky") => {
                let (payment, run) = self.execute(request);
                let busy = Response::error(503, "busy, nothing was charged");
                Ok(Some(if run == 1 { busy } else { payment }))
            }
            ("POST", "/payments/charge-then-fail") => {
                self.execute(request);
                Ok(Some(Response::error(500, "charged the card, then crashed")))
            }
            ("POST", "/atomic/payments") => {
                let (payment, run) = self.execute(request);
                let undone = Response::error(500, "failed, and undid everything");
                Ok(Some(if run == 1 { undone } else { payment }))
            }
            (_, _) => Ok(Some(Response::error(404, "no such path"))),
        }
    }

    /// The work that must not be done twice: counted, and given a payment of its own. Also tells which run of the
    /// key it is, from 1.
    fn execute(&self, request: &Message) -> (Response, u32) {
        let name = |header| request.header(header).unwrap_or("-").to_owned();
        let sent: Value = serde_json::from_slice(&request.body).unwrap_or_default();
        let mut books = self.books();
        books.payments += 1;
        let id = format!("pay-{}", books.payments);
        let run_of = (name("x-account-id"), name("idempotency-key"));
        if let Some(attempt) = request.header("x-idempotency-attempt") {
            books.attempts.insert(run_of.clone(), attempt.to_owned());
        }
        let runs = books.runs.entry(run_of).or_default();
        *runs += 1;
        let run = *runs;
        drop(books);
        self.changed.notify_all();
        let location = format!("/payments/{id}");
        let body = json!({ "id": id, "amount": sent.get("amount") });
        (Response { status: 201, location: Some(location), body }, run)
    }

    /// Works for some time, or until the caller goes away.
    fn linger(&self, caller: &TcpStream, time: Duration, payment: Response) -> io::Result<Option<Response>> {
        let end = Instant::now() + time;
        caller.set_read_timeout(Some(GLANCE))?;
        while Instant::now() < end {
            if is_gone(caller) {
                self.books().hang_ups += 1;
                self.changed.notify_all();
                return Ok(None);
            }
        }
        caller.set_read_timeout(None)?;
        Ok(Some(payment))
    }

    fn report(&self) -> Response {
        let books = self.books();
        let runs: Vec<Value> = books
            .runs
            .iter()
            .map(|(run, runs)| {
                let attempt = books.attempts.get(run);
                json!({ "account": run.0, "key": run.1, "runs": runs, "x-idempotency-attempt": attempt })
            })
            .collect();
        Response { status: 200, location: None, body: Value::Array(runs) }
    }
}

/// Looks for at most [`GLANCE`].
fn is_gone(caller: &TcpStream) -> bool {
    match caller.peek(&mut [0]) {
        Ok(0) => true,
        Ok(_) => {
            std::thread::sleep(GLANCE);
            false
        }
        Err(error) => {
            let kind = error.kind();
            kind != io::ErrorKind::WouldBlock
                && kind != io::ErrorKind::TimedOut
                && kind != io::ErrorKind::Interrupted
        }
    }
}

struct Response {
    status: u16,
    location: Option<String>,
    body: Value,
}

impl Response {
    fn error(status: u16, why: &str) -> Self {
        Self { status, location: None, body: json!({ "error": why }) }
    }

    fn write(&self, stream: &mut TcpStream) -> io::Result<()> {
        let mut headers = vec![("content-type", "application/json")];
        if let Some(location) = &self.location {
            headers.push(("location", location));
        }
        let first_line = format!("HTTP/1.1 {} -", self.status);
        wire::write(stream, &first_line, &headers, self.body.to_string().as_bytes())
    }
}
