//! The log of `zerosock serve` about connections: each is refused, opened or closed with a reason, and
//! the name of the rule that denies it. docs/logs.md has these lines.

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::Instant;

use crate::process::{Running, wait_until, zerosock};
use zerosock::vsock::{Datagram, Endpoint};
use zerosock::{Address, Cid, Port};

/// A daemon with a VM of CID 3 in group a, and processes in group b.
struct Daemon {
    dir: tempfile::TempDir,
    running: Running,
}

impl Daemon {
    fn start(level: &str) -> Daemon {
        Daemon::with(level, "")
    }

    /// With `more` at the end of the file.
    fn with(level: &str, more: &str) -> Daemon {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name).display().to_string();
        let file = format!(
            "vms: [{{guest_cid: 3, socket: {}, uds_path: {}, groups: a}}]\n\
             attach: {{socket: {}, groups: b, uds_path: {}}}\n\
             access:\n\
             - deny: {{from: any, to: host, ports: 5}}\n\
             - deny: {{name: no-60, from: any, to: host, ports: 60}}\n\
             - allow: {{from: any, to: host}}\n\
             {more}",
            at("control"),
            at("hybrid"),
            at("attach"),
            at("out"),
        );
        fs::write(dir.path().join("vms.yaml"), file).unwrap();
        let mut serve = zerosock();
        serve.args(["serve", "--connect-timeout", "0.3", "--log-level", level]);
        serve.arg("--config");
        let running = Running::start(serve.arg(dir.path().join("vms.yaml")));
        wait_until("it to serve", || {
            running.stderr().contains("processes may attach")
        });
        Daemon { dir, running }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn process(&self) -> Endpoint {
        Endpoint::attach(self.at("attach")).unwrap()
    }

    /// Waits for a line with all of these texts.
    fn wait_for_line(&self, texts: &[&str]) -> String {
        let mut found = None;
        wait_until(&format!("a line with {texts:?}"), || {
            let said = self.running.stderr();
            let mut lines = said.lines();
            found = lines
                .find(|line| texts.iter().all(|text| line.contains(text)))
                .map(str::to_owned);
            found.is_some()
        });
        found.unwrap()
    }
}

fn at(cid: Cid, port: u32) -> Address {
    Address::new(cid, Port::new(port))
}

#[test]
fn denied_connections_are_named_with_the_rule() {
    let daemon = Daemon::start("info");
    let process = daemon.process();
    process.connect(at(Cid::HOST, 5)).unwrap_err();
    daemon.wait_for_line(&["INFO", "connection denied", "access[0] denies it"]);
    let _vm = Endpoint::builder()
        .attach_device(daemon.at("control"))
        .unwrap();
    process.connect(at(Cid::new(3), 1)).unwrap_err();
    daemon.wait_for_line(&["INFO", "connection denied", "no group in common"]);
    // Ordinary refusals are no denials, and there are at most 20 lines in 10 s.
    let began = Instant::now();
    for _ in 0..200 {
        process.connect(at(Cid::HOST, 5)).unwrap_err();
        process.connect(at(Cid::HOST, 6)).unwrap_err();
    }
    let said = daemon.running.stderr();
    let periods = 2 + began.elapsed().as_secs() as usize / 10;
    assert!(
        said.matches("connection denied").count() <= 2 + 20 * periods,
        "{said}"
    );
    assert!(!said.contains("refused"), "{said}");
    // The counters tell them apart.
    drop(process);
    daemon.running.signal("TERM");
    let said = daemon.running.finish().stderr;
    assert!(
        said.contains("access[0] has denied 201 connections and datagrams"),
        "{said}"
    );
    assert!(!said.contains("access no-60"), "{said}");
    for counter in [
        "refused_denied=202",
        "refused_no_listener=200",
        "refused_backlog_full=0",
    ] {
        assert!(said.contains(counter), "{counter}: {said}");
    }
}

