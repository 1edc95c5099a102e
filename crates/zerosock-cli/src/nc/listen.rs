//! A listening endpoint of `nc`: bound once, accepts one connection or many.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::SocketFlags;
use signal_hook::consts::{SIGINT, SIGTERM};
use zerosock::vsock::{Listener, SeqPacketListener};

use super::attached;
use super::connection::{Connection, Kind};
use super::deadline::{Deadline, timespec, wait_for};
use super::error::ConnectError;
use crate::endpoint::Endpoint;
use crate::sockets::{self, SocketFile};
use zerosock_relay::relay::Endpoint as Kernel;

/// A bound endpoint.
pub(super) struct Acceptor {
    source: Source,
    /// The endpoint, for errors.
    place: String,
}

enum Source {
    Kernel {
        listener: OwnedFd,
        kind: Kind,
        signals: SignalGuard,
        /// Removed when this is dropped.
        _file: Option<SocketFile>,
    },
    Streams(Listener),
    Messages(SeqPacketListener),
}

impl Acceptor {
    /// Binds `endpoint`; `None` if it does not listen.
    pub(super) fn bind(
        endpoint: &Endpoint,
        kind: Kind,
        backlog: i32,
        deadline: Deadline,
    ) -> Result<Option<Acceptor>, ConnectError> {
        let (source, place) = match endpoint {
            Endpoint::Kernel(Kernel::VsockListen { port }) => {
                let place = format!("vsock port {port}");
                (vsock(*port, kind, backlog, &place)?, place)
            }
            Endpoint::Kernel(Kernel::UnixListen(path)) => {
                let place = path.display().to_string();
                let signals = SignalGuard::catch().map_err(failed(&place))?;
                let access = sockets::Access::default();
                let (listener, file) = sockets::bind_type(path, access, kind.socket_type())?;
                let source = Source::Kernel {
                    listener,
                    kind,
                    signals,
                    _file: Some(file),
                };
                (source, place)
            }
            Endpoint::Attached(end) if end.to.is_none() => {
                let (port, backlog) = (end.port, backlog as usize);
                let endpoint = attached::attach(end, &[port], deadline.left())?;
                let listener = match kind {
                    Kind::Bytes => endpoint.listen(port, backlog).map(Source::Streams),
                    Kind::Messages => {
                        let listener = endpoint.listen_seqpacket(port, backlog);
                        listener.map(Source::Messages)
                    }
                };
                let failed = attached::failed(format!("listening on port {port}"));
                (listener.map_err(failed)?, format!("port {port}"))
            }
            _ => return Ok(None),
        };
        Ok(Some(Acceptor { source, place }))
    }

    /// Waits for a connection.
    pub(super) fn accept(&self, deadline: Deadline) -> Result<Connection, ConnectError> {
        let timed_out =
            || ConnectError::TimedOut(format!("waiting for a connection at {}", self.place));
        // Duration::MAX is no limit in practice.
        let left = deadline.left().unwrap_or(Duration::MAX);
        let accepted = match &self.source {
            Source::Kernel {
                listener,
                kind,
                signals,
                ..
            } => match signals.accept(listener, deadline) {
                Ok(None) => return Err(timed_out()),
                Ok(Some(socket)) => Ok(kind.of(socket)),
                Err(error) => Err(error),
            },
            Source::Streams(listener) => {
                let accepted = listener.accept_timeout(left);
                accepted.map(|(stream, _)| Connection::Stream(stream))
            }
            Source::Messages(listener) => {
                let accepted = listener.accept_timeout(left);
                accepted.map(|(connection, _)| Connection::Messages(connection))
            }
        };
        accepted.map_err(|error| match error.kind() {
            io::ErrorKind::TimedOut => timed_out(),
            _ => failed(&self.place)(error),
        })
    }

