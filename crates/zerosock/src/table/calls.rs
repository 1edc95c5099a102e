//! The calls of a backend that need only the tables of sockets and the flows of the protocol core,
//! implemented once for both halves of the virtqueues.
//!
//! # Use
//! A half of the queues implements [`TableAccess`]; [`ConnectionCalls`] and [`InboxCalls`] follow.
//! All calls obey the invariants of [`Backend`](super::backend::Backend).

use zerosock_proto::vsock::datagram::{
    BindError, DatagramDrops, DatagramId, DatagramLimits, DatagramStats,
};
use zerosock_proto::vsock::{FlowId, RefuseReason, Shard};
use zerosock_proto::{Address, Port};

use super::coalesced::unsent;
use super::inboxes::{Inboxes, LeasedDatagram, ReceivedDatagram};
use super::places::LeaseParts;
use super::sockets::{
    Conn, MessageEnd, NoLease, Received, Shown, Sockets, Store, StreamId, StreamState,
};
use super::transfers::{Ahead, Payload, RecvFault, ShowBounds};

/// The state of a connection.
#[derive(Copy, Clone, Debug)]
pub struct ConnInfo {
    /// Its state.
    pub state: StreamState,
    /// Why the connect failed, if it did.
    pub(crate) refused: Option<RefuseReason>,
    /// The local address.
    pub local: Address,
    /// The peer's address.
    pub peer: Address,
    /// Received bytes not read yet.
    pub unread: usize,
    /// Bytes read since the connection was established.
    pub(crate) taken: u64,
    /// Fewer unread bytes than this do not make the connection readable.
    pub(crate) low_water: u32,
    /// No more bytes will arrive: the peer shut down sending, or this side shut down receiving.
    pub(crate) at_end: bool,
    /// The peer shut down receiving.
    pub(crate) peer_recv_shutdown: bool,
    /// Unread messages of a message connection; `None` for a stream.
    pub(crate) messages: Option<u32>,
    /// The application declared this peer trusted: it does not write leased bytes.
    pub(crate) trusted: bool,
}

impl ConnInfo {
    /// The state of `conn`. `trusted`: the peer was declared to leave lent bytes unchanged.
    pub(crate) fn new<T>(conn: &Conn<T>, trusted: bool) -> ConnInfo {
        ConnInfo {
            state: conn.state,
            refused: conn.refused,
            local: conn.local,
            peer: conn.peer,
            unread: conn.unread(),
            taken: conn.taken(),
            low_water: conn.low_water(),
            at_end: conn.is_at_end(),
            peer_recv_shutdown: conn.peer_recv_shutdown,
            messages: conn.messages(),
            trusted,
        }
    }
}

/// The credit of an open connection.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct CreditInfo {
    /// Size of the local receive buffer (`buf_alloc`), in bytes.
    pub(crate) buffer: u32,
    /// Bytes accepted from the writer that the peer has not reported as consumed.
    pub(crate) unsent: u32,
}

/// What one half of the queues provides for the calls of this module.
pub(crate) trait TableAccess {
    /// Names a held buffer.
    type Token;
    /// The buffers and the shard of one connection.
    type Store<'a>: Store<Token = Self::Token>;
    /// The buffers and shards of all connections.
    type AllStores<'a>: Store<Token = Self::Token>;

    /// The connections.
    fn sockets(&self) -> Option<&Sockets<Self::Token>>;

    /// The connections, to be changed.
    fn sockets_mut(&mut self) -> Option<&mut Sockets<Self::Token>>;

    /// Whether the application declared the peer with this pool of buffers trusted: it does not
    /// write leased bytes.
    fn trusts_pool(&self, pool: u32) -> bool;

