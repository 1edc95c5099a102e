//! The connection of all connected sockets: wait mode, time-outs, close.
//!
//! # Invariants
//! - A call that returns `WouldBlock` has armed the endpoint's descriptor.
//! - Data sent before a shutdown or a close still arrives.
//!
//! A [`Stream`](super::Stream) adds bytes to a [`Connection`], a [`SeqPacket`](super::SeqPacket)
//! messages.

mod calls;
mod counts;
mod options;
pub(super) use calls::connection_calls;
pub use counts::ConnectionStats;
use counts::Counts;

use std::io;
use std::net::Shutdown;
use std::sync::{Arc, Mutex};

use zerosock_proto::Address;
use zerosock_proto::vsock::Directions;
use zerosock_proto::wire::vsock::SocketType;
use zerosock_ring::Trust;

use super::blocking::CallWaits;
use super::bound::Bound;
use super::errors::{ConnectError, StreamError, of_recv, of_refusal, of_send};
use super::hub::{Core, Interest};
use super::options::Options;
use super::waiting::Wait;
use crate::table::sockets::{StreamId, StreamState};
use crate::table::{
    backend::{Backend, ConnInfo},
    transfers::{RecvFault, SendFault},
};

/// A type of connected socket.
pub(super) trait Connected: Sized {
    const TYPE: SocketType;

    fn new(core: Arc<Core>, id: StreamId, info: &ConnInfo, wait: Wait) -> Self;

    fn conn(&self) -> &Connection;

    /// See [`Connection::apply_options`].
    fn apply_options(&mut self, options: Options, bound: Option<Bound>);

    /// Takes the bound port out, if the socket was bound before it connected.
    fn unbind(&mut self) -> Option<Bound>;
}

/// A connection; dropping it closes the connection.
pub(super) struct Connection {
    pub(super) core: Arc<Core>,
    pub(super) id: StreamId,
    pub(super) local: Address,
    pub(super) peer: Address,
    pub(super) trust: Option<Trust>,
    pub(super) waits: CallWaits,
    pub(super) counts: Counts,
    /// Boxed: rarely used.
    options: Box<Mutex<Options>>,
    /// The port that was bound before the connect, if any.
    bound: Option<Bound>,
}

impl Connection {
    pub(super) fn new(core: Arc<Core>, id: StreamId, info: &ConnInfo, wait: Wait) -> Connection {
        let trust = core.trust().filter(|_| info.trusted);
        let options = Box::new(Mutex::new(Options::new(core.window())));
        Connection {
            core,
            id,
            local: info.local,
            peer: info.peer,
            trust,
            waits: CallWaits::new(wait),
            counts: Counts::default(),
            options,
            bound: None,
        }
    }

    /// Waits for the answer to a request, as a read would.
    pub(super) fn wait_connected(&self) -> io::Result<()> {
        let attempt = |backend: &mut dyn Backend| outcome(&backend.info(self.id)?);
        let interest = Interest::Conn(self.id);
        Ok(self
            .core
            .wait(interest, || self.waits.read_budget(), attempt)??)
    }

    pub(super) fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        let how = match how {
            Shutdown::Read => Directions::RECEIVE,
            Shutdown::Write => Directions::SEND,
            Shutdown::Both => Directions::BOTH,
        };
        let mut locked = self.core.lock();
        let backend = locked.backend();
        match backend.info(self.id) {
            Some(info) if info.state == StreamState::Connected => {
                backend.shutdown(self.id, how);
                backend.flush();
                Ok(())
            }
            _ => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    pub(super) fn reset(&self) {
        let mut locked = self.core.lock();
        locked.backend().abort(self.id);
        locked.backend().flush();
    }

    pub(super) fn state(&self) -> StreamState {
        let mut locked = self.core.lock();
        locked
            .backend()
            .info(self.id)
            .map_or(StreamState::Reset, |info| info.state)
    }

    pub(super) fn stats(&self) -> ConnectionStats {
        let mut locked = self.core.lock();
        let info = locked.backend().info(self.id);
        self.counts.stats(info.map_or(0, |info| info.unread))
    }

    /// Calls `get` until it returns data, end of file or an error.
    #[inline]
    pub(super) fn receive<T>(
        &self,
        mut get: impl FnMut(&mut dyn Backend) -> Result<T, RecvFault>,
    ) -> io::Result<T> {
        let attempt = |backend: &mut dyn Backend| match get(backend) {
            Ok(got) => Some(Ok(got)),
            Err(fault) => of_recv(fault).map(Err),
        };
        let interest = Interest::Conn(self.id);
        Ok(self
            .core
            .wait_to_read(interest, || self.waits.read_budget(), attempt)??)
    }

    /// Calls `put` until it has room, or returns an error; publishes what it has queued.
    #[inline]
    pub(super) fn transmit<T>(
        &self,
        mut put: impl FnMut(&mut dyn Backend) -> Result<T, SendFault>,
    ) -> io::Result<T> {
        self.wait_for_room(|backend| {
            let done = put(backend)?;
            backend.flush();
            Ok(done)
        })
    }

    /// As [`transmit`](Self::transmit), for a call that queues nothing, or publishes that itself.
    #[inline]
    pub(super) fn wait_for_room<T>(
        &self,
        mut put: impl FnMut(&mut dyn Backend) -> Result<T, SendFault>,
    ) -> io::Result<T> {
        let attempt = |backend: &mut dyn Backend| match put(backend) {
            Ok(done) => Some(Ok(done)),
            Err(fault) => self.send_fault(backend, fault),
        };
        let interest = Interest::Conn(self.id);
        Ok(self
            .core
            .wait(interest, || self.waits.write_budget(), attempt)??)
    }

    /// Waits until the queued rest of a message is sent: the program may not call the endpoint
    /// again. Does not wait on a non-blocking socket: its program must call again.
    #[cold]
    pub(super) fn wait_queued_sent(&self) -> io::Result<()> {
        let attempt = |backend: &mut dyn Backend| {
            backend.flush();
            (!backend.is_sending(self.id)).then_some(())
        };
        let interest = Interest::Conn(self.id);
        let budget = || self.waits.write_budget();
        Ok(self.core.wait(interest, budget, attempt)?)
    }

    /// `None`: the call would block.
    pub(super) fn send_fault<T>(
        &self,
        backend: &mut dyn Backend,
        fault: SendFault,
    ) -> Option<Result<T, StreamError>> {
        let mut error = of_send(fault)?;
        if error == StreamError::ShutDown
            && backend.info(self.id).is_some_and(|i| i.peer_recv_shutdown)
        {
            error = StreamError::PeerShutdown;
        }
        Some(Err(error))
    }
}

impl Drop for Connection {
    /// Closes the connection; waits if it lingers.
    fn drop(&mut self) {
        self.end();
    }
}

/// The result of a request; `None` while it is pending.
pub(super) fn outcome(info: &ConnInfo) -> Option<Result<(), ConnectError>> {
    match info.state {
        StreamState::Connecting => None,
        // Also a connection that the peer has closed since: it may have unread bytes.
        StreamState::Connected | StreamState::Finished => Some(Ok(())),
        StreamState::Reset => Some(match info.refused {
            Some(reason) => Err(of_refusal(info.peer, reason)),
            None => Ok(()),
        }),
    }
}
