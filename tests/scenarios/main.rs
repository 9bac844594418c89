//! Whole exchanges on a virtual clock: every row of the design's tables, and how often the upstream executes.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, missing_docs)]

mod detached;
mod world;

use std::time::Duration;

use idempotency::exchange::{Event, Gate};
use idempotency::metrics::Counter;
use idempotency::store::StoreError;
use serde_json::json;
use world::{Trip, World};

const SECOND: Duration = Duration::from_secs(1);

fn world() -> World {
    World::new(json!({}))
}

fn complete(world: &mut World, status: u16, body: &str) -> Trip {
    let mut trip = world.post("b");
    world.respond(&mut trip, status, &[], body);
    trip
}

#[test]
fn the_first_request_runs_and_the_retry_is_replayed() {
    let mut world = world();
    let first = complete(&mut world, 201, "paid");
    assert!(first.forwarded && first.reply.is_none());
    assert_eq!(first.gate, Gate::Pass);
    let retry = world.post("b");
    assert!(retry.replayed(201, "paid"));
    assert_eq!(retry.reply_header("cache-control").as_deref(), Some("no-store"));
    assert_eq!(world.count(Counter::Executed), 1);
}

#[test]
fn a_duplicate_of_a_live_execution_gets_409_with_retry_after() {
    let mut world = world();
    let _first = world.post("b");
    let duplicate = world.post("b");
    assert!(duplicate.refused_as(409, "in-flight"));
    assert_eq!(duplicate.reply_header("retry-after").as_deref(), Some("1"));
    assert_eq!(world.count(Counter::Executed), 1);
}

#[test]
fn retry_after_follows_the_usual_execution_time() {
    let mut world = world();
    for key in ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"] {
        let mut trip = world.request(&[("idempotency-key", key), ("x-account-id", "alice")], "b");
        world.pass(SECOND * 10);
        world.respond(&mut trip, 200, &[], "x");
    }
    let _first = world.post("b");
    world.pass(SECOND * 2);
    let duplicate = world.post("b");
    // 1 s, smoothed ten times towards 10 s with weight 1/8, is 7.6 s; 2 s of it are over.
    assert_eq!(duplicate.reply_header("retry-after").as_deref(), Some("6"));
}

#[test]
fn the_fingerprint_is_compared_first_whatever_the_records_state() {
    // In flight.
    let mut world = world();
    let mut first = world.post("b");
    assert!(world.post("other").refused_as(422, "mismatch"));
    // Completed.
    world.respond(&mut first, 200, &[], "x");
    assert!(world.post("other").refused_as(422, "mismatch"));
    assert!(world.post("b").replayed(200, "x"));
    // Failed.
    let mut world = World::new(json!({}));
    complete(&mut world, 500, "no");
    assert!(world.post("other").refused_as(422, "mismatch"));
    // Abandoned, takeover and retain.
    for on_abandoned in ["takeover", "retain"] {
        let mut world = World::new(json!({"on_abandoned": on_abandoned}));
        let _first = world.post("b");
        world.pass(SECOND * 61);
        assert!(world.post("other").refused_as(422, "mismatch"), "{on_abandoned}");
    }
}

#[test]
fn an_abandoned_record_is_taken_over_as_attempt_two() {
    let mut world = world();
    let _crashed = world.post("b");
    world.pass(SECOND * 61);
    let mut second = world.post("b");
    assert!(second.forwarded);
    assert_eq!(second.request_headers.get("x-idempotency-attempt").map(String::as_str), Some("2"));
    assert_eq!(world.count(Counter::Takeovers), 1);
    world.respond(&mut second, 201, &[], "second");
    assert!(world.post("b").replayed(201, "second"));
}

#[test]
fn an_abandoned_record_is_kept_under_retain() {
    let mut world = World::new(json!({"on_abandoned": "retain"}));
    let _crashed = world.post("b");
    world.pass(SECOND * 61);
    assert!(world.post("b").refused_as(424, "abandoned"));
    assert_eq!(world.count(Counter::Executed), 1);
}

#[test]
fn a_crash_heals_after_the_lease_and_not_after_the_records_life() {
    let mut world = world();
    let _crashed = world.post("b");
    world.pass(SECOND * 59);
    assert!(world.post("b").refused_as(409, "in-flight"));
    world.pass(SECOND * 2);
    assert!(world.post("b").forwarded);
}

#[test]
fn a_failing_status_is_retained_or_released_as_the_rule_says() {
    let mut retain = world();
    complete(&mut retain, 500, "no");
    assert!(retain.post("b").refused_as(424, "failed"));
    assert_eq!((retain.count(Counter::Executed), retain.count(Counter::RetainedStatus)), (1, 1));

    let mut release = World::new(json!({"on_failure": "release"}));
    complete(&mut release, 500, "no");
    assert!(release.post("b").forwarded);
    assert_eq!(release.count(Counter::ReleasedFailure), 1);
}

#[test]
fn a_not_processed_status_gives_the_claim_back() {
    for status in [401, 407, 408, 421, 425, 429, 501, 503] {
        let mut world = world();
        complete(&mut world, status, "later");
        assert_eq!(world.records(), 0, "{status}");
        let mut again = world.post("b");
        world.respond(&mut again, 200, &[], "ok");
        assert!(world.post("b").replayed(200, "ok"), "{status}");
        assert_eq!(world.count(Counter::ReleasedStatus), 1, "{status}");
    }
}

