//! Detached execution: the exchange outlives its client.

use std::time::Duration;

use idempotency::exchange::{
    ATTEMPTS_HEADER, DETAILS_HEADER, Event, ExecutionAnswer, Gate, NotDispatched, REDIRECTED_HEADER,
};
use idempotency::metrics::Counter;
use idempotency::store::StoreError;
use serde_json::json;

use crate::world::{Trip, World};

const SECOND: Duration = Duration::from_secs(1);
const CLIENT_GONE: u64 = 1 << 14;

fn world(patch: serde_json::Value) -> World {
    let mut rule = json!({"execution": "detached", "execute_timeout": "10s", "lock_ttl": "3s"});
    for (name, value) in patch.as_object().unwrap() {
        rule[name] = value.clone();
    }
    World::with(json!({"execute_cluster": "execute"}), rule)
}

fn leave(world: &mut World, trip: &mut Trip) {
    world.close(trip, "downstream_remote_disconnect", CLIENT_GONE);
}

/// No event of a detached exchange lets the client's own request go on.
fn never_forwarded(trip: &Trip) {
    assert!(!trip.forwarded, "{:?}", trip.published);
}

#[test]
fn the_request_leaves_once_and_its_own_stream_goes_nowhere() {
    let mut world = world(json!({}));
    let mut trip = world.post("amount=1");
    assert_eq!((trip.executing, trip.gate), (Some((1, true)), Gate::HoldRequest));
    assert!(world.post("amount=1").refused_as(409, "in-flight"));
    world.executed_with(&mut trip, "201", "made");
    let reply = trip.reply.as_ref().unwrap();
    assert_eq!((reply.status, reply.body()), (201, &b"made"[..]));
    assert_eq!(trip.reply_header("x-made").as_deref(), Some("1"));
    assert_eq!((trip.reply_header(DETAILS_HEADER), trip.reply_header("idempotent-replayed")), (None, None));
    never_forwarded(&trip);
    assert!(world.post("amount=1").replayed(201, "made"));
    assert!(world.post("amount=2").refused_as(422, "mismatch"));
    assert_eq!((world.count(Counter::Detached), world.count(Counter::Executed)), (1, 1));
    assert_eq!(world.worker.detached.taken(), 0);
    assert_eq!(world.count(Counter::UnexpectedEvents), 0);
}

#[test]
fn a_client_that_leaves_changes_nothing_but_who_is_told() {
    for when in ["executing", "saving"] {
        let mut world = world(json!({}));
        let mut trip = world.post("amount=1");
        if when == "executing" {
            leave(&mut world, &mut trip);
        }
        world.deferred = true;
        world.executed_with(&mut trip, "201", "made");
        if when == "saving" {
            leave(&mut world, &mut trip);
        }
        world.answer(&mut trip);
        world.deferred = false;
        assert!(trip.reply.is_none(), "{when}");
        assert_eq!(trip.gate, Gate::HoldRequest, "{when}: nothing may be resumed");
        never_forwarded(&trip);
        assert!(world.post("amount=1").replayed(201, "made"), "{when}");
        let alone = u64::from(when == "executing");
        assert_eq!(world.count(Counter::FinishedWithoutClient), alone, "{when}");
        assert_eq!((world.count(Counter::Executed), world.worker.detached.taken()), (1, 0), "{when}");
        assert_eq!(world.count(Counter::UnexpectedEvents), 0, "{when}");
    }
}

/// Envoy's own answer to the client (an idle time-out) is no answer of the upstream.
#[test]
fn a_local_reply_to_the_client_ends_nothing() {
    for saving in [false, true] {
        let mut world = world(json!({}));
        let mut trip = world.post("amount=1");
        world.deferred = true;
        if saving {
            world.executed_with(&mut trip, "201", "made");
        }
        world.local_head(&mut trip, "stream_idle_timeout", None, 408, &[], true);
        world.close(&mut trip, "stream_idle_timeout", 0);
        if !saving {
            world.executed_with(&mut trip, "201", "made");
        }
        world.answer(&mut trip);
        world.deferred = false;
        assert!(trip.reply.is_none());
        assert_eq!(trip.gate, Gate::HoldRequest);
        never_forwarded(&trip);
        assert!(world.post("amount=1").replayed(201, "made"), "saving: {saving}");
    }
}

#[test]
fn the_lease_is_renewed_without_a_client_but_not_beyond_the_time_out() {
    let mut world = world(json!({}));
    let mut trip = world.post("amount=1");
    leave(&mut world, &mut trip);
    for _ in 0..9 {
        world.pass(SECOND);
        world.feed(&mut trip, Event::Ticked);
        assert!(world.post("amount=1").refused_as(409, "in-flight"), "at {:?}", world.now);
    }
    for _ in 0..5 {
        world.pass(SECOND);
        world.feed(&mut trip, Event::Ticked);
    }
    assert!(world.post("amount=1").refused_as(424, "abandoned"), "a detached rule retains");
}

