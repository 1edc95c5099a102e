//! A relay with clients and targets of every kind, for tests. A deadline is on every wait.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::RecvFlags;

use zerosock_sys::bpf::BpfError;

use crate::relay::{KernelEndpoint, NoSockmap, Relay, RelayConfig, RelayStats, Way};

/// Generous: only a hang takes this long.
pub(super) const DEADLINE: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Kind {
    Tcp,
    Unix,
}

/// A stream of either kind.
#[derive(Debug)]
pub(super) enum Sock {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// A listener of either kind.
#[derive(Debug)]
pub(super) enum Target {
    Tcp(TcpListener),
    Unix(UnixListener, PathBuf),
}

/// A relay from a listener to a target that the test has.
pub(super) struct Rig {
    relay: Relay,
    pub(super) target: Target,
    connector: Connect,
    about: String,
    _dir: Arc<tempfile::TempDir>,
}

/// How to connect to the relay.
#[derive(Clone, Debug)]
pub(super) struct Connect {
    tcp: Option<SocketAddr>,
    unix: PathBuf,
}

/// Asks for way sockmap; the reason if the machine does not permit it.
pub(super) fn make_map(config: &mut RelayConfig) -> Option<String> {
    config.way = Way::Sockmap;
    match config.make_map() {
        Ok(()) => None,
        Err(NoSockmap::Bpf(error @ (BpfError::Denied { .. } | BpfError::NotSupported { .. }))) => {
            Some(error.to_string())
        }
        Err(error) => panic!("{error}"),
    }
}

pub(super) fn skipped(reason: &dyn fmt::Display) {
    let name = thread::current().name().unwrap_or_default().to_owned();
    println!("SKIPPED {name}, way sockmap: {reason}");
}

/// Waits for a condition, and fails the test at the deadline.
pub(super) fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !holds() {
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Bytes that no shift, repetition or loss leaves the same.
pub(super) fn pattern(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let words = (0..length.div_ceil(8)).flat_map(|_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    words.take(length).collect()
}

/// Whether all bytes are the same, without printing them.
pub(super) fn same(one: &[u8], other: &[u8]) -> bool {
    one == other
}

pub(super) fn read_all(from: &mut impl Read) -> Vec<u8> {
    let mut all = Vec::new();
    from.read_to_end(&mut all).unwrap();
    all
}

impl Target {
    pub(super) fn new(kind: Kind, dir: &Path) -> Target {
        match kind {
            Kind::Tcp => Target::Tcp(TcpListener::bind("127.0.0.1:0").unwrap()),
            Kind::Unix => {
                let path = dir.join("target");
                Target::Unix(UnixListener::bind(&path).unwrap(), path)
            }
        }
    }

    pub(super) fn endpoint(&self) -> KernelEndpoint {
        let text = match self {
            Target::Tcp(listener) => format!("tcp:{}", listener.local_addr().unwrap()),
            Target::Unix(_, path) => format!("unix:{}", path.display()),
        };
        text.parse().unwrap()
    }

    fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Target::Tcp(listener) => listener.as_fd(),
            Target::Unix(listener, _) => listener.as_fd(),
        }
    }

    pub(super) fn accept(&self) -> Sock {
        wait_readable(self.fd());
        let sock = match self {
            Target::Tcp(listener) => Sock::Tcp(listener.accept().unwrap().0),
            Target::Unix(listener, _) => Sock::Unix(listener.accept().unwrap().0),
        };
        sock.limited()
    }

    fn try_clone(&self) -> Target {
        match self {
            Target::Tcp(listener) => Target::Tcp(listener.try_clone().unwrap()),
            Target::Unix(listener, path) => {
                Target::Unix(listener.try_clone().unwrap(), path.clone())
            }
        }
    }
}

pub(super) fn wait_readable(fd: BorrowedFd<'_>) {
    let limit = Timespec::try_from(DEADLINE).unwrap();
    let mut polled = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    assert_eq!(poll(&mut polled, Some(&limit)).unwrap(), 1, "a time-out");
}

pub(super) fn listening(kind: Kind, dir: &Path) -> KernelEndpoint {
    let text = match kind {
        Kind::Tcp => "tcp-listen:127.0.0.1:0".into(),
        Kind::Unix => format!("unix-listen:{}", dir.join("relay").display()),
    };
    text.parse().unwrap()
}

impl Rig {
    pub(super) fn start(from: Kind, to: Kind, set: impl FnOnce(&mut RelayConfig)) -> Rig {
        let dir = Arc::new(tempfile::tempdir().unwrap());
        let target = Target::new(to, dir.path());
        let mut config = RelayConfig::new([listening(from, dir.path()), target.endpoint()]);
        config.max_connections = 20_000;
        set(&mut config);
        let about = format!("{from:?} to {to:?} by {}", config.way);
        let relay = Relay::start(config).unwrap();
        let connector = Connect {
            tcp: relay.addresses()[0],
            unix: dir.path().join("relay"),
        };
        Rig {
            relay,
            target,
            connector,
            about,
            _dir: dir,
        }
    }

    /// The address of the relay's TCP listener.
    pub(super) fn address(&self) -> SocketAddr {
        self.connector.tcp.unwrap()
    }

    /// The path of the relay's Unix listener.
    pub(super) fn path(&self) -> PathBuf {
        self.connector.unix.clone()
    }

    /// Closes the target's listener; its address stays the relay's target.
    pub(super) fn close_target(&mut self) {
        self.target = Target::new(Kind::Tcp, Path::new("/nonexistent"));
    }

    pub(super) fn connector(&self) -> Connect {
        self.connector.clone()
    }

