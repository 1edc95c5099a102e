//! Waits for sockets of many endpoints and for other descriptors.
//!
//! # Invariants
//! - Readiness is level-triggered, as with `poll(2)`: what was not consumed is reported again. A
//!   poller consumes nothing.
//! - Each poller has an eventfd of its own, registered at every endpoint while it sleeps. So
//!   several pollers do not clear each other's notifications.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use zerosock_proto::vsock::datagram::DatagramId;
use zerosock_proto::{Address, Port};

use super::datagram::Datagram;
use super::hub::{AlreadyReady, Core, EventFd, Interest, Locked};
use super::listener::Listener;
use super::seqpacket::{SeqPacket, SeqPacketListener};
use super::stream::Stream;
use super::waiting::{SpinTime, Wait};
use crate::table::sockets::{StreamId, StreamState};
use zerosock_virtio::deadline::{deadline_in, earlier, timespec};

/// Checks of all endpoints between two readings of the clock and polls of descriptors, while
/// spinning.
const CHECKS_PER_CLOCK: u32 = 32;
/// Readings of the clock between two unconditional turns, which find what the checks do not show.
const CLOCKS_PER_TURN: u32 = 64;

/// Which events of a source to report.
///
/// ```
/// # let (host, process) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/pair.rs"));
/// use zerosock::vsock::{Poller, Readiness, Wait};
///
/// let mut poller = Poller::new(Wait::Sleep);
/// poller.add_stream(&process, 1, Readiness::BOTH);
/// // There is nothing to read, but room to write.
/// assert_eq!(poller.wait(None)?[0].readiness, Readiness::WRITABLE);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Readiness {
    /// Received bytes (at least the stream's [low-water mark](Stream::set_low_water)), end of file,
    /// or a connection to accept.
    pub readable: bool,
    /// Room to send, or an error that a send would return.
    pub writable: bool,
}

impl Readiness {
    /// Only reading.
    pub const READABLE: Readiness = Readiness {
        readable: true,
        writable: false,
    };
    /// Only writing.
    pub const WRITABLE: Readiness = Readiness {
        readable: false,
        writable: true,
    };
    /// Both.
    pub const BOTH: Readiness = Readiness {
        readable: true,
        writable: true,
    };

    fn any(self) -> bool {
        self.readable || self.writable
    }
}

/// A source that is ready, by the key that it was added with.
///
/// ```
/// # let (host, process) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/pair.rs"));
/// use std::io::Write;
/// use zerosock::vsock::{Poller, Readiness, Ready, Wait};
///
/// let mut poller = Poller::new(Wait::Sleep);
/// poller.add_stream(&process, 7, Readiness::READABLE);
/// (&host).write_all(b"x")?;
/// let readiness = Readiness::READABLE;
/// assert_eq!(poller.wait(None)?, [Ready { key: 7, readiness }]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Ready {
    /// The key.
    pub key: u64,
    /// The requested events that are ready.
    pub readiness: Readiness,
}

/// Waits for many sockets of any number of endpoints, and for other descriptors. Each wait checks
/// all of them, as `poll(2)` does; for thousands of sockets use an async runtime.
/// Several pollers, and threads that block, may use one endpoint at the same time.
///
/// ```
/// # let (db, web) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/two.rs"));
/// use std::time::Duration;
/// use zerosock::vsock::{Poller, Readiness, Wait};
/// use zerosock::{Address, Port};
///
/// let (done, finished) = std::io::pipe()?;
/// let listener = db.listen(Port::new(1), 8)?;
/// let mut poller = Poller::new(Wait::ADAPTIVE);
/// poller.add_listener(&listener, 1);
/// poller.add_fd(&done, 2, Readiness::READABLE)?;
///
/// let theirs = web.begin_connect(Address::new(db.cid(), Port::new(1)))?;
/// assert_eq!(poller.wait(Some(Duration::from_secs(10)))?[0].key, 1);
/// let (stream, _peer) = listener.accept()?;
/// poller.add_stream(&stream, 3, Readiness::READABLE);
///
/// drop(finished);
/// assert_eq!(poller.wait(None)?[0].key, 2);
/// # theirs.wait_connected()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// It keeps the endpoints of its sources, so a forked child must neither use nor drop its copy: see
/// [forks](crate::vsock#forks).
#[derive(Debug)]
pub struct Poller {
    sources: Vec<Source>,
    wait: Wait,
    spin_time: SpinTime,
    /// Created by the first sleep.
    event_fd: Option<Arc<EventFd>>,
}

