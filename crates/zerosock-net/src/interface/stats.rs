//! Counters of an interface.

use std::fmt;
/// Counters since the interface was connected.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct InterfaceStats {
    /// Frames received.
    pub rx_frames: u64,
    /// Bytes of them.
    pub rx_bytes: u64,
    /// Those of them that are TSO frames.
    pub rx_tso: u64,
    /// Frames received and dropped: with a header that lies about the frame or uses what was not
    /// negotiated, or shorter than an Ethernet header; and buffers that came back without a frame.
    pub rx_dropped: u64,
    /// Frames queued.
    pub tx_frames: u64,
    /// Bytes of them.
    pub tx_bytes: u64,
    /// Those of them that are TSO frames.
    pub tx_tso: u64,
    /// Loans refused because no buffer was free.
    pub tx_full: u64,
    /// Writes to a kick eventfd.
    pub kicks: u64,
    /// Times that [`wait`](super::Interface::wait) slept.
    pub sleeps: u64,
}

/// All counters, as `name=value`, on one line.
impl fmt::Display for InterfaceStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "rx_frames={} rx_bytes={} rx_tso={} rx_dropped={} tx_frames={} tx_bytes={} tx_tso={} tx_full={} kicks={} sleeps={}",
            self.rx_frames,
            self.rx_bytes,
            self.rx_tso,
            self.rx_dropped,
            self.tx_frames,
            self.tx_bytes,
            self.tx_tso,
            self.tx_full,
            self.kicks,
            self.sleeps,
        )
    }
}

/// Counters of the receive queue.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ReceiveStats {
    pub(super) frames: u64,
    pub(super) bytes: u64,
    pub(super) tso: u64,
    pub(super) dropped: u64,
    pub(super) kicks: u64,
}

/// Counters of the transmit queue.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TransmitStats {
    pub(super) frames: u64,
    pub(super) bytes: u64,
    pub(super) tso: u64,
    pub(super) full: u64,
    pub(super) kicks: u64,
}

impl InterfaceStats {
    pub(super) fn new(rx: ReceiveStats, tx: TransmitStats, sleeps: u64) -> InterfaceStats {
        InterfaceStats {
            rx_frames: rx.frames,
            rx_bytes: rx.bytes,
            rx_tso: rx.tso,
            rx_dropped: rx.dropped,
            tx_frames: tx.frames,
            tx_bytes: tx.bytes,
            tx_tso: tx.tso,
            tx_full: tx.full,
            kicks: rx.kicks + tx.kicks,
            sleeps,
        }
    }
}
