//! How users share the places of processes that attach.

use std::collections::BTreeMap;

/// Whether one of `most` places is free for this user. `taken` has the user of each place in use.
///
/// Half of the places is guaranteed to the users in equal parts; the other half is for the first
/// that request it.
pub(crate) fn has_place(
    taken: impl Iterator<Item = u32>,
    uid: u32,
    users: &[u32],
    most: usize,
) -> bool {
    let mut of_user: BTreeMap<u32, usize> = users.iter().map(|&user| (user, 0)).collect();
    let guaranteed = most / 2 / of_user.len().max(1);
    let mut in_use = 0;
    for user in taken {
        in_use += 1;
        if let Some(count) = of_user.get_mut(&user) {
            *count += 1;
        }
    }
    let others = of_user.iter().filter(|&(&user, _)| user != uid);
    let kept: usize = others
        .map(|(_, &count)| guaranteed.saturating_sub(count))
        .sum();
    in_use + kept < most
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many places a user gets beside those in use.
    fn places(taken: &[u32], uid: u32, users: &[u32], most: usize) -> usize {
        let mut taken = taken.to_vec();
        let before = taken.len();
        while has_place(taken.iter().copied(), uid, users, most) {
            taken.push(uid);
        }
        taken.len() - before
    }

    #[test]
    fn no_user_takes_the_places_of_another() {
        let users = [1, 2, 3, 3];
        // Five are guaranteed to each.
        assert_eq!(places(&[], 1, &users, 30), 20);
        let greedy = [1; 20];
        assert_eq!(places(&greedy, 2, &users, 30), 5);
        // What another user has taken of its own part is not kept free for it.
        let both = [greedy.as_slice(), &[2; 5]].concat();
        assert_eq!(places(&both, 3, &users, 30), 5);
        assert_eq!(places(&both, 1, &users, 30), 0);
    }

    #[test]
    fn single_user_gets_all_places() {
        assert_eq!(places(&[], 1, &[1], 7), 7);
        assert_eq!(places(&[], 1, &[1, 2, 3], 1), 1);
        // A user that was removed from the list keeps its places.
        assert_eq!(places(&[9; 3], 1, &[1], 7), 4);
    }
}
