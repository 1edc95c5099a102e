//! Tasks that wait, found by what they wait for.
//!
//! An endpoint may have as many as it has connections, so nobody looks at all of them but when the
//! endpoint ends, or who worked for them.
//!
//! What must hold: a ticket is in the list of its interest exactly as long as it has a place.

use std::task::Waker;

use hashbrown::HashMap;

use super::waiters::Interest;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Tasks {
    /// By ticket.
    places: HashMap<u64, (Interest, Waker)>,
    by_interest: HashMap<Interest, Vec<u64>>,
}

impl Tasks {
    pub(super) fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.places.len()
    }

    /// Another waker for a task that is here. False: it is not.
    pub(super) fn renew(&mut self, ticket: u64, task: &Waker) -> bool {
        let known = self.places.get_mut(&ticket);
        known.map(|(_, known)| known.clone_from(task)).is_some()
    }

    pub(super) fn add(&mut self, ticket: u64, interest: Interest, task: Waker) {
        self.places.insert(ticket, (interest, task));
        self.by_interest.entry(interest).or_default().push(ticket);
    }

    /// Whether it was here.
    pub(super) fn remove(&mut self, ticket: u64) -> bool {
        let Some((interest, _)) = self.places.remove(&ticket) else {
            return false;
        };
        // A reader, a writer, and the calls that are awaited on one socket: a short list.
        if let Some(tickets) = self.by_interest.get_mut(&interest) {
            tickets.retain(|&other| other != ticket);
            if tickets.is_empty() {
                self.by_interest.remove(&interest);
            }
        }
        true
    }

    /// Wakes those who wait for this. They are told once.
    pub(super) fn tell(&mut self, interest: Interest) {
        for ticket in self.by_interest.remove(&interest).unwrap_or_default() {
            if let Some((_, task)) = self.places.remove(&ticket) {
                task.wake();
            }
        }
        self.shrink();
    }

    /// Wakes all.
    pub(super) fn tell_all(&mut self) {
        self.by_interest = HashMap::new();
        for (_, (_, task)) in std::mem::take(&mut self.places) {
            task.wake();
        }
    }

    /// What a crowd has left behind is given back with it.
    fn shrink(&mut self) {
        if self.places.is_empty() && self.places.capacity() > 1024 {
            (self.places, self.by_interest) = (HashMap::new(), HashMap::new());
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
    fn those_who_wait_for_it_are_told_once_and_nobody_else() {
        let counts: Vec<Arc<Count>> = (0..4).map(|_| Arc::default()).collect();
        let told = || -> Vec<usize> {
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
        tasks.tell(port(1));
        tasks.tell(port(1));
        assert_eq!(told(), [1, 0, 1, 0]);
        assert!(!tasks.remove(0), "it was told");
        assert!(!tasks.renew(2, &counts[0].clone().into()));
        // The second one's socket has another waker now.
        assert!(tasks.renew(1, &counts[0].clone().into()));
        tasks.tell(port(2));
        assert_eq!(told(), [2, 0, 1, 0]);
        assert!(tasks.remove(3) && tasks.is_empty() && tasks.by_interest.is_empty());
        tasks.add(9, port(1), counts[1].clone().into());
        tasks.add(10, Interest::Anything, counts[2].clone().into());
        tasks.tell_all();
        assert_eq!(told(), [2, 1, 2, 0]);
        assert!(tasks.is_empty() && tasks.by_interest.is_empty());
    }
}
