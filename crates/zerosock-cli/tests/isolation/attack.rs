//! Attacks that block a thread of the daemon, and the steps of most tests: the neighbour makes
//! progress meanwhile.

use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use super::driver::Driver;
use rustix::event::{EventfdFlags, eventfd};
use zerosock_sys::reaper::{MAX_STUCK_EACH, MAX_THREADS};

use super::daemon::{ATTACKER, Daemon};
use super::lingering::lingering_socket;
use super::neighbour::Neighbour;
use super::pipe_lock::PipeLock;
use super::process::wait_until;
use super::raw::{GET_FEATURES, RawFrontend, SET_VRING_CALL, Way, send_by};
use super::threads::{CALL, Held, REAPER, count_held};

/// A running attack. Drop it before the daemon: a process with a blocked thread may not end.
pub(crate) struct Attack<A, R> {
    pub(crate) attacker: A,
    pub(crate) held: Held,
    /// Dropping it releases the blocked threads.
    pub(crate) release: R,
}

/// A front-end sends a descriptor that cannot be closed before `release` is dropped.
pub(crate) fn hand_over<R>(
    daemon: &Daemon,
    way: Way,
    (fd, release): (OwnedFd, R),
) -> Attack<Option<RawFrontend>, R> {
    let attacker = daemon.pass(daemon.frontend(ATTACKER), way, vec![fd]);
    Attack {
        attacker,
        held: Held::wait(daemon.pid(), REAPER),
        release,
    }
}

/// A guest sends a pipe with its lock held as call descriptor. The daemon notifies it at once,
/// since the queue is running.
pub(crate) fn hand_over_pipe(
    daemon: &Daemon,
    (pipe, release): (OwnedFd, PipeLock),
) -> Attack<Driver, PipeLock> {
    let mut attacker = daemon.attach(ATTACKER);
    let index = 0u64.to_ne_bytes();
    send_by(&mut attacker, SET_VRING_CALL, &index, &[pipe.as_fd()]);
    drop(pipe);
    Attack {
        attacker,
        held: Held::wait(daemon.pid(), CALL),
        release,
    }
}

/// A front-end sends a pipe with its lock held as call descriptor, and then another descriptor in
/// its place: the daemon closes the pipe.
pub(crate) fn replace_pipe(
    daemon: &Daemon,
    (pipe, release): (OwnedFd, PipeLock),
) -> Attack<Option<RawFrontend>, PipeLock> {
    let way = Way::With(SET_VRING_CALL);
    let kept = daemon.frontend(ATTACKER).pass(way, vec![pipe]);
    let frontend = kept.expect("still connected");
    assert!(frontend.ask_features().is_some());
    let other = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    Attack {
        attacker: frontend.pass(way, vec![other]),
        held: Held::wait(daemon.pid(), REAPER),
        release,
    }
}

/// A front-end sends more lingering sockets than the reaper has threads.
pub(crate) fn hand_over_many(daemon: &Daemon) -> Attack<Option<RawFrontend>, Vec<TcpStream>> {
    let (sockets, release) = more_than_threads();
    let frontend = daemon.frontend(ATTACKER);
    Attack {
        attacker: daemon.pass(frontend, Way::With(GET_FEATURES), sockets),
        held: wait_for_most_threads(daemon),
        release,
    }
}

/// As many front-ends as there are lingering sockets connect while the device has a front-end:
/// closing a socket also closes the descriptors queued in it.
pub(crate) fn be_turned_away(daemon: &Daemon) -> Attack<Vec<RawFrontend>, Vec<TcpStream>> {
    let first = daemon.frontend(ATTACKER);
    let (sockets, release) = more_than_threads();
    let connect = || RawFrontend(UnixStream::connect(daemon.socket(ATTACKER)).unwrap());
    let turned_away = daemon.while_stopped(|| {
        let each = sockets.into_iter();
        let pass = |socket| connect().pass(Way::With(GET_FEATURES), vec![socket]);
        each.filter_map(pass).collect::<Vec<_>>()
    });
    Attack {
        attacker: [vec![first], turned_away].into_iter().flatten().collect(),
        held: wait_for_most_threads(daemon),
        release,
    }
}

/// Enough to block all threads.
fn more_than_threads() -> (Vec<OwnedFd>, Vec<TcpStream>) {
    (0..MAX_THREADS + 20).map(|_| lingering_socket()).unzip()
}

fn wait_for_most_threads(daemon: &Daemon) -> Held {
    wait_until("as many held threads as one VM may have", || {
        count_held(daemon.pid(), REAPER) >= MAX_STUCK_EACH
    });
    Held::wait(daemon.pid(), REAPER)
}

/// Steps of a test: `start` blocks a thread, and the neighbour makes progress until it is released.
pub(crate) fn expect_isolation<A, R>(start: impl FnOnce(&Daemon) -> Attack<A, R>) {
    let daemon = Daemon::start(&[]);
    let mut neighbour = Neighbour::new(&daemon);
    neighbour.round_trip(1);
    let Attack {
        attacker,
        held,
        release,
    } = start(&daemon);
    neighbour.goes_on_while(&daemon, &held);
    drop(attacker);
    // The attacker's device accepts a new front-end too.
    assert!(daemon.frontend(ATTACKER).ask_features().is_some());
    held.check();
    drop(release);
    held.wait_for_end();
    neighbour.round_trip(2);
}
