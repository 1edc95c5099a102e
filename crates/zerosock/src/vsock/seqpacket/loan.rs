//! Messages to send, written in place.
//!
//! # Invariants
//! - The peer sees nothing of a message before it is sent, and then all of it.
//! - A dropped loan returns its buffers and its credit.

use std::fmt;
use std::io::{self, IoSlice, IoSliceMut, Write};

use crate::table::leases::NONE;
use crate::table::{
    backend::Backend,
    transfers::{LoanParts, LoanedPart, SendFault},
};
use crate::vsock::connection::Connection;
use crate::vsock::errors::StreamError;
use crate::vsock::hub::Interest;
use crate::vsock::loan::{Buffer, LoanSlice, ZEROS, append_each};

/// The buffers for one message, in memory that the peer reads. [`send`](Self::send) sends the whole
/// message; dropped, the buffers are returned unsent. Nothing of it is visible to the peer before.
///
/// Bytes are written by [`Write`] (each call appends) and by [`write_at`](Self::write_at), with any
/// peer. Plain slices ([`as_mut_slices`](Self::as_mut_slices),
/// [`with_io_slices`](Self::with_io_slices)) of a loan in place need trust, as for a
/// [`Loan`](crate::vsock::Loan).
///
/// ```
/// use std::io::Write;
///
/// # let (host, process) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/messages.rs"));
/// let mut loan = process.loan(200_000)?;
/// loan.write_all(&[7; 100_000])?;
/// loan.write_all(b"written where it will be read")?;
/// assert!(loan.is_in_place());
/// assert_eq!(loan.send()?, 100_029);
/// let message = host.recv_leases()?.expect("a message");
/// assert_eq!((message.len(), message.is_in_place()), (100_029, true));
/// # Ok::<(), std::io::Error>(())
/// ```
///
/// A loan that was sent is gone:
///
/// ```compile_fail,E0382
/// # use zerosock::vsock::SeqPacket;
/// # use std::io::Write;
/// fn loan_used_after_send(connection: &SeqPacket) -> std::io::Result<()> {
///     let mut loan = connection.loan(100)?;
///     loan.write_all(b"hello")?;
///     loan.send()?;
///     loan.write_all(b"too late")
/// }
/// ```
///
/// Nor can it outlive its connection:
///
/// ```compile_fail,E0505
/// # use zerosock::vsock::SeqPacket;
/// fn loan_outlives_connection(connection: SeqPacket) {
///     let loan = connection.loan(100).unwrap();
///     drop(connection);
///     loan.send().unwrap();
/// }
/// ```
///
/// Nor can it be sent while its slices are borrowed:
///
/// ```compile_fail,E0505
/// # use zerosock::vsock::MessageLoan;
/// fn filled_after_send(mut loan: MessageLoan<'_>) {
///     let mut slices = loan.as_mut_slices().unwrap();
///     loan.send().unwrap();
///     slices[0][0] = 1;
/// }
/// ```
pub struct MessageLoan<'a> {
    conn: &'a Connection,
    /// In order. Only the last may be private from the start.
    buffers: Vec<Buffer>,
    /// Number of buffers, from the first, that the backend has back.
    returned: usize,
    len: usize,
    /// Bytes written, from the beginning.
    filled: usize,
    /// The application had slices of the whole loan, and may have written any part.
    slices_taken: bool,
}

