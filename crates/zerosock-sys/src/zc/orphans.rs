//! Buffers whose carrier has gone before the kernel was done with them.
//!
//! They may not be freed: the kernel would send what lies there next, whatever that is. One thread,
//! which exists only while there are such buffers, waits for the kernel and frees them. If it cannot
//! be had, they are leaked.

use std::mem;
use std::os::fd::BorrowedFd;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// What waits for the kernel.
pub(super) trait Orphan: Send {
    /// Takes what the kernel has said, without waiting. Whether it owes nothing more.
    fn is_done(&mut self) -> bool;

    /// A descriptor that tells when there is something, and whether it does so by being readable;
    /// else by an error.
    fn descriptor(&self) -> (BorrowedFd<'_>, bool);
}

/// Those that are to come to the thread, and whether there is one.
static WAITING: Mutex<(Vec<Box<dyn Orphan>>, bool)> = Mutex::new((Vec::new(), false));

/// The longest that newcomers wait, and that a descriptor is not looked at.
const TURN: Duration = Duration::from_millis(20);

/// Waits for the kernel in `orphan`'s stead, on another thread.
pub(super) fn adopt(mut orphan: impl Orphan + 'static) {
    if orphan.is_done() {
        return;
    }
    let mut waiting = WAITING.lock().unwrap_or_else(PoisonError::into_inner);
    waiting.0.push(Box::new(orphan));
    if waiting.1 {
        return;
    }
    let thread = thread::Builder::new().name("zerosock-zc".to_owned());
    waiting.1 = thread.spawn(look_after).is_ok();
    if !waiting.1 {
        // A leak is the lesser evil; the next one that comes tries again for all.
        waiting.0.drain(..).for_each(mem::forget);
    }
}

fn look_after() {
    let mut mine: Vec<Box<dyn Orphan>> = Vec::new();
    loop {
        {
            let mut waiting = WAITING.lock().unwrap_or_else(PoisonError::into_inner);
            mine.append(&mut waiting.0);
            mine.retain_mut(|orphan| !orphan.is_done());
            if mine.is_empty() {
                waiting.1 = false;
                return;
            }
        }
        let mut descriptors: Vec<_> = mine
            .iter()
            .map(|orphan| match orphan.descriptor() {
                (fd, true) => PollFd::from_borrowed_fd(fd, PollFlags::IN),
                (fd, false) => PollFd::from_borrowed_fd(fd, PollFlags::empty()),
            })
            .collect();
        let turn = Timespec::try_from(TURN).unwrap_or_default();
        let ready = poll(&mut descriptors, Some(&turn));
        // A socket that has hung up says so all the time, also when nothing is new.
        if ready.is_ok_and(|count| count > 0) {
            thread::sleep(Duration::from_millis(1));
        }
    }
}
