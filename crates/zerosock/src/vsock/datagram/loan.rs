//! Datagrams to send, written in place.

use std::fmt;
use std::io::{self, Write};

use zerosock_proto::Address;

use super::{Datagram, DatagramError};
use crate::table::datagrams::DatagramFault;
use crate::table::leases::Entered;
use crate::table::sockets::BufferPlace;
use crate::table::{backend::Backend, transfers::LoanParts};
use crate::vsock::hub::Interest;
use crate::vsock::loan::ZEROS;

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
    index: u32,
    len: usize,
    place: Option<BufferPlace>,
    /// The bytes of a loan that is not, or no longer, in place.
    private: Vec<u8>,
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
        let LoanParts { index, len, place } = parts;
        let private = match place {
            Some(_) => Vec::new(),
            None => vec![0; len],
        };
        Ok(DatagramLoan {
            socket: self,
            index,
            len,
            place,
            private,
            filled: 0,
            returned: false,
        })
    }
}

impl DatagramLoan<'_> {
    /// Its capacity in bytes.
    pub fn capacity(&self) -> usize {
        self.len
    }

    /// Bytes written so far.
    pub fn filled(&self) -> usize {
        self.filled
    }

    /// Whether it is in place.
    pub fn is_in_place(&self) -> bool {
        self.place.is_some()
    }

    /// Writes `bytes` at `offset`; returns how many fit. [`filled`](Self::filled) is at least their
    /// end then. Bytes between the old fill level and `offset` become zeros.
    ///
    /// # Errors
    /// [`DatagramError::Revoked`]: the peer has taken its memory back, and earlier writes are lost.
    pub fn write_at(&mut self, offset: usize, bytes: &[u8]) -> io::Result<usize> {
        let offset = offset.min(self.len);
        while self.filled < offset {
            let part = ZEROS.len().min(offset - self.filled);
            match self.put_at(self.filled, &ZEROS[..part])? {
                0 => break,
                done => self.filled += done,
            }
        }
        let written = self.put_at(offset, bytes)?;
        self.filled = self.filled.max(offset + written);
        Ok(written)
    }

    /// Writes `bytes` at `offset`, which is within the capacity; returns how many fit.
    fn put_at(&mut self, offset: usize, bytes: &[u8]) -> Result<usize, DatagramError> {
        let fits = bytes.len().min(self.len - offset);
        let bytes = bytes.get(..fits).unwrap_or(bytes);
        let core = &self.socket.core;
        let mut written = bytes.len();
        if self.place.is_some() && !self.enter() {
            self.moved(core.lock().backend())?;
        }
        if let Some(BufferPlace::InPlace {
            memory,
            pieces,
            offset: start,
        }) = &self.place
        {
            written = memory.write(pieces, start + offset, bytes);
            core.end_access(self.index);
        } else if let Some(to) = self.private.get_mut(offset..offset + fits) {
            to.copy_from_slice(bytes);
        }
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
        if self.place.is_some() {
            if self.enter() {
                // Not `Core::end_access`: this thread holds the lock; releasing it returns dropped
                // leases.
                self.socket.core.leases().leave(self.index);
            } else {
                self.moved(backend).map_err(|_| DatagramFault::Unknown)?;
            }
        }
        let private = self.place.is_none().then_some(&self.private[..]);
        let private = private.map(|all| all.get(..self.filled).unwrap_or(all));
        let backend = backend.datagrams().ok_or(DatagramFault::Unknown)?;
        let sent = backend.send_loan(self.index, self.filled, private);
        if sent != Err(DatagramFault::WouldBlock) {
            // The backend has the buffer back and may reuse the index.
            self.returned = true;
        }
        sent
    }

    /// Begins a write. False: the endpoint has moved the loan out of the peer's memory.
    fn enter(&self) -> bool {
        self.socket.core.leases().enter_to_write(self.index) == Entered::InPlace
    }

    /// Makes the loan private after the endpoint has moved it; takes what was written from the
    /// copy.
    fn moved(&mut self, backend: &mut dyn Backend) -> Result<(), DatagramError> {
        match backend.copy_of(self.index) {
            Some((bytes, start)) => {
                let bytes = bytes.get(start..).unwrap_or(&[]);
                self.private.extend_from_slice(bytes);
            }
            None if self.filled > 0 => return Err(DatagramError::Revoked),
            None => {}
        }
        self.private.resize(self.len, 0);
        self.place = None;
        Ok(())
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
            self.socket.core.return_buffer(self.index);
        }
    }
}

impl fmt::Debug for DatagramLoan<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DatagramLoan")
            .field("capacity", &self.len)
            .field("filled", &self.filled)
            .field("in_place", &self.is_in_place())
            .finish_non_exhaustive()
    }
}
