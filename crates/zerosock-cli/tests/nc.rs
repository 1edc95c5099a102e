//! `zerosock nc` as a process, over Unix sockets and against a hybrid vsock server made here.
//!
//! Its AF_VSOCK endpoints are tested inside guests only.

mod keep_open;

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::process::{DEADLINE, Ended, Running, wait_until, zerosock};
use sha2::{Digest, Sha256};

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

    fn listen(&self) -> (UnixListener, String) {
        let path = self.at("server");
        (
            UnixListener::bind(&path).unwrap(),
            format!("unix:{}", path.display()),
        )
    }
}

fn nc(args: &[&str]) -> Command {
    let mut command = zerosock();
    command
        .arg("nc")
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    command
}

fn accept(listener: &UnixListener) -> UnixStream {
    listener.set_nonblocking(true).unwrap();
    let mut stream = None;
    wait_until("a connection", || {
        stream = listener.accept().ok().map(|(stream, _)| stream);
        stream.is_some()
    });
    let stream = stream.unwrap();
    stream.set_nonblocking(false).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    stream.set_write_timeout(Some(DEADLINE)).unwrap();
    stream
}

fn read_all(mut from: impl Read) -> Vec<u8> {
    let mut all = Vec::new();
    from.read_to_end(&mut all).unwrap();
    all
}

fn finish_successfully(running: Running) -> Ended {
    let ended = running.finish();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert_eq!(ended.stderr, "");
    ended
}

/// Pseudo-random bytes, in which a shift, repetition or loss is detected.
fn pattern(length: usize, mut seed: u64) -> Vec<u8> {
    let bytes = (0..length.div_ceil(8)).flat_map(|_| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed.to_le_bytes()
    });
    bytes.take(length).collect()
}

#[test]
fn bytes_pass_both_ways_and_the_end_of_input_closes_the_sending_half_only() {
    let dir = TestDir::new();
    let (listener, endpoint) = dir.listen();
    let mut running = Running::start_with(&mut nc(&[&endpoint]));
    let mut peer = accept(&listener);
    running
        .child
        .stdin
        .take()
        .unwrap()
        .write_all(b"question")
        .unwrap();
    // Reads to the end: so the sending half was closed.
    assert_eq!(read_all(&peer), b"question");
    peer.write_all(b"answer").unwrap();
    drop(peer);
    assert_eq!(finish_successfully(running).stdout, b"answer");
}

#[test]
fn a_peer_that_closes_its_sending_half_first_still_gets_everything() {
    let dir = TestDir::new();
    let (listener, endpoint) = dir.listen();
    let mut running = Running::start_with(&mut nc(&[&endpoint]));
    let mut peer = accept(&listener);
    peer.write_all(b"early").unwrap();
    peer.shutdown(Shutdown::Write).unwrap();
    let mut stdin = running.child.stdin.take().unwrap();
    // Long enough for it to notice the peer's end of file, and to look about a few times after.
    let started = Instant::now();
    while started.elapsed() < Duration::from_millis(400) {
        let word = pattern(100, 9);
        stdin.write_all(&word).unwrap();
        let mut got = vec![0; word.len()];
        peer.read_exact(&mut got).unwrap();
        assert_eq!(got, word);
    }
    drop(stdin);
    assert_eq!(read_all(&peer), b"");
    assert_eq!(finish_successfully(running).stdout, b"early");
}

#[test]
fn standard_output_ends_with_the_peers_half_while_input_is_open() {
    let dir = TestDir::new();
    let (listener, endpoint) = dir.listen();
    let mut command = nc(&[&endpoint]);
    let (output, ours) = std::io::pipe().unwrap();
    let mut running = Running::start_with(command.stdout(ours));
    // The command holds the writing end too.
    drop(command);
    let mut peer = accept(&listener);
    peer.write_all(b"all of it").unwrap();
    peer.shutdown(Shutdown::Write).unwrap();
    // A pipe knows no time-out, so a thread of its own reads it.
    let (all, arrived) = std::sync::mpsc::channel();
    std::thread::spawn(move || all.send(read_all(output)));
    assert_eq!(arrived.recv_timeout(DEADLINE).unwrap(), b"all of it");
    assert_eq!(
        running.child.try_wait().unwrap(),
        None,
        "the other half goes on"
    );
    drop(running.child.stdin.take());
    finish_successfully(running);
}

