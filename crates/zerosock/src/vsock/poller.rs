//! One wait over many endpoints, their sockets, and descriptors of other kinds.
//!
//! What must hold: readiness is level-triggered, as with `poll(2)`: what is there and was not used
//! is reported again. Nothing is consumed here.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use zerosock_proto::Port;

use super::core::Core;
use super::engine::Engine;
use super::listener::Listener;
use super::sockets::{StreamId, StreamState};
use super::stream::Stream;
use super::waiting::{Learned, Wait};

/// Looks at all endpoints between two looks at the clock and at descriptors, while spinning.
const LOOKS: u32 = 32;

/// What is to be reported of a source.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Readiness {
    /// Bytes, an end, a connection to accept.
    pub readable: bool,
    /// Room to send, or a reason not to.
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
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Ready {
    /// The key.
    pub key: u64,
    /// For what it is ready, of that which was asked for.
    pub readiness: Readiness,
}

/// Waits for many sockets at once: of any number of endpoints, and other descriptors. A wait looks
/// at all of them, as `poll(2)` does; for thousands of sockets an executor is the better place.
///
/// ```no_run
/// use std::time::Duration;
/// use zerosock::Port;
/// use zerosock::vsock::{Endpoint, Poller, Readiness, Wait};
///
/// let endpoint = Endpoint::attach("/run/zerosock/attach.sock")?;
/// let listener = endpoint.listen(Port::new(1), 8)?;
/// let mut poller = Poller::new(Wait::ADAPTIVE);
/// poller.add_listener(&listener, 1);
/// poller.add_fd(std::io::stdin(), 2, Readiness::READABLE)?;
/// for ready in poller.wait(Some(Duration::from_secs(1)))? {
///     println!("source {} is ready", ready.key);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Poller {
    sources: Vec<Source>,
    wait: Wait,
    learned: Learned,
}

struct Source {
    key: u64,
    wanted: Readiness,
    what: What,
}

enum What {
    Stream(Arc<Core>, StreamId),
    Listener(Arc<Core>, Port),
    Fd(OwnedFd),
}

impl Poller {
    /// A poller without sources that waits by `wait`.
    pub fn new(wait: Wait) -> Poller {
        Poller {
            sources: Vec::new(),
            wait,
            learned: Learned::default(),
        }
    }

    /// Adds a stream. It should be [non-blocking](Stream::set_nonblocking). A stream that is
    /// dropped is reported as ready until it is removed.
    pub fn add_stream(&mut self, stream: &Stream, key: u64, wanted: Readiness) {
        let what = What::Stream(stream.core.clone(), stream.id);
        self.sources.push(Source { key, wanted, what });
    }

    /// Adds a listener: readable when a connection waits.
    pub fn add_listener(&mut self, listener: &Listener, key: u64) {
        let what = What::Listener(listener.core.clone(), listener.local_addr().port);
        let wanted = Readiness::READABLE;
        self.sources.push(Source { key, wanted, what });
    }

    /// Adds a descriptor of another kind: a socket, a pipe, a timer.
    ///
    /// # Errors
    /// When the system has no descriptor left for a duplicate.
    pub fn add_fd(&mut self, fd: impl AsFd, key: u64, wanted: Readiness) -> io::Result<()> {
        let what = What::Fd(fd.as_fd().try_clone_to_owned()?);
        self.sources.push(Source { key, wanted, what });
        Ok(())
    }

    /// Changes what is to be reported of the sources with `key`.
    pub fn want(&mut self, key: u64, wanted: Readiness) {
        for source in self.sources.iter_mut().filter(|source| source.key == key) {
            source.wanted = wanted;
        }
    }

    /// Removes the sources with `key`.
    pub fn remove(&mut self, key: u64) {
        self.sources.retain(|source| source.key != key);
    }

    /// Waits until something is ready, or for `timeout` (`None`: for ever). Empty: the time was
    /// up.
    ///
    /// # Errors
    /// `ConnectionAborted` when an endpoint is over; what `poll(2)` answers.
    pub fn wait(&mut self, timeout: Option<Duration>) -> io::Result<Vec<Ready>> {
        let began = Instant::now();
        let deadline = timeout.map(|timeout| began + timeout);
        let cores = self.cores();
        let mut slept = false;
        loop {
            for core in &cores {
                core.lock().turn()?;
            }
            let ready = self.ready()?;
            if !ready.is_empty() || deadline_is_past(deadline) {
                let waited = began.elapsed();
                self.learned.learn(self.wait, waited, slept);
                return Ok(ready);
            }
            if self.spin(&cores, began, deadline)? {
                continue;
            }
            slept = true;
            self.sleep(&cores, deadline)?;
        }
    }

