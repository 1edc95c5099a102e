//! A thread that resolves names and makes connections, for callers that must not wait.
//!
//! # Invariants
//! - Each request is answered exactly once, on the connector's thread: also when it is cancelled, when
//!   the thread ends, and when too many are in flight.
//! - No packet goes to an address that the policy of the request has not permitted. The policy judges
//!   each resolved address, so that a name whose address changes opens nothing.
//! - A request ends within its time-out; the sockets that it did not hand over are closed then.
//! - A request holds at most [`ATTEMPTS_AT_ONCE`] sockets, and all requests together 1024 beyond one for each.
//!   Those by which a name is resolved are shared by all requests for it.
//!
//! # Examples
//! ```
//! use std::sync::{Arc, mpsc};
//! use std::time::Duration;
//! use zerosock_relay::{AddressPolicy, ConnectRequest, Connector, ConnectorConfig};
//!
//! let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
//! let connector = Connector::start(ConnectorConfig::default())?;
//! let request = ConnectRequest {
//!     target: format!("tcp:{}", listener.local_addr()?).parse()?,
//!     policy: Arc::new(AddressPolicy::for_guests(Vec::new(), Vec::new())),
//!     timeout: Duration::from_secs(5),
//!     keepalive: Some(Duration::from_secs(60)),
//!     first_bytes: Vec::new(),
//!     attempts: zerosock_relay::connector::ATTEMPTS_AT_ONCE,
//! };
//! let (sender, receiver) = mpsc::channel();
//! connector.connect(request, Box::new(move |result| sender.send(result).unwrap()));
//! assert_eq!(receiver.recv()??.address, Some(listener.local_addr()?));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod dial;
mod error;
mod handover;
mod history;
mod schedule;
mod unix;

use std::fmt;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::num::NonZeroU16;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::net::SocketType;
use tokio::runtime::{self, Handle};
use tokio::sync::{Semaphore, oneshot};
use tokio::task::{AbortHandle, JoinHandle};
use tokio::time::Instant;
use zerosock_sys::{PeerFd, socket_path};

use crate::networks::AddressPolicy;
use crate::resolve::{Resolver, System};
use crate::target::{Host, Target};
use history::AddressHistory;
use schedule::Order;

pub use dial::ATTEMPTS_AT_ONCE;
pub use error::{ConnectError, ConnectStage};
pub(crate) use handover::set_tcp_options;
pub use unix::NO_PERMISSION;
pub(crate) use unix::RIGHTS;

/// Receives the result of a request; runs on the connector's thread and must not block.
pub type ConnectCallback = Box<dyn FnOnce(Result<Connected, ConnectError>) + Send>;

/// Stands for "never" where a time-out is too long for the clock.
const FOREVER: Duration = Duration::from_secs(60 * 60 * 24 * 365);

/// The handle of a connector thread. Dropping the last one ends the thread and does not wait for it.
#[derive(Clone)]
pub struct Connector {
    thread: Arc<Thread>,
    shared: Arc<Shared>,
}

/// Settings of a connector.
#[derive(Clone, Debug)]
pub struct ConnectorConfig {
    /// Name servers to ask instead of those in `resolv_conf`; empty for the latter.
    pub name_servers: Vec<SocketAddr>,
    /// The file with name servers, search domains and options.
    pub resolv_conf: PathBuf,
    /// The file with names and addresses that come before those of name servers.
    pub hosts: PathBuf,
    /// Requests in flight; further ones are answered [`ConnectError::Busy`].
    pub max_requests: usize,
}

/// A connection to make.
#[derive(Clone, Debug)]
pub struct ConnectRequest {
    /// What to connect to.
    pub target: Target,
    /// Which addresses may be used.
    pub policy: Arc<AddressPolicy>,
    /// Time for all of it: resolving, connecting, and writing `first_bytes`.
    pub timeout: Duration,
    /// Interval of TCP keepalive probes, and the idle time before the first; None for no probes.
    /// Rounded to whole seconds from 1 to 32767.
    pub keepalive: Option<Duration>,
    /// Written before the socket is handed over. One message on sockets that keep message bounds.
    pub first_bytes: Vec<u8>,
    /// Addresses of a name that may be tried at once, 1 to [`ATTEMPTS_AT_ONCE`]: as many sockets.
    pub attempts: usize,
}

