//! SIGHUP to a running `zerosock serve --config`: what changes, what stays, and which connections
//! continue.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use crate::process::{DEADLINE, Running, wait_until, zerosock};
use sha2::{Digest, Sha256};
use zerosock::vsock::{Endpoint, Listener, Stream};
use zerosock::{Address, Cid, Port};

/// A server with a file that can be written anew.
struct TestDaemon {
    dir: tempfile::TempDir,
    serve: Option<Running>,
    /// Number of outcomes of reloads in the log.
    said: usize,
}

impl TestDaemon {
    fn new(file: &str) -> TestDaemon {
        let mut daemon = TestDaemon {
            dir: tempfile::tempdir().unwrap(),
            serve: None,
            said: 0,
        };
        daemon.write(file);
        let mut serve = zerosock();
        serve.args(["serve", "--workers", "2", "--config"]);
        serve.arg(daemon.at("vms.yaml"));
        serve.env("NOTIFY_SOCKET", daemon.at("notify"));
        let manager = UnixDatagram::bind(daemon.at("notify")).unwrap();
        manager.set_read_timeout(Some(DEADLINE)).unwrap();
        daemon.serve = Some(Running::start(&mut serve));
        let mut message = [0; 1024];
        let length = manager.recv(&mut message).unwrap();
        assert!(String::from_utf8_lossy(&message[..length]).contains("READY=1"));
        daemon
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Writes the file; `@` stands for the directory.
    fn write(&self, file: &str) {
        let file = file.replace('@', &self.dir.path().display().to_string());
        std::fs::write(self.at("vms.yaml"), file).unwrap();
    }

    /// The lines that the server has written. One that is being written does not count.
    fn stderr(&self) -> String {
        let mut said = self.serve.as_ref().unwrap().stderr();
        said.truncate(said.rfind('\n').map_or(0, |end| end + 1));
        said
    }

    /// Reloads the file, and returns the new log lines.
    fn reload(&mut self) -> String {
        let before = self.stderr().len();
        self.serve.as_ref().unwrap().signal("HUP");
        let outcomes = |said: &str| said.matches("reloaded").count();
        wait_until("an answer", || outcomes(&self.stderr()) > self.said);
        let all = self.stderr();
        self.said = outcomes(&all);
        all[before..].to_owned()
    }

    /// As the guest of the VM.
    fn guest(&self, cid: u32) -> Endpoint {
        let guest = Endpoint::builder().attach_device(self.at(&format!("vm{cid}")));
        let guest = guest.unwrap();
        assert_eq!(guest.cid(), Cid::new(cid));
        guest
    }

    fn stop(mut self) -> String {
        let serve = self.serve.take().unwrap();
        serve.signal("TERM");
        let ended = serve.finish();
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        ended.stderr
    }
}

fn at(cid: u32, port: u32) -> Address {
    Address::new(Cid::new(cid), Port::new(port))
}

/// Connects one to a port of the other, where this listens.
fn pair(from: &Endpoint, to: Address, listener: &Listener) -> (Stream, Stream) {
    thread::scope(|scope| {
        let connecting = scope.spawn(|| from.connect(to).unwrap());
        let (accepted, _) = listener.accept_timeout(DEADLINE).unwrap();
        (connecting.join().unwrap(), accepted)
    })
}

/// Accepts every connection while the endpoint exists; this also drives the endpoint.
fn keep_accepting(listener: Listener) {
    thread::spawn(move || while listener.accept().is_ok() {});
}

/// Whether a connect to the port succeeds; only the switch refuses here.
fn reaches(from: &Endpoint, to: Address) -> bool {
    match from.connect(to) {
        Ok(_) => true,
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{error}");
            false
        }
    }
}

