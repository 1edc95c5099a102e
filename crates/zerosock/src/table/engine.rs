//! What a [`Core`](crate::vsock::hub::Core) drives: the half of the queues that an endpoint has.
//!
//! Two things are engines: a [`Driver`](crate::driver::Driver) (a process as a guest) and a host's
//! devices. Neither has a thread: every call here is made by a caller's thread that has the lock.
//!
//! What must hold: no call here sleeps. What calls queue becomes visible to the peer with
//! [`Engine::flush`], or with the next [`Engine::turn`], so that many packets cost one
//! notification. After [`Engine::arm`] has answered false, whatever the peer does makes
//! [`Engine::fd`] readable.

use std::io::IoSlice;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use zerosock_proto::vsock::datagram::DatagramId;
use zerosock_proto::vsock::{ConnectError, How, ListenError, MoveError, RefuseReason};
use zerosock_proto::wire::vsock::SocketType;
use zerosock_proto::{Address, Port};
use zerosock_ring::GuestSlice;

use super::leases::Leases;
use super::sockets::{Copied, LeaseParts, Message, Place, StreamId, StreamState};
use crate::table::datagrams::DatagramEngine;
use crate::table::over::EndpointOver;

/// Why there is nothing to read.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) enum RecvFault {
    /// Not now.
    WouldBlock,
    /// The connection was reset or refused.
    Reset,
    /// It is not connected yet.
    NotConnected,
    /// As many leases and loans are out as the endpoint can count.
    TooManyLeases,
    /// There is no such connection.
    Unknown,
}

/// Why nothing can be sent.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) enum SendFault {
    /// No credit or no buffer now.
    WouldBlock,
    /// We, or the peer, said that no more is to be sent.
    ShutDown,
    /// The connection was reset or refused.
    Reset,
    /// It is not connected yet.
    NotConnected,
    /// A message that the peer's buffer can never take.
    TooLong,
    /// As many leases and loans are out as the endpoint can count.
    TooManyLoans,
    /// There is no such connection, or no such loan.
    Unknown,
}

/// What is known of a connection.
#[derive(Copy, Clone, Debug)]
pub(crate) struct ConnInfo {
    pub(crate) state: StreamState,
    /// Why it did not come about, if it did not.
    pub(crate) refused: Option<RefuseReason>,
    pub(crate) local: Address,
    pub(crate) peer: Address,
    /// Bytes to be read.
    pub(crate) unread: usize,
    /// Bytes that were read since the beginning.
    pub(crate) taken: u64,
    /// From how many unread bytes on there is something to read.
    pub(crate) low_water: u32,
    /// Nothing will be added to what is unread: the peer sends no more, or we read no more.
    pub(crate) at_end: bool,
    /// The peer will read no more.
    pub(crate) peer_recv_shutdown: bool,
    /// Unread messages, for a connection that carries them; `None`: a stream.
    pub(crate) messages: Option<u32>,
    /// Who opened the endpoint has declared that this peer writes nothing that is on lease.
    pub(crate) trusted: bool,
}

/// The credit of a connection that has not ended.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) struct CreditInfo {
    /// Our receive buffer, in bytes.
    pub(crate) buffer: u32,
    /// Bytes that were sent and that the peer has not said to have consumed.
    pub(crate) unsent: u32,
}

/// What lies ahead of the reader of a connection.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) struct Ahead {
    /// Bytes to be read.
    pub(crate) unread: usize,
    /// Nothing will be added to them.
    pub(crate) closed: bool,
    /// What a lease would give now.
    pub(crate) next: Option<Next>,
}

/// The first of what was received.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) struct Next {
    pub(crate) len: usize,
    pub(crate) kind: NextKind,
}

/// How a lease on it would be.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) enum NextKind {
    /// In place.
    InPlace,
    /// A copy that is made for it: the bounds on leases allow no more in place.
    Bounded,
    /// On a copy that is there already, or that has to be made anyway.
    Copied,
}

/// What a new loan is made of.
#[derive(Debug)]
pub(crate) struct LoanParts {
    /// Its word, and what it is sent or given back by.
    pub(crate) index: u32,
    /// Bytes that may be written.
    pub(crate) len: usize,
    /// Where. `None`: in a private buffer of that length, which its holder makes and which is sent
    /// by copying, because the bounds did not allow a loan in place.
    pub(crate) place: Option<Place>,
}

/// A buffer of a message's loan, as it is to be sent.
#[derive(Copy, Clone, Debug)]
pub(crate) struct LoanedPart<'p> {
    /// Its word; [`NONE`](super::leases::NONE) of what has none.
    pub(crate) index: u32,
    /// Bytes of it that are sent.
    pub(crate) len: usize,
    /// They, if it is not in place.
    pub(crate) private: Option<&'p [u8]>,
}

