//! The two ports of the host that a VM with guest endpoints has: the stream that registers them, and doorbells, by which
//! each side wakes the other. No wake-up is lost, none adds up at a guest that does not read, and an endpoint ends with
//! its doorbell.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;

use zerosock_proto::wire::vsock::{Op, SHUTDOWN_RECEIVE, SHUTDOWN_SEND};
use zerosock_proto::{Address, Port};

use super::guest_orders::{GuestEvent, GuestOrder};
use super::guest_test_lab::*;
use super::{DriverKind, test_guest};
use crate::registration::Reason;
use crate::registration::{DOORBELL_PORT, REGISTRATION_PORT};

fn connect(lab: &mut GuestLab, from: u32, to: Port) -> Option<Op> {
    lab.vm.send(from, host(to), Op::Request, 0);
    lab.packet(from).0.op.known()
}

#[track_caller]
fn assert_ends(lab: &mut GuestLab, endpoint: &TestEndpoint, why: Reason) {
    match lab.event() {
        GuestEvent::Ended { key, reason } => assert_eq!((key, reason), (endpoint.key, why)),
        other => panic!("{other:?}"),
    }
}

/// Bytes that have arrived for a port.
fn arrived(lab: &mut GuestLab, port: u32) -> usize {
    let mut bytes = 0;
    while let Some((header, payload)) = lab.take_packet(port) {
        let op = header.op.known();
        assert!(matches!(op, Some(Op::Rw | Op::CreditUpdate)), "{op:?}");
        bytes += payload.len();
    }
    bytes
}

#[test]
fn a_registration_stream_reaches_the_control_thread() {
    let mut lab = GuestLab::new();
    assert_eq!(
        connect(&mut lab, 1023, REGISTRATION_PORT),
        Some(Op::Response)
    );
    let GuestEvent::Stream(socket) = lab.event() else {
        panic!("no stream");
    };
    let mut control = UnixStream::from(socket.into_trusted());
    let to = host(REGISTRATION_PORT);
    control.write_all(b"hello").unwrap();
    let (_, payload) = lab.packet(1023);
    assert_eq!(payload, b"hello");
    lab.until("room", |lab| lab.vm.is_drained().then_some(()));
    lab.vm.send_bytes(1023, to, b"register");
    let mut received = [0; 8];
    lab.until("the request", |_| match control.read(&mut received) {
        Ok(8) => Some(()),
        Ok(_) => panic!("a part"),
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::WouldBlock);
            None
        }
    });
    assert_eq!(&received, b"register");
    // Its end is that of the stream.
    lab.vm.send(1023, to, Op::Rst, 0);
    lab.until("the end", |_| {
        matches!(control.read(&mut received), Ok(0)).then_some(())
    });
}

#[test]
fn only_ports_below_1024_may_register() {
    let mut lab = GuestLab::new();
    for from in [1024, 1025, 5000, 0xffff_fffe] {
        assert_eq!(connect(&mut lab, from, REGISTRATION_PORT), Some(Op::Rst));
    }
    // A message socket carries no stream of requests.
    lab.no_event();
    assert_eq!(connect(&mut lab, 1, REGISTRATION_PORT), Some(Op::Response));
    assert!(matches!(lab.event(), GuestEvent::Stream(_)));
}

/// Neither processes nor VMs without guest endpoints have the ports: nothing listens there.
#[test]
fn devices_without_guest_endpoints_have_no_such_ports() {
    let mut lab = GuestLab::new();
    for (number, driver) in [(1, DriverKind::Process), (2, DriverKind::Vm)] {
        lab.add_plain_device(number, driver);
        lab.settle();
        let now = lab.worker.clock().now();
        let (device, _) = lab.worker.lend(number, now);
        let mut guest = test_guest::start(device.unwrap());
        for to in [REGISTRATION_PORT, DOORBELL_PORT] {
            guest.send(1000, host(to), Op::Request, 0);
            lab.worker.activate(number);
            let answers = lab.until("an answer", |_| {
                let packets = guest.received();
                (!packets.is_empty()).then_some(packets)
            });
            assert_eq!(answers[0].op.known(), Some(Op::Rst));
        }
    }
    // A guest endpoint neither.
    let mut endpoint = lab.endpoint(&PAGES);
    for to in [REGISTRATION_PORT, DOORBELL_PORT] {
        endpoint.guest.send(1000, host(to), Op::Request, 0);
        lab.ring(endpoint.doorbell, &[1]);
        let answers = lab.until("an answer", |_| {
            let packets = endpoint.guest.received();
            (!packets.is_empty()).then_some(packets)
        });
        assert_eq!(answers[0].op.known(), Some(Op::Rst));
    }
    lab.no_event();
}

