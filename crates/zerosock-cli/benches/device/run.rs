//! One measurement: a device, a driver, a stream of bytes.

use std::fmt;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use zerosock::driver::{Driver, DriverConfig, RecvError, SendError};
use zerosock::{Address, Cid, Port};

use crate::device::{Device, Running};

/// A period that divides no packet size, so that a lost, doubled or swapped
/// packet shows.
const PERIOD: usize = 251 * 257;
const PORT: u32 = 1234;
/// No measurement takes as long.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// Which way the bytes go.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) enum Direction {
    ToHost,
    ToGuest,
}

impl Direction {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Direction::ToHost => "to-host",
            Direction::ToGuest => "to-guest",
        }
    }
}

impl std::str::FromStr for Direction {
    type Err = String;

    fn from_str(text: &str) -> Result<Direction, String> {
        match text {
            "to-host" => Ok(Direction::ToHost),
            "to-guest" => Ok(Direction::ToGuest),
            _ => Err("neither to-host nor to-guest".to_owned()),
        }
    }
}

/// What is measured.
#[derive(Copy, Clone, Debug)]
pub(crate) struct Case {
    pub(crate) direction: Direction,
    /// Bytes of each packet to the host, or of each write on the host.
    pub(crate) size: usize,
    pub(crate) bytes: u64,
    pub(crate) rx_buffer: u32,
    pub(crate) queue_size: u16,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let direction = match self.direction {
            Direction::ToHost => "to host",
            Direction::ToGuest => "to guest",
        };
        write!(f, "{direction}, {} B", self.size)
    }
}

/// What one measurement gave.
#[derive(Copy, Clone, Debug)]
pub(crate) struct Figures {
    pub(crate) mb_s: f64,
    /// CPU seconds of the device's process for each 10^9 bytes.
    pub(crate) cpu_s_per_gb: f64,
    /// System calls of the device's process, and what counted them.
    pub(crate) syscalls: Option<(u64, &'static str)>,
}

/// Runs `case` once on a fresh device.
pub(crate) fn once(device: &Device, case: &Case, count: bool) -> Result<Figures, String> {
    let dir = tempfile::tempdir().map_err(|error| format!("temporary directory: {error}"))?;
    let running = device.start(dir.path())?;
    let mut driver = attach(&running, case)?;
    let counter = if count {
        Counter::start(running.pid())?
    } else {
        None
    };
    let cpu_before = running.cpu_seconds()?;
    let took = match case.direction {
        Direction::ToHost => to_host(&mut driver, &running, case)?,
        Direction::ToGuest => to_guest(&mut driver, &running, case)?,
    };
    let cpu = running.cpu_seconds()? - cpu_before;
    let syscalls = counter.map(Counter::stop).transpose()?;
    Ok(Figures {
        mb_s: case.bytes as f64 / 1e6 / took.as_secs_f64(),
        cpu_s_per_gb: cpu / (case.bytes as f64 / 1e9),
        syscalls,
    })
}

/// The socket's file appears before it listens.
fn attach(running: &Running, case: &Case) -> Result<Driver, String> {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let config = DriverConfig {
            rx_buffer_size: case.rx_buffer,
            queue_size: case.queue_size,
            ..DriverConfig::new(&running.socket)
        };
        match Driver::attach(config) {
            Ok(driver) => return Ok(driver),
            Err(error) if Instant::now() > deadline => return Err(error.to_string()),
            Err(_) => thread::sleep(Duration::from_millis(5)),
        }
    }
}