#[test]
fn nc_ends_when_the_peer_closes_although_input_is_open() {
    let dir = TestDir::new();
    let (listener, endpoint) = dir.listen();
    let mut running = Running::start_with(&mut nc(&[&endpoint]));
    let stdin = running.child.stdin.take();
    let mut peer = accept(&listener);
    peer.write_all(b"bye").unwrap();
    drop(peer);
    assert_eq!(finish_successfully(running).stdout, b"bye");
    drop(stdin);
}

#[test]
fn bytes_that_the_peer_does_not_take_are_an_error() {
    let dir = TestDir::new();
    let (listener, endpoint) = dir.listen();
    let file = dir.at("file");
    fs::write(&file, pattern(8 << 20, 1)).unwrap();
    let running = Running::start_with(nc(&[&endpoint]).stdin(File::open(&file).unwrap()));
    let mut peer = accept(&listener);
    peer.read_exact(&mut [0; 1000]).unwrap();
    drop(peer);
    let ended = running.finish();
    assert_eq!(ended.code, Some(1));
    assert!(
        ended.stderr.contains("sending: ") || ended.stderr.contains("receiving: "),
        "{}",
        ended.stderr
    );
}

#[test]
fn large_transfers_both_ways_at_once_arrive_unchanged() {
    const LENGTH: usize = 12 << 20;
    let dir = TestDir::new();
    let (listener, endpoint) = dir.listen();
    let (there, back) = (pattern(LENGTH, 3), pattern(LENGTH + 12345, 5));
    fs::write(dir.at("there"), &there).unwrap();
    let running = Running::start_with(
        nc(&[&endpoint])
            .stdin(File::open(dir.at("there")).unwrap())
            .stdout(File::create(dir.at("back")).unwrap()),
    );
    let peer = accept(&listener);
    let mut writing = peer.try_clone().unwrap();
    let wanted_back = Sha256::digest(&back);
    let writer = std::thread::spawn(move || {
        writing.write_all(&back).unwrap();
        writing.shutdown(Shutdown::Write).unwrap();
    });
    assert_eq!(Sha256::digest(read_all(&peer)), Sha256::digest(&there));
    writer.join().unwrap();
    finish_successfully(running);
    assert_eq!(
        Sha256::digest(fs::read(dir.at("back")).unwrap()),
        wanted_back
    );
}

#[test]
fn listener_and_client_exchange_bytes() {
    let dir = TestDir::new();
    let path = dir.at("met");
    // A stale socket is in the way.
    drop(UnixListener::bind(&path).unwrap());
    let server = Running::start_with(
        nc(&["-v", &format!("unix-listen:{}", path.display())]).stdin(Stdio::null()),
    );
    wait_until("it to listen", || server.stderr().contains("listening"));
    let mut client = Running::start_with(&mut nc(&[&format!("unix:{}", path.display())]));
    client
        .child
        .stdin
        .take()
        .unwrap()
        .write_all(b"hello")
        .unwrap();
    finish_successfully(client);
    let served = server.finish();
    assert_eq!(
        (served.code, served.stdout.as_slice()),
        (Some(0), &b"hello"[..])
    );
    assert!(
        !path.exists(),
        "the socket file is gone once somebody has connected"
    );
}

#[test]
fn a_listener_that_is_interrupted_removes_its_socket() {
    let dir = TestDir::new();
    let path = dir.at("s");
    let running = Running::start_with(&mut nc(&["-v", &format!("unix-listen:{}", path.display())]));
    wait_until("it to listen", || running.stderr().contains("listening"));
    running.signal("TERM");
    assert_eq!(running.finish().code, Some(1));
    assert!(!path.exists());
}

