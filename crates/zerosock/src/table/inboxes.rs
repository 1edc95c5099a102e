//! The unread datagrams of an endpoint's sockets.
//!
//! The protocol core's [`DatagramTable`] assigns datagrams to sockets and limits their bytes. The
//! payloads lie in [`Sockets`], in one internal connection for each socket and pool, so that the
//! limits on held buffers and the leases of streams apply to datagrams too. Beyond half of a pool,
//! datagrams are copied; beyond the socket's limit the core drops them. Unread datagrams therefore
//! never block a queue.
//!
//! # Invariants
//! - A socket's datagrams are read in order of arrival.
//! - Each is reported to the table as taken exactly once.

use std::collections::VecDeque;

use zerosock_proto::Address;
use zerosock_proto::vsock::datagram::{DatagramId, DatagramTable};

use super::places::{LeaseParts, NoLease};
use super::sockets::{HeldBuffer, Sockets, Store, StreamId, StreamState};
use crate::table::transfers::{Payload, RecvFault};

/// The unread datagrams of all sockets. See the module documentation.
#[derive(Debug)]
pub(crate) struct Inboxes {
    pub(crate) table: DatagramTable,
    boxes: Vec<Inbox>,
    /// Sockets with changed readiness, oldest first.
    ready_list: VecDeque<DatagramId>,
}

#[derive(Debug, Default)]
struct Inbox {
    /// The socket; `None` for a free entry.
    id: Option<DatagramId>,
    entries: VecDeque<Entry>,
    /// The internal connection for each pool from which datagrams arrived.
    conns: Vec<(u32, StreamId)>,
    /// The socket is in the ready list.
    listed: bool,
}

#[derive(Debug)]
struct Entry {
    source: Address,
    len: u32,
    place: At,
}

#[derive(Debug)]
enum At {
    /// It is the next part of this connection.
    Conn(StreamId),
    Copy(Vec<u8>),
}

/// The result of reading a datagram.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct ReceivedDatagram {
    /// Bytes copied.
    pub(crate) copied: usize,
    /// Length of the datagram in bytes.
    pub(crate) len: usize,
    pub(crate) source: Address,
}

/// A leased datagram.
#[derive(Debug)]
pub struct LeasedDatagram {
    /// `None`: the datagram is empty.
    pub(crate) parts: Option<LeaseParts>,
    pub(crate) source: Address,
    /// The pool of its buffer; tells whether the peer is trusted.
    pub(crate) pool: Option<u32>,
}

impl Inboxes {
    pub(crate) fn new(table: DatagramTable) -> Inboxes {
        Inboxes {
            table,
            boxes: Vec::new(),
            ready_list: VecDeque::new(),
        }
    }

    #[inline]
    fn inbox(&mut self, id: DatagramId) -> Option<&mut Inbox> {
        let inbox = self.boxes.get_mut(id.index() as usize)?;
        (inbox.id == Some(id)).then_some(inbox)
    }

    /// Adds a new socket.
    pub(crate) fn open(&mut self, id: DatagramId) {
        let index = id.index() as usize;
        if self.boxes.len() <= index {
            self.boxes.resize_with(index + 1, Inbox::default);
        }
        if let Some(inbox) = self.boxes.get_mut(index) {
            inbox.id = Some(id);
        }
    }

    /// Drops the unread datagrams of a closed socket.
    pub(crate) fn close<T>(
        &mut self,
        id: DatagramId,
        sockets: &mut Sockets<T>,
        store: &mut impl Store<Token = T>,
    ) {
        if let Some(inbox) = self.inbox(id) {
            for (_, conn) in std::mem::take(inbox).conns {
                sockets.remove(conn, store);
            }
        }
    }

    /// Whether the socket has no unread datagram.
    #[inline]
    pub(crate) fn is_empty(&self, id: DatagramId) -> bool {
        let inbox = self.boxes.get(id.index() as usize);
        inbox.is_none_or(|inbox| inbox.entries.is_empty())
    }

