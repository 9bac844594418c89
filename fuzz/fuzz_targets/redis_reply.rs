#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| properties::redis_reply(data));
