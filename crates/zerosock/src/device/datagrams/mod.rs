//! Datagrams of the guest (docs/datagrams.md): to and from the program that embeds the device, and
//! to and from siblings.
//!
//! From the guest a packet branches off where it is not payload of a connection. For the program
//! its chain is held, or copied, by the bounds of [`crate::table::inboxes`]; for a sibling it is
//! lent by one message, and the sibling's worker copies the payload into a posted buffer at once
//! and gives the chain back, so that nobody holds it. What finds no buffer waits there in a copy,
//! bounded, and its sources are told to stop.
//!
//! What must hold: the fragments of a datagram lie in the guest's queue one after the other; a
//! packet of the guest's speaks for no other CID; every chain that was lent comes back; whatever
//! waits has a bound.

mod app;
mod put;
mod siblings;
#[cfg(test)]
pub(crate) mod tests;
#[cfg(test)]
mod waiting_tests;

use std::collections::VecDeque;

use zerosock_proto::vsock::datagram::{
    Assembler, Control, F_DGRAM, F_DGRAM_FLOW, PauseSource, PausedSenders, PayloadPart as Part,
};
use zerosock_proto::wire::vsock::{HEADER_LEN, Op, Repr};
use zerosock_proto::{Address, Cid, Instant};
use zerosock_ring::Chain;

use crate::device::app_store::QueueStore;
use crate::device::program::HostToken;
use crate::device::ring::Ring;
use crate::device::{Context, Device};
use crate::io::deadline::earlier;
use crate::table::sockets::{Ends, HeldBuffer};
pub(crate) use put::NotPut;
pub(crate) use siblings::returned;

/// Words of the flow control that wait for it.
const WORDS: usize = 64;
/// What a datagram that had to be copied counts for, of the bytes that a turn may move: what a
/// reader leaves in the queue he will have in place.
const COPY: usize = 128 << 10;

/// What a device has for datagrams.
#[derive(Debug)]
pub(super) struct Datagrams {
    /// Its driver takes them.
    agreed: bool,
    /// And words of the flow control.
    flow: bool,
    assembler: Assembler,
    /// The fragments of the set at hand.
    kept: Vec<u8>,
    /// For the guest, from siblings, while there are no buffers.
    waiting: VecDeque<Waiting>,
    /// Bytes of those, overheads included.
    waiting_bytes: usize,
    /// Words for the guest.
    words: VecDeque<Repr>,
    /// Sources that were told to stop because of `waiting`.
    stops: PausedSenders,
    stopping: bool,
    /// Buffers that datagrams of siblings may still take before streams that have something have
    /// had their turn; `None`: none was taken since.
    share: Option<u16>,
    /// Bytes of ours that went to siblings and were not answered.
    under_way: usize,
    /// Sockets of the program found no buffer.
    wanted: bool,
    /// Something found too few buffers, but some, of which nobody tells how many there are: when it
    /// is tried again.
    retry: Option<Instant>,
    /// Bytes shown to the program whose buffers have gone back and were not published.
    returned: usize,
    /// Kept for its memory.
    gathered: Vec<Chain>,
    /// Counted in the bytes that were moved, and are none.
    pub(super) charged: usize,
}

#[derive(Debug)]
struct Waiting {
    from: Address,
    to: Address,
    bytes: Vec<u8>,
}

impl Datagrams {
    pub(super) fn new() -> Datagrams {
        Datagrams {
            agreed: false,
            flow: false,
            assembler: Assembler::new(),
            kept: Vec::new(),
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            words: VecDeque::new(),
            stops: PausedSenders::new(PauseSource::Switch),
            stopping: false,
            share: None,
            under_way: 0,
            wanted: false,
            retry: None,
            returned: 0,
            gathered: Vec::new(),
            charged: 0,
        }
    }

    fn is_data(header: &Repr) -> bool {
        header.op.get() == Op::Rw as u16
    }

    #[inline]
    pub(super) fn are_agreed(&self) -> bool {
        self.agreed
    }

