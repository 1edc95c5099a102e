//! Connections that carry messages: where each ends, and reading one as a whole.
//!
//! The parts of a message come as a stream's do; the last of them has its end. A message is there
//! for its reader when it has ended, and not before: what is unread counts whole ones. One that has
//! not ended when the connection does is nobody's, and goes back.
//!
//! What must hold: the bounds on what is held are the same for half messages. Of one that has not
//! ended an eighth of the pool is held at most, what is beyond is copied aside: so a message may be
//! longer than what may be held in place, and arrives. A message in a copy costs more than its bytes,
//! and is counted so ([`COST`]), because a peer chooses how short its messages are.

use zerosock_proto::wire::vsock::{SEQ_EOM, SEQ_EOR};

use super::parts::{Held, Part, copy_out};
use super::{LeaseParts, NoLease, ReadyFlags, Sockets, Store, StreamId};

/// What a message in a copy costs beside its bytes.
const COST: usize = 64;

/// Whether a part is the last of its message. A stream's parts never are.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub(crate) enum Ends {
    #[default]
    Nothing,
    /// A message.
    Message,
    /// A message, and with it a record, as its sender said (MSG_EOR).
    Record,
}

impl Ends {
    /// What ends with a packet that has these flags.
    pub(crate) fn from_flags(flags: u32) -> Ends {
        match flags {
            _ if flags & SEQ_EOM == 0 => Ends::Nothing,
            _ if flags & SEQ_EOR == 0 => Ends::Message,
            _ => Ends::Record,
        }
    }

    pub(crate) fn any(self) -> bool {
        self != Ends::Nothing
    }
}

/// A message that was read, or looked at.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) struct Message {
    /// Its bytes.
    pub(crate) len: usize,
    /// Those of them that were copied.
    pub(crate) copied: usize,
    pub(crate) ends_record: bool,
}

/// What a connection that carries messages has beside a stream's.
#[derive(Debug, Default)]
pub(crate) struct Messages {
    /// Unread ones that have ended.
    pub(super) whole: u32,
    /// Bytes of one that has not.
    pub(super) half: usize,
    /// Buffers held of it.
    pub(super) half_held: u32,
}

impl<T> Part<T> {
    pub(super) fn ends(&self) -> Ends {
        match self {
            Part::Held(held) => held.ends,
            Part::Copied { ends, .. } => *ends,
        }
    }
}

/// What a copy with that end costs beside its bytes.
pub(super) fn cost(ends: Ends) -> usize {
    if ends.any() { COST } else { 0 }
}

impl<T> super::Conn<T> {
    /// Unread messages, if the connection carries any.
    pub(crate) fn messages(&self) -> Option<u32> {
        self.messages.as_ref().map(|messages| messages.whole)
    }

    /// Parts of the first message, and its bytes.
    fn first_message(&self) -> Option<(usize, usize)> {
        if self.messages()? == 0 {
            return None;
        }
        let mut len = 0;
        for (at, part) in self.parts.iter().enumerate() {
            len += part.len();
            if part.ends().any() {
                return Some((at + 1, len));
            }
        }
        None
    }
}

impl<T> Sockets<T> {
    /// The connection, which is new, carries messages.
    pub(crate) fn carry_messages(&mut self, id: StreamId) {
        if let Some(conn) = self.get_mut(id) {
            conn.messages = Some(Box::default());
        }
    }

    /// Takes in a part of a message. As [`deliver`](Self::deliver).
    pub(crate) fn deliver_part(
        &mut self,
        id: StreamId,
        held: Held<T>,
        store: &mut impl Store<Token = T>,
    ) {
        let eighth = |pool: u32| {
            self.pools
                .get(pool as usize)
                .map_or(1, |pool| pool.eighth())
        };
        let most = self.get(id).map(|conn| eighth(conn.pool));
        let Some(conn) = self.conns.get_mut(id.index as usize).filter(|conn| {
            conn.used && conn.generation == id.generation && conn.messages.is_some()
        }) else {
            return store.release(held.token);
        };
        if conn.recv_shutdown {
            return self.discard(id, held, store);
        }
        let Some(messages) = conn.messages.as_deref_mut() else {
            return;
        };
        let (len, ends) = (held.len as usize, held.ends);
        self.counted.received += len as u64;
        let aside = conn.stalled || most.is_some_and(|most| messages.half_held >= most);
        let begun = messages.half > 0;
        messages.half += len;
        messages.half_held += u32::from(!aside && len > 0);
        let first = messages.whole == 0;
        if ends.any() {
            conn.unread += messages.half;
            messages.half = 0;
            messages.half_held = 0;
            messages.whole += 1;
        }
        if len > 0 && !aside {
            conn.parts.push_back(Part::Held(held));
            self.hold_one(id.index);
        } else {
            let mut copied = len;
            match conn.parts.back_mut() {
                // The end of what is there already.
                Some(Part::Held(last)) if len == 0 && begun => last.ends = ends,
                _ => {
                    copied += cost(ends);
                    conn.push_copy(ends, len, |bytes| {
                        if len > 0 {
                            copy_out(store, &held, bytes);
                        }
                    });
                }
            }
            self.counted.copied_aside += len as u64;
            self.copied(id.index, copied);
            store.release(held.token);
        }
        if ends.any() && first {
            self.announce(id, ReadyFlags::Readable);
        }
    }