#[test]
fn a_503_that_a_sidecar_made_for_a_lost_request_is_unknown() {
    let mut world = world();
    let text =
        "upstream connect error or disconnect/reset before headers. reset reason: connection termination";
    complete(&mut world, 503, text);
    assert!(world.post("b").refused_as(424, "failed"));
    assert_eq!(world.count(Counter::RetainedIntermediary), 1);
}

#[test]
fn a_503_cut_off_before_its_text_may_be_a_sidecars() {
    let mut world = world();
    let mut trip = world.post("b");
    let head = [("server", "envoy"), ("content-type", "text/plain"), ("content-length", "95")];
    world.respond_head(&mut trip, 503, &head, false);
    world.close(&mut trip, "upstream_reset_after_response_started{connection_termination}", 0x40);
    assert!(world.post("b").refused_as(424, "failed"));
    assert_eq!(world.count(Counter::Executed), 1);
}

#[test]
fn once_a_not_processed_status_was_seen_a_cut_off_changes_nothing() {
    let mut world = world();
    let mut trip = world.post("b");
    world.respond_head(&mut trip, 429, &[("content-length", "100")], false);
    world.close(&mut trip, "downstream_remote_disconnect", 0x4000);
    assert!(world.post("b").forwarded);
}

#[test]
fn what_never_reached_an_upstream_is_released_always() {
    for (details, attempts) in [
        ("no_healthy_upstream", None),
        ("route_not_found", None),
        ("ext_authz_denied", None),
        ("upstream_reset_before_response_started{remote_connection_failure|delayed}", Some(1)),
        ("upstream_reset_before_response_started{overflow}", Some(1)),
    ] {
        let mut world = world();
        let mut trip = world.post("b");
        world.local_head(&mut trip, details, attempts, 503, &[], true);
        assert_eq!(world.count(Counter::ReleasedNotSent), 1, "{details}");
        assert!(world.post("b").forwarded, "{details}");
    }
}

#[test]
fn an_unknown_outcome_is_retained_or_released_as_the_rule_says() {
    for (details, counter) in [
        ("response_timeout", Counter::RetainedTimeout),
        ("upstream_reset_before_response_started{connection_termination}", Counter::RetainedReset),
        ("lua_response", Counter::RetainedReplaced),
    ] {
        let mut world = world();
        let mut trip = world.post("b");
        world.local_head(&mut trip, details, Some(1), 503, &[], true);
        assert_eq!(world.count(counter), 1, "{details}");
        assert!(world.post("b").refused_as(424, "failed"), "{details}");

        let mut released = World::new(json!({"on_unknown": "release"}));
        let mut trip = released.post("b");
        released.local_head(&mut trip, details, Some(1), 503, &[], true);
        assert!(released.post("b").forwarded, "{details}");
    }
}

#[test]
fn a_client_that_leaves_after_forwarding_leaves_an_unknown_outcome() {
    let mut world = world();
    let mut trip = world.post("b");
    world.close(&mut trip, "downstream_remote_disconnect", 0x4000);
    let retry = world.post("b");
    assert!(retry.refused_as(424, "failed"));
    assert_eq!((world.count(Counter::Executed), world.count(Counter::RetainedClientGone)), (1, 1));
}

#[test]
fn a_client_that_leaves_while_its_body_arrives_claims_nothing() {
    let mut world = world();
    let mut trip = world.head(&[("idempotency-key", "k"), ("x-account-id", "alice")], false);
    world.feed(&mut trip, Event::RequestBody { chunk: b"half", end: false });
    world.close(&mut trip, "downstream_remote_disconnect", 0x4000);
    assert_eq!(world.records(), 0);
}

#[test]
fn a_response_cut_off_is_truncated_and_never_replayed() {
    let mut world = world();
    let mut trip = world.post("b");
    world.respond_head(&mut trip, 200, &[("content-length", "10")], false);
    world.feed(&mut trip, Event::ResponseBody { chunk: b"half", skipped: 0, end: false });
    world.close(&mut trip, "upstream_reset_after_response_started{connection_termination}", 0x40);
    assert_eq!(world.count(Counter::RetainedTruncated), 1);
    assert!(world.post("b").refused_as(424, "failed"));
}

#[test]
fn what_the_client_does_after_the_responses_end_changes_nothing() {
    let mut world = world();
    let mut trip = complete(&mut world, 200, "whole");
    world.close(&mut trip, "downstream_remote_disconnect", 0x4000);
    assert!(world.post("b").replayed(200, "whole"));
}

#[test]
fn the_frame_that_completes_the_length_waits_for_the_end() {
    let mut world = world();
    let mut trip = world.post("b");
    world.respond_head(&mut trip, 200, &[("content-length", "4")], false);
    world.feed(&mut trip, Event::ResponseBody { chunk: b"wh", skipped: 0, end: false });
    assert_eq!(trip.gate, Gate::Pass);
    world.feed(&mut trip, Event::ResponseBody { chunk: b"ol", skipped: 0, end: false });
    assert_eq!(trip.gate, Gate::HoldResponse);
    world.feed(&mut trip, Event::ResponseBody { chunk: b"", skipped: 0, end: true });
    assert_eq!(trip.gate, Gate::Pass);
    assert!(world.post("b").replayed(200, "whol"));
}