#[test]
fn a_listening_rule_without_its_vm_is_named_in_the_log() {
    let vm = "vms: [{guest_cid: 3, socket: @/vm3, uds_path: @/u3}]\n";
    let one = "listen: [{on: 'unix:@/in', to: '7:80'}, {on: 'unix:@/other', to: '3:80'}, \
               {on: 'unix:@/name', to: 'name:web:80'}, {on: 'unix:@/service', to: 'host:80'}]\n";
    let warning = |said: &str| said.matches("no VM has CID").count();
    let mut daemon = TestDaemon::new(&format!("{vm}{one}"));
    let rule = format!("unix:{}=7:80: no VM has CID 7", daemon.at("in").display());
    wait_until("a warning", || warning(&daemon.stderr()) == 1);
    let said = daemon.stderr();
    assert!(said.contains(&rule), "{said}");
    let said = daemon.reload();
    assert!(warning(&said) == 1 && said.contains(&rule), "{said}");
    let seven = vm.replace("]", ", {guest_cid: 7, socket: @/vm7, uds_path: @/u7}]");
    daemon.write(&format!("{seven}{one}"));
    let said = daemon.reload();
    assert_eq!(warning(&said), 0, "{said}");
    daemon.stop();
    // A process can attach with this CID.
    let attach = "attach: {socket: @/attach}\n";
    let mut daemon = TestDaemon::new(&format!("{vm}{one}{attach}"));
    daemon.reload();
    assert_eq!(warning(&daemon.stop()), 0);
}

const THREE: &str = "{guest_cid: 3, socket: @/vm3, uds_path: @/u3";
const FOUR: &str = "{guest_cid: 4, socket: @/vm4, uds_path: @/u4";
const ATTACH: &str = "attach: {socket: @/attach";

#[test]
fn a_live_stream_does_not_notice() {
    let vms = format!("vms: [{THREE}}}, {FOUR}}}]\n{ATTACH}}}\n");
    let forbidden = format!("{vms}access: [deny: {{from: any, to: any}}]");
    let apart = format!("vms: [{THREE}, groups: a}}, {FOUR}, groups: b}}]\n{ATTACH}}}\n");
    let mut daemon = TestDaemon::new(&vms);
    let (three, four) = (daemon.guest(3), daemon.guest(4));
    let listener = four.listen(Port::new(1), 64).unwrap();
    let (stream, accepted) = pair(&three, at(4, 1), &listener);
    keep_accepting(listener);
    let (stop, moved) = (AtomicBool::new(false), AtomicU64::new(0));
    let (sent, received) = thread::scope(|scope| {
        let sending = scope.spawn(|| {
            let (mut hash, mut round) = (Sha256::new(), 0u64);
            while !stop.load(Ordering::Relaxed) {
                let part: Vec<u8> = (0..8192u64)
                    .flat_map(|n| (n * round).to_le_bytes())
                    .collect();
                (&mut &stream).write_all(&part).unwrap();
                hash.update(&part);
                round += 1;
            }
            stream.shutdown(Shutdown::Write).unwrap();
            hash.finalize()
        });
        let receiving = scope.spawn(|| {
            let (mut hash, mut part) = (Sha256::new(), vec![0; 65536]);
            loop {
                match (&mut &accepted).read(&mut part).unwrap() {
                    0 => return hash.finalize(),
                    more => {
                        hash.update(&part[..more]);
                        moved.fetch_add(more as u64, Ordering::Relaxed);
                    }
                }
            }
        });
        for _ in 0..5 {
            for (file, allowed) in [(&forbidden, false), (&vms, true), (&apart, false)] {
                daemon.write(file);
                let said = daemon.reload();
                assert!(!said.contains("ERROR"), "{said}");
                assert_eq!(reaches(&three, at(4, 1)), allowed, "{said}");
                // Bytes move under each of them.
                let before = moved.load(Ordering::Relaxed);
                wait_until("bytes", || {
                    moved.load(Ordering::Relaxed) > before + (1 << 20)
                });
            }
        }
        stop.store(true, Ordering::Relaxed);
        (sending.join().unwrap(), receiving.join().unwrap())
    });
    assert_eq!(sent, received);
    daemon.stop();
}

/// Sends there and back.
#[track_caller]
fn echoes(mut one: impl Read + Write, mut two: impl Read + Write, word: &[u8]) {
    let mut got = vec![0; word.len()];
    one.write_all(word).unwrap();
    two.read_exact(&mut got).unwrap();
    assert_eq!(got, word);
    two.write_all(word).unwrap();
    one.read_exact(&mut got).unwrap();
    assert_eq!(got, word);
}

