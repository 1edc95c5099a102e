//! Plans of memory: what they give overlaps nothing, and stays in its huge page.

use proptest::prelude::*;

use super::*;

/// What a plan is asked for.
#[derive(Clone, Debug)]
enum Part {
    Run(u64),
    Slots(u32, u16),
}

/// The range of each run and of each buffer, in the order of the parts.
fn ranges(plan: &mut Plan, parts: &[Part]) -> Vec<(u64, u64)> {
    let mut ranges = Vec::new();
    for part in parts {
        match *part {
            Part::Run(len) => ranges.push((plan.take(len), len)),
            Part::Slots(len, count) => {
                let places = plan.take_slots(len, count);
                ranges.extend((0..count).map(|n| (places.addr(n), u64::from(len))));
            }
        }
    }
    ranges
}

fn overlaps(ranges: &[(u64, u64)]) -> bool {
    let mut sorted = ranges.to_vec();
    sorted.sort_unstable();
    sorted
        .windows(2)
        .any(|pair| pair[0].0 + pair[0].1 > pair[1].0)
}

const USABLE: u64 = Plan::MOST_IN_HUGE_PAGE;

fn check_pages(parts: &[Part]) {
    let mut plan = Plan::of_huge_pages();
    let ranges = ranges(&mut plan, parts);
    for &(addr, len) in &ranges {
        let inside = addr % HUGE_PAGE;
        assert!(inside + len <= USABLE, "{len} bytes at {addr:#x}");
        assert!(addr + len <= plan.len());
        assert_eq!(addr % LINE, 0);
    }
    assert!(!overlaps(&ranges), "{ranges:x?}");
    assert!(plan.len().is_multiple_of(HUGE_PAGE));
}

#[test]
fn parts_that_fill_a_page_to_its_last_line_stay_in_it() {
    check_pages(&[Part::Run(USABLE), Part::Run(USABLE)]);
    check_pages(&[Part::Run(1), Part::Run(USABLE), Part::Run(1)]);
    check_pages(&[
        Part::Run(USABLE - 4096),
        Part::Run(4096 - LINE),
        Part::Run(1),
    ]);
    check_pages(&[Part::Run(USABLE - 4096), Part::Run(4096), Part::Run(1)]);
    check_pages(&[Part::Slots(USABLE as u32, 3)]);
    check_pages(&[Part::Slots(1 << 20, 5), Part::Run(1 << 20)]);
    // Two buffers fill a page; with another byte each they do not.
    let stride = Plan::stride(1_048_448);
    for len in [(USABLE - stride) as u32, (USABLE - stride) as u32 + 1] {
        let places = Plan::of_huge_pages().take_slots(len, 4);
        let (second, third) = (places.addr(1), places.addr(2));
        let fits = Plan::stride(len) + u64::from(len) <= USABLE;
        assert_eq!(second < HUGE_PAGE, fits);
        assert_eq!(third, if fits { HUGE_PAGE } else { 2 * HUGE_PAGE });
        check_pages(&[Part::Slots(len, 4)]);
    }
}

#[test]
fn a_plan_of_huge_pages_begins_at_the_start_of_the_memory() {
    let mut plan = Plan::of_huge_pages();
    assert!(plan.is_empty());
    assert_eq!([5, 4097, 1].map(|len| plan.take(len)), [0, 4096, 3 * 4096]);
    assert_eq!(plan.len(), HUGE_PAGE);
    let shared = SharedMemory::create("plan", &plan, true, false).unwrap();
    assert_eq!(
        (shared.region.len, shared.memory.size()),
        (HUGE_PAGE, HUGE_PAGE)
    );
    let ring = DriverLayout::at(4096, 8);
    let VringAddr { desc, used, .. } = shared.vring_addr(&ring);
    assert_eq!((desc, used), (ring.desc, ring.used));
}

#[test]
fn a_plan_of_a_file_is_mapped_from_its_beginning() {
    let mut plan = Plan::of_huge_pages();
    plan.take(1);
    let file = memfd::create("plan", 3 * HUGE_PAGE, true).unwrap();
    let shared = SharedMemory::of_file(file, &plan).unwrap();
    assert_eq!(
        (shared.memory.size(), shared.huge_pages),
        (HUGE_PAGE, false)
    );
}

#[test]
fn buffers_of_other_memory_are_one_run() {
    let mut plan = Plan::default();
    let places = plan.take_slots(65_600, 128);
    for index in 0..128 {
        let offset = u64::from(index) * Plan::stride(65_600);
        assert_eq!(places.addr(index), GUEST_BASE + offset);
    }
    assert_eq!(
        plan.len(),
        (128 * Plan::stride(65_600)).next_multiple_of(PAGE)
    );
    let shared = SharedMemory::create("plan", &plan, true, false).unwrap();
    let ring = DriverLayout::at(GUEST_BASE + 4096, 8);
    let difference = USER_BASE - GUEST_BASE;
    assert_eq!(shared.vring_addr(&ring).desc, ring.desc + difference);
}

proptest! {
    #[test]
    fn no_part_crosses_a_huge_page(
        parts in prop::collection::vec(prop_oneof![
            (1..=USABLE).prop_map(Part::Run),
            (1..70_000u32, 1..600u16).prop_map(|(len, count)| Part::Slots(len, count)),
            (1..=USABLE as u32, 1..6u16).prop_map(|(len, count)| Part::Slots(len, count)),
        ], 1..12),
    ) {
        check_pages(&parts);
        prop_assert!(!overlaps(&ranges(&mut Plan::default(), &parts)));
    }
}
