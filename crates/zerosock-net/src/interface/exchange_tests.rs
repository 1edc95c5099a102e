//! Frames between an interface and a device that is honest: leases, loans and their order.

use zerosock_proto::wire::net::{GSO_TCPV4, Header, MAX_FRAME, NEEDS_CSUM, Offloads};

use super::test_device::{frame, pair};
use super::{Checksum, Gso, HeaderError, Interface, LoanError, Repr, Segments};

fn is_send<T: Send>() {}

#[test]
fn an_interface_can_move_to_another_thread() {
    is_send::<Interface>();
}

#[test]
fn frames_of_all_lengths_arrive() {
    let (interface, mut device) = pair(|_, _| {});
    for (seed, len) in (0..).zip([
        14, 15, 60, 1514, 2035, 2036, 2037, 4084, 4085, 9000, MAX_FRAME,
    ]) {
        device.send(Header::default(), &frame(len, seed));
        let lease = interface.recv().unwrap();
        assert_eq!((lease.len(), lease.repr()), (len, Repr::PLAIN));
        assert_eq!(lease.to_vec(), frame(len, seed));
        assert_eq!(lease.slices().count(), (len + 12).div_ceil(2048));
        let mut some = [0; 7];
        let offset = len - 14;
        assert_eq!(lease.read(offset, &mut some), 7);
        assert_eq!(some, frame(len, seed)[offset..offset + 7]);
        assert_eq!(lease.read(len - 3, &mut some), 3);
        assert_eq!(lease.read(len, &mut some), 0);
        drop(lease);
        assert!(interface.recv().is_none());

        let mut loan = interface.loan(len).unwrap();
        assert_eq!(loan.write(0, &frame(len + 9, seed)), len);
        loan.queue(&Repr::PLAIN).unwrap();
        assert!(device.take().is_none(), "seen before the flush");
        interface.flush();
        assert_eq!(device.take(), Some((Header::default(), frame(len, seed))));
    }
    let stats = interface.stats();
    assert_eq!((stats.rx_frames, stats.tx_frames), (11, 11));
    assert_eq!(stats.rx_bytes, stats.tx_bytes);
}

#[test]
fn a_lease_shows_what_the_device_writes_later() {
    let (interface, mut device) = pair(|_, _| {});
    let chains = device.write(Header::default(), &frame(5000, 1));
    let last = chains[2].0.writable().to_vec();
    device.complete(chains);
    let lease = interface.recv().unwrap();
    let at = 2 * 2048 - 12;
    device.memory.write(&last, 0, &[0xaa]);
    let mut byte = [0];
    lease.read(at, &mut byte);
    assert_eq!(byte, [0xaa]);
    device.memory.write(&last, 0, &[0xbb]);
    lease.read(at, &mut byte);
    assert_eq!(byte, [0xbb], "the lease is a copy");
}

#[test]
fn leases_are_dropped_in_any_order() {
    let (interface, mut device) = pair(|config, _| config.rx_queue_size = 8);
    for round in 0..200u8 {
        let seeds = [round, round.wrapping_add(1), round.wrapping_add(2)];
        // 2 + 1 + 3 buffers.
        let lens = [3000, 100, 5000];
        for (seed, len) in seeds.iter().zip(lens) {
            device.send(Header::default(), &frame(len, *seed));
        }
        let mut leases: Vec<_> = (0..3).map(|_| Some(interface.recv().unwrap())).collect();
        let order = [
            [0, 1, 2],
            [0, 2, 1],
            [1, 0, 2],
            [1, 2, 0],
            [2, 0, 1],
            [2, 1, 0],
        ];
        for index in order[usize::from(round) % 6] {
            for (lease, (seed, len)) in leases.iter().zip(seeds.iter().zip(lens)) {
                if let Some(lease) = lease {
                    assert_eq!(lease.to_vec(), frame(len, *seed));
                }
            }
            leases[index] = None;
        }
        assert!(interface.recv().is_none());
    }
}

#[test]
fn without_leases_to_give_the_device_has_no_buffers() {
    let (interface, mut device) = pair(|config, _| config.rx_queue_size = 8);
    for seed in 0..8 {
        device.send(Header::default(), &frame(100, seed));
    }
    let mut leases: Vec<_> = std::iter::from_fn(|| interface.recv()).collect();
    assert_eq!(leases.len(), 8);
    assert!(device.rx.pop().unwrap().is_none());
    leases.remove(3);
    assert!(interface.recv().is_none());
    device.send(Header::default(), &frame(100, 9));
    assert_eq!(interface.recv().unwrap().to_vec(), frame(100, 9));
}

/// The device may complete the buffers of a frame one after the other.
#[test]
fn a_frame_is_received_when_all_its_buffers_have_come() {
    let (interface, mut device) = pair(|_, _| {});
    let mut chains = device.write(Header::default(), &frame(6000, 1));
    let rest = chains.split_off(1);
    device.complete(chains);
    assert!(interface.recv().is_none());
    device.complete(rest);
    assert_eq!(interface.recv().unwrap().to_vec(), frame(6000, 1));
}

