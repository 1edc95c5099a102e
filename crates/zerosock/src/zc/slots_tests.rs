//! The rules one by one, and a model that is too simple to be wrong.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

fn posted(slots: &mut Slots) -> Vec<(u64, u32)> {
    std::iter::from_fn(|| slots.next().map(|found| (found.tag, found.sequence))).collect()
}

#[test]
fn nothing_attached_posts_nothing() {
    let mut slots = Slots::new([7]);
    slots.flush(0..1).expect("a slot");
    slots.flush(0..1).expect("a slot");
    assert_eq!(posted(&mut slots), []);
    // And takes no sequence number.
    let send = slots.accepted(0);
    let attached = slots.executed(send, true).expect("a slot");
    slots.released(attached);
    assert_eq!(posted(&mut slots), [(7, 0)]);
}

#[test]
fn a_flush_waits_for_what_is_attached_and_for_no_more() {
    let mut slots = Slots::new([1, 2]);
    let sends = [(); 3].map(|()| slots.accepted(1));
    let first = slots.executed(sends[0], false).expect("a slot");
    let second = slots.executed(sends[1], true).expect("a slot");
    let third = slots.executed(sends[2], false).expect("a slot");
    slots.released(third);
    slots.released(second);
    assert_eq!(posted(&mut slots), []);
    slots.released(first);
    assert_eq!(posted(&mut slots), [(2, 0)]);
    slots.flush(0..2).expect("slots");
    assert_eq!(posted(&mut slots), [(2, 1)]);
}

#[test]
fn a_failed_send_attaches_and_does_not_flush() {
    let mut slots = Slots::new([1]);
    let send = slots.accepted(0);
    let failed = slots.executed(send, false).expect("a slot");
    slots.released(failed);
    assert_eq!(posted(&mut slots), []);
    slots.flush(0..1).expect("a slot");
    assert_eq!(posted(&mut slots), [(1, 0)]);
}

#[test]
fn a_flush_covers_what_was_accepted_before_it() {
    let mut slots = Slots::new([1]);
    let before = slots.accepted(0);
    slots.flush(0..1).expect("a slot");
    let after = slots.accepted(0);
    let before = slots.executed(before, false).expect("a slot");
    let after = slots.executed(after, false).expect("a slot");
    slots.released(before);
    assert_eq!(posted(&mut slots), [(1, 0)]);
    slots.released(after);
    assert_eq!(posted(&mut slots), []);
}

#[test]
fn a_flush_waits_for_one_that_is_overtaken() {
    let mut slots = Slots::new([1]);
    let before = slots.accepted(0);
    slots.flush(0..1).expect("a slot");
    let after = slots.accepted(0);
    // The one behind is executed first: it shares the notifier, which stays open for the other.
    let after = slots.executed(after, false).expect("a slot");
    slots.released(after);
    assert_eq!(posted(&mut slots), []);
    let before = slots.executed(before, false).expect("a slot");
    assert_eq!(posted(&mut slots), []);
    slots.released(before);
    assert_eq!(posted(&mut slots), [(1, 0)]);
}

#[test]
fn one_that_is_never_executed_holds_no_flush_up() {
    let mut slots = Slots::new([1]);
    let sent = slots.accepted(0);
    let never = slots.accepted(0);
    let sent = slots.executed(sent, false).expect("a slot");
    slots.released(sent);
    slots.flush(0..1).expect("a slot");
    assert_eq!(posted(&mut slots), []);
    slots.abandoned(never);
    assert_eq!(posted(&mut slots), [(1, 0)]);
}

#[test]
fn tags_are_taken_when_a_notifier_is_made() {
    let mut slots = Slots::new([1]);
    let old = slots.accepted(0);
    let old = slots.executed(old, false).expect("a slot");
    slots.set_tag(0, 9).expect("a slot");
    slots.flush(0..1).expect("a slot");
    let new = slots.accepted(0);
    let new = slots.executed(new, true).expect("a slot");
    slots.released(new);
    slots.released(old);
    assert_eq!(posted(&mut slots), [(9, 1), (1, 0)]);
}

#[test]
fn sequences_wrap() {
    let mut slots = Slots::new([1]);
    slots.slots[0].sequence = u32::MAX;
    for _ in 0..2 {
        let send = slots.accepted(0);
        let attached = slots.executed(send, true).expect("a slot");
        slots.released(attached);
    }
    assert_eq!(posted(&mut slots), [(1, u32::MAX), (1, 0)]);
}

