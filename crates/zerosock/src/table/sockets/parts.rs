//! What a connection has received: buffers in place and copies, in order; taking in and reading.

use super::messages::cost;
use super::{Conn, Counted, Ends, Sockets, Store, StreamId};
use crate::table::engine::Payload;
use zerosock_proto::Instant;
use zerosock_proto::vsock::FlowId;
use zerosock_ring::SliceBuf;

/// Bytes of a buffer of the pool.
#[derive(Debug)]
pub(crate) struct Held<T> {
    pub(crate) token: T,
    /// The first byte not yet read, from the beginning of the buffer's pieces.
    pub(crate) offset: u32,
    /// Bytes not yet read.
    pub(crate) len: u32,
    /// When they came.
    pub(crate) since: Instant,
    /// What ends with them.
    pub(crate) ends: Ends,
}

/// A stretch of received bytes.
#[derive(Debug)]
pub(crate) enum Part<T> {
    /// Where the peer's side wrote them.
    Held(Held<T>),
    /// In a copy: the first `taken` bytes have been read.
    Copied {
        bytes: Vec<u8>,
        taken: usize,
        ends: Ends,
    },
}

impl<T> Part<T> {
    pub(crate) fn len(&self) -> usize {
        match self {
            Part::Held(held) => held.len as usize,
            Part::Copied { bytes, taken, .. } => bytes.len() - taken,
        }
    }
}

/// Copies the bytes of `held` to the end of `to`. What cannot be read is zeros, so that a stream
/// keeps its length; but it can: buffers are checked when they are taken in, and recalled before
/// their memory goes.
pub(super) fn copy_out<T>(store: &impl Store<Token = T>, held: &Held<T>, to: &mut Vec<u8>) {
    let start = to.len();
    to.resize(start + held.len as usize, 0);
    let mut read = 0;
    if let (Some(memory), Some(out)) = (store.memory(&held.token), to.get_mut(start..)) {
        read = memory.read(store.pieces(&held.token), held.offset as usize, out);
    }
    debug_assert_eq!(read, held.len as usize, "bytes that are nowhere");
}

/// Bytes of a buffer of copies: so much is allocated without a way to fail.
const MOST_COPIED: usize = 64 << 10;

impl<T> Conn<T> {
    /// Appends `len` bytes to the copies at the end: many small packets into one buffer of at most
    /// [`MOST_COPIED`], unless a message ended there; what has been read of it is dropped when it is
    /// half, so that it stays below twice the bytes that wait.
    pub(super) fn push_copy(&mut self, ends: Ends, len: usize, copy: impl FnOnce(&mut Vec<u8>)) {
        if !self.whole
            && let Some(Part::Copied {
                bytes,
                taken,
                ends: end @ Ends::Nothing,
            }) = self.parts.back_mut()
            && bytes.len() - *taken + len <= MOST_COPIED
            && bytes.try_reserve(len).is_ok()
        {
            if *taken >= bytes.len() / 2 {
                bytes.drain(..*taken);
                *taken = 0;
            }
            copy(bytes);
            *end = ends;
        } else {
            let mut bytes = Vec::with_capacity(len);
            copy(&mut bytes);
            self.parts.push_back(Part::Copied {
                bytes,
                taken: 0,
                ends,
            });
        }
    }
}

impl<T> Sockets<T> {
    /// Takes in `len` bytes at `offset` of a buffer's pieces. The buffer is held, or it goes back
    /// at once because its bytes were copied (the connection has stalled) or nobody wants them.
    #[inline]
    pub(crate) fn deliver(
        &mut self,
        id: StreamId,
        held: Held<T>,
        store: &mut impl Store<Token = T>,
    ) {
        let Some(conn) = self
            .conns
            .get_mut(id.index as usize)
            .filter(|conn| conn.used && conn.generation == id.generation && held.len > 0)
        else {
            return store.release(held.token);
        };
        if conn.recv_shutdown {
            return self.discard(id, held, store);
        }
        if conn.unread < conn.low_water as usize {
            self.announce(id, super::ReadyFlags::Readable);
        }
        let Some(conn) = self.conns.get_mut(id.index as usize) else {
            return;
        };
        self.counted.received += u64::from(held.len);
        conn.unread += held.len as usize;
        if !conn.stalled {
            conn.parts.push_back(Part::Held(held));
            return self.hold_one(id.index);
        }
        self.counted.copied_aside += u64::from(held.len);
        let len = held.len as usize;
        conn.push_copy(Ends::Nothing, len, |bytes| copy_out(store, &held, bytes));
        self.copied(id.index, held.len as usize);
        store.release(held.token);
    }

