//! Maps a peer's files, after all checks of the memory table.

use core::{fmt, ptr};
use std::sync::Arc;

use rustix::fd::{AsFd, BorrowedFd};
use rustix::fs::{fstat, fstatfs};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use crate::fault::Registration;

/// One region of a vhost-user memory table.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub struct RegionConfig {
    /// First guest physical address.
    pub guest_addr: u64,
    /// First address in the front-end's own address space; ring addresses are given in it.
    pub user_addr: u64,
    /// Length in bytes.
    pub len: u64,
    /// Where the region starts in its file, in bytes; need not be page-aligned.
    pub fd_offset: u64,
}

/// Most regions of one [`Memory`](crate::Memory); vhost-user's memory-slot extension allows 509.
pub const MAX_REGIONS: usize = 512;

/// Why a memory table was refused. All but `Map` and `Stat` are the peer's fault.
#[derive(Clone, Eq, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MapError {
    /// More than [`MAX_REGIONS`] regions.
    #[error("{count} memory regions, at most {MAX_REGIONS} are taken")]
    TooMany {
        /// How many were given.
        count: usize,
    },
    /// A region of no bytes.
    #[error("memory region {index} has no length")]
    ZeroLength {
        /// Position in the table.
        index: usize,
    },
    /// A region that ends past the end of the address space.
    #[error("memory region {index} wraps around the address space")]
    Wraps {
        /// Position in the table.
        index: usize,
    },
    /// Two regions share guest or user addresses.
    #[error("memory regions {first} and {second} overlap")]
    Overlap {
        /// Position of one.
        first: usize,
        /// Position of the other.
        second: usize,
    },
    /// The file ends before the region does.
    #[error("memory region {index} ends past its file, which has {file_len} bytes")]
    ShortFile {
        /// Position in the table.
        index: usize,
        /// Length of the file in bytes.
        file_len: u64,
    },
    /// The file's pages come from another process or machine, which could block us for ever.
    #[error(
        "memory region {index} lies on a file system (type {magic:#x}) that another process or machine serves"
    )]
    FileSystem {
        /// Position in the table.
        index: usize,
        /// The file system's type as statfs(2) gives it.
        magic: u64,
    },
    /// fstat or fstatfs failed.
    #[error("cannot examine the file of memory region {index}: {errno}")]
    Stat {
        /// Position in the table.
        index: usize,
        /// The system's reason.
        errno: Errno,
    },
    /// mmap failed.
    #[error("cannot map memory region {index}: {errno}")]
    Map {
        /// Position in the table.
        index: usize,
        /// The system's reason.
        errno: Errno,
    },
}

/// Unmaps the regions of a peer's memory on another thread.
///
/// The last munmap(2) of a region frees its pages, which takes the kernel 150 ms per GiB. By
/// default the thread that drops the last reference to a [`Memory`](crate::Memory) makes that call;
/// a program with threads that must not stop for so long passes the region to another one.
pub trait Unmapper: fmt::Debug + Send + Sync {
    /// Takes a region that nothing uses any more. Dropping it unmaps it.
    fn unmap(&self, region: RetiredRegion);
}

/// Bytes unmapped by one munmap(2). The call holds the lock of the address space, for which mmap(2)
/// and page faults of other threads wait: 10 to 17 ms for this size.
const PIECE: usize = 32 << 20;

/// A region that nothing uses any more. Dropping it unmaps it, in pieces.
#[derive(Debug)]
pub struct RetiredRegion {
    start: *mut u8,
    len: usize,
}

// SAFETY: a range of addresses of this process, which any thread may unmap; nothing else uses it.
unsafe impl Send for RetiredRegion {}

impl RetiredRegion {
    /// A mapping that its maker alone has, and nothing uses once the result is dropped.
    pub(crate) fn new(start: *mut u8, len: usize) -> RetiredRegion {
        RetiredRegion { start, len }
    }

    /// Mapped bytes.
    pub fn size(&self) -> usize {
        self.len
    }
}

