//! Unit tests of `owner_lock`.

use super::*;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

#[test]
fn one_thread_at_a_time_has_the_value_and_none_sleeps_for_ever() {
    const EACH: u32 = 20_000;
    let lock = Arc::new(OwnerLock::new(0u32));
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let lock = lock.clone();
            thread::spawn(move || {
                for _ in 0..EACH {
                    let mut guard = lock.try_lock().unwrap_or_else(|| lock.lock_contended());
                    let value = *guard;
                    // Another thread may find the lock taken, and block.
                    hint::black_box(&mut guard);
                    *guard = value + 1;
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    assert_eq!(*lock.try_lock().unwrap(), 4 * EACH);
    assert!(!lock.is_contended());
}

#[test]
fn a_blocked_thread_gets_the_lock_when_the_holder_yields_and_when_it_releases() {
    let lock = Arc::new(OwnerLock::new(0u32));
    let mut guard = lock.try_lock().unwrap();
    for round in 0..2 {
        let theirs = lock.clone();
        let blocked = thread::spawn(move || *theirs.lock_contended() += 1);
        while !lock.is_contended() {
            thread::yield_now();
        }
        guard = match round {
            0 => guard.yield_to_waiters(),
            _ => {
                drop(guard);
                blocked.join().unwrap();
                lock.try_lock().unwrap()
            }
        };
        assert_eq!(*guard, round + 1);
    }
}

#[test]
fn the_lock_names_its_holder_and_survives_a_panic() {
    let lock = OwnerLock::new(());
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let _guard = lock.try_lock().unwrap();
        assert!(lock.is_held_by_this_thread() && lock.try_lock().is_none());
        thread::scope(|scope| {
            let other = scope.spawn(|| lock.is_held_by_this_thread());
            assert!(!other.join().unwrap());
        });
        panic!("a holder");
    }));
    assert!(panicked.is_err());
    assert!(!lock.is_held_by_this_thread() && lock.try_lock().is_some());
}
