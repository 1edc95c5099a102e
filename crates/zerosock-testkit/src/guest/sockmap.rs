//! A relay between a socket of the guest and kernel AF_VSOCK: redirection inside the kernel and copying in
//! here, socat, or `zerosock relay`. The client of the relay is in here too, and with the loopback CID also
//! the other end.
//!
//! Kernel AF_VSOCK: runs only inside guests. It prints one line with what happened.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{Shutdown, shutdown};
use sha2::{Digest, Sha256};
use zerosock_cli::vm::pattern::{Pattern, hex};
use zerosock_relay::sockmap::{
    DirectionCounters, Directions, RedirectState, RedirectedPair, RelayMap, SCRATCH, Side,
};
use zerosock_sys::vsock;

use crate::datagrams::foreign_bytes;

/// CID 1: the guest itself.
const LOOPBACK: u32 = 1;
/// Where a relay that is another program listens.
const ADDRESS: &str = "127.0.0.1:7100";
const PATH: &str = "/tmp/relay.sock";
const STEP: Duration = Duration::from_secs(30);
/// Bytes of a direction inside the kernel.
const LIMIT: u64 = 4 << 20;
/// Buffer of the copying relay.
const BUFFER: usize = 256 << 10;
/// A datagram relay ends when nothing has come for so long.
const QUIET: Duration = Duration::from_millis(500);

/// How the relay moves bytes.
#[derive(Copy, Clone, Debug, Eq, PartialEq, ValueEnum)]
pub(super) enum Way {
    /// By `zerosock_relay::sockmap`, in here.
    Sockmap,
    /// In here, with a large buffer.
    Copy,
    Socat,
    /// By `zerosock relay --way auto`, and so on.
    RelayAuto,
    RelayCopy,
    RelaySplice,
    RelaySockmap,
}

impl Way {
    /// What `zerosock relay` is told.
    fn of_relay(self) -> Option<&'static str> {
        match self {
            Way::Sockmap | Way::Copy | Way::Socat => None,
            Way::RelayAuto => Some("auto"),
            Way::RelayCopy => Some("copy"),
            Way::RelaySplice => Some("splice"),
            Way::RelaySockmap => Some("sockmap"),
        }
    }
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
    /// Receive buffer of the vsock socket
    #[arg(long)]
    buffer: Option<u64>,
    /// Pause after each datagram, in microseconds
    #[arg(long, default_value_t = 0)]
    pause: u64,
}

/// What the relay did.
#[derive(Default)]
struct Relayed {
    counters: DirectionCounters,
    /// The way that `zerosock relay` says it took.
    way: Option<String>,
}

pub(super) fn run(options: &Options) -> io::Result<()> {
    // Made before, and compared after the time that counts.
    let sent = Arc::new(Pattern::bytes(options.seed, options.bytes));
    let far = match options.cid {
        LOOPBACK => Some(far_end(options, sent.clone())?),
        _ => None,
    };
    let (client, relay) = relay(options)?;
    let before = busy()?;
    let start = Instant::now();
    let mut received = Arrived::default();
    match (client, options.back) {
        (Client::Stream(mut client), false) => {
            for piece in sent.chunks(options.chunk.max(1)) {
                client.write_all(piece)?;
            }
            client.shutdown_write()?;
            received.elapsed = start.elapsed();
        }
        (Client::Stream(mut client), true) => received = read_to_end(&mut client)?,
        (Client::Datagrams(client), _) => {
            for datagram in sent.chunks(options.chunk.max(1)) {
                // An error: nothing listens yet, or the queue is full. The datagram is lost.
                let _ = client.send(datagram);
                if options.pause > 0 {
                    thread::sleep(Duration::from_micros(options.pause));
                }
            }
            received.elapsed = start.elapsed();
        }
    }
    let relayed = relay.finish()?;
    let far = match far {
        Some(far) => Some(far.join().map_err(|_| panicked())??),
        None => None,
    };
    let busy = busy()?.saturating_sub(before);
    let digest = |arrived: &Arrived| hex(Sha256::digest(&arrived.bytes).as_slice());
    let mut line = format!(
        "sent_us={} client_sha256={}",
        received.elapsed.as_micros(),
        digest(&received)
    );
    if let Some(far) = far {
        let foreign = match options.kind {
            Kind::Udp => foreign_bytes(&sent, &far.bytes, options.chunk),
            _ => 0,
        };
        line += &format!(
            " far_us={} far_bytes={} far_sha256={} far_foreign={foreign}",
            far.elapsed.as_micros(),
            far.bytes.len(),
            digest(&far)
        );
    }
    if let Some(way) = relayed.way {
        line += &format!(" way={way}");
    }
    let counters = relayed.counters;
    println!(
        "sockmap: {line} busy_us={busy} redirected={} packets={} by_hand={}",
        counters.redirected_bytes, counters.redirected_packets, counters.by_hand_bytes
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
    Zerosock(Child),
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
            Relay::Zerosock(mut child) => {
                let way = way_taken(&mut child);
                child.kill()?;
                child.wait()?;
                Ok(Relayed {
                    way: Some(way?),
                    ..Relayed::default()
                })
            }
        }
    }
}

