//! The host functions the filter uses, each returning a `Result`.
//!
//! The SDK's wrappers panic on statuses they don't expect and on header values that are not UTF-8, and a trap
//! kills the worker's VM for every plugin in it. These don't.

use std::ptr::{null, null_mut};
use std::time::Duration;

use crate::headers::serialize_pairs;

/// The host refused, with its status code (`WasmResult` in proxy-wasm-cpp-host `include/proxy-wasm/wasm_api_impl.h`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostError(pub u32);

/// `BadArgument`.
pub const BAD_ARGUMENT: u32 = 2;
/// `CasMismatch`.
pub const CAS_MISMATCH: u32 = 8;
const OK: u32 = 0;
const NOT_FOUND: u32 = 1;

/// Which header map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Map {
    /// Of the request.
    Request = 0,
    /// The request's trailers.
    RequestTrailers = 1,
    /// Of the response.
    Response = 2,
    /// The response's trailers.
    ResponseTrailers = 3,
    /// Of a callout's answer; only while it is delivered, and only if it has any.
    CalloutResponse = 6,
    /// The trailers of a callout's answer, under the same conditions.
    CalloutResponseTrailers = 7,
}

/// Which buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Buffer {
    /// The request's body.
    RequestBody = 0,
    /// The response's body.
    ResponseBody = 1,
    /// The body of a callout's answer, while it is delivered.
    CalloutResponseBody = 4,
    /// The plugin's configuration.
    PluginConfiguration = 7,
}

/// Which direction of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Direction {
    /// The request.
    Request = 0,
    /// The response.
    Response = 1,
}

/// Which kind of metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum MetricKind {
    /// Goes up.
    Counter = 0,
    /// Goes up and down.
    Gauge = 1,
    /// Takes samples.
    Histogram = 2,
}

/// How grave a line of the log is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum LogLevel {
    /// Every step.
    Trace = 0,
    /// For whoever looks for a fault.
    Debug = 1,
    /// Worth knowing.
    Info = 2,
    /// Worth a look.
    Warn = 3,
    /// Something does not work.
    Error = 4,
    /// The VM goes.
    Critical = 5,
}

#[link(wasm_import_module = "env")]
unsafe extern "C" {
    fn proxy_log(level: u32, text: *const u8, size: usize) -> u32;
    fn proxy_http_call(
        cluster: *const u8,
        cluster_size: usize,
        headers: *const u8,
        headers_size: usize,
        body: *const u8,
        body_size: usize,
        trailers: *const u8,
        trailers_size: usize,
        timeout_millis: u32,
        token: *mut u32,
    ) -> u32;
    fn proxy_get_header_map_pairs(map: u32, data: *mut *mut u8, size: *mut usize) -> u32;
    fn proxy_set_header_map_pairs(map: u32, data: *const u8, size: usize) -> u32;
    fn proxy_get_header_map_value(
        map: u32,
        key: *const u8,
        key_size: usize,
        data: *mut *mut u8,
        size: *mut usize,
    ) -> u32;
    fn proxy_replace_header_map_value(
        map: u32,
        key: *const u8,
        key_size: usize,
        value: *const u8,
        value_size: usize,
    ) -> u32;
    fn proxy_add_header_map_value(
        map: u32,
        key: *const u8,
        key_size: usize,
        value: *const u8,
        value_size: usize,
    ) -> u32;
    fn proxy_register_shared_queue(name: *const u8, name_size: usize, id: *mut u32) -> u32;
    fn proxy_enqueue_shared_queue(id: u32, value: *const u8, value_size: usize) -> u32;
    fn proxy_dequeue_shared_queue(id: u32, data: *mut *mut u8, size: *mut usize) -> u32;
    fn proxy_remove_header_map_value(map: u32, key: *const u8, key_size: usize) -> u32;
    fn proxy_get_property(path: *const u8, path_size: usize, data: *mut *mut u8, size: *mut usize) -> u32;
    fn proxy_set_property(path: *const u8, path_size: usize, value: *const u8, value_size: usize) -> u32;
    fn proxy_get_shared_data(
        key: *const u8,
        key_size: usize,
        data: *mut *mut u8,
        size: *mut usize,
        cas: *mut u32,
    ) -> u32;
    fn proxy_set_shared_data(
        key: *const u8,
        key_size: usize,
        value: *const u8,
        value_size: usize,
        cas: u32,
    ) -> u32;
    fn proxy_get_buffer_bytes(
        buffer: u32,
        start: usize,
        max_size: usize,
        data: *mut *mut u8,
        size: *mut usize,
    ) -> u32;
    fn proxy_send_local_response(
        status: u32,
        details: *const u8,
        details_size: usize,
        body: *const u8,
        body_size: usize,
        headers: *const u8,
        headers_size: usize,
        grpc_status: i32,
    ) -> u32;
    fn proxy_continue_stream(stream: u32) -> u32;
    fn proxy_set_effective_context(context_id: u32) -> u32;
    fn proxy_set_tick_period_milliseconds(period: u32) -> u32;
    fn proxy_define_metric(kind: u32, name: *const u8, name_size: usize, id: *mut u32) -> u32;
    fn proxy_increment_metric(id: u32, offset: i64) -> u32;
    fn proxy_record_metric(id: u32, value: u64) -> u32;
    fn proxy_call_foreign_function(
        name: *const u8,
        name_size: usize,
        arguments: *const u8,
        arguments_size: usize,
        data: *mut *mut u8,
        size: *mut usize,
    ) -> u32;
}

