//! Credit: who may send how much (virtio 1.2, 5.10.6.3).
//!
//! `peer_free = peer_buf_alloc - (tx_cnt - peer_fwd_cnt)` over free-running
//! 32-bit counters. The counters wrap; the difference of two is what counts.
//! The free space is computed in 64 bits and stops at 0, so that a peer that
//! shrinks its buffer with bytes in flight gets nothing instead of everything
//! (CVE-2026-23069).

use crate::wire::vsock::MAX_PAYLOAD;

/// Bytes of a receiver's buffer to count for each packet. Linux from 6.12.92
/// resets a connection whose packets, at about 576 bytes of book-keeping
/// each, exceed `buf_alloc`; this stays clear of it.
pub const PACKET_OVERHEAD: u32 = 640;

/// Bytes from which a packet is not small. A receiver's buffer has room for so many packets of this
/// size that they fill it: what is left of the bound on packets when small ones have had theirs.
/// Else a reader that waits for many bytes (SO_RCVLOWAT) and a sender that may send no packet more
/// would wait for each other. The receive buffers of Linux guests take 3.7 KB.
pub const SMALL_PACKET: u32 = 2048;

/// How finely the outstanding packets are released, see [`TxCredit`].
const EPOCHS: usize = 4;

/// Packets sent one after the other, counted together.
#[derive(Copy, Clone, Default, Debug)]
struct Epoch {
    /// `tx_cnt` after the last of them.
    end: u32,
    packets: u32,
}

/// What keeps a connection from sending.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub enum Stall {
    /// Nothing.
    None,
    /// The peer's buffer is full: it tells us when that changes.
    Window,
    /// A limit of ours, which the peer does not know: it may see no reason to
    /// send an update, so it must be asked (Linux before 6.8 sends none while
    /// 64 KiB of its window are left).
    Limit,
}

/// The sending half: how much the peer lets us send.
///
/// Packets are bounded as well as bytes, with memory that does not grow: the
/// packets in flight are counted in at most four epochs, and an epoch's
/// packets are over when the peer has consumed the last byte of the last of
/// them. That errs towards too many outstanding, never too few.
#[derive(Clone, Debug)]
pub struct TxCredit {
    peer_buf_alloc: u32,
    peer_fwd_cnt: u32,
    tx_cnt: u32,
    limit: u32,
    reserved: u32,
    reserved_packets: u32,
    /// Packets for which the peer's buffer has room, at least 1: kept, for it takes a division. 0
    /// while nothing may be sent.
    max_packets: u32,
    /// Packets of all epochs.
    packets: u32,
    /// The epoch being counted; none when it has no packets.
    open: Epoch,
    /// Packets at which another epoch follows it.
    open_max: u32,
    /// Those before it, oldest first; the first `used` of them.
    full: [Epoch; EPOCHS - 1],
    used: u32,
}

impl TxCredit {
    /// No credit yet. Counters start at `first`; at most `limit` bytes will be in flight, whatever
    /// the peer allows.
    pub fn new(first: u32, limit: u32) -> TxCredit {
        TxCredit {
            peer_buf_alloc: 0,
            peer_fwd_cnt: first,
            tx_cnt: first,
            limit,
            reserved: 0,
            reserved_packets: 0,
            max_packets: 1,
            packets: 0,
            open: Epoch::default(),
            open_max: 1,
            full: [Epoch::default(); EPOCHS - 1],
            used: 0,
        }
    }

    /// Takes what the peer says in a header. `buf_alloc` may go any way;
    /// `fwd_cnt` must move forward and not past what was sent. False: it did not, and was left where
    /// it was, so that it can never invent credit.
    #[inline]
    pub fn update(&mut self, buf_alloc: u32, fwd_cnt: u32) -> bool {
        if buf_alloc != self.peer_buf_alloc {
            self.set_peer_buf_alloc(buf_alloc);
        }
        let moved = fwd_cnt.wrapping_sub(self.peer_fwd_cnt);
        if moved == 0 {
            return true;
        }
        if moved > self.in_flight() {
            return false;
        }
        self.peer_fwd_cnt = fwd_cnt;
        if self.used > 0 && self.is_over(self.full[0]) {
            self.retire();
        }
        if self.used == 0 && self.is_over(self.open) {
            self.open.packets = 0;
            self.packets = 0;
        }
        true
    }

    #[cold]
    fn set_peer_buf_alloc(&mut self, buf_alloc: u32) {
        self.peer_buf_alloc = buf_alloc;
        if self.max_packets > 0 {
            self.resume();
        }
    }

