//! One measurement of a device: a stream of bytes, or round trips of a message.
//!
//! The guest is zerosock's driver half on a memfd, which sleeps when idle; on the host's side is a
//! program with a Unix socket. Both are threads of this process on one core, and the device has the
//! other one, unless a placement says otherwise. The receiver checks each byte.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use zerosock::{Address, Cid, Port};
use zerosock_testkit::driver::{Driver, DriverConfig, RecvError, SendError, StreamId};

use super::program::{Device, Running, START};
use crate::pair::Cores;
use crate::processes::{on_core, retry};
use crate::report::line;
use crate::worker;
use crate::worker::jobs::percentile;
use crate::worker::order::Outcome;
use crate::worker::touch::stream as pattern;

pub(crate) const PORT: u32 = 1234;
/// Longest time that a measurement may take.
const PATIENCE: Duration = Duration::from_secs(120);
/// Size of a receiver's buffer.
const BLOCK: usize = 256 << 10;
/// Size of a round-trip message, bytes.
pub(crate) const TRIP: usize = 64;

/// Direction of the bytes.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) enum Direction {
    /// Packets of the given size from the driver.
    ToHost,
    /// Writes of the given size by the host program.
    ToGuest,
}

/// What is streamed.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) struct Case {
    pub(crate) direction: Direction,
    pub(crate) size: usize,
    /// Payload bytes of each of the driver's receive buffers.
    pub(crate) rx_buffer: u32,
}

/// Result of one stream.
#[derive(Copy, Clone, Debug)]
pub(crate) struct Figures {
    pub(crate) mb_s: f64,
    /// CPU seconds of the device's process per 10^9 bytes.
    pub(crate) cpu_s_per_gb: f64,
}

/// Streams `bytes` bytes through a fresh device.
pub(crate) fn stream(
    device: &Device,
    case: Case,
    bytes: u64,
    cores: Cores,
) -> Result<Figures, String> {
    with_device(device, case.rx_buffer, cores, |running, driver| {
        let cpu_before = running.cpu_seconds()?;
        let took = match case.direction {
            Direction::ToHost => {
                let listener = listen(running)?;
                let accept = move || accept(&listener, cores.host);
                to_host(driver, accept, case.size, bytes)?
            }
            Direction::ToGuest => to_guest(driver, running, case.size, bytes, cores.host)?,
        };
        let cpu = running.cpu_seconds()? - cpu_before;
        Ok(Figures {
            mb_s: bytes as f64 / 1e6 / took.as_secs_f64(),
            cpu_s_per_gb: cpu / (bytes as f64 / 1e9),
        })
    })
}

/// Sends a message of [`TRIP`] bytes to a program on the host and waits for the echo, repeatedly;
/// each round trip is timed.
pub(crate) fn round_trips(
    device: &Device,
    warm: Duration,
    time: Duration,
    cores: Cores,
) -> Result<Outcome, String> {
    let stock = Case::STOCK_RX_BUFFER;
    with_device(device, stock, cores, |running, driver| {
        let listener = listen(running)?;
        ping(driver, move || accept(&listener, cores.host), warm, time)
    })
}

/// Round trips to a program that accepts the guest's connection with `accept`.
pub(crate) fn ping<S: Read + Write>(
    driver: &mut Driver,
    accept: impl FnOnce() -> Result<S, String> + Send + 'static,
    warm: Duration,
    time: Duration,
) -> Result<Outcome, String> {
    // Ends when the device closes the connection, at the latest when it is killed.
    let echo = thread::spawn(move || -> Result<(), String> {
        let mut stream = accept()?;
        let mut message = [0; TRIP];
        while stream.read_exact(&mut message).is_ok() {
            stream.write_all(&message).map_err(line)?;
        }
        Ok(())
    });
    let deadline = Instant::now() + PATIENCE;
    let stream = connect(driver, deadline)?;
    let outcome = time_round_trips(warm, time, |sent, back| {
        driver.wait_send(stream, sent, deadline).map_err(line)?;
        let received = driver.wait_recv_exact(stream, back, deadline);
        received.map_err(line)
    });
    driver.abort(stream);
    driver.drive().map_err(line)?;
    drop(echo);
    outcome
}

