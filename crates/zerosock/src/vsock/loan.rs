//! Loans: bytes written where the peer will read them.
//!
//! A loan in place is a buffer of the peer's (a guest's receive buffer) or one that the peer will
//! read where it is (our driver's transmit buffer). Credit for it is taken already. Beyond the
//! bounds on loans it is a private buffer, which is copied when it is sent: nothing but the
//! counters shows the difference.
//!
//! What must hold: a loan is sent, or goes back, exactly once; nothing is written to the peer's
//! memory after it was taken back.

use std::fmt;
use std::io::{self, IoSliceMut, Write};
use std::os::fd::AsFd;
use std::sync::Arc;

use zerosock_ring::{Claim, SliceBuf};

use super::core::{Core, Interest};
use super::engine::{Engine, LoanParts, SendFault};
use super::errors::{StreamError, of_send};
use super::leases::Entered;
use super::sockets::{PIECES, Place};
use super::stream::Stream;

/// The right to write the bytes of one packet where the peer will read them. It is sent with
/// [`send`](Loan::send); dropped, it goes back unsent.
///
/// Bytes go in by [`Write`] (each call appends), by [`write_at`](Loan::write_at), or straight from
/// a file or socket by [`read_from`](Loan::read_from).
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
    stream: &'a Stream,
    index: u32,
    len: usize,
    place: Option<Place>,
    /// The buffer of a loan that is not in place (any more).
    private: Vec<u8>,
    /// Bytes written, from the beginning.
    filled: usize,
    sent: bool,
}

/// A loan's bytes as plain slices, as long as this lives.
///
/// ```
/// use std::io::Read;
///
/// # let (host, process) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/pair.rs"));
/// let mut loan = process.loan(100)?;
/// let mut filling = loan.as_mut_slice()?;
/// let len = (&b"from a reader"[..]).read_vectored(&mut filling.as_io_slices())?;
/// drop(filling);
/// loan.set_filled(len);
/// loan.send()?;
/// assert_eq!(host.recv()?.expect("a packet").to_vec(), b"from a reader");
/// # Ok::<(), std::io::Error>(())
/// ```
///
/// While it lives, the loan is not sent, nor written to in another way:
///
/// ```compile_fail,E0505
/// # use zerosock::vsock::Loan;
/// fn filled_after_send(mut loan: Loan<'_>) {
///     let mut filling = loan.as_mut_slice().unwrap();
///     loan.send().unwrap();
///     filling[0] = 1;
/// }
/// ```
pub struct Filling<'l> {
    core: &'l Core,
    index: u32,
    place: FillingPlace<'l>,
}

enum FillingPlace<'l> {
    Private(&'l mut [u8]),
    Claimed(Claim, Arc<zerosock_ring::Memory>),
}

