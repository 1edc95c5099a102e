//! `zerosock relay` as a process: its command line, log, signals, and what connections cost it.

mod process;

use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Command;

use process::{DEADLINE, Running, wait_until, zerosock};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

fn relay(words: &[&str]) -> Command {
    let mut command = zerosock();
    command.arg("relay").args(words);
    command
}

/// Starts a relay and waits until it listens; its first address, if it has one.
fn start(words: &[&str]) -> (Running, Option<SocketAddr>) {
    let running = Running::start(&mut relay(words));
    wait_until("the relay", || running.stderr().contains("relaying"));
    let said = running.stderr();
    let address = said
        .split_once("address=")
        .and_then(|(_, rest)| rest.split_whitespace().next())
        .and_then(|address| address.parse().ok());
    (running, address)
}

fn limited(socket: TcpStream) -> TcpStream {
    socket.set_read_timeout(Some(DEADLINE)).unwrap();
    socket.set_write_timeout(Some(DEADLINE)).unwrap();
    socket
}

fn connect(address: Option<SocketAddr>) -> TcpStream {
    limited(TcpStream::connect(address.unwrap()).unwrap())
}

fn read_all(mut from: impl Read) -> Vec<u8> {
    let mut all = Vec::new();
    from.read_to_end(&mut all).unwrap();
    all
}

/// A field of /proc/PID/status in KiB.
fn status(running: &Running, field: &str) -> u64 {
    let text = fs::read_to_string(format!("/proc/{}/status", running.child.id())).unwrap();
    let line = text.lines().find(|line| line.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

fn descriptors(running: &Running) -> usize {
    let path = format!("/proc/{}/fd", running.child.id());
    fs::read_dir(path).unwrap().count()
}

fn terminate(running: Running) -> String {
    running.signal("TERM");
    let ended = running.finish();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    ended.stderr
}

#[test]
fn a_connection_is_relayed_and_logged_with_its_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("target");
    let target = UnixListener::bind(&path).unwrap();
    let to = format!("unix:{}", path.display());
    let (running, address) = start(&["tcp-listen:127.0.0.1:0", &to]);
    let mut client = connect(address);
    client.write_all(b"question").unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    let (mut served, _) = target.accept().unwrap();
    assert_eq!(read_all(&mut served), b"question");
    served.write_all(b"the answer").unwrap();
    drop(served);
    assert_eq!(read_all(&mut client), b"the answer");
    let source = client.local_addr().unwrap();
    wait_until("the access log", || {
        running.stderr().contains("connection ended")
    });
    let said = running.stderr();
    let line = said
        .lines()
        .find(|line| line.contains("connection ended"))
        .unwrap();
    for part in [
        &format!("source={source}"),
        &format!("target={to}"),
        "to_target=8",
        "to_source=10",
        "reason=closed",
        "way=splice/copy",
    ] {
        assert!(line.contains(part), "{part}: {line}");
    }
    let said = terminate(running);
    assert!(said.contains("opened=1 open=0"), "{said}");
}

/// Nothing reads standard error, and the access log has more lines than fit into the pipe.
#[test]
fn connections_are_relayed_while_nothing_reads_the_log() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("relay");
    let target = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = format!("tcp:{}", target.local_addr().unwrap());
    let from = format!("unix-listen:{}", path.display());
    let mut command = relay(&[&from, &to]);
    command.stderr(std::process::Stdio::piped());
    let mut child = Killed(command.spawn().unwrap());
    // Its buffer takes 64 KiB.
    let _stderr = child.0.stderr.take().unwrap();
    wait_until("the relay", || path.exists());
    target.set_nonblocking(true).unwrap();
    for _ in 0..600 {
        let client = UnixStream::connect(&path).unwrap();
        client.set_read_timeout(Some(DEADLINE)).unwrap();
        let mut accepted = None;
        wait_until("the connection", || {
            accepted = target.accept().ok();
            accepted.is_some()
        });
        let (mut served, _) = accepted.unwrap();
        served.write_all(b"x").unwrap();
        drop(served);
        assert_eq!(read_all(client), b"x");
    }
    let pid = rustix::process::Pid::from_child(&child.0);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    wait_until("the end", || child.0.try_wait().unwrap().is_some());
}

/// A process that ends with the test.
struct Killed(std::process::Child);

