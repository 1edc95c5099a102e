//! Unit tests of `message`.

use super::*;
use proptest::prelude::*;

fn error(datagram: &[u8], fds: usize) -> String {
    decode(datagram, fds).unwrap_err().to_string()
}

#[test]
fn wire_form_is_fixed() {
    let batch = [
        Put("a/b", b"xy", 2),
        Remove("a"),
        Rename("c", "d"),
        Write("e", b""),
    ];
    let expected = [
        &[1, 0, 4, 0][..],
        &[1, 2, 3, 0, 2, 0, 0, 0],
        b"a/bxy",
        &[2, 0, 1, 0, 0, 0, 0, 0],
        b"a",
        &[3, 0, 1, 0, 1, 0, 0, 0],
        b"cd",
        &[4, 0, 1, 0, 0, 0, 0, 0],
        b"e",
    ];
    assert_eq!(encode(&batch).unwrap(), expected.concat());
    assert_eq!(decode(&expected.concat(), 2).unwrap(), batch);
    let limits = Limits {
        entries: 1,
        bytes: 2,
        descriptors: 3,
    };
    for (operation, kind) in [
        (Alive, 5),
        (Notify("READY=1"), 6),
        (Stopping, 7),
        (End(limits), 8),
        (Take, 9),
        (TakeOver, 10),
        (HandedOver, 11),
        (Resume, 12),
    ] {
        let datagram = encode(&[operation]).unwrap();
        assert_eq!(datagram[4], kind);
        assert_eq!(decode(&datagram, 0).unwrap(), [operation]);
    }
}

#[test]
fn bounds_are_exact() {
    let key = "k".repeat(MAX_KEY);
    let bytes = vec![0; MAX_BYTES];
    encode(&[Put(&key, &bytes, MAX_FDS)]).unwrap();
    encode(&[Write(&key, &bytes)]).unwrap();
    encode(&vec![Remove("k"); MAX_OPERATIONS]).unwrap();
    encode(&[Notify(&format!("STATUS={}", "x".repeat(MAX_NOTIFY - 7)))]).unwrap();

    let long_key = "k".repeat(MAX_KEY + 1);
    let long_bytes = vec![0; MAX_BYTES + 1];
    let full = [Put(&key, &bytes, 0); 8];
    for refused in [
        &[Put(&long_key, b"", 0)][..],
        &[Remove(&long_key)],
        &[Rename(&key, &long_key)],
        &[Put("", b"", 0)],
        &[Put("a b", b"", 0)],
        &[Put("ä", b"", 0)],
        &[Rename("a", "")],
        &[Put("k", &long_bytes, 0)],
        &[Write("k", &long_bytes)],
        &[Put("k", b"", MAX_FDS + 1)],
        &[Put("k", b"", MAX_FDS), Put("l", b"", 1)],
        &[Put("k", b"", 256)],
        &[Remove("k"); MAX_OPERATIONS + 1],
        &full,
        &[Notify(&format!("STATUS={}", "x".repeat(MAX_NOTIFY - 6)))],
    ] {
        encode(refused).unwrap_err();
    }
}

/// Found by the fuzz target `supervisor`.
#[test]
fn surplus_bytes_in_an_operation_are_refused() {
    let limits = Limits {
        entries: 1,
        bytes: 2,
        descriptors: 3,
    };
    let mut datagram = encode(&[End(limits)]).unwrap();
    datagram.push(0);
    // The length of its bytes.
    datagram[8] += 1;
    assert!(error(&datagram, 0).contains("unknown"));
}

#[test]
fn malformed_messages_are_refused() {
    let valid = encode(&[Put("key", b"bytes", 1), Rename("a", "b")]).unwrap();
    decode(&valid, 1).unwrap();
    for length in 0..valid.len() {
        decode(&valid[..length], 1).unwrap_err();
    }
    assert!(error(&[&valid[..], b"x"].concat(), 1).contains("surplus"));
    assert!(error(&valid, 0).contains("descriptors"));
    assert!(error(&valid, 2).contains("descriptors"));
    assert!(error(&[2, 0, 0, 0], 0).contains("version"));
    assert!(error(&[1, 0, 1, 0, 13, 0, 0, 0, 0, 0, 0, 0], 0).contains("unknown operation"));
    // A length that would overflow an addition.
    assert!(error(&[1, 0, 1, 0, 1, 0, 1, 0, 255, 255, 255, 255, b'k'], 0).contains("truncated"));
    // Fields that these kinds do not have.
    for kind in [2, 3, 4] {
        let with_fds = [1, 0, 1, 0, kind, 1, 1, 0, 1, 0, 0, 0, b'k', b'k'];
        decode(&with_fds, 1).unwrap_err();
    }
    decode(&[1, 0, 1, 0, 2, 0, 1, 0, 1, 0, 0, 0, b'k', b'x'], 0).unwrap_err();
    for kind in [5, 6, 7, 8, 9, 10, 11, 12] {
        decode(&[1, 0, 1, 0, kind, 0, 1, 0, 0, 0, 0, 0, b'k'], 0).unwrap_err();
    }
}

#[test]
fn only_harmless_states_reach_the_service_manager() {
    for text in [
        "READY=1",
        "STOPPING=1",
        "RELOADING=1\nMONOTONIC_USEC=123",
        "STATUS=serving 3 VMs = fine",
        "STATUS=",
        "READY=1\nSTATUS=ä",
    ] {
        encode(&[Notify(text)]).unwrap();
    }
    for text in [
        "",
        "READY=0",
        "READY=1\n",
        "MAINPID=1",
        "READY=1\nMAINPID=1",
        "STATUS=x\rMAINPID=1",
        "STATUS=x\0",
        "FDSTORE=1",
        "FDSTOREREMOVE=1",
        "WATCHDOG=1",
        "WATCHDOG_USEC=1",
        "EXTEND_TIMEOUT_USEC=1",
        "MONOTONIC_USEC=1x",
        "ready=1",
        "STATUS",
    ] {
        assert!(encode(&[Notify(text)]).is_err(), "{text:?}");
    }
}

#[test]
fn prefix_covers_whole_components() {
    for (key, prefix, below) in [
        ("vm/3", "vm/3", true),
        ("vm/3/err", "vm/3", true),
        ("vm/3/err", "vm/3/", true),
        ("vm/3", "vm/3/", false),
        ("vm/30", "vm/3", false),
        ("vm/30/err", "vm/3/", false),
        ("v", "vm", false),
    ] {
        assert_eq!(is_below(key, prefix), below, "{key} {prefix}");
    }
}

proptest! {
    #[test]
    fn no_datagram_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200), fds in 0..70_usize) {
        let _ = decode(&bytes, fds);
    }

    #[test]
    fn what_is_decoded_is_encoded_to_the_same_bytes(
        (at, with) in (0..60_usize, any::<u8>()),
        fds in 0..4_usize,
    ) {
        let batch = [Put("key", b"bytes", 1), Rename("a", "b"), Write("c", b"d"), Remove("e")];
        let mut datagram = encode(&batch).unwrap();
        if let Some(byte) = datagram.get_mut(at) {
            *byte = with;
        }
        if let Ok(operations) = decode(&datagram, fds) {
            prop_assert_eq!(encode(&operations).unwrap(), datagram);
        }
    }
}
