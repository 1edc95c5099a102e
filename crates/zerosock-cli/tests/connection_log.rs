//! The log of `zerosock serve` about connections: each is refused, opened or closed with a reason, and
//! the name of the rule that denies it.

mod process;

use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::time::Instant;

use process::{Running, wait_until, zerosock};
use zerosock::vsock::Endpoint;
use zerosock::{Address, Cid, Port};

/// A daemon with a VM of CID 3 in group a, and processes in group b.
struct Daemon {
    dir: tempfile::TempDir,
    running: Running,
}

impl Daemon {
    fn start(level: &str) -> Daemon {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name).display().to_string();
        let file = format!(
            "vms: [{{guest_cid: 3, socket: {}, uds_path: {}, groups: a}}]\n\
             attach: {{socket: {}, groups: b, uds_path: {}}}\n\
             access:\n\
             - deny: {{from: any, to: host, ports: 5}}\n\
             - allow: {{from: any, to: host}}\n",
            at("control"),
            at("hybrid"),
            at("attach"),
            at("out"),
        );
        fs::write(dir.path().join("vms.yaml"), file).unwrap();
        let mut serve = zerosock();
        serve.args(["serve", "--log-level", level, "--config"]);
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
        said.contains("access[0] has denied 201 connections"),
        "{said}"
    );
    assert!(!said.contains("access[1]"), "{said}");
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