#[link(wasm_import_module = "wasi_snapshot_preview1")]
unsafe extern "C" {
    fn clock_time_get(clock: u32, precision: u64, time: *mut u64) -> u16;
    fn random_get(buffer: *mut u8, size: usize) -> u16;
}

const CLOCK_MONOTONIC: u32 = 1;

fn check(status: u32) -> Result<(), HostError> {
    if status == OK { Ok(()) } else { Err(HostError(status)) }
}

/// Memory the host allocated in the guest through `proxy_on_memory_allocate`.
struct Returned {
    data: *mut u8,
    size: usize,
}

impl Returned {
    const fn new() -> Self {
        Self { data: null_mut(), size: 0 }
    }

    fn into_vec(self) -> Vec<u8> {
        if self.data.is_null() {
            return Vec::new();
        }
        // SAFETY: `proxy_on_memory_allocate` made `data` as a boxed slice of `size` bytes, the host filled all of it and gives each
        // allocation away once.
        unsafe { Vec::from_raw_parts(self.data, self.size, self.size) }
    }
}

/// Writes a line of the log. One that the host does not take is lost.
pub fn log(level: LogLevel, text: &str) {
    // SAFETY: the pointer is valid for the call.
    unsafe { proxy_log(level as u32, text.as_ptr(), text.len()) };
}

/// Sends a request to a cluster; its answer comes to the root whose callback this is called from, with this token.
pub fn http_call(
    cluster: &str,
    headers: &[(&str, &str)],
    body: &[u8],
    timeout: Duration,
) -> Result<u32, HostError> {
    let headers = serialize_pairs(headers);
    let no_trailers = serialize_pairs::<&str, &str>(&[]);
    let body_data = if body.is_empty() { null() } else { body.as_ptr() };
    let millis = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX);
    let mut token = 0;
    // SAFETY: the pointers are valid for the call.
    check(unsafe {
        proxy_http_call(
            cluster.as_ptr(),
            cluster.len(),
            headers.as_ptr(),
            headers.len(),
            body_data,
            body.len(),
            no_trailers.as_ptr(),
            no_trailers.len(),
            millis,
            &raw mut token,
        )
    })?;
    Ok(token)
}

/// All lines of a map, serialized.
pub fn header_pairs(map: Map) -> Result<Vec<u8>, HostError> {
    let mut returned = Returned::new();
    // SAFETY: the pointers are valid for the call.
    check(unsafe { proxy_get_header_map_pairs(map as u32, &raw mut returned.data, &raw mut returned.size) })?;
    Ok(returned.into_vec())
}

/// The first line of that name; `None` when there is none, or the map can't be read in this phase.
pub fn header(map: Map, name: &str) -> Option<Vec<u8>> {
    let mut returned = Returned::new();
    // SAFETY: the pointers are valid for the call.
    let status = unsafe {
        proxy_get_header_map_value(
            map as u32,
            name.as_ptr(),
            name.len(),
            &raw mut returned.data,
            &raw mut returned.size,
        )
    };
    let value = returned.into_vec();
    (status == OK).then_some(value)
}

/// Replaces all lines of that name.
pub fn set_header(map: Map, name: &str, value: &[u8]) -> Result<(), HostError> {
    // SAFETY: the pointers are valid for the call.
    check(unsafe {
        proxy_replace_header_map_value(map as u32, name.as_ptr(), name.len(), value.as_ptr(), value.len())
    })
}

