//! Forwarding rules of a running `zerosock serve`: a page fetched and one served, DNS over UDP, what a
//! reload changes, and mistakes that are refused.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::PathBuf;
use std::thread;

use crate::process::{DEADLINE, Running, wait_until, zerosock};
use sha2::{Digest, Sha256};
use zerosock::vsock::{Datagram, Endpoint, Listener};
use zerosock::{Address, Cid, Port};

/// A server of one VM, with more flags or a file that can be written anew.
struct Room {
    dir: tempfile::TempDir,
    serve: Option<Running>,
    /// Number of outcomes of reloads in the log.
    said: usize,
}

impl Room {
    fn empty() -> Room {
        Room {
            dir: tempfile::tempdir().unwrap(),
            serve: None,
            said: 0,
        }
    }

    /// A server with these flags.
    fn with_flags(flags: &[&str]) -> Room {
        let mut room = Room::empty();
        let mut serve = zerosock();
        serve.arg("serve").arg("--socket").arg(room.at("vm3"));
        serve.arg("--uds-path").arg(room.at("u3")).args(flags);
        room.start(serve);
        room
    }

    /// A server with a file of one VM and these lines.
    fn with_file(lines: &str) -> Room {
        let mut room = Room::empty();
        room.write(lines);
        let mut serve = zerosock();
        serve.args(["serve", "--config"]).arg(room.at("vms.yaml"));
        room.start(serve);
        room
    }

    fn start(&mut self, mut serve: std::process::Command) {
        serve.env("NOTIFY_SOCKET", self.at("notify"));
        let manager = UnixDatagram::bind(self.at("notify")).unwrap();
        manager.set_read_timeout(Some(DEADLINE)).unwrap();
        self.serve = Some(Running::start(&mut serve));
        let mut message = [0; 1024];
        let length = manager.recv(&mut message).unwrap();
        assert!(String::from_utf8_lossy(&message[..length]).contains("READY=1"));
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Writes the file; `@` stands for the directory.
    fn write(&self, lines: &str) {
        let vm = "vms: [{guest_cid: 3, socket: @/vm3, uds_path: @/u3}]";
        self.write_whole(&format!("{vm}\n{lines}"));
    }

    /// Writes the file with a list of VMs of its own.
    fn write_whole(&self, file: &str) {
        let file = file.replace('@', &self.dir.path().display().to_string());
        std::fs::write(self.at("vms.yaml"), file).unwrap();
    }

    fn stderr(&self) -> String {
        self.serve.as_ref().unwrap().stderr()
    }

    /// Writes the file and reloads it. Returns the whole log.
    fn reload(&mut self, lines: &str) -> String {
        self.write(lines);
        self.reload_file()
    }

    /// Reloads the file as it is. Returns the whole log.
    fn reload_file(&mut self) -> String {
        self.serve.as_ref().unwrap().signal("HUP");
        let outcomes = |said: &str| said.matches("reloaded").count();
        wait_until("an answer", || outcomes(&self.stderr()) > self.said);
        let all = self.stderr();
        self.said = outcomes(&all);
        all
    }

    fn guest(&self) -> Endpoint {
        Endpoint::builder().attach_device(self.at("vm3")).unwrap()
    }

    fn stop(mut self) -> String {
        let serve = self.serve.take().unwrap();
        serve.signal("TERM");
        let ended = serve.finish();
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        ended.stderr
    }
}

fn host(port: u32) -> Address {
    Address::new(Cid::HOST, Port::new(port))
}

/// An address of loopback on which nothing listens now.
fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
}

fn server() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

fn page() -> Vec<u8> {
    (0..3_000_000u32)
        .map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect()
}

/// Reads a request up to its empty line, and answers it with the page.
fn serve_page(mut stream: impl Read + Write) -> String {
    let mut request = Vec::new();
    let mut part = [0; 1024];
    while !request.ends_with(b"\r\n\r\n") {
        let got = stream.read(&mut part).unwrap();
        assert!(got > 0, "half a request");
        request.extend_from_slice(&part[..got]);
    }
    let body = page();
    let head = format!("HTTP/1.0 200 OK\r\nContent-Length: {}\r\n\r\n", body.len());
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(&body).unwrap();
    String::from_utf8(request).unwrap()
}