impl<'a> MessageLoan<'a> {
    pub(super) fn new(conn: &'a Connection, parts: Vec<LoanParts>) -> MessageLoan<'a> {
        let buffers: Vec<Buffer> = parts.into_iter().map(Buffer::new).collect();
        MessageLoan {
            conn,
            len: buffers.iter().map(Buffer::len).sum(),
            buffers,
            returned: 0,
            filled: 0,
            slices_taken: false,
        }
    }

    /// Its capacity in bytes, as requested.
    pub fn capacity(&self) -> usize {
        self.len
    }

    /// Bytes written so far.
    pub fn filled(&self) -> usize {
        self.filled
    }

    /// Sets the number of bytes written, after writing through
    /// [`as_mut_slices`](Self::as_mut_slices); at most the capacity. Without such slices, bytes
    /// that were not written become zeros.
    pub fn set_filled(&mut self, filled: usize) {
        let filled = filled.min(self.len);
        // If the loan was revoked meanwhile, the send reports it.
        if self.slices_taken || self.fill_gap(filled).is_ok() {
            self.filled = filled;
        }
    }

    /// Fills with zeros up to `end`.
    fn fill_gap(&mut self, end: usize) -> Result<(), StreamError> {
        while self.filled < end {
            let part = ZEROS.len().min(end - self.filled);
            match self.put_at(self.filled, &ZEROS[..part])? {
                0 => break,
                done => self.filled += done,
            }
        }
        Ok(())
    }

    /// Whether all of it is in place, without a private buffer that is copied when it is sent.
    pub fn is_in_place(&self) -> bool {
        self.buffers.iter().all(Buffer::is_in_place)
    }

    /// Writes `bytes` from `offset` on, across its buffers; returns how many fit.
    /// [`filled`](Self::filled) is at least their end then. Bytes between the old fill level and
    /// `offset` become zeros.
    ///
    /// # Errors
    /// [`StreamError::Revoked`]: the peer has taken its memory back, and earlier writes are lost.
    pub fn write_at(&mut self, offset: usize, bytes: &[u8]) -> io::Result<usize> {
        if !self.slices_taken && offset < self.len && !bytes.is_empty() {
            self.fill_gap(offset)?;
        }
        let done = self.put_at(offset, bytes)?;
        if done > 0 {
            self.filled = self.filled.max(offset + done);
        }
        Ok(done)
    }

    /// Writes `bytes` from `offset` on, across its buffers; returns how many fit.
    fn put_at(&mut self, offset: usize, bytes: &[u8]) -> Result<usize, StreamError> {
        let core = &self.conn.core;
        let (mut begin, mut done) = (0, 0);
        for buffer in &mut self.buffers {
            let at = offset + done;
            let rest = bytes.get(done..).unwrap_or(&[]);
            if rest.is_empty() {
                break;
            }
            if at < begin + buffer.len() {
                done += buffer.write(core, at - begin, rest, self.filled > begin)?;
            }
            begin += buffer.len();
        }
        Ok(done)
    }

    /// All its bytes as slices to write to, in order: one for each piece of memory. Report the
    /// number of written bytes with [`set_filled`](Self::set_filled). The initial contents are
    /// unspecified.
    ///
    /// # Errors
    /// [`StreamError::Untrusted`] if the peer may write or read them meanwhile: then use
    /// [`write_at`](Self::write_at), or declare trust when opening the endpoint.
    /// [`StreamError::Revoked`].
    pub fn as_mut_slices(&mut self) -> Result<Vec<LoanSlice<'_>>, StreamError> {
        let slices = slices_from(self.conn, &mut self.buffers, self.filled, 0)?;
        self.slices_taken = true;
        Ok(slices)
    }

    /// Calls `read` with slices of the free part, one for each piece of memory, and appends as many
    /// bytes as it returns: for [`read_vectored`](std::io::Read::read_vectored) and similar calls.
    /// The initial contents of the slices are unspecified.
    ///
    /// ```
    /// use std::io::Read;
    ///
    /// # let (host, process) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/messages.rs"));
    /// let mut loan = process.loan(100)?;
    /// let got = loan.with_io_slices(|slices| (&b"from a reader"[..]).read_vectored(slices))?;
    /// assert_eq!((got, loan.filled()), (13, 13));
    /// loan.send_eor()?;
    /// let message = host.recv_leases()?.expect("a message");
    /// assert!(message.to_vec() == b"from a reader" && message.end_of_record());
    /// # Ok::<(), std::io::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of `read`, and of [`as_mut_slices`](Self::as_mut_slices).
    pub fn with_io_slices(
        &mut self,
        read: impl FnOnce(&mut [IoSliceMut<'_>]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let (filled, room) = (self.filled, self.len - self.filled);
        let mut slices = slices_from(self.conn, &mut self.buffers, filled, filled)?;
        let io_slices = slices
            .iter_mut()
            .map(|slice| IoSliceMut::new(slice.as_mut_slice()));
        let got = read(&mut io_slices.collect::<Vec<_>>())?;
        drop(slices);
        let got = got.min(room);
        self.filled += got;
        Ok(got)
    }

    /// Sends the bytes written so far as one message, which may be empty; returns how many. The
    /// part in place is sent at once. A private part may block for buffers, as in
    /// [`SeqPacket::send`](super::SeqPacket::send), and so does a message behind one that is partly
    /// sent.
    ///
    /// # Errors
    /// The connection has ended, or this direction was shut down; [`StreamError::Revoked`];
    /// `WouldBlock` or `TimedOut`: nothing of it was sent, and [`try_send`](Self::try_send) keeps
    /// the bytes.
    pub fn send(self) -> io::Result<usize> {
        self.try_send().map_err(|(error, _)| error)
    }

    /// As [`send`](Self::send), and ends a record: MSG_EOR.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn send_eor(self) -> io::Result<usize> {
        self.try_send_eor().map_err(|(error, _)| error)
    }

    /// As [`send`](Self::send), but the error returns a loan that could not be sent.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn try_send(self) -> Result<usize, (io::Error, Self)> {
        self.put(false)
    }