#[test]
fn with_debug_each_connection_has_lines_with_the_reason() {
    let daemon = Daemon::start("debug");
    let (one, two) = (daemon.process(), daemon.process());
    // No program listens at the path.
    one.connect(at(Cid::HOST, 77)).unwrap_err();
    let path = format!("{}_77: No such file", daemon.at("out").display());
    daemon.wait_for_line(&["DEBUG", "connection of the guest refused", &path]);
    // The other process does not listen.
    let target = at(two.cid(), 8);
    let accepting = std::thread::spawn(move || {
        let listener = two.listen(Port::new(9), 1).unwrap();
        let (mut stream, _) = listener.accept().unwrap();
        std::io::copy(&mut stream, &mut std::io::sink()).unwrap();
        two
    });
    one.connect(target).unwrap_err();
    daemon.wait_for_line(&["DEBUG", "connection refused", "has no listener on the port"]);
    one.connect(at(Cid::new(4711), 1)).unwrap_err();
    daemon.wait_for_line(&["DEBUG", "connection refused", "no endpoint has this CID"]);
    let mut connected = None;
    wait_until("the other process to listen", || {
        connected = one.connect(at(target.cid, 9)).ok();
        connected.is_some()
    });
    let peer = format!("local={}", at(target.cid, 9));
    let opened = daemon.wait_for_line(&["DEBUG", "connection opened", &peer]);
    let mut connected = connected.unwrap();
    connected.write_all(b"hello").unwrap();
    drop(connected);
    let flow = opened.split("flow=").nth(1).unwrap();
    let flow = format!("flow={} ", flow.split(' ').next().unwrap());
    let bytes = "from_endpoint=5 to_endpoint=0";
    daemon.wait_for_line(&["DEBUG", "connection closed", &flow, bytes, "reason="]);
    drop(accepting.join().unwrap());
}

#[test]
fn sigusr1_logs_the_counters_and_other_signals_change_nothing() {
    let daemon = Daemon::start("info");
    let said = daemon.running.stderr();
    let first = said.lines().next().unwrap();
    assert!(first.contains("INFO serving vms=1 attach=true"), "{said}");
    assert!(!said.contains("zerosock_cli"), "{said}");
    for signal in ["ALRM", "VTALRM", "PROF", "IO", "PWR", "STKFLT", "34", "64"] {
        daemon.running.signal(signal);
    }
    let db = Endpoint::builder().name("db").attach(daemon.at("attach"));
    let db = db.unwrap();
    let listener = db.listen(Port::new(9), 1).unwrap();
    let to = at(db.cid(), 9);
    let accepting = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut read = Vec::new();
        stream.read_to_end(&mut read).unwrap();
        (db, listener, read)
    });
    let process = daemon.process();
    let mut stream = process.connect(to).unwrap();
    stream.write_all(b"hello").unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let (db, _listener, read) = accepting.join().unwrap();
    assert_eq!(read, b"hello");
    process.connect(at(Cid::HOST, 5)).unwrap_err();
    // Published at the end of the turn that has answered.
    let (sender, receiver) = (process.cid(), to.cid);
    wait_until("the counters", || {
        daemon.running.signal("USR1");
        let said = daemon.running.stderr();
        let has = |texts: &[&str]| {
            let mut lines = said.lines();
            lines.any(|line| texts.iter().all(|text| line.contains(text)))
        };
        has(&[
            &format!("counters of an endpoint cid={sender} "),
            "refused=1",
            "from_endpoint=5",
        ]) && has(&[
            &format!("cid={receiver} name=db "),
            "connections=1",
            "to_endpoint=5",
        ]) && has(&[
            "counters of an endpoint cid=3 ",
            "from_endpoint=0 to_endpoint=0",
        ]) && has(&["access[0] has denied 1 connections"])
            && has(&["INFO counters in_place_bytes="])
    });
    // Still there.
    drop(daemon.process());
    drop(db);
    daemon.running.signal("TERM");
    assert_eq!(daemon.running.finish().code, Some(0));
}

#[test]
fn values_with_blanks_are_quoted() {
    let daemon = Daemon::start("info");
    daemon.process().connect(at(Cid::HOST, 5)).unwrap_err();
    daemon.wait_for_line(&["reason=\"access[0] denies it\""]);
}

/// A TCP listener that answers no more SYN, because its backlog is full, and the connections in it.
fn silent_target() -> (TcpListener, Vec<TcpStream>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    let address = listener.local_addr().unwrap();
    let mut fillers = Vec::new();
    let short = std::time::Duration::from_millis(300);
    while let Ok(filler) = TcpStream::connect_timeout(&address, short) {
        fillers.push(filler);
    }
    (listener, fillers)
}

#[test]
fn a_connection_to_a_guest_that_has_no_driver_or_loses_it_counts_once() {
    let daemon = Daemon::with("debug", "- allow: {from: any, to: any}\n");
    let process = daemon.process();
    process.connect(at(Cid::new(3), 1)).unwrap_err();
    let guest = Endpoint::builder().attach_device(daemon.at("control"));
    let guest = guest.unwrap();
    let asking = process.begin_connect(at(Cid::new(3), 2)).unwrap();
    process.drive().unwrap();
    daemon.wait_for_line(&["connection requested", "3:2"]);
    drop(guest);
    asking.wait_connected().unwrap_err();
    drop(process);
    daemon.running.signal("TERM");
    let said = daemon.running.finish().stderr;
    for counter in ["refused=2 ", "refused_unreachable=2 "] {
        assert!(said.contains(counter), "{counter}: {said}");
    }
}

