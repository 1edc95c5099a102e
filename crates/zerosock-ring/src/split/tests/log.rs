//! The log of written pages against a comparison of the memory, byte by byte, before and after.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;

use proptest::prelude::*;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::*;
use crate::dirty::{DirtyLog, LOG_PAGE};
use crate::split::{Buffer, Singles};

/// A used ring of three pages.
const SIZE: u16 = 1024;
/// Buffers lie here, on both sides of the border of the data regions.
const BUFFERS: u64 = BORDER - 0x8000;
const BUFFERS_LEN: u64 = 0x1_0000;
/// A bit for each page of `memory`.
const LOG_LEN: u64 = (DATA + 2 * DATA_LEN) / LOG_PAGE / 8 + 1;

struct Log(OwnedFd);

impl Log {
    fn new() -> (Log, Arc<DirtyLog>) {
        let file = memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, LOG_LEN).unwrap();
        let log = DirtyLog::map(&file, 0, LOG_LEN, None).unwrap();
        (Log(file), Arc::new(log))
    }

    fn pages(&self) -> BTreeSet<u64> {
        let mut bytes = vec![0; LOG_LEN as usize];
        assert_eq!(
            rustix::io::pread(&self.0, &mut bytes[..], 0).unwrap(),
            bytes.len()
        );
        (0..8 * LOG_LEN)
            .filter(|page| bytes[(page / 8) as usize] & 1 << (page % 8) != 0)
            .collect()
    }
}

/// The rings and the buffers, by guest address.
fn snapshot(mem: &Memory, size: u16) -> [(u64, Vec<u8>); 2] {
    let rings = DriverLayout::bytes_needed(size) as usize;
    [(RINGS, rings), (BUFFERS, BUFFERS_LEN as usize)].map(|(at, len)| (at, peek(mem, at, len)))
}

fn changed(before: &[(u64, Vec<u8>)], after: &[(u64, Vec<u8>)]) -> BTreeSet<u64> {
    let mut pages = BTreeSet::new();
    for ((at, old), (_, new)) in before.iter().zip(after) {
        // Regions begin at pages.
        let chunks = old
            .chunks(LOG_PAGE as usize)
            .zip(new.chunks(LOG_PAGE as usize));
        let chunks = (at / LOG_PAGE..).zip(chunks);
        pages.extend(chunks.filter(|(_, (a, b))| a != b).map(|(page, _)| page));
    }
    pages
}

#[derive(Clone, Debug)]
struct Step {
    /// Offsets and lengths of the buffers of a chain.
    buffers: Vec<(u32, u16)>,
    /// How much of the chain is written.
    written: prop::sample::Index,
    publish: bool,
    enable: bool,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let buffer = (0..BUFFERS_LEN as u32 - 9000, 1..9000u16);
    let buffers = prop::collection::vec(buffer, 1..4);
    let step = (buffers, any::<prop::sample::Index>(), any::<(bool, bool)>());
    let step = step.prop_map(|(buffers, written, (publish, enable))| Step {
        buffers,
        written,
        publish,
        enable,
    });
    prop::collection::vec(step, 1..30)
}