#[test]
fn a_slot_out_of_range_changes_nothing() {
    let mut slots = Slots::new([1, 2]);
    let error = NoSuchSlot { slot: 2, slots: 2 };
    assert_eq!(slots.check(2), Err(error));
    assert_eq!(slots.set_tag(2, 0), Err(error));
    let send = slots.accepted(0);
    let attached = slots.executed(send, false).expect("a slot");
    slots.released(attached);
    assert_eq!(slots.flush(0..3), Err(error));
    assert_eq!(posted(&mut slots), []);
}

#[derive(Clone, Debug)]
enum Step {
    Accept(u32, bool),
    Execute(bool),
    Release(prop::sample::Index),
    Flush(u32, u32),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..3u32, any::<bool>()).prop_map(|(slot, flush)| Step::Accept(slot, flush)),
        4 => prop::bool::weighted(0.8).prop_map(Step::Execute),
        4 => any::<prop::sample::Index>().prop_map(Step::Release),
        1 => (0..3u32, 0..3u32).prop_map(|(from, to)| Step::Flush(from, to)),
    ]
}

/// The rules said again as history: for each slot the list of what happened in order, flushes put
/// behind the sends they cover. A notifier is a stretch between flushes that has sends in it.
#[derive(Default)]
struct Model {
    /// For each slot: sends by number, and flushes.
    history: [Vec<Entry>; 3],
}

#[derive(Copy, Clone)]
enum Entry {
    Send(usize),
    Flush,
}

impl Model {
    /// What must have been posted by now, for each slot in the order of sequences.
    fn posted(&self, slot: usize, sends: &[Sent]) -> Vec<u32> {
        let mut done = Vec::new();
        let (mut sequence, mut attached, mut free) = (0, 0, true);
        for entry in &self.history[slot] {
            match *entry {
                Entry::Send(number) if sends[number].executed.is_none() => break,
                Entry::Send(number) => {
                    attached += 1;
                    free &= sends[number].released;
                    if sends[number].executed == Some(true) && sends[number].flush {
                        if free {
                            done.push(sequence);
                        }
                        (sequence, attached, free) = (sequence + 1, 0, true);
                    }
                }
                Entry::Flush if attached > 0 => {
                    if free {
                        done.push(sequence);
                    }
                    (sequence, attached, free) = (sequence + 1, 0, true);
                }
                Entry::Flush => {}
            }
        }
        done
    }
}

struct Sent {
    ticket: Ticket,
    flush: bool,
    executed: Option<bool>,
    released: bool,
    attached: Option<Attached>,
}

proptest! {
    /// Whatever the order of accepting, executing, releasing and flushing, what has been posted is
    /// what the rules say, each once.
    #[test]
    fn slots_do_as_the_rules_say(steps in vec(step(), 0..200)) {
        let mut slots = Slots::new([0, 1, 2]);
        let mut model = Model::default();
        let mut sends: Vec<Sent> = Vec::new();
        let mut next = 0;
        let mut seen: [Vec<u32>; 3] = Default::default();
        for step in steps {
            match step {
                Step::Accept(slot, flush) => {
                    let ticket = slots.accepted(slot);
                    model.history[slot as usize].push(Entry::Send(sends.len()));
                    sends.push(Sent { ticket, flush, executed: None, released: false, attached: None });
                }
                Step::Execute(success) if next < sends.len() => {
                    let send = &mut sends[next];
                    next += 1;
                    send.executed = Some(success);
                    send.attached = slots.executed(send.ticket, success && send.flush);
                    prop_assert!(send.attached.is_some());
                }
                Step::Release(index) if next > 0 => {
                    let send = &mut sends[index.index(next)];
                    if let Some(attached) = send.attached.take() {
                        send.released = true;
                        slots.released(attached);
                    }
                }
                Step::Flush(from, to) => {
                    slots.flush(from..to).expect("slots");
                    for slot in from..to {
                        model.history[slot as usize].push(Entry::Flush);
                    }
                }
                Step::Execute(_) | Step::Release(_) => {}
            }
            while let Some(found) = slots.next() {
                seen[found.tag as usize].push(found.sequence);
            }
            for (slot, seen) in seen.iter().enumerate() {
                let mut sorted = seen.clone();
                sorted.sort_unstable();
                prop_assert_eq!(&sorted, &model.posted(slot, &sends), "slot {}", slot);
            }
        }
        // Everything released and flushed leaves nothing behind.
        while next < sends.len() {
            sends[next].attached = slots.executed(sends[next].ticket, false);
            next += 1;
        }
        for send in &mut sends {
            if let Some(attached) = send.attached.take() {
                slots.released(attached);
            }
        }
        slots.flush(0..3).expect("slots");
        prop_assert!(slots.notifiers.is_empty());
    }
}