#[test]
fn a_last_frame_whose_end_does_not_come_is_let_go_and_kept() {
    let mut world = world();
    let mut trip = world.post("b");
    world.respond_head(&mut trip, 200, &[("content-length", "4")], false);
    world.feed(&mut trip, Event::ResponseBody { chunk: b"whol", skipped: 0, end: false });
    world.pass(SECOND);
    world.feed(&mut trip, Event::Ticked);
    assert_eq!(trip.gate, Gate::Pass);
    world.close(&mut trip, "downstream_remote_disconnect", 0x4000);
    assert!(world.post("b").replayed(200, "whol"));
}

#[test]
fn what_was_not_kept_is_a_tombstone_with_status_and_location() {
    let too_long = "x".repeat(262_145);
    let announced = too_long.len().to_string();
    let cases: [(&str, Vec<(&str, &str)>); 3] = [
        ("announced", vec![("content-length", announced.as_str()), ("location", "/pay/1")]),
        ("streamed", vec![("location", "/pay/1")]),
        ("event stream", vec![("content-type", "text/event-stream"), ("location", "/pay/1")]),
    ];
    for (name, headers) in cases {
        let mut world = world();
        let mut trip = world.post("b");
        world.respond(&mut trip, 201, &headers, if name == "event stream" { "data: 1" } else { &too_long });
        let retry = world.post("b");
        assert!(retry.refused_as(409, "response-not-kept"), "{name}");
        assert_eq!(retry.reply_header("location").as_deref(), Some("/pay/1"), "{name}");
        assert_eq!(retry.reply_header("retry-after"), None, "{name}");
        assert_eq!(world.count(Counter::Tombstones), 1, "{name}");
    }
}

#[test]
fn the_largest_body_that_is_kept_is_kept_whole() {
    let body = "x".repeat(262_144);
    let mut world = world();
    let mut trip = world.post("b");
    world.respond(&mut trip, 200, &[], &body);
    assert!(world.post("b").replayed(200, &body));
}

#[test]
fn a_response_with_trailers_is_a_tombstone_even_when_its_length_was_announced() {
    let mut world = world();
    let mut trip = world.post("b");
    world.respond_head(&mut trip, 200, &[("content-length", "4")], false);
    world.feed(&mut trip, Event::ResponseBody { chunk: b"whol", skipped: 0, end: false });
    world.feed(&mut trip, Event::ResponseTrailers);
    assert_eq!(trip.gate, Gate::Pass);
    assert!(world.post("b").refused_as(409, "response-not-kept"));
}

#[test]
fn captures_beyond_the_workers_budget_are_tombstones_and_give_their_bytes_back() {
    let mut world = World::with(json!({"limits": {"captured_bytes": 4096}}), json!({}));
    let mut trip = world.post("b");
    world.respond(&mut trip, 200, &[], &"x".repeat(5000));
    assert!(world.post("b").refused_as(409, "response-not-kept"));
    assert_eq!(world.worker.captured.taken(), 0);
}

#[test]
fn a_body_whose_length_disagrees_with_its_head_is_not_kept() {
    let mut world = world();
    let mut trip = world.post("b");
    world.respond(&mut trip, 200, &[("content-length", "9")], "short");
    assert!(world.post("b").refused_as(409, "response-not-kept"));
}

#[test]
fn an_empty_response_is_kept_and_replayed() {
    for status in [200, 201, 204, 304] {
        let mut world = world();
        let mut trip = world.post("b");
        world.respond_head(&mut trip, status, &[("etag", "\"1\"")], true);
        let retry = world.post("b");
        assert!(retry.replayed(status, ""), "{status}");
        assert_eq!(retry.reply_header("etag").as_deref(), Some("\"1\""), "{status}");
    }
}

#[test]
fn cors_headers_are_replayed_only_to_the_same_origin() {
    let mut world = world();
    let headers = [("idempotency-key", "k"), ("x-account-id", "alice"), ("origin", "https://a.example")];
    let mut trip = world.request(&headers, "b");
    let cors = [("access-control-allow-origin", "https://a.example"), ("vary", "origin")];
    world.respond(&mut trip, 200, &cors, "x");
    let same = world.request(&headers, "b");
    assert_eq!(same.reply_header("access-control-allow-origin").as_deref(), Some("https://a.example"));
    let other = [("idempotency-key", "k"), ("x-account-id", "alice"), ("origin", "https://b.example")];
    let other = world.request(&other, "b");
    assert!(other.replayed(200, "x"));
    assert_eq!(other.reply_header("access-control-allow-origin"), None);
    let none = world.post("b");
    assert_eq!(none.reply_header("access-control-allow-origin"), None);
}

#[test]
fn a_slow_execution_keeps_its_lease_while_its_exchange_lives() {
    let mut world = world();
    let mut slow = world.post("b");
    for _ in 0..20 {
        world.pass(SECOND * 20);
        world.feed(&mut slow, Event::Ticked);
        assert!(world.post("b").refused_as(409, "in-flight"));
    }
    world.respond(&mut slow, 200, &[], "late");
    assert!(world.post("b").replayed(200, "late"));
    assert_eq!(world.count(Counter::Executed), 1);
}

