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
#[path = "tasks_tests.rs"]
mod tests;
