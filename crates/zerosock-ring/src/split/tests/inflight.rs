//! A device half that is killed behind each of its stores, and its successor: the driver gets each chain
//! that it posted back, and once. And records that no device half has written.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU64, Ordering::Relaxed};

use proptest::prelude::*;
use rustix::fd::OwnedFd;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use super::*;
use crate::split::{Buffer, Chain, InflightRecord, LostChains, PopError, Singles};
use crate::state_map::StateMap;

thread_local! {
    /// Stores of the device half so far.
    static STORES: Cell<u64> = const { Cell::new(0) };
    /// The store behind which the device half is killed.
    static KILLED_AFTER: Cell<Option<u64>> = const { Cell::new(None) };
}

struct Killed;

/// Counts a store, and ends the device half behind the one that was chosen.
pub(in crate::split) fn stored() {
    STORES.set(STORES.get() + 1);
    if KILLED_AFTER.get() == Some(STORES.get()) {
        resume_unwind(Box::new(Killed));
    }
}

/// Runs `device`, which is killed behind that store. Returns whether it was.
fn killed_after(store: Option<u64>, device: impl FnOnce()) -> bool {
    STORES.set(0);
    KILLED_AFTER.set(store);
    let ended = catch_unwind(AssertUnwindSafe(device));
    KILLED_AFTER.set(None);
    match ended {
        Ok(()) => false,
        Err(reason) if reason.is::<Killed>() => true,
        Err(reason) => resume_unwind(reason),
    }
}

fn file() -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = memfd_create("state", flags).unwrap();
    ftruncate(&fd, InflightRecord::LEN as u64).unwrap();
    fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW).unwrap();
    fd
}

fn state(fd: &OwnedFd) -> StateMap {
    StateMap::map(fd, InflightRecord::LEN).unwrap()
}

/// The number of the queue start.
const START: u64 = 7;

#[derive(Copy, Clone, Debug)]
enum Step {
    /// The driver posts a chain of so many buffers, writable or not.
    Post(u8, bool),
    /// The driver takes what was returned.
    Poll,
    Pop,
    /// Takes the chain at the front: pops it, or completes it there.
    Front(bool),
    /// Reads so many chains ahead, completes the first of them, and pops the others.
    Singles(u8, u8),
    Unpop,
    Complete(prop::sample::Index),
    Publish,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        5 => (1u8..4, any::<bool>()).prop_map(|(count, writable)| Step::Post(count, writable)),
        2 => Just(Step::Poll),
        4 => Just(Step::Pop),
        2 => any::<bool>().prop_map(Step::Front),
        1 => (1u8..4, 0u8..4).prop_map(|(count, first)| Step::Singles(count, first)),
        1 => Just(Step::Unpop),
        5 => any::<prop::sample::Index>().prop_map(Step::Complete),
        2 => Just(Step::Publish),
    ]
}

#[derive(Clone, Debug)]
struct Case {
    size: u16,
    base: u16,
    event_idx: bool,
    /// Chains that a device without a record has lost before.
    lost: u16,
    steps: Vec<Step>,
}

fn case() -> impl Strategy<Value = Case> {
    let base = prop_oneof![Just(0), 65_500u16..=65_535, any::<u16>()];
    let steps = prop::collection::vec(step(), 1..80);
    (0u32..=8, base, any::<bool>(), 0u16..3, steps).prop_map(
        |(size, base, event_idx, lost, steps)| Case {
            size: 1 << size,
            base,
            event_idx,
            lost,
            steps,
        },
    )
}

/// All that outlives the device half.
struct World {
    mem: Arc<Memory>,
    driver: DriverQueue,
    record: InflightRecord,
    config: QueueConfig,
    posted: BTreeSet<u64>,
    returned: BTreeSet<u64>,
    /// The next step.
    at: usize,
}

impl World {
    fn new(case: &Case) -> World {
        let mem = memory(case.size);
        let (layout, event_idx) = (layout(case.size), case.event_idx);
        let driver = DriverQueue::with_base(Arc::clone(&mem), layout, event_idx, case.base);
        let mut world = World {
            driver: driver.unwrap(),
            record: InflightRecord::new(state(&file())).unwrap(),
            config: config(case.size, case.base, event_idx),
            mem,
            posted: BTreeSet::new(),
            returned: BTreeSet::new(),
            at: 0,
        };
        let mut before = DeviceQueue::new(Arc::clone(&world.mem), &world.config).unwrap();
        for _ in 0..case.lost {
            world.post(1, true);
            let _ = before.pop().unwrap();
        }
        world.config.base = before.base();
        world.posted.clear();
        world
    }