    pub(super) fn negotiated(&mut self, features: u64) {
        self.agreed = features & F_DGRAM != 0;
        self.flow = self.agreed && features & F_DGRAM_FLOW != 0;
    }

    /// The driver is gone, or has forgotten everything.
    pub(super) fn forget(&mut self) {
        let (agreed, flow, under_way) = (self.agreed, self.flow, self.under_way);
        *self = Datagrams::new();
        (self.agreed, self.flow, self.under_way) = (agreed, flow, under_way);
    }

    pub(super) fn next_timeout(&self) -> Option<Instant> {
        let words = earlier(self.assembler.poll_timeout(), self.stops.poll_timeout());
        earlier(words, self.retry)
    }

    /// True: who found too few buffers may try again.
    pub(super) fn handle_timeout(&mut self, now: Instant) -> bool {
        if self.assembler.handle_timeout(now) {
            self.kept = Vec::new();
        }
        let again = self.retry.is_some_and(|at| at <= now);
        if again {
            self.retry = None;
        }
        again
    }

    /// Whether sockets of the program's wait for the guest's buffers.
    pub(super) fn are_wanted(&self) -> bool {
        self.wanted
    }

    /// Whether something can be tried for the guest's buffers.
    pub(super) fn has_some(&self) -> bool {
        self.retry.is_none() && (!self.waiting.is_empty() || !self.words.is_empty())
    }

    fn add_word(&mut self, word: Repr) {
        // One that is lost costs its time.
        if self.flow && self.words.len() < WORDS {
            self.words.push_back(word);
        }
    }
}

impl Device {
    /// Whether the guest's driver takes datagrams; `None`: there is no driver.
    pub(crate) fn takes_datagrams(&self) -> Option<bool> {
        let running = self.rx.as_ref().is_some_and(Ring::live);
        running.then_some(self.datagrams.agreed)
    }

    /// A packet of type DGRAM from the guest.
    #[cold]
    pub(super) fn guest_datagram(&mut self, chain: Chain, header: Repr, cx: &mut Context<'_>) {
        let word = Control::parse(&header).is_some();
        if !self.speaks_for(header.src, cx)
            || !(Datagrams::is_data(&header) || (word && self.datagrams.flow))
        {
            cx.counters.bad_packets.add(1);
            return self.complete_tx(chain);
        }
        if word {
            return self.guest_word(chain, header, cx);
        }
        let piece = self.datagrams.assembler.handle(&header, || cx.time());
        self.count_lost(cx);
        let end = match piece {
            Part::Whole => return self.dispatch(chain, header, None, cx),
            Part::First => {
                self.datagrams.kept.clear();
                None
            }
            Part::More => None,
            Part::Last { len } => Some(len),
            Part::Lost => {
                self.datagrams.kept = Vec::new();
                cx.counters.bad_packets.add(1);
                return self.complete_tx(chain);
            }
        };
        if let Some(tx) = &self.tx {
            let kept = &mut self.datagrams.kept;
            let start = kept.len();
            kept.resize(start + header.len as usize, 0);
            let out = kept.get_mut(start..).unwrap_or(&mut []);
            tx.queue.memory().read(chain.readable(), HEADER_LEN, out);
            cx.counters.copied_bytes.add(u64::from(header.len));
        }
        match end {
            None => self.complete_tx(chain),
            Some(len) => {
                let bytes = std::mem::take(&mut self.datagrams.kept);
                self.dispatch(chain, Repr { len, ..header }, Some(bytes), cx);
            }
        }
    }

    /// Whether a packet with this source is the guest's own: one of its CID, and, of the host's, one
    /// of a port that the service has claimed.
    fn speaks_for(&self, source: Address, cx: &Context<'_>) -> bool {
        source.cid == self.cid
            && (self.cid != Cid::HOST || cx.routes.service(source.port) == Some(self.addr))
    }

