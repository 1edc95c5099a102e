//! Messages to a thread with an event loop from other threads: an unbounded queue and an eventfd that wakes it.
//!
//! The eventfd is written once per sleep, not once per message: `pending` says that a wake-up is on its way.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;

use rustix::event::{EventfdFlags, eventfd};

#[derive(Debug)]
struct Wakeup {
    fd: OwnedFd,
    pending: AtomicBool,
}

impl Wakeup {
    fn signal(&self) {
        // AcqRel: pairs with the swap in `drain`. Either the owner clears `pending` after this
        // store and then sees the message, or this swap sees false and writes the eventfd.
        if !self.pending.swap(true, Ordering::AcqRel) {
            // Fails only if the counter is full (EAGAIN), and then a wake-up is pending.
            let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
        }
    }
}

/// The sending half; cheap to clone.
#[derive(Debug)]
pub struct Sender<T> {
    queue: mpsc::Sender<T>,
    wakeup: Arc<Wakeup>,
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        Sender {
            queue: self.queue.clone(),
            wakeup: self.wakeup.clone(),
        }
    }
}

impl<T> Sender<T> {
    /// Sends `message`.
    ///
    /// # Errors
    /// The receiver was dropped; returns the message.
    pub fn send(&self, message: T) -> Result<(), T> {
        self.queue.send(message).map_err(|e| e.0)?;
        self.wakeup.signal();
        Ok(())
    }
}

/// The receiving half.
#[derive(Debug)]
pub struct Mailbox<T> {
    queue: mpsc::Receiver<T>,
    wakeup: Arc<Wakeup>,
}

impl<T> Mailbox<T> {
    /// Makes a mailbox and its first sender.
    ///
    /// # Errors
    /// eventfd(2) fails.
    pub fn new() -> io::Result<(Sender<T>, Mailbox<T>)> {
        let (tx, rx) = mpsc::channel();
        let wakeup = Arc::new(Wakeup {
            fd: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            pending: AtomicBool::new(false),
        });
        Ok((
            Sender {
                queue: tx,
                wakeup: wakeup.clone(),
            },
            Mailbox { queue: rx, wakeup },
        ))
    }

    /// The descriptor to poll, edge-triggered.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.wakeup.fd.as_fd()
    }

    /// Whether messages were sent since the last [`drain`](Self::drain).
    #[inline]
    pub fn is_pending(&self) -> bool {
        self.wakeup.pending.load(Ordering::Acquire)
    }

    /// Clears `pending`, then takes the queued messages. Call it before every sleep, or for each event: a
    /// message sent after this call writes the eventfd.
    pub fn drain(&self) -> impl Iterator<Item = T> + '_ {
        self.wakeup.pending.swap(false, Ordering::AcqRel);
        self.queue.try_iter()
    }

    /// Waits for the next message. `None`: there is no sender left.
    pub fn wait(&self) -> Option<T> {
        self.queue.recv().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{Timespec, epoll};

    #[test]
    fn every_message_wakes_a_sleeper_that_drains_before_it_sleeps() {
        let (tx, mailbox) = Mailbox::new().unwrap();
        let poller = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&poller, mailbox.fd(), epoll::EventData::new_u64(0), flags).unwrap();
        const N: u64 = 20_000;
        let sender = std::thread::spawn(move || {
            for i in 0..N {
                tx.send(i).unwrap();
            }
        });
        let mut next = 0;
        let most = Timespec {
            tv_sec: 30,
            tv_nsec: 0,
        };
        while next < N {
            for i in mailbox.drain() {
                assert_eq!(i, next);
                next += 1;
            }
            if next < N {
                let mut events = Vec::with_capacity(1);
                let room = rustix::buffer::spare_capacity(&mut events);
                let woken = epoll::wait(&poller, room, Some(&most)).unwrap();
                assert_eq!(woken, 1, "a message came without a wake-up");
            }
        }
        sender.join().unwrap();
    }
}
