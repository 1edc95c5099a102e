//! Relays between two kernel sockets, or between all that connect to one and another.
//!
//! A [`Relay`] has workers, each a thread with an event loop
//! ([`zerosock_virtio::worker`]). A connection belongs to one worker from its accept to its end: each
//! worker has a listening socket of its own where the kernel spreads connections over several
//! (SO_REUSEPORT); otherwise the first worker accepts and hands over in turn.
//!
//! # Invariants
//! - No worker waits for anything but its next event. Names are resolved, and full Unix listeners are
//!   tried again, on the thread of the [`Connector`].
//! - Bytes that a target does not take stay with their sender, beyond one read of each direction.
//! - A connection costs a slot of a slab in user space; buffers and pipes belong to the workers.
//!
//! # How the bytes move
//! Each direction of a pair has a way of its own, by [`Way`]: splice into Unix sockets, a copy through a
//! large buffer into TCP, batches of messages for datagrams. docs/relay.md has the reasons.

mod associations;
mod counters;
mod device;
mod direction;
mod endpoint;
mod joined;
mod listen;
mod open;
mod pair;
mod plan;
mod socket;
mod store;
mod way;

#[cfg(test)]
mod tests;

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::process::{Resource, getrlimit};
use zerosock_sys::socket_file::SocketFile;
use zerosock_virtio::mailbox::Mailbox;
use zerosock_virtio::outbox::DeviceAddr;
use zerosock_virtio::worker::{Worker, WorkerMessage};

pub use self::counters::RelayStats;
pub use self::device::{CLOSED_WITHOUT_OK, HybridAnswer, LONGEST_ANSWER};
pub use self::endpoint::{FORMS, KernelEndpoint, ParseEndpointError, path_and_port};
pub use self::plan::{ACCESS_LINES, NoSockmap, RelayConfig};
pub use self::way::{UnknownWay, Way};

use self::counters::WorkerCounters;
use self::device::{Listener, Message, Parts, RelayDevice};
use self::listen::{Access, Listeners, listen};
use self::open::Destination;
use self::plan::RelayPlan;
use self::socket::Socket;
use crate::connector::{Connector, ConnectorConfig};

/// Descriptors that associations of datagrams leave to everything else.
const RESERVED_DESCRIPTORS: u64 = 64;

type Sender = zerosock_virtio::mailbox::Sender<WorkerMessage<RelayDevice>>;

/// A running relay. Dropping it ends it.
#[derive(Debug)]
pub struct Relay {
    plan: Arc<RelayPlan>,
    counters: Vec<Arc<WorkerCounters>>,
    senders: Vec<Sender>,
    threads: Vec<JoinHandle<()>>,
    addresses: [Option<SocketAddr>; 2],
    files: Vec<SocketFile>,
}

/// Why a relay cannot start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The ends do not fit together.
    #[error("{0} has messages and {1} is a stream: give two streams, or two ends with messages")]
    Bounds(KernelEndpoint, KernelEndpoint),
    /// Datagrams of many senders need one target for each.
    #[error("{0} and {1} both listen: with datagrams one of the ends has to connect")]
    TwoReceivers(KernelEndpoint, KernelEndpoint),
    /// The sockets to both ends would have addresses that nothing knows.
    #[error(
        "{0} and {1} both connect: no peer could send the first datagram; one of the ends has to listen"
    )]
    NoReceiver(KernelEndpoint, KernelEndpoint),
    /// The endpoint cannot be listened at.
    #[error("{endpoint}: cannot listen: {source}")]
    Listen {
        /// The endpoint.
        endpoint: KernelEndpoint,
        /// Why.
        source: io::Error,
    },
    /// The endpoint cannot be connected to.
    #[error("{endpoint}: {source}")]
    Connect {
        /// The endpoint.
        endpoint: KernelEndpoint,
        /// Why.
        source: io::Error,
    },
    /// The PROXY protocol header needs a stream.
    #[error("a PROXY protocol header needs a stream to {0}")]
    ProxyProtocol(KernelEndpoint),
    /// No thread, epoll instance or eventfd is to be had.
    #[error("cannot start: {0}")]
    System(#[from] io::Error),
}

impl Relay {
    /// Starts a relay. When this returns, its listeners accept connections.
    ///
    /// # Errors
    /// [`StartError`]; nothing is left behind.
    pub fn start(mut config: RelayConfig) -> Result<Relay, StartError> {
        check(&config)?;
        // The listening end first, so that the second one is what is connected to.
        let swapped = config.ends[1].listens() && !config.ends[0].listens();
        if swapped {
            config.ends.swap(0, 1);
        }
        config.workers = match config.ends.iter().filter(|end| end.listens()).count() {
            1 => config.workers.max(1),
            // One pair, or connections that have to meet.
            _ => 1,
        };
        config.buffer = config.buffer.clamp(4096, 16 << 20);
        if config.ends.iter().any(KernelEndpoint::receives_datagrams) {
            config.max_connections = config.max_connections.min(most_associations());
        }
        let mut destinations = [None, None];
        let mut listeners = Vec::new();
        let access = Access {
            mode: config.socket_mode,
            group: config.socket_group,
        };
        for (index, endpoint) in config.ends.iter().enumerate() {
            if endpoint.listens() {
                let made = listen(endpoint, config.workers, config.keepalive, access);
                let made = made.map_err(|source| StartError::Listen {
                    endpoint: endpoint.clone(),
                    source,
                })?;
                listeners.push((index, made));
            } else {
                let made = Destination::new(endpoint, config.keepalive, config.sockmap.is_none());
                destinations[index] = Some(made.map_err(|errno| StartError::Connect {
                    endpoint: endpoint.clone(),
                    source: errno.into(),
                })?);
            }
        }
        let needs_connector = destinations
            .iter()
            .flatten()
            .any(Destination::needs_connector);
        let connector = match needs_connector {
            true => Some(Connector::start(ConnectorConfig::default())?),
            false => None,
        };
        let plan = Arc::new(RelayPlan::new(config, destinations, connector)?);
        let mut relay = Relay {
            counters: Vec::new(),
            senders: Vec::new(),
            threads: Vec::new(),
            addresses: [None, None],
            files: Vec::new(),
            plan,
        };
        for (index, made) in &mut listeners {
            let index = if swapped { 1 - *index } else { *index };
            relay.addresses[index] = made.address;
            relay.files.extend(made.file.take());
        }
        relay.start_workers(listeners)?;
        Ok(relay)
    }

