//! Both halves of a virtqueue, with a peer that writes rings, descriptors and records between any two calls.
//!
//! No piece lies outside memory, lengths agree with pieces, no more chains are outstanding than the queue has, a successor
//! gets each lost chain once, and a driver gets each of its chains back at most once.
#![no_main]

use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, LazyLock};

use arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use zerosock_fuzz::{memory_file, number, steps};
use zerosock_ring::{
    Buffer, Chain, DeviceQueue, DriverLayout, DriverQueue, InflightRecord, Memory, PopError,
    QueueConfig, RegionConfig, Singles, StateMap,
};

const LEN: u64 = 0x8000;
const GUEST: u64 = 0x10_0000;
/// Where the two regions meet in guest addresses; in user addresses they lie apart.
const BORDER: u64 = GUEST + LEN;
const USER: [u64; 2] = [0x7f00_0000_0000, 0x7e00_0000_0000];
const SIZE: u16 = 16;
const START: u64 = 7;

struct Files {
    memory: Arc<Memory>,
    record: std::fs::File,
}

static FILES: LazyLock<Files> = LazyLock::new(|| {
    let fds: [OwnedFd; 2] = [LEN; 2].map(memory_file);
    let region = |at: usize| RegionConfig {
        guest_addr: GUEST + LEN * at as u64,
        user_addr: USER[at],
        len: LEN,
        fd_offset: 0,
    };
    let memory = Memory::map(
        fds.into_iter()
            .enumerate()
            .map(|(at, fd)| (fd, region(at)))
            .collect(),
    );
    Files {
        memory: Arc::new(memory.unwrap()),
        record: memory_file(InflightRecord::LEN as u64).into(),
    }
});

fn layout() -> DriverLayout {
    DriverLayout::at(GUEST, SIZE)
}

fn config(event_idx: bool, base: u16) -> QueueConfig {
    let DriverLayout {
        size,
        desc,
        avail,
        used,
    } = layout();
    let user = |addr| addr - GUEST + USER[0];
    QueueConfig {
        size,
        desc: user(desc),
        avail: user(avail),
        used: user(used),
        base,
        event_idx,
        indirect: true,
    }
}

#[derive(Debug)]
enum Step {
    /// A descriptor of the queue, or of the table at this place of the second region.
    Descriptor(Option<u8>, u8, [u8; 16]),
    /// A head, and how far the available index advances.
    Head(u16, u16),
    /// Bytes anywhere in the first region's rings, or in the record.
    Poke(u16, u8),
    Record(u16, u8),
    Pop,
    PopPlain(u32),
    Front(u8, bool, bool),
    Singles(u8, bool),
    Unpop,
    Complete(u8, u32),
    Publish,
    Notifications(bool),
    Successor,
    DriverAdd(u8, bool),
    DriverPoll,
}

fn descriptor(u: &mut Unstructured<'_>) -> Result<[u8; 16]> {
    let addr = match u.arbitrary::<u8>()? {
        0..=127 => BORDER - 0x800 + u64::from(u.arbitrary::<u16>()? % 0x1000),
        128..=159 => BORDER + 1024 * u64::from(u.arbitrary::<u8>()? % 8),
        160..=191 => BORDER + LEN - 64 + u64::from(u.arbitrary::<u8>()? % 64),
        192..=223 => GUEST + u64::from(u.arbitrary::<u16>()? % 0x400),
        224..=239 => u64::MAX - u64::from(u.arbitrary::<u8>()?),
        _ => u.arbitrary()?,
    };
    let len = match u.arbitrary::<u8>()? {
        at @ 0..=127 => 16 * (1 + u32::from(at % 8)),
        _ => number(u)?,
    };
    let flags = match u.arbitrary::<u8>()? {
        255 => u.arbitrary()?,
        flags => u16::from(flags % 8),
    };
    let next: u16 = match u.arbitrary::<u8>()? {
        255 => u.arbitrary()?,
        next => u16::from(next % 20),
    };
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&addr.to_le_bytes());
    bytes[8..12].copy_from_slice(&len.to_le_bytes());
    bytes[12..14].copy_from_slice(&flags.to_le_bytes());
    bytes[14..].copy_from_slice(&next.to_le_bytes());
    Ok(bytes)
}

