//! What a driver outside of a VMM shares with its device: memory, and two eventfds for each queue.
//!
//! # Invariants
//! The eventfds can outlive a device and be passed to the next one, so that a kick written while a
//! device restarts reaches the new one.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{EventfdFlags, eventfd};
use zerosock_ring::{DriverLayout, MapError, Memory, RegionConfig};
use zerosock_sys::memfd::{self, HUGE_PAGE};

use super::{Frontend, FrontendError, VringAddr};

/// Guest address of the first byte of shared memory. Not zero, so that a device fails that confuses
/// an unset address with a valid one.
const GUEST_BASE: u64 = 0x10_0000;
/// Front-end ("user") address of the same byte. Different from the guest address, so that a device
/// fails that confuses the two.
const USER_BASE: u64 = 0x7e00_0000_0000;
const PAGE: u64 = 4096;
/// Bytes of a cache line.
const LINE: u64 = 64;

/// Divides shared memory before it exists.
#[derive(Debug)]
pub struct Plan {
    /// The first byte of the region that the memory will be. Its length is 0.
    region: RegionConfig,
    end: u64,
    /// Bytes that lie together: those of a huge page, or [`TOGETHER`].
    page: u64,
}

/// More bytes than any memory has.
const TOGETHER: u64 = 1 << 62;

impl Default for Plan {
    fn default() -> Plan {
        Plan::at(GUEST_BASE, USER_BASE, TOGETHER)
    }
}

impl Plan {
    /// The most bytes of a ring or a buffer in [huge pages](Self::of_huge_pages).
    pub const MOST_IN_HUGE_PAGE: u64 = HUGE_PAGE - LINE;

    /// For memory whose device sees each huge page at another place, and reads the last cache line of each to find out
    /// whether it is still the same page: no ring and no buffer crosses the end of a huge page or has a byte in that
    /// line. Addresses are offsets in the memory.
    pub fn of_huge_pages() -> Plan {
        Plan::at(0, 0, HUGE_PAGE)
    }

    fn at(guest_addr: u64, user_addr: u64, page: u64) -> Plan {
        let region = RegionConfig {
            guest_addr,
            user_addr,
            len: 0,
            fd_offset: 0,
        };
        Plan {
            region,
            end: guest_addr,
            page,
        }
    }

    /// Guest address of `len` bytes that no other call has got, at the start of a page. In huge pages `len` is at most
    /// [`MOST_IN_HUGE_PAGE`](Self::MOST_IN_HUGE_PAGE).
    pub fn take(&mut self, len: u64) -> u64 {
        if self.end % self.page + len > self.page - LINE {
            self.end = self.end.next_multiple_of(self.page);
        }
        let start = self.end;
        self.end += len.next_multiple_of(PAGE);
        start
    }

    /// The places of `count` buffers of `len` bytes that no other call has got. For `len` see [`take`](Self::take).
    pub fn take_slots(&mut self, len: u32, count: u16) -> SlotPlaces {
        let stride = Plan::stride(len);
        let (len, count) = (u64::from(len), u64::from(count));
        // The bytes between the last buffer and the end need not be a whole stride.
        let span = |slots: u64| slots.saturating_sub(1) * stride + len;
        let per_page = (self.page - LINE).saturating_sub(len) / stride + 1;
        let full_pages = count.saturating_sub(1) / per_page;
        // All pages have the same offsets, so with several the first one is a fresh one too.
        let base = match full_pages {
            0 => self.take(span(count)),
            _ => {
                let base = self.end.next_multiple_of(self.page);
                self.end = base + full_pages * self.page;
                self.take(span(count - full_pages * per_page));
                base
            }
        };
        SlotPlaces {
            base,
            stride,
            per_page,
        }
    }

    /// Bytes taken so far.
    pub fn len(&self) -> u64 {
        let len = self.end - self.region.guest_addr;
        match self.page {
            HUGE_PAGE => len.next_multiple_of(HUGE_PAGE),
            _ => len,
        }
    }

    /// Whether nothing was taken.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Distance of two buffers of `len` bytes: an odd number of pairs of cache lines. At distances of
    /// a power of two, the beginnings of all buffers would share a few cache sets. Processors fetch
    /// the lines of a pair together.
    pub fn stride(len: u32) -> u64 {
        let pairs = u64::from(len).div_ceil(2 * LINE);
        2 * LINE * (pairs | 1)
    }
}

/// The places of buffers of equal length.
#[derive(Copy, Clone, Debug)]
pub struct SlotPlaces {
    base: u64,
    stride: u64,
    /// Buffers of a huge page; those behind them lie at the same offsets of the next one.
    per_page: u64,
}

impl SlotPlaces {
    /// The guest address of buffer `index`.
    pub fn addr(&self, index: u16) -> u64 {
        let index = u64::from(index);
        self.base + index / self.per_page * HUGE_PAGE + index % self.per_page * self.stride
    }
}

