//! Datagrams of the guest (docs/datagrams.md): to and from the program that embeds the device, and
//! to and from siblings.
//!
//! From the guest a packet branches off where it is not payload of a connection. For the program
//! its chain is held, or copied, by the bounds of [`crate::vsock::inboxes`]; for a sibling it is
//! lent by one message, and the sibling's worker copies the payload into a posted buffer at once
//! and gives the chain back, so that nobody holds it. What finds no buffer waits there in a copy,
//! bounded, and its sources are told to stop.
//!
//! What must hold: the fragments of a datagram lie in the guest's queue one after the other; a
//! packet of the guest's speaks for no other CID; every chain that was lent comes back; whatever
//! waits has a bound.

use std::collections::VecDeque;
use std::time::Duration;

use zerosock_proto::vsock::datagram::{
    Assembler, Control, DGRAM_EOM, DatagramId, F_DGRAM, F_DGRAM_FLOW, OVERHEAD, Piece as Part,
    Place, Stops, data,
};
use zerosock_proto::wire::vsock::{HEADER_LEN, Op, Repr, SocketType};
use zerosock_proto::{Address, Cid, Instant};
use zerosock_ring::{Chain, Memory, SliceBuf};

use super::app::QueueStore;
use super::events::emit;
use super::program::HostToken;
use super::ring::Ring;
use super::{Context, Device};
use crate::deadline::earlier;
use crate::header;
use crate::switch::{Datagram, DeviceAddr, Message, Payload as Carried};
use crate::vsock::engine::Payload;
use crate::vsock::sockets::{Ends, Held};

/// Bytes that wait for a guest without buffers, overheads included; one datagram may overshoot.
const WAITING: usize = 256 << 10;
/// Words of the flow control that wait for it.
const WORDS: usize = 64;
/// What a datagram that had to be copied counts for, of the bytes that a turn may move: what a
/// reader leaves in the queue he will have in place.
const COPY: usize = 128 << 10;
/// When to look again for as many buffers as a datagram of several packets needs.
const RETRY: Duration = Duration::from_millis(1);
/// Packets taken in for one datagram of the program's.
const BUDGET: usize = 256;

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
    stops: Stops,
    stopping: bool,
    /// Sockets of the program found no buffer.
    wanted: bool,
    /// Something found too few buffers, but some, of which nobody tells how many there are: when it
    /// is tried again.
    retry: Option<Instant>,
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

/// What a datagram is made of.
#[derive(Copy, Clone)]
pub(super) enum Source<'a> {
    Bytes(&'a [u8]),
    /// Of a chain, behind the header.
    Chain(&'a Memory, &'a Chain, usize),
}

/// Why a datagram was not put into the guest's queue.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) enum NotPut {
    /// Too few buffers are there.
    NoRoom,
    /// The guest's queue cannot take so much.
    TooLong,
}

