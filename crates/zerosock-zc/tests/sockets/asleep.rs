//! Waits until a thread sleeps in the kernel.

use std::sync::mpsc;
use std::thread::{self, Scope, ScopedJoinHandle};

use zerosock_zc::{Returned, SharedSender};

/// It waits, and ends with the first buffer; it is asleep when this returns.
pub(crate) fn waiting<'scope>(
    scope: &'scope Scope<'scope, '_>,
    sender: &SharedSender<Vec<u8>>,
) -> ScopedJoinHandle<'scope, Returned<Vec<u8>>> {
    let (say, hear) = mpsc::channel();
    let sender = sender.clone();
    let waiting = scope.spawn(move || {
        say.send(rustix::thread::gettid()).expect("the test");
        loop {
            sender.wait(None).expect("the kernel answers");
            if let Some(back) = sender.returned() {
                return back;
            }
        }
    });
    let thread = hear.recv().expect("the thread").as_raw_nonzero();
    let path = format!("/proc/self/task/{thread}/stat");
    while !std::fs::read_to_string(&path).is_ok_and(|stat| stat.contains(") S ")) {
        thread::yield_now();
    }
    waiting
}
