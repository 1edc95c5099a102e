//! The side of the process: asks for a place, and holds it.

use std::io::{self, IoSlice};
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_type};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use zerosock_proto::{Cid, Port};
use zerosock_sys::{PeerFd, fd_passing};

use super::codec::{
    ANSWER_LEN, Answer, AttachRequest, Request, ServiceRequest, Status, VERSION, Version,
    decode_answer, encode_request,
};
use crate::fault::Fault;
use crate::io::deadline::timespec;
use crate::routing::name::Name;

/// How long [`Client::connect`] waits for each step unless told otherwise.
pub const TIMEOUT: Duration = Duration::from_secs(10);

/// Why a process did not attach, or a name was not found.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// Nobody listens there, or the socket cannot be reached.
    #[error("cannot reach the attach socket {path}: {source}")]
    Connect {
        /// The path.
        path: String,
        /// What connect(2) said.
        source: io::Error,
    },
    /// More than 256 ports, or the port 2^32 - 1.
    #[error("at most 256 ports can be named, and 4294967295 is none")]
    Ports,
    /// The socket failed.
    #[error("the attach socket failed: {0}")]
    Io(#[from] io::Error),
    /// The server closed the connection.
    #[error("the server closed the attach socket")]
    Closed,
    /// The server gave no answer in time.
    #[error("the server did not answer in time")]
    TimedOut,
    /// The server's answer is none.
    #[error("the server broke the attach protocol: {0}")]
    Protocol(&'static str),
    /// The server speaks another major version, or a minor one that does not know what we ask.
    #[error("the server speaks version {server} of the attach protocol, we speak {ours}")]
    VersionMismatch {
        /// Our version.
        ours: Version,
        /// The server's.
        server: Version,
    },
    /// Our user is not among those who may attach, or not among those who may be the host.
    #[error("our user may not attach here")]
    NotPermitted,
    /// The port belongs to a service: another one, or ourselves.
    #[error("port {0} of the host is taken")]
    PortTaken(Port),
    /// The port is none that a service can have.
    #[error("port {0} of the host is reserved; services have those up to 1073741823")]
    PortReserved(Port),
    /// The port that was to be given up is not ours.
    #[error("port {0} of the host is not ours")]
    NotClaimed(Port),
    /// The CID belongs to a VM or to another process.
    #[error("CID {} is taken", .0.map_or(0, Cid::get))]
    CidTaken(Option<Cid>),
    /// Another process has the name.
    #[error("the name {} is taken", .0.as_ref().map_or("", Name::as_str))]
    NameTaken(Option<Name>),
    /// The server finds fault with the request.
    #[error("the server says that the request is not well formed")]
    BadRequest,
    /// No place, no CID or no room for the request is free.
    #[error("the server has no place free")]
    Full,
    /// No attached process has the name.
    #[error("nobody has the name {0}")]
    UnknownName(Name),
    /// The server's system refused something.
    #[error("the server's system refused something; its log says what")]
    ServerFailed,
}

impl AttachError {
    /// Who is to blame.
    pub fn fault(&self) -> Fault {
        match self {
            AttachError::Closed
            | AttachError::TimedOut
            | AttachError::Protocol(_)
            | AttachError::VersionMismatch { .. } => Fault::Peer,
            AttachError::Ports
            | AttachError::NotPermitted
            | AttachError::PortTaken(_)
            | AttachError::PortReserved(_)
            | AttachError::NotClaimed(_)
            | AttachError::CidTaken(_)
            | AttachError::NameTaken(_)
            | AttachError::BadRequest
            | AttachError::UnknownName(_) => Fault::Caller,
            AttachError::Connect { .. }
            | AttachError::Io(_)
            | AttachError::Full
            | AttachError::ServerFailed => Fault::System,
        }
    }
}

impl AttachError {
    /// What the system would have said.
    pub(crate) fn kind(&self) -> io::ErrorKind {
        use io::ErrorKind;
        match self {
            AttachError::Connect { source, .. } | AttachError::Io(source) => source.kind(),
            AttachError::Ports | AttachError::BadRequest => ErrorKind::InvalidInput,
            AttachError::Closed => ErrorKind::ConnectionAborted,
            AttachError::TimedOut => ErrorKind::TimedOut,
            AttachError::Protocol(_) => ErrorKind::InvalidData,
            AttachError::VersionMismatch { .. } => ErrorKind::Unsupported,
            AttachError::NotPermitted | AttachError::PortReserved(_) => ErrorKind::PermissionDenied,
            AttachError::CidTaken(_) | AttachError::NameTaken(_) | AttachError::PortTaken(_) => {
                ErrorKind::AddrInUse
            }
            AttachError::NotClaimed(_) => ErrorKind::AddrNotAvailable,
            AttachError::Full => ErrorKind::ResourceBusy,
            AttachError::UnknownName(_) => ErrorKind::NotFound,
            AttachError::ServerFailed => ErrorKind::Other,
        }
    }
}

/// A place that was granted.
///
/// ```
/// # let dir = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/hub.rs"));
/// # let path = dir.path().join("attach.sock");
/// use zerosock::attach::{AttachRequest, Attached, Client};
/// use zerosock::driver::{Driver, DriverConfig};
///
/// let Attached { cid, socket, control, .. } = Client::connect(&path, &AttachRequest::default())?;
/// let driver = Driver::attach_over(socket, DriverConfig::default())?;
/// assert_eq!(driver.cid(), cid);
/// // The place is held as long as this is.
/// drop(control);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Attached {
    /// Our CID.
    pub cid: Cid,
    /// The CID at which the host is reached.
    pub host: Cid,
    /// The vhost-user connection of our device, for
    /// [`Driver::attach_over`](crate::driver::Driver::attach_over).
    pub socket: UnixStream,
    /// The lease: dropping it gives up the place, and ends the device.
    pub control: Client,
}

