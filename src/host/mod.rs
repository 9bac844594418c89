//! The proxy-wasm side: callbacks in, host calls out. The only room that talks to Envoy.

mod execution;
mod hostcalls;
mod io;
mod metrics;
mod redis;
mod request_end_hold;
mod root;
mod shared_data;
#[cfg(feature = "test-hooks")]
mod store_driver;
mod stream;
#[cfg(feature = "test-hooks")]
mod test_hooks;
mod wake;

use proxy_wasm::traits::RootContext;
use proxy_wasm::types::LogLevel;

proxy_wasm::main! {{
    proxy_wasm::set_log_level(LogLevel::Info);
    proxy_wasm::set_root_context(|context_id| -> Box<dyn RootContext> { Box::new(root::Root::new(context_id)) });
}}
