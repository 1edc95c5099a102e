//! Maps: sockets by number, numbers by cookie, and the slots.

use std::io;
use std::mem::{offset_of, size_of};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::calls::{self, MapKind};
use super::error::BpfError;

/// Sockets by number (BPF_MAP_TYPE_SOCKMAP).
#[derive(Debug)]
pub struct SockMap(OwnedFd);

impl SockMap {
    /// A map for the numbers below `entries`.
    ///
    /// # Errors
    /// See [`BpfError`].
    pub fn create(entries: u32) -> Result<SockMap, BpfError> {
        calls::create_map(MapKind::SockMap, 4, 4, entries, 0)
            .map(SockMap)
            .map_err(|error| BpfError::new("the map of sockets", error))
    }

    /// Makes `number` refer to a socket, instead of the socket that it may have referred to. If a
    /// program is attached to the map, it runs for later packets of the socket.
    ///
    /// # Errors
    /// EOPNOTSUPP for a kind of socket that this kernel redirects not, or in no fitting state, as a
    /// TCP socket whose peer has ended its stream; EBUSY for a socket that runs another program already;
    /// E2BIG for a number beyond the end; ENOTSOCK.
    pub fn insert(&self, number: u32, socket: impl AsFd) -> io::Result<()> {
        let socket = calls::number(socket.as_fd());
        // SAFETY: keys and values of this map have four bytes, as `create` says.
        unsafe { calls::set(&self.0, number, socket) }
    }

    /// Ends what `insert` began. Packets that were handed to the socket and are not sent yet are lost
    /// if this was its last map.
    ///
    /// # Errors
    /// EINVAL if there is no socket of this number, for instance because it was closed.
    pub fn remove(&self, number: u32) -> io::Result<()> {
        // SAFETY: keys of this map have four bytes, as `create` says.
        unsafe { calls::remove(&self.0, number) }
    }
}

impl AsFd for SockMap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Numbers of sockets by their cookies (BPF_MAP_TYPE_HASH).
#[derive(Debug)]
pub struct NumberByCookie(OwnedFd);

impl NumberByCookie {
    /// An empty map with room for `entries` sockets.
    ///
    /// # Errors
    /// See [`BpfError`].
    pub fn create(entries: u32) -> Result<NumberByCookie, BpfError> {
        calls::create_map(MapKind::Hash, 8, 4, entries, 0)
            .map(NumberByCookie)
            .map_err(|error| BpfError::new("the map of numbers", error))
    }

    /// Sets the number of a socket.
    ///
    /// # Errors
    /// E2BIG if the map is full.
    pub fn insert(&self, cookie: u64, number: u32) -> io::Result<()> {
        // SAFETY: keys of this map have eight bytes and values four, as `create` says.
        unsafe { calls::set(&self.0, cookie, number) }
    }

    /// Removes a socket.
    ///
    /// # Errors
    /// ENOENT if it is not there.
    pub fn remove(&self, cookie: u64) -> io::Result<()> {
        // SAFETY: keys of this map have eight bytes, as `create` says.
        unsafe { calls::remove(&self.0, cookie) }
    }
}

impl AsFd for NumberByCookie {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// State of the direction that begins at one socket, shared with the program. One cache line.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct Slot {
    /// Cookie of the socket; 0: no socket has the slot. Written by this process.
    pub cookie: AtomicU64,
    /// The program redirects as long as `bytes` does not exceed this. Written by this process.
    pub allowance: AtomicU64,
    /// Bytes of `passed` that this process has received and sent on. While it differs from `passed` the
    /// program redirects nothing, so that the order of bytes is kept. Written by this process.
    pub handled: AtomicU64,
    /// Not 0: each packet is a datagram, which must stay one. Written by this process.
    pub whole: AtomicU64,
    /// Bytes redirected. Written by the program.
    pub bytes: AtomicU64,
    /// Packets redirected. Written by the program.
    pub packets: AtomicU64,
    /// Bytes that stayed at their socket. Written by the program.
    pub passed: AtomicU64,
    /// Packets without bytes, which cannot be redirected, and datagrams that were not redirected for
    /// another reason. Written by the program.
    pub dropped: AtomicU64,
}