/// Driver to Unix sink, packets of `case.size`.
fn to_host(driver: &mut Driver, running: &Running, case: &Case) -> Result<Duration, String> {
    let mut sink_path = running.uds_path.clone().into_os_string();
    sink_path.push(format!("_{PORT}"));
    let listener = UnixListener::bind(PathBuf::from(sink_path)).map_err(|e| e.to_string())?;
    let bytes = case.bytes;
    let sink = thread::spawn(move || -> Result<Instant, String> {
        let (mut stream, _) = listener.accept().map_err(|error| error.to_string())?;
        let mut check = Check::new();
        let mut buffer = vec![0u8; 256 << 10];
        while check.seen < bytes {
            match stream
                .read(&mut buffer)
                .map_err(|error| error.to_string())?
            {
                0 => return Err(format!("end of file after {} bytes", check.seen)),
                got => check.take(&buffer[..got])?,
            }
        }
        Ok(Instant::now())
    });
    let deadline = Instant::now() + PATIENCE;
    let stream = driver
        .wait_connect(Address::new(Cid::HOST, Port::new(PORT)), deadline)
        .map_err(|error| format!("connect: {error}"))?;
    let pattern = pattern(case.size);
    let start = Instant::now();
    let mut sent = 0u64;
    let outcome = driver
        .wait_until(deadline, |driver| {
            while sent < bytes {
                // A packet cut short by credit is finished first, so that
                // packets begin on their own borders again.
                let within = (sent % case.size as u64) as usize;
                let want = (case.size - within).min((bytes - sent) as usize);
                let at = (sent % PERIOD as u64) as usize;
                match driver.send(stream, &pattern[at..at + want]) {
                    Ok(more) => sent += more as u64,
                    Err(SendError::WouldBlock) => return None,
                    Err(error) => return Some(Err(error.to_string())),
                }
            }
            Some(Ok(()))
        })
        .map_err(|error| error.to_string())?;
    outcome.unwrap_or_else(|| Err(format!("{sent} of {bytes} bytes sent in time")))?;
    // The driver goes on serving credit until the sink has everything.
    while !sink.is_finished() {
        if Instant::now() > deadline {
            return Err("the sink did not get everything in time".to_owned());
        }
        driver
            .poll(Some(Instant::now() + Duration::from_millis(1)))
            .map_err(|error| error.to_string())?;
    }
    let end = sink.join().map_err(|_| "the sink panicked")??;
    Ok(end.duration_since(start))
}

/// Unix source to driver, writes of `case.size`.
fn to_guest(driver: &mut Driver, running: &Running, case: &Case) -> Result<Duration, String> {
    driver
        .listen(Port::new(PORT), 1)
        .map_err(|error| error.to_string())?;
    let stream = running.connect_hybrid()?;
    let (bytes, size) = (case.bytes, case.size);
    let source = thread::spawn(move || source(stream, bytes, size));
    let deadline = Instant::now() + PATIENCE;
    let stream = driver
        .wait_accept(Port::new(PORT), deadline)
        .map_err(|error| format!("accept: {error}"))?;
    let mut check = Check::new();
    let mut buffer = vec![0u8; 256 << 10];
    let outcome = driver
        .wait_until(deadline, |driver| {
            while check.seen < bytes {
                match driver.recv(stream, &mut buffer) {
                    Ok(0) => return Some(Err(format!("end of file after {}", check.seen))),
                    Ok(got) => {
                        if let Err(error) = check.take(&buffer[..got]) {
                            return Some(Err(error));
                        }
                    }
                    Err(RecvError::WouldBlock) => return None,
                    Err(error) => return Some(Err(error.to_string())),
                }
            }
            Some(Ok(()))
        })
        .map_err(|error| error.to_string())?;
    let end = Instant::now();
    outcome.unwrap_or_else(|| Err(format!("{} of {bytes} bytes in time", check.seen)))?;
    let start = source.join().map_err(|_| "the source panicked")??;
    Ok(end.duration_since(start))
}

fn source(mut stream: UnixStream, bytes: u64, size: usize) -> Result<Instant, String> {
    // In one write: vhost-device-vsock drops a connection whose line comes in pieces.
    let line = format!("CONNECT {PORT}\n");
    stream
        .write_all(line.as_bytes())
        .map_err(|error| error.to_string())?;
    let mut line = String::new();
    BufReader::new(stream.try_clone().map_err(|error| error.to_string())?)
        .read_line(&mut line)
        .map_err(|error| error.to_string())?;
    if !line.starts_with("OK ") {
        return Err(format!("the device answered {line:?}"));
    }
    let start = Instant::now();
    write_pattern(&mut stream, bytes, size)?;
    Ok(start)
}

