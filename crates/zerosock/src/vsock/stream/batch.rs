//! Many packets, sent with one lock and one notification.
//!
//! # Invariants
//! - The lock is held from the first packet on, and released only to wait for room.
//! - Written packets are published to the peer before such a wait, and when the batch is dropped.

use std::fmt;
use std::io;

use crate::table::sockets::StreamId;
use crate::table::{
    backend::Backend,
    transfers::{Publish, SendFault},
};
use crate::vsock::connection::Connection;
use crate::vsock::hub::{Interest, Locked};

/// Many packets, sent together. It keeps the endpoint locked: calls of other threads block, calls
/// of this thread panic. Leases, loans and sockets may be dropped meanwhile.
///
/// ```
/// # let (host, process) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/pair.rs"));
/// let mut batch = process.batch();
/// for line in ["one", "two", "three"] {
///     batch.write(line.as_bytes())?;
/// }
/// drop(batch);
/// let mut lines = Vec::new();
/// while lines.len() < 3 {
///     host.recv_each(16, |message| lines.push(message.to_vec()))?;
/// }
/// assert_eq!(lines[2], b"three");
/// # Ok::<(), std::io::Error>(())
/// ```
///
/// A batch cannot outlive its stream:
///
/// ```compile_fail,E0505
/// # use zerosock::vsock::Stream;
/// fn batch_outlives_stream(stream: Stream) {
///     let mut batch = stream.batch();
///     drop(stream);
///     batch.flush();
/// }
/// ```
pub struct Batch<'a> {
    pub(super) conn: &'a Connection,
    pub(super) locked: Option<Locked<'a>>,
}

impl Batch<'_> {
    /// Appends all of `bytes` as a packet, or as several if one buffer is too small; waits for room
    /// as the stream's other calls do.
    ///
    /// # Errors
    /// `WouldBlock` and `TimedOut` without room: some of the bytes may be sent. Else a
    /// [`StreamError`](crate::vsock::StreamError) is the source.
    pub fn write(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let sent = self.transmit(|backend, id| backend.write(id, bytes, Publish::Later))?;
            self.conn.counts.add_sent_copied(sent);
            bytes = bytes.get(sent..).unwrap_or(&[]);
        }
        Ok(())
    }

    /// Publishes the packets written so far to the peer.
    pub fn flush(&mut self) {
        if let Some(locked) = &mut self.locked {
            locked.backend().flush();
        }
    }

    #[inline]
    fn transmit<T>(
        &mut self,
        mut put: impl FnMut(&mut dyn Backend, StreamId) -> Result<T, SendFault>,
    ) -> io::Result<T> {
        let conn = self.conn;
        // The common case: there is room, and the lock is held.
        if let Some(locked) = &mut self.locked
            && let Ok(done) = put(locked.backend(), conn.id)
        {
            return Ok(done);
        }
        let budget = conn.waits.write_budget();
        let attempt = |backend: &mut dyn Backend| match put(backend, conn.id) {
            Ok(done) => Some(Ok(done)),
            Err(fault) => conn.send_fault(backend, fault),
        };
        self.flush();
        let interest = Interest::Conn(conn.id);
        Ok(conn
            .core
            .wait_with(&mut self.locked, interest, budget, attempt)??)
    }
}

impl Drop for Batch<'_> {
    fn drop(&mut self) {
        self.flush();
    }
}

impl fmt::Debug for Batch<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batch")
            .field("local", &self.conn.local)
            .field("peer", &self.conn.peer)
            .finish_non_exhaustive()
    }
}