#[test]
fn an_owner_that_lost_its_lease_says_so_and_never_overwrites() {
    let mut world = world();
    let mut slow = world.post("b");
    world.pass(SECOND * 61);
    let mut second = world.post("b");
    assert!(second.forwarded);
    world.feed(&mut slow, Event::Ticked);
    assert_eq!(slow.warnings.len(), 1);
    world.respond(&mut second, 201, &[], "second");
    world.respond(&mut slow, 201, &[], "first");
    assert!(world.post("b").replayed(201, "second"));
    assert_eq!(world.count(Counter::StaleWrites), 2);
}

#[test]
fn a_body_that_does_not_come_is_refused_and_claims_nothing() {
    let mut world = world();
    let mut trip = world.head(&[("idempotency-key", "k"), ("x-account-id", "alice")], false);
    world.pass(SECOND * 14);
    world.feed(&mut trip, Event::Ticked);
    assert!(trip.reply.is_none());
    world.pass(SECOND * 2);
    world.feed(&mut trip, Event::Ticked);
    assert!(trip.refused_as(408, "body-timeout"));
    assert_eq!((world.records(), world.count(Counter::StopIterationMissing)), (0, 1));
    assert!(trip.warnings[0].contains("allow_on_headers_stop_iteration"));
}

#[test]
fn a_worker_that_has_seen_bodies_does_not_blame_the_setting() {
    let mut world = world();
    complete(&mut world, 200, "x");
    let mut trip = world.head(&[("idempotency-key", "k2"), ("x-account-id", "alice")], false);
    world.pass(SECOND * 16);
    world.feed(&mut trip, Event::Ticked);
    assert!(trip.refused_as(408, "body-timeout"));
    assert!(trip.warnings.is_empty());
}

#[test]
fn a_body_that_keeps_coming_is_not_late() {
    let mut world = world();
    let mut trip = world.head(&[("idempotency-key", "k"), ("x-account-id", "alice")], false);
    for _ in 0..10 {
        world.pass(SECOND * 14);
        world.feed(&mut trip, Event::RequestBody { chunk: b"x", end: false });
        world.feed(&mut trip, Event::Ticked);
    }
    assert!(trip.reply.is_none());
    world.feed(&mut trip, Event::RequestTrailers);
    assert!(trip.forwarded);
}

#[test]
fn a_body_over_the_limit_is_refused_before_any_claim() {
    let mut world = World::new(json!({"max_request_body_bytes": 8}));
    let announced = [("idempotency-key", "k"), ("x-account-id", "alice"), ("content-length", "9")];
    assert!(world.head(&announced, false).refused_as(413, "payload-too-large"));
    let mut trip = world.head(&[("idempotency-key", "k"), ("x-account-id", "alice")], false);
    world.feed(&mut trip, Event::RequestBody { chunk: b"12345678", end: false });
    assert!(trip.reply.is_none());
    world.feed(&mut trip, Event::RequestBody { chunk: b"9", end: false });
    assert!(trip.refused_as(413, "payload-too-large"));
    assert_eq!(world.records(), 0);
    assert!(world.post("small").forwarded);
}

#[test]
fn a_request_without_a_key_is_refused_or_passes_as_the_rule_says() {
    let account = [("x-account-id", "alice")];
    assert!(world().request(&account, "b").refused_as(400, "missing-key"));
    let mut pass = World::new(json!({"missing_key": "pass"}));
    let first = pass.request(&account, "b");
    let second = pass.request(&account, "b");
    assert!(first.forwarded && second.forwarded);
    assert_eq!((pass.records(), pass.count(Counter::BypassedNoKey)), (0, 2));
}

#[test]
fn two_callers_with_the_same_key_each_run() {
    let mut world = world();
    for caller in ["alice", "bob"] {
        let headers = [("idempotency-key", "k"), ("x-account-id", caller)];
        let mut trip = world.request(&headers, "b");
        world.respond(&mut trip, 200, &[], caller);
        assert!(world.request(&headers, "b").replayed(200, caller));
    }
    assert_eq!(world.count(Counter::Executed), 2);
    assert!(world.request(&[("idempotency-key", "k")], "b").refused_as(400, "invalid-scope"));
}

#[test]
fn inbound_marks_are_removed_before_forwarding() {
    let mut world = world();
    let trip = world.request(
        &[
            ("idempotency-key", "k"),
            ("x-account-id", "alice"),
            ("x-idempotency-attempt", "7"),
            ("idempotency-protection", "none"),
        ],
        "b",
    );
    assert_eq!(trip.removed_headers, ["x-idempotency-attempt", "idempotency-protection"]);
    assert!(trip.request_headers.is_empty());
}

