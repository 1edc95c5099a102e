//! Paths of host programs that lead through links and file systems of another user, or to sockets of the
//! daemon.

use std::fs::{self, File, Permissions};
use std::io::{self, Read};
use std::net::TcpStream;
use std::os::unix::fs::{PermissionsExt, lchown, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;
use zerosock::{Address, Cid, Port};

use super::daemon::{ATTACKER, Alone, Daemon, NEIGHBOUR, alone, command};
use super::fuse::{mount_silent, not_asked_for};
use super::neighbour::{Neighbour, deadline};
use super::process::{DEADLINE, Running, wait_until, zerosock};

/// The user that does not answer.
const USER: u32 = 65534;

/// A directory with `real/svc`, a socket; `silent`, where the user has mounted what answers nothing;
/// `shared/link`, a link of the user to that; and `ours`, a link of our own to `real`.
struct Paths {
    dir: TempDir,
    program: UnixListener,
    alone: Alone,
}

impl Paths {
    /// Err: why there are none.
    fn new() -> Result<Paths, String> {
        if let Some(reason) = not_asked_for() {
            return Err(reason);
        }
        let alone = alone();
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for name in ["shared", "silent", "real"] {
            fs::create_dir(at(name)).unwrap();
        }
        fs::set_permissions(at("shared"), Permissions::from_mode(0o1777)).unwrap();
        symlink(at("silent"), at("shared/link")).unwrap();
        let given = lchown(at("shared/link"), Some(USER), Some(USER));
        given.map_err(|error| format!("cannot give a link away: {error}"))?;
        symlink("real", at("ours")).unwrap();
        let program = UnixListener::bind(at("real/svc")).unwrap();
        Ok(Paths {
            dir,
            program,
            alone,
        })
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Starts a command that sees the mount, which is there until the file is closed.
    fn start(&self, mut command: Command) -> Result<(Running, File), String> {
        let silent = self.at("silent");
        // A thread of its own: it leaves the mount namespace of the others, and takes the process along.
        let started = std::thread::spawn(move || {
            let device = mount_silent(&silent, USER)?;
            io::Result::Ok((Running::start(&mut command), device))
        });
        let started = started.join().unwrap();
        started.map_err(|error| format!("no FUSE: {error}"))
    }
}

/// Lines that name the component at which each path ends.
fn reasons(dir: &Path) -> [String; 2] {
    let at = |name: &str| dir.join(name).display().to_string();
    [
        format!("{}: a symbolic link of user {USER}", at("shared/link")),
        format!("{}: a file system of user {USER} (FUSE)", at("silent")),
    ]
}

#[test]
fn serve_refuses_paths_through_links_and_mounts_of_another_user_and_no_guest_waits() {
    if let Err(reason) = serve_refuses_paths() {
        println!("SKIPPED serve_refuses_paths_through_links_and_mounts: {reason}");
    }
}

fn serve_refuses_paths() -> Result<(), String> {
    let paths = Paths::new()?;
    // A service of the attacker.
    let service = paths.at("vm3.vsock_13");
    symlink(paths.at("silent/svc"), &service).unwrap();
    lchown(&service, Some(USER), Some(USER)).unwrap();
    let mut command = command(paths.dir.path());
    for (port, path) in [(9, "shared/link/svc"), (10, "silent/svc"), (11, "ours/svc")] {
        let rule = format!("{port}=unix:{}", paths.at(path).display());
        command.args(["--forward", &rule]);
    }
    let (running, _device) = paths.start(command)?;
    let Paths {
        dir,
        program,
        alone,
    } = paths;
    let daemon = Daemon::with(running, dir, alone);
    let mut neighbour = Neighbour::new(&daemon);
    let mut attacker = daemon.attach(ATTACKER);
    for (round, port) in [9, 10, 13, 9, 10, 13].into_iter().enumerate() {
        let to = Address::new(Cid::HOST, Port::new(port));
        let refused = attacker.wait_connect(to, deadline());
        assert!(refused.is_err(), "port {port}: {refused:?}");
        neighbour.round_trip(round as u8);
        neighbour.ask_features();
    }
    // Links of our own are followed.
    let to = Address::new(Cid::HOST, Port::new(11));
    attacker.wait_connect(to, deadline()).unwrap();
    program.accept().unwrap();
    for reason in reasons(daemon.dir.path()) {
        wait_until(&reason, || daemon.running.stderr().contains(&reason));
    }
    Ok(())
}

#[test]
fn relay_refuses_paths_through_links_and_mounts_of_another_user_and_waits_for_none() {
    let of_links = |reason: &[String; 2]| reason[0].clone();
    let of_mounts = |reason: &[String; 2]| reason[1].clone();
    let refused = [
        ("shared/link/svc", of_links as fn(&[String; 2]) -> String),
        ("silent/svc", of_mounts),
    ];
    for (path, reason) in refused {
        if let Err(reason) = relay_refuses(path, reason) {
            return println!("SKIPPED relay_refuses_paths_through_links_and_mounts: {reason}");
        }
    }
}

fn relay_refuses(path: &str, reason: fn(&[String; 2]) -> String) -> Result<(), String> {
    let paths = Paths::new()?;
    let mut command = zerosock();
    command.args(["relay", "--workers", "1", "tcp-listen:127.0.6.1:0"]);
    command.arg(format!("unix:{}", paths.at(path).display()));
    let (relay, _device) = paths.start(command)?;
    let address = || {
        let said = relay.stderr();
        let rest = said.split("address=127.0.6.1:").nth(1)?;
        let port = rest.split(|it: char| !it.is_ascii_digit()).next()?;
        Some(format!("127.0.6.1:{port}"))
    };
    wait_until("the address", || address().is_some());
    // With the first client the worker would wait; the second one shows that it does not.
    for _ in 0..2 {
        let mut client = TcpStream::connect(address().unwrap()).unwrap();
        client.set_read_timeout(Some(DEADLINE)).unwrap();
        let ended = client.read(&mut [0]);
        let timed_out = io::ErrorKind::WouldBlock;
        assert!(!matches!(&ended, Err(error) if error.kind() == timed_out));
    }
    let reason = reason(&reasons(paths.dir.path()));
    wait_until(&reason, || relay.stderr().contains(&reason));
    Ok(())
}

/// Their names are no names of ports of the attacker, so that `serve` starts.
#[test]
fn no_guest_reaches_a_socket_of_the_daemon_as_a_host_program() {
    let daemon = Daemon::start(&[]);
    let mut neighbour = Neighbour::new(&daemon);
    let service = |port| daemon.service(ATTACKER, Port::new(port));
    fs::hard_link(daemon.hybrid(NEIGHBOUR), service(77)).unwrap();
    fs::hard_link(daemon.socket(NEIGHBOUR), service(78)).unwrap();
    symlink(daemon.hybrid(NEIGHBOUR), service(79)).unwrap();
    let mut attacker = daemon.attach(ATTACKER);
    for port in [77, 78, 79] {
        let to = Address::new(Cid::HOST, Port::new(port));
        let refused = attacker.wait_connect(to, deadline());
        assert!(refused.is_err(), "port {port}: {refused:?}");
    }
    neighbour.round_trip(0);
    // A program's own socket is reached as before.
    let program = UnixListener::bind(service(80)).unwrap();
    let to = Address::new(Cid::HOST, Port::new(80));
    attacker.wait_connect(to, deadline()).unwrap();
    program.accept().unwrap();
}
