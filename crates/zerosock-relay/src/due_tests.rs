//! Unit tests of `due`.

use super::*;

struct Entry(Link);

impl Linked for Entry {
    fn link(&mut self) -> &mut Link {
        &mut self.0
    }
}

fn at(seconds: u64) -> Instant {
    Instant::ZERO + Duration::from_secs(seconds)
}

#[test]
fn entries_come_in_the_order_in_which_they_were_added() {
    let mut slab = Slab::new();
    let mut list = DueList::new(Some(Duration::from_secs(10)));
    let keys: Vec<u32> = (0..5)
        .map(|n| {
            let key = slab.insert(Entry(Link::default())) as u32;
            list.add(&mut slab, key, at(n));
            key
        })
        .collect();
    assert_eq!(list.next(), Some(at(10)));
    assert_eq!(list.pop(&mut slab, at(9)), None);
    // From the middle, the beginning and the end.
    for key in [2, 0, 4] {
        list.remove(&mut slab, keys[key]);
        list.remove(&mut slab, keys[key]);
    }
    assert_eq!(list.next(), Some(at(11)));
    assert_eq!(list.pop(&mut slab, at(20)), Some(keys[1]));
    assert_eq!(list.pop(&mut slab, at(12)), None);
    assert_eq!(list.pop(&mut slab, at(13)), Some(keys[3]));
    assert_eq!(list.pop(&mut slab, at(99)), None);
    assert_eq!(list.next(), None);
    list.add(&mut slab, keys[0], at(5));
    assert_eq!(list.pop(&mut slab, at(15)), Some(keys[0]));
}

#[test]
fn a_list_without_a_period_stays_empty() {
    let mut slab = Slab::new();
    let mut list = DueList::new(None);
    let key = slab.insert(Entry(Link::default())) as u32;
    list.add(&mut slab, key, at(0));
    assert_eq!(list.next(), None);
    list.remove(&mut slab, key);
}
