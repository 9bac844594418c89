//! What the host calls (proxy-wasm ABI 0.2.1): which context a callback is for.
//!
//! The SDK's dispatcher panics on an id it does not know, looks every id up by a keyed hash, asks the host for the context
//! that the host has already set, and exports what this filter never uses. This one does none of that. Nothing calls back
//! while a callback runs but `proxy_on_memory_allocate`; if it did, a request would be held, never let go.

use std::cell::RefCell;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use super::hostcalls::{self, LogLevel};
use super::root::Root;
#[cfg(feature = "test-hooks")]
use super::store_driver::StoreDriver;
use super::stream::Stream;
use super::{request_end_hold, stream};

/// What becomes of the part of a stream that a callback announced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Action {
    /// It goes on.
    Continue = 0,
    /// It is held.
    Pause = 1,
}

/// A stream's context.
pub enum HttpContext {
    /// Of the filter.
    Filter(Stream),
    /// Of the link to Redis.
    RequestEndHold,
    /// Of the store contract's tests.
    #[cfg(feature = "test-hooks")]
    StoreDriver,
}

struct Contexts {
    /// A handful at most: one for each plugin configuration of the VM.
    roots: RefCell<Vec<Root>>,
    streams: RefCell<HashMap<u32, HttpContext, BuildHasherDefault<IdHasher>>>,
}

thread_local! {
    static CONTEXTS: Contexts = const {
        Contexts {
            roots: RefCell::new(Vec::new()),
            streams: RefCell::new(HashMap::with_hasher(BuildHasherDefault::new())),
        }
    };
}

