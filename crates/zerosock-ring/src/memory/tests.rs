//! Translation on heap memory (runs under Miri), and mapping of real files (does not).

use rustix::io::Errno;

use super::*;

const PAGE: u64 = 0x1000;

fn region(guest_addr: u64, user_addr: u64, len: u64) -> RegionConfig {
    RegionConfig {
        guest_addr,
        user_addr,
        len,
        fd_offset: 0,
    }
}

/// Two contiguous regions, a hole, and one at the very end of the address space.
fn heap() -> Memory {
    Memory::from_heap(&[
        region(0x3000, 0x5_3000, PAGE),
        region(0x2000, 0x9_2000, PAGE),
        region(u64::MAX - PAGE, 0x1_0000, PAGE),
    ])
}

fn lens(mem: &Memory, addr: u64, len: u32) -> Result<Vec<usize>, TranslateError> {
    let mut pieces = Vec::new();
    // The hint does not change the result.
    let results: Vec<_> = [0, 1, 2, 7]
        .map(|mut hint| {
            pieces.clear();
            mem.translate_near(&mut hint, addr, len, |piece| pieces.push(piece))
                .map(|()| pieces.clone())
        })
        .into();
    assert!(
        results.iter().all(|result| *result == results[0]),
        "{results:?}"
    );
    let result = mem.translate(addr, len, &mut pieces);
    assert_eq!(result.is_ok(), results[0].is_ok());
    results[0]
        .clone()
        .map(|pieces| pieces.iter().map(|piece| piece.len()).collect())
}

#[test]
fn buffers_inside_and_over_the_border_translate() {
    let mem = heap();
    assert_eq!(lens(&mem, 0x2000, 1), Ok(vec![1]));
    assert_eq!(lens(&mem, 0x2000, 0x1000), Ok(vec![0x1000]));
    assert_eq!(lens(&mem, 0x2fff, 1), Ok(vec![1]));
    assert_eq!(lens(&mem, 0x2fff, 2), Ok(vec![1, 1]));
    assert_eq!(lens(&mem, 0x2000, 0x2000), Ok(vec![0x1000, 0x1000]));
    assert_eq!(lens(&mem, 0x3000, 0x1000), Ok(vec![0x1000]));
    assert_eq!(lens(&mem, u64::MAX - PAGE, 0x1000), Ok(vec![0x1000]));
}

#[test]
fn buffers_outside_regions_are_refused() {
    use TranslateError::*;
    let mem = heap();
    assert_eq!(lens(&mem, 0x2000, 0), Err(ZeroLength));
    assert_eq!(lens(&mem, 0x1fff, 1), Err(Unmapped { addr: 0x1fff }));
    assert_eq!(lens(&mem, 0x1fff, 2), Err(Unmapped { addr: 0x1fff }));
    // One byte past the end, from inside, from the last byte, from the end itself.
    assert_eq!(lens(&mem, 0x2000, 0x2001), Err(Unmapped { addr: 0x4000 }));
    assert_eq!(lens(&mem, 0x3fff, 2), Err(Unmapped { addr: 0x4000 }));
    assert_eq!(lens(&mem, 0x4000, 1), Err(Unmapped { addr: 0x4000 }));
    assert_eq!(lens(&mem, 0x2000, u32::MAX), Err(Unmapped { addr: 0x4000 }));
    // The last address is in no region; past it there is none.
    assert_eq!(lens(&mem, u64::MAX, 1), Err(Unmapped { addr: u64::MAX }));
    assert_eq!(
        lens(&mem, u64::MAX - PAGE, 0x1001),
        Err(Unmapped { addr: u64::MAX })
    );
    assert_eq!(lens(&mem, u64::MAX - PAGE, 0x1002), Err(Wraps));
    assert_eq!(lens(&mem, u64::MAX, u32::MAX), Err(Wraps));
    assert_eq!(lens(&mem, 0, 1), Err(Unmapped { addr: 0 }));
    assert_eq!(
        lens(&Memory::from_heap(&[]), 0, 1),
        Err(Unmapped { addr: 0 })
    );
}

