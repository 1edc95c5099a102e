//! Host services over a running `zerosock serve`, each a process of its own: `zerosock nc`, and
//! this one as a guest. By connections and by datagrams.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;

use crate::process::{DEADLINE, Running, wait_until, zerosock};
use sha2::{Digest, Sha256};
use zerosock::vsock::{Datagram, Endpoint, Stream};
use zerosock::{Address, Cid, Port};

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

    fn show(&self, name: &str) -> String {
        self.at(name).display().to_string()
    }

    /// A server of one VM and of processes.
    fn serve(&self, more: &[&str]) -> Running {
        let mut serve = zerosock();
        serve.arg("serve").arg("--socket").arg(self.at("vm"));
        serve.arg("--uds-path").arg(self.at("hybrid"));
        serve.arg("--attach-socket").arg(self.at("attach"));
        let running = Running::start(serve.args(more));
        wait_until("the sockets", || {
            UnixStream::connect(self.at("hybrid")).is_ok() && self.at("attach").exists()
        });
        running
    }

    /// As the guest of the VM, with CID 3.
    fn guest(&self) -> Endpoint {
        Endpoint::builder()
            .attach_device(self.at("vm"))
            .expect("a device")
    }

    fn process(&self) -> Endpoint {
        Endpoint::attach(self.at("attach")).unwrap()
    }

    /// `zerosock nc` with the words, in which `@` stands for the attach socket.
    fn nc(&self, words: &[&str]) -> Command {
        let attach = self.show("attach");
        let mut command = zerosock();
        command.arg("nc").arg("-v");
        command.args(words.iter().map(|word| word.replace('@', &attach)));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        command
    }

    fn listening(&self, words: &[&str]) -> Running {
        let running = Running::start_with(&mut self.nc(words));
        wait_until("it to listen", || running.stderr().contains(": listening"));
        running
    }
}

fn bytes(seed: u8, len: usize) -> Vec<u8> {
    let mut state = u32::from(seed) | 1;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        })
        .collect()
}

fn hash(bytes: &[u8]) -> Vec<u8> {
    Sha256::digest(bytes).to_vec()
}

fn host(port: u32) -> Address {
    Address::new(Cid::HOST, Port::new(port))
}

/// Gives a process its input, to the end.
fn feed(running: &mut Running, bytes: &[u8]) {
    let mut stdin = running.child.stdin.take().unwrap();
    let bytes = bytes.to_vec();
    thread::spawn(move || stdin.write_all(&bytes).unwrap());
}

/// Sends to the end while it receives to the end.
fn exchange(stream: &Stream, bytes: &[u8]) -> Vec<u8> {
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut sending = stream;
            sending.write_all(bytes).unwrap();
            stream.shutdown(std::net::Shutdown::Write).unwrap();
        });
        let mut all = Vec::new();
        let mut receiving = stream;
        receiving.read_to_end(&mut all).unwrap();
        all
    })
}

fn finish_successfully(running: Running) -> Vec<u8> {
    let ended = running.finish();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    ended.stdout
}

fn stop(serve: Running) -> String {
    serve.signal("TERM");
    let ended = serve.finish();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    ended.stderr
}

#[test]
fn two_services_and_the_hybrid_socket_serve_one_guest() {
    const LEN: usize = 3 << 20;
    let dir = TestDir::new();
    let serve = dir.serve(&["--workers", "2"]);
    let mut one = dir.listening(&["service-listen:@:1000"]);
    let mut two = dir.listening(&["service-listen:@:2000"]);
    let program = UnixListener::bind(dir.at("hybrid_3000")).unwrap();
    let guest = dir.guest();
    let to_one = guest.connect(host(1000)).unwrap();
    let to_two = guest.connect(host(2000)).unwrap();
    let to_program = guest.connect(host(3000)).unwrap();
    let (mut socket, _) = program.accept().unwrap();
    for (service, stream, seed) in [(&mut one, &to_one, 1), (&mut two, &to_two, 2)] {
        feed(service, &bytes(seed, LEN));
        let got = exchange(stream, &bytes(seed + 10, LEN));
        assert_eq!(hash(&got), hash(&bytes(seed, LEN)));
    }
    for (service, seed) in [(one, 11), (two, 12)] {
        assert_eq!(hash(&finish_successfully(service)), hash(&bytes(seed, LEN)));
    }
    (&mut &to_program).write_all(b"to the program").unwrap();
    let mut got = [0; 14];
    socket.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"to the program");
    let said = stop(serve);
    let uid = rustix::process::geteuid().as_raw();
    assert!(said.contains("service attached"), "{said}");
    assert!(said.contains(&format!("uid={uid} ports=1000")), "{said}");
}