/// The answer that comes after all is written: nobody took over.
#[test]
fn a_late_answer_settles_an_abandoned_record() {
    let mut world = world(json!({}));
    let mut trip = world.post("amount=1");
    world.pass(SECOND * 60);
    assert!(world.post("amount=1").refused_as(424, "abandoned"));
    world.executed_with(&mut trip, "201", "made");
    assert!(world.post("amount=1").replayed(201, "made"));
}

#[test]
fn after_a_takeover_the_first_answer_is_stale() {
    let mut world = world(json!({"on_abandoned": "takeover"}));
    let mut first = world.post("amount=1");
    world.pass(SECOND * 60);
    let mut second = world.post("amount=1");
    assert_eq!(second.executing, Some((2, true)));
    world.executed_with(&mut first, "201", "first");
    assert_eq!(world.count(Counter::StaleWrites), 1);
    world.executed_with(&mut second, "201", "second");
    assert!(world.post("amount=1").replayed(201, "second"));
}

#[test]
fn what_is_known_of_the_execution_decides_as_inline() {
    let answered = |details: &str, attempts: &str, status: &str, body: &str, redirected: &str| {
        let mut world = world(json!({}));
        let mut trip = world.post("amount=1");
        let headers = [
            (":status", status),
            (DETAILS_HEADER, details),
            (ATTEMPTS_HEADER, attempts),
            (REDIRECTED_HEADER, redirected),
        ];
        world.executed(&mut trip, &headers, body);
        never_forwarded(&trip);
        let told = trip.reply.as_ref().unwrap().status;
        let next = world.post("amount=1");
        let outcome = match (next.executing, next.refusal()) {
            (Some((1, true)), None) => "free".to_owned(),
            (None, Some((200, kind))) => kind,
            (None, Some((status, kind))) => format!("{status} {kind}"),
            other => panic!("{other:?}"),
        };
        (told, outcome)
    };
    let connect = "upstream_reset_before_response_started{remote_connection_failure}";
    for (details, attempts, status, redirected, expected) in [
        ("via_upstream", "1", "200", "-", "replay"),
        ("via_upstream", "1", "503", "-", "free"),
        ("via_upstream", "2", "503", "-", "424 failed"),
        ("via_upstream", "1", "503", "http://a.example/first", "424 failed"),
        ("via_upstream", "1", "500", "", "424 failed"),
        ("route_not_found", "0", "404", "-", "free"),
        // Told half, nothing is proven.
        ("route_not_found", "-", "404", "-", "424 failed"),
        ("stream_idle_timeout", "", "408", "-", "424 failed"),
        ("stream_idle_timeout", "many", "408", "-", "424 failed"),
        ("route_not_found", "0", "404", "/first", "424 failed"),
        (connect, "1", "503", "-", "free"),
        (connect, "2", "503", "-", "424 failed"),
        ("response_timeout", "1", "504", "-", "424 failed"),
        ("never_heard_of", "1", "200", "-", "424 failed"),
    ] {
        let status_told = status.parse().unwrap();
        assert_eq!(
            answered(details, attempts, status, "body", redirected),
            (status_told, expected.to_owned()),
            "{details} {attempts} {status} {redirected}"
        );
    }
    // This filter, behind itself: nothing ran, and the client may come again.
    let refused = (503, "free".to_owned());
    for details in ["idempotency_in_flight", "idempotency_store_unavailable", "idempotency_mismatch"] {
        assert_eq!(answered(details, "0", "409", "{}", "-"), refused, "{details}");
    }
    // One that ran it, or replays, in a key space of its own: its answer is the upstream's.
    for details in ["idempotency_executed", "idempotency_replayed"] {
        assert_eq!(answered(details, "0", "201", "{}", "-"), (201, "201 replay".to_owned()), "{details}");
    }
}

/// What lacks its details was made on the way to the execution listener, or by one that doesn't tell.
#[test]
fn an_answer_without_details_proves_only_a_missing_connection() {
    let connect =
        "upstream connect error or disconnect/reset before headers. reset reason: remote connection failure";
    let reset =
        "upstream connect error or disconnect/reset before headers. reset reason: connection termination";
    for (status, body, told, free) in [
        ("503", connect, 503, true),
        ("503", "no healthy upstream", 503, true),
        ("503", reset, 502, false),
        ("503", "busy", 503, false),
        ("504", "upstream request timeout", 504, false),
        ("504", "slow", 504, false),
        ("200", "made", 200, false),
        ("404", connect, 404, false),
    ] {
        let mut world = world(json!({}));
        let mut trip = world.post("amount=1");
        world.executed(&mut trip, &[(":status", status)], body);
        assert_eq!(trip.reply.as_ref().unwrap().status, told, "{status} {body}");
        let next = world.post("amount=1");
        assert_eq!(
            (next.executing.is_some(), next.refused_as(424, "failed")),
            (free, !free),
            "{status} {body}"
        );
        assert_eq!(world.count(Counter::ExecutionUnavailable), u64::from(free), "{status} {body}");
    }
}

