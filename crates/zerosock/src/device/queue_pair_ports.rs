//! Command ports of a device with several queue pairs, each of which is a `Device`, on any worker.
//!
//! # Invariants
//! - A command for one queue goes to its queue pair, with the queue's index there; the event queue
//!   belongs to the first pair.
//! - A command for the whole device goes to all pairs, in the same order, and is answered when all
//!   have answered.

use zerosock_proto::vsock::QueuePairs;
use zerosock_proto::vsock::pairs::{EVENT_QUEUE, QueueUse, RX_QUEUE, TX_QUEUE};

use zerosock_vhost_user::{DeviceCommand, DevicePort, Reply};

/// The ports of one device's queue pairs, for the control thread.
pub(crate) struct QueuePairPorts {
    queue_pairs: Vec<Box<dyn DevicePort>>,
    most: QueuePairs,
}

impl QueuePairPorts {
    /// One port for each of `most` pairs.
    pub(crate) fn new(most: QueuePairs, queue_pairs: Vec<Box<dyn DevicePort>>) -> QueuePairPorts {
        QueuePairPorts { queue_pairs, most }
    }

    /// The queue pair of queue `index`, and the queue's index there.
    fn of_queue(&mut self, index: u16) -> Option<(&mut Box<dyn DevicePort>, u16)> {
        let (pair, index) = match self.most.queue_use(index)? {
            QueueUse::Receive(pair) => (pair, RX_QUEUE),
            QueueUse::Transmit(pair) => (pair, TX_QUEUE),
            QueueUse::Events => (0, EVENT_QUEUE),
        };
        Some((self.queue_pairs.get_mut(usize::from(pair))?, index))
    }
}

impl DevicePort for QueuePairPorts {
    fn submit(&mut self, mut command: DeviceCommand, reply: Reply) {
        use DeviceCommand as C;
        match &mut command {
            C::StartQueue { index, .. }
            | C::SetCall { index, .. }
            | C::SetErr { index, .. }
            | C::SetUsedLog { index, .. }
            | C::EnableQueue { index, .. }
            | C::StopQueue { index } => {
                let Some((queue_pair, there)) = self.of_queue(*index) else {
                    return reply.failed(format!("no queue {index}"));
                };
                *index = there;
                queue_pair.submit(command, reply);
            }
            // The session does not offer it.
            C::SendRarp(_) => reply.failed("no network device"),
            C::Connected { .. }
            | C::SetFeatures(_)
            | C::SetLog(_)
            | C::SetConfig(_)
            | C::SetMemory(_)
            | C::ResetDevice
            | C::Disconnected => {
                let replies = reply.split(self.queue_pairs.len());
                for (queue_pair, reply) in self.queue_pairs.iter_mut().zip(replies) {
                    let command = match &command {
                        C::Connected { link } => C::Connected { link: link.clone() },
                        C::SetFeatures(features) => C::SetFeatures(*features),
                        C::SetLog(log) => C::SetLog(log.clone()),
                        C::SetConfig(config) => C::SetConfig(config.clone()),
                        C::SetMemory(memory) => C::SetMemory(memory.clone()),
                        C::ResetDevice => C::ResetDevice,
                        _ => C::Disconnected,
                    };
                    queue_pair.submit(command, reply);
                }
            }
        }
    }
}