#[test]
fn a_store_that_does_not_answer_denies_or_allows_as_configured() {
    let mut deny = world();
    deny.store.borrow_mut().errors.push_back(StoreError::Unavailable);
    let refused = deny.post("b");
    assert!(refused.refused_as(503, "store-unavailable"));
    assert!(refused.reply_header("retry-after").is_some());
    assert_eq!(deny.count(Counter::Executed), 0);

    let mut allow = World::with(json!({"on_store_error": "allow"}), json!({}));
    allow.store.borrow_mut().errors.push_back(StoreError::Unavailable);
    let mut let_through = allow.post("b");
    assert!(let_through.forwarded);
    assert_eq!(let_through.request_headers.get("idempotency-protection").map(String::as_str), Some("none"));
    allow.respond(&mut let_through, 200, &[], "x");
    assert_eq!(let_through.response_headers, [("idempotency-protection".to_owned(), b"none".to_vec())]);
    assert_eq!(allow.count(Counter::Unprotected), 1);
    // It kept its owner, so its end was written all the same.
    assert!(allow.post("b").replayed(200, "x"));
}

#[test]
fn a_full_or_unreadable_store_is_never_let_through() {
    for (error, kind) in [(StoreError::Full, "store-full"), (StoreError::Unreadable, "store-unavailable")] {
        let mut world = World::with(json!({"on_store_error": "allow"}), json!({}));
        world.store.borrow_mut().errors.push_back(error);
        assert!(world.post("b").refused_as(503, kind));
    }
}

#[test]
fn a_kept_response_that_cannot_be_read_is_not_absent() {
    let mut world = world();
    complete(&mut world, 200, "x");
    for record in world.store.borrow_mut().records.values_mut() {
        if let idempotency::record::RecordState::Completed { response } = &mut record.state {
            response[0] = 99;
        }
    }
    assert!(world.post("b").refused_as(503, "store-unavailable"));
    assert_eq!(world.count(Counter::Executed), 1);
}

#[test]
fn a_write_the_store_did_not_take_waits_in_the_outbox_and_frees_nothing() {
    let mut world = world();
    let mut trip = world.post("b");
    world.store.borrow_mut().errors.push_back(StoreError::Unavailable);
    world.respond(&mut trip, 201, &[], "paid");
    assert_eq!(trip.gate, Gate::Pass, "the client is not kept waiting");
    assert!(world.post("b").refused_as(409, "in-flight"));
    world.store.borrow_mut().errors.push_back(StoreError::Unavailable);
    world.flush_outbox();
    assert_eq!(world.outbox.len(), 1);
    world.pass(SECOND);
    world.flush_outbox();
    assert!(world.outbox.is_empty());
    assert!(world.post("b").replayed(201, "paid"));
    assert_eq!(world.count(Counter::Executed), 1);
}

#[test]
fn a_client_that_leaves_while_its_claim_is_asked_for_leaves_no_orphan() {
    let mut world = world();
    world.deferred = true;
    let mut trip = world.post("b");
    assert_eq!(trip.gate, Gate::HoldRequest);
    world.close(&mut trip, "downstream_remote_disconnect", 0x4000);
    world.answer(&mut trip);
    assert_eq!(world.records(), 1);
    world.flush_outbox();
    assert_eq!(world.records(), 0);
}

#[test]
fn an_end_waits_for_the_renewal_that_is_out() {
    let mut world = world();
    world.deferred = true;
    let mut trip = world.post("b");
    world.answer(&mut trip);
    world.pass(SECOND * 30);
    world.feed(&mut trip, Event::Ticked);
    world.respond(&mut trip, 200, &[], "x");
    assert_eq!(trip.gate, Gate::HoldResponse);
    world.answer(&mut trip);
    assert_eq!(trip.gate, Gate::HoldResponse);
    world.answer(&mut trip);
    assert_eq!(trip.gate, Gate::Pass);
    world.deferred = false;
    assert!(world.post("b").replayed(200, "x"));
}

#[test]
fn after_response_never_holds_a_response() {
    let mut world = World::new(json!({"commit": "after_response"}));
    world.deferred = true;
    let mut trip = world.post("b");
    world.answer(&mut trip);
    world.respond_head(&mut trip, 200, &[("content-length", "1")], false);
    world.feed(&mut trip, Event::ResponseBody { chunk: b"x", skipped: 0, end: false });
    assert_eq!(trip.gate, Gate::Pass);
    world.feed(&mut trip, Event::ResponseBody { chunk: b"", skipped: 0, end: true });
    assert_eq!(trip.gate, Gate::Pass);
}

#[test]
fn an_internal_redirect_hands_the_claim_to_the_next_pass() {
    let mut world = world();
    let mut first = world.post("b");
    world.close(&mut first, "internal_redirect", 0);
    let handover = first.handover.take().expect("handed over");
    let mut second = world.trip();
    world.feed(&mut second, Event::Adopted(handover));
    second.forwarded = true;
    world.respond(&mut second, 200, &[], "redirected");
    assert!(world.post("b").replayed(200, "redirected"));
    assert_eq!(world.count(Counter::Executed), 1);
}

#[test]
fn what_the_last_pass_did_not_do_does_not_give_the_first_back() {
    for details in ["via_upstream", "no_healthy_upstream"] {
        let mut world = world();
        let mut first = world.post("b");
        world.close(&mut first, "internal_redirect", 0);
        let handover = first.handover.take().expect("handed over");
        let mut second = world.trip();
        world.feed(&mut second, Event::Adopted(handover));
        world.local_head(&mut second, details, None, 503, &[], true);
        assert_eq!(world.count(Counter::RetainedRedirected), 1, "{details}");
        assert!(world.post("b").refused_as(424, "failed"), "{details}");
        assert_eq!(world.count(Counter::Executed), 1, "{details}");
    }
}

