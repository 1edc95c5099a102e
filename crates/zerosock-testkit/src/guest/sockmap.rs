//! A relay between a socket of the guest and kernel AF_VSOCK, in three ways: redirection inside the
//! kernel, copying, and socat. The client of the relay is in here too, and with the loopback CID also
//! the other end.
//!
//! Kernel AF_VSOCK: runs only inside guests. It prints one line with what happened.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{Shutdown, shutdown};
use sha2::{Digest, Sha256};
use zerosock_cli::vm::pattern::{Pattern, hex};
use zerosock_relay::sockmap::{Counters, Directions, Pair, RelayMap, Side, State};
use zerosock_sys::vsock;

/// CID 1: the guest itself.
const LOOPBACK: u32 = 1;
/// Where socat listens.
const SOCAT: &str = "127.0.0.1:7100";
const STEP: Duration = Duration::from_secs(30);
/// Bytes of a direction inside the kernel.
const LIMIT: u64 = 4 << 20;
/// Buffer of the copying relay, and for what the redirecting one does by hand.
const BUFFER: usize = 256 << 10;
/// A datagram relay ends when nothing has come for so long.
const QUIET: Duration = Duration::from_millis(500);

/// How the relay moves bytes.
#[derive(Copy, Clone, Debug, Eq, PartialEq, ValueEnum)]
pub(super) enum Way {
    Sockmap,
    Copy,
    Socat,
}

/// The socket on the other side of the relay than vsock.
#[derive(Copy, Clone, Debug, Eq, PartialEq, ValueEnum)]
pub(super) enum Kind {
    Tcp,
    Unix,
    Udp,
}

/// What to do.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Options {
    #[arg(long)]
    way: Way,
    #[arg(long)]
    kind: Kind,
    /// The other end of the vsock connection
    #[arg(long)]
    cid: u32,
    #[arg(long)]
    port: u32,
    /// From vsock to the other kind, not to vsock
    #[arg(long)]
    back: bool,
    #[arg(long)]
    bytes: usize,
    /// Bytes of a write, or of a datagram
    #[arg(long, default_value_t = 65536)]
    chunk: usize,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Pause after each datagram, in microseconds
    #[arg(long, default_value_t = 0)]
    pause: u64,
}

/// What the relay did.
#[derive(Default)]
struct Relayed {
    counters: Counters,
}

pub(super) fn run(options: &Options) -> io::Result<()> {
    let far = match options.cid {
        LOOPBACK => Some(far_end(options)?),
        _ => None,
    };
    let (client, relay) = relay(options)?;
    let before = busy()?;
    let start = Instant::now();
    let mut sent = None;
    let digest = match (client, options.back) {
        (Client::Stream(mut client), false) => {
            write_pattern(options, |bytes| client.write_all(bytes))?;
            client.shutdown_write()?;
            String::new()
        }
        (Client::Stream(mut client), true) => {
            let received = read_to_end(&mut client)?;
            sent = Some(received.elapsed);
            received.digest
        }
        (Client::Datagrams(client), _) => {
            write_pattern(options, |bytes| {
                let sent = client.send(bytes);
                if options.pause > 0 {
                    thread::sleep(Duration::from_micros(options.pause));
                }
                match sent {
                    // Nothing listens yet, or the queue is full: as UDP does.
                    Err(error) if error.raw_os_error().is_some() => Ok(()),
                    other => other.map(|_| ()),
                }
            })?;
            String::new()
        }
    };
    let sent = sent.unwrap_or_else(|| start.elapsed());
    let relayed = relay.finish()?;
    let mut line = format!("sent_us={} client_sha256={digest}", sent.as_micros());
    if let Some(far) = far {
        let far = far.join().map_err(|_| panicked())??;
        let mut far_line = format!(" far_us={}", far.elapsed.as_micros());
        far_line += &format!(" far_bytes={} far_sha256={}", far.bytes, far.digest);
        line += &far_line;
    }
    let counters = relayed.counters;
    println!(
        "sockmap: {line} busy_us={} redirected={} packets={} by_hand={}",
        busy()?.saturating_sub(before),
        counters.redirected_bytes,
        counters.redirected_packets,
        counters.by_hand_bytes
    );
    Ok(())
}

/// The client's end of the relay.
enum Client {
    Stream(Stream),
    Datagrams(UdpSocket),
}

/// TCP or Unix: only read, write and shutdown are used, which all stream sockets share.
struct Stream(UnixStream);