#[test]
fn a_refused_buffer_leaves_no_pieces() {
    let mem = heap();
    let mut pieces = Vec::new();
    mem.translate(0x2000, 4, &mut pieces).unwrap();
    assert!(mem.translate(0x2ff0, 0x1100, &mut pieces).is_err());
    assert_eq!(pieces.len(), 1);
}

#[test]
fn a_piece_is_checked_by_the_memory_that_resolves_it() {
    let mem = heap();
    let piece = |region, offset, len| Piece {
        region,
        len,
        offset,
    };
    assert_eq!(mem.slice(piece(0, 0, 0x1000)).unwrap().len(), 0x1000);
    assert!(mem.slice(piece(0, 0x1000, 0)).is_some());
    for bad in [
        piece(0, 0, 0x1001),
        piece(0, 1, 0x1000),
        piece(0, 0x1001, 0),
        piece(0, u64::MAX, 1),
        piece(3, 0, 1),
        piece(u32::MAX, 0, 0),
    ] {
        assert!(mem.slice(bad).is_none(), "{bad:?}");
        assert_eq!(mem.read(&[bad], 0, &mut [0; 1]), 0);
    }
}

#[test]
fn bytes_are_read_and_written_at_any_offset() {
    let mem = heap();
    let mut pieces = Vec::new();
    mem.translate(0x2ff0, 0x20, &mut pieces).unwrap();
    mem.translate(0x2000, 0x10, &mut pieces).unwrap();
    let data: Vec<u8> = (0..0x30).collect();
    assert_eq!(mem.write(&pieces, 0, &data), 0x30);
    for offset in 0..0x32usize {
        for len in 0..0x32 {
            let mut out = vec![0xee; len];
            let expected = 0x30usize.saturating_sub(offset).min(len);
            assert_eq!(mem.read(&pieces, offset, &mut out), expected);
            assert_eq!(out[..expected], data[offset.min(0x30)..][..expected]);
            assert!(out[expected..].iter().all(|byte| *byte == 0xee));
            let mut slices = SliceBuf::<8>::new();
            assert_eq!(mem.slices(&pieces, offset, len, &mut slices), expected);
            assert_eq!(slices.bytes(), expected);
            if cfg!(miri) && len > 3 {
                break;
            }
        }
    }
    assert_eq!(mem.write(&pieces, 0x2f, &[1, 2]), 1);
    assert_eq!(mem.read(&pieces, usize::MAX, &mut [0]), 0);
}

#[test]
fn slices_stop_when_the_buffer_is_full() {
    let mem = heap();
    let mut pieces = Vec::new();
    for _ in 0..3 {
        mem.translate(0x2ff8, 16, &mut pieces).unwrap();
    }
    let mut slices = SliceBuf::<4>::new();
    assert_eq!(mem.slices(&pieces, 0, usize::MAX, &mut slices), 32);
    assert!(slices.is_full());
    assert_eq!(
        slices.iter().map(|slice| slice.len()).collect::<Vec<_>>(),
        [8; 4]
    );
    assert_eq!(mem.slices(&pieces, 32, 16, &mut slices), 0);
    slices.clear();
    assert_eq!(mem.slices(&pieces, 31, usize::MAX, &mut slices), 17);
}

