//! Waiters of an endpoint with a scripted backend.

use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use zerosock_proto::Port;

use super::*;
use crate::table::backend::{Backend, ReadySource};
use crate::table::sockets::{StreamId, StreamState};
use crate::vsock::connection::Connected;
use crate::vsock::fake::{Scripted, core, info};
use crate::vsock::listener::Listener;
use crate::vsock::stream::Stream;
use crate::vsock::waiting::Wait;
use zerosock_virtio::deadline::timespec;

const SOON: Duration = Duration::from_millis(10);
/// A deadline that only a failing test reaches.
const DEADLINE: Duration = Duration::from_secs(30);

fn is_readable(fd: impl AsFd, within: Duration) -> bool {
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    poll(&mut fds, Some(&timespec(within))).unwrap() > 0
}

/// A thread that sleeps until the backend's timer has fired; the receiver gets a message then.
fn sleeper(core: &Arc<Core>, script: &Scripted) -> mpsc::Receiver<()> {
    let (done, woken) = mpsc::channel();
    let (mine, script) = (core.clone(), script.clone());
    thread::spawn(move || {
        let budget = WaitBudget {
            mode: WaitMode::Block(Wait::Sleep),
            deadline: None,
        };
        let fired = |_: &mut dyn Backend| (script.lock().unwrap().fired > 0).then_some(());
        let _ = mine.wait(Interest::Port(Port::new(1)), || budget, fired);
        let _ = done.send(());
    });
    while core.lock().state().sleeper.is_none() {
        thread::yield_now();
    }
    woken
}

#[test]
fn sleeping_thread_wakes_for_a_timer_that_is_set_later() {
    let (core, script) = core();
    let woken = sleeper(&core, &script);
    let locked = core.lock();
    script.lock().unwrap().due = Some(Instant::now() + SOON);
    drop(locked);
    woken
        .recv_timeout(DEADLINE)
        .expect("the sleeper wakes in time");
}

#[test]
fn poller_is_woken_once_for_a_timer_that_is_set_later() {
    let (core, script) = core();
    let event_fd = Arc::new(EventFd::new().unwrap());
    assert_eq!(
        core.lock().register_poller(&event_fd, Interest::Anything),
        Ok(None)
    );
    let locked = core.lock();
    script.lock().unwrap().due = Some(Instant::now() + DEADLINE);
    drop(locked);
    assert!(is_readable(&*event_fd, Duration::ZERO));
    event_fd.clear();
    drop(core.lock());
    assert!(!is_readable(&*event_fd, Duration::ZERO), "once");
    let due = script.lock().unwrap().due;
    assert_eq!(
        core.lock().register_poller(&event_fd, Interest::Anything),
        Ok(due)
    );
}

#[test]
fn descriptor_is_readable_when_a_timer_is_due() {
    let (core, script) = core();
    assert!(!core.lock().watch_descriptor());
    assert!(!is_readable(&*core, Duration::ZERO));
    let locked = core.lock();
    script.lock().unwrap().due = Some(Instant::now() + SOON);
    drop(locked);
    assert!(is_readable(&*core, DEADLINE), "timer set later");
    core.lock().drive().unwrap();
    assert!(!core.lock().watch_descriptor());
    assert!(!is_readable(&*core, Duration::ZERO), "the timer has fired");
    script.lock().unwrap().due = Some(Instant::now() + SOON);
    assert!(!core.lock().watch_descriptor());
    assert!(is_readable(&*core, DEADLINE), "timer set before");
}

#[test]
fn eventfd_of_a_poller_stays_readable_when_another_poller_clears_its_own() {
    let (core, script) = core();
    let event_fds = [(); 2].map(|()| Arc::new(EventFd::new().unwrap()));
    for event_fd in &event_fds {
        core.lock()
            .register_poller(event_fd, Interest::Anything)
            .unwrap();
    }
    assert!(!core.lock().watch_descriptor());
    let stirred = ReadySource::Port(Port::new(1));
    script.lock().unwrap().stirred.push_back(stirred);
    drop(core.lock());
    // The first poller finds nothing for itself; neither does a poller of the descriptor.
    event_fds[0].clear();
    core.lock()
        .register_poller(&event_fds[0], Interest::Anything)
        .unwrap();
    assert!(!core.lock().watch_descriptor());
    assert!(is_readable(&*event_fds[1], Duration::ZERO));
    core.lock().deregister_poller(&event_fds[0]);
    core.lock().deregister_poller(&event_fds[1]);
    assert_eq!(core.waiters(), 1, "the descriptor");
}

