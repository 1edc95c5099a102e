//! Unit tests of `header`.

use super::*;
use zerosock_ring::RegionConfig;

/// Two regions that meet in the middle of the header, and one that contains all of it.
fn memory(first: u64) -> (Memory, Vec<Piece>) {
    let region = |guest_addr, len, fd_offset| {
        let config = RegionConfig {
            guest_addr,
            user_addr: guest_addr,
            len,
            fd_offset,
        };
        (fd_offset, config)
    };
    let fd = zerosock_sys::memfd::create("header", 8192, true).unwrap();
    let regions = [
        region(4096 - first, first, 4096 - first),
        region(4096, 4096, 4096),
    ];
    let table = regions
        .into_iter()
        .filter(|(_, config)| config.len > 0)
        .map(|(_, config)| (fd.try_clone().unwrap(), config))
        .collect();
    let memory = Memory::map(table).unwrap();
    let mut pieces = Vec::new();
    memory
        .translate(4096 - first, HEADER_LEN as u32, &mut pieces)
        .unwrap();
    (memory, pieces)
}

#[test]
fn headers_are_the_same_wherever_the_pieces_meet() {
    let bytes: [u8; HEADER_LEN] = std::array::from_fn(|i| match i {
        4..8 | 12..16 | 26..28 => 0,
        i => i as u8 + 1,
    });
    let header = Repr::parse(&bytes).unwrap();
    for first in 0..HEADER_LEN as u64 {
        let (memory, pieces) = memory(first);
        assert!(write(&memory, &pieces, &header));
        let mut out = [0; HEADER_LEN];
        memory.read(&pieces, 0, &mut out);
        assert_eq!(out, bytes, "{first}");
        assert_eq!(read(&memory, &pieces), Ok(header));
        let short = [pieces[0].part(0, 20)];
        assert_eq!(read(&memory, &short), Err(HeaderFault::Short));
    }
}