#[test]
fn copies_between_memories_with_different_pieces_are_complete() {
    let (from, to) = (heap(), heap());
    let (mut src, mut dst) = (Vec::new(), Vec::new());
    from.translate(0x2ffd, 10, &mut src).unwrap();
    from.translate(0x2000, 7, &mut src).unwrap();
    to.translate(0x2100, 5, &mut dst).unwrap();
    to.translate(0x2ff8, 20, &mut dst).unwrap();
    let data: Vec<u8> = (1..18).collect();
    from.write(&src, 0, &data);
    for (at_src, at_dst, len, expected) in [
        (0, 0, 17, 17),
        (0, 0, 99, 17),
        (3, 1, 5, 5),
        (16, 24, 9, 1),
        (17, 0, 1, 0),
        (0, 23, 9, 2),
    ] {
        let blank = [0u8; 25];
        to.write(&dst, 0, &blank);
        let done = Memory::copy((&from, &src, at_src), (&to, &dst, at_dst), len);
        assert_eq!(done, expected);
        let mut out = [0; 25];
        to.read(&dst, 0, &mut out);
        assert_eq!(out[at_dst..at_dst + done], data[at_src..at_src + done]);
        assert!(
            out[..at_dst]
                .iter()
                .chain(&out[at_dst + done..])
                .all(|byte| *byte == 0)
        );
    }
}

