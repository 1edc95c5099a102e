//! When each socket may send, and who is told that it may again.
//!
//! What must hold: a socket that was refused for now is named when another try is worth it; one that
//! has as much under way as may be, when half of it was taken; one that waits for all, when all was.

use super::{DatagramId, DatagramTable, Socket};
use crate::addr::Address;
use crate::time::Instant;
use crate::vsock::datagram::paused_destinations::PauseReason;
use crate::vsock::datagram::{MAX_DATAGRAM, OVERHEAD};

/// Throttled sockets that are looked at one by one.
const SCAN_LIMIT: usize = 16;

/// Why nothing is sent now.
#[derive(Copy, Clone, Eq, PartialEq, Debug, thiserror::Error)]
pub enum Refusal {
    /// There is no such socket.
    #[error("no such socket")]
    Unknown,
    /// Longer than any datagram may be (EMSGSIZE).
    #[error("a datagram of {0} bytes is above the limit of 65536")]
    TooLong(usize),
    /// As much is under way as may be: wait until [`DatagramTable::poll_writable`] names the
    /// socket.
    #[error("as much is under way as may be")]
    Throttled,
    /// The destination has enough: as above.
    #[error("the destination takes no more now")]
    Stopped,
    /// The destination takes no datagrams.
    #[error("the destination has not negotiated datagrams")]
    Unsupported,
}

impl DatagramTable {
    /// Whether a datagram may be sent now. `now` is asked for when somebody has said STOP.
    ///
    /// # Errors
    /// Why not; for one that is so for now, the socket is named when it may be otherwise.
    #[inline]
    pub fn may_send(
        &mut self,
        id: DatagramId,
        to: Address,
        len: usize,
        now: impl FnOnce() -> Instant,
    ) -> Result<Address, Refusal> {
        let paused_destinations = &self.paused_destinations;
        let Some(socket) = self
            .sockets
            .get_mut(id.index as usize)
            .filter(|socket| socket.used && socket.generation == id.generation)
        else {
            return Err(Refusal::Unknown);
        };
        if len > MAX_DATAGRAM as usize {
            return Err(Refusal::TooLong(len));
        }
        if !paused_destinations.is_empty() {
            match paused_destinations.reason(now(), socket.local.port, to) {
                Some(PauseReason::Unsupported) => return Err(Refusal::Unsupported),
                Some(PauseReason::Full(_)) => {
                    socket.waiting = true;
                    return Err(Refusal::Stopped);
                }
                None => {}
            }
        }
        // Without a buffer it is one at a time.
        if socket.sending >= socket.limits.send.max(1) {
            let half = socket.limits.send / 2;
            self.throttle(id.index, half);
            return Err(Refusal::Throttled);
        }
        Ok(socket.local)
    }

    /// A datagram of `len` bytes was sent. `under_way`: it counts until it is
    /// [`handle_completed`](Self::handle_completed).
    #[inline]
    pub fn sent(&mut self, id: DatagramId, len: u32, in_flight: bool) {
        if let Some(socket) = self.get_mut(id) {
            socket.stats.sent += 1;
            socket.stats.sent_bytes += u64::from(len);
            if in_flight {
                let counts = len + OVERHEAD;
                let others = if socket.sending == 0 {
                    0
                } else {
                    socket.largest
                };
                socket.largest = others.max(counts);
                socket.sending = socket.sending.saturating_add(counts);
            }
        }
    }

    /// What `sent` has counted as under way was taken by the other side.
    #[inline]
    pub fn handle_completed(&mut self, id: DatagramId, len: u32) {
        if let Some(socket) = self.get_mut(id) {
            socket.sending = socket.sending.saturating_sub(len + OVERHEAD);
            if socket.throttled.is_some() && socket.sending <= socket.writable_at {
                self.wake(id.index);
            }
        }
    }

    /// A send found no buffer: the socket is to be named with [`wake_all`](Self::wake_all).
    pub fn wait_for_buffer(&mut self, id: DatagramId) {
        if let Some(socket) = self.get_mut(id) {
            socket.waiting = true;
        }
    }

    /// Every socket that waits may try again.
    pub fn wake_all(&mut self) {
        for index in 0..self.sockets.len() as u32 {
            self.wake(index);
        }
    }

    pub(super) fn wake(&mut self, index: u32) {
        let Some(socket) = self.sockets.get_mut(index as usize) else {
            return;
        };
        if let Some(place) = socket.throttled.take() {
            self.throttled.swap_remove(place as usize);
            let moved = self.throttled.get(place as usize);
            if let Some(moved) = moved.and_then(|at| self.sockets.get_mut(*at as usize)) {
                moved.throttled = Some(place);
            }
        }
        let Some(socket) = self.sockets.get_mut(index as usize) else {
            return;
        };
        if core::mem::take(&mut socket.waiting) && !core::mem::replace(&mut socket.listed, true) {
            self.writable.push_back(index);
        }
    }

    /// Whether nothing that was sent is under way. If something is, the socket is named when it is
    /// worth another look.
    pub fn is_flushed(&mut self, id: DatagramId) -> bool {
        let in_flight = self.get(id).is_some_and(|socket| socket.sending > 0);
        if in_flight {
            self.throttle(id.index, 0);
        }
        !in_flight
    }

    /// Somebody waits until no more than `writable_at` is under way. For a send that is half of what may
    /// be, as with a kernel's writers; one by one they would sleep and wake for each datagram.
    fn throttle(&mut self, index: u32, until: u32) {
        let place = self.throttled.len() as u32;
        if let Some(socket) = self.sockets.get_mut(index as usize) {
            socket.waiting = true;
            match socket.throttled {
                // Both are named with the first of them.
                Some(_) => socket.writable_at = socket.writable_at.max(until),
                None => {
                    socket.writable_at = until;
                    socket.throttled = Some(place);
                    self.throttled.push(index);
                }
            }
        }
    }

    /// Whether a socket waits for what it has under way to be taken.
    #[inline]
    pub fn has_throttled(&self) -> bool {
        !self.throttled.is_empty()
    }

    /// How many packets have to be taken at least until so much of one of the sockets that wait for
    /// it may have been; it has as many under way. `None`: nobody waits.
    pub fn completions_until_writable(&self) -> Option<u32> {
        if self.throttled.len() > SCAN_LIMIT {
            // Not worth a long look.
            return Some(1);
        }
        // Never more than it takes: the others under way may be held for as long as a reader likes.
        let until_named = |socket: &Socket| {
            let bytes = socket.sending.saturating_sub(socket.writable_at);
            bytes.div_ceil(socket.largest.max(1)).max(1)
        };
        let sockets = self.throttled.iter();
        let sockets = sockets.filter_map(|&index| self.sockets.get(index as usize));
        sockets.map(until_named).min()
    }

    /// The next socket that was told to wait and may try again.
    #[inline]
    pub fn poll_writable(&mut self) -> Option<DatagramId> {
        while let Some(index) = self.writable.pop_front() {
            let Some(socket) = self.sockets.get_mut(index as usize) else {
                continue;
            };
            socket.listed = false;
            if socket.used {
                let generation = socket.generation;
                return Some(DatagramId { index, generation });
            }
        }
        None
    }
}