#[test]
fn rings_are_armed_again_when_the_backend_reports_them_stale() {
    let (core, script) = core();
    let event_fd = Arc::new(EventFd::new().unwrap());
    core.lock()
        .register_poller(&event_fd, Interest::Anything)
        .unwrap();
    let arms = script.lock().unwrap().arms;
    drop(core.lock());
    assert_eq!(script.lock().unwrap().arms, arms, "still armed");
    script.lock().unwrap().stale = true;
    drop(core.lock());
    assert_eq!(script.lock().unwrap().arms, arms + 1);
}

#[test]
fn returned_buffer_is_published_by_the_call_that_returns_it() {
    let (core, script) = core();
    core.leases().push_dropped(3);
    core.lock().backend().stats();
    let script = script.lock().unwrap();
    assert_eq!(script.given_back, [3]);
    assert_eq!(script.settled, 1);
}

#[test]
fn lease_of_the_present_round_returns_with_the_next_call() {
    let (core, script) = core();
    let given_back = || script.lock().unwrap().given_back.clone();
    let round = core.leases().round();
    core.return_lease(3, Some(round));
    assert!(given_back().is_empty(), "nobody waits for it");
    core.lock().backend().stats();
    assert_eq!(given_back(), [3]);
    // The thread that sleeps may wait for what the leases hold.
    core.lock().arm();
    core.return_lease(4, Some(round));
    assert_eq!(given_back(), [3, 4]);
    core.return_lease(5, None);
    assert_eq!(given_back(), [3, 4, 5]);
}

#[test]
fn failed_endpoint_wakes_all_waiters() {
    let (core, script) = core();
    let woken = sleeper(&core, &script);
    let event_fd = Arc::new(EventFd::new().unwrap());
    core.lock()
        .register_poller(&event_fd, Interest::Anything)
        .unwrap();
    script.lock().unwrap().over = true;
    assert!(core.lock().drive().is_err());
    woken.recv_timeout(DEADLINE).expect("the sleeper is woken");
    assert!(is_readable(&*event_fd, Duration::ZERO));
    event_fd.clear();
    assert_eq!(
        core.lock().register_poller(&event_fd, Interest::Anything),
        Ok(None),
        "no timer"
    );
    assert_eq!(core.waiters(), 0);
}

#[test]
fn call_by_the_thread_that_holds_the_lock_panics() {
    let (core, _) = core();
    let state = info(StreamState::Connected);
    let stream = Stream::new(core.clone(), StreamId::FIRST, &state, Wait::Sleep);
    let assert_panics = |call: &mut dyn FnMut()| {
        let panic = catch_unwind(AssertUnwindSafe(call)).unwrap_err();
        let message = panic.downcast_ref::<&str>().copied().unwrap_or_default();
        assert!(message.contains("Batch"), "{message:?}");
    };
    let batch = stream.batch();
    assert_panics(&mut || drop(stream.recv()));
    // Another thread blocks until the lock is free.
    thread::scope(|scope| {
        let other = scope.spawn(|| stream.unread());
        drop(batch);
        assert_eq!(other.join().unwrap(), 0);
    });
    stream
        .recv_each(1, |_| assert_panics(&mut || drop(stream.loan(1))))
        .unwrap();
    assert_eq!(stream.unread(), 0, "the endpoint works on");
}

#[test]
fn socket_dropped_by_the_lock_holder_is_closed_when_the_lock_is_released() {
    let (core, script) = core();
    let state = info(StreamState::Connected);
    let new = || Stream::new(core.clone(), StreamId::FIRST, &state, Wait::Sleep);
    let (stream, mut other) = (new(), Some(new()));
    let mut listener = Some(Listener::new(core.clone(), state.local, Wait::Sleep));
    stream
        .recv_each(1, |_| {
            drop((other.take(), listener.take()));
            let script = script.lock().unwrap();
            assert!(script.closed == 0 && script.unlistened.is_empty());
        })
        .unwrap();
    let script = script.lock().unwrap();
    assert_eq!((script.closed, script.unlistened.len()), (1, 1));
}

#[cfg(feature = "tokio")]
#[test]
fn stream_owned_by_a_woken_task_is_closed_at_once() {
    struct Keeps(#[expect(dead_code, reason = "it is there to be dropped")] Stream);
    impl std::task::Wake for Keeps {
        fn wake(self: Arc<Self>) {}
    }
    let (core, script) = core();
    let state = info(StreamState::Connected);
    let stream = Stream::new(core.clone(), StreamId::FIRST, &state, Wait::Sleep);
    let task = std::task::Waker::from(Arc::new(Keeps(stream)));
    core.register_task(&mut 0, Interest::Anything, &task);
    drop(task);
    let locked = core.lock();
    let stirred = ReadySource::Port(Port::new(1));
    script.lock().unwrap().stirred.push_back(stirred);
    drop(locked);
    assert_eq!(script.lock().unwrap().closed, 1);
}
