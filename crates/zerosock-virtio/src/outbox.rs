//! Addresses of devices, and queues of messages between them.

use std::collections::{TryReserveError, VecDeque};

/// The address of a device: its worker, and its number there.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct DeviceAddr {
    /// The number of the worker.
    pub worker: u32,
    /// The number of the device on that worker: see [`numbers`](crate::numbers).
    pub number: u32,
}

/// Messages that devices append and their worker takes out: for devices of the same worker, and
/// for devices of other workers.
#[derive(Debug)]
pub struct Outbox<M> {
    worker: u32,
    local: VecDeque<(u32, M)>,
    remote: VecDeque<(DeviceAddr, M)>,
}

impl<M> Outbox<M> {
    /// The outbox of the worker with this number.
    pub fn new(worker: u32) -> Outbox<M> {
        Outbox {
            worker,
            local: VecDeque::new(),
            remote: VecDeque::new(),
        }
    }

    /// Appends a message to the device at `to`.
    #[inline]
    pub fn send(&mut self, to: DeviceAddr, message: M) {
        if to.worker == self.worker {
            self.local.push_back((to.number, message));
        } else {
            self.remote.push_back((to, message));
        }
    }

    /// Makes room for so many messages to the device at `to`.
    ///
    /// # Errors
    /// Without memory for them.
    pub fn try_reserve(&mut self, to: DeviceAddr, count: usize) -> Result<(), TryReserveError> {
        if to.worker == self.worker {
            self.local.try_reserve(count)
        } else {
            self.remote.try_reserve(count)
        }
    }

    /// The next message to a device of the same worker: its number there, and the message.
    pub fn pop_local(&mut self) -> Option<(u32, M)> {
        self.local.pop_front()
    }

    /// The next message to a device of another worker.
    pub fn pop_remote(&mut self) -> Option<(DeviceAddr, M)> {
        self.remote.pop_front()
    }

    /// Whether no message waits.
    pub fn is_empty(&self) -> bool {
        self.local.is_empty() && self.remote.is_empty()
    }
}
