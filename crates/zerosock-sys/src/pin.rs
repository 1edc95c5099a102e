//! Pages that stay in memory and at their physical addresses, whatever happens to their file: registered buffers of
//! io_uring are a long-term pin.
//!
//! The file's owner may make it shorter, or punch holes. The pages then leave the file, but not the pin: the kernel gives
//! them to nothing else before it ends.

use std::io;

use io_uring::IoUring;
use libc::iovec;

use crate::hugetlbfs::HugeMapping;

/// Bytes of one registered buffer: the largest that the kernel takes.
const MAX_BUFFER: usize = 1 << 30;

/// Why pages cannot be pinned.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PinError {
    /// The kernel has no io_uring, or does not give it to this process.
    #[error(
        "this kernel gives no io_uring to this process ({0}), which pins pages: see kernel.io_uring_disabled in \
         sysctl, CONFIG_IO_URING, and seccomp filters"
    )]
    NoIoUring(io::Error),
    /// Pages cannot be registered: ENOMEM above RLIMIT_MEMLOCK without CAP_IPC_LOCK, EFAULT if the file has become
    /// shorter. Both, if pages lie in a movable zone, which a pin moves them out of, and there are no other free ones.
    #[error(
        "cannot pin pages: {0}; memory that was added at run time or can be removed has huge pages that cannot be \
         pinned: online it as `online_kernel`, or make more huge pages"
    )]
    Register(io::Error),
}

/// The pages of a mapping, pinned until it is dropped.
pub struct Pin {
    /// Has the pages as its buffers. Nothing is ever submitted.
    ring: IoUring,
}

impl std::fmt::Debug for Pin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Pin")
    }
}

impl Pin {
    /// Pins all pages of a mapping, which need not live as long as the pin. Pinning can move a page: read its address
    /// afterwards.
    ///
    /// # Errors
    /// See [`PinError`].
    pub fn new(mapping: &HugeMapping) -> Result<Pin, PinError> {
        let ring = IoUring::new(1).map_err(PinError::NoIoUring)?;
        let starts = (0..mapping.len()).step_by(MAX_BUFFER);
        let buffers = starts.map(|start| iovec {
            iov_base: mapping.addr().wrapping_byte_add(start),
            iov_len: MAX_BUFFER.min(mapping.len() - start),
        });
        let buffers: Vec<iovec> = buffers.collect();
        let submitter = ring.submitter();
        // SAFETY: the addresses are those of the mapping during the call, which takes a reference to each page. The
        // kernel uses a buffer later only for requests that name it, and the ring, which is private, never gets any.
        unsafe { submitter.register_buffers(&buffers) }.map_err(PinError::Register)?;
        Ok(Pin { ring })
    }
}

impl Drop for Pin {
    /// The pages are free when this returns. The kernel ends a ring some time after it is closed.
    fn drop(&mut self) {
        let _ = self.ring.submitter().unregister_buffers();
    }
}