#[test]
fn offloads_are_exposed_in_both_directions() {
    let repr = Repr {
        checksum: Checksum::Partial {
            start: 34,
            offset: 16,
        },
        gso: Some(Gso {
            kind: Segments::Tcp4,
            ecn: false,
            size: 1448,
            hdr_len: 54,
        }),
    };
    let (interface, mut device) = pair(|_, _| {});
    let mut loan = interface.loan(60_000).unwrap();
    loan.write(0, &frame(60_000, 1));
    loan.queue(&repr).unwrap();
    interface.flush();
    let (header, bytes) = device.take().unwrap();
    assert_eq!(bytes, frame(60_000, 1));
    assert_eq!((header.flags(), header.gso_type()), (NEEDS_CSUM, GSO_TCPV4));
    assert_eq!((header.csum_start(), header.csum_offset()), (34, 16));
    assert_eq!((header.gso_size(), header.hdr_len()), (1448, 54));
    device.send(header, &bytes);
    let lease = interface.recv().unwrap();
    assert_eq!(lease.repr(), repr);
    drop(lease);

    let valid = Repr {
        checksum: Checksum::Valid,
        gso: None,
    };
    device.send(valid.emit(), &frame(100, 1));
    assert_eq!(interface.recv().unwrap().repr(), valid);
    // That a checksum is right is nothing that a driver says.
    interface.loan(100).unwrap().queue(&valid).unwrap();
    interface.flush();
    assert_eq!(device.take().unwrap().0, Header::default());
}

#[test]
fn a_frame_that_the_device_does_not_take_is_refused() {
    let (interface, mut device) = pair(|_, terms| {
        terms.to_device = Offloads {
            tso4: false,
            ..Offloads::ALL
        };
    });
    let partial = Repr {
        checksum: Checksum::Partial {
            start: 34,
            offset: 16,
        },
        gso: None,
    };
    let tso = Repr {
        gso: Some(Gso {
            kind: Segments::Tcp4,
            ecn: false,
            size: 1448,
            hdr_len: 54,
        }),
        ..partial
    };
    let refused = interface.loan(3000).unwrap().queue(&tso);
    assert_eq!(refused, Err(HeaderError::GsoNotNegotiated(GSO_TCPV4)));
    let refused = interface.loan(51).unwrap().queue(&partial);
    assert!(matches!(refused, Err(HeaderError::ChecksumOutside { .. })));
    interface.loan(52).unwrap().queue(&partial).unwrap();
    interface.flush();
    assert_eq!(device.take().unwrap().1.len(), 52);
    assert!(device.take().is_none());
}

#[test]
fn a_loan_that_is_dropped_sends_nothing_and_is_free_again() {
    let (interface, mut device) = pair(|_, _| {});
    for _ in 0..1000 {
        let mut loan = interface.loan(100).unwrap();
        loan.write(0, b"never sent");
        drop(loan);
        drop(interface.loan(MAX_FRAME).unwrap());
    }
    interface.flush();
    assert!(device.take().is_none());
    let mut loan = interface.loan(1000).unwrap();
    loan.write(0, &frame(1000, 3));
    loan.truncate(60);
    assert_eq!(loan.len(), 60);
    loan.queue(&Repr::PLAIN).unwrap();
    interface.flush();
    assert_eq!(device.take().unwrap().1, frame(60, 3));
}

#[test]
fn loans_are_limited_and_come_back() {
    let (interface, mut device) = pair(|config, _| {
        config.tx_queue_size = 16;
        config.large_loans = 4;
    });
    for len in [13, MAX_FRAME + 1] {
        assert_eq!(interface.loan(len).err(), Some(LoanError::Length(len)));
    }
    for round in 0..10u8 {
        for len in [100, 2036, 2037, MAX_FRAME] {
            let most = if len <= 2036 { 12 } else { 4 };
            let mut queued = 0;
            while let Ok(mut loan) = interface.loan(len) {
                loan.write(0, &frame(len, round.wrapping_add(queued)));
                loan.queue(&Repr::PLAIN).unwrap();
                queued += 1;
            }
            assert_eq!(queued, most);
            assert_eq!(interface.loan(len).err(), Some(LoanError::Full));
            assert!(!interface.is_ready());
            // The refusal has published them.
            for index in 0..queued {
                let expected = frame(len, round.wrapping_add(index));
                assert_eq!(device.take().unwrap().1, expected);
            }
            assert!(interface.is_ready(), "room");
            assert!(interface.arm(), "no notification for what is there");
        }
    }
    let (interface, _device) = pair(|config, _| config.large_loans = 0);
    assert_eq!(interface.loan(2037).err(), Some(LoanError::Length(2037)));
}

#[test]
fn plain_slices_need_trust() {
    let (interface, mut device) = pair(|_, _| {});
    device.send(Header::default(), &frame(100, 1));
    assert!(interface.recv().unwrap().bytes().is_none());
    assert!(interface.loan(100).unwrap().bytes_mut().is_none());
}

#[test]
fn notifications_are_requested_by_arm_only() {
    let (interface, mut device) = pair(|_, _| {});
    let mut send = |interface: &Interface| {
        let chains = device.write(Header::default(), &frame(100, 1));
        for (chain, written) in chains {
            device.rx.complete(chain, written);
        }
        let wanted = device.rx.publish();
        while interface.recv().is_some() {}
        wanted
    };
    // The first one is always notified.
    send(&interface);
    assert!((0..100).all(|_| !send(&interface)));
    assert!(!interface.arm());
    assert!(send(&interface));
    assert!((0..100).all(|_| !send(&interface)));
}

/// A program that sleeps has shown everything to its device.
#[test]
fn arming_publishes_returned_buffers_and_queued_frames() {
    let (interface, mut device) = pair(|config, _| config.rx_queue_size = 8);
    for seed in 0..8 {
        device.send(Header::default(), &frame(100, seed));
    }
    let leases: Vec<_> = std::iter::from_fn(|| interface.recv()).collect();
    drop(leases);
    interface.loan(60).unwrap().queue(&Repr::PLAIN).unwrap();
    assert!(device.rx.pop().unwrap().is_none());
    assert!(device.take().is_none());
    assert!(!interface.arm());
    assert!(device.rx.pop().unwrap().is_some());
    assert!(device.take().is_some());
}
