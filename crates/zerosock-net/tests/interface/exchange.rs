//! Frames between two interfaces on a switch.

use std::os::fd::AsFd;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use zerosock_net::interface::{
    Checksum, Gso, Interface, InterfaceConfig, InterfaceConfigError, InterfaceConnectError,
    InterfaceFailure, LoanError, Repr, Segments,
};
use zerosock_proto::wire::net::{Mac, Offloads};

use super::lan::{DEADLINE, Lan, mac, receive};

/// A frame that can be told from others.
pub(crate) fn frame(to: Mac, from: Mac, len: usize, seed: u8) -> Vec<u8> {
    let bytes = (0..len as u32).map(|at| at.wrapping_mul(0x9e37_79b1).to_be_bytes()[0] ^ seed);
    let mut frame: Vec<u8> = bytes.collect();
    frame[..6].copy_from_slice(&to.0);
    frame[6..12].copy_from_slice(&from.0);
    frame[12..14].copy_from_slice(&[0x88, 0xb5]);
    frame
}

#[track_caller]
fn send(interface: &Interface, bytes: &[u8], repr: &Repr) {
    let end = Instant::now() + DEADLINE;
    let mut loan = loop {
        match interface.loan(bytes.len()) {
            Ok(loan) => break loan,
            Err(LoanError::Full) => {
                interface.wait(Some(end)).unwrap();
                assert!(Instant::now() < end, "no room");
            }
            Err(error) => panic!("{error}"),
        }
    };
    assert_eq!(loan.write(0, bytes), bytes.len());
    loan.queue(repr).unwrap();
}

/// All configurations in which notifications or buffers differ.
fn configs() -> Vec<InterfaceConfig> {
    let default = InterfaceConfig::default();
    vec![
        default.clone(),
        InterfaceConfig {
            event_idx: false,
            ..default.clone()
        },
        InterfaceConfig {
            spin: Duration::from_micros(50),
            rx_queue_size: 64,
            tx_queue_size: 8,
            large_loans: 2,
            ..default.clone()
        },
        InterfaceConfig {
            huge_pages: true,
            rx_buffer_size: 1530,
            tx_buffer_size: 65569,
            large_loans: 0,
            ..default.clone()
        },
    ]
}

#[test]
fn frames_of_all_lengths_go_both_ways() {
    for config in configs() {
        let lan = Lan::new(&[None; 2]);
        let (a, b) = (lan.connect(0, &config), lan.connect(1, &config));
        for (seed, len) in (0..).zip([14, 60, 64, 1514, 2036, 2037, 4096, 9000, 65_549]) {
            for _ in 0..20 {
                let there = frame(mac(1), mac(0), len, seed);
                send(&a, &there, &Repr::PLAIN);
                a.flush();
                assert_eq!(receive(&b).to_vec(), there);
                let back = frame(mac(0), mac(1), len, !seed);
                send(&b, &back, &Repr::PLAIN);
                b.flush();
                assert_eq!(receive(&a).to_vec(), back);
            }
        }
        assert_eq!((a.failure(), b.failure()), (None, None));
        assert_eq!(lan.server().stats()[1].1.rx_copied, 0);
    }
}

#[test]
fn a_tso_frame_crosses_as_one_with_its_metadata() {
    let lan = Lan::new(&[None; 2]);
    let config = InterfaceConfig::default();
    let (a, b) = (lan.connect(0, &config), lan.connect(1, &config));
    assert_eq!(
        (a.offloads(), b.receive_offloads()),
        (Offloads::ALL, Offloads::ALL)
    );
    for kind in [Segments::Tcp4, Segments::Tcp6] {
        let repr = Repr {
            checksum: Checksum::Partial {
                start: 34,
                offset: 16,
            },
            gso: Some(Gso {
                kind,
                ecn: true,
                size: 1448,
                hdr_len: 54,
            }),
        };
        let sent = frame(mac(1), mac(0), 65_000, 7);
        send(&a, &sent, &repr);
        a.flush();
        let lease = receive(&b);
        assert_eq!((lease.len(), lease.repr()), (65_000, repr));
        assert_eq!(lease.slices().count(), 65_012usize.div_ceil(2048));
        assert_eq!(lease.to_vec(), sent);
    }
    assert_eq!((a.stats().tx_tso, b.stats().rx_tso), (2, 2));
    assert_eq!((a.stats().tx_frames, b.stats().rx_frames), (2, 2));
}

#[test]
fn a_stream_of_frames_arrives_in_order_while_both_sides_sleep() {
    for config in configs() {
        let lan = Lan::new(&[None; 2]);
        let (a, b) = (lan.connect(0, &config), lan.connect(1, &config));
        const FRAMES: u32 = 20_000;
        let sender = thread::spawn(move || {
            for number in 0..FRAMES {
                let mut bytes = frame(mac(1), mac(0), 64, 0);
                bytes[14..18].copy_from_slice(&number.to_be_bytes());
                // The receiver answers each window of frames, so that none is dropped.
                send(&a, &bytes, &Repr::PLAIN);
                if number % 16 == 15 {
                    a.flush();
                    receive(&a);
                }
            }
            a
        });
        for number in 0..FRAMES {
            let lease = receive(&b);
            let mut copy = [0; 4];
            lease.read(14, &mut copy);
            assert_eq!(u32::from_be_bytes(copy), number);
            drop(lease);
            if number % 16 == 15 {
                send(&b, &frame(mac(0), mac(1), 14, 0), &Repr::PLAIN);
                b.flush();
            }
        }
        let a = sender.join().unwrap();
        assert_eq!(a.stats().tx_frames, u64::from(FRAMES));
        assert_eq!(b.stats().rx_frames, u64::from(FRAMES));
    }
}