/// Adds a line.
pub fn add_header(map: Map, name: &str, value: &[u8]) -> Result<(), HostError> {
    // SAFETY: the pointers are valid for the call.
    check(unsafe {
        proxy_add_header_map_value(map as u32, name.as_ptr(), name.len(), value.as_ptr(), value.len())
    })
}

/// Registers a queue whose items wake the root that runs.
pub fn register_queue(name: &str) -> Result<u32, HostError> {
    let mut id = 0;
    // SAFETY: the pointers are valid for the call.
    check(unsafe { proxy_register_shared_queue(name.as_ptr(), name.len(), &raw mut id) })?;
    Ok(id)
}

/// Adds an item to a queue.
pub fn enqueue(queue: u32, item: &[u8]) -> Result<(), HostError> {
    // SAFETY: the pointers are valid for the call.
    check(unsafe { proxy_enqueue_shared_queue(queue, item.as_ptr(), item.len()) })
}

/// Takes an item off a queue; `false` when it is empty.
pub fn dequeue(queue: u32) -> bool {
    let mut returned = Returned::new();
    // SAFETY: the pointers are valid for the call.
    let status = unsafe { proxy_dequeue_shared_queue(queue, &raw mut returned.data, &raw mut returned.size) };
    drop(returned.into_vec());
    status == OK
}

/// Replaces the whole map by these serialized lines.
pub fn set_header_pairs(map: Map, lines: &[u8]) -> Result<(), HostError> {
    // SAFETY: the pointer is valid for the call.
    check(unsafe { proxy_set_header_map_pairs(map as u32, lines.as_ptr(), lines.len()) })
}

/// Removes all lines of that name.
pub fn remove_header(map: Map, name: &str) -> Result<(), HostError> {
    // SAFETY: the pointers are valid for the call.
    check(unsafe { proxy_remove_header_map_value(map as u32, name.as_ptr(), name.len()) })
}

/// An Envoy attribute; `None` when there is none, or the host does not tell. An empty one is `None` too.
pub fn property(path: &[&str]) -> Option<Vec<u8>> {
    try_property(path).ok().flatten()
}

/// An Envoy attribute; `None` when there is none. An empty one is `None` too.
pub fn try_property(path: &[&str]) -> Result<Option<Vec<u8>>, HostError> {
    let joined = join_path(path);
    let mut returned = Returned::new();
    // SAFETY: the pointers are valid for the call.
    let status = unsafe {
        proxy_get_property(joined.as_ptr(), joined.len(), &raw mut returned.data, &raw mut returned.size)
    };
    let value = returned.into_vec();
    match status {
        OK if value.is_empty() => Ok(None),
        OK => Ok(Some(value)),
        NOT_FOUND => Ok(None),
        other => Err(HostError(other)),
    }
}

/// Whether an Envoy attribute exists.
pub fn has_property(path: &[&str]) -> bool {
    let joined = join_path(path);
    let mut returned = Returned::new();
    // SAFETY: the pointers are valid for the call.
    let status = unsafe {
        proxy_get_property(joined.as_ptr(), joined.len(), &raw mut returned.data, &raw mut returned.size)
    };
    drop(returned.into_vec());
    status != NOT_FOUND
}

fn join_path(path: &[&str]) -> Vec<u8> {
    let mut joined = Vec::with_capacity(path.iter().map(|part| part.len() + 1).sum());
    for (index, part) in path.iter().enumerate() {
        if index > 0 {
            joined.push(0);
        }
        joined.extend_from_slice(part.as_bytes());
    }
    joined
}

/// Sets the filter state `wasm.<name>` of the current stream.
pub fn set_filter_state(name: &str, value: &[u8]) -> Result<(), HostError> {
    // SAFETY: the pointers are valid for the call.
    check(unsafe { proxy_set_property(name.as_ptr(), name.len(), value.as_ptr(), value.len()) })
}

/// Reads the filter state `wasm.<name>` of the current stream.
pub fn filter_state(name: &str) -> Option<Vec<u8>> {
    property(&[name])
}

/// A value of the process-wide map and its version; `None` for a name that was never written.
pub fn shared_data(name: &str) -> Result<Option<(Vec<u8>, u32)>, HostError> {
    let mut returned = Returned::new();
    let mut cas = 0;
    // SAFETY: the pointers are valid for the call.
    let status = unsafe {
        proxy_get_shared_data(
            name.as_ptr(),
            name.len(),
            &raw mut returned.data,
            &raw mut returned.size,
            &raw mut cas,
        )
    };
    let value = returned.into_vec();
    match status {
        OK => Ok(Some((value, cas))),
        NOT_FOUND => Ok(None),
        other => Err(HostError(other)),
    }
}

