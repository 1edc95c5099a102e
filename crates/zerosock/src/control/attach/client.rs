//! The client of the attach protocol, for the process that attaches.

use std::io::{self, IoSlice};
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::SocketType;
use rustix::net::sockopt::socket_type;
use zerosock_proto::addr::AddressError;
use zerosock_proto::{Cid, Port};
use zerosock_sys::{PeerFd, fd_passing, memfd, socket_path};

use super::codec::{
    ANSWER_LEN, Answer, AttachRequest, MEMORY_MINOR, Request, ServiceRequest, Start, Status,
    VERSION, decode_answer, encode_request,
};
use crate::driver::guest_device::GuestDevice;
use crate::fault::Fault;
use crate::routing::name::Name;
use zerosock_virtio::deadline::{deadline_in, timespec};

/// The default time limit of attaching, and of each later request.
pub const TIMEOUT: Duration = Duration::from_secs(10);

/// What to do about an attach socket that cannot be connected to.
fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => {
            " (this user may not write to it, or not enter its directory; --attach-mode and --socket-group \
             of `zerosock serve` permit it, in a guest --socket-mode and --socket-group of `zerosock guest`)"
        }
        _ => "",
    }
}

/// Why a request to the attach server failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AttachError {
    /// No server listens at the path, or the socket cannot be reached.
    #[error("cannot reach the attach socket {path}: {source}{}", remedy(source))]
    Connect {
        /// The path.
        path: String,
        /// The error of connect(2).
        source: io::Error,
    },
    /// More than 256 ports, or the port 2^32 - 1, which means "any port".
    #[error("at most 256 ports can be named, and 4294967295 is not a port")]
    Ports,
    /// The requested CID is 0, 1, 2 or 4294967295.
    #[error(transparent)]
    Cid(#[from] AddressError),
    /// The socket failed.
    #[error("the attach socket failed: {0}")]
    Io(#[from] io::Error),
    /// The server closed the connection.
    #[error("the server closed the attach socket")]
    Closed,
    /// The server did not answer in time.
    #[error(
        "the server of the attach socket {path} has not answered within {limit:?}: it is stopped or \
         overloaded, or it is a `Host` that no thread drives"
    )]
    TimedOut {
        /// The path.
        path: String,
        /// The time limit.
        limit: Duration,
    },
    /// The server's answer is malformed or does not match the request.
    #[error("the server broke the attach protocol: {0}")]
    Protocol(&'static str),
    /// The server has another major version, or a minor version without the request.
    #[error("the server speaks version {}.{} of the attach protocol, we speak {}.{}", server.0, server.1, ours.0, ours.1)]
    VersionMismatch {
        /// Our version, major and minor.
        ours: (u16, u16),
        /// The server's.
        server: (u16, u16),
    },
    /// Our user may not attach, or may not attach as a service; in a guest, the host may not allow the name or CID.
    #[error(
        "user {} may not attach here; add --attach-uid {0} to the server, for a service --service-uid {0}; or, in a \
         guest, the host does not allow its VM this name or CID: see `names` of `guest_endpoints`",
        rustix::process::geteuid().as_raw()
    )]
    NotPermitted,
    /// The port belongs to a service, possibly this one.
    #[error("port {0} of the host is taken")]
    PortTaken(Port),
    /// The port is outside of the range that services may claim.
    #[error("port {0} of the host is reserved; services may claim ports up to 1073741823")]
    PortReserved(Port),
    /// The port to release is not claimed by this service.
    #[error("port {0} of the host is not claimed by this service")]
    NotClaimed(Port),
    /// The CID belongs to a VM or to another process.
    #[error("CID {} is taken", .0.map_or(0, Cid::get))]
    CidTaken(Option<Cid>),
    /// Another process has the name.
    #[error("the name {} is taken", .0.as_ref().map_or("", Name::as_str))]
    NameTaken(Option<Name>),
    /// The server rejected the request as malformed.
    #[error("the server rejects the request as malformed")]
    BadRequest,
    /// The server's limit of processes, services, claims or requests is reached; in a guest, it may be that of memory.
    #[error(
        "the server's limit of processes, services or claims is reached; or, in a guest, too few huge pages are free: \
         the log of `zerosock guest` has the number"
    )]
    Full,
    /// No attached process has the name.
    #[error("no attached process has the name {0}")]
    UnknownName(Name),
    /// The server gives memory for the device, as the agent in a guest does, and the request takes a vhost-user
    /// connection only.
    #[error(
        "the server gives memory for the device, as the agent in a guest does, and this request does not take it: \
         attach as an endpoint with a CID of its own"
    )]
    MemoryOnly,
    /// A system call failed in the server.
    #[error("a system call failed in the server; its log has the error")]
    ServerFailed,
}