/// A place as the host that was granted to a service.
///
/// ```
/// # let dir = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/services.rs"));
/// # let path = dir.path().join("attach.sock");
/// use zerosock::attach::{Client, ServiceRequest, Serving};
/// use zerosock::driver::{Driver, DriverConfig};
/// use zerosock::{Cid, Port};
///
/// let request = ServiceRequest { name: None, ports: vec![Port::new(37)] };
/// let Serving { socket, sources, mut control } = Client::serve(&path, &request)?;
/// let config = DriverConfig { host_ports: Some(sources), ..DriverConfig::default() };
/// let driver = Driver::attach_over(socket, config)?;
/// assert_eq!(driver.cid(), Cid::HOST);
/// control.claim(&[Port::new(13)])?;
/// control.release(&[Port::new(37)])?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Serving {
    /// The vhost-user connection of our device, for
    /// [`Driver::attach_over`](crate::driver::Driver::attach_over).
    pub socket: UnixStream,
    /// The ports that our own connections come from, for
    /// [`DriverConfig::host_ports`](crate::driver::DriverConfig::host_ports). No other service has
    /// them; connections from other ports than these and the claimed ones are refused.
    pub sources: RangeInclusive<Port>,
    /// The lease: dropping it gives up the ports, and ends the device.
    pub control: Client,
}

/// The socket on which a process asked for its place. It is the lease on CID and name: to be kept
/// as long as they are to be kept.
///
/// A forked child must neither use nor drop its copy: see [forks](crate::vsock#forks).
#[derive(Debug)]
pub struct Client {
    socket: OwnedFd,
    timeout: Duration,
    /// Answers that did not come in time, and may come yet: answers come in the order of requests.
    late: u32,
}

impl Client {
    /// Asks for a place at the attach socket `path`. Blocks, for each step at most [`TIMEOUT`].
    ///
    /// ```no_run
    /// use zerosock::attach::{AttachRequest, Client};
    /// use zerosock::driver::{Driver, DriverConfig};
    /// let request = AttachRequest {
    ///     name: Some("web".parse()?),
    ///     ..AttachRequest::default()
    /// };
    /// let mut attached = Client::connect("/run/zerosock/attach".as_ref(), &request)?;
    /// let db = attached.control.resolve(&"db".parse()?)?;
    /// let driver = Driver::attach_over(attached.socket, DriverConfig::default())?;
    /// # let _ = (db, driver);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// See [`AttachError`]; [`AttachError::fault`] says who is to blame.
    pub fn connect(path: &Path, request: &AttachRequest) -> Result<Attached, AttachError> {
        Client::connect_within(path, request, TIMEOUT)
    }

    /// As [`Client::connect`], with another time-out for each step and for later requests.
    pub fn connect_within(
        path: &Path,
        request: &AttachRequest,
        timeout: Duration,
    ) -> Result<Attached, AttachError> {
        let bytes = encode_request(&Request::Attach(request.clone())).ok_or(AttachError::Ports)?;
        let (client, answer, fds) = Client::begin(path, timeout, &bytes)?;
        match answer.status {
            Status::Ok => {}
            Status::CidTaken => return Err(AttachError::CidTaken(request.cid)),
            Status::NameTaken => return Err(AttachError::NameTaken(request.name.clone())),
            _ => return Err(refusal(&answer)),
        }
        let socket = only_socket(fds)?;
        if !answer.cid.is_guest() || request.cid.is_some_and(|cid| cid != answer.cid) {
            return Err(AttachError::Protocol("another CID than was asked for"));
        }
        Ok(Attached {
            cid: answer.cid,
            host: answer.host,
            socket,
            control: client,
        })
    }