    fn post(&mut self, count: u8, writable: bool) {
        let token = self.posted.len() as u64;
        let buffer = |at: u8| Buffer {
            addr: DATA + u64::from(at),
            len: 1,
            writable,
        };
        let buffers: Vec<Buffer> = (0..count).map(buffer).collect();
        if self.driver.add(&buffers, token).is_ok() {
            self.posted.insert(token);
            let _ = self.driver.publish();
        }
    }

    fn poll(&mut self) {
        while let Some(used) = self.driver.poll().expect("a chain that was posted") {
            assert!(
                self.returned.insert(used.token),
                "{} comes twice",
                used.token
            );
        }
    }

    /// A device half for what is there.
    fn device(&self) -> (DeviceQueue, LostChains) {
        let (mem, record) = (Arc::clone(&self.mem), self.record.clone());
        DeviceQueue::recover(mem, &self.config, record, START).unwrap()
    }

    fn recovered(&self) -> DeviceQueue {
        let (mut device, lost) = self.device();
        let outstanding = device.outstanding();
        assert_eq!(device.complete_lost(lost), outstanding);
        let _ = device.publish();
        device
    }

    /// Carries out the steps that are left.
    fn run(&mut self, device: &mut DeviceQueue, steps: &[Step]) {
        let (mut chains, mut singles) = (Vec::new(), Singles::default());
        while let Some(&step) = steps.get(self.at) {
            self.at += 1;
            self.step(device, step, &mut chains, &mut singles);
        }
    }

    fn step(
        &mut self,
        device: &mut DeviceQueue,
        step: Step,
        chains: &mut Vec<Chain>,
        singles: &mut Singles,
    ) {
        match step {
            Step::Post(count, writable) => self.post(count, writable),
            Step::Poll => self.poll(),
            Step::Pop => match device.pop() {
                Ok(chain) => chains.extend(chain),
                Err(PopError::Malformed(chain)) => chains.push(chain),
                Err(PopError::Broken(reason)) => panic!("{reason}"),
            },
            Step::Front(is_popped) => {
                let front = |writable| {
                    let front = device.front(1, writable)?;
                    Some(front.token)
                };
                if let Some(token) = [false, true].into_iter().find_map(front) {
                    match is_popped {
                        true => chains.push(device.pop_front(token)),
                        false => device.complete_front(token, 0),
                    }
                }
            }
            Step::Singles(count, first) => {
                device.read_singles(singles, count.into(), true, 1);
                for at in 0..count {
                    match at < first {
                        true => device.complete_single(singles, 1),
                        false => chains.extend(device.pop_single(singles)),
                    }
                }
            }
            Step::Unpop => {
                if let Some(at) = chains
                    .iter()
                    .position(|chain| chain.position.wrapping_add(1) == device.base())
                {
                    device.unpop(chains.remove(at));
                }
            }
            Step::Complete(which) => {
                if !chains.is_empty() {
                    let chain = chains.remove(which.index(chains.len()));
                    let written = chain.writable_len();
                    device.complete(chain, written);
                }
            }
            Step::Publish => {
                let _ = device.publish();
            }
        }
    }

    /// Returns what is posted, and compares.
    fn finish(&mut self, mut device: DeviceQueue) {
        loop {
            match device.pop() {
                Ok(None) => break,
                Ok(Some(chain)) | Err(PopError::Malformed(chain)) => device.complete(chain, 0),
                Err(PopError::Broken(reason)) => panic!("{reason}"),
            }
        }
        assert_eq!(device.outstanding(), 0);
        let _ = device.publish();
        self.poll();
        assert_eq!(self.returned, self.posted, "chains are lost");
    }
}

/// Kills the device half behind that store, and its successor behind that one, and lets the third go on.
/// Returns whether each was killed.
fn run(case: &Case, store: u64, next: Option<u64>) -> [bool; 2] {
    let mut world = World::new(case);
    let first = killed_after(Some(store), || {
        let (mut device, _) = world.device();
        world.run(&mut device, &case.steps);
    });
    let second = next.is_some() && killed_after(next, || drop(world.recovered()));
    let mut device = world.recovered();
    world.poll();
    // Where the first one was killed nothing is in flight now.
    let left = world.at;
    world.run(&mut device, &case.steps);
    drop(device);
    let device = world.recovered();
    assert!(world.at >= left);
    world.finish(device);
    [first, second]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn each_posted_chain_is_returned_once_after_a_kill_behind_any_store(case in case()) {
        let mut store = 1;
        while run(&case, store, None)[0] {
            store += 1;
        }
    }

    #[test]
    fn a_successor_can_be_killed_behind_any_store_too(case in case(), store in 1u64..200) {
        let mut next = 1;
        while run(&case, store, Some(next))[1] {
            next += 1;
        }
    }
}