/// Sends a request, and checks the page that comes.
#[track_caller]
fn fetch_page(mut stream: impl Read + Write) {
    stream
        .write_all(b"GET /page HTTP/1.0\r\nHost: example.test\r\n\r\n")
        .unwrap();
    let mut reply = Vec::new();
    stream.read_to_end(&mut reply).unwrap();
    let head = reply
        .windows(4)
        .position(|part| part == b"\r\n\r\n")
        .unwrap()
        + 4;
    assert!(reply.starts_with(b"HTTP/1.0 200 OK"));
    assert_eq!(Sha256::digest(&reply[head..]), Sha256::digest(page()));
}

#[test]
fn a_guest_fetches_a_page_through_a_rule_and_the_log_says_so() {
    let (listener, address) = server();
    let room = Room::with_flags(&["--forward", &format!("8080=tcp:{address}")]);
    let guest = room.guest();
    let web = thread::spawn(move || serve_page(listener.accept().unwrap().0));
    fetch_page(guest.connect(host(8080)).unwrap());
    assert!(web.join().unwrap().starts_with("GET /page"));
    let line = format!("rule=\"forward 8080 to tcp:{address}\"");
    wait_until("a line of the access log", || {
        let said = room.stderr();
        let mut lines = said.lines();
        lines.any(|said| said.contains("forwarded connection ended") && said.contains(&line))
    });
    let said = room.stderr();
    let ended = said
        .lines()
        .find(|line| line.contains("forwarded connection ended"))
        .unwrap();
    for wanted in [
        "from=\"3:",
        "sent=42",
        "received=30000",
        "seconds=",
        "reason=\"closed\"",
    ] {
        assert!(ended.contains(wanted), "{wanted}: {ended}");
    }
    let said = room.stop();
    let totals = said
        .lines()
        .find(|line| line.contains("connections of a rule"))
        .unwrap();
    assert!(totals.contains("opened=1"), "{totals}");
}

#[test]
fn clients_fetch_a_page_that_a_guest_serves() {
    let on = free_address();
    let room = Room::with_flags(&["--listen", &format!("tcp:{on}=3:80")]);
    let guest = room.guest();
    let listener = guest.listen(Port::new(80), 8).unwrap();
    let web = thread::spawn(move || {
        let (stream, peer) = listener.accept_timeout(DEADLINE).unwrap();
        assert_eq!(peer.cid, Cid::HOST);
        serve_page(stream)
    });
    fetch_page(TcpStream::connect(on).unwrap());
    web.join().unwrap();
}

#[test]
fn a_guest_asks_a_name_server_through_a_udp_rule() {
    let server = UdpSocket::bind("127.0.0.1:0").unwrap();
    server.set_read_timeout(Some(DEADLINE)).unwrap();
    let to = server.local_addr().unwrap();
    let room = Room::with_file(&format!("forward: [{{port: 53, to: 'udp:{to}'}}]"));
    let guest = room.guest();
    let socket = guest.connect_seqpacket(host(53)).unwrap();
    socket.set_read_timeout(Some(DEADLINE)).unwrap();
    for query in [&b"\x12\x34query one"[..], b"\x56\x78and two"] {
        socket.send(query).unwrap();
        let mut datagram = [0; 512];
        let (len, from) = server.recv_from(&mut datagram).unwrap();
        assert_eq!(&datagram[..len], query);
        server
            .send_to(&[&query[..2], b"answer"].concat(), from)
            .unwrap();
        let got = socket.recv(&mut datagram).unwrap().unwrap();
        assert_eq!(datagram[..got.len], [&query[..2], b"answer"].concat());
    }
}