#[test]
fn a_copy_within_one_memory_may_overlap() {
    let mem = heap();
    let (mut src, mut dst) = (Vec::new(), Vec::new());
    mem.translate(0x2000, 8, &mut src).unwrap();
    mem.translate(0x2002, 8, &mut dst).unwrap();
    mem.write(&src, 0, &[1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(Memory::copy((&mem, &src, 0), (&mem, &dst, 0), 8), 8);
    let mut out = [0; 8];
    mem.read(&dst, 0, &mut out);
    assert_eq!(out, [1, 2, 3, 4, 5, 6, 7, 8]);
}

#[test]
fn parts_of_slices_stay_inside() {
    let mem = heap();
    let mut pieces = Vec::new();
    mem.translate(0x2000, 16, &mut pieces).unwrap();
    let slice = mem.slice(pieces[0]).unwrap();
    for (offset, len, expected) in [
        (0, 16, 16),
        (0, 17, 16),
        (15, 9, 1),
        (16, 1, 0),
        (17, 1, 0),
        (usize::MAX, usize::MAX, 0),
    ] {
        assert_eq!(slice.part(offset, len).len(), expected);
        assert_eq!(pieces[0].part(offset, len).len(), expected);
    }
    assert_eq!(slice.write(12, &[1; 8]), 4);
    assert_eq!(slice.read(12, &mut [0; 8]), 4);
    assert_eq!(slice.read_array::<4>(12), Some([1; 4]));
    assert_eq!(slice.read_array::<5>(12), None);
    assert_eq!(slice.read_array::<1>(usize::MAX), None);
    assert_eq!(slice.part(0, 3).copy_to(slice.part(14, 9)), 2);
}

fn all(mem: &Memory, pieces: &[Piece]) -> Vec<u8> {
    let mut bytes = vec![0; pieces.iter().map(|piece| piece.len()).sum()];
    mem.read(pieces, 0, &mut bytes);
    bytes
}

#[test]
fn words_are_read_and_written_across_pieces() {
    let mem = heap();
    let bytes: Vec<u8> = (1..=48).collect();
    for border in [0, 1, 7, 8, 20, 47, 48] {
        // The border of the two regions lies `border` bytes into the buffer.
        let mut pieces = Vec::new();
        mem.translate(0x3000 - border, 48, &mut pieces).unwrap();
        assert_eq!(mem.write(&pieces, 0, &bytes), 48);
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        for at in [0, 3, 8, 16, 24] {
            let expected = [word(at), word(at + 8), word(at + 16)];
            assert_eq!(
                mem.read_words(&pieces, at),
                Some(expected),
                "{at}, {border}"
            );
            assert!(mem.write_words(&pieces, at, expected.map(u64::swap_bytes)));
            let swapped = expected.map(u64::swap_bytes);
            assert_eq!(mem.read_words(&pieces, at), Some(swapped), "{at}, {border}");
            assert!(mem.write_words(&pieces, at, expected));
            assert_eq!(
                mem.read_array(&pieces, at),
                Some(<[u8; 24]>::try_from(&bytes[at..at + 24]).unwrap())
            );
        }
        assert_eq!(all(&mem, &pieces), bytes, "nothing else was written");
        assert_eq!(mem.read_words::<3>(&pieces, 25), None);
        assert_eq!(mem.read_words::<1>(&pieces, usize::MAX), None);
        assert_eq!(mem.read_array::<24>(&pieces, 25), None);
        assert_eq!(mem.read_words(&pieces, 40), Some([word(40)]));
        assert!(!mem.write_words(&pieces, 41, [0]));
        assert!(!mem.write_words(&pieces, usize::MAX - 3, [0]));
    }
}

#[test]
fn contiguous_ranges_must_lie_in_one_piece() {
    let mem = heap();
    let mut pieces = Vec::new();
    mem.translate(0x2100, 44, &mut pieces).unwrap();
    mem.translate(0x2f00, 0x200, &mut pieces).unwrap();
    for (offset, len, there) in [
        (0, 44, true),
        (0, 45, false),
        (44, 0x100, true),
        (44, 0x101, false),
        (43, 1, true),
        (44 + 0xff, 1, true),
        (44 + 0x200, 1, false),
        (usize::MAX, 1, false),
    ] {
        let whole = mem.contiguous(&pieces, offset, len);
        assert_eq!(
            whole.map(|slice| slice.len()),
            there.then_some(len),
            "{len} from {offset}"
        );
    }
    let slice = mem.contiguous(&pieces, 0, 44).unwrap();
    assert_eq!(slice.as_ptr(), mem.slice(pieces[0]).unwrap().as_ptr());
    assert!(!slice.write_words(37, [1]) && slice.read_words::<1>(37).is_none());
    assert!(slice.read_words::<1>(usize::MAX).is_none() && slice.write_words(36, [1]));
    // Prefetches have no effect, whatever the address.
    slice.prefetch();
    slice.prefetch_write();
    mem.prefetch(7, u64::MAX, true);
    mem.prefetch(0, 0x2fff, false);
}

#[test]
fn ring_addresses_lie_in_one_region() {
    let mem = heap();
    let base = mem.at_guest_addr(0x2000, PAGE).unwrap();
    assert_eq!(mem.at_user_addr(0x9_2000, PAGE), Some(base));
    assert_eq!(mem.at_user_addr(0x9_2001, 1), Some(base.wrapping_add(1)));
    assert!(mem.at_guest_addr(0x2000, PAGE + 1).is_none());
    assert!(mem.at_user_addr(0x9_2001, PAGE).is_none());
    assert!(mem.at_user_addr(0x9_1fff, 2).is_none());
    assert!(mem.at_user_addr(u64::MAX, u64::MAX).is_none());
}

#[test]
fn invalid_tables_are_refused() {
    let a = region(0x1000, 0x10_0000, 0x1000);
    assert_eq!(check(&[]), Ok(()));
    assert_eq!(check(&[a, region(0x2000, 0x10_1000, 1)]), Ok(()));
    assert_eq!(
        check(&[a, RegionConfig { len: 0, ..a }]),
        Err(MapError::ZeroLength { index: 1 })
    );
    for wrapping in [
        region(u64::MAX, 0, 1),
        region(0, u64::MAX - 0xffe, 0xfff),
        RegionConfig {
            fd_offset: u64::MAX,
            ..a
        },
        region(0, 0, u64::MAX),
    ] {
        assert_eq!(
            check(&[wrapping]),
            Err(MapError::Wraps { index: 0 }),
            "{wrapping:?}"
        );
    }
    for other in [
        region(0x1fff, 0, 1),
        region(0x0fff, 0, 2),
        region(0x1800, 0, 8),
        region(0, 0, 0x9000),
        region(0x9000, 0x10_0fff, 1),
        region(0x9000, 0x0f_ffff, 2),
    ] {
        assert!(
            matches!(check(&[a, other]), Err(MapError::Overlap { .. })),
            "{other:?}"
        );
    }
    let many: Vec<_> = (0..=MAX_REGIONS as u64)
        .map(|i| region(i * 16, i * 16, 16))
        .collect();
    assert_eq!(check(&many), Err(MapError::TooMany { count: 513 }));
    assert_eq!(check(&many[1..]), Ok(()));
}

#[cfg(not(miri))]
mod mapped {
    use rustix::fd::OwnedFd;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;

    fn memfd(len: u64) -> OwnedFd {
        let fd = memfd_create("ring-test", MemfdFlags::CLOEXEC).expect("a memfd");
        ftruncate(&fd, len).expect("its length");
        fd
    }

    #[test]
    fn two_mappings_of_a_file_show_the_same_bytes() {
        let fd = memfd(4 * PAGE);
        // An offset that is no multiple of a page.
        let config = RegionConfig {
            fd_offset: PAGE + 0x123,
            ..region(0x1000, 0, 2 * PAGE)
        };
        let whole = region(0, 0, 4 * PAGE);
        let a = Memory::map(vec![(fd.try_clone().unwrap(), config)]).unwrap();
        let b = Memory::map(vec![(fd, whole)]).unwrap();
        assert_ne!(a.id(), b.id());
        let (mut in_a, mut in_b) = (Vec::new(), Vec::new());
        a.translate(0x1000 + 2 * PAGE - 4, 4, &mut in_a).unwrap();
        b.translate(3 * PAGE + 0x123 - 4, 4, &mut in_b).unwrap();
        a.write(&in_a, 0, b"ring");
        let mut out = [0; 4];
        b.read(&in_b, 0, &mut out);
        assert_eq!(&out, b"ring");
        assert!(!a.is_lost());
    }

    #[test]
    fn a_file_must_reach_to_the_end_of_its_region() {
        let short = RegionConfig {
            fd_offset: 1,
            ..region(0, 0, PAGE)
        };
        assert_eq!(
            Memory::map(vec![(memfd(PAGE), short)]).unwrap_err(),
            MapError::ShortFile {
                index: 0,
                file_len: PAGE
            }
        );
        assert!(Memory::map(vec![(memfd(PAGE + 1), short)]).is_ok());
        // The valid region in front of it is unmapped again.
        let result = Memory::map(vec![
            (memfd(PAGE), region(0, 0, PAGE)),
            (memfd(0), region(0x9000, 0x9000, 1)),
        ]);
        assert_eq!(
            result.unwrap_err(),
            MapError::ShortFile {
                index: 1,
                file_len: 0
            }
        );
    }

    #[test]
    fn files_that_are_not_writable_are_refused() {
        let read_only = rustix::fs::open(
            "/proc/self/exe",
            rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC,
            rustix::fs::Mode::empty(),
        )
        .unwrap();
        let result = Memory::map(vec![(read_only, region(0, 0, PAGE))]);
        assert_eq!(
            result.unwrap_err(),
            MapError::Map {
                index: 0,
                errno: Errno::ACCESS
            }
        );
        let (pipe, _other) = rustix::pipe::pipe().unwrap();
        assert!(matches!(
            Memory::map(vec![(pipe, region(0, 0, PAGE))]).unwrap_err(),
            MapError::ShortFile { .. }
        ));
    }

    #[test]
    fn mappings_and_descriptors_are_released() {
        let mapped = || {
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            maps.lines()
                .filter(|line| line.contains("memfd:ring-leak"))
                .count()
        };
        let fd = memfd_create("ring-leak", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, 4 * PAGE).unwrap();
        let regions: Vec<_> = (0..4)
            .map(|i| {
                let config = RegionConfig {
                    fd_offset: i * PAGE,
                    ..region(i * 2 * PAGE, i * PAGE, PAGE)
                };
                (fd.try_clone().unwrap(), config)
            })
            .collect();
        let mem = Memory::map(regions).unwrap();
        assert_ne!(mapped(), 0);
        drop(mem);
        assert_eq!(mapped(), 0);
    }

    /// Counts the bytes of retired regions, and unmaps them.
    #[derive(Debug, Default)]
    struct Counting(AtomicU64);

    impl Unmapper for Counting {
        fn unmap(&self, region: RetiredRegion) {
            self.0.fetch_add(region.size() as u64, Relaxed);
        }
    }

    #[test]
    fn the_unmapper_gets_each_unused_region() {
        // Several pieces, and a rest.
        let len = (64 << 20) + 4096;
        let table = |at: u64| RegionConfig {
            guest_addr: at,
            user_addr: at,
            len,
            fd_offset: 0,
        };
        let unmapper: Arc<Counting> = Arc::default();
        let regions = vec![(memfd(len), table(0)), (memfd(len), table(1 << 40))];
        let memory = Memory::map_with(regions, Some(unmapper.clone())).expect("a mapping");
        let start = memory.regions[0].host.addr();
        let mapped = || {
            let maps = std::fs::read_to_string("/proc/self/maps").expect("our mappings");
            maps.contains(&format!("{start:x}-"))
        };
        assert!(mapped());
        assert_eq!(unmapper.0.load(Relaxed), 0);
        drop(memory);
        assert_eq!(unmapper.0.load(Relaxed), 2 * len);
    }
}

/// Miri and the thread sanitizer see a race here if there is one.
#[test]
fn safe_code_on_two_threads_accesses_the_same_bytes_without_race() {
    let mem = &heap();
    let rounds = if cfg!(miri) { 5 } else { 1000 };
    for len in [1, 7, 8, 44, 200] {
        let mut pieces = Vec::new();
        // From 0x1000 - 16 bytes into the one region to 16 behind the border, where it is longer.
        mem.translate(0x2ff0, len, &mut pieces).expect("in memory");
        let pieces = &pieces;
        let len = len as usize;
        std::thread::scope(|scope| {
            for fill in [1_u8, 2] {
                scope.spawn(move || {
                    let mut out = vec![0; len];
                    for _ in 0..rounds {
                        assert_eq!(mem.write(pieces, 0, &vec![fill; len]), len);
                        assert_eq!(mem.read(pieces, 0, &mut out), len);
                        assert!(out.iter().all(|byte| [1, 2].contains(byte)), "{out:?}");
                        let end = (mem, &pieces[..], len / 2);
                        Memory::copy((mem, pieces, 0), end, len / 2);
                        mem.write_words(pieces, 0, [0x0101_0101_0101_0101]);
                        if let Some(words) = mem.read_words::<1>(pieces, 0) {
                            assert!(
                                words[0]
                                    .to_le_bytes()
                                    .iter()
                                    .all(|byte| [1, 2].contains(byte))
                            );
                        }
                    }
                });
            }
        });
    }
}

#[test]
fn windows_are_all_bytes_in_order_in_short_private_slices() {
    const LEN: u64 = 4 * PAGE;
    let mem = Memory::from_heap(&[region(0, 0, LEN)]);
    let slice = |len: usize| {
        let mut pieces = Vec::new();
        mem.translate(0, LEN as u32, &mut pieces).unwrap();
        mem.slice(pieces[0]).unwrap().part(3, len)
    };
    let bytes: Vec<u8> = (0..LEN).map(|at| (at * 7 + at / 256) as u8).collect();
    for (len, longest) in [
        (0, 0),
        (1, 1),
        (4096, 4096),
        (4097, 512),
        (5000, 512),
        (3 * 4096, 512),
    ] {
        slice(len).write(0, &bytes);
        let (mut seen, mut most) = (Vec::new(), 0);
        slice(len).windows(|window| {
            seen.extend_from_slice(window);
            most = most.max(window.len());
            // A peer that writes now changes no byte of this window.
            slice(len).write(seen.len() - window.len(), &vec![0xee; window.len()]);
            assert!(seen.ends_with(window));
        });
        assert_eq!((seen.len(), most), (len, longest));
        assert_eq!(seen, bytes[..len], "{len} bytes");
    }
}
