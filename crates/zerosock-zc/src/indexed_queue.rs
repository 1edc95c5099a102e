//! A queue with access from the front by index, each operation in constant time.
//!
//! # Invariants
//! No operation costs more when the queue is longer. Tests count the operations to find a caller
//! that iterates over the queue.

use std::collections::VecDeque;

pub(super) struct IndexedQueue<T> {
    all: VecDeque<T>,
    #[cfg(test)]
    steps: u64,
}

impl<T> Default for IndexedQueue<T> {
    fn default() -> Self {
        Self {
            all: VecDeque::new(),
            #[cfg(test)]
            steps: 0,
        }
    }
}

impl<T> IndexedQueue<T> {
    fn step(&mut self) -> &mut VecDeque<T> {
        #[cfg(test)]
        {
            self.steps += 1;
        }
        &mut self.all
    }

    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    pub(super) fn push(&mut self, one: T) {
        self.step().push_back(one);
    }

    /// The item that has `ahead` items in front of it.
    pub(super) fn get_mut(&mut self, ahead: usize) -> Option<&mut T> {
        self.step().get_mut(ahead)
    }

    pub(super) fn last_mut(&mut self) -> Option<&mut T> {
        self.step().back_mut()
    }

    /// Removes the first item if `may` says so.
    pub(super) fn pop_if(&mut self, may: impl FnOnce(&T) -> bool) -> Option<T> {
        let all = self.step();
        match all.front() {
            Some(first) if may(first) => all.pop_front(),
            _ => None,
        }
    }

    /// Number of operations so far.
    #[cfg(test)]
    pub(super) fn steps(&self) -> u64 {
        self.steps
    }
}
