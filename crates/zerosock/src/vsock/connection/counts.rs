//! The counters of one connection.
//!
//! # Invariants
//! - Only a thread that holds the endpoint's lock adds to them, so that adding is no atomic operation.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::table::places::{BufferPlace, LeaseParts};

/// Bytes of one connection since it was established, as its sockets' calls have seen them.
///
/// ```
/// # let (host, process) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/pair.rs"));
/// use std::io::Write;
///
/// (&process).write_all(b"copied, ")?;
/// let mut loan = process.loan(8)?;
/// loan.write_all(b"in place")?;
/// loan.send()?;
/// let stats = process.stats();
/// assert_eq!((stats.sent, stats.sent_in_place), (16, 8));
///
/// let lease = host.recv()?.expect("a packet");
/// assert_eq!(host.stats().received_in_place, lease.len() as u64);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct ConnectionStats {
    /// Bytes received, read or unread.
    pub received: u64,
    /// Bytes that were passed to the program where the peer has written them.
    pub received_in_place: u64,
    /// Bytes sent.
    pub sent: u64,
    /// Bytes that the program has written where the peer reads them.
    pub sent_in_place: u64,
}

/// All counters, as `name=value`, on one line.
impl fmt::Display for ConnectionStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "received={} received_in_place={} sent={} sent_in_place={}",
            self.received, self.received_in_place, self.sent, self.sent_in_place
        )
    }
}

/// The counters of the calls of one connection. No byte is in two counters, so that a call adds to one.
#[derive(Debug, Default)]
pub(in crate::vsock) struct Counts {
    /// Bytes that a call has copied to the program.
    read_copied: AtomicU64,
    /// Bytes that a call has lent to the program where the peer has written them.
    read_in_place: AtomicU64,
    /// Bytes sent that a call has copied.
    sent_copied: AtomicU64,
    /// Bytes sent that the program has written where the peer reads them.
    sent_in_place: AtomicU64,
}

impl Counts {
    #[inline]
    pub(in crate::vsock) fn add_read_copied(&self, bytes: usize) {
        add(&self.read_copied, bytes);
    }

    #[inline]
    pub(in crate::vsock) fn add_read(&self, bytes: usize, is_in_place: bool) {
        let counter = if is_in_place {
            &self.read_in_place
        } else {
            &self.read_copied
        };
        add(counter, bytes);
    }

    #[inline]
    pub(in crate::vsock) fn add_lease(&self, parts: &LeaseParts) {
        self.add_read(parts.len, !matches!(parts.place, BufferPlace::Copied(_)));
    }

    #[inline]
    pub(in crate::vsock) fn add_sent_copied(&self, bytes: usize) {
        add(&self.sent_copied, bytes);
    }

    #[inline]
    pub(in crate::vsock) fn add_sent(&self, bytes: usize, is_in_place: bool) {
        let counter = if is_in_place {
            &self.sent_in_place
        } else {
            &self.sent_copied
        };
        add(counter, bytes);
    }

    pub(super) fn stats(&self, unread: usize) -> ConnectionStats {
        let received_in_place = self.read_in_place.load(Ordering::Relaxed);
        let sent_in_place = self.sent_in_place.load(Ordering::Relaxed);
        let read = received_in_place + self.read_copied.load(Ordering::Relaxed);
        ConnectionStats {
            received: read + unread as u64,
            received_in_place,
            sent: sent_in_place + self.sent_copied.load(Ordering::Relaxed),
            sent_in_place,
        }
    }
}

#[inline]
fn add(counter: &AtomicU64, bytes: usize) {
    let sum = counter.load(Ordering::Relaxed) + bytes as u64;
    counter.store(sum, Ordering::Relaxed);
}