#[test]
fn a_token_opens_one_doorbell_however_it_is_cut() {
    let mut lab = GuestLab::new();
    for cut in 0..16 {
        let endpoint = lab.accepted(&PAGES);
        let (first, rest) = endpoint.token.0.split_at(cut);
        let port = endpoint.doorbell;
        assert_eq!(connect(&mut lab, port, DOORBELL_PORT), Some(Op::Response));
        if cut > 0 {
            lab.ring(port, first);
            lab.settle();
        }
        lab.ring(port, rest);
        lab.woken(port);
        // Again: no attachment waits for one.
        assert_eq!(connect(&mut lab, port + 100, DOORBELL_PORT), Some(Op::Rst));
        // Nor is it that of another, which does.
        let other = lab.accepted(&OTHER_PAGES);
        lab.open_doorbell(port + 101, &endpoint.token.0);
        lab.expect(port + 101, Op::Rst);
        let (key, reason) = (endpoint.key, Reason::REQUESTED);
        lab.order(GuestOrder::End { key, reason });
        assert_ends(&mut lab, &endpoint, reason);
        lab.expect(port, Op::Rst);
        // Not after the end either.
        lab.open_doorbell(port + 200, &endpoint.token.0);
        lab.expect(port + 200, Op::Rst);
        lab.remove_device(key.0 as u32);
        let key = other.key;
        lab.order(GuestOrder::End { key, reason });
        assert_ends(&mut lab, &other, reason);
        assert_eq!(connect(&mut lab, port + 300, DOORBELL_PORT), Some(Op::Rst));
        lab.remove_device(key.0 as u32);
    }
}

/// Any program of the guest can open such connections, and keep them.
#[test]
fn connections_without_a_token_are_few() {
    let mut lab = GuestLab::new();
    let endpoint = lab.accepted(&PAGES);
    for port in 3000..3032 {
        assert_eq!(connect(&mut lab, port, DOORBELL_PORT), Some(Op::Response));
    }
    lab.settle();
    assert!((3000..3032).all(|port| lab.take_packet(port).is_none()));
    // The oldest ones make room.
    lab.open_doorbell(endpoint.doorbell, &endpoint.token.0);
    lab.expect(3000, Op::Rst);
    lab.woken(endpoint.doorbell);
    lab.settle();
    assert!(lab.take_packet(endpoint.doorbell).is_none());
    lab.no_event();
}

#[test]
fn a_wrong_token_is_refused_and_half_of_one_opens_nothing() {
    let mut lab = GuestLab::new();
    let endpoint = lab.accepted(&PAGES);
    for (number, wrong) in [[0; 16], [0xff; 16]].into_iter().enumerate() {
        let port = 3000 + number as u32;
        lab.open_doorbell(port, &wrong);
        lab.expect(port, Op::Rst);
    }
    for (number, wrong) in endpoint.token.0.iter().enumerate() {
        let mut token = endpoint.token.0;
        token[number] = wrong ^ 1;
        let port = 4000 + number as u32;
        lab.open_doorbell(port, &token);
        lab.expect(port, Op::Rst);
    }
    // Half of one, and the end.
    lab.open_doorbell(3100, &endpoint.token.0[..15]);
    lab.settle();
    let to = host(DOORBELL_PORT);
    lab.vm.shut_down(3100, to, SHUTDOWN_RECEIVE | SHUTDOWN_SEND);
    lab.expect(3100, Op::Rst);
    lab.no_event();
    // The right one still works.
    lab.open_doorbell(endpoint.doorbell, &endpoint.token.0);
    lab.woken(endpoint.doorbell);
}

