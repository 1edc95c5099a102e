//! Credit: how much each side may send (virtio 1.2, 5.10.6.3).
//!
//! # Invariants
//! `peer_free = peer_buf_alloc - (tx_cnt - peer_fwd_cnt)` over free-running 32-bit counters. The
//! counters wrap; only differences count. The free space is computed in 64 bits and stops at 0, so
//! that a peer that shrinks its buffer with bytes in flight gets nothing instead of everything
//! (CVE-2026-23069).

use super::snapshot::{Reader, RestoreError, Writer};
use crate::wire::vsock::MAX_PAYLOAD;

/// Bytes of a receiver's buffer to count for each packet. Linux from 6.12.92 counts about 576 bytes
/// of bookkeeping for each packet and resets a connection that exceeds `buf_alloc`; this stays
/// below that.
pub const PACKET_OVERHEAD: u32 = 640;

/// Packets below this many bytes are small. The packet limit keeps space for so many packets of
/// this size that they fill the receiver's buffer. Otherwise a reader that waits for many bytes
/// (SO_RCVLOWAT) and a sender at the packet limit would wait for each other. The receive buffers of
/// Linux guests hold 3.7 KB.
pub const SMALL_PACKET: u32 = 2048;

/// Most outstanding packets of a connection that is restored: fewer than can be counted.
const MAX_RESTORED_PACKETS: u32 = 1 << 30;

/// Number of epochs in which outstanding packets are counted, see [`TxCredit`].
const EPOCHS: usize = 4;

/// Consecutive packets, counted together.
#[derive(Copy, Clone, Default, Debug)]
struct Epoch {
    /// `tx_cnt` after the last of them.
    end: u32,
    /// Packets sent in the epoch.
    packets: u32,
}

/// What keeps a connection from sending.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub enum Stall {
    /// Nothing.
    None,
    /// The peer's buffer is full: the peer sends an update when it has read.
    Window,
    /// A limit of ours, which the peer does not know: it may see no reason to send an update, so we
    /// must request one (Linux before 6.8 sends none while 64 KiB of its window are free).
    Limit,
}

/// The sending half: how much the peer lets us send.
///
/// Packets are bounded as well as bytes, in constant memory: the packets in flight are counted in
/// at most four epochs, and the packets of an epoch are complete when the peer has consumed the
/// last byte of its last packet. The count may be too high, never too low.
#[derive(Clone, Debug)]
pub struct TxCredit {
    /// The peer's receive buffer, in bytes.
    peer_buf_alloc: u32,
    /// Bytes that the peer has consumed, free-running.
    peer_fwd_cnt: u32,
    /// Bytes sent, free-running.
    tx_cnt: u32,
    /// Most bytes in flight, whatever the peer allows.
    limit: u32,
    /// Bytes reserved and not yet sent.
    reserved: u32,
    /// Packets reserved and not yet sent.
    reserved_packets: u32,
    /// Most packets in flight, for the peer's buffer, at least 1; stored because it takes a
    /// division.
    max_packets: u32,
    /// Packets of all epochs.
    packets: u32,
    /// The epoch being counted; empty if it has no packets.
    open: Epoch,
    /// Packets after which the next epoch begins.
    open_max: u32,
    /// The epochs before it, oldest first; the first `used` are valid.
    full: [Epoch; EPOCHS - 1],
    /// Number of valid epochs in `full`.
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

    /// Saves all but the reservations.
    pub(crate) fn save(&self, to: &mut Writer) {
        let Self {
            peer_buf_alloc,
            peer_fwd_cnt,
            tx_cnt,
            limit,
            ..
        } = *self;
        to.u32s([peer_buf_alloc, peer_fwd_cnt, tx_cnt, limit, self.used]);
        for epoch in self.full.iter().chain([&self.open]) {
            to.u32s([epoch.end, epoch.packets]);
        }
    }

