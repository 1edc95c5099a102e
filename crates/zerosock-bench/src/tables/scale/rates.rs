//! Rate of connecting and closing, and many busy connections at once.

use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use zerosock::{Address, Cid, Port};
use zerosock_testkit::driver::{Driver, DriverEvent, RecvError, SendError, StreamId, StreamState};

use crate::args::Settings;
use crate::bench::Bench;
use crate::processes::{on_core, own_cpu_time};
use crate::report::line;
use crate::tables::device::program::{Device, Running};
use crate::tables::device::traffic::{self, Case};
use crate::worker;
use crate::worker::jobs::percentile;

const PATIENCE: Duration = Duration::from_secs(120);
/// Pending connects at a time.
const AT_A_TIME: usize = 64;
/// Number of connections that play ping-pong.
const PLAYERS: usize = 1000;
const MESSAGE: usize = 64;
/// The port of the program that takes the bulk stream.
const SINK: u32 = 4321;

/// Connects and closes per second, and microseconds of the device's CPU time for each.
pub(super) fn connects(device: &Device, bench: &Bench<'_>) -> Result<(f64, f64), String> {
    let Settings { warm, time, .. } = *bench.settings;
    let cores = bench.cores;
    traffic::with_device(device, Case::STOCK_RX_BUFFER, cores, |running, driver| {
        let listener = traffic::listen(running)?;
        // The thread ends with the process.
        thread::spawn(move || accept_all(&listener));
        let to = Address::new(Cid::HOST, Port::new(traffic::PORT));
        let begin = Instant::now();
        let give_up = begin + PATIENCE;
        let (mut under_way, mut done) = (0, 0u64);
        let mut counted_from = None;
        loop {
            let now = Instant::now();
            if now > begin + warm && counted_from.is_none() {
                counted_from = Some((now, done, running.cpu_seconds()?));
            }
            if let Some((from, before, cpu)) = counted_from
                && now > from + time
                && done > before
            {
                let count = (done - before) as f64;
                let cpu = running.cpu_seconds()? - cpu;
                return Ok((count / (now - from).as_secs_f64(), cpu * 1e6 / count));
            }
            if now > give_up {
                return Err(format!("{done} connections in {PATIENCE:?}"));
            }
            while under_way < AT_A_TIME {
                driver.connect(to).map_err(line)?;
                under_way += 1;
            }
            // One poll of the queues and one kick for all events.
            let first = driver.poll(Some(now + Duration::from_millis(50)));
            let mut next = first.map_err(line)?;
            while let Some(event) = next {
                if let DriverEvent::Ready { stream } = event {
                    match driver.state(stream) {
                        Some(StreamState::Connected) => {
                            driver.close(stream);
                            under_way -= 1;
                            done += 1;
                        }
                        Some(StreamState::Reset) => return Err("a connect was refused".into()),
                        _ => {}
                    }
                }
                next = driver.next_event();
            }
        }
    })
}

/// A program that accepts every connection. The other side closes first, as a client does.
fn accept_all(listener: &UnixListener) {
    let mut recent = std::collections::VecDeque::new();
    while let Ok((stream, _)) = listener.accept() {
        recent.push_back(stream);
        if recent.len() > 4 * AT_A_TIME {
            recent.pop_front();
        }
    }
}

/// As [`connects`], for a process that makes only the socket calls: the ceiling of any device that
/// connects to Unix sockets.
pub(super) fn bare_connects(bench: &Bench<'_>) -> Result<(f64, f64), String> {
    let (settings, core) = (bench.settings, bench.cores.sender);
    let dir = tempfile::tempdir().map_err(line)?;
    let path = dir.path().join(format!("vm.vsock_{}", traffic::PORT));
    let listener = UnixListener::bind(&path).map_err(line)?;
    thread::spawn(move || {
        if worker::pin(core).is_ok() {
            accept_all(&listener);
        }
    });
    on_core(bench.cores.receiver, || {
        let to = SocketAddrUnix::new(&path).map_err(line)?;
        let begin = Instant::now();
        let mut counted_from = None;
        let mut done = 0u64;
        loop {
            let now = Instant::now();
            if now > begin + settings.warm && counted_from.is_none() {
                counted_from = Some((now, done, own_cpu_time()?));
            }
            if let Some((from, before, cpu)) = counted_from
                && now > from + settings.time
                && done > before
            {
                let count = (done - before) as f64;
                let cpu = (own_cpu_time()? - cpu) as f64 / 1e9;
                return Ok((count / (now - from).as_secs_f64(), cpu * 1e6 / count));
            }
            let mut open = Vec::with_capacity(AT_A_TIME);
            while open.len() < AT_A_TIME {
                open.push(connect_one(&to)?);
            }
            done += open.len() as u64;
        }
    })
}

fn connect_one(to: &SocketAddrUnix) -> Result<OwnedFd, String> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
    let socket = socket.map_err(line)?;
    loop {
        match net::connect(&socket, to) {
            Ok(()) => return Ok(socket),
            // The backlog is full.
            Err(Errno::AGAIN) => thread::yield_now(),
            Err(error) => return Err(line(error)),
        }
    }
}

