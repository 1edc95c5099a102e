//! The memory that leases of a guest's former memory keep mapped.

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use zerosock_ring::{Extent, RegionConfig};

use super::*;

#[test]
fn old_memory_of_extents_counts_as_its_parent_until_it_is_dropped() {
    let len = 4 * Extent::HUGE_PAGE;
    let file = memfd_create("vm", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, len).unwrap();
    let region = RegionConfig {
        guest_addr: 0,
        user_addr: 0,
        len,
        fd_offset: 0,
    };
    let parent = Arc::new(Memory::map(vec![(file, region)]).unwrap());
    let page = Extent {
        addr: 0,
        len: Extent::HUGE_PAGE,
    };
    let memory = Arc::new(Memory::of_extents(&parent, &[page]).unwrap());
    let next = Extent {
        addr: Extent::HUGE_PAGE,
        ..page
    };
    let second = Arc::new(Memory::of_extents(&parent, &[next]).unwrap());
    let mut old = OldMemory::default();
    old.track(&memory);
    old.track(&second);
    drop(parent);
    // One mapping.
    assert_eq!(old.alive(), len);
    drop(second);
    assert_eq!(old.alive(), len);
    drop(memory);
    assert_eq!(old.alive(), 0);
    assert!(old.is_empty());
}
