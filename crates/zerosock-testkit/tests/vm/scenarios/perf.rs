//! `zerosock perf` between a guest, with kernel sockets, and a process on this machine: attached to
//! the guest's device, or embedding it. The receiver checks every byte.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, ChildStdout, Command as Process, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use zerosock_testkit::protocol::Command;

use crate::lab::{Lab, STEP, short_dir, zerosock};

pub(crate) const MEGABYTES: &str = "4";
pub(crate) const RECEIVED: &str = "received: 4194304 bytes";

/// The process on this machine; killed when the scenario ends before it.
pub(crate) struct Here {
    child: Child,
    out: BufReader<ChildStdout>,
}

impl Here {
    pub(crate) fn start(arguments: &str, place: [&str; 1], path: &Path) -> Here {
        let mut command = Process::new(zerosock());
        command.arg("perf").args(arguments.split_whitespace());
        command.args(place).arg(path);
        let command = command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("zerosock perf");
        let out = BufReader::new(child.stdout.take().expect("a pipe"));
        Here { child, out }
    }

    /// Waits for a line with this prefix. Returns the rest of it.
    pub(crate) fn wait_for(&mut self, start: &str) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            let got = self.out.read_line(&mut line).expect("a line");
            assert!(got > 0, "it ended before it said {start:?}");
            if let Some(rest) = line.strip_prefix(start) {
                return rest.to_owned();
            }
        }
    }

    /// Its output, and whether it succeeded.
    pub(crate) fn finish(mut self) -> (bool, String) {
        let mut said = String::new();
        self.out.read_to_string(&mut said).expect("its output");
        (self.child.wait().expect("its end").success(), said)
    }
}

impl Drop for Here {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// `zerosock perf` in a guest.
fn there(arguments: &str) -> Command {
    let argv = ["/bin/zerosock", "perf"].into_iter();
    let argv = argv.chain(arguments.split_whitespace());
    Command::Run {
        argv: argv.map(str::to_owned).collect(),
    }
}

pub(crate) fn guest_is_server(lab: &Lab) {
    let port = crate::lab::port();
    for mode in ["n", "y", "u"] {
        let serving = lab.a.start(there(&format!("-s -m {MEGABYTES} -p {port}")));
        let give_up = Instant::now() + STEP;
        let cid = lab.a.endpoint.cid;
        let client = format!("-c {cid} -p {port} -z {mode} -b 16 --verify");
        let said = loop {
            let here = Here::start(&client, ["--device"], &lab.process.vhost);
            let (well, said) = here.finish();
            if well {
                break said;
            }
            // Refused: the guest does not listen yet.
            assert!(Instant::now() < give_up, "{said}");
            thread::sleep(Duration::from_millis(50));
        };
        assert!(said.contains(RECEIVED), "{said}");
        assert_eq!(said.contains("in place: 0 bytes"), mode == "n", "{said}");
        let served = serving.wait(STEP).expect("served");
        let said = served.text.unwrap_or_default();
        assert!(served.bytes == 0 && said.contains("tx loop: "), "{said}");
    }
}

pub(crate) fn guest_is_client(lab: &Lab) {
    let port = crate::lab::port();
    let server = format!("-s -m {MEGABYTES} -p {port}");
    let mut here = Here::start(&server, ["--device"], &lab.process.vhost);
    here.wait_for("TX buffer");
    let cid = lab.process.cid;
    let done = lab.a.run(there(&format!("-c {cid} -p {port} --verify")));
    let said = done.text.unwrap_or_default();
    assert!(done.bytes == 0 && said.contains(RECEIVED), "{said}");
    assert!(said.contains("average in 'read()': "), "{said}");
    let (well, said) = here.finish();
    assert!(well && said.contains("tx rate: "), "{said}");
}

/// The receiver is the host and reads in the guest kernel's memory.
pub(crate) fn from_own_guest(lab: &Lab) {
    let dir = short_dir();
    let socket = dir.path().join("vhost");
    let client = "-c 6 --host --vm-cid 6 -z y -b 16 --verify";
    let mut here = Here::start(client, ["--vm-socket"], &socket);
    here.wait_for("Peer credit");
    let (guest, _dir) = lab.boot_at(&socket);
    let server = there(&format!("-s -m {MEGABYTES}"));
    let serving = guest.remote().start(server);
    let (well, said) = here.finish();
    assert!(well && said.contains(RECEIVED), "{said}");
    assert!(
        said.contains("in place: 4194304 bytes; copied out: 0;"),
        "{said}"
    );
    let served = serving.wait(STEP).expect("served");
    let said = served.text.unwrap_or_default();
    assert!(said.contains("tx loop: "), "{said}");
}

pub(crate) fn to_own_guest(lab: &Lab) {
    let dir = short_dir();
    let socket = dir.path().join("vhost");
    let server = format!("-s -m {MEGABYTES} --host --vm-cid 6");
    let mut here = Here::start(&server, ["--vm-socket"], &socket);
    here.wait_for("TX buffer");
    let (guest, _dir) = lab.boot_at(&socket);
    let done = guest.remote().run(there("-c 2 --verify"), STEP);
    let done = done.expect("received");
    let said = done.text.unwrap_or_default();
    assert!(done.bytes == 0 && said.contains(RECEIVED), "{said}");
    let (well, said) = here.finish();
    assert!(well && said.contains("tx rate: "), "{said}");
}