#[test]
fn datagrams_of_a_guest_take_the_same_rule_and_the_log_says_so() {
    let server = UdpSocket::bind("127.0.0.1:0").unwrap();
    server.set_read_timeout(Some(DEADLINE)).unwrap();
    let to = server.local_addr().unwrap();
    let room = Room::with_file(&format!(
        "forward: [{{port: 53, to: 'udp:{to}', idle_timeout: 0.2}}]"
    ));
    let guest = room.guest();
    let socket = Datagram::bind(&guest, Port::new(1000)).unwrap();
    socket.set_read_timeout(Some(DEADLINE)).unwrap();
    socket.send_to(b"query", host(53)).unwrap();
    let mut datagram = [0; 512];
    let (len, from) = server.recv_from(&mut datagram).unwrap();
    assert_eq!(&datagram[..len], b"query");
    server.send_to(b"an answer", from).unwrap();
    let (len, from) = socket.recv_from(&mut datagram).unwrap();
    assert_eq!((&datagram[..len], from), (&b"an answer"[..], host(53)));
    let ended = |line: &&str| line.contains("forwarded connection ended");
    wait_until("a line of the access log", || {
        room.stderr().lines().any(|line| ended(&line))
    });
    let said = room.stderr();
    let line = said.lines().find(ended).unwrap();
    for wanted in ["from=\"3:1000\"", "sent=5 received=9", "reason=\"idle\""] {
        assert!(line.contains(wanted), "{wanted}: {line}");
    }
}

#[test]
fn a_guest_writes_a_bounded_number_of_lines_of_the_access_log() {
    const MOST: usize = 1000;
    let (listener, address) = server();
    let room = Room::with_flags(&["--forward", &format!("1=tcp:{address}")]);
    let guest = room.guest();
    let begin = std::time::Instant::now();
    for _ in 0..MOST + 50 {
        drop(guest.connect(host(1)).unwrap());
        listener.accept().unwrap();
    }
    let said = room.stop();
    if begin.elapsed() > std::time::Duration::from_secs(9) {
        return println!(
            "SKIPPED: a_guest_writes_a_bounded_number_of_lines_of_the_access_log: the machine is too slow"
        );
    }
    let lines = said.matches("forwarded connection ended").count();
    assert_eq!(lines, MOST);
    assert!(said.contains("opened=1050"), "{said}");
}

#[test]
fn the_log_tells_why_each_connection_has_ended() {
    let (listener, address) = server();
    let room = Room::with_file(&format!(
        "forward: [{{port: 1, to: 'tcp:{address}'}}, \
         {{port: 2, to: 'tcp:{address}', idle_timeout: 0.2}}, {{port: 3, to: 'unix:/nonexistent'}}]"
    ));
    let guest = room.guest();
    let connect = |port| {
        let stream = guest.connect(host(port)).unwrap();
        (stream, listener.accept().unwrap().0)
    };
    let (_reset_by_server, at_server) = connect(1);
    rustix::net::sockopt::set_socket_linger(&at_server, Some(std::time::Duration::ZERO)).unwrap();
    drop(at_server);
    let (reset_by_guest, _at_server) = connect(1);
    reset_by_guest.reset();
    let _idle = connect(2);
    guest.connect(host(3)).unwrap_err();
    let (_open, _at_server) = connect(1);
    for reason in ["reset by the remote side", "reset by the endpoint", "idle"] {
        let wanted = format!("reason=\"{reason}\"");
        wait_until(&wanted, || room.stderr().contains(&wanted));
    }
    let refused = "connection not forwarded rule=\"forward 3 to unix:/nonexistent\"";
    assert!(room.stderr().contains(refused), "{}", room.stderr());
    let said = room.stop();
    assert!(said.contains("reason=\"reset by the daemon\""), "{said}");
}

/// Accepts one connection to `port` and returns what it says.
fn said_to(listener: &Listener) -> String {
    let (mut stream, _) = listener.accept_timeout(DEADLINE).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

fn say(stream: impl Read + Write, text: &str) {
    let mut stream = stream;
    stream.write_all(text.as_bytes()).unwrap();
}

#[test]
fn a_unix_listener_has_its_permissions_and_is_removed_with_its_rule() {
    let mut room = Room::with_file("listen: [{on: 'unix:@/in', to: '3:22', mode: '0600'}]");
    let guest = room.guest();
    let listener = guest.listen(Port::new(22), 8).unwrap();
    let mode = std::fs::metadata(room.at("in"))
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);
    say(UnixStream::connect(room.at("in")).unwrap(), "hello");
    assert_eq!(said_to(&listener), "hello");
    let other = "listen: [{on: 'unix:@/other', to: '3:22'}]";
    room.reload(other);
    assert!(!room.at("in").exists());
    say(UnixStream::connect(room.at("other")).unwrap(), "again");
    assert_eq!(said_to(&listener), "again");
    let (at_other, dir) = (room.at("other"), room.dir.path().to_owned());
    assert!(dir.exists());
    let serve = room.serve.take().unwrap();
    serve.signal("TERM");
    assert_eq!(serve.finish().code, Some(0));
    assert!(!at_other.exists());
}