/// Writes a value if the name's version is `cas`. On a name never written, any non-zero `cas` inserts.
pub fn set_shared_data(name: &str, value: &[u8], cas: u32) -> Result<(), HostError> {
    // SAFETY: the pointers are valid for the call.
    check(unsafe { proxy_set_shared_data(name.as_ptr(), name.len(), value.as_ptr(), value.len(), cas) })
}

/// Bytes of a buffer.
pub fn buffer(buffer: Buffer, start: usize, max_size: usize) -> Result<Vec<u8>, HostError> {
    let mut returned = Returned::new();
    // SAFETY: the pointers are valid for the call.
    let status = unsafe {
        proxy_get_buffer_bytes(buffer as u32, start, max_size, &raw mut returned.data, &raw mut returned.size)
    };
    let value = returned.into_vec();
    match status {
        OK => Ok(value),
        NOT_FOUND => Ok(Vec::new()),
        other => Err(HostError(other)),
    }
}

/// Answers the current stream. At most once per stream.
pub fn send_local_response(status: u32, details: &str, headers: &[u8], body: &[u8]) -> Result<(), HostError> {
    let body_data = if body.is_empty() { null() } else { body.as_ptr() };
    // SAFETY: the pointers are valid for the call.
    check(unsafe {
        proxy_send_local_response(
            status,
            details.as_ptr(),
            details.len(),
            body_data,
            body.len(),
            headers.as_ptr(),
            headers.len(),
            -1,
        )
    })
}

/// Lets a held direction of the current stream go on.
pub fn resume(direction: Direction) -> Result<(), HostError> {
    // SAFETY: takes no pointer.
    check(unsafe { proxy_continue_stream(direction as u32) })
}

/// Makes a stream the one that host calls act on. The caller knows that it lives.
pub fn set_effective_context(context_id: u32) -> Result<(), HostError> {
    // SAFETY: takes no pointer.
    check(unsafe { proxy_set_effective_context(context_id) })
}

/// Sets the root's tick; zero stops it.
pub fn set_tick_millis(period: u32) -> Result<(), HostError> {
    // SAFETY: takes no pointer.
    check(unsafe { proxy_set_tick_period_milliseconds(period) })
}

/// Defines a metric, or finds it by its name.
pub fn define_metric(kind: MetricKind, name: &str) -> Result<u32, HostError> {
    let mut id = 0;
    // SAFETY: the pointers are valid for the call.
    check(unsafe { proxy_define_metric(kind as u32, name.as_ptr(), name.len(), &raw mut id) })?;
    Ok(id)
}

/// Adds to a counter or gauge.
pub fn increment_metric(id: u32, offset: i64) -> Result<(), HostError> {
    // SAFETY: takes no pointer.
    check(unsafe { proxy_increment_metric(id, offset) })
}

/// Records a sample.
pub fn record_metric(id: u32, value: u64) -> Result<(), HostError> {
    // SAFETY: takes no pointer.
    check(unsafe { proxy_record_metric(id, value) })
}

/// Calls a foreign function (Envoy `source/extensions/common/wasm/foreign.cc`).
pub fn call_foreign_function(name: &str, arguments: &[u8]) -> Result<(), HostError> {
    let mut returned = Returned::new();
    // SAFETY: the pointers are valid for the call.
    let status = unsafe {
        proxy_call_foreign_function(
            name.as_ptr(),
            name.len(),
            arguments.as_ptr(),
            arguments.len(),
            &raw mut returned.data,
            &raw mut returned.size,
        )
    };
    drop(returned.into_vec());
    check(status)
}

/// The process's monotonic clock in milliseconds; the same for all its VMs.
pub fn monotonic_millis() -> u64 {
    monotonic_nanos() / 1_000_000
}

/// The process's monotonic clock in nanoseconds.
pub fn monotonic_nanos() -> u64 {
    let mut nanos = 0;
    // SAFETY: the pointer is valid for the call. On an error the clock reads zero.
    unsafe { clock_time_get(CLOCK_MONOTONIC, 1, &raw mut nanos) };
    nanos
}

/// Random bytes of the host; `None` when it has none to give.
pub fn random_bytes<const N: usize>() -> Option<[u8; N]> {
    let mut bytes = [0; N];
    // SAFETY: the pointer is valid for `N` bytes.
    (unsafe { random_get(bytes.as_mut_ptr(), N) } == 0).then_some(bytes)
}
