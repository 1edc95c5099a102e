//! Loans: buffers for bytes that are written where the peer reads them.
//!
//! # Invariants
//! - A loan is sent or returned exactly once.
//! - Nothing is written to the peer's memory after the peer has taken it back.
//! - A thread that has entered a loan for writing does not block, because the thread that takes the
//!   loan back waits until it has left.
//!
//! # Use
//! A loan in place is a guest's receive buffer, or a transmit buffer of the driver, which the peer
//! reads in place. Its credit is reserved. Beyond the limit on loans it is a private buffer, which
//! is copied when it is sent: only counters show the difference.

mod buffer;
mod slice;

use std::fmt;
use std::io::{self, IoSlice, IoSliceMut, Write};
use std::os::fd::{AsFd, BorrowedFd};

use arrayvec::ArrayVec;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{FileType, OFlags, fcntl_getfl, fstat};
use zerosock_ring::{Claim, GuestSlice, SliceBuf};

use super::connection::Connection;
use super::errors::{StreamError, of_send};
use super::hub::Interest;
use crate::table::sockets::{BufferPlace, PIECES};
use crate::table::{
    backend::Backend,
    transfers::{LoanParts, SendFault},
};
pub(in crate::vsock) use buffer::{Buffer, ZEROS};
use buffer::{WriteAccess, parts};
pub use slice::LoanSlice;
use slice::SlicePlace;

/// A buffer for one packet, in memory that the peer reads. [`send`](Loan::send) sends it; dropped,
/// it is returned unsent.
///
/// Bytes are written by [`Write`] (each call appends), by [`write_at`](Loan::write_at), or directly
/// from a file or socket by [`read_from`](Loan::read_from) and
/// [`read_at_from`](Loan::read_at_from): all of these with any peer. Plain slices
/// ([`as_mut_slice`](Loan::as_mut_slice), [`with_io_slices`](Loan::with_io_slices)) of a loan in
/// place need trust: a guest may write its memory at any time, and Rust allows no slice of such
/// bytes.
///
/// ```
/// use std::io::Write;
///
/// # let (host, process) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/pair.rs"));
/// let mut loan = process.loan(100)?;
/// loan.write_all(b"written where ")?;
/// loan.write_all(b"it will be read")?;
/// assert_eq!(loan.send()?, 29);
/// assert_eq!(host.recv()?.expect("a packet").len(), 29);
/// # Ok::<(), std::io::Error>(())
/// ```
///
/// A loan that was sent is gone:
///
/// ```compile_fail,E0382
/// # use zerosock::vsock::Stream;
/// # use std::io::Write;
/// fn loan_used_after_send(stream: &Stream) -> std::io::Result<()> {
///     let mut loan = stream.loan(100)?;
///     loan.write_all(b"hello")?;
///     loan.send()?;
///     loan.write_all(b"too late")
/// }
/// ```
///
/// Nor can it outlive its stream:
///
/// ```compile_fail,E0505
/// # use zerosock::vsock::Stream;
/// fn loan_outlives_stream(stream: Stream) {
///     let loan = stream.loan(100).unwrap();
///     drop(stream);
///     loan.send().unwrap();
/// }
/// ```
pub struct Loan<'a> {
    conn: &'a Connection,
    buffer: Buffer,
    /// Bytes written, from the beginning.
    filled: usize,
    /// Bytes of this loan that earlier calls have sent.
    sent_before: usize,
    /// The application had a slice of the whole buffer, and may have written any part.
    slice_taken: bool,
    sent: bool,
}