/// A received part while it is shown.
#[derive(Copy, Clone, Debug)]
pub(crate) enum Payload<'m> {
    InPlace(&'m [GuestSlice<'m>]),
    Copied(&'m [u8]),
}

/// How much of what arrives is shown at once.
#[derive(Copy, Clone, Debug)]
pub(crate) struct ShowBounds {
    pub(crate) packets: usize,
    pub(crate) bytes: usize,
}

impl ShowBounds {
    /// No bytes: the next packet is taken in and held.
    pub(crate) const HOLD: ShowBounds = ShowBounds {
        packets: 1,
        bytes: 0,
    };
}

/// Copies to `out` what `show` shows, which says how many packets and bytes that was; the bytes.
#[inline]
pub(crate) fn copy_shown(
    out: &mut [u8],
    show: impl FnOnce(ShowBounds, &mut dyn FnMut(Payload<'_>) -> bool) -> (usize, usize),
) -> usize {
    let bounds = ShowBounds {
        packets: usize::MAX,
        bytes: out.len(),
    };
    let mut at = 0;
    let mut copy = |payload: Payload<'_>| {
        at += payload.copy_to(0, out.get_mut(at..).unwrap_or(&mut []));
        at < out.len()
    };
    show(bounds, &mut copy).1
}

impl<'m> Payload<'m> {
    /// Bytes.
    #[inline]
    pub(crate) fn len(self) -> usize {
        match self {
            Payload::Copied(bytes) => bytes.len(),
            Payload::InPlace(slices) => slices.iter().map(|slice| slice.len()).sum(),
        }
    }

    pub(crate) fn in_place(slices: &'m [GuestSlice<'m>]) -> Payload<'m> {
        Payload::InPlace(slices)
    }

    pub(crate) fn copied(bytes: &'m [u8]) -> Payload<'m> {
        Payload::Copied(bytes)
    }

    /// Copies bytes from `offset` on to `out`; how many.
    #[inline]
    pub(crate) fn copy_to(self, offset: usize, out: &mut [u8]) -> usize {
        match self {
            Payload::Copied(bytes) => {
                let rest = bytes.get(offset..).unwrap_or(&[]);
                let len = rest.len().min(out.len());
                out[..len].copy_from_slice(&rest[..len]);
                len
            }
            Payload::InPlace(slices) => {
                let (mut skip, mut done) = (offset, 0);
                for slice in slices {
                    let Some(rest) = out.get_mut(done..).filter(|rest| !rest.is_empty()) else {
                        break;
                    };
                    done += slice.read(skip, rest);
                    skip = skip.saturating_sub(slice.len());
                }
                done
            }
        }
    }
}

/// What something has happened to.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) enum ReadySource {
    /// A connection.
    Conn(StreamId),
    /// A port that is listened on.
    Port(Port),
    /// A datagram socket.
    Datagram(DatagramId),
}

/// Bytes that went through an endpoint.
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
    /// Received, wherever they were put.
    pub received: u64,
    /// Of those, handed out where the peer's side wrote them.
    pub received_in_place: u64,
    /// Of those, copied aside because of the bounds on what is held.
    pub copied_aside: u64,
    /// Copied to a reader's buffer by a call that copies.
    pub copied_out: u64,
    /// Sent.
    pub sent: u64,
    /// Of those, written by their sender where the peer's side reads them.
    pub sent_in_place: u64,
    /// Of those, copied from a sender's buffer by a call that copies.
    pub copied_in: u64,
    /// Packets taken in, of every kind.
    pub packets_received: u64,
    /// Packets given out, of every kind.
    pub packets_sent: u64,
    /// Times that the peer's side was notified.
    pub notifications: u64,
}

/// See the module.
pub(crate) trait Engine: Send {
    /// The words that leases and loans share with this engine.
    fn words(&self) -> Arc<Leases>;

    /// Whether a turn would find something, as far as a cheap look can tell. No clock, no system
    /// call.
    fn pending(&mut self) -> bool;

    /// Takes in what the peer's side has sent and returned, acts on what is due, and shows what is
    /// queued. Bounded. True: something was taken in.
    fn turn(&mut self) -> Result<bool, EndpointOver>;

    /// Shows what is queued: packets, buffers that go back, credit.
    fn flush(&mut self);

    /// After reading: shows of that only what the peer's side may be waiting for, such as credit
    /// that it has run out of, or a good number of buffers. So a reader of many small packets
    /// notifies for few of them. What is left over is shown by the next turn or flush.
    fn settle(&mut self) {
        self.flush();
    }

