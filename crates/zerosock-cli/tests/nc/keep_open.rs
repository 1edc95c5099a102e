//! `nc --keep-open` and `--exec`: several connections, one after the other or at once.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;

use super::{TestDir, finish_successfully, nc, read_all};
use crate::process::{DEADLINE, Running, wait_until, zerosock};

/// What the peer at `path` answers, to the end.
fn ask(path: &Path, question: &[u8]) -> Vec<u8> {
    let mut stream = UnixStream::connect(path).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    stream.write_all(question).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    read_all(stream)
}

#[test]
fn a_command_is_run_for_each_connection_and_several_at_once() {
    let dir = TestDir::new();
    let path = dir.at("s");
    let endpoint = format!("unix-listen:{}", path.display());
    let running = Running::start_with(&mut nc(&[
        "-v",
        "--keep-open",
        "--exec",
        "tr a-z A-Z",
        &endpoint,
    ]));
    wait_until("it to listen", || running.stderr().contains("listening"));
    // It stays open while others come and go.
    let mut first = UnixStream::connect(&path).unwrap();
    for _ in 0..70 {
        assert_eq!(ask(&path, b"loud"), b"LOUD");
    }
    first.set_read_timeout(Some(DEADLINE)).unwrap();
    first.write_all(b"first").unwrap();
    first.shutdown(Shutdown::Write).unwrap();
    assert_eq!(read_all(first), b"FIRST");
    running.signal("TERM");
    let ended = running.finish();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(!path.exists());
}

#[test]
fn a_signal_ends_a_listener_while_as_many_commands_run_as_may() {
    const MOST: usize = 64;
    let dir = TestDir::new();
    let path = dir.at("s");
    let endpoint = format!("unix-listen:{}", path.display());
    let command = &["-v", "--keep-open", "--exec", "echo here; cat", &endpoint];
    let running = Running::start_with(&mut nc(command));
    wait_until("it to listen", || running.stderr().contains("listening"));
    let connect = || {
        let stream = UnixStream::connect(&path).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        stream
    };
    let mut greeting = [0; 5];
    let mut streams: Vec<_> = (0..MOST).map(|_| connect()).collect();
    for stream in &mut streams {
        stream.read_exact(&mut greeting).unwrap();
    }
    // One more has to wait for the end of a command.
    let mut next = connect();
    drop(streams.pop());
    next.read_exact(&mut greeting).unwrap();
    running.signal("TERM");
    wait_until("its socket goes", || !path.exists());
    // Commands that run keep theirs, and its standard error.
    drop((streams, next));
    assert_eq!(running.finish().code, Some(0));
}

#[test]
fn a_listener_that_is_kept_open_outlives_a_shortage_of_descriptors() {
    let dir = TestDir::new();
    let path = dir.at("s");
    let endpoint = format!("unix-listen:{}", path.display());
    let command = &["-v", "--keep-open", "--exec", "echo here; cat", &endpoint];
    let mut program = nc(command);
    let mut limited = std::process::Command::new("prlimit");
    limited.arg("--nofile=24").arg("--");
    limited.arg(program.get_program()).args(program.get_args());
    drop(std::mem::replace(&mut program, limited));
    let running = Running::start_with(&mut program);
    wait_until("it to listen", || running.stderr().contains("listening"));
    let mut streams: Vec<_> = (0..20)
        .map(|_| UnixStream::connect(&path).unwrap())
        .collect();
    wait_until("a shortage", || {
        running.stderr().contains("Too many open files")
    });
    streams.clear();
    wait_until("connections are served again", || {
        let mut stream = UnixStream::connect(&path).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        let mut greeting = [0; 5];
        stream.read_exact(&mut greeting).is_ok()
    });
    running.signal("TERM");
    assert_eq!(running.finish().code, Some(0));
}

#[test]
fn without_a_command_a_listener_that_is_kept_open_receives_one_after_the_other() {
    let dir = TestDir::new();
    let path = dir.at("s");
    let endpoint = format!("unix-listen:{}", path.display());
    let running = Running::start_with(
        nc(&["-v", "--keep-open", &endpoint]).stdout(File::create(dir.at("all")).unwrap()),
    );
    wait_until("it to listen", || running.stderr().contains("listening"));
    for part in ["one ", "two ", "three"] {
        assert_eq!(ask(&path, part.as_bytes()), b"");
    }
    assert_eq!(fs::read(dir.at("all")).unwrap(), b"one two three");
    running.signal("KILL");
}

#[test]
fn the_end_of_a_command_ends_the_connection_and_its_failure_is_reported() {
    let dir = TestDir::new();
    let path = dir.at("s");
    let endpoint = format!("unix-listen:{}", path.display());
    let command = "echo bye; exit 3";
    let running = Running::start_with(&mut nc(&["-v", "--exec", command, &endpoint]));
    wait_until("it to listen", || running.stderr().contains("listening"));
    let stream = UnixStream::connect(&path).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    assert_eq!(
        read_all(&stream),
        b"bye\n",
        "although the peer sends nothing"
    );
    let ended = running.finish();
    assert_eq!(ended.code, Some(1));
    assert!(ended.stderr.contains("exit status: 3"), "{}", ended.stderr);
}

/// A stream of ours, not of the kernel: bytes are copied to and from the command.
#[test]
fn a_host_service_runs_a_command_for_each_connection() {
    let dir = TestDir::new();
    let attach = dir.at("attach");
    let _daemon = Running::start(zerosock().arg("serve").arg("--attach-socket").arg(&attach));
    wait_until("the attach socket", || attach.exists());
    let service = format!("service-listen:{}:7", attach.display());
    let service = Running::start_with(&mut nc(&[
        "-v",
        "--retry",
        "--keep-open",
        "--exec",
        "tr a-z A-Z",
        &service,
    ]));
    wait_until("it to listen", || service.stderr().contains("listening"));
    let client = format!("attach:{}:2:7", attach.display());
    for _ in 0..3 {
        let mut running = Running::start_with(&mut nc(&[&client]));
        running
            .child
            .stdin
            .take()
            .unwrap()
            .write_all(b"loud")
            .unwrap();
        assert_eq!(finish_successfully(running).stdout, b"LOUD");
    }
    // The peer keeps its sending half open after the command has ended.
    let ended = format!("service-listen:{}:8", attach.display());
    let ended = Running::start_with(&mut nc(&["-v", "--exec", "echo bye", &ended]));
    wait_until("it to listen", || ended.stderr().contains("listening"));
    let endpoint = zerosock::vsock::Endpoint::attach(&attach).unwrap();
    let port = zerosock::Port::new(8);
    let stream = endpoint.connect(zerosock::Address::new(zerosock::Cid::HOST, port));
    let stream = stream.unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    assert_eq!(read_all(&stream), b"bye\n");
    assert_eq!(ended.finish().code, Some(0));
}

#[test]
fn keep_open_needs_an_endpoint_that_listens() {
    let ended = Running::start_with(&mut nc(&["--keep-open", "unix:/nonexistent/s"])).finish();
    assert_eq!(ended.code, Some(2));
    assert!(ended.stderr.contains("--keep-open"), "{}", ended.stderr);
}