impl<'a> Loan<'a> {
    pub(super) fn new(conn: &'a Connection, parts: LoanParts) -> Loan<'a> {
        Loan {
            conn,
            buffer: Buffer::new(parts),
            filled: 0,
            sent_before: 0,
            slice_taken: false,
            sent: false,
        }
    }

    /// Its capacity in bytes.
    pub fn capacity(&self) -> usize {
        self.buffer.len
    }

    /// Bytes written so far.
    pub fn filled(&self) -> usize {
        self.filled
    }

    /// Sets the number of bytes written, after writing through
    /// [`as_mut_slice`](Self::as_mut_slice); at most the capacity. Without such a slice, bytes that
    /// were not written become zeros.
    pub fn set_filled(&mut self, filled: usize) {
        let filled = filled.min(self.capacity());
        let core = &self.conn.core;
        // If the loan was revoked meanwhile, the send reports it.
        if self.slice_taken || self.buffer.fill_gap(core, self.filled, filled).is_ok() {
            self.filled = filled;
        }
    }

    /// Whether it is in place.
    pub fn is_in_place(&self) -> bool {
        self.buffer.is_in_place()
    }

    /// Writes `bytes` at `offset`; returns how many fit. [`filled`](Self::filled) is at least their
    /// end then. Bytes between the old fill level and `offset` become zeros.
    ///
    /// # Errors
    /// [`StreamError::Revoked`]: the peer has taken its memory back, and earlier writes are lost.
    pub fn write_at(&mut self, offset: usize, bytes: &[u8]) -> io::Result<usize> {
        let offset = offset.min(self.capacity());
        let core = &self.conn.core;
        if !self.slice_taken {
            self.filled = self.buffer.fill_gap(core, self.filled, offset)?;
        }
        let written = self.buffer.write(core, offset, bytes, self.filled > 0)?;
        self.filled = self.filled.max(offset + written);
        Ok(written)
    }

    /// Appends the bytes of one read of `fd`, in place; returns how many. 0 is end of file, or no
    /// room left. It blocks if `fd` does; meanwhile the peer can take its memory back without loss
    /// of bytes.
    ///
    /// Bytes of a descriptor without non-blocking reads (a terminal; before Linux 6.5 a pipe) are
    /// copied.
    ///
    /// # Errors
    /// Those of `readv(2)`; [`StreamError::Revoked`].
    pub fn read_from(&mut self, fd: impl AsFd) -> io::Result<usize> {
        let fd = fd.as_fd();
        let mut waited = false;
        loop {
            let now = self.read_in_place(|slices| zerosock_sys::read_slices_now(fd, slices))?;
            let error = match now {
                None => {
                    let got = rustix::io::read(fd, &mut self.buffer.private[self.filled..])?;
                    self.filled += got;
                    return Ok(got);
                }
                Some(Ok(got)) => {
                    self.filled += got;
                    return Ok(got);
                }
                Some(Err(error)) => error,
            };
            let empty = error.kind() == io::ErrorKind::WouldBlock;
            if !empty && error.kind() != io::ErrorKind::Unsupported {
                return Err(error);
            }
            if is_on_disk(fd)? {
                // A disk may be slow, but its read does not depend on another process.
                match self.read_in_place(|slices| zerosock_sys::read_slices(fd, slices))? {
                    Some(got) => {
                        self.filled += *got.as_ref().unwrap_or(&0);
                        return got;
                    }
                    None => continue,
                }
            }
            if empty && fcntl_getfl(fd)?.contains(OFlags::NONBLOCK) {
                return Err(error);
            }
            if empty && !std::mem::replace(&mut waited, true) {
                wait_for(fd)?;
                continue;
            }
            // It has no non-blocking reads, or another reader has taken the bytes.
            let mut bytes = vec![0; self.capacity() - self.filled];
            let got = rustix::io::read(fd, &mut bytes)?;
            return self.write_at(self.filled, &bytes[..got]);
        }
    }

    /// As [`read_from`](Self::read_from), from offset `at` of a file, in bytes; does not change the
    /// file position of `fd`.
    ///
    /// ```
    /// # use std::io::Write;
    /// # let (host, process) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/pair.rs"));
    /// # let mut file = tempfile::tempfile()?;
    /// # file.write_all(b"a header and a body")?;
    /// let mut loan = process.loan(100)?;
    /// assert_eq!(loan.read_at_from(&file, 13)?, 6);
    /// loan.send()?;
    /// assert_eq!(host.recv()?.expect("a packet").to_vec(), b"a body");
    /// # Ok::<(), std::io::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of `preadv(2)`, such as for a descriptor that is not seekable; [`StreamError::Revoked`].
    pub fn read_at_from(&mut self, fd: impl AsFd, at: u64) -> io::Result<usize> {
        let fd = fd.as_fd();
        let got = match self.read_in_place(|slices| zerosock_sys::read_slices_at(fd, slices, at))? {
            Some(got) => got?,
            None => rustix::io::pread(fd, &mut self.buffer.private[self.filled..], at)?,
        };
        self.filled += got;
        Ok(got)
    }

    /// Appends by `read` in place; `None` if the loan is not in place.
    fn read_in_place(
        &mut self,
        read: impl FnOnce(&[GuestSlice<'_>]) -> io::Result<usize>,
    ) -> io::Result<Option<io::Result<usize>>> {
        let (filled, room) = (self.filled, self.capacity() - self.filled);
        let (core, index) = (&self.conn.core, self.buffer.index);
        let Some(BufferPlace::InPlace { memory, pieces }) = self.buffer.enter(core, filled > 0)?
        else {
            return Ok(None);
        };
        let access = WriteAccess { core, index };
        let mut slices = SliceBuf::<PIECES>::new();
        memory.slices(pieces, filled, room, &mut slices);
        let got = read(&slices);
        drop(access);
        Ok(Some(got))
    }

    /// Calls `read` with slices of the free part, one for each piece of memory, and appends as many
    /// bytes as it returns: for [`read_vectored`](std::io::Read::read_vectored) and similar calls.
    /// The initial contents of the slices are unspecified.
    ///
    /// ```
    /// use std::io::Read;
    ///
    /// # let (host, process) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/pair.rs"));
    /// let mut loan = process.loan(100)?;
    /// let got = loan.with_io_slices(|slices| (&b"from a reader"[..]).read_vectored(slices))?;
    /// assert_eq!((got, loan.filled()), (13, 13));
    /// loan.send()?;
    /// assert_eq!(host.recv()?.expect("a packet").to_vec(), b"from a reader");
    /// # Ok::<(), std::io::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of `read`, and of [`as_mut_slice`](Self::as_mut_slice) except `Scattered`.
    pub fn with_io_slices(
        &mut self,
        read: impl FnOnce(&mut [IoSliceMut<'_>]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let (filled, room) = (self.filled, self.capacity() - self.filled);
        let (core, index) = (&self.conn.core, self.buffer.index);
        let trust = self.conn.trust;
        let got = if let Some(BufferPlace::InPlace { memory, pieces }) =
            self.buffer.enter(core, filled > 0)?
        {
            let _access = WriteAccess { core, index };
            let trust = trust.ok_or(StreamError::Untrusted)?;
            let mut claims = ArrayVec::<Claim, PIECES>::new();
            for part in parts(pieces, filled, room) {
                claims.extend(Claim::new(memory, part, trust));
            }
            let slices = claims
                .iter_mut()
                .filter_map(|claim| claim.slice_mut(memory));
            let mut slices: ArrayVec<_, PIECES> = slices.map(IoSliceMut::new).collect();
            read(&mut slices)?
        } else {
            read(&mut [IoSliceMut::new(&mut self.buffer.private[filled..])])?
        };
        let got = got.min(room);
        self.filled += got;
        Ok(got)
    }

    /// The whole buffer as a slice to write to; report the number of written bytes with
    /// [`set_filled`](Self::set_filled). The initial contents are unspecified.
    ///
    /// # Errors
    /// [`StreamError::Untrusted`] if the peer may write or read them meanwhile: then use
    /// [`write_at`](Self::write_at), or declare trust when opening the endpoint.
    /// [`StreamError::Scattered`] if it lies in several pieces: then use
    /// [`with_io_slices`](Self::with_io_slices). [`StreamError::Revoked`].
    pub fn as_mut_slice(&mut self) -> Result<LoanSlice<'_>, StreamError> {
        let (core, trust) = (&*self.conn.core, self.conn.trust);
        let (index, len) = (self.buffer.index, self.buffer.len);
        if self.buffer.enter(core, self.filled > 0)?.is_none() {
            self.slice_taken = true;
            let place = SlicePlace::Private(&mut self.buffer.private);
            return Ok(LoanSlice { core, index, place });
        }
        let access = WriteAccess { core, index };
        let Some(BufferPlace::InPlace { memory, pieces }) = &self.buffer.place else {
            return Err(StreamError::Revoked);
        };
        let trust = trust.ok_or(StreamError::Untrusted)?;
        let [piece] = pieces[..] else {
            return Err(StreamError::Scattered);
        };
        let claim = Claim::new(memory, piece.part(0, len), trust);
        let (claim, memory) = (claim.ok_or(StreamError::Revoked)?, memory.clone());
        self.slice_taken = true;
        // The drop of the `LoanSlice` ends the write access.
        std::mem::forget(access);
        let place = SlicePlace::Claimed(claim, memory);
        Ok(LoanSlice { core, index, place })
    }

    /// Sends the bytes written so far as one packet; returns how many. An empty loan is returned
    /// unsent. A loan in place is sent at once; a private one may block for a buffer, as a write
    /// does, and take several packets.
    ///
    /// # Errors
    /// The connection has ended, or this direction was shut down; [`StreamError::Revoked`];
    /// `WouldBlock` or `TimedOut` without a buffer: part of a private loan may have been sent then, and
    /// [`try_send`](Self::try_send) keeps the rest.
    pub fn send(mut self) -> io::Result<usize> {
        self.send_filled()
    }

    /// As [`send`](Self::send), but the error returns a loan that could not be sent. A private loan
    /// may have been sent in part, if the peer's buffers are smaller than before: then the returned
    /// loan has the rest.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    #[allow(
        clippy::result_large_err,
        reason = "returning the loan costs no allocation"
    )]
    pub fn try_send(mut self) -> Result<usize, (io::Error, Self)> {
        let sent = self.send_filled();
        sent.map_err(|error| (error, self))
    }

    fn send_filled(&mut self) -> io::Result<usize> {
        if self.filled == 0 {
            return Ok(0);
        }
        if self.sent {
            // An earlier try has sent or returned it, and the connection has ended.
            return Err(StreamError::Reset.into());
        }
        let conn = self.conn;
        let interest = Interest::Conn(conn.id);
        let attempt = |backend: &mut dyn Backend| match self.queue(backend) {
            Ok(sent) => {
                backend.flush();
                Some(Ok(sent))
            }
            Err(SendFault::WouldBlock) => None,
            Err(SendFault::Unknown) => Some(Err(StreamError::Revoked)),
            Err(fault) => Some(Err(of_send(fault).unwrap_or(StreamError::Reset))),
        };
        let budget = || conn.waits.write_budget();
        Ok(conn.core.wait(interest, budget, attempt)??)
    }

    fn queue(&mut self, backend: &mut dyn Backend) -> Result<usize, SendFault> {
        let core = &self.conn.core;
        let settled = self.buffer.prepare_send(core, backend, self.filled > 0);
        settled.map_err(|_| SendFault::Unknown)?;
        let private = self.buffer.private(self.filled);
        let in_place = private.is_none();
        let result = backend.send_loan(self.buffer.index, self.filled, private);
        if let Ok(sent) = result {
            self.conn.counts.add_sent(sent, in_place);
        }
        match result {
            Ok(sent) if sent < self.filled => {
                // The rest stays in the loan for another try.
                self.buffer.private.drain(..sent);
                self.sent_before += sent;
                self.filled -= sent;
                self.buffer.len -= sent;
                Err(SendFault::WouldBlock)
            }
            Err(SendFault::WouldBlock) => Err(SendFault::WouldBlock),
            Ok(_) => {
                self.sent = true;
                Ok(self.sent_before + self.filled)
            }
            Err(fault) => {
                self.sent = true;
                self.buffer.mark_returned();
                Err(fault)
            }
        }
    }
}

/// Appends one slice after the other until one does not fit.
pub(super) fn append_each(
    slices: &[IoSlice<'_>],
    mut append: impl FnMut(&[u8]) -> io::Result<usize>,
) -> io::Result<usize> {
    let mut done = 0;
    for slice in slices {
        let written = append(slice)?;
        done += written;
        if written < slice.len() {
            break;
        }
    }
    Ok(done)
}

impl Write for Loan<'_> {
    /// Appends bytes; 0 when the loan is full.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_at(self.filled, bytes)
    }

    /// Appends all that fits, from one slice after the other.
    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        append_each(slices, |slice| self.write(slice))
    }

    /// Does nothing: [`Loan::send`] sends a loan.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Loan<'_> {
    fn drop(&mut self) {
        if !self.sent {
            self.conn.core.return_buffer(self.buffer.index);
        }
    }
}

/// Whether a read of `fd` blocks for a disk at most.
fn is_on_disk(fd: BorrowedFd<'_>) -> io::Result<bool> {
    let kind = FileType::from_raw_mode(fstat(fd)?.st_mode);
    Ok(matches!(
        kind,
        FileType::RegularFile | FileType::BlockDevice
    ))
}

/// Waits until `fd` is readable.
fn wait_for(fd: BorrowedFd<'_>) -> io::Result<()> {
    match poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], None) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

impl fmt::Debug for Loan<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loan")
            .field("capacity", &self.capacity())
            .field("filled", &self.filled)
            .field("in_place", &self.is_in_place())
            .finish_non_exhaustive()
    }
}
