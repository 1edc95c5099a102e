//! A lock that knows which thread holds it.
//!
//! # Invariants
//! - Taking and releasing the lock without contention is one read-modify-write each.
//! - At most one [`OwnerGuard`] exists, on the thread whose id is in `owner`.
//! - A thread that blocks is counted in `waiters` before its last attempt, and the holder reads
//!   `waiters` after the release: one of the two sees the other.

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::{fmt, hint, ptr, thread};

/// No thread has this id.
const NO_THREAD: usize = 0;
/// Attempts of a thread that finds the lock taken, before it blocks.
const SPINS: u32 = 100;

/// Protects a value, as [`Mutex`] does, and names the thread that holds it. A panic of the holder
/// releases it and leaves no mark.
///
/// The release is a sequentially consistent store, and [`try_lock`](Self::try_lock) a sequentially
/// consistent load. So if one thread announces something by a sequentially consistent operation
/// and then tries the lock, and the holder releases it and then looks at the announcement in such
/// an operation, the attempt succeeds or the holder finds the announcement.
pub struct OwnerLock<T> {
    /// The thread that holds the lock.
    owner: AtomicUsize,
    /// Threads that block on the lock.
    waiters: AtomicU32,
    /// Held by a waiter from its last attempt until it sleeps.
    queue: Mutex<()>,
    /// Notified when the lock was released while there were waiters.
    released: Condvar,
    value: UnsafeCell<T>,
}

// SAFETY: a reference to the lock gives access to the value to one thread at a time, as sending the
// value from one to the next would.
unsafe impl<T: Send> Sync for OwnerLock<T> {}

// As `Mutex` is: a reference to the lock can be used after a panic of its holder, which releases it.
impl<T> UnwindSafe for OwnerLock<T> {}
impl<T> RefUnwindSafe for OwnerLock<T> {}

/// The held lock. It stays on its thread.
pub struct OwnerGuard<'a, T> {
    lock: &'a OwnerLock<T>,
    /// The lock is released by the thread that has taken it.
    not_send: std::marker::PhantomData<*const ()>,
}

/// An id that no other live thread has.
#[inline]
fn thread_id() -> usize {
    thread_local! {
        static HERE: u8 = const { 0 };
    }
    HERE.with(|here| ptr::from_ref(here).addr())
}

impl<T> OwnerLock<T> {
    /// A lock that no thread holds.
    pub fn new(value: T) -> OwnerLock<T> {
        OwnerLock {
            owner: AtomicUsize::new(NO_THREAD),
            waiters: AtomicU32::new(0),
            queue: Mutex::new(()),
            released: Condvar::new(),
            value: UnsafeCell::new(value),
        }
    }

    /// Takes the lock if no thread holds it.
    #[inline]
    pub fn try_lock(&self) -> Option<OwnerGuard<'_, T>> {
        self.owner
            .compare_exchange(NO_THREAD, thread_id(), Ordering::SeqCst, Ordering::SeqCst)
            .ok()?;
        Some(OwnerGuard {
            lock: self,
            not_send: std::marker::PhantomData,
        })
    }

    /// Takes the lock, and blocks while another thread holds it; for ever if this thread does.
    #[cold]
    pub fn lock_contended(&self) -> OwnerGuard<'_, T> {
        for _ in 0..SPINS {
            if let Some(guard) = self.try_lock() {
                return guard;
            }
            hint::spin_loop();
        }
        self.waiters.fetch_add(1, Ordering::SeqCst);
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let guard = loop {
            if let Some(guard) = self.try_lock() {
                break guard;
            }
            let woken = self.released.wait(queue);
            queue = woken.unwrap_or_else(PoisonError::into_inner);
        };
        self.waiters.fetch_sub(1, Ordering::Relaxed);
        guard
    }

    /// Whether threads block on the lock.
    #[inline]
    pub fn is_contended(&self) -> bool {
        self.waiters.load(Ordering::Relaxed) > 0
    }

    /// Whether this thread holds the lock.
    pub fn is_held_by_this_thread(&self) -> bool {
        // Only this thread stores its id, and it removes it when it releases the lock.
        self.owner.load(Ordering::Relaxed) == thread_id()
    }

    #[cold]
    fn wake_one(&self) {
        // Behind the last attempt of a waiter, which sleeps when it has released the queue.
        drop(self.queue.lock().unwrap_or_else(PoisonError::into_inner));
        self.released.notify_one();
    }
}

impl<'a, T> OwnerGuard<'a, T> {
    /// Lets all threads that block on the lock have it before this one takes it again.
    #[cold]
    pub fn yield_to_waiters(self) -> OwnerGuard<'a, T> {
        let lock = self.lock;
        drop(self);
        while lock.is_contended() {
            thread::yield_now();
        }
        lock.lock_contended()
    }
}

impl<T> Deref for OwnerGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the guard has the lock, so no other reference to the value is in use: others are
        // borrowed from this guard, and a shared borrow of it allows shared ones only.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for OwnerGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`; the guard is borrowed exclusively.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for OwnerGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.lock.owner.swap(NO_THREAD, Ordering::SeqCst);
        if self.lock.waiters.load(Ordering::SeqCst) > 0 {
            self.lock.wake_one();
        }
    }
}

impl<T> fmt::Debug for OwnerLock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnerLock").finish_non_exhaustive()
    }
}

#[cfg(test)]
#[path = "owner_lock_tests.rs"]
mod tests;
