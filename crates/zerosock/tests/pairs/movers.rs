//! Drivers that move connections of others, move connections that are not established, move twice
//! or in the middle of a message, or send at a pair too early. They harm only their own
//! connections.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use rustix::net::{AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, sockopt};
use zerosock::daemon::{DaemonConfig, HostSide, HybridMessages};
use zerosock::driver::{Address, Cid, Port};
use zerosock_proto::vsock::QueuePairs;
use zerosock_proto::wire::vsock::{Op, Repr, SEQ_EOM, SocketType};

use super::common::raw::{RawGuest, connect};
use super::common::{PATIENCE, TestDaemon, connect_guest, eventually};
use super::guest::{PairsGuest, until};
use super::hosting::Hosted;

const PORT: u32 = 7000;
const OURS: u32 = 6000;

fn tune(config: &mut DaemonConfig) {
    config.workers = 2;
    config.queue_pairs = 3;
}

/// As `tune`, and the first VM has SOCK_SEQPACKET hybrid sockets too.
fn with_messages(config: &mut DaemonConfig) {
    tune(config);
    if let HostSide::Hybrid { path, messages, .. } = &mut config.vms[0].host {
        let path = messages_at(path);
        let listener = listen(&path);
        *messages = Some(HybridMessages { path, listener });
    }
}

fn messages_at(streams: &Path) -> PathBuf {
    streams.with_extension("messages")
}