fn step(u: &mut Unstructured<'_>) -> Result<Step> {
    Ok(match u.arbitrary::<u8>()? % 24 {
        0..=4 => Step::Descriptor(None, u.arbitrary()?, descriptor(u)?),
        5 => Step::Descriptor(Some(u.arbitrary()?), u.arbitrary()?, descriptor(u)?),
        6..=9 => Step::Head(
            if u.ratio(1, 32)? {
                u.arbitrary()?
            } else {
                u.int_in_range(0..=SIZE - 1)?
            },
            if u.ratio(1, 32)? { u.arbitrary()? } else { 1 },
        ),
        10 => Step::Poke(u.int_in_range(0..=0x3ff)?, u.arbitrary()?),
        11 => Step::Record(u.int_in_range(0..=63)?, u.arbitrary()?),
        12 | 13 => Step::Pop,
        14 => Step::PopPlain(u.arbitrary::<u8>()?.into()),
        15 => Step::Front(u.arbitrary::<u8>()? % 64, u.arbitrary()?, u.arbitrary()?),
        16 => Step::Singles(u.arbitrary::<u8>()? % 34, u.arbitrary()?),
        17 => Step::Unpop,
        18 | 19 => Step::Complete(u.arbitrary()?, number(u)?),
        20 => Step::Publish,
        21 => Step::Notifications(u.arbitrary()?),
        22 => match u.arbitrary()? {
            true => Step::Successor,
            false => Step::DriverPoll,
        },
        _ => Step::DriverAdd(u.arbitrary::<u8>()? % 4, u.arbitrary()?),
    })
}

struct World {
    device: DeviceQueue,
    held: Vec<Chain>,
    driver: DriverQueue,
    /// Tokens that the driver has posted and not got back.
    posted: Vec<u64>,
    avail: u16,
    event_idx: bool,
}

fn record() -> InflightRecord {
    InflightRecord::new(StateMap::map(&FILES.record, InflightRecord::LEN).unwrap()).unwrap()
}

/// Writes as the peer does, at a guest address.
fn poke(at: u64, bytes: &[u8]) {
    let mut pieces = Vec::new();
    FILES
        .memory
        .translate(at, bytes.len() as u32, &mut pieces)
        .unwrap();
    assert_eq!(FILES.memory.write(&pieces, 0, bytes), bytes.len());
}

fn peek<const N: usize>(at: u64) -> [u8; N] {
    let mut pieces = Vec::new();
    FILES.memory.translate(at, N as u32, &mut pieces).unwrap();
    FILES.memory.read_array(&pieces, 0).unwrap()
}

fn check(chain: &Chain, written: bool) {
    let mut total = 0;
    for piece in chain.readable().iter().chain(chain.writable()) {
        assert!(!piece.is_empty());
        let slice = FILES.memory.slice(*piece).expect("a piece outside memory");
        total += slice.len() as u64;
        if written {
            slice.write(0, &[0xa5; 4]);
        }
    }
    let lens = u64::from(chain.readable_len()) + u64::from(chain.writable_len());
    assert_eq!(total, lens);
}

impl World {
    fn new(event_idx: bool, base: u16) -> World {
        poke(GUEST, &[0; 0x400]);
        poke(BORDER, &[0; 0x2000]);
        FILES.record.write_all_at(&[0; 4096], 0).unwrap();
        let memory = &FILES.memory;
        let driver = DriverQueue::with_base(memory.clone(), layout(), event_idx, base).unwrap();
        let device =
            DeviceQueue::recover(memory.clone(), &config(event_idx, base), record(), START);
        let (device, lost) = device.unwrap();
        let mut world = World {
            device,
            held: Vec::new(),
            driver,
            posted: Vec::new(),
            avail: base,
            event_idx,
        };
        world.device.complete_lost(lost);
        world
    }

    fn hold(&mut self, chain: Chain) {
        check(&chain, false);
        assert!(self.device.outstanding() <= SIZE);
        self.held.push(chain);
        assert!(self.held.len() <= usize::from(SIZE));
    }

