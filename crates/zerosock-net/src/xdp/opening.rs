//! How the socket of a port comes and goes.
//!
//! Registering the guest's memory, binding and closing run on threads of their own. A queue has one socket
//! at a time, and a socket one memory:
//!
//! ```text
//!              registered soon                   bound
//! no socket ────────────────────▶ binding ────────────────▶ socket with the guest's memory
//!     │                              ▲
//!     │ not after 100 ms             │ registered, closed
//!     ▼             bound            │
//! binding ────────────────▶ socket with private memory
//! ```
//!
//! Without a guest's memory, or if that cannot be registered, the socket keeps private memory. Where the reason may
//! pass, such as a limit of locked memory, registering is tried again when the driver starts the queue, and after
//! 1, 2, 4 and more seconds, up to 64.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use zerosock_proto::Instant;
use zerosock_ring::Memory;
use zerosock_sys::xdp::{Closing, Registered, Task, Umem, XdpError, XdpInterface, XdpSocket};
use zerosock_virtio::deadline::earlier;

use super::sizes::{CHUNKS, SIZES};

/// How long the guest's memory may take before a socket without it is made.
const SOON: Duration = Duration::from_millis(100);
/// How long a queue that another socket has just left may be in use.
const BUSY: Duration = Duration::from_secs(1);
/// When a socket that could not be bound is tried again, and memory that could not be registered for the first time.
pub(super) const RETRY: Duration = Duration::from_secs(1);
/// The longest time between two attempts to register the same memory: each allocates it.
const MAX_RETRY: Duration = Duration::from_secs(64);

type Outcome<T> = Task<Result<T, XdpError>>;

/// What a port has to do with its socket.
pub(super) enum Step {
    /// Nothing now.
    None,
    /// Use this socket.
    Use(Box<XdpSocket>),
    /// Close the socket that it has: there is a better memory.
    Replace,
}

/// See the [module](self).
pub(super) struct Opening {
    /// The name in the log.
    name: String,
    interface: Arc<XdpInterface>,
    queue: u32,
    /// Watches all that an event can be expected of: it is readable then.
    events: OwnedFd,
    memory: Option<Arc<Memory>>,
    /// The memory could not be registered.
    refused: Option<Refused>,
    /// How long until the next attempt, if the next one fails.
    backoff: Duration,
    /// Why it could not be registered, as the log has it.
    reported_memory: String,
    /// The memory that is being registered.
    registering: Option<(Outcome<Registered>, Arc<Memory>)>,
    registered: Option<Box<Registered>>,
    binding: Option<Outcome<XdpSocket>>,
    /// What is bound has the guest's memory.
    binds_memory: bool,
    closing: Option<Closing>,
    /// When a socket without the guest's memory is made.
    small_at: Option<Instant>,
    retry_at: Option<Instant>,
    /// The port needed a socket at the last step.
    is_wanted: bool,
    /// Why there was no socket, as the log has it.
    reported: String,
}

/// Memory could not be registered.
#[derive(Clone, Copy, Debug)]
struct Refused {
    /// When it is tried again; `None`: no attempt can succeed.
    retry_at: Option<Instant>,
}

impl Opening {
    pub(super) fn new(
        name: String,
        interface: Arc<XdpInterface>,
        queue: u32,
    ) -> Result<Opening, io::Error> {
        Ok(Opening {
            name,
            interface,
            queue,
            events: epoll::create(CreateFlags::CLOEXEC)?,
            memory: None,
            refused: None,
            backoff: RETRY,
            reported_memory: String::new(),
            registering: None,
            registered: None,
            binding: None,
            binds_memory: false,
            closing: None,
            small_at: None,
            retry_at: None,
            is_wanted: false,
            reported: String::new(),
        })
    }

    pub(super) fn events(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }

    /// Has the descriptor of `events` report those of another one, too.
    pub(super) fn watch(&self, fd: impl AsFd, flags: EventFlags) {
        if let Err(error) = epoll::add(&self.events, fd, EventData::new_u64(0), flags) {
            tracing::warn!("{}: cannot watch a descriptor: {error}", self.name);
        }
    }

    /// The memory that sockets are to have.
    pub(super) fn set_memory(&mut self, memory: Option<&Arc<Memory>>) {
        self.memory = memory.cloned();
        self.refused = None;
        self.backoff = RETRY;
        self.reported_memory.clear();
        self.registered = None;
    }

    /// Has memory that could not be registered tried again at once, if that may succeed.
    pub(super) fn retry_memory(&mut self) {
        self.refused.take_if(|refused| refused.retry_at.is_some());
    }

    /// Has a socket that could not be bound tried again at once.
    pub(super) fn retry(&mut self) {
        self.retry_at = None;
    }

    /// Lets no socket be bound for a while.
    pub(super) fn pause(&mut self, now: Instant) {
        self.retry_at = Some(now + RETRY);
    }

    /// The last attempt has failed.
    pub(super) fn has_failed(&self) -> bool {
        self.retry_at.is_some()
    }

    pub(super) fn is_closing(&self) -> bool {
        self.closing.is_some()
    }

    pub(super) fn next_timeout(&self) -> Option<Instant> {
        let memory = self.refused.and_then(|refused| refused.retry_at);
        let memory = memory.filter(|_| self.is_wanted);
        earlier(earlier(self.small_at, self.retry_at), memory)
    }

    /// Whether a socket has the memory that it is to have in the end.
    pub(super) fn has_memory(&self, socket: &XdpSocket) -> bool {
        match (socket.umem().memory(), &self.memory) {
            (Some(has), Some(wanted)) => Arc::ptr_eq(has, wanted),
            _ => false,
        }
    }

