//! The driver's side of each connection: what was received and not yet read.
//!
//! A [`StreamId`] stays valid until [`Driver::close`](super::Driver::close),
//! also after the peer reset the connection: bytes that arrived before are
//! still there to be read. The protocol core's own `FlowId` is gone by then.
//!
//! What must hold here: received bytes lie in the device's buffers as long as
//! this connection holds no more than its share of them, then in an overflow
//! of its own, bounded by the receive window. Order: held slots first, then
//! the overflow; while there is overflow nothing new is held.

use std::collections::VecDeque;

use zerosock_proto::Address;
use zerosock_proto::vsock::FlowId;

/// No slot.
const NONE: u16 = u16::MAX;

/// A connection of one [`Driver`](super::Driver).
#[derive(Copy, Clone, Debug, Eq, PartialEq, Hash)]
pub struct StreamId {
    index: u32,
    generation: u32,
}

/// Where a connection stands.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum StreamState {
    /// The request is out, no answer yet.
    Connecting,
    /// Both sides agreed; each may have shut down one way.
    Connected,
    /// The peer had already said that it would send no more, or we closed
    /// it: the end came in good order.
    Finished,
    /// Refused, timed out, reset by the peer or by a protocol error, or lost
    /// with the transport.
    Reset,
}

/// What a connection has to tell. Each kind is told once until it happens
/// again, in this order.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) enum News {
    Connected = 0,
    Readable = 1,
    PeerShutdown = 2,
    Writable = 3,
    Refused = 4,
    Closed = 5,
}

const NEWS: [News; 6] = [
    News::Connected,
    News::Readable,
    News::PeerShutdown,
    News::Writable,
    News::Refused,
    News::Closed,
];

/// One connection.
#[derive(Debug)]
pub(crate) struct Stream {
    generation: u32,
    /// A bit for each [`News`] not told yet.
    news: u8,
    /// This place is in the list of those with news. Outlives the connection,
    /// so that a place is never listed twice.
    listed: bool,
    pub(crate) used: bool,
    pub(crate) flow: Option<FlowId>,
    pub(crate) state: StreamState,
    pub(crate) local: Address,
    pub(crate) peer: Address,
    /// The peer will send no more.
    pub(crate) peer_finished: bool,
    /// The peer will read no more.
    pub(crate) peer_deaf: bool,
    /// We will send no more.
    pub(crate) finished: bool,
    /// A send found no room: tell when there is some.
    pub(crate) wants_room: bool,
    head: u16,
    tail: u16,
    /// Slots held.
    pub(crate) held: u16,
    overflow: VecDeque<u8>,
    /// Bytes received and not read, wherever they lie.
    pub(crate) unread: usize,
}

/// Per receive slot: its place in a connection's list, and what is left in it.
#[derive(Copy, Clone, Debug)]
struct HeldSlot {
    next: u16,
    start: u32,
    end: u32,
}

/// What is next to be read from a connection.
pub(crate) enum Next {
    /// Bytes `start..end` of slot `slot`'s payload.
    Slot { slot: u16, start: u32, end: u32 },
    /// The overflow.
    Overflow,
    /// Nothing.
    Empty,
}

/// All connections of a driver.
#[derive(Debug)]
pub(crate) struct Streams {
    streams: Vec<Stream>,
    free: Vec<u32>,
    slots: Vec<HeldSlot>,
    /// Stream index by flow index.
    by_flow: Vec<u32>,
    /// Places with news, oldest first; as long as the table at most.
    with_news: VecDeque<u32>,
}

impl Streams {
    pub(crate) fn new(slots: u16) -> Streams {
        let empty = HeldSlot {
            next: NONE,
            start: 0,
            end: 0,
        };
        Streams {
            streams: Vec::new(),
            free: Vec::new(),
            slots: vec![empty; usize::from(slots)],
            by_flow: Vec::new(),
            with_news: VecDeque::new(),
        }
    }

    pub(crate) fn insert(
        &mut self,
        flow: FlowId,
        state: StreamState,
        local: Address,
        peer: Address,
    ) -> StreamId {
        let index = self.free.pop().unwrap_or_else(|| {
            self.streams.push(Stream {
                generation: 0,
                news: 0,
                listed: false,
                used: false,
                flow: None,
                state,
                local,
                peer,
                peer_finished: false,
                peer_deaf: false,
                finished: false,
                wants_room: false,
                head: NONE,
                tail: NONE,
                held: 0,
                overflow: VecDeque::new(),
                unread: 0,
            });
            (self.streams.len() - 1) as u32
        });
        if self.by_flow.len() <= flow.index() {
            self.by_flow.resize(flow.index() + 1, u32::MAX);
        }
        self.by_flow[flow.index()] = index;
        let stream = &mut self.streams[index as usize];
        stream.generation = stream.generation.wrapping_add(1);
        stream.used = true;
        stream.flow = Some(flow);
        stream.state = state;
        stream.local = local;
        stream.peer = peer;
        stream.peer_finished = false;
        stream.peer_deaf = false;
        stream.finished = false;
        stream.wants_room = false;
        stream.news = 0;
        StreamId {
            index,
            generation: stream.generation,
        }
    }

