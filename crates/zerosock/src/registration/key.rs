//! The key of a VM, and the tags by which its agent shows that it has it.
//!
//! # Invariants
//! - A tag is valid for one request, at one place of one stream: it covers the nonce of the stream, the number of the
//!   request and all of its bytes.
//! - Tags are compared in constant time.

use std::fmt;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

/// Bytes of a tag.
pub const TAG_LEN: usize = 32;
/// The shortest key, in bytes.
pub const MIN_KEY: usize = 16;
/// Separates these tags from other uses of the key.
const LABEL: &[u8] = b"zerosock guest request\0";
/// In its place if there is no key, so that no key has the tags of none.
const LABEL_WITHOUT_KEY: &[u8] = b"zerosock guest request without key\0";

/// The number that the daemon chooses for a stream: random, and never used twice.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Nonce(pub [u8; 32]);

/// Bytes that are no key.
#[derive(Copy, Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    /// Fewer than [`MIN_KEY`].
    #[error("a key of {0} bytes, at least {MIN_KEY} are needed")]
    TooShort(usize),
    /// Zeroes only, as in a file that was allocated and never written.
    #[error("a key of zeroes only is no secret")]
    Zeroes,
}

/// The secret that a daemon shares with the agent of one VM.
#[derive(Clone)]
pub struct GuestKey(
    /// Has read key and label.
    Hmac<Sha256>,
);

impl GuestKey {
    /// The key with these bytes, which are random. All of them count, also a newline at the end: a side that reads the
    /// key from a file passes the whole file, and strips nothing.
    ///
    /// # Errors
    /// [`KeyError`]: there are fewer than [`MIN_KEY`], or all are zero.
    pub fn new(bytes: &[u8]) -> Result<GuestKey, KeyError> {
        let short = KeyError::TooShort(bytes.len());
        if bytes.len() < MIN_KEY {
            return Err(short);
        }
        if bytes.iter().all(|&byte| byte == 0) {
            return Err(KeyError::Zeroes);
        }
        // Any length is taken.
        let keyed: Hmac<Sha256> = Hmac::new_from_slice(bytes).map_err(|_| short)?;
        Ok(GuestKey(keyed.chain_update(LABEL)))
    }

    /// No secret: for a VM in which every process that may bind a port below 1024 may name pages, and with them read and
    /// write all memory of the VM.
    pub fn none() -> GuestKey {
        // A key is filled up with zeroes, so this is the empty one.
        let keyed: Hmac<Sha256> = Hmac::new(&Default::default());
        GuestKey(keyed.chain_update(LABEL_WITHOUT_KEY))
    }
}

/// By the tags that keys have, so that keys are not to be kept in another form.
impl PartialEq for GuestKey {
    fn eq(&self, other: &GuestKey) -> bool {
        self.0.clone().finalize() == other.0.clone().finalize()
    }
}

impl Eq for GuestKey {}

impl fmt::Debug for GuestKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GuestKey")
    }
}

/// The tags of the requests of one stream, in their order.
#[derive(Clone, Debug)]
pub(crate) struct StreamTags {
    /// Has read key, label and nonce.
    begun: Hmac<Sha256>,
    /// The number of the next request.
    number: u32,
}

impl StreamTags {
    pub(crate) fn new(key: &GuestKey, nonce: &Nonce) -> StreamTags {
        let begun = key.0.clone().chain_update(nonce.0);
        StreamTags { begun, number: 0 }
    }

    fn over(&self, message: &[u8]) -> Hmac<Sha256> {
        let number = self.number.to_le_bytes();
        self.begun
            .clone()
            .chain_update(number)
            .chain_update(message)
    }

    /// The tag of the next request, which has these bytes.
    pub(crate) fn next(&mut self, message: &[u8]) -> [u8; TAG_LEN] {
        let tag = self.over(message).finalize().into_bytes().into();
        self.number = self.number.wrapping_add(1);
        tag
    }

    /// Whether this is the tag of the next request. If it is, the one behind that is the next.
    pub(crate) fn verify(&mut self, message: &[u8], tag: &[u8]) -> bool {
        let valid = self.over(message).verify_slice(tag).is_ok();
        self.number = self.number.wrapping_add(u32::from(valid));
        valid
    }
}
