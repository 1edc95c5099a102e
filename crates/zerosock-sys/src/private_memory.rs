//! Private memory that goes back to the system as soon as it is dropped.
//!
//! The allocator keeps memory that was freed below an allocation in use, for later ones: after a burst of
//! buffers of 64 KiB that can be all of it.

use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::slice;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

/// A range of memory with a mapping of its own. Its pages are allocated by the first access.
pub struct PrivateMemory {
    start: NonNull<u8>,
    /// Bytes.
    len: usize,
}

// SAFETY: the value owns the mapping, and its bytes are reached by borrows of the value only.
unsafe impl Send for PrivateMemory {}
// SAFETY: as for Send; a shared borrow only reads.
unsafe impl Sync for PrivateMemory {}

impl PrivateMemory {
    /// `len` bytes of zeros, not 0 and at most `isize::MAX`.
    ///
    /// # Errors
    /// Errors of mmap(2): the length is out of its range, or there is no memory.
    pub fn new(len: usize) -> io::Result<PrivateMemory> {
        if isize::try_from(len).is_err() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory that exists.
        let start =
            unsafe { mmap_anonymous(std::ptr::null_mut(), len, access, MapFlags::PRIVATE) }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(PrivateMemory { start, len })
    }
}

impl Deref for PrivateMemory {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping has `len` initialized bytes, at most isize::MAX, and lives as long as
        // the value; they change only through `deref_mut`, which borrows the value alone.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for PrivateMemory {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; the borrow of the value is the only one.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for PrivateMemory {
    fn drop(&mut self) {
        // SAFETY: the mapping that `new` made, unmapped once; no borrow of the value is left.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
    }
}

impl fmt::Debug for PrivateMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PrivateMemory({} bytes)", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_zero_and_can_be_written_up_to_its_end() {
        let mut memory = PrivateMemory::new(5000).unwrap();
        assert_eq!(memory.len(), 5000);
        assert!(memory.iter().all(|byte| *byte == 0));
        memory[4999] = 7;
        assert_eq!(memory[4998..], [0, 7]);
        assert!(PrivateMemory::new(0).is_err());
        assert!(PrivateMemory::new(usize::MAX).is_err());
    }
}