    /// Asks to be told. True: something came meanwhile, and perhaps nobody will tell.
    fn arm(&mut self) -> bool;

    /// Whether what was asked for is less than what is wanted now: something was taken in or given
    /// back since. Then it is to be asked again.
    fn is_stale(&self) -> bool {
        false
    }

    /// Asks no more, and forgets what was told.
    fn disarm(&mut self);

    /// Readable when something was told: an epoll instance.
    fn fd(&self) -> BorrowedFd<'_>;

    /// The next connection or port of which something is to be told: bytes or an end have come,
    /// there is room again, it was connected, refused or closed; a connection waits. Each is named
    /// once until something happens again.
    fn next_stirred(&mut self) -> Option<ReadySource>;

    /// When a turn has something to do of itself.
    fn next_timeout(&self) -> Option<Instant>;

    /// Begins to connect.
    fn connect(
        &mut self,
        from: Port,
        to: Address,
        socket_type: SocketType,
    ) -> Result<StreamId, ConnectError>;

    /// Begins to listen for connections of that type; others are refused.
    fn listen(
        &mut self,
        port: Port,
        backlog: usize,
        socket_type: SocketType,
    ) -> Result<(), ListenError>;

    /// Takes a port, or with [`Port::ANY`] one that nobody has, so that nobody else can listen on
    /// it or bind it; which one it is.
    fn bind(&mut self, port: Port) -> Result<Port, ListenError>;

    /// Gives a bound port up.
    fn unbind(&mut self, port: Port);

    /// The receive buffer of connections that come to `port`, which is listened on, from now on.
    fn set_accept_buffer(&mut self, port: Port, bytes: u32);

    /// Listens no more, and resets what waits to be accepted.
    fn unlisten(&mut self, port: Port);

    /// The oldest connection that waits on `port`.
    fn accept(&mut self, port: Port) -> Option<StreamId>;

    /// About a connection; `None` for one that was closed.
    fn info(&self, id: StreamId) -> Option<ConnInfo>;

    /// What a reader of the connection would find; `None` for one that was closed.
    fn ahead(&mut self, id: StreamId) -> Option<Ahead>;

    /// Ends one way, or both.
    fn shutdown(&mut self, id: StreamId, how: How);

    /// Gives a connection up in good order; `id` is invalid from now on.
    fn close(&mut self, id: StreamId);

    /// Resets a connection; `id` is invalid from now on.
    fn abort(&mut self, id: StreamId);

    /// Copies received bytes out. `Ok(0)`: end of file, or `out` is empty.
    fn read(&mut self, id: StreamId, out: &mut [u8], peek: bool) -> Result<usize, RecvFault>;

    /// Takes up to `len` bytes that a peek has shown; how many.
    fn skip(&mut self, id: StreamId, len: usize) -> usize;

    /// From how many unread bytes on a connection has something to read: fewer are no ready_flags.
    fn set_low_water(&mut self, id: StreamId, bytes: u32);

    /// Changes a connection's receive buffer, and with it the most that it has under way to the
    /// peer; the peer is told.
    fn set_buffer(&mut self, id: StreamId, bytes: u32);

    /// How long the request of a connection may go unanswered from now on.
    fn set_connect_timeout(&mut self, id: StreamId, timeout: Duration);

    /// A connection's credit; `None` for one that has ended.
    fn credit(&self, id: StreamId) -> Option<CreditInfo>;

    /// Asks the peer how much of what was sent it has consumed, unless that is known to be all.
    fn ask_progress(&mut self, id: StreamId);

    /// The queue pair at which a connection is.
    fn queue_pair(&self, id: StreamId) -> u16;

    /// Asks that a connection go on at another queue pair. Not visible before the next flush. What
    /// comes of it is ready_flags of a sender: that it may send again.
    fn move_to_pair(&mut self, _: StreamId, _: u16) -> Result<(), MoveError> {
        Err(MoveError::NotNegotiated)
    }

    /// Whether a connection is on its way to another queue pair.
    fn is_moving(&self, _: StreamId) -> bool {
        false
    }

    /// Lends the next packet's bytes out. `Ok(None)`: end of file.
    fn lease(&mut self, id: StreamId) -> Result<Option<LeaseParts>, RecvFault>;