impl AttachError {
    /// The party at fault.
    pub fn fault(&self) -> Fault {
        match self {
            AttachError::Closed
            | AttachError::TimedOut { .. }
            | AttachError::Protocol(_)
            | AttachError::VersionMismatch { .. } => Fault::Peer,
            AttachError::Ports
            | AttachError::Cid(_)
            | AttachError::NotPermitted
            | AttachError::PortTaken(_)
            | AttachError::PortReserved(_)
            | AttachError::NotClaimed(_)
            | AttachError::CidTaken(_)
            | AttachError::NameTaken(_)
            | AttachError::BadRequest
            | AttachError::MemoryOnly
            | AttachError::UnknownName(_) => Fault::Caller,
            AttachError::Connect { .. }
            | AttachError::Io(_)
            | AttachError::Full
            | AttachError::ServerFailed => Fault::System,
        }
    }
}

impl AttachError {
    /// The corresponding kind of system error.
    pub(crate) fn kind(&self) -> io::ErrorKind {
        use io::ErrorKind;
        match self {
            AttachError::Connect { source, .. } | AttachError::Io(source) => source.kind(),
            AttachError::Ports | AttachError::Cid(_) | AttachError::BadRequest => {
                ErrorKind::InvalidInput
            }
            AttachError::Closed => ErrorKind::ConnectionAborted,
            AttachError::TimedOut { .. } => ErrorKind::TimedOut,
            AttachError::Protocol(_) => ErrorKind::InvalidData,
            AttachError::VersionMismatch { .. } | AttachError::MemoryOnly => ErrorKind::Unsupported,
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

/// The result of attaching as an endpoint.
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
/// // Dropping the control connection detaches the process.
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
    /// The control connection. Dropping it frees the CID and the name, and removes the device.
    pub control: Client,
}

/// The result of attaching as a service of the host.
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
    /// The ports that our outgoing connections use, for
    /// [`DriverConfig::host_ports`](crate::driver::DriverConfig::host_ports). No other service has
    /// them. The device refuses connections from ports other than these and the claimed ones.
    pub sources: RangeInclusive<Port>,
    /// The control connection. Dropping it releases the ports and removes the device.
    pub control: Client,
}

/// The device of a process that can take memory.
#[derive(Debug)]
pub enum AttachedDevice {
    /// A vhost-user connection, for [`Driver::attach_over`](crate::driver::Driver::attach_over).
    VhostUser(UnixStream),
    /// Memory, for [`Driver::attach_guest`](crate::driver::Driver::attach_guest), which starts the queues by
    /// [`Client::start_within`].
    Memory(GuestDevice),
}

/// The control connection of an attached process. The process keeps its CID, name and ports as long
/// as it is open.
///
/// A forked child must neither use nor drop its copy: see [forks](crate::vsock#forks).
#[derive(Debug)]
pub struct Client {
    socket: OwnedFd,
    /// The attach socket, for errors.
    path: String,
    /// Time limit of a request.
    timeout: Duration,
    /// Answers that missed the time-out and may still arrive. Answers have the order of requests.
    overdue_answers: u32,
}

impl Client {
    /// Attaches at the attach socket `path`. Blocks for at most [`TIMEOUT`].
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
    /// See [`AttachError`]; [`AttachError::fault`] names the party at fault.
    pub fn connect(path: &Path, request: &AttachRequest) -> Result<Attached, AttachError> {
        Client::connect_within(path, request, TIMEOUT)
    }