#[test]
fn a_redirect_while_a_renewal_is_out_leaves_nobody_waiting() {
    let mut world = world();
    let mut first = world.post("b");
    world.deferred = true;
    world.pass(SECOND * 21);
    world.feed(&mut first, Event::Ticked);
    world.close(&mut first, "internal_redirect", 0);
    let handover = first.handover.take().expect("handed over");
    world.answer(&mut first);
    let mut second = world.trip();
    world.feed(&mut second, Event::Adopted(handover));
    second.forwarded = true;
    world.respond(&mut second, 200, &[], "redirected");
    assert_eq!(second.gate, Gate::HoldResponse);
    world.answer(&mut second);
    assert_eq!(second.gate, Gate::Pass);
    world.deferred = false;
    assert!(world.post("b").replayed(200, "redirected"));
    assert_eq!(world.count(Counter::Executed), 1);
}

#[test]
fn envoys_own_reply_while_the_body_arrives_claims_nothing() {
    let mut world = world();
    let mut trip = world.head(&[("idempotency-key", "k"), ("x-account-id", "alice")], false);
    world.feed(&mut trip, Event::RequestBody { chunk: b"much", end: false });
    world.local_head(&mut trip, "request_payload_too_large", None, 413, &[], true);
    assert_eq!((trip.gate, world.records()), (Gate::Pass, 0));
}

#[test]
fn events_in_the_wrong_state_are_ignored() {
    let mut world = world();
    let mut trip = complete(&mut world, 200, "x");
    world.respond_head(&mut trip, 500, &[], true);
    world.feed(&mut trip, Event::ResponseTrailers);
    world.feed(&mut trip, Event::Ticked);
    world.feed(&mut trip, Event::RequestTrailers);
    world.close(&mut trip, "downstream_remote_disconnect", 0x4000);
    assert!(world.post("b").replayed(200, "x"));
}

#[test]
fn nothing_that_is_logged_or_published_shows_a_key_or_a_scope() {
    let mut world = world();
    let headers = [("idempotency-key", "secret-key-1"), ("x-account-id", "secret-account")];
    let mut trip = world.request(&headers, "secret-body");
    world.respond(&mut trip, 200, &[], "x");
    let duplicate = world.request(&headers, "other");
    let lines = trip.published.iter().chain(&duplicate.published).cloned().collect::<String>()
        + &String::from_utf8_lossy(duplicate.reply.as_ref().unwrap().body())
        + &format!("{:?} {:?}", trip.exchange, world.store.borrow().records.keys());
    assert!(!lines.contains("secret"), "{lines}");
    assert!(trip.published[0].starts_with("executing rule=payments attempt=1 key="));
}

#[test]
fn a_redirect_whose_second_leg_was_not_sent_is_not_given_back() {
    let mut world = world();
    let mut first = world.post("b");
    world.close(&mut first, "internal_redirect", 0);
    let handover = first.handover.take().unwrap();
    let mut second = world.trip();
    world.feed(&mut second, Event::Adopted(handover));
    world.local_head(&mut second, "no_healthy_upstream", None, 503, &[], true);
    assert!(!world.post("b").forwarded, "first leg ran, retry runs again");
}

#[test]
fn a_redirect_whose_second_leg_was_not_processed_is_not_given_back() {
    let mut world = world();
    let mut first = world.post("b");
    world.close(&mut first, "internal_redirect", 0);
    let handover = first.handover.take().unwrap();
    let mut second = world.trip();
    world.feed(&mut second, Event::Adopted(handover));
    world.respond_head(&mut second, 503, &[], true);
    assert!(!world.post("b").forwarded, "first leg ran, retry runs again");
}

#[test]
fn a_503_after_an_earlier_attempt_is_unknown_unless_retries_are_trusted() {
    let mut world = world();
    let mut t = world.post("b");
    world.local_head(&mut t, "via_upstream", Some(2), 503, &[], true);
    assert!(!world.post("b").forwarded);
}

#[test]
fn a_failing_status_that_is_cut_off_is_truncated() {
    let mut world = World::new(json!({"on_failure": "release"}));
    let mut t = world.post("b");
    world.respond_head(&mut t, 500, &[("content-length", "100")], false);
    world.feed(&mut t, Event::ResponseBody { chunk: b"x", skipped: 0, end: false });
    world.close(&mut t, "upstream_reset_after_response_started{connection_termination}", 0x40);
    assert_eq!(world.count(Counter::RetainedTruncated), 1);
    assert!(world.post("b").refused_as(424, "failed"));
}

#[test]
fn a_sidecars_text_cut_off_is_unknown() {
    let mut world = world();
    let mut t = world.post("b");
    world.respond_head(
        &mut t,
        503,
        &[("server", "envoy"), ("content-type", "text/plain"), ("content-length", "95")],
        false,
    );
    world.feed(&mut t, Event::ResponseBody { chunk: b"upstream connect err", skipped: 0, end: false });
    world.close(&mut t, "upstream_reset_after_response_started{connection_termination}", 0x40);
    assert!(world.post("b").refused_as(424, "failed"));
}