#[test]
fn connections_of_a_removed_rule_continue_after_a_reload() {
    let (listener, address) = server();
    let mut room = Room::with_file(&format!("forward: [{{port: 1, to: 'tcp:{address}'}}]"));
    let guest = room.guest();
    let mut stream = guest.connect(host(1)).unwrap();
    let (mut at_server, _) = listener.accept().unwrap();
    let said = room.reload("forward: []");
    let drained = said
        .lines()
        .find(|line| line.contains("connections of a rule"))
        .unwrap();
    assert!(
        drained.contains("removed=true") && drained.contains("active=1"),
        "{drained}"
    );
    stream.write_all(b"still here").unwrap();
    let mut got = [0; 10];
    at_server.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"still here");
    let error = guest.connect(host(1)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
}

/// The lines of the log with all of these texts.
fn lines_with(said: &str, texts: &[&str]) -> usize {
    let has_all = |line: &&str| texts.iter().all(|text| line.contains(text));
    said.lines().filter(has_all).count()
}

#[test]
fn log_and_counters_name_the_rules_that_have_names() {
    let (listener, address) = server();
    let (ssh, lost) = (free_address(), free_address());
    let room = Room::with_file(&format!(
        "access: [deny: {{name: no-telnet, from: 3, to: host, ports: 23}}]\n\
         forward: [{{name: web, port: 1, to: 'tcp:{address}'}}, \
         {{name: closed, port: 2, to: 'unix:/nonexistent'}}]\n\
         listen: [{{name: web, on: 'tcp:{ssh}', to: '3:22'}}, {{name: lost, on: 'tcp:{lost}', to: '9:1'}}]"
    ));
    let guest = room.guest();
    guest.connect(host(23)).unwrap_err();
    guest.connect(host(2)).unwrap_err();
    drop((guest.connect(host(1)).unwrap(), listener.accept().unwrap()));
    let at_guest = guest.listen(Port::new(22), 8).unwrap();
    let client = TcpStream::connect(ssh).unwrap();
    drop((at_guest.accept_timeout(DEADLINE).unwrap(), client));
    drop(TcpStream::connect(lost).unwrap());
    let wait = |what: &[&str]| {
        wait_until(&format!("{what:?}"), || {
            lines_with(&room.stderr(), what) > 0
        });
    };
    wait(&["WARN", "listen lost: no VM has CID 9"]);
    wait(&["connection denied", "access no-telnet denies it"]);
    wait(&["connection not forwarded rule=\"forward closed\""]);
    wait(&["forwarded connection ended rule=\"forward web\""]);
    wait(&["forwarded connection ended rule=\"listen web\""]);
    wait(&["client refused rule=\"listen lost\""]);
    room.serve.as_ref().unwrap().signal("USR1");
    wait(&["counters in_place_bytes="]);
    let said = room.stderr();
    for counted in [
        "rule=\"forward web\" removed=false active=0 opened=1 refused=0",
        "rule=\"forward closed\" removed=false active=0 opened=0 refused=1",
        "rule=\"listen web\" removed=false active=0 opened=1",
        "rule=\"listen lost\" removed=false active=0 opened=0 refused=1",
        "access no-telnet has denied 1 connections and datagrams",
    ] {
        assert!(said.contains(counted), "{counted}: {said}");
    }
    room.stop();
}

