//! A message written where it will be read.
//!
//! What must hold: nothing of it is seen before it is sent, and then all of it is; one that is
//! dropped gives its buffers and its credit back.

use std::fmt;
use std::io::{self, IoSlice, IoSliceMut, Write};

use super::SeqPacket;
use crate::table::backend::{Backend, LoanParts, LoanedPart, SendFault};
use crate::table::leases::NONE;
use crate::vsock::errors::StreamError;
use crate::vsock::hub::Interest;
use crate::vsock::loan::{Buffer, Filling, ZEROS, append_each};

/// The right to write one message where the peer will read it: into as many of its buffers as it
/// takes. It is sent with [`send`](Self::send), as a whole; dropped, it goes back unsent. The peer
/// is told of none of it before.
///
/// Bytes go in by [`Write`] (each call appends) and by [`write_at`](Self::write_at), with any peer.
/// Plain slices ([`as_mut_slices`](Self::as_mut_slices), [`with_io_slices`](Self::with_io_slices))
/// need trust where it is in place, as for a [`Loan`](crate::vsock::Loan).
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
/// Nor is it sent while somebody has its slices:
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
    connection: &'a SeqPacket,
    /// In order. Only the last may have been private from the first.
    buffers: Vec<Buffer>,
    /// Of the first ones so many are the engine's again.
    over: usize,
    len: usize,
    /// Bytes written, from the beginning.
    filled: usize,
    /// Its holder had slices of all of it, and may have written any part.
    shown: bool,
}

impl<'a> MessageLoan<'a> {
    pub(super) fn new(connection: &'a SeqPacket, parts: Vec<LoanParts>) -> MessageLoan<'a> {
        let buffers: Vec<Buffer> = parts.into_iter().map(Buffer::new).collect();
        MessageLoan {
            connection,
            len: buffers.iter().map(Buffer::len).sum(),
            buffers,
            over: 0,
            filled: 0,
            shown: false,
        }
    }

    /// Bytes that it takes at most: as many as were asked for.
    pub fn capacity(&self) -> usize {
        self.len
    }

    /// Bytes written so far.
    pub fn filled(&self) -> usize {
        self.filled
    }

    /// Says that the first `filled` bytes are written: by way of
    /// [`as_mut_slices`](Self::as_mut_slices), which cannot know. More than the capacity is the
    /// capacity. Without such slices, bytes that were not written become zeros.
    pub fn set_filled(&mut self, filled: usize) {
        let filled = filled.min(self.len);
        // A loan that was torn meanwhile says so when it is sent.
        if self.shown || self.fill_gap(filled).is_ok() {
            self.filled = filled;
        }
    }

    /// Puts zeros behind what is filled, up to `end`.
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

    /// Whether all of it is in place, and no part a private buffer that is copied when it is sent.
    pub fn is_in_place(&self) -> bool {
        self.buffers.iter().all(Buffer::is_in_place)
    }

    /// Writes `bytes` from `offset` on, across its buffers; how many fitted.
    /// [`filled`](Self::filled) is at least their end then. What lies between the bytes filled
    /// before and `offset` becomes zeros.
    ///
    /// # Errors
    /// [`StreamError::Torn`]: the peer took its memory back, and what was written before is lost.
    pub fn write_at(&mut self, offset: usize, bytes: &[u8]) -> io::Result<usize> {
        if !self.shown && offset < self.len && !bytes.is_empty() {
            self.fill_gap(offset)?;
        }
        let done = self.put_at(offset, bytes)?;
        if done > 0 {
            self.filled = self.filled.max(offset + done);
        }
        Ok(done)
    }

    /// Writes `bytes` from `offset` on, across its buffers; how many fitted.
    fn put_at(&mut self, offset: usize, bytes: &[u8]) -> Result<usize, StreamError> {
        let core = &self.connection.conn.core;
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

    /// All of its bytes as slices to write to, in order: one for each piece of memory that they lie
    /// in. Tell how many were written with [`set_filled`](Self::set_filled). What they hold before
    /// is unspecified.
    ///
    /// # Errors
    /// [`StreamError::Untrusted`] if the peer may write or read them meanwhile: then use
    /// [`write_at`](Self::write_at), or declare trust when opening the endpoint.
    /// [`StreamError::Torn`].
    pub fn as_mut_slices(&mut self) -> Result<Vec<Filling<'_>>, StreamError> {
        let fillings = slices_from(self.connection, &mut self.buffers, self.filled, 0)?;
        self.shown = true;
        Ok(fillings)
    }

    /// Has `read` fill what is free of it, in as many slices as it has pieces, and notes how many
    /// bytes it says it has put there, from the beginning: for
    /// [`read_vectored`](std::io::Read::read_vectored) and its like. What the slices hold before is
    /// unspecified.
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
    /// What `read` returns; as for [`as_mut_slices`](Self::as_mut_slices).
    pub fn with_io_slices(
        &mut self,
        read: impl FnOnce(&mut [IoSliceMut<'_>]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let (filled, room) = (self.filled, self.len - self.filled);
        let mut fillings = slices_from(self.connection, &mut self.buffers, filled, filled)?;
        let slices = fillings
            .iter_mut()
            .map(|filling| IoSliceMut::new(filling.as_mut_slice()));
        let got = read(&mut slices.collect::<Vec<_>>())?;
        drop(fillings);
        let got = got.min(room);
        self.filled += got;
        Ok(got)
    }

    /// Sends the bytes written so far as one message; how many. One in which nothing was written is
    /// a message without a byte, and is sent as well. What of it is in place leaves at once; what
    /// is not may have to wait for buffers, as in [`SeqPacket::send`], and so does a message behind
    /// another that has begun.
    ///
    /// # Errors
    /// The connection has ended, or this direction was shut down; [`StreamError::Torn`]; and
    /// `WouldBlock` or `TimedOut`: nothing of it was sent. Who wants to keep the bytes then, uses
    /// [`try_send`](Self::try_send).
    pub fn send(self) -> io::Result<usize> {
        self.try_send().map_err(|(error, _)| error)
    }

    /// As [`send`](Self::send), and says that a record ends with it: MSG_EOR.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn send_eor(self) -> io::Result<usize> {
        self.try_send_eor().map_err(|(error, _)| error)
    }

    /// As [`send`](Self::send), but a loan that could not be sent now is given back.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn try_send(self) -> Result<usize, (io::Error, Self)> {
        self.put(false)
    }

    /// As [`send_eor`](Self::send_eor), but a loan that could not be sent now is given back.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn try_send_eor(self) -> Result<usize, (io::Error, Self)> {
        self.put(true)
    }

