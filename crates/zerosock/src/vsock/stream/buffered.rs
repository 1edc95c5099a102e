//! A copy of unread bytes, for [`BufRead`](std::io::BufRead) on streams.
//!
//! # Invariants
//! - Bytes leave the receive buffer only when they are consumed, and once.
//! - The copy is valid only while the stream's position is where the copy begins.

use std::ops::Range;

use crate::vsock::connection::Connection;

/// Most bytes of one copy.
const BUFFER: usize = 64 << 10;

/// A copy of unread bytes.
#[derive(Debug, Default)]
pub(super) struct ReadAhead {
    bytes: Vec<u8>,
    /// The range of the copy that was not consumed.
    unconsumed: Range<usize>,
    /// Stream position of the start of `unconsumed`. The copy is valid while the stream is there.
    at: u64,
}

impl ReadAhead {
    /// The buffer of the copy, for another one.
    pub(super) fn take_buffer(&mut self) -> Vec<u8> {
        let mut bytes = std::mem::take(&mut self.bytes);
        bytes.resize(BUFFER, 0);
        bytes
    }

    /// Keeps the first `len` bytes of `bytes` as the copy: those at stream position `at`.
    pub(super) fn store(&mut self, bytes: Vec<u8>, len: usize, at: u64) {
        *self = ReadAhead {
            bytes,
            unconsumed: 0..len,
            at,
        };
    }

    /// The unconsumed bytes of the copy.
    pub(super) fn unconsumed(&self) -> &[u8] {
        &self.bytes[self.unconsumed.clone()]
    }

    /// Consumes bytes of the copy, except those that another call has read since.
    pub(super) fn consume(&mut self, conn: &Connection, len: usize) {
        let ReadAhead { unconsumed, at, .. } = self;
        let len = len.min(unconsumed.len());
        let mut locked = conn.core.lock();
        let backend = locked.backend();
        if let Some(info) = backend.info(conn.id) {
            let gone = info.taken.saturating_sub(*at);
            let rest = len.saturating_sub(usize::try_from(gone).unwrap_or(usize::MAX));
            conn.counts.add_read_copied(backend.skip(conn.id, rest));
            backend.flush_after_read();
        }
        unconsumed.start += len;
        *at += len as u64;
    }

    /// Whether the copy has unconsumed bytes and no other call has read since.
    pub(super) fn is_current(&self, conn: &Connection) -> bool {
        let ReadAhead { unconsumed, at, .. } = self;
        let mut locked = conn.core.lock();
        let info = locked.backend().info(conn.id);
        !unconsumed.is_empty() && info.is_some_and(|info| info.taken == *at)
    }
}
