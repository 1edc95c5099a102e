//! Carriers that were dropped while the kernel reads their buffers.
//!
//! Those buffers must not be freed: the kernel would send what is stored there next. One thread,
//! which exists only while there are such buffers, waits for the kernel and frees them. If it
//! cannot be started, they are leaked. So is a buffer of which the kernel does not tell whether it reads
//! it (`in_doubt`).
//!
//! Dropping a buffer can run code of the application. It may panic, which affects that buffer
//! alone, and it may drop another `ZcSocket`, which adds that one here: no lock is held meanwhile.

use std::any::Any;
use std::mem;
use std::os::fd::BorrowedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// A dropped socket with buffers that the kernel reads.
pub(super) trait Orphan: Send {
    /// Handles events, without waiting for long. Returns whether no result or notification is
    /// pending.
    fn is_done(&mut self) -> bool;

    /// Frees one of its buffers. Returns whether there was one. Called only after `is_done`.
    fn free_one(&mut self) -> bool;

    /// A descriptor to wait on, and whether it signals an event by being readable; otherwise by an
    /// error.
    fn descriptor(&self) -> (BorrowedFd<'_>, bool);
}

/// Orphans that the thread has not taken yet, and whether the thread runs.
static WAITING: Mutex<(Vec<Box<dyn Orphan>>, bool)> = Mutex::new((Vec::new(), false));

fn waiting() -> MutexGuard<'static, (Vec<Box<dyn Orphan>>, bool)> {
    WAITING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The orphans of the thread. If it panics they wait for the next thread.
struct Mine(Vec<Box<dyn Orphan>>);

impl Drop for Mine {
    fn drop(&mut self) {
        if !self.0.is_empty() {
            let mut waiting = waiting();
            waiting.0.append(&mut self.0);
            waiting.1 = false;
        }
    }
}

/// The longest time until the thread takes new orphans and polls all descriptors again.
const TURN: Duration = Duration::from_millis(20);

/// Hands an orphan to the thread, which is started if necessary.
pub(super) fn adopt(orphan: impl Orphan + 'static) {
    let mut waiting = waiting();
    waiting.0.push(Box::new(orphan));
    if waiting.1 {
        return;
    }
    let thread = thread::Builder::new().name("zerosock-zc".to_owned());
    waiting.1 = thread.spawn(wait_for_orphans).is_ok();
    if !waiting.1 {
        // Leaks the buffers, which is safe. The next orphan tries to start the thread again.
        waiting.0.drain(..).for_each(mem::forget);
    }
}

fn wait_for_orphans() {
    let mut mine = Mine(Vec::new());
    loop {
        {
            let mut waiting = waiting();
            mine.0.append(&mut waiting.0);
            if mine.0.is_empty() {
                waiting.1 = false;
                return;
            }
        }
        let mut index = 0;
        while let Some(orphan) = mine.0.get_mut(index) {
            if orphan.is_done() {
                free(mine.0.swap_remove(index));
            } else {
                index += 1;
            }
        }
        if mine.0.is_empty() {
            continue;
        }
        let mut descriptors: Vec<_> = mine
            .0
            .iter()
            .map(|orphan| match orphan.descriptor() {
                (fd, true) => PollFd::from_borrowed_fd(fd, PollFlags::IN),
                (fd, false) => PollFd::from_borrowed_fd(fd, PollFlags::empty()),
            })
            .collect();
        let turn = Timespec::try_from(TURN).unwrap_or_default();
        let ready = poll(&mut descriptors, Some(&turn));
        // A hangup is reported by every poll, and a poll that fails fails again: avoids a busy
        // loop.
        if !matches!(ready, Ok(0)) {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// One buffer at a time: two panics at once would end the process.
fn free(mut orphan: Box<dyn Orphan>) {
    // Dropping the payload of a panic may panic as well.
    let keep = |thrown: Box<dyn Any + Send>| mem::forget(thrown);
    while catch_unwind(AssertUnwindSafe(|| orphan.free_one()))
        .map_err(keep)
        .unwrap_or(true)
    {}
    let _ = catch_unwind(AssertUnwindSafe(|| drop(orphan))).map_err(keep);
}