    fn put(self, ends_record: bool) -> Result<usize, (io::Error, Self)> {
        let connection = self.connection;
        let (len, all) = self.begin(ends_record)?;
        if !all {
            // It is sent, whatever comes of the wait.
            let _ = connection.see_off();
        }
        Ok(len)
    }

    /// Sends it; how many bytes. False: what has found no buffer is kept, and to be seen off.
    pub(in crate::vsock) fn begin(
        mut self,
        ends_record: bool,
    ) -> Result<(usize, bool), (io::Error, Self)> {
        if self.over > 0 {
            // It was tried before, and the connection has ended.
            return Err((StreamError::Reset.into(), self));
        }
        let conn = &self.connection.conn;
        let attempt = |engine: &mut dyn Backend| match self.queue(engine, ends_record) {
            Ok(Ok(all)) => {
                engine.flush();
                Some(Ok(all))
            }
            Ok(Err(fault)) => conn.send_fault(engine, fault),
            Err(torn) => Some(Err(torn)),
        };
        let done = conn
            .core
            .wait(Interest::Conn(conn.id), conn.write_patience(), attempt)
            .map_err(io::Error::from)
            .and_then(|result| Ok(result?));
        match done {
            // What was not used goes back now, before others wait for it.
            Ok(all) => Ok((self.filled, all)),
            Err(error) => Err((error, self)),
        }
    }

    fn queue(
        &mut self,
        engine: &mut dyn Backend,
        ends_record: bool,
    ) -> Result<Result<bool, SendFault>, StreamError> {
        let conn = &self.connection.conn;
        let (mut left, mut count) = (self.filled, 0);
        for buffer in &mut self.buffers {
            if left == 0 && count > 0 {
                break;
            }
            buffer.settle(&conn.core, engine, left > 0)?;
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
        let sent = engine.send_message_loan(conn.id, &parts, ends_record);
        if sent != Err(SendFault::WouldBlock) {
            // The engine has them back: their words and their places are somebody else's.
            self.over = count;
        }
        if sent.is_err_and(|fault| fault != SendFault::WouldBlock) {
            let over = self.buffers.iter_mut().take(count);
            over.for_each(Buffer::forget_place);
        }
        Ok(sent)
    }
}

/// Slices of what lies `skip` bytes and more from the beginning, of which `filled` are written.
fn slices_from<'l>(
    connection: &'l SeqPacket,
    buffers: &'l mut [Buffer],
    filled: usize,
    mut skip: usize,
) -> Result<Vec<Filling<'l>>, StreamError> {
    let conn = &connection.conn;
    let mut fillings = Vec::with_capacity(buffers.len());
    let mut begin = 0;
    for buffer in buffers {
        let len = buffer.len();
        if skip < len {
            buffer.fillings(&conn.core, conn.trust, skip, filled > begin, &mut fillings)?;
        }
        skip = skip.saturating_sub(len);
        begin += len;
    }
    Ok(fillings)
}

impl Write for MessageLoan<'_> {
    /// Appends; 0 when it is full.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_at(self.filled, bytes)
    }

    /// Appends all that fits, from one slice after the other.
    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        append_each(slices, |slice| self.write(slice))
    }

    /// Nothing to do: a message is sent by [`MessageLoan::send`].
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for MessageLoan<'_> {
    fn drop(&mut self) {
        let out = self.buffers.iter().skip(self.over).map(Buffer::index);
        let out = out.filter(|index| *index != NONE);
        self.connection.conn.core.give_all_back(out);
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
