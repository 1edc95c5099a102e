//! `zerosock serve` as a process: exit codes, sockets made and removed, signals, and the service
//! manager's conventions.
//!
//! What the devices do with a guest is tested elsewhere.

use std::fs;
use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::process::{DEADLINE, Running, wait_until, zerosock};

struct TestDir {
    dir: tempfile::TempDir,
}

impl TestDir {
    fn new() -> TestDir {
        TestDir {
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
fn both_sockets_exist_while_it_runs_and_are_removed_after_either_signal() {
    for signal in ["TERM", "INT"] {
        let dir = TestDir::new();
        let running = Running::start(&mut dir.serve());
        wait_for_socket(&dir.at("control"));
        wait_for_socket(&dir.at("hybrid"));
        running.signal(signal);
        let ended = running.finish();
        assert_eq!(ended.code, Some(0), "SIG{signal}: {}", ended.stderr);
        assert!(
            ended.stderr.contains(&format!("SIG{signal}: stopping")),
            "{}",
            ended.stderr
        );
        assert!(!dir.at("control").exists());
        assert!(!dir.at("hybrid").exists());
    }
}

#[test]
fn a_second_server_on_the_same_path_is_refused_and_the_first_lives_on() {
    let dir = TestDir::new();
    let first = Running::start(&mut dir.serve());
    wait_for_socket(&dir.at("hybrid"));
    let second = Running::start(&mut dir.serve()).finish();
    assert_eq!(second.code, Some(1));
    let wanted = format!("{}: in use by a live process", dir.at("control").display());
    assert!(second.stderr.contains(&wanted), "{}", second.stderr);
    wait_for_socket(&dir.at("control"));
    first.signal("TERM");
    assert_eq!(first.finish().code, Some(0));
}

#[test]
fn the_sockets_of_a_killed_server_are_replaced() {
    let dir = TestDir::new();
    let killed = Running::start(&mut dir.serve());
    wait_for_socket(&dir.at("hybrid"));
    killed.signal("KILL");
    assert_eq!(killed.finish().code, None);
    assert!(
        dir.at("control").exists(),
        "a killed process removes nothing"
    );
    let next = Running::start(&mut dir.serve());
    wait_for_socket(&dir.at("hybrid"));
    next.signal("TERM");
    assert_eq!(next.finish().code, Some(0));
}

#[test]
fn a_file_at_a_socket_path_is_kept_and_sockets_made_before_are_removed() {
    let dir = TestDir::new();
    fs::write(dir.at("hybrid"), "precious").unwrap();
    let ended = Running::start(&mut dir.serve()).finish();
    assert_eq!(ended.code, Some(1));
    assert!(
        ended.stderr.contains("hybrid: exists and is not a socket"),
        "{}",
        ended.stderr
    );
    assert_eq!(fs::read_to_string(dir.at("hybrid")).unwrap(), "precious");
    assert!(!dir.at("control").exists());
}

#[test]
fn wrong_options_exit_with_2_and_touch_nothing() {
    let dir = TestDir::new();
    for wrong in [
        ["--guest-cid", "2"],
        ["--queue-size", "1000"],
        ["--socket-mode", "rw"],
        ["--no-such-option", "x"],
        ["--ok-port", "both"],
    ] {
        let ended = Running::start(dir.serve().args(wrong)).finish();
        assert_eq!(ended.code, Some(2), "{wrong:?}: {}", ended.stderr);
        assert!(
            ended.stderr.contains(wrong[0]),
            "{wrong:?}: {}",
            ended.stderr
        );
        assert!(ended.stdout.is_empty());
    }
    assert!(!dir.at("control").exists());
    let long = dir.at(&"x".repeat(120));
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
    let dir = TestDir::new();
    let running = Running::start(dir.serve().args(["--socket-mode", "0620"]));
    for name in ["control", "hybrid"] {
        wait_for_socket(&dir.at(name));
        let mode = fs::metadata(dir.at(name)).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o620, "{name}");
    }
    running.signal("TERM");
    assert_eq!(running.finish().code, Some(0));
}

/// Whatever the umask is. The socket is never wider: it is made in a directory that others cannot enter.
#[test]
fn sockets_are_for_our_own_user_or_a_group_unless_told_otherwise() {
    let dir = TestDir::new();
    let group = fs::metadata(dir.at(".")).unwrap().gid().to_string();
    let at = |name: &str| dir.at(name).display().to_string();
    let commands = [
        format!(
            "serve --guest-cid 3 --socket {} --uds-path {} --attach-socket {}",
            at("a"),
            at("b"),
            at("c")
        ),
        format!("net --socket {} --socket {}", at("a"), at("b")),
        format!("relay unix-listen:{} unix:{}", at("a"), at("none")),
        format!("relay unix-dgram-listen:{} udp:127.0.0.1:9", at("a")),
    ];
    for (words, names) in commands.iter().zip(["abc", "ab", "a", "a"]) {
        for (more, wanted) in [("", 0o600), (&*format!("--socket-group {group}"), 0o660)] {
            let mut shell = Command::new("sh");
            shell.args(["-c", "umask 0; exec \"$@\"", "sh"]);
            shell.arg(zerosock().get_program());
            shell.args(words.split(' ').chain(more.split_whitespace()));
            let running = Running::start(&mut shell);
            for name in names.chars().map(String::from) {
                let path = dir.at(&name);
                wait_until("the socket", || path.exists());
                let made = fs::metadata(path).unwrap();
                assert_eq!(
                    made.permissions().mode() & 0o7777,
                    wanted,
                    "{words}: {name}"
                );
            }
            running.signal("TERM");
            running.finish();
        }
    }
}

#[test]
fn a_link_named_like_the_peer_takes_the_peers_command_line() {
    let dir = TestDir::new();
    let link = dir.at("vhost-device-vsock");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_zerosock"), &link).unwrap();
    let vm = format!(
        "guest-cid=4,uds-path={},socket={},tx-buffer-size=65536,queue-size=1024",
        dir.at("hybrid").display(),
        dir.at("control").display()
    );
    let running = Running::start(Command::new(&link).args(["--vm", &vm]));
    wait_for_socket(&dir.at("hybrid"));
    running.signal("TERM");
    assert_eq!(running.finish().code, Some(0));
}

#[test]
fn log_format_json_prints_a_json_object_per_line() {
    let dir = TestDir::new();
    let running = Running::start(dir.serve().args(["--log-format", "json"]));
    wait_for_socket(&dir.at("hybrid"));
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
    let dir = TestDir::new();
    let manager = UnixDatagram::bind(dir.at("notify")).unwrap();
    manager.set_read_timeout(Some(DEADLINE)).unwrap();
    let hear = || {
        let mut message = [0; 1024];
        let length = manager.recv(&mut message).unwrap();
        String::from_utf8(message[..length].to_vec()).unwrap()
    };
    let running = Running::start(
        dir.serve()
            .env("NOTIFY_SOCKET", dir.at("notify"))
            .env("WATCHDOG_USEC", "200000"),
    );
    let ready = hear();
    assert!(
        ready.contains("READY=1") && ready.contains("STATUS=serving CID 3"),
        "{ready}"
    );
    UnixStream::connect(dir.at("hybrid")).expect("READY comes after the sockets");
    // A busy machine may have it say before that a thread has not answered yet.
    while !hear().contains("WATCHDOG=1") {}
    running.signal("TERM");
    while !hear().contains("STOPPING=1") {}
    assert_eq!(running.finish().code, Some(0));
}

/// The example that `make install` puts into /etc/zerosock, with the command line of the unit.
#[test]
fn the_example_configuration_is_served() {
    let dir = TestDir::new();
    let dist = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../dist");
    let example = fs::read_to_string(dist.join("vms.yaml")).unwrap();
    let run = dir.at("").display().to_string();
    fs::write(dir.at("vms.yaml"), example.replace("/run/zerosock/", &run)).unwrap();
    let unit = fs::read_to_string(dist.join("zerosock.service")).unwrap();
    let unit = unit.replace("\\\n", " ");
    let start = unit
        .lines()
        .find_map(|line| line.strip_prefix("ExecStart="));
    let mut words = start.unwrap().split_whitespace();
    assert_eq!(words.next(), Some("/usr/local/bin/zerosock"));
    // The group kvm may be missing here.
    let words = words.map(|word| match word {
        "/etc/zerosock/vms.yaml" => dir.at("vms.yaml").display().to_string(),
        "kvm" => rustix::process::getegid().as_raw().to_string(),
        other => other.to_owned(),
    });
    let running = Running::start(zerosock().args(words));
    wait_for_socket(&dir.at("3.vhost"));
    wait_for_socket(&dir.at("3.vsock"));
    running.signal("TERM");
    let ended = running.finish();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
}

/// Starts `command` with one or two sockets as descriptors 3 and 4, as systemd does.
///
/// A shell gets them as its standard input and output, moves them, says its own process id, and
/// becomes the program.
fn activated(command: &Command, names: &str, sockets: &[BorrowedFd<'_>]) -> Running {
    let script = format!(
        "exec 3<&0 4<&1 0</dev/null 1>/dev/null
         export LISTEN_PID=$$ LISTEN_FDS={} LISTEN_FDNAMES={names}
         exec \"$@\"",
        sockets.len()
    );
    let copy = |index: usize| match sockets.get(index) {
        Some(socket) => Stdio::from(socket.try_clone_to_owned().unwrap()),
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
    let dir = TestDir::new();
    let control = UnixListener::bind(dir.at("control")).unwrap();
    let elsewhere = UnixListener::bind(dir.at("elsewhere")).unwrap();
    let running = activated(
        &dir.serve(),
        "whatever:uds-path",
        &[control.as_fd(), elsewhere.as_fd()],
    );
    wait_until("the log line", || running.stderr().contains("serving"));
    running.signal("TERM");
    let ended = running.finish();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(
        !dir.at("hybrid").exists(),
        "the one passed in by name stands in for it"
    );
    assert!(dir.at("control").exists() && dir.at("elsewhere").exists());
}

/// So a port below 1024 needs no capability.
#[test]
fn a_tcp_socket_passed_in_is_used_for_the_rule_with_its_address() {
    use std::io::{Read, Write};
    let dir = TestDir::new();
    let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let on = tcp.local_addr().unwrap();
    let unix = UnixListener::bind(dir.at("clients")).unwrap();
    let mut serve = dir.serve();
    serve.arg("--listen").arg(format!("tcp:{on}=3:80"));
    let of_unix = format!("unix:{}=3:81", dir.at("clients").display());
    serve.arg("--listen").arg(of_unix);
    let running = activated(&serve, "web:web", &[tcp.as_fd(), unix.as_fd()]);
    drop(tcp);
    wait_for_socket(&dir.at("hybrid"));
    let guest = zerosock::vsock::Endpoint::builder()
        .attach_device(dir.at("control"))
        .unwrap();
    let listen = |port| guest.listen(zerosock::Port::new(port), 8).unwrap();
    let (of_tcp, of_unix) = (listen(80), listen(81));
    let mut client = std::net::TcpStream::connect(on).unwrap();
    client.set_read_timeout(Some(DEADLINE)).unwrap();
    let (mut stream, _) = of_tcp.accept_timeout(DEADLINE).unwrap();
    stream.write_all(b"hello").unwrap();
    let mut got = [0; 5];
    client.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"hello");
    let _client = UnixStream::connect(dir.at("clients")).unwrap();
    of_unix.accept_timeout(DEADLINE).unwrap();
    running.signal("TERM");
    let ended = running.finish();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(dir.at("clients").exists(), "the service manager's");
}

#[test]
fn a_tcp_socket_passed_in_for_no_rule_is_an_error() {
    let dir = TestDir::new();
    let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let on = tcp.local_addr().unwrap();
    let ended = activated(&dir.serve(), "web", &[tcp.as_fd()]).finish();
    assert_eq!(ended.code, Some(1), "{}", ended.stderr);
    let wanted = format!("named `web` is for none of the VMs and rules, and bound to tcp:{on}");
    assert!(ended.stderr.contains(&wanted), "{}", ended.stderr);
}

#[test]
fn a_socket_passed_in_for_no_vm_is_an_error() {
    let dir = TestDir::new();
    let stray = UnixListener::bind(dir.at("stray")).unwrap();
    let ended = activated(&dir.serve(), "stray", &[stray.as_fd()]).finish();
    assert_eq!(ended.code, Some(1), "{}", ended.stderr);
    assert!(
        ended
            .stderr
            .contains("named `stray` is for none of the VMs"),
        "{}",
        ended.stderr
    );
    assert_eq!(
        UnixStream::connect(dir.at("control")).unwrap_err().kind(),
        ErrorKind::NotFound,
        "nothing is left behind"
    );
}

#[test]
fn processes_attach_to_the_attach_socket() {
    use zerosock::attach::{AttachError, AttachRequest, Client};
    let dir = TestDir::new();
    let socket = dir.at("attach");
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
fn shrinkable_memory_is_refused_with_an_error_that_names_the_seal() {
    use crate::driver::{Driver, DriverConfig};
    let dir = TestDir::new();
    let running = Running::start(dir.serve().arg("--require-sealed-memory"));
    wait_until("the socket", || dir.at("control").exists());
    let mut config = DriverConfig::new(dir.at("control"));
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

/// The lines of standard error at a level.
fn lines_of(stderr: &str, level: &str) -> Vec<String> {
    let of_level = stderr.lines().filter(|line| line.contains(level));
    of_level.map(str::to_owned).collect()
}

#[test]
fn a_stop_with_drivers_that_run_warns_of_nothing() {
    let dir = TestDir::new();
    let attach = dir.at("attach");
    let running = Running::start(dir.serve().arg("--attach-socket").arg(&attach));
    wait_for_socket(&dir.at("hybrid"));
    let vm = zerosock::vsock::Endpoint::builder().attach_device(dir.at("control"));
    let process = zerosock::vsock::Endpoint::attach(&attach);
    wait_until("both drivers to be ready", || {
        running.stderr().matches("driver ready").count() == 2
    });
    running.signal("TERM");
    let ended = running.finish();
    assert_eq!(ended.code, Some(0));
    assert_eq!(lines_of(&ended.stderr, "WARN"), [""; 0], "{}", ended.stderr);
    assert_eq!(lines_of(&ended.stderr, "ERROR"), [""; 0]);
    drop((vm, process));
}

#[test]
fn the_log_names_the_users_that_may_attach() {
    let dir = TestDir::new();
    let mut serve = dir.serve();
    serve.arg("--attach-socket").arg(dir.at("attach"));
    let running = Running::start(serve.args(["--service-uid", "4711"]));
    wait_for_socket(&dir.at("hybrid"));
    let uid = rustix::process::geteuid().as_raw();
    let line = format!("uids=[{uid}] service_uids=[4711]");
    wait_until("the line", || running.stderr().contains(&line));
}

#[test]
fn a_process_whose_user_is_not_listed_is_told_of_the_option() {
    let dir = TestDir::new();
    let attach = dir.at("attach");
    let uid = rustix::process::geteuid().as_raw();
    let mut serve = dir.serve();
    serve.arg("--attach-socket").arg(&attach);
    let running = Running::start(serve.args(["--attach-uid", "4711", "--service-uid", "4711"]));
    wait_until("it to serve", || {
        running.stderr().contains("processes may attach")
    });
    let option = format!("add --attach-uid {uid}");
    let error = zerosock::vsock::Endpoint::attach(&attach).unwrap_err();
    assert!(error.to_string().contains(&option), "{error}");
    wait_until("the line", || running.stderr().contains(&option));
}
