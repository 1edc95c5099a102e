//! The waiting tasks of an endpoint, indexed by their interest.
//!
//! An endpoint may have as many tasks as connections. They are all visited only when the endpoint
//! fails or its reactor ends.
//!
//! # Invariants
//! `by_interest` lists a ticket exactly while `by_ticket` has it.

use std::task::Waker;

use hashbrown::HashMap;

use super::waiter::Interest;

/// The waiting tasks, by ticket and by interest.
#[derive(Debug, Default)]
pub(super) struct Tasks {
    by_ticket: HashMap<u64, (Interest, Waker)>,
    by_interest: HashMap<Interest, Vec<u64>>,
}

impl Tasks {
    pub(super) fn is_empty(&self) -> bool {
        self.by_ticket.is_empty()
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.by_ticket.len()
    }

    /// Replaces the waker of a registered task. Returns whether the ticket is registered.
    pub(super) fn update_waker(&mut self, ticket: u64, task: &Waker) -> bool {
        let known = self.by_ticket.get_mut(&ticket);
        known.map(|(_, known)| known.clone_from(task)).is_some()
    }

    pub(super) fn add(&mut self, ticket: u64, interest: Interest, task: Waker) {
        self.by_ticket.insert(ticket, (interest, task));
        self.by_interest.entry(interest).or_default().push(ticket);
    }

    /// Removes a task. Returns whether it was registered.
    pub(super) fn remove(&mut self, ticket: u64) -> bool {
        let Some((interest, _)) = self.by_ticket.remove(&ticket) else {
            return false;
        };
        // Short: a reader, a writer, and the pending calls of one socket.
        if let Some(tickets) = self.by_interest.get_mut(&interest) {
            tickets.retain(|&other| other != ticket);
            if tickets.is_empty() {
                self.by_interest.remove(&interest);
            }
        }
        true
    }

    /// Wakes and removes the tasks with this interest.
    pub(super) fn wake(&mut self, interest: Interest) {
        for ticket in self.by_interest.remove(&interest).unwrap_or_default() {
            if let Some((_, task)) = self.by_ticket.remove(&ticket) {
                task.wake();
            }
        }
        self.shrink();
    }

    /// Wakes and removes all tasks.
    pub(super) fn wake_all(&mut self) {
        self.by_interest = HashMap::new();
        for (_, (_, task)) in std::mem::take(&mut self.by_ticket) {
            task.wake();
        }
    }

    /// Frees the maps after a peak of many tasks.
    fn shrink(&mut self) {
        if self.by_ticket.is_empty() && self.by_ticket.capacity() > 1024 {
            (self.by_ticket, self.by_interest) = (HashMap::new(), HashMap::new());
        }
    }
}

#[cfg(test)]
mod tests {
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
}
