//! The interface between the sockets of an endpoint and the half of the virtqueues that carries
//! them.
//!
//! Implemented by [`Driver`](crate::driver::Driver) (an attached process) and by the devices of an
//! embedding program. A backend has no thread: a [`Core`](crate::vsock::hub::Core) calls it on the
//! caller's thread, with its lock held.
//!
//! # Invariants
//! - No call sleeps.
//! - Queued packets become visible to the peer with [`Backend::flush`] or the next
//!   [`Backend::drive`], so that many packets cost one notification. A call that publishes what it
//!   sends ([`Publish::Now`](super::transfers::Publish::Now)) may leave other changes to them.
//! - After [`Backend::arm`] has returned false, every action of the peer makes [`Backend::fd`]
//!   readable.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use zerosock_proto::vsock::datagram::DatagramId;
use zerosock_proto::vsock::{ConnectError, Directions, ListenError};
use zerosock_proto::wire::vsock::SocketType;
use zerosock_proto::{Address, Port};
use zerosock_virtio::poller::Events;

use super::calls::ConnectionCalls;
use super::leases::Leases;
use super::places::Copied;
use super::sending::SendingCalls;
use super::sockets::{Counted, StreamId};
use super::tally::Tally;
use crate::table::datagrams::DatagramBackend;
use crate::table::over::EndpointEnded;
use crate::table::transfers::SendFault;

pub(crate) use super::calls::ConnInfo;
pub(crate) use super::transfers::Ahead;

/// An object with changed readiness.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum ReadySource {
    /// A connection.
    Conn(StreamId),
    /// A listening port.
    Port(Port),
    /// A datagram socket.
    Datagram(DatagramId),
}

/// Byte and packet counters of an endpoint.
///
/// ```
/// # let (db, web) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/two.rs"));
/// use std::io::Write;
/// use zerosock::{Address, Port};
///
/// let listener = db.listen(Port::new(1), 1)?;
/// let mut theirs = web.begin_connect(Address::new(db.cid(), Port::new(1)))?;
/// let (ours, _) = listener.accept()?;
/// theirs.wait_connected()?;
/// theirs.write_all(b"counted")?;
/// assert_eq!(ours.recv()?.expect("a packet").to_vec(), b"counted");
///
/// let sender = web.stats();
/// assert_eq!((sender.sent, sender.copied_in), (7, 7));
/// let receiver = db.stats();
/// assert_eq!((receiver.received, receiver.copied_out), (7, 0));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct EndpointStats {
    /// Bytes received, in place or copied.
    pub received: u64,
    /// Received bytes passed to the application in place.
    pub received_in_place: u64,
    /// Received bytes copied because of the limits on held buffers.
    pub copied_aside: u64,
    /// Received bytes copied to the caller's buffer by a copying call.
    pub copied_out: u64,
    /// Bytes sent.
    pub sent: u64,
    /// Sent bytes that the application wrote into a loaned buffer.
    pub sent_in_place: u64,
    /// Sent bytes copied from the caller's buffer by a copying call.
    pub copied_in: u64,
    /// Packets received, of every kind.
    pub packets_received: u64,
    /// Packets sent, of every kind.
    pub packets_sent: u64,
    /// Notifications sent to the peer.
    pub notifications: u64,
    /// Times that a blocking call slept until a notification, a timer, its deadline, or a call of
    /// another thread.
    pub sleeps: u64,
}

impl EndpointStats {
    pub(crate) fn new(tally: &Tally, counted: Counted) -> EndpointStats {
        EndpointStats {
            received: counted.received,
            received_in_place: counted.leased,
            copied_aside: counted.copied_aside,
            copied_out: counted.copied_out,
            sent: tally.sent,
            sent_in_place: tally.sent_in_place,
            copied_in: tally.copied_in,
            packets_received: tally.packets_received,
            packets_sent: tally.packets_sent,
            notifications: tally.notifications,
            sleeps: 0,
        }
    }
}

/// All counters, as `name=value`, on one line.
impl fmt::Display for EndpointStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "received={} received_in_place={} copied_aside={} copied_out={} sent={} sent_in_place={} copied_in={} packets_received={} packets_sent={} notifications={} sleeps={}",
            self.received,
            self.received_in_place,
            self.copied_aside,
            self.copied_out,
            self.sent,
            self.sent_in_place,
            self.copied_in,
            self.packets_received,
            self.packets_sent,
            self.notifications,
            self.sleeps,
        )
    }
}

/// The sockets of an endpoint as seen by the API. See the module documentation; the calls that both
/// halves implement alike are in [`ConnectionCalls`] and [`SendingCalls`]. Public for tests, which drive a
/// [`Driver`](crate::driver::Driver) by it.
pub trait Backend: ConnectionCalls + SendingCalls + Send {
    /// The lease table shared with the holders of leases and loans.
    fn lease_table(&self) -> Arc<Leases>;