#[test]
fn a_service_connects_out_and_processes_find_each_other() {
    const LEN: usize = 1 << 20;
    let dir = TestDir::new();
    let serve = dir.serve(&[]);
    // A service to the guest.
    let guest = dir.guest();
    let listener = guest.listen(Port::new(77), 4).unwrap();
    let mut out = Running::start_with(&mut dir.nc(&["service:@:3:77"]));
    let (stream, from) = listener.accept_timeout(DEADLINE).unwrap();
    assert_eq!(from.cid, Cid::HOST);
    feed(&mut out, &bytes(3, LEN));
    assert_eq!(
        hash(&exchange(&stream, &bytes(4, LEN))),
        hash(&bytes(3, LEN))
    );
    assert_eq!(hash(&finish_successfully(out)), hash(&bytes(4, LEN)));
    // A process to a process, and to a service; the process knows its own CID by nothing but its
    // peer, so the guest looks it up by the number it has.
    let server = dir.process();
    let listener = server.listen(Port::new(5), 4).unwrap();
    let to = format!("attach:@:{}:5", server.cid());
    let mut client = Running::start_with(&mut dir.nc(&[&to]));
    let (stream, from) = listener.accept_timeout(DEADLINE).unwrap();
    assert!(from.cid.is_guest(), "a CID of its own");
    feed(&mut client, b"to a process");
    assert_eq!(exchange(&stream, b"and back"), b"to a process");
    assert_eq!(finish_successfully(client), b"and back");
    let service = dir.listening(&["-d", "service-listen:@:6"]);
    let mut client = Running::start_with(&mut dir.nc(&["attach:@:2:6"]));
    feed(&mut client, b"to a service");
    assert_eq!(finish_successfully(service), b"to a service");
    finish_successfully(client);
    stop(serve);
}

#[test]
fn a_taken_port_is_named_and_free_when_its_process_is_killed() {
    let dir = TestDir::new();
    let serve = dir.serve(&[]);
    let first = dir.listening(&["service-listen:@:1000"]);
    let second = Running::start_with(&mut dir.nc(&["service-listen:@:1000"])).finish();
    assert_eq!(second.code, Some(1));
    let wanted = "port 1000 of the host is taken";
    assert!(second.stderr.contains(wanted), "{}", second.stderr);
    let owner = format!("process {} of user ", first.child.id());
    // The server answers before it logs, and another thread reads what it logs.
    wait_until("the owner in the log", || serve.stderr().contains(&owner));
    let guest = dir.guest();
    let to_first = guest.connect(host(1000)).unwrap();
    first.signal("KILL");
    let mut byte = [0];
    let error = (&mut &to_first).read(&mut byte).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    drop(first);
    // At once, and reached.
    let mut third = dir.listening(&["service-listen:@:1000"]);
    feed(&mut third, b"the third");
    let to_third = guest.connect(host(1000)).unwrap();
    assert_eq!(exchange(&to_third, b""), b"the third");
    finish_successfully(third);
    stop(serve);
}

#[test]
fn a_user_without_permission_cannot_attach_a_service() {
    for flags in [["--service-uid", "4000000001"], ["--service-max", "0"]] {
        let dir = TestDir::new();
        let serve = dir.serve(&flags);
        let refused = Running::start_with(&mut dir.nc(&["service-listen:@:1000"])).finish();
        assert_eq!(refused.code, Some(1), "{}", refused.stderr);
        // It may attach as a process all the same.
        dir.process();
        stop(serve);
    }
}