#[test]
fn a_listener_refuses_a_path_in_use() {
    let dir = TestDir::new();
    let (_listener, endpoint) = dir.listen();
    let endpoint = endpoint.replace("unix:", "unix-listen:");
    let ended = Running::start_with(&mut nc(&[&endpoint])).finish();
    assert_eq!(ended.code, Some(1));
    assert!(
        ended.stderr.contains("in use by a live process"),
        "{}",
        ended.stderr
    );
}

#[test]
fn unreachable_endpoints_are_named_and_exit_with_1() {
    let dir = TestDir::new();
    drop(UnixListener::bind(dir.at("stale")).unwrap());
    for (name, wanted) in [
        ("stale", "connection refused"),
        ("none", "No such file or directory"),
    ] {
        let endpoint = format!("unix:{}", dir.at(name).display());
        let ended = Running::start_with(&mut nc(&[&endpoint])).finish();
        assert_eq!(ended.code, Some(1));
        assert!(ended.stderr.contains(wanted), "{}", ended.stderr);
        assert!(ended.stderr.contains(&endpoint), "{}", ended.stderr);
    }
}

#[test]
fn retry_waits_until_the_peer_listens() {
    let dir = TestDir::new();
    let path = dir.at("later");
    drop(UnixListener::bind(&path).unwrap());
    let running = Running::start_with(
        nc(&["--retry", &format!("unix:{}", path.display())]).stdin(Stdio::null()),
    );
    // Refused at first by a stale socket, then there is none, then it is there.
    fs::remove_file(&path).unwrap();
    let listener = UnixListener::bind(&path).unwrap();
    accept(&listener).write_all(b"there").unwrap();
    assert_eq!(finish_successfully(running).stdout, b"there");
}

#[test]
fn retry_ends_with_the_timeout() {
    let dir = TestDir::new();
    let endpoint = format!("unix:{}", dir.at("never").display());
    let ended = Running::start_with(&mut nc(&["--retry", "-w", "0.3", &endpoint])).finish();
    assert_eq!(ended.code, Some(1));
    assert!(ended.stderr.contains("No such file"), "{}", ended.stderr);
}

#[test]
fn an_idle_connection_ends_with_the_timeout() {
    let dir = TestDir::new();
    let (listener, endpoint) = dir.listen();
    let running = Running::start_with(&mut nc(&["-w", "0.3", &endpoint]));
    let _peer = accept(&listener);
    let ended = running.finish();
    assert_eq!(ended.code, Some(1));
    assert!(
        ended.stderr.contains("timed out: no byte moved for 300ms"),
        "{}",
        ended.stderr
    );
}

#[test]
fn listening_without_a_peer_ends_with_the_timeout() {
    let dir = TestDir::new();
    let path = dir.at("s");
    let endpoint = format!("unix-listen:{}", path.display());
    let ended = Running::start_with(&mut nc(&["--timeout", "0.2", &endpoint])).finish();
    assert_eq!(ended.code, Some(1));
    assert!(
        ended.stderr.contains("timed out waiting for a connection"),
        "{}",
        ended.stderr
    );
    assert!(!path.exists());
}

#[test]
fn quit_does_not_wait_for_the_peer_to_close() {
    let dir = TestDir::new();
    let (listener, endpoint) = dir.listen();
    let mut running = Running::start_with(&mut nc(&["-q", "0", &endpoint]));
    let peer = accept(&listener);
    running
        .child
        .stdin
        .take()
        .unwrap()
        .write_all(b"all")
        .unwrap();
    finish_successfully(running);
    assert_eq!(read_all(&peer), b"all");
}

/// The names of a process's threads.
fn threads(running: &Running) -> Vec<String> {
    let tasks = fs::read_dir(format!("/proc/{}/task", running.child.id())).unwrap();
    let name = |task: std::io::Result<fs::DirEntry>| {
        fs::read_to_string(task.ok()?.path().join("comm")).ok()
    };
    tasks
        .filter_map(name)
        .map(|name| name.trim().to_owned())
        .collect()
}

