//! Sockets for tokio: [`AsyncRead`], [`AsyncWrite`], and leases that are awaited.
//!
//! Each endpoint that is used here has one task in the runtime that does for all its sockets what
//! a blocked call does otherwise: it waits for the endpoint's descriptor and the next time-out,
//! lets the engine work, and wakes the tasks whose sockets have news. It ends with the last async
//! socket of the endpoint.
//!
//! What must hold: a task that is told to wait was enlisted before the last look.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::Pin;
use std::sync::{Arc, PoisonError, Weak};
use std::task::{Context, Poll, ready};

use ::tokio::io::unix::AsyncFd;
use ::tokio::io::{AsyncRead, AsyncWrite, Interest as IoInterest, ReadBuf};
use ::tokio::task::JoinHandle;
use zerosock_proto::Address;

use super::core::{Core, Interest};
use super::endpoint::Endpoint;
use super::lease::Lease;
use super::listener::Listener;
use super::loan::Loan;
use super::stream::Stream;

/// The task of an endpoint.
#[derive(Debug)]
pub(crate) struct Reactor {
    task: JoinHandle<()>,
}

impl Reactor {
    /// The endpoint's task, started if it does not run.
    fn of(core: &Arc<Core>) -> io::Result<Arc<Reactor>> {
        let mut place = core
            .reactor()
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(running) = place.upgrade().filter(|it| !it.task.is_finished()) {
            return Ok(running);
        }
        let fd: OwnedFd = (**core).as_fd().try_clone_to_owned()?;
        #[allow(
            deprecated,
            reason = "the newer way is unsafe, to have promised what an OwnedFd does by itself: \
                      that it stays open and the same"
        )]
        let fd = AsyncFd::with_interest(fd, IoInterest::READABLE)?;
        let task = ::tokio::spawn(work(Arc::downgrade(core), fd));
        let reactor = Arc::new(Reactor { task });
        *place = Arc::downgrade(&reactor);
        Ok(reactor)
    }
}

impl Drop for Reactor {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn work(core: Weak<Core>, fd: AsyncFd<OwnedFd>) {
    loop {
        let due = {
            let Some(core) = core.upgrade() else { return };
            let mut locked = core.lock();
            if locked.turn().is_err() {
                // Everybody was told.
                return;
            }
            if locked.watch() {
                None
            } else {
                Some(locked.engine().next_timeout())
            }
        };
        let Some(due) = due else {
            ::tokio::task::yield_now().await;
            continue;
        };
        let readable = fd.readable();
        let ready = match due {
            Some(at) => ::tokio::time::timeout_at(at.into(), readable).await.ok(),
            None => Some(readable.await),
        };
        match ready {
            Some(Ok(mut guard)) => guard.clear_ready(),
            Some(Err(_)) => return,
            None => {}
        }
    }
}

/// A [`Stream`] in a tokio runtime.
///
/// ```no_run
/// use tokio::io::{AsyncReadExt, AsyncWriteExt};
/// use zerosock::vsock::Endpoint;
/// use zerosock::vsock::tokio::AsyncStream;
/// use zerosock::{Address, Cid, Port};
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let endpoint = Endpoint::attach("/run/zerosock/attach.sock")?;
/// let server = Address::new(Cid::HOST, Port::new(1024));
/// let mut stream = AsyncStream::connect(&endpoint, server).await?;
/// stream.write_all(b"hello").await?;
/// if let Some(lease) = stream.recv().await? {
///     println!("{} bytes", lease.len());
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct AsyncStream {
    stream: Stream,
    watch: Watched,
}

/// A socket's part in the task of its endpoint. When it goes, nobody is told of the socket any
/// more.
#[derive(Debug)]
struct Watched {
    core: Arc<Core>,
    interest: Interest,
    _reactor: Arc<Reactor>,
}

impl Watched {
    fn new(core: &Arc<Core>, interest: Interest) -> io::Result<Watched> {
        Ok(Watched {
            _reactor: Reactor::of(core)?,
            core: core.clone(),
            interest,
        })
    }

    /// Tries, is enlisted, and tries once more.
    fn poll<T>(
        &self,
        cx: &Context<'_>,
        mut attempt: impl FnMut() -> io::Result<T>,
    ) -> Poll<io::Result<T>> {
        match attempt() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            result => return Poll::Ready(result),
        }
        self.core.enlist_task(self.interest, cx.waker());
        match attempt() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Poll::Pending,
            result => Poll::Ready(result),
        }
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.core.forget_tasks(self.interest);
    }
}

impl AsyncStream {
    /// Takes a stream into the runtime of the caller.
    ///
    /// # Errors
    /// When the system has no descriptor left.
    ///
    /// # Panics
    /// Outside of a tokio runtime, as everything of tokio's does.
    pub fn new(stream: Stream) -> io::Result<AsyncStream> {
        stream.set_nonblocking(true)?;
        let watch = Watched::new(&stream.core, Interest::Conn(stream.id))?;
        Ok(AsyncStream { stream, watch })
    }