    /// Closes a socket that was used.
    pub(super) fn close(&mut self, socket: XdpSocket) {
        // Not watched: it was bound and not used.
        let _ = epoll::delete(&self.events, &socket);
        let mut closing = socket.close();
        if !closing.is_done() {
            if let Some(descriptor) = closing.descriptor() {
                self.watch(descriptor, EventFlags::IN);
            }
            self.closing = Some(closing);
        }
    }

    /// Goes on. `wanted`: the port needs a socket; `current`: the one that it has.
    pub(super) fn step(&mut self, now: Instant, wanted: bool, current: Option<&XdpSocket>) -> Step {
        self.closing.take_if(Closing::is_done);
        if let Some((task, _)) = &mut self.registering
            && let Some(result) = task.take()
        {
            self.take_registered(result, now);
        }
        self.is_wanted = wanted;
        if let Some(result) = self.binding.as_mut().and_then(Task::take) {
            self.binding = None;
            match result {
                Ok(socket)
                    if wanted && (socket.umem().memory().is_none() || self.has_memory(&socket)) =>
                {
                    self.retry_at = None;
                    self.reported.clear();
                    self.watch(&socket, EventFlags::IN | EventFlags::OUT | EventFlags::ET);
                    return Step::Use(Box::new(socket));
                }
                Ok(socket) => self.close(socket),
                Err(error) => {
                    self.report("no socket", &error.to_string());
                    self.retry_at = Some(now + RETRY);
                }
            }
        }
        if !wanted {
            self.registered = None;
            (self.small_at, self.retry_at) = (None, None);
            return Step::None;
        }
        let is_complete = current.is_some_and(|socket| self.has_memory(socket))
            || (self.binding.is_some() && self.binds_memory);
        let is_due = |refused: &mut Refused| refused.retry_at.is_some_and(|at| now >= at);
        self.refused.take_if(is_due);
        if !is_complete && self.refused.is_none() && self.registered.is_none() {
            self.register(now);
        }
        if current.is_some() {
            return match self.registered {
                Some(_) => Step::Replace,
                None => Step::None,
            };
        }
        self.retry_at.take_if(|at| now >= *at);
        if self.closing.is_some() || self.binding.is_some() || self.retry_at.is_some() {
            return Step::None;
        }
        let small = self.memory.is_none() || self.refused.is_some();
        if let Some(registered) = self.registered.take() {
            self.bind(now, Some(registered));
        } else if small || now >= *self.small_at.get_or_insert(now + SOON) {
            self.bind(now, None);
        }
        Step::None
    }

    /// Begins to register the guest's memory.
    fn register(&mut self, now: Instant) {
        // An old memory that is being registered still is left to finish: each has a thread.
        let (Some(memory), None) = (&self.memory, &self.registering) else {
            return;
        };
        let (memory, kept) = (Arc::clone(memory), Arc::clone(memory));
        let create = move || Registered::create(Umem::map(Some(memory), CHUNKS)?, SIZES);
        match Task::start("xdp-memory", create) {
            Ok(task) => {
                self.watch(&task, EventFlags::IN);
                self.registering = Some((task, kept));
            }
            Err(error) => self.refuse(&error.to_string(), true, now),
        }
    }

    fn take_registered(&mut self, result: Result<Registered, XdpError>, now: Instant) {
        let of = self.registering.take().map(|(_, memory)| memory);
        let is_wanted = match (&of, &self.memory) {
            (Some(of), Some(wanted)) => Arc::ptr_eq(of, wanted),
            _ => false,
        };
        match result {
            _ if !is_wanted => {}
            Ok(registered) => self.registered = Some(Box::new(registered)),
            Err(error) => self.refuse(&error.to_string(), error.may_pass(), now),
        }
    }

    /// Leaves the memory alone, for a while or for good. Says so in the log once for each reason.
    fn refuse(&mut self, reason: &str, may_pass: bool, now: Instant) {
        let retry_at = may_pass.then(|| now + self.backoff);
        self.backoff = (2 * self.backoff).min(MAX_RETRY);
        self.refused = Some(Refused { retry_at });
        if self.reported_memory != reason {
            let again = match may_pass {
                true => ", until another attempt succeeds",
                false => "",
            };
            let name = &self.name;
            tracing::warn!(
                "{name}: the guest's memory cannot be used: frames are copied{again}: {reason}"
            );
            reason.clone_into(&mut self.reported_memory);
        }
    }

    /// Begins to bind what is registered, or a socket with private memory.
    fn bind(&mut self, now: Instant, registered: Option<Box<Registered>>) {
        self.small_at = None;
        self.binds_memory = registered.is_some();
        let (interface, queue) = (Arc::clone(&self.interface), self.queue);
        let bind = move || {
            let registered = match registered {
                Some(registered) => *registered,
                None => Registered::create(Umem::map(None, CHUNKS)?, SIZES)?,
            };
            registered.bind(&interface, queue, BUSY)
        };
        match Task::start("xdp-bind", bind) {
            Ok(task) => {
                self.watch(&task, EventFlags::IN);
                self.binding = Some(task);
            }
            Err(error) => {
                self.report("no socket", &error.to_string());
                self.retry_at = Some(now + RETRY);
            }
        }
    }

    /// Says it in the log, once.
    fn report(&mut self, what: &str, reason: &str) {
        let line = format!("{what}: {reason}");
        if self.reported != line {
            tracing::warn!("{}: {line}", self.name);
            self.reported = line;
        }
    }
}
