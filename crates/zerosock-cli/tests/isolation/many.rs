//! One VM that hands over more descriptors than the reaper has threads.

use std::io::Read;
use std::os::unix::net::UnixStream;

use super::daemon::{ATTACKER, Daemon};
use super::lingering::lingering_socket;
use super::neighbour::Neighbour;
use super::process::{DEADLINE, wait_until};
use super::raw::{GET_FEATURES, Way};
use super::threads::{Held, REAPER, count_held};

use zerosock_sys::reaper::{MAX_STUCK_EACH, MAX_THREADS};

#[test]
fn more_lingering_sockets_than_reaper_threads_leave_threads_for_the_neighbour() {
    let daemon = Daemon::start(&[]);
    let mut neighbour = Neighbour::new(&daemon);
    let pairs = (0..MAX_THREADS + 20).map(|_| lingering_socket());
    let (sockets, receivers): (Vec<_>, Vec<_>) = pairs.unzip();
    let frontend = daemon.frontend(ATTACKER);
    let attacker = daemon.pass(frontend, Way::With(GET_FEATURES), sockets);
    wait_until("as many held threads as one VM may have", || {
        count_held(daemon.pid(), REAPER) >= MAX_STUCK_EACH
    });
    let held = Held::wait(daemon.pid(), REAPER);
    // The neighbour's own descriptors are closed.
    for _ in 0..3 {
        let (passed, mut other) = UnixStream::pair().unwrap();
        other.set_read_timeout(Some(DEADLINE)).unwrap();
        neighbour.pass_unwanted(passed.into());
        assert_eq!(other.read(&mut [0; 1]).unwrap(), 0);
    }
    neighbour.goes_on_while(&daemon, &held);
    assert_eq!(count_held(daemon.pid(), REAPER), MAX_STUCK_EACH);
    drop((attacker, receivers));
    wait_until("all sockets to be closed", || {
        count_held(daemon.pid(), REAPER) == 0
    });
    neighbour.round_trip(3);
}
