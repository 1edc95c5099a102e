//! Connections that come in.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use zerosock_proto::Address;

use super::core::{Core, Ending, Interest, Patience};
use super::stream::{Blocking, Stream, decode, encode};
use super::waiting::Wait;

/// A port that is listened on. Dropping it ends that, and resets connections that wait to be
/// accepted.
///
/// ```no_run
/// use std::io::{Read, Write};
/// use zerosock::Port;
/// use zerosock::vsock::Endpoint;
///
/// let endpoint = Endpoint::attach("/run/zerosock/attach.sock")?;
/// let listener = endpoint.listen(Port::new(1024), 16)?;
/// for stream in listener.incoming() {
///     let mut stream = stream?;
///     let mut question = String::new();
///     stream.read_to_string(&mut question)?;
///     stream.write_all(question.to_uppercase().as_bytes())?;
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Listener {
    pub(super) core: Arc<Core>,
    local: Address,
    pub(super) blocking: Blocking,
    wait: AtomicU64,
}

impl Listener {
    pub(super) fn new(core: Arc<Core>, local: Address, wait: Wait) -> Listener {
        Listener {
            core,
            local,
            blocking: Blocking::new(),
            wait: AtomicU64::new(encode(wait)),
        }
    }

    /// The address that is listened on.
    pub fn local_addr(&self) -> Address {
        self.local
    }

    /// [`accept`](Self::accept) answers `WouldBlock` instead of waiting; see
    /// [`Stream::set_nonblocking`].
    ///
    /// # Errors
    /// None; as in `std::net`, the result is there for the future.
    pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        self.blocking.set_nonblocking(nonblocking);
        Ok(())
    }

    /// How [`accept`](Self::accept) waits, and streams that it gives, until they are told
    /// otherwise. At first as the endpoint was told.
    pub fn set_wait(&self, wait: Wait) {
        self.wait.store(encode(wait), Ordering::Relaxed);
    }

    /// The oldest connection that waits, and who it is from.
    ///
    /// # Errors
    /// `WouldBlock`, if the listener does not wait; `ConnectionAborted` when the endpoint is over.
    pub fn accept(&self) -> io::Result<(Stream, Address)> {
        self.accept_until(None)
    }

    /// As [`accept`](Self::accept), for at most `timeout`.
    ///
    /// # Errors
    /// `TimedOut` as well.
    pub fn accept_timeout(&self, timeout: Duration) -> io::Result<(Stream, Address)> {
        self.accept_until(Some(Instant::now() + timeout))
    }

    fn accept_until(&self, deadline: Option<Instant>) -> io::Result<(Stream, Address)> {
        let wait = decode(self.wait.load(Ordering::Relaxed));
        let patience = Patience {
            manner: self.blocking.manner(wait),
            deadline,
        };
        let port = self.local.port;
        let (id, info) = self.core.wait(Interest::Port(port), patience, |engine| {
            let id = engine.accept(port)?;
            let info = engine.info(id)?;
            engine.flush();
            Some((id, info))
        })?;
        let stream = Stream::new(self.core.clone(), id, &info, wait);
        Ok((stream, info.peer))
    }

    /// Connections, as they come; never `None`.
    pub fn incoming(&self) -> impl Iterator<Item = io::Result<Stream>> + '_ {
        std::iter::repeat_with(|| self.accept().map(|(stream, _)| stream))
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.core.end(Ending::Listener(self.local.port));
    }
}

impl AsFd for Listener {
    /// The endpoint's descriptor; see [`Stream::set_nonblocking`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        (*self.core).as_fd()
    }
}

impl AsRawFd for Listener {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listener")
            .field("local", &self.local)
            .finish_non_exhaustive()
    }
}