#[test]
fn processes_meet_the_host_s_sockets_by_paths_of_their_own() {
    let dir = TestDir::new();
    let serve = dir.serve(&[
        "--attach-uds-path",
        &dir.show("p{cid}"),
        "--socket-mode",
        "0620",
    ]);
    let one = Endpoint::builder()
        .cid(Cid::new(500))
        .attach(dir.at("attach"))
        .unwrap();
    let path = dir.at("p500");
    let mode = std::os::unix::fs::PermissionsExt::mode(&path.metadata().unwrap().permissions());
    assert_eq!(mode & 0o7777, 0o620);
    // Out: to PATH_PORT.
    let program = UnixListener::bind(dir.at("p500_9")).unwrap();
    let stream = one.connect(host(9)).unwrap();
    let (mut socket, _) = program.accept().unwrap();
    (&mut &stream).write_all(b"out").unwrap();
    let mut got = [0; 3];
    socket.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"out");
    drop(stream);
    // In: by CONNECT.
    let listener = one.listen(Port::new(10), 4).unwrap();
    let hybrid = format!("hybrid:{}:10", path.display());
    let mut client = Running::start_with(&mut dir.nc(&[&hybrid]));
    let (stream, from) = listener.accept_timeout(DEADLINE).unwrap();
    assert_eq!(from.cid, Cid::HOST);
    feed(&mut client, b"in");
    assert_eq!(exchange(&stream, b"out"), b"in");
    assert_eq!(finish_successfully(client), b"out");
    // Another one has another.
    let two = dir.process();
    assert!(dir.at(&format!("p{}", two.cid())).exists());
    assert!(two.connect(host(9)).is_err());
    drop((one, listener, stream));
    wait_until("its socket to go", || !Path::exists(&path));
    stop(serve);
    assert!(!dir.at(&format!("p{}", two.cid())).exists());
}

/// A socket that gives up in the end.
fn datagrams(at: &Endpoint, port: u32) -> Datagram {
    let socket = Datagram::bind(at, Port::new(port)).unwrap();
    socket.set_read_timeout(Some(DEADLINE)).unwrap();
    socket.set_write_timeout(Some(DEADLINE)).unwrap();
    socket
}

fn receive(socket: &Datagram) -> (Vec<u8>, Address) {
    let mut all = vec![0; 65536];
    let (len, from) = socket.recv_from(&mut all).unwrap();
    all.truncate(len);
    (all, from)
}

#[test]
fn files_go_both_ways_by_datagrams() {
    const LEN: usize = 4 << 20;
    let dir = TestDir::new();
    let serve = dir.serve(&["--workers", "2"]);
    for (listens, talks) in [
        ("service-listen:@:514", "attach:@:2:514"),
        ("attach-listen:@:515", "service:@:CID:515"),
    ] {
        // The next process gets the next CID; a CID is in use until its process ends.
        let next = dir.process();
        let cid = next.cid().get() + 1;
        let mut one = dir.listening(&["--dgram", listens]);
        let talks = talks.replace("CID", &cid.to_string());
        let mut two = Running::start_with(&mut dir.nc(&["--dgram", &talks]));
        feed(&mut one, &bytes(1, LEN));
        feed(&mut two, &bytes(2, LEN));
        assert_eq!(hash(&finish_successfully(two)), hash(&bytes(1, LEN)));
        assert_eq!(hash(&finish_successfully(one)), hash(&bytes(2, LEN)));
    }
    stop(serve);
}

