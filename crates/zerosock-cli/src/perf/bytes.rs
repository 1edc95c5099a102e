//! The bytes that a server sends, and how a client checks them.
//!
//! The position of a byte in the stream determines its value, with a prime period that divides no
//! size of a buffer or packet: lost, repeated or moved bytes are detected.

use std::hint::black_box;
use std::io;

use super::settings::CheckMode;

const PERIOD: usize = 65_521;
/// Bytes compared at once.
const CHUNK: usize = 4096;

fn pattern(len: usize) -> Vec<u8> {
    let byte = |at: usize| (((at % PERIOD) as u32).wrapping_mul(0x9e37_79b1) >> 23) as u8;
    (0..len).map(byte).collect()
}

/// The sent bytes: slices of one buffer, at any position of the stream.
pub(super) struct SentBytes {
    bytes: Vec<u8>,
    at: u64,
    len: u64,
}

impl SentBytes {
    /// A stream of `len` bytes, at most `most` at once.
    pub(super) fn new(len: u64, most: usize) -> SentBytes {
        let bytes = pattern(PERIOD + most);
        SentBytes { bytes, at: 0, len }
    }

    /// The next bytes; none at the end.
    pub(super) fn next(&self) -> &[u8] {
        let start = (self.at % PERIOD as u64) as usize;
        let most = self.bytes.len() - PERIOD;
        let left = usize::try_from(self.len - self.at).unwrap_or(usize::MAX);
        &self.bytes[start..start + most.min(left)]
    }

    /// Marks the first `len` of them as sent.
    pub(super) fn sent(&mut self, bytes: usize) {
        self.at += bytes as u64;
    }
}

/// Checks received bytes as the flags `--touch` and `--verify` ask: reads them, or compares them
/// with those sent.
pub(super) struct ByteChecker {
    check_mode: CheckMode,
    expected: Vec<u8>,
    at: u64,
}

impl ByteChecker {
    pub(super) fn new(check_mode: CheckMode) -> ByteChecker {
        let expected = match check_mode {
            CheckMode::Verify => pattern(PERIOD + CHUNK),
            _ => Vec::new(),
        };
        ByteChecker {
            check_mode,
            expected,
            at: 0,
        }
    }

    /// Checks the next `len` bytes. `copy` copies them, from the given offset on, into a buffer and
    /// returns how many.
    pub(super) fn check(
        &mut self,
        len: usize,
        mut copy: impl FnMut(usize, &mut [u8]) -> usize,
    ) -> io::Result<()> {
        if self.check_mode == CheckMode::None {
            return Ok(());
        }
        let mut chunk = [0; CHUNK];
        let mut done = 0;
        while done < len {
            let piece = &mut chunk[..CHUNK.min(len - done)];
            if copy(done, piece) != piece.len() {
                return Err(io::Error::other("bytes received cannot be read"));
            }
            done += piece.len();
            self.check_piece(piece)?;
        }
        Ok(())
    }

    /// As [`check`](Self::check), for bytes in a buffer.
    pub(super) fn check_slice(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self.check_mode {
            CheckMode::None => Ok(()),
            CheckMode::Touch | CheckMode::Verify => bytes
                .chunks(CHUNK)
                .try_for_each(|piece| self.check_piece(piece)),
        }
    }

    fn check_piece(&mut self, piece: &[u8]) -> io::Result<()> {
        if self.check_mode == CheckMode::Verify {
            let start = (self.at % PERIOD as u64) as usize;
            if piece != &self.expected[start..start + piece.len()] {
                let at = self.at;
                return Err(io::Error::other(format!(
                    "the received bytes differ from those sent, at byte {at} or later"
                )));
            }
        } else {
            black_box(piece.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte)));
        }
        self.at += piece.len() as u64;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sent_bytes_verify_in_pieces_of_any_size() {
        let mut source = SentBytes::new(1_000_000, 70_000);
        let mut all = Vec::new();
        while !source.next().is_empty() {
            let some = source.next().len().min(12_345);
            all.extend_from_slice(&source.next()[..some]);
            source.sent(some);
        }
        assert_eq!(all.len(), 1_000_000);
        let mut checker = ByteChecker::new(CheckMode::Verify);
        checker.check_slice(&all[..100]).unwrap();
        let rest = &all[100..];
        checker
            .check(rest.len(), |at, out| {
                out.copy_from_slice(&rest[at..at + out.len()]);
                out.len()
            })
            .unwrap();
    }

    #[test]
    fn a_missing_byte_or_a_repeated_packet_fails_the_check() {
        let all = pattern(300_000);
        let mut checker = ByteChecker::new(CheckMode::Verify);
        checker.check_slice(&all[..65_536]).unwrap();
        assert!(checker.check_slice(&all[65_537..100_000]).is_err());
        let mut checker = ByteChecker::new(CheckMode::Verify);
        checker.check_slice(&all[..65_536]).unwrap();
        assert!(checker.check_slice(&all[..65_536]).is_err());
    }
}
