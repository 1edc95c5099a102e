//! A pipe with its lock held: a thread of the attacker reads from it into a page that
//! userfaultfd(2) never resolves.
//!
//! The kernel copies under the lock of the pipe, so that the thread keeps it until the page is
//! there. Another thread that writes to the pipe, or closes the last descriptor of an end, then sleeps
//! uninterruptibly. The thread that holds the lock can be killed, and the end of this process
//! resolves the page fault, so that no thread stays stuck. The constants are those of
//! linux/userfaultfd.h.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::thread::JoinHandle;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::pipe::{PipeFlags, pipe_with};

use super::process::DEADLINE;

const UFFD_API: u64 = 0xaa;
/// `_IOWR(UFFD_API, 0x3f, struct uffdio_api)`
const UFFDIO_API: u64 = 0xc018_aa3f;
/// `_IOWR(UFFD_API, 0x00, struct uffdio_register)`
const UFFDIO_REGISTER: u64 = 0xc020_aa00;
const UFFDIO_REGISTER_MODE_MISSING: u64 = 1;
const PAGE: usize = 4096;

/// The holder of the lock. Dropping it releases the lock.
pub(crate) struct PipeLock {
    /// Closing it resolves the page fault.
    faults: Option<OwnedFd>,
    holder: Option<JoinHandle<()>>,
}

/// A page whose faults nothing resolves while `faults` is open.
struct MissingPage {
    start: *mut libc::c_void,
}

impl PipeLock {
    /// Makes a pipe and takes its lock. Returns the only writing end, and the holder of the lock.
    ///
    /// # Errors
    /// When this user may not handle page faults of system calls, or there is no userfaultfd(2).
    pub(crate) fn hold() -> io::Result<(OwnedFd, PipeLock)> {
        let (faults, page) = MissingPage::new()?;
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC)?;
        rustix::io::write(&writer, b"x")?;
        let holder = std::thread::spawn(move || page.read_from(&reader));
        let lock = PipeLock {
            faults: Some(faults),
            holder: Some(holder),
        };
        lock.wait_for_fault()?;
        Ok((writer, lock))
    }

    fn wait_for_fault(&self) -> io::Result<()> {
        let faults = self.faults.as_ref().expect("only drop takes it");
        let mut fds = [PollFd::new(faults, PollFlags::IN)];
        let limit = Timespec::try_from(DEADLINE).expect("some seconds");
        match poll(&mut fds, Some(&limit))? {
            0 => Err(io::ErrorKind::TimedOut.into()),
            _ => Ok(()),
        }
    }
}

impl Drop for PipeLock {
    fn drop(&mut self) {
        self.faults = None;
        let _ = self.holder.take().map(JoinHandle::join);
    }
}

// SAFETY: an address of this process, for one thread at a time to hand to the kernel.
unsafe impl Send for MissingPage {}

impl MissingPage {
    fn new() -> io::Result<(OwnedFd, MissingPage)> {
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
        // SAFETY: takes flags only.
        let faults = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
        if faults < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just made it for us. A descriptor is an int.
        let faults = unsafe { OwnedFd::from_raw_fd(faults as i32) };
        let (protection, kind) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        );
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), PAGE, protection, kind, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let page = MissingPage { start };
        // struct uffdio_api: api, features, ioctls.
        request(&faults, UFFDIO_API, &mut [UFFD_API, 0, 0])?;
        // struct uffdio_register: start, length, mode, ioctls.
        let range = [start as u64, PAGE as u64, UFFDIO_REGISTER_MODE_MISSING, 0];
        request(&faults, UFFDIO_REGISTER, &mut { range })?;
        Ok((faults, page))
    }

    /// Sleeps in the page fault, with the lock of the pipe.
    fn read_from(&self, pipe: &OwnedFd) {
        // SAFETY: the mapping has this byte, and no Rust reference to it exists.
        unsafe { libc::read(pipe.as_raw_fd(), self.start, 1) };
    }
}

impl Drop for MissingPage {
    fn drop(&mut self) {
        // SAFETY: this object's own mapping, which nothing uses any more.
        unsafe { libc::munmap(self.start, PAGE) };
    }
}

fn request<const N: usize>(
    faults: impl AsFd,
    number: u64,
    argument: &mut [u64; N],
) -> io::Result<()> {
    let fd = faults.as_fd().as_raw_fd();
    // SAFETY: the callers give each request an argument of the size that its number names.
    match unsafe { libc::ioctl(fd, number as libc::Ioctl, argument.as_mut_ptr()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
