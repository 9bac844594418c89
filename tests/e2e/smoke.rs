//! The shortest proof that the filter works: first run, replay, conflict, mismatch.

use serde_json::json;

use crate::support::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_request_runs_and_the_retry_is_replayed() {
    let origin = Origin::start().await;
    let envoy = Envoy::builder().plugin(plugin_with(json!({}))).origin_addr(origin.addr()).start().await;
    for proto in Protocol::BOTH {
        let key = unique_key();
        let request = Request::post("/pay").key(&key).body("amount=1");
        let first = send_once(envoy.addr(), proto, &request).await.unwrap();
        let retry = send_once(envoy.addr(), proto, &request).await.unwrap();
        assert_eq!((first.status, retry.status), (200, 200), "{}", envoy.log_text());
        assert_eq!(first.body, retry.body);
        assert_eq!(first.header("idempotent-replayed"), None);
        assert_eq!(retry.header("idempotent-replayed"), Some("true"));
        assert_eq!(origin.executions_of(&key), 1);
        let other =
            send_once(envoy.addr(), proto, &Request::post("/pay").key(&key).body("amount=2")).await.unwrap();
        assert_eq!((other.status, other.problem_type().as_deref()), (422, Some("mismatch")));
        assert_eq!(origin.executions_of(&key), 1);
    }
}