    /// As [`send_eor`](Self::send_eor), but the error returns a loan that could not be sent.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn try_send_eor(self) -> Result<usize, (io::Error, Self)> {
        self.put(true)
    }

    fn put(self, ends_record: bool) -> Result<usize, (io::Error, Self)> {
        let conn = self.conn;
        let (len, all) = self.begin(ends_record)?;
        if !all {
            // The message is sent in any case.
            let _ = conn.wait_queued_sent();
        }
        Ok(len)
    }

    /// Sends it; returns how many bytes. False: a part is queued for lack of buffers; the caller
    /// waits until it is sent.
    pub(in crate::vsock) fn begin(
        mut self,
        ends_record: bool,
    ) -> Result<(usize, bool), (io::Error, Self)> {
        if self.returned > 0 {
            // An earlier try has sent or returned it, and the connection has ended.
            return Err((StreamError::Reset.into(), self));
        }
        let conn = self.conn;
        let attempt = |backend: &mut dyn Backend| match self.queue(backend, ends_record) {
            Ok(Ok(all)) => {
                backend.flush();
                Some(Ok(all))
            }
            Ok(Err(fault)) => conn.send_fault(backend, fault),
            Err(revoked) => Some(Err(revoked)),
        };
        let done = conn
            .core
            .wait(
                Interest::Conn(conn.id),
                || conn.waits.write_budget(),
                attempt,
            )
            .map_err(io::Error::from)
            .and_then(|result| Ok(result?));
        match done {
            // Returns unused buffers at once: other senders may wait for them.
            Ok(all) => Ok((self.filled, all)),
            Err(error) => Err((error, self)),
        }
    }

    fn queue(
        &mut self,
        backend: &mut dyn Backend,
        ends_record: bool,
    ) -> Result<Result<bool, SendFault>, StreamError> {
        let conn = self.conn;
        let (mut left, mut count) = (self.filled, 0);
        for buffer in &mut self.buffers {
            if left == 0 && count > 0 {
                break;
            }
            buffer.prepare_send(&conn.core, backend, left > 0)?;
            left -= left.min(buffer.len());
            count += 1;
        }
        let mut left = self.filled;
        let part = |buffer: &'_ Buffer| {
            let len = left.min(buffer.len());
            left -= len;
            (buffer.index(), len)
        };
        let lens: Vec<(u32, usize)> = self.buffers.iter().take(count).map(part).collect();
        let parts = self.buffers.iter().zip(lens);
        let parts: Vec<LoanedPart<'_>> = parts
            .map(|(buffer, (index, len))| LoanedPart {
                index,
                len,
                private: buffer.private(len),
            })
            .collect();
        let sent = backend.send_message_loan(conn.id, &parts, ends_record);
        if sent.is_ok() {
            for part in &parts {
                conn.counts.add_sent(part.len, part.private.is_none());
            }
        }
        if sent != Err(SendFault::WouldBlock) {
            // The backend has the buffers back and may reuse their indices and memory.
            self.returned = count;
        }
        if sent.is_err_and(|fault| fault != SendFault::WouldBlock) {
            let returned = self.buffers.iter_mut().take(count);
            returned.for_each(Buffer::mark_returned);
        }
        Ok(sent)
    }
}

/// Slices of the bytes from `skip` on; `filled` bytes of the loan are written.
fn slices_from<'l>(
    conn: &'l Connection,
    buffers: &'l mut [Buffer],
    filled: usize,
    mut skip: usize,
) -> Result<Vec<LoanSlice<'l>>, StreamError> {
    let mut slices = Vec::with_capacity(buffers.len());
    let mut begin = 0;
    for buffer in buffers {
        let len = buffer.len();
        if skip < len {
            buffer.add_slices_to(&conn.core, conn.trust, skip, filled > begin, &mut slices)?;
        }
        skip = skip.saturating_sub(len);
        begin += len;
    }
    Ok(slices)
}

impl Write for MessageLoan<'_> {
    /// Appends bytes; 0 when the loan is full.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_at(self.filled, bytes)
    }

    /// Appends all that fits, from one slice after the other.
    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        append_each(slices, |slice| self.write(slice))
    }

    /// Does nothing: [`MessageLoan::send`] sends a message.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for MessageLoan<'_> {
    fn drop(&mut self) {
        let out = self.buffers.iter().skip(self.returned).map(Buffer::index);
        let out = out.filter(|index| *index != NONE);
        self.conn.core.return_buffers(out);
    }
}

impl fmt::Debug for MessageLoan<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MessageLoan")
            .field("capacity", &self.len)
            .field("filled", &self.filled)
            .field("buffers", &self.buffers.len())
            .field("in_place", &self.is_in_place())
            .finish_non_exhaustive()
    }
}