#[test]
fn no_stdin_reads_no_input_and_no_shutdown_keeps_the_sending_half_open() {
    let dir = TestDir::new();
    for option in ["--no-stdin", "--no-shutdown"] {
        let (listener, endpoint) = dir.listen();
        let running = Running::start_with(nc(&[option, &endpoint]).stdin(Stdio::null()));
        let mut peer = accept(&listener);
        peer.write_all(b"x").unwrap();
        // Its thread that sends has ended, or never was: nothing and no end of file will come.
        wait_until("the sending thread to end", || {
            let threads = threads(&running);
            threads.len() == 2 && threads.contains(&"receive".to_owned())
        });
        peer.set_nonblocking(true).unwrap();
        let error = peer.read(&mut [0]).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock, "{option}");
        drop(peer);
        assert_eq!(finish_successfully(running).stdout, b"x");
        fs::remove_file(dir.at("server")).unwrap();
    }
}

/// What a guest behind a hybrid socket does with the connection to a port.
type Guest = fn(u32, UnixStream);

/// A hybrid vsock server for one connection: reads CONNECT byte by byte, then hands over.
fn hybrid(path: &Path, guest: Guest) -> JoinHandle<()> {
    let listener = UnixListener::bind(path).unwrap();
    std::thread::spawn(move || {
        let mut stream = accept(&listener);
        let mut line = Vec::new();
        while line.last() != Some(&b'\n') {
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            line.extend(byte);
        }
        let line = String::from_utf8(line).unwrap();
        let port = line
            .strip_prefix("CONNECT ")
            .unwrap()
            .trim_end()
            .parse()
            .unwrap();
        assert_eq!(line, format!("CONNECT {port}\n"));
        guest(port, stream);
    })
}

fn talk_to(guest: Guest) -> (Running, JoinHandle<()>) {
    let dir = TestDir::new();
    let path = dir.at("hybrid:1");
    let server = hybrid(&path, guest);
    let mut running = Running::start_with(&mut nc(&[
        "--retry",
        &format!("hybrid:{}:77", path.display()),
    ]));
    let _ = running
        .child
        .stdin
        .take()
        .unwrap()
        .write_all(b"to the guest");
    wait_until("the server", || server.is_finished());
    drop(dir);
    (running, server)
}

#[test]
fn payload_right_behind_the_ok_line_is_kept() {
    let (running, server) = talk_to(|port, mut stream| {
        assert_eq!(port, 77);
        // One write: the reader that takes more than the line loses the rest.
        stream.write_all(b"OK 1073741824\nOK 5\nat once").unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        assert_eq!(read_all(&stream), b"to the guest");
    });
    assert_eq!(finish_successfully(running).stdout, b"OK 5\nat once");
    server.join().unwrap();
}

#[test]
fn an_ok_line_in_pieces_is_read() {
    let (running, server) = talk_to(|port, mut stream| {
        for byte in format!("OK {port}\n").bytes() {
            stream.write_all(&[byte]).unwrap();
        }
        assert_eq!(read_all(&stream), b"to the guest");
        stream.write_all(b"back").unwrap();
    });
    assert_eq!(finish_successfully(running).stdout, b"back");
    server.join().unwrap();
}

#[test]
fn a_refusal_by_the_guest_is_reported_as_connection_refused() {
    let dir = TestDir::new();
    let path = dir.at("hybrid");
    let server = hybrid(&path, |_, stream| drop(stream));
    let ended = Running::start_with(&mut nc(&[&format!("hybrid:{}:77", path.display())])).finish();
    server.join().unwrap();
    assert_eq!(ended.code, Some(1));
    assert!(
        ended.stderr.contains("connection refused"),
        "{}",
        ended.stderr
    );
    assert!(
        ended
            .stderr
            .contains("closed without OK for port 77 (no VMM is connected, no driver runs,"),
        "{}",
        ended.stderr
    );
}

