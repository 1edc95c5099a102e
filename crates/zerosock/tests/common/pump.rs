//! A host whose device is driven by a thread, while the test does something else.

use std::ops::Deref;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use zerosock::vsock::Host;

/// A host, and a thread that calls [`Host::drive`] on each event and at least every millisecond. The
/// thread ends when this is dropped.
pub(crate) struct Pumped {
    host: Arc<Host>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Pumped {
    pub(crate) fn new(host: Host) -> Pumped {
        let host = Arc::new(host);
        let stop = Arc::new(AtomicBool::new(false));
        let thread = std::thread::spawn({
            let (host, stop) = (host.clone(), stop.clone());
            move || {
                let wait = Timespec {
                    tv_sec: 0,
                    tv_nsec: 1_000_000,
                };
                while !stop.load(Ordering::Relaxed) {
                    let fd = host.as_fd();
                    let _ = poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&wait));
                    host.drive().unwrap();
                }
            }
        });
        Pumped {
            host,
            stop,
            thread: Some(thread),
        }
    }

    /// Stops the thread: from now on no thread calls the host's `drive`.
    pub(crate) fn stop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

impl Deref for Pumped {
    type Target = Host;

    fn deref(&self) -> &Host {
        &self.host
    }
}

impl Drop for Pumped {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