fn run(steps: &[Step], event_idx: bool, base: u16) {
    let mem = memory(SIZE);
    let layout = layout(SIZE);
    for word in [layout.avail + 2, layout.used + 2] {
        poke(&mem, word, &base.to_le_bytes());
    }
    // Elements that the device has never written, so that each write changes a byte.
    let elements = vec![0xee; 8 * usize::from(SIZE)];
    poke(&mem, layout.used + 4, &elements);
    let config = config(SIZE, base, event_idx);
    let mut device = DeviceQueue::new(Arc::clone(&mem), &config).unwrap();
    let (file, log) = Log::new();
    device.set_log(Some(log));
    device.set_used_log(Some(layout.used));
    let mut fill = 0u8;
    for step in steps {
        let table: Vec<_> = (0u16..)
            .zip(&step.buffers)
            .map(|(index, &(at, len))| {
                let next = usize::from(index) + 1 < step.buffers.len();
                let flags = 2 | u16::from(next);
                (BUFFERS + u64::from(at), u32::from(len), flags, index + 1)
            })
            .collect();
        post(&mem, SIZE, &table);
        let before = snapshot(&mem, SIZE);
        let marked_before = file.pages();
        let index = u64::from(device.base() & (SIZE - 1));
        let mut singles = Singles::default();
        device.read_singles(&mut singles, 1, true, 0);
        let single = singles.front().map(|single| vec![*single.piece()]);
        let chain = match single {
            Some(_) => None,
            None => device.pop().unwrap(),
        };
        let pieces = single.unwrap_or_else(|| chain.as_ref().unwrap().writable().to_vec());
        let room: usize = pieces.iter().map(|piece| piece.len()).sum();
        let written = step.written.index(1 + room);
        // The old bytes, each changed.
        let mut bytes = vec![0; written];
        mem.read(&pieces, 0, &mut bytes);
        fill = fill.wrapping_mul(5) | 1;
        bytes.iter_mut().for_each(|byte| *byte ^= fill);
        mem.write(&pieces, 0, &bytes);
        let mut written_pages = BTreeSet::new();
        let mut left = written as u64;
        for &(at, len) in &step.buffers {
            let len = left.min(u64::from(len));
            left -= len;
            let at = BUFFERS + u64::from(at);
            if len > 0 {
                written_pages.extend(at / LOG_PAGE..=(at + len - 1) / LOG_PAGE);
            }
        }
        let used_page = |offset: u64| (layout.used + offset) / LOG_PAGE;
        // An element may lie in two pages.
        written_pages.extend([used_page(4 + 8 * index), used_page(11 + 8 * index)]);
        match chain {
            Some(chain) => device.complete(chain, written as u32),
            None => device.complete_single(&mut singles, written as u32),
        }
        let marks = file.pages();
        let fresh: BTreeSet<_> = marks.difference(&marked_before).copied().collect();
        assert!(
            fresh.is_subset(&written_pages),
            "{fresh:?} {written_pages:?}"
        );
        if step.publish {
            let _ = device.publish();
            written_pages.insert(used_page(2));
        }
        if step.enable {
            device.disable_notifications();
            let _ = device.enable_notifications();
            let word = if event_idx {
                4 + 8 * u64::from(SIZE)
            } else {
                0
            };
            written_pages.insert(used_page(word));
        }
        let marks = file.pages();
        let changed = changed(&before, &snapshot(&mem, SIZE));
        assert!(
            changed.is_subset(&marks),
            "changed {changed:?}, marked {marks:?}"
        );
        let fresh: BTreeSet<_> = marks.difference(&marked_before).copied().collect();
        assert!(
            fresh.is_subset(&written_pages),
            "{fresh:?} {written_pages:?}"
        );
        assert!(written_pages.is_subset(&marks));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn every_written_page_is_marked_and_no_other(
        steps in steps(), event_idx: bool, base: u16,
    ) {
        run(&steps, event_idx, base);
    }
}

#[test]
fn a_log_is_replaced_and_removed_while_the_queue_runs() {
    let (mut driver, mut device) = queues(8, 0, true);
    let mem = Arc::clone(device.memory());
    let [(first, one), (second, two)] = [Log::new(), Log::new()];
    // Returns whether the chain is found at the front: not the first of a queue, and none with a log.
    let mut write = |device: &mut DeviceQueue, page: u64| {
        let buffer = Buffer {
            addr: DATA + LOG_PAGE * page,
            len: 16,
            writable: true,
        };
        driver.add(&[buffer], 0).unwrap();
        let _ = driver.publish();
        let front = device.front(16, true).map(|front| front.token);
        let found = front.is_some();
        match front {
            Some(token) => device.complete_front(token, 16),
            None => {
                let chain = device.pop().unwrap().unwrap();
                device.complete(chain, 16);
            }
        }
        let _ = device.publish();
        driver.poll().unwrap().unwrap();
        found
    };
    assert!(!write(&mut device, 0));
    device.set_log(Some(one));
    assert!(!write(&mut device, 1));
    device.set_log(Some(Arc::clone(&two)));
    assert!(!write(&mut device, 2));
    // Without an address of the used ring only buffers are marked.
    let page = DATA / LOG_PAGE;
    assert_eq!(first.pages(), BTreeSet::from([page + 1]));
    assert_eq!(second.pages(), BTreeSet::from([page + 2]));
    device.set_log(None);
    assert!(write(&mut device, 3));
    assert_eq!(second.pages(), BTreeSet::from([page + 2]));
    two.mark_all(&mem);
    let all = [(RINGS, DriverLayout::bytes_needed(8)), (DATA, 2 * DATA_LEN)];
    let all = all.map(|(at, len)| at / LOG_PAGE..=(at + len - 1) / LOG_PAGE);
    assert_eq!(second.pages(), all.into_iter().flatten().collect());
}