    fn start_workers(&mut self, mut listeners: Vec<(usize, Listeners)>) -> io::Result<()> {
        let count = self.plan.config.workers;
        let mut mailboxes = Vec::new();
        for _ in 0..count {
            let (sender, mailbox) = Mailbox::new()?;
            self.senders.push(sender);
            mailboxes.push(mailbox);
        }
        let mut workers = Vec::new();
        for (number, mailbox) in mailboxes.into_iter().enumerate() {
            let counters = Arc::new(WorkerCounters::default());
            self.counters.push(Arc::clone(&counters));
            let mut parts = Parts {
                addr: DeviceAddr {
                    worker: number as u32,
                    number: 0,
                },
                plan: Arc::clone(&self.plan),
                counters,
                own: self.senders[number].clone(),
                listeners: Vec::new(),
                datagrams: None,
                connects_at: None,
                workers: 1,
            };
            for (end, made) in &mut listeners {
                if made.sockets.len() < count && number == 0 {
                    parts.workers = count as u32;
                }
                let Some(fd) = made.sockets.pop() else {
                    continue;
                };
                if self.plan.config.ends[*end].receives_datagrams() {
                    let mut socket = Socket::new(fd, made.kind, made.refuses_rights);
                    match (&self.plan.config.sockmap, made.address) {
                        (None, _) => socket.coalesce(),
                        (Some(_), Some(address)) => {
                            parts.connects_at = Some(address);
                            listen::allow_connected(socket.fd()?, address)?;
                        }
                        (Some(_), None) => {}
                    }
                    parts.datagrams = Some(socket);
                    continue;
                }
                parts.listeners.push(Listener {
                    fd,
                    end: *end,
                    kind: made.kind,
                    refuses_rights: made.refuses_rights,
                    readable: false,
                });
            }
            let mut worker = Worker::new(number as u32, self.senders.clone(), mailbox, ())?;
            worker.add(RelayDevice::new(parts));
            workers.push(worker);
        }
        for (number, worker) in workers.into_iter().enumerate() {
            let plan = Arc::clone(&self.plan);
            let thread = std::thread::Builder::new().name(format!("relay-{number}"));
            self.threads.push(thread.spawn(move || {
                if let Err(error) = worker.run(Duration::ZERO) {
                    tracing::error!("a worker has ended: {error}");
                    plan.finish(false);
                }
            })?);
        }
        if self.plan.is_single() {
            let begin = WorkerMessage::Device {
                number: 0,
                message: Message::Begin,
            };
            let _ = self.senders[0].send(begin);
        }
        Ok(())
    }

    /// The addresses that the ends listen at, where they are Internet addresses: the port of a listener
    /// at port 0.
    pub fn addresses(&self) -> [Option<SocketAddr>; 2] {
        self.addresses
    }

    /// What the relay has done.
    pub fn stats(&self) -> RelayStats {
        RelayStats::sum(self.counters.iter().map(|one| &**one))
    }

    /// Readable when the relay is over: the only pair has ended, or a worker has failed.
    pub fn over(&self) -> BorrowedFd<'_> {
        self.plan.over.as_fd()
    }

    /// Whether the relay is over because its only pair has ended in order.
    pub fn succeeded(&self) -> bool {
        // Relaxed: see `RelayPlan::finish`.
        self.plan.succeeded.load(Ordering::Relaxed)
    }

    /// Ends all connections and listeners, and returns what was done until then. Peers of TCP connections
    /// that had not ended get a reset.
    pub fn shutdown(mut self) -> RelayStats {
        self.end();
        self.stats()
    }

    fn end(&mut self) {
        for sender in &self.senders {
            let _ = sender.send(WorkerMessage::Shutdown);
        }
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
        if let Some(connector) = &self.plan.connector {
            connector.stop();
        }
        self.files.clear();
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.end();
    }
}

/// How many associations there are descriptors for, beside what resolving their target needs.
fn most_associations() -> usize {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let most = limit - RESERVED_DESCRIPTORS.min(limit / 2);
    usize::try_from(most).unwrap_or(usize::MAX)
}

/// Whether the ends fit together.
fn check(config: &RelayConfig) -> Result<(), StartError> {
    let [one, two] = &config.ends;
    if one.keeps_messages() != two.keeps_messages() {
        let (messages, stream) = match one.keeps_messages() {
            true => (one, two),
            false => (two, one),
        };
        return Err(StartError::Bounds(messages.clone(), stream.clone()));
    }
    let receivers = config.ends.iter().filter(|end| end.receives_datagrams());
    let listeners = config.ends.iter().filter(|end| end.listens());
    if receivers.count() > 0 && listeners.count() > 1 {
        return Err(StartError::TwoReceivers(one.clone(), two.clone()));
    }
    if config
        .ends
        .iter()
        .all(|end| !end.listens() && !end.kind().has_end())
    {
        return Err(StartError::NoReceiver(one.clone(), two.clone()));
    }
    if config.proxy_protocol && one.keeps_messages() {
        return Err(StartError::ProxyProtocol(two.clone()));
    }
    Ok(())
}