impl<'a> Loan<'a> {
    pub(super) fn new(stream: &'a Stream, parts: LoanParts) -> Loan<'a> {
        let LoanParts { index, len, place } = parts;
        let private = match place {
            Some(_) => Vec::new(),
            None => vec![0; len],
        };
        Loan {
            stream,
            index,
            len,
            place,
            private,
            filled: 0,
            sent: false,
        }
    }

    /// Bytes that it takes at most.
    pub fn capacity(&self) -> usize {
        self.len
    }

    /// Bytes written so far.
    pub fn filled(&self) -> usize {
        self.filled
    }

    /// Says that the first `filled` bytes are written: by way of
    /// [`as_mut_slice`](Self::as_mut_slice), which cannot know. More than the capacity is the
    /// capacity.
    pub fn set_filled(&mut self, filled: usize) {
        self.filled = filled.min(self.len);
    }

    /// Whether it is in place.
    pub fn is_in_place(&self) -> bool {
        self.place.is_some()
    }

    /// Writes `bytes` at `offset`; how many fitted. [`filled`](Self::filled) is at least their end
    /// then.
    ///
    /// # Errors
    /// [`StreamError::Torn`]: the peer took its memory back, and what was written before is lost.
    pub fn write_at(&mut self, offset: usize, bytes: &[u8]) -> io::Result<usize> {
        let offset = offset.min(self.len);
        let bytes = &bytes[..bytes.len().min(self.len - offset)];
        let written = match self.enter()? {
            Some(Place::InPlace {
                memory,
                pieces,
                offset: start,
            }) => {
                let written = memory.write(pieces, start + offset, bytes);
                self.stream.core.leases().leave(self.index);
                written
            }
            _ => {
                self.private[offset..offset + bytes.len()].copy_from_slice(bytes);
                bytes.len()
            }
        };
        self.filled = self.filled.max(offset + written);
        Ok(written)
    }

    /// Appends what one read of `fd` gives, straight to where the peer will read it; how many
    /// bytes. 0 is the end of the file, or no room left.
    ///
    /// # Errors
    /// Those of `readv(2)`; [`StreamError::Torn`].
    pub fn read_from(&mut self, fd: impl AsFd) -> io::Result<usize> {
        let (filled, room) = (self.filled, self.len - self.filled);
        let got = match self.enter()? {
            Some(Place::InPlace {
                memory,
                pieces,
                offset,
            }) => {
                let mut slices = SliceBuf::<PIECES>::new();
                memory.slices(pieces, offset + filled, room, &mut slices);
                let got = zerosock_sys::read_slices(fd.as_fd(), &slices);
                self.stream.core.leases().leave(self.index);
                got?
            }
            _ => rustix::io::read(fd, &mut self.private[filled..])?,
        };
        self.filled += got;
        Ok(got)
    }

    /// All of its bytes as a slice to write to; tell how many with
    /// [`set_filled`](Self::set_filled). What they hold before is unspecified.
    ///
    /// # Errors
    /// [`StreamError::Untrusted`] if the peer may write or read them meanwhile: then use
    /// [`write_at`](Self::write_at), or declare trust when opening the endpoint.
    /// [`StreamError::Torn`].
    pub fn as_mut_slice(&mut self) -> Result<Filling<'_>, StreamError> {
        let (core, index, len) = (&*self.stream.core, self.index, self.len);
        let trust = self.stream.trust;
        if self.enter()?.is_none() {
            let place = FillingPlace::Private(&mut self.private);
            return Ok(Filling { core, index, place });
        }
        let claim = match (&self.place, trust) {
            (
                Some(Place::InPlace {
                    memory,
                    pieces,
                    offset,
                }),
                Some(trust),
            ) => match pieces[..] {
                [piece] => Claim::new(memory, piece.part(*offset, len), trust)
                    .map(|claim| (claim, memory.clone())),
                _ => None,
            },
            _ => None,
        };
        let Some((claim, memory)) = claim else {
            core.leases().leave(index);
            return Err(StreamError::Untrusted);
        };
        let place = FillingPlace::Claimed(claim, memory);
        Ok(Filling { core, index, place })
    }

    /// Sends the bytes written so far, as one packet; how many. A loan with nothing in it goes
    /// back. One in place is sent at once; one that is not may have to wait for a buffer, as a
    /// write does.
    ///
    /// # Errors
    /// The connection has ended, or this direction was shut down; [`StreamError::Torn`]; and
    /// `WouldBlock` or `TimedOut`, if there was no buffer. Who wants to keep the bytes then, uses
    /// [`try_send`](Self::try_send).
    pub fn send(self) -> io::Result<usize> {
        self.try_send().map_err(|(error, _)| error)
    }

