//! The thread that accepts clients of listening rules and passes them to the devices.
//!
//! # Invariants
//! - No other work waits for an accept, and no accept for a device: a client goes by message to the
//!   worker of its destination.
//! - At most [`MAX_UNDER_WAY`] clients are on their way to workers.
//! - A client that cannot be connected is reset (TCP) or closed at once.
//!
//! # Operation
//! [`Listeners::publish`] replaces routes and rules. A rule that stays keeps its socket and its counters;
//! the socket of a removed rule is closed, connections that were accepted continue.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{SocketFlags, SocketType as SocketKind, acceptfrom_with, getsockname};
use zerosock_proto::wire::vsock::SocketType;
use zerosock_proto::{Address, Cid};
use zerosock_relay::networks::AddressPolicy;
use zerosock_relay::proxy_protocol::{self, Source};
use zerosock_sys::account::Account;
use zerosock_sys::{LogLimit, PeerFd, fd_passing};
use zerosock_vhost_user::Notice;
use zerosock_virtio::mailbox::{Mailbox, Sender};
use zerosock_virtio::outbox::DeviceAddr;
use zerosock_virtio::poller::{EventKind, Events, Interest, Poller, Token};

use crate::device::WorkerMessage;
use crate::device::host_sockets::{HostSocket, hybrid, network};
use crate::device::state::forwarded::{Forwarded, Remote};
use crate::device::state::host::Client;
use crate::device::state::sibling_message::SiblingMessage;
use crate::routing::Routes;
use crate::routing::forward::{Admitted, Destination, ListenAddress, ListenRule, RuleState};

/// Clients on their way to workers, at most: a bound on the mailboxes.
const MAX_UNDER_WAY: usize = 1024;

/// Clients accepted from one listener before the others have their turn.
const BUDGET: usize = 64;

/// Pause while no descriptor is free or too many clients are on their way.
const PAUSE: Duration = Duration::from_millis(20);

/// Events of the mailbox, and of listeners by their index.
const MAILBOX: EventKind = EventKind::new(1);
const LISTENER: EventKind = EventKind::new(2);

/// A listening rule in effect.
#[derive(Debug)]
pub(super) struct ActiveListener {
    pub(super) rule: ListenRule,
    policy: AddressPolicy,
    pub(super) state: Arc<RuleState>,
    /// Bounds the refusals of this rule in the log.
    log: LogLimit,
}

impl ActiveListener {
    /// A rule that takes the place of `old`, which has the same address.
    pub(super) fn new(rule: ListenRule, old: Option<&ActiveListener>) -> ActiveListener {
        let policy = AddressPolicy::for_clients(rule.allow.clone(), rule.deny.clone());
        let text = rule.text();
        let state = match old {
            Some(old) if old.rule.is_same(&rule) => old.state.renamed(text),
            old => RuleState::new(text, rule.max_connections, old.map(|old| &*old.state)),
        };
        ActiveListener {
            policy,
            state,
            log: LogLimit::default(),
            rule,
        }
    }
}

/// The listening socket of a rule.
#[derive(Debug)]
pub(super) enum ListenSocket {
    Tcp(OwnedFd),
    /// Connections in its backlog can carry descriptors.
    Unix(PeerFd, SocketKind),
}

impl AsFd for ListenSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            ListenSocket::Tcp(fd) => fd.as_fd(),
            ListenSocket::Unix(fd, _) => fd.as_fd(),
        }
    }
}

/// Rules, with the sockets of those that the thread does not have yet.
pub(super) type NewListeners = Vec<(Arc<ActiveListener>, Option<ListenSocket>)>;

#[derive(Debug)]
enum Message {
    /// New routes, and new rules if there are any.
    Update {
        routes: Arc<Routes>,
        rules: Option<NewListeners>,
        taken: Option<Arc<Notice>>,
    },
    Stop,
}

