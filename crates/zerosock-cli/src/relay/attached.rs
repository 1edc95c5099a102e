//! Relays with an end of an attached process or service.
//!
//! Bytes from the endpoint go to the kernel's socket from where the sender wrote them (a lease); bytes to
//! it are received into the buffer that the receiver reads (a loan). Each connection has two threads with
//! blocking calls, one for each direction.
//!
//! # Invariants
//! - A lease is not held while the kernel's socket takes nothing: what it did not take is copied.
//! - A loan is taken only when there is something to read.
//! - A TCP socket is reset when it is closed, by the end of this process too, until both directions have
//!   ended in order.

use std::io;
use std::net::{Shutdown, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{SocketFlags, SocketType, accept_with, getsockname, sockopt};
use sd_notify::NotifyState;
use tracing::{info, warn};
use zerosock::vsock::{Endpoint, Listener, Stream};
use zerosock::{Address, Port};
use zerosock_relay::relay::{ACCESS_LINES, KernelEndpoint};
use zerosock_relay::{AddressPolicy, ConnectRequest, Connector, ConnectorConfig, Target};
use zerosock_sys::{LogLimit, wait_ready};

use super::args::RelayArgs;
use crate::endpoint::{Attached, EndpointArg};
use crate::failure::Failure;
use crate::service_manager::notify;
use crate::signals::{Signals, signals_failed};
use crate::sockets::{self, SocketFile};

/// Connections that may wait to be accepted.
const BACKLOG: usize = 128;

/// The most that one loan is asked to hold.
const LOAN: usize = 65536;

/// Stack of a thread: each connection has two.
const STACK: usize = 256 << 10;

/// How often a direction that waits for room at the endpoint looks whether the other one has failed.
const LOOK: Duration = Duration::from_secs(1);

/// How long nothing is accepted after an accept has failed.
const PAUSE: Duration = Duration::from_millis(50);

/// Runs until a signal, or to the end of the only pair if neither end listens.
pub(super) fn run(args: &RelayArgs, signals: &Signals) -> Result<(), Failure> {
    let (attached, kernel) = match (&args.first, &args.second) {
        (EndpointArg::Attached(attached), EndpointArg::Kernel(kernel))
        | (EndpointArg::Kernel(kernel), EndpointArg::Attached(attached)) => (attached, kernel),
        _ => {
            return Err(Failure::usage(
                "one of the ends has to be a socket of the kernel, such as unix:PATH or tcp:HOST:PORT",
            ));
        }
    };
    if kernel.keeps_messages() || args.proxy_protocol {
        return Err(Failure::usage(format_args!(
            "{attached} is a stream: give a stream as the other end too, without --proxy-protocol"
        )));
    }
    let limits = Arc::new(ConnectionContext {
        open: AtomicUsize::new(0),
        max_connections: args.max_connections as usize,
        idle: args.idle_timeout,
        name: format!("{attached} and {kernel}"),
        warnings: LogLimit::default(),
        lines: LogLimit::new(ACCESS_LINES),
    });
    // The file is removed when this function returns.
    let (source, _file) = source(attached, kernel, args)?;
    let targets = Arc::new(targets(attached, kernel, args)?);
    info!(from = %args.first, to = %args.second, "relaying");
    notify(&[NotifyState::Ready]);
    let (over, done) = io::pipe().map_err(Failure::runtime)?;
    match source {
        ConnectionSource::None => {
            let (limits, targets) = (Arc::clone(&limits), Arc::clone(&targets));
            let first = targets.attached().map_err(Failure::runtime)?;
            spawn("relay", move || {
                connect_and_join(&targets, &limits, SourceConnection::Stream(first));
                drop(done);
            })
            .map_err(Failure::runtime)?;
        }
        source => {
            let limits = Arc::clone(&limits);
            spawn("accept", move || accept(&source, &targets, &limits))
                .map_err(Failure::runtime)?;
            // The relay is over with a signal only.
            std::mem::forget(done);
        }
    }
    let open = || limits.open.load(Ordering::Relaxed);
    let report = || info!(open = open(), "counters");
    let ended = signals.wait_for_end(over.as_fd(), report);
    if let Some(name) = ended.map_err(signals_failed)? {
        info!(open = open(), "{name}: stopping");
    }
    Ok(())
}

/// What connections have in common.
struct ConnectionContext {
    open: AtomicUsize,
    max_connections: usize,
    idle: Option<Duration>,
    /// For the log.
    name: String,
    warnings: LogLimit,
    /// For the access log.
    lines: LogLimit,
}

impl ConnectionContext {
    /// Logs a warning, within a rate.
    fn warn(&self, text: &dyn std::fmt::Display) {
        if let Some(suppressed) = self.warnings.admit(Instant::now()) {
            warn!(suppressed, "{}: {text}", self.name);
        }
    }
}

/// Where connections come from.
enum ConnectionSource {
    Attached(
        Listener,
        #[allow(dead_code, reason = "keeps the attachment")] Endpoint,
    ),
    Kernel(OwnedFd),
    /// Neither end listens.
    None,
}

/// A connection from the source.
enum SourceConnection {
    Stream(Stream),
    Socket(OwnedFd),
}

/// What connections from the source are joined to; both if neither end listens.
struct Targets {
    attached: Option<(Endpoint, Address)>,
    kernel: Option<KernelTarget>,
}

struct KernelTarget {
    target: Target,
    connector: Connector,
    timeout: Duration,
    keepalive: Option<Duration>,
}

fn attach(end: &Attached, ports: &[Port], args: &RelayArgs) -> Result<Endpoint, Failure> {
    let attached = end.attach(ports, Some(args.connect_timeout));
    attached.map_err(|error| {
        Failure::runtime(format_args!(
            "{}: cannot attach: {error}",
            end.path.display()
        ))
    })
}

fn source(
    attached: &Attached,
    kernel: &KernelEndpoint,
    args: &RelayArgs,
) -> Result<(ConnectionSource, Option<SocketFile>), Failure> {
    let failed = |error: &dyn std::fmt::Display| {
        Failure::runtime(format_args!("{kernel}: cannot listen: {error}"))
    };
    match (attached.to.is_none(), kernel) {
        (true, kernel) if kernel.listens() => Err(Failure::usage(format_args!(
            "{attached} and {kernel} both listen: one of the ends has to connect"
        ))),
        (true, _) => {
            let endpoint = attach(attached, &[attached.port], args)?;
            let listener = endpoint.listen(attached.port, BACKLOG);
            let listener = listener.map_err(Failure::runtime)?;
            info!(end = %attached, cid = %endpoint.cid(), "listening");
            Ok((ConnectionSource::Attached(listener, endpoint), None))
        }
        (false, KernelEndpoint::TcpListen(address)) => {
            let listener = sockets::bind_tcp(*address).map_err(|error| failed(&error))?;
            let address = getsockname(&listener).and_then(SocketAddr::try_from);
            let address = address.map_err(|error| failed(&error))?;
            info!(end = %kernel, %address, "listening");
            Ok((ConnectionSource::Kernel(listener), None))
        }
        (false, KernelEndpoint::UnixListen(path)) => {
            let access = args.sockets.access()?;
            let bound = sockets::bind_type(path, access, SocketType::STREAM);
            let (listener, file) = bound.map_err(|error| failed(&error))?;
            info!(end = %kernel, "listening");
            Ok((ConnectionSource::Kernel(listener), Some(file)))
        }
        (false, _) => Ok((ConnectionSource::None, None)),
    }
}

fn not_joined(kernel: &KernelEndpoint) -> Failure {
    Failure::usage(format_args!(
        "{kernel} cannot be joined to an attached endpoint: give a TCP or Unix stream socket"
    ))
}

fn targets(
    attached: &Attached,
    kernel: &KernelEndpoint,
    args: &RelayArgs,
) -> Result<Targets, Failure> {
    let kernel = match kernel {
        KernelEndpoint::Connect(target) => Some(KernelTarget {
            target: target.clone(),
            connector: Connector::start(ConnectorConfig::default()).map_err(Failure::runtime)?,
            timeout: args.connect_timeout,
            keepalive: (!args.keepalive.is_zero()).then_some(args.keepalive),
        }),
        KernelEndpoint::TcpListen(_) | KernelEndpoint::UnixListen(_) => None,
        _ => return Err(not_joined(kernel)),
    };
    let attached = match &attached.to {
        Some(to) => {
            let endpoint = attach(attached, &[], args)?;
            let to = to.port(&endpoint, attached.port);
            Some((endpoint, to.map_err(Failure::runtime)?))
        }
        None => None,
    };
    Ok(Targets { attached, kernel })
}

impl Targets {
    /// A connection to the attached end.
    fn attached(&self) -> io::Result<Stream> {
        let (endpoint, to) = self.attached.as_ref().ok_or(io::ErrorKind::InvalidInput)?;
        endpoint.connect(*to)
    }

    /// A connection to the kernel's end.
    fn kernel(&self) -> Result<OwnedFd, String> {
        let kernel = self.kernel.as_ref().ok_or("no target")?;
        let (answer, answered) = mpsc::channel();
        let request = ConnectRequest {
            target: kernel.target.clone(),
            policy: Arc::new(AddressPolicy::unrestricted(Vec::new())),
            timeout: kernel.timeout,
            keepalive: kernel.keepalive,
            first_bytes: Vec::new(),
            attempts: zerosock_relay::connector::ATTEMPTS_AT_ONCE,
        };
        let done = Box::new(move |result| {
            let _ = answer.send(result);
        });
        kernel.connector.connect(request, done);
        match answered.recv() {
            Ok(Ok(connected)) => Ok(connected.socket.into_trusted()),
            Ok(Err(error)) => Err(error.to_string()),
            Err(error) => Err(error.to_string()),
        }
    }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let thread = thread::Builder::new().name(name.into()).stack_size(STACK);
    thread.spawn(work).map(|_| ())
}

/// Accepts for as long as the process lives.
fn accept(source: &ConnectionSource, targets: &Arc<Targets>, limits: &Arc<ConnectionContext>) {
    loop {
        let accepted = match source {
            ConnectionSource::Attached(listener, _) => listener
                .accept()
                .map(|(stream, _)| SourceConnection::Stream(stream)),
            ConnectionSource::Kernel(listener) => {
                let accept = || accept_with(listener, SocketFlags::CLOEXEC);
                let accepted = retry_on_intr(accept);
                accepted
                    .map(SourceConnection::Socket)
                    .map_err(io::Error::from)
            }
            ConnectionSource::None => return,
        };
        let side = match accepted {
            Ok(side) => side,
            Err(error) => {
                limits.warn(&format_args!("cannot accept a connection: {error}"));
                thread::sleep(PAUSE);
                continue;
            }
        };
        if limits.open.load(Ordering::Relaxed) >= limits.max_connections {
            limits.warn(&"a connection over the limit was closed");
            continue;
        }
        let (targets, of_thread) = (Arc::clone(targets), Arc::clone(limits));
        let started = spawn("relay", move || {
            connect_and_join(&targets, &of_thread, side)
        });
        if let Err(error) = started {
            limits.warn(&format_args!("no thread for a connection: {error}"));
        }
    }
}

/// Connects to the other end, and relays.
fn connect_and_join(targets: &Targets, limits: &Arc<ConnectionContext>, first: SourceConnection) {
    limits.open.fetch_add(1, Ordering::Relaxed);
    let joined = match first {
        SourceConnection::Stream(stream) => targets.kernel().map(|socket| (stream, socket)),
        SourceConnection::Socket(socket) => match targets.attached() {
            Ok(stream) => Ok((stream, socket)),
            Err(error) => {
                reset_on_close(&socket, true);
                Err(error.to_string())
            }
        },
    };
    match joined {
        Ok((stream, socket)) => join(stream, socket, limits),
        Err(reason) => {
            if let Some(suppressed) = limits.lines.admit(Instant::now()) {
                info!(ends = limits.name, suppressed, reason, "cannot connect");
            }
        }
    }
    limits.open.fetch_sub(1, Ordering::Relaxed);
}

/// A stream of an endpoint and a socket of the kernel.
struct Joint {
    stream: Stream,
    socket: OwnedFd,
    idle: Option<Duration>,
    started: Instant,
    /// When bytes moved last, in milliseconds since the start.
    moved: AtomicU64,
    /// A direction has failed.
    failed: AtomicBool,
}

/// Relays until both directions have ended.
fn join(stream: Stream, socket: OwnedFd, limits: &ConnectionContext) {
    let prepared = rustix::io::ioctl_fionbio(&socket, true)
        .map_err(io::Error::from)
        .and_then(|()| stream.set_read_timeout(limits.idle))
        .and_then(|()| stream.set_write_timeout(Some(limits.idle.unwrap_or(LOOK).min(LOOK))));
    reset_on_close(&socket, true);
    // Small writes are passed on at once; fails for a Unix socket.
    let _ = sockopt::set_tcp_nodelay(&socket, true);
    let joint = Arc::new(Joint {
        stream,
        socket,
        idle: limits.idle,
        started: Instant::now(),
        moved: AtomicU64::new(0),
        failed: AtomicBool::new(false),
    });
    let other = Arc::clone(&joint);
    let (answer, answered) = mpsc::channel();
    let there = prepared.and_then(|()| {
        spawn("relay-back", move || {
            let _ = answer.send(other.finish(other.to_stream()));
        })?;
        joint.finish(joint.to_socket())
    });
    let back = answered.recv().unwrap_or(Ok(0));
    let reason = match (&there, &back) {
        (Ok(_), Ok(_)) => {
            reset_on_close(&joint.socket, false);
            "closed".to_owned()
        }
        (Err(error), _) | (_, Err(error)) => error.to_string(),
    };
    let Some(suppressed) = limits.lines.admit(Instant::now()) else {
        return;
    };
    info!(
        ends = limits.name,
        suppressed,
        to_socket = there.unwrap_or(0),
        to_stream = back.unwrap_or(0),
        seconds = joint.started.elapsed().as_secs_f64(),
        way = "in place",
        reason,
        "connection ended"
    );
}

/// Makes the close of a TCP socket a reset, or an orderly end.
fn reset_on_close(socket: &OwnedFd, reset: bool) {
    // A Unix socket has no such option.
    let _ = sockopt::set_socket_linger(socket, reset.then_some(Duration::ZERO));
}

impl Joint {
    /// After a failure of one direction, ends the other.
    fn finish(&self, result: io::Result<u64>) -> io::Result<u64> {
        if result.is_err() {
            // The peers get resets: after a shutdown they would take what they have for the whole. That of
            // the stream is sent when both directions have ended.
            self.failed.store(true, Ordering::Relaxed);
            self.stream.set_linger(Some(Duration::ZERO));
            let _ = self.stream.shutdown(Shutdown::Read);
            // Resets TCP, and fails for a Unix socket.
            if rustix::net::connect_unspec(&self.socket).is_err() {
                let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
            }
        }
        result
    }

    fn note_moved(&self) {
        let now = self.started.elapsed().as_millis() as u64;
        self.moved.store(now, Ordering::Relaxed);
    }

    /// After a time-out of one direction.
    ///
    /// # Errors
    /// `TimedOut` if no byte moved in the other one either, `ConnectionReset` if that has failed.
    fn check(&self) -> io::Result<()> {
        if self.failed.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        let moved = Duration::from_millis(self.moved.load(Ordering::Relaxed));
        match self.idle {
            Some(limit) if self.started.elapsed().saturating_sub(moved) >= limit => {
                Err(io::Error::new(io::ErrorKind::TimedOut, "idle"))
            }
            _ => Ok(()),
        }
    }

    /// Waits for the socket.
    fn wait(&self, events: PollFlags) -> io::Result<()> {
        while wait_ready(&self.socket, events, self.idle)?.is_empty() {
            self.check()?;
        }
        Ok(())
    }

    /// From the endpoint's buffers to the socket.
    fn to_socket(&self) -> io::Result<u64> {
        let mut bytes = 0;
        loop {
            let lease = match self.stream.recv() {
                Ok(Some(lease)) => lease,
                Ok(None) => {
                    let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Write);
                    return Ok(bytes);
                }
                Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                    self.check()?;
                    continue;
                }
                Err(error) => return Err(error),
            };
            let length = lease.len();
            let wrote = match lease.write_to(&self.socket) {
                Ok(wrote) => wrote,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
                Err(error) => return Err(error),
            };
            if wrote < length {
                let mut rest = vec![0; length - wrote];
                if lease.copy_to(wrote, &mut rest) < rest.len() {
                    return Err(io::ErrorKind::ConnectionReset.into());
                }
                drop(lease);
                self.write(&rest)?;
            }
            bytes += length as u64;
            self.note_moved();
        }
    }

    fn write(&self, mut rest: &[u8]) -> io::Result<()> {
        while !rest.is_empty() {
            self.wait(PollFlags::OUT)?;
            let flags = rustix::net::SendFlags::NOSIGNAL;
            match rustix::net::send(&self.socket, rest, flags) {
                Ok(wrote) => {
                    rest = &rest[wrote..];
                    self.note_moved();
                }
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    /// From the socket into the endpoint's buffers.
    fn to_stream(&self) -> io::Result<u64> {
        let mut bytes = 0;
        loop {
            self.wait(PollFlags::IN)?;
            let mut loan = match self.stream.loan(LOAN) {
                Ok(loan) => loan,
                Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                    self.check()?;
                    continue;
                }
                Err(error) => return Err(error),
            };
            match loan.read_from(&self.socket) {
                Ok(0) => {
                    drop(loan);
                    return match self.stream.shutdown(Shutdown::Write) {
                        Err(error) if error.kind() != io::ErrorKind::NotConnected => Err(error),
                        _ => Ok(bytes),
                    };
                }
                Ok(got) => {
                    loan.send()?;
                    bytes += got as u64;
                    self.note_moved();
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
    }
}