    /// Frees a connection's place. Its slots must have been taken out before.
    pub(crate) fn remove(&mut self, id: StreamId) {
        if let Some(stream) = self.get_mut(id) {
            stream.used = false;
            stream.news = 0;
            stream.flow = None;
            stream.overflow = VecDeque::new();
            stream.unread = 0;
            self.free.push(id.index);
        }
    }

    pub(crate) fn get(&self, id: StreamId) -> Option<&Stream> {
        self.streams
            .get(id.index as usize)
            .filter(|stream| stream.used && stream.generation == id.generation)
    }

    pub(crate) fn get_mut(&mut self, id: StreamId) -> Option<&mut Stream> {
        self.streams
            .get_mut(id.index as usize)
            .filter(|stream| stream.used && stream.generation == id.generation)
    }

    /// The connection that a flow of the protocol core belongs to.
    pub(crate) fn of_flow(&self, flow: FlowId) -> Option<StreamId> {
        let index = *self.by_flow.get(flow.index())?;
        let stream = self.streams.get(index as usize)?;
        (stream.used && stream.flow == Some(flow)).then_some(StreamId {
            index,
            generation: stream.generation,
        })
    }

    /// Appends slot `slot`, `len` bytes of payload, to the connection's list.
    pub(crate) fn hold(&mut self, id: StreamId, slot: u16, len: u32) {
        let Some(held) = self.slots.get_mut(usize::from(slot)) else {
            return;
        };
        *held = HeldSlot {
            next: NONE,
            start: 0,
            end: len,
        };
        let Some(stream) = self
            .streams
            .get_mut(id.index as usize)
            .filter(|stream| stream.used && stream.generation == id.generation)
        else {
            return;
        };
        let tail = std::mem::replace(&mut stream.tail, slot);
        stream.held += 1;
        stream.unread += len as usize;
        if tail == NONE {
            stream.head = slot;
        } else if let Some(last) = self.slots.get_mut(usize::from(tail)) {
            last.next = slot;
        }
    }

    /// Whether new bytes may stay in their slot.
    pub(crate) fn may_hold(&self, id: StreamId, share: u16) -> bool {
        self.get(id)
            .is_some_and(|stream| stream.overflow.is_empty() && stream.held < share)
    }

    /// Appends bytes to the connection's overflow.
    pub(crate) fn overflow(&mut self, id: StreamId, bytes: &[u8]) {
        if let Some(stream) = self.get_mut(id) {
            stream.overflow.extend(bytes);
            stream.unread += bytes.len();
        }
    }

    /// What is next to be read.
    pub(crate) fn next(&self, id: StreamId) -> Next {
        let Some(stream) = self.get(id) else {
            return Next::Empty;
        };
        match self.slots.get(usize::from(stream.head)) {
            Some(held) if stream.head != NONE => Next::Slot {
                slot: stream.head,
                start: held.start,
                end: held.end,
            },
            _ if !stream.overflow.is_empty() => Next::Overflow,
            _ => Next::Empty,
        }
    }

    /// `len` bytes of the first held slot were read. Returns the slot if it is
    /// used up: the caller posts it again.
    pub(crate) fn read_slot(&mut self, id: StreamId, len: u32) -> Option<u16> {
        let stream = self
            .streams
            .get_mut(id.index as usize)
            .filter(|stream| stream.used && stream.generation == id.generation)?;
        let slot = stream.head;
        let held = self.slots.get_mut(usize::from(slot))?;
        held.start = held.start.saturating_add(len).min(held.end);
        stream.unread = stream.unread.saturating_sub(len as usize);
        if held.start < held.end {
            return None;
        }
        stream.head = held.next;
        if stream.head == NONE {
            stream.tail = NONE;
        }
        stream.held = stream.held.saturating_sub(1);
        Some(slot)
    }

    /// Reads from the overflow.
    pub(crate) fn read_overflow(&mut self, id: StreamId, out: &mut [u8]) -> usize {
        let Some(stream) = self.get_mut(id) else {
            return 0;
        };
        let mut copied = 0;
        let (first, second) = stream.overflow.as_slices();
        for part in [first, second] {
            let len = part.len().min(out.len() - copied);
            out[copied..copied + len].copy_from_slice(&part[..len]);
            copied += len;
        }
        stream.overflow.drain(..copied);
        stream.unread = stream.unread.saturating_sub(copied);
        copied
    }

    /// Takes the next held slot out unread, for posting it again.
    pub(crate) fn drop_slot(&mut self, id: StreamId) -> Option<u16> {
        match self.next(id) {
            Next::Slot { start, end, .. } => self.read_slot(id, end - start),
            Next::Overflow | Next::Empty => None,
        }
    }

