//! A line: who comes stands behind, who goes was in front, and anybody can be told something where
//! he stands.
//!
//! What must hold: nothing here costs more when the line is longer, and nothing else can be done with
//! it. Tests count what is done, so that who walks along a line is found out.

use std::collections::VecDeque;

pub(super) struct Line<T> {
    all: VecDeque<T>,
    #[cfg(test)]
    steps: u64,
}

impl<T> Default for Line<T> {
    fn default() -> Self {
        Self {
            all: VecDeque::new(),
            #[cfg(test)]
            steps: 0,
        }
    }
}

impl<T> Line<T> {
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

    /// The one before whom so many stand.
    pub(super) fn get_mut(&mut self, ahead: usize) -> Option<&mut T> {
        self.step().get_mut(ahead)
    }

    pub(super) fn last_mut(&mut self) -> Option<&mut T> {
        self.step().back_mut()
    }

    /// The first one goes if he may.
    pub(super) fn pop_if(&mut self, may: impl FnOnce(&T) -> bool) -> Option<T> {
        let all = self.step();
        match all.front() {
            Some(first) if may(first) => all.pop_front(),
            _ => None,
        }
    }

    /// How much has ever been done.
    #[cfg(test)]
    pub(super) fn steps(&self) -> u64 {
        self.steps
    }
}