struct Source {
    key: u64,
    wanted: Readiness,
    kind: SourceKind,
}

enum SourceKind {
    Stream(Arc<Core>, StreamId),
    Listener(Arc<Core>, Port),
    /// With the destination for which writability is checked.
    Datagram(Arc<Core>, DatagramId, Option<Address>),
    Fd(OwnedFd),
}

impl Poller {
    /// A poller without sources that waits by `wait`.
    pub fn new(wait: Wait) -> Poller {
        Poller {
            sources: Vec::new(),
            wait,
            spin_time: SpinTime::default(),
            event_fd: None,
        }
    }

    /// Adds a stream. It should be [non-blocking](Stream::set_nonblocking). A stream that is
    /// dropped, or that lost its endpoint, is reported as ready until it is removed. One that is
    /// [connecting](super::Endpoint::begin_connect) is writable when the connect has succeeded or
    /// failed.
    pub fn add_stream(&mut self, stream: &Stream, key: u64, wanted: Readiness) {
        let kind = SourceKind::Stream(stream.conn.core.clone(), stream.conn.id);
        self.sources.push(Source { key, wanted, kind });
    }

    /// Adds a connection that carries messages, as [`add_stream`](Self::add_stream) adds a stream:
    /// readable when a whole message is there, writable when a message may be sent, in particular
    /// one that a send refused for lack of room.
    pub fn add_seqpacket(&mut self, socket: &SeqPacket, key: u64, wanted: Readiness) {
        let kind = SourceKind::Stream(socket.conn.core.clone(), socket.conn.id);
        self.sources.push(Source { key, wanted, kind });
    }

    /// Adds a listener for such connections, as [`add_listener`](Self::add_listener).
    pub fn add_seqpacket_listener(&mut self, listener: &SeqPacketListener, key: u64) {
        self.add_listener(listener.port(), key);
    }

    /// Adds a listener: readable when a connection waits.
    pub fn add_listener(&mut self, listener: &Listener, key: u64) {
        let kind = SourceKind::Listener(listener.core.clone(), listener.local_addr().port);
        let wanted = Readiness::READABLE;
        self.sources.push(Source { key, wanted, kind });
    }

    /// Adds a datagram socket: readable when a datagram is there, writable when one could be sent
    /// to the peer that it is [connected](Datagram::connect) to now or, unconnected, when there is
    /// room at all. It should be non-blocking.
    pub fn add_datagram(&mut self, socket: &Datagram, key: u64, wanted: Readiness) {
        let (core, id) = socket.core_and_id();
        let kind = SourceKind::Datagram(core.clone(), id, socket.peer_addr());
        self.sources.push(Source { key, wanted, kind });
    }

    /// Adds a descriptor of another kind: a socket, a pipe, a timer.
    ///
    /// # Errors
    /// When the system has no descriptor left for a duplicate.
    pub fn add_fd(&mut self, fd: impl AsFd, key: u64, wanted: Readiness) -> io::Result<()> {
        let kind = SourceKind::Fd(fd.as_fd().try_clone_to_owned()?);
        self.sources.push(Source { key, wanted, kind });
        Ok(())
    }

    /// Changes which events of the sources with `key` are reported.
    pub fn want(&mut self, key: u64, wanted: Readiness) {
        for source in self.sources.iter_mut().filter(|source| source.key == key) {
            source.wanted = wanted;
        }
    }

    /// Removes the sources with `key`.
    pub fn remove(&mut self, key: u64) {
        self.sources.retain(|source| source.key != key);
    }

    /// Waits until a source is ready, or for `timeout` (`None`: without limit). Returns the ready
    /// sources, or none after the timeout.
    ///
    /// # Errors
    /// Those of `poll(2)`; when the system has no descriptor left.
    pub fn wait(&mut self, timeout: Option<Duration>) -> io::Result<Vec<Ready>> {
        let began = Instant::now();
        let deadline = timeout.and_then(deadline_in);
        let cores = self.cores();
        let mut slept = false;
        loop {
            for core in &cores {
                // The sockets report the failure of an endpoint.
                let _ = core.lock().drive();
            }
            let ready = self.ready()?;
            if !ready.is_empty() || deadline_is_past(deadline) {
                let waited = began.elapsed();
                self.spin_time.record(self.wait, waited, slept);
                return Ok(ready);
            }
            if self.spin(&cores, began, deadline)? {
                continue;
            }
            slept = true;
            self.sleep(&cores, deadline)?;
        }
    }

