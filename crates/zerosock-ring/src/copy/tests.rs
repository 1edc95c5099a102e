use super::*;

type Copy = unsafe fn(*const u8, *mut u8, usize);

#[cfg(all(target_arch = "x86_64", not(miri)))]
const PORTABLE: [Copy; 3] = [atomic::copy_out, atomic::copy_in, atomic::copy_disjoint];
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
const PORTABLE: [Copy; 0] = [];

/// Bytes none of which equals its neighbours.
fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 7 + at / 251) as u8).collect()
}

/// Every length around the borders between the methods, at every offset within a word.
fn lengths() -> impl Iterator<Item = usize> {
    let step = if cfg!(miri) { 13 } else { 1 };
    (0..140).step_by(step).chain([511, 512, 513, 4099])
}

#[test]
fn every_length_and_alignment_is_copied_without_touching_neighbours() {
    let from = pattern(4200);
    for len in lengths() {
        for (skip_src, skip_dst) in [(0, 0), (0, 3), (5, 0), (1, 2), (7, 7)] {
            let copies = [copy_out as Copy, copy_in, copy_between];
            for copy in copies.into_iter().chain(PORTABLE) {
                let mut to = vec![0xee; len + 16];
                // Through a writable pointer, as for shared memory.
                let mut from = from.clone();
                // SAFETY: both vectors are long enough, and apart.
                unsafe {
                    copy(
                        from.as_mut_ptr().add(skip_src),
                        to.as_mut_ptr().add(skip_dst),
                        len,
                    );
                };
                assert_eq!(to[skip_dst..][..len], from[skip_src..][..len], "{len}");
                let beside = to[..skip_dst].iter().chain(&to[skip_dst + len..]);
                assert!(beside.into_iter().all(|byte| *byte == 0xee), "{len}");
            }
        }
    }
}

#[test]
fn overlapping_ranges_are_copied_as_by_memmove() {
    for len in lengths() {
        for distance in [0, 1, 7, 8, 64, 500, 512, 1000] {
            for forward in [true, false] {
                let (src, dst) = match forward {
                    true => (distance, 0),
                    false => (0, distance),
                };
                let mut bytes = pattern(len + distance);
                let mut expected = bytes.clone();
                expected.copy_within(src..src + len, dst);
                let base = bytes.as_mut_ptr();
                // SAFETY: both ranges lie within the vector.
                unsafe { copy_between(base.add(src), base.add(dst), len) };
                assert_eq!(bytes, expected, "{len} bytes, {distance} apart");
            }
        }
    }
}

#[test]
fn words_are_loaded_and_stored_at_any_alignment() {
    let mut bytes = pattern(24);
    for at in 0..16 {
        // SAFETY: at + 8 <= 24.
        unsafe {
            let base = bytes.as_mut_ptr();
            let word = load(base.add(at));
            assert_eq!(word.to_ne_bytes(), bytes[at..at + 8]);
            store(bytes.as_mut_ptr().add(at), !word);
            assert_eq!((!word).to_ne_bytes(), bytes[at..at + 8]);
            #[cfg(all(target_arch = "x86_64", not(miri)))]
            {
                assert_eq!(atomic::load(bytes.as_ptr().add(at)), !word);
                atomic::store(bytes.as_mut_ptr().add(at), word);
                assert_eq!(word.to_ne_bytes(), bytes[at..at + 8]);
            }
        }
    }
}

/// A number that one thread writes while another reads it, each by one copy, is the old or the new one.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[test]
fn numbers_are_never_seen_half_written() {
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
    // Neighbours that differ in every byte.
    let (old, new) = ([0x00; 8], [0xff; 8]);
    for len in [2, 4, 8] {
        let (shared, is_over) = (AtomicU64::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Relaxed) {
                    for bytes in [old, new] {
                        // SAFETY: `shared` has 8 bytes, and is accessed by copies alone.
                        unsafe { copy_in(bytes.as_ptr(), shared.as_ptr().cast(), len) };
                    }
                }
            });
            let torn = (0..2_000_000).find_map(|_| {
                let mut seen = [0; 8];
                // SAFETY: as above.
                unsafe { copy_out(shared.as_ptr().cast(), seen.as_mut_ptr(), len) };
                (seen[..len] != old[..len] && seen[..len] != new[..len]).then_some(seen)
            });
            is_over.store(true, Relaxed);
            assert_eq!(torn, None, "{len} bytes");
        });
    }
}
