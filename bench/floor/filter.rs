//! The least that a proxy-wasm filter costs: every callback that the filter takes, and nothing in them. With `--cfg holds`
//! it also holds the request until its body is there, and the end of the response for one callback, as every filter must
//! that looks at a body before it forwards.

#![no_std]

const CONTINUE: u32 = 0;
const PAUSE: u32 = 1;
const HELD: u32 = if cfg!(holds) { PAUSE } else { CONTINUE };

#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    core::arch::wasm32::unreachable()
}

fn held_until(end: bool) -> u32 {
    if end { CONTINUE } else { HELD }
}

#[unsafe(no_mangle)]
extern "C" fn proxy_abi_version_0_2_1() {}
#[unsafe(no_mangle)]
extern "C" fn _initialize() {}
#[unsafe(no_mangle)]
extern "C" fn proxy_on_memory_allocate(_size: usize) -> usize {
    0
}
#[unsafe(no_mangle)]
extern "C" fn proxy_on_context_create(_id: u32, _root_id: u32) {}
#[unsafe(no_mangle)]
extern "C" fn proxy_on_vm_start(_id: u32, _size: usize) -> bool {
    true
}
#[unsafe(no_mangle)]
extern "C" fn proxy_on_configure(_id: u32, _size: usize) -> bool {
    true
}
#[unsafe(no_mangle)]
extern "C" fn proxy_on_request_headers(_id: u32, _lines: usize, end: bool) -> u32 {
    held_until(end)
}
#[unsafe(no_mangle)]
extern "C" fn proxy_on_request_body(_id: u32, _size: usize, end: bool) -> u32 {
    held_until(end)
}
#[unsafe(no_mangle)]
extern "C" fn proxy_on_response_headers(_id: u32, _lines: usize, _end: bool) -> u32 {
    CONTINUE
}
#[unsafe(no_mangle)]
extern "C" fn proxy_on_response_body(_id: u32, _size: usize, end: bool) -> u32 {
    held_until(end)
}
#[unsafe(no_mangle)]
extern "C" fn proxy_on_log(_id: u32) {}
#[unsafe(no_mangle)]
extern "C" fn proxy_on_done(_id: u32) -> bool {
    true
}
#[unsafe(no_mangle)]
extern "C" fn proxy_on_delete(_id: u32) {}
