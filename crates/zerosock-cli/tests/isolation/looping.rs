//! A front-end that sends messages with descriptors without end, of which none can be closed.

use std::fs;
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::daemon::{ATTACKER, Daemon};
use super::lingering::lingering_socket;
use super::neighbour::Neighbour;
use super::process::wait_until;
use super::raw::{GET_FEATURES, SET_OWNER, message};
use super::threads::{Held, REAPER};

/// More jobs than may wait for the stuck ones of the same VM.
const STUCK: usize = 64;

const LONG: Timespec = Timespec {
    tv_sec: 60,
    tv_nsec: 0,
};

fn open_files(daemon: &Daemon) -> usize {
    let files = fs::read_dir(format!("/proc/{}/fd", daemon.pid())).unwrap();
    files.count()
}

#[test]
fn nothing_is_received_from_a_vm_whose_descriptors_are_not_closed() {
    let daemon = Daemon::start(&[]);
    let mut neighbour = Neighbour::new(&daemon);
    let before = open_files(&daemon);
    let frontend = daemon.frontend(ATTACKER);
    let unwanted = message(SET_OWNER, &[]);
    let (sockets, receivers): (Vec<OwnedFd>, Vec<TcpStream>) =
        (0..STUCK).map(|_| lingering_socket()).unzip();
    // The daemon has the only copies.
    daemon.while_stopped(|| {
        for socket in sockets {
            frontend.send(&unwanted, &[socket.as_fd()]).unwrap();
        }
    });
    let (pipe, _other) = rustix::pipe::pipe().unwrap();
    wait_until("the end of the connection", || {
        let _ = frontend.send(&unwanted, &[pipe.as_fd()]);
        let mut fds = [PollFd::new(&frontend.0, PollFlags::empty())];
        poll(&mut fds, Some(&Timespec::default())).unwrap() == 1
    });
    wait_until("the reason in the log", || {
        let log = daemon.running.stderr();
        log.contains("descriptors that the front-end has sent wait to be closed")
    });
    drop(frontend);
    let held = Held::wait(daemon.pid(), REAPER);
    neighbour.goes_on_while(&daemon, &held);
    assert!(open_files(&daemon) <= before + 2 * STUCK);

    // The next front-end waits meanwhile.
    let late = UnixStream::connect(daemon.socket(ATTACKER)).unwrap();
    rustix::io::write(&late, &message(GET_FEATURES, &[])).unwrap();
    neighbour.goes_on_while(&daemon, &held);
    let mut fds = [PollFd::new(&late, PollFlags::IN)];
    assert_eq!(poll(&mut fds, Some(&Timespec::default())).unwrap(), 0);
    drop(receivers);
    assert_eq!(poll(&mut fds, Some(&LONG)).unwrap(), 1);
    drop(late);
    assert!(daemon.frontend(ATTACKER).ask_features().is_some());
    neighbour.round_trip(1);
}
