//! The batcher against a server that does everything a server, a link and a host may do wrong, on virtual time.
//!
//! The server reads the very bytes it is sent and notes what it executed; what it does is drawn by proptest.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use idempotency::clock::Timestamp;
use idempotency::store::redis::resp::{Value, decode};
use idempotency::store::redis::{
    Answer, BatchId, BatchSettings, Batcher, CalloutFault, Dispatch, Operation, Priority, SCRIPTS, Transport,
};
use idempotency::store::{StoreError, Write};
use proptest::prelude::*;

use crate::fixture::{claim, complete, hold};

/// What the host calls it with: so late may an answer be.
const TICK: Duration = Duration::from_millis(5);

/// What becomes of a callout.
#[derive(Debug, Clone)]
enum Fate {
    Refused,
    Answered {
        after: u64,
        kind: Kind,
    },
    /// It ends by its timeout; it was executed or not.
    TimesOut {
        is_executed: bool,
    },
    /// The host never calls back.
    Lost {
        is_executed: bool,
    },
}

#[derive(Debug, Clone)]
enum Kind {
    Whole,
    /// Each value is drawn.
    Mixed(Vec<u8>),
    Empty,
    Cut(prop::sample::Index),
    Longer,
    Reset,
    OtherStatus,
}

#[derive(Debug, Clone)]
struct Step {
    wait: u64,
    claims: u8,
    writes: u8,
    outbox: u8,
    cancel: Option<prop::sample::Index>,
}

fn any_kind() -> impl Strategy<Value = Kind> {
    prop_oneof![
        6 => Just(Kind::Whole),
        4 => proptest::collection::vec(0u8..6, 1..40).prop_map(Kind::Mixed),
        1 => Just(Kind::Empty),
        1 => any::<prop::sample::Index>().prop_map(Kind::Cut),
        1 => Just(Kind::Longer),
        1 => Just(Kind::Reset),
        1 => Just(Kind::OtherStatus),
    ]
}

fn any_fate() -> impl Strategy<Value = Fate> {
    prop_oneof![
        1 => Just(Fate::Refused),
        8 => (0u64..130, any_kind()).prop_map(|(after, kind)| Fate::Answered { after, kind }),
        1 => any::<bool>().prop_map(|is_executed| Fate::TimesOut { is_executed }),
        1 => any::<bool>().prop_map(|is_executed| Fate::Lost { is_executed }),
    ]
}

fn any_step() -> impl Strategy<Value = Step> {
    let cancel = proptest::option::weighted(0.2, any::<prop::sample::Index>());
    (0u64..30, 0u8..8, 0u8..4, 0u8..4, cancel).prop_map(|(wait, claims, writes, outbox, cancel)| Step {
        wait,
        claims,
        writes,
        outbox,
        cancel,
    })
}

/// A callout that is out.
struct Out {
    batch: BatchId,
    due: Option<Timestamp>,
    /// From then on it does not count any more.
    lost_from: Timestamp,
    reply: Result<Vec<u8>, CalloutFault>,
}

struct World {
    batcher: Batcher,
    now: Timestamp,
    max_in_flight: usize,
    timeout: Duration,
    fates: Vec<Fate>,
    next_fate: usize,
    out: Vec<Out>,
    submitted: BTreeMap<u64, (Timestamp, bool)>,
    answered: BTreeSet<u64>,
    executed: BTreeMap<u64, u32>,
    /// By a whole answer, which is what each success has to come from.
    told: BTreeSet<u64>,
}

impl World {
    fn submit(&mut self, is_claim: bool, priority: Priority) {
        let ticket = self.submitted.len() as u64;
        let holder = hold(ticket, 1);
        let operation = match (is_claim, ticket % 9) {
            (true, _) => claim(&holder),
            (false, 0) => Operation::Write(holder, Write::Release),
            (false, 1) => complete(&holder, &vec![b'*'; 300 << 10]),
            (false, _) => complete(&holder, b"+OK\r\n"),
        };
        self.submitted.insert(ticket, (self.now, is_claim));
        self.batcher.submit(ticket, operation, priority, self.now);
    }

