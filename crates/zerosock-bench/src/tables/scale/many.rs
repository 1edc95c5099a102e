//! Thousands of idle connections: memory of the device's process for each.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};
use zerosock::vsock::{Endpoint, Listener, Stream};
use zerosock::{Address, Cid, Port};
use zerosock_testkit::driver::{Driver, StreamId, StreamState};

use crate::pair::Cores;
use crate::processes::{KilledOnDrop, retry};
use crate::report::line;
use crate::tables::device::program::{self, Device};
use crate::tables::device::traffic::{self, Case};

const PORT: Port = Port::new(traffic::PORT);
/// Longest time of a step.
const PATIENCE: Duration = Duration::from_secs(120);
/// Pending connects at a time.
const AT_A_TIME: usize = 256;

/// Resident memory of a process, bytes.
fn resident(process: u32) -> Result<f64, String> {
    let path = format!("/proc/{process}/statm");
    let text = std::fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
    let pages = text.split_whitespace().nth(1);
    let pages: f64 = pages.and_then(|pages| pages.parse().ok()).ok_or(path)?;
    Ok(pages * rustix::param::page_size() as f64)
}

/// `serve` for attached processes only.
struct Serve(KilledOnDrop);

impl Serve {
    fn start(path: &Path) -> Result<Serve, String> {
        let mut command = Command::new(program::ours()?.program());
        command.args(["serve", "--workers", "1", "--log-level", "info"]);
        command.arg("--attach-socket").arg(path);
        command.stdin(Stdio::null());
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        KilledOnDrop::spawn(command, None).map(Serve)
    }

    /// Stops it with SIGTERM; returns its output.
    fn counts(mut self) -> Result<String, String> {
        let pid = Pid::from_child(&self.0.0);
        rustix::process::kill_process(pid, Signal::TERM).map_err(line)?;
        let mut said = String::new();
        let stderr = self.0.0.stderr.take().ok_or("serve says nothing")?;
        std::io::BufReader::new(stderr)
            .read_to_string(&mut said)
            .map_err(line)?;
        let names = ["connections_now", "bridges_now", "timers_now", "ports_now"];
        let plain = said.replace(|c: char| c.is_control(), " ");
        let found = names.map(|name| {
            let (_, behind) = plain.split_once(&format!("{name}="))?;
            behind.split_whitespace().next()
        });
        if found.iter().any(|count| *count != Some("0")) {
            return Err(format!("serve still has {found:?} of {names:?}"));
        }
        Ok("connections 0, ends 0, timers 0, ports 0".to_owned())
    }
}

fn attach(path: &Path) -> Result<Endpoint, String> {
    let attach = || {
        let builder = Endpoint::builder().huge_pages(false).queue_size(1024);
        let builder = builder.receive_buffers(4096).transmit_buffers(4096);
        builder.attach(path)
    };
    retry(PATIENCE, attach).map_err(|error| format!("attach: {error}"))
}

struct Ends {
    client: Endpoint,
    host: Endpoint,
    listener: Listener,
}

impl Ends {
    /// Drives both ends until `done`.
    fn drive(&self, mut done: impl FnMut() -> bool) -> Result<(), String> {
        let deadline = Instant::now() + PATIENCE;
        while !done() {
            if Instant::now() > deadline {
                return Err("a connection did not come about in time".to_owned());
            }
            self.client.drive().map_err(line)?;
            self.host.drive().map_err(line)?;
            thread::yield_now();
        }
        Ok(())
    }

    fn connect(&self, count: usize) -> Result<Vec<(Stream, Stream)>, String> {
        let to = Address::new(self.host.cid(), PORT);
        let mut all: Vec<(Stream, Stream)> = Vec::with_capacity(count);
        while all.len() < count {
            let first = all.len();
            let mut begun = Vec::new();
            for _ in 0..AT_A_TIME.min(count - first) {
                begun.push(self.client.begin_connect(to).map_err(line)?);
            }
            for ours in begun {
                let mut theirs = None;
                self.drive(|| {
                    theirs = self.listener.accept().ok();
                    theirs.is_some()
                })?;
                let (theirs, _) = theirs.ok_or("no connection")?;
                ours.set_nonblocking(true).map_err(line)?;
                theirs.set_nonblocking(true).map_err(line)?;
                all.push((ours, theirs));
            }
            for (ours, theirs) in &all[first..] {
                self.pass(ours, theirs)?;
                self.pass(theirs, ours)?;
            }
        }
        Ok(all)
    }

