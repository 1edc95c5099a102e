//! A waiter: what it waits for, and what it sleeps on.

use std::sync::Arc;
use std::thread::Thread;
use std::time::Instant;

use zerosock_proto::Port;
use zerosock_proto::vsock::datagram::DatagramId;

use super::descriptors::EventFd;
use crate::table::backend::ReadySource;
use crate::table::sockets::StreamId;

/// What a waiter waits for.
#[derive(Copy, Clone, Debug, Eq, Hash, PartialEq)]
pub(crate) enum Interest {
    Conn(StreamId),
    Port(Port),
    Datagram(DatagramId),
    Anything,
    /// No socket: what arrives on the rings, and timers.
    Rings,
}

impl From<ReadySource> for Interest {
    fn from(source: ReadySource) -> Interest {
        match source {
            ReadySource::Conn(conn) => Interest::Conn(conn),
            ReadySource::Port(port) => Interest::Port(port),
            ReadySource::Datagram(socket) => Interest::Datagram(socket),
        }
    }
}

/// A registered thread or poller.
#[derive(Debug)]
pub(super) struct Waiter {
    pub(super) ticket: u64,
    pub(super) interest: Interest,
    pub(super) kind: WaiterKind,
    /// When it wakes by itself and drives the backend.
    pub(super) wakes_at: Option<Instant>,
}

#[derive(Debug)]
pub(super) enum WaiterKind {
    /// A thread in [`Core::wait`].
    Thread(Thread),
    /// A poller of the backend's descriptor and of an eventfd that only it clears; woken once.
    EventFd(Arc<EventFd>),
    /// An application that polls the descriptor of [`AsFd`]; woken once.
    Descriptor,
}

impl Waiter {
    /// Whether it sleeps on the rings, not only until the lock holder wakes it.
    pub(super) fn waits_on_rings(&self, sleeper: Option<u64>) -> bool {
        match self.kind {
            WaiterKind::Thread(_) => sleeper == Some(self.ticket),
            WaiterKind::EventFd(_) | WaiterKind::Descriptor => true,
        }
    }
}
