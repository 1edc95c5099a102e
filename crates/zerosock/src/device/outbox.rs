//! Queues of messages from a worker's devices to sibling devices.

use super::sibling_message::SiblingMessage;
use crate::routing::DeviceAddr;
use std::collections::VecDeque;

/// Messages that devices append and their worker takes out: for devices of the same worker, and
/// for devices of other workers.
#[derive(Debug)]
pub(crate) struct Outbox {
    worker: u32,
    local: VecDeque<(u32, SiblingMessage)>,
    remote: VecDeque<(DeviceAddr, SiblingMessage)>,
}

impl Outbox {
    /// The outbox of the worker with this number.
    pub(crate) fn new(worker: u32) -> Outbox {
        Outbox {
            worker,
            local: VecDeque::new(),
            remote: VecDeque::new(),
        }
    }

    pub(crate) fn send(&mut self, to: DeviceAddr, message: SiblingMessage) {
        if to.worker == self.worker {
            self.local.push_back((to.vm, message));
        } else {
            self.remote.push_back((to, message));
        }
    }

    /// The next message to a device of the same worker: its number there, and the message.
    pub(crate) fn pop_local(&mut self) -> Option<(u32, SiblingMessage)> {
        self.local.pop_front()
    }

    /// The next message to a device of another worker.
    pub(crate) fn pop_remote(&mut self) -> Option<(DeviceAddr, SiblingMessage)> {
        self.remote.pop_front()
    }

    /// Whether no message waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.local.is_empty() && self.remote.is_empty()
    }
}
