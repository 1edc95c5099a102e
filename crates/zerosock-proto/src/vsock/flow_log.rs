//! The log in which a shard writes down its connections.

use core::fmt;

use crate::addr::Address;
use crate::wire::vsock::SocketType;

/// What the log has of a connection.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Debug)]
pub struct LoggedFlow {
    /// Our address.
    pub local: Address,
    /// The peer's address.
    pub peer: Address,
    /// STREAM or SEQPACKET.
    pub socket_type: SocketType,
}

/// Memory that outlives the process, with numbered entries for connections.
pub trait FlowLog: fmt::Debug + Send {
    /// Whether no entry is free: no connection begins then.
    fn is_full(&self) -> bool;

    /// Writes a free entry and returns its number. The log is not full.
    fn enter(&mut self, flow: LoggedFlow) -> u32;

    /// Clears an entry, which is free from now on.
    fn clear(&mut self, entry: u32);
}

/// The log of a shard.
#[derive(Debug)]
pub(crate) struct Logging {
    pub(crate) log: Box<dyn FlowLog>,
    /// Entries of ended connections whose last packets the peer may not see yet.
    pub(crate) ended: Vec<u32>,
}

impl Logging {
    pub(crate) fn new(log: Box<dyn FlowLog>) -> Logging {
        Logging {
            log,
            ended: Vec::new(),
        }
    }

    /// Reserves memory for the end of `count` connections. False: there is none.
    pub(crate) fn reserve_ends(&mut self, count: usize) -> bool {
        self.ended.try_reserve(count).is_ok()
    }
}
