//! Drivers that ask for moves of connections that they do not have, or to pairs that do not exist, or
//! again and again.

use std::io::Write;

use zerosock::daemon::DaemonConfig;
use zerosock::driver::{Address, Cid, Port};
use zerosock_proto::wire::vsock::{Op, Repr, SocketType};

use super::guest::{PairsGuest, until};
use crate::common::{TestDaemon, connect_guest};

const PORT: u32 = 7000;

fn tune(config: &mut DaemonConfig) {
    config.workers = 2;
    config.queue_pairs = 3;
}

fn move_header(guest: &PairsGuest, from: u32, pair: u32) -> Repr {
    Repr {
        flags: pair,
        ..guest.raw.header(from, PORT, Op::Move)
    }
}

/// The next packet at `pair`.
fn next(guest: &mut PairsGuest, pair: u16) -> Repr {
    let give_up = crate::common::deadline();
    loop {
        if let Some((header, _)) = guest.raw.try_recv_on(pair) {
            return header;
        }
        assert!(std::time::Instant::now() < give_up, "no packet");
        std::thread::sleep(std::time::Duration::from_micros(200));
    }
}

#[test]
fn a_move_to_any_pair_is_declined_and_the_connection_continues() {
    let daemon = TestDaemon::with(1, tune);
    let listener = daemon.host_listener(PORT);
    let mut guest = PairsGuest::attach(&daemon.vms[0].socket, 3, PORT);
    let conn = guest.connect(6000, Address::new(Cid::HOST, Port::new(PORT)));
    until(&mut [&mut guest], |guests| guests[0].conns[conn].connected);
    let mut program = listener.accept().unwrap().0;
    let (pair, _) = guest.conns[conn].at.unwrap();
    for wanted in [0, 1, 2, 3, 16, 65_536 + 1, u32::MAX] {
        let header = move_header(&guest, 6000, wanted);
        guest.raw.send_on(pair, &header, &[]);
        let answer = next(&mut guest, pair);
        assert_eq!(answer.op.known(), Some(Op::Moved), "{answer}");
        assert_eq!(answer.flags, u32::from(pair), "it stays");
    }
    program.write_all(b"still here").unwrap();
    until(&mut [&mut guest], |guests| {
        guests[0].conns[conn].received == b"still here"
    });
}

#[test]
fn a_connection_that_is_not_there_cannot_be_moved() {
    let daemon = TestDaemon::with(1, tune);
    let mut guest = PairsGuest::attach(&daemon.vms[0].socket, 3, PORT);
    for pair in 0..3 {
        let header = move_header(&guest, 6000, u32::from((pair + 1) % 3));
        guest.raw.send_on(pair, &header, &[]);
        assert_eq!(next(&mut guest, pair).op.known(), Some(Op::Rst));
    }
}

#[test]
fn a_driver_that_repeats_move_harms_no_connection() {
    let daemon = TestDaemon::with(2, tune);
    let listener = daemon.host_listener(PORT);
    let mut guest = PairsGuest::attach(&daemon.vms[0].socket, 3, PORT);
    let to = Address::new(Cid::HOST, Port::new(PORT));
    let (bad, good) = (guest.connect(6000, to), guest.connect(6001, to));
    until(&mut [&mut guest], |guests| {
        guests[0].conns[bad].connected && guests[0].conns[good].connected
    });
    let mut programs = [listener.accept().unwrap().0, listener.accept().unwrap().0];
    let (pair, _) = guest.conns[bad].at.unwrap();
    for n in 0..200 {
        let header = move_header(&guest, 6000, (u32::from(pair) + 1 + n % 2) % 3);
        while !guest.raw.may_send_on(pair) {
            std::thread::yield_now();
        }
        guest.raw.send_on(pair, &header, &[]);
    }
    // Its answers wait for buffers, and no payload is lost.
    for program in &mut programs {
        program.write_all(b"hello").unwrap();
    }
    until(&mut [&mut guest], |guests| {
        [good, bad]
            .iter()
            .all(|&conn| guests[0].conns[conn].received == b"hello")
    });
    drop(guest);
    // The device is free for the next front-end.
    let mut guest = PairsGuest::attach(&daemon.vms[0].socket, 3, PORT);
    let conn = guest.connect(6000, to);
    until(&mut [&mut guest], |guests| guests[0].conns[conn].connected);
}