impl Stream {
    fn new(socket: impl Into<OwnedFd>) -> Stream {
        Stream(UnixStream::from(socket.into()))
    }

    fn shutdown_write(&self) -> io::Result<()> {
        Ok(shutdown(&self.0, Shutdown::Write)?)
    }
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A relay at work.
enum Relay {
    Thread(thread::JoinHandle<io::Result<Relayed>>),
    Socat(Child),
}

impl Relay {
    fn finish(self) -> io::Result<Relayed> {
        match self {
            Relay::Thread(thread) => thread.join().map_err(|_| panicked())?,
            Relay::Socat(mut child) => {
                let status = child.wait()?;
                if !status.success() {
                    return Err(io::Error::other(format!("socat: {status}")));
                }
                Ok(Relayed::default())
            }
        }
    }
}

fn relay(options: &Options) -> io::Result<(Client, Relay)> {
    if options.way == Way::Socat {
        return socat(options);
    }
    let (client, inner): (Client, OwnedFd) = match options.kind {
        Kind::Tcp => {
            let listener = TcpListener::bind("127.0.0.1:0")?;
            let client = TcpStream::connect(listener.local_addr()?)?;
            let inner = listener.accept()?.0;
            inner.set_nodelay(true)?;
            (Client::Stream(Stream::new(client)), inner.into())
        }
        Kind::Unix => {
            let (client, inner) = UnixStream::pair()?;
            (Client::Stream(Stream::new(client)), inner.into())
        }
        Kind::Udp => {
            let client = UdpSocket::bind("127.0.0.1:0")?;
            let inner = UdpSocket::bind("127.0.0.1:0")?;
            client.connect(inner.local_addr()?)?;
            inner.connect(client.local_addr()?)?;
            (Client::Datagrams(client), inner.into())
        }
    };
    let vsock = vsock::connect_blocking(options.cid, options.port, STEP)?;
    let Options {
        kind, back, way, ..
    } = *options;
    let thread = match way {
        Way::Sockmap => {
            let map = RelayMap::new(1).map_err(io::Error::other)?;
            let (from, to) = if back { (vsock, inner) } else { (inner, vsock) };
            let pair = map.insert_pair(from, to, LIMIT, Directions::FromA);
            let pair = pair.map_err(io::Error::other)?;
            thread::spawn(move || redirect(pair, kind))
        }
        Way::Copy | Way::Socat => thread::spawn(move || {
            let (from, to) = if back { (vsock, inner) } else { (inner, vsock) };
            copy(&from, &to, kind)
        }),
    };
    Ok((client, Relay::Thread(thread)))
}

/// Drives the pair until its one direction has ended.
fn redirect(mut pair: Pair<OwnedFd>, kind: Kind) -> io::Result<Relayed> {
    let mut scratch = vec![0; BUFFER];
    let mut seen = (0, Instant::now());
    loop {
        let turn = pair.turn(Side::A, &mut scratch).map_err(io::Error::other)?;
        let counters = pair.counters(Side::A);
        if turn.state == State::Ended {
            return Ok(Relayed { counters });
        }
        let total = counters.redirected_bytes + counters.by_hand_bytes;
        if total != seen.0 {
            seen = (total, Instant::now());
        } else if kind == Kind::Udp && total > 0 && seen.1.elapsed() >= QUIET {
            // Datagrams have no end.
            shutdown(pair.socket(Side::B), Shutdown::Write)?;
            return Ok(Relayed { counters });
        }
        let again = turn.again.unwrap_or(Duration::from_millis(20));
        let again = Timespec::try_from(again).map_err(io::Error::other)?;
        let events = match turn.state {
            // An end that waits stays readable.
            State::Waiting => PollFlags::empty(),
            State::Idle => PollFlags::IN | PollFlags::RDHUP,
            State::Redirecting | State::Ended => PollFlags::RDHUP,
        };
        let mut sockets = [PollFd::new(pair.socket(Side::A), events)];
        poll(&mut sockets, Some(&again))?;
    }
}

/// Copies through one buffer to the end.
fn copy(from: &OwnedFd, to: &OwnedFd, kind: Kind) -> io::Result<Relayed> {
    let mut buffer = vec![0; BUFFER];
    loop {
        if kind == Kind::Udp {
            let quiet = Timespec::try_from(QUIET).map_err(io::Error::other)?;
            let mut sockets = [PollFd::new(from, PollFlags::IN)];
            if poll(&mut sockets, Some(&quiet))? == 0 {
                break;
            }
        }
        let count = rustix::io::read(from, &mut buffer)?;
        if count == 0 {
            break;
        }
        let mut rest = &buffer[..count];
        while !rest.is_empty() {
            rest = &rest[rustix::io::write(to, rest)?..];
        }
    }
    shutdown(to, Shutdown::Write)?;
    Ok(Relayed::default())
}

/// socat with its own buffer of 8 KiB, as in published comparisons.
fn socat(options: &Options) -> io::Result<(Client, Relay)> {
    let to = format!("VSOCK-CONNECT:{}:{}", options.cid, options.port);
    let port = SOCAT.rsplit(':').next().unwrap_or_default();
    let mut command = Command::new("/bin/socat");
    command.args(["-b", "8192"]);
    let udp = options.kind == Kind::Udp;
    if udp {
        let from = format!("UDP-RECV:{port},bind=127.0.0.1");
        command.args(["-u", "-T", "0.5", &from, &to]);
    } else {
        let from = format!("TCP-LISTEN:{port},bind=127.0.0.1,reuseaddr,nodelay");
        command.args([&from, &to]);
    }
    let child = command.spawn()?;
    let deadline = Instant::now() + STEP;
    let client = loop {
        let client = if udp {
            // Until it is bound, an empty datagram comes back as an error of the next call.
            let client = UdpSocket::bind("127.0.0.1:0")?;
            client.connect(SOCAT)?;
            let probe = client.send(&[]).and_then(|_| client.send(&[]));
            probe.map(|_| Client::Datagrams(client))
        } else {
            TcpStream::connect(SOCAT).map(|stream| Client::Stream(Stream::new(stream)))
        };
        match client {
            Ok(client) => break client,
            // socat does not listen yet, and nothing signals that it does.
            Err(_) if Instant::now() < deadline => thread::sleep(Duration::from_millis(10)),
            Err(error) => return Err(error),
        }
    };
    Ok((client, Relay::Socat(child)))
}

/// What arrived at the far end of the loopback connection.
struct Far {
    bytes: u64,
    digest: String,
    elapsed: Duration,
}

fn far_end(options: &Options) -> io::Result<thread::JoinHandle<io::Result<Far>>> {
    let listener = vsock::listen(vsock::CID_ANY, options.port, 1)?;
    let options = options.clone();
    Ok(thread::spawn(move || {
        let (fd, _, _) = vsock::accept_blocking(&listener)?;
        let mut far = Stream::new(fd);
        let start = Instant::now();
        if options.back {
            write_pattern(&options, |bytes| far.write_all(bytes))?;
            far.shutdown_write()?;
            // Until the relay has closed, so that nothing is discarded.
            let _ = far.read(&mut [0]);
            return Ok(Far {
                bytes: options.bytes as u64,
                digest: String::new(),
                elapsed: start.elapsed(),
            });
        }
        read_to_end(&mut far)
    }))
}

fn write_pattern(
    options: &Options,
    mut write: impl FnMut(&[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let bytes = Pattern::bytes(options.seed, options.bytes);
    bytes.chunks(options.chunk.max(1)).try_for_each(&mut write)
}

/// What came, and the time from the first to the last byte: some relays end late.
fn read_to_end(from: &mut Stream) -> io::Result<Far> {
    let mut all = Vec::new();
    let mut buffer = vec![0; BUFFER];
    let mut first = None;
    let mut last = Instant::now();
    loop {
        let count = from.read(&mut buffer)?;
        if count == 0 {
            break;
        }
        last = Instant::now();
        first.get_or_insert(last);
        all.extend_from_slice(&buffer[..count]);
    }
    Ok(Far {
        bytes: all.len() as u64,
        digest: hex(Sha256::digest(&all).as_slice()),
        elapsed: last - first.unwrap_or(last),
    })
}

/// Time that all processors were busy, in microseconds (/proc/stat has hundredths of a second).
fn busy() -> io::Result<u64> {
    let stat = std::fs::read_to_string("/proc/stat")?;
    let numbers: Vec<u64> = stat
        .lines()
        .next()
        .unwrap_or_default()
        .split_whitespace()
        .filter_map(|word| word.parse().ok())
        .collect();
    // All but idle and iowait.
    let busy = numbers
        .iter()
        .enumerate()
        .filter(|(at, _)| !matches!(at, 3 | 4));
    Ok(busy.map(|(_, ticks)| ticks).sum::<u64>() * 10_000)
}

fn panicked() -> io::Error {
    io::Error::other("a thread panicked")
}
