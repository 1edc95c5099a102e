//! Reading leased bytes while the endpoint does not move them.

use std::fmt;
use std::io::{self, IoSlice};
use std::os::fd::AsFd;
use std::sync::Arc;

use zerocopy::{FromBytes, Immutable, KnownLayout};
use zerosock_ring::{SliceBuf, Trust};

use crate::table::leases::{Entered, NONE};
use crate::table::sockets::{BufferPlace, Copied, LeaseParts, PIECES};
use crate::vsock::errors::StreamError;
use crate::vsock::hub::Core;

/// The contents of [`Lease`] and [`OwnedLease`].
#[derive(Debug)]
pub(super) struct Body {
    pub(super) parts: LeaseParts,
    /// The application's declaration of trust, if it covers this peer.
    pub(super) trust: Option<Trust>,
}

impl Body {
    /// A body that refers to no lease: left behind for the drop when a lease is converted.
    pub(super) fn nothing() -> Self {
        let parts = LeaseParts {
            index: NONE,
            len: 0,
            place: BufferPlace::Copied((Arc::default(), 0)),
            round: None,
        };
        Self { parts, trust: None }
    }

    /// Returns the lease, which is dropped.
    #[inline]
    pub(super) fn end(&self, core: &Core) {
        core.return_lease(self.parts.index, self.parts.round);
    }
}

/// Leased bytes that are not moved while this lives.
///
/// ```
/// use std::io::Write;
///
/// # let (host, process) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/pair.rs"));
/// (&process).write_all(&[1, 0, 0, 0, 2, 0, 0, 0])?;
/// let lease = host.recv()?.expect("a packet");
/// let reading = lease.read();
/// // Trust was declared, so there are a plain slice and a value in place.
/// assert_eq!(reading.as_slice().expect("trusted").len(), 8);
/// assert_eq!(reading.view::<[u32; 2]>().map(|words| words[1].to_le()), Some(2));
/// assert!(!reading.is_revoked());
/// # Ok::<(), std::io::Error>(())
/// ```
///
/// It cannot outlive its lease, and a slice of it cannot outlive the reading:
///
/// ```compile_fail,E0505
/// # use zerosock::vsock::Lease;
/// fn reading_outlives_lease(lease: Lease<'_>) {
///     let reading = lease.read();
///     drop(lease);
///     println!("{}", reading.len());
/// }
/// ```
///
/// ```compile_fail,E0505
/// # use zerosock::vsock::Lease;
/// fn slice_outlives_reading(lease: Lease<'_>) {
///     let reading = lease.read();
///     let bytes = reading.as_slice();
///     drop(reading);
///     println!("{bytes:?}");
/// }
/// ```
pub struct LeaseReader<'l> {
    pub(super) core: &'l Core,
    pub(super) body: &'l Body,
    /// The bytes, if the endpoint has moved them.
    pub(super) copy: Option<Copied>,
    /// The lease is entered: its bytes stay in place until the drop.
    pub(super) entered: bool,
}

