//! Wakes the root from a stream's callback: only the root's own callbacks may make callouts.

use std::cell::Cell;

use super::hostcalls;

/// A queue of the root's own. Its items wake the root on its own thread.
pub struct Wake {
    queue: u32,
    woken: Cell<bool>,
}

impl Wake {
    /// Registers the queue.
    ///
    /// # Errors
    /// When the host gives no queue or no random name for it.
    pub fn open() -> Result<Self, String> {
        // Names made of time and context ids collide between workers, and then one worker gets all the wakes.
        let name = hostcalls::random_bytes::<16>().ok_or("the host gives no random bytes")?;
        let name = format!("idempotency:{:032x}", u128::from_le_bytes(name));
        let queue = hostcalls::register_queue(&name)
            .map_err(|error| format!("the host gives no queue (status {})", error.0))?;
        Ok(Self { queue, woken: Cell::new(false) })
    }

    /// Wakes the root, once until it has woken. A wake that fails is made good by the tick.
    pub fn ring(&self) {
        if !self.woken.get() {
            self.woken.set(hostcalls::enqueue(self.queue, &[]).is_ok());
        }
    }

    /// The root was woken.
    pub fn on_woken(&self, queue: u32) {
        if queue == self.queue {
            while hostcalls::dequeue(queue) {}
            self.woken.set(false);
        }
    }
}
