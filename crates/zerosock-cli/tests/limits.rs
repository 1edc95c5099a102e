//! Shares of process-wide resources of `zerosock serve`: descriptors and address space.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use crate::driver::{Driver, DriverConfig, StreamId};
use crate::process::{DEADLINE, Running, wait_until, zerosock};
use zerosock::{Address, Cid, Port};

const GREEDY: u32 = 3;
const NEIGHBOUR: u32 = 4;
const PORT: u32 = 7;

fn deadline() -> Instant {
    Instant::now() + DEADLINE
}

/// `serve` with two VMs and few descriptors.
struct Daemon {
    serve: Running,
    dir: tempfile::TempDir,
}

impl Daemon {
    fn start(descriptors: u32, options: &[&str]) -> Daemon {
        let dir = tempfile::tempdir().unwrap();
        let plain = zerosock();
        let mut command = Command::new("sh");
        let script = format!("ulimit -n {descriptors}; exec \"$0\" \"$@\"");
        command.args(["-c", &script]).arg(plain.get_program());
        command
            .args(["serve", "--no-supervisor", "--workers", "1"])
            .args(options);
        for (name, value) in plain.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        for cid in [GREEDY, NEIGHBOUR] {
            let at = |kind: &str| dir.path().join(format!("{cid}.{kind}"));
            let (vhost, vsock) = (at("vhost"), at("vsock"));
            command.arg("--vm").arg(format!(
                "guest-cid={cid},socket={},uds-path={}",
                vhost.display(),
                vsock.display()
            ));
        }
        let daemon = Daemon {
            serve: Running::start(&mut command),
            dir,
        };
        wait_until("the devices", || daemon.log().contains("guaranteed_each"));
        daemon
    }

    fn at(&self, cid: u32, kind: &str) -> PathBuf {
        self.dir.path().join(format!("{cid}.{kind}"))
    }

    fn guest(&self, cid: u32) -> Driver {
        let mut guest = None;
        wait_until("a guest", || {
            guest = Driver::attach(DriverConfig::new(self.at(cid, "vhost"))).ok();
            guest.is_some()
        });
        guest.unwrap()
    }

    fn program(&self, cid: u32) -> UnixListener {
        UnixListener::bind(self.at(cid, &format!("vsock_{PORT}"))).unwrap()
    }

    fn log(&self) -> String {
        self.serve.stderr()
    }

    /// A number in the line logged at the start.
    fn number(&self, name: &str) -> usize {
        let log = self.log();
        let mut words = log.split_whitespace();
        let number = words.find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
        let number = number.unwrap_or_else(|| panic!("no {name} in {log}"));
        number.parse().unwrap()
    }
}

/// Connects until refused, or up to this number; each connection has carried a byte.
fn connect(guest: &mut Driver, program: &UnixListener, most: usize) -> Vec<(StreamId, UnixStream)> {
    let mut all = Vec::new();
    while all.len() < most {
        let to = Address::new(Cid::HOST, Port::new(PORT));
        let Ok(stream) = guest.wait_connect(to, deadline()) else {
            break;
        };
        let (mut end, _) = program.accept().unwrap();
        end.set_read_timeout(Some(DEADLINE)).unwrap();
        guest.wait_send(stream, b"x", deadline()).unwrap();
        end.read_exact(&mut [0]).unwrap();
        all.push((stream, end));
    }
    all
}

/// Descriptors of a front-end: memory, and a kick and a call for each of three queues, of which the
/// old ones may not be closed yet.
const OF_FRONTEND: usize = 16;

#[test]
fn a_vm_that_uses_up_all_descriptors_that_it_can_borrow_leaves_its_neighbour_its_share() {
    let daemon = Daemon::start(1024, &["--connect-timeout", "100"]);
    let guaranteed = daemon.number("guaranteed_each");
    let common = daemon.number("common");
    assert_eq!(daemon.number("rlimit_nofile"), 1024);
    assert!(guaranteed > 2 * OF_FRONTEND && common > OF_FRONTEND);
    assert_eq!(daemon.number("max_connections"), guaranteed + common);

    let program = daemon.program(GREEDY);
    let mut greedy = daemon.guest(GREEDY);
    let mut held = connect(&mut greedy, &program, usize::MAX);
    assert!(held.len() > guaranteed, "{}: it can borrow", held.len());
    assert!(held.len() <= guaranteed + common, "{}", held.len());
    // Connections of host programs are refused too, and the log says why.
    for _ in 0..3 {
        let mut refused = UnixStream::connect(daemon.at(GREEDY, "vsock")).unwrap();
        refused.set_read_timeout(Some(DEADLINE)).unwrap();
        // The end, or a reset.
        assert_eq!(refused.read(&mut [0; 8]).unwrap_or(0), 0);
    }
    wait_until("the reason", || {
        let share = format!("the share of {guaranteed} is used up");
        daemon.log().contains(&share) && daemon.log().contains("RLIMIT_NOFILE")
    });

    let its_program = daemon.program(NEIGHBOUR);
    let mut neighbour = daemon.guest(NEIGHBOUR);
    let its_own = guaranteed - OF_FRONTEND;
    let mut its = connect(&mut neighbour, &its_program, its_own);
    assert_eq!(its.len(), its_own, "{}", daemon.log());
    for (stream, end) in &mut its {
        end.write_all(b"y").unwrap();
        let mut got = [0];
        neighbour
            .wait_recv_exact(*stream, &mut got, deadline())
            .unwrap();
    }
    // Both can use what the greedy VM releases.
    for (stream, _) in held.drain(..) {
        greedy.abort(stream);
    }
    greedy.drive().unwrap();
    wait_until("room", || {
        greedy.drive().unwrap();
        !connect(&mut neighbour, &its_program, OF_FRONTEND).is_empty()
    });
    daemon.serve.signal("TERM");
    assert_eq!(daemon.serve.finish().code, Some(0));
}
