//! The back-end of senders that keep completions.
//!
//! Asking for completions is a system call over the error queue, and none over io_uring; a send is
//! cheaper over the error queue. So the better back-end depends on how often an application asks. CPU
//! seconds of the sender for 10^9 bytes, of 20 rounds (`bench/results/notify.md`), over io_uring and
//! over the error queue:
//!
//! | | asking at each send | at each 32nd |
//! |---|---|---|
//! | UDP, IPv4 | 0.058, 0.065 | 0.056, 0.052 |
//! | UDP, IPv6 | 0.058, 0.065 | 0.058, 0.054 |
//! | TCP, IPv4 | 0.076, 0.071 | 0.074, 0.059 |
//! | TCP, IPv6 | 0.087, 0.078 | 0.084, 0.069 |
//!
//! An open sender cannot change its back-end: event loops wait for its descriptor. So the choice is
//! made when a sender is opened. On TCP it is the error queue. On UDP the lines of the table meet at 2.5
//! sends per call that reads completions: the choice follows the last sender of the process over UDP, and the
//! first one takes io_uring.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use crate::sys::SocketKind;

/// Sends per call that reads completions, from which on the error queue is cheaper on UDP.
const RARE: u64 = 3;
/// A sender with fewer sends does not influence the choice.
const MIN_USE: u64 = 1024;

/// The last sender over UDP made at least [`RARE`] sends per call that reads completions.
static ASKED_RARELY: AtomicBool = AtomicBool::new(false);

/// Whether the error queue is the better back-end of a sender that keeps completions.
pub(super) fn prefers_error_queue(kind: SocketKind) -> bool {
    match kind {
        SocketKind::Tcp4 | SocketKind::Tcp6 => true,
        SocketKind::Udp4 | SocketKind::Udp6 => ASKED_RARELY.load(Relaxed),
        _ => false,
    }
}

/// Takes note of how a sender that keeps completions was used: its sends, and how often it was asked.
pub(super) fn record_use(kind: SocketKind, sends: u64, asked: u64) {
    if matches!(kind, SocketKind::Udp4 | SocketKind::Udp6) && sends >= MIN_USE {
        ASKED_RARELY.store(asked * RARE <= sends, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_queue_is_for_completions_that_are_rarely_asked_for() {
        let udp = || prefers_error_queue(SocketKind::Udp4);
        assert!(!udp() && prefers_error_queue(SocketKind::Tcp6));
        assert!(!prefers_error_queue(SocketKind::VsockStream));
        for (sends, asked, rarely) in [
            (MIN_USE, MIN_USE / 32, true),
            // Too few to count.
            (MIN_USE - 1, MIN_USE - 1, true),
            (MIN_USE, MIN_USE / 2, false),
            (MIN_USE, 0, true),
            (MIN_USE, MIN_USE, false),
        ] {
            record_use(SocketKind::Udp6, sends, asked);
            assert_eq!(udp(), rarely, "{sends} sends, {asked}");
        }
        // Streams do not count.
        record_use(SocketKind::Tcp4, MIN_USE, 0);
        assert!(!udp());
    }
}
