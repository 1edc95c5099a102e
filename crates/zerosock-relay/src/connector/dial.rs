//! Connecting to one of the addresses of a host, over TCP or UDP.
//!
//! # Invariants
//! - No packet goes to an address that the policy has not permitted.
//! - At most [`ATTEMPTS_AT_ONCE`] sockets exist at once, and those of all requests beyond their first ones are
//!   bounded by [`Extra`].
//! - One attempt wins; the sockets of the others are closed before the winner is returned.

use std::future::{Future, pending, poll_fn};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{Instant, sleep_until};
use tracing::debug;

use super::error::{ConnectError, ConnectStage};
use super::schedule::{Order, Schedule};
use crate::networks::AddressPolicy;
use crate::resolve::{Family, Found, LookupError, LookupResult, Resolver};
use crate::target::{DomainName, Host};

/// Sockets that a request holds at once, the most: see [`super::ConnectRequest::attempts`]. With 250 ms between
/// attempts, the last starts 1.25 s after the first, within the usual time-outs.
pub const ATTEMPTS_AT_ONCE: usize = 6;

/// Time after which an attempt is given up for the next address, if there may be no more at once.
/// Linux sends a SYN again after 1 s, so that one may be lost.
const ATTEMPT_LIMIT: Duration = Duration::from_secs(2);

/// Sockets of all requests of a connector together, beyond the first of each.
pub(super) const MAX_EXTRA: usize = 1024;

/// Permits for attempts beyond the first of each request.
pub(super) type Extra = Arc<Semaphore>;

/// An attempt to connect to one address.
pub(super) type Attempt = Pin<Box<dyn Future<Output = io::Result<OwnedFd>> + Send>>;

/// The addresses of a host, and those that a lookup has yet to find.
pub(super) struct Addresses {
    found: Found,
    /// None if `found` is complete.
    updates: Option<watch::Receiver<Found>>,
    /// The name that is looked up.
    name: Option<DomainName>,
}

impl Addresses {
    /// The address of a host, or the beginning of a lookup.
    pub(super) fn of(host: &Host, resolver: &Resolver) -> Self {
        match host {
            Host::Name(name) if !name.is_localhost() => {
                let mut updates = resolver.lookup(name);
                let found = updates.borrow_and_update().clone();
                Addresses {
                    found,
                    updates: Some(updates),
                    name: Some(name.clone()),
                }
            }
            Host::Name(_) => Addresses::named(Found::localhost()),
            Host::Address(address) => Addresses::named(Found::known(&[*address])),
        }
    }

    /// Addresses that the rule itself names.
    fn named(found: Found) -> Self {
        Addresses {
            found,
            updates: None,
            name: None,
        }
    }

    /// Waits until more is found.
    async fn changed(&mut self) {
        let Some(updates) = &mut self.updates else {
            return pending().await;
        };
        match updates.changed().await {
            Ok(()) => self.found = updates.borrow_and_update().clone(),
            Err(_) => {
                let ended = || Err(LookupError::Failed("the lookup ended".into()));
                self.found.v4.get_or_insert_with(ended);
                self.found.v6.get_or_insert_with(ended);
            }
        }
    }

    /// Moves answers that are new to a schedule, without the addresses that the policy denies.
    fn pass_on(&self, schedule: &mut Schedule, policy: &AddressPolicy, failure: &mut Failure) {
        for (family, answer) in [(Family::V6, &self.found.v6), (Family::V4, &self.found.v4)] {
            let Some(answer) = answer.as_ref().filter(|_| !schedule.has_answer(family)) else {
                continue;
            };
            let permitted = self.permitted(answer, policy, failure);
            schedule.on_answer(Instant::now(), family, permitted);
        }
    }

