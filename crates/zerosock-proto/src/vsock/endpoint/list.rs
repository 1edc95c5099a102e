//! Lists of connections, linked through the slab: insertion and removal take constant time and no
//! memory, and a connection is in a list at most once.

/// No connection.
const NIL: u32 = u32::MAX;
/// As `prev`: not in the list.
const UNLINKED: u32 = u32::MAX - 1;

/// Connections with control packets to send.
pub(super) const CONTROL: usize = 0;
/// Connections with data to send.
pub(super) const DATA: usize = 1;
/// Connections with events to poll.
pub(super) const EVENTS: usize = 2;
/// How many lists there are.
pub(super) const LISTS: usize = 3;

/// The links of a connection in one list.
#[derive(Copy, Clone, Debug)]
pub(super) struct Link {
    prev: u32,
    next: u32,
}

impl Link {
    pub(super) fn next(self) -> Option<u32> {
        (self.next != NIL).then_some(self.next)
    }

    #[inline]
    fn is_member(self) -> bool {
        self.prev != UNLINKED
    }
}

impl Default for Link {
    fn default() -> Link {
        Link {
            prev: UNLINKED,
            next: NIL,
        }
    }
}

/// An entry of the slab, with its links in each list.
pub(super) trait Linked {
    fn links(&mut self) -> &mut [Link; LISTS];

    /// The next entry of the list `L`.
    fn next<const L: usize>(&self) -> Option<u32>;
}

/// A first-in, first-out list.
#[derive(Debug)]
pub(super) struct List<const L: usize> {
    head: u32,
    tail: u32,
}

impl<const L: usize> List<L> {
    pub(super) fn new() -> List<L> {
        List {
            head: NIL,
            tail: NIL,
        }
    }

    pub(super) fn front(&self) -> Option<u32> {
        (self.head != NIL).then_some(self.head)
    }

    /// The connections, in order.
    pub(super) fn members(&self, slots: &[impl Linked]) -> impl Iterator<Item = u32> {
        core::iter::successors(self.front(), |&index| slots[index as usize].next::<L>())
    }

    /// Appends a connection; one that is in the list keeps its position.
    pub(super) fn push(&mut self, slots: &mut [impl Linked], index: u32) {
        let link = &mut slots[index as usize].links()[L];
        if link.is_member() {
            return;
        }
        *link = Link {
            prev: self.tail,
            next: NIL,
        };
        match self.tail {
            NIL => self.head = index,
            tail => slots[tail as usize].links()[L].next = index,
        }
        self.tail = index;
    }

    /// Removes a connection, at any position.
    pub(super) fn remove(&mut self, slots: &mut [impl Linked], index: u32) {
        let link = core::mem::take(&mut slots[index as usize].links()[L]);
        if !link.is_member() {
            return;
        }
        let Link { prev, next } = link;
        match prev {
            NIL => self.head = next,
            prev => slots[prev as usize].links()[L].next = next,
        }
        match next {
            NIL => self.tail = prev,
            next => slots[next as usize].links()[L].prev = prev,
        }
    }

    /// Adds or removes a connection so that it is in the list if `member`.
    pub(super) fn set(&mut self, slots: &mut [impl Linked], index: u32, member: bool) {
        if member {
            self.push(slots, index);
        } else {
            self.remove(slots, index);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::table::Slot;
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    proptest! {
        #[test]
        fn list_agrees_with_a_deque(steps in prop::collection::vec((0u8..3, 0u32..6), 0..100)) {
            let mut slots: Vec<Slot<()>> = (0..6).map(|_| Slot::vacant()).collect();
            let mut list = List::<DATA>::new();
            let mut oracle = VecDeque::new();
            for (step, index) in steps {
                match step {
                    0 => {
                        list.push(&mut slots, index);
                        if !oracle.contains(&index) {
                            oracle.push_back(index);
                        }
                    }
                    1 => {
                        list.remove(&mut slots, index);
                        oracle.retain(|&i| i != index);
                    }
                    _ => {
                        if let Some(front) = list.front() {
                            list.remove(&mut slots, front);
                        }
                        oracle.pop_front();
                    }
                }
                prop_assert_eq!(list.front(), oracle.front().copied());
                let members: Vec<u32> = list.members(&slots).collect();
                prop_assert_eq!(members, Vec::from(oracle.clone()));
            }
        }
    }
}