    /// As [`Client::connect`], with another time limit, which later requests have as well.
    pub fn connect_within(
        path: &Path,
        request: &AttachRequest,
        timeout: Duration,
    ) -> Result<Attached, AttachError> {
        if let Some(cid) = request.cid {
            // The server would take 0 for any CID, and another reserved one for a malformed request.
            cid.for_guest()?;
        }
        let bytes = encode_request(&Request::Attach(request.clone())).ok_or(AttachError::Ports)?;
        let (client, answer, fds) = Client::open(path, timeout, &bytes)?;
        check_place(&answer, request)?;
        Ok(Attached {
            cid: answer.cid,
            host: answer.host,
            socket: only_socket(fds)?,
            control: client,
        })
    }

    /// As [`Client::connect_within`], for a process that also takes memory, as the agent in a guest gives it: of
    /// `memory_len` bytes, whole huge pages of 2 MiB, or more.
    ///
    /// # Errors
    /// See [`AttachError`]; [`AttachError::fault`] names the party at fault.
    pub fn connect_for_memory(
        path: &Path,
        request: &AttachRequest,
        memory_len: u64,
        timeout: Duration,
    ) -> Result<(AttachedDevice, Client), AttachError> {
        if let Some(cid) = request.cid {
            cid.for_guest()?;
        }
        let begin = Instant::now();
        let asked = Request::AttachMemory(request.clone(), memory_len);
        let asked = encode_request(&asked).ok_or(AttachError::Ports)?;
        let (mut client, mut answer, mut fds) = Client::open(path, timeout, &asked)?;
        if answer.status == Status::BadRequest && answer.version.minor < MEMORY_MINOR {
            // A server of 1.0 or 1.1 refuses the flag, and has a vhost-user connection.
            let asked = encode_request(&Request::Attach(request.clone()));
            let left = timeout.saturating_sub(begin.elapsed());
            (client, answer, fds) = Client::open(path, left, &asked.ok_or(AttachError::Ports)?)?;
            client.timeout = timeout;
        }
        check_place(&answer, request)?;
        let device = match answer.memory {
            0 => AttachedDevice::VhostUser(only_socket(fds)?),
            _ => AttachedDevice::Memory(guest_device(&answer, fds, memory_len)?),
        };
        Ok((device, client))
    }

    /// Over a socket that is attached already.
    pub(crate) fn over(socket: OwnedFd, path: String, timeout: Duration) -> Client {
        Client {
            socket,
            path,
            timeout,
            overdue_answers: 0,
        }
    }

    /// Starts the queues of a process that was given memory, and returns the features in use. Waits for at most `limit`.
    ///
    /// # Errors
    /// See [`AttachError`].
    pub fn start_within(&mut self, start: &Start, limit: Duration) -> Result<u64, AttachError> {
        let bytes = encode_request(&Request::Start(*start)).ok_or(AttachError::BadRequest)?;
        let (answer, _) = self.request_until(&bytes, deadline_in(limit))?;
        match answer.status {
            Status::Ok => Ok(answer.features),
            _ => Err(refusal(&answer)),
        }
    }

    /// Attaches as a service of the host that claims these ports, at the attach socket `path`.
    /// Blocks as [`Client::connect`] does.
    ///
    /// # Errors
    /// See [`AttachError`]; [`AttachError::fault`] names the party at fault.
    pub fn serve(path: &Path, request: &ServiceRequest) -> Result<Serving, AttachError> {
        Client::serve_within(path, request, TIMEOUT)
    }