    pub(crate) fn load(from: &mut Reader<'_>) -> Result<TxCredit, RestoreError> {
        let [peer_buf_alloc, peer_fwd_cnt, tx_cnt, limit, used] = from.u32s()?;
        let mut epochs = [Epoch::default(); EPOCHS];
        for epoch in &mut epochs {
            let [end, packets] = from.u32s()?;
            *epoch = Epoch { end, packets };
        }
        let [full @ .., open] = epochs;
        let valid = full.get(..used as usize);
        let valid = valid.ok_or(RestoreError::Invalid("number of epochs"))?;
        let packets = valid.iter().chain([&open]);
        let packets = packets.fold(0, |sum: u32, epoch| sum.saturating_add(epoch.packets));
        let most = match tx_cnt == peer_fwd_cnt {
            true => 0,
            false => MAX_RESTORED_PACKETS,
        };
        if packets > most {
            return Err(RestoreError::Invalid("number of packets in flight"));
        }
        let mut credit = TxCredit {
            peer_fwd_cnt,
            tx_cnt,
            packets,
            open,
            full,
            used,
            ..TxCredit::new(0, limit)
        };
        credit.set_peer_buf_alloc(peer_buf_alloc);
        Ok(credit)
    }

    /// Updates the credit from a header of the peer. `buf_alloc` may grow and shrink; `fwd_cnt`
    /// must move forward and not past what was sent. False: it did not, and was ignored, so that it
    /// cannot invent credit.
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
        self.max_packets = (self.peer_buf_alloc / PACKET_OVERHEAD).max(1);
        self.bound_open();
    }

    /// Changes the limit of bytes in flight. Bytes above it that are in flight stay.
    pub fn set_limit(&mut self, limit: u32) {
        self.limit = limit;
    }

    /// An epoch has a quarter of the packet limit; the last one is unlimited because none follows
    /// it.
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

    /// Begins another epoch, if there is one left.
    #[cold]
    fn open_next(&mut self) {
        if let Some(place) = self.full.get_mut(self.used as usize) {
            *place = self.open;
            self.open.packets = 0;
            self.used += 1;
            self.bound_open();
        }
    }

    /// Removes the completed epochs.
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

    /// Packets that the peer may not have read.
    #[inline]
    pub fn packets(&self) -> u32 {
        self.packets
    }

    /// Whether so many packets are outstanding that the next one should not be small
    /// ([`SMALL_PACKET`]). Never when none is: a buffer below twice [`PACKET_OVERHEAD`] allows one
    /// packet at a time, and the peer would have nothing to read that frees space.
    #[inline]
    pub fn nears_packet_limit(&self) -> bool {
        let outstanding = self.packets + self.reserved_packets;
        let for_others = self.peer_buf_alloc.div_ceil(SMALL_PACKET);
        outstanding > 0 && outstanding + for_others >= self.max_packets
    }

    /// Most bytes that may be in flight at once.
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

    /// Bytes that one packet of up to `max` bytes may carry now.
    #[inline]
    fn offer(&self, max: u32) -> u32 {
        max.min(MAX_PAYLOAD).min(self.available())
    }

    /// What stalls one more byte.
    #[inline]
    pub fn stall(&self) -> Stall {
        self.stall_for(1)
    }

    /// What stalls `wanted` more bytes at once, or as many as the limit allows.
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

    /// As [`stall`](Self::stall), for a message that was begun: without the packet limit.
    pub(crate) fn stall_within(&self) -> Stall {
        if self.free_bytes(self.limit()) > 0 && self.max_packets > 0 {
            Stall::None
        } else if self.free_bytes(self.peer_buf_alloc) == 0 {
            Stall::Window
        } else {
            Stall::Limit
        }
    }

    /// Reserves `len` bytes for a message, and its first packet. False: there is not enough credit.
    pub(crate) fn reserve_whole(&mut self, len: u32) -> bool {
        // The completion of an empty packet is never known: those have a limit of their own.
        let packet = len == 0 || self.packets + self.reserved_packets < self.max_packets;
        let fits = packet && self.max_packets > 0 && self.free_bytes(self.limit()) >= len;
        if fits {
            self.reserved += len;
            self.reserved_packets += 1;
        }
        fits
    }

    /// Reserves a packet for a message that was begun before a restore: nothing else is sent before its rest.
    pub(crate) fn reserve_packet(&mut self) {
        self.reserved_packets += 1;
    }

    /// Reserves the rest of that message, once. False: there is not enough credit.
    pub(crate) fn reserve_rest(&mut self, len: u32) -> bool {
        let fits = self.reserved == 0 && self.free_bytes(self.limit()) >= len;
        if fits {
            self.reserved = len;
        }
        fits
    }

    /// Sends `len` of the bytes reserved for a message. [Cancel](Self::cancel) the rest at its end.
    pub(crate) fn send_part(&mut self, len: u32) {
        self.reserved = self.reserved.saturating_sub(len);
        if len > 0 {
            self.count(len);
        }
    }

    /// Sends up to `max` bytes of a message that was begun as one packet, without the packet limit;
    /// returns 0 if there is no credit.
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

    /// Reserves up to `max` bytes and one packet; returns 0 if there is no credit.
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

    /// Releases a reservation of `reserved` bytes.
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

    /// Sends up to `max` bytes as one packet; returns 0 if there is no credit.
    #[inline]
    pub fn send(&mut self, max: u32) -> u32 {
        let len = self.offer(max);
        if len > 0 {
            self.count(len);
        }
        len
    }

    /// Sends `len` bytes as one packet. False: there is not enough credit, or they are none or too
    /// many for a packet.
    #[inline(always)] // every packet
    pub(crate) fn send_whole(&mut self, len: u32) -> bool {
        let fits = len > 0 && self.offer(len) == len;
        if fits {
            self.count(len);
        }
        fits
    }

    /// Counts a packet that is sent.
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
    /// Our receive buffer, in bytes.
    buf_alloc: u32,
    /// Consumed bytes after which the peer gets an update: half of the buffer, at least 1, or less
    /// if the reader's low-water mark needs it.
    update_threshold: u32,
    /// Bytes consumed, free-running.
    fwd_cnt: u32,
    /// Bytes received, free-running.
    rx_cnt: u32,
    /// The `fwd_cnt` of the last header sent.
    announced: u32,
    /// The highest byte count that the peer was permitted: bytes in flight stay valid when our
    /// buffer shrinks.
    promised_end: u32,
    /// The peer waits: consumed bytes are announced in steps of this size, until all received bytes are consumed.
    /// 0: it does not wait.
    waiting_step: u32,
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
            waiting_step: 0,
        }
    }

    pub(crate) fn save(&self, to: &mut Writer) {
        to.u32s([self.buf_alloc, self.update_threshold, self.fwd_cnt]);
        let counts = [self.rx_cnt, self.announced, self.promised_end];
        to.u32s(counts);
        to.u32s([self.waiting_step]);
    }

    pub(crate) fn load(from: &mut Reader<'_>) -> Result<RxCredit, RestoreError> {
        let [buf_alloc, update_threshold, fwd_cnt] = from.u32s()?;
        let [rx_cnt, announced, promised_end] = from.u32s()?;
        let [waiting_step] = from.u32s()?;
        Ok(RxCredit {
            buf_alloc,
            update_threshold: update_threshold.max(1),
            fwd_cnt,
            rx_cnt,
            announced,
            promised_end,
            waiting_step,
        })
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

    /// Whether the peer does not know all consumed bytes.
    pub(crate) fn has_unannounced(&self) -> bool {
        self.fwd_cnt != self.announced
    }

    /// Whether `len` more bytes keep the peer within its credit.
    #[inline]
    pub fn allows(&self, len: u32) -> bool {
        u64::from(self.unread()) + u64::from(len) <= u64::from(self.window())
    }

    /// Counts `len` received bytes, which [`RxCredit::allows`] has allowed.
    #[inline]
    pub fn receive(&mut self, len: u32) {
        self.rx_cnt = self.rx_cnt.wrapping_add(len);
    }

    /// Counts bytes consumed. `None`: more than were unread. `Some(true)`: the peer needs an
    /// update, because half of the buffer was freed without its knowledge, or less after it requested
    /// one and waits. Half of the *smaller* buffer: as in Linux, a peer may have no more in flight
    /// than its own buffer (`peer_buffer`), and would wait for ever if ours were more than twice as
    /// large.
    #[inline]
    pub fn consume(&mut self, bytes: u32, peer_buffer: u32) -> Option<bool> {
        if bytes > self.unread() {
            return None;
        }
        let promised = self.promised_end.wrapping_sub(self.fwd_cnt);
        self.fwd_cnt = self.fwd_cnt.wrapping_add(bytes);
        if bytes > promised {
            // The peer has used space that was free and not announced.
            self.promised_end = self.fwd_cnt;
        }
        Some(if self.waiting_step > 0 {
            self.consumed_in_steps(peer_buffer)
        } else {
            self.fwd_cnt.wrapping_sub(self.announced) >= self.update_size(peer_buffer)
        })
    }

    /// Bytes consumed without the peer's knowledge from which it needs an update.
    #[inline]
    fn update_size(&self, peer_buffer: u32) -> u32 {
        self.update_threshold.min((peer_buffer / 2).max(1))
    }

    /// Whether the peer would need an update if all received bytes were consumed now.
    #[inline]
    pub(crate) fn would_update(&self, peer_buffer: u32) -> bool {
        self.waiting_step > 0
            || self.rx_cnt.wrapping_sub(self.announced) >= self.update_size(peer_buffer)
    }

    /// Whether a waiting peer needs an update.
    #[cold]
    fn consumed_in_steps(&mut self, peer_buffer: u32) -> bool {
        if self.unread() == 0 {
            self.waiting_step = 0;
            return self.has_unannounced();
        }
        let step = self.waiting_step.min(self.update_size(peer_buffer));
        self.fwd_cnt.wrapping_sub(self.announced) >= step
    }

    /// The peer sent CREDIT_REQUEST: until all unread bytes are consumed, each quarter of them is announced. Not
    /// each byte: a peer that waits would be woken for every read, and fill just that room.
    pub fn handle_credit_request(&mut self) {
        self.waiting_step = self.unread().div_ceil(4);
    }

    /// A part of a message arrived that does not end it; the peer's buffer has `peer_buffer` bytes.
    /// Linux begins a message with the credit it has and requests no more when that is used up, and
    /// its reader takes no partial message. So as soon as the next packet could be cut short by
    /// lack of credit, every consumption is announced at once. True: the peer needs an update now.
    pub(crate) fn handle_partial_message(&mut self, peer_buffer: u32) -> bool {
        let used = self.rx_cnt.wrapping_sub(self.announced);
        let known = self.buf_alloc.min(peer_buffer).saturating_sub(used);
        if known >= MAX_PAYLOAD {
            return false;
        }
        self.waiting_step = self.unread().min(1);
        self.has_unannounced()
    }

    /// Changes the buffer. Credit that the peer already has stays valid.
    pub fn set_buf_alloc(&mut self, buf_alloc: u32) {
        self.buf_alloc = buf_alloc;
        self.update_threshold = (buf_alloc / 2).max(1);
    }

    /// Sets the low-water mark of the reader (SO_RCVLOWAT), in bytes; call it again after a change
    /// of the buffer. True: the peer lacks credit for that many bytes, and needs an update.
    ///
    /// The peer knows of `announced + buf_alloc`; the reader needs `fwd_cnt + bytes`. So the peer
    /// gets an update when more than `buf_alloc - bytes` have been consumed without its knowledge.
    pub fn set_low_water(&mut self, bytes: u32) -> bool {
        let spare = self.buf_alloc.saturating_sub(bytes.max(1));
        self.update_threshold = (self.buf_alloc / 2).min(spare.saturating_add(1)).max(1);
        self.fwd_cnt.wrapping_sub(self.announced) >= self.update_threshold
    }

    /// `buf_alloc` and `fwd_cnt` for a header that the caller sends.
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
