//! A listening endpoint of `nc`: bound once, accepts one connection or many.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::SocketFlags;
use zerosock::vsock::{Listener, SeqPacketListener};

use super::attached;
use super::connection::{Connection, Kind};
use super::deadline::Deadline;
use super::error::{EstablishError, failed};
use crate::endpoint::EndpointArg;
use crate::signals::{Signals, Wake};
use crate::sockets::{self, SocketFile};
use zerosock_relay::relay::KernelEndpoint;
use zerosock_sys::wait_ready;

/// A bound endpoint.
pub(super) struct Acceptor {
    source: ListeningSocket,
    /// The endpoint, for errors.
    place: String,
}

enum ListeningSocket {
    Kernel {
        listener: OwnedFd,
        kind: Kind,
        /// They end a wait, so that the socket file is removed.
        signals: Signals,
        /// Removed when this is dropped.
        _file: Option<SocketFile>,
    },
    Streams(Listener),
    Messages(SeqPacketListener),
}

impl Acceptor {
    /// Binds `endpoint`; `None` if it does not listen.
    pub(super) fn bind(
        endpoint: &EndpointArg,
        kind: Kind,
        backlog: i32,
        deadline: Deadline,
    ) -> Result<Option<Acceptor>, EstablishError> {
        let (source, place) = match endpoint {
            EndpointArg::Kernel(KernelEndpoint::VsockListen { port }) => {
                let place = format!("vsock port {port}");
                (vsock(*port, kind, backlog, &place)?, place)
            }
            EndpointArg::Kernel(KernelEndpoint::UnixListen(path)) => {
                let place = path.display().to_string();
                let signals = Signals::catch().map_err(failed_at(&place))?;
                let access = sockets::Access::default();
                let (listener, file) = sockets::bind_type(path, access, kind.socket_type())?;
                let source = ListeningSocket::Kernel {
                    listener,
                    kind,
                    signals,
                    _file: Some(file),
                };
                (source, place)
            }
            EndpointArg::Attached(end) if end.to.is_none() => {
                let (port, backlog) = (end.port, backlog as usize);
                let endpoint = attached::attach(end, &[port], deadline.left())?;
                let listener = match kind {
                    Kind::Bytes => endpoint.listen(port, backlog).map(ListeningSocket::Streams),
                    Kind::Messages => {
                        let listener = endpoint.listen_seqpacket(port, backlog);
                        listener.map(ListeningSocket::Messages)
                    }
                };
                let failed = failed(format!("listening on port {port}"));
                (listener.map_err(failed)?, format!("port {port}"))
            }
            _ => return Ok(None),
        };
        Ok(Some(Acceptor { source, place }))
    }

    /// Waits for a connection.
    pub(super) fn accept(&self, deadline: Deadline) -> Result<Connection, EstablishError> {
        let timed_out =
            || EstablishError::TimedOut(format!("waiting for a connection at {}", self.place));
        // Duration::MAX is no limit in practice.
        let left = deadline.left().unwrap_or(Duration::MAX);
        let accepted = match &self.source {
            ListeningSocket::Kernel {
                listener,
                kind,
                signals,
                ..
            } => match accept(signals, listener, deadline) {
                Ok(None) => return Err(timed_out()),
                Ok(Some(socket)) => Ok(kind.of(socket)),
                Err(error) => Err(error),
            },
            ListeningSocket::Streams(listener) => {
                let accepted = listener.accept_timeout(left);
                accepted.map(|(stream, _)| Connection::Stream(stream))
            }
            ListeningSocket::Messages(listener) => {
                let accepted = listener.accept_timeout(left);
                accepted.map(|(connection, _)| Connection::Messages(connection))
            }
        };
        accepted.map_err(|error| match error.kind() {
            io::ErrorKind::TimedOut => timed_out(),
            _ => failed_at(&self.place)(error),
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
    ) -> Result<(), EstablishError> {
        let waited = match &self.source {
            ListeningSocket::Kernel { signals, .. } => {
                wait_or_signal(signals, other, Deadline::after(limit)).map(drop)
            }
            // Signals have their default effect.
            ListeningSocket::Streams(_) | ListeningSocket::Messages(_) => {
                wait_ready(other, PollFlags::IN, limit).map(drop)
            }
        };
        waited.map_err(failed_at(&self.place))
    }

    /// Gives signals their default effect, or catches them again, so that they end a wait.
    pub(super) fn catch_signals(&self, caught: bool) {
        if let ListeningSocket::Kernel { signals, .. } = &self.source {
            signals.restore(!caught);
        }
    }
}

fn failed_at(place: &str) -> impl Fn(io::Error) -> EstablishError {
    failed(format!("listening at {place}"))
}

fn vsock(
    port: u32,
    kind: Kind,
    backlog: i32,
    place: &str,
) -> Result<ListeningSocket, EstablishError> {
    let any = zerosock_sys::vsock::CID_ANY;
    let listener = match kind {
        Kind::Bytes => zerosock_sys::vsock::listen(any, port, backlog),
        Kind::Messages => zerosock_sys::vsock::listen_seqpacket(any, port, backlog),
    };
    Ok(ListeningSocket::Kernel {
        listener: listener.map_err(failed_at(place))?,
        kind,
        signals: Signals::catch().map_err(failed_at(place))?,
        _file: None,
    })
}

/// `None` at the deadline.
fn accept(
    signals: &Signals,
    listener: &OwnedFd,
    deadline: Deadline,
) -> io::Result<Option<OwnedFd>> {
    while wait_or_signal(signals, listener, deadline)? {
        match rustix::net::accept_with(listener, SocketFlags::CLOEXEC) {
            Err(Errno::INTR | Errno::CONNABORTED | Errno::AGAIN) => {}
            accepted => return Ok(Some(accepted?)),
        }
    }
    Ok(None)
}

/// Waits until `other` is readable; false at the deadline. A signal is an error, `Interrupted`.
fn wait_or_signal(signals: &Signals, other: impl AsFd, deadline: Deadline) -> io::Result<bool> {
    loop {
        match signals.wait(other.as_fd(), deadline.left())? {
            Wake::Signal(_) => return Err(io::ErrorKind::Interrupted.into()),
            Wake::Other => return Ok(true),
            _ if deadline.is_over() => return Ok(false),
            Wake::TimeIsUp | Wake::Hangup | Wake::User | Wake::Upgrade => {}
        }
    }
}