#[test]
fn indices_wrap_around_under_a_record() {
    let case = Case {
        size: 4,
        base: 65_000,
        event_idx: true,
        lost: 1,
        steps: vec![],
    };
    let mut world = World::new(&case);
    let mut device = world.device().0;
    for round in 0..2000_u32 {
        world.post(1, true);
        let kept = device.pop().unwrap().unwrap();
        world.post(1, true);
        let chain = device.pop().unwrap().unwrap();
        device.complete(chain, 1);
        if round % 3 == 0 {
            let _ = device.publish();
        }
        let base = device.base();
        if round % 5 == 0 {
            // Killed: the one that was kept comes back, and the other one is not popped again.
            drop((kept, device));
            device = world.recovered();
            assert_eq!(device.base(), base);
        } else {
            device.complete(kept, 1);
        }
        let _ = device.publish();
        world.poll();
        assert_eq!(world.returned.len(), world.posted.len());
    }
    world.finish(device);
}

#[test]
fn another_start_begins_anew_at_its_base() {
    let case = Case {
        size: 8,
        base: 10,
        event_idx: false,
        lost: 0,
        steps: vec![],
    };
    for (first, second) in [(START, START + 1), (0, 0), (START, 0), (0, START)] {
        let mut world = World::new(&case);
        let start = |world: &World, number| {
            let (mem, record) = (Arc::clone(&world.mem), world.record.clone());
            DeviceQueue::recover(mem, &world.config, record, number).unwrap()
        };
        world.post(1, true);
        let (mut device, lost) = start(&world, first);
        assert_eq!(device.complete_lost(lost), 0);
        let _ = device.pop().unwrap().unwrap();
        let (mut device, lost) = start(&world, second);
        assert_eq!((device.base(), device.outstanding()), (10, 0));
        assert_eq!(device.complete_lost(lost), 0);
        // The new record is as good as the first one.
        let _ = device.pop().unwrap().unwrap();
        let (device, lost) = start(&world, second);
        let expected = u16::from(second != 0);
        assert_eq!(
            (device.base(), device.outstanding()),
            (10 + expected, expected)
        );
        let _ = lost;
    }
}

#[test]
fn each_way_to_take_a_chain_is_written_down() {
    let case = Case {
        size: 8,
        base: 10,
        event_idx: false,
        lost: 0,
        steps: vec![],
    };
    // The buffers of the chain, how it is taken, and how many are in flight then.
    let ways = [
        (1, Step::Pop, 1),
        (2, Step::Pop, 1),
        (3, Step::Pop, 1),
        (1, Step::Front(true), 1),
        (1, Step::Front(false), 0),
        (1, Step::Singles(1, 0), 1),
        (1, Step::Singles(1, 1), 0),
    ];
    for (count, step, in_flight) in ways {
        let mut world = World::new(&case);
        let (mut device, _) = world.device();
        // The first chain shows the region of the buffers, which the short ways expect.
        world.post(1, true);
        let first = device.pop().unwrap().unwrap();
        device.complete(first, 1);
        world.post(count, true);
        world.post(1, true);
        let (mut chains, mut singles) = (Vec::new(), Singles::default());
        world.step(&mut device, step, &mut chains, &mut singles);
        let (next, lost) = world.device();
        assert_eq!(
            (next.base(), next.outstanding()),
            (12, in_flight),
            "{step:?}"
        );
        drop((chains, device, next, lost));
        let device = world.recovered();
        world.finish(device);
    }
}

/// It is processed by the successor, and the base that a stopped queue answers stays right.
#[test]
fn an_unpopped_chain_is_still_posted() {
    let case = Case {
        size: 8,
        base: 10,
        event_idx: false,
        lost: 0,
        steps: vec![],
    };
    let mut world = World::new(&case);
    let (mut device, _) = world.device();
    world.post(1, true);
    world.post(3, true);
    let [first, second] = [(); 2].map(|()| device.pop().unwrap().unwrap());
    device.unpop(second);
    assert_eq!(world.recovered().base(), 11);
    drop(first);
    let mut device = world.recovered();
    let second = device.pop().unwrap().unwrap();
    device.unpop(second);
    assert_eq!(world.recovered().base(), 11);
    let device = world.recovered();
    world.finish(device);
}

