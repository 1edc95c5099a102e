//! Options of a connection, and its close.
//!
//! # Invariants
//! - An option is in force when the call that sets it returns, and announced to the peer if it
//!   concerns the peer.
//! - A lingering close shuts sending down before it waits.
//! - Lock order: the endpoint, then the options.

use std::io;
use std::net::Shutdown;
use std::sync::{MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::Connection;
use crate::table::backend::Backend;
use crate::table::sockets::{StreamId, StreamState};
use crate::vsock::bound::Bound;
use crate::vsock::errors::StreamError;
use crate::vsock::hub::{DeferredClose, Interest, WaitBudget, WaitFault, WaitMode};
use crate::vsock::options::{Options, timeout};
use crate::vsock::waiting::Wait;
use zerosock_virtio::deadline::{deadline_in, earlier};

/// First interval at which a lingering close requests a credit update.
const FIRST_CREDIT_POLL: Duration = Duration::from_millis(1);
/// Longest such interval; each one doubles the last.
const MAX_CREDIT_POLL: Duration = Duration::from_millis(64);

impl Connection {
    pub(in crate::vsock) fn options(&self) -> MutexGuard<'_, Options> {
        // Each update leaves the value consistent, even where a panic has poisoned the lock.
        self.options.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the options and the bound port of the listener or socket that it was made of. The
    /// receive buffer was set before.
    pub(in crate::vsock) fn apply_options(&mut self, options: Options, bound: Option<Bound>) {
        self.bound = bound;
        *self.options() = options;
        self.waits.set_read_timeout(options.read_timeout);
        self.waits.set_write_timeout(options.write_timeout);
    }

    /// Takes the bound port out, if the socket was bound before it connected.
    pub(in crate::vsock) fn unbind(&mut self) -> Option<Bound> {
        self.bound.take()
    }

    pub(in crate::vsock) fn set_read_timeout(&self, time: Option<Duration>) -> io::Result<()> {
        let time = timeout(time)?;
        self.options().read_timeout = time;
        self.waits.set_read_timeout(time);
        Ok(())
    }

    pub(in crate::vsock) fn set_write_timeout(&self, time: Option<Duration>) -> io::Result<()> {
        let time = timeout(time)?;
        self.options().write_timeout = time;
        self.waits.set_write_timeout(time);
        Ok(())
    }

    /// Sets the buffer to `bytes`, clamped to its bounds; returns the result.
    pub(in crate::vsock) fn set_buffer_size(&self, bytes: u32) -> io::Result<u32> {
        let bytes = self.options().set_buffer(bytes)?;
        self.resize(bytes);
        Ok(bytes)
    }

    pub(in crate::vsock) fn buffer_size(&self) -> u32 {
        let mut locked = self.core.lock();
        let credit = locked.backend().credit(self.id);
        drop(locked);
        match credit {
            Some(credit) => credit.buffer,
            None => self.options().buffer.unwrap_or(self.core.window()),
        }
    }

    /// Sets the bounds; returns the size of the buffer if it has changed.
    pub(in crate::vsock) fn set_buffer_bounds(
        &self,
        min: u32,
        max: u32,
    ) -> io::Result<Option<u32>> {
        let now = self.buffer_size();
        let changed = self.options().set_bounds(min, max, now)?;
        if let Some(bytes) = changed {
            self.resize(bytes);
        }
        Ok(changed)
    }

    pub(in crate::vsock) fn queue_pair(&self) -> u16 {
        self.core.lock().backend().queue_pair(self.id)
    }

    fn resize(&self, bytes: u32) {
        let mut locked = self.core.lock();
        locked.backend().set_buffer(self.id, bytes);
        locked.backend().flush();
    }

    /// Sets the bytes that a read waits for; returns the mark.
    pub(in crate::vsock) fn set_low_water(&self, bytes: u32) -> io::Result<u32> {
        let mut locked = self.core.lock();
        let backend = locked.backend();
        let buffer = backend.credit(self.id).map_or(u32::MAX, |it| it.buffer);
        let bytes = self.options().set_low_water(bytes, buffer)?;
        backend.set_low_water(self.id, bytes);
        backend.flush_after_read();
        Ok(bytes)
    }

    pub(in crate::vsock) fn unread(&self) -> usize {
        let mut locked = self.core.lock();
        // Counts packets not yet taken in. A failed endpoint still has what it received before.
        let _ = locked.drive();
        locked.backend().info(self.id).map_or(0, |info| info.unread)
    }

    pub(in crate::vsock) fn unsent(&self) -> usize {
        let mut locked = self.core.lock();
        let _ = locked.drive();
        let backend = locked.backend();
        let unsent = unsent(backend, self.id);
        if unsent > 0 {
            backend.request_credit_update(self.id);
            backend.flush();
        }
        unsent as usize
    }

    /// Lingers; the drop closes the connection.
    pub(in crate::vsock) fn close(&self) -> io::Result<()> {
        let linger = self.options().linger;
        let Some(time) = linger.filter(|time| !time.is_zero()) else {
            return Ok(());
        };
        // The drop must not linger again.
        self.options().linger = None;
        match self.waiting() {
            Some(wait) => self.linger_until(wait, deadline_in(time)),
            None => Ok(()),
        }
    }

    /// Closes the connection, when it is dropped.
    pub(super) fn end(&self) {
        let linger = self.options().linger;
        match linger {
            None => {}
            Some(Duration::ZERO) => return self.core.close_deferred(DeferredClose::Reset(self.id)),
            Some(time) => {
                if let Some(wait) = self
                    .waiting()
                    .filter(|_| !self.core.is_held_by_this_thread())
                {
                    // A drop cannot report an error.
                    let _ = self.linger_until(wait, deadline_in(time));
                }
            }
        }
        self.core.close_deferred(DeferredClose::Stream(self.id));
    }

    /// The wait mode of calls; `None` if they do not block.
    fn waiting(&self) -> Option<Wait> {
        match self.waits.read_budget().mode {
            WaitMode::Block(wait) => Some(wait),
            _ => None,
        }
    }

    /// Waits until the peer has consumed everything, then for its answer to the shutdown. In this
    /// order, because Linux forgets a connection that its peer has shut down both ways: it would no
    /// longer answer credit requests, and so never report what its program has read.
    fn linger_until(&self, wait: Wait, deadline: Option<Instant>) -> io::Result<()> {
        // Fails when it is not connected: then there is nothing to wait for.
        let _ = self.shutdown(Shutdown::Write);
        self.wait_consumed(wait, deadline)?;
        let _ = self.shutdown(Shutdown::Both);
        let budget = WaitBudget {
            mode: WaitMode::Block(wait),
            deadline,
        };
        let ended = self.core.wait(
            Interest::Conn(self.id),
            || budget,
            |backend| {
                match backend.info(self.id).map(|info| info.state) {
                    Some(StreamState::Connected) => None,
                    Some(StreamState::Reset) => Some(Err(StreamError::Reset)),
                    // A connection that was never established has sent nothing.
                    _ => Some(Ok(())),
                }
            },
        )?;
        Ok(ended?)
    }

    /// Requests credit updates at growing intervals until the peer has consumed everything, or has
    /// shut receiving down.
    fn wait_consumed(&self, wait: Wait, deadline: Option<Instant>) -> Result<(), WaitFault> {
        let mut pause = FIRST_CREDIT_POLL;
        loop {
            let budget = WaitBudget {
                mode: WaitMode::Block(wait),
                deadline: earlier(deadline, deadline_in(pause)),
            };
            let mut asked = false;
            let taken = self.core.wait(
                Interest::Conn(self.id),
                || budget,
                |backend| {
                    let takes = backend.info(self.id).is_some_and(|it| {
                        it.state == StreamState::Connected && !it.peer_recv_shutdown
                    });
                    if !takes || (unsent(backend, self.id) == 0 && !backend.is_sending(self.id)) {
                        return Some(());
                    }
                    if !std::mem::replace(&mut asked, true) {
                        backend.request_credit_update(self.id);
                        backend.flush();
                    }
                    None
                },
            );
            match taken {
                Err(WaitFault::TimedOut) if deadline.is_none_or(|at| at > Instant::now()) => {
                    pause = (pause * 2).min(MAX_CREDIT_POLL);
                }
                taken => return taken,
            }
        }
    }
}

/// Bytes sent and not yet reported as consumed.
fn unsent(backend: &mut dyn Backend, id: StreamId) -> u32 {
    backend.credit(id).map_or(0, |credit| credit.unsent)
}
