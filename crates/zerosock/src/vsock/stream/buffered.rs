//! [`BufRead`] for streams, on a copy of unread bytes.
//!
//! # Invariants
//! - Bytes leave the receive buffer only when they are consumed, and once.
//! - The copy is valid only while the stream's position is where the copy begins.

use std::io::{self, BufRead};
use std::ops::Range;

use super::Stream;

/// Most bytes of one copy.
const BUFFER: usize = 64 << 10;

/// A copy of unread bytes, for [`BufRead`].
#[derive(Debug, Default)]
pub(super) struct ReadAhead {
    bytes: Vec<u8>,
    /// The range of the copy that was not consumed.
    unconsumed: Range<usize>,
    /// Stream position of the start of `unconsumed`. The copy is valid while the stream is there.
    at: u64,
}

impl BufRead for Stream {
    /// Returns a copy of unread bytes, since peer memory has no plain slice. The bytes stay in the
    /// receive buffer, visible to reads, leases and polls, until they are consumed.
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if !self.is_current() {
            let mut bytes = std::mem::take(&mut self.read_ahead.bytes);
            bytes.resize(BUFFER, 0);
            let got = self.receive(|engine| {
                let got = engine.read(self.conn.id, &mut bytes, true)?;
                Ok((got, engine.info(self.conn.id).map_or(0, |info| info.taken)))
            });
            let (len, at) = *got.as_ref().unwrap_or(&(0, 0));
            self.read_ahead = ReadAhead {
                bytes,
                unconsumed: 0..len,
                at,
            };
            got?;
        }
        Ok(&self.read_ahead.bytes[self.read_ahead.unconsumed.clone()])
    }

    /// Consumes bytes of the copy, except those that another call has read since.
    fn consume(&mut self, len: usize) {
        let ReadAhead { unconsumed, at, .. } = &mut self.read_ahead;
        let len = len.min(unconsumed.len());
        let mut locked = self.conn.core.lock();
        let engine = locked.engine();
        if let Some(info) = engine.info(self.conn.id) {
            let gone = info.taken.saturating_sub(*at);
            let rest = len.saturating_sub(usize::try_from(gone).unwrap_or(usize::MAX));
            engine.skip(self.conn.id, rest);
            engine.flush_after_read();
        }
        unconsumed.start += len;
        *at += len as u64;
    }
}

impl Stream {
    /// Whether the copy has unconsumed bytes and no other call has read since.
    fn is_current(&self) -> bool {
        let ReadAhead { unconsumed, at, .. } = &self.read_ahead;
        let mut locked = self.conn.core.lock();
        let info = locked.engine().info(self.conn.id);
        !unconsumed.is_empty() && info.is_some_and(|info| info.taken == *at)
    }
}
