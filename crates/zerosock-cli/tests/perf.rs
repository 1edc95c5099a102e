//! `zerosock perf` between two processes: each mode, with every byte checked, and its output.
//!
//! With guests it is tested among the VM tests.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};

use crate::process::{Running, wait_until, zerosock};

const MEGABYTES: u64 = 3;

/// A server that has said that it listens; killed when the test ends before it.
struct Server {
    child: Child,
    out: BufReader<ChildStdout>,
    said: String,
}

impl Server {
    fn start(command: &mut Command) -> Server {
        let command = command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut said = String::new();
        while !said.contains("TX buffer") {
            assert!(out.read_line(&mut said).unwrap() > 0, "{said}");
        }
        Server { child, out, said }
    }

    fn cid(&self) -> String {
        let (_, rest) = self.said.split_once("Listen at CID ").unwrap();
        rest.split(',').next().unwrap().to_owned()
    }

    fn finish(mut self) -> String {
        let mut said = std::mem::take(&mut self.said);
        self.out.read_to_string(&mut said).unwrap();
        assert!(self.child.wait().unwrap().success(), "{said}");
        said
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The number in the line that begins with `label`.
fn figure(said: &str, label: &str) -> f64 {
    let line = said.lines().find_map(|line| line.strip_prefix(label));
    let words = line.unwrap_or_else(|| panic!("no {label:?} in {said}"));
    words.split_whitespace().next().unwrap().parse().unwrap()
}

fn check_client(said: &str, mode: &str) {
    assert_eq!(figure(said, "received:"), (MEGABYTES << 20) as f64);
    let rx_loop = figure(said, "rx loop:");
    let calls = if mode == "n" {
        "'read()'"
    } else {
        "'fill()' + 'release()'"
    };
    let dequeue = figure(said, &format!("total in {calls}:"));
    assert!(
        rx_loop > 0.0 && dequeue > 0.0 && dequeue <= rx_loop,
        "{said}"
    );
    let rate = figure(said, "rx rate:");
    let expected = (MEGABYTES << 23) as f64 / rx_loop / 1e9;
    // As far as the digits go that are printed.
    assert!((rate - expected).abs() <= 0.001 + expected * 0.01, "{said}");
    let average = figure(said, &format!("average in {calls}:"));
    assert_eq!(said.contains("POLLIN"), mode != "u", "{said}");
    if mode != "u" {
        let wakeups = figure(said, "POLLIN wake-ups:");
        assert!(
            wakeups >= 1.0 && (average - dequeue * 1e9 / wakeups).abs() <= 2000.0 / wakeups + 2.0
        );
    }
    let whole = (MEGABYTES << 20) as f64;
    let in_place = figure(said, "in place:");
    if mode == "n" {
        assert!(said.contains(&format!("copied out: {whole}")), "{said}");
    } else {
        assert!(in_place > 0.0, "{said}");
    }
}

fn client(mode: &str, cid: &str) -> Command {
    let mut command = zerosock();
    // More than the usual window of a connection, which must not bind either side.
    command.args(["perf", "-c", cid, "-z", mode, "-b", "128", "--verify"]);
    command
}

fn server() -> Command {
    let mut command = zerosock();
    command.args(["perf", "-s", "-m", &MEGABYTES.to_string()]);
    command
}

fn run(mut client: Command, server: Server, mode: &str) {
    let ended = Running::start(&mut client).finish();
    let said = String::from_utf8(ended.stdout).unwrap();
    assert_eq!(ended.code, Some(0), "{said}{}", ended.stderr);
    check_client(&said, mode);
    let said = server.finish();
    assert!(said.contains("TX buffer 16777216 bytes"), "{said}");
    assert_eq!(figure(&said, "Send"), (MEGABYTES << 20) as f64);
    assert!(figure(&said, "tx loop:") > 0.0 && figure(&said, "tx rate:") > 0.0);
}

fn wait_for_file(path: &Path) {
    wait_until(&path.display().to_string(), || path.exists());
}

#[test]
fn between_two_attached_processes() {
    let dir = tempfile::tempdir().unwrap();
    let attach: PathBuf = dir.path().join("attach");
    let _daemon = Running::start(zerosock().arg("serve").arg("--attach-socket").arg(&attach));
    wait_for_file(&attach);
    for mode in ["n", "y", "u"] {
        let server = Server::start(server().arg("--attach").arg(&attach));
        let mut client = client(mode, &server.cid());
        client.arg("--attach").arg(&attach);
        run(client, server, mode);
    }
}

#[test]
fn between_a_process_and_the_host() {
    let dir = tempfile::tempdir().unwrap();
    for mode in ["n", "y", "u"] {
        let attach = dir.path().join(format!("attach-{mode}"));
        let server = Server::start(server().arg("--host").arg("--attach-socket").arg(&attach));
        assert_eq!(server.cid(), "2");
        let mut client = client(mode, "2");
        client.arg("--attach").arg(&attach);
        run(client, server, mode);
    }
}

#[test]
fn to_the_host_from_its_only_process() {
    let dir = tempfile::tempdir().unwrap();
    for mode in ["n", "y", "u"] {
        let socket = dir.path().join(format!("vm-{mode}"));
        let mut host = client(mode, "3");
        host.arg("--host").arg("--vm-socket").arg(&socket);
        let host = Running::start(&mut host);
        wait_for_file(&socket);
        let server = Server::start(server().arg("--device").arg(&socket));
        let ended = host.finish();
        let said = String::from_utf8(ended.stdout).unwrap();
        assert_eq!(ended.code, Some(0), "{said}{}", ended.stderr);
        check_client(&said, mode);
        server.finish();
    }
}

#[test]
fn impossible_requests_are_reported() {
    let dir = tempfile::tempdir().unwrap();
    let attach = dir.path().join("attach");
    let nowhere = Running::start(client("y", "5").arg("--attach").arg(&attach)).finish();
    assert_eq!(nowhere.code, Some(1));
    assert!(nowhere.stderr.contains("zerosock: "), "{}", nowhere.stderr);
    let host = dir.path().join("host");
    let _daemon = Running::start(zerosock().arg("serve").arg("--attach-socket").arg(&host));
    wait_for_file(&host);
    let nothing = Running::start(client("y", "5").arg("--attach").arg(&host)).finish();
    let address = "connecting to CID 5, port 1234: ";
    assert!(nothing.stderr.contains(address), "{}", nothing.stderr);
    let no_maps = Running::start(&mut client("u", "2")).finish();
    assert_eq!(no_maps.code, Some(2));
    assert!(
        no_maps.stderr.contains("no receive maps"),
        "{}",
        no_maps.stderr
    );
}

#[test]
fn json_is_one_object_on_standard_output() {
    let dir = tempfile::tempdir().unwrap();
    let attach = dir.path().join("attach");
    let mut server = zerosock();
    server.args([
        "perf",
        "-s",
        "-m",
        "1",
        "--json",
        "--host",
        "--attach-socket",
    ]);
    let server = Running::start(server.arg(&attach));
    wait_until("it to listen", || server.stderr().contains("TX buffer"));
    let mut client = client("y", "2");
    let client = Running::start(client.arg("--json").arg("--attach").arg(&attach)).finish();
    for (ended, role) in [(client, "client"), (server.finish(), "server")] {
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        let figures: serde_json::Value = serde_json::from_slice(&ended.stdout).unwrap();
        assert_eq!(
            (&figures["role"], &figures["bytes"]),
            (&role.into(), &(1 << 20).into())
        );
        assert!(
            figures["gbit_per_second"].as_f64().unwrap() > 0.0,
            "{figures}"
        );
        assert_eq!(
            figures["in_place_bytes"].is_u64(),
            role == "client",
            "{figures}"
        );
    }
}
