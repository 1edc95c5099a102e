//! A device chooses another source port when two addresses already have a connection.

use std::collections::HashSet;
use std::thread;

use crate::common::driver::{Address, Cid, Driver, Port, StreamState};
use zerosock::daemon::DaemonConfig;
use zerosock_proto::vsock::ConnectError;
use zerosock_proto::wire::vsock::Op;

use super::guest::{PairsGuest, until};
use crate::common::{TestDaemon, connect_guest, deadline, host_listener};
use crate::hosting::Hosted;

const PORT: u32 = 7000;
/// Consecutive ports of the host that are in use: some of each pair.
const TAKEN: u32 = 24;

fn tune(config: &mut DaemonConfig) {
    config.workers = 2;
    config.queue_pairs = 3;
}

/// The guest connects from the port on which it listens to `TAKEN` ports of the host from `first`
/// on: for a connect from one of those, the addresses are in use.
fn take_ports(guest: &mut PairsGuest, first: u32) {
    let mut asked = HashSet::new();
    for port in first..first + TAKEN {
        let to = Address::new(Cid::HOST, Port::new(port));
        let pair = guest.pair_of(Port::new(PORT), to);
        while !guest.raw.may_send_on(pair) {
            thread::yield_now();
        }
        let request = guest.raw.header(PORT, port, Op::Request);
        guest.raw.send_on(pair, &request, &[]);
        asked.insert(to.port);
    }
    // The guest's shards have no such connections, and must not see the answers.
    let give_up = deadline();
    while !asked.is_empty() {
        for pair in 0..3 {
            while let Some((header, _)) = guest.raw.try_recv_on(pair) {
                assert_eq!(header.op.known(), Some(Op::Response), "{header}");
                assert!(asked.remove(&header.src.port));
            }
        }
        assert!(std::time::Instant::now() < give_up, "{asked:?}");
        thread::yield_now();
    }
}

/// The peer's port of the guest's latest connection.
fn last_port(guest: &PairsGuest) -> u32 {
    let (pair, flow) = guest.conns.last().unwrap().at.unwrap();
    let info = guest.shards[usize::from(pair)].flow(flow).unwrap();
    assert_eq!(pair, guest.pair_of(info.local.port, info.peer));
    info.peer.port.get()
}

#[test]
fn a_host_program_reaches_its_guest_although_the_next_ports_are_taken() {
    let daemon = TestDaemon::with(1, tune);
    let mut guest = PairsGuest::attach(&daemon.vms[0].socket, 3, PORT);
    let call = |guest: &mut PairsGuest| {
        let path = daemon.uds_path();
        let before = guest.conns.len();
        let program = thread::spawn(move || connect_guest(&path, PORT));
        until(&mut [&mut *guest], |_| program.is_finished());
        let program = program.join().unwrap().expect("it is connected");
        assert_eq!(guest.conns.len(), before + 1);
        program
    };
    let mut programs = vec![call(&mut guest)];
    let first = last_port(&guest) + 1;
    let taken = first..first + TAKEN;
    let _listeners: Vec<_> = taken
        .clone()
        .map(|port| daemon.host_listener(port))
        .collect();
    take_ports(&mut guest, first);
    for _ in 0..6 {
        programs.push(call(&mut guest));
        assert!(!taken.contains(&last_port(&guest)));
    }
}

#[test]
fn a_program_reaches_its_guest_although_the_next_ports_are_taken() {
    let hosted = Hosted::tuned(|builder| builder.queue_pairs(3));
    let mut guest = PairsGuest::attach(hosted.socket_path(0), 3, PORT);
    let to = Address::new(guest.raw.cid, Port::new(PORT));
    let mut streams = vec![hosted.begin_connect(to).unwrap()];
    until(&mut [&mut guest], |guests| guests[0].conns.len() == 1);
    let first = last_port(&guest) + 1;
    let taken = first..first + TAKEN;
    let listen = |port| hosted.listen(Port::new(port), 4).unwrap();
    let _listeners: Vec<_> = taken.clone().map(listen).collect();
    take_ports(&mut guest, first);
    for n in 1..7 {
        streams.push(hosted.begin_connect(to).unwrap());
        until(&mut [&mut guest], |guests| guests[0].conns.len() == n + 1);
        assert!(!taken.contains(&last_port(&guest)));
    }
}

#[test]
fn a_driver_finds_a_port_although_the_next_one_is_taken() {
    let daemon = TestDaemon::with(1, tune);
    let listener = daemon.host_listener(PORT);
    let mut driver = daemon.guest_of(0, |config| config.queue_pairs = 3);
    let end = deadline();
    let to = Address::new(Cid::HOST, Port::new(PORT));
    let stream = driver.wait_connect(to, end).unwrap();
    let _program = listener.accept().unwrap();
    let next = driver.addresses(stream).unwrap().0.port.get() + 1;

    // A host program has a connection with the next port, which has no listener any more.
    driver.listen(Port::new(next), 4).unwrap();
    let path = daemon.uds_path();
    let program = thread::spawn(move || connect_guest(&path, next).unwrap());
    let accepted = driver.wait_accept(Port::new(next), end).unwrap();
    driver.unlisten(Port::new(next));
    while !program.is_finished() {
        driver.drive().unwrap();
    }
    let (ours, theirs) = driver.addresses(accepted).unwrap();
    assert_eq!(ours.port.get(), next);

    let listener = host_listener(&daemon.uds_path(), theirs.port.get());
    let again = driver.wait_connect(theirs, end).expect("another port");
    let (other, _) = driver.addresses(again).unwrap();
    assert!(other.port.get() > next, "{other:?}");
    let _second = listener.accept().unwrap();
    drop(program.join().unwrap());
}

#[test]
fn two_addresses_have_one_connection() {
    let daemon = TestDaemon::with(1, tune);
    let listener = daemon.host_listener(PORT);
    let mut driver = daemon.guest_of(0, |config| config.queue_pairs = 3);
    let end = deadline();
    let to = Address::new(Cid::HOST, Port::new(PORT));
    let from = Port::new(6000);
    let stream = driver.connect_from(from, to).unwrap();
    let connected =
        |driver: &mut Driver| (driver.state(stream) == Some(StreamState::Connected)).then_some(());
    driver.wait_until(end, connected).unwrap().unwrap();
    let _program = listener.accept().unwrap();
    assert_eq!(driver.connect_from(from, to), Err(ConnectError::InUse));
}