impl Drop for Killed {
    fn drop(&mut self) {
        // Fails when the process has ended, which is expected.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn sockmap_is_taken_where_it_can_be_and_the_reason_is_said_where_not() {
    let target = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = format!("tcp:{}", target.local_addr().unwrap());
    let exchange = |address: Option<SocketAddr>| {
        let mut client = connect(address);
        let mut served = limited(target.accept().unwrap().0);
        let bytes = pattern(3 << 20);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                client.write_all(&bytes).unwrap();
                client.shutdown(Shutdown::Write).unwrap();
            });
            assert!(read_all(&served) == bytes);
        });
        served.write_all(b"the answer").unwrap();
        drop(served);
        assert_eq!(read_all(&mut client), b"the answer");
    };
    let (running, address) = start(&["tcp-listen:127.0.0.1:0", &to, "--way", "sockmap"]);
    exchange(address);
    wait_until("the access log", || {
        running.stderr().contains("connection ended")
    });
    let task = format!("/proc/{}/task", running.child.id());
    let effective = |path: std::path::PathBuf| {
        let text = fs::read_to_string(path.join("status")).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix("CapEff:"));
        u64::from_str_radix(line.unwrap().trim(), 16).unwrap()
    };
    let tasks = fs::read_dir(task).unwrap();
    let capabilities: Vec<u64> = tasks.map(|task| effective(task.unwrap().path())).collect();
    let said = terminate(running);
    if said.contains("auto is used") {
        println!("SKIPPED: {said}");
        assert!(said.contains("way=copy"), "{said}");
    } else {
        for part in [
            "way=sockmap",
            "to_target=3145728",
            "to_source=10",
            "joined=1",
        ] {
            assert!(said.contains(part), "{part}: {said}");
        }
        // CAP_NET_ADMIN, CAP_SYS_ADMIN and CAP_BPF.
        let dropped = 1 << 12 | 1 << 21 | 1 << 39;
        assert!(capabilities.len() > 1);
        for of_thread in capabilities {
            assert_eq!(of_thread & dropped, 0);
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let from = format!("unix-listen:{}", dir.path().join("relay").display());
    let (running, _) = start(&[&from, &to, "--way", "sockmap"]);
    let said = terminate(running);
    let reason = "--way sockmap: both ends have to be TCP, or both UDP: auto is used";
    assert_eq!(said.matches(reason).count(), 1, "{said}");
}

#[test]
fn the_counters_are_logged_on_a_signal() {
    let target = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = format!("tcp:{}", target.local_addr().unwrap());
    let (running, address) = start(&["tcp-listen:127.0.0.1:0", &to]);
    let mut client = connect(address);
    let mut served = limited(target.accept().unwrap().0);
    // Bytes pass when the connection has been counted.
    client.write_all(b"x").unwrap();
    served.read_exact(&mut [0]).unwrap();
    running.signal("USR1");
    wait_until("the counters", || running.stderr().contains("counters"));
    assert!(
        running.stderr().contains("opened=1 open=1"),
        "{}",
        running.stderr()
    );
    terminate(running);
}

#[test]
fn a_signal_resets_what_has_not_ended_and_removes_the_socket() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("relay");
    let target = TcpListener::bind("127.0.0.1:0").unwrap();
    let from = format!("unix-listen:{}", path.display());
    let to = format!("tcp:{}", target.local_addr().unwrap());
    let (running, _) = start(&[&from, &to]);
    let mut client = UnixStream::connect(&path).unwrap();
    client.write_all(b"a part").unwrap();
    let mut served = limited(target.accept().unwrap().0);
    served.read_exact(&mut [0; 6]).unwrap();
    terminate(running);
    let error = served.read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    assert!(!path.exists());
}

#[test]
fn a_pair_without_a_listener_ends_the_command() {
    let [one, two] = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    let ends = [&one, &two].map(|one| format!("tcp:{}", one.local_addr().unwrap()));
    let running = Running::start(&mut relay(&[&ends[0], &ends[1]]));
    let (mut first, second) = (one.accept().unwrap().0, two.accept().unwrap().0);
    first.write_all(b"all").unwrap();
    drop(first);
    assert_eq!(read_all(&second), b"all");
    drop(second);
    assert_eq!(running.finish().code, Some(0));
    drop((one, two));
    let ended = Running::start(&mut relay(&[&ends[0], &ends[1]])).finish();
    assert_eq!(ended.code, Some(1), "{}", ended.stderr);
    assert!(
        ended.stderr.contains("Connection refused"),
        "{}",
        ended.stderr
    );
}