    /// As [`send`](Self::send), but a loan that could not be sent now is given back.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    #[allow(
        clippy::result_large_err,
        reason = "a loan that comes back costs no allocation"
    )]
    pub fn try_send(mut self) -> Result<usize, (io::Error, Self)> {
        if self.filled == 0 {
            return Ok(0);
        }
        if self.sent {
            // It was tried before, and the connection has ended.
            return Err((StreamError::Reset.into(), self));
        }
        let stream = self.stream;
        let interest = Interest::Conn(stream.id);
        let attempt = |engine: &mut dyn Engine| match self.queue(engine) {
            Ok(sent) => {
                engine.flush();
                Some(Ok(sent))
            }
            Err(SendFault::WouldBlock) => None,
            Err(SendFault::Unknown) => Some(Err(StreamError::Torn)),
            Err(fault) => Some(Err(of_send(fault).unwrap_or(StreamError::Reset))),
        };
        let done = stream
            .core
            .wait(interest, stream.write_patience(), attempt)
            .map_err(io::Error::from)
            .and_then(|result| Ok(result?));
        done.map_err(|error| (error, self))
    }

    fn queue(&mut self, engine: &mut dyn Engine) -> Result<usize, SendFault> {
        let in_place = self.enter_with(engine).map_err(|_| SendFault::Unknown)?;
        if in_place {
            self.stream.core.leases().leave(self.index);
        }
        let private = (!in_place).then(|| &self.private[..self.filled]);
        let result = engine.send_loan(self.index, self.filled, private);
        // Sent or not, the engine has it back, and its word is somebody else's from now on.
        self.sent = result != Err(SendFault::WouldBlock);
        if self.sent && result.is_err() {
            // So is its place.
            self.place = None;
            self.private.resize(self.len, 0);
        }
        result.map(|()| self.filled)
    }

    /// Begins to write where it is in place; `None`: into the private buffer.
    fn enter(&mut self) -> Result<Option<&Place>, StreamError> {
        if self.place.is_some() && self.stream.core.leases().enter(self.index) == Entered::Moved {
            let core = &self.stream.core;
            self.moved(core.lock().engine())?;
        }
        Ok(self.place.as_ref())
    }

    fn enter_with(&mut self, engine: &mut dyn Engine) -> Result<bool, StreamError> {
        if self.place.is_some() && self.stream.core.leases().enter(self.index) == Entered::Moved {
            self.moved(engine)?;
        }
        Ok(self.place.is_some())
    }

    /// The endpoint has taken the place away: what was written is in a copy, if there is one.
    fn moved(&mut self, engine: &mut dyn Engine) -> Result<(), StreamError> {
        match engine.copy_of(self.index) {
            Some((bytes, start)) => self.private.extend_from_slice(&bytes[start..]),
            None if self.filled > 0 => return Err(StreamError::Torn),
            None => {}
        }
        self.private.resize(self.len, 0);
        self.place = None;
        Ok(())
    }
}

impl Write for Loan<'_> {
    /// Appends; 0 when it is full.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_at(self.filled, bytes)
    }

    /// Nothing to do: a loan is sent by [`Loan::send`].
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Loan<'_> {
    fn drop(&mut self) {
        if !self.sent {
            self.stream.core.give_back(self.index);
        }
    }
}

impl Filling<'_> {
    /// The bytes.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        match &mut self.place {
            FillingPlace::Private(bytes) => bytes,
            FillingPlace::Claimed(claim, memory) => claim.slice_mut(memory).unwrap_or(&mut []),
        }
    }

    /// The bytes, for `readv(2)` and its like.
    pub fn as_io_slices(&mut self) -> [IoSliceMut<'_>; 1] {
        [IoSliceMut::new(self.as_mut_slice())]
    }
}

impl std::ops::Deref for Filling<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.place {
            FillingPlace::Private(bytes) => bytes,
            FillingPlace::Claimed(claim, memory) => claim.slice(memory).unwrap_or(&[]),
        }
    }
}

impl std::ops::DerefMut for Filling<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.as_mut_slice()
    }
}

impl Drop for Filling<'_> {
    fn drop(&mut self) {
        if matches!(self.place, FillingPlace::Claimed(..)) {
            self.core.leases().leave(self.index);
        }
    }
}

impl fmt::Debug for Loan<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loan")
            .field("capacity", &self.len)
            .field("filled", &self.filled)
            .field("in_place", &self.is_in_place())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Filling<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Filling").field("len", &self.len()).finish()
    }
}