#[test]
fn queue_pairs_are_chosen_once_and_within_bounds() {
    use crate::common::raw::set_queue_pairs;
    use zerosock::driver::FrontendError;
    use zerosock_proto::vsock::features::F_PAIRS;
    let daemon = TestDaemon::with(1, tune);
    let mut frontend = crate::common::raw::connect(&daemon.vms[0].socket);
    let protocol = vhost::vhost_user::message::VhostUserProtocolFeatures::all();
    frontend.negotiate(1 << 32 | F_PAIRS, protocol).unwrap();
    let mut max_pairs = [0; 2];
    frontend.read_config(8, &mut max_pairs).unwrap();
    assert_eq!(u16::from_le_bytes(max_pairs), 3);
    assert_eq!(frontend.get_queue_num().unwrap(), 7);
    for wrong in [0, 4, 17, u16::MAX] {
        let refused = set_queue_pairs(&mut frontend, wrong).unwrap_err();
        assert!(
            matches!(refused, FrontendError::Refused { .. }),
            "{refused}"
        );
    }
    // Queues beyond those in use cannot be set up.
    assert!(frontend.set_vring_num(3, 64).is_err());
    set_queue_pairs(&mut frontend, 2).unwrap();
    frontend.set_vring_num(4, 64).unwrap();
    assert!(frontend.set_vring_num(5, 64).is_err());
}

#[test]
fn a_type_that_does_not_match_moves_nothing() {
    let daemon = TestDaemon::with(1, tune);
    let path = daemon.uds_path();
    let mut guest = PairsGuest::attach(&daemon.vms[0].socket, 3, PORT);
    let program = std::thread::spawn(move || connect_guest(&path, PORT).unwrap());
    until(&mut [&mut guest], |guests| {
        guests[0].conns.len() == 1 && program.is_finished()
    });
    let (pair, flow) = guest.conns[0].at.unwrap();
    let info = guest.shards[usize::from(pair)].flow(flow).unwrap();
    let header = Repr {
        src: info.local,
        dst: info.peer,
        socket_type: SocketType::SeqPacket.into(),
        flags: u32::from((pair + 1) % 3),
        ..guest.raw.header(0, 0, Op::Move)
    };
    guest.raw.send_on(pair, &header, &[]);
    assert_eq!(next(&mut guest, pair).op.known(), Some(Op::Rst));
    program.join().unwrap().write_all(b"as before").unwrap();
    until(&mut [&mut guest], |guests| {
        guests[0].conns[0].received == b"as before"
    });
}

#[test]
fn a_datagram_through_another_pair_than_the_first_is_dropped() {
    let daemon = TestDaemon::with(1, tune);
    let mut guest = PairsGuest::attach(&daemon.vms[0].socket, 3, PORT);
    let datagram = Repr {
        socket_type: SocketType::Datagram.into(),
        flags: 1,
        ..guest.raw.header(6000, PORT, Op::Rw)
    };
    for pair in [1, 2] {
        guest.raw.send_on(pair, &datagram, &[]);
        // The packets after it are answered, it is not.
        let header = move_header(&guest, 6000, 0);
        guest.raw.send_on(pair, &header, &[]);
        let answer = next(&mut guest, pair);
        assert_eq!(
            answer.socket_type.known(),
            Some(SocketType::Stream),
            "{answer}"
        );
        assert_eq!(answer.op.known(), Some(Op::Rst));
    }
}

#[test]
fn a_driver_that_sends_after_move_gets_every_buffer_back() {
    let daemon = TestDaemon::with(2, tune);
    let mut one = PairsGuest::attach(&daemon.vms[0].socket, 3, PORT);
    let mut two = PairsGuest::attach(&daemon.vms[1].socket, 3, PORT);
    let conn = one.connect(6000, Address::new(two.raw.cid, Port::new(PORT)));
    until(&mut [&mut one, &mut two], |guests| {
        guests[0].conns[conn].connected && !guests[1].conns.is_empty()
    });
    let (pair, flow) = one.conns[conn].at.unwrap();
    let info = one.shards[usize::from(pair)].flow(flow).unwrap();
    let header = |op: Op, flags, len| Repr {
        src: info.local,
        dst: info.peer,
        len,
        socket_type: SocketType::Stream.into(),
        op: op.into(),
        flags,
        buf_alloc: 16384,
        fwd_cnt: 0,
    };
    // Bytes, MOVE, bytes, without a pause: an older driver would wait for the answer.
    for n in 0..16 {
        while !one.raw.may_send_on(pair) {
            two.pump();
        }
        let kind = if n % 4 == 2 { Op::Move } else { Op::Rw };
        match kind {
            Op::Move => one
                .raw
                .send_on(pair, &header(kind, u32::from((pair + 1) % 3), 0), &[]),
            _ => one.raw.send_on(pair, &header(kind, 0, 500), &[7; 500]),
        }
    }
    // Whatever happens to the connection, every buffer returns, and the queues can be stopped.
    until(&mut [&mut two], |_| {
        (0..3).all(|pair| one.raw.is_idle_on(pair))
    });
    for queue in 0..7 {
        one.raw.frontend.get_vring_base(queue).unwrap();
    }
}