    /// Puts a socket on the ready list.
    #[inline]
    pub(crate) fn mark_ready(&mut self, id: DatagramId) {
        if let Some(inbox) = self.inbox(id)
            && !std::mem::replace(&mut inbox.listed, true)
        {
            self.ready_list.push_back(id);
        }
    }

    /// The next socket with changed readiness.
    #[inline]
    pub(crate) fn next_ready(&mut self) -> Option<DatagramId> {
        while let Some(id) = self.ready_list.pop_front() {
            if let Some(inbox) = self.inbox(id) {
                inbox.listed = false;
                return Some(id);
            }
        }
        self.table.poll_writable()
    }

    /// Stores a datagram in a buffer of `pool` for the socket that the table chose. Returns whether
    /// it had to be copied.
    pub(crate) fn deliver<T>(
        &mut self,
        id: DatagramId,
        source: Address,
        pool: u32,
        held: HeldBuffer<T>,
        sockets: &mut Sockets<T>,
        store: &mut impl Store<Token = T>,
    ) -> bool {
        let len = held.len;
        let local = self.table.addresses(id).map(|(local, _)| local);
        let (Some(inbox), Some(local)) = (self.inbox(id), local) else {
            store.release(held.token);
            return false;
        };
        let (place, copied) = if len > 0 && sockets.may_hold_datagram(pool) {
            let conn = inbox.conn(pool, local, sockets, store);
            sockets.deliver(conn, held, store);
            (At::Conn(conn), false)
        } else {
            let mut bytes = vec![0; len as usize];
            if let Some(memory) = store.memory(&held.token) {
                let pieces = store.pieces(&held.token);
                memory.read(pieces, held.offset as usize, &mut bytes);
            }
            store.release(held.token);
            sockets.count_copied(bytes.len());
            (At::Copy(bytes), len > 0)
        };
        inbox.entries.push_back(Entry { source, len, place });
        self.mark_ready(id);
        copied
    }

    /// As [`deliver`](Self::deliver), for a datagram reassembled from fragments.
    pub(crate) fn deliver_copy<T>(
        &mut self,
        id: DatagramId,
        source: Address,
        bytes: Vec<u8>,
        sockets: &mut Sockets<T>,
    ) {
        if let Some(inbox) = self.inbox(id) {
            sockets.count_copied(bytes.len());
            inbox.entries.push_back(Entry {
                source,
                len: bytes.len() as u32,
                place: At::Copy(bytes),
            });
            self.mark_ready(id);
        }
    }

    /// The next datagram that still exists. Those dropped by the copy limit
    /// are skipped.
    fn front<T>(&mut self, id: DatagramId, sockets: &Sockets<T>) -> Option<&mut Entry> {
        loop {
            let entry = self.inbox(id)?.entries.front()?;
            match entry.place {
                At::Conn(conn) if sockets.unread(conn) < entry.len as usize => {
                    let len = entry.len;
                    self.inbox(id)?.entries.pop_front();
                    self.table.consume(id, len);
                }
                _ => return self.inbox(id)?.entries.front_mut(),
            }
        }
    }

    /// Copies the next datagram to `out`, truncated to its length, and consumes all of it.
    pub(crate) fn read<T>(
        &mut self,
        id: DatagramId,
        out: &mut [u8],
        peek: bool,
        sockets: &mut Sockets<T>,
        store: &mut impl Store<Token = T>,
    ) -> Option<ReceivedDatagram> {
        let entry = self.front(id, sockets)?;
        let (source, len) = (entry.source, entry.len);
        let copied = (len as usize).min(out.len());
        let out = out.get_mut(..copied).unwrap_or(&mut []);
        match &entry.place {
            At::Copy(bytes) => {
                out.copy_from_slice(bytes.get(..copied).unwrap_or(&[]));
                if !peek {
                    sockets.count_copied_out(copied);
                }
            }
            At::Conn(conn) => {
                let conn = *conn;
                sockets.read(conn, out, peek, store);
                if !peek && copied < len as usize {
                    sockets.skip(conn, len as usize - copied, store);
                }
            }
        }
        if !peek {
            self.inbox(id)?.entries.pop_front();
            self.table.consume(id, len);
        }
        Some(ReceivedDatagram {
            copied,
            len: len as usize,
            source,
        })
    }