/// The handle of the thread. Dropping it ends the thread.
#[derive(Debug)]
pub(super) struct Listeners {
    sender: Sender<Message>,
    thread: Option<JoinHandle<()>>,
    account: Account,
}

impl Listeners {
    /// Starts the thread. Accepted sockets count against `account` until their device has them.
    pub(super) fn start(
        workers: Vec<Sender<WorkerMessage>>,
        account: Account,
    ) -> io::Result<Listeners> {
        let (sender, mailbox) = Mailbox::new()?;
        let poller = Poller::new()?;
        let token = Token {
            device: 0,
            kind: MAILBOX,
            key: 0,
        };
        poller.add(mailbox.fd(), token, Interest::Read)?;
        let acceptor = Acceptor {
            mailbox,
            poller,
            workers,
            account: account.clone(),
            routes: Arc::default(),
            listeners: BTreeMap::new(),
            next_key: 0,
            under_way: Arc::new(()),
        };
        let thread = std::thread::Builder::new()
            .name("zerosock-accept".to_owned())
            .spawn(move || acceptor.run())?;
        Ok(Listeners {
            sender,
            thread: Some(thread),
            account,
        })
    }

    /// Prepares the sockets of new rules: nothing can fail afterwards.
    pub(super) fn prepare(&self, rule: &mut ListenRule) -> io::Result<Option<ListenSocket>> {
        let Some(socket) = rule.socket.take() else {
            return Ok(None);
        };
        rustix::io::ioctl_fionbio(&socket, true)?;
        let unix = |socket: OwnedFd, kind| {
            let socket = PeerFd::from(socket).owned_by(&self.account);
            fd_passing::refuse_rights(&socket)?;
            Ok::<_, io::Error>(ListenSocket::Unix(socket, kind))
        };
        let socket = match rule.on {
            ListenAddress::Tcp(_) => ListenSocket::Tcp(socket),
            ListenAddress::Unix(_) => unix(socket, SocketKind::STREAM)?,
            ListenAddress::UnixSeqpacket(_) => unix(socket, SocketKind::SEQPACKET)?,
        };
        Ok(Some(socket))
    }

    /// Sends new routes to the thread, and new rules if there are any. It uses them, and has closed the
    /// sockets of other rules, when `taken` is dropped.
    pub(super) fn publish(
        &self,
        routes: &Arc<Routes>,
        rules: Option<NewListeners>,
        taken: Option<&Arc<Notice>>,
    ) {
        // The thread runs until this handle is dropped.
        let _ = self.sender.send(Message::Update {
            routes: Arc::clone(routes),
            rules,
            taken: taken.cloned(),
        });
    }
}

impl Drop for Listeners {
    fn drop(&mut self) {
        let _ = self.sender.send(Message::Stop);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread of the listeners had panicked");
        }
    }
}

/// One listener of the thread.
#[derive(Debug)]
struct Listener {
    active: Arc<ActiveListener>,
    socket: ListenSocket,
    /// There may be clients in its backlog.
    ready: bool,
    /// Some of them may have come before the socket had the options of the rule, which later ones inherit.
    early: bool,
}

/// A client that was accepted.
struct Accepted {
    socket: HostSocket,
    address: Option<SocketAddr>,
    kind: SocketType,
}

/// What the thread works on.
struct Acceptor {
    mailbox: Mailbox<Message>,
    poller: Poller,
    workers: Vec<Sender<WorkerMessage>>,
    account: Account,
    routes: Arc<Routes>,
    listeners: BTreeMap<u32, Listener>,
    next_key: u32,
    under_way: Arc<()>,
}