    /// Counts a datagram that will not be whole, if there is one.
    #[inline]
    fn count_lost(&mut self, cx: &mut Context<'_>) {
        let Some(lost) = self.datagrams.assembler.take_lost() else {
            return;
        };
        cx.counters.datagrams_dropped.add(1);
        if is_apps(lost.to(), cx)
            && let Some(app) = cx.app.as_deref_mut()
        {
            app.inboxes.table.handle_lost(lost);
        }
    }

    fn complete_tx(&mut self, chain: Chain) {
        if let Some(tx) = &mut self.tx {
            tx.complete(chain, 0);
        }
    }

    /// A word of the flow control from the guest.
    fn guest_word(&mut self, chain: Chain, header: Repr, cx: &mut Context<'_>) {
        if is_apps(header.dst, cx) {
            let now = cx.time();
            if let Some(app) = cx.app.as_deref_mut() {
                app.inboxes.table.handle_control(now, &header);
            }
            return self.complete_tx(chain);
        }
        self.lend_to_sibling(chain, header, None, cx);
    }

    /// A whole datagram of the guest's, in `chain`, or put together.
    fn dispatch(
        &mut self,
        chain: Chain,
        header: Repr,
        bytes: Option<Vec<u8>>,
        cx: &mut Context<'_>,
    ) {
        self.moved += header.len as usize;
        if !is_apps(header.dst, cx) {
            return self.lend_to_sibling(chain, header, bytes, cx);
        }
        let flow = self.datagrams.flow;
        if cx.app.is_none() || !cx.routes.may_reach(self.cid, header.dst) {
            cx.counters.datagrams_dropped.add(1);
            return self.complete_tx(chain);
        }
        let now = cx.time();
        let taken = cx.app.as_deref_mut().and_then(|app| {
            let table = &mut app.inboxes.table;
            let id = table.receive(header.src, header.dst, header.len, flow, || now);
            Some((id.ok()?, app))
        });
        let (Some((id, app)), Some(tx)) = (taken, self.tx.as_mut()) else {
            return self.complete_tx(chain);
        };
        if let Some(bytes) = bytes {
            tx.complete(chain, 0);
            app.inboxes
                .deliver_copy(id, header.src, bytes, &mut app.sockets);
            return;
        }
        self.app.note_descriptors(chain.descriptors(), tx, app);
        let held = HeldBuffer {
            token: HostToken {
                chain,
                vm: self.addr.vm,
                epoch: tx.epoch,
            },
            offset: HEADER_LEN as u32,
            len: header.len,
            since: now,
            ends: Ends::Nothing,
        };
        let pool = self.app.pool;
        let mut store = QueueStore::new(tx, &mut self.shard);
        let (inboxes, sockets) = (&mut app.inboxes, &mut app.sockets);
        if inboxes.deliver(id, header.src, pool, held, sockets, &mut store) {
            self.moved += COPY;
            self.datagrams.charged += COPY;
        }
    }

    /// Acts on what is due.
    pub(super) fn datagram_timeout(&mut self, cx: &mut Context<'_>) {
        if self.datagrams.handle_timeout(cx.now) {
            wake_all(cx);
        }
        self.count_lost(cx);
        self.tell_sources(cx);
    }

    /// The driver is gone, or has forgotten everything: so has the program about it.
    pub(super) fn forget_datagrams(&mut self, cx: &mut Context<'_>) {
        self.datagrams.forget();
        let cid = self.cid;
        if let Some(app) = cx.app.as_deref_mut() {
            app.inboxes.table.forget(cid);
        }
    }
}

/// Every socket of the program's that waits may try again.
fn wake_all(cx: &mut Context<'_>) {
    if let Some(app) = cx.app.as_deref_mut() {
        app.inboxes.table.wake_all();
    }
}

/// Whether a destination is the program's that embeds the device: CID 2, but for what services have.
fn is_apps(to: Address, cx: &Context<'_>) -> bool {
    to.cid == Cid::HOST && cx.routes.service(to.port).is_none()
}
