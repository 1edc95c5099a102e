//! Those who wait, with an engine that does what a script says.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};

use super::*;
use crate::io::deadline::timespec;
use crate::table::backend::ReadySource;
use crate::table::sockets::StreamState;
use crate::vsock::fake::{Scripted, core, info};
use crate::vsock::listener::Listener;
use crate::vsock::stream::Stream;
use crate::vsock::waiting::Wait;

const SOON: Duration = Duration::from_millis(10);
/// Longer than anything takes that works.
const PATIENCE: Duration = Duration::from_secs(30);

fn is_readable(fd: impl AsFd, within: Duration) -> bool {
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    poll(&mut fds, Some(&timespec(within))).unwrap() > 0
}

/// Somebody who sleeps until the engine has done what was due; hears of it.
fn sleeper(core: &Arc<Core>, script: &Scripted) -> mpsc::Receiver<()> {
    let (told, hears) = mpsc::channel();
    let (mine, script) = (core.clone(), script.clone());
    thread::spawn(move || {
        let budget = WaitBudget {
            mode: WaitMode::Waits(Wait::Sleep),
            deadline: None,
        };
        let fired = |_: &mut dyn Backend| (script.lock().unwrap().fired > 0).then_some(());
        let _ = mine.wait(Interest::Port(Port::new(1)), budget, fired);
        let _ = told.send(());
    });
    while core.lock().state().sleeper.is_none() {
        thread::yield_now();
    }
    hears
}

#[test]
fn a_timer_that_is_set_while_somebody_sleeps_is_not_slept_over() {
    let (core, script) = core();
    let hears = sleeper(&core, &script);
    let locked = core.lock();
    script.lock().unwrap().due = Some(Instant::now() + SOON);
    drop(locked);
    hears
        .recv_timeout(PATIENCE)
        .expect("the sleeper comes in time");
}

#[test]
fn who_polls_is_told_of_a_timer_that_is_set_since() {
    let (core, script) = core();
    let event_fd = Arc::new(EventFd::new().unwrap());
    assert_eq!(core.lock().watch_by(&event_fd), Ok(None));
    let locked = core.lock();
    script.lock().unwrap().due = Some(Instant::now() + PATIENCE);
    drop(locked);
    assert!(is_readable(&*event_fd, Duration::ZERO));
    event_fd.silence();
    drop(core.lock());
    assert!(!is_readable(&*event_fd, Duration::ZERO), "once");
    let due = script.lock().unwrap().due;
    assert_eq!(core.lock().watch_by(&event_fd), Ok(due));
}

#[test]
fn the_descriptor_is_readable_when_a_timer_is_due() {
    let (core, script) = core();
    assert!(!core.lock().watch());
    assert!(!is_readable(&*core, Duration::ZERO));
    let locked = core.lock();
    script.lock().unwrap().due = Some(Instant::now() + SOON);
    drop(locked);
    assert!(is_readable(&*core, PATIENCE), "set by another");
    core.lock().turn().unwrap();
    assert!(!core.lock().watch());
    assert!(!is_readable(&*core, Duration::ZERO), "and done");
    script.lock().unwrap().due = Some(Instant::now() + SOON);
    assert!(!core.lock().watch());
    assert!(is_readable(&*core, PATIENCE), "known before");
}

#[test]
fn each_who_polls_has_a_bell_that_no_other_silences() {
    let (core, script) = core();
    let event_fds = [(); 2].map(|()| Arc::new(EventFd::new().unwrap()));
    for event_fd in &event_fds {
        core.lock().watch_by(event_fd).unwrap();
    }
    assert!(!core.lock().watch());
    let stirred = ReadySource::Port(Port::new(1));
    script.lock().unwrap().stirred.push_back(stirred);
    drop(core.lock());
    // The first one looks, finds nothing for itself, and so does who polls the descriptor.
    event_fds[0].silence();
    core.lock().watch_by(&event_fds[0]).unwrap();
    assert!(!core.lock().watch());
    assert!(is_readable(&*event_fds[1], Duration::ZERO));
    core.lock().unwatch(&event_fds[0]);
    core.lock().unwatch(&event_fds[1]);
    assert_eq!(core.waiters(), 1, "the descriptor");
}

#[test]
fn rings_are_armed_anew_when_more_is_wanted_than_was_asked_for() {
    let (core, script) = core();
    let event_fd = Arc::new(EventFd::new().unwrap());
    core.lock().watch_by(&event_fd).unwrap();
    let arms = script.lock().unwrap().arms;
    drop(core.lock());
    assert_eq!(script.lock().unwrap().arms, arms, "as they were");
    script.lock().unwrap().stale = true;
    drop(core.lock());
    assert_eq!(script.lock().unwrap().arms, arms + 1);
}

#[test]
fn what_was_dropped_is_shown_by_who_finds_it() {
    let (core, script) = core();
    core.leases().push_dropped(3);
    core.lock().engine().stats();
    let script = script.lock().unwrap();
    assert_eq!(script.given_back, [3]);
    assert_eq!(script.settled, 1);
}

#[test]
fn an_endpoint_that_is_over_says_so_to_all_who_wait() {
    let (core, script) = core();
    let hears = sleeper(&core, &script);
    let event_fd = Arc::new(EventFd::new().unwrap());
    core.lock().watch_by(&event_fd).unwrap();
    script.lock().unwrap().over = true;
    assert!(core.lock().turn().is_err());
    hears.recv_timeout(PATIENCE).expect("the sleeper is told");
    assert!(is_readable(&*event_fd, Duration::ZERO));
    event_fd.silence();
    assert_eq!(core.lock().watch_by(&event_fd), Ok(None), "for ever");
    assert_eq!(core.waiters(), 0);
}

#[test]
fn a_call_by_the_thread_that_has_the_lock_says_so() {
    let (core, _) = core();
    let state = info(StreamState::Connected);
    let stream = Stream::new(core.clone(), StreamId::FIRST, &state, Wait::Sleep);
    let says = |call: &mut dyn FnMut()| {
        let panic = catch_unwind(AssertUnwindSafe(call)).unwrap_err();
        let said = panic.downcast_ref::<&str>().copied().unwrap_or_default();
        assert!(said.contains("Batch"), "{said:?}");
    };
    let batch = stream.batch();
    says(&mut || drop(stream.recv()));
    // Another thread waits as ever.
    thread::scope(|scope| {
        let other = scope.spawn(|| stream.unread());
        drop(batch);
        assert_eq!(other.join().unwrap(), 0);
    });
    stream
        .recv_each(1, |_| says(&mut || drop(stream.loan(1))))
        .unwrap();
    assert_eq!(stream.unread(), 0, "and goes on");
}

#[test]
fn what_is_dropped_by_the_thread_that_has_the_lock_ends_later() {
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
fn what_a_told_task_was_the_last_to_have_ends_at_once() {
    struct Keeps(#[expect(dead_code, reason = "it is there to be dropped")] Stream);
    impl std::task::Wake for Keeps {
        fn wake(self: Arc<Self>) {}
    }
    let (core, script) = core();
    let state = info(StreamState::Connected);
    let stream = Stream::new(core.clone(), StreamId::FIRST, &state, Wait::Sleep);
    let task = std::task::Waker::from(Arc::new(Keeps(stream)));
    core.enlist_task(&mut 0, Interest::Anything, &task);
    drop(task);
    let locked = core.lock();
    let stirred = ReadySource::Port(Port::new(1));
    script.lock().unwrap().stirred.push_back(stirred);
    drop(locked);
    assert_eq!(script.lock().unwrap().closed, 1);
}