#[test]
fn no_answer_is_a_time_out_or_a_reset_by_the_time_it_took() {
    for (passed, status, reason) in [(SECOND, 502, "reset"), (SECOND * 10, 504, "timeout")] {
        let mut world = world(json!({}));
        let mut trip = world.post("amount=1");
        world.pass(passed);
        world.feed(&mut trip, Event::Executed(ExecutionAnswer::Unanswered));
        assert_eq!(trip.refusal(), Some((status, "failed".to_owned())));
        let next = world.post("amount=1");
        assert!(next.refused_as(424, "failed"), "{reason}");
        let problem: serde_json::Value = serde_json::from_slice(next.reply.unwrap().body()).unwrap();
        assert_eq!(problem["reason"], reason);
    }
}

#[test]
fn what_never_left_is_free_again() {
    for why in [
        NotDispatched::Unreadable,
        NotDispatched::UnknownCluster,
        NotDispatched::NobodyListens,
        NotDispatched::RootGone,
    ] {
        let mut world = world(json!({}));
        let mut trip = world.post("amount=1");
        world.feed(&mut trip, Event::Executed(ExecutionAnswer::NotDispatched(why)));
        assert!(trip.refused_as(503, "execution-unavailable"), "{why:?}");
        assert_eq!((trip.warnings.len(), world.records()), (1, 0), "{why:?}");
        assert_eq!(world.post("amount=1").executing, Some((1, true)), "{why:?}");
    }
}

#[test]
fn without_room_nothing_runs_and_the_claim_is_given_back() {
    let rule = json!({"execution": "detached", "execute_timeout": "10s",
        "max_request_body_bytes": 1000, "max_response_body_bytes": 2000});
    let mut world = World::with(json!({"execute_cluster": "e", "limits": {"detached_bytes": 4000}}), rule);
    let mut first = world.post("amount=1");
    assert_eq!(world.worker.detached.taken(), 2008);
    let other = world.request(&[("idempotency-key", "other"), ("x-account-id", "alice")], "amount=1");
    assert!(other.refused_as(503, "execution-unavailable") && other.executing.is_none());
    world.flush_outbox();
    assert_eq!(world.records(), 1, "only the first holds a claim");
    world.executed_with(&mut first, "200", "made");
    let other = world.request(&[("idempotency-key", "other"), ("x-account-id", "alice")], "amount=1");
    assert!(other.executing.is_some());
}

/// The room for the response is granted at the start; what goes beyond it needs more.
#[test]
fn an_answer_beyond_its_room_is_not_read_and_leaves_a_tombstone() {
    let rule = json!({"execution": "detached", "execute_timeout": "10s",
        "max_request_body_bytes": 1000, "max_response_body_bytes": 2000});
    let mut world = World::with(json!({"execute_cluster": "e", "limits": {"detached_bytes": 3000}}), rule);
    let mut trip = world.post("amount=1");
    assert!(trip.exchange.make_room(2000) && trip.exchange.make_room(2900));
    assert!(!trip.exchange.make_room(3000));
    let headers = [
        (":status", "201"),
        (DETAILS_HEADER, "via_upstream"),
        (ATTEMPTS_HEADER, "1"),
        ("location", "/pay/1"),
    ];
    let headers = idempotency::headers::HeaderBlock::from_pairs(headers);
    let answer = ExecutionAnswer::Answered { headers: &headers, body: None, has_trailers: false };
    world.feed(&mut trip, Event::Executed(answer));
    for trip in [&trip, &world.post("amount=1")] {
        assert_eq!(trip.refusal(), Some((409, "response-not-kept".to_owned())));
        assert_eq!(trip.reply_header("location").as_deref(), Some("/pay/1"));
    }
}

/// Unread, a 503 may be a proxy's for a request that ran.
#[test]
fn a_release_status_whose_body_was_not_read_frees_nothing() {
    let mut world = world(json!({}));
    let mut trip = world.post("amount=1");
    let headers = [(":status", "503"), (DETAILS_HEADER, "via_upstream"), (ATTEMPTS_HEADER, "1")];
    let headers = idempotency::headers::HeaderBlock::from_pairs(headers);
    let answer = ExecutionAnswer::Answered { headers: &headers, body: None, has_trailers: false };
    world.feed(&mut trip, Event::Executed(answer));
    assert!(trip.refused_as(409, "response-not-kept"));
    assert!(world.post("amount=1").refused_as(424, "failed"));
}