    /// From now on there is no room, whatever the peer says.
    pub(crate) fn pause(&mut self) {
        self.max_packets = 0;
    }

    /// The end of a [`port_ref`](Self::port_ref): there is as much room as the peer's buffer has.
    pub(crate) fn resume(&mut self) {
        self.max_packets = (self.peer_buf_alloc / PACKET_OVERHEAD).max(1);
        self.bound_open();
    }

    /// Changes how many bytes may be in flight whatever the peer allows. Those that are beyond it
    /// already stay.
    pub fn set_limit(&mut self, limit: u32) {
        self.limit = limit;
    }

    /// An epoch is a quarter of what the peer has room for, but the last has no other behind it.
    fn bound_open(&mut self) {
        self.open_max = if (self.used as usize) < self.full.len() {
            (self.max_packets / EPOCHS as u32).max(1)
        } else {
            u32::MAX
        };
    }

    /// Whether the peer has consumed an epoch's last byte.
    #[inline]
    fn is_over(&self, epoch: Epoch) -> bool {
        self.tx_cnt.wrapping_sub(epoch.end) >= self.in_flight()
    }

    /// Begins another epoch; `open_max` is out of reach when there is no room for one.
    #[cold]
    fn open_next(&mut self) {
        if let Some(place) = self.full.get_mut(self.used as usize) {
            *place = self.open;
            self.open.packets = 0;
            self.used += 1;
            self.bound_open();
        }
    }

    /// Forgets the full epochs that are over.
    #[cold]
    #[inline(never)]
    fn retire(&mut self) {
        while self.used > 0 && self.is_over(self.full[0]) {
            self.packets -= self.full[0].packets;
            self.full.copy_within(1.., 0);
            self.used -= 1;
        }
        self.bound_open();
    }

    /// Bytes sent that the peer has not consumed, as far as we know.
    #[inline]
    pub fn in_flight(&self) -> u32 {
        self.tx_cnt.wrapping_sub(self.peer_fwd_cnt)
    }

    /// Bytes sent, free-running.
    #[inline]
    pub fn tx_cnt(&self) -> u32 {
        self.tx_cnt
    }

    /// The peer's buffer, in bytes.
    #[inline]
    pub fn peer_buf_alloc(&self) -> u32 {
        self.peer_buf_alloc
    }

    /// Bytes that the peer has consumed, free-running.
    #[inline]
    pub fn peer_fwd_cnt(&self) -> u32 {
        self.peer_fwd_cnt
    }

    #[inline]
    fn free_bytes(&self, window: u32) -> u32 {
        let taken = u64::from(self.in_flight()) + u64::from(self.reserved);
        // At most the window, so it fits.
        u64::from(window).saturating_sub(taken) as u32
    }

    /// Packets that the peer may still have in its queue.
    #[inline]
    pub fn packets(&self) -> u32 {
        self.packets
    }

    /// Whether so many packets are outstanding that another one should not be [`SMALL_PACKET`]. Never when
    /// none is: a buffer below twice [`PACKET_OVERHEAD`] has room for one packet at a time, and the
    /// peer would have nothing to read that makes more room.
    #[inline]
    pub fn nears_packet_limit(&self) -> bool {
        let outstanding = self.packets + self.reserved_packets;
        let for_others = self.peer_buf_alloc.div_ceil(SMALL_PACKET);
        outstanding > 0 && outstanding + for_others >= self.max_packets
    }

    /// The most bytes that may ever be under way at once.
    #[inline]
    pub fn limit(&self) -> u32 {
        self.peer_buf_alloc.min(self.limit)
    }

    /// Bytes that may be reserved now.
    #[inline]
    pub fn available(&self) -> u32 {
        if self.packets + self.reserved_packets >= self.max_packets {
            0
        } else {
            self.free_bytes(self.peer_buf_alloc.min(self.limit))
        }
    }

    /// What one packet of up to `max` bytes may hold now.
    #[inline]
    fn offer(&self, max: u32) -> u32 {
        max.min(MAX_PAYLOAD).min(self.available())
    }

    /// What is in the way of one more byte.
    #[inline]
    pub fn stall(&self) -> Stall {
        self.stall_for(1)
    }

    /// What is in the way of `wanted` more bytes at once, or of as many as there can ever be.
    #[inline]
    pub(crate) fn stall_for(&self, wanted: u32) -> Stall {
        let wanted = wanted.min(self.limit()).max(1);
        if self.available() >= wanted {
            Stall::None
        } else if self.free_bytes(self.peer_buf_alloc) < wanted {
            Stall::Window
        } else {
            Stall::Limit
        }
    }

