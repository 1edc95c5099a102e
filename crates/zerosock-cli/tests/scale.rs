//! Very many connections on one device of `zerosock serve`: memory of each at rest, and none left
//! after they have closed.
//!
//! Both attached endpoints are in this process, and one connects to the other: no connection has a
//! descriptor, so the measured memory is the switch's own, for both halves of each connection.

use std::io::{Read, Write};
use std::path::Path;
use std::time::Instant;

use crate::process::{DEADLINE, Running, wait_until, zerosock};
use zerosock::vsock::{Endpoint, Listener, Stream};
use zerosock::{Address, Port};

const PORT: Port = Port::new(7);
/// As many as the bound on those that are undecided lets through with room to spare.
const AT_A_TIME: usize = 256;

struct Switch {
    serve: Running,
    client: Endpoint,
    server: Listener,
    to: Address,
    /// The endpoint that listens.
    host: Endpoint,
}

impl Switch {
    fn start(dir: &Path) -> Switch {
        let path = dir.join("attach");
        let mut command = zerosock();
        command.args([
            "serve",
            "--workers",
            "1",
            "--log-level",
            "info",
            "--attach-socket",
        ]);
        let serve = Running::start(command.arg(&path));
        wait_until("the attach socket", || path.exists());
        let attach = || {
            let mut endpoint = None;
            wait_until("a place", || {
                endpoint = Endpoint::builder().huge_pages(false).attach(&path).ok();
                endpoint.is_some()
            });
            endpoint.unwrap()
        };
        let (client, host) = (attach(), attach());
        let server = host.listen(PORT, 2 * AT_A_TIME).unwrap();
        server.set_nonblocking(true).unwrap();
        let to = Address::new(host.cid(), PORT);
        Switch {
            serve,
            client,
            server,
            to,
            host,
        }
    }

    /// Connections and their other ends. Each has carried a byte in each direction.
    fn connect(&self, connections: usize) -> Vec<(Stream, Stream)> {
        let mut all = Vec::with_capacity(connections);
        while all.len() < connections {
            let now = AT_A_TIME.min(connections - all.len());
            let begun: Vec<Stream> = (0..now)
                .map(|_| self.client.begin_connect(self.to).unwrap())
                .collect();
            let first = all.len();
            for ours in begun {
                let mut theirs = None;
                self.drive("a connection", || {
                    theirs = self.server.accept().ok();
                    theirs.is_some()
                });
                all.push((ours, theirs.unwrap().0));
            }
            for (ours, theirs) in &all[first..] {
                self.pass(ours, theirs);
                self.pass(theirs, ours);
            }
        }
        all
    }

    /// Lets both ends work until `done`.
    fn drive(&self, what: &str, mut done: impl FnMut() -> bool) {
        let give_up = Instant::now() + DEADLINE;
        while !done() {
            assert!(Instant::now() < give_up, "waited in vain for {what}");
            self.client.drive().unwrap();
            self.host.drive().unwrap();
            std::thread::yield_now();
        }
    }

    fn pass(&self, from: &Stream, to: &Stream) {
        let mut got = [0];
        for end in [from, to] {
            end.set_nonblocking(true).unwrap();
        }
        self.drive("room", || matches!((&mut &*from).write(b"x"), Ok(1)));
        self.drive("a byte", || matches!((&mut &*to).read(&mut got), Ok(1)));
        assert_eq!(&got, b"x");
    }

    /// Resident memory of `serve`, bytes.
    fn resident(&self) -> usize {
        let path = format!("/proc/{}/statm", self.serve.child.id());
        let statm = std::fs::read_to_string(path).unwrap();
        let pages = statm.split_whitespace().nth(1).unwrap();
        pages.parse::<usize>().unwrap() * rustix::param::page_size()
    }
}

/// DESIGN: below 1 KiB. Both halves of a connection are in this switch, and are counted together.
const MOST: f64 = 1024.0;

/// As many as the test has time for where nothing is optimised; the design speaks of 100 000.
fn many() -> usize {
    match std::env::var("ZEROSOCK_TEST_CONNECTIONS") {
        Ok(number) => number.parse().unwrap(),
        Err(_) => 20_000,
    }
}

#[test]
fn an_idle_connection_costs_the_switch_less_than_a_kibibyte_and_the_next_ones_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let switch = Switch::start(dir.path());
    // What the first ones cost once: buffers of queues, a table's first memory.
    drop(switch.connect(AT_A_TIME));
    let before = switch.resident();
    let grown = || (switch.resident() as f64 - before as f64) / many() as f64;
    let mut all = switch.connect(many());
    let each = grown();
    println!("{each:.0} bytes for each connection");
    assert!(each < MOST, "{each} bytes for each connection");
    // One after the other, so that the table is never empty: places are used again.
    for part in 0..many() / AT_A_TIME {
        let from = part * AT_A_TIME;
        all.splice(from..from + AT_A_TIME, []);
        let more = switch.connect(AT_A_TIME);
        all.splice(from..from, more);
    }
    let again = grown();
    println!("{again:.0} when each has made room for another");
    assert!(again < each + 64.0, "{again} bytes, {each} before");
}