#[test]
fn a_mesh_sidecars_head_cut_off_is_unknown() {
    let mut world = world();
    let mut t = world.post("b");
    world.respond_head(
        &mut t,
        503,
        &[("server", "istio-envoy"), ("content-type", "text/plain"), ("content-length", "95")],
        false,
    );
    world.close(&mut t, "upstream_reset_after_response_started{connection_termination}", 0x40);
    assert!(world.post("b").refused_as(424, "failed"));
}

#[test]
fn a_304_that_announces_a_length_is_replayed() {
    let mut world = world();
    let mut t = world.post("b");
    world.respond_head(&mut t, 304, &[("content-length", "100"), ("etag", "\"1\"")], true);
    assert!(world.post("b").replayed(304, ""));
}

#[test]
fn a_write_in_the_outbox_keeps_its_lease() {
    let mut world = world();
    let mut t = world.post("b");
    world.store.borrow_mut().refuses_responses = true;
    world.respond(&mut t, 201, &[], "paid");
    for _ in 0..200 {
        world.flush_outbox();
        world.pass(SECOND);
        assert!(world.post("b").refused_as(409, "in-flight"));
    }
    world.store.borrow_mut().refuses_responses = false;
    world.flush_outbox();
    assert!(world.post("b").replayed(201, "paid"));
    assert_eq!(world.count(Counter::Executed), 1);
}

#[test]
fn a_stream_reset_by_the_client_is_a_client_gone() {
    let mut world = world();
    let mut t = world.post("b");
    world.close(&mut t, "http2.remote_reset", 1 << 28);
    assert_eq!(world.count(Counter::RetainedClientGone), 1);
}

#[test]
fn a_tombstone_obeys_the_drop_list() {
    let mut world = World::new(json!({"drop_response_headers": ["location"], "max_response_body_bytes": 10}));
    let mut t = world.post("b");
    world.respond(&mut t, 201, &[("location", "/secret"), ("content-length", "20")], "01234567890123456789");
    assert_eq!(world.post("b").reply_header("location"), None);
}

#[test]
fn trailers_after_the_last_frame_was_let_go_still_make_a_tombstone() {
    let mut world = world();
    let mut t = world.post("b");
    world.respond_head(&mut t, 200, &[("content-length", "4")], false);
    world.feed(&mut t, Event::ResponseBody { chunk: b"whol", skipped: 0, end: false });
    world.pass(SECOND);
    world.feed(&mut t, Event::Ticked);
    world.feed(&mut t, Event::ResponseTrailers);
    assert!(world.post("b").refused_as(409, "response-not-kept"));
}

#[test]
fn inbound_marks_are_removed_from_a_request_without_a_key_too() {
    let mut world = World::new(json!({"missing_key": "pass"}));
    let t = world.request(&[("x-account-id", "a"), ("x-idempotency-attempt", "7")], "b");
    assert_eq!(t.removed_headers, ["x-idempotency-attempt"]);
}

#[test]
fn an_event_stream_in_capitals_is_one() {
    let mut world = world();
    let mut t = world.post("b");
    world.respond(&mut t, 200, &[("content-type", "Text/Event-Stream")], "data: 1");
    assert!(world.post("b").refused_as(409, "response-not-kept"));
}

fn waiting(rule: serde_json::Value) -> World {
    let mut rule = rule;
    rule["in_flight"] = json!("wait");
    World::with(json!({"limits": {"waiters": 2}}), rule)
}

#[test]
fn a_duplicate_that_waits_gets_the_replay() {
    let mut world = waiting(json!({}));
    let mut first = world.post("b");
    let mut duplicate = world.post("b");
    assert_eq!((duplicate.gate, duplicate.reply.is_some()), (Gate::HoldRequest, false));
    for _ in 0..5 {
        world.pass(SECOND);
        world.feed(&mut duplicate, Event::Ticked);
    }
    assert!(duplicate.reply.is_none() && !duplicate.forwarded);
    world.respond(&mut first, 201, &[], "paid");
    world.pass(SECOND * 2);
    world.feed(&mut duplicate, Event::Ticked);
    assert!(duplicate.replayed(201, "paid"));
    assert_eq!((world.count(Counter::Executed), world.count(Counter::Waited)), (1, 1));
}

#[test]
fn a_duplicate_waits_no_longer_than_it_may() {
    let mut world = waiting(json!({"wait_timeout": "3s"}));
    let _first = world.post("b");
    let mut duplicate = world.post("b");
    for _ in 0..3 {
        world.pass(SECOND);
        world.feed(&mut duplicate, Event::Ticked);
    }
    assert!(duplicate.refused_as(409, "in-flight"));
    assert_eq!((world.count(Counter::Executed), world.count(Counter::WaitTimeouts)), (1, 1));
}

#[test]
fn a_duplicate_that_waits_may_become_the_one_that_executes() {
    let mut world = waiting(json!({}));
    let mut first = world.post("b");
    let mut duplicate = world.post("b");
    world.respond(&mut first, 503, &[], "busy");
    world.pass(SECOND);
    world.feed(&mut duplicate, Event::Ticked);
    assert!(duplicate.forwarded);
    world.respond(&mut duplicate, 200, &[], "done");
    assert!(world.post("b").replayed(200, "done"));
}

