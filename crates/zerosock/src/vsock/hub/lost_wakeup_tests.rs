//! What one thread drops while another has the lock: the first does not wait, so the second has to
//! look once more. Each test puts the drop at the one place where a missing look would lose it.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use zerosock_proto::Port;

use super::wait::{WaitBudget, WaitMode};
use super::{Core, Interest};
use crate::table::backend::Backend;
use crate::vsock::fake::core;
use crate::vsock::waiting::Wait;

/// Longer than anything takes that works.
const PATIENCE: Duration = Duration::from_secs(60);

/// Before `core`'s lock is released the next time, another thread drops the lease `index` and
/// finds the lock taken.
fn drop_before_release(core: &Arc<Core>, index: u32) {
    let other = core.clone();
    core.before_release.set(move || {
        assert!(other.is_mine(), "called with the lock");
        thread::spawn(move || other.give_back(index))
            .join()
            .unwrap();
    });
}

#[test]
fn lease_dropped_while_a_call_releases_the_lock_is_given_back() {
    let (core, script) = core();
    let locked = core.lock();
    drop_before_release(&core, 5);
    drop(locked);
    let script = script.lock().unwrap();
    assert_eq!(script.given_back, [5]);
    assert_eq!(script.settled, 1, "and shown to the peer");
}

#[test]
fn lease_dropped_while_another_drop_releases_the_lock_is_given_back() {
    let (core, script) = core();
    drop_before_release(&core, 5);
    core.give_back(3);
    let script = script.lock().unwrap();
    assert_eq!(script.given_back, [3, 5]);
    assert_eq!(script.settled, 2, "and shown to the peer");
}

#[test]
fn lease_dropped_under_the_lock_of_a_call_is_given_back_by_its_end() {
    let (core, script) = core();
    let locked = core.lock();
    thread::scope(|scope| scope.spawn(|| core.give_back(5)).join().unwrap());
    assert!(script.lock().unwrap().given_back.is_empty());
    drop(locked);
    assert_eq!(script.lock().unwrap().given_back, [5]);
}

#[test]
fn spinning_call_gives_back_what_others_drop() {
    let (core, script) = core();
    thread::scope(|scope| {
        let call = scope.spawn(|| {
            let budget = WaitBudget {
                mode: WaitMode::Waits(Wait::Spin),
                deadline: Some(Instant::now() + PATIENCE),
            };
            let fired = |_: &mut dyn Backend| (script.lock().unwrap().fired > 0).then_some(());
            core.wait(Interest::Port(Port::new(1)), budget, fired)
        });
        while core.state.try_lock().is_ok() {
            thread::yield_now();
        }
        core.give_back(5);
        let give_up = Instant::now() + PATIENCE;
        // No call of the endpoint: that would look itself.
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
fn socket_of_a_task_that_a_drop_tells_is_closed() {
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
    core.enlist_task(&mut 0, Interest::Anything, &task);
    drop(task);
    let stirred = ReadySource::Port(Port::new(1));
    script.lock().unwrap().stirred.push_back(stirred);
    // The drop of the lease takes the lock, tells the task and so drops the stream.
    core.give_back(3);
    assert_eq!(script.lock().unwrap().closed, 1);
}
