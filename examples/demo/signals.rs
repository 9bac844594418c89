//! Ctrl-C and friends, taken by one thread, so that Envoy never outlives the demo.

use std::io;

use crate::Fallible;

/// The signals that mean "stop".
fn stop_signals() -> libc::sigset_t {
    // SAFETY: `sigemptyset` initializes the set it is given, `sigaddset` changes an initialized one.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
            libc::sigaddset(&raw mut set, signal);
        }
        set
    }
}

/// Keeps the stop signals for [`on_stop`]; every thread and process started from here on inherits that.
pub fn block() -> io::Result<()> {
    mask(libc::SIG_BLOCK)
}

/// For a child, between fork and exec.
pub fn unblock() -> io::Result<()> {
    mask(libc::SIG_UNBLOCK)
}

fn mask(how: libc::c_int) -> io::Result<()> {
    let set = stop_signals();
    // SAFETY: the set is initialized, and no former mask is asked for.
    let result = unsafe { libc::pthread_sigmask(how, &raw const set, std::ptr::null_mut()) };
    if result == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(result)) }
}

/// At the first stop signal: runs `stop` and exits with the status it gives.
pub fn on_stop(stop: impl FnOnce() -> i32 + Send + 'static) -> Fallible<()> {
    std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
        let set = stop_signals();
        let mut signal = 0;
        // SAFETY: both point to initialized values that outlive the call.
        if unsafe { libc::sigwait(&raw const set, &raw mut signal) } == 0 {
            std::process::exit(stop());
        }
    })?;
    Ok(())
}