    /// Shows up to `most` packets' bytes where they lie, and takes them. `Ok(0)`: end of file.
    fn each(
        &mut self,
        id: StreamId,
        most: usize,
        look: &mut dyn FnMut(Payload<'_>) -> bool,
    ) -> Result<usize, RecvFault>;

    /// The bytes of a lease that were moved.
    fn copy_of(&self, index: u32) -> Option<Copied>;

    /// A lease or a loan was dropped.
    fn give_back(&mut self, index: u32);

    /// Sends a copy of as many bytes as there is room for: at least one, in as few packets as
    /// buffers allow. Not visible before the next flush.
    fn write(&mut self, id: StreamId, bytes: &[u8]) -> Result<usize, SendFault>;

    /// Whether small writes wait for each other when the peer has very many packets unread. Not
    /// visible before the next flush.
    fn set_coalesces(&mut self, _: StreamId, _: bool) {}

    /// What was written in small pieces and waits for more waits no longer. Not visible before the
    /// next flush.
    fn let_go(&mut self, _: StreamId) {}

    /// Whether another write would be taken to wait with those that wait; `None`: none does.
    fn may_gather_more(&mut self, _: StreamId) -> Option<bool> {
        None
    }

    /// Borrows a buffer that the peer's side will read, for one packet of at most `max` bytes.
    fn loan(&mut self, id: StreamId, max: usize) -> Result<LoanParts, SendFault>;

    /// Sends the first `len` bytes of a loan; of `private` if the loan was not in place. The loan is
    /// over, whatever comes of it, unless it was private and found no buffer (`WouldBlock`), or not
    /// enough of them: fewer than `len` bytes were sent. Then the rest is still out, and can be
    /// sent or given back.
    fn send_loan(
        &mut self,
        index: u32,
        len: usize,
        private: Option<&[u8]>,
    ) -> Result<usize, SendFault>;

    /// Copies the first message to `out`, as much of it as fits, and takes it; with `peek` leaves
    /// it. `Ok(None)`: there will be no other.
    fn read_message(
        &mut self,
        id: StreamId,
        out: &mut [u8],
        peek: bool,
    ) -> Result<Option<Message>, RecvFault>;

    /// Lends the first message out, in one lease for each part that it lies in; whether a record
    /// ends with it. `Ok(None)`: there will be no other.
    fn lease_message(&mut self, id: StreamId)
    -> Result<Option<(Vec<LeaseParts>, bool)>, RecvFault>;

    /// Sends the bytes of `slices` as one message: all of it, or nothing. False: what there is no
    /// buffer for now is kept, and sent by turns when there is. Not visible before the next flush.
    fn send_message(
        &mut self,
        id: StreamId,
        slices: &[IoSlice<'_>],
        ends_record: bool,
    ) -> Result<bool, SendFault>;

    /// Borrows buffers that the peer's side will read, for one message of at most `len` bytes, and
    /// credit for all of it: in order, each with a word of its own. What there is no buffer for, or
    /// none in place, is one private buffer behind them, which has a word only if it is the only
    /// one.
    fn loan_message(&mut self, id: StreamId, len: usize) -> Result<Vec<LoanParts>, SendFault>;

    /// Sends what was written into the buffers of such a loan as one message: `parts` are those
    /// that have something, and the first in any case. They are over, whatever comes of it, unless
    /// it is `WouldBlock`: then nothing was sent, and they are still out. False as for
    /// [`send_message`](Engine::send_message). Not visible before the next flush.
    fn send_message_loan(
        &mut self,
        id: StreamId,
        parts: &[LoanedPart<'_>],
        ends_record: bool,
    ) -> Result<bool, SendFault>;

    /// Whether something of a message is kept.
    fn is_sending(&self, id: StreamId) -> bool;

    /// Whether a message may be sent now: see [`is_writable`](Engine::is_writable).
    fn may_send_message(&mut self, id: StreamId) -> bool;

    /// Whether a write would do something now: send, or fail. If not, the connection is named by
    /// [`next_stirred`](Engine::next_stirred) when it would.
    fn is_writable(&mut self, id: StreamId) -> bool {
        if self.info(id).is_some_and(|info| info.messages.is_some()) {
            return self.may_send_message(id);
        }
        if let Some(more) = self.may_gather_more(id) {
            return more;
        }
        match self.loan(id, 1) {
            Ok(parts) => {
                self.give_back(parts.index);
                true
            }
            Err(SendFault::WouldBlock | SendFault::NotConnected) => false,
            Err(_) => true,
        }
    }

    /// Whether [`accept`](Engine::accept) would give a connection.
    fn is_acceptable(&self, port: Port) -> bool;

    /// What was counted.
    fn stats(&self) -> EndpointStats;

    /// The datagram sockets, if the engine has any.
    fn datagrams(&mut self) -> Option<&mut dyn DatagramEngine> {
        None
    }
}
