//! Unit tests of `tasks`.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Wake;

use zerosock_proto::Port;

use super::*;

#[derive(Default)]
struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn wake_wakes_the_tasks_of_one_interest_once_and_no_others() {
    let counts: Vec<Arc<Count>> = (0..4).map(|_| Arc::default()).collect();
    let wakeups = || -> Vec<usize> {
        let counts = counts.iter();
        counts
            .map(|count| count.0.load(Ordering::Relaxed))
            .collect()
    };
    let port = |port| Interest::Port(Port::new(port));
    let mut tasks = Tasks::default();
    for (ticket, (interest, count)) in [
        (port(1), 0),
        (port(2), 1),
        (port(1), 2),
        (Interest::Anything, 3),
    ]
    .into_iter()
    .enumerate()
    {
        tasks.add(ticket as u64, interest, counts[count].clone().into());
    }
    tasks.wake(port(1));
    tasks.wake(port(1));
    assert_eq!(wakeups(), [1, 0, 1, 0]);
    assert!(!tasks.remove(0), "it was woken");
    assert!(!tasks.update_waker(2, &counts[0].clone().into()));
    // The second task has another waker from now on.
    assert!(tasks.update_waker(1, &counts[0].clone().into()));
    tasks.wake(port(2));
    assert_eq!(wakeups(), [2, 0, 1, 0]);
    assert!(tasks.remove(3) && tasks.is_empty() && tasks.by_interest.is_empty());
    tasks.add(9, port(1), counts[1].clone().into());
    tasks.add(10, Interest::Anything, counts[2].clone().into());
    tasks.wake_all();
    assert_eq!(wakeups(), [2, 1, 2, 0]);
    assert!(tasks.is_empty() && tasks.by_interest.is_empty());
}
