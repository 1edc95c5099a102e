//! A device that another process continues: nothing is lost, and nothing that was saved is trusted.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Duration;

use rustix::fd::{BorrowedFd, OwnedFd};
use zerosock_proto::vsock::Directions;
use zerosock_proto::wire::vsock::{Op, Repr, SHUTDOWN_SEND};
use zerosock_virtio::device::{Event, WorkerDevice};
use zerosock_virtio::poller::{Events, Poller};

use super::successor_tests::{Lab, SERVICE, fixture, ops, resets};
use super::test_guest;
use super::*;
use crate::device::state::saved::Saved;

type Parts = (Vec<u8>, Vec<OwnedFd>);

/// What the device passes on, as another process would get it.
fn save(lab: &mut Lab) -> Parts {
    let (device, mut cx) = lab.lab.lend();
    device.release(&mut cx);
    let mut saved = None;
    device.save(&mut cx, |bytes, fds| {
        let copy = |fd: &BorrowedFd<'_>| fd.try_clone_to_owned().unwrap();
        saved = Some((bytes.to_vec(), fds.iter().map(copy).collect()));
    });
    saved.unwrap()
}

/// Lets another device continue, with these parts.
fn continue_with(lab: &mut Lab, (bytes, fds): Parts) {
    let rings = &lab.lab.device.queues.rings;
    let bases = [&rings.tx, &rings.rx].map(|ring| ring.as_ref().unwrap().queue.base());
    let memory = lab.lab.device.queues.memory.clone().unwrap();
    let rules = Arc::default();
    let saved = SavedDevice { bytes, fds, rules };
    lab.lab = fixture(&lab.dir, &lab.state, Some(saved));
    test_guest::resume(&mut lab.lab.device, &memory, bases);
}

fn upgrade(lab: &mut Lab) {
    let parts = save(lab);
    continue_with(lab, parts);
}

/// Handles the events of sockets.
fn poll(lab: &mut Lab) {
    let (device, mut cx) = lab.lab.lend();
    let mut events = Events::default();
    events.wait(cx.poller, Some(Duration::ZERO)).unwrap();
    for (token, readiness) in Poller::interpret(&events) {
        let Token { kind, key, .. } = token;
        let event = Event {
            kind,
            key,
            readiness,
        };
        device.on_event(event, &mut cx);
    }
}

/// Reads what is there.
fn read_some(stream: &mut UnixStream) -> Vec<u8> {
    let mut bytes = vec![0; 50_000];
    stream.set_nonblocking(true).unwrap();
    let read = stream.read(&mut bytes).unwrap_or(0);
    bytes.truncate(read);
    bytes
}

const PACKET: usize = 1000;
const PACKETS: usize = 200;

/// Byte `at` of what the guest sends.
fn byte(at: usize) -> u8 {
    (at % PACKET * 31 % 251) as u8
}

#[test]
fn bytes_that_wait_in_each_direction_arrive_after_upgrades() {
    let mut lab = Lab::new();
    let (_listener, mut program) = lab.serve(7);
    let packet: Vec<u8> = (0..PACKET).map(byte).collect();
    upgrade(&mut lab);
    lab.guest.send_bytes(7, SERVICE, &packet);
    lab.turn();
    for _ in 1..PACKETS {
        lab.guest.take_returned();
        lab.guest.send(7, SERVICE, Op::Rw, PACKET as u32);
        lab.turn();
    }
    lab.guest.shut_down(7, SERVICE, SHUTDOWN_SEND);
    lab.turn();
    program.write_all(&packet).unwrap();
    let (mut to_host, mut to_guest) = (Vec::new(), Vec::new());
    while to_host.len() < PACKET * PACKETS {
        upgrade(&mut lab);
        assert!(lab.guest.is_drained(), "a buffer of the guest is held");
        lab.turn();
        to_guest.extend(lab.guest.received_bytes());
        to_host.extend(read_some(&mut program));
        lab.turn();
    }
    assert!((0..).zip(&to_host).all(|(at, &got)| got == byte(at)));
    assert_eq!(to_host.len(), PACKET * PACKETS);
    lab.turn();
    // The end of the guest's stream follows; the other direction is open.
    program.set_nonblocking(false).unwrap();
    assert_eq!(program.read(&mut [0]).unwrap(), 0);
    let payload: Vec<u8> = to_guest
        .iter()
        .flat_map(|(_, bytes)| bytes)
        .copied()
        .collect();
    assert_eq!(payload, packet);
    let packets: Vec<Repr> = to_guest.into_iter().map(|(header, _)| header).collect();
    assert_eq!(resets(&packets), []);
    program.write_all(b"more").unwrap();
    upgrade(&mut lab);
    lab.turn();
    let more = lab.guest.received_bytes();
    assert_eq!(more.last().unwrap().1, b"more");
    drop(program);
    upgrade(&mut lab);
    lab.turn();
    assert!(ops(&lab.packets()).contains(&Op::Shutdown));
    lab.guest.send(7, SERVICE, Op::Rst, 0);
    lab.turn();
    assert_eq!(lab.lab.device.bridges.len(), 0);
    assert_eq!(lab.lab.device.shard.occupied(), 0);
}