    /// Copies the first message to `out`, as much of it as fits, and takes it; with `peek` leaves
    /// it. `None`: there is none.
    pub(crate) fn read_message(
        &mut self,
        id: StreamId,
        out: &mut [u8],
        peek: bool,
        store: &mut impl Store<Token = T>,
    ) -> Option<Message> {
        let conn = self.get(id)?;
        let (parts, len) = conn.first_message()?;
        let mut copied = 0;
        let mut ends_record = false;
        for part in conn.parts.iter().take(parts) {
            let rest = out.get_mut(copied..).unwrap_or(&mut []);
            let step = rest.len().min(part.len());
            let rest = &mut rest[..step];
            match part {
                Part::Held(held) if step > 0 => {
                    if let Some(memory) = store.memory(&held.token) {
                        let pieces = store.pieces(&held.token);
                        memory.read(pieces, held.offset as usize, rest);
                    }
                }
                Part::Held(_) => {}
                Part::Copied { bytes, taken, .. } => {
                    rest.copy_from_slice(&bytes[*taken..*taken + step]);
                }
            }
            copied += step;
            ends_record = part.ends() == Ends::Record;
        }
        if !peek {
            self.counted.copied_out += copied as u64;
            self.take_message(id, parts, store);
        }
        Some(Message {
            len,
            copied,
            ends_record,
        })
    }

    /// Throws the first message away, which has so many parts.
    fn take_message(&mut self, id: StreamId, parts: usize, store: &mut impl Store<Token = T>) {
        let mut bytes = 0;
        for _ in 0..parts {
            let first = self.get(id).and_then(|conn| conn.parts.front());
            bytes += first.map_or(0, Part::len);
            self.drop_front(id, store);
        }
        self.consumed(id, bytes, store);
        self.took_message(id, bytes, store);
    }

    /// The first message, of so many bytes, is no more among the unread ones.
    fn took_message(&mut self, id: StreamId, bytes: usize, store: &mut impl Store<Token = T>) {
        let Some(conn) = self.get_mut(id) else { return };
        if let Some(messages) = &mut conn.messages {
            messages.whole = messages.whole.saturating_sub(1);
        }
        if let Some(flow) = conn.flow.filter(|_| bytes == 0) {
            store.consumed_empty(conn.pool, flow, 1);
        }
    }

    /// Lends out the first message, in as many leases as it has parts, each in place if the bounds
    /// allow. None for one without a byte.
    pub(crate) fn lease_message(
        &mut self,
        id: StreamId,
        store: &mut impl Store<Token = T>,
    ) -> Result<(Vec<LeaseParts>, bool), NoLease> {
        let conn = self.get(id).ok_or(NoLease::Empty)?;
        let (mut parts, len) = conn.first_message().ok_or(NoLease::Empty)?;
        let last = conn.parts.get(parts - 1).map(Part::ends);
        let ends_record = last == Some(Ends::Record);
        if len == 0 {
            self.take_message(id, parts, store);
            return Ok((Vec::new(), ends_record));
        }
        // What an endpoint can count is shared out as for streams; a message takes all of its
        // leases or, as one copy, a single one.
        let lent = conn.lent as usize;
        if lent + 2 * parts > self.free_lent() {
            self.join_parts(id, parts, store);
            parts = 1;
        }
        if lent + parts > self.free_lent() {
            return Err(NoLease::TooMany);
        }
        let mut leases = Vec::with_capacity(parts);
        let mut lent = 0;
        while lent < parts {
            // There are words for all of them.
            let Ok(lease) = self.lease(id, store) else {
                break;
            };
            if lease.len > 0 {
                leases.push(lease);
            } else {
                // An end that came by itself.
                self.give_back(lease.index, store);
            }
            lent += 1;
        }
        self.took_message(id, len, store);
        Ok((leases, ends_record))
    }

    /// Copies the first so many parts into one.
    fn join_parts(&mut self, id: StreamId, parts: usize, store: &mut impl Store<Token = T>) {
        let Some(conn) = self.get_mut(id).filter(|_| parts > 1) else {
            return;
        };
        let mut all = Vec::new();
        let mut last = Ends::Nothing;
        let (mut released, mut aside, mut was) = (0, 0, 0);
        for part in conn.parts.drain(..parts.min(conn.parts.len())) {
            last = part.ends();
            match part {
                Part::Held(held) => {
                    copy_out(store, &held, &mut all);
                    aside += held.len as usize;
                    released += 1;
                    store.release(held.token);
                }
                Part::Copied { bytes, taken, ends } => {
                    all.extend_from_slice(bytes.get(taken..).unwrap_or(&[]));
                    was += bytes.len() - taken + cost(ends);
                }
            }
        }
        let now = all.len() + cost(last);
        conn.parts.push_front(Part::Copied {
            bytes: all,
            taken: 0,
            ends: last,
        });
        self.counted.copied_aside += aside as u64;
        self.uncopy(id.index, was);
        self.copied(id.index, now);
        if released > 0 {
            self.unhold(id.index, released);
        }
    }

    /// Nothing more will come: a message that has not ended is nobody's.
    pub(crate) fn drop_half(&mut self, id: StreamId, store: &mut impl Store<Token = T>) {
        let Some(conn) = self.get_mut(id) else { return };
        let Some(messages) = conn.messages.as_deref_mut() else {
            return;
        };
        let half = std::mem::take(&mut messages.half);
        messages.half_held = 0;
        let (mut released, mut copies) = (0, 0);
        while conn.parts.back().is_some_and(|part| !part.ends().any()) {
            let Some(part) = conn.parts.pop_back() else {
                break;
            };
            match part {
                Part::Held(held) => {
                    store.release(held.token);
                    released += 1;
                }
                Part::Copied { bytes, taken, .. } => copies += bytes.len() - taken,
            }
        }
        if let Some(flow) = conn.flow.filter(|_| half > 0) {
            store.consumed(conn.pool, flow, half as u32);
        }
        self.uncopy(id.index, copies);
        if released > 0 {
            self.unhold(id.index, released);
        }
        self.catch_up(id.index);
    }
}