    pub(super) fn connect(&self) -> Sock {
        self.connector.connect()
    }

    /// A client, and what the target has accepted for it.
    pub(super) fn pair(&self) -> (Sock, Sock) {
        let client = self.connect();
        (client, self.target.accept())
    }

    pub(super) fn stats(&self) -> RelayStats {
        self.relay.stats()
    }

    /// Waits until so many connections were made and all have ended.
    pub(super) fn ended(&self, opened: u64) {
        wait_until("the end of all connections", || {
            let stats = self.stats();
            stats.opened == opened && stats.open == 0
        });
    }

    /// Answers what comes, until the result is dropped.
    pub(super) fn serve_echo(&self) -> Echo {
        let stop = Arc::new(AtomicBool::new(false));
        let target = self.target.try_clone();
        let address = self.target.try_clone();
        let stopped = stop.clone();
        let thread = thread::spawn(move || {
            loop {
                let mut sock = target.accept();
                if stopped.load(Ordering::SeqCst) {
                    return;
                }
                let mut all = Vec::new();
                // A client may have reset its connection.
                if sock.read_to_end(&mut all).is_ok() {
                    let _ = sock.write_all(&all);
                }
            }
        });
        Echo {
            stop,
            address,
            thread: Some(thread),
        }
    }
}

impl fmt::Display for Rig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.about)
    }
}

/// A thread that answers. Dropping it ends it.
pub(super) struct Echo {
    stop: Arc<AtomicBool>,
    address: Target,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Echo {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        let _waker: Sock = match &self.address {
            Target::Tcp(listener) => {
                Sock::Tcp(TcpStream::connect(listener.local_addr().unwrap()).unwrap())
            }
            Target::Unix(_, path) => Sock::Unix(UnixStream::connect(path).unwrap()),
        };
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

impl Connect {
    pub(super) fn connect(&self) -> Sock {
        let sock = match self.tcp {
            Some(address) => Sock::Tcp(TcpStream::connect(address).unwrap()),
            None => Sock::Unix(UnixStream::connect(&self.unix).unwrap()),
        };
        sock.limited()
    }
}

impl Sock {
    fn limited(self) -> Sock {
        match &self {
            Sock::Tcp(sock) => {
                sock.set_read_timeout(Some(DEADLINE)).unwrap();
                sock.set_write_timeout(Some(DEADLINE)).unwrap();
            }
            Sock::Unix(sock) => {
                sock.set_read_timeout(Some(DEADLINE)).unwrap();
                sock.set_write_timeout(Some(DEADLINE)).unwrap();
            }
        }
        self
    }

    pub(super) fn try_clone(&self) -> Sock {
        match self {
            Sock::Tcp(sock) => Sock::Tcp(sock.try_clone().unwrap()),
            Sock::Unix(sock) => Sock::Unix(sock.try_clone().unwrap()),
        }
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Sock::Tcp(sock) => sock.as_fd(),
            Sock::Unix(sock) => sock.as_fd(),
        }
    }

    pub(super) fn shutdown(&self, how: Shutdown) {
        // The peer may be gone.
        let _ = match self {
            Sock::Tcp(sock) => sock.shutdown(how),
            Sock::Unix(sock) => sock.shutdown(how),
        };
    }

    /// Waits until a byte can be read, and leaves it.
    pub(super) fn peek(&self) {
        wait_readable(self.fd());
        let got = rustix::net::recv(self.fd(), &mut [0; 1], RecvFlags::PEEK).unwrap();
        assert_eq!(got.0, 1);
    }

    /// Closes it at once: TCP by a reset.
    pub(super) fn reset(self) {
        if let Sock::Tcp(sock) = &self {
            rustix::net::sockopt::set_socket_linger(sock, Some(Duration::ZERO)).unwrap();
        }
    }

    /// Writes the bytes of an endless pattern until nothing is taken for a while; returns how many.
    pub(super) fn fill(&self, endless: &Endless) -> usize {
        const MOST: usize = 80 << 20;
        let mut sent = 0;
        let limit = Timespec::try_from(Duration::from_millis(300)).unwrap();
        while sent < MOST {
            let mut polled = [PollFd::from_borrowed_fd(self.fd(), PollFlags::OUT)];
            if poll(&mut polled, Some(&limit)).unwrap() == 0 {
                break;
            }
            let flags = rustix::net::SendFlags::DONTWAIT | rustix::net::SendFlags::NOSIGNAL;
            match rustix::net::send(self.fd(), endless.at(sent), flags) {
                Ok(more) => sent += more,
                Err(rustix::io::Errno::AGAIN) => {}
                Err(errno) => panic!("{errno}"),
            }
        }
        sent
    }
}

/// A pattern that repeats after a number of bytes that no buffer has.
pub(super) struct Endless(Vec<u8>);

impl Endless {
    pub(super) fn new() -> Endless {
        Endless(pattern(1_000_003, 7))
    }

    fn at(&self, offset: usize) -> &[u8] {
        &self.0[offset % self.0.len()..]
    }

    /// Whether these are its first bytes.
    pub(super) fn begins_with(&self, bytes: &[u8]) -> bool {
        bytes
            .chunks(self.0.len())
            .all(|chunk| chunk == &self.0[..chunk.len()])
    }
}

impl Read for Sock {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Sock::Tcp(sock) => sock.read(buffer),
            Sock::Unix(sock) => sock.read(buffer),
        }
    }
}

impl Write for Sock {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Sock::Tcp(sock) => sock.write(bytes),
            Sock::Unix(sock) => sock.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