/// A connection of each kind, through files with errors and files whose rules would forbid it.
#[test]
fn existing_connections_survive_every_reload() {
    const ALL: &str = "deny: {from: any, to: any}";
    let good = format!("vms: [{THREE}}}, {FOUR}}}]\n{ATTACH}, uds_path: '@/p'}}\n");
    let mut daemon = TestDaemon::new(&good);
    let (three, four) = (daemon.guest(3), daemon.guest(4));
    let process = Endpoint::attach(daemon.at("attach")).unwrap();
    let service = Endpoint::builder().ports([Port::new(10)]);
    let service = service.attach_as_host(daemon.at("attach")).unwrap();
    let listen = |endpoint: &Endpoint| endpoint.listen(Port::new(10), 64).unwrap();
    let (at_four, at_process, at_service) = (listen(&four), listen(&process), listen(&service));
    let cid = process.cid().get();
    let streams = [
        pair(&three, at(4, 10), &at_four),
        pair(&three, at(cid, 10), &at_process),
        pair(&process, at(4, 10), &at_four),
        pair(&three, at(2, 10), &at_service),
        pair(&process, at(2, 10), &at_service),
        pair(&service, at(4, 10), &at_four),
    ];
    let program = UnixListener::bind(daemon.at("u3_20")).unwrap();
    let out = three.connect(at(2, 20)).unwrap();
    let mut host = vec![(out, program.accept().unwrap().0)];
    let mut socket = UnixStream::connect(daemon.at("u4")).unwrap();
    socket.set_read_timeout(Some(DEADLINE)).unwrap();
    socket.write_all(b"CONNECT 10\n").unwrap();
    let (from_host, from) = at_four.accept_timeout(DEADLINE).unwrap();
    assert_eq!(from.cid, Cid::HOST);
    let mut ok = [0];
    while ok != *b"\n" {
        socket.read_exact(&mut ok).unwrap();
    }
    host.push((from_host, socket));
    host[0].1.set_read_timeout(Some(DEADLINE)).unwrap();
    for listener in [at_four, at_process, at_service] {
        keep_accepting(listener);
    }
    let targets = [
        (&three, at(4, 10)),
        (&three, at(cid, 10)),
        (&process, at(4, 10)),
        (&three, at(2, 10)),
        (&service, at(4, 10)),
        (&three, at(2, 20)),
    ];
    // The file, whether it is accepted, and whether connects are allowed afterwards.
    let files = [
        ("vms: [".to_owned(), false, true),
        (format!("{good}access: [{ALL}, oops]"), false, true),
        (format!("{good}access: [{ALL}]"), true, false),
        // A file with an error leaves the rules of the last good file in effect.
        (format!("{good}acces: []"), false, false),
        (good.clone(), true, true),
        (
            format!(
                "vms: [{THREE}, groups: a}}, {FOUR}, groups: b}}]
{ATTACH}, uds_path: '@/p', groups: c, uid: [4000000001], service_uid: [4000000001], max: 1,
  service_max: 0}}
access: [deny: {{from: any, to: host}}, deny: {{from: host, to: any}}]"
            ),
            true,
            false,
        ),
        (String::new(), false, false),
        (good.clone(), true, true),
    ];
    for (file, taken, allowed) in files {
        daemon.write(&file);
        let said = daemon.reload();
        assert_eq!(
            !said.contains("nothing was changed"),
            taken,
            "{file}: {said}"
        );
        for (from, to) in targets {
            assert_eq!(reaches(from, to), allowed, "{to}: {file}: {said}");
        }
        for (n, (one, two)) in streams.iter().enumerate() {
            echoes(&mut &*one, &mut &*two, format!("{n}: {file}").as_bytes());
        }
        for (guest, socket) in &host {
            echoes(&mut &*guest, &mut &*socket, file.as_bytes());
        }
        // The service has its port.
        let another = Endpoint::builder().ports([Port::new(10)]);
        assert!(another.attach_as_host(daemon.at("attach")).is_err());
    }
    daemon.stop();
}

