//! Upgrades of `zerosock serve` under traffic, with guests that are drivers in this process: connections between guests, of
//! messages, by rule, and of host programs go on, and no byte is lost.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, UdpSocket};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use zerosock::vsock::{Endpoint, SeqPacket};
use zerosock::{Address, Cid, Port};

use crate::process::{DEADLINE, Running, wait_until, zerosock};

const UPGRADES: usize = 8;

struct Lab {
    dir: tempfile::TempDir,
    serve: Running,
}

impl Lab {
    fn start(more: &str) -> Lab {
        let dir = tempfile::tempdir().unwrap();
        write_file(dir.path(), more);
        let mut serve = zerosock();
        let file = dir.path().join("vms.yaml");
        serve.args(["serve", "--config"]).arg(file);
        let serve = Running::start(&mut serve);
        let lab = Lab { dir, serve };
        wait_until("sockets", || {
            lab.at("vm3").exists() && lab.at("vm4").exists()
        });
        lab
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn guest(&self, cid: u32) -> Endpoint {
        let builder = Endpoint::builder().background();
        let guest = builder.attach_device(self.at(&format!("vm{cid}")));
        guest.unwrap_or_else(|error| panic!("{error}\n{}", self.serve.stderr()))
    }

    fn count(&self, text: &str) -> usize {
        self.serve.stderr().matches(text).count()
    }

    fn upgrade(&self) {
        let (before, begun) = (self.count("has taken over"), self.count("upgrade to "));
        self.serve.signal("USR2");
        wait_until("its begin", || self.count("upgrade to ") > begun);
        // A report of the counters does not disturb it.
        self.serve.signal("USR1");
        wait_until("an upgrade", || self.count("has taken over") > before);
    }

    fn kill_worker(&self) {
        let id = self.serve.child.id();
        let children = std::fs::read_to_string(format!("/proc/{id}/task/{id}/children"));
        let worker: i32 = children.unwrap().trim().parse().expect("one child");
        let worker = rustix::process::Pid::from_raw(worker).unwrap();
        rustix::process::kill_process(worker, rustix::process::Signal::KILL).unwrap();
    }

    /// A host program that is connected to a port of a guest.
    fn program(&self, cid: u32, port: u32) -> UnixStream {
        let mut stream = UnixStream::connect(self.at(&format!("uds{cid}"))).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        stream
            .write_all(format!("CONNECT {port}\n").as_bytes())
            .unwrap();
        let mut line = String::new();
        // Nothing follows the line before the program sends something.
        BufReader::new(&stream).read_line(&mut line).unwrap();
        assert!(line.starts_with("OK "), "{line}");
        stream
    }
}

fn write_file(dir: &Path, more: &str) {
    let mut text = "vms:\n".to_owned();
    for cid in [3, 4] {
        let at = |name: &str| dir.join(format!("{name}{cid}")).display().to_string();
        let (socket, uds) = (at("vm"), at("uds"));
        text += &format!("  - guest_cid: {cid}\n    socket: {socket}\n    uds_path: {uds}\n");
    }
    std::fs::write(dir.join("vms.yaml"), text + more).unwrap();
}

fn address(cid: u32, port: u32) -> Address {
    Address::new(Cid::new(cid), Port::new(port))
}

/// Sends back what comes until the end.
fn echo(mut from: impl Read, mut to: impl Write) {
    let mut buffer = vec![0; 1 << 16];
    while let Ok(bytes @ 1..) = from.read(&mut buffer) {
        to.write_all(&buffer[..bytes]).unwrap();
    }
}

/// Byte `at` of a stream.
fn byte(at: u64) -> u8 {
    (at * 131 % 251) as u8
}

/// Sends a stream to an echo until told to stop, ends it, and reads all of it. Returns its length.
fn stream(
    to: impl Write + Send,
    mut from: impl Read,
    end: impl FnOnce() + Send,
    stop: &AtomicBool,
) -> u64 {
    thread::scope(|scope| {
        let mut to = to;
        let sending = scope.spawn(move || {
            let mut sent = 0;
            while !stop.load(Ordering::Relaxed) {
                let bytes: Vec<u8> = (sent..sent + 3000).map(byte).collect();
                to.write_all(&bytes).unwrap();
                sent += 3000;
            }
            end();
            sent
        });
        let (mut buffer, mut received) = (vec![0; 1 << 16], 0);
        loop {
            let bytes = from.read(&mut buffer).unwrap();
            if bytes == 0 {
                break;
            }
            for &got in &buffer[..bytes] {
                assert_eq!(got, byte(received), "byte {received}");
                received += 1;
            }
        }
        assert_eq!(sending.join().unwrap(), received);
        received
    })
}

/// Sends messages to an echo and reads each, until told to stop. Returns their number.
fn messages(socket: &SeqPacket, stop: &AtomicBool) -> u64 {
    let mut count = 0;
    let mut buffer = vec![0; 1 << 16];
    while !stop.load(Ordering::Relaxed) {
        let message: Vec<u8> = (count..count + 1 + count * 37 % 20_000).map(byte).collect();
        socket.send(&message).unwrap();
        let received = socket.recv(&mut buffer).unwrap().unwrap();
        assert_eq!(&buffer[..received.len], message, "message {count}");
        count += 1;
    }
    count
}

fn echo_messages(socket: &SeqPacket) {
    let mut buffer = vec![0; 1 << 16];
    while let Ok(Some(received)) = socket.recv(&mut buffer) {
        socket.send(&buffer[..received.len]).unwrap();
    }
}

#[test]
fn connections_of_all_kinds_outlast_upgrades() {
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
    udp.set_read_timeout(Some(DEADLINE)).unwrap();
    let (tcp_at, udp_at) = (server.local_addr().unwrap(), udp.local_addr().unwrap());
    let lab = Lab::start(&format!(
        "forward: [{{port: 80, to: 'tcp:{tcp_at}', zero_copy: always}}, {{port: 53, to: 'udp:{udp_at}'}}]\n"
    ));
    let (three, four) = (lab.guest(3), lab.guest(4));
    let listener = four.listen(Port::new(1), 8).unwrap();
    let of_messages = four.listen_seqpacket(Port::new(2), 8).unwrap();
    let sibling = three.connect(address(4, 1)).unwrap();
    let (at_sibling, _) = listener.accept().unwrap();
    let packets = three.connect_seqpacket(address(4, 2)).unwrap();
    let (at_packets, _) = of_messages.accept().unwrap();
    let program = lab.program(4, 1);
    let (at_program, _) = listener.accept().unwrap();
    let by_rule = three.connect(address(2, 80)).unwrap();
    let (target, _) = server.accept().unwrap();
    let dns = three.connect_seqpacket(address(2, 53)).unwrap();
    let stop = &AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            echo(&at_sibling, &at_sibling);
            at_sibling.shutdown(Shutdown::Write).unwrap();
        });
        scope.spawn(|| {
            echo(&at_program, &at_program);
            at_program.shutdown(Shutdown::Write).unwrap();
        });
        scope.spawn(|| {
            echo(&target, &target);
            target.shutdown(Shutdown::Write).unwrap();
        });
        scope.spawn(|| echo_messages(&at_packets));
        let counts = [
            scope.spawn(|| {
                let end = || sibling.shutdown(Shutdown::Write).unwrap();
                stream(&sibling, &sibling, end, stop)
            }),
            scope.spawn(|| {
                let end = || program.shutdown(Shutdown::Write).unwrap();
                stream(&program, &program, end, stop)
            }),
            scope.spawn(|| {
                let end = || by_rule.shutdown(Shutdown::Write).unwrap();
                stream(&by_rule, &by_rule, end, stop)
            }),
            scope.spawn(|| {
                let count = messages(&packets, stop);
                packets.shutdown(Shutdown::Both).unwrap();
                count
            }),
        ];
        for round in 0..UPGRADES {
            lab.upgrade();
            dns.send(&[round as u8]).unwrap();
            let mut datagram = [0; 8];
            let (bytes, _) = udp.recv_from(&mut datagram).unwrap();
            assert_eq!(datagram[..bytes], [round as u8]);
            drop(lab.program(4, 1));
            drop(listener.accept().unwrap());
        }
        stop.store(true, Ordering::Relaxed);
        let counts = counts.map(|count| count.join().unwrap());
        assert!(counts.iter().all(|&count| count > 0), "{counts:?}");
    });
    assert_eq!(lab.count("has taken over"), UPGRADES);
}

