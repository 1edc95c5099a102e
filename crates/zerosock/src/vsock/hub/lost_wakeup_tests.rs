//! Leases that one thread drops while another holds the lock: the first does not block, so the
//! second must check again. Each test drops at the point where a missing check would lose the
//! lease.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use zerosock_proto::Port;

use super::{Core, Interest, WaitBudget, WaitMode};
use crate::table::backend::Backend;
use crate::vsock::connection::Connected;
use crate::vsock::fake::core;
use crate::vsock::waiting::Wait;

/// A deadline that only a failing test reaches.
const DEADLINE: Duration = Duration::from_secs(60);

/// Before `core`'s lock is released the next time, another thread drops the lease `index` and
/// finds the lock taken.
fn drop_before_release(core: &Arc<Core>, index: u32) {
    let other = core.clone();
    core.before_release.set(move || {
        assert!(other.is_held_by_this_thread(), "called with the lock held");
        thread::spawn(move || other.return_buffer(index))
            .join()
            .unwrap();
    });
}

#[test]
fn lease_dropped_while_a_call_releases_the_lock_is_returned() {
    let (core, script) = core();
    let locked = core.lock();
    drop_before_release(&core, 5);
    drop(locked);
    let script = script.lock().unwrap();
    assert_eq!(script.given_back, [5]);
    assert_eq!(script.settled, 1, "and published to the peer");
}

#[test]
fn lease_dropped_while_another_drop_releases_the_lock_is_returned() {
    let (core, script) = core();
    drop_before_release(&core, 5);
    core.return_buffer(3);
    let script = script.lock().unwrap();
    assert_eq!(script.given_back, [3, 5]);
    assert_eq!(script.settled, 2, "and published to the peer");
}

#[test]
fn lease_dropped_while_a_call_holds_the_lock_is_returned_when_the_call_ends() {
    let (core, script) = core();
    let locked = core.lock();
    thread::scope(|scope| scope.spawn(|| core.return_buffer(5)).join().unwrap());
    assert!(script.lock().unwrap().given_back.is_empty());
    drop(locked);
    assert_eq!(script.lock().unwrap().given_back, [5]);
}

#[test]
fn spinning_call_returns_leases_that_other_threads_drop() {
    let (core, script) = core();
    thread::scope(|scope| {
        let call = scope.spawn(|| {
            let budget = WaitBudget {
                mode: WaitMode::Block(Wait::Spin),
                deadline: Some(Instant::now() + DEADLINE),
            };
            let fired = |_: &mut dyn Backend| (script.lock().unwrap().fired > 0).then_some(());
            core.wait(Interest::Port(Port::new(1)), || budget, fired)
        });
        while core.state.try_lock().is_some() {
            thread::yield_now();
        }
        core.return_buffer(5);
        let give_up = Instant::now() + DEADLINE;
        // Without a call of the endpoint, which would return the lease itself.
        while script.lock().unwrap().given_back.is_empty() && Instant::now() < give_up {
            thread::yield_now();
        }
        assert!(!call.is_finished());
        assert_eq!(script.lock().unwrap().given_back, [5]);
        script.lock().unwrap().due = Some(Instant::now());
        call.join().unwrap().unwrap();
    });
}

#[cfg(feature = "tokio")]
#[test]
fn stream_owned_by_a_task_that_a_lease_drop_wakes_is_closed() {
    use crate::table::backend::ReadySource;
    use crate::table::sockets::{StreamId, StreamState};
    use crate::vsock::fake::info;
    use crate::vsock::stream::Stream;

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
    let stirred = ReadySource::Port(Port::new(1));
    script.lock().unwrap().stirred.push_back(stirred);
    // Returning the buffer takes the lock and wakes the task; dropping the task drops the stream.
    core.return_buffer(3);
    assert_eq!(script.lock().unwrap().closed, 1);
}

#[test]
fn lease_of_a_round_that_ends_before_the_lock_is_released_is_returned() {
    let (core, script) = core();
    let round = core.leases().round();
    let mut locked = core.lock();
    let other = core.clone();
    core.before_release.set(move || {
        let drop_lease = || other.return_lease(5, Some(round));
        thread::scope(|scope| scope.spawn(drop_lease).join().unwrap());
    });
    // Arming ends the round.
    locked.arm();
    drop(locked);
    assert_eq!(script.lock().unwrap().given_back, [5]);
}
