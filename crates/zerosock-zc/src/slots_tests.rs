//! Each rule of slots, and a comparison with a simple model.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

fn posted(slots: &mut Slots) -> Vec<(u64, u32)> {
    std::iter::from_fn(|| slots.next().map(|found| (found.tag, found.sequence))).collect()
}

#[test]
fn a_flush_without_sends_posts_nothing() {
    let mut slots = Slots::new([7]);
    slots.flush(0..1).expect("a slot");
    slots.flush(0..1).expect("a slot");
    assert_eq!(posted(&mut slots), []);
    // It takes no sequence number.
    let send = slots.accepted(0);
    let attached = slots.executed(send, true).expect("a slot");
    slots.released(attached);
    assert_eq!(posted(&mut slots), [(7, 0)]);
}

#[test]
fn a_flush_waits_for_attached_sends_only() {
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
fn a_flush_covers_earlier_sends() {
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
fn a_flush_waits_for_an_overtaken_send() {
    let mut slots = Slots::new([1]);
    let before = slots.accepted(0);
    slots.flush(0..1).expect("a slot");
    let after = slots.accepted(0);
    // The later send is executed first: both share the notifier, which stays open for the earlier
    // one.
    let after = slots.executed(after, false).expect("a slot");
    slots.released(after);
    assert_eq!(posted(&mut slots), []);
    let before = slots.executed(before, false).expect("a slot");
    assert_eq!(posted(&mut slots), []);
    slots.released(before);
    assert_eq!(posted(&mut slots), [(1, 0)]);
}

/// A datagram without memory is retried, and a later one that is copied overtakes it.
#[test]
fn a_flush_on_a_send_covers_earlier_sends() {
    let mut slots = Slots::new([1]);
    let [before, flushing, after] = [(); 3].map(|()| slots.accepted(0));
    let flushing = slots.executed(flushing, true).expect("a slot");
    slots.released(flushing);
    assert_eq!(posted(&mut slots), []);
    let before = slots.executed(before, false).expect("a slot");
    assert_eq!(posted(&mut slots), []);
    slots.released(before);
    assert_eq!(posted(&mut slots), [(1, 0)]);
    let after = slots.executed(after, true).expect("a slot");
    slots.released(after);
    assert_eq!(posted(&mut slots), [(1, 1)]);
}

/// Results are handled in any order.
#[test]
fn a_notifier_has_the_tag_of_its_first_accepted_send() {
    for order in [[0, 1], [1, 0]] {
        let mut slots = Slots::new([1]);
        let old = slots.accepted(0);
        slots.set_tag(0, 2).expect("a slot");
        let new = slots.accepted(0);
        slots.set_tag(0, 3).expect("a slot");
        slots.flush(0..1).expect("a slot");
        for index in order {
            let attached = slots.executed([old, new][index], false).expect("a slot");
            slots.released(attached);
        }
        assert_eq!(posted(&mut slots), [(1, 0)], "{order:?}");
    }
}

#[test]
fn a_send_that_is_never_executed_does_not_delay_a_flush() {
    let mut slots = Slots::new([1]);
    let sent = slots.accepted(0);
    let never = slots.accepted(0);
    let sent = slots.executed(sent, false).expect("a slot");
    slots.released(sent);
    slots.flush(0..1).expect("a slot");
    assert_eq!(posted(&mut slots), []);
    slots.finish(never);
    assert_eq!(posted(&mut slots), [(1, 0)]);
}

#[test]
fn a_new_tag_applies_to_new_notifiers() {
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

/// Number of operations on the queue of a slot for sends that finish in this order, each followed
/// by a flush.
fn steps(order: impl IntoIterator<Item = usize>, sends: usize) -> u64 {
    let mut slots = Slots::new([1]);
    let accept = |_| {
        let ticket = slots.accepted(0);
        slots.flush(0..1).expect("a slot");
        ticket
    };
    let tickets: Vec<Ticket> = (0..sends).map(accept).collect();
    for index in order {
        let attached = slots.executed(tickets[index], true).expect("a slot");
        slots.released(attached);
    }
    // All are finished and flushed.
    assert!(slots.notifiers.is_empty() && slots.slots[0].sends.len() == 0);
    assert!(!posted(&mut slots).is_empty());
    slots.slots[0].sends.steps()
}

#[test]
fn the_cost_of_a_flush_does_not_grow_with_waiting_flushes() {
    const SENDS: usize = 10_000;
    const MOST: u64 = 8 * SENDS as u64;
    assert!(steps(0..SENDS, SENDS) <= MOST);
    assert!(steps((0..SENDS).rev(), SENDS) <= MOST);
    // 7919 is a prime and no factor of the number of sends.
    assert!(steps((0..SENDS).map(|send| send * 7919 % SENDS), SENDS) <= MOST);
}

#[derive(Clone, Debug)]
enum Step {
    Accept(u32, bool),
    /// Executes any send that was not executed, with or without success.
    Execute(prop::sample::Index, bool),
    Abandon(prop::sample::Index),
    Release(prop::sample::Index),
    Flush(u32, u32),
    Tag(u32),
}

fn step() -> impl Strategy<Value = Step> {
    let index = any::<prop::sample::Index>;
    prop_oneof![
        4 => (0..3u32, any::<bool>()).prop_map(|(slot, flush)| Step::Accept(slot, flush)),
        4 => (index(), prop::bool::weighted(0.8))
            .prop_map(|(which, success)| Step::Execute(which, success)),
        1 => index().prop_map(Step::Abandon),
        4 => index().prop_map(Step::Release),
        1 => (0..3u32, 0..3u32).prop_map(|(from, to)| Step::Flush(from, to)),
        1 => (0..3u32).prop_map(Step::Tag),
    ]
}

struct Sent {
    slot: usize,
    ticket: Ticket,
    tag: u64,
    flush: bool,
    finished: bool,
    released: bool,
    attached: Option<Attached>,
}

/// The model of one slot. Sends have numbers in the order of acceptance.
#[derive(Default)]
struct Model {
    tag: u64,
    open: Vec<usize>,
    closed: Vec<Vec<usize>>,
    /// Pending flushes, each for the sends with lower numbers.
    flushes: Vec<usize>,
}

impl Model {
    /// Executes the flushes that wait for finished sends only.
    fn execute_flushes(&mut self, slot: usize, sends: &[Sent]) {
        let waits = |flush: &usize| {
            let mut before = sends[..*flush].iter();
            before.any(|send| send.slot == slot && !send.finished)
        };
        let waiting = self.flushes.len();
        self.flushes.retain(waits);
        if self.flushes.len() < waiting && !self.open.is_empty() {
            self.closed.push(std::mem::take(&mut self.open));
        }
    }

    /// The notifications that must have been posted.
    fn posted(&self, sends: &[Sent]) -> Vec<(u32, u64)> {
        let groups = (0..).zip(&self.closed);
        groups
            .filter(|(_, group)| group.iter().all(|&send| sends[send].released))
            .map(|(sequence, group)| {
                let first = group.iter().min().expect("nothing attached posts nothing");
                (sequence, sends[*first].tag)
            })
            .collect()
    }
}

/// One of the unfinished sends.
fn pick(sends: &[Sent], index: prop::sample::Index) -> Option<usize> {
    let waiting: Vec<_> = (0..sends.len())
        .filter(|&send| !sends[send].finished)
        .collect();
    (!waiting.is_empty()).then(|| *index.get(&waiting))
}

proptest! {
    /// In any order of accepting, executing, releasing and flushing, the notifications of the model
    /// are posted, each once.
    #[test]
    fn slots_agree_with_the_model(steps in vec(step(), 0..200)) {
        let mut slots = Slots::new([0, 1, 2]);
        let mut models: [Model; 3] = Default::default();
        let mut tags = 3;
        (0..).zip(&mut models).for_each(|(tag, model)| model.tag = tag);
        let mut sends: Vec<Sent> = Vec::new();
        let mut seen: [Vec<(u32, u64)>; 3] = Default::default();
        // Tags differ, and identify their slot.
        let slot_of = |tag: u64| (tag % 3) as usize;
        for step in steps {
            match step {
                Step::Accept(slot, flush) => {
                    let ticket = slots.accepted(slot);
                    let slot = slot as usize;
                    let (finished, released, attached) = (false, false, None);
                    let tag = models[slot].tag;
                    sends.push(Sent { slot, ticket, tag, flush, finished, released, attached });
                }
                Step::Execute(which, success) => if let Some(which) = pick(&sends, which) {
                    let send = &mut sends[which];
                    let flush = success && send.flush;
                    send.finished = true;
                    send.attached = slots.executed(send.ticket, flush);
                    prop_assert!(send.attached.is_some());
                    let slot = send.slot;
                    models[slot].open.push(which);
                    if flush {
                        models[slot].flushes.push(which + 1);
                    }
                    models[slot].execute_flushes(slot, &sends);
                }
                Step::Abandon(which) => if let Some(which) = pick(&sends, which) {
                    sends[which].finished = true;
                    slots.finish(sends[which].ticket);
                    let slot = sends[which].slot;
                    models[slot].execute_flushes(slot, &sends);
                }
                Step::Release(index) => if !sends.is_empty() {
                    let send = index.index(sends.len());
                    if let Some(attached) = sends[send].attached.take() {
                        sends[send].released = true;
                        slots.released(attached);
                    }
                }
                Step::Flush(from, to) => {
                    slots.flush(from..to).expect("slots");
                    let range = from as usize..to as usize;
                    for (slot, model) in models.iter_mut().enumerate() {
                        if range.contains(&slot) {
                            model.flushes.push(sends.len());
                            model.execute_flushes(slot, &sends);
                        }
                    }
                }
                Step::Tag(slot) => {
                    let tag = tags + u64::from(slot);
                    tags += 3;
                    slots.set_tag(slot, tag).expect("a slot");
                    models[slot as usize].tag = tag;
                }
            }
            while let Some(found) = slots.next() {
                seen[slot_of(found.tag)].push((found.sequence, found.tag));
            }
            for (model, seen) in models.iter().zip(&mut seen) {
                seen.sort_unstable();
                prop_assert_eq!(&*seen, &model.posted(&sends));
            }
        }
        // After all releases and flushes, no state remains.
        for send in sends.iter_mut().filter(|send| !send.finished) {
            send.attached = slots.executed(send.ticket, false);
        }
        for send in &mut sends {
            if let Some(attached) = send.attached.take() {
                slots.released(attached);
            }
        }
        slots.flush(0..3).expect("slots");
        prop_assert!(slots.notifiers.is_empty());
        prop_assert!(slots.slots.iter().all(|slot| slot.sends.len() == 0));
    }
}