/// Times round trips: `exchange` sends [`TRIP`] bytes and waits for their echo.
pub(super) fn time_round_trips(
    warm: Duration,
    time: Duration,
    mut exchange: impl FnMut(&[u8], &mut [u8]) -> Result<(), String>,
) -> Result<Outcome, String> {
    let (mut sent, mut back) = ([0; TRIP], [0; TRIP]);
    let mut position = 0;
    let mut times = Vec::new();
    let begin = Instant::now();
    let mut now = begin;
    // One trip is counted at least: on a busy machine the first may take all of the time.
    while now - begin < warm + time || times.is_empty() {
        pattern::fill(position, &mut sent);
        exchange(&sent, &mut back)?;
        pattern::check(position, &back)?;
        position += TRIP as u64;
        let after = Instant::now();
        if now - begin >= warm {
            times.push(u64::try_from((after - now).as_nanos()).unwrap_or(u64::MAX));
        }
        now = after;
    }
    times.sort_unstable();
    Ok(Outcome {
        messages: times.len() as u64,
        nanoseconds: times.iter().sum(),
        p50: percentile(&times, 50),
        p99: percentile(&times, 99),
        ..Outcome::default()
    })
}

impl Case {
    /// Receive buffers as Linux guests post them.
    pub(crate) const STOCK_RX_BUFFER: u32 = 4096;
}

/// Starts the device on the receiver's core and runs the rest on the sender's.
pub(crate) fn with_device<T: Send>(
    device: &Device,
    rx_buffer: u32,
    cores: Cores,
    run: impl FnOnce(&Running, &mut Driver) -> Result<T, String> + Send,
) -> Result<T, String> {
    let dir = tempfile::tempdir().map_err(|error| format!("temporary directory: {error}"))?;
    let running = device.start(dir.path(), cores.receiver)?;
    on_core(cores.sender, || {
        let mut driver = attach(&running, rx_buffer)?;
        run(&running, &mut driver)
    })
}

/// The socket's file appears before the socket listens.
fn attach(running: &Running, rx_buffer_size: u32) -> Result<Driver, String> {
    let attach = || {
        Driver::attach(DriverConfig {
            rx_buffer_size,
            ..DriverConfig::new(&running.socket)
        })
    };
    retry(START, attach).map_err(line)
}

pub(crate) fn listen(running: &Running) -> Result<UnixListener, String> {
    let mut path = running.uds_path.clone().into_os_string();
    path.push(format!("_{PORT}"));
    UnixListener::bind(PathBuf::from(path)).map_err(line)
}

/// On the thread of the program on the host, which runs on core `cpu` from here on.
fn accept(listener: &UnixListener, cpu: Option<usize>) -> Result<UnixStream, String> {
    worker::pin(cpu)?;
    listener.accept().map(|(stream, _)| stream).map_err(line)
}

fn connect(driver: &mut Driver, deadline: Instant) -> Result<StreamId, String> {
    driver
        .wait_connect(Address::new(Cid::HOST, Port::new(PORT)), deadline)
        .map_err(|error| format!("connect: {error}"))
}

/// Driver to a sink that accepts the guest's connection with `accept`, packets of `size`.
pub(crate) fn to_host<S: Read>(
    driver: &mut Driver,
    accept: impl FnOnce() -> Result<S, String> + Send + 'static,
    size: usize,
    bytes: u64,
) -> Result<Duration, String> {
    let sink = thread::spawn(move || -> Result<Instant, String> {
        let mut stream = accept()?;
        let mut seen = 0;
        let mut buffer = vec![0u8; BLOCK];
        while seen < bytes {
            match stream.read(&mut buffer).map_err(line)? {
                0 => return Err(format!("end of file after {seen} bytes")),
                got => {
                    pattern::check(seen, &buffer[..got])?;
                    seen += got as u64;
                }
            }
        }
        Ok(Instant::now())
    });
    let deadline = Instant::now() + PATIENCE;
    let stream = connect(driver, deadline)?;
    let mut packet = vec![0; size];
    let start = Instant::now();
    let mut sent = 0u64;
    let outcome = driver
        .wait_until(deadline, |driver| {
            while sent < bytes {
                // Finish a packet that credit has cut short, so that packets keep their boundaries.
                let within = (sent % size as u64) as usize;
                let want = (size - within).min((bytes - sent) as usize);
                pattern::fill(sent, &mut packet[..want]);
                match driver.send(stream, &packet[..want]) {
                    Ok(more) => sent += more as u64,
                    Err(SendError::WouldBlock) => return None,
                    Err(error) => return Some(Err(error.to_string())),
                }
            }
            Some(Ok(()))
        })
        .map_err(line)?;
    outcome.unwrap_or_else(|| Err(format!("{sent} of {bytes} bytes sent in time")))?;
    // The driver continues to handle credit until the sink has everything.
    while !sink.is_finished() {
        if Instant::now() > deadline {
            return Err("the sink did not get everything in time".to_owned());
        }
        driver
            .poll(Some(Instant::now() + Duration::from_millis(1)))
            .map_err(line)?;
    }
    let end = sink.join().map_err(|_| "the sink panicked")??;
    Ok(end.duration_since(start))
}