    /// As [`stall`](Self::stall), for a message that has begun: the bound on packets is none.
    pub(crate) fn stall_within(&self) -> Stall {
        if self.free_bytes(self.limit()) > 0 && self.max_packets > 0 {
            Stall::None
        } else if self.free_bytes(self.peer_buf_alloc) == 0 {
            Stall::Window
        } else {
            Stall::Limit
        }
    }

    /// Takes `len` bytes at once, for a message, and the place of its first packet. False: there
    /// are not as many.
    pub(crate) fn reserve_whole(&mut self, len: u32) -> bool {
        // A packet without a byte is never known to be over: those have a bound of their own.
        let packet = len == 0 || self.packets + self.reserved_packets < self.max_packets;
        let room = packet && self.max_packets > 0 && self.free_bytes(self.limit()) >= len;
        if room {
            self.reserved += len;
            self.reserved_packets += 1;
        }
        room
    }

    /// Sends `len` of the bytes that were taken at once. What is left of them is to be
    /// [cancelled](Self::cancel) at the end.
    pub(crate) fn send_part(&mut self, len: u32) {
        self.reserved = self.reserved.saturating_sub(len);
        if len > 0 {
            self.count(len);
        }
    }

    /// Sends up to `max` bytes of a message that has begun as one packet, whatever the bound on
    /// packets; 0 when there are none.
    pub(crate) fn send_within(&mut self, max: u32) -> u32 {
        let len = match self.stall_within() {
            Stall::None => max.min(MAX_PAYLOAD).min(self.free_bytes(self.limit())),
            _ => 0,
        };
        if len > 0 {
            self.count(len);
        }
        len
    }

    /// Takes up to `max` bytes and one packet; 0 when there are none.
    #[inline]
    pub fn reserve(&mut self, max: u32) -> u32 {
        let len = self.offer(max);
        if len > 0 {
            self.reserved += len;
            self.reserved_packets += 1;
        }
        len
    }

    /// Whether anything is reserved.
    #[inline]
    pub fn has_reserved(&self) -> bool {
        self.reserved_packets > 0
    }

    /// Gives a reservation of `reserved` bytes back.
    #[inline]
    pub fn cancel(&mut self, reserved: u32) {
        self.reserved = self.reserved.saturating_sub(reserved);
        self.reserved_packets = self.reserved_packets.saturating_sub(1);
    }

    /// Sends `len` of the `reserved` bytes as one packet.
    #[inline]
    pub fn commit(&mut self, reserved: u32, len: u32) {
        self.cancel(reserved);
        self.count(len);
    }

    /// Reserves up to `max` bytes and sends them as one packet; 0 when there are none.
    #[inline]
    pub fn send(&mut self, max: u32) -> u32 {
        let len = self.offer(max);
        if len > 0 {
            self.count(len);
        }
        len
    }

    /// Counts a packet that leaves.
    #[inline]
    fn count(&mut self, len: u32) {
        self.tx_cnt = self.tx_cnt.wrapping_add(len);
        if self.open.packets >= self.open_max {
            self.open_next();
        }
        self.open.packets += 1;
        self.open.end = self.tx_cnt;
        self.packets += 1;
    }
}

/// The receiving half: how much we let the peer send.
#[derive(Clone, Debug)]
pub struct RxCredit {
    buf_alloc: u32,
    /// So much is consumed before the peer is told: half of the buffer, at least 1, or less if
    /// there would not be room for what the reader waits for.
    update_threshold: u32,
    fwd_cnt: u32,
    rx_cnt: u32,
    announced: u32,
    /// The furthest byte count the peer was ever told it may reach: what is
    /// in flight when our buffer shrinks keeps its right to arrive.
    promised_end: u32,
    eager: bool,
}

impl RxCredit {
    /// Nothing received. Counters start at `first`.
    pub fn new(first: u32, buf_alloc: u32) -> RxCredit {
        RxCredit {
            buf_alloc,
            update_threshold: (buf_alloc / 2).max(1),
            fwd_cnt: first,
            rx_cnt: first,
            announced: first,
            promised_end: first,
            eager: false,
        }
    }

    /// Our buffer, in bytes.
    #[inline]
    pub fn buf_alloc(&self) -> u32 {
        self.buf_alloc
    }

    /// Bytes consumed, free-running.
    #[inline]
    pub fn fwd_cnt(&self) -> u32 {
        self.fwd_cnt
    }

