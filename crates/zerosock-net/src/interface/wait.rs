//! Waiting: polling for as long as that pays, then sleeping on the descriptor.

use std::io;
use std::time::Instant;

use super::Interface;
use super::failure::InterfaceFailure;

/// Polls between two looks at the clock.
const POLLS: u32 = 64;

impl Interface {
    /// Whether [`recv`](Self::recv) may return a frame, or a loan that was refused can be had: two
    /// loads. True also when the interface has failed by what the device has written.
    #[inline]
    pub fn is_ready(&self) -> bool {
        self.receiver.has_used() || self.transmitter.has_room()
    }

    /// Flushes, and requests a notification for the next frame and, if a loan was refused since buffers
    /// came back last, for room. True: there is something to do, and no notification follows for it.
    ///
    /// After false, the descriptor of the interface becomes readable.
    #[must_use = "no notification follows for what is there already"]
    pub fn arm(&self) -> bool {
        let room = self.transmitter.arm();
        self.receiver.arm() || room || self.failure.get().is_some()
    }

    /// Clears the notifications of the descriptor, after it was readable.
    ///
    /// # Errors
    /// [`InterfaceFailure`]: the interface cannot be used any more.
    pub fn clear(&self) -> Result<(), InterfaceFailure> {
        self.note(self.watch.clear());
        self.check()
    }

    /// Flushes, and waits until there is a frame or a loan that was refused can be had, or until
    /// `deadline`. Returns whether there is something to do.
    ///
    /// # Errors
    /// [`InterfaceFailure`]: the interface cannot be used any more, and there is nothing to do.
    pub fn wait(&self, deadline: Option<Instant>) -> Result<bool, InterfaceFailure> {
        self.check()?;
        if self.is_ready() {
            self.flush();
            return Ok(true);
        }
        if self.poll(deadline) {
            return Ok(true);
        }
        while !self.arm() {
            self.sleeps.set(self.sleeps.get() + 1);
            let since = Instant::now();
            self.note(self.watch.sleep(deadline));
            if self.spin.borrow().is_enabled() {
                self.spin.borrow_mut().slept(since.elapsed());
            }
            self.check()?;
            if self.is_ready() {
                return Ok(true);
            }
            if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Polls for as long as that has paid lately. Returns whether there is something to do.
    fn poll(&self, deadline: Option<Instant>) -> bool {
        let spin = &mut *self.spin.borrow_mut();
        let Some(time) = spin.poll_time() else {
            return false;
        };
        self.flush();
        let end = Instant::now() + time;
        let end = deadline.map_or(end, |deadline| deadline.min(end));
        loop {
            for _ in 0..POLLS {
                if self.is_ready() {
                    spin.found_work();
                    return true;
                }
                std::hint::spin_loop();
            }
            if Instant::now() >= end {
                spin.found_nothing();
                return false;
            }
        }
    }

    /// Records what waiting has shown.
    fn note(&self, gone: io::Result<bool>) {
        let failure = match gone {
            Ok(false) => return,
            Ok(true) => InterfaceFailure::Disconnected,
            Err(error) => InterfaceFailure::Wait(error.kind()),
        };
        if self.failure.get().is_none() {
            self.failure.set(Some(failure));
        }
    }

    /// What a device has sent before it disconnected can be received.
    fn check(&self) -> Result<(), InterfaceFailure> {
        match self.failure.get() {
            Some(failure) if failure.is_lie() || !self.receiver.has_used() => Err(failure),
            _ => Ok(()),
        }
    }
}