impl<'l> LeaseReader<'l> {
    pub(super) fn new(core: &'l Core, body: &'l Body) -> LeaseReader<'l> {
        let (mut copy, mut entered) = (None, false);
        if let BufferPlace::InPlace { .. } = &body.parts.place {
            entered = core.leases().enter(body.parts.index) == Entered::InPlace;
            if !entered {
                // The copy exists: the endpoint stores it before it marks the lease as moved.
                copy = core.lock().backend().copy_of(body.parts.index);
                debug_assert!(copy.is_some(), "moved to nowhere");
            }
        }
        LeaseReader {
            core,
            body,
            copy,
            entered,
        }
    }

    /// Where the bytes are, if in private memory.
    fn private(&self) -> Option<&[u8]> {
        let (bytes, start) = match (&self.copy, &self.body.parts.place) {
            (Some(copy), _) | (None, BufferPlace::Copied(copy)) => copy,
            (None, BufferPlace::InPlace { .. }) => return None,
        };
        bytes.get(*start..*start + self.body.parts.len)
    }

    /// Length in bytes; never 0.
    #[expect(clippy::len_without_is_empty, reason = "a lease is never empty")]
    pub fn len(&self) -> usize {
        self.body.parts.len
    }

    /// Whether the peer has taken its memory back during the reading (it disconnected, rebooted, or
    /// changed its memory): the memory is still mapped, but its contents are undefined.
    ///
    /// A long reading keeps mapped memory that its guest no longer uses. The limit is
    /// [`HostBuilder::old_memory`](crate::vsock::HostBuilder::old_memory), at least twice the guest's
    /// memory: beyond it further leases from that guest are copies.
    pub fn is_revoked(&self) -> bool {
        match self.entered {
            true => self.core.leases().is_revoked(self.body.parts.index),
            // Neither in place nor copied; cannot happen.
            false => self.private().is_none(),
        }
    }

    /// `None`: the bytes can be shared in place. Otherwise a copy of them.
    pub(super) fn share(&self) -> Result<Option<Vec<u8>>, StreamError> {
        if self.private().is_some() {
            return Ok(None);
        }
        if self.is_revoked() {
            return Err(StreamError::Revoked);
        }
        if self.body.trust.is_none() {
            return Err(StreamError::Untrusted);
        }
        Ok(self.as_slice().is_none().then(|| self.to_vec()))
    }

    /// The bytes themselves. `None` if the peer may write them: then copy them out, or, for
    /// process peers, declare trust when opening the endpoint. `None` also for bytes in more than
    /// one piece, or revoked ones ([`is_revoked`](Self::is_revoked)).
    pub fn as_slice(&self) -> Option<&[u8]> {
        if !self.entered {
            return self.private();
        }
        if self.core.leases().is_revoked(self.body.parts.index) {
            return None;
        }
        let BufferPlace::InPlace { memory, pieces } = &self.body.parts.place else {
            return None;
        };
        let [piece] = pieces[..] else { return None };
        memory.trusted_slice(piece.part(0, self.body.parts.len), self.body.trust?)
    }

    /// The value at the beginning, in place. `None` as for [`as_slice`](Self::as_slice), or if
    /// there are too few bytes or they are not aligned for it. In buffers of a zerosock driver,
    /// payload is aligned to 64 bytes.
    pub fn view<T: FromBytes + KnownLayout + Immutable>(&self) -> Option<&T> {
        T::ref_from_prefix(self.as_slice()?)
            .ok()
            .map(|(value, _)| value)
    }

    /// The complete values from `offset` on, in place. `None` as for [`view`](Self::view).
    ///
    /// ```
    /// use std::io::Write;
    ///
    /// # let (host, process) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/pair.rs"));
    /// (&process).write_all(&[0, 0, 0, 0, 0, 0, 0x80, 0x3f, 0, 0, 0, 0x40])?;
    /// let lease = host.recv()?.expect("a packet");
    /// if cfg!(target_endian = "little") {
    ///     assert_eq!(lease.read().view_slice::<f32>(4), Some(&[1.0, 2.0][..]));
    /// }
    /// # Ok::<(), std::io::Error>(())
    /// ```
    pub fn view_slice<T: FromBytes + Immutable>(&self, offset: usize) -> Option<&[T]> {
        let bytes = self.as_slice()?.get(offset..)?;
        let count = bytes.len().checked_div(size_of::<T>())?;
        <[T]>::ref_from_prefix_with_elems(bytes, count)
            .ok()
            .map(|(values, _)| values)
    }

    /// A copy of the value at `offset`; `None` if it does not lie within the lease.
    pub fn read_as<T: FromBytes>(&self, offset: usize) -> Option<T> {
        const MOST: usize = 256;
        if size_of::<T>() > self.body.parts.len.checked_sub(offset)? {
            return None;
        }
        if size_of::<T>() <= MOST {
            let mut bytes = [0; MOST];
            let bytes = &mut bytes[..size_of::<T>()];
            self.copy_to(offset, bytes);
            return T::read_from_bytes(bytes).ok();
        }
        let mut bytes = vec![0; size_of::<T>()];
        self.copy_to(offset, &mut bytes);
        T::read_from_bytes(&bytes).ok()
    }

    /// Copies bytes from `offset` on to `out`; returns how many. Safe with any peer.
    pub fn copy_to(&self, offset: usize, out: &mut [u8]) -> usize {
        let offset = offset.min(self.body.parts.len);
        let len = out.len().min(self.body.parts.len - offset);
        let out = &mut out[..len];
        if let Some(bytes) = self.private() {
            out.copy_from_slice(&bytes[offset..offset + len]);
            return len;
        }
        match &self.body.parts.place {
            BufferPlace::InPlace { memory, pieces } => memory.read(pieces, offset, out),
            BufferPlace::Copied(_) => 0,
        }
    }

    /// Passes all bytes in order to `look` in plain slices: the bytes themselves where
    /// [`as_slice`](Self::as_slice) gives them, otherwise copies of a few hundred bytes each, made
    /// just before they are looked at. Up to 4 KiB are copied at once. Safe with any peer, and for long
    /// leases faster than [`copy_to`](Self::copy_to): the copies stay in the nearest cache.
    ///
    /// ```
    /// use std::hash::{DefaultHasher, Hasher};
    /// use std::io::Write;
    ///
    /// # let (host, process) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/pair.rs"));
    /// (&process).write_all(b"summed and hashed")?;
    /// let lease = host.recv()?.expect("a packet");
    /// let (mut sum, mut hash) = (0u64, DefaultHasher::new());
    /// lease.read().windows(|bytes| {
    ///     sum += bytes.iter().map(|&byte| u64::from(byte)).sum::<u64>();
    ///     hash.write(bytes);
    /// });
    /// assert_eq!(sum, 1643);
    /// # Ok::<(), std::io::Error>(())
    /// ```
    ///
    /// The next window may overwrite a slice, which therefore cannot leave the closure:
    ///
    /// ```compile_fail,E0521
    /// # use zerosock::vsock::LeaseReader;
    /// fn window_outlives_its_call(reader: &LeaseReader<'_>) {
    ///     let mut kept: &[u8] = &[];
    ///     reader.windows(|bytes| kept = bytes);
    /// }
    /// ```
    pub fn windows(&self, mut look: impl FnMut(&[u8])) {
        if let Some(bytes) = self.as_slice() {
            return look(bytes);
        }
        if self.entered {
            let slices = self.slices(self.body.parts.len);
            slices.iter().for_each(|slice| slice.windows(&mut look));
        }
    }

    /// A copy of all bytes.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.body.parts.len];
        self.copy_to(0, &mut bytes);
        bytes
    }

    /// Writes all bytes to `fd` without a copy in user space; returns how many the system took.
    ///
    /// # Errors
    /// Those of `writev(2)`.
    pub fn write_to(&self, fd: impl AsFd) -> io::Result<usize> {
        if let Some(bytes) = self.private() {
            return Ok(rustix::io::writev(fd, &[IoSlice::new(bytes)])?);
        }
        zerosock_sys::write_slices(fd.as_fd(), &self.slices(self.body.parts.len))
    }

    /// The first `len` bytes where they lie; none for bytes that were copied.
    fn slices(&self, len: usize) -> SliceBuf<'_, PIECES> {
        let mut slices = SliceBuf::new();
        if let BufferPlace::InPlace { memory, pieces } = &self.body.parts.place {
            memory.slices(pieces, 0, len, &mut slices);
        }
        slices
    }

    /// The address of the first byte, to check that it lies where the peer wrote it.
    pub fn as_ptr(&self) -> *const u8 {
        if let Some(bytes) = self.private() {
            return bytes.as_ptr();
        }
        let slices = self.slices(1);
        slices
            .first()
            .map_or(std::ptr::null(), |slice| slice.as_ptr().cast_const())
    }
}

impl Drop for LeaseReader<'_> {
    fn drop(&mut self) {
        if self.entered {
            self.core.end_access(self.body.parts.index);
        }
    }
}

impl fmt::Debug for LeaseReader<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseReader")
            .field("len", &self.body.parts.len)
            .field("revoked", &self.is_revoked())
            .finish_non_exhaustive()
    }
}
