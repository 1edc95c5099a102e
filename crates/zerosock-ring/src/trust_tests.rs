//! Unit tests of `trust`.

use super::*;
use crate::memory::RegionConfig;

/// Two regions that meet at 0x2000.
fn memory() -> Memory {
    let region = |guest_addr, user_addr| RegionConfig {
        guest_addr,
        user_addr,
        len: 0x1000,
        fd_offset: 0,
    };
    Memory::from_heap(&[region(0x1000, 0x1_0000), region(0x2000, 0x9_0000)])
}

fn pieces(mem: &Memory, addr: u64, len: u32) -> Vec<Piece> {
    let mut pieces = Vec::new();
    mem.translate(addr, len, &mut pieces).unwrap();
    pieces
}

fn trust() -> Trust {
    // SAFETY: the memories of these tests lie on the heap and have no peer; each test keeps
    // its claims and slices apart.
    unsafe { Trust::declare() }
}

#[test]
fn a_trusted_slice_shows_the_bytes_in_place() {
    let mem = memory();
    let pieces = pieces(&mem, 0x1ffc, 8);
    assert_eq!(mem.write(&pieces, 0, b"abcdefgh"), 8);
    let parts: Vec<&[u8]> = pieces
        .iter()
        .map(|piece| mem.trusted_slice(*piece, trust()).unwrap())
        .collect();
    assert_eq!(parts, [b"abcd", b"efgh"]);
    let [first, _] = pieces[..] else {
        panic!("two regions, two pieces")
    };
    assert_eq!(
        parts[0].as_ptr(),
        mem.slice(first).unwrap().as_ptr().cast_const()
    );
}

#[test]
fn bytes_written_through_a_claim_are_in_memory() {
    let mem = memory();
    let piece = pieces(&mem, 0x1100, 4)[0];
    let mut claim = Claim::new(&mem, piece, trust()).unwrap();
    claim.slice_mut(&mem).unwrap().copy_from_slice(b"loan");
    assert_eq!(claim.slice(&mem).unwrap(), b"loan");
    assert_eq!(claim.piece(), piece);
    let mut out = [0; 4];
    assert_eq!(mem.read(&[piece], 0, &mut out), 4);
    assert_eq!(&out, b"loan");
}

#[test]
fn pieces_outside_a_memory_give_no_slice() {
    let (mem, other) = (memory(), memory());
    let inside = pieces(&mem, 0x1000, 0x1000)[0];
    let outside = Piece {
        offset: 1,
        ..inside
    };
    assert_eq!(mem.trusted_slice(outside, trust()), None);
    assert_eq!(
        mem.trusted_slice(
            Piece {
                region: 2,
                ..inside
            },
            trust()
        ),
        None
    );
    assert!(Claim::new(&mem, outside, trust()).is_none());
    let mut claim = Claim::new(&mem, inside, trust()).unwrap();
    assert_eq!(claim.slice(&other), None);
    assert_eq!(claim.slice_mut(&other), None);
}
