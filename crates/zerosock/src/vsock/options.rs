//! Options of all sockets: buffer sizes, time-outs, linger.
//!
//! # Invariants
//! - Options are validated when they are set, so stored options are valid.
//! - An accepted socket starts with the options of its listener.
//! - Each change of a receive buffer is announced to the peer.

use std::io::{Error, ErrorKind};
use std::time::Duration;

/// The default receive buffer in bytes, as on Linux.
pub(super) const DEFAULT_BUFFER: u32 = 256 << 10;
/// The default lower bound of the receive buffer in bytes, as on Linux.
const DEFAULT_MIN: u32 = 128;

/// Why an option cannot be set: the caller's fault, `InvalidInput`. Nothing was changed.
///
/// ```
/// # let (host, process) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/pair.rs"));
/// use std::io::ErrorKind;
/// use zerosock::vsock::OptionError;
///
/// process.set_buffer_size(64 << 10)?;
/// let error = process.set_low_water(64 * 1024 + 1).unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::InvalidInput);
/// let reason = error.get_ref().and_then(|inner| inner.downcast_ref::<OptionError>());
/// let above = OptionError::LowWaterAboveBuffer { low_water: 65537, buffer: 65536 };
/// assert_eq!(reason, Some(&above));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Copy, Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum OptionError {
    /// A receive buffer of 0 bytes could receive nothing.
    #[error("a receive buffer has at least one byte")]
    EmptyBuffer,
    /// The lower bound is above the upper one.
    #[error("the smallest buffer, {min} bytes, is larger than the largest, {max} bytes")]
    MinAboveMax {
        /// Bytes.
        min: u32,
        /// Bytes.
        max: u32,
    },
    /// A read would wait forever for more bytes than the buffer holds.
    #[error("a low-water mark of {low_water} bytes, above the buffer of {buffer} bytes")]
    LowWaterAboveBuffer {
        /// Bytes.
        low_water: u32,
        /// Bytes.
        buffer: u32,
    },
    /// A time-out of zero. For calls that do not block use `set_nonblocking`.
    #[error("a time-out of zero: use set_nonblocking for calls that do not block")]
    ZeroTimeout,
}

impl From<OptionError> for Error {
    fn from(error: OptionError) -> Error {
        Error::new(ErrorKind::InvalidInput, error)
    }
}

/// The options of a socket. A listener passes them on to accepted sockets.
#[derive(Copy, Clone, Debug)]
pub(super) struct Options {
    /// Receive buffer in bytes; `None`: the endpoint's default.
    pub(super) buffer: Option<u32>,
    /// Bounds of the buffer.
    min: u32,
    max: u32,
    /// `None`: the endpoint's default.
    pub(super) connect_timeout: Option<Duration>,
    /// How long closing waits for the peer; zero resets the connection.
    pub(super) linger: Option<Duration>,
    /// Least bytes that a read waits for; at least 1.
    pub(super) low_water: u32,
    pub(super) read_timeout: Option<Duration>,
    pub(super) write_timeout: Option<Duration>,
}

impl Options {
    /// The defaults of an endpoint with receive buffers of `window` bytes.
    pub(super) fn new(window: u32) -> Options {
        Options {
            buffer: None,
            min: DEFAULT_MIN.min(window),
            max: DEFAULT_BUFFER.max(window),
            connect_timeout: None,
            linger: None,
            low_water: 1,
            read_timeout: None,
            write_timeout: None,
        }
    }

    /// Smallest and largest buffer.
    pub(super) fn bounds(&self) -> (u32, u32) {
        (self.min, self.max)
    }

    /// Sets the buffer to `bytes`, clamped to the bounds; returns the result.
    pub(super) fn set_buffer(&mut self, bytes: u32) -> Result<u32, OptionError> {
        if bytes == 0 {
            return Err(OptionError::EmptyBuffer);
        }
        let bytes = bytes.clamp(self.min, self.max);
        self.buffer = Some(bytes);
        Ok(bytes)
    }

    /// Sets the bounds of a buffer that has `now` bytes; returns its size within them.
    pub(super) fn set_bounds(
        &mut self,
        min: u32,
        max: u32,
        now: u32,
    ) -> Result<Option<u32>, OptionError> {
        if min == 0 {
            return Err(OptionError::EmptyBuffer);
        }
        if min > max {
            return Err(OptionError::MinAboveMax { min, max });
        }
        (self.min, self.max) = (min, max);
        let bytes = now.clamp(min, max);
        if bytes == now {
            return Ok(None);
        }
        self.buffer = Some(bytes);
        Ok(Some(bytes))
    }

    /// Sets the low-water mark for a buffer of `buffer` bytes; 0 becomes 1. Returns the mark.
    pub(super) fn set_low_water(&mut self, bytes: u32, buffer: u32) -> Result<u32, OptionError> {
        if bytes > buffer {
            return Err(OptionError::LowWaterAboveBuffer {
                low_water: bytes,
                buffer,
            });
        }
        self.low_water = bytes.max(1);
        Ok(self.low_water)
    }
}

/// Validates a time-out: not zero.
pub(super) fn timeout(timeout: Option<Duration>) -> Result<Option<Duration>, OptionError> {
    match timeout {
        Some(Duration::ZERO) => Err(OptionError::ZeroTimeout),
        timeout => Ok(timeout),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffer_size_is_clamped_to_its_bounds() {
        let mut options = Options::new(DEFAULT_BUFFER);
        assert_eq!(options.bounds(), (128, 262_144));
        assert_eq!(options.set_buffer(1), Ok(128));
        assert_eq!(options.set_buffer(u32::MAX), Ok(262_144));
        assert_eq!(options.set_buffer(0), Err(OptionError::EmptyBuffer));
        assert_eq!(options.buffer, Some(262_144), "as it was");
        assert_eq!(options.set_bounds(64, 4096, 262_144), Ok(Some(4096)));
        assert_eq!(options.set_buffer(1), Ok(64));
        assert_eq!(options.set_bounds(64, 1 << 20, 64), Ok(None));
        let above = OptionError::MinAboveMax { min: 2, max: 1 };
        assert_eq!(options.set_bounds(2, 1, 64), Err(above));
        assert_eq!(options.set_bounds(0, 1, 64), Err(OptionError::EmptyBuffer));
        assert_eq!(options.bounds(), (64, 1 << 20), "as they were");
    }

    #[test]
    fn upper_bound_of_the_buffer_is_at_least_the_window_of_the_endpoint() {
        assert_eq!(Options::new(8 << 20).bounds(), (128, 8 << 20));
        assert_eq!(Options::new(64).bounds(), (64, 262_144));
    }
}
