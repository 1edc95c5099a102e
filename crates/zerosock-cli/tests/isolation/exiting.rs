//! A front-end that sends its own socket over that socket and exits.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::Command;

use super::daemon::{ATTACKER, Daemon};
use super::neighbour::Neighbour;
use super::raw::{RawFrontend, WAYS};

/// Environment variable of the exiting process: the path to connect to.
const SOCKET: &str = "ZEROSOCK_TEST_EXITING_SOCKET";
/// Environment variable of the exiting process: the index of the way in [`WAYS`].
const WAY: &str = "ZEROSOCK_TEST_EXITING_WAY";

#[test]
fn a_front_end_that_sent_its_own_socket_and_exited_is_disconnected() {
    let daemon = Daemon::start(&[]);
    let mut neighbour = Neighbour::new(&daemon);
    for (index, way) in WAYS.iter().enumerate() {
        eprintln!("{way:?}");
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "exiting::send_own_socket_and_exit", "--ignored"]);
        child.env(SOCKET, daemon.socket(ATTACKER));
        let status = child.env(WAY, index.to_string()).status().unwrap();
        assert_eq!(status.code(), Some(EXITED));
        let next = daemon.frontend(ATTACKER);
        assert!(next.ask_features().is_some());
        neighbour.round_trip(0);
    }
}

/// Exit code of that process; a test program has another one.
const EXITED: i32 = 77;

#[test]
#[ignore = "ends the process; run by another test"]
fn send_own_socket_and_exit() {
    let socket = std::env::var_os(SOCKET).expect("run by another test");
    let way: usize = std::env::var(WAY).unwrap().parse().unwrap();
    let frontend = RawFrontend::connect(Path::new(&socket));
    let own = OwnedFd::from(frontend.0.try_clone().unwrap());
    let _open = frontend.pass(WAYS[way], vec![own]);
    std::process::exit(EXITED);
}