#[test]
fn no_more_duplicates_wait_than_may_and_places_come_back() {
    let mut world = waiting(json!({}));
    let _first = world.post("b");
    let mut waiters = [world.post("b"), world.post("b")];
    assert!(world.post("b").refused_as(409, "in-flight"));
    for waiter in &mut waiters {
        world.close(waiter, "downstream_remote_disconnect", 0x4000);
    }
    assert!(world.post("b").reply.is_none());
}

#[test]
fn another_request_never_waits() {
    let mut world = waiting(json!({}));
    let _first = world.post("b");
    assert!(world.post("other").refused_as(422, "mismatch"));
}

fn shadow() -> World {
    World::new(json!({"mode": "shadow"}))
}

#[test]
fn under_shadow_everything_passes_and_what_would_have_been_is_counted() {
    let mut world = shadow();
    let mut first = world.head(&[("idempotency-key", "k"), ("x-account-id", "alice")], false);
    assert_eq!(first.gate, Gate::Pass);
    world.feed(&mut first, Event::RequestBody { chunk: b"b", end: true });
    assert_eq!((first.gate, first.reply.is_some()), (Gate::Pass, false));
    let mut conflict = world.head(&[("idempotency-key", "k"), ("x-account-id", "alice")], false);
    world.feed(&mut conflict, Event::RequestBody { chunk: b"b", end: true });
    first.forwarded = true;
    world.respond(&mut first, 201, &[("content-length", "4")], "paid");
    for body in ["b", "other"] {
        let mut again = world.head(&[("idempotency-key", "k"), ("x-account-id", "alice")], false);
        world.feed(&mut again, Event::RequestBody { chunk: body.as_bytes(), end: true });
        assert_eq!((again.gate, again.reply.is_some()), (Gate::Pass, false));
    }
    let _keyless = world.head(&[("x-account-id", "alice")], true);
    for (counter, expected) in [
        (Counter::ShadowExecuted, 1),
        (Counter::ShadowConflicts, 1),
        (Counter::ShadowReplayed, 1),
        (Counter::ShadowMismatches, 1),
        (Counter::ShadowRejected, 1),
        (Counter::Executed, 0),
        (Counter::Replayed, 0),
    ] {
        assert_eq!(world.count(counter), expected, "{}", counter.name());
    }
    assert!(first.published.is_empty() && first.request_headers.is_empty());
}

#[test]
fn a_shadow_whose_answer_comes_after_its_response_still_ends() {
    let mut world = shadow();
    world.deferred = true;
    let mut trip = world.head(&[("idempotency-key", "k"), ("x-account-id", "alice")], true);
    trip.forwarded = true;
    world.respond(&mut trip, 200, &[], "x");
    world.answer(&mut trip);
    world.answer(&mut trip);
    world.deferred = false;
    let _again = world.head(&[("idempotency-key", "k"), ("x-account-id", "alice")], true);
    assert_eq!((world.count(Counter::ShadowExecuted), world.count(Counter::ShadowReplayed)), (1, 1));
}

#[test]
fn a_shadow_ignores_its_store() {
    let mut world = shadow();
    world.store.borrow_mut().errors.push_back(StoreError::Unavailable);
    let mut trip = world.head(&[("idempotency-key", "k"), ("x-account-id", "alice")], true);
    trip.forwarded = true;
    world.respond(&mut trip, 200, &[], "x");
    world.close(&mut trip, "", 0);
    assert_eq!((trip.gate, world.count(Counter::StoreErrors), world.records()), (Gate::Pass, 1, 0));
}

/// G06: Envoy below 1.38.4 loses a part of a body that was held and is let go before its end.
#[test]
fn a_body_that_was_held_is_let_go_only_whole() {
    let headers = [("idempotency-key", "k"), ("x-account-id", "alice")];
    let piece = |end| Event::RequestBody { chunk: b"", end };
    let begun = |held: bool| {
        let mut world = World::new(json!({"fingerprint": {"body": false, "headers": ["content-digest"]}}));
        world.deferred = true;
        let mut trip = world.head(&headers, false);
        if held {
            world.feed(&mut trip, piece(false));
        }
        world.answer(&mut trip);
        world.deferred = false;
        (world, trip)
    };
    // Nothing of the body had come: it flows.
    let (_, trip) = begun(false);
    assert!(trip.forwarded);
    // A part had come: it waits for the rest.
    for trailers in [false, true] {
        let (mut world, mut trip) = begun(true);
        assert!(!trip.forwarded && trip.gate == Gate::HoldRequest);
        world.feed(&mut trip, piece(false));
        assert!(!trip.forwarded);
        assert!(world.post("").refused_as(409, "in-flight"));
        world.feed(&mut trip, if trailers { Event::RequestTrailers } else { piece(true) });
        assert!(trip.forwarded);
        world.respond(&mut trip, 201, &[], "made");
        assert!(world.head(&headers, true).replayed(201, "made"));
    }
    // The rest never comes: nothing ran, and the key is free.
    for closed in [true, false] {
        let (mut world, mut trip) = begun(true);
        if closed {
            world.close(&mut trip, "downstream_remote_disconnect", 1 << 14);
        } else {
            world.local_head(&mut trip, "stream_idle_timeout", None, 408, &[], true);
        }
        assert_eq!((world.records(), world.count(Counter::ReleasedNotSent)), (0, 1), "closed: {closed}");
    }
}