    /// Asks to be the host, with these ports of its own, at the attach socket `path`. Blocks as
    /// [`Client::connect`] does.
    ///
    /// # Errors
    /// See [`AttachError`]; [`AttachError::fault`] says who is to blame.
    pub fn serve(path: &Path, request: &ServiceRequest) -> Result<Serving, AttachError> {
        Client::serve_within(path, request, TIMEOUT)
    }

    /// As [`Client::serve`], with another time-out for each step and for later requests.
    pub fn serve_within(
        path: &Path,
        request: &ServiceRequest,
        timeout: Duration,
    ) -> Result<Serving, AttachError> {
        let bytes = encode_request(&Request::Serve(request.clone())).ok_or(AttachError::Ports)?;
        let (client, answer, fds) = Client::begin(path, timeout, &bytes)?;
        match answer.status {
            Status::Ok => {}
            Status::NameTaken => return Err(AttachError::NameTaken(request.name.clone())),
            _ => return Err(refusal_of_claim(&answer)),
        }
        let socket = only_socket(fds)?;
        let first = answer.port.get();
        let last = answer.ports.checked_sub(1);
        let last = last.and_then(|more| first.checked_add(more));
        let (Cid::HOST, Some(last)) = (answer.cid, last) else {
            let what = "another CID than the host's, or no ports to connect from";
            return Err(AttachError::Protocol(what));
        };
        Ok(Serving {
            socket,
            sources: Port::new(first)..=Port::new(last),
            control: client,
        })
    }

    /// Connects, and says the first word.
    fn begin(
        path: &Path,
        timeout: Duration,
        request: &[u8],
    ) -> Result<(Client, Answer, Vec<OwnedFd>), AttachError> {
        // A time of zero would mean no limit to the kernel.
        let timeout = timeout.max(Duration::from_millis(1));
        let socket = connect_to(path, timeout).map_err(|source| AttachError::Connect {
            path: path.display().to_string(),
            source,
        })?;
        let mut client = Client {
            socket,
            timeout,
            late: 0,
        };
        let (answer, fds) = client.ask(request)?;
        Ok((client, answer, fds))
    }

    /// Claims these ports of the host, all of them or none, for a place had with
    /// [`Client::serve`]. When this returns, guests that connect there come to us. Ports that
    /// somebody is giving up are waited for.
    ///
    /// # Errors
    /// [`AttachError::PortTaken`], [`AttachError::PortReserved`], or [`AttachError::Full`] beyond
    /// [`MAX_CLAIMS`](super::MAX_CLAIMS).
    pub fn claim(&mut self, ports: &[Port]) -> Result<(), AttachError> {
        self.change(Request::Claim(ports.to_vec()))
    }

    /// Gives these ports up, all of them or none. When this returns they are anybody's; what was
    /// connected there stays.
    ///
    /// # Errors
    /// [`AttachError::NotClaimed`].
    pub fn release(&mut self, ports: &[Port]) -> Result<(), AttachError> {
        self.change(Request::Release(ports.to_vec()))
    }

    fn change(&mut self, request: Request) -> Result<(), AttachError> {
        let bytes = encode_request(&request).ok_or(AttachError::Ports)?;
        let (answer, _) = self.ask(&bytes)?;
        match answer.status {
            Status::Ok => Ok(()),
            _ => Err(refusal_of_claim(&answer)),
        }
    }

    /// The CID of the attached process of this name.
    ///
    /// # Errors
    /// [`AttachError::UnknownName`] when there is none now.
    pub fn resolve(&mut self, name: &Name) -> Result<Cid, AttachError> {
        let request = Request::Resolve(name.clone());
        let bytes = encode_request(&request).ok_or(AttachError::BadRequest)?;
        let (answer, _) = self.ask(&bytes)?;
        match answer.status {
            Status::Ok => Ok(answer.cid),
            Status::UnknownName => Err(AttachError::UnknownName(name.clone())),
            _ => Err(refusal(&answer)),
        }
    }

