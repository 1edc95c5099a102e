//! `zerosock serve` as a process: exit codes, sockets made and removed, signals, and the service
//! manager's conventions.
//!
//! What the devices do with a guest is tested elsewhere.

mod process;

use std::fs;
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use process::{DEADLINE, Running, wait_until, zerosock};

struct Room {
    dir: tempfile::TempDir,
}

impl Room {
    fn new() -> Room {
        Room {
            dir: tempfile::tempdir().unwrap(),
        }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn serve(&self) -> Command {
        let mut command = zerosock();
        command.arg("serve").arg("--socket").arg(self.at("control"));
        command.arg("--uds-path").arg(self.at("hybrid"));
        command
    }
}

fn wait_for_socket(path: &Path) {
    wait_until(&format!("{} to listen", path.display()), || {
        UnixStream::connect(path).is_ok()
    });
}

#[test]
fn both_sockets_are_there_while_it_runs_and_gone_after_either_signal() {
    for signal in ["TERM", "INT"] {
        let room = Room::new();
        let running = Running::start(&mut room.serve());
        wait_for_socket(&room.at("control"));
        wait_for_socket(&room.at("hybrid"));
        running.signal(signal);
        let ended = running.finish();
        assert_eq!(ended.code, Some(0), "SIG{signal}: {}", ended.stderr);
        assert!(
            ended.stderr.contains(&format!("SIG{signal}: stopping")),
            "{}",
            ended.stderr
        );
        assert!(!room.at("control").exists());
        assert!(!room.at("hybrid").exists());
    }
}

#[test]
fn a_second_server_on_the_same_path_is_refused_and_the_first_lives_on() {
    let room = Room::new();
    let first = Running::start(&mut room.serve());
    wait_for_socket(&room.at("hybrid"));
    let second = Running::start(&mut room.serve()).finish();
    assert_eq!(second.code, Some(1));
    let wanted = format!("{}: in use by a live process", room.at("control").display());
    assert!(second.stderr.contains(&wanted), "{}", second.stderr);
    wait_for_socket(&room.at("control"));
    first.signal("TERM");
    assert_eq!(first.finish().code, Some(0));
}

#[test]
fn the_sockets_of_a_killed_server_are_replaced() {
    let room = Room::new();
    let killed = Running::start(&mut room.serve());
    wait_for_socket(&room.at("hybrid"));
    killed.signal("KILL");
    assert_eq!(killed.finish().code, None);
    assert!(
        room.at("control").exists(),
        "a killed process removes nothing"
    );
    let next = Running::start(&mut room.serve());
    wait_for_socket(&room.at("hybrid"));
    next.signal("TERM");
    assert_eq!(next.finish().code, Some(0));
}

#[test]
fn a_file_in_the_way_is_left_alone_and_what_was_made_before_is_removed() {
    let room = Room::new();
    fs::write(room.at("hybrid"), "precious").unwrap();
    let ended = Running::start(&mut room.serve()).finish();
    assert_eq!(ended.code, Some(1));
    assert!(
        ended.stderr.contains("hybrid: exists and is not a socket"),
        "{}",
        ended.stderr
    );
    assert_eq!(fs::read_to_string(room.at("hybrid")).unwrap(), "precious");
    assert!(!room.at("control").exists());
}

#[test]
fn wrong_options_exit_with_2_and_touch_nothing() {
    let room = Room::new();
    for wrong in [
        ["--guest-cid", "2"],
        ["--queue-size", "1000"],
        ["--socket-mode", "rw"],
        ["--no-such-option", "x"],
        ["--ok-port", "both"],
    ] {
        let ended = Running::start(room.serve().args(wrong)).finish();
        assert_eq!(ended.code, Some(2), "{wrong:?}: {}", ended.stderr);
        assert!(
            ended.stderr.contains(wrong[0]),
            "{wrong:?}: {}",
            ended.stderr
        );
        assert!(ended.stdout.is_empty());
    }
    assert!(!room.at("control").exists());
    let long = room.at(&"x".repeat(120));
    let ended = Running::start(
        zerosock()
            .args(["serve", "--uds-path", "u", "--socket"])
            .arg(&long),
    )
    .finish();
    assert_eq!(ended.code, Some(2));
    assert!(ended.stderr.contains("holds 108"), "{}", ended.stderr);
}

#[test]
fn help_teaches_and_exits_with_0() {
    let ended = Running::start(zerosock().args(["serve", "--help"])).finish();
    assert_eq!(ended.code, Some(0));
    let help = String::from_utf8(ended.stdout).unwrap();
    for taught in [
        "--vm guest-cid=3,socket=",
        "memory-backend-memfd,id=mem,size=512M,share=on",
        "CONNECT PORT",
        "PATH_1234",
        "vhost-device-vsock's",
        "LISTEN_FDS",
    ] {
        assert!(help.contains(taught), "{taught} is missing in:\n{help}");
    }
    for words in [&["--version"][..], &["--help"], &["nc", "--help"]] {
        assert_eq!(
            Running::start(zerosock().args(words)).finish().code,
            Some(0),
            "{words:?}"
        );
    }
    assert_eq!(Running::start(&mut zerosock()).finish().code, Some(2));
}

#[test]
fn permissions_are_as_asked() {
    let room = Room::new();
    let running = Running::start(room.serve().args(["--socket-mode", "0620"]));
    for name in ["control", "hybrid"] {
        wait_for_socket(&room.at(name));
        let mode = fs::metadata(room.at(name)).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o620, "{name}");
    }
    running.signal("TERM");
    assert_eq!(running.finish().code, Some(0));
}

