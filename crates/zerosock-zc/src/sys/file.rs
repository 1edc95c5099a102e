//! Files as buffers: sent from the page cache.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use super::{Piece, Stable};

/// A file in memory, to be sent in parts.
///
/// This type does not read the bytes: the kernel does when it sends them. A concurrent write to the
/// file may or may not be sent; a send of bytes that were truncated fails with EFAULT.
///
/// A forked child may use and drop its copy.
#[derive(Clone, Debug)]
pub struct FileMap(Arc<Mapping>);

/// A part of a file, as a buffer. It keeps the file in memory.
#[derive(Clone, Debug)]
pub struct FilePart {
    mapping: Arc<Mapping>,
    from: usize,
    len: usize,
}

#[derive(Debug)]
struct Mapping {
    /// None for an empty file.
    start: Option<NonNull<u8>>,
    len: usize,
}

// SAFETY: the address is only passed to the kernel, and unmapped by the drop of the mapping.
unsafe impl Send for Mapping {}
// SAFETY: nothing in it changes while it is shared.
unsafe impl Sync for Mapping {}

impl FileMap {
    /// Maps the whole file, as long as it is now.
    ///
    /// # Errors
    /// The error of mmap(2): ENODEV if it is no regular file.
    pub fn new(file: &File) -> io::Result<Self> {
        let len = usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?;
        if len == 0 {
            return Ok(Self(Arc::new(Mapping { start: None, len })));
        }
        // SAFETY: the kernel chooses the address, so no existing mapping is replaced. The mapping
        // is read-only, and no reference into it is ever made: changes of the file are visible to
        // the kernel only.
        let start = unsafe {
            mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ,
                MapFlags::SHARED,
                file,
                0,
            )
        }?;
        let start = NonNull::new(start.cast::<u8>());
        Ok(Self(Arc::new(Mapping { start, len })))
    }

    /// Length of the file in bytes, when it was mapped.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a length of 0 says it")]
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// `len` bytes from `from` on; fewer where the file ends. Their pages are read into memory with
    /// one system call.
    #[must_use]
    pub fn part(&self, from: usize, len: usize) -> FilePart {
        let from = from.min(self.0.len);
        let part = FilePart {
            mapping: Arc::clone(&self.0),
            from,
            len: len.min(self.0.len - from),
        };
        part.populate();
        part
    }
}

impl FilePart {
    /// Reads the pages into memory, if possible. Errors are ignored: this only makes the send
    /// cheaper.
    fn populate(&self) {
        let page = rustix::param::page_size();
        let skipped = self.from % page;
        if let (Some(start), true) = (self.mapping.start, self.len > 0) {
            let first = start.as_ptr().wrapping_add(self.from - skipped).cast();
            // SAFETY: the range lies within the mapping, and populating changes no bytes.
            let _ = unsafe { madvise(first, self.len + skipped, Advice::LinuxPopulateRead) };
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if let Some(start) = self.start {
            // SAFETY: mapped by `new`, of this length. No part refers to it any more: each keeps
            // this value.
            let _ = unsafe { munmap(start.as_ptr().cast(), self.len) };
        }
    }
}

// SAFETY: the mapping stays where it is as long as the part has it. It is read-only; a writer of
// the file does not write through this value, and the kernel's reading tolerates it.
unsafe impl Stable for FilePart {
    fn pieces(&self, each: &mut impl FnMut(Piece)) {
        if let Some(start) = self.mapping.start {
            each(Piece {
                address: start.as_ptr().wrapping_add(self.from),
                len: self.len,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_lies_within_its_file() {
        let path = std::env::temp_dir().join(format!("zerosock-part-{}", std::process::id()));
        std::fs::write(&path, vec![1; 10_000]).expect("a file");
        let file = File::open(&path).expect("the file");
        std::fs::remove_file(&path).expect("the file");
        let map = FileMap::new(&file).expect("a mapping");
        assert_eq!(map.len(), 10_000);
        for (from, len, found) in [
            (0, 10_000, 10_000),
            (5000, 3, 3),
            (9999, 9, 1),
            (10_000, 1, 0),
            (usize::MAX, usize::MAX, 0),
        ] {
            assert_eq!(map.part(from, len).total(), found, "{from} {len}");
        }
        let part = map.part(5000, 100);
        drop(map);
        let mut seen = Vec::new();
        part.pieces(&mut |piece| seen.push((piece.address as usize % 4096, piece.len)));
        assert_eq!(seen, [(5000 % 4096, 100)]);
    }
}