/// As an event loop does that has other descriptors.
#[test]
fn an_armed_interface_makes_its_descriptor_readable() {
    let lan = Lan::new(&[None; 2]);
    let config = InterfaceConfig::default();
    let (a, b) = (lan.connect(0, &config), lan.connect(1, &config));
    for seed in 0..100 {
        let sent = frame(mac(1), mac(0), 100, seed);
        if !b.arm() {
            send(&a, &sent, &Repr::PLAIN);
            a.flush();
            let mut fds = [PollFd::from_borrowed_fd(b.as_fd(), PollFlags::IN)];
            let limit = DEADLINE.try_into().unwrap();
            assert_eq!(poll(&mut fds, Some(&limit)).unwrap(), 1);
            b.clear().unwrap();
        }
        assert_eq!(receive(&b).to_vec(), sent);
    }
}

#[test]
fn waiting_ends_at_its_deadline() {
    let lan = Lan::new(&[None; 2]);
    let spin = Duration::from_micros(50);
    let config = InterfaceConfig {
        spin,
        ..InterfaceConfig::default()
    };
    let a = lan.connect(0, &config);
    let deadline = Instant::now() + Duration::from_millis(20);
    assert_eq!(a.wait(Some(deadline)), Ok(false));
    assert!(Instant::now() >= deadline);
    assert_eq!(a.wait(Some(Instant::now())), Ok(false));
}

#[test]
fn waiting_ends_when_loans_come_back() {
    let lan = Lan::new(&[None; 2]);
    let config = InterfaceConfig {
        tx_queue_size: 8,
        large_loans: 0,
        ..InterfaceConfig::default()
    };
    // The other port has no driver: the switch drops the frames and returns their buffers.
    let a = lan.connect(0, &config);
    for _ in 0..1000 {
        send(&a, &frame(mac(1), mac(0), 100, 1), &Repr::PLAIN);
    }
    assert_eq!(a.stats().tx_frames, 1000);
}

#[test]
fn address_mtu_and_link_come_from_the_device() {
    let lan = Lan::new(&[Some(9000), None]);
    let config = InterfaceConfig::default();
    let (a, b) = (lan.connect(0, &config), lan.connect(1, &config));
    assert_eq!((a.mac(), a.mtu()), (mac(0), Some(9000)));
    assert_eq!((b.mac(), b.mtu()), (mac(1), None));
    assert!(a.link_is_up().unwrap());
    drop(a);
    let own = InterfaceConfig {
        mac: Some(mac(9)),
        offloads: Offloads::default(),
        ..config
    };
    let a = lan.connect(0, &own);
    assert_eq!(a.mac(), mac(9));
    assert_eq!(a.offloads(), Offloads::default());
}

#[test]
fn a_device_that_goes_ends_the_interface() {
    let mut lan = Lan::new(&[None; 2]);
    let config = InterfaceConfig::default();
    let (a, b) = (lan.connect(0, &config), lan.connect(1, &config));
    let sent = frame(mac(1), mac(0), 1000, 3);
    send(&a, &sent, &Repr::PLAIN);
    a.flush();
    let lease = receive(&b);
    let stopper = thread::spawn(move || lan.stop());
    let end = Some(Instant::now() + DEADLINE);
    assert_eq!(a.wait(end), Err(InterfaceFailure::Disconnected));
    assert_eq!(b.wait(end), Err(InterfaceFailure::Disconnected));
    stopper.join().unwrap();
    assert_eq!(
        a.loan(60).err(),
        Some(LoanError::Failed(InterfaceFailure::Disconnected))
    );
    assert!(a.recv().is_none() && b.recv().is_none());
    assert!(a.link_is_up().is_err());
    assert_eq!(lease.to_vec(), sent);
}

/// A second front-end of a port waits in vain, and gets the port when the first has gone.
#[test]
fn a_port_serves_the_next_interface_when_one_has_gone() {
    let lan = Lan::new(&[None; 2]);
    let config = InterfaceConfig::default();
    let b = lan.connect(1, &config);
    for seed in 0..5 {
        let a = lan.connect(0, &config);
        let sent = frame(mac(1), mac(0), 1000, seed);
        send(&a, &sent, &Repr::PLAIN);
        a.flush();
        assert_eq!(receive(&b).to_vec(), sent);
    }
}

#[test]
fn what_cannot_be_connected_is_an_error() {
    let config = InterfaceConfig {
        rx_queue_size: 100,
        ..InterfaceConfig::default()
    };
    let error = Interface::connect(Path::new("/nowhere"), &config).unwrap_err();
    assert!(matches!(
        error,
        InterfaceConnectError::Config(InterfaceConfigError::QueueSize(100))
    ));
    let config = InterfaceConfig::default();
    let error = Interface::connect(Path::new("/nowhere"), &config).unwrap_err();
    assert!(
        matches!(error, InterfaceConnectError::Frontend(_)),
        "{error}"
    );
    // One that closes at once.
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    drop(theirs);
    let error = Interface::over(ours, &config).unwrap_err();
    assert!(
        matches!(error, InterfaceConnectError::Frontend(_)),
        "{error}"
    );
}