    /// Whether a turn would find work, by a cheap check without clock or system call.
    fn pending(&mut self) -> bool;

    /// Receives what the peer sent and returned, handles due timers and publishes queued packets.
    /// The work per call is bounded. Returns whether anything was received.
    fn drive(&mut self) -> Result<bool, EndpointEnded>;

    /// Publishes queued packets, returned buffers and credit.
    fn flush(&mut self);

    /// Publishes after a read only what the peer may be waiting for: credit that it has run out of,
    /// or a batch of buffers. A reader of many small packets then sends few notifications. The next
    /// turn or flush publishes the rest.
    fn flush_after_read(&mut self) {
        self.flush();
    }

    /// Publishes what attempts that failed have changed, if [`pending`](Backend::pending) would take it for work.
    fn flush_before_spin(&mut self) {}

    /// Requests notifications from the peer. Returns true if work arrived meanwhile, for which no
    /// notification may come.
    fn arm(&mut self) -> bool;

    /// Whether the requested notifications no longer match the state, because packets were received
    /// or buffers returned since. The caller must then [`arm`](Backend::arm) again.
    fn is_stale(&self) -> bool {
        false
    }

    /// Stops requesting notifications. Those on their way may still make [`Backend::fd`] readable.
    fn disarm(&mut self);

    /// An epoll descriptor, readable when a notification arrived.
    fn fd(&self) -> BorrowedFd<'_>;

    /// Whether an event of [`Backend::fd`] names an object whose name is used again after its end, as
    /// those of host sockets do. Such events are taken with the backend locked: another thread could
    /// otherwise end the object, and begin another one, before they are handled.
    fn reuses_names(&self) -> bool {
        false
    }

    /// Handles the events of a wait on [`Backend::fd`], which has cleared them.
    fn handle_events(&mut self, events: &Events);

    /// The next object with changed readiness: bytes or an end of stream arrived, room became
    /// available, a connect completed or failed, a connection closed or waits for accept. Each
    /// object is returned once per change.
    fn next_ready(&mut self) -> Option<ReadySource>;

    /// When the next timer is due.
    fn next_timeout(&self) -> Option<Instant>;

    /// Starts to connect.
    fn connect(
        &mut self,
        from: Port,
        to: Address,
        socket_type: SocketType,
    ) -> Result<StreamId, ConnectError>;

    /// Listens for connections of that type; requests of the other type are refused.
    fn listen(
        &mut self,
        port: Port,
        backlog: usize,
        socket_type: SocketType,
    ) -> Result<(), ListenError>;

    /// Reserves a port, or a free one for [`Port::ANY`], against other listeners and binds. Returns
    /// it.
    fn bind(&mut self, port: Port) -> Result<Port, ListenError>;

    /// Releases a bound port.
    fn unbind(&mut self, port: Port);

    /// Sets the receive buffer of later connections to the listening `port`.
    fn set_accept_buffer(&mut self, port: Port, bytes: u32);

    /// Stops listening and resets connections that wait for accept.
    fn unlisten(&mut self, port: Port);

    /// Accepts the oldest waiting connection on `port`.
    fn accept(&mut self, port: Port) -> Option<StreamId>;

    /// Shuts down one or both directions.
    fn shutdown(&mut self, id: StreamId, how: Directions);

    /// Closes a connection in order; `id` becomes invalid.
    fn close(&mut self, id: StreamId);

    /// Resets a connection; `id` becomes invalid.
    fn abort(&mut self, id: StreamId);

    /// Sets how long a connect waits for the answer.
    fn set_connect_timeout(&mut self, id: StreamId, timeout: Duration);

    /// The queue pair of a connection.
    fn queue_pair(&self, id: StreamId) -> u16;

    /// The copy of a lease's bytes, if they were moved.
    fn copy_of(&self, index: u32) -> Option<Copied>;

    /// Ends a lease or loan that its holder dropped.
    fn handle_dropped(&mut self, index: u32);

    /// Whether a write would succeed or fail now instead of blocking. If not, the connection is
    /// returned by [`next_ready`](Backend::next_ready) when it would.
    fn is_writable(&mut self, id: StreamId) -> bool {
        if self.info(id).is_some_and(|info| info.messages.is_some()) {
            return self.may_send_message(id);
        }
        if let Some(more) = self.can_coalesce_more(id) {
            return more;
        }
        match self.loan(id, 1) {
            Ok(parts) => {
                self.handle_dropped(parts.index);
                true
            }
            Err(SendFault::WouldBlock | SendFault::NotConnected) => false,
            Err(_) => true,
        }
    }

    /// Whether [`accept`](Backend::accept) would return a connection.
    fn is_acceptable(&self, port: Port) -> bool;

    /// The counters of the endpoint.
    fn stats(&self) -> EndpointStats;

    /// The datagram sockets, if the backend supports them.
    fn datagrams(&mut self) -> Option<&mut dyn DatagramBackend> {
        None
    }
}