#[test]
fn vms_come_and_go_and_others_stay() {
    let mut daemon = TestDaemon::new(&format!("vms: [{THREE}}}]"));
    let three = daemon.guest(3);
    let listener = three.listen(Port::new(1), 64).unwrap();
    daemon.write(&format!("vms: [{THREE}}}, {FOUR}}}]"));
    let said = daemon.reload();
    assert!(said.contains("added=[4] removed=[]"), "{said}");
    let four = daemon.guest(4);
    let (stream, mut accepted) = pair(&four, at(3, 1), &listener);
    keep_accepting(listener);
    // Its way to the host is there too.
    let program = UnixListener::bind(daemon.at("u4_7")).unwrap();
    let out = four.connect(at(2, 7)).unwrap();
    let (mut socket, _) = program.accept().unwrap();
    daemon.write(&format!("vms: [{THREE}}}]"));
    let said = daemon.reload();
    assert!(said.contains("added=[] removed=[4]"), "{said}");
    let mut byte = [0];
    assert_eq!(
        accepted.read(&mut byte).unwrap_err().kind(),
        ErrorKind::ConnectionReset
    );
    assert_eq!(socket.read(&mut byte).unwrap_or(0), 0);
    wait_until("its sockets to go", || {
        !daemon.at("vm4").exists() && !daemon.at("u4").exists()
    });
    drop((four, stream, out));
    assert!(!reaches(&three, at(4, 1)));
    // And comes again.
    daemon.write(&format!("vms: [{FOUR}}}, {THREE}}}]"));
    let said = daemon.reload();
    assert!(said.contains("added=[4] removed=[]"), "{said}");
    assert!(reaches(&daemon.guest(4), at(3, 1)));
    let said = daemon.stop();
    assert!(!said.contains("cannot change"), "{said}");
}

#[test]
fn a_file_with_an_error_changes_nothing_and_the_log_names_the_line() {
    let good = format!("vms: [{THREE}}}, {FOUR}}}]\n");
    let mut daemon = TestDaemon::new(&good);
    let (three, four) = (daemon.guest(3), daemon.guest(4));
    keep_accepting(four.listen(Port::new(1), 64).unwrap());
    let used = UnixListener::bind(daemon.at("used")).unwrap();
    for (file, wanted) in [
        ("vms: [".to_owned(), "vms.yaml: "),
        (String::new(), "the list `vms` is empty"),
        (format!("{good}acces: []"), "unknown field `acces`"),
        (
            format!(
                "{good}access:\n  - deny: {{from: any, to: any}}\n  - deny: {{from: 1, to: any}}"
            ),
            "access[1].deny: `1` has a reserved CID; those of guests are 3 to 4294967294; give any",
        ),
        (
            format!("{good}access:\n  - deny: {{from: 'group:kvm', to: any}}"),
            "access[0] group:kvm: no VM or process is in this group; the groups are default",
        ),
        (
            format!("vms: [{THREE}, queue_size: 5}}]"),
            "vms[0].queue_size 5: give a power of two",
        ),
        // A valid file, but a path in use.
        (
            format!(
                "vms: [{THREE}, groups: x}}, {{guest_cid: 9, socket: @/used, uds_path: @/u9}}]"
            ),
            "in use by a live process",
        ),
    ] {
        daemon.write(&file);
        let said = daemon.reload();
        assert!(
            said.contains("configuration not reloaded, nothing was changed"),
            "{file}: {said}"
        );
        assert!(said.contains(wanted), "{file}: {said}");
        assert!(reaches(&three, at(4, 1)), "{file}");
        assert!(!daemon.at("u9").exists());
    }
    let lines = daemon.stderr();
    assert!(lines.contains("at line 4"), "the line of a rule: {lines}");
    drop(used);
    std::fs::remove_file(daemon.at("vms.yaml")).unwrap();
    assert!(daemon.reload().contains("cannot be read"));
    daemon.write(&good);
    assert!(!daemon.reload().contains("nothing was changed"));
    daemon.stop();
}