/// The p99 of round trips of all players, in microseconds.
pub(super) fn ping_pong(
    device: &Device,
    beside_bulk: bool,
    bench: &Bench<'_>,
) -> Result<f64, String> {
    let Settings { warm, time, .. } = *bench.settings;
    let cores = bench.cores;
    let players = if bench.settings.quick {
        PLAYERS / 10
    } else {
        PLAYERS
    };
    traffic::with_device(device, Case::STOCK_RX_BUFFER, cores, |running, driver| {
        let listener = traffic::listen(running)?;
        // Both end when the device closes their connections, at the latest when it is killed.
        thread::spawn(move || echo(&listener, players));
        let deadline = Instant::now() + PATIENCE;
        let to = |port| Address::new(Cid::HOST, Port::new(port));
        let mut streams = Vec::new();
        for _ in 0..players {
            let stream = driver.wait_connect(to(traffic::PORT), deadline);
            streams.push(stream.map_err(line)?);
        }
        let bulk = if beside_bulk {
            Some(bulk(driver, running, to(SINK), deadline)?)
        } else {
            None
        };
        play(driver, &streams, bulk, warm, time)
    })
}

fn bulk(
    driver: &mut Driver,
    running: &Running,
    to: Address,
    deadline: Instant,
) -> Result<StreamId, String> {
    let mut path = running.uds_path.clone().into_os_string();
    path.push(format!("_{SINK}"));
    let sink = UnixListener::bind(path).map_err(line)?;
    let stream = driver.wait_connect(to, deadline).map_err(line)?;
    let (mut program, _) = sink.accept().map_err(line)?;
    thread::spawn(move || {
        let mut buffer = vec![0; 256 << 10];
        while program.read(&mut buffer).is_ok_and(|bytes| bytes > 0) {}
    });
    Ok(stream)
}

fn play(
    driver: &mut Driver,
    streams: &[StreamId],
    bulk: Option<StreamId>,
    warm: Duration,
    time: Duration,
) -> Result<f64, String> {
    let begin = Instant::now();
    let give_up = begin + PATIENCE;
    let block = vec![7; 64 << 10];
    let message = [5; MESSAGE];
    // Send time of each message, and how many bytes of its echo have arrived.
    let mut players = HashMap::new();
    for &stream in streams {
        driver.wait_send(stream, &message, give_up).map_err(line)?;
        players.insert(stream, (Instant::now(), 0));
    }
    let mut times = Vec::new();
    let (mut bytes, mut sent) = ([0; MESSAGE], 0u64);
    loop {
        let now = Instant::now();
        if now > give_up {
            return Err(format!("{} round trips in {PATIENCE:?}", times.len()));
        }
        if now > begin + warm + time && times.len() >= streams.len() {
            break;
        }
        if let Some(stream) = bulk {
            for _ in 0..4 {
                match driver.send(stream, &block) {
                    Ok(more) => sent += more as u64,
                    Err(SendError::WouldBlock) => break,
                    Err(error) => return Err(format!("the bulk stream: {error}")),
                }
            }
        }
        let mut event = driver.poll(Some(now + Duration::from_millis(50)));
        while let Some(DriverEvent::Ready { stream }) = event.map_err(line)? {
            if let Some((begun, back)) = players.get_mut(&stream) {
                loop {
                    match driver.recv(stream, &mut bytes[*back..]) {
                        Ok(0) => return Err("a player has left".to_owned()),
                        Ok(got) => *back += got,
                        Err(RecvError::WouldBlock) => break,
                        Err(error) => return Err(error.to_string()),
                    }
                    if *back == MESSAGE {
                        let now = Instant::now();
                        if now > begin + warm {
                            times.push((now - *begun).as_nanos() as u64);
                        }
                        (*begun, *back) = (now, 0);
                        driver.wait_send(stream, &message, give_up).map_err(line)?;
                    }
                }
            }
            event = Ok(driver.next_event());
        }
    }
    if bulk.is_some() && sent == 0 {
        return Err("the bulk stream sent nothing".to_owned());
    }
    times.sort_unstable();
    let p99 = percentile(&times, 99).ok_or("no round trip")?;
    Ok(p99 as f64 / 1e3)
}

/// A program that echoes on `count` connections at once.
fn echo(listener: &UnixListener, count: usize) -> Result<(), String> {
    let poller = epoll::create(CreateFlags::CLOEXEC).map_err(line)?;
    let mut streams: Vec<UnixStream> = Vec::new();
    for n in 0..count {
        let (stream, _) = listener.accept().map_err(line)?;
        stream.set_nonblocking(true).map_err(line)?;
        let data = EventData::new_u64(n as u64);
        epoll::add(&poller, &stream, data, EventFlags::IN).map_err(line)?;
        streams.push(stream);
    }
    let mut events = Vec::with_capacity(256);
    let mut bytes = [0; 4096];
    loop {
        events.clear();
        let spare = rustix::buffer::spare_capacity(&mut events);
        epoll::wait(&poller, spare, None).map_err(line)?;
        for event in &events {
            let Event { data, .. } = *event;
            let Some(stream) = streams.get_mut(data.u64() as usize) else {
                continue;
            };
            match stream.read(&mut bytes) {
                Ok(0) => return Ok(()),
                Ok(got) => stream.write_all(&bytes[..got]).map_err(line)?,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(line(error)),
            }
        }
    }
}
