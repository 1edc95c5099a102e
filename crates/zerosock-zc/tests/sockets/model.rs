//! In any order of calls, every send is reported once, in each way.
//!
//! The model knows only the order of acceptance and which datagrams are too long. It derives the
//! notifications that must be posted in the end; each step checks that no notification precedes the
//! buffers that it covers.

use std::collections::{BTreeMap, BTreeSet};
use std::net::UdpSocket;
use std::time::Duration;

use proptest::prelude::*;
use zerosock_zc::{Completion, Copying, Outgoing, Refusal, SendBackend, Sender};

use crate::network::BACKENDS;

const PATIENCE: Duration = Duration::from_secs(300);
const SLOTS: u32 = 3;
/// A length that no datagram can have.
const TOO_LONG: usize = 65_508;

#[derive(Clone, Debug)]
enum Step {
    Push {
        len: usize,
        copying: Copying,
        slot: Option<u32>,
        flush: bool,
    },
    Submit,
    Poll,
    Take,
    Flush(u32, u32),
    Ask(usize),
    Wait,
}

fn step() -> impl Strategy<Value = Step> {
    let len = prop_oneof![
        4 => 8usize..2000,
        2 => 2000usize..65_507,
        1 => Just(TOO_LONG),
    ];
    let copying = prop_oneof![
        Just(Copying::Auto),
        Just(Copying::Never),
        Just(Copying::Always)
    ];
    let slot = prop::option::of(0..SLOTS);
    prop_oneof![
        8 => (len, copying, slot, any::<bool>()).prop_map(|(len, copying, slot, flush)| {
            let flush = flush && slot.is_some();
            Step::Push { len, copying, slot, flush }
        }),
        3 => Just(Step::Submit),
        2 => Just(Step::Poll),
        2 => Just(Step::Take),
        1 => (0..SLOTS, 0..=SLOTS).prop_map(|(from, to)| Step::Flush(from.min(to), from.max(to))),
        2 => (0usize..=16).prop_map(Step::Ask),
        1 => Just(Step::Wait),
    ]
}

/// The sends that one notification covers.
#[derive(Default)]
struct Group {
    sends: BTreeSet<u64>,
}

#[derive(Default)]
struct Model {
    /// Accepted sends, by what their buffers begin with.
    under_way: BTreeMap<u64, usize>,
    back: BTreeSet<u64>,
    numbered: BTreeSet<u32>,
    told: BTreeSet<u32>,
    /// By slot: groups that are closed, in order, and the open one.
    closed: [Vec<Group>; SLOTS as usize],
    open: [Group; SLOTS as usize],
    /// Sequence numbers notified so far, by slot: one may precede an earlier one if the buffers of
    /// that one are busy for longer.
    notified: [BTreeSet<u32>; SLOTS as usize],
}

impl Model {
    fn close(&mut self, slot: u32) {
        let slot = slot as usize;
        let group = std::mem::take(&mut self.open[slot]);
        if !group.sends.is_empty() {
            self.closed[slot].push(group);
        }
    }

    fn take(&mut self, sender: &mut Sender<Vec<u8>>) {
        while let Some(returned) = sender.returned() {
            let id = u64::from_ne_bytes(returned.buffer[..8].try_into().expect("eight bytes"));
            let len = self.under_way.remove(&id).expect("it was under way");
            assert_eq!(returned.buffer.len(), len);
            assert!(self.back.insert(id));
            assert_eq!(returned.outcome.is_err(), len == TOO_LONG, "{returned:?}");
        }
    }

    fn told(&mut self, ranges: &[Completion]) {
        for range in ranges {
            let mut number = range.lo;
            for _ in 0..range.count() {
                assert!(self.numbered.contains(&number), "{range:?}");
                assert!(self.told.insert(number), "{number} twice");
                number = number.wrapping_add(1);
            }
        }
    }

    /// Each notification is posted once, after its buffers are free. The caller takes the buffers
    /// first.
    fn notifications(&mut self, sender: &mut Sender<Vec<u8>>) {
        while let Some(notification) = sender.notification() {
            let slot = (notification.tag - 100) as usize;
            assert!(self.notified[slot].insert(notification.sequence));
            let group = &self.closed[slot][notification.sequence as usize];
            assert!(group.sends.is_subset(&self.back), "{notification:?}");
        }
    }
}

fn run(backend: SendBackend, steps: &[Step]) {
    let receiver = UdpSocket::bind("127.0.0.1:0").expect("loopback");
    let socket = UdpSocket::bind("127.0.0.1:0").expect("loopback");
    socket
        .connect(receiver.local_addr().expect("an address"))
        .expect("loopback");
    let builder = Sender::builder().backend(backend).capacity(8);
    let builder = builder.inline_completions().slots([100, 101, 102]);
    let mut sender: Sender<Vec<u8>> = builder.open(socket).expect("a sender");
    let mut model = Model::default();
    let mut room = [Completion::default(); 16];
    let mut next = 0u64;
    for step in steps {
        match *step {
            Step::Push {
                len,
                copying,
                slot,
                flush,
            } => {
                let mut buffer = vec![7; len];
                buffer[..8].copy_from_slice(&next.to_ne_bytes());
                let outgoing = Outgoing {
                    slot,
                    flush,
                    ..Outgoing::new(buffer).copying(copying)
                };
                match sender.push(outgoing) {
                    Ok(number) => {
                        assert_eq!(number.is_none(), copying == Copying::Always);
                        model.numbered.extend(number);
                        model.under_way.insert(next, len);
                        if let Some(slot) = slot {
                            model.open[slot as usize].sends.insert(next);
                            if flush && len != TOO_LONG {
                                model.close(slot);
                            }
                        }
                        next += 1;
                    }
                    Err(refused) => assert!(matches!(refused.why, Refusal::Full), "{refused}"),
                }
            }
            Step::Submit => sender.submit().expect("the kernel answers"),
            Step::Poll => sender.poll().expect("the kernel answers"),
            Step::Take => model.take(&mut sender),
            Step::Flush(from, to) => {
                sender.flush(from..to).expect("there are three");
                (from..to).for_each(|slot| model.close(slot));
            }
            Step::Ask(most) => {
                let room = &mut room[..most];
                let count = sender.completions(room).expect("the kernel answers");
                model.told(&room[..count]);
            }
            Step::Wait => sender
                .wait(Some(Duration::from_millis(1)))
                .expect("the kernel answers"),
        }
        model.take(&mut sender);
        model.notifications(&mut sender);
    }
    assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
    (0..SLOTS).for_each(|slot| model.close(slot));
    model.take(&mut sender);
    model.notifications(&mut sender);
    loop {
        let count = sender.completions(&mut room).expect("the kernel answers");
        model.told(&room[..count]);
        if count == 0 {
            break;
        }
    }
    assert!(model.under_way.is_empty(), "{:?}", model.under_way);
    assert_eq!(model.told, model.numbered);
    for slot in 0..SLOTS as usize {
        assert_eq!(model.notified[slot].len(), model.closed[slot].len());
    }
    assert_eq!(sender.room(), 8);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn every_send_is_reported_once_in_any_order_of_calls(
        backend in prop::sample::select(BACKENDS.to_vec()),
        steps in prop::collection::vec(step(), 1..120),
    ) {
        run(backend, &steps);
    }
}
