//! Reads and writes the values of a snapshot, which [`Shard::save`](super::Shard::save) makes.
//!
//! Numbers are little-endian. Up to eight booleans share a byte, the first one in the lowest bit. A time is the number
//! of nanoseconds until it, or 2^64 - 1 if there is none.
//!
//! # Invariants
//! A `Reader` takes hostile bytes: it reads nothing beyond their end, and reserves no memory.

use crate::addr::{Address, Cid, Port};
use crate::time::{Duration, Instant};

/// The version that this program writes and reads.
pub(crate) const VERSION: u32 = 1;

/// Why [`Shard::restore`](super::Shard::restore) failed. The shard is unchanged.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RestoreError {
    /// Caller: the shard has connections, or RSTs to send.
    #[error("the shard is in use")]
    InUse,
    /// The bytes begin with another word.
    #[error("no snapshot of a shard")]
    NotASnapshot,
    /// The snapshot is of another version of the format.
    #[error("the snapshot has version {0}, not {VERSION}")]
    Version(u32),
    /// The snapshot is of the other half of a queue pair, or has a connection of another CID.
    #[error("the snapshot is of another endpoint")]
    OtherEndpoint,
    /// The snapshot ends too early, or bytes follow it.
    #[error("the snapshot has a wrong length")]
    Length,
    /// This value of the snapshot contradicts the others, or has no meaning.
    #[error("the snapshot has an invalid {0}")]
    Invalid(&'static str),
    /// Two connections have the same addresses.
    #[error("the snapshot has two connections with the same addresses")]
    Duplicate,
    /// [`max_connections`](super::ShardConfig::max_connections) is exceeded.
    #[error("the snapshot has too many connections")]
    TooManyConnections,
    /// System: out of memory.
    #[error("out of memory")]
    OutOfMemory,
}

/// Appends values to a snapshot.
#[derive(Default)]
pub(crate) struct Writer(pub(crate) Vec<u8>);

impl Writer {
    pub(crate) fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    pub(crate) fn u32s<const N: usize>(&mut self, values: [u32; N]) {
        self.0.extend(values.into_iter().flat_map(u32::to_le_bytes));
    }

    pub(crate) fn u64(&mut self, value: u64) {
        self.0.extend(value.to_le_bytes());
    }

    /// A number of things in memory.
    pub(crate) fn count(&mut self, count: usize) {
        self.u32s([u32::try_from(count).unwrap_or(u32::MAX)]);
    }

    pub(crate) fn bits<const N: usize>(&mut self, bits: [bool; N]) {
        const { assert!(N <= 8) };
        let bits = bits.into_iter().rev();
        self.u8(bits.fold(0, |byte, bit| byte << 1 | u8::from(bit)));
    }

    pub(crate) fn address(&mut self, address: Address) {
        self.u32s([address.cid.get(), address.port.get()]);
    }

    pub(crate) fn time(&mut self, now: Instant, time: Option<Instant>) {
        let left = time.map(|time| time.saturating_duration_since(now));
        let nanos = left.map(|left| u64::try_from(left.as_nanos()).unwrap_or(u64::MAX));
        self.u64(nanos.unwrap_or(u64::MAX));
    }
}

/// The rest of a snapshot.
pub(crate) struct Reader<'a>(pub(crate) &'a [u8]);

impl Reader<'_> {
    fn array<const N: usize>(&mut self) -> Result<[u8; N], RestoreError> {
        let (value, rest) = self.0.split_first_chunk().ok_or(RestoreError::Length)?;
        self.0 = rest;
        Ok(*value)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, RestoreError> {
        Ok(u8::from_le_bytes(self.array()?))
    }

    pub(crate) fn u32s<const N: usize>(&mut self) -> Result<[u32; N], RestoreError> {
        let mut values = [0; N];
        for value in &mut values {
            *value = u32::from_le_bytes(self.array()?);
        }
        Ok(values)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, RestoreError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// A number of things.
    pub(crate) fn count(&mut self) -> Result<u32, RestoreError> {
        let [count] = self.u32s()?;
        Ok(count)
    }

    pub(crate) fn bits<const N: usize>(&mut self) -> Result<[bool; N], RestoreError> {
        const { assert!(N <= 8) };
        let byte = u32::from(self.u8()?);
        if byte >> N != 0 {
            return Err(RestoreError::Invalid("flag"));
        }
        Ok(core::array::from_fn(|bit| byte >> bit & 1 != 0))
    }

    pub(crate) fn address(&mut self) -> Result<Address, RestoreError> {
        let [cid, port] = self.u32s()?;
        Ok(Address::new(Cid::new(cid), Port::new(port)))
    }

    pub(crate) fn time(&mut self, now: Instant) -> Result<Option<Instant>, RestoreError> {
        let nanos = self.u64()?;
        Ok((nanos != u64::MAX).then(|| now + Duration::from_nanos(nanos)))
    }
}
