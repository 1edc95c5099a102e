//! Datagrams to send, written in place.

use std::fmt;
use std::io::{self, Write};

use zerosock_proto::Address;

use super::{Datagram, DatagramError};
use crate::table::backend::Backend;
use crate::table::datagrams::DatagramFault;
use crate::vsock::hub::Interest;
use crate::vsock::loan::Buffer;

/// A buffer for a datagram, in memory that the receiver's side reads. [`send`](Self::send) sends
/// it; dropped, it is returned unsent. Beyond the limit on loans, or for a datagram that needs
/// several of the receiver's buffers, it is a private buffer, which is copied when it is sent.
///
/// ```
/// # let (db, web) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/two.rs"));
/// use std::io::Write;
/// use zerosock::vsock::Datagram;
/// use zerosock::Port;
///
/// let ours = Datagram::bind(&db, Port::new(514))?;
/// let theirs = Datagram::bind(&web, Port::ANY)?;
/// let mut loan = theirs.loan(ours.local_addr(), 100)?;
/// write!(loan, "written where it {} read", "is")?;
/// assert_eq!(loan.send()?, 24);
/// assert_eq!(ours.recv_lease()?.to_vec(), b"written where it is read");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct DatagramLoan<'a> {
    socket: &'a Datagram,
    buffer: Buffer,
    filled: usize,
    returned: bool,
}

impl Datagram {
    /// Lends a buffer for a datagram of at most `len` bytes to `to`.
    ///
    /// # Errors
    /// As [`send_to`](Self::send_to).
    pub fn loan(&self, to: Address, len: usize) -> io::Result<DatagramLoan<'_>> {
        let parts = self.transmit(|backend| backend.loan(self.id, to, len))?;
        Ok(DatagramLoan {
            socket: self,
            buffer: Buffer::new(parts),
            filled: 0,
            returned: false,
        })
    }
}

impl DatagramLoan<'_> {
    /// Its capacity in bytes.
    pub fn capacity(&self) -> usize {
        self.buffer.len()
    }

    /// Bytes written so far.
    pub fn filled(&self) -> usize {
        self.filled
    }

    /// Whether it is in place.
    pub fn is_in_place(&self) -> bool {
        self.buffer.is_in_place()
    }

    /// Writes `bytes` at `offset`; returns how many fit. [`filled`](Self::filled) is at least their
    /// end then. Bytes between the old fill level and `offset` become zeros.
    ///
    /// # Errors
    /// [`DatagramError::Revoked`]: the peer has taken its memory back, and earlier writes are lost.
    pub fn write_at(&mut self, offset: usize, bytes: &[u8]) -> io::Result<usize> {
        let (core, revoked) = (&self.socket.core, |_| DatagramError::Revoked);
        let offset = offset.min(self.capacity());
        let filled = self.buffer.fill_gap(core, self.filled, offset);
        self.filled = filled.map_err(revoked)?;
        let written = self.buffer.write(core, offset, bytes, self.filled > 0);
        let written = written.map_err(revoked)?;
        self.filled = self.filled.max(offset + written);
        Ok(written)
    }

    /// Sends the bytes written so far as one datagram; returns how many. A loan without any is sent
    /// as an empty datagram.
    ///
    /// # Errors
    /// As [`Datagram::send_to`]; [`DatagramError::Revoked`].
    pub fn send(mut self) -> io::Result<usize> {
        self.try_send()
    }

    /// As [`send`](Self::send); on `WouldBlock` the loan is unchanged.
    pub(in crate::vsock) fn try_send(&mut self) -> io::Result<usize> {
        let socket = self.socket;
        let attempt = |backend: &mut dyn Backend| match self.queue(backend) {
            Ok(()) => {
                backend.flush();
                Some(Ok(self.filled))
            }
            Err(fault) => DatagramError::of(fault).map(Err),
        };
        let interest = Interest::Datagram(socket.id);
        let budget = || socket.waits.write_budget();
        Ok(socket.core.wait(interest, budget, attempt)??)
    }

    fn queue(&mut self, backend: &mut dyn Backend) -> Result<(), DatagramFault> {
        let prepared = (self.buffer).prepare_send(&self.socket.core, backend, self.filled > 0);
        prepared.map_err(|_| DatagramFault::Unknown)?;
        let private = self.buffer.private(self.filled);
        let backend = backend.datagrams().ok_or(DatagramFault::Unknown)?;
        let sent = backend.send_loan(self.buffer.index(), self.filled, private);
        if sent != Err(DatagramFault::WouldBlock) {
            // The backend has the buffer back and may reuse the index.
            self.returned = true;
        }
        sent
    }
}

impl Write for DatagramLoan<'_> {
    /// Appends bytes; 0 when the loan is full.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_at(self.filled, bytes)
    }

    /// Does nothing: [`DatagramLoan::send`] sends it.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for DatagramLoan<'_> {
    fn drop(&mut self) {
        if !self.returned {
            self.socket.core.return_buffer(self.buffer.index());
        }
    }
}

impl fmt::Debug for DatagramLoan<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DatagramLoan")
            .field("capacity", &self.capacity())
            .field("filled", &self.filled)
            .field("in_place", &self.is_in_place())
            .finish_non_exhaustive()
    }
}