impl Acceptor {
    fn run(mut self) {
        let mut events = Events::default();
        let mut wait = None;
        loop {
            let messages: Vec<_> = self.mailbox.drain().collect();
            for message in messages {
                match message {
                    Message::Update {
                        routes,
                        rules,
                        taken,
                    } => {
                        self.routes = routes;
                        if let Some(rules) = rules {
                            self.replace_rules(rules);
                        }
                        drop(taken);
                    }
                    Message::Stop => return,
                }
            }
            if let Err(error) = events.wait(&self.poller, wait) {
                tracing::error!(%error, "waiting for clients failed: listening rules accept no more; restart the daemon");
                return;
            }
            for (token, _) in Poller::interpret(&events) {
                if token.kind == LISTENER
                    && let Some(listener) = self.listeners.get_mut(&token.key)
                {
                    listener.ready = true;
                }
            }
            wait = self.accept_all();
        }
    }

    fn replace_rules(&mut self, rules: NewListeners) {
        let mut before: Vec<_> = std::mem::take(&mut self.listeners).into_iter().collect();
        for (active, socket) in rules {
            let kept = before
                .iter()
                .position(|(_, listener)| listener.active.rule.on == active.rule.on);
            let (key, mut listener) = match (socket, kept) {
                (None, Some(at)) => before.swap_remove(at),
                (Some(socket), _) => match self.add(&active, socket) {
                    Some(added) => added,
                    None => continue,
                },
                // `RuleError::NoSocket` has excluded it.
                (None, None) => continue,
            };
            listener.set_rule(active);
            self.listeners.insert(key, listener);
        }
        for (_, listener) in before {
            // The reaper may close it later.
            self.poller.remove(&listener.socket);
        }
    }

    fn add(
        &mut self,
        active: &Arc<ActiveListener>,
        socket: ListenSocket,
    ) -> Option<(u32, Listener)> {
        let key = self.next_key;
        self.next_key = key.wrapping_add(1);
        let token = Token {
            device: 0,
            kind: LISTENER,
            key,
        };
        if let Err(error) = self.poller.add(&socket, token, Interest::Read) {
            let rule = active.state.text();
            tracing::error!(rule, %error, "cannot add a listener to the poller");
            return None;
        }
        let listener = Listener {
            active: Arc::clone(active),
            socket,
            // Clients may have come before.
            ready: true,
            early: true,
        };
        Some((key, listener))
    }

    /// Accepts from all listeners that may have clients. Returns how long to wait for events.
    fn accept_all(&mut self) -> Option<Duration> {
        let mut wait = None;
        for listener in self.listeners.values_mut() {
            if !listener.ready {
                continue;
            }
            for _ in 0..BUDGET {
                if Arc::strong_count(&self.under_way) > MAX_UNDER_WAY {
                    wait = Some(PAUSE);
                    break;
                }
                match listener.accept(&self.account) {
                    Ok(accepted) => {
                        let place = Place {
                            routes: &self.routes,
                            workers: &self.workers,
                            under_way: &self.under_way,
                        };
                        if let Err(reason) = place.pass(&listener.active, accepted) {
                            log_refusal(&listener.active, &reason);
                        }
                    }
                    Err(Errno::AGAIN) => {
                        (listener.ready, listener.early) = (false, false);
                        break;
                    }
                    Err(Errno::INTR | Errno::CONNABORTED) => {}
                    Err(error) => {
                        // Most likely there is no descriptor.
                        let error = io::Error::from(error).to_string();
                        log_refusal(&listener.active, &error);
                        wait = Some(PAUSE);
                        break;
                    }
                }
            }
            if listener.ready {
                wait.get_or_insert(Duration::ZERO);
            }
        }
        wait
    }
}

impl Listener {
    /// Sets the rule, and the options of the socket that accepted ones inherit.
    fn set_rule(&mut self, active: Arc<ActiveListener>) {
        if let ListenSocket::Tcp(socket) = &self.socket {
            network::configure_tcp(socket, active.rule.keepalive);
            (self.ready, self.early) = (true, true);
        }
        self.active = active;
    }