#[test]
fn an_upgrade_that_fails_changes_nothing() {
    let lab = Lab::start("");
    let (three, four) = (lab.guest(3), lab.guest(4));
    let listener = four.listen(Port::new(1), 8).unwrap();
    let stream = three.connect(address(4, 1)).unwrap();
    let (at_stream, _) = listener.accept().unwrap();
    let mut buffer = [0; 5];
    write_file(lab.dir.path(), "nonsense: 1\n");
    for round in 1..4 {
        lab.serve.signal("USR2");
        wait_until("a failure", || lab.count("the upgrade has failed") >= round);
        (&stream).write_all(b"hello").unwrap();
        (&at_stream).read_exact(&mut buffer).unwrap();
        assert_eq!(&buffer, b"hello");
    }
    write_file(lab.dir.path(), "");
    lab.upgrade();
    (&stream).write_all(b"again").unwrap();
    (&at_stream).read_exact(&mut buffer).unwrap();
    assert_eq!(&buffer, b"again");
}

/// What the kernel has not sent yet when the process is killed lies in memory that the successor gives back to the guest.
#[test]
fn a_connection_with_zero_copy_sends_is_reset_by_a_crash() {
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = server.local_addr().unwrap();
    for (way, is_reset) in [("always", true), ("never", false)] {
        let rule = format!("{{port: 80, to: 'tcp:{at}', zero_copy: {way}}}");
        let lab = Lab::start(&format!("forward: [{rule}]\n"));
        let three = lab.guest(3);
        let stream = three.connect(address(2, 80)).unwrap();
        let (mut target, _) = server.accept().unwrap();
        // Large enough for a send without a copy.
        let bytes: Vec<u8> = (0..1 << 18).map(byte).collect();
        thread::scope(|scope| {
            scope.spawn(|| (&stream).write_all(&bytes).unwrap());
            let mut received = vec![0; bytes.len()];
            target.read_exact(&mut received).unwrap();
            assert_eq!(received, bytes);
        });
        lab.kill_worker();
        let end = target.read(&mut [0]);
        match is_reset {
            true => assert_eq!(end.unwrap_err().kind(), ErrorKind::ConnectionReset),
            false => assert_eq!(end.unwrap(), 0),
        }
    }
}