/// A connection that was made.
#[derive(Debug)]
pub struct Connected {
    /// Non-blocking, close-on-exec, with TCP_NODELAY if it is TCP. A server can have sent descriptors into
    /// a Unix socket already, so that closing it may wait for them.
    pub socket: PeerFd,
    /// The address that it is connected to; None for Unix sockets.
    pub address: Option<SocketAddr>,
    /// The target is a name that has, or may have, another address that was neither tried nor has refused
    /// datagrams lately: see [`Connector::refused`].
    pub has_alternative: bool,
}

/// A request in flight. Dropping it changes nothing.
#[derive(Debug)]
pub struct PendingConnect(AbortHandle);

/// What ends the thread.
struct Thread {
    runtime: Handle,
    /// The thread runs until this is dropped.
    stop: Mutex<Option<oneshot::Sender<()>>>,
    handle: Mutex<Option<thread::JoinHandle<()>>>,
}

/// What requests share. They do not keep the thread alive.
struct Shared {
    resolver: Resolver,
    history: Mutex<AddressHistory>,
    extra: dial::Extra,
    max_requests: usize,
    requests: AtomicUsize,
}

impl Default for ConnectorConfig {
    fn default() -> Self {
        ConnectorConfig {
            name_servers: Vec::new(),
            resolv_conf: "/etc/resolv.conf".into(),
            hosts: "/etc/hosts".into(),
            max_requests: 4096,
        }
    }
}

impl Connector {
    /// Starts the thread.
    ///
    /// # Errors
    /// No thread, epoll instance or eventfd can be created.
    pub fn start(config: ConnectorConfig) -> io::Result<Connector> {
        let runtime = runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()?;
        let handle = runtime.handle().clone();
        // Else the first path is resolved by a thread that reads the list of mounts.
        let _ = socket_path::learn_mounts();
        let (stop, stopped) = oneshot::channel();
        let thread = thread::Builder::new()
            .name("connector".into())
            .spawn(move || {
                // The sender is dropped, never used. The runtime then drops what is in flight, here.
                let _ = runtime.block_on(stopped);
            })?;
        let system = System::new(config.name_servers, config.resolv_conf, config.hosts);
        Ok(Connector {
            thread: Arc::new(Thread {
                runtime: handle,
                stop: Mutex::new(Some(stop)),
                handle: Mutex::new(Some(thread)),
            }),
            shared: Arc::new(Shared {
                resolver: Resolver::new(system),
                history: Mutex::default(),
                extra: Arc::new(Semaphore::new(dial::MAX_EXTRA)),
                max_requests: config.max_requests,
                requests: AtomicUsize::new(0),
            }),
        })
    }

    /// Makes a connection and calls `done` with it or with the error, exactly once and on the
    /// connector's thread. After [`stop`](Connector::stop) it is called before this returns.
    pub fn connect(&self, request: ConnectRequest, done: ConnectCallback) -> PendingConnect {
        let admitted = self.shared.admit();
        let reply = Reply {
            done: Some(done),
            admitted: admitted.then(|| self.shared.clone()),
        };
        let shared = self.shared.clone();
        let task = self.thread.runtime.spawn(async move {
            let result = match admitted {
                true => make(&shared, &request).await,
                false => Err(ConnectError::Busy),
            };
            reply.send(result);
        });
        PendingConnect(task.abort_handle())
    }

    /// A datagram to this address of the target was refused (ICMP): for a minute, other addresses of the name
    /// are preferred for datagrams.
    pub fn refused(&self, target: &Target, address: SocketAddr) {
        if let Target::Udp {
            host: Host::Name(name),
            ..
        } = target
        {
            lock(&self.shared.history).refused(Instant::now(), name, address.ip());
        }
    }

