//! The plan of most tests: a descriptor that cannot be closed is handed over, and the neighbour goes
//! on.

use std::os::fd::OwnedFd;

use super::daemon::{ATTACKER, Daemon};
use super::neighbour::Neighbour;
use super::raw::Way;
use super::threads::{Held, REAPER};

/// A front-end hands over a descriptor. Dropping what comes with it ends the wait for its close.
pub(crate) fn attack<R>(way: Way, make: impl FnOnce(&Daemon) -> (OwnedFd, R)) {
    let daemon = Daemon::start(&[]);
    let mut neighbour = Neighbour::new(&daemon);
    neighbour.round_trip(1);
    // Dropped before the daemon, should the test fail: a process with a held thread may not end.
    let (fd, release) = make(&daemon);
    let attacker = daemon.pass(daemon.frontend(ATTACKER), way, vec![fd]);
    let held = Held::wait(daemon.pid(), REAPER);
    neighbour.goes_on_while(&daemon, &held);
    drop(attacker);
    // The attacker's place is free as well.
    assert!(daemon.frontend(ATTACKER).ask_features().is_some());
    held.check();
    drop(release);
    held.wait_for_end();
    neighbour.round_trip(2);
}