    /// Returns the sources that are ready now, for an event loop that waits by itself (mio, epoll(7)): it
    /// waits for the descriptors of the endpoints ([`Endpoint`](super::Endpoint) and [`Host`](super::Host)
    /// implement [`AsFd`]), and calls this on each event. When nothing is ready, the descriptors are armed:
    /// each becomes readable, and gives an edge, when a socket of its endpoint has had an event or a timer is
    /// due. So call it until it returns nothing, then wait. One thread at a time may wait for the descriptor
    /// of an endpoint.
    ///
    /// # Errors
    /// Those of `poll(2)`, for sources of [`add_fd`](Self::add_fd).
    pub fn poll(&mut self) -> io::Result<Vec<Ready>> {
        let cores = self.cores();
        for core in &cores {
            // The sockets report the failure of an endpoint.
            let _ = core.lock().drive();
        }
        let ready = self.ready()?;
        if !ready.is_empty() {
            return Ok(ready);
        }
        for core in &cores {
            core.lock().arm_descriptor();
        }
        // What another thread took in before the descriptors were armed.
        self.ready()
    }

    /// The endpoints of all sources, each once.
    fn cores(&self) -> Vec<Arc<Core>> {
        let mut cores: Vec<Arc<Core>> = Vec::new();
        for source in &self.sources {
            if let SourceKind::Stream(core, _)
            | SourceKind::Listener(core, _)
            | SourceKind::Datagram(core, ..) = &source.kind
                && !cores.iter().any(|known| Arc::ptr_eq(known, core))
            {
                cores.push(core.clone());
            }
        }
        cores
    }

    /// The sources that are ready now.
    fn ready(&self) -> io::Result<Vec<Ready>> {
        let mut ready = Vec::new();
        for source in &self.sources {
            let readiness = match &source.kind {
                SourceKind::Stream(core, id) => of_stream(&mut core.lock(), *id, source.wanted),
                SourceKind::Listener(core, port) => {
                    let mut locked = core.lock();
                    let there = locked.is_over() || locked.backend().is_acceptable(*port);
                    Readiness {
                        readable: source.wanted.readable && there,
                        writable: false,
                    }
                }
                SourceKind::Datagram(core, id, to) => {
                    of_datagram(&mut core.lock(), *id, *to, source.wanted)
                }
                SourceKind::Fd(_) => continue,
            };
            if readiness.any() {
                let key = source.key;
                ready.push(Ready { key, readiness });
            }
        }
        self.poll_fds(&[], Some(Instant::now()), &mut ready)?;
        Ok(ready)
    }

    /// Spins. Returns whether something may be ready; false when the spin time is used up.
    fn spin(
        &self,
        cores: &[Arc<Core>],
        began: Instant,
        deadline: Option<Instant>,
    ) -> io::Result<bool> {
        let budget = self.spin_time.budget(self.wait);
        if budget.is_some_and(|budget| budget.is_zero()) {
            return Ok(false);
        }
        for clock in 1u32.. {
            for _ in 0..CHECKS_PER_CLOCK {
                if cores.iter().any(|core| core.lock().backend().pending()) {
                    return Ok(true);
                }
                std::hint::spin_loop();
            }
            let now = Instant::now();
            let due = |core: &Arc<Core>| {
                let at = core.lock().backend().next_timeout();
                at.is_some_and(|at| at <= now)
            };
            if deadline.is_some_and(|at| at <= now)
                || clock.is_multiple_of(CLOCKS_PER_TURN)
                || cores.iter().any(due)
            {
                return Ok(true);
            }
            if budget.is_some_and(|budget| now.saturating_duration_since(began) >= budget) {
                return Ok(false);
            }
            // Another thread may have taken in what this poller waits for.
            if !self.ready()?.is_empty() {
                return Ok(true);
            }
        }
        Ok(true)
    }

