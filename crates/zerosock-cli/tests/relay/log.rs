//! The access log, counters and signals.

use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, UdpSocket};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Stdio};

use crate::process::{DEADLINE, wait_until};
use crate::{connect, limited, read_all, relay, start, terminate};

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
    command.stderr(Stdio::piped());
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
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        // Fails when the process has ended, which is expected.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn sockmap_drops_its_capabilities_and_counts_bytes() {
    let udp = || {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.set_read_timeout(Some(DEADLINE)).unwrap();
        socket
    };
    let (client, target) = (udp(), udp());
    let to = format!("udp:{}", target.local_addr().unwrap());
    let (running, address) = start(&["udp-listen:127.0.0.1:0", &to, "--way", "sockmap"]);
    client.connect(address.unwrap()).unwrap();
    for n in 0..10 {
        client.send(&[n; 1000]).unwrap();
        let mut got = [0; 2000];
        let (length, from) = target.recv_from(&mut got).unwrap();
        assert_eq!(got[..length], [n; 1000]);
        target.send_to(b"answer", from).unwrap();
        assert_eq!(client.recv(&mut got).unwrap(), 6);
    }
    let task = format!("/proc/{}/task", running.child.id());
    let effective = |path: PathBuf| {
        let text = fs::read_to_string(path.join("status")).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix("CapEff:"));
        u64::from_str_radix(line.unwrap().trim(), 16).unwrap()
    };
    let tasks = fs::read_dir(task).unwrap();
    let capabilities: Vec<u64> = tasks.map(|task| effective(task.unwrap().path())).collect();
    let said = terminate(running);
    if said.contains("auto is used") {
        println!("SKIPPED: {said}");
        assert!(said.contains("way=messages"), "{said}");
    } else {
        for part in ["way=sockmap", "to_target=10000", "to_source=60", "joined=1"] {
            assert!(said.contains(part), "{part}: {said}");
        }
        // CAP_NET_ADMIN, CAP_SYS_ADMIN and CAP_BPF.
        let dropped = 1 << 12 | 1 << 21 | 1 << 39;
        assert!(capabilities.len() > 1);
        for of_thread in capabilities {
            assert_eq!(of_thread & dropped, 0);
        }
    }
}

/// The kernel would redirect some bytes twice, and lose some of a client that ends its stream early.
#[test]
fn sockmap_refuses_tcp_as_a_source_and_copies() {
    let target = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = format!("tcp:{}", target.local_addr().unwrap());
    let (running, address) = start(&["tcp-listen:127.0.0.1:0", &to, "--way", "sockmap"]);
    let mut client = connect(address);
    client.write_all(b"all of it").unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    let served = limited(target.accept().unwrap().0);
    assert_eq!(read_all(&served), b"all of it");
    drop(served);
    assert_eq!(read_all(&mut client), b"");
    wait_until("the access log", || {
        running.stderr().contains("connection ended")
    });
    let said = terminate(running);
    for part in [
        "--way sockmap: TCP can be no source",
        "way=copy",
        "joined=0",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert!(!said.contains("way=sockmap"), "{said}");
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
fn datagrams_are_relayed_in_batches() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    let target = UnixDatagram::bind(&path).unwrap();
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