    fn permitted(
        &self,
        answer: &LookupResult,
        policy: &AddressPolicy,
        failure: &mut Failure,
    ) -> Vec<IpAddr> {
        let addresses = match answer {
            Ok(addresses) => addresses.as_slice(),
            Err(error) => {
                if let Some(name) = &self.name {
                    failure.add(lookup_error(name, error));
                }
                &[]
            }
        };
        let check = |address: &IpAddr| {
            let checked = match self.name {
                Some(_) => policy.check(*address),
                None => policy.check_literal(*address),
            };
            checked.map_err(|denied| failure.add(denied.into())).is_ok()
        };
        addresses.iter().copied().filter(check).collect()
    }
}

fn lookup_error(name: &DomainName, error: &LookupError) -> ConnectError {
    let name = name.clone();
    match error {
        LookupError::NoRecords => ConnectError::NoSuchName(name),
        #[cfg(not(feature = "names"))]
        LookupError::NotSupported => ConnectError::NamesNotSupported(name),
        LookupError::Failed(reason) => ConnectError::Resolve {
            name,
            reason: reason.clone(),
        },
    }
}

/// The error that says most of those that a request met.
#[derive(Default)]
struct Failure(Option<ConnectError>);

impl Failure {
    /// Keeps the first of the errors that say most: what a target answered before what the network or
    /// this machine says, and that before what kept an attempt from being made.
    fn add(&mut self, error: ConnectError) {
        let rank = |error: &ConnectError| match error {
            ConnectError::Refused(_) => 5,
            ConnectError::TimedOut(_) => 4,
            ConnectError::Io(_) => 3,
            ConnectError::Denied(_) => 2,
            ConnectError::NoSuchName(_) => 0,
            _ => 1,
        };
        if self.0.as_ref().is_none_or(|kept| rank(kept) < rank(&error)) {
            self.0 = Some(error);
        }
    }

    fn into_error(self) -> ConnectError {
        // Without an address there was an error or nothing to connect to.
        self.0
            .unwrap_or_else(|| io::Error::from(io::ErrorKind::AddrNotAvailable).into())
    }
}

/// The attempts that a request permits, and their order.
pub(super) struct DialPlan<'a> {
    pub(super) port: u16,
    pub(super) policy: &'a AddressPolicy,
    pub(super) deadline: Instant,
    pub(super) order: Order,
    /// Most attempts at once, at least 1.
    pub(super) at_once: usize,
    pub(super) extra: &'a Extra,
}

/// An attempt that has succeeded.
pub(super) struct Dialled {
    pub(super) socket: OwnedFd,
    pub(super) address: SocketAddr,
    /// The host has, or may have, another address that was not tried.
    pub(super) has_alternative: bool,
}

/// Connects by `attempt` to the first address that lets it.
pub(super) async fn dial(
    mut addresses: Addresses,
    plan: DialPlan<'_>,
    attempt: fn(SocketAddr) -> Attempt,
) -> Result<Dialled, ConnectError> {
    let DialPlan {
        port,
        policy,
        deadline,
        order,
        at_once,
        extra,
    } = plan;
    let mut schedule = Schedule::new(order);
    let mut attempts = Attempts::new(at_once.clamp(1, ATTEMPTS_AT_ONCE), extra);
    let mut failure = Failure::default();
    loop {
        addresses.pass_on(&mut schedule, policy, &mut failure);
        let now = Instant::now();
        if now >= deadline {
            let resolving = addresses.name.is_some() && !schedule.has_started();
            return Err(ConnectError::TimedOut(match resolving {
                true => ConnectStage::Resolving,
                false => ConnectStage::Connecting,
            }));
        }
        let due = schedule.next_attempt(now);
        if due.is_some_and(|due| attempts.room(due) <= now) {
            if let Some(ip) = schedule.start(now) {
                if attempts.make_room() {
                    failure.add(ConnectError::TimedOut(ConnectStage::Connecting));
                }
                let address = SocketAddr::new(ip, port);
                attempts.start(now, address, attempt(address));
            }
        } else if attempts.is_empty() && schedule.is_exhausted() {
            return Err(failure.into_error());
        }
        let due = schedule.next_attempt(now);
        let due = due.map_or(deadline, |due| attempts.room(due));
        tokio::select! {
            biased;
            (address, result) = attempts.finished() => match result {
                Ok(socket) => return Ok(Dialled {
                    socket,
                    address,
                    has_alternative: schedule.has_alternative(),
                }),
                Err(error) => {
                    debug!("cannot connect to {address}: {error}");
                    failure.add(refused_or(error, Some(address)));
                    schedule.on_failure();
                }
            },
            () = addresses.changed(), if !schedule.is_answered() => {}
            () = sleep_until(due.min(deadline)) => {}
        }
    }
}

