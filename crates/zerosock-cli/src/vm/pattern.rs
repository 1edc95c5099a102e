//! Bytes that both ends can make for themselves from a number, and their digest.

use sha2::{Digest as _, Sha256};

/// An endless stream of bytes, the same for the same seed (xorshift64*; for tests only).
pub struct Pattern(u64);

impl Pattern {
    /// The stream of `seed`.
    pub fn new(seed: u64) -> Pattern {
        // Any state but zero works; the multiplication spreads neighbouring seeds.
        Pattern(seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// The next bytes. The stream is cut into words of eight bytes per call, so both ends must
    /// fill in the same steps; [`Pattern::bytes`] makes a whole buffer.
    pub fn fill(&mut self, out: &mut [u8]) {
        for word in out.chunks_mut(8) {
            self.0 ^= self.0 >> 12;
            self.0 ^= self.0 << 25;
            self.0 ^= self.0 >> 27;
            let bytes = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d).to_le_bytes();
            word.copy_from_slice(&bytes[..word.len()]);
        }
    }

    /// The first `len` bytes of the stream of `seed`.
    pub fn bytes(seed: u64, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        Pattern::new(seed).fill(&mut out);
        out
    }
}

/// SHA-256 in hexadecimal.
pub fn sha256(data: &[u8]) -> String {
    hex(Sha256::digest(data).as_slice())
}

/// A digest in hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_differ_and_repeat() {
        assert_eq!(Pattern::bytes(7, 33), Pattern::bytes(7, 33));
        assert_ne!(Pattern::bytes(7, 33), Pattern::bytes(8, 33));
    }

    #[test]
    fn digest_of_nothing_is_the_published_one() {
        assert!(sha256(b"").starts_with("e3b0c44298fc1c149afbf4c8996fb924"));
    }
}