#[test]
fn bytes_of_an_ended_connection_are_still_delivered() {
    let mut lab = Lab::new();
    let (_listener, mut program) = lab.serve(7);
    let packet: Vec<u8> = (0..PACKET).map(byte).collect();
    upgrade(&mut lab);
    lab.guest.send_bytes(7, SERVICE, &packet);
    for _ in 1..PACKETS {
        lab.turn();
        lab.guest.take_returned();
        lab.guest.send(7, SERVICE, Op::Rw, PACKET as u32);
    }
    lab.turn();
    lab.guest.shut_down(7, SERVICE, SHUTDOWN_SEND | 1);
    lab.turn();
    lab.guest.send(7, SERVICE, Op::Rst, 0);
    lab.turn();
    assert_eq!(lab.lab.device.lingering.len(), 1);
    let mut bytes = 0;
    while bytes < PACKET * PACKETS {
        upgrade(&mut lab);
        lab.turn();
        let got = read_some(&mut program);
        assert!((bytes..).zip(&got).all(|(at, &got)| got == byte(at)));
        bytes += got.len();
        lab.turn();
    }
    program.set_nonblocking(false).unwrap();
    assert_eq!(program.read(&mut [0]).unwrap(), 0);
    assert_eq!(lab.lab.device.bridges.len(), 0);
}

#[test]
fn programs_that_connect_meanwhile_are_connected_by_the_other_process() {
    let mut lab = Lab::new();
    let listener = UnixListener::bind(lab.dir.path().join("host")).unwrap();
    listener.set_nonblocking(true).unwrap();
    let (device, mut cx) = lab.lab.lend();
    device.host = HostAccess::Hybrid {
        services: lab.dir.path().join("vm").into(),
        listener: Some(OwnedFd::from(listener).into()),
        messages: None,
    };
    let connect = || UnixStream::connect(lab.dir.path().join("host")).unwrap();
    let (mut asked, mut asking) = (connect(), connect());
    asked.write_all(b"CONNECT 80\n").unwrap();
    asking.write_all(b"CONN").unwrap();
    device.bridges_with(&mut cx).accept(0);
    let [request] = lab.packets().try_into().unwrap();
    // One waits for the guest's answer, the other has not sent its line.
    upgrade(&mut lab);
    lab.turn();
    assert_eq!(lab.packets(), []);
    lab.guest.send(80, request.src, Op::Response, 0);
    lab.turn();
    let mut answer = [0; 3];
    asked.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"OK ");
    asking.write_all(b"ECT 81\n").unwrap();
    assert_eq!(lab.lab.device.handshakes.len(), 1);
    poll(&mut lab);
    let [request] = lab.packets().try_into().unwrap();
    assert_eq!(
        (request.op, request.dst.port.get()),
        (Op::Request.into(), 81)
    );
}

#[test]
fn a_device_that_is_not_replaced_goes_on() {
    let mut lab = Lab::new();
    let (_listener, mut program) = lab.serve(7);
    upgrade(&mut lab);
    lab.guest.send_bytes(7, SERVICE, b"before");
    drop(save(&mut lab));
    lab.turn();
    program.write_all(b"answer").unwrap();
    poll(&mut lab);
    lab.turn();
    let mut bytes = [0; 6];
    program.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"before");
    assert_eq!(lab.guest.received_bytes().last().unwrap().1, b"answer");
}

#[test]
fn what_is_not_passed_on_is_reset() {
    let mut lab = Lab::new();
    let (flow, named) = lab.open(1);
    // There is no other end: this one is not saved.
    assert!(lab.lab.device.bridges.key_of(flow).is_none());
    let _open = lab.serve(7);
    let (mut bytes, mut fds) = save(&mut lab);
    // The socket of the other one is missing.
    fds.clear();
    continue_with(&mut lab, (bytes.clone(), fds));
    let seven = (7, SERVICE, SocketType::Stream);
    assert_eq!(resets(&lab.packets()), [named, seven]);
    // Another version, or nothing at all.
    // Behind the first length is the magic number of the protocol core, then its version.
    for broken in [Some(4), Some(8 + 8 + 8), None] {
        let _open = lab.serve(7);
        let (fresh, fds) = save(&mut lab);
        bytes = fresh;
        match broken {
            Some(at) => bytes[at] += 1,
            None => bytes.clear(),
        }
        assert!(check_saved(&bytes).is_err());
        continue_with(&mut lab, (bytes.clone(), fds));
        assert_eq!(resets(&lab.packets()), [seven]);
        lab.turn();
    }
}

#[test]
fn forged_state_harms_the_guest_itself_at_most() {
    let mut lab = Lab::new();
    let (_listener, _program) = lab.serve(7);
    let (flow, _) = lab.open(1);
    lab.shut_down(flow, Directions::BOTH);
    let (bytes, _fds) = save(&mut lab);
    assert!(Saved::decode(&bytes).is_ok());
    let mut usable = 0;
    for at in (0..bytes.len()).step_by(3) {
        let mut forged = bytes.clone();
        forged[at] ^= 1 << (at % 8);
        let socket = UnixStream::pair().unwrap().0;
        continue_with(&mut lab, (forged, vec![socket.into()]));
        lab.turn();
        lab.guest.received();
        usable += lab.lab.device.bridges.len();
        if at % 21 == 0 {
            continue_with(&mut lab, (bytes[..at].to_vec(), Vec::new()));
            lab.turn();
            lab.guest.received();
            assert_eq!(lab.lab.device.bridges.len(), 0);
        }
    }
    assert!(usable > 0);
}