#[test]
fn datagrams_are_relayed_in_batches() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    let target = std::os::unix::net::UnixDatagram::bind(&path).unwrap();
    target.set_read_timeout(Some(DEADLINE)).unwrap();
    let to = format!("unix-dgram:{}", path.display());
    let (running, address) = start(&["udp-listen:127.0.0.1:0", &to, "--udp-timeout", "0.2"]);
    let client = UdpSocket::bind("127.0.0.1:0").unwrap();
    for n in 0..10u8 {
        client
            .send_to(&vec![n; 100 * usize::from(n)], address.unwrap())
            .unwrap();
    }
    for n in 0..10u8 {
        let mut got = [0; 2000];
        let length = target.recv(&mut got).unwrap();
        assert_eq!(got[..length], vec![n; 100 * usize::from(n)]);
    }
    wait_until("the end of the association", || {
        running.stderr().contains("association ended")
    });
    let said = terminate(running);
    assert!(said.contains("to_target=4500"), "{said}");
}

#[test]
fn what_is_wrong_is_said_with_the_fix() {
    for (words, code, part) in [
        (
            &["tcp-listen:8080", "tcp:x:1"][..],
            2,
            "tcp-listen:127.0.0.1:8080",
        ),
        (&["http:x", "tcp:x:1"], 2, "is no endpoint"),
        (
            &["udp-listen:127.0.0.1:0", "tcp:127.0.0.1:1"],
            2,
            "is a stream",
        ),
        (
            &["tcp-listen:127.0.0.1:0", "tcp:127.0.0.1:1", "--way", "fast"],
            2,
            "splice",
        ),
        (
            &["tcp-listen:127.0.0.1:0", "tcp:127.0.0.1:1", "--buffer", "1"],
            2,
            "4K to 16M",
        ),
        (
            &[
                "tcp-listen:127.0.0.1:0",
                "tcp:127.0.0.1:1",
                "--workers",
                "0",
            ],
            2,
            "at least 1",
        ),
        (
            &[
                "tcp-listen:127.0.0.1:0",
                "tcp:127.0.0.1:1",
                "--idle-timeout",
                "0",
            ],
            2,
            "more than 0",
        ),
        (
            &["unix-listen:/nonexistent/x", "tcp:127.0.0.1:1"],
            1,
            "cannot listen",
        ),
    ] {
        let ended = Running::start(&mut relay(words)).finish();
        assert_eq!(ended.code, Some(code), "{words:?}: {}", ended.stderr);
        assert!(ended.stderr.contains(part), "{words:?}: {}", ended.stderr);
    }
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let from = format!("tcp-listen:{}", taken.local_addr().unwrap());
    let ended = Running::start(&mut relay(&[&from, "tcp:127.0.0.1:1"])).finish();
    assert_eq!(ended.code, Some(1));
    assert!(ended.stderr.contains("in use"), "{}", ended.stderr);
}

#[test]
fn the_help_lists_every_kind_of_end() {
    let ended = Running::start(&mut relay(&["--help"])).finish();
    assert_eq!(ended.code, Some(0));
    let said = String::from_utf8(ended.stdout).unwrap();
    for kind in [
        "tcp",
        "tcp-listen",
        "udp",
        "udp-listen",
        "unix",
        "unix-listen",
        "unix-dgram",
        "unix-dgram-listen",
        "unix-seqpacket",
        "unix-seqpacket-listen",
        "hybrid",
        "attach",
        "attach-listen",
        "service",
        "service-listen",
        "vsock",
        "vsock-listen",
    ] {
        assert!(said.contains(&format!("{kind}:")), "{kind}");
    }
}