    /// Calls `act` with the buffers of a connection. `act` returns whether it consumed any. It is
    /// not called for a connection that was closed, if the half finds the buffers by connection.
    fn with_received(
        &mut self,
        id: StreamId,
        act: impl FnOnce(&mut Sockets<Self::Token>, &mut Self::Store<'_>) -> bool,
    );

    /// Passes arriving packets of a connection without held packets to `look`, directly from the
    /// queue. A packet out of bounds is held.
    fn show_arrivals(
        &mut self,
        id: StreamId,
        bounds: ShowBounds,
        look: &mut impl FnMut(Payload<'_>) -> bool,
    ) -> Shown;

    /// Leases the next packet of a connection: the first unread one, or if there is none, the next that
    /// has arrived. Arrived packets before it, of other connections, are held.
    fn lease_next(&mut self, id: StreamId) -> Result<LeaseParts, NoLease>;

    /// Called before a message is leased from buffers of a connection.
    fn prepare_lease(&mut self, _: StreamId) {}

    /// The shard and the flow of a connection, if it has a flow.
    fn flow(&self, id: StreamId) -> Option<(&Shard, FlowId)>;

    /// Calls `act` with the shard and the flow of a connection, if it has a flow. The next flush
    /// makes the result visible.
    fn with_flow<T>(
        &mut self,
        id: StreamId,
        act: impl FnOnce(&mut Shard, FlowId) -> T,
    ) -> Option<T>;

    /// The datagram sockets.
    fn inboxes(&self) -> Option<&Inboxes>;

    /// Calls `act` with the datagram sockets and the buffers of all their datagrams.
    fn with_inboxes<T>(
        &mut self,
        act: impl FnOnce(&mut Inboxes, &mut Sockets<Self::Token>, &mut Self::AllStores<'_>) -> T,
    ) -> Option<T>;

    /// Passes the next datagram of a socket that holds none to `look`, directly from the queue. The
    /// last argument tells whether its peer is trusted.
    fn show_datagram(&mut self, id: DatagramId, look: &mut dyn FnMut(Address, Payload<'_>, bool));

    /// Moves arrived datagrams to the inboxes, at least until this one has some.
    fn take_in_datagrams(&mut self, id: DatagramId);
}

/// The calls on connections.
pub trait ConnectionCalls {
    /// The state of a connection; `None` if it was closed.
    fn info(&self, id: StreamId) -> Option<ConnInfo>;

    /// What a reader would find; `None` if the connection was closed.
    fn ahead(&mut self, id: StreamId) -> Option<Ahead>;

    /// Copies received bytes to `out`. `Ok(0)`: end of stream, or `out` is empty.
    fn read(&mut self, id: StreamId, out: &mut [u8], peek: bool) -> Result<usize, RecvFault>;

    /// Consumes up to `len` bytes that a peek returned; returns how many.
    fn skip(&mut self, id: StreamId, len: usize) -> usize;

    /// Sets the low-water mark: fewer unread bytes do not make the connection readable.
    fn set_low_water(&mut self, id: StreamId, bytes: u32);

    /// Sets a connection's receive buffer and with it the limit on its bytes in flight to the peer.
    /// The peer is sent the new size.
    fn set_buffer(&mut self, id: StreamId, bytes: u32);

    /// The credit of a connection; `None` if it has ended.
    fn credit(&self, id: StreamId) -> Option<CreditInfo>;

    /// Requests a credit update from the peer, unless all sent bytes are known to be consumed.
    fn request_credit_update(&mut self, id: StreamId);

    /// Leases the next packet's bytes. `Ok(None)`: end of stream.
    fn lease(&mut self, id: StreamId) -> Result<Option<LeaseParts>, RecvFault>;

    /// Passes the bytes of up to `most` packets to the callback in place and consumes them.
    /// `Ok(0)`: end of stream.
    fn consume_in_place(
        &mut self,
        id: StreamId,
        most: usize,
        look: &mut dyn FnMut(Payload<'_>) -> bool,
    ) -> Result<usize, RecvFault>;

    /// Copies the first message to `out`, truncated to its length, and consumes it unless `peek`.
    /// `Ok(None)`: end of stream.
    fn read_message(
        &mut self,
        id: StreamId,
        out: &mut [u8],
        peek: bool,
    ) -> Result<Option<Received>, RecvFault>;

    /// Leases the first message, one lease for each part. The flag tells whether it ends a record.
    /// `Ok(None)`: end of stream.
    fn lease_message(&mut self, id: StreamId)
    -> Result<Option<(Vec<LeaseParts>, bool)>, RecvFault>;

    /// Sets whether small writes are coalesced while the peer has many packets unread. Visible
    /// after the next flush.
    fn set_coalesces(&mut self, id: StreamId, coalesces: bool);

    /// Sends coalesced writes without further delay. Visible after the next flush.
    fn flush_coalesced(&mut self, id: StreamId);

    /// Whether another write would be coalesced with the pending ones; `None` if none are pending.
    fn can_coalesce_more(&mut self, id: StreamId) -> Option<bool>;
}

impl<A: TableAccess> ConnectionCalls for A {
    fn info(&self, id: StreamId) -> Option<ConnInfo> {
        let conn = self.sockets()?.get(id)?;
        Some(ConnInfo::new(conn, self.trusts_pool(conn.pool)))
    }

    #[inline]
    fn ahead(&mut self, id: StreamId) -> Option<Ahead> {
        let mut ahead = None;
        self.with_received(id, |sockets, store| {
            ahead = sockets.ahead(id, store);
            false
        });
        ahead
    }

    #[inline]
    fn read(&mut self, id: StreamId, out: &mut [u8], peek: bool) -> Result<usize, RecvFault> {
        let mut got = 0;
        if !peek && !out.is_empty() {
            // Nothing, if the connection holds bytes; a packet that is longer than `out` is held.
            let bounds = ShowBounds {
                packets: usize::MAX,
                bytes: out.len(),
            };
            let mut at = 0;
            let mut copy = |payload: Payload<'_>| {
                at += payload.copy_to(0, out.get_mut(at..).unwrap_or(&mut []));
                at < out.len()
            };
            got = self.show_arrivals(id, bounds, &mut copy).bytes;
            if let Some(sockets) = self.sockets_mut() {
                sockets.count_read(got);
            }
        }
        if got == 0 {
            self.with_received(id, |sockets, store| {
                got = sockets.read(id, out, peek, store);
                got > 0 && !peek
            });
        }
        if got == 0 && !out.is_empty() {
            why_empty(self, id)?;
        }
        Ok(got)
    }

    fn skip(&mut self, id: StreamId, len: usize) -> usize {
        let mut done = 0;
        self.with_received(id, |sockets, store| {
            done = sockets.skip(id, len, store);
            done > 0
        });
        done
    }

    fn set_low_water(&mut self, id: StreamId, bytes: u32) {
        if let Some(sockets) = self.sockets_mut() {
            sockets.set_low_water(id, bytes);
            // Credit of leases that are out may be due earlier, here and in `set_buffer`.
            sockets.lease_table().end_round();
        }
        // Fails only for a flow that has ended, which needs no credit; likewise in the calls below.
        self.with_flow(id, |shard, flow| shard.set_low_water(flow, bytes));
    }

    fn set_buffer(&mut self, id: StreamId, bytes: u32) {
        if let Some(sockets) = self.sockets() {
            sockets.lease_table().end_round();
        }
        self.with_flow(id, |shard, flow| shard.set_buf_alloc(flow, bytes));
    }

    fn credit(&self, id: StreamId) -> Option<CreditInfo> {
        let (shard, flow) = self.flow(id)?;
        let info = shard.flow(flow)?;
        Some(CreditInfo {
            buffer: info.buf_alloc,
            unsent: unsent(&info),
        })
    }

    fn request_credit_update(&mut self, id: StreamId) {
        self.with_flow(id, |shard, flow| shard.request_progress(flow));
    }

    #[inline]
    fn lease(&mut self, id: StreamId) -> Result<Option<LeaseParts>, RecvFault> {
        let leased = self.lease_next(id);
        lease_result(self, id, leased)
    }

    #[inline]
    fn consume_in_place(
        &mut self,
        id: StreamId,
        most: usize,
        look: &mut dyn FnMut(Payload<'_>) -> bool,
    ) -> Result<usize, RecvFault> {
        let stopped = std::cell::Cell::new(false);
        let mut look = |payload: Payload<'_>| {
            stopped.set(!look(payload));
            !stopped.get()
        };
        let mut seen = 0;
        self.with_received(id, |sockets, store| {
            seen = sockets.consume_in_place(id, most, &mut look, store);
            seen > 0
        });
        if seen < most && !stopped.get() {
            let bounds = ShowBounds {
                packets: most - seen,
                bytes: usize::MAX,
            };
            let shown = self.show_arrivals(id, bounds, &mut look);
            if let Some(sockets) = self.sockets_mut() {
                sockets.count_shown(shown.bytes);
            }
            seen += shown.packets as usize;
        }
        if seen == 0 && most > 0 {
            why_empty(self, id)?;
        }
        Ok(seen)
    }

    fn read_message(
        &mut self,
        id: StreamId,
        out: &mut [u8],
        peek: bool,
    ) -> Result<Option<Received>, RecvFault> {
        if !peek {
            // Nothing, if the connection holds bytes.
            let bounds = ShowBounds {
                packets: 1,
                bytes: usize::MAX,
            };
            let mut copied = 0;
            let mut copy = |payload: Payload<'_>| {
                copied = payload.copy_to(0, out);
                false
            };
            let shown = self.show_arrivals(id, bounds, &mut copy);
            if shown.packets > 0 {
                let message = Received {
                    len: shown.bytes,
                    copied,
                    end_of_record: shown.ends == Some(MessageEnd::Record),
                };
                if let Some(sockets) = self.sockets_mut() {
                    sockets.count_read_message(&message);
                }
                return Ok(Some(message));
            }
        }
        let mut message = None;
        self.with_received(id, |sockets, store| {
            message = sockets.read_message(id, out, peek, store);
            message.is_some() && !peek
        });
        if message.is_none() {
            why_empty(self, id)?;
        }
        Ok(message)
    }

    fn lease_message(
        &mut self,
        id: StreamId,
    ) -> Result<Option<(Vec<LeaseParts>, bool)>, RecvFault> {
        self.prepare_lease(id);
        let mut leased = Err(NoLease::Empty);
        self.with_received(id, |sockets, store| {
            leased = sockets.lease_message(id, store);
            leased.is_ok()
        });
        lease_result(self, id, leased)
    }

    fn set_coalesces(&mut self, id: StreamId, coalesces: bool) {
        self.with_flow(id, |shard, flow| shard.set_coalescing(flow, coalesces));
    }

    fn flush_coalesced(&mut self, id: StreamId) {
        self.with_flow(id, |shard, flow| shard.flush_coalesced(flow));
    }

    fn can_coalesce_more(&mut self, id: StreamId) -> Option<bool> {
        self.with_flow(id, |shard, flow| shard.can_coalesce_more(flow))?
    }
}

#[inline]
fn lease_result<A: TableAccess, T>(
    of: &A,
    id: StreamId,
    leased: Result<T, NoLease>,
) -> Result<Option<T>, RecvFault> {
    match leased {
        Ok(parts) => Ok(Some(parts)),
        Err(NoLease::TooMany) => Err(RecvFault::TooManyLeases),
        Err(NoLease::Empty) => why_empty(of, id).map(|()| None),
    }
}

/// The result of a receive that found nothing: `Ok` for end of stream, else the reason.
#[cold]
fn why_empty<A: TableAccess>(of: &A, id: StreamId) -> Result<(), RecvFault> {
    let conn = of.sockets().and_then(|sockets| sockets.get(id));
    conn.ok_or(RecvFault::Unknown)?.why_empty()
}

/// The calls on datagram sockets, except sending.
pub trait InboxCalls {
    /// Opens a socket at `port`, or at a free port for [`Port::ANY`]. Returns its id and address.
    fn bind(
        &mut self,
        port: Port,
        limits: DatagramLimits,
    ) -> Result<(DatagramId, Address), BindError>;

    /// Closes a socket and drops its unread datagrams.
    fn close(&mut self, id: DatagramId);

    /// Restricts reception to datagrams from `peer`; `None` accepts all senders.
    fn connect(&mut self, id: DatagramId, peer: Option<Address>);

    /// The limits on unread and unsent bytes of a socket.
    fn limits(&self, id: DatagramId) -> Option<DatagramLimits>;

    /// Changes the limits.
    fn set_limits(&mut self, id: DatagramId, limits: DatagramLimits);

    /// Copies the next datagram to `out`, truncated to its length. `None`: the socket is empty.
    fn recv(&mut self, id: DatagramId, out: &mut [u8], peek: bool) -> Option<ReceivedDatagram>;

    /// Leases the next datagram.
    fn lease(&mut self, id: DatagramId) -> Result<LeasedDatagram, RecvFault>;

    /// Whether the application declared the sender trusted: it does not write leased bytes. `pool`
    /// has the bytes; `None`: they lie in a copy.
    fn trusts(&self, pool: Option<u32>) -> bool;

    /// Passes up to `most` datagrams to `look` in place and consumes them, until `look` returns
    /// false. Returns their number. The last argument of `look` tells whether the peer is trusted
    /// not to write the bytes meanwhile.
    fn consume_in_place(
        &mut self,
        id: DatagramId,
        most: usize,
        look: &mut dyn FnMut(Address, Payload<'_>, bool) -> bool,
    ) -> usize;

    /// Whether a datagram is unread.
    fn has_some(&self, id: DatagramId) -> bool;

    /// The counters of a socket.
    fn stats(&self, id: DatagramId) -> Option<DatagramStats>;

    /// Dropped datagrams over all sockets.
    fn drops(&self) -> DatagramDrops;
}

impl<A: TableAccess> InboxCalls for A {
    fn bind(
        &mut self,
        port: Port,
        limits: DatagramLimits,
    ) -> Result<(DatagramId, Address), BindError> {
        let bound = self.with_inboxes(|inboxes, _, _| {
            let id = inboxes.table.bind(port, limits)?;
            inboxes.open(id);
            let local = inboxes.table.addresses(id).map(|(local, _)| local);
            Ok((id, local.unwrap_or(Address::new(inboxes.table.cid(), port))))
        });
        bound.unwrap_or(Err(BindError::TooMany))
    }

    fn close(&mut self, id: DatagramId) {
        self.with_inboxes(|inboxes, sockets, store| {
            inboxes.table.close(id);
            inboxes.close(id, sockets, store);
        });
    }

    fn connect(&mut self, id: DatagramId, peer: Option<Address>) {
        self.with_inboxes(|inboxes, _, _| inboxes.table.connect(id, peer));
    }

    fn limits(&self, id: DatagramId) -> Option<DatagramLimits> {
        self.inboxes()?.table.limits(id)
    }

    fn set_limits(&mut self, id: DatagramId, limits: DatagramLimits) {
        self.with_inboxes(|inboxes, _, _| inboxes.table.set_limits(id, limits));
    }

    #[inline]
    fn recv(&mut self, id: DatagramId, out: &mut [u8], peek: bool) -> Option<ReceivedDatagram> {
        if !peek && !self.has_some(id) {
            let mut got = None;
            self.show_datagram(id, &mut |source, payload, _| {
                got = Some(ReceivedDatagram {
                    copied: payload.copy_to(0, out),
                    len: payload.len(),
                    source,
                });
            });
            if let (Some(got), Some(sockets)) = (got, self.sockets_mut()) {
                sockets.count_read(got.len);
                return Some(got);
            }
        }
        self.with_inboxes(|inboxes, sockets, store| inboxes.read(id, out, peek, sockets, store))?
    }

    fn lease(&mut self, id: DatagramId) -> Result<LeasedDatagram, RecvFault> {
        if !self.has_some(id) {
            self.take_in_datagrams(id);
        }
        let leased = self.with_inboxes(|inboxes, sockets, store| inboxes.lease(id, sockets, store));
        leased.unwrap_or(Err(RecvFault::Unknown))
    }

    fn trusts(&self, pool: Option<u32>) -> bool {
        // A copy is our own memory.
        pool.is_none_or(|pool| self.trusts_pool(pool))
    }

    fn consume_in_place(
        &mut self,
        id: DatagramId,
        most: usize,
        look: &mut dyn FnMut(Address, Payload<'_>, bool) -> bool,
    ) -> usize {
        let mut seen = 0;
        while seen < most {
            let mut go_on = None;
            if !self.has_some(id) {
                let mut bytes = 0;
                self.show_datagram(id, &mut |source, payload, trusted| {
                    bytes = payload.len();
                    go_on = Some(look(source, payload, trusted));
                });
                if let Some(sockets) = self.sockets_mut() {
                    sockets.count_shown(bytes);
                }
            }
            if go_on.is_none() {
                let pool = self.inboxes().zip(self.sockets());
                let pool = pool.and_then(|(inboxes, sockets)| inboxes.front_pool(id, sockets));
                let trusted = self.trusts(pool);
                let mut look = |source, payload: Payload<'_>| look(source, payload, trusted);
                go_on = self
                    .with_inboxes(|inboxes, sockets, store| {
                        inboxes.show(id, &mut look, sockets, store)
                    })
                    .flatten();
            }
            match go_on {
                Some(true) => seen += 1,
                Some(false) => return seen + 1,
                None => break,
            }
        }
        seen
    }

    fn has_some(&self, id: DatagramId) -> bool {
        self.inboxes().is_some_and(|inboxes| !inboxes.is_empty(id))
    }

    fn stats(&self, id: DatagramId) -> Option<DatagramStats> {
        self.inboxes()?.table.stats(id)
    }

    fn drops(&self) -> DatagramDrops {
        let inboxes = self.inboxes();
        inboxes
            .map(|inboxes| inboxes.table.drops())
            .unwrap_or_default()
    }
}