fn listen(path: &Path) -> OwnedFd {
    let kind = rustix::net::SocketType::SEQPACKET;
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
    rustix::net::bind(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    rustix::net::listen(&socket, 16).unwrap();
    socket
}

/// A guest with three pairs, written by hand, so that it can break the rules.
struct Mover {
    raw: RawGuest,
    /// The connection under test.
    local: Address,
    peer: Address,
    socket_type: SocketType,
    /// Bytes read, as announced in `fwd_cnt`.
    read: u32,
}

impl Mover {
    fn attach(socket: &Path, socket_type: SocketType) -> Mover {
        let three = QueuePairs::new(3).unwrap();
        let raw = RawGuest::with_pairs(connect(socket), true, three);
        let local = Address::new(raw.cid, Port::new(OURS));
        let peer = Address::new(Cid::HOST, Port::new(PORT));
        Mover {
            raw,
            local,
            peer,
            socket_type,
            read: 0,
        }
    }

    #[track_caller]
    fn say(&mut self, pair: u16, op: Op, flags: u32, payload: &[u8]) {
        let header = Repr {
            src: self.local,
            dst: self.peer,
            len: payload.len() as u32,
            socket_type: self.socket_type.into(),
            op: op.into(),
            flags,
            buf_alloc: 65536,
            fwd_cnt: self.read,
        };
        eventually("there is room to send", || self.raw.may_send_on(pair));
        self.raw.send_on(pair, &header, payload);
    }

    /// The next packet at `pair`.
    #[track_caller]
    fn next(&mut self, pair: u16) -> (Op, Repr, Vec<u8>) {
        let mut packet = None;
        eventually("a packet comes", || {
            packet = self.raw.try_recv_on(pair);
            packet.is_some()
        });
        let (header, payload) = packet.unwrap();
        self.read += header.len;
        (header.op.known().unwrap(), header, payload)
    }

    /// The next packet at `pair` other than a credit update.
    #[track_caller]
    fn next_but_credit(&mut self, pair: u16) -> (Op, Repr, Vec<u8>) {
        loop {
            match self.next(pair) {
                (Op::CreditUpdate | Op::CreditRequest, ..) => {}
                packet => return packet,
            }
        }
    }

    #[track_caller]
    fn connect(&mut self, pair: u16) {
        self.say(pair, Op::Request, 0, &[]);
        assert_eq!(self.next(pair).0, Op::Response);
    }

    /// Moves as the protocol requires.
    #[track_caller]
    fn goes(&mut self, from: u16, to: u16) {
        self.say(from, Op::Move, to.into(), &[]);
        let (op, header, _) = self.next_but_credit(from);
        assert_eq!((op, header.flags), (Op::Moved, u32::from(to)));
        self.say(to, Op::CreditUpdate, 0, &[]);
    }

    /// Checks that every buffer returns, and that the queues can be stopped.
    #[track_caller]
    fn ends(&mut self) {
        eventually("all buffers are back", || {
            (0..3).all(|pair| self.raw.is_idle_on(pair))
        });
        for queue in 0..7 {
            self.raw.frontend.get_vring_base(queue).unwrap();
        }
    }
}

fn patient(socket: UnixStream) -> UnixStream {
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket
}

#[track_caller]
fn none_are_left(daemon: &TestDaemon) {
    eventually("all connections are gone", || {
        let stats = daemon.stats().unwrap();
        stats.conns_added == stats.conns_removed
    });
}

#[test]
fn a_connection_moves_only_by_its_owner_and_at_its_own_pair() {
    let daemon = TestDaemon::with(2, tune);
    let listener = daemon.host_listener(PORT);
    let mut owner = PairsGuest::attach(&daemon.vms[0].socket, 3, PORT);
    let mut thief = Mover::attach(&daemon.vms[1].socket, SocketType::Stream);
    let conn = owner.connect(OURS, Address::new(Cid::HOST, Port::new(PORT)));
    until(&mut [&mut owner], |guests| guests[0].conns[conn].connected);
    let (at, _) = owner.conns[conn].at.unwrap();
    let mut program = patient(listener.accept().unwrap().0);
    // With its own address, and with the owner's.
    for (pair, to) in [(0, 1), (1, 2), (2, 0)] {
        thief.local.cid = owner.raw.cid;
        thief.say(pair, Op::Move, to, &[]);
        thief.local.cid = thief.raw.cid;
        thief.say(pair, Op::Move, to, &[]);
        let (op, header, _) = thief.next(pair);
        assert_eq!(
            (op, header.dst),
            (Op::Rst, thief.local),
            "the first has no answer"
        );
    }
    // The owner cannot move it either, at a pair where it is not.
    for pair in (0..3).filter(|pair| *pair != at) {
        let header = Repr {
            flags: u32::from(pair + 1) % 3,
            ..owner.raw.header(OURS, PORT, Op::Move)
        };
        owner.raw.send_on(pair, &header, &[]);
        let mut answer = None;
        eventually("it is answered", || {
            answer = owner.raw.try_recv_on(pair);
            answer.is_some()
        });
        assert_eq!(answer.unwrap().0.op.known(), Some(Op::Rst));
    }
    program.write_all(b"as before").unwrap();
    until(&mut [&mut owner], |guests| {
        guests[0].conns[conn].received == b"as before"
    });
    assert_eq!(owner.conns[conn].moves, 0);
    assert_eq!(owner.conns[conn].at.unwrap().0, at);
    assert!(owner.ask_move(conn, (at + 1) % 3));
    until(&mut [&mut owner], |guests| guests[0].conns[conn].moves == 1);
}

#[test]
fn of_two_moves_at_once_only_the_first_is_carried_out() {
    let daemon = TestDaemon::with(1, tune);
    let listener = daemon.host_listener(PORT);
    let mut guest = Mover::attach(&daemon.vms[0].socket, SocketType::Stream);
    guest.connect(0);
    let mut program = patient(listener.accept().unwrap().0);
    let mut at = 0;
    for round in 0..60u8 {
        // The second MOVE: to another pair, to one that does not exist, to the current one.
        let (to, other) = ((at + 1) % 3, [(at + 2) % 3, 9, at][usize::from(round % 3)]);
        guest.say(at, Op::Move, to.into(), &[]);
        guest.say(at, Op::Move, other.into(), &[]);
        // A packet that is answered in order.
        guest.local.port = Port::new(OURS + 1);
        guest.say(at, Op::Move, to.into(), &[]);
        guest.local.port = Port::new(OURS);
        let (mut moved, mut behind) = (0, false);
        while moved == 0 || !behind {
            match guest.next_but_credit(at) {
                (Op::Moved, header, _) => {
                    assert_eq!(header.flags, u32::from(to), "the first counts");
                    moved += 1;
                }
                (Op::Rst, header, _) if header.dst.port.get() == OURS + 1 => behind = true,
                // The first MOVE is complete: this pair has no connection any more.
                (Op::Rst, ..) => assert!(!behind),
                packet => panic!("{packet:?}"),
            }
        }
        assert_eq!(moved, 1);
        guest.say(to, Op::Rw, 0, &[round; 100]);
        let mut out = [0; 100];
        program.read_exact(&mut out).unwrap();
        assert_eq!(out, [round; 100]);
        program.write_all(&[round]).unwrap();
        let (op, _, payload) = guest.next_but_credit(to);
        assert_eq!((op, payload), (Op::Rw, vec![round]));
        at = to;
    }
    guest.ends();
}

#[test]
fn an_incomplete_message_moves_with_its_connection() {
    let daemon = TestDaemon::with(1, with_messages);
    let listener = listen(&PathBuf::from(format!(
        "{}_{PORT}",
        messages_at(&daemon.uds_path()).display()
    )));
    let mut guest = Mover::attach(&daemon.vms[0].socket, SocketType::SeqPacket);
    guest.connect(0);
    let program = rustix::net::accept(&listener).unwrap();
    sockopt::set_socket_timeout(&program, sockopt::Timeout::Recv, Some(PATIENCE)).unwrap();
    let recv = || {
        let mut out = vec![0; 65536];
        let got = rustix::net::recv(&program, &mut out[..], RecvFlags::empty());
        got.map(|(_, got)| out[..got].to_vec())
    };
    let mut at = 0;
    let mut expected = Vec::new();
    for hop in 0..30u8 {
        guest.say(at, Op::Rw, 0, &[hop; 100]);
        expected.extend_from_slice(&[hop; 100]);
        let to = (at + 1 + u16::from(hop) % 2) % 3;
        guest.goes(at, to);
        // A part of a message at the old pair is dropped, and ends no message.
        guest.say(at, Op::Rw, SEQ_EOM, b"stray");
        assert_eq!(guest.next_but_credit(at).0, Op::Rst);
        at = to;
    }
    guest.say(at, Op::Rw, SEQ_EOM, b"end");
    expected.extend_from_slice(b"end");
    assert_eq!(recv().unwrap(), expected);
    // A message that never ends is dropped.
    guest.say(at, Op::Rw, 0, b"half");
    guest.goes(at, (at + 1) % 3);
    guest.say((at + 1) % 3, Op::Rst, 0, &[]);
    assert!(recv().is_ok_and(|got| got.is_empty()));
    none_are_left(&daemon);
    guest.ends();
}

#[test]
fn an_incomplete_message_between_siblings_moves_with_both_ends() {
    let daemon = TestDaemon::with(2, tune);
    let mut one = Mover::attach(&daemon.vms[0].socket, SocketType::SeqPacket);
    let mut two = Mover::attach(&daemon.vms[1].socket, SocketType::SeqPacket);
    one.peer.cid = two.raw.cid;
    (two.local.port, two.peer) = (Port::new(PORT), one.local);
    one.say(0, Op::Request, 0, &[]);
    let mut there = u16::MAX;
    eventually("it is asked", || {
        let request = |pair: &u16| two.raw.try_recv_on(*pair).is_some();
        there = (0..3).find(request).unwrap_or(u16::MAX);
        there != u16::MAX
    });
    two.say(there, Op::Response, 0, &[]);
    assert_eq!(one.next(0).0, Op::Response);
    let mut at = 0;
    for round in 0..10u8 {
        let mut expected = Vec::new();
        for hop in 0..6u8 {
            one.say(at, Op::Rw, 0, &[round ^ hop; 700]);
            expected.extend_from_slice(&[round ^ hop; 700]);
            // Sometimes both ends move at once.
            let (to, back) = ((at + 1) % 3, (there + 1) % 3);
            if hop % 2 == 0 {
                two.say(there, Op::Move, back.into(), &[]);
            }
            one.say(at, Op::Move, to.into(), &[]);
            // It may be refused while the sibling has not confirmed the previous move.
            let (op, header, _) = one.next_but_credit(at);
            assert_eq!(op, Op::Moved);
            at = header.flags as u16;
            one.say(at, Op::CreditUpdate, 0, &[]);
            if hop % 2 == 0 {
                let (op, header, _) = two.next_but_credit(there);
                assert_eq!(op, Op::Moved, "half a message is not shown");
                there = header.flags as u16;
                two.say(there, Op::CreditUpdate, 0, &[]);
            }
        }
        one.say(at, Op::Rw, SEQ_EOM, b"end");
        expected.extend_from_slice(b"end");
        let mut received = Vec::new();
        loop {
            let (op, header, payload) = two.next_but_credit(there);
            assert_eq!(op, Op::Rw);
            received.extend_from_slice(&payload);
            if header.flags & SEQ_EOM != 0 {
                break;
            }
        }
        assert_eq!(received, expected, "{round}");
        two.say(there, Op::CreditUpdate, 0, &[]);
    }
    // A message that never ends is dropped.
    one.say(at, Op::Rw, 0, b"half");
    one.say(at, Op::Move, u32::from((at + 1) % 3), &[]);
    let at = one.next_but_credit(at).1.flags as u16;
    one.say(at, Op::Rst, 0, &[]);
    assert_eq!(two.next_but_credit(there).0, Op::Rst);
    none_are_left(&daemon);
    one.ends();
    two.ends();
}

#[test]
fn an_incomplete_message_for_the_program_moves_with_its_connection() {
    let hosted = Hosted::tuned(|builder| builder.queue_pairs(3));
    let listener = hosted.listen_seqpacket(Port::new(PORT), 4).unwrap();
    let mut guest = Mover::attach(hosted.socket_path(0), SocketType::SeqPacket);
    guest.connect(0);
    let (program, _) = listener.accept_timeout(PATIENCE).unwrap();
    program.set_read_timeout(Some(PATIENCE)).unwrap();
    let (mut at, mut kept) = (0, Vec::new());
    for round in 0..8u8 {
        let mut expected = Vec::new();
        for hop in 0..5u8 {
            guest.say(at, Op::Rw, 0, &[round ^ hop; 300]);
            expected.extend_from_slice(&[round ^ hop; 300]);
            let to = (at + 1 + u16::from(hop) % 2) % 3;
            guest.goes(at, to);
            at = to;
        }
        guest.say(at, Op::Rw, SEQ_EOM, b"end");
        expected.extend_from_slice(b"end");
        let message = program.recv_leases().unwrap().unwrap();
        assert!(message.to_vec() == expected, "{round}");
        // Leased while the connection continues to move.
        kept.push((message, expected));
    }
    guest.say(at, Op::Rw, SEQ_EOM, b"whole");
    guest.say(at, Op::Rw, 0, b"half");
    guest.goes(at, (at + 1) % 3);
    guest.say((at + 1) % 3, Op::Rst, 0, &[]);
    let whole = program.recv_leases().unwrap().unwrap();
    assert_eq!(whole.to_vec(), b"whole");
    let error = program.recv_leases().unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    for (message, expected) in &kept {
        assert!(message.to_vec() == *expected);
    }
    drop((kept, whole));
    guest.ends();
}

#[test]
fn what_has_not_been_accepted_does_not_move() {
    let daemon = TestDaemon::with(1, tune);
    let path = daemon.uds_path();
    let mut guest = Mover::attach(&daemon.vms[0].socket, SocketType::Stream);
    let program = std::thread::spawn(move || connect_guest(&path, PORT).unwrap());
    let mut request = None;
    eventually("it is asked", || {
        request = (0..3).find_map(|pair| Some((pair, guest.raw.try_recv_on(pair)?.0)));
        request.is_some()
    });
    let (pair, request) = request.unwrap();
    (guest.local, guest.peer) = (request.dst, request.src);
    // Before the answer, which starts the move.
    guest.say(pair, Op::Move, u32::from((pair + 1) % 3), &[]);
    guest.say(pair, Op::Response, 0, &[]);
    let mut program = program.join().unwrap();
    program.write_all(b"here").unwrap();
    let (op, _, payload) = guest.next(pair);
    assert_eq!((op, &payload[..]), (Op::Rw, &b"here"[..]));
    guest.goes(pair, (pair + 1) % 3);
    guest.ends();
}

#[test]
fn a_driver_that_sends_at_the_new_pair_too_early_harms_only_itself() {
    let daemon = TestDaemon::with(1, tune);
    let listener = daemon.host_listener(PORT);
    let mut guest = Mover::attach(&daemon.vms[0].socket, SocketType::Stream);
    guest.connect(0);
    let mut good = patient(listener.accept().unwrap().0);
    for round in 0..40u16 {
        guest.local.port = Port::new(OURS + 1 + u32::from(round));
        let (at, to) = (round % 3, (round + 1 + round % 2) % 3);
        guest.say(at, Op::Request, 0, &[]);
        let mut response = guest.next_but_credit(at);
        // Packets that arrived too late for an earlier one.
        while response.1.dst != guest.local {
            response = guest.next_but_credit(at);
        }
        assert_eq!(response.0, Op::Response);
        let program = listener.accept().unwrap().0;
        guest.say(at, Op::Move, to.into(), &[]);
        for _ in 0..4 {
            guest.say(to, Op::Rw, 0, &[7; 500]);
        }
        guest.say(at, Op::Rw, 0, &[8; 500]);
        drop(program);
    }
    guest.local.port = Port::new(OURS);
    guest.say(0, Op::Rw, 0, b"well");
    let mut out = [0; 4];
    good.read_exact(&mut out).unwrap();
    assert_eq!(&out, b"well");
    guest.ends();
    drop(guest);
    none_are_left(&daemon);
}

#[test]
fn two_between_the_same_addresses_do_not_meet_at_one_pair() {
    let daemon = TestDaemon::with(1, tune);
    let listener = daemon.host_listener(PORT);
    let mut guest = Mover::attach(&daemon.vms[0].socket, SocketType::Stream);
    guest.connect(0);
    let mut first = patient(listener.accept().unwrap().0);
    guest.connect(1);
    let mut second = patient(listener.accept().unwrap().0);
    guest.say(0, Op::Move, 1, &[]);
    assert_eq!(guest.next(0).0, Op::Rst);
    assert!(!first.read(&mut [0; 8]).is_ok_and(|got| got > 0));
    guest.say(1, Op::Rw, 0, b"here");
    let mut out = [0; 4];
    second.read_exact(&mut out).unwrap();
    assert_eq!(&out, b"here");
    guest.ends();
}
