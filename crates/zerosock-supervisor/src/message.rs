//! Wire form of the messages: one datagram each, of a header and up to 64 operations. Numbers are
//! little-endian.
//!
//! | offset | size | header of the message |
//! |---|---|---|
//! | 0 | 2 | version, 1 |
//! | 2 | 2 | operations |
//!
//! | offset | size | header of an operation |
//! |---|---|---|
//! | 0 | 1 | kind |
//! | 1 | 1 | descriptors of a `Put`, otherwise 0 |
//! | 2 | 2 | bytes of the key that follows |
//! | 4 | 4 | other bytes that follow, which are the new key in a `Rename` and the text in a `Notify` |
//!
//! # Invariants
//! - [`decode`] checks every bound and never panics. [`encode`] returns only what `decode` accepts.

use crate::Error;

/// Most bytes of a key.
pub const MAX_KEY: usize = 96;
/// Most bytes of an entry or a write.
pub const MAX_BYTES: usize = 16 * 1024;
/// Most descriptors of a batch.
pub const MAX_FDS: usize = 64;
/// Most operations of a batch.
pub const MAX_OPERATIONS: usize = 64;
/// Most bytes of a batch in its wire form: 8 for each operation, its keys and its bytes.
pub const MAX_DATAGRAM: usize = 128 * 1024;
/// Most bytes of a `Notify`.
const MAX_NOTIFY: usize = 1024;
/// Bytes of an `End`.
const LIMITS_LEN: usize = 3 * size_of::<u64>();
const VERSION: u16 = 1;

/// A part of a message. The last eight are messages of their own.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Operation<'a> {
    /// Inserts an entry with this many descriptors at the end, in the place of one with the same key.
    Put(&'a str, &'a [u8], usize),
    /// Removes the entry with this key and those below it, see [`is_below`].
    Remove(&'a str),
    /// Moves an entry to the end, with another key, in the place of one with that key.
    Rename(&'a str, &'a str),
    /// Writes to the first descriptor of an entry, a Unix stream socket.
    Write(&'a str, &'a [u8]),
    /// The worker process makes progress.
    Alive,
    /// States for the service manager, sd_notify(3).
    Notify(&'a str),
    /// The worker process ends on purpose.
    Stopping,
    /// The supervisor has sent all entries, each as a `Put`. These bounds hold for the store.
    End(Limits),
    /// A process waits for its entries.
    Take,
    /// The process that waits has all entries, and serves from now on.
    TakeOver,
    /// The worker process has stopped and has written down what the process that waits for it needs.
    HandedOver,
    /// From the supervisor: that process does not take over; go on.
    Resume,
}
use Operation::{
    Alive, End, HandedOver, Notify, Put, Remove, Rename, Resume, Stopping, Take, TakeOver, Write,
};

/// Bounds of the store.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Limits {
    /// Entries.
    pub entries: u64,
    /// Bytes of all entries, with their keys.
    pub bytes: u64,
    /// Descriptors of all entries.
    pub descriptors: u64,
}

/// Whether `key` is `prefix` or continues it after a slash: `vm/3/err` is below `vm/3` and below `vm/3/`,
/// `vm/30` is below neither.
pub(crate) fn is_below(key: &str, prefix: &str) -> bool {
    let rest = key.strip_prefix(prefix);
    rest.is_some_and(|rest| rest.is_empty() || prefix.ends_with('/') || rest.starts_with('/'))
}

