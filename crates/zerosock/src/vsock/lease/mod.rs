//! Leases: received bytes, read in place.
//!
//! # Invariants
//! - No reference to peer memory exists without the application's declaration of trust, and no new
//!   one to memory that the peer has taken back.
//! - Bytes are copied out once.
//! - A lease is returned exactly once.
//!
//! # Life of a lease
//! A lease in place refers to bytes in memory that the peer shares. Dropping it returns the buffer
//! and the credit: at once, or with the endpoint's next call while the peer can wait for neither,
//! which takes one atomic operation and no lock ([`crate::table::leases`]). Before that, after a
//! bounded time, the endpoint may copy the bytes out and return the buffer; the application reads the
//! same bytes either way. While a [`LeaseReader`] lives, they are not moved.

mod cursor;
mod reader;

use std::fmt;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use bytes::Bytes;
use zerocopy::FromBytes;
use zerosock_ring::Trust;

use self::reader::Body;
use super::errors::StreamError;
use super::hub::Core;
use crate::table::sockets::{BufferPlace, Copied, LeaseParts};
use crate::zc::{Buf, Mapped};

pub use self::cursor::LeaseCursor;
pub use self::reader::LeaseReader;

/// The calls of both kinds of leases that read their bytes.
macro_rules! lease_calls {
    () => {
        /// Length in bytes; never 0.
        #[expect(clippy::len_without_is_empty, reason = "a lease is never empty")]
        pub fn len(&self) -> usize {
            self.body.parts.len
        }

        /// Whether the bytes lay where the peer's side wrote them when they were received. False for a
        /// packet beyond the hold limit, which is a copy.
        pub fn is_in_place(&self) -> bool {
            matches!(self.body.parts.place, BufferPlace::InPlace { .. })
        }

        /// Keeps the bytes in place while they are read.
        pub fn read(&self) -> LeaseReader<'_> {
            LeaseReader::new(&self.core, &self.body)
        }

        /// Copies bytes from `offset` on to `out`; returns how many. Safe with any peer.
        pub fn copy_to(&self, offset: usize, out: &mut [u8]) -> usize {
            self.read().copy_to(offset, out)
        }

        /// A copy of all bytes.
        pub fn to_vec(&self) -> Vec<u8> {
            self.read().to_vec()
        }

        /// A copy of the value at `offset`; `None` if it does not lie within the lease.
        pub fn read_as<T: FromBytes>(&self, offset: usize) -> Option<T> {
            self.read().read_as(offset)
        }

        /// Writes all bytes to `fd` without a copy in user space; returns how many the system took.
        ///
        /// # Errors
        /// Those of `writev(2)`.
        pub fn write_to(&self, fd: impl AsFd) -> io::Result<usize> {
            self.read().write_to(fd)
        }
    };
}

/// The bytes of one received packet, in place. Dropping it returns the buffer and the credit to the
/// sender.
///
/// ```
/// use std::io::Write;
///
/// # let (host, process) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/pair.rs"));
/// (&process).write_all(b"\x07\0\0\0seven bytes")?;
/// let lease = host.recv()?.expect("a packet");
/// assert_eq!(lease.read_as::<[u8; 4]>(0), Some([7, 0, 0, 0]));
/// let mut text = [0; 5];
/// assert_eq!(lease.copy_to(4, &mut text), 5);
/// assert_eq!(&text, b"seven");
/// # Ok::<(), std::io::Error>(())
/// ```
///
/// A lease cannot outlive its stream, and with it its endpoint:
///
/// ```compile_fail,E0505
/// # use zerosock::vsock::Stream;
/// fn lease_outlives_stream(stream: Stream) {
///     let lease = stream.recv().unwrap().unwrap();
///     drop(stream);
///     println!("{}", lease.len());
/// }
/// ```
pub struct Lease<'a> {
    core: &'a Arc<Core>,
    body: Body,
}

/// A lease that may outlive its stream: it keeps the endpoint alive. For handing received bytes to
/// another thread, or to a [`Bytes`].
///
/// ```
/// use std::io::Write;
///
/// # let (host, process) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/pair.rs"));
/// (&process).write_all(b"for a thread of its own")?;
/// let lease = host.recv()?.expect("a packet").into_owned();
/// let length = std::thread::spawn(move || lease.to_vec().len());
/// assert_eq!(length.join().unwrap(), 23);
/// # Ok::<(), std::io::Error>(())
/// ```
pub struct OwnedLease {
    core: Arc<Core>,
    body: Body,
}

