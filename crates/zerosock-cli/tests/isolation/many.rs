//! One VM that hands over more descriptors than the reaper has threads.

use std::io::Read;
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use super::daemon::{ATTACKER, Daemon};
use super::lingering::lingering_socket;
use super::neighbour::Neighbour;
use super::process::{DEADLINE, wait_until};
use super::raw::{GET_FEATURES, RawFrontend, Way};
use super::threads::{Held, REAPER, count_held};

use zerosock_sys::reaper::{MAX_STUCK_EACH, MAX_THREADS};

/// So many that they would take all threads.
fn pairs() -> (Vec<OwnedFd>, Vec<TcpStream>) {
    (0..MAX_THREADS + 20).map(|_| lingering_socket()).unzip()
}

/// The attacker holds as many threads as one VM may; the neighbour's descriptors are closed.
fn expect_threads_for_the_neighbour(
    daemon: &Daemon,
    neighbour: &mut Neighbour,
    receivers: Vec<TcpStream>,
) {
    wait_until("as many held threads as one VM may have", || {
        count_held(daemon.pid(), REAPER) >= MAX_STUCK_EACH
    });
    let held = Held::wait(daemon.pid(), REAPER);
    for _ in 0..3 {
        let (passed, mut other) = UnixStream::pair().unwrap();
        other.set_read_timeout(Some(DEADLINE)).unwrap();
        neighbour.pass_unwanted(passed.into());
        assert_eq!(other.read(&mut [0; 1]).unwrap(), 0);
    }
    neighbour.goes_on_while(daemon, &held);
    assert_eq!(count_held(daemon.pid(), REAPER), MAX_STUCK_EACH);
    drop(receivers);
    wait_until("all sockets to be closed", || {
        count_held(daemon.pid(), REAPER) == 0
    });
    neighbour.round_trip(3);
}

#[test]
fn more_lingering_sockets_than_reaper_threads_leave_threads_for_the_neighbour() {
    let daemon = Daemon::start(&[]);
    let mut neighbour = Neighbour::new(&daemon);
    let (sockets, receivers) = pairs();
    let frontend = daemon.frontend(ATTACKER);
    let _attacker = daemon.pass(frontend, Way::With(GET_FEATURES), sockets);
    expect_threads_for_the_neighbour(&daemon, &mut neighbour, receivers);
}

/// The kernel closes what is queued in a socket when the socket is closed.
#[test]
fn front_ends_turned_away_with_lingering_sockets_leave_threads_for_the_neighbour() {
    let daemon = Daemon::start(&[]);
    let mut neighbour = Neighbour::new(&daemon);
    let _first = daemon.frontend(ATTACKER);
    let (sockets, receivers) = pairs();
    let connect = || RawFrontend(UnixStream::connect(daemon.socket(ATTACKER)).unwrap());
    let turned_away = daemon.while_stopped(|| {
        let each = sockets.into_iter();
        let pass = |socket| connect().pass(Way::With(GET_FEATURES), vec![socket]);
        each.filter_map(pass).collect::<Vec<_>>()
    });
    expect_threads_for_the_neighbour(&daemon, &mut neighbour, receivers);
    drop(turned_away);
}