/// Why shared memory could not be created.
#[derive(Debug, thiserror::Error)]
pub enum SharedMemoryError {
    /// The memfd could not be created or duplicated.
    #[error("cannot create shared memory: {0}")]
    Memfd(#[from] io::Error),
    /// It could not be mapped.
    #[error("cannot map shared memory: {0}")]
    Map(#[from] MapError),
}

/// Memory of a driver: one memfd, mapped.
#[derive(Debug)]
pub struct SharedMemory {
    /// The mapping.
    pub memory: Arc<Memory>,
    /// The memfd, for SET_MEM_TABLE.
    pub fd: OwnedFd,
    /// The memory's only region.
    pub region: RegionConfig,
    /// The memory consists of huge pages.
    pub huge_pages: bool,
}

impl SharedMemory {
    /// Creates and maps the memory of a plan. With `seal` its length can never change. With
    /// `huge_pages` it consists of them if enough are free; that needs `seal`.
    ///
    /// # Errors
    /// [`SharedMemoryError`]: the system refuses the memory.
    pub fn create(
        name: &str,
        plan: &Plan,
        seal: bool,
        huge_pages: bool,
    ) -> Result<SharedMemory, SharedMemoryError> {
        let len = plan.len();
        if huge_pages && seal {
            // Whole pages, because a part of one could not be unmapped.
            let len = len.next_multiple_of(HUGE_PAGE);
            let region = RegionConfig { len, ..plan.region };
            let huge = memfd::create_huge(name, len).map_err(SharedMemoryError::Memfd);
            if let Ok(shared) = huge.and_then(|fd| SharedMemory::map(fd, region, true)) {
                return Ok(shared);
            }
        }
        let region = RegionConfig { len, ..plan.region };
        SharedMemory::map(memfd::create(name, len, seal)?, region, false)
    }

    /// Maps the beginning of a file that exists already as the memory of a plan. An access to pages that vanish from it
    /// is an error of that memory, as in one that is not sealed.
    ///
    /// # Errors
    /// [`SharedMemoryError`]: the system does not map it.
    pub fn of_file(fd: OwnedFd, plan: &Plan) -> Result<SharedMemory, SharedMemoryError> {
        let huge_pages = memfd::has_huge_pages(&fd);
        let region = RegionConfig {
            len: plan.len(),
            ..plan.region
        };
        SharedMemory::map(fd, region, huge_pages)
    }

    fn map(
        fd: OwnedFd,
        region: RegionConfig,
        huge_pages: bool,
    ) -> Result<SharedMemory, SharedMemoryError> {
        let memory = Memory::map(vec![(fd.try_clone()?, region)])?;
        Ok(SharedMemory {
            memory: Arc::new(memory),
            fd,
            region,
            huge_pages,
        })
    }

    /// The memory table, for [`Frontend::set_mem_table`].
    pub fn table(&self) -> [(BorrowedFd<'_>, RegionConfig); 1] {
        [(self.fd.as_fd(), self.region)]
    }

    /// The addresses of a ring as SET_VRING_ADDR takes them.
    pub fn vring_addr(&self, ring: &DriverLayout) -> VringAddr {
        let RegionConfig {
            guest_addr,
            user_addr,
            ..
        } = self.region;
        let user_addr = |addr| addr - guest_addr + user_addr;
        VringAddr {
            desc: user_addr(ring.desc),
            avail: user_addr(ring.avail),
            used: user_addr(ring.used),
        }
    }
}

/// Two eventfds for each queue.
#[derive(Debug)]
pub struct QueueEventFds {
    kicks: Vec<OwnedFd>,
    calls: Vec<OwnedFd>,
}

impl QueueEventFds {
    /// Eventfds for `queues` queues.
    ///
    /// # Errors
    /// Errors of eventfd(2).
    pub fn new(queues: u16) -> io::Result<QueueEventFds> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let make = || {
            let fds = (0..queues).map(|_| Ok(eventfd(0, flags)?));
            fds.collect::<io::Result<Vec<_>>>()
        };
        Ok(QueueEventFds {
            kicks: make()?,
            calls: make()?,
        })
    }

    /// The eventfds that the device writes to.
    pub fn calls(&self) -> &[OwnedFd] {
        &self.calls
    }

    /// Notifies the device of new entries in queue `index`.
    pub fn kick(&self, index: usize) {
        if let Some(kick) = self.kicks.get(index) {
            // Fails only if the counter is full (EAGAIN); then a kick is pending already.
            let _ = rustix::io::write(kick, &1u64.to_ne_bytes());
        }
    }

    /// As `kick`, if `wanted`; returns `wanted`.
    pub fn kick_if(&self, wanted: bool, index: usize) -> bool {
        if wanted {
            self.kick(index);
        }
        wanted
    }

    /// Notifies the device of every queue.
    pub fn kick_all(&self) {
        (0..self.kicks.len()).for_each(|queue| self.kick(queue));
    }
}

impl Frontend {
    /// Passes the memory table and starts the queues, one for each of `rings`, each at its index in
    /// `bases`.
    ///
    /// # Errors
    /// [`FrontendError`] of the first request that fails.
    pub fn start_queues(
        &mut self,
        shared: &SharedMemory,
        rings: &[DriverLayout],
        event_fds: &QueueEventFds,
        bases: &[u16],
    ) -> Result<(), FrontendError> {
        self.set_mem_table(&shared.table())?;
        let fds = event_fds.kicks.iter().zip(&event_fds.calls);
        let queues = rings.iter().zip(fds).zip(bases);
        for (index, ((ring, (kick, call)), base)) in (0u32..).zip(queues) {
            self.set_vring_num(index, ring.size)?;
            self.set_vring_base(index, *base)?;
            self.set_vring_addr(index, shared.vring_addr(ring))?;
            self.set_vring_call(index, Some(call.as_fd()))?;
            self.set_vring_kick(index, Some(kick.as_fd()))?;
        }
        for (index, _) in (0u32..).zip(rings) {
            self.set_vring_enable(index, true)?;
        }
        self.sync()
    }
}

#[cfg(test)]
#[path = "shared_tests.rs"]
mod tests;
