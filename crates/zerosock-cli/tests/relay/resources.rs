//! What connections cost the relay.

use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream, UdpSocket};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Command;

use rustix::process::{Pid, Resource, Rlimit, getrlimit, setrlimit};

use crate::process::{DEADLINE, Running, wait_until};
use crate::{connect, descriptors, read_all, relay, start, start_command, terminate};

/// A field of /proc/PID/status in KiB.
fn status(running: &Running, field: &str) -> u64 {
    let text = fs::read_to_string(format!("/proc/{}/status", running.child.id())).unwrap();
    let line = text.lines().find(|line| line.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
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
        let none = descriptors(&running);
        // What the first connections need once: buffers, pipes, the allocator's own memory.
        drop(open(100));
        wait_until("the end of the first connections", || {
            running.stderr().matches("connection ended").count() == 100
        });
        let (memory, fds) = (status(&running, "RssAnon"), descriptors(&running));
        let all = open(connections);
        let used = status(&running, "RssAnon").saturating_sub(memory) * 1024;
        // Sockets of the first ones may be closed later than they are logged.
        assert!(descriptors(&running) >= none + 2 * connections);
        let each = used / connections as u64;
        println!("{each} bytes for each of {connections} idle connections to {to}");
        assert!(each < 2048, "{each} bytes for each connection");
        drop(all);
        // The access log has not all of them.
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

/// The time of day at which a line was logged.
fn seconds(line: &str) -> f64 {
    let (stamp, _) = line.split_once('Z').unwrap();
    let (_, time) = stamp.split_once('T').unwrap();
    let parts = time.split(':').map(|part| part.parse::<f64>().unwrap());
    parts.fold(0.0, |sum, part| sum * 60.0 + part)
}

/// With few descriptors there is an answer for each of many senders.
#[test]
fn senders_of_datagrams_beyond_the_descriptors_replace_the_longest_idle() {
    let udp = || {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.set_read_timeout(Some(DEADLINE)).unwrap();
        socket
    };
    let target = udp();
    let to = format!("udp:{}", target.local_addr().unwrap());
    let zerosock = relay(&["udp-listen:127.0.0.1:0", &to, "--workers", "1"]);
    let mut command = Command::new("sh");
    command
        .args(["-c", "ulimit -n 100 && exec \"$0\" \"$@\""])
        .arg(zerosock.get_program())
        .args(zerosock.get_args());
    let (running, address) = start_command(&mut command);
    let clients: Vec<_> = (0..300)
        .map(|n| {
            let client = udp();
            client.connect(address.unwrap()).unwrap();
            client.send(&[n as u8]).unwrap();
            let mut got = [0; 2];
            let (_, from) = target.recv_from(&mut got).unwrap();
            target.send_to(&got[..1], from).unwrap();
            assert_eq!(client.recv(&mut got).unwrap(), 1);
            client
        })
        .collect();
    let said = terminate(running);
    assert!(said.contains("a new sender has taken its place"), "{said}");
    assert!(said.contains("opened=300"), "{said}");
    assert!(said.contains("dropped=0"), "{said}");
    drop(clients);
}

/// Each failed accept is followed by a pause of 50 ms; its warnings have a rate of their own.
#[test]
fn a_relay_without_descriptors_says_so_a_few_times_only() {
    let target = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = format!("tcp:{}", target.local_addr().unwrap());
    let (running, address) = start(&["tcp-listen:127.0.0.1:0", &to, "--workers", "1"]);
    let pid = Some(Pid::from_child(&running.child));
    let maximum = getrlimit(Resource::Nofile).maximum;
    let limit = |current| {
        let limit = Rlimit { current, maximum };
        rustix::process::prlimit(pid, Resource::Nofile, limit).unwrap();
    };
    // Fewer than it has. poll(2) fails if it is given more descriptors than this.
    limit(Some(8));
    let client = connect(address);
    let warnings = || {
        let said = running.stderr();
        let lines = said
            .split_inclusive('\n')
            .filter(|line| line.ends_with('\n'));
        lines
            .filter(|line| line.contains("cannot accept a connection"))
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    // At most 20 in each 10 s, so that the 21st begins another 10 s. Without the limit all of them come
    // within about a second.
    wait_until("the warnings", || warnings().len() > 20);
    let warnings = warnings();
    let [first, next] = [0, 20].map(|n| seconds(&warnings[n]));
    // Midnight may be between them.
    let between = (next - first).rem_euclid(24.0 * 3600.0);
    assert!((5.0..600.0).contains(&between), "{warnings:#?}");
    assert!(warnings[20].contains("suppressed="), "{warnings:#?}");
    limit(maximum);
    (&client).write_all(b"late").unwrap();
    drop(client);
    assert_eq!(read_all(target.accept().unwrap().0), b"late");
    terminate(running);
}