/// The attempts of a request that are in flight, in the order of their start.
struct Attempts<'a> {
    all: Vec<InFlight>,
    at_once: usize,
    extra: &'a Extra,
}

struct InFlight {
    started: Instant,
    address: SocketAddr,
    attempt: Attempt,
    /// None for the only attempt.
    _extra: Option<OwnedSemaphorePermit>,
}

impl<'a> Attempts<'a> {
    fn new(at_once: usize, extra: &'a Extra) -> Self {
        Attempts {
            all: Vec::new(),
            at_once,
            extra,
        }
    }

    fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Whether another attempt takes the place of the oldest one.
    fn is_full(&self) -> bool {
        let exhausted = || self.extra.available_permits() == 0;
        self.all.len() >= self.at_once || !self.is_empty() && exhausted()
    }

    /// The earliest time, from `due` on, at which another attempt may start.
    fn room(&self, due: Instant) -> Instant {
        match self.all.first() {
            Some(oldest) if self.is_full() => due.max(oldest.started + ATTEMPT_LIMIT),
            _ => due,
        }
    }

    /// Closes the oldest attempt if there are as many as there may be. Returns whether it did.
    fn make_room(&mut self) -> bool {
        let is_full = self.is_full();
        if is_full {
            let address = self.all.remove(0).address;
            debug!("{address} does not answer: the next address is tried");
        }
        is_full
    }

    fn start(&mut self, now: Instant, address: SocketAddr, attempt: Attempt) {
        // All connects run on one thread: the permits that `is_full` has seen are there.
        let extra = match self.all.is_empty() {
            true => None,
            false => Arc::clone(self.extra).try_acquire_owned().ok(),
        };
        self.all.push(InFlight {
            started: now,
            address,
            attempt,
            _extra: extra,
        });
    }

    /// Waits for an attempt to end, and removes it.
    async fn finished(&mut self) -> (SocketAddr, io::Result<OwnedFd>) {
        poll_fn(|context| {
            for (index, one) in self.all.iter_mut().enumerate() {
                if let Poll::Ready(result) = one.attempt.as_mut().poll(context) {
                    let address = self.all.remove(index).address;
                    return Poll::Ready((address, result));
                }
            }
            Poll::Pending
        })
        .await
    }
}

/// What an error of connecting or of the first bytes means.
pub(super) fn refused_or(error: io::Error, address: Option<SocketAddr>) -> ConnectError {
    match error.kind() {
        io::ErrorKind::ConnectionRefused => ConnectError::Refused(address),
        io::ErrorKind::TimedOut => ConnectError::TimedOut(ConnectStage::Connecting),
        _ => error.into(),
    }
}

/// Connects over TCP.
pub(super) fn tcp(address: SocketAddr) -> Attempt {
    Box::pin(async move {
        let stream = TcpStream::connect(address).await?;
        // Without a listener, a connection to an own port can meet itself (simultaneous open).
        if stream.local_addr()? == address {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        Ok(stream.into_std()?.into())
    })
}

/// Connects a UDP socket, which sends nothing.
pub(super) fn udp(address: SocketAddr) -> Attempt {
    let connect = move || {
        let any: IpAddr = match address {
            SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let socket = UdpSocket::bind((any, 0))?;
        socket.connect(address)?;
        socket.set_nonblocking(true)?;
        Ok(socket.into())
    };
    Box::pin(async move { connect() })
}

#[cfg(test)]
#[path = "dial_tests.rs"]
mod tests;