#[test]
fn each_read_is_a_datagram_and_other_senders_are_dropped() {
    let dir = TestDir::new();
    let serve = dir.serve(&[]);
    let process = dir.process();
    let (ours, stranger) = (datagrams(&process, 5), datagrams(&process, 6));
    let to = format!("attach:@:{}:5", process.cid());
    let mut talks = Running::start_with(&mut dir.nc(&["-u", &to]));
    let mut stdin = talks.child.stdin.take().unwrap();
    let mut peer = None;
    for line in ["one\n", "and another\n"] {
        stdin.write_all(line.as_bytes()).unwrap();
        let (got, from) = receive(&ours);
        assert_eq!(String::from_utf8(got).unwrap(), line);
        stranger.send_to(b"from a stranger", from).unwrap();
        ours.send_to(line.to_uppercase().as_bytes(), from).unwrap();
        peer = Some(from);
    }
    drop(stdin);
    assert_eq!(receive(&ours).0, b"", "the end");
    ours.send_to(b"", peer.unwrap()).unwrap();
    assert_eq!(finish_successfully(talks), b"ONE\nAND ANOTHER\n");
    // A listener takes the first sender as its peer; earlier datagrams of others are dropped.
    let listens = dir.listening(&["-u", "-d", "service-listen:@:7"]);
    ours.send_to(b"the first, ", host(7)).unwrap();
    stranger.send_to(b"from a stranger", host(7)).unwrap();
    ours.send_to(b"the second", host(7)).unwrap();
    stranger.send_to(b"", host(7)).unwrap();
    ours.send_to(b"", host(7)).unwrap();
    assert_eq!(finish_successfully(listens), b"the first, the second");
    stop(serve);
}

#[test]
fn datagrams_sent_right_before_exit_arrive() {
    const LEN: usize = (3 << 16) + 5;
    let dir = TestDir::new();
    let serve = dir.serve(&["--workers", "2"]);
    let process = dir.process();
    let ours = datagrams(&process, 5);
    let other = dir.process();
    let marker = datagrams(&other, 6);
    let to = format!("attach:@:{}:5", process.cid());
    let path = dir.at("input");
    std::fs::write(&path, bytes(9, LEN)).unwrap();
    for _ in 0..10 {
        let words = ["--dgram", "--no-shutdown", "--quit", "0", &to];
        let input = std::fs::File::open(&path).unwrap();
        let ended = Running::start_with(dir.nc(&words).stdin(input)).finish();
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        ours.set_read_timeout(Some(DEADLINE)).unwrap();
        let got: Vec<_> = (0..4).map(|_| receive(&ours).0).collect();
        assert!(got.concat() == bytes(9, LEN));
        assert_eq!(got.iter().map(Vec::len).max(), Some(65536));
        // There is no end that was not to be sent: what is sent now comes next.
        marker.send_to(b"marker", ours.local_addr()).unwrap();
        assert_eq!(receive(&ours).0, b"marker");
    }
    stop(serve);
}

#[test]
fn endpoints_without_datagrams_are_named_in_the_error() {
    let dir = TestDir::new();
    for to in [
        "unix:/tmp/x",
        "hybrid:/tmp/x:1",
        "vsock:2:1",
        "vsock-listen:1",
    ] {
        let ended = Running::start_with(&mut dir.nc(&["--dgram", to])).finish();
        assert_eq!(ended.code, Some(2), "{}", ended.stderr);
        let wanted = format!("--dgram: {to}: this endpoint has no datagrams; give attach:");
        assert!(ended.stderr.contains(&wanted), "{}", ended.stderr);
    }
    let serve = dir.serve(&[]);
    let words = ["--dgram", "-w", "0.2", "service-listen:@:9"];
    let ended = Running::start_with(&mut dir.nc(&words)).finish();
    assert_eq!(ended.code, Some(1));
    let wanted = "timed out waiting for a datagram to port 9";
    assert!(ended.stderr.contains(wanted), "{}", ended.stderr);
    // A guest as those of stock kernels are.
    let builder = Endpoint::builder().datagrams(false);
    let guest = builder.attach_device(dir.at("vm")).unwrap();
    let mut deaf = Running::start_with(&mut dir.nc(&["--dgram", "service:@:3:9"]));
    let mut stdin = deaf.child.stdin.take().unwrap();
    wait_until("it to be told", || {
        stdin.write_all(b"is anybody there?").is_err() || deaf.child.try_wait().unwrap().is_some()
    });
    let _ = guest.drive();
    let ended = deaf.finish();
    assert_eq!(ended.code, Some(1));
    let wanted = "the destination does not take datagrams";
    assert!(ended.stderr.contains(wanted), "{}", ended.stderr);
    stop(serve);
}