#[test]
fn a_short_range_is_no_record() {
    let mut map = state(&file());
    map.split_off(InflightRecord::LEN - 4096).unwrap();
    assert!(InflightRecord::new(map).is_none());
}

/// A record and rings with any contents.
#[derive(Clone, Debug)]
struct Hostile {
    size: u16,
    base: u16,
    used: u16,
    posted: u16,
    completed: u16,
    offset: u16,
    /// Those that have a byte, and their bytes.
    heads: Vec<(u16, u8)>,
    elements: Vec<u16>,
}

fn hostile() -> impl Strategy<Value = Hostile> {
    // Often such as an honest record has them, or nearly.
    (0u32..=8, any::<u16>(), any::<u16>()).prop_flat_map(|(size, base, used)| {
        let size = 1 << size;
        let distance = || prop_oneof![2 => 0..=size + 1, 1 => Just(size), 1 => any::<u16>()];
        let offset = prop_oneof![2 => Just(0), 1 => 0u16..4, 1 => any::<u16>()];
        let few = prop::collection::vec((0..size, any::<u8>()), 0..4);
        let dense = prop::collection::vec((0..size, any::<u8>()), 0..256);
        let heads = prop_oneof![3 => few, 1 => dense];
        let elements = prop::collection::vec(0..size, usize::from(size));
        let wrong = prop::option::of((any::<prop::sample::Index>(), any::<u16>()));
        let indices = (distance(), distance(), offset);
        (indices, heads, elements, wrong).prop_map(
            move |((posted, completed, offset), heads, mut elements, wrong)| {
                if let Some((at, value)) = wrong {
                    elements[at.index(usize::from(size))] = value;
                }
                Hostile {
                    size,
                    base,
                    used,
                    posted: used.wrapping_add(posted),
                    completed: used.wrapping_add(completed),
                    offset,
                    heads,
                    elements,
                }
            },
        )
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4096, ..ProptestConfig::default() })]

    #[test]
    fn a_hostile_record_returns_no_more_than_was_posted(hostile in hostile()) {
        let Hostile { size, base, used, posted, completed, offset, heads, elements } = hostile;
        let fd = file();
        let mut map = state(&fd);
        let mut rest = map.split_off(8).unwrap();
        let heads_map = rest.split_off(56).unwrap();
        let (start, words) = (map.into_array::<AtomicU64>(), rest.into_array::<AtomicU16>());
        start[0].store(START, Relaxed);
        words[0].store(offset, Relaxed);
        words[1].store(completed, Relaxed);
        let bytes = heads_map.into_array::<AtomicU8>();
        for (head, value) in heads {
            bytes[usize::from(head)].store(value, Relaxed);
        }
        drop((start, words, bytes));
        let record = InflightRecord::new(state(&fd)).unwrap();
        let mem = memory(size);
        let layout = layout(size);
        poke(&mem, layout.used + 2, &used.to_le_bytes());
        poke(&mem, layout.avail + 2, &posted.to_le_bytes());
        for (at, element) in elements.iter().enumerate() {
            poke(&mem, layout.used + 4 + 8 * at as u64, &u32::from(*element).to_le_bytes());
        }
        let config = config(size, base, true);
        let (mut device, lost) = DeviceQueue::recover(Arc::clone(&mem), &config, record, START).unwrap();
        let _ = device.complete_lost(lost);
        let _ = device.publish();
        prop_assert_eq!(device.outstanding(), 0);
        let now = peek_u16(&mem, layout.used + 2);
        let returned = now.wrapping_sub(used);
        if returned > 0 {
            prop_assert!(returned <= posted.wrapping_sub(used) && returned <= size);
            for at in 0..returned {
                let at = u64::from(used.wrapping_add(at) % size);
                let head = peek(&mem, layout.used + 4 + 8 * at, 4);
                prop_assert!(u32::from_le_bytes(head.try_into().unwrap()) < size.into());
            }
            prop_assert!(posted.wrapping_sub(device.base()) <= size);
        } else {
            prop_assert!(device.base() == base || device.base() == used.wrapping_add(offset));
        }
        // It is usable, or says that it is not.
        for _ in 0..2 * size {
            match device.pop() {
                Ok(Some(chain)) | Err(PopError::Malformed(chain)) => device.complete(chain, 0),
                Ok(None) | Err(PopError::Broken(_)) => break,
            }
        }
        let _ = device.publish();
    }
}
