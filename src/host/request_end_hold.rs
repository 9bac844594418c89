//! The role `request_end_hold`: keeps the end of a request from the upstream, for the link to Redis.
//!
//! A callout always ends its request, and the TCP upstream turns that end into a half-close, on which `redis_proxy`
//! drops its replies. At the end of the body this filter adds a trailer, so that the data goes on without the end; a
//! trailer that arrives is held for ever. A filter never sees the trailers it added itself, so the link has two of
//! these in a row. `QUIT`, the last command, makes `redis_proxy` close, and that ends the exchange.

use proxy_wasm::traits::{Context, HttpContext};
use proxy_wasm::types::Action;

use super::hostcalls::{self, Map};

/// A request of the link.
pub struct RequestEndHold;

impl Context for RequestEndHold {}

impl HttpContext for RequestEndHold {
    fn on_http_request_body(&mut self, _body_size: usize, end_of_stream: bool) -> Action {
        if end_of_stream && hostcalls::add_header(Map::RequestTrailers, "x-end", b"held").is_err() {
            log::error!("request_end_hold: no trailer can be added, so redis_proxy will drop its replies");
        }
        Action::Continue
    }

    fn on_http_request_trailers(&mut self, _num_trailers: usize) -> Action {
        Action::Pause
    }
}
