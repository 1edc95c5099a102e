//! Sending and receiving bytes on a driver's connections.
//!
//! # Invariants
//! - Sent bytes are written once, into the buffer that the device reads; received bytes are copied
//!   once, out of the buffer that the device wrote.
//! - Credit is given only for bytes that the reader has copied out.

use super::Driver;
use super::errors::{DriverError, RecvError, SendError};
use super::{StreamId, StreamState};
use crate::table::sending::SendingCalls;
use crate::table::transfers::Publish;

impl Driver {
    /// Sends as many of `bytes` as credit and buffers allow, in packets as long as possible, and
    /// returns how many. Visible to the device after the next turn or flush, unless
    /// small writes are coalesced.
    pub fn send(&mut self, stream: StreamId, bytes: &[u8]) -> Result<usize, SendError> {
        if bytes.is_empty() {
            return Ok(0);
        }
        self.write(stream, bytes, Publish::Later)
    }

    /// Receives into `out`: at least one byte, or 0 at the end of the stream or for an empty `out`.
    pub fn recv(&mut self, stream: StreamId, out: &mut [u8]) -> Result<usize, RecvError> {
        let done = self.sockets.read(stream, out, false, &mut self.store);
        if done > 0 {
            return Ok(done);
        }
        self.store.check().map_err(DriverError::from)?;
        let entry = self.sockets.get(stream).ok_or(RecvError::Unknown)?;
        match entry.state {
            _ if out.is_empty() || entry.is_at_end() => Ok(0),
            StreamState::Finished => Ok(0),
            StreamState::Reset => Err(RecvError::Reset),
            StreamState::Connecting | StreamState::Connected => Err(RecvError::WouldBlock),
        }
    }

    /// Bytes that [`Driver::recv`] would return now.
    pub fn unread(&self, stream: StreamId) -> usize {
        self.sockets.unread(stream)
    }
}
