//! A thread that is known to sleep in a wait of a shared sender.

use std::sync::mpsc;
use std::thread::{self, Scope, ScopedJoinHandle};

use zerosock_zc::{Returned, SharedSender};

/// Spawns a thread that waits on `sender` until a buffer is returned, which is its result. Returns
/// when the thread sleeps.
pub(crate) fn spawn_waiter<'scope>(
    scope: &'scope Scope<'scope, '_>,
    sender: &SharedSender<Vec<u8>>,
) -> ScopedJoinHandle<'scope, Returned<Vec<u8>>> {
    let (id_sender, id_receiver) = mpsc::channel();
    let sender = sender.clone();
    let waiting = scope.spawn(move || {
        id_sender.send(rustix::thread::gettid()).expect("the test");
        loop {
            sender.wait(None).expect("the kernel answers");
            if let Some(returned) = sender.returned() {
                return returned;
            }
        }
    });
    let thread = id_receiver.recv().expect("the thread").as_raw_nonzero();
    let path = format!("/proc/self/task/{thread}/stat");
    // The third field is the state; S is an interruptible sleep (proc(5)).
    while !std::fs::read_to_string(&path).is_ok_and(|stat| stat.contains(") S ")) {
        thread::yield_now();
    }
    waiting
}