    fn sleep(&mut self, cores: &[Arc<Core>], deadline: Option<Instant>) -> io::Result<()> {
        let event_fd = match &self.event_fd {
            Some(event_fd) => event_fd.clone(),
            None => self.event_fd.insert(Arc::new(EventFd::new()?)).clone(),
        };
        let slept = self.sleep_on(cores, &event_fd, deadline);
        for core in cores {
            core.lock().deregister_poller(&event_fd);
        }
        slept
    }

    fn sleep_on(
        &self,
        cores: &[Arc<Core>],
        event_fd: &Arc<EventFd>,
        mut until: Option<Instant>,
    ) -> io::Result<()> {
        // Cleared before it is registered anywhere: every later signal is an event.
        event_fd.clear();
        let mut fds = vec![event_fd.as_fd()];
        for core in cores {
            let mut locked = core.lock();
            match locked.register_poller(event_fd, Interest::Anything) {
                Ok(at) => until = earlier(until, at),
                Err(AlreadyReady) => return Ok(()),
            }
            // A failed endpoint has no more events, and its descriptor may stay readable.
            if !locked.is_over() {
                fds.push(core.backend_fd());
            }
        }
        // What another thread took in before the registration is not signalled.
        if !self.ready()?.is_empty() {
            return Ok(());
        }
        self.poll_fds(&fds, until, &mut Vec::new())
    }

    /// Polls the descriptors of all sources, and `others`, until one is ready or until `until`.
    /// Adds ready sources to `ready`.
    fn poll_fds(
        &self,
        others: &[BorrowedFd<'_>],
        until: Option<Instant>,
        ready: &mut Vec<Ready>,
    ) -> io::Result<()> {
        let fds = self.sources.iter().filter_map(|source| match &source.kind {
            SourceKind::Fd(fd) => Some((fd.as_fd(), source)),
            _ => None,
        });
        let fds: Vec<(BorrowedFd<'_>, &Source)> = fds.collect();
        if fds.is_empty() && others.is_empty() && until.is_some_and(|at| at <= Instant::now()) {
            return Ok(());
        }
        let mut polled: Vec<PollFd<'_>> = fds
            .iter()
            .map(|(fd, source)| {
                let mut flags = PollFlags::empty();
                flags.set(PollFlags::IN, source.wanted.readable);
                flags.set(PollFlags::OUT, source.wanted.writable);
                PollFd::from_borrowed_fd(*fd, flags)
            })
            .chain(
                others
                    .iter()
                    .map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)),
            )
            .collect();
        let timeout = until.map(|at| timespec(at.saturating_duration_since(Instant::now())));
        match poll(&mut polled, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let ended = PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL;
        for ((_, source), polled) in fds.iter().zip(&polled) {
            let got = polled.revents();
            let readiness = Readiness {
                readable: source.wanted.readable && got.intersects(PollFlags::IN | ended),
                writable: source.wanted.writable && got.intersects(PollFlags::OUT | ended),
            };
            if readiness.any() {
                let key = source.key;
                ready.push(Ready { key, readiness });
            }
        }
        Ok(())
    }
}

fn deadline_is_past(deadline: Option<Instant>) -> bool {
    deadline.is_some_and(|at| at <= Instant::now())
}

fn of_stream(locked: &mut Locked<'_>, id: StreamId, wanted: Readiness) -> Readiness {
    let is_over = locked.is_over();
    let backend = locked.backend();
    let Some(info) = backend.info(id).filter(|_| !is_over) else {
        return wanted;
    };
    let ended = matches!(info.state, StreamState::Finished | StreamState::Reset);
    let enough = match info.messages {
        Some(messages) => messages > 0,
        None => info.unread >= info.low_water as usize,
    };
    Readiness {
        readable: wanted.readable && (enough || info.at_end || ended),
        writable: wanted.writable && (ended || backend.is_writable(id)),
    }
}

fn of_datagram(
    locked: &mut Locked<'_>,
    id: DatagramId,
    to: Option<Address>,
    wanted: Readiness,
) -> Readiness {
    let is_over = locked.is_over();
    let Some(backend) = locked.backend().datagrams().filter(|_| !is_over) else {
        return wanted;
    };
    Readiness {
        readable: wanted.readable && backend.has_some(id),
        writable: wanted.writable && backend.may_send(id, to),
    }
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Source")
            .field("key", &self.key)
            .field("wanted", &self.wanted)
            .finish_non_exhaustive()
    }
}