    /// Notes that there is something to tell about a connection.
    pub(crate) fn announce(&mut self, id: StreamId, news: News) {
        let Some(stream) = self.get_mut(id) else {
            return;
        };
        stream.news |= 1 << news as u8;
        if !std::mem::replace(&mut stream.listed, true) {
            self.with_news.push_back(id.index);
        }
    }

    /// The next thing to tell. Connections take turns.
    pub(crate) fn next_news(&mut self) -> Option<(StreamId, News)> {
        loop {
            let index = self.with_news.pop_front()?;
            let stream = self.streams.get_mut(index as usize)?;
            stream.listed = false;
            if stream.unread == 0 {
                stream.news &= !(1 << News::Readable as u8);
            }
            let Some(news) = NEWS
                .into_iter()
                .find(|news| stream.news & (1 << *news as u8) != 0)
            else {
                continue;
            };
            stream.news &= !(1 << news as u8);
            if stream.news != 0 {
                stream.listed = true;
                self.with_news.push_back(index);
            }
            let generation = stream.generation;
            return Some((StreamId { index, generation }, news));
        }
    }

    /// Connections that exist.
    pub(crate) fn len(&self) -> usize {
        self.streams.len() - self.free.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Flow ids come from a shard alone.
    fn flow() -> FlowId {
        use zerosock_proto::vsock::{PortTable, Shard, ShardConfig};
        use zerosock_proto::wire::vsock::SocketType;
        use zerosock_proto::{Cid, Instant, Port};
        let cid = Cid::new(3);
        let mut shard = Shard::new(ShardConfig::driver(cid), PortTable::new().into());
        let local = Address::new(cid, Port::ANY);
        let peer = Address::new(Cid::HOST, Port::new(1));
        shard
            .connect(Instant::ZERO, local, peer, SocketType::Stream)
            .unwrap()
    }

    fn table() -> (Streams, StreamId) {
        let mut streams = Streams::new(8);
        let address: Address = "3:1".parse().unwrap();
        let id = streams.insert(flow(), StreamState::Connected, address, address);
        (streams, id)
    }

    #[test]
    fn slots_come_before_the_overflow_and_in_order() {
        let (mut streams, id) = table();
        streams.hold(id, 3, 10);
        streams.hold(id, 1, 5);
        assert!(streams.may_hold(id, 3));
        assert!(!streams.may_hold(id, 2));
        streams.overflow(id, b"tail");
        assert!(!streams.may_hold(id, 3), "overflow first has to drain");
        assert_eq!(streams.get(id).unwrap().unread, 19);
        assert_eq!(streams.read_slot(id, 4), None);
        assert!(matches!(
            streams.next(id),
            Next::Slot {
                slot: 3,
                start: 4,
                end: 10
            }
        ));
        assert_eq!(streams.read_slot(id, 6), Some(3));
        assert_eq!(streams.drop_slot(id), Some(1));
        assert!(matches!(streams.next(id), Next::Overflow));
        let mut out = [0u8; 8];
        assert_eq!(streams.read_overflow(id, &mut out[..3]), 3);
        assert_eq!(streams.read_overflow(id, &mut out[3..]), 1);
        assert_eq!(&out[..4], b"tail");
        assert!(matches!(streams.next(id), Next::Empty));
        assert_eq!(streams.get(id).unwrap().unread, 0);
        assert!(streams.may_hold(id, 1));
    }

    #[test]
    fn news_are_told_once_and_listed_once() {
        let (mut streams, id) = table();
        streams.announce(id, News::Closed);
        streams.announce(id, News::Readable);
        streams.announce(id, News::PeerShutdown);
        streams.announce(id, News::Closed);
        assert_eq!(streams.with_news.len(), 1);
        assert_eq!(
            streams.next_news(),
            Some((id, News::PeerShutdown)),
            "nothing to read any more"
        );
        assert_eq!(streams.next_news(), Some((id, News::Closed)));
        assert_eq!(streams.next_news(), None);
        streams.announce(id, News::Writable);
        streams.remove(id);
        assert_eq!(streams.next_news(), None, "nothing about the dead");
    }

    #[test]
    fn a_closed_handle_is_dead_also_when_its_place_is_used_again() {
        let (mut streams, id) = table();
        let flow = streams.get(id).unwrap().flow.unwrap();
        assert_eq!(streams.of_flow(flow), Some(id));
        streams.remove(id);
        assert_eq!(streams.of_flow(flow), None);
        let address: Address = "3:1".parse().unwrap();
        let again = streams.insert(flow, StreamState::Connecting, address, address);
        assert_eq!(again.index, id.index);
        assert!(streams.get(id).is_none());
        assert!(streams.get(again).is_some());
    }
}
