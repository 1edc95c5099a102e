//! Unit tests of `link`.

use std::io::{Read, Write};

use super::*;

#[test]
fn tso_is_accepted_only_with_checksums_and_mergeable_buffers() {
    let all = crate::model::ALL_OFFLOADS;
    let config = InterfaceConfig::default();
    let is_accepted = |offered: u64, bits: u64| wanted(offered, &config) & bits == bits;
    assert!(is_accepted(all | F_MRG_RXBUF, all));
    assert_eq!(
        wanted(all, &config) & (F_GUEST_TSO4 | F_GUEST_TSO6 | F_GUEST_ECN),
        0
    );
    assert!(is_accepted(all, F_GUEST_CSUM | F_HOST_TSO4 | F_HOST_ECN));
    assert_eq!(wanted(F_HOST_TSO4 | F_HOST_ECN, &config) & all, 0);
    assert_eq!(wanted(F_CSUM | F_HOST_ECN, &config) & all, F_CSUM);
    let none = InterfaceConfig {
        offloads: Offloads::default(),
        ..config
    };
    assert_eq!(wanted(all | F_MRG_RXBUF, &none) & all, 0);
}

/// One that offers MRG_RXBUF, and one that offers nothing: its headers have 10 bytes.
#[test]
fn a_device_before_virtio_1_is_refused_by_name() {
    const ANSWER: [u32; 3] = [1, 1 | 1 << 2, 8];
    for offered in [0, F_MRG_RXBUF] {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let header = ANSWER.map(u32::to_ne_bytes).concat();
        theirs.write_all(&header).unwrap();
        theirs.write_all(&u64::to_ne_bytes(offered)).unwrap();
        let refused = Link::over(ours, &InterfaceConfig::default());
        let Err(InterfaceConnectError::Missing("VIRTIO_F_VERSION_1")) = refused else {
            panic!("{refused:?}");
        };
        // It has been asked for its features only.
        let mut requests = Vec::new();
        theirs.read_to_end(&mut requests).unwrap();
        assert_eq!(requests, [1_u32, 1, 0].map(u32::to_ne_bytes).concat());
    }
}

#[test]
fn a_random_address_is_one_of_an_interface() {
    for _ in 0..100 {
        let mac = random_mac();
        assert!(mac.is_unicast() && mac.0[0] & 2 != 0, "{mac}");
    }
    assert_ne!(random_mac(), random_mac());
}