/// Unix source on core `cpu` to driver, writes of `size`.
fn to_guest(
    driver: &mut Driver,
    running: &Running,
    size: usize,
    bytes: u64,
    cpu: Option<usize>,
) -> Result<Duration, String> {
    driver.listen(Port::new(PORT), 1).map_err(line)?;
    let stream = running.connect_hybrid()?;
    let source = thread::spawn(move || {
        worker::pin(cpu)?;
        let stream = request(stream)?;
        source(stream, bytes, size)
    });
    let deadline = Instant::now() + PATIENCE;
    let stream = driver
        .wait_accept(Port::new(PORT), deadline)
        .map_err(|error| format!("accept: {error}"))?;
    let end = drain(driver, stream, bytes, deadline)?;
    let start = source.join().map_err(|_| "the source panicked")??;
    Ok(end.duration_since(start))
}

/// A source that accepts the guest's connection with `accept`, to the driver, writes of `size`.
pub(crate) fn back_to_guest<S: Write>(
    driver: &mut Driver,
    accept: impl FnOnce() -> Result<S, String> + Send + 'static,
    size: usize,
    bytes: u64,
) -> Result<Duration, String> {
    let source = thread::spawn(move || source(accept()?, bytes, size));
    let deadline = Instant::now() + PATIENCE;
    let stream = connect(driver, deadline)?;
    let end = drain(driver, stream, bytes, deadline)?;
    let start = source.join().map_err(|_| "the source panicked")??;
    Ok(end.duration_since(start))
}

/// Receives and checks `bytes` bytes; returns when the last one had arrived.
fn drain(
    driver: &mut Driver,
    stream: StreamId,
    bytes: u64,
    deadline: Instant,
) -> Result<Instant, String> {
    let mut seen = 0u64;
    let mut buffer = vec![0u8; BLOCK];
    let outcome = driver
        .wait_until(deadline, |driver| {
            while seen < bytes {
                match driver.recv(stream, &mut buffer) {
                    Ok(0) => return Some(Err(format!("end of file after {seen} bytes"))),
                    Ok(got) => {
                        if let Err(error) = pattern::check(seen, &buffer[..got]) {
                            return Some(Err(error));
                        }
                        seen += got as u64;
                    }
                    Err(RecvError::WouldBlock) => return None,
                    Err(error) => return Some(Err(error.to_string())),
                }
            }
            Some(Ok(()))
        })
        .map_err(line)?;
    let end = Instant::now();
    outcome.unwrap_or_else(|| Err(format!("{seen} of {bytes} bytes in time")))?;
    Ok(end)
}

/// Asks a hybrid socket for a connection to the guest's port.
fn request(mut stream: UnixStream) -> Result<UnixStream, String> {
    // One write: vhost-device-vsock drops a connection when the line arrives in pieces.
    let request = format!("CONNECT {PORT}\n");
    stream.write_all(request.as_bytes()).map_err(line)?;
    let mut answer = String::new();
    BufReader::new(stream.try_clone().map_err(line)?)
        .read_line(&mut answer)
        .map_err(line)?;
    if !answer.starts_with("OK ") {
        return Err(format!("the device answered {answer:?}"));
    }
    Ok(stream)
}

/// Writes `bytes` bytes; returns when it began.
fn source(mut stream: impl Write, bytes: u64, size: usize) -> Result<Instant, String> {
    let mut piece = vec![0; size];
    let mut sent = 0;
    let start = Instant::now();
    while sent < bytes {
        let want = size.min((bytes - sent) as usize);
        pattern::fill(sent, &mut piece[..want]);
        stream.write_all(&piece[..want]).map_err(line)?;
        sent += want as u64;
    }
    Ok(start)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_round_trip_is_counted_when_the_first_takes_all_of_the_time() {
        let mut trips = 0;
        let outcome = time_round_trips(Duration::from_nanos(1), Duration::ZERO, |sent, back| {
            trips += 1;
            back.copy_from_slice(sent);
            Ok(())
        });
        let outcome = outcome.unwrap();
        assert!(outcome.messages >= 1 && trips > outcome.messages, "{trips}");
        assert!(outcome.p50.is_some());
    }
}