    /// Waits until `other` is readable, at most for `limit`.
    ///
    /// # Errors
    /// As [`accept`](Self::accept): a signal that is caught.
    pub(super) fn wait_for(
        &self,
        other: &UnixStream,
        limit: Option<Duration>,
    ) -> Result<(), ConnectError> {
        let deadline = Deadline::after(limit);
        let waited = match &self.source {
            Source::Kernel { signals, .. } => signals.wait_for(other, deadline).map(drop),
            // Signals have their default effect.
            Source::Streams(_) | Source::Messages(_) => {
                wait_for(other, PollFlags::IN, deadline).map(drop)
            }
        };
        waited.map_err(failed(&self.place))
    }

    /// Gives signals their default effect, or catches them again, so that they end a wait.
    pub(super) fn catch_signals(&self, caught: bool) {
        if let Source::Kernel { signals, .. } = &self.source {
            signals.restored.store(!caught, Ordering::SeqCst);
        }
    }
}

fn failed(place: &str) -> impl Fn(io::Error) -> ConnectError {
    move |source| ConnectError::System {
        operation: format!("listening at {place}"),
        source,
    }
}

fn vsock(port: u32, kind: Kind, backlog: i32, place: &str) -> Result<Source, ConnectError> {
    let any = zerosock_sys::vsock::CID_ANY;
    let listener = match kind {
        Kind::Bytes => zerosock_sys::vsock::listen(any, port, backlog),
        Kind::Messages => zerosock_sys::vsock::listen_seqpacket(any, port, backlog),
    };
    Ok(Source::Kernel {
        listener: listener.map_err(failed(place))?,
        kind,
        signals: SignalGuard::catch().map_err(failed(place))?,
        _file: None,
    })
}

/// Catches SIGINT and SIGTERM, so that they end a wait and a socket file is removed.
struct SignalGuard {
    /// Set while the signals have their default effect.
    restored: Arc<AtomicBool>,
    /// Readable when SIGTERM, or SIGINT, has arrived.
    signals: [UnixStream; 2],
}

impl SignalGuard {
    fn catch() -> io::Result<SignalGuard> {
        let restored = Arc::new(AtomicBool::new(false));
        let watch = |signal| {
            let (ours, handlers) = UnixStream::pair()?;
            signal_hook::flag::register_conditional_default(signal, restored.clone())?;
            signal_hook::low_level::pipe::register(signal, handlers)?;
            io::Result::Ok(ours)
        };
        Ok(SignalGuard {
            restored: restored.clone(),
            signals: [watch(SIGTERM)?, watch(SIGINT)?],
        })
    }

    /// `None` at the deadline.
    fn accept(&self, listener: &OwnedFd, deadline: Deadline) -> io::Result<Option<OwnedFd>> {
        while self.wait_for(listener, deadline)? {
            match rustix::net::accept_with(listener, SocketFlags::CLOEXEC) {
                Err(Errno::INTR | Errno::CONNABORTED | Errno::AGAIN) => {}
                accepted => return Ok(Some(accepted?)),
            }
        }
        Ok(None)
    }

    /// Waits until `other` is readable; false at the deadline. A signal is an error, `Interrupted`.
    fn wait_for(&self, other: impl AsFd, deadline: Deadline) -> io::Result<bool> {
        loop {
            let [terminate, interrupt] = &self.signals;
            let mut watched = [
                PollFd::new(&other, PollFlags::IN),
                PollFd::new(terminate, PollFlags::IN),
                PollFd::new(interrupt, PollFlags::IN),
            ];
            match rustix::event::poll(&mut watched, timespec(deadline.left()).as_ref()) {
                Ok(0) => return Ok(false),
                Err(Errno::INTR) => continue,
                Ok(_) => {}
                Err(errno) => return Err(errno.into()),
            }
            let [is_readable, signals @ ..] = watched.map(|fd| !fd.revents().is_empty());
            if signals.contains(&true) {
                return Err(io::ErrorKind::Interrupted.into());
            }
            if is_readable {
                return Ok(true);
            }
        }
    }
}
