//! [`BufRead`]: what is unread, copied aside.
//!
//! What must hold: nothing is taken before it is consumed, and nothing twice; a copy is worth
//! something only as long as the stream has come no further than where it begins.

use std::io::{self, BufRead};
use std::ops::Range;

use super::Stream;

/// Bytes that are copied at once.
const BUFFER: usize = 64 << 10;

/// A copy of what is unread, for [`BufRead`].
#[derive(Debug, Default)]
pub(super) struct Shown {
    bytes: Vec<u8>,
    /// What of it has not been consumed.
    left: Range<usize>,
    /// Where in the stream that begins. It is worth something only as long as nobody else has
    /// taken bytes.
    at: u64,
}

impl BufRead for Stream {
    /// Copies what has come aside, as peer memory is no plain slice, and takes none of it: reads,
    /// leases and polls see it as long as it was not consumed.
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if !self.is_shown() {
            let mut bytes = std::mem::take(&mut self.shown.bytes);
            bytes.resize(BUFFER, 0);
            let got = self.receive(|engine| {
                let got = engine.read(self.conn.id, &mut bytes, true)?;
                Ok((got, engine.info(self.conn.id).map_or(0, |info| info.taken)))
            });
            let (len, at) = *got.as_ref().unwrap_or(&(0, 0));
            self.shown = Shown {
                bytes,
                left: 0..len,
                at,
            };
            got?;
        }
        Ok(&self.shown.bytes[self.shown.left.clone()])
    }

    /// Takes what was shown. What somebody has taken since by another call is not taken again.
    fn consume(&mut self, len: usize) {
        let Shown { left, at, .. } = &mut self.shown;
        let len = len.min(left.len());
        let mut locked = self.conn.core.lock();
        let engine = locked.engine();
        if let Some(info) = engine.info(self.conn.id) {
            let gone = info.taken.saturating_sub(*at);
            let rest = len.saturating_sub(usize::try_from(gone).unwrap_or(usize::MAX));
            engine.skip(self.conn.id, rest);
            engine.flush_after_read();
        }
        left.start += len;
        *at += len as u64;
    }
}

impl Stream {
    /// Whether there is something of what was copied aside that nobody has taken since.
    fn is_shown(&self) -> bool {
        let Shown { left, at, .. } = &self.shown;
        let mut locked = self.conn.core.lock();
        let info = locked.engine().info(self.conn.id);
        !left.is_empty() && info.is_some_and(|info| info.taken == *at)
    }
}