#[test]
fn an_answer_other_than_ok_is_quoted_in_the_error() {
    for answer in [
        "HTTP/1.1 400 Bad Request\r\n",
        "OK \n",
        "OK x\n",
        "OK 4294967296\n",
    ] {
        let dir = TestDir::new();
        let path = dir.at("hybrid");
        let listener = UnixListener::bind(&path).unwrap();
        let running = Running::start_with(&mut nc(&[&format!("hybrid:{}:77", path.display())]));
        let mut stream = accept(&listener);
        stream.write_all(answer.as_bytes()).unwrap();
        let ended = running.finish();
        assert_eq!(ended.code, Some(1), "{answer:?}");
        assert!(ended.stderr.contains(answer.trim_end()), "{}", ended.stderr);
    }
    let dir = TestDir::new();
    let listener = UnixListener::bind(dir.at("hybrid")).unwrap();
    let endpoint = format!("hybrid:{}:77", dir.at("hybrid").display());
    let running = Running::start_with(&mut nc(&[&endpoint]));
    accept(&listener).write_all(&[b'x'; 4096]).unwrap();
    assert_eq!(running.finish().code, Some(1), "a line without an end");
}

#[test]
fn a_guest_that_never_answers_ends_with_the_timeout() {
    let dir = TestDir::new();
    let listener = UnixListener::bind(dir.at("hybrid")).unwrap();
    let endpoint = format!("hybrid:{}:77", dir.at("hybrid").display());
    let running = Running::start_with(&mut nc(&["-w", "0.3", &endpoint]));
    let _silent = accept(&listener);
    let ended = running.finish();
    assert_eq!(ended.code, Some(1));
    assert!(
        ended.stderr.contains("timed out waiting for OK"),
        "{}",
        ended.stderr
    );
}

/// Also without the capability that lets root pass the permissions of files.
#[test]
fn a_socket_without_permission_names_the_options_that_give_it() {
    let dir = TestDir::new();
    let path = dir.at("s");
    let _listener = UnixListener::bind(&path).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o000)).unwrap();
    let path = path.display();
    for (words, wanted) in [
        (
            format!("nc unix:{path}"),
            "--socket-group and --socket-mode",
        ),
        (
            format!("nc hybrid:{path}:7"),
            "--socket-group and --socket-mode",
        ),
        (
            format!("nc attach:{path}:2:7"),
            "--attach-mode and --socket-group of `zerosock serve` permit it, in a guest --socket-mode",
        ),
        (
            format!("relay unix:{path} tcp:127.0.0.1:1"),
            "--socket-group and --socket-mode",
        ),
        (
            format!("relay attach:{path}:2:7 tcp:127.0.0.1:1"),
            "--attach-mode and --socket-group",
        ),
    ] {
        let zerosock = zerosock();
        let mut command = match rustix::process::geteuid().is_root() {
            true => {
                let mut command = Command::new("setpriv");
                let bounds = "--bounding-set=-dac_override,-dac_read_search";
                command.args([bounds, "--"]).arg(zerosock.get_program());
                command
            }
            false => zerosock,
        };
        command.args(words.split(' '));
        let ended = Running::start(&mut command).finish();
        assert_eq!(ended.code, Some(1), "{words}: {}", ended.stderr);
        for part in ["Permission denied", wanted] {
            assert!(ended.stderr.contains(part), "{words}: {}", ended.stderr);
        }
    }
}

#[test]
fn a_wrong_endpoint_exits_with_2_and_names_the_forms() {
    for (endpoint, wanted) in [
        ("nonsense:/x", "give one of vsock:CID:PORT"),
        ("127.0.0.1:80", "nc has no TCP; use relay: `zerosock relay"),
        ("vsock:2:x", "`x` is not a port"),
        (
            "hybrid:/tmp/x",
            "the port is missing; give hybrid:PATH:PORT",
        ),
    ] {
        let ended = Running::start_with(&mut nc(&[endpoint])).finish();
        assert_eq!(ended.code, Some(2));
        assert!(
            ended.stderr.contains(wanted) && ended.stderr.contains(endpoint),
            "{}",
            ended.stderr
        );
    }
}