    fn drain(&mut self) {
        while let Some((ticket, answer)) = self.batcher.next_answer() {
            assert!(self.answered.insert(ticket), "{ticket} is answered twice");
            let (since, is_claim) = self.submitted[&ticket];
            let took = self.now.since(since);
            assert!(took < self.timeout + TICK, "{ticket} took {took:?}");
            let executed = self.executed.get(&ticket).copied().unwrap_or_default();
            assert!(executed <= 2, "{ticket} was executed {executed} times");
            match answer {
                Answer::NotSent => assert_eq!(executed, 0, "{ticket} was executed"),
                Answer::Claim(Ok(_)) => assert!(is_claim && self.told.contains(&ticket)),
                Answer::Write(Ok(_)) => assert!(!is_claim && self.told.contains(&ticket)),
                Answer::Claim(Err(StoreError::Unavailable | StoreError::Unreadable)) => assert!(is_claim),
                Answer::Write(Err(StoreError::Unavailable | StoreError::Unreadable)) => assert!(!is_claim),
                Answer::Claim(Err(StoreError::Full)) | Answer::Write(Err(StoreError::Full)) => {
                    panic!("no reply says so")
                }
            }
        }
    }

    fn dispatch(&mut self) {
        self.drain();
        while let Some(dispatch) = self.batcher.poll(self.now) {
            self.drain();
            self.take(&dispatch);
            let counting = self.out.iter().filter(|out| self.now < out.lost_from).count();
            // As many again for slots that fail.
            assert!(counting <= 2 * self.max_in_flight, "{counting} callouts are out");
        }
        self.drain();
    }

    fn take(&mut self, dispatch: &Dispatch) {
        let commands = commands(&dispatch.request.body);
        assert_eq!(commands.len(), dispatch.operations);
        assert!(dispatch.operations <= 256);
        assert!(dispatch.operations == 1 || dispatch.request.body.len() <= (1 << 20) + 100);
        assert!(dispatch.timeout <= self.timeout / 2 && dispatch.timeout > Duration::ZERO);
        let fate = self.fates[self.next_fate % self.fates.len()].clone();
        self.next_fate += 1;
        let (due, is_executed, kind) = match fate {
            Fate::Refused => {
                self.batcher.on_refused(dispatch.batch, self.now);
                return;
            }
            Fate::Answered { after, kind } => {
                let after = Duration::from_millis(after);
                if after <= dispatch.timeout {
                    (Some(after), true, kind)
                } else {
                    (Some(dispatch.timeout), true, Kind::Reset)
                }
            }
            Fate::TimesOut { is_executed } => (Some(dispatch.timeout), is_executed, Kind::Reset),
            Fate::Lost { is_executed } => (None, is_executed, Kind::Reset),
        };
        let reply = self.execute(&commands, is_executed, &kind);
        self.out.push(Out {
            batch: dispatch.batch,
            due: due.map(|after| self.now.after(after)),
            lost_from: due.map_or(self.now.after(dispatch.timeout).after(self.timeout), |_| {
                Timestamp::from_millis(u64::MAX)
            }),
            reply,
        });
    }

    fn execute(
        &mut self,
        commands: &[(u64, bool, bool)],
        is_executed: bool,
        kind: &Kind,
    ) -> Result<Vec<u8>, CalloutFault> {
        let mut reply = Vec::new();
        let mut told = Vec::new();
        for (at, (ticket, by_name, is_claim)) in commands.iter().enumerate() {
            let drawn = match kind {
                Kind::Mixed(drawn) => drawn[at % drawn.len()],
                Kind::Whole | Kind::Empty | Kind::Cut(_) | Kind::Longer | Kind::Reset | Kind::OtherStatus => {
                    0
                }
            };
            let is_miss = drawn == 1 && *by_name;
            if is_executed && !is_miss {
                *self.executed.entry(*ticket).or_default() += 1;
            }
            let good = if *is_claim { "*2\r\n$7\r\nclaimed\r\n:1\r\n" } else { "*1\r\n$7\r\napplied\r\n" };
            match drawn {
                1 if is_miss => reply.extend(b"-NOSCRIPT No matching script.\r\n"),
                2 => reply.extend(b"-upstream failure\r\n"),
                3 => reply.extend(b"-OOM command not allowed\r\n"),
                4 => reply.extend(b"$-1\r\n"),
                5 => reply.extend(b"*1\r\n$10\r\nunreadable\r\n"),
                _ => {
                    reply.extend(good.as_bytes());
                    told.push(*ticket);
                }
            }
        }
        reply.extend(b"+OK\r\n");
        match kind {
            Kind::Whole | Kind::Mixed(_) => {
                self.told.extend(told);
                Ok(reply)
            }
            Kind::Empty => Ok(Vec::new()),
            Kind::Cut(at) => Ok(reply[..at.index(reply.len())].to_vec()),
            Kind::Longer => Ok([&reply[..], b"+OK\r\n"].concat()),
            Kind::Reset => Err(CalloutFault::NoAnswer),
            Kind::OtherStatus => Err(CalloutFault::Status),
        }
    }