#[test]
fn a_link_named_like_the_peer_takes_the_peers_command_line() {
    let room = Room::new();
    let link = room.at("vhost-device-vsock");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_zerosock"), &link).unwrap();
    let vm = format!(
        "guest-cid=4,uds-path={},socket={},tx-buffer-size=65536,queue-size=1024",
        room.at("hybrid").display(),
        room.at("control").display()
    );
    let running = Running::start(Command::new(&link).args(["--vm", &vm]));
    wait_for_socket(&room.at("hybrid"));
    running.signal("TERM");
    assert_eq!(running.finish().code, Some(0));
}

#[test]
fn log_lines_are_json_when_asked() {
    let room = Room::new();
    let running = Running::start(room.serve().args(["--log-format", "json"]));
    wait_for_socket(&room.at("hybrid"));
    running.signal("TERM");
    let ended = running.finish();
    assert!(!ended.stderr.is_empty());
    for line in ended.stderr.lines() {
        let parsed: serde_json::Value = serde_json::from_str(line).unwrap();
        assert_eq!(parsed["level"], "INFO", "{line}");
    }
}

#[test]
fn the_service_manager_hears_ready_watchdog_and_stopping() {
    let room = Room::new();
    let manager = UnixDatagram::bind(room.at("notify")).unwrap();
    manager.set_read_timeout(Some(DEADLINE)).unwrap();
    let hear = || {
        let mut message = [0; 1024];
        let length = manager.recv(&mut message).unwrap();
        String::from_utf8(message[..length].to_vec()).unwrap()
    };
    let running = Running::start(
        room.serve()
            .env("NOTIFY_SOCKET", room.at("notify"))
            .env("WATCHDOG_USEC", "200000"),
    );
    let ready = hear();
    assert!(
        ready.contains("READY=1") && ready.contains("STATUS=serving CID 3"),
        "{ready}"
    );
    UnixStream::connect(room.at("hybrid")).expect("READY comes after the sockets");
    // A busy machine may have it say before that a thread has not answered yet.
    while !hear().contains("WATCHDOG=1") {}
    running.signal("TERM");
    while !hear().contains("STOPPING=1") {}
    assert_eq!(running.finish().code, Some(0));
}

