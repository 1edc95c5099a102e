//! Unit tests of `header`.

use std::os::fd::OwnedFd;

use zerosock_proto::wire::net::{Checksum, Gso, Segments};
use zerosock_ring::{Memory, RegionConfig};
use zerosock_sys::memfd;

use super::*;

#[test]
fn headers_are_read_and_written_byte_by_byte_and_nothing_else_is() {
    let region = RegionConfig {
        guest_addr: 0,
        user_addr: 0,
        len: 4096,
        fd_offset: 0,
    };
    let file: OwnedFd = memfd::create("guest", region.len, true).unwrap();
    let memory = Memory::map(vec![(file, region)]).unwrap();
    let mut pieces = Vec::new();
    memory.translate(1, 40, &mut pieces).unwrap();
    let slice = memory.slice(pieces[0]).unwrap();
    let bytes = std::array::from_fn(|at| at as u8 + 1);
    slice.write(0, &[0xee; 40]);
    assert!(write(slice.part(3, 12), Header(bytes)));
    let mut all = [0; 40];
    slice.read(0, &mut all);
    assert_eq!(all[3..15], bytes);
    assert!(all[..3].iter().chain(&all[15..]).all(|byte| *byte == 0xee));
    assert_eq!(read(slice.part(3, 12)), Some(Header(bytes)));
    for short in [0, 4, 8, 11] {
        assert_eq!(read(slice.part(3, short)), None);
        assert!(!write(slice.part(20, short), Header(bytes)));
    }
    slice.read(0, &mut all);
    assert!(all[15..].iter().all(|byte| *byte == 0xee));
    let partial = Checksum::Partial {
        start: 34,
        offset: 16,
    };
    let gso = Gso {
        kind: Segments::Tcp6,
        ecn: true,
        size: 1448,
        hdr_len: 54,
    };
    for (checksum, gso) in [
        (Checksum::Complete, None),
        (Checksum::Valid, None),
        (partial, None),
        (partial, Some(gso)),
    ] {
        let repr = Repr { checksum, gso };
        let mut wanted = repr.emit();
        wanted.set_num_buffers(0x1234);
        assert!(write_repr(slice, &repr, 0x1234));
        assert_eq!(slice.read_array(0), Some(wanted.0));
    }
}
