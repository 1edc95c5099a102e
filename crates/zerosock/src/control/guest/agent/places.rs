//! The places of clients, which their users share as at the attach socket of a host.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::control::attach::places::has_place;

/// The users of the places that are taken.
#[derive(Debug, Default)]
pub(super) struct Places(Mutex<Vec<u32>>);

/// A place of this user, which is taken until it is dropped.
#[derive(Debug)]
pub(super) struct Place<'a> {
    places: &'a Places,
    uid: u32,
}

impl Places {
    /// Takes one of `most` places for a user, if one of `users` is not to have it.
    pub(super) fn take(&self, uid: u32, users: &[u32], most: usize) -> Option<Place<'_>> {
        let mut taken = self.taken();
        has_place(taken.iter().copied(), uid, users, most).then(|| {
            taken.push(uid);
            Place { places: self, uid }
        })
    }

    fn taken(&self) -> MutexGuard<'_, Vec<u32>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut taken = self.places.taken();
        if let Some(at) = taken.iter().position(|&uid| uid == self.uid) {
            taken.swap_remove(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_shared_and_free_when_they_are_dropped() {
        let places = Places::default();
        let take = |uid| places.take(uid, &[1, 2], 8);
        let all = || -> Vec<_> { std::iter::from_fn(|| take(1)).collect() };
        let mut greedy = all();
        assert_eq!(greedy.len(), 6, "two are guaranteed to the other user");
        let other = [take(2).unwrap(), take(2).unwrap()];
        assert!(take(2).is_none());
        greedy.pop();
        let again = take(1).unwrap();
        assert!(take(1).is_none());
        drop((greedy, other, again));
        assert_eq!(all().len(), 6);
    }
}
