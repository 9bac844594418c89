use super::abi::Action;
use super::hostcalls::{self, Map};

/// Puts a trailer behind the end of the body.
pub fn on_request_body(end: bool) -> Action {
    if end && hostcalls::add_header(Map::RequestTrailers, "x-end", b"held").is_err() {
        log::error!("request_end_hold: no trailer can be added, so redis_proxy will drop its replies");
    }
    Action::Continue
}