    fn accept(&self, account: &Account) -> Result<Accepted, Errno> {
        let permit = account.take_descriptors(1).map_err(|_| Errno::MFILE)?;
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let (socket, address) = acceptfrom_with(&self.socket, flags)?;
        Ok(match self.socket {
            ListenSocket::Tcp(_) => {
                if self.early {
                    network::configure_tcp(&socket, self.active.rule.keepalive);
                }
                Accepted {
                    socket: HostSocket::tcp(socket, permit),
                    address: address.and_then(|address| SocketAddr::try_from(address).ok()),
                    kind: SocketType::Stream,
                }
            }
            ListenSocket::Unix(_, kind) => {
                let socket = HostSocket::unix(socket, permit, kind);
                let kind = match kind == SocketKind::SEQPACKET {
                    true if !hybrid::configure_packets(&socket) => {
                        return Err(Errno::CONNABORTED);
                    }
                    true => SocketType::SeqPacket,
                    false => SocketType::Stream,
                };
                let address = None;
                Accepted {
                    socket,
                    address,
                    kind,
                }
            }
        })
    }
}

/// Where accepted clients go.
struct Place<'a> {
    routes: &'a Routes,
    workers: &'a [Sender<WorkerMessage>],
    under_way: &'a Arc<()>,
}

impl Place<'_> {
    /// Passes a client to the device of its destination. The error is why it was refused.
    fn pass(&self, active: &ActiveListener, accepted: Accepted) -> Result<(), String> {
        let refused = |reason: String| {
            active.state.count_refused();
            accepted.socket.abort();
            Err(reason)
        };
        let ip = accepted.address.map(|address| address.ip());
        if let Some(denied) = ip.and_then(|ip: IpAddr| active.policy.check(ip).err()) {
            return refused(denied.to_string());
        }
        let Some((device, endpoint)) = self.find(&active.rule.to) else {
            return refused(format!("there is no {}", active.rule.to));
        };
        let admitted = match active.state.admit() {
            Ok(admitted) => admitted,
            Err(reason) => return refused(reason.to_owned()),
        };
        let Some(worker) = self.workers.get(device.worker as usize) else {
            return refused("its worker has ended".to_owned());
        };
        let message = SiblingMessage::Client(Box::new(Client {
            forwarded: connection(admitted, endpoint, &accepted, &active.rule),
            to: endpoint.port,
            socket: accepted.socket,
            socket_type: accepted.kind,
            _under_way: Arc::clone(self.under_way),
        }));
        let number = device.number;
        // A worker that has ended is shutting down with the rest of the daemon.
        let _ = worker.send(WorkerMessage::Device { number, message });
        Ok(())
    }

    /// The device of a destination, and the address that it is connected to.
    fn find(&self, to: &Destination) -> Option<(DeviceAddr, Address)> {
        let cid = match to {
            Destination::Cid(cid, _) => *cid,
            Destination::Name(name, _) => self.routes.named(name)?,
            Destination::Service(_) => Cid::HOST,
        };
        let address = Address::new(cid, to.port());
        Some((self.routes.target(address)?, address))
    }
}

fn connection(
    admitted: Admitted,
    endpoint: Address,
    accepted: &Accepted,
    rule: &ListenRule,
) -> Box<Forwarded> {
    let remote = Remote::Client(accepted.address);
    let mut forwarded = Forwarded::new(admitted, endpoint, remote, rule.idle_timeout)
        .with_zero_copy(rule.zero_copy);
    if rule.proxy_protocol {
        let source = accepted.address.map_or(Source::Local, Source::Ip);
        let local = getsockname(&accepted.socket).ok();
        let local = local.and_then(|local| SocketAddr::try_from(local).ok());
        forwarded.set_header(proxy_protocol::header(source, local));
    }
    Box::new(forwarded)
}

fn log_refusal(active: &ActiveListener, reason: &str) {
    if let Some(suppressed) = active.log.admit(std::time::Instant::now()) {
        let rule = active.state.text();
        tracing::info!(rule, reason, suppressed, "client refused");
    }
}

#[cfg(test)]
#[path = "listeners_tests.rs"]
mod tests;