/// The host counts its ids up: they spread by themselves, once their low bits are where the table looks.
#[derive(Default)]
struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    fn write_u32(&mut self, id: u32) {
        // Fibonacci hashing.
        self.0 = u64::from(id).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

fn with_root<T>(id: u32, otherwise: T, act: impl FnOnce(&mut Root) -> T) -> T {
    CONTEXTS.with(|contexts| {
        let Ok(mut roots) = contexts.roots.try_borrow_mut() else { return otherwise };
        match roots.iter_mut().find(|root| root.id() == id) {
            Some(root) => act(root),
            None => otherwise,
        }
    })
}

fn with_stream<T>(id: u32, otherwise: T, act: impl FnOnce(&mut HttpContext) -> T) -> T {
    CONTEXTS.with(|contexts| {
        let Ok(mut streams) = contexts.streams.try_borrow_mut() else { return otherwise };
        match streams.get_mut(&id) {
            Some(stream) => act(stream),
            None => otherwise,
        }
    })
}

/// Names the version of the ABI.
#[unsafe(no_mangle)]
pub extern "C" fn proxy_abi_version_0_2_1() {}

/// Runs once, before anything else.
#[unsafe(no_mangle)]
pub extern "C" fn _initialize() {
    unsafe extern "C" {
        fn __wasm_call_ctors();
    }
    // SAFETY: the linker makes it, and the host calls this function once.
    unsafe { __wasm_call_ctors() };
    std::panic::set_hook(Box::new(|panic| hostcalls::log(LogLevel::Critical, &panic.to_string())));
    if log::set_logger(&Logger).is_ok() {
        log::set_max_level(log::LevelFilter::Info);
    }
}

/// Memory for what the host hands over; [`hostcalls`] takes it as a boxed slice of that size.
#[unsafe(no_mangle)]
pub extern "C" fn proxy_on_memory_allocate(size: usize) -> *mut u8 {
    Box::into_raw(Box::<[u8]>::new_uninit_slice(size)).cast()
}

/// A plugin configuration's root, or a stream of one.
#[unsafe(no_mangle)]
pub extern "C" fn proxy_on_context_create(id: u32, root_id: u32) {
    CONTEXTS.with(|contexts| {
        if root_id == 0 {
            if let Ok(mut roots) = contexts.roots.try_borrow_mut() {
                roots.push(Root::new(id));
            }
            return;
        }
        let context = contexts.roots.try_borrow().ok().and_then(|roots| {
            roots.iter().find(|root| root.id() == root_id).and_then(|root| root.create_stream(id))
        });
        if let (Some(context), Ok(mut streams)) = (context, contexts.streams.try_borrow_mut()) {
            streams.insert(id, context);
        }
    });
}

/// The VM has no configuration of its own.
#[unsafe(no_mangle)]
pub const extern "C" fn proxy_on_vm_start(_root_id: u32, _size: usize) -> bool {
    true
}

/// A plugin configuration is there; `false` refuses it.
#[unsafe(no_mangle)]
pub extern "C" fn proxy_on_configure(root_id: u32, _size: usize) -> bool {
    with_root(root_id, false, Root::on_configure)
}

/// Time passed.
#[unsafe(no_mangle)]
pub extern "C" fn proxy_on_tick(root_id: u32) {
    with_root(root_id, (), |root| root.on_tick());
}

/// A queue has an item.
#[unsafe(no_mangle)]
pub extern "C" fn proxy_on_queue_ready(root_id: u32, queue: u32) {
    with_root(root_id, (), |root| root.on_queue_ready(queue));
}

/// A callout of a root's was answered, or was not.
#[unsafe(no_mangle)]
pub extern "C" fn proxy_on_http_call_response(
    root_id: u32,
    token: u32,
    headers: usize,
    body_size: usize,
    trailers: usize,
) {
    with_root(root_id, (), |root| root.on_http_call_response(token, headers, body_size, trailers));
}

/// The head of a request. One that no context stands for is not forwarded.
#[unsafe(no_mangle)]
pub extern "C" fn proxy_on_request_headers(id: u32, _lines: usize, end: bool) -> Action {
    with_stream(id, None, |stream| {
        Some(match stream {
            HttpContext::Filter(stream) => stream.on_request_head(end),
            HttpContext::RequestEndHold => Action::Continue,
            #[cfg(feature = "test-hooks")]
            HttpContext::StoreDriver => Action::Pause,
        })
    })
    .unwrap_or_else(stream::refuse_unknown)
}

/// A piece of a request's body.
#[unsafe(no_mangle)]
pub extern "C" fn proxy_on_request_body(id: u32, size: usize, end: bool) -> Action {
    with_stream(id, Action::Pause, |stream| match stream {
        HttpContext::Filter(stream) => stream.on_request_body(size, end),
        HttpContext::RequestEndHold => request_end_hold::on_request_body(end),
        #[cfg(feature = "test-hooks")]
        HttpContext::StoreDriver => StoreDriver::on_request_body(size, end),
    })
}

/// A request's trailers.
#[unsafe(no_mangle)]
pub extern "C" fn proxy_on_request_trailers(id: u32, _lines: usize) -> Action {
    with_stream(id, Action::Pause, |stream| match stream {
        HttpContext::Filter(stream) => stream.on_request_trailers(),
        HttpContext::RequestEndHold => Action::Pause,
        #[cfg(feature = "test-hooks")]
        HttpContext::StoreDriver => Action::Continue,
    })
}

fn with_filter(id: u32, act: impl FnOnce(&mut Stream) -> Action) -> Action {
    with_stream(id, Action::Continue, |stream| match stream {
        HttpContext::Filter(stream) => act(stream),
        HttpContext::RequestEndHold => Action::Continue,
        #[cfg(feature = "test-hooks")]
        HttpContext::StoreDriver => Action::Continue,
    })
}

/// The head of a response.
#[unsafe(no_mangle)]
pub extern "C" fn proxy_on_response_headers(id: u32, _lines: usize, end: bool) -> Action {
    with_filter(id, |stream| stream.on_response_head(end))
}

/// A piece of a response's body.
#[unsafe(no_mangle)]
pub extern "C" fn proxy_on_response_body(id: u32, size: usize, end: bool) -> Action {
    with_filter(id, |stream| stream.on_response_body(size, end))
}

/// A response's trailers.
#[unsafe(no_mangle)]
pub extern "C" fn proxy_on_response_trailers(id: u32, _lines: usize) -> Action {
    with_filter(id, Stream::on_response_trailers)
}

/// The stream is over.
#[unsafe(no_mangle)]
pub extern "C" fn proxy_on_log(id: u32) {
    with_filter(id, |stream| {
        stream.on_log();
        Action::Continue
    });
}

/// A root goes, or a stream.
#[unsafe(no_mangle)]
pub extern "C" fn proxy_on_done(id: u32) -> bool {
    with_root(id, (), |root| root.on_done());
    true
}

/// The context is not called again.
#[unsafe(no_mangle)]
pub extern "C" fn proxy_on_delete(id: u32) {
    CONTEXTS.with(|contexts| {
        let stream = contexts.streams.try_borrow_mut().ok().and_then(|mut streams| streams.remove(&id));
        if stream.is_none()
            && let Ok(mut roots) = contexts.roots.try_borrow_mut()
        {
            roots.retain(|root| root.id() != id);
        }
    });
}

struct Logger;

impl log::Log for Logger {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.level() <= log::max_level()
    }

    fn log(&self, record: &log::Record<'_>) {
        if self.enabled(record.metadata()) {
            let level = match record.level() {
                log::Level::Trace => LogLevel::Trace,
                log::Level::Debug => LogLevel::Debug,
                log::Level::Info => LogLevel::Info,
                log::Level::Warn => LogLevel::Warn,
                log::Level::Error => LogLevel::Error,
            };
            hostcalls::log(level, &record.args().to_string());
        }
    }

    fn flush(&self) {}
}