impl<'a> Lease<'a> {
    pub(super) fn new(core: &'a Arc<Core>, parts: LeaseParts, trust: Option<Trust>) -> Lease<'a> {
        let body = Body { parts, trust };
        Lease { core, body }
    }

    lease_calls!();

    /// Converts it to a lease that may outlive the stream.
    pub fn into_owned(mut self) -> OwnedLease {
        OwnedLease {
            core: self.core.clone(),
            body: std::mem::replace(&mut self.body, Body::nothing()),
        }
    }

    /// Converts it to a buffer for a [`zc::Sender`](crate::zc::Sender), which sends it over a
    /// kernel socket directly from the peer's memory. The buffer returns to the peer once the
    /// kernel has released it and the program has polled the sender. A program that waits for more
    /// from the peer while the sender holds the peer's whole window, and does not poll the sender,
    /// waits forever. No trust is needed: the kernel copies the bytes of that moment.
    ///
    /// The endpoint cannot take the buffer back, and the kernel keeps it until the TCP receiver has
    /// acknowledged it, without a time limit. A limit of the sender
    /// ([`SenderBuilder::limit`](crate::zc::SenderBuilder::limit)), or
    /// [`Sender::close`](crate::zc::Sender::close) with a time, bounds that: the sender resets the
    /// connection then, which releases the peer's memory.
    ///
    /// # Errors
    /// [`StreamError::Revoked`] with the unchanged lease: see [`LeaseReader::is_revoked`].
    pub fn into_zc_buf(self) -> Result<Buf, (StreamError, Self)> {
        let core = self.core;
        self.into_owned()
            .into_zc_buf()
            .map_err(|(error, lease)| (error, lease.into_bound(core)))
    }

    /// Converts it to a shared buffer, which can be cloned without a copy. The buffer returns to
    /// its sender when the last clone is dropped. Bytes in several pieces are copied once, since a
    /// `Bytes` is contiguous.
    ///
    /// # Errors
    /// [`StreamError::Untrusted`] with the unchanged lease: the peer may write the bytes at any
    /// time, and `Bytes` is a plain slice. [`StreamError::Revoked`]: see [`LeaseReader::is_revoked`].
    pub fn into_bytes(self) -> Result<Bytes, (StreamError, Self)> {
        let shared = self.read().share();
        match shared {
            Ok(Some(copy)) => Ok(Bytes::from(copy)),
            Ok(None) => Ok(Bytes::from_owner(Shared::new(self.into_owned()))),
            Err(error) => Err((error, self)),
        }
    }
}

impl OwnedLease {
    /// Converts it back to a lease that borrows its stream.
    fn into_bound(mut self, core: &Arc<Core>) -> Lease<'_> {
        let body = std::mem::replace(&mut self.body, Body::nothing());
        Lease { core, body }
    }

    lease_calls!();

    /// As [`Lease::into_zc_buf`].
    ///
    /// # Errors
    /// As there.
    pub fn into_zc_buf(self) -> Result<Buf, (StreamError, Self)> {
        if self.read().is_revoked() {
            return Err((StreamError::Revoked, self));
        }
        let len = self.len();
        let place = self.body.parts.place.clone();
        let shared = Shared::new(self);
        let BufferPlace::InPlace { memory, pieces } = place else {
            return Ok(Bytes::from_owner(shared).into());
        };
        if !shared.entered {
            return Ok(Bytes::from_owner(shared).into());
        }
        Ok(match Mapped::new(&memory, &pieces, 0, len, shared) {
            Ok(mapped) => mapped.into(),
            // In more regions than a `Buf` takes: copied once.
            Err(shared) => shared.reading().to_vec().into(),
        })
    }

    /// As [`Lease::into_bytes`].
    ///
    /// # Errors
    /// As there.
    pub fn into_bytes(self) -> Result<Bytes, (StreamError, Self)> {
        let shared = self.read().share();
        match shared {
            Ok(Some(copy)) => Ok(Bytes::from(copy)),
            Ok(None) => Ok(Bytes::from_owner(Shared::new(self))),
            Err(error) => Err((error, self)),
        }
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        self.body.end(self.core);
    }
}

impl Drop for OwnedLease {
    fn drop(&mut self) {
        self.body.end(&self.core);
    }
}

/// An owned lease that keeps its bytes in place: the owner of a `Bytes`.
struct Shared {
    lease: OwnedLease,
    /// The bytes, if the endpoint had moved them before.
    copy: Option<Copied>,
    /// The lease is entered: its bytes stay in place until the drop.
    entered: bool,
}

impl Shared {
    fn new(lease: OwnedLease) -> Shared {
        // The reading ends in the drop of `Shared`.
        let mut reading = std::mem::ManuallyDrop::new(lease.read());
        let (copy, entered) = (reading.copy.take(), reading.entered);
        Shared {
            lease,
            copy,
            entered,
        }
    }

    fn reading(&self) -> std::mem::ManuallyDrop<LeaseReader<'_>> {
        std::mem::ManuallyDrop::new(LeaseReader {
            core: &self.lease.core,
            body: &self.lease.body,
            copy: self.copy.clone(),
            entered: self.entered,
        })
    }
}

impl AsRef<[u8]> for Shared {
    fn as_ref(&self) -> &[u8] {
        if let Some((bytes, start)) = &self.copy {
            return bytes
                .get(*start..*start + self.lease.body.parts.len)
                .unwrap_or(&[]);
        }
        match &self.lease.body.parts.place {
            BufferPlace::Copied((bytes, start)) => bytes
                .get(*start..*start + self.lease.body.parts.len)
                .unwrap_or(&[]),
            BufferPlace::InPlace { memory, pieces } => {
                match (&pieces[..], self.lease.body.trust.filter(|_| self.entered)) {
                    ([piece], Some(trust)) => memory
                        .trusted_slice(piece.part(0, self.lease.body.parts.len), trust)
                        .unwrap_or(&[]),
                    _ => &[],
                }
            }
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        drop(std::mem::ManuallyDrop::into_inner(self.reading()));
    }
}

impl fmt::Debug for Lease<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("len", &self.body.parts.len)
            .field("in_place", &self.is_in_place())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for OwnedLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnedLease")
            .field("len", &self.body.parts.len)
            .finish_non_exhaustive()
    }
}
