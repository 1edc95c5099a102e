//! A process that sends its own end of the connection and exits.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::Command;

use super::daemon::{ATTACKER, Daemon};
use super::neighbour::Neighbour;
use super::raw::{RawFrontend, WAYS};

/// Tells the exiting process where to connect, and which of [`WAYS`] to use.
const SOCKET: &str = "ZEROSOCK_TEST_EXITING_SOCKET";
const WAY: &str = "ZEROSOCK_TEST_EXITING_WAY";

#[test]
fn place_of_a_process_that_handed_in_its_own_end_and_exited_is_free_again() {
    let daemon = Daemon::start(&[]);
    let mut neighbour = Neighbour::new(&daemon);
    for (index, way) in WAYS.iter().enumerate() {
        eprintln!("{way:?}");
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "exiting::hand_in_and_exit", "--ignored"]);
        child.env(SOCKET, daemon.socket(ATTACKER));
        let status = child.env(WAY, index.to_string()).status().unwrap();
        assert_eq!(status.code(), Some(EXITED));
        let next = daemon.frontend(ATTACKER);
        assert!(next.ask_features().is_some());
        neighbour.round_trip(0);
    }
}

/// Not the exit code of a test program.
const EXITED: i32 = 77;

#[test]
#[ignore = "ends the process; run by another test"]
fn hand_in_and_exit() {
    let socket = std::env::var_os(SOCKET).expect("run by another test");
    let way: usize = std::env::var(WAY).unwrap().parse().unwrap();
    let frontend = RawFrontend::connect(Path::new(&socket));
    let own = OwnedFd::from(frontend.0.try_clone().unwrap());
    let _open = frontend.pass(WAYS[way], vec![own]);
    std::process::exit(EXITED);
}