#[test]
fn a_reload_that_changes_names_only_keeps_connections_listeners_and_counters() {
    let (listener, address) = server();
    let on = free_address();
    let lines = |name: &str| {
        format!(
            "access: [deny: {{name: no-{name}, from: 3, to: host, ports: 23}}]\n\
             forward: [{{name: {name}, port: 1, to: 'tcp:{address}', max_connections: 2}}]\n\
             listen: [{{name: {name}, on: 'tcp:{on}', to: '3:22'}}]"
        )
    };
    let mut room = Room::with_file(&lines("old"));
    let guest = room.guest();
    let mut forwarded = guest.connect(host(1)).unwrap();
    let (mut at_server, _) = listener.accept().unwrap();
    let at_guest = guest.listen(Port::new(22), 8).unwrap();
    let mut client = TcpStream::connect(on).unwrap();
    let (mut accepted, _) = at_guest.accept_timeout(DEADLINE).unwrap();
    guest.connect(host(23)).unwrap_err();
    let said = room.reload(&lines("new"));
    assert_eq!(lines_with(&said, &["connections of a rule"]), 0, "{said}");
    assert_eq!(lines_with(&said, &["has denied"]), 0, "{said}");
    // The connections go on, and the new names count them and later ones.
    let mut got = [0; 5];
    forwarded.write_all(b"hello").unwrap();
    at_server.read_exact(&mut got).unwrap();
    client.write_all(b"hello").unwrap();
    accepted.read_exact(&mut got).unwrap();
    let _second = guest.connect(host(1)).unwrap();
    let _at_server = listener.accept().unwrap();
    guest.connect(host(1)).unwrap_err();
    let _client = TcpStream::connect(on).unwrap();
    at_guest.accept_timeout(DEADLINE).unwrap();
    guest.connect(host(23)).unwrap_err();
    let said = room.stop();
    for counted in [
        "rule=\"forward new\" removed=false active=2 opened=2 refused=1",
        "rule=\"listen new\" removed=false",
        "access no-new has denied 2 connections and datagrams",
    ] {
        assert!(said.contains(counted), "{counted}: {said}");
    }
    assert!(!said.contains("removed=true"), "{said}");
}

#[test]
fn a_reload_with_a_mistake_changes_nothing() {
    let (listener, address) = server();
    let (taken, taken_on) = server();
    let rule = format!("forward: [{{port: 1, to: 'tcp:{address}'}}]");
    let mut room = Room::with_file(&rule);
    let guest = room.guest();
    for (lines, wanted) in [
        (
            "forward: [{port: 1-5, to: 'unix:/a'}, {port: 5, to: 'unix:/b'}]".to_owned(),
            "forward[0] and forward[1]: both match connections from the same endpoints to port 5",
        ),
        (
            format!("listen: [{{on: 'tcp:{taken_on}', to: '3:1'}}]"),
            "the sandbox of this process does not permit TCP listeners",
        ),
        (
            "listen: [{on: 'unix:@/a', to: '3:1'}, {on: 'unix:@/a', to: '3:2'}]".to_owned(),
            "listen[0] and listen[1]: both are on unix:",
        ),
        (
            "forward: [{port: 1, from: 'group:no', to: 'unix:/a'}]".to_owned(),
            "no VM or process is in this group",
        ),
        (
            "forward: [{port: 1, from: host, to: 'unix:/a'}]".to_owned(),
            "forward[0]: from: name VMs or processes",
        ),
        (
            "forward: [{name: a, port: 1, to: 'unix:/a'}, {name: a, port: 2, to: 'unix:/b'}]"
                .to_owned(),
            "forward[0] and forward[1]: both have the name a",
        ),
        (
            "listen: [{name: a, on: 'unix:@/a', to: '3:1'}, {name: a, on: 'unix:@/b', to: '3:2'}]"
                .to_owned(),
            "listen[0] and listen[1]: both have the name a",
        ),
        (
            "access: [deny: {name: a, from: 9, to: any}, allow: {name: a, from: 8, to: any}]"
                .to_owned(),
            "access[0] and access[1]: both have the name a",
        ),
        (
            "listen: [{name: a b, on: 'unix:@/a', to: '3:1'}]".to_owned(),
            "name: `a b`: the name of a rule has 1 to 32 of",
        ),
    ] {
        let said = room.reload(&lines);
        let line = said
            .lines()
            .rfind(|line| line.contains("not reloaded"))
            .unwrap();
        assert!(
            line.contains("nothing was changed") && line.contains(wanted),
            "{line}"
        );
        guest.connect(host(1)).unwrap();
        listener.accept().unwrap();
    }
    drop(taken);
}