    /// Connects to `peer`.
    ///
    /// # Errors
    /// As [`Endpoint::connect`].
    pub async fn connect(endpoint: &Endpoint, peer: Address) -> io::Result<AsyncStream> {
        let stream = endpoint.begin_connect(peer)?;
        let stream = AsyncStream::new(stream)?;
        std::future::poll_fn(|cx| stream.watch.poll(cx, || stream.stream.outcome())).await?;
        Ok(stream)
    }

    /// The stream itself. Calls of it do not wait.
    pub fn get_ref(&self) -> &Stream {
        &self.stream
    }

    /// The stream, taken out of the runtime; it waits again.
    pub fn into_inner(self) -> Stream {
        // Never fails.
        let _ = self.stream.set_nonblocking(false);
        self.stream
    }

    /// As [`Stream::recv`].
    ///
    /// # Errors
    /// As [`Stream::recv`].
    pub async fn recv(&self) -> io::Result<Option<Lease<'_>>> {
        std::future::poll_fn(|cx| self.watch.poll(cx, || self.stream.recv())).await
    }

    /// As [`Stream::loan`].
    ///
    /// # Errors
    /// As [`Stream::loan`].
    pub async fn loan(&self, max: usize) -> io::Result<Loan<'_>> {
        std::future::poll_fn(|cx| self.watch.poll(cx, || self.stream.loan(max))).await
    }

    /// Two halves for two tasks.
    pub fn into_split(self) -> (ReadHalf, WriteHalf) {
        let stream = Arc::new(self);
        (ReadHalf(stream.clone()), WriteHalf(stream))
    }

    fn poll_read(&self, cx: &Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let out = buf.initialize_unfilled();
        let got = ready!(self.watch.poll(cx, || (&self.stream).read(out)))?;
        buf.advance(got);
        Poll::Ready(Ok(()))
    }

    fn poll_write(&self, cx: &Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.watch.poll(cx, || (&self.stream).write(bytes))
    }

    fn finish(&self) -> io::Result<()> {
        match self.stream.shutdown(Shutdown::Write) {
            // Over is over.
            Err(error) if error.kind() == io::ErrorKind::NotConnected => Ok(()),
            result => result,
        }
    }
}

impl AsyncRead for AsyncStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        AsyncStream::poll_read(&self, cx, buf)
    }
}

impl AsyncWrite for AsyncStream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        AsyncStream::poll_write(&self, cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    /// Sends end of file.
    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.finish())
    }
}

/// The half of an [`AsyncStream`] that reads.
#[derive(Debug)]
pub struct ReadHalf(Arc<AsyncStream>);

/// The half of an [`AsyncStream`] that writes. Dropping it sends end of file.
#[derive(Debug)]
pub struct WriteHalf(Arc<AsyncStream>);

impl ReadHalf {
    /// As [`AsyncStream::recv`].
    ///
    /// # Errors
    /// As [`Stream::recv`].
    pub async fn recv(&self) -> io::Result<Option<Lease<'_>>> {
        self.0.recv().await
    }
}

impl WriteHalf {
    /// As [`AsyncStream::loan`].
    ///
    /// # Errors
    /// As [`Stream::loan`].
    pub async fn loan(&self, max: usize) -> io::Result<Loan<'_>> {
        self.0.loan(max).await
    }
}

impl AsyncRead for ReadHalf {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.0.poll_read(cx, buf)
    }
}

impl AsyncWrite for WriteHalf {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.0.poll_write(cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.0.finish())
    }
}

impl Drop for WriteHalf {
    fn drop(&mut self) {
        // A connection that has ended needs no end of file.
        let _ = self.0.finish();
    }
}

/// A [`Listener`] in a tokio runtime.
#[derive(Debug)]
pub struct AsyncListener {
    listener: Listener,
    watch: Watched,
}

impl AsyncListener {
    /// Takes a listener into the runtime of the caller.
    ///
    /// # Errors
    /// When the system has no descriptor left.
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub fn new(listener: Listener) -> io::Result<AsyncListener> {
        listener.set_nonblocking(true)?;
        let interest = Interest::Port(listener.local_addr().port);
        let watch = Watched::new(&listener.core, interest)?;
        Ok(AsyncListener { listener, watch })
    }

    /// The oldest connection that waits, and who it is from.
    ///
    /// # Errors
    /// As [`Listener::accept`].
    pub async fn accept(&self) -> io::Result<(AsyncStream, Address)> {
        let (stream, peer) =
            std::future::poll_fn(|cx| self.watch.poll(cx, || self.listener.accept())).await?;
        Ok((AsyncStream::new(stream)?, peer))
    }
}
