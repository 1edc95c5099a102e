//! A daemon with as few descriptors as it accepts, all of which are in use but its reserve, and
//! messages with as many descriptors as a message can have. If the reserve did not cover them, the
//! kernel would close the others in the receiving thread.

use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;
use zerosock::{Address, Cid, Port};
use zerosock_sys::fd_passing::MAX_FDS;

use super::daemon::{ATTACKER, Alone, Daemon, alone, command};
use super::lingering::lingering_socket;
use super::neighbour::{Neighbour, deadline};
use super::process::Running;
use super::raw::{GET_FEATURES, RawFrontend, message};
use super::threads::{Held, REAPER};

/// A VM that takes all descriptors that it can get.
const GREEDY: Cid = Cid::new(5);
const PORT: Port = Port::new(9);
/// Messages that are sent: the reserve is not for as many.
const MESSAGES: usize = 4;
/// Enough for all threads of the reaper that one VM may block.
const LINGERING: usize = 5;

/// `serve` with three VMs and this limit of descriptors.
fn start(dir: &Path, descriptors: usize) -> Running {
    let serve = command(dir);
    let mut shell = Command::new("sh");
    let script = format!("ulimit -n {descriptors}; exec \"$0\" \"$@\"");
    shell.args(["-c", &script]).arg(serve.get_program());
    let at = dir.join("vm5");
    let at = at.display();
    let vm = format!("guest-cid=5,socket={at}.sock,uds-path={at}.vsock");
    shell.args(serve.get_args()).args(["--vm", &vm]);
    Running::start(&mut shell)
}

/// The lowest limit that it accepts, as it says when it refuses a lower one.
fn least_descriptors(dir: &Path) -> usize {
    let refused = |descriptors| {
        let ended = start(dir, descriptors).finish();
        assert_eq!(ended.code, Some(1), "{}", ended.stderr);
        ended.stderr
    };
    let reason = refused(64);
    let (_, number) = reason.split_once("need at least ").expect("the number");
    let number: String = number.chars().take_while(char::is_ascii_digit).collect();
    let least = number.parse().unwrap();
    assert!(refused(least - 1).contains(&number));
    least
}

fn start_with_least() -> Daemon {
    let alone: Alone = alone();
    let dir: TempDir = tempfile::tempdir().unwrap();
    let least = least_descriptors(dir.path());
    Daemon::with(start(dir.path(), least), dir, alone)
}

/// As many descriptors as a message can have. The first ones use up the attacker's part of the
/// reaper, so that none is closed soon, and the last one is the first that would not be received.
fn send_most(frontend: &RawFrontend, pipe: BorrowedFd<'_>) -> Vec<TcpStream> {
    let (sockets, receivers): (Vec<OwnedFd>, Vec<_>) =
        (0..=LINGERING).map(|_| lingering_socket()).unzip();
    let (last, first) = sockets.split_last().unwrap();
    let mut fds: Vec<_> = first.iter().map(|fd| fd.as_fd()).collect();
    fds.resize(MAX_FDS - 1, pipe);
    fds.push(last.as_fd());
    let bytes = message(GET_FEATURES, &[]);
    assert_eq!(frontend.send(&bytes, &fds).unwrap(), bytes.len());
    receivers
}

#[test]
fn messages_with_most_descriptors_hold_only_the_reaper_when_few_are_left() {
    let daemon = start_with_least();
    let mut neighbour = Neighbour::new(&daemon);
    let program = UnixListener::bind(daemon.service(GREEDY, PORT)).unwrap();
    let mut greedy = daemon.attach(GREEDY);
    let mut ends = Vec::new();
    while greedy
        .wait_connect(Address::new(Cid::HOST, PORT), deadline())
        .is_ok()
    {
        ends.push(program.accept().unwrap());
    }
    assert!(!ends.is_empty());

    let (pipe, _other) = rustix::pipe::pipe().unwrap();
    let (frontends, receivers): (Vec<_>, Vec<_>) = daemon.while_stopped(|| {
        let send = |_| {
            let frontend = RawFrontend(UnixStream::connect(daemon.socket(ATTACKER)).unwrap());
            let receivers = send_most(&frontend, pipe.as_fd());
            (frontend, receivers)
        };
        (0..MESSAGES).map(send).unzip()
    });
    let held = Held::wait(daemon.pid(), REAPER);
    neighbour.goes_on_while(&daemon, &held);
    drop((frontends, receivers));
    held.wait_for_end();
    assert!(daemon.frontend(ATTACKER).ask_features().is_some());
    neighbour.round_trip(1);
    let log = daemon.running.stderr();
    assert!(!log.contains("Too many open files"), "{log}");
}