    fn step(&mut self, step: Step) {
        let layout = layout();
        match step {
            Step::Descriptor(None, slot, bytes) => {
                poke(layout.desc + 16 * u64::from(slot % SIZE as u8), &bytes);
            }
            Step::Descriptor(Some(table), slot, bytes) => {
                let at = 1024 * u64::from(table % 8) + 16 * u64::from(slot % 40);
                poke(BORDER + at, &bytes);
            }
            Step::Head(head, more) => {
                let slot = u64::from(self.avail % SIZE);
                poke(layout.avail + 4 + 2 * slot, &head.to_le_bytes());
                self.avail = self.avail.wrapping_add(more);
                poke(layout.avail + 2, &self.avail.to_le_bytes());
            }
            Step::Poke(at, byte) => poke(GUEST + u64::from(at), &[byte]),
            Step::Record(at, byte) => FILES.record.write_all_at(&[byte], at.into()).unwrap(),
            Step::Pop => match self.device.pop() {
                Ok(Some(chain)) => self.hold(chain),
                Err(PopError::Malformed(chain)) => {
                    assert!(chain.fault().is_some());
                    self.hold(chain);
                }
                Ok(None) | Err(PopError::Broken(_)) => {}
            },
            Step::PopPlain(room) => {
                if let Some(chain) = self.device.pop_plain(room) {
                    self.hold(chain);
                }
            }
            Step::Front(at, writable, complete) => {
                let Some(front) = self.device.front(at.into(), writable) else {
                    return;
                };
                assert!(front.header.len() >= usize::from(at));
                let token = front.token;
                match complete {
                    true => self.device.complete_front(token, 0),
                    false => {
                        let chain = self.device.pop_front(token);
                        self.hold(chain);
                    }
                }
            }
            Step::Singles(most, writable) => {
                let mut singles = Singles::default();
                self.device
                    .read_singles(&mut singles, most.into(), writable, 64);
                while let Some(single) = singles.front() {
                    assert!(FILES.memory.slice(*single.piece()).is_some());
                    if most % 3 == 0 {
                        let Some(chain) = self.device.pop_single(&mut singles) else {
                            break;
                        };
                        self.hold(chain);
                    } else {
                        self.device.complete_single(&mut singles, 0);
                    }
                }
            }
            Step::Unpop => {
                if let Ok(Some(chain)) = self.device.pop() {
                    check(&chain, false);
                    self.device.unpop(chain);
                }
            }
            Step::Complete(at, written) => {
                if !self.held.is_empty() {
                    let chain = self.held.swap_remove(usize::from(at) % self.held.len());
                    check(&chain, true);
                    let written = written.min(chain.writable_len());
                    self.device.complete(chain, written);
                }
            }
            Step::Publish => {
                let _ = self.device.publish();
            }
            Step::Notifications(true) => {
                let _ = self.device.enable_notifications();
            }
            Step::Notifications(false) => self.device.disable_notifications(),
            Step::Successor => {
                self.held.clear();
                let config = config(self.event_idx, 0);
                let posted = || {
                    let index = |at| u16::from_le_bytes(peek(at));
                    index(layout.avail + 2).wrapping_sub(index(layout.used + 2))
                };
                let before = posted();
                let again = DeviceQueue::recover(FILES.memory.clone(), &config, record(), START);
                let (device, lost) = again.unwrap();
                self.device = device;
                let outstanding = self.device.outstanding();
                assert!(outstanding <= SIZE);
                assert_eq!(self.device.complete_lost(lost), outstanding);
                assert_eq!(self.device.outstanding(), 0);
                let _ = self.device.publish();
                assert!(
                    before > SIZE || posted() <= before,
                    "more chains return than are posted"
                );
            }
            Step::DriverAdd(more, writable) => {
                let buffer = Buffer {
                    addr: BORDER - 32,
                    len: 64,
                    writable,
                };
                let token = self.posted.last().map_or(0, |token| token + 1);
                if self
                    .driver
                    .add(&[buffer; 4][..=usize::from(more)], token)
                    .is_ok()
                {
                    self.posted.push(token);
                    let _ = self.driver.publish();
                    self.avail = self.avail.wrapping_add(1);
                }
            }
            Step::DriverPoll => {
                while let Ok(Some(used)) = self.driver.poll() {
                    let place = self.posted.iter().position(|token| *token == used.token);
                    self.posted
                        .swap_remove(place.expect("a chain came back twice"));
                    self.posted.sort_unstable();
                    assert!(used.len <= 4 * 64);
                }
            }
        }
    }
}

fuzz_target!(|bytes: &[u8]| {
    let mut u = Unstructured::new(bytes);
    let Ok((event_idx, base)) = u.arbitrary::<(bool, u16)>() else {
        return;
    };
    let base = if base % 2 == 0 { 0 } else { base | 0xfff0 };
    let mut world = World::new(event_idx, base);
    for step in steps(&mut u, step) {
        world.step(step);
        assert!(world.device.outstanding() <= SIZE);
    }
});