impl Drop for RetiredRegion {
    fn drop(&mut self) {
        let mut done = 0;
        while done < self.len {
            let piece = PIECE.min(self.len - done);
            // SAFETY: `start` and `len` are what mmap returned for this object alone, and it is
            // made only once nothing has an address in it: see `Mapping`. PIECE is a multiple of
            // every page size up to 32 MiB; a larger page fails with EINVAL and stays mapped until
            // the next line unmaps all.
            let result = unsafe { munmap(self.start.add(done).cast(), piece) };
            if result.is_err() {
                // SAFETY: as above, for what is left.
                let _ = unsafe { munmap(self.start.add(done).cast(), self.len - done) };
                return;
            }
            done += piece;
        }
    }
}

/// A shared mapping, and its entry in the fault table.
#[derive(Debug)]
pub(super) struct Mapping {
    /// None only during `drop`.
    region: Option<RetiredRegion>,
    /// An Option only so that `drop` can end it before it unmaps.
    registration: Option<Registration>,
    unmapper: Option<Arc<dyn Unmapper>>,
}

impl Mapping {
    #[inline]
    pub(super) fn registration(&self) -> Option<&Registration> {
        self.registration.as_ref()
    }

    pub(super) fn unmapper(&self) -> Option<&Arc<dyn Unmapper>> {
        self.unmapper.as_ref()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // Removed from the table first: once unmapped, the addresses may belong to another mapping
        // at once.
        self.registration = None;
        // It is dropped with its Memory, which all slices borrow and all rings and memories of extents
        // keep alive, so nothing has an address in it any more.
        if let (Some(region), Some(unmapper)) = (self.region.take(), &self.unmapper) {
            unmapper.unmap(region);
        }
    }
}

/// Checks everything in a table that does not depend on its files.
pub(super) fn check(configs: &[RegionConfig]) -> Result<(), MapError> {
    if configs.len() > MAX_REGIONS {
        return Err(MapError::TooMany {
            count: configs.len(),
        });
    }
    for (index, config) in configs.iter().enumerate() {
        if config.len == 0 {
            return Err(MapError::ZeroLength { index });
        }
        let wraps = |start: u64| start.checked_add(config.len).is_none();
        if wraps(config.guest_addr)
            || wraps(config.user_addr)
            || wraps(config.fd_offset)
            || config.len > isize::MAX as u64
        {
            return Err(MapError::Wraps { index });
        }
    }
    check_overlap(configs, |config| config.guest_addr)?;
    check_overlap(configs, |config| config.user_addr)
}

fn check_overlap(
    configs: &[RegionConfig],
    start: impl Fn(&RegionConfig) -> u64,
) -> Result<(), MapError> {
    let mut order: Vec<(u64, u64, usize)> = configs
        .iter()
        .enumerate()
        .map(|(index, config)| (start(config), start(config) + config.len, index))
        .collect();
    order.sort_unstable();
    for pair in order.windows(2) {
        if let [(_, end, first), (next, _, second)] = *pair
            && next < end
        {
            return Err(MapError::Overlap { first, second });
        }
    }
    Ok(())
}

/// Bytes of the whole pages in which the region lies.
fn pages(config: &RegionConfig, page: u64) -> Option<u64> {
    let end = (config.fd_offset % page).checked_add(config.len)?;
    end.checked_next_multiple_of(page)
}

impl RegionConfig {
    /// Bytes of address space that the region of this file takes when it is mapped: whole pages, of
    /// the size that its file system has.
    ///
    /// # Errors
    /// [`MapError`], with this position in the table.
    pub fn mapped_len(&self, index: usize, fd: impl AsFd) -> Result<u64, MapError> {
        let page = page_size(index, fd.as_fd())?;
        pages(self, page).ok_or(MapError::Wraps { index })
    }
}