/// Number of descriptors of a message.
pub(crate) fn descriptors(operations: &[Operation<'_>]) -> usize {
    let counts = operations.iter().map(|operation| match operation {
        Put(_, _, fds) => *fds,
        _ => 0,
    });
    counts.sum()
}

/// The wire form of a message.
pub(crate) fn encode(operations: &[Operation<'_>]) -> Result<Vec<u8>, Error> {
    let too_long = |_| Error::Invalid("a length is out of range");
    let count = u16::try_from(operations.len()).map_err(too_long)?;
    let mut out = [VERSION.to_le_bytes(), count.to_le_bytes()].concat();
    for operation in operations {
        let bounds;
        let (kind, fds, key, bytes) = match *operation {
            Put(key, bytes, fds) => (1, fds, key, bytes),
            Remove(prefix) => (2, 0, prefix, &[][..]),
            Rename(from, to) => (3, 0, from, to.as_bytes()),
            Write(key, bytes) => (4, 0, key, bytes),
            Alive => (5, 0, "", &[][..]),
            Notify(text) => (6, 0, "", text.as_bytes()),
            Stopping => (7, 0, "", &[][..]),
            End(Limits {
                entries,
                bytes,
                descriptors,
            }) => {
                bounds = [entries, bytes, descriptors].map(u64::to_le_bytes).concat();
                (8, 0, "", &bounds[..])
            }
            Take => (9, 0, "", &[][..]),
            TakeOver => (10, 0, "", &[][..]),
            HandedOver => (11, 0, "", &[][..]),
            Resume => (12, 0, "", &[][..]),
        };
        out.extend([kind, u8::try_from(fds).map_err(too_long)?]);
        out.extend(u16::try_from(key.len()).map_err(too_long)?.to_le_bytes());
        out.extend(u32::try_from(bytes.len()).map_err(too_long)?.to_le_bytes());
        out.extend(key.as_bytes());
        out.extend(bytes);
    }
    decode(&out, descriptors(operations))?;
    Ok(out)
}

/// Checks a datagram that came with this many descriptors.
pub(crate) fn decode(datagram: &[u8], fds: usize) -> Result<Vec<Operation<'_>>, Error> {
    let mut rest = Reader(datagram);
    if datagram.len() > MAX_DATAGRAM || u16::from_le_bytes(rest.array()?) != VERSION {
        return Err(Error::Invalid("unknown version, or too long"));
    }
    let count = usize::from(u16::from_le_bytes(rest.array()?));
    if count > MAX_OPERATIONS {
        return Err(Error::Invalid("too many operations"));
    }
    let operations = (0..count)
        .map(|_| rest.operation())
        .collect::<Result<Vec<_>, _>>()?;
    if !rest.0.is_empty() {
        return Err(Error::Invalid("surplus bytes"));
    }
    if fds > MAX_FDS || fds != descriptors(&operations) {
        return Err(Error::Invalid(
            "too many descriptors, or others than its operations say",
        ));
    }
    Ok(operations)
}

/// What has not been read yet.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn operation(&mut self) -> Result<Operation<'a>, Error> {
        let [kind, fds] = self.array()?;
        let key = usize::from(u16::from_le_bytes(self.array()?));
        let bytes = usize::try_from(u32::from_le_bytes(self.array()?)).unwrap_or(usize::MAX);
        let (key, bytes) = (self.bytes(key)?, self.bytes(bytes)?);
        if bytes.len() > MAX_BYTES || (fds > 0 && kind != 1) {
            return Err(Error::Invalid(
                "too long, or with descriptors that it cannot have",
            ));
        }
        Ok(match (kind, key, bytes) {
            (1, ..) => Put(valid_key(key)?, bytes, usize::from(fds)),
            (2, _, []) => Remove(valid_key(key)?),
            (3, ..) => Rename(valid_key(key)?, valid_key(bytes)?),
            (4, ..) => Write(valid_key(key)?, bytes),
            (5, [], []) => Alive,
            (6, [], _) => Notify(permitted_states(bytes)?),
            (7, [], []) => Stopping,
            (8, [], _) if bytes.len() == LIMITS_LEN => {
                let mut bounds = Reader(bytes);
                let mut bound = || Ok::<_, Error>(u64::from_le_bytes(bounds.array()?));
                End(Limits {
                    entries: bound()?,
                    bytes: bound()?,
                    descriptors: bound()?,
                })
            }
            (9, [], []) => Take,
            (10, [], []) => TakeOver,
            (11, [], []) => HandedOver,
            (12, [], []) => Resume,
            _ => return Err(Error::Invalid("unknown operation")),
        })
    }

    fn bytes(&mut self, count: usize) -> Result<&'a [u8], Error> {
        let parts = self.0.split_at_checked(count);
        let (bytes, rest) = parts.ok_or(Error::Invalid("truncated"))?;
        self.0 = rest;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Error> {
        self.bytes(N)?
            .try_into()
            .map_err(|_| Error::Invalid("truncated"))
    }
}

fn valid_key(bytes: &[u8]) -> Result<&str, Error> {
    let valid = (1..=MAX_KEY).contains(&bytes.len()) && bytes.iter().all(u8::is_ascii_graphic);
    let key = std::str::from_utf8(bytes).ok().filter(|_| valid);
    key.ok_or(Error::Invalid("a key is empty, too long or not printable"))
}

/// A worker process that an attacker controls must not name another main process (MAINPID) or leave
/// descriptors with the service manager (FDSTORE), so only these states are permitted.
fn permitted_states(bytes: &[u8]) -> Result<&str, Error> {
    let permitted = |line: &str| match line.split_once('=') {
        Some(("READY" | "RELOADING" | "STOPPING", value)) => value == "1",
        Some(("MONOTONIC_USEC", value)) => value.bytes().all(|byte| byte.is_ascii_digit()),
        Some(("STATUS", value)) => !value.contains(char::is_control),
        _ => false,
    };
    let text = std::str::from_utf8(bytes)
        .ok()
        .filter(|text| text.len() <= MAX_NOTIFY);
    let text = text.filter(|text| text.split('\n').all(permitted));
    text.ok_or(Error::Invalid(
        "a state for the service manager is not permitted",
    ))
}

#[cfg(test)]
#[path = "message_tests.rs"]
mod tests;
