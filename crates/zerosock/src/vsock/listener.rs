//! Listeners for stream connections.

use std::fmt;
use std::io;
use std::iter::FusedIterator;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use zerosock_proto::Address;

use super::blocking::{CallWaits, waiting_calls};
use super::connection::Connected;
use super::hub::{Core, DeferredClose, Interest, WaitBudget};
use super::options::Options;
use super::stream::Stream;
use super::waiting::Wait;
use zerosock_virtio::deadline::deadline_in;

/// A listening socket. Dropping it stops listening and resets connections that were not accepted.
///
/// ```
/// # let (db, web) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/two.rs"));
/// use std::io::{Read, Write};
/// use std::net::Shutdown;
/// use zerosock::{Address, Port};
///
/// let there = Address::new(db.cid(), Port::new(1024));
/// let listener = db.listen(Port::new(1024), 16)?;
/// let client = std::thread::spawn(move || -> std::io::Result<String> {
///     let mut stream = web.connect(there)?;
///     stream.write_all(b"louder")?;
///     stream.shutdown(Shutdown::Write)?;
///     let mut answer = String::new();
///     stream.read_to_string(&mut answer)?;
///     Ok(answer)
/// });
/// for stream in listener.incoming().take(1) {
///     let mut stream = stream?;
///     let mut question = String::new();
///     stream.read_to_string(&mut question)?;
///     stream.write_all(question.to_uppercase().as_bytes())?;
/// }
/// assert_eq!(client.join().unwrap()?, "LOUDER");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// A forked child must neither use nor drop its copy: see [forks](crate::vsock#forks).
pub struct Listener {
    pub(super) core: Arc<Core>,
    pub(super) local: Address,
    pub(super) waits: CallWaits,
    options: Mutex<Options>,
}

/// Makes the calls that listeners of all types of connections have.
macro_rules! listener_calls {
    ($listener:ident, $socket:ident) => {
        impl $listener {
            /// The local address.
            pub fn local_addr(&self) -> Address {
                self.port().local
            }

            /// Accepts the oldest pending connection; returns it and the address of its peer.
            ///
            /// # Errors
            /// `WouldBlock` if the listener is non-blocking; `ConnectionAborted` when the endpoint
            /// has failed.
            pub fn accept(&self) -> io::Result<($socket, Address)> {
                self.port().accept_until(None)
            }

            /// As [`accept`](Self::accept), for at most `timeout`.
            ///
            /// # Errors
            /// `TimedOut` as well.
            pub fn accept_timeout(&self, timeout: Duration) -> io::Result<($socket, Address)> {
                self.port().accept_until(deadline_in(timeout))
            }
        }
    };
}
pub(super) use listener_calls;

listener_calls!(Listener, Stream);
waiting_calls!(Listener);

impl Listener {
    pub(super) fn new(core: Arc<Core>, local: Address, wait: Wait) -> Listener {
        Listener {
            options: Mutex::new(Options::new(core.window())),
            core,
            local,
            waits: CallWaits::new(wait),
        }
    }

    /// The listener behind a listener of any type of connection: itself.
    pub(super) fn port(&self) -> &Listener {
        self
    }

    /// Sets the receive buffer of later connections, in bytes; see [`Stream::set_buffer_size`].
    /// Other options are set on the [`Socket`](super::Socket) before it listens.
    ///
    /// # Errors
    /// With an [`OptionError`](super::OptionError) inside: `InvalidInput` for 0.
    pub fn set_buffer_size(&self, bytes: u32) -> io::Result<()> {
        let bytes = self.options().set_buffer(bytes)?;
        let mut locked = self.core.lock();
        locked.backend().set_accept_buffer(self.local.port, bytes);
        Ok(())
    }

    /// The receive buffer of later connections, in bytes.
    pub fn buffer_size(&self) -> u32 {
        self.options().buffer.unwrap_or(self.core.window())
    }

    /// Takes the options of the socket that it was made of.
    pub(super) fn apply_options(&self, options: Options) {
        *self.options() = options;
    }

    /// The options of accepted sockets.
    pub(super) fn options(&self) -> MutexGuard<'_, Options> {
        // Each update leaves the value consistent, even where a panic has poisoned the lock.
        self.options.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// As `accept`, for any type of socket.
    pub(super) fn accept_until<S: Connected>(
        &self,
        deadline: Option<Instant>,
    ) -> io::Result<(S, Address)> {
        let wait = self.waits.wait();
        let budget = WaitBudget {
            mode: self.waits.blocking.mode(wait),
            deadline,
        };
        let port = self.local.port;
        let (id, info) = self.core.wait(
            Interest::Port(port),
            || budget,
            |backend| {
                let id = backend.accept(port)?;
                let info = backend.info(id)?;
                backend.flush();
                Some((id, info))
            },
        )?;
        let mut socket = S::new(self.core.clone(), id, &info, wait);
        socket.apply_options(*self.options(), None);
        Ok((socket, info.peer))
    }

    /// An iterator over connections: each step is an [`accept`](Self::accept); it never ends. So is
    /// `&listener` in a loop.
    ///
    /// ```
    /// # let (db, web) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/two.rs"));
    /// use zerosock::{Address, Port};
    ///
    /// let listener = db.listen(Port::new(1), 1)?;
    /// let theirs = web.begin_connect(Address::new(db.cid(), Port::new(1)))?;
    /// for stream in &listener {
    ///     assert_eq!(stream?.peer_addr(), theirs.local_addr());
    ///     break;
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn incoming(&self) -> impl FusedIterator<Item = io::Result<Stream>> + fmt::Debug + '_ {
        Incoming { listener: self }
    }
}

/// See [`Listener::incoming`].
#[derive(Debug)]
pub struct Incoming<'a> {
    listener: &'a Listener,
}

impl Iterator for Incoming<'_> {
    type Item = io::Result<Stream>;

    fn next(&mut self) -> Option<io::Result<Stream>> {
        Some(self.listener.accept().map(|(stream, _)| stream))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (usize::MAX, None)
    }
}

impl FusedIterator for Incoming<'_> {}

impl<'a> IntoIterator for &'a Listener {
    type Item = io::Result<Stream>;
    type IntoIter = Incoming<'a>;

    fn into_iter(self) -> Incoming<'a> {
        Incoming { listener: self }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.core
            .close_deferred(DeferredClose::Listener(self.local.port));
    }
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listener")
            .field("local", &self.local)
            .finish_non_exhaustive()
    }
}
