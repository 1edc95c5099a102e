//! The bytes between a client and the host: a header from the client, then a pattern in each direction, without an end or
//! of a length.

use std::io;

use zerosock_cli::vm::pattern::Pattern;

/// Bytes of a header.
pub const HEADER: usize = 24;
/// The length of patterns without an end.
pub const ENDLESS: u64 = u64::MAX;

/// What a connection begins with.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Header {
    /// Of both patterns.
    pub seed: u64,
    /// Bytes of each pattern.
    pub len: u64,
    /// Whether the host sends slowly: receive buffers are free at all times then.
    pub is_paced: bool,
}

impl Header {
    /// As it is sent.
    pub fn encode(&self) -> [u8; HEADER] {
        let words = [self.seed, self.len, self.is_paced.into()];
        let mut bytes = [0; HEADER];
        for (part, word) in bytes.chunks_exact_mut(8).zip(words) {
            part.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Reads what was sent.
    pub fn decode(bytes: &[u8; HEADER]) -> Header {
        let mut words = [0; 3];
        for (part, word) in bytes.chunks_exact(8).zip(&mut words) {
            *word = u64::from_le_bytes(part.try_into().unwrap_or_default());
        }
        let [seed, len, is_paced] = words;
        Header {
            seed,
            len,
            is_paced: is_paced != 0,
        }
    }

    /// What the client sends.
    pub fn to_host(&self) -> Pattern {
        Pattern::new(self.seed)
    }

    /// What the host sends.
    pub fn from_host(&self) -> Pattern {
        Pattern::new(!self.seed)
    }
}

/// Checks received bytes.
pub struct Expected {
    pattern: Pattern,
    next: Vec<u8>,
    /// Bytes that were right.
    pub count: u64,
}

impl Expected {
    /// Expects this pattern.
    pub fn new(pattern: Pattern) -> Expected {
        Expected {
            pattern,
            next: Vec::new(),
            count: 0,
        }
    }

    /// Checks the next bytes.
    ///
    /// # Errors
    /// A byte is wrong.
    pub fn check(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.next.resize(bytes.len(), 0);
        self.pattern.fill(&mut self.next);
        let pairs = bytes.iter().zip(&self.next);
        if bytes != self.next
            && let Some(at) = pairs
                .into_iter()
                .position(|(found, wanted)| found != wanted)
        {
            let part = |bytes: &[u8]| bytes.iter().skip(at).take(16).copied().collect::<Vec<_>>();
            let (at, found, wanted) = (self.count + at as u64, part(bytes), part(&self.next));
            let text =
                format!("foreign bytes at {at} of a stream: {found:x?}, expected {wanted:x?}");
            return Err(io::Error::other(text));
        }
        self.count += bytes.len() as u64;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_read_as_it_was_sent() {
        let header = Header {
            seed: 7,
            len: 1 << 40,
            is_paced: true,
        };
        assert_eq!(Header::decode(&header.encode()), header);
    }

    #[test]
    fn a_wrong_byte_is_found_wherever_it_is() {
        let mut bytes = Pattern::bytes(3, 100);
        let mut expected = Expected::new(Pattern::new(3));
        expected.check(&bytes[..41]).unwrap();
        bytes[50] ^= 1;
        let error = expected.check(&bytes[41..]).unwrap_err().to_string();
        assert!(error.contains("at 50 of a stream"), "{error}");
    }
}
