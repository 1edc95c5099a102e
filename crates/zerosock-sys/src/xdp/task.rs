//! Work that can take long, on a thread of its own.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::Builder;

use rustix::event::{EventfdFlags, eventfd};

use crate::reaper;

/// A result to come. Dropping it does not wait: the thread ends by itself, and a result that nothing takes
/// is dropped on a thread of the [`reaper`](crate::reaper).
#[derive(Debug)]
pub struct Task<T: Send + 'static>(Arc<Shared<T>>);

#[derive(Debug)]
struct Shared<T> {
    result: Mutex<Option<T>>,
    /// Readable once the result is there.
    done: OwnedFd,
}

impl<T: Send + 'static> Task<T> {
    /// Starts a thread for `work`. It inherits capabilities and namespaces of this one.
    ///
    /// # Errors
    /// The system has no thread or no descriptor.
    pub fn start(name: &str, work: impl FnOnce() -> T + Send + 'static) -> io::Result<Task<T>> {
        let task = Task::new()?;
        let job = task.job(work);
        Builder::new().name(name.into()).spawn(job)?;
        Ok(task)
    }

    /// Has the reaper do `work`; without a descriptor for the result, this thread does it.
    pub(super) fn reap(work: impl FnOnce() -> T + Send + 'static) -> io::Result<Task<T>> {
        match Task::new() {
            Ok(task) => {
                reaper::run(task.job(work), None);
                Ok(task)
            }
            Err(error) => {
                drop(work());
                Err(error)
            }
        }
    }

    fn new() -> io::Result<Task<T>> {
        let done = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let result = Mutex::new(None);
        Ok(Task(Arc::new(Shared { result, done })))
    }

    fn job(&self, work: impl FnOnce() -> T + Send + 'static) -> impl FnOnce() + Send + 'static {
        let shared = Arc::clone(&self.0);
        move || {
            let result = work();
            *shared.result.lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
            // It cannot fail: the counter is 0.
            let _ = rustix::io::write(&shared.done, &1_u64.to_ne_bytes());
        }
    }

    /// The result, once it is there.
    pub fn take(&mut self) -> Option<T> {
        let result = &self.0.result;
        result.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// An eventfd that becomes readable when the result is there. It is never read.
impl<T: Send + 'static> AsFd for Task<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.done.as_fd()
    }
}

impl<T: Send + 'static> Drop for Task<T> {
    fn drop(&mut self) {
        if let Some(result) = self.take() {
            reaper::run(|| drop(result), None);
        }
    }
}

#[cfg(test)]
#[path = "task_tests.rs"]
mod tests;