/// Waits for the end of the connection, in the relay's log.
fn way_taken(child: &mut Child) -> io::Result<String> {
    let log = child.stderr.take().ok_or(io::ErrorKind::NotFound)?;
    let mut said = String::new();
    for line in BufReader::new(log).lines() {
        let line = line?;
        if line.contains("connection ended") {
            let way = line.split(' ').find_map(|word| word.strip_prefix("way="));
            return way
                .map(str::to_owned)
                .ok_or_else(|| io::Error::other(line.clone()));
        }
        said += &line;
    }
    Err(io::Error::other(format!("the relay ended: {said}")))
}

fn relay(options: &Options) -> io::Result<(Client, Relay)> {
    if options.way == Way::Socat || options.way.of_relay().is_some() {
        return program(options);
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
    if let Some(bytes) = options.buffer {
        vsock::set_buffer_size(&vsock, bytes)?;
    }
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
        _ => thread::spawn(move || {
            let (from, to) = if back { (vsock, inner) } else { (inner, vsock) };
            copy(&from, &to, kind)
        }),
    };
    Ok((client, Relay::Thread(thread)))
}

/// Drives the pair until its one direction has ended.
fn redirect(mut pair: RedirectedPair<OwnedFd>, kind: Kind) -> io::Result<Relayed> {
    let mut scratch = vec![0; SCRATCH];
    let mut seen = (0, Instant::now());
    loop {
        let turn = pair.turn(Side::A, &mut scratch).map_err(io::Error::other)?;
        let counters = pair.counters(Side::A);
        if turn.state == RedirectState::Ended {
            return Ok(Relayed {
                counters,
                way: None,
            });
        }
        let total = counters.redirected_bytes + counters.by_hand_bytes;
        if total != seen.0 {
            seen = (total, Instant::now());
        } else if kind == Kind::Udp && total > 0 && seen.1.elapsed() >= QUIET {
            // Datagrams have no end.
            shutdown(pair.socket(Side::B), Shutdown::Write)?;
            return Ok(Relayed {
                counters,
                way: None,
            });
        }
        let again = turn.again.unwrap_or(Duration::from_millis(20));
        let again = Timespec::try_from(again).map_err(io::Error::other)?;
        let events = match turn.state {
            // An end that waits stays readable.
            RedirectState::Waiting => PollFlags::empty(),
            RedirectState::Idle => PollFlags::IN | PollFlags::RDHUP,
            RedirectState::Redirecting | RedirectState::Ended => PollFlags::RDHUP,
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

/// socat with its own buffer of 8 KiB, as in published comparisons, or `zerosock relay`.
fn program(options: &Options) -> io::Result<(Client, Relay)> {
    let Options {
        cid, port, kind, ..
    } = *options;
    let own_port = ADDRESS.rsplit(':').next().unwrap_or_default();
    let way = options.way.of_relay();
    let mut command = match way {
        None => Command::new("/bin/socat"),
        Some(_) => Command::new("/bin/zerosock"),
    };
    if let Some(way) = way {
        let from = match kind {
            Kind::Tcp => format!("tcp-listen:{ADDRESS}"),
            Kind::Unix => format!("unix-listen:{PATH}"),
            Kind::Udp => format!("udp-listen:{ADDRESS}"),
        };
        // The name decides what the program of the benchmarks is.
        command.arg0("zerosock").args(["relay", &from]);
        command.arg(format!("vsock:{cid}:{port}"));
        command.args(["--way", way, "--workers", "1"]);
        command.stderr(Stdio::piped());
    } else {
        let from = match kind {
            Kind::Tcp => format!("TCP-LISTEN:{own_port},bind=127.0.0.1,reuseaddr,nodelay"),
            Kind::Unix => format!("UNIX-LISTEN:{PATH},unlink-early"),
            Kind::Udp => format!("UDP-RECV:{own_port},bind=127.0.0.1"),
        };
        if kind == Kind::Udp {
            command.args(["-u", "-T", "0.5"]);
        }
        command.args(["-b", "8192", &from]);
        command.arg(format!("VSOCK-CONNECT:{cid}:{port}"));
    }
    let mut child = command.spawn()?;
    let client = match connect(kind) {
        Ok(client) => client,
        Err(error) => {
            let _ = child.kill();
            return Err(error);
        }
    };
    let relay = match way {
        None => Relay::Socat(child),
        Some(_) => Relay::Zerosock(child),
    };
    Ok((client, relay))
}

fn connect(kind: Kind) -> io::Result<Client> {
    let deadline = Instant::now() + STEP;
    loop {
        let client = match kind {
            Kind::Udp => {
                // Until it is bound, an empty datagram comes back as an error of the next call.
                let client = UdpSocket::bind("127.0.0.1:0")?;
                client.connect(ADDRESS)?;
                let probe = client.send(&[]).and_then(|_| client.send(&[]));
                probe.map(|_| Client::Datagrams(client))
            }
            Kind::Tcp => TcpStream::connect(ADDRESS).map(|it| Client::Stream(Stream::new(it))),
            Kind::Unix => UnixStream::connect(PATH).map(|it| Client::Stream(Stream::new(it))),
        };
        match client {
            // The relay does not listen yet, and nothing signals that it does.
            Err(_) if Instant::now() < deadline => thread::sleep(Duration::from_millis(10)),
            client => return client,
        }
    }
}

/// What arrived at one end.
#[derive(Default)]
struct Arrived {
    bytes: Vec<u8>,
    elapsed: Duration,
}

/// The other end of the loopback connection.
fn far_end(
    options: &Options,
    sent: Arc<Vec<u8>>,
) -> io::Result<thread::JoinHandle<io::Result<Arrived>>> {
    let listener = vsock::listen(vsock::CID_ANY, options.port, 1)?;
    let options = options.clone();
    Ok(thread::spawn(move || {
        let (fd, _, _) = vsock::accept_blocking(&listener)?;
        let mut far = Stream::new(fd);
        if !options.back {
            return read_to_end(&mut far);
        }
        for piece in sent.chunks(options.chunk.max(1)) {
            far.write_all(piece)?;
        }
        far.shutdown_write()?;
        // Until the relay has closed, so that nothing is discarded.
        let _ = far.read(&mut [0]);
        Ok(Arrived::default())
    }))
}

/// What came, and the time from the first to the last byte: some relays end late.
fn read_to_end(from: &mut Stream) -> io::Result<Arrived> {
    let mut bytes = Vec::new();
    let mut buffer = vec![0; BUFFER];
    let mut first = None;
    let mut last = Instant::now();
    loop {
        let count = from.read(&mut buffer)?;
        if count == 0 {
            let elapsed = last - first.unwrap_or(last);
            return Ok(Arrived { bytes, elapsed });
        }
        last = Instant::now();
        first.get_or_insert(last);
        bytes.extend_from_slice(&buffer[..count]);
    }
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