pub(super) fn map_region(
    index: usize,
    fd: BorrowedFd<'_>,
    config: &RegionConfig,
    owner: u64,
    leader: Option<&Registration>,
    unmapper: Option<&Arc<dyn Unmapper>>,
) -> Result<(Mapping, *mut u8), MapError> {
    let stat = fstat(fd).map_err(|errno| MapError::Stat { index, errno })?;
    let file_len = u64::try_from(stat.st_size).unwrap_or(0);
    if config.fd_offset + config.len > file_len {
        return Err(MapError::ShortFile { index, file_len });
    }
    let page = page_size(index, fd)?;
    let skip = config.fd_offset % page;
    let too_long = MapError::Map {
        index,
        errno: Errno::NOMEM,
    };
    let len = pages(config, page)
        .and_then(|len| usize::try_from(len).ok())
        .ok_or(too_long)?;
    let map_error = |errno| MapError::Map { index, errno };
    // SAFETY: a fresh mapping at an address the system chooses touches no memory in use.
    let start = unsafe {
        mmap(
            ptr::null_mut(),
            len,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED | MapFlags::NORESERVE,
            fd,
            config.fd_offset - skip,
        )
    }
    .map_err(map_error)?
    .cast::<u8>();
    // A core dump of this process must not contain guest memory. The advice may fail; that is
    // accepted.
    // SAFETY: the range just mapped; the advice changes no contents.
    let _ = unsafe { madvise(start.cast(), len, Advice::LinuxDontDump) };
    let registration =
        Registration::new(start.expose_provenance(), len, page as usize, owner, leader);
    let mapping = Mapping {
        region: Some(RetiredRegion::new(start, len)),
        registration: Some(registration),
        unmapper: unmapper.cloned(),
    };
    // SAFETY: skip < page <= len: inside the mapping.
    let host = unsafe { start.add(skip as usize) };
    Ok((mapping, host))
}

/// File system types (statfs(2)).
const FUSE: u64 = 0x6573_5546;
const NFS: u64 = 0x6969;
const SMB2: u64 = 0xfe53_4d42;
const CIFS: u64 = 0xff53_4d42;
const V9FS: u64 = 0x0102_1997;
const HUGETLBFS: u64 = 0x9584_58f6;

/// The unit in which a file of this file system is mapped, in bytes: `block` for hugetlbfs, else
/// the system's page; None if its pages are fetched from another process or machine. A front-end
/// that serves its own pages could block one of our threads for ever, and with it every other VM
/// that the thread serves.
fn mapping_unit(magic: u64, block: u64, page: u64) -> Option<u64> {
    match magic {
        FUSE | NFS | SMB2 | CIFS | V9FS => None,
        HUGETLBFS if block.is_power_of_two() => Some(block.max(page)),
        _ => Some(page),
    }
}

fn page_size(index: usize, fd: BorrowedFd<'_>) -> Result<u64, MapError> {
    let file_system = fstatfs(fd).map_err(|errno| MapError::Stat { index, errno })?;
    // The mask removes the sign extension of the magic number on some architectures.
    let magic = file_system.f_type as u64 & 0xffff_ffff;
    let block = u64::try_from(file_system.f_bsize).unwrap_or(0);
    let page = rustix::param::page_size() as u64;
    mapping_unit(magic, block, page).ok_or(MapError::FileSystem { index, magic })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_served_by_another_process_are_refused() {
        for magic in [FUSE, NFS, SMB2, CIFS, V9FS] {
            assert_eq!(mapping_unit(magic, 4096, 4096), None);
        }
        let (tmpfs, ext4) = (0x0102_1994, 0xef53);
        assert_eq!(mapping_unit(tmpfs, 0x20_0000, 4096), Some(4096));
        assert_eq!(mapping_unit(ext4, 1024, 4096), Some(4096));
        assert_eq!(mapping_unit(HUGETLBFS, 0x20_0000, 4096), Some(0x20_0000));
        assert_eq!(mapping_unit(HUGETLBFS, 0, 4096), Some(4096));
    }
    #[test]
    fn a_region_takes_the_pages_that_it_touches() {
        let len = |fd_offset, len| {
            let config = RegionConfig {
                guest_addr: 0,
                user_addr: 0,
                len,
                fd_offset,
            };
            pages(&config, 4096)
        };
        assert_eq!(len(0, 1), Some(4096));
        assert_eq!(len(0, 4096), Some(4096));
        assert_eq!(len(4095, 2), Some(8192));
        assert_eq!(len(8192, 4097), Some(8192));
        assert_eq!(len(4095, u64::MAX), None);
        assert_eq!(len(0, u64::MAX), None);
    }
}