    /// Bytes delivered and not yet consumed.
    #[inline]
    pub fn unread(&self) -> u32 {
        self.rx_cnt.wrapping_sub(self.fwd_cnt)
    }

    /// Bytes that may be unread at once.
    #[inline]
    pub(crate) fn window(&self) -> u32 {
        self.buf_alloc
            .max(self.promised_end.wrapping_sub(self.fwd_cnt))
    }

    /// Whether the peer does not know all that was consumed.
    pub(crate) fn has_unannounced(&self) -> bool {
        self.fwd_cnt != self.announced
    }

    /// Whether `len` more bytes keep the peer within its credit.
    #[inline]
    pub fn allows(&self, len: u32) -> bool {
        u64::from(self.unread()) + u64::from(len) <= u64::from(self.window())
    }

    /// Counts `len` bytes that [`RxCredit::allows`] allowed.
    #[inline]
    pub fn receive(&mut self, len: u32) {
        self.rx_cnt = self.rx_cnt.wrapping_add(len);
    }

    /// Counts bytes consumed. `None`: more than were unread. `Some(true)`:
    /// the peer should be told, because half of the buffer has been freed
    /// without its knowledge, or because it asked and is waiting. Half of the
    /// *smaller* buffer: a peer may have no more under way than its own
    /// (`peer_buffer`) holds, as Linux does, and would wait for an update that
    /// never comes if ours were more than twice as large.
    #[inline]
    pub fn consume(&mut self, bytes: u32, peer_buffer: u32) -> Option<bool> {
        if bytes > self.unread() {
            return None;
        }
        self.fwd_cnt = self.fwd_cnt.wrapping_add(bytes);
        Some(if self.eager {
            self.consumed_eagerly()
        } else {
            let half = self.update_threshold.min((peer_buffer / 2).max(1));
            self.fwd_cnt.wrapping_sub(self.announced) >= half
        })
    }

    /// What the peer is to be told while it waits.
    #[cold]
    fn consumed_eagerly(&mut self) -> bool {
        if self.unread() == 0 {
            self.eager = false;
        }
        self.fwd_cnt != self.announced
    }

    /// The peer sent CREDIT_REQUEST: until all that is unread has been consumed, what is consumed
    /// is announced without waiting for half a buffer.
    pub fn handle_credit_request(&mut self) {
        self.eager = self.unread() > 0;
    }

    /// A part of a message has come that is not its end, from a peer with a buffer of `peer_buffer`
    /// bytes. Linux begins a message with whatever credit it has, and asks for no more when that is
    /// used up; and half of a message is nothing that its reader would take. So as soon as the next
    /// packet could be cut short by that, what is consumed is announced without waiting for half a
    /// buffer. True: the peer should be told now.
    pub(crate) fn handle_partial_message(&mut self, peer_buffer: u32) -> bool {
        let used = self.rx_cnt.wrapping_sub(self.announced);
        let known = self.buf_alloc.min(peer_buffer).saturating_sub(used);
        if known >= MAX_PAYLOAD {
            return false;
        }
        self.handle_credit_request();
        self.has_unannounced()
    }

    /// Changes the buffer. What the peer was promised stays promised.
    pub fn set_buf_alloc(&mut self, buf_alloc: u32) {
        self.buf_alloc = buf_alloc;
        self.update_threshold = (buf_alloc / 2).max(1);
    }

    /// The reader takes nothing before `bytes` are there (SO_RCVLOWAT); to be said again when the
    /// buffer has changed. True: the peer does not know of room for so many, and should be told.
    ///
    /// What it knows of is `announced + buf_alloc`; what is to be there is `fwd_cnt + bytes`. So it
    /// is told when more than `buf_alloc - bytes` have been consumed without its knowledge.
    pub fn set_low_water(&mut self, bytes: u32) -> bool {
        let spare = self.buf_alloc.saturating_sub(bytes.max(1));
        self.update_threshold = (self.buf_alloc / 2).min(spare.saturating_add(1)).max(1);
        self.fwd_cnt.wrapping_sub(self.announced) >= self.update_threshold
    }

    /// `buf_alloc` and `fwd_cnt` for a header that will be sent.
    #[inline]
    pub fn announce(&mut self) -> (u32, u32) {
        self.promised_end = self.fwd_cnt.wrapping_add(self.window());
        self.announced = self.fwd_cnt;
        (self.buf_alloc, self.fwd_cnt)
    }
}

#[cfg(test)]
#[path = "credit_tests.rs"]
mod tests;
