//! Notifying a peer through a descriptor that the peer controls, without ever blocking.
//!
//! A vhost-user front-end hands over the descriptor on which it wants to be called. It shares the
//! open file with us, and with it the O_NONBLOCK flag: it can clear the flag, fill the counter, and
//! a plain write(2) would then hold the caller for as long as the front-end likes. What must hold:
//! no call in here waits, whatever the other holder of the file does with it.
//!
//! - A pipe is written with RWF_NOWAIT, a socket with MSG_DONTWAIT: both count for the one call.
//! - An eventfd has no such write. But the kernel itself signals an eventfd without waiting (the
//!   counter stays at its largest), and does so when an asynchronous read with IOCB_FLAG_RESFD is
//!   complete (io_submit(2)). A read of /dev/null is complete at once.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::fs::FileType;
use rustix::io::ReadWriteFlags;
use rustix::net::SendFlags;

/// A descriptor to notify a peer on.
#[derive(Debug)]
pub struct Bell {
    fd: OwnedFd,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Kind {
    Eventfd,
    Pipe,
    Socket,
}

impl Bell {
    /// Takes an eventfd, the writing end of a pipe, or a connected socket.
    ///
    /// # Errors
    /// What fstat(2) answers.
    pub fn new(fd: OwnedFd) -> io::Result<Bell> {
        let kind = match FileType::from_raw_mode(rustix::fs::fstat(&fd)?.st_mode) {
            FileType::Fifo => Kind::Pipe,
            FileType::Socket => Kind::Socket,
            // An eventfd has no type of its own; io_submit(2) knows it and refuses all others.
            _ => Kind::Eventfd,
        };
        Ok(Bell { fd, kind })
    }
}

/// Rings bells. One for each thread that does.
#[derive(Debug)]
pub struct Ringer {
    /// None where the kernel has no asynchronous I/O: eventfds are then written, and their flag is
    /// trusted.
    queue: Option<Queue>,
}

impl Ringer {
    /// Asks the kernel for what it needs to ring eventfds. Where that is refused (a seccomp
    /// profile, fs.aio-max-nr), [`guarded`](Self::guarded) says so.
    pub fn new() -> Ringer {
        Ringer {
            queue: Queue::new().ok(),
        }
    }

    /// Whether eventfds are rung without trust in their O_NONBLOCK flag.
    pub fn guarded(&self) -> bool {
        self.queue.is_some()
    }

    /// Adds one to an eventfd, or eight bytes to a pipe or socket. A bell that is full has a peer
    /// that is about to wake, and one that is broken has none: neither is an error.
    pub fn ring(&self, bell: &Bell) {
        let one = 1u64.to_ne_bytes();
        match (bell.kind, &self.queue) {
            (Kind::Eventfd, Some(queue)) => queue.signal(&bell.fd),
            (Kind::Eventfd, None) => {
                let _ = rustix::io::write(&bell.fd, &one);
            }
            (Kind::Pipe, _) => {
                const AT_ITS_END: u64 = u64::MAX;
                let flags = ReadWriteFlags::NOWAIT;
                let _ = rustix::io::pwritev2(&bell.fd, &[IoSlice::new(&one)], AT_ITS_END, flags);
            }
            (Kind::Socket, _) => {
                let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
                let _ = rustix::net::send(&bell.fd, &one, flags);
            }
        }
    }
}

impl Default for Ringer {
    fn default() -> Self {
        Ringer::new()
    }
}

/// A context of asynchronous I/O and something to read that is always done at once.
#[derive(Debug)]
struct Queue {
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
    fn new() -> io::Result<Queue> {
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

    fn signal(&self, fd: &OwnedFd) {
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
        let mut list = [&raw mut request];
        for _ in 0..2 {
            // SAFETY: the list has one pointer to a whole iocb, and both live until the call
            // returns. io_submit(2) copies the request before it returns and writes to its `key`
            // at most. The request reads nothing (`nbytes` is 0), so that no memory of ours is
            // written later.
            let result =
                unsafe { libc::syscall(libc::SYS_io_submit, self.context, 1, list.as_mut_ptr()) };
            if result == 1 {
                self.unreaped.set(self.unreaped.get() + 1);
                return;
            }
            // EAGAIN: no room, whatever we counted. EINVAL: `fd` is no eventfd, and rings nobody.
            self.reap();
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::pipe::pipe;

    fn count(fd: &OwnedFd) -> u64 {
        let mut bytes = [0; 8];
        rustix::io::read(fd, &mut bytes).unwrap();
        u64::from_ne_bytes(bytes)
    }

    #[test]
    fn an_eventfd_counts_every_ring() {
        let ringer = Ringer::new();
        assert!(ringer.guarded(), "no asynchronous I/O on this machine");
        let fd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let bell = Bell::new(fd.try_clone().unwrap()).unwrap();
        // More than the queue has room for.
        for _ in 0..1000 {
            ringer.ring(&bell);
        }
        assert_eq!(count(&fd), 1000);
    }

    /// The front-end clears O_NONBLOCK and fills what it gave us: a plain write would wait.
    #[test]
    fn full_bells_that_block_hold_nobody() {
        let ringer = Ringer::new();
        let full = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        ringer.ring(&Bell::new(full).unwrap());

        let (_reader, writer) = pipe().unwrap();
        rustix::io::ioctl_fionbio(&writer, true).unwrap();
        while rustix::io::write(&writer, &[0; 4096]).is_ok() {}
        rustix::io::ioctl_fionbio(&writer, false).unwrap();
        ringer.ring(&Bell::new(writer).unwrap());

        let (_a, b) = std::os::unix::net::UnixStream::pair().unwrap();
        b.set_nonblocking(true).unwrap();
        while rustix::io::write(&b, &[0; 4096]).is_ok() {}
        b.set_nonblocking(false).unwrap();
        ringer.ring(&Bell::new(b.into()).unwrap());
    }

    #[test]
    fn pipes_and_sockets_ring_too() {
        let ringer = Ringer::new();
        let (reader, writer) = pipe().unwrap();
        ringer.ring(&Bell::new(writer).unwrap());
        assert_eq!(count(&reader), 1);
        let (a, b) = std::os::unix::net::UnixStream::pair().unwrap();
        ringer.ring(&Bell::new(b.into()).unwrap());
        assert_eq!(count(&a.into()), 1);
    }
}