#[test]
fn a_server_whose_listener_is_taken_does_not_start() {
    let (_taken, on) = server();
    let room = Room::empty();
    let mut serve = zerosock();
    serve.arg("serve").arg("--socket").arg(room.at("vm3"));
    serve.arg("--uds-path").arg(room.at("u3"));
    serve.args(["--listen", &format!("tcp:{on}=3:22")]);
    let ended = Running::start(&mut serve).finish();
    assert_eq!(ended.code, Some(1));
    let wanted = format!("listen: on tcp:{on}: ");
    assert!(ended.stderr.contains(&wanted), "{}", ended.stderr);
    assert!(!room.at("vm3").exists(), "its sockets are removed");
}

#[test]
fn wrong_flags_are_named_with_what_is_right() {
    for (flag, value, wanted) in [
        ("--forward", "80", "give PORT=TARGET"),
        ("--forward", "80=http:a:1", "http:a:1"),
        ("--forward", "70000=tcp:a", "only ports from 1 to 65535"),
        ("--listen", "tcp:1.2.3.4:5", "give ADDRESS=CID:PORT"),
        ("--listen", "tcp:1.2.3.4:5=2:1", "names no endpoint"),
    ] {
        let mut serve = zerosock();
        serve.args([
            "serve",
            "--socket",
            "/tmp/a",
            "--uds-path",
            "/tmp/b",
            flag,
            value,
        ]);
        let ended = Running::start(&mut serve).finish();
        assert_eq!(ended.code, Some(2), "{value}: {}", ended.stderr);
        assert!(ended.stderr.contains(wanted), "{value}: {}", ended.stderr);
    }
}

/// Connects to a port of the host, and checks that the connection comes to this listener.
fn answer(guest: &Endpoint, port: u32, listener: &UnixListener, text: &str) {
    let mut stream = guest.connect(host(port)).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    listener.set_nonblocking(true).unwrap();
    let mut accepted = None;
    wait_until("a connection", || {
        accepted = listener.accept().ok();
        accepted.is_some()
    });
    let (mut accepted, _) = accepted.unwrap();
    accepted.write_all(text.as_bytes()).unwrap();
    drop(accepted);
    let mut got = String::new();
    stream.read_to_string(&mut got).unwrap();
    assert_eq!(got, text);
}

#[test]
fn ports_of_uds_path_have_sockets_at_their_own_paths() {
    let dir = tempfile::tempdir().unwrap();
    let listen = |name: &str| UnixListener::bind(dir.path().join(name)).unwrap();
    let (agent, other) = (listen("agent.sock"), listen("other.sock"));
    let at = |name: &str| dir.path().join(name).display().to_string();
    let flag = format!("1234={}", at("agent.sock"));
    let mut room = Room::with_flags(&["--uds-path", &flag]);
    let by_port = UnixListener::bind(room.at("u3_1235")).unwrap();
    let guest = room.guest();
    answer(&guest, 1234, &agent, "the agent");
    answer(&guest, 1235, &by_port, "PATH_PORT, as before");
    drop(guest);
    room.stop();

    // In the file; a reload changes it.
    room = Room::empty();
    let vms = |target: &str| {
        format!(
            "vms: [{{guest_cid: 3, socket: @/vm3, uds_path: [@/u3, '1234={}']}}]\n",
            at(target)
        )
    };
    room.write_whole(&vms("agent.sock"));
    let mut serve = zerosock();
    serve.args(["serve", "--config"]).arg(room.at("vms.yaml"));
    room.start(serve);
    let guest = room.guest();
    answer(&guest, 1234, &agent, "of the file");
    room.write_whole(&vms("other.sock"));
    let log = room.reload_file();
    assert!(!log.contains("not reloaded"), "{log}");
    answer(&guest, 1234, &other, "after a reload");
}