/// What the execution listener tells is for the filter alone, and no setting keeps it.
#[test]
fn a_replay_carries_nothing_of_the_report() {
    let mut world = world(json!({"keep_response_headers": [DETAILS_HEADER, "x-made"]}));
    let mut trip = world.post("amount=1");
    world.executed_with(&mut trip, "201", "made");
    for trip in [&trip, &world.post("amount=1")] {
        assert_eq!(trip.reply_header("x-made").as_deref(), Some("1"));
        for name in [DETAILS_HEADER, ATTEMPTS_HEADER, REDIRECTED_HEADER] {
            assert_eq!(trip.reply_header(name), None, "{name}");
        }
    }
}

/// A small execution takes room as well: many of them are bounded.
#[test]
fn an_execution_without_a_body_takes_room() {
    let rule = json!({"execution": "detached", "execute_timeout": "10s",
        "max_request_body_bytes": 0, "max_response_body_bytes": 0});
    let mut world = World::with(json!({"execute_cluster": "e", "limits": {"detached_bytes": 2047}}), rule);
    let headers = |key| [("idempotency-key", key), ("x-account-id", "alice")];
    let first = world.head(&headers("one"), true);
    assert!(first.executing.is_some());
    assert!(world.head(&headers("two"), true).refused_as(503, "execution-unavailable"));
}

#[test]
fn trailers_leave_a_tombstone_and_the_client_its_answer() {
    let mut world = world(json!({}));
    let mut trip = world.post("amount=1");
    let headers = [(":status", "200"), (DETAILS_HEADER, "via_upstream"), (ATTEMPTS_HEADER, "1")];
    let headers = idempotency::headers::HeaderBlock::from_pairs(headers);
    let answer =
        ExecutionAnswer::Answered { headers: &headers, body: Some(b"made".to_vec()), has_trailers: true };
    world.feed(&mut trip, Event::Executed(answer));
    assert_eq!(trip.reply.as_ref().unwrap().body(), b"made");
    assert!(world.post("amount=1").refused_as(409, "response-not-kept"));
}

/// A failed write goes to the outbox and frees nothing; the client has its answer.
#[test]
fn a_lost_store_write_is_tried_again_and_the_client_is_answered() {
    let mut world = world(json!({}));
    let mut trip = world.post("amount=1");
    world.store.borrow_mut().errors.push_back(StoreError::Unavailable);
    world.executed_with(&mut trip, "201", "made");
    assert_eq!(trip.reply.as_ref().unwrap().status, 201);
    assert!(world.post("amount=1").refused_as(409, "in-flight"));
    world.flush_outbox();
    assert!(world.post("amount=1").replayed(201, "made"));
}

#[test]
fn the_client_need_not_wait_for_the_record() {
    let mut world = world(json!({"commit": "after_response"}));
    let mut trip = world.post("amount=1");
    world.deferred = true;
    world.executed_with(&mut trip, "201", "made");
    assert_eq!(trip.reply.as_ref().unwrap().status, 201);
    assert_eq!(trip.gate, Gate::HoldRequest);
    world.local_head(&mut trip, "idempotency_executed", None, 201, &[("content-type", "text/plain")], false);
    world.answer(&mut trip);
    world.deferred = false;
    never_forwarded(&trip);
    assert!(world.post("amount=1").replayed(201, "made"));
    assert_eq!(world.count(Counter::UnexpectedEvents), 0);
}

#[test]
fn an_unprotected_execution_is_marked_and_still_kept() {
    let mut world = World::with(
        json!({"execute_cluster": "e", "on_store_error": "allow"}),
        json!({"execution": "detached", "execute_timeout": "10s"}),
    );
    world.store.borrow_mut().errors.push_back(StoreError::Unavailable);
    let mut trip = world.post("amount=1");
    assert_eq!(trip.executing, Some((1, false)));
    world.executed_with(&mut trip, "201", "made");
    assert_eq!(trip.reply_header("idempotency-protection").as_deref(), Some("none"));
    assert!(world.post("amount=1").replayed(201, "made"));
}

/// A client that leaves while its claim is out was never executed.
#[test]
fn a_client_that_leaves_before_the_claim_is_answered_runs_nothing() {
    let mut world = world(json!({}));
    world.deferred = true;
    let mut trip = world.post("amount=1");
    leave(&mut world, &mut trip);
    world.answer(&mut trip);
    world.deferred = false;
    world.flush_outbox();
    assert_eq!((trip.executing, world.records()), (None, 0));
}