/// One session in which a connection is refused for each reason. Each line of docs/logs.md has to be in its log.
#[test]
fn each_reason_to_refuse_has_its_line_of_the_documented_log() {
    let (silent, _fillers) = silent_target();
    let closed = TcpListener::bind("127.0.0.1:0").unwrap();
    let (silent, closed_at) = (silent.local_addr().unwrap(), closed.local_addr().unwrap());
    drop(closed);
    let daemon = Daemon::with(
        "debug",
        &format!(
            "forward:\n\
             - {{port: 80, to: 'tcp:{closed_at}'}}\n\
             - {{port: 81, to: 'tcp:{silent}'}}\n\
             - {{name: few, port: 82, to: 'tcp:{silent}', max_connections: 1, connect_timeout: 600}}\n"
        ),
    );
    let refuse = |from: &Endpoint, to| drop(from.connect(to).unwrap_err());
    // A program of the host: no driver, a line that is none, then a guest without a listener.
    let program = |line: &[u8]| {
        let mut program = UnixStream::connect(daemon.at("hybrid")).unwrap();
        program.write_all(line).unwrap();
        let mut answer = Vec::new();
        // The socket is closed without an answer; a reset says the same.
        let _ = program.read_to_end(&mut answer);
        assert_eq!(answer, b"");
    };
    program(b"CONNECT 1\n");
    program(b"GET / HTTP/1.1\n");
    let guest = Endpoint::builder().attach_device(daemon.at("control"));
    let guest = guest.unwrap();
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| program(b"CONNECT 2\n"));
        while !asking.is_finished() {
            guest.drive().unwrap();
            std::thread::yield_now();
        }
    });
    // Access: a rule, a group, a port that is not named; a datagram.
    let one = daemon.process();
    let two = Endpoint::builder().ports([Port::new(8)]).name("db");
    let two = two.attach(daemon.at("attach")).unwrap();
    refuse(&one, at(Cid::HOST, 5));
    refuse(&one, at(Cid::HOST, 60));
    refuse(&one, at(Cid::new(3), 1));
    refuse(&one, at(two.cid(), 9));
    let datagrams = Datagram::bind(&one, Port::new(1000)).unwrap();
    datagrams.send_to(b"denied", at(Cid::HOST, 5)).unwrap();
    // Listeners: none on the host, a full backlog, none in a process, no such CID.
    refuse(&one, at(Cid::HOST, 77));
    let full = daemon.dir.path().join("out_78");
    let listener = UnixListener::bind(&full).unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    let _filler = UnixStream::connect(&full).unwrap();
    refuse(&one, at(Cid::HOST, 78));
    refuse(&one, at(Cid::new(4711), 1));
    let asked = two.cid();
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| refuse(&one, at(asked, 8)));
        while !asking.is_finished() {
            two.drive().unwrap();
            std::thread::yield_now();
        }
    });
    // Rules: nothing listens, no answer, as many as there may be.
    refuse(&one, at(Cid::HOST, 80));
    refuse(&one, at(Cid::HOST, 81));
    let waiting = one.begin_connect(at(Cid::HOST, 82)).unwrap();
    refuse(&one, at(Cid::HOST, 82));
    drop(waiting);
    // One that is established.
    fs::remove_file(&full).unwrap();
    let listener = UnixListener::bind(&full).unwrap();
    let mut stream = one.connect(at(Cid::HOST, 78)).unwrap();
    let (program, _) = listener.accept().unwrap();
    stream.write_all(b"hello").unwrap();
    drop(stream);
    drop(one);
    drop(program);
    daemon.wait_for_line(&["connection closed"]);
    daemon.running.signal("USR1");
    daemon.wait_for_line(&["counters in_place_bytes="]);
    drop((two, guest));
    daemon.running.signal("TERM");
    let said = daemon.running.finish().stderr;
    println!("{said}");
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = fs::read_to_string(root.join("docs/logs.md")).unwrap();
    // These need a guest that stops, many connections, or a slow listener, and have tests of their own.
    let others = [
        "connections ended: the VM has been paused",
        "the guest has its share of the connections",
        "host program refused: 1024 others",
        "reason=\"the backlog of the endpoint's listener stays full",
    ];
    let mut checked = 0;
    for row in page.lines().filter(|line| line.starts_with("| `")) {
        let line = row.split('`').nth(1).unwrap();
        if others.iter().any(|other| line.contains(other)) {
            continue;
        }
        let is_it = |mut said: &str| {
            line.split('…').all(|part| match said.find(part) {
                Some(found) => {
                    said = &said[found + part.len()..];
                    true
                }
                None => false,
            })
        };
        assert!(said.lines().any(is_it), "`{line}` is not in:\n{said}");
        checked += 1;
    }
    assert!(checked >= 20, "{checked} lines");
}
