//! Host services over a running `zerosock serve`, each a process of its own: `zerosock nc`, and
//! this one as a guest.

mod process;

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;

use process::{DEADLINE, Running, wait_until, zerosock};
use sha2::{Digest, Sha256};
use zerosock::vsock::{Endpoint, Stream};
use zerosock::{Address, Cid, Port};

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

fn finished_well(running: Running) -> Vec<u8> {
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
    let room = Room::new();
    let serve = room.serve(&["--workers", "2"]);
    let mut one = room.listening(&["service-listen:@:1000"]);
    let mut two = room.listening(&["service-listen:@:2000"]);
    let program = UnixListener::bind(room.at("hybrid_3000")).unwrap();
    let guest = room.guest();
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
        assert_eq!(hash(&finished_well(service)), hash(&bytes(seed, LEN)));
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
    let room = Room::new();
    let serve = room.serve(&[]);
    // A service to the guest.
    let guest = room.guest();
    let listener = guest.listen(Port::new(77), 4).unwrap();
    let mut out = Running::start_with(&mut room.nc(&["service:@:3:77"]));
    let (stream, from) = listener.accept_timeout(DEADLINE).unwrap();
    assert_eq!(from.cid, Cid::HOST);
    feed(&mut out, &bytes(3, LEN));
    assert_eq!(
        hash(&exchange(&stream, &bytes(4, LEN))),
        hash(&bytes(3, LEN))
    );
    assert_eq!(hash(&finished_well(out)), hash(&bytes(4, LEN)));
    // A process to a process, and to a service; the process knows its own CID by nothing but its
    // peer, so the guest looks it up by the number it has.
    let server = room.process();
    let listener = server.listen(Port::new(5), 4).unwrap();
    let to = format!("attach:@:{}:5", server.cid());
    let mut client = Running::start_with(&mut room.nc(&[&to]));
    let (stream, from) = listener.accept_timeout(DEADLINE).unwrap();
    assert!(from.cid.is_guest(), "a CID of its own");
    feed(&mut client, b"to a process");
    assert_eq!(exchange(&stream, b"and back"), b"to a process");
    assert_eq!(finished_well(client), b"and back");
    let service = room.listening(&["-d", "service-listen:@:6"]);
    let mut client = Running::start_with(&mut room.nc(&["attach:@:2:6"]));
    feed(&mut client, b"to a service");
    assert_eq!(finished_well(service), b"to a service");
    finished_well(client);
    stop(serve);
}

#[test]
fn a_taken_port_is_named_and_free_when_its_process_is_killed() {
    let room = Room::new();
    let serve = room.serve(&[]);
    let first = room.listening(&["service-listen:@:1000"]);
    let second = Running::start_with(&mut room.nc(&["service-listen:@:1000"])).finish();
    assert_eq!(second.code, Some(1));
    let wanted = "port 1000 of the host is taken";
    assert!(second.stderr.contains(wanted), "{}", second.stderr);
    let owner = format!("it is process {}'s, of user ", first.child.id());
    assert!(serve.stderr().contains(&owner), "{}", serve.stderr());
    let guest = room.guest();
    let to_first = guest.connect(host(1000)).unwrap();
    first.signal("KILL");
    let mut byte = [0];
    let error = (&mut &to_first).read(&mut byte).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    drop(first);
    // At once, and reached.
    let mut third = room.listening(&["service-listen:@:1000"]);
    feed(&mut third, b"the third");
    let to_third = guest.connect(host(1000)).unwrap();
    assert_eq!(exchange(&to_third, b""), b"the third");
    finished_well(third);
    stop(serve);
}

#[test]
fn who_may_not_is_no_service() {
    for flags in [["--service-uid", "4000000001"], ["--service-max", "0"]] {
        let room = Room::new();
        let serve = room.serve(&flags);
        let refused = Running::start_with(&mut room.nc(&["service-listen:@:1000"])).finish();
        assert_eq!(refused.code, Some(1), "{}", refused.stderr);
        // It may attach as a process all the same.
        room.process();
        stop(serve);
    }
}

#[test]
fn processes_meet_the_host_s_sockets_by_paths_of_their_own() {
    let room = Room::new();
    let serve = room.serve(&[
        "--attach-uds-path",
        &room.show("p{cid}"),
        "--socket-mode",
        "0620",
    ]);
    let one = Endpoint::builder()
        .cid(Cid::new(500))
        .attach(room.at("attach"))
        .unwrap();
    let path = room.at("p500");
    let mode = std::os::unix::fs::PermissionsExt::mode(&path.metadata().unwrap().permissions());
    assert_eq!(mode & 0o7777, 0o620);
    // Out: to PATH_PORT.
    let program = UnixListener::bind(room.at("p500_9")).unwrap();
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
    let mut client = Running::start_with(&mut room.nc(&[&hybrid]));
    let (stream, from) = listener.accept_timeout(DEADLINE).unwrap();
    assert_eq!(from.cid, Cid::HOST);
    feed(&mut client, b"in");
    assert_eq!(exchange(&stream, b"out"), b"in");
    assert_eq!(finished_well(client), b"out");
    // Another one has another.
    let two = room.process();
    assert!(room.at(&format!("p{}", two.cid())).exists());
    assert!(two.connect(host(9)).is_err());
    drop((one, listener, stream));
    wait_until("its socket to go", || !Path::exists(&path));
    stop(serve);
    assert!(!room.at(&format!("p{}", two.cid())).exists());
}