impl Slot {
    pub(super) const COOKIE: i16 = offset_of!(Slot, cookie) as i16;
    pub(super) const ALLOWANCE: i16 = offset_of!(Slot, allowance) as i16;
    pub(super) const HANDLED: i16 = offset_of!(Slot, handled) as i16;
    pub(super) const WHOLE: i16 = offset_of!(Slot, whole) as i16;
    pub(super) const BYTES: i16 = offset_of!(Slot, bytes) as i16;
    pub(super) const PACKETS: i16 = offset_of!(Slot, packets) as i16;
    pub(super) const PASSED: i16 = offset_of!(Slot, passed) as i16;
    pub(super) const DROPPED: i16 = offset_of!(Slot, dropped) as i16;
}

/// A value of an array that the kernel's programs and this process access at the same time.
///
/// # Safety
/// The type consists of atomics of aligned words, and all bit patterns are values of it.
pub(crate) unsafe trait SharedValue {}

// SAFETY: it consists of `AtomicU64`.
unsafe impl SharedValue for Slot {}
// SAFETY: an aligned word, of which all bit patterns are values.
unsafe impl SharedValue for AtomicU64 {}

/// Values by number (BPF_MAP_TYPE_ARRAY), mapped into this process.
#[derive(Debug)]
pub(crate) struct SharedArray<T> {
    fd: OwnedFd,
    first: NonNull<T>,
    entries: u32,
}

// SAFETY: the mapping belongs to the process, not to a thread, and what is in it is atomic.
unsafe impl<T: SharedValue> Send for SharedArray<T> {}
// SAFETY: as for `Send`: only shared references to atomics are given out.
unsafe impl<T: SharedValue> Sync for SharedArray<T> {}

impl<T: SharedValue> SharedArray<T> {
    /// `entries` values, all zero. `what` names it in errors.
    pub(crate) fn create(what: &'static str, entries: u32) -> Result<SharedArray<T>, BpfError> {
        let size = size_of::<T>() as u32;
        let fd = calls::create_map(MapKind::Array, 4, size, entries, calls::MAPPABLE)
            .map_err(|error| BpfError::new(what, error))?;
        // SAFETY: a new mapping at an address that the kernel chooses replaces no other mapping. The
        // kernel refuses a length beyond the map's own.
        let mapped = unsafe {
            mmap(
                std::ptr::null_mut(),
                entries as usize * size_of::<T>(),
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &fd,
                0,
            )
        };
        let system = |error| BpfError::System { what, error };
        let mapped = mapped.map_err(|error| system(error.into()))?;
        let first = NonNull::new(mapped.cast::<T>());
        let first = first.ok_or_else(|| system(io::ErrorKind::AddrNotAvailable.into()))?;
        Ok(SharedArray { fd, first, entries })
    }

    /// The value of a number; `None` beyond the end.
    pub(crate) fn get(&self, number: u32) -> Option<&T> {
        if number >= self.entries {
            return None;
        }
        // SAFETY: the mapping has `entries` values, starts at a page, lives as long as `self` and is
        // never written except atomically: by programs with atomic additions of aligned words, by this
        // process through atomics. All bit patterns are values of `T`.
        Some(unsafe { self.first.add(number as usize).as_ref() })
    }
}

impl<T> AsFd for SharedArray<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl<T> Drop for SharedArray<T> {
    fn drop(&mut self) {
        let len = self.entries as usize * size_of::<T>();
        // SAFETY: the mapping that `create` made, of the same length; the references that `get` gave
        // out borrow `self` and are gone.
        let _ = unsafe { munmap(self.first.as_ptr().cast(), len) };
    }
}

/// The slots by number.
#[derive(Debug)]
pub struct Slots(SharedArray<Slot>);

impl Slots {
    /// `entries` slots, all zero.
    ///
    /// # Errors
    /// See [`BpfError`].
    pub fn create(entries: u32) -> Result<Slots, BpfError> {
        SharedArray::create("the map of slots", entries).map(Slots)
    }

    /// Number of slots.
    pub fn entries(&self) -> u32 {
        self.0.entries
    }

    /// The slot of a number; `None` beyond the end.
    pub fn get(&self, number: u32) -> Option<&Slot> {
        self.0.get(number)
    }
}

impl AsFd for Slots {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
