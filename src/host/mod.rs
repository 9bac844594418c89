//! The proxy-wasm side: callbacks in, host calls out. The only room that talks to Envoy.

mod abi;
mod execution;
mod hostcalls;
mod io;
mod metrics;
mod random;
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