    /// Copies received bytes to `out`, from the front; takes them, or with `peek` leaves them.
    pub(crate) fn read(
        &mut self,
        id: StreamId,
        out: &mut [u8],
        peek: bool,
        store: &mut impl Store<Token = T>,
    ) -> usize {
        if peek {
            return self.peek(id, out, store);
        }
        let mut done = 0;
        let mut uncopied = 0;
        while let Some(rest) = out.get_mut(done..).filter(|rest| !rest.is_empty()) {
            let Some(conn) = self.get_mut(id) else { break };
            let Some(part) = conn.parts.front_mut() else {
                break;
            };
            let len = rest.len().min(part.len());
            match part {
                Part::Held(held) => {
                    if let Some(memory) = store.memory(&held.token) {
                        let pieces = store.pieces(&held.token);
                        memory.read(pieces, held.offset as usize, &mut rest[..len]);
                    }
                    held.offset += len as u32;
                    held.len -= len as u32;
                }
                Part::Copied { bytes, taken, .. } => {
                    rest[..len].copy_from_slice(&bytes[*taken..*taken + len]);
                    *taken += len;
                    uncopied += len;
                }
            }
            done += len;
            if part.len() == 0 {
                self.drop_front(id, store);
            }
        }
        if uncopied > 0 {
            self.uncopy(id.index, uncopied);
        }
        self.counted.copied_out += done as u64;
        self.consumed(id, done, store);
        done
    }

    /// Takes up to `len` received bytes that the reader has had by a peek; how many.
    pub(crate) fn skip(
        &mut self,
        id: StreamId,
        len: usize,
        store: &mut impl Store<Token = T>,
    ) -> usize {
        let mut done = 0;
        let mut uncopied = 0;
        while done < len {
            let Some(part) = self.get_mut(id).and_then(|conn| conn.parts.front_mut()) else {
                break;
            };
            let step = part.len().min(len - done);
            match part {
                Part::Held(held) => {
                    held.offset += step as u32;
                    held.len -= step as u32;
                }
                Part::Copied { taken, .. } => {
                    *taken += step;
                    uncopied += step;
                }
            }
            done += step;
            if part.len() == 0 {
                self.drop_front(id, store);
            }
        }
        if uncopied > 0 {
            self.uncopy(id.index, uncopied);
        }
        self.counted.copied_out += done as u64;
        self.consumed(id, done, store);
        done
    }

    fn peek(&self, id: StreamId, out: &mut [u8], store: &impl Store<Token = T>) -> usize {
        let mut done = 0;
        let Some(conn) = self.get(id) else { return 0 };
        for part in &conn.parts {
            let rest = &mut out[done..];
            let len = rest.len().min(part.len());
            match part {
                Part::Held(held) => {
                    if let Some(memory) = store.memory(&held.token) {
                        let pieces = store.pieces(&held.token);
                        memory.read(pieces, held.offset as usize, &mut rest[..len]);
                    }
                }
                Part::Copied { bytes, taken, .. } => {
                    rest[..len].copy_from_slice(&bytes[*taken..*taken + len]);
                }
            }
            done += len;
        }
        done
    }

