//! Signals an eventfd without waiting for it.
//!
//! write(2) to an eventfd waits while its counter is full, and O_NONBLOCK belongs to the open file,
//! which a peer shares. But the kernel itself signals an eventfd without waiting (the counter stays
//! at its largest), and does so when an asynchronous read with IOCB_FLAG_RESFD is complete
//! (io_submit(2)). A read of /dev/null is complete at once.

use std::cell::Cell;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// A context of asynchronous I/O and something to read that is always done at once.
#[derive(Debug)]
pub(super) struct Queue {
    context: usize,
    null: File,
    /// Completions that the kernel may still keep for us.
    unreaped: Cell<u32>,
}

/// Completions that a context has room for.
const ROOM: u32 = 128;

/// `struct iocb` of linux/aio_abi.h, for little-endian machines.
#[repr(C)]
#[derive(Default)]
struct Iocb {
    data: u64,
    key: u32,
    rw_flags: u32,
    opcode: u16,
    priority: i16,
    fildes: u32,
    buf: u64,
    nbytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    resfd: u32,
}

const _: () = assert!(size_of::<Iocb>() == 64 && cfg!(target_endian = "little"));

const PREAD: u16 = 0;
const RESFD: u32 = 1;

/// `struct io_event` of linux/aio_abi.h.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct IoEvent([u64; 4]);

impl Queue {
    pub(super) fn new() -> io::Result<Queue> {
        let null = File::open("/dev/null")?;
        let mut context = 0usize;
        // SAFETY: io_setup(2) writes one word, the context's name, to the pointer, which is valid
        // for that; it wants the word to be 0 before.
        let result = unsafe { libc::syscall(libc::SYS_io_setup, ROOM, &mut context) };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Queue {
            context,
            null,
            unreaped: Cell::new(0),
        })
    }

    /// One on which no request can be made.
    #[cfg(test)]
    pub(super) fn broken() -> Queue {
        Queue {
            context: 0,
            null: File::open("/dev/null").unwrap(),
            unreaped: Cell::new(0),
        }
    }

    /// Adds one to an eventfd. One that is full stays full.
    ///
    /// # Errors
    /// What io_submit(2) answers. Nothing was signalled then.
    pub(super) fn signal(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        if self.unreaped.get() >= ROOM / 2 {
            self.reap();
        }
        let mut request = Iocb {
            opcode: PREAD,
            fildes: self.null.as_fd().as_raw_fd().cast_unsigned(),
            flags: RESFD,
            resfd: fd.as_raw_fd().cast_unsigned(),
            ..Iocb::default()
        };
        // EAGAIN: no room, whatever we counted.
        self.submit(&mut request).or_else(|_| {
            self.reap();
            self.submit(&mut request)
        })
    }

    fn submit(&self, request: &mut Iocb) -> io::Result<()> {
        let mut list = [&raw mut *request];
        // SAFETY: the list has one pointer to a whole iocb, and both live until the call returns.
        // io_submit(2) copies the request before it returns and writes to its `key` at most. The
        // request reads nothing (`nbytes` is 0), so that no memory of ours is written later.
        let result =
            unsafe { libc::syscall(libc::SYS_io_submit, self.context, 1, list.as_mut_ptr()) };
        if result != 1 {
            return Err(io::Error::last_os_error());
        }
        self.unreaped.set(self.unreaped.get() + 1);
        Ok(())
    }

    /// Makes room: completions of reads that read nothing say nothing.
    fn reap(&self) {
        let mut events = [IoEvent::default(); ROOM as usize];
        let zero = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: `events` has room for the ROOM entries that are asked for at most, `zero` is a
        // timespec that is only read, and both outlive the call, which does not wait.
        unsafe {
            libc::syscall(
                libc::SYS_io_getevents,
                self.context,
                0,
                ROOM,
                events.as_mut_ptr(),
                &zero,
            )
        };
        self.unreaped.set(0);
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // SAFETY: the context is ours and is not used again; nothing of it is under way, because
        // every request was complete when it was submitted.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}
