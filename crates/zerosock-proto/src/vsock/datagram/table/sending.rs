//! Back-pressure of sending sockets: when a send is refused, and when the socket is writable again.
//!
//! # Invariants
//! After a refused send [`DatagramTable::poll_writable`] returns the socket when a retry can
//! succeed: for a full send buffer when half of it is free, and for a flush when nothing is in
//! flight.

use super::{DatagramId, DatagramRefusal, DatagramTable, Socket};
use crate::addr::Address;
use crate::time::Instant;
use crate::vsock::datagram::paused_destinations::PauseReason;
use crate::vsock::datagram::{MAX_DATAGRAM, OVERHEAD};

/// Most throttled sockets that `completions_until_writable` examines one by one.
const SCAN_LIMIT: usize = 16;

impl DatagramTable {
    /// Checks whether the socket may send a datagram now, and returns its address. `now` is called
    /// when a destination is paused.
    ///
    /// # Errors
    /// [`DatagramRefusal`]; after one that is temporary, [`poll_writable`](Self::poll_writable) returns the
    /// socket when a retry can succeed.
    #[inline]
    pub fn may_send(
        &mut self,
        id: DatagramId,
        to: Address,
        len: usize,
        now: impl FnOnce() -> Instant,
    ) -> Result<Address, DatagramRefusal> {
        let paused_destinations = &self.paused_destinations;
        let Some(socket) = self
            .sockets
            .get_mut(id.index as usize)
            .filter(|socket| socket.used && socket.generation == id.generation)
        else {
            return Err(DatagramRefusal::Unknown);
        };
        if len > MAX_DATAGRAM as usize {
            return Err(DatagramRefusal::TooLong(len));
        }
        if !paused_destinations.is_empty() {
            match paused_destinations.reason(now(), socket.local.port, to) {
                Some(PauseReason::Unsupported) => return Err(DatagramRefusal::Unsupported),
                Some(PauseReason::Full(_)) => {
                    socket.waiting = true;
                    return Err(DatagramRefusal::Stopped);
                }
                None => {}
            }
        }
        // A send buffer of 0 bytes allows one datagram at a time.
        if socket.sending >= socket.limits.send.max(1) {
            let half = socket.limits.send / 2;
            self.throttle(id.index, half);
            return Err(DatagramRefusal::Throttled);
        }
        Ok(socket.local)
    }

    /// A datagram of `len` bytes was sent. `under_way`: it counts as in flight until
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

    /// The other side has taken a datagram that [`sent`](Self::sent) counted as in flight.
    #[inline]
    pub fn handle_completed(&mut self, id: DatagramId, len: u32) {
        if let Some(socket) = self.get_mut(id) {
            socket.sending = socket.sending.saturating_sub(len + OVERHEAD);
            if socket.throttled.is_some() && socket.sending <= socket.writable_at {
                self.wake(id.index);
            }
        }
    }

    /// A send found no buffer in the queue: [`wake_all`](Self::wake_all) makes the socket writable.
    pub fn wait_for_buffer(&mut self, id: DatagramId) {
        if let Some(socket) = self.get_mut(id) {
            socket.waiting = true;
        }
    }

    /// Makes every waiting socket writable.
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

    /// Whether no datagram of the socket is in flight. If not,
    /// [`poll_writable`](Self::poll_writable) returns the socket when none is.
    pub fn is_flushed(&mut self, id: DatagramId) -> bool {
        let in_flight = self.get(id).is_some_and(|socket| socket.sending > 0);
        if in_flight {
            self.throttle(id.index, 0);
        }
        !in_flight
    }

    /// The socket waits until at most `until` bytes are in flight. A refused send waits for half of
    /// the limit, as a writer in a kernel does: otherwise it would sleep and wake for each
    /// datagram.
    fn throttle(&mut self, index: u32, until: u32) {
        let place = self.throttled.len() as u32;
        if let Some(socket) = self.sockets.get_mut(index as usize) {
            socket.waiting = true;
            match socket.throttled {
                // The larger limit is reached first and wakes both waiters.
                Some(_) => socket.writable_at = socket.writable_at.max(until),
                None => {
                    socket.writable_at = until;
                    socket.throttled = Some(place);
                    self.throttled.push(index);
                }
            }
        }
    }

    /// Whether a socket waits for completions of its own datagrams.
    #[inline]
    pub fn has_throttled(&self) -> bool {
        !self.throttled.is_empty()
    }

    /// The least number of completions that can make one of the throttled sockets writable; that
    /// many of its datagrams are in flight. `None`: no socket is throttled.
    pub fn completions_until_writable(&self) -> Option<u32> {
        if self.throttled.len() > SCAN_LIMIT {
            // Too many to examine: wake at the next completion.
            return Some(1);
        }
        // A lower bound: a reader may hold the other datagrams in flight for as long as it likes.
        let until_named = |socket: &Socket| {
            let bytes = socket.sending.saturating_sub(socket.writable_at);
            bytes.div_ceil(socket.largest.max(1)).max(1)
        };
        let sockets = self.throttled.iter();
        let sockets = sockets.filter_map(|&index| self.sockets.get(index as usize));
        sockets.map(until_named).min()
    }

    /// The next socket that may retry a refused send.
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