    /// Shows up to `most` parts to `look`, each where it lies, and takes them. Stops when `look`
    /// says so (false), after the part it was shown.
    #[inline]
    pub(crate) fn each(
        &mut self,
        id: StreamId,
        most: usize,
        look: &mut dyn FnMut(Payload<'_>) -> bool,
        store: &mut impl Store<Token = T>,
    ) -> usize {
        let mut shown = Shown {
            sockets: self,
            store,
            id,
            showing: false,
            bytes: 0,
        };
        let mut seen = 0;
        while seen < most {
            let Some(part) = shown.sockets.get(id).and_then(|conn| conn.parts.front()) else {
                break;
            };
            shown.bytes += part.len();
            shown.showing = true;
            let go_on = match part {
                Part::Copied { bytes, taken, .. } => look(Payload::copied(&bytes[*taken..])),
                Part::Held(held) => {
                    let mut slices = SliceBuf::<4>::new();
                    let (offset, len) = (held.offset as usize, held.len as usize);
                    let mut covered = 0;
                    if let Some(memory) = shown.store.memory(&held.token) {
                        let pieces = shown.store.pieces(&held.token);
                        covered = memory.slices(pieces, offset, len, &mut slices);
                    }
                    if covered == len {
                        look(Payload::in_place(&slices))
                    } else {
                        // In more places than are worth naming.
                        let mut bytes = Vec::with_capacity(len);
                        copy_out(&*shown.store, held, &mut bytes);
                        look(Payload::copied(&bytes))
                    }
                }
            };
            seen += 1;
            shown.taken();
            if !go_on {
                break;
            }
        }
        seen
    }

    /// The flow of a connection for which nothing is held, so that what arrives may be shown at
    /// once; `None` if it has none, or wants nothing.
    #[inline]
    pub(crate) fn drained_flow(&self, id: StreamId) -> Option<FlowId> {
        let conn = self.get(id)?;
        conn.flow
            .filter(|_| conn.parts.is_empty() && !conn.recv_shutdown)
    }

    /// Bytes were shown where they lie, without having been held.
    #[inline]
    pub(crate) fn count_shown(&mut self, bytes: usize) {
        self.counted.received += bytes as u64;
        self.counted.leased += bytes as u64;
    }

    /// Bytes were copied to a reader, without having been held.
    #[inline]
    pub(crate) fn count_read(&mut self, bytes: usize) {
        self.counted.received += bytes as u64;
        self.counted.copied_out += bytes as u64;
    }

    /// Bytes were copied aside before anybody read them, without having been held.
    pub(crate) fn count_copied(&mut self, bytes: usize) {
        self.counted.received += bytes as u64;
        self.counted.copied_aside += bytes as u64;
    }

    /// Bytes of such a copy were copied to a reader.
    pub(crate) fn count_copied_out(&mut self, bytes: usize) {
        self.counted.copied_out += bytes as u64;
    }

    /// The first part has been used up.
    #[inline]
    pub(super) fn drop_front(&mut self, id: StreamId, store: &mut impl Store<Token = T>) {
        let Some(part) = self.get_mut(id).and_then(|conn| conn.parts.pop_front()) else {
            return;
        };
        match part {
            Part::Held(held) => {
                store.release(held.token);
                self.unhold(id.index, 1);
            }
            Part::Copied { bytes, taken, ends } => {
                self.uncopy(id.index, bytes.len() - taken + cost(ends));
            }
        }
        self.catch_up(id.index);
    }

    /// `bytes` have left the list of parts for good.
    #[inline]
    pub(super) fn consumed(
        &mut self,
        id: StreamId,
        bytes: usize,
        store: &mut impl Store<Token = T>,
    ) {
        if bytes == 0 {
            return;
        }
        if let Some(conn) = self.get_mut(id) {
            conn.unread = conn.unread.saturating_sub(bytes);
            conn.taken += bytes as u64;
            if let Some(flow) = conn.flow {
                store.consumed(conn.pool, flow, bytes as u32);
            }
        }
    }

    /// SHUT_RD: a read finds the end of file from now on, as on Linux also when bytes had come that
    /// were not read. They go back, and so does what still comes; leases stay with their holders.
    pub(crate) fn read_no_more(&mut self, id: StreamId, store: &mut impl Store<Token = T>) {
        self.drop_unread(id, store);
        if let Some(conn) = self.get_mut(id) {
            conn.recv_shutdown = true;
        }
    }

    /// Gives back a buffer that came for a connection that reads no more.
    #[cold]
    pub(super) fn discard(
        &mut self,
        id: StreamId,
        held: Held<T>,
        store: &mut impl Store<Token = T>,
    ) {
        self.counted.received += u64::from(held.len);
        if let Some(conn) = self.get(id)
            && let Some(flow) = conn.flow.filter(|_| held.len > 0)
        {
            store.consumed(conn.pool, flow, held.len);
        }
        store.release(held.token);
    }

    /// Throws away what was not read.
    pub(crate) fn drop_unread(&mut self, id: StreamId, store: &mut impl Store<Token = T>) {
        let Some(unread) = self.get(id).map(|conn| conn.unread) else {
            return;
        };
        self.drop_half(id, store);
        while self.get(id).is_some_and(|conn| !conn.parts.is_empty()) {
            self.drop_front(id, store);
        }
        self.consumed(id, unread, store);
        if let Some(messages) = self.get_mut(id).and_then(|conn| conn.messages.as_mut()) {
            messages.whole = 0;
        }
    }
}

impl Counted {
    /// Bytes that were never copied by us.
    pub(crate) fn in_place(&self) -> u64 {
        self.leased
    }
}

/// Parts that are being shown. What was shown is taken, also when the one who looks panics.
struct Shown<'a, T, S: Store<Token = T>> {
    sockets: &'a mut Sockets<T>,
    store: &'a mut S,
    id: StreamId,
    /// The first part is being looked at.
    showing: bool,
    bytes: usize,
}

impl<T, S: Store<Token = T>> Shown<'_, T, S> {
    /// The first part has been looked at.
    #[inline]
    fn taken(&mut self) {
        self.showing = false;
        self.sockets.drop_front(self.id, self.store);
    }
}

impl<T, S: Store<Token = T>> Drop for Shown<'_, T, S> {
    #[inline]
    fn drop(&mut self) {
        if self.showing {
            self.taken();
        }
        self.sockets.counted.leased += self.bytes as u64;
        self.sockets.consumed(self.id, self.bytes, self.store);
    }
}