    fn pass(&self, mut from: &Stream, mut to: &Stream) -> Result<(), String> {
        self.drive(|| matches!(from.write(b"x"), Ok(1)))?;
        self.drive(|| matches!(to.read(&mut [0]), Ok(1)))
    }
}

/// Bytes per connection for `count` connections between two processes, and what remains after they
/// have closed.
pub(super) fn between_processes(count: usize) -> Result<(f64, String), String> {
    let dir = tempfile::tempdir().map_err(line)?;
    let path = dir.path().join("attach");
    let serve = Serve::start(&path)?;
    let (client, host) = (attach(&path)?, attach(&path)?);
    let listener = host.listen(PORT, 2 * AT_A_TIME).map_err(line)?;
    listener.set_nonblocking(true).map_err(line)?;
    let ends = Ends {
        client,
        host,
        listener,
    };
    // One-time cost of the first connections.
    drop(ends.connect(AT_A_TIME)?);
    let before = resident(serve.0.id())?;
    let all = ends.connect(count)?;
    let each = (resident(serve.0.id())? - before) / count as f64;
    // The last connections close after all others: data behind them proves that the others have
    // closed.
    for (ours, theirs) in all {
        drop((ours, theirs));
        ends.client.drive().map_err(line)?;
        ends.host.drive().map_err(line)?;
    }
    let quiet = Instant::now() + Duration::from_millis(500);
    ends.drive(|| Instant::now() > quiet)?;
    Ok((each, serve.counts()?))
}

/// Bytes per connection in the device's process, for `count` connections of a guest to a program.
pub(super) fn with_sockets(device: &Device, count: usize, cores: Cores) -> Result<f64, String> {
    traffic::with_device(device, Case::STOCK_RX_BUFFER, cores, |running, driver| {
        let listener = traffic::listen(running)?;
        listener.set_nonblocking(true).map_err(line)?;
        let mut all: Vec<(StreamId, UnixStream)> = Vec::new();
        let first = 64.min(count / 2);
        connect(driver, &listener, first, &mut all)?;
        let before = resident(running.id())?;
        connect(driver, &listener, count, &mut all)?;
        Ok((resident(running.id())? - before) / (count - first) as f64)
    })
}

/// Connects repeatedly until there are `count` connections.
fn connect(
    driver: &mut Driver,
    listener: &std::os::unix::net::UnixListener,
    count: usize,
    all: &mut Vec<(StreamId, UnixStream)>,
) -> Result<(), String> {
    let deadline = Instant::now() + PATIENCE;
    while all.len() < count {
        let to = Address::new(Cid::HOST, PORT);
        let stream = driver.wait_connect(to, deadline).map_err(line)?;
        let mut program = None;
        let accepted = driver.wait_until(deadline, |_| {
            program = listener.accept().ok();
            program.is_some().then_some(())
        });
        accepted.map_err(line)?;
        let (mut program, _) = program.ok_or("no program was connected")?;
        if driver.state(stream) != Some(StreamState::Connected) {
            return Err("a connection was lost".to_owned());
        }
        driver.wait_send(stream, b"x", deadline).map_err(line)?;
        program.set_nonblocking(false).map_err(line)?;
        program.set_read_timeout(Some(PATIENCE)).map_err(line)?;
        program.read_exact(&mut [0]).map_err(line)?;
        program.write_all(b"x").map_err(line)?;
        driver
            .wait_recv_exact(stream, &mut [0], deadline)
            .map_err(line)?;
        all.push((stream, program));
    }
    Ok(())
}