/// Raises the limit of descriptors for this process and those that it starts; returns the limit.
fn raise_descriptors(wanted: u64) -> u64 {
    let set = |current, maximum| {
        let limit = Rlimit { current, maximum };
        setrlimit(Resource::Nofile, limit)
    };
    if set(Some(wanted), Some(wanted)).is_err() {
        let maximum = getrlimit(Resource::Nofile).maximum;
        set(maximum, maximum).unwrap();
    }
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

#[test]
fn idle_connections_use_less_than_2_kib_each_and_leave_nothing() {
    // Two descriptors for each connection, here and in the relay.
    let limit = raise_descriptors(21_000);
    let connections = (usize::try_from(limit).unwrap() - 1000).min(20_000) / 2;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("target");
    for to_unix in [false, true] {
        let _ = fs::remove_file(&path);
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let unix = UnixListener::bind(&path).unwrap();
        let to = match to_unix {
            true => format!("unix:{}", path.display()),
            false => format!("tcp:{}", tcp.local_addr().unwrap()),
        };
        let (running, address) = start(&["tcp-listen:127.0.0.1:0", &to]);
        let open = |count: usize| -> Vec<(TcpStream, Box<dyn Socket>)> {
            (0..count)
                .map(|_| {
                    let mut client = connect(address);
                    let mut served: Box<dyn Socket> = match to_unix {
                        true => Box::new(unix.accept().unwrap().0),
                        false => Box::new(tcp.accept().unwrap().0),
                    };
                    // Each of them has been used.
                    client.write_all(&[7; 100]).unwrap();
                    served.read_exact(&mut [0; 100]).unwrap();
                    served.write_all(&[7; 100]).unwrap();
                    client.read_exact(&mut [0; 100]).unwrap();
                    (client, served)
                })
                .collect()
        };
        // What the first connections need once: buffers, pipes, the allocator's own memory.
        drop(open(100));
        let ended = |count: usize| {
            wait_until("the end of all connections", || {
                running.stderr().matches("connection ended").count() == count
            });
        };
        ended(100);
        let (memory, fds) = (status(&running, "RssAnon"), descriptors(&running));
        let all = open(connections);
        let used = status(&running, "RssAnon").saturating_sub(memory) * 1024;
        assert!(descriptors(&running) >= fds + 2 * connections);
        let each = used / connections as u64;
        println!("{each} bytes for each of {connections} idle connections to {to}");
        assert!(each < 2048, "{each} bytes for each connection");
        drop(all);
        ended(100 + connections);
        wait_until("the last close", || descriptors(&running) <= fds);
        let said = terminate(running);
        let last = said.lines().last().unwrap();
        assert!(
            last.contains(&format!("opened={} open=0", 100 + connections)),
            "{last}"
        );
    }
}

trait Socket: Read + Write {}

impl Socket for TcpStream {}
impl Socket for UnixStream {}

/// ZEROSOCK_RELAY_CONNECTIONS sets the number; a release is tested with 100 000.
#[test]
fn short_connections_do_not_grow_the_relay() {
    let count = std::env::var("ZEROSOCK_RELAY_CONNECTIONS");
    let count: usize = count.ok().and_then(|n| n.parse().ok()).unwrap_or(10_000);
    let target = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = format!("tcp:{}", target.local_addr().unwrap());
    std::thread::spawn(move || {
        while let Ok((mut served, _)) = target.accept() {
            let mut all = Vec::new();
            if served.read_to_end(&mut all).is_ok() {
                let _ = served.write_all(&all);
            }
        }
    });
    let (running, address) = start(&["tcp-listen:127.0.0.1:0", &to, "--log-level", "info"]);
    let run = |count: usize| {
        for n in 0..count {
            let mut client = connect(address);
            client.write_all(&n.to_ne_bytes()).unwrap();
            client.shutdown(Shutdown::Write).unwrap();
            assert_eq!(read_all(&mut client), n.to_ne_bytes());
        }
    };
    run(count / 10);
    let (memory, fds) = (status(&running, "RssAnon"), descriptors(&running));
    run(count);
    let grown = status(&running, "RssAnon").saturating_sub(memory);
    // What the allocator keeps may vary by some pages.
    assert!(grown <= 256, "{grown} KiB more after {count} connections");
    wait_until("the last close", || descriptors(&running) <= fds + 4);
    let said = terminate(running);
    let last = said.lines().last().unwrap();
    assert!(
        last.contains(&format!("opened={} open=0", count + count / 10)),
        "{last}"
    );
}

/// As on a kernel that cannot refuse descriptors: they are received, closed, and hold nothing up.
#[test]
fn descriptors_that_a_client_sends_are_closed_and_the_bytes_pass() {
    let dir = tempfile::tempdir().unwrap();
    let [from, to] = ["relay", "target"].map(|name| dir.path().join(name));
    let target = UnixListener::bind(&to).unwrap();
    let mut command = relay(&[
        &format!("unix-listen:{}", from.display()),
        &format!("unix:{}", to.display()),
    ]);
    command.env(zerosock_sys::fd_passing::WITHOUT_PASSRIGHTS, "1");
    let running = Running::start(&mut command);
    wait_until("the relay", || running.stderr().contains("relaying"));
    let client = UnixStream::connect(&from).unwrap();
    let (mut served, _) = target.accept().unwrap();
    let file = tempfile::tempfile().unwrap();
    let fds = [std::os::fd::AsFd::as_fd(&file); 100];
    // Several at once: a read ends behind each.
    for n in 0..50u8 {
        let message = [n; 100];
        let bytes = [std::io::IoSlice::new(&message)];
        zerosock_sys::fd_passing::send(&client, &bytes, &fds).unwrap();
    }
    drop(client);
    let all = read_all(&mut served);
    let wanted: Vec<u8> = (0..50).flat_map(|n| [n; 100]).collect();
    assert_eq!(all, wanted);
    drop(served);
    wait_until("the end", || running.stderr().contains("connection ended"));
    wait_until("the closes", || descriptors(&running) < 30);
    terminate(running);
}

/// As on a kernel that cannot refuse descriptors.
#[test]
fn an_out_of_band_byte_passes_in_its_place_and_descriptors_of_datagrams_are_closed() {
    let dir = tempfile::tempdir().unwrap();
    let start = |from: &str, to: &str| {
        let mut command = relay(&[from, to]);
        command.env(zerosock_sys::fd_passing::WITHOUT_PASSRIGHTS, "1");
        let running = Running::start(&mut command);
        wait_until("the relay", || running.stderr().contains("relaying"));
        running
    };
    let at = |name: &str| dir.path().join(name);
    let target = UnixListener::bind(at("target")).unwrap();
    let running = start(
        &format!("unix-listen:{}", at("relay").display()),
        &format!("unix:{}", at("target").display()),
    );
    let client = UnixStream::connect(at("relay")).unwrap();
    let (mut served, _) = target.accept().unwrap();
    (&client).write_all(b"before").unwrap();
    let urgent = rustix::net::SendFlags::OOB;
    match rustix::net::send(&client, b"!", urgent) {
        Ok(_) => {
            (&client).write_all(b"after").unwrap();
            drop(client);
            assert_eq!(read_all(&mut served), b"before!after");
        }
        Err(errno) => println!("SKIPPED: no MSG_OOB for Unix sockets: {errno}"),
    }
    terminate(running);

    let target = std::os::unix::net::UnixDatagram::bind(at("to")).unwrap();
    target.set_read_timeout(Some(DEADLINE)).unwrap();
    let running = start(
        &format!("unix-dgram-listen:{}", at("from").display()),
        &format!("unix-dgram:{}", at("to").display()),
    );
    let client = std::os::unix::net::UnixDatagram::bind(at("client")).unwrap();
    client.set_read_timeout(Some(DEADLINE)).unwrap();
    client.connect(at("from")).unwrap();
    let file = tempfile::tempfile().unwrap();
    let fds = [std::os::fd::AsFd::as_fd(&file); 100];
    let mut got = [0; 200];
    for n in 0..50u8 {
        let message = [n; 100];
        let bytes = [std::io::IoSlice::new(&message)];
        zerosock_sys::fd_passing::send(&client, &bytes, &fds).unwrap();
        let (length, from) = target.recv_from(&mut got).unwrap();
        assert_eq!(got[..length], message);
        let name = std::os::linux::net::SocketAddrExt::as_abstract_name(&from).unwrap();
        let to = rustix::net::SocketAddrUnix::new_abstract_name(name).unwrap();
        let flags = rustix::net::SendFlags::empty();
        rustix::net::sendto(&target, &message, flags, &to).unwrap();
        assert_eq!(client.recv(&mut got).unwrap(), 100);
    }
    wait_until("the closes", || descriptors(&running) < 30);
    terminate(running);
}

/// A daemon of processes that attach.
fn serve(dir: &std::path::Path) -> (Running, String) {
    let attach = dir.join("attach");
    let running = Running::start(zerosock().arg("serve").arg("--attach-socket").arg(&attach));
    wait_until("the attach socket", || attach.exists());
    (running, attach.display().to_string())
}

fn pattern(length: usize) -> Vec<u8> {
    let mut state = 1u64;
    let words = (0..length.div_ceil(8)).flat_map(|_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    words.take(length).collect()
}

#[test]
fn a_client_of_tcp_reaches_an_attached_process() {
    let dir = tempfile::tempdir().unwrap();
    let (serve, attach) = serve(dir.path());
    let process = zerosock::vsock::Endpoint::attach(&attach).unwrap();
    let listener = process.listen(zerosock::Port::new(7), 8).unwrap();
    let to = format!("attach:{attach}:{}:7", process.cid());
    let (running, address) = start(&["tcp-listen:127.0.0.1:0", &to]);
    let bytes = pattern(3 << 20);
    for _ in 0..3 {
        let client = connect(address);
        let (mut served, _) = listener.accept_timeout(DEADLINE).unwrap();
        let (sent, mut sender) = (bytes.clone(), client.try_clone().unwrap());
        let sender = std::thread::spawn(move || {
            sender.write_all(&sent).unwrap();
            sender.shutdown(Shutdown::Write).unwrap();
        });
        assert!(read_all(&mut served) == bytes);
        sender.join().unwrap();
        let echoed = bytes.clone();
        let echo = std::thread::spawn(move || served.write_all(&echoed).unwrap());
        assert!(read_all(&client) == bytes);
        echo.join().unwrap();
    }
    // An abrupt end of the process's side.
    let mut client = connect(address);
    let (served, _) = listener.accept_timeout(DEADLINE).unwrap();
    served.set_linger(Some(std::time::Duration::ZERO));
    drop(served);
    match client.read(&mut [0]) {
        Ok(0) => {}
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
        Ok(more) => panic!("{more} bytes"),
    }
    let said = terminate(running);
    assert_eq!(said.matches("reason=\"closed\"").count(), 3, "{said}");
    drop(serve);
}

#[test]
fn an_attached_process_reaches_a_unix_socket_through_a_service() {
    let dir = tempfile::tempdir().unwrap();
    let (serve, attach) = serve(dir.path());
    let path = dir.path().join("target");
    let target = UnixListener::bind(&path).unwrap();
    let from = format!("service-listen:{attach}:514");
    let (running, _) = start(&[&from, &format!("unix:{}", path.display())]);
    let process = zerosock::vsock::Endpoint::attach(&attach).unwrap();
    let host = zerosock::Address::new(zerosock::Cid::new(2), zerosock::Port::new(514));
    let stream = process.connect(host).unwrap();
    (&stream).write_all(b"question").unwrap();
    let (mut served, _) = target.accept().unwrap();
    served.read_exact(&mut [0; 8]).unwrap();
    served.write_all(b"answer").unwrap();
    drop(served);
    assert_eq!(read_all(&stream), b"answer");
    drop(stream);
    // A target that is gone.
    drop(target);
    fs::remove_file(&path).unwrap();
    let stream = process.connect(host).unwrap();
    let mut got = [0];
    assert!(matches!((&stream).read(&mut got), Ok(0) | Err(_)));
    wait_until("the log", || running.stderr().contains("cannot connect"));
    terminate(running);
    drop(serve);
}

#[test]
fn a_full_target_holds_no_buffer_of_the_sender() {
    let dir = tempfile::tempdir().unwrap();
    let (serve, attach) = serve(dir.path());
    let path = dir.path().join("target");
    let target = UnixListener::bind(&path).unwrap();
    let from = format!("service-listen:{attach}:9");
    let (running, _) = start(&[&from, &format!("unix:{}", path.display())]);
    let process = zerosock::vsock::Endpoint::attach(&attach).unwrap();
    let host = zerosock::Address::new(zerosock::Cid::new(2), zerosock::Port::new(9));
    let full = process.connect(host).unwrap();
    let (held, _) = target.accept().unwrap();
    full.set_write_timeout(Some(std::time::Duration::from_millis(300)))
        .unwrap();
    let bytes = pattern(8 << 20);
    let mut sent = 0;
    while let Ok(more) = (&full).write(&bytes[sent..]) {
        sent += more;
        assert!(sent < bytes.len(), "it never stops");
    }
    // Another connection of the same endpoint goes on.
    let other = process.connect(host).unwrap();
    let (mut served, _) = target.accept().unwrap();
    (&other).write_all(b"passes").unwrap();
    served.read_exact(&mut [0; 6]).unwrap();
    full.shutdown(Shutdown::Write).unwrap();
    assert!(read_all(&held) == bytes[..sent]);
    terminate(running);
    drop(serve);
}