impl Source<'_> {
    fn len(self) -> usize {
        match self {
            Source::Bytes(bytes) => bytes.len(),
            Source::Chain(_, _, len) => len,
        }
    }

    /// Copies `len` bytes from `at` on to the payload part of `chain`.
    fn copy(self, at: usize, len: usize, memory: &Memory, chain: &Chain) {
        match self {
            Source::Bytes(bytes) => {
                let bytes = bytes.get(at..at + len).unwrap_or(&[]);
                memory.write(chain.writable(), HEADER_LEN, bytes);
            }
            Source::Chain(from, source, _) => {
                let source = (from, source.readable(), HEADER_LEN + at);
                Memory::copy(source, (memory, chain.writable(), HEADER_LEN), len);
            }
        }
    }
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
            stops: Stops::new(Place::OnTheWay),
            stopping: false,
            wanted: false,
            retry: None,
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
        let (agreed, flow) = (self.agreed, self.flow);
        *self = Datagrams::new();
        (self.agreed, self.flow) = (agreed, flow);
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
        let end = match self.datagrams.assembler.handle(&header, || cx.time()) {
            Part::Whole => return self.dispatch(chain, header, None, cx),
            Part::First => {
                self.datagrams.kept.clear();
                None
            }
            Part::More => None,
            Part::Last { len } => Some(len),
            Part::TooLong => {
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
        if !cx.routes.may_reach(self.cid, header.dst) {
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
        let held = Held {
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

    /// Hands a packet on to the device of its destination.
    fn lend_to_sibling(
        &mut self,
        chain: Chain,
        header: Repr,
        bytes: Option<Vec<u8>>,
        cx: &mut Context<'_>,
    ) {
        let may = cx.routes.may_reach(self.cid, header.dst);
        let device = may.then(|| cx.routes.target(header.dst)).flatten();
        let (Some(device), Some(tx)) = (device, self.tx.as_ref()) else {
            return self.complete_tx(chain);
        };
        let payload = match bytes {
            Some(bytes) => Carried::Copied(bytes),
            None => Carried::Lent(tx.queue.memory().clone()),
        };
        let datagram = Datagram {
            from: self.addr,
            flow: self.datagrams.flow,
            header,
            payload,
            chain,
            epoch: tx.epoch,
        };
        cx.outbox.send(device, Message::Datagram(datagram));
    }

    /// A sibling's datagram, or word, for our guest.
    pub(super) fn sibling_datagram(&mut self, datagram: Datagram, cx: &mut Context<'_>) {
        let Datagram {
            from,
            flow,
            header,
            payload,
            chain,
            epoch,
        } = datagram;
        let mut answer = None;
        if !self.datagrams.agreed {
            // Also for one without a driver: there is nobody.
            if flow && Datagrams::is_data(&header) {
                answer = Some(Control::Deaf.emit(header.dst, header.src));
            }
        } else if !Datagrams::is_data(&header) {
            self.datagrams.add_word(header);
        } else {
            let source = match &payload {
                Carried::Copied(bytes) => Source::Bytes(bytes),
                Carried::Lent(memory) => Source::Chain(memory, &chain, header.len as usize),
            };
            self.take_from_sibling(&header, source, flow, cx);
        }
        let done = Message::DatagramDone {
            chain,
            epoch,
            answer,
        };
        cx.outbox.send(from, done);
    }

    fn take_from_sibling(
        &mut self,
        header: &Repr,
        source: Source<'_>,
        flow: bool,
        cx: &mut Context<'_>,
    ) {
        let (from, to) = (header.src, header.dst);
        let put = match self.datagrams.waiting.is_empty() {
            true => self.put_datagram(from, to, source, cx),
            false => Err(NotPut::NoRoom),
        };
        match put {
            Ok(()) => return cx.counters.in_place_bytes.add(source.len() as u64),
            Err(NotPut::TooLong) => return,
            Err(NotPut::NoRoom) => {}
        }
        let datagrams = &mut self.datagrams;
        if datagrams.waiting_bytes <= WAITING {
            let mut bytes = vec![0; source.len()];
            match source {
                Source::Bytes(from) => bytes.copy_from_slice(from),
                Source::Chain(memory, chain, _) => {
                    memory.read(chain.readable(), HEADER_LEN, &mut bytes);
                }
            }
            cx.counters.copied_bytes.add(bytes.len() as u64);
            datagrams.waiting_bytes += bytes.len() + OVERHEAD as usize;
            datagrams.waiting.push_back(Waiting { from, to, bytes });
        }
        if flow && datagrams.waiting_bytes > WAITING / 4 {
            datagrams.stopping = true;
            let now = cx.time();
            datagrams.stops.stop(now, to, from);
            self.tell_sources(cx);
        }
    }

    /// Says to sources what is due of it.
    pub(super) fn tell_sources(&mut self, cx: &mut Context<'_>) {
        if self.datagrams.stops.is_empty() {
            return;
        }
        let now = cx.time();
        while let Some(word) = self.datagrams.stops.poll(now, |_| true) {
            if let Some(device) = cx.routes.target(word.dst) {
                cx.outbox.send(device, Message::DatagramWord(word));
            }
        }
    }

    /// A sibling has done with a packet of our guest's.
    pub(super) fn datagram_done(&mut self, chain: Chain, epoch: u32, answer: Option<Repr>) {
        // A chain of an earlier start of the queue belongs to nobody any more.
        if let Some(tx) = self.tx.as_mut().filter(|tx| tx.epoch == epoch) {
            tx.complete(chain, 0);
        }
        if let Some(answer) = answer {
            self.datagrams.add_word(answer);
        }
    }

    /// A sibling's device has something to say to our guest.
    pub(super) fn datagram_word(&mut self, word: Repr) {
        self.datagrams.add_word(word);
    }

    /// Puts a word of the flow control into the guest's queue. False: there is no buffer.
    pub(crate) fn put_word(&mut self, word: &Repr, cx: &mut Context<'_>) -> bool {
        if !self.datagrams.flow {
            // Nobody who would understand.
            return true;
        }
        let rx = self.rx.as_mut().filter(|_| self.waiting.is_none());
        let popped = rx.and_then(|rx| Some((rx.pop_if(HEADER_LEN, true)?, rx)));
        let Some((chain, rx)) = popped else {
            self.starved = true;
            return false;
        };
        emit(rx, chain, word, 0);
        cx.counters.tx_packets.add(1);
        true
    }

    /// What the program's sockets have to say to this guest.
    pub(super) fn put_app_words(&mut self, cx: &mut Context<'_>) {
        let cid = self.cid;
        let has = |app: &mut super::program::App| app.inboxes.table.has_control();
        if !cx.app.as_deref_mut().is_some_and(has) {
            return;
        }
        let now = cx.time();
        loop {
            let app = cx.app.as_deref_mut();
            let poll = |app: &mut super::program::App| {
                app.inboxes.table.poll_control(now, |to| to.cid == cid)
            };
            let Some(word) = app.and_then(poll) else {
                break;
            };
            if !self.put_word(&word, cx)
                && let Some(app) = cx.app.as_deref_mut()
            {
                app.inboxes.table.control_again(now, &word);
                break;
            }
        }
    }

    /// Puts a datagram into as many of the guest's buffers as it needs: all of it, or nothing.
    pub(super) fn put_datagram(
        &mut self,
        from: Address,
        to: Address,
        source: Source<'_>,
        cx: &mut Context<'_>,
    ) -> Result<(), NotPut> {
        let len = source.len();
        let least = HEADER_LEN + usize::from(len > 0);
        let rx = self.rx.as_mut().filter(|_| self.waiting.is_none());
        let Some(rx) = rx else {
            return Err(NotPut::NoRoom);
        };
        let Some(first) = rx.pop_if(least, true) else {
            self.starved = true;
            return Err(NotPut::NoRoom);
        };
        if first.writable_len() as usize >= HEADER_LEN + len {
            source.copy(0, len, rx.queue.memory(), &first);
            emit(rx, first, &data(from, to, len as u32, true), len);
            cx.counters.tx_packets.add(1);
            cx.counters.tx_bytes.add(len as u64);
            return Ok(());
        }
        self.put_fragments(first, from, to, source, cx)
    }

    #[cold]
    fn put_fragments(
        &mut self,
        first: Chain,
        from: Address,
        to: Address,
        source: Source<'_>,
        cx: &mut Context<'_>,
    ) -> Result<(), NotPut> {
        let Some(rx) = self.rx.as_mut() else {
            return Err(NotPut::NoRoom);
        };
        let len = source.len();
        let mut chains = std::mem::take(&mut self.datagrams.gathered);
        let mut room = first.writable_len() as usize - HEADER_LEN;
        chains.push(first);
        while room < len {
            let Some(chain) = rx.pop_if(HEADER_LEN + 1, false) else {
                break;
            };
            room += chain.writable_len() as usize - HEADER_LEN;
            chains.push(chain);
        }
        if room < len {
            // What a queue full of such buffers would have.
            let descriptors: usize = chains.iter().map(|c| usize::from(c.descriptors())).sum();
            let most = room * usize::from(rx.queue.size()) / descriptors.max(1);
            while let Some(chain) = chains.pop() {
                rx.queue.unpop(chain);
            }
            self.datagrams.gathered = chains;
            if most < len {
                return Err(NotPut::TooLong);
            }
            self.datagrams.retry = Some(cx.time() + RETRY);
            return Err(NotPut::NoRoom);
        }
        let mut at = 0;
        for chain in chains.drain(..) {
            let part = (chain.writable_len() as usize - HEADER_LEN).min(len - at);
            source.copy(at, part, rx.queue.memory(), &chain);
            at += part;
            emit(rx, chain, &data(from, to, part as u32, at == len), part);
            cx.counters.tx_packets.add(1);
        }
        self.datagrams.gathered = chains;
        cx.counters.tx_bytes.add(len as u64);
        Ok(())
    }

    /// Hands the guest what waits for it, as far as there are buffers.
    pub(super) fn transmit_datagrams(&mut self, cx: &mut Context<'_>) {
        while let Some(word) = self.datagrams.words.pop_front() {
            if !self.put_word(&word, cx) {
                self.datagrams.words.push_front(word);
                return;
            }
        }
        while let Some(next) = self.datagrams.waiting.pop_front() {
            let put = self.put_datagram(next.from, next.to, Source::Bytes(&next.bytes), cx);
            if put == Err(NotPut::NoRoom) {
                self.datagrams.waiting.push_front(next);
                break;
            }
            let bytes = next.bytes.len() + OVERHEAD as usize;
            self.datagrams.waiting_bytes = self.datagrams.waiting_bytes.saturating_sub(bytes);
        }
        if self.datagrams.stopping && self.datagrams.waiting_bytes <= WAITING / 8 {
            self.datagrams.stopping = false;
            self.datagrams.stops.start_all();
        }
        self.tell_sources(cx);
    }

    /// Shows the next datagram for a socket of the program's, of which nothing is held, as it is
    /// taken in, and gives its chain back at once; packets before it go their way. False: there was
    /// none.
    pub(crate) fn app_show_datagram(
        &mut self,
        id: DatagramId,
        look: &mut dyn FnMut(Address, Payload<'_>),
        cx: &mut Context<'_>,
    ) -> bool {
        let mut taken = 0;
        let mut shown = false;
        let mut others = false;
        let empty = |cx: &Context<'_>| {
            let app = cx.app.as_deref();
            app.is_some_and(|app| app.inboxes.is_empty(id))
        };
        while !shown
            && taken < BUDGET
            && !self.receive_blocked()
            && !self.app_is_full(cx)
            // One of several packets may have come before.
            && (!others || empty(cx))
        {
            let Some(chain) = self.tx.as_mut().and_then(|tx| tx.pop()) else {
                break;
            };
            taken += 1;
            if self.is_for(id, &chain, cx) {
                shown = self.show_chain(id, chain, look, cx);
            } else {
                others = true;
                let before = self.datagrams.charged;
                self.packet(chain, cx);
                taken += (self.datagrams.charged - before) / COPY * 16;
            }
        }
        cx.counters.rx_packets.add(taken as u64);
        if let Some(app) = cx.app.as_deref_mut() {
            app.tally.packets_received += taken as u64;
        }
        if others {
            cx.time();
            self.drain_events(cx);
            self.flush_dirty(cx);
        }
        shown
    }

    /// Whether a packet of the guest's seems to be a whole datagram for a socket of the program's.
    fn is_for(&mut self, id: DatagramId, chain: &Chain, cx: &mut Context<'_>) -> bool {
        let (Some(tx), Some(app)) = (&self.tx, cx.app.as_deref_mut()) else {
            return false;
        };
        if let Some(payload) = tx.queue.memory().whole(chain.readable(), HEADER_LEN, 1) {
            // The payload comes near while the header does.
            payload.prefetch();
        }
        let Ok(header) = header::read(tx.queue.memory(), chain.readable()) else {
            return false;
        };
        self.datagrams.agreed
            && header.socket_type.get() == SocketType::Datagram as u16
            && !self.datagrams.assembler.is_open()
            && header.dst.cid == Cid::HOST
            && cx.routes.service(header.dst.port).is_none()
            && app.inboxes.table.find(header.dst.port) == Some(id)
    }

    /// Shows a packet that seemed to be a datagram; what it is, its header decides that is read
    /// here.
    fn show_chain(
        &mut self,
        id: DatagramId,
        chain: Chain,
        look: &mut dyn FnMut(Address, Payload<'_>),
        cx: &mut Context<'_>,
    ) -> bool {
        let (Some(tx), Some(app)) = (self.tx.as_mut(), cx.app.as_deref_mut()) else {
            return false;
        };
        let memory = tx.queue.memory();
        let header = match header::read(memory, chain.readable()) {
            Ok(header)
                if Datagrams::is_data(&header)
                    && header.socket_type.get() == SocketType::Datagram as u16
                    && header.flags & DGRAM_EOM != 0
                    && header.src.cid == self.cid
                    && header.dst.cid == Cid::HOST
                    && cx.routes.service(header.dst.port).is_none()
                    && app.inboxes.table.find(header.dst.port) == Some(id)
                    && cx.routes.may_reach(self.cid, header.dst)
                    && header.len as usize <= chain.readable_len() as usize - HEADER_LEN =>
            {
                header
            }
            _ => {
                self.packet(chain, cx);
                return false;
            }
        };
        let len = header.len as usize;
        let flow = self.datagrams.flow;
        let (now, clock) = (cx.now, cx.clock);
        let now = || clock.map_or(now, |clock| clock.now());
        let table = &mut app.inboxes.table;
        if table
            .receive(header.src, header.dst, header.len, flow, now)
            .is_err()
        {
            tx.complete(chain, 0);
            return false;
        }
        table.taken(id, header.len);
        let mut slices = SliceBuf::<4>::new();
        if memory.slices(chain.readable(), HEADER_LEN, len, &mut slices) == len {
            look(header.src, Payload::in_place(&slices));
        } else {
            // In more places than are worth naming.
            let mut bytes = vec![0; len];
            memory.read(chain.readable(), HEADER_LEN, &mut bytes);
            look(header.src, Payload::copied(&bytes));
        }
        tx.complete(chain, 0);
        cx.counters.rx_bytes.add(len as u64);
        true
    }

    /// Copies a datagram of the program's into buffers of the guest.
    pub(crate) fn app_send_datagram(
        &mut self,
        from: Address,
        to: Address,
        bytes: &[u8],
        cx: &mut Context<'_>,
    ) -> Result<(), NotPut> {
        let put = self.put_datagram(from, to, Source::Bytes(bytes), cx);
        match put {
            Ok(()) => {
                if let Some(app) = cx.app.as_deref_mut() {
                    app.tally.sent += bytes.len() as u64;
                    app.tally.copied_in += bytes.len() as u64;
                    app.tally.packets_sent += 1;
                }
            }
            Err(NotPut::NoRoom) if self.datagrams.retry.is_none() => self.want_datagram_room(),
            Err(NotPut::NoRoom) => {}
            Err(NotPut::TooLong) => {}
        }
        put
    }

    /// A send found too few buffers: all sockets are told when there are some.
    pub(crate) fn want_datagram_room(&mut self) {
        self.starved = true;
        self.datagrams.wanted = true;
    }

    /// Whether a datagram that needs one buffer would find it.
    pub(crate) fn has_datagram_room(&mut self) -> bool {
        let waits = self.waiting.is_some();
        let rx = self.rx.as_mut().filter(|rx| !waits && rx.live());
        rx.is_some_and(|rx| rx.queue.available() > 0)
    }

    /// Tells the program's sockets that there are buffers again.
    pub(super) fn tell_of_datagram_room(&mut self, cx: &mut Context<'_>) {
        if !self.datagrams.wanted {
            return;
        }
        if !self.has_datagram_room() {
            self.starved = true;
            return;
        }
        self.datagrams.wanted = false;
        wake_all(cx);
    }

    /// Acts on what is due.
    pub(super) fn datagram_timeout(&mut self, cx: &mut Context<'_>) {
        if self.datagrams.handle_timeout(cx.now) {
            wake_all(cx);
        }
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

/// Where a packet that was lent goes back to when its receiver is gone.
pub(crate) fn returned(datagram: Datagram) -> (DeviceAddr, Message) {
    let Datagram {
        from, chain, epoch, ..
    } = datagram;
    let answer = None;
    let done = Message::DatagramDone {
        chain,
        epoch,
        answer,
    };
    (from, done)
}
