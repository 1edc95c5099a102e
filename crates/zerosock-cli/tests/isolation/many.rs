//! One VM that sends more descriptors than the reaper has threads.

use std::io::Read;
use std::net::TcpStream;
use std::os::unix::net::UnixStream;

use zerosock_sys::reaper::MAX_STUCK_EACH;

use super::attack::{Attack, be_turned_away, hand_over_many};
use super::daemon::Daemon;
use super::neighbour::Neighbour;
use super::process::{DEADLINE, wait_until};
use super::threads::{REAPER, count_held};

/// The attacker blocks its share of the threads; the neighbour's descriptors are still closed.
fn expect_threads_for_the_neighbour<A>(start: impl FnOnce(&Daemon) -> Attack<A, Vec<TcpStream>>) {
    let daemon = Daemon::start(&[]);
    let mut neighbour = Neighbour::new(&daemon);
    let attack = start(&daemon);
    for _ in 0..3 {
        let (passed, mut other) = UnixStream::pair().unwrap();
        other.set_read_timeout(Some(DEADLINE)).unwrap();
        neighbour.pass_unwanted(passed.into());
        assert_eq!(other.read(&mut [0; 1]).unwrap(), 0);
    }
    neighbour.goes_on_while(&daemon, &attack.held);
    assert_eq!(count_held(daemon.pid(), REAPER), MAX_STUCK_EACH);
    drop(attack.release);
    wait_until("all sockets to be closed", || {
        count_held(daemon.pid(), REAPER) == 0
    });
    neighbour.round_trip(3);
}

#[test]
fn more_lingering_sockets_than_reaper_threads_leave_threads_for_the_neighbour() {
    expect_threads_for_the_neighbour(hand_over_many);
}

#[test]
fn front_ends_turned_away_with_lingering_sockets_leave_threads_for_the_neighbour() {
    expect_threads_for_the_neighbour(be_turned_away);
}
