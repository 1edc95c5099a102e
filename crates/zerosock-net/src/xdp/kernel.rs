//! What the kernel drops at the socket of a port, by its own counters (XDP_STATISTICS).
//!
//! Reading them is a system call, so it is done at most once in [`INTERVAL`], once more after the last turn, and when
//! the socket is closed. Frames that find no chunk cause no turn: while there is none, the counters are read each
//! [`STARVED`].

use std::time::Duration;

use zerosock_proto::Instant;
use zerosock_sys::xdp::XdpSocket;

use crate::stats::NetStats;

/// How often the counters are read while there are turns.
const INTERVAL: Duration = Duration::from_millis(100);
/// How often they are read while the kernel has no chunk.
const STARVED: Duration = Duration::from_secs(1);

/// See the [module](self).
#[derive(Debug, Default)]
pub(super) struct KernelDrops {
    /// Values of the current socket when they were last read.
    seen: Values,
    /// What has come since the last turn.
    new: Values,
    read_at: Option<Instant>,
    /// A turn has not read them since.
    has_skipped: bool,
}

/// `rx_dropped`, `rx_ring_full`, `rx_fill_ring_empty_descs` and `tx_invalid_descs`.
type Values = [u64; 4];

impl KernelDrops {
    /// Reads the counters if it is time.
    pub(super) fn update(&mut self, socket: &XdpSocket, now: Instant) {
        self.has_skipped = self.read_at.is_some_and(|at| now < at + INTERVAL);
        if !self.has_skipped {
            self.read_at = Some(now);
            self.read(socket);
        }
    }

    /// Reads the counters of a socket for the last time.
    pub(super) fn finish(&mut self, socket: &XdpSocket) {
        self.read(socket);
        *self = KernelDrops {
            new: self.new,
            ..KernelDrops::default()
        };
    }

    fn read(&mut self, socket: &XdpSocket) {
        // It cannot fail on an AF_XDP socket.
        let Ok(values) = socket.statistics() else {
            return;
        };
        let values = [
            values.rx_dropped,
            values.rx_ring_full.unwrap_or_default(),
            values.rx_fill_ring_empty_descs.unwrap_or_default(),
            values.tx_invalid_descs,
        ];
        let all = self.new.iter_mut().zip(self.seen).zip(values);
        all.for_each(|((new, seen), value)| *new += value.wrapping_sub(seen));
        self.seen = values;
    }

    /// Adds what has come since the last call.
    pub(super) fn add_to(&mut self, tally: &mut NetStats) {
        let [dropped, ring_full, fill_empty, invalid] = std::mem::take(&mut self.new);
        tally.rx_kernel_dropped += dropped;
        tally.rx_ring_full += ring_full;
        tally.rx_fill_empty += fill_empty;
        tally.tx_invalid += invalid;
    }

    /// When to read again. `is_starved`: the kernel has no chunk.
    pub(super) fn next_timeout(&self, is_starved: bool) -> Option<Instant> {
        let interval = match self.has_skipped {
            true => INTERVAL,
            false if is_starved => STARVED,
            false => return None,
        };
        self.read_at.map(|at| at + interval)
    }
}