    /// The endpoints of all sources, each once.
    fn cores(&self) -> Vec<Arc<Core>> {
        let mut cores: Vec<Arc<Core>> = Vec::new();
        for source in &self.sources {
            if let What::Stream(core, _) | What::Listener(core, _) = &source.what
                && !cores.iter().any(|known| Arc::ptr_eq(known, core))
            {
                cores.push(core.clone());
            }
        }
        cores
    }

    /// What is ready now.
    fn ready(&self) -> io::Result<Vec<Ready>> {
        let mut ready = Vec::new();
        for source in &self.sources {
            let readiness = match &source.what {
                What::Stream(core, id) => of_stream(core.lock().engine(), *id, source.wanted),
                What::Listener(core, port) => Readiness {
                    readable: source.wanted.readable && core.lock().engine().is_acceptable(*port),
                    writable: false,
                },
                What::Fd(_) => continue,
            };
            if readiness.any() {
                let key = source.key;
                ready.push(Ready { key, readiness });
            }
        }
        self.poll_fds(&[], Some(Instant::now()), &mut ready)?;
        Ok(ready)
    }

    /// Looks again and again until the time to spin is over. True: something may be there.
    fn spin(
        &self,
        cores: &[Arc<Core>],
        began: Instant,
        deadline: Option<Instant>,
    ) -> io::Result<bool> {
        let budget = self.learned.budget(self.wait);
        if budget.is_some_and(|budget| budget.is_zero()) {
            return Ok(false);
        }
        loop {
            for _ in 0..LOOKS {
                if cores.iter().any(|core| core.lock().engine().pending()) {
                    return Ok(true);
                }
                std::hint::spin_loop();
            }
            let now = Instant::now();
            let due = |core: &Arc<Core>| {
                let at = core.lock().engine().next_timeout();
                at.is_some_and(|at| at <= now)
            };
            if deadline.is_some_and(|at| at <= now) || cores.iter().any(due) {
                return Ok(true);
            }
            if budget.is_some_and(|budget| now.saturating_duration_since(began) >= budget) {
                return Ok(false);
            }
            // Also what another thread has taken in.
            if !self.ready()?.is_empty() {
                return Ok(true);
            }
        }
    }

    fn sleep(&self, cores: &[Arc<Core>], deadline: Option<Instant>) -> io::Result<()> {
        let mut until = deadline;
        for core in cores {
            let mut locked = core.lock();
            if locked.watch() {
                return Ok(());
            }
            until = match (until, locked.engine().next_timeout()) {
                (Some(one), Some(other)) => Some(one.min(other)),
                (one, other) => one.or(other),
            };
        }
        // What another thread took in meanwhile, nobody tells us of.
        if !self.ready()?.is_empty() {
            return Ok(());
        }
        self.poll_fds(cores, until, &mut Vec::new())
    }

    /// Polls all descriptors, and `cores`, until one is ready or until `until`. Reports those of
    /// sources.
    fn poll_fds(
        &self,
        cores: &[Arc<Core>],
        until: Option<Instant>,
        ready: &mut Vec<Ready>,
    ) -> io::Result<()> {
        let fds = self.sources.iter().filter_map(|source| match &source.what {
            What::Fd(fd) => Some((fd.as_fd(), source)),
            _ => None,
        });
        let fds: Vec<(BorrowedFd<'_>, &Source)> = fds.collect();
        if fds.is_empty() && cores.is_empty() && until.is_some_and(|at| at <= Instant::now()) {
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
                cores
                    .iter()
                    .map(|core| PollFd::from_borrowed_fd((**core).as_fd(), PollFlags::IN)),
            )
            .collect();
        let timeout = until.map(|at| {
            let left = at.saturating_duration_since(Instant::now());
            Timespec {
                tv_sec: left.as_secs() as i64,
                tv_nsec: left.subsec_nanos().into(),
            }
        });
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

fn of_stream(engine: &mut dyn Engine, id: StreamId, wanted: Readiness) -> Readiness {
    let Some(info) = engine.info(id) else {
        return wanted;
    };
    let ended = matches!(info.state, StreamState::Finished | StreamState::Reset);
    Readiness {
        readable: wanted.readable && (info.unread > 0 || info.peer_finished || ended),
        writable: wanted.writable && (ended || engine.is_writable(id)),
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
