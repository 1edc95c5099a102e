//! Reproducible byte patterns, and their digests.

use sha2::{Digest as _, Sha256};

/// An endless stream of bytes, the same for the same seed (xorshift64*; for tests only).
pub struct Pattern {
    state: u64,
    word: [u8; 8],
    /// Number of bytes of `word` that have been returned.
    used: usize,
}

impl Pattern {
    /// Makes the stream of `seed`.
    pub fn new(seed: u64) -> Pattern {
        // Any state but zero works; the multiplication spreads neighbouring seeds.
        let state = seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        Pattern {
            state,
            word: [0; 8],
            used: 8,
        }
    }

    /// The next bytes, however the stream is cut into calls.
    pub fn fill(&mut self, out: &mut [u8]) {
        let left = out.len().min(8 - self.used);
        let (head, rest) = out.split_at_mut(left);
        head.copy_from_slice(&self.word[self.used..self.used + left]);
        self.used += left;
        for word in rest.chunks_mut(8) {
            self.state ^= self.state >> 12;
            self.state ^= self.state << 25;
            self.state ^= self.state >> 27;
            self.word = self.state.wrapping_mul(0x2545_f491_4f6c_dd1d).to_le_bytes();
            self.used = word.len();
            word.copy_from_slice(&self.word[..word.len()]);
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
    fn how_the_stream_is_cut_does_not_matter() {
        let mut pattern = Pattern::new(3);
        let mut cut = Vec::new();
        for len in [1, 7, 8, 9, 129, 3, 512] {
            let mut piece = vec![0; len];
            pattern.fill(&mut piece);
            cut.extend(piece);
        }
        assert_eq!(cut, Pattern::bytes(3, cut.len()));
    }

    #[test]
    fn digest_of_nothing_is_the_published_one() {
        assert!(sha256(b"").starts_with("e3b0c44298fc1c149afbf4c8996fb924"));
    }
}