/// Writes `bytes` bytes, `size` at a time.
pub(crate) fn write_pattern(
    stream: &mut UnixStream,
    bytes: u64,
    size: usize,
) -> Result<(), String> {
    let pattern = pattern(size);
    let mut sent = 0u64;
    while sent < bytes {
        let want = size.min((bytes - sent) as usize);
        let at = (sent % PERIOD as u64) as usize;
        stream
            .write_all(&pattern[at..at + want])
            .map_err(|error| error.to_string())?;
        sent += want as u64;
    }
    Ok(())
}

/// The bytes that are sent: long enough for one packet from any place of the
/// period.
pub(crate) fn pattern(size: usize) -> Vec<u8> {
    (0..PERIOD + size).map(|at| byte(at % PERIOD)).collect()
}

fn byte(at: usize) -> u8 {
    (at % 251) as u8 ^ (at / 251) as u8
}

/// Compares what arrives with what was sent.
pub(crate) struct Check {
    pattern: Vec<u8>,
    pub(crate) seen: u64,
}

impl Check {
    pub(crate) fn new() -> Check {
        Check {
            pattern: pattern(256 << 10),
            seen: 0,
        }
    }

    pub(crate) fn take(&mut self, bytes: &[u8]) -> Result<(), String> {
        let at = (self.seen % PERIOD as u64) as usize;
        if self.pattern.get(at..at + bytes.len()) != Some(bytes) {
            return Err(format!("wrong bytes behind byte {}", self.seen));
        }
        self.seen += bytes.len() as u64;
        Ok(())
    }
}

/// Counts a process's system calls: with perf, or, where there is none, with
/// strace, which slows the process and so changes what it batches.
struct Counter {
    child: Child,
    how: &'static str,
}

impl Counter {
    fn start(pid: u32) -> Result<Option<Counter>, String> {
        let pid = pid.to_string();
        let perf = Command::new("perf")
            .args(["stat", "-x,", "-e", "raw_syscalls:sys_enter", "-p", &pid])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn();
        let (mut child, how) = match perf {
            Ok(child) => (child, "perf"),
            Err(_) => {
                let strace = Command::new("strace")
                    .args(["-c", "-f", "-p", &pid])
                    .stdin(Stdio::null())
                    .stdout(Stdio::null())
                    .stderr(Stdio::piped())
                    .spawn();
                match strace {
                    Ok(child) => (child, "strace"),
                    Err(_) => return Ok(None),
                }
            }
        };
        // Neither says in the same words when it has attached; both do so in
        // far less than this.
        thread::sleep(Duration::from_millis(500));
        if let Ok(Some(_)) = child.try_wait() {
            return Ok(None);
        }
        Ok(Some(Counter { child, how }))
    }

    fn stop(mut self) -> Result<(u64, &'static str), String> {
        let pid = i32::try_from(self.child.id())
            .ok()
            .and_then(rustix::process::Pid::from_raw);
        if let Some(pid) = pid {
            rustix::process::kill_process(pid, rustix::process::Signal::INT)
                .map_err(|error| error.to_string())?;
        }
        let mut output = String::new();
        if let Some(mut stderr) = self.child.stderr.take() {
            stderr
                .read_to_string(&mut output)
                .map_err(|error| error.to_string())?;
        }
        self.child.wait().map_err(|error| error.to_string())?;
        let count = match self.how {
            // count,unit,event,…
            "perf" => output
                .lines()
                .find(|line| line.contains("raw_syscalls"))
                .and_then(|line| line.split(',').next()),
            // % time, seconds, usecs/call, calls, [errors], "total"
            _ => output
                .lines()
                .find(|line| line.trim_end().ends_with("total"))
                .and_then(|line| line.split_whitespace().nth(3)),
        };
        count
            .and_then(|count| count.parse().ok())
            .map(|count| (count, self.how))
            .ok_or_else(|| format!("{} gave no count: {output}", self.how))
    }
}