    /// As [`Client::serve`], with another time limit, which later requests have as well.
    pub fn serve_within(
        path: &Path,
        request: &ServiceRequest,
        timeout: Duration,
    ) -> Result<Serving, AttachError> {
        let bytes = encode_request(&Request::Serve(request.clone())).ok_or(AttachError::Ports)?;
        let (client, answer, fds) = Client::open(path, timeout, &bytes)?;
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

    /// Connects and sends the first request.
    fn open(
        path: &Path,
        timeout: Duration,
        request: &[u8],
    ) -> Result<(Client, Answer, Vec<OwnedFd>), AttachError> {
        let deadline = deadline_in(timeout);
        let name = path.display().to_string();
        let socket = match socket_path::connect(path, SocketType::SEQPACKET, timeout) {
            Ok(socket) => socket,
            Err(source) => return Err(AttachError::Connect { path: name, source }),
        };
        let mut client = Client::over(socket, name, timeout);
        let (answer, fds) = client.request_until(request, deadline)?;
        Ok((client, answer, fds))
    }

    /// Claims these ports of the host, all or none, for a service attached with [`Client::serve`].
    /// When this returns, guests' connections to them reach this service. Waits for ports that
    /// another service is releasing.
    ///
    /// # Errors
    /// [`AttachError::PortTaken`], [`AttachError::PortReserved`], or [`AttachError::Full`] beyond
    /// [`MAX_CLAIMS`](super::MAX_CLAIMS).
    pub fn claim(&mut self, ports: &[Port]) -> Result<(), AttachError> {
        self.change(Request::Claim(ports.to_vec()))
    }

    /// Releases these ports, all or none. When this returns, other services can claim them;
    /// established connections stay.
    ///
    /// # Errors
    /// [`AttachError::NotClaimed`].
    pub fn release(&mut self, ports: &[Port]) -> Result<(), AttachError> {
        self.change(Request::Release(ports.to_vec()))
    }

    fn change(&mut self, request: Request) -> Result<(), AttachError> {
        let bytes = encode_request(&request).ok_or(AttachError::Ports)?;
        let (answer, _) = self.request(&bytes)?;
        match answer.status {
            Status::Ok => Ok(()),
            _ => Err(refusal_of_claim(&answer)),
        }
    }

    /// The CID of the attached process of this name.
    ///
    /// # Errors
    /// [`AttachError::UnknownName`] if no attached process has the name.
    pub fn resolve(&mut self, name: &Name) -> Result<Cid, AttachError> {
        let request = Request::Resolve(name.clone());
        let bytes = encode_request(&request).ok_or(AttachError::BadRequest)?;
        let (answer, _) = self.request(&bytes)?;
        match answer.status {
            Status::Ok => Ok(answer.cid),
            Status::UnknownName => Err(AttachError::UnknownName(name.clone())),
            _ => Err(refusal(&answer)),
        }
    }

    fn request(&mut self, request: &[u8]) -> Result<(Answer, Vec<OwnedFd>), AttachError> {
        self.request_until(request, deadline_in(self.timeout))
    }

    /// Sends a request and receives its answer; no deadline is no limit.
    fn request_until(
        &mut self,
        request: &[u8],
        deadline: Option<Instant>,
    ) -> Result<(Answer, Vec<OwnedFd>), AttachError> {
        loop {
            match fd_passing::send(&self.socket, &[IoSlice::new(request)], &[]) {
                // A SEQPACKET message is sent whole or not at all.
                Ok(_) => break,
                // A server that refuses the connection has sent its answer already.
                Err(error) if is_disconnected(&error) => break,
                Err(error) => self.wait(error, PollFlags::OUT, deadline)?,
            }
        }
        // A longer answer is of a later minor version.
        let mut bytes = [0; 4 * ANSWER_LEN];
        let mut tries = 0;
        loop {
            let mut fds = Vec::new();
            match fd_passing::recv(&self.socket, &mut bytes, &mut fds) {
                Ok(received) if received.bytes == 0 => return Err(AttachError::Closed),
                Ok(_) if self.overdue_answers > 0 => self.overdue_answers -= 1,
                Ok(received) => {
                    if received.truncated_fds {
                        let error = io::Error::other(
                            "no free descriptor number for the received descriptor",
                        );
                        return Err(error.into());
                    }
                    let bytes = bytes.get(..received.bytes).unwrap_or_default();
                    let answer = decode_answer(bytes)
                        .map_err(|_| AttachError::Protocol("an answer of an unknown form"))?;
                    // The server is trusted.
                    let fds = fds.into_iter().map(PeerFd::into_trusted).collect();
                    return Ok((answer, fds));
                }
                // If the server closed without reading our request, the kernel reports a reset
                // once, before the answer.
                Err(error) if is_disconnected(&error) && tries == 0 => tries += 1,
                Err(error) if is_disconnected(&error) => return Err(AttachError::Closed),
                Err(error) => {
                    let waited = self.wait(error, PollFlags::IN, deadline);
                    let timed_out = matches!(waited, Err(AttachError::TimedOut { .. }));
                    self.overdue_answers += u32::from(timed_out);
                    waited?;
                }
            }
        }
    }

    fn wait(
        &self,
        error: io::Error,
        flags: PollFlags,
        deadline: Option<Instant>,
    ) -> Result<(), AttachError> {
        if error.kind() != io::ErrorKind::WouldBlock {
            return Err(error.into());
        }
        let left = deadline.map(|end| timespec(end.saturating_duration_since(Instant::now())));
        let mut fds = [PollFd::new(&self.socket, flags)];
        match poll(&mut fds, left.as_ref()) {
            Ok(0) => Err(AttachError::TimedOut {
                path: self.path.clone(),
                limit: self.timeout,
            }),
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(AttachError::Io(error.into())),
        }
    }
}

impl AsFd for Client {
    /// Reports a hang-up when the server has ended or has removed our device.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn is_disconnected(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset};
    matches!(error.kind(), BrokenPipe | ConnectionReset)
}

/// Checks the answer to a request to attach.
fn check_place(answer: &Answer, request: &AttachRequest) -> Result<(), AttachError> {
    match answer.status {
        Status::Ok => {}
        Status::CidTaken => return Err(AttachError::CidTaken(request.cid)),
        Status::NameTaken => return Err(AttachError::NameTaken(request.name.clone())),
        _ => return Err(refusal(answer)),
    }
    if !answer.cid.is_guest() || request.cid.is_some_and(|cid| cid != answer.cid) {
        return Err(AttachError::Protocol("a CID that was not requested"));
    }
    Ok(())
}

/// The memory and the doorbell that come with an answer that gives memory. The driver relies on the length of the file,
/// which no process can change or, on hugetlbfs, only one that has it.
fn guest_device(
    answer: &Answer,
    fds: Vec<OwnedFd>,
    wanted: u64,
) -> Result<GuestDevice, AttachError> {
    let Ok([memory, doorbell]) = <[OwnedFd; 2]>::try_from(fds) else {
        return Err(AttachError::Protocol("not exactly a memory and a doorbell"));
    };
    // First of all: a call to the file system of another file could wait.
    if !memfd::is_memory(&memory) {
        return Err(AttachError::Protocol("the memory is not a file in memory"));
    }
    if !memfd::is_shrink_sealed(&memory) && !memfd::has_huge_pages(&memory) {
        return Err(AttachError::Protocol(
            "the memory can shrink: it is neither sealed nor on hugetlbfs",
        ));
    }
    if memfd::len(&memory)? != answer.memory || answer.memory < wanted {
        return Err(AttachError::Protocol(
            "the memory is shorter than was requested, or has another length than the answer says",
        ));
    }
    Ok(GuestDevice {
        memory,
        doorbell: stream_socket(doorbell)?,
        features: answer.features,
        cid: answer.cid,
    })
}

/// The one descriptor that comes with a successful answer.
fn only_socket(fds: Vec<OwnedFd>) -> Result<UnixStream, AttachError> {
    let Ok([socket]) = <[OwnedFd; 1]>::try_from(fds) else {
        return Err(AttachError::Protocol("not exactly one descriptor"));
    };
    stream_socket(socket).map(UnixStream::from)
}

fn stream_socket(socket: OwnedFd) -> Result<OwnedFd, AttachError> {
    match socket_type(&socket) {
        Ok(SocketType::STREAM) => Ok(socket),
        _ => Err(AttachError::Protocol(
            "the descriptor is not a stream socket",
        )),
    }
}

/// The error for a refused request of a service.
fn refusal_of_claim(answer: &Answer) -> AttachError {
    match answer.status {
        Status::PortTaken => AttachError::PortTaken(answer.port),
        Status::PortReserved => AttachError::PortReserved(answer.port),
        Status::NotClaimed => AttachError::NotClaimed(answer.port),
        // A server of version 1.0 does not know services.
        Status::BadRequest if answer.version.minor < VERSION.minor => {
            AttachError::VersionMismatch {
                ours: VERSION.into(),
                server: answer.version.into(),
            }
        }
        _ => refusal(answer),
    }
}

/// The error for a refusal that no request-specific error describes.
fn refusal(answer: &Answer) -> AttachError {
    match answer.status {
        Status::VersionMismatch => AttachError::VersionMismatch {
            ours: VERSION.into(),
            server: answer.version.into(),
        },
        Status::NotPermitted => AttachError::NotPermitted,
        Status::BadRequest => AttachError::BadRequest,
        Status::Full => AttachError::Full,
        Status::MemoryOnly => AttachError::MemoryOnly,
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