#[test]
fn an_endpoint_ends_with_its_doorbell() {
    let to = host(DOORBELL_PORT);
    let ends: [fn(&mut GuestLab, u32, Address); 3] = [
        |lab, port, to| lab.vm.send(port, to, Op::Rst, 0),
        |lab, port, to| lab.vm.shut_down(port, to, SHUTDOWN_SEND),
        |lab, port, to| lab.vm.shut_down(port, to, SHUTDOWN_RECEIVE | SHUTDOWN_SEND),
    ];
    for end in ends {
        let mut lab = GuestLab::new();
        let mut endpoint = lab.endpoint(&PAGES);
        let mut stream = lab.stream(&mut endpoint);
        lab.exchange(&mut endpoint, &mut stream, 1000);
        end(&mut lab, endpoint.doorbell, to);
        assert_ends(&mut lab, &endpoint, Reason::DOORBELL_CLOSED);
        let before = read(&endpoint.view);
        lab.settle();
        assert!(before == read(&endpoint.view));
        stream.ended(&mut lab);
    }
}

#[test]
fn each_wake_up_arrives_while_the_guest_reads() {
    let mut lab = GuestLab::new();
    let mut endpoint = lab.endpoint(&PAGES);
    let mut stream = lab.stream(&mut endpoint);
    lab.settle();
    arrived(&mut lab, endpoint.doorbell);
    for _ in 0..1000 {
        stream.write(1);
        lab.woken(endpoint.doorbell);
        lab.finish_to_endpoint(&mut endpoint, &mut stream);
    }
}

/// The limit of Linux from 6.12.92 on is about 455 packets in a buffer of 256 KiB.
#[test]
fn wake_ups_do_not_add_up_at_a_guest_that_does_not_read_and_none_is_lost() {
    let mut lab = GuestLab::new();
    lab.vm.window = 256 << 10;
    let port = 2001;
    lab.vm.unread = Some(port);
    let mut endpoint = lab.endpoint(&PAGES);
    assert_eq!(endpoint.doorbell, port);
    let mut stream = lab.stream(&mut endpoint);
    let mut unread = 0;
    for round in 0..3 {
        for _ in 0..1000 {
            stream.write(1);
            lab.finish_to_endpoint(&mut endpoint, &mut stream);
            unread += arrived(&mut lab, port);
        }
        lab.settle();
        unread += arrived(&mut lab, port);
        assert!((200..=420).contains(&unread), "round {round}: {unread}");
        // It reads, and sleeps.
        lab.vm.read_more(port, unread as u32);
        lab.vm.send(port, host(DOORBELL_PORT), Op::CreditUpdate, 0);
        unread = 0;
        // The wake-up that waited, and then the next.
        lab.until("the wake-up that waited", |lab| {
            unread += arrived(lab, port);
            (unread > 0).then_some(())
        });
        lab.settle();
        unread += arrived(&mut lab, port);
        let before = unread;
        stream.write(1);
        lab.until("a wake-up", |lab| {
            unread += arrived(lab, port);
            (unread > before).then_some(())
        });
        lab.finish_to_endpoint(&mut endpoint, &mut stream);
    }
    lab.no_event();
}

#[test]
fn floods_of_a_guest_are_one_wake_up_for_each_turn() {
    let mut lab = GuestLab::new();
    let mut endpoint = lab.endpoint(&PAGES);
    let mut stream = lab.stream(&mut endpoint);
    let to = host(DOORBELL_PORT);
    let mut sent = 0;
    while sent < 20_000 {
        while sent < 20_000 && lab.vm.try_send(endpoint.doorbell, to, Op::Rw, 1) {
            sent += 1;
        }
        lab.until("room", |lab| (lab.vm.take_returned() > 0).then_some(()));
    }
    lab.ring(endpoint.doorbell, &vec![1; 60_000]);
    lab.exchange(&mut endpoint, &mut stream, 1000);
    // More than its credit, which comes back.
    for _ in 0..20 {
        lab.ring(endpoint.doorbell, &vec![1; 60_000]);
    }
    lab.exchange(&mut endpoint, &mut stream, 1000);
    lab.no_event();
}

/// Notifications of an endpoint that was started before its doorbell was opened.
#[test]
fn a_doorbell_that_is_opened_late_rings_at_once() {
    let mut lab = GuestLab::new();
    let endpoint = lab.accepted(&PAGES);
    lab.order_start(&endpoint);
    assert!(matches!(lab.event(), GuestEvent::Started { .. }));
    lab.settle();
    lab.open_doorbell(endpoint.doorbell, &endpoint.token.0);
    lab.woken(endpoint.doorbell);
}