#[test]
fn a_change_that_needs_a_restart_is_logged_and_not_applied() {
    let mut daemon = TestDaemon::new(&format!("vms: [{THREE}}}]\n{ATTACH}, uid: [4000000001]}}"));
    let three = daemon.guest(3);
    let refused = Endpoint::attach(daemon.at("attach")).unwrap_err();
    let kind = std::io::Error::from(refused).kind();
    assert_eq!(kind, ErrorKind::PermissionDenied);
    daemon.write(
        "vms: [{guest_cid: 3, socket: @/other, uds_path: @/u3, queue_size: 64}]
attach: {socket: @/attach, mode: '0600', max: 1, service_max: 0}
access: [deny: {from: 3, to: host, ports: 5}]",
    );
    let said = daemon.reload();
    for wanted in [
        "VM 3: socket cannot change while it runs: it stays ",
        "VM 3: queue_size cannot change while it runs: it stays 1024, not 64",
        "attach: mode cannot change while it runs: it stays that of the other sockets, not 0600",
        "attach=true rules=1",
    ] {
        assert!(said.contains(wanted), "{said}");
    }
    assert!(daemon.at("vm3").exists() && !daemon.at("other").exists());
    // The rest has changed: the users, the numbers, the list.
    let process = Endpoint::attach(daemon.at("attach")).unwrap();
    let full = Endpoint::attach(daemon.at("attach")).unwrap_err();
    assert!(full.to_string().contains("limit of processes"), "{full}");
    let full = Endpoint::builder().attach_as_host(daemon.at("attach"));
    assert!(full.is_err());
    let programs = [5, 6].map(|port| UnixListener::bind(daemon.at(&format!("u3_{port}"))).unwrap());
    assert!(!reaches(&three, at(2, 5)) && reaches(&three, at(2, 6)));
    // A second reload names it again; attached processes stay although no user may attach now.
    daemon.write(&format!("vms: [{THREE}}}]\n{ATTACH}, uid: [4000000001]}}"));
    let said = daemon.reload();
    assert!(!said.contains("cannot change"), "{said}");
    keep_accepting(process.listen(Port::new(1), 4).unwrap());
    assert!(reaches(&three, Address::new(process.cid(), Port::new(1))));
    assert!(reaches(&three, at(2, 5)));
    drop(programs);
    daemon.stop();
}

/// The VM would be port 77 of the host for the guest of the other one.
#[test]
fn a_reload_refuses_a_socket_at_the_path_of_a_port() {
    let three = "{socket: '@/vm3', guest_cid: 3, uds_path: '@/s3.vsock'}";
    let mut daemon = TestDaemon::new(&format!("vms: [{three}]"));
    for four in [
        "{socket: '@/vm4', guest_cid: 4, uds_path: '@/s3.vsock_77'}",
        "{socket: '@/s3.vsock_77', guest_cid: 4, uds_path: '@/u4'}",
    ] {
        daemon.write(&format!("vms: [{three}, {four}]"));
        let said = daemon.reload();
        let wanted = "s3.vsock_77: this is port 77 of the host for ";
        assert!(
            said.contains("nothing was changed") && said.contains(wanted),
            "{said}"
        );
        assert!(!daemon.at("s3.vsock_77").exists());
    }
    daemon.stop();
}

#[test]
fn without_a_file_a_hangup_reloads_nothing_and_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let attach = dir.path().join("attach");
    let running = Running::start(zerosock().arg("serve").arg("--attach-socket").arg(&attach));
    wait_until("the socket", || Endpoint::attach(&attach).is_ok());
    running.signal("HUP");
    wait_until("it to say so", || {
        running.stderr().contains("SIGHUP: nothing is reloaded")
    });
    Endpoint::attach(&attach).unwrap();
    running.signal("TERM");
    assert_eq!(running.finish().code, Some(0));
}

#[test]
fn the_service_manager_is_notified_of_a_reload() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let file = format!("attach: {{socket: {}}}", at("attach").display());
    std::fs::write(at("vms.yaml"), file).unwrap();
    let manager = UnixDatagram::bind(at("notify")).unwrap();
    manager.set_read_timeout(Some(DEADLINE)).unwrap();
    let hear = || {
        let mut message = [0; 1024];
        let length = manager.recv(&mut message).unwrap();
        String::from_utf8(message[..length].to_vec()).unwrap()
    };
    let mut serve = zerosock();
    serve.arg("serve").arg("--config").arg(at("vms.yaml"));
    let running = Running::start(serve.env("NOTIFY_SOCKET", at("notify")));
    assert!(hear().contains("READY=1"));
    UnixStream::connect(at("attach")).unwrap_err();
    running.signal("HUP");
    let reloading = hear();
    assert!(
        reloading.contains("RELOADING=1") && reloading.contains("MONOTONIC_USEC="),
        "{reloading}"
    );
    assert!(hear().contains("READY=1"));
    running.signal("TERM");
    while !hear().contains("STOPPING=1") {}
    assert_eq!(running.finish().code, Some(0));
}