    fn ask(&mut self, request: &[u8]) -> Result<(Answer, Vec<OwnedFd>), AttachError> {
        let deadline = Instant::now() + self.timeout;
        loop {
            match fd_passing::send(&self.socket, &[IoSlice::new(request)], &[]) {
                // The message goes whole or not at all.
                Ok(_) => break,
                // Who refuses us unheard has answered already.
                Err(error) if gone(&error) => break,
                Err(error) => self.wait(error, PollFlags::OUT, deadline)?,
            }
        }
        // A longer one is of a later minor version.
        let mut bytes = [0; 4 * ANSWER_LEN];
        let mut tries = 0;
        loop {
            let mut fds = Vec::new();
            match fd_passing::recv(&self.socket, &mut bytes, &mut fds) {
                Ok(received) if received.bytes == 0 => return Err(AttachError::Closed),
                Ok(_) if self.late > 0 => self.late -= 1,
                Ok(received) => {
                    if received.truncated_fds {
                        let error = io::Error::other("no room for the descriptor that came");
                        return Err(error.into());
                    }
                    let bytes = bytes.get(..received.bytes).unwrap_or_default();
                    let answer = decode_answer(bytes)
                        .map_err(|_| AttachError::Protocol("not an answer that we know"))?;
                    // The server is trusted.
                    let fds = fds.into_iter().map(PeerFd::into_trusted).collect();
                    return Ok((answer, fds));
                }
                // A server that closed without having read us makes the kernel say so once, before
                // the answer that is there.
                Err(error) if gone(&error) && tries == 0 => tries += 1,
                Err(error) if gone(&error) => return Err(AttachError::Closed),
                Err(error) => {
                    let waited = self.wait(error, PollFlags::IN, deadline);
                    self.late += u32::from(matches!(waited, Err(AttachError::TimedOut)));
                    waited?;
                }
            }
        }
    }

    fn wait(
        &self,
        error: io::Error,
        flags: PollFlags,
        deadline: Instant,
    ) -> Result<(), AttachError> {
        if error.kind() != io::ErrorKind::WouldBlock {
            return Err(error.into());
        }
        let left = deadline.saturating_duration_since(Instant::now());
        let mut fds = [PollFd::new(&self.socket, flags)];
        match poll(&mut fds, Some(&timespec(left))) {
            Ok(0) => Err(AttachError::TimedOut),
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(AttachError::Io(error.into())),
        }
    }
}

impl AsFd for Client {
    /// Hangs up when the place is lost: the server has ended, or ended our device.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn gone(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset};
    matches!(error.kind(), BrokenPipe | ConnectionReset)
}

fn connect_to(path: &Path, timeout: Duration) -> io::Result<OwnedFd> {
    let address = SocketAddrUnix::new(path)?;
    let kind = SocketType::SEQPACKET;
    let socket = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
    // Bounds a connect to a server whose backlog is full.
    set_socket_timeout(&socket, Timeout::Send, Some(timeout))?;
    connect(&socket, &address)?;
    Ok(socket)
}

/// The one descriptor that comes with a place.
fn only_socket(fds: Vec<OwnedFd>) -> Result<UnixStream, AttachError> {
    let Ok([socket]) = <[OwnedFd; 1]>::try_from(fds) else {
        return Err(AttachError::Protocol("not exactly one descriptor came"));
    };
    if socket_type(&socket) != Ok(SocketType::STREAM) {
        return Err(AttachError::Protocol("the descriptor is no stream socket"));
    }
    Ok(UnixStream::from(socket))
}

/// What a refusal to a service means.
fn refusal_of_claim(answer: &Answer) -> AttachError {
    match answer.status {
        Status::PortTaken => AttachError::PortTaken(answer.port),
        Status::PortReserved => AttachError::PortReserved(answer.port),
        Status::NotClaimed => AttachError::NotClaimed(answer.port),
        // It does not know what a service is.
        Status::BadRequest if answer.version.minor < VERSION.minor => {
            AttachError::VersionMismatch {
                ours: VERSION,
                server: answer.version,
            }
        }
        _ => refusal(answer),
    }
}

/// What a refusal means that is not about what was asked for.
fn refusal(answer: &Answer) -> AttachError {
    match answer.status {
        Status::VersionMismatch => AttachError::VersionMismatch {
            ours: VERSION,
            server: answer.version,
        },
        Status::NotPermitted => AttachError::NotPermitted,
        Status::BadRequest => AttachError::BadRequest,
        Status::Full => AttachError::Full,
        Status::ServerFailed => AttachError::ServerFailed,
        Status::Ok
        | Status::CidTaken
        | Status::NameTaken
        | Status::UnknownName
        | Status::PortTaken
        | Status::PortReserved
        | Status::NotClaimed => AttachError::Protocol("an answer to another request"),
    }
}