/// Starts `command` with one or two sockets as descriptors 3 and 4, as systemd does.
///
/// A shell gets them as its standard input and output, moves them, says its own process id, and
/// becomes the program.
fn activated(command: &Command, names: &str, sockets: &[&UnixListener]) -> Running {
    let script = format!(
        "exec 3<&0 4<&1 0</dev/null 1>/dev/null
         export LISTEN_PID=$$ LISTEN_FDS={} LISTEN_FDNAMES={names}
         exec \"$@\"",
        sockets.len()
    );
    let copy = |index: usize| match sockets.get(index) {
        Some(socket) => Stdio::from(OwnedFd::from(socket.try_clone().unwrap())),
        None => Stdio::null(),
    };
    let mut shell = Command::new("sh");
    shell
        .args(["-c", &script, "sh"])
        .arg(command.get_program())
        .args(command.get_args());
    Running::start_with(shell.stdin(copy(0)).stdout(copy(1)))
}

#[test]
fn sockets_passed_in_are_used_by_path_or_name_and_left_in_place() {
    let room = Room::new();
    let control = UnixListener::bind(room.at("control")).unwrap();
    let elsewhere = UnixListener::bind(room.at("elsewhere")).unwrap();
    let running = activated(&room.serve(), "whatever:uds-path", &[&control, &elsewhere]);
    wait_until("the log line", || running.stderr().contains("serving"));
    running.signal("TERM");
    let ended = running.finish();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(
        !room.at("hybrid").exists(),
        "the one passed in by name stands in for it"
    );
    assert!(room.at("control").exists() && room.at("elsewhere").exists());
}

#[test]
fn a_socket_passed_in_for_no_vm_is_an_error() {
    let room = Room::new();
    let stray = UnixListener::bind(room.at("stray")).unwrap();
    let ended = activated(&room.serve(), "stray", &[&stray]).finish();
    assert_eq!(ended.code, Some(1), "{}", ended.stderr);
    assert!(
        ended
            .stderr
            .contains("named `stray` is for none of the VMs"),
        "{}",
        ended.stderr
    );
    assert_eq!(
        UnixStream::connect(room.at("control")).unwrap_err().kind(),
        ErrorKind::NotFound,
        "nothing is left behind"
    );
}

#[test]
fn processes_attach_to_the_attach_socket() {
    use zerosock::attach::{AttachError, AttachRequest, Client};
    let room = Room::new();
    let socket = room.at("attach");
    let mut serve = zerosock();
    serve.arg("serve").arg("--attach-socket").arg(&socket);
    serve.args(["--attach-mode", "0600", "--attach-max", "1"]);
    let running = Running::start(&mut serve);
    let request = AttachRequest::default();
    let mut attached = None;
    wait_until("a process to attach", || {
        attached = Client::connect(&socket, &request).ok();
        attached.is_some()
    });
    let mode = fs::metadata(&socket).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o600);
    let error = Client::connect(&socket, &request).unwrap_err();
    assert!(matches!(error, AttachError::Full), "{error}");
    running.signal("TERM");
    let ended = running.finish();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(!socket.exists());
    drop(attached);

    // Another user's number only: not ours.
    let mut serve = zerosock();
    serve.arg("serve").arg("--attach-socket").arg(&socket);
    let running = Running::start(serve.args(["--attach-uid", "4000000001"]));
    wait_until("a refusal", || {
        let refused = Client::connect(&socket, &request);
        matches!(refused, Err(AttachError::NotPermitted))
    });
    running.signal("TERM");
    assert_eq!(running.finish().code, Some(0));
}

#[test]
fn memory_that_can_shrink_is_refused_with_a_message_that_says_so() {
    use zerosock::driver::{Driver, DriverConfig};
    let room = Room::new();
    let running = Running::start(room.serve().arg("--require-sealed-memory"));
    wait_until("the socket", || room.at("control").exists());
    let mut config = DriverConfig::new(room.at("control"));
    config.seal = false;
    assert!(Driver::attach(config).is_err());
    wait_until("the log line", || {
        let said = running.stderr();
        let reason = "has no F_SEAL_SHRINK, and memory that can shrink is not accepted here";
        said.contains("SET_MEM_TABLE") && said.contains(reason)
    });
    running.signal("TERM");
    assert_eq!(running.finish().code, Some(0));
}
