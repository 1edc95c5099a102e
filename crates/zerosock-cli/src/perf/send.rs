//! The server's loop: consecutive writes, timed as a whole.

use std::io;
use std::time::{Duration, Instant};

use super::bytes::SentBytes;

/// Sends `bytes` in writes of `buffer` bytes by `write`; returns the time of the loop.
pub(super) fn run(
    bytes: u64,
    buffer: usize,
    mut write: impl FnMut(&[u8]) -> io::Result<usize>,
) -> io::Result<Duration> {
    let mut source = SentBytes::new(bytes, buffer);
    let began = Instant::now();
    loop {
        let next = source.next();
        if next.is_empty() {
            return Ok(began.elapsed());
        }
        let sent = match write(next) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(sent) => sent,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
            Err(error) => return Err(error),
        };
        source.sent(sent);
    }
}