    /// A millisecond passes: what is due comes, and every few of them the host ticks.
    fn pass(&mut self) {
        self.now = self.now.after(Duration::from_millis(1));
        let now = self.now;
        let (due, out) = std::mem::take(&mut self.out)
            .into_iter()
            .partition(|out: &Out| out.due.is_some_and(|due| now >= due));
        self.out = out;
        for Out { batch, reply, .. } in due {
            self.batcher.on_reply(batch, reply.as_deref().map_err(|fault| *fault), now);
            self.dispatch();
        }
        if now.as_millis().is_multiple_of(u64::try_from(TICK.as_millis()).unwrap()) {
            self.batcher.on_tick(now);
            self.dispatch();
        }
    }
}

/// The ticket each command is for, whether it names its script, and whether it is a claim.
fn commands<'a>(body: &'a [u8]) -> Vec<(u64, bool, bool)> {
    let mut commands = Vec::new();
    let mut rest = body;
    loop {
        let (value, after) = decode(rest).expect("a command");
        rest = after;
        let Value::Array(argv) = value else { panic!("{value:?}") };
        let bulk = |argument: &Value<'a>| {
            let Value::Bulk(argument) = argument else { panic!("{argument:?}") };
            *argument
        };
        let argv: Vec<&[u8]> = argv.iter().map(bulk).collect();
        if argv == [b"QUIT"] {
            assert_eq!(rest, b"", "the QUIT is the last");
            return commands;
        }
        assert_eq!(argv[2], b"1");
        let key = std::str::from_utf8(argv[3]).unwrap().strip_prefix("idem:").unwrap();
        let ticket = u64::from_str_radix(&key[..16], 16).unwrap();
        let is_claim = [SCRIPTS.claim.sha1, SCRIPTS.claim.source].map(str::as_bytes).contains(&argv[1]);
        commands.push((ticket, argv[0] == b"EVALSHA", is_claim));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn every_ticket_is_answered_once_and_in_time(
        fates in proptest::collection::vec(any_fate(), 1..30),
        steps in proptest::collection::vec(any_step(), 1..30),
        max_in_flight in 1usize..4,
        timeout in prop_oneof![Just(250u64), 20u64..400],
    ) {
        let timeout = Duration::from_millis(timeout);
        let settings = BatchSettings {
            key_prefix: "idem:".to_owned(),
            timeout,
            max_in_flight_batches: max_in_flight,
            max_response_body_bytes: 256 << 10,
            transport: Transport::Link,
        };
        let mut world = World {
            batcher: Batcher::new(settings, SCRIPTS),
            now: Timestamp::from_millis(1_000),
            max_in_flight,
            timeout,
            fates,
            next_fate: 0,
            out: Vec::new(),
            submitted: BTreeMap::new(),
            answered: BTreeSet::new(),
            executed: BTreeMap::new(),
            told: BTreeSet::new(),
        };
        for Step { wait, claims, writes, outbox, cancel } in steps {
            (0..wait).for_each(|_| world.pass());
            (0..claims).for_each(|_| world.submit(true, Priority::Normal));
            (0..writes).for_each(|_| world.submit(false, Priority::Normal));
            (0..outbox).for_each(|_| world.submit(false, Priority::Outbox));
            if let Some(cancelled) = cancel
                && !world.submitted.is_empty()
            {
                let cancelled = cancelled.index(world.submitted.len()) as u64;
                world.batcher.cancel(cancelled);
            }
            world.dispatch();
        }
        let patience = timeout * 3;
        (0..patience.as_millis()).for_each(|_| world.pass());
        prop_assert_eq!(world.answered.len(), world.submitted.len());
        prop_assert!(world.batcher.is_idle());
    }
}
