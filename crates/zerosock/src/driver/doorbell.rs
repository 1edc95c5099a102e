//! How a driver and its device wake each other.
//!
//! # Invariants
//! - A driver that takes an event of a stream reads all bytes before it requests notifications again: the device may
//!   drop a wake-up as long as one is unread, and the event of that one is still there.
//! - A driver does not sleep while the kernel has not taken a kick of it: see [`Doorbell::has_unsent_kick`].
//! - No call changes the flags of a stream, which other processes may have, or waits on it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{RecvFlags, SendFlags, recv, send};
use zerosock_vhost_user::frontend::QueueEventFds;
use zerosock_virtio::watch::Watch;

/// Most calls to read what has arrived. A device has a few bytes unread, so more are left for the next event.
const MOST_READS: usize = 64;

/// See the [module](self).
#[derive(Debug)]
pub(super) enum Doorbell {
    /// Two eventfds for each queue, which the device got over the vhost-user connection.
    Eventfds(QueueEventFds),
    /// One stream for all queues: each byte is a wake-up, and its end is that of the device. The flag: the last kick could
    /// not be sent. It is atomic so that the driver stays `Sync`.
    Stream(OwnedFd, AtomicBool),
}

impl Doorbell {
    /// What the driver sleeps on: this, and the connection to a device that has one.
    pub(super) fn watch(&self, connection: Option<BorrowedFd<'_>>) -> io::Result<Watch> {
        let (calls, stream) = match self {
            Doorbell::Eventfds(event_fds) => (event_fds.calls(), None),
            Doorbell::Stream(stream, _) => ([].as_slice(), Some(stream)),
        };
        let mut watch = Watch::new(calls)?;
        if let Some(stream) = stream {
            watch.doorbell(stream.as_fd())?;
        }
        if let Some(connection) = connection {
            watch.device(connection)?;
        }
        Ok(watch)
    }

    /// Notifies the device of new entries in queue `index`.
    pub(super) fn kick(&self, index: usize) {
        match self {
            Doorbell::Eventfds(event_fds) => event_fds.kick(index),
            Doorbell::Stream(stream, unsent) => {
                let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
                let sent = retry_on_intr(|| send(stream, &[0], flags));
                // EAGAIN: the device has wake-ups to read, or this kernel does not know yet that it has read them. After
                // other errors than those of a want of memory the stream has ended, which the next read shows.
                let lost = matches!(sent, Err(Errno::AGAIN | Errno::NOMEM | Errno::NOBUFS));
                unsent.store(lost, Ordering::Relaxed);
            }
        }
    }

    /// Sends the last kick again if it could not be sent, and returns whether it still cannot.
    pub(super) fn has_unsent_kick(&self) -> bool {
        let Doorbell::Stream(_, unsent) = self else {
            return false;
        };
        if unsent.load(Ordering::Relaxed) {
            self.kick(0);
        }
        unsent.load(Ordering::Relaxed)
    }

    /// Notifies the device of every queue.
    pub(super) fn kick_all(&self) {
        match self {
            Doorbell::Eventfds(event_fds) => event_fds.kick_all(),
            Doorbell::Stream(..) => self.kick(0),
        }
    }

    /// Whether a kick for one queue is one for all.
    pub(super) fn is_shared(&self) -> bool {
        matches!(self, Doorbell::Stream(..))
    }

    /// Reads what has arrived, after an event of the device. Returns whether it has hung up.
    pub(super) fn has_hung_up(&self) -> bool {
        let Doorbell::Stream(stream, _) = self else {
            // The event was the hang-up.
            return true;
        };
        let mut bytes = [0; 256];
        for _ in 0..MOST_READS {
            match recv(stream, &mut bytes, RecvFlags::DONTWAIT) {
                Ok((0, _)) => return true,
                // Also behind fewer bytes than were asked for: the end has no event of its own.
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return error != Errno::AGAIN,
            }
        }
        false
    }
}

#[cfg(test)]
#[path = "doorbell_tests.rs"]
mod tests;