    /// Leases the next datagram.
    pub(crate) fn lease<T>(
        &mut self,
        id: DatagramId,
        sockets: &mut Sockets<T>,
        store: &mut impl Store<Token = T>,
    ) -> Result<LeasedDatagram, RecvFault> {
        let entry = self.front(id, sockets).ok_or(RecvFault::WouldBlock)?;
        let (source, len) = (entry.source, entry.len);
        let mut pool = None;
        let parts = match &mut entry.place {
            At::Copy(bytes) if bytes.is_empty() => None,
            At::Copy(bytes) => match sockets.lend_copy(std::mem::take(bytes)) {
                Ok(parts) => Some(parts),
                Err((_, back)) => {
                    *bytes = back;
                    return Err(RecvFault::TooManyLeases);
                }
            },
            At::Conn(conn) => {
                pool = sockets.get(*conn).map(|conn| conn.pool);
                match sockets.lease(*conn, store) {
                    Ok(parts) => Some(parts),
                    Err(NoLease::TooMany) => return Err(RecvFault::TooManyLeases),
                    Err(NoLease::Empty) => return Err(RecvFault::WouldBlock),
                }
            }
        };
        if let Some(inbox) = self.inbox(id) {
            inbox.entries.pop_front();
        }
        self.table.consume(id, len);
        Ok(LeasedDatagram {
            parts,
            source,
            pool,
        })
    }

    /// The pool of the next datagram's buffer; `None` if it is a copy, or there is none.
    pub(crate) fn front_pool<T>(&self, id: DatagramId, sockets: &Sockets<T>) -> Option<u32> {
        let inbox = self.boxes.get(id.index() as usize)?;
        match inbox.entries.front()?.place {
            At::Conn(conn) => sockets.get(conn).map(|conn| conn.pool),
            At::Copy(_) => None,
        }
    }

    /// Passes the next datagram to `look` in place and consumes it.
    pub(crate) fn show<T>(
        &mut self,
        id: DatagramId,
        look: &mut dyn FnMut(Address, Payload<'_>) -> bool,
        sockets: &mut Sockets<T>,
        store: &mut impl Store<Token = T>,
    ) -> Option<bool> {
        self.front(id, sockets)?;
        let Entry { source, len, place } = self.inbox(id)?.entries.pop_front()?;
        // Before the call, because `look` may panic.
        self.table.consume(id, len);
        let mut go_on = true;
        match place {
            At::Copy(bytes) => {
                sockets.count_copied_out(bytes.len());
                go_on = look(source, Payload::copied(&bytes));
            }
            At::Conn(conn) => {
                let mut one = |payload: Payload<'_>| {
                    go_on = look(source, payload);
                    false
                };
                sockets.consume_in_place(conn, 1, &mut one, store);
            }
        }
        Some(go_on)
    }
}

impl Inbox {
    /// The internal connection for buffers of `pool`.
    fn conn<T>(
        &mut self,
        pool: u32,
        local: Address,
        sockets: &mut Sockets<T>,
        store: &mut impl Store<Token = T>,
    ) -> StreamId {
        let at = self.conns.iter().position(|(of, _)| *of == pool);
        if let Some((_, conn)) = at.and_then(|at| self.conns.get(at)) {
            let conn = *conn;
            let known = sockets.get(conn);
            if known.is_some_and(|conn| conn.state == StreamState::Connected) {
                return conn;
            }
            // The copy limit reset it; its leases remain valid.
            sockets.remove(conn, store);
        }
        let conn = sockets.insert_datagrams(pool, local);
        match at.and_then(|at| self.conns.get_mut(at)) {
            Some(place) => place.1 = conn,
            None => self.conns.push((pool, conn)),
        }
        conn
    }
}