    /// Runs a future on the connector's thread, for example a task that accepts connections. The future
    /// is dropped when the thread ends; one that owns a `Connector` keeps the thread alive.
    pub fn spawn<F>(&self, future: F) -> JoinHandle<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        self.thread.runtime.spawn(future)
    }

    /// Ends the thread and waits for it. Requests in flight and later ones are answered
    /// [`ConnectError::Stopped`]. On the connector's own thread it does not wait.
    pub fn stop(&self) {
        drop(lock(&self.thread.stop).take());
        let handle = lock(&self.thread.handle).take();
        let Some(handle) = handle else { return };
        if handle.thread().id() != thread::current().id() {
            // A panic on the thread has been reported there.
            let _ = handle.join();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl fmt::Debug for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let requests = self.shared.requests.load(Ordering::Relaxed);
        f.debug_struct("Connector")
            .field("requests", &requests)
            .finish_non_exhaustive()
    }
}

impl PendingConnect {
    /// Gives the request up: it is answered [`ConnectError::Stopped`], unless it has been answered.
    pub fn cancel(&self) {
        self.0.abort();
    }
}

impl Shared {
    fn admit(&self) -> bool {
        // Relaxed: the number alone is used; nothing else is published with it.
        let more = |requests| (requests < self.max_requests).then_some(requests + 1);
        self.requests
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, more)
            .is_ok()
    }
}

/// The answer that a request owes; dropping it answers `Stopped`.
struct Reply {
    done: Option<ConnectCallback>,
    /// None for a request that was not admitted.
    admitted: Option<Arc<Shared>>,
}

impl Reply {
    fn send(mut self, result: Result<Connected, ConnectError>) {
        self.finish(result);
    }

    fn finish(&mut self, result: Result<Connected, ConnectError>) {
        // First, so that `done` can make a request in place of this one.
        if let Some(shared) = self.admitted.take() {
            shared.requests.fetch_sub(1, Ordering::Relaxed);
        }
        if let Some(done) = self.done.take() {
            done(result);
        }
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        self.finish(Err(ConnectError::Stopped));
    }
}

/// Makes the connection of a request.
async fn make(shared: &Shared, request: &ConnectRequest) -> Result<Connected, ConnectError> {
    let now = Instant::now();
    let deadline = now.checked_add(request.timeout).unwrap_or(now + FOREVER);
    let mut has_alternative = false;
    let (socket, address) = match &request.target {
        Target::Tcp { host, port } => {
            let dialled = dial_host(shared, host, *port, request, deadline, dial::tcp).await?;
            set_tcp_options(&dialled.socket, request.keepalive)?;
            (dialled.socket.into(), Some(dialled.address))
        }
        Target::Udp { host, port } => {
            let dialled = dial_host(shared, host, *port, request, deadline, dial::udp).await?;
            has_alternative = dialled.has_alternative;
            (dialled.socket.into(), Some(dialled.address))
        }
        Target::Unix(path) => unix::dial(path, SocketType::STREAM, deadline).await?,
        Target::UnixSeqpacket(path) => unix::dial(path, SocketType::SEQPACKET, deadline).await?,
        Target::UnixDatagram(path) => unix::dial(path, SocketType::DGRAM, deadline).await?,
    };
    let socket = handover::write_first(socket, &request.first_bytes, address, deadline).await?;
    Ok(Connected {
        socket,
        address,
        has_alternative,
    })
}

async fn dial_host(
    shared: &Shared,
    host: &Host,
    port: NonZeroU16,
    request: &ConnectRequest,
    deadline: Instant,
    attempt: fn(SocketAddr) -> dial::Attempt,
) -> Result<dial::Dialled, ConnectError> {
    let is_stream = matches!(request.target, Target::Tcp { .. });
    let order = match host {
        Host::Name(name) => {
            let (history, now) = (lock(&shared.history), Instant::now());
            match is_stream {
                true => history.order_of_streams(now, name),
                false => history.order_of_datagrams(now, name),
            }
        }
        Host::Address(_) => Order::default(),
    };
    let plan = dial::DialPlan {
        port: port.get(),
        policy: &request.policy,
        deadline,
        order,
        at_once: request.attempts,
        extra: &shared.extra,
    };
    let addresses = dial::Addresses::of(host, &shared.resolver);
    let dialled = dial::dial(addresses, plan, attempt).await?;
    if let (true, Host::Name(name)) = (is_stream, host) {
        lock(&shared.history).accepted(Instant::now(), name, dialled.address.ip());
    }
    Ok(dialled)
}
