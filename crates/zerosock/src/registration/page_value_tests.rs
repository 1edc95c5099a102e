//! Values of pages: the vectors, and lists of extents that are not what the agent has.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use zerosock_ring::{Extent, RegionConfig};

use super::*;

const HUGE: u64 = Extent::HUGE_PAGE;
const PER_HUGE: u64 = HUGE / PAGE;

fn nonce() -> Nonce {
    let mut bytes = [0; 32];
    for (n, byte) in (0..).zip(&mut bytes) {
        *byte = n;
    }
    Nonce(bytes)
}

/// Values of the nonce that `nonce` makes.
const VECTORS: [(u64, &str); 6] = [
    (0, "49a1fd605adc47bcaa25584b294e8842"),
    (1, "831bffa0fda7681a743c5b11053ccae7"),
    (511, "497dc64cf5cf91ef73f21b2ca97d11c9"),
    (512, "cbe97e79a66c8b68adf9784156479358"),
    (262143, "9f0f80fb9f3d611c5e5e6c07766071b3"),
    (u64::MAX, "b1abd506383f106dbb9e86a2d785ff30"),
];

/// As `sha256sum` gives them for the label, the bytes 0 to 31, and the number.
#[test]
fn values_are_those_of_the_vectors() {
    let hex = |value: [u8; VALUE_LEN]| {
        let digits = value.iter().map(|byte| format!("{byte:02x}"));
        digits.collect::<String>()
    };
    for (number, value) in VECTORS {
        assert_eq!(hex(page_value(&nonce(), number)), value, "page {number}");
    }
}

#[test]
fn label_nonce_and_number_are_one_block_of_the_hash() {
    // The padding takes a byte and eight of the length.
    assert!(LABEL.len() + size_of::<Nonce>() + size_of::<u64>() <= 64 - 9);
}

#[test]
fn values_differ_by_nonce_and_by_number() {
    let other = Nonce([7; 32]);
    let mut all: Vec<_> = (0..4096)
        .flat_map(|number| [page_value(&nonce(), number), page_value(&other, number)])
        .collect();
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), 2 * 4096);
}

/// The memory of a VM: eight huge pages from one gigabyte on.
const RAM: u64 = 1 << 30;

fn vm() -> Arc<Memory> {
    let file: OwnedFd = memfd_create("vm", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, 8 * HUGE).unwrap();
    let region = RegionConfig {
        guest_addr: RAM,
        user_addr: 0,
        len: 8 * HUGE,
        fd_offset: 0,
    };
    Arc::new(Memory::map(vec![(file, region)]).unwrap())
}

fn of(vm: &Arc<Memory>, pages: &[u64]) -> Memory {
    let extents = pages.iter().map(|page| Extent {
        addr: RAM + page * HUGE,
        len: HUGE,
    });
    Memory::of_extents(vm, &extents.collect::<Vec<_>>()).unwrap()
}

#[test]
fn pages_show_their_values_in_the_order_of_the_list_only() {
    let vm = vm();
    let (all, nonce) = (0..3 * PER_HUGE, nonce());
    // The agent writes through its own mapping of the file.
    let file = of(&vm, &[5, 1, 2]);
    assert_eq!(write_values(&file, &nonce, all.clone()), None);
    assert_eq!(find_wrong_page(&file, &nonce, all.clone()), None);
    for (named, wrong) in [
        // The right extents in another order.
        ([1, 5, 2], 0),
        ([5, 2, 1], PER_HUGE),
        // One of them is of another program.
        ([5, 1, 3], 2 * PER_HUGE),
        ([0, 1, 2], 0),
    ] {
        let found = find_wrong_page(&of(&vm, &named), &nonce, all.clone());
        assert_eq!(found, Some(wrong), "{named:?}");
    }
    // Values of an earlier stream.
    let found = find_wrong_page(&file, &Nonce([1; 32]), all.clone());
    assert_eq!(found, Some(0));
    // A page beyond the end.
    let found = find_wrong_page(&file, &nonce, 0..3 * PER_HUGE + 1);
    assert_eq!(found, Some(3 * PER_HUGE));
    for huge in [1 << 52, u64::MAX - 1] {
        assert_eq!(find_wrong_page(&file, &nonce, huge..huge + 1), Some(huge));
        assert_eq!(write_values(&file, &nonce, huge..huge + 1), Some(huge));
    }
}

/// Each page of 4 KiB has a value: one that was not written is found, wherever it is.
#[test]
fn every_page_counts() {
    let vm = vm();
    let (file, nonce) = (of(&vm, &[3, 7]), nonce());
    let all = 0..2 * PER_HUGE;
    assert_eq!(write_values(&file, &nonce, all.clone()), None);
    for page in [0, 1, 255, PER_HUGE - 1, PER_HUGE, 2 * PER_HUGE - 1] {
        for byte in [0, VALUE_LEN as u64 - 1] {
            let mut pieces = Vec::new();
            let at = page * PAGE + VALUE_AT + byte;
            file.translate(at, 1, &mut pieces).unwrap();
            let [value]: [u8; 1] = file.read_array(&pieces, 0).unwrap();
            file.write(&pieces, 0, &[value ^ 1]);
            let found = find_wrong_page(&file, &nonce, all.clone());
            assert_eq!(found, Some(page), "byte {byte}");
            // In pieces, as a worker checks them.
            assert_eq!(find_wrong_page(&file, &nonce, 0..page), None);
            file.write(&pieces, 0, &[value]);
        }
    }
    assert_eq!(find_wrong_page(&file, &nonce, all), None);
}
