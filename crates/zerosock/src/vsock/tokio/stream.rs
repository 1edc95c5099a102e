//! Streams and their listeners, awaited.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use ::tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use ::tokio::task::spawn_blocking;
use futures_core::Stream as FutureStream;
use zerosock_proto::{Address, Port};

use super::reactor::Watched;
use crate::vsock::endpoint_ref::EndpointRef;
use crate::vsock::hub::Interest;
use crate::vsock::lease::Lease;
use crate::vsock::listener::Listener;
use crate::vsock::loan::Loan;
use crate::vsock::stream::Stream;

/// A [`Stream`] in a tokio runtime.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (db, web) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/two.rs"));
/// use tokio::io::{AsyncReadExt, AsyncWriteExt};
/// use zerosock::vsock::tokio::{AsyncListener, AsyncStream};
/// use zerosock::{Address, Port};
///
/// let listener = AsyncListener::new(db.listen(Port::new(1), 16)?)?;
/// let there = Address::new(db.cid(), Port::new(1));
/// let (accepted, connected) = tokio::join!(listener.accept(), AsyncStream::connect(&web, there));
/// let ((mut ours, _peer), mut theirs) = (accepted?, connected?);
///
/// theirs.write_all(b"copied").await?;
/// let mut copied = [0; 6];
/// ours.read_exact(&mut copied).await?;
///
/// theirs.write_all(b"where it was written").await?;
/// let lease = ours.recv().await?.expect("a packet");
/// assert_eq!(lease.to_vec(), b"where it was written");
/// # Ok(())
/// # }
/// ```
///
/// A forked child must neither use nor drop its copy: see [forks](crate::vsock#forks).
#[derive(Debug)]
pub struct AsyncStream {
    pub(super) stream: Stream,
    watch: Watched,
}

impl AsyncStream {
    /// Takes a stream into the runtime of the caller.
    ///
    /// # Errors
    /// When the system has no descriptor left.
    ///
    /// # Panics
    /// Outside of a tokio runtime, as everything of tokio's does, or in one without its I/O driver
    /// (`enable_io`). Its time driver is not needed.
    pub fn new(stream: Stream) -> io::Result<AsyncStream> {
        let watch = Watched::new(&stream.conn.core, Interest::Conn(stream.conn.id))?;
        stream.conn.blocking.set_async();
        Ok(AsyncStream { stream, watch })
    }

    /// Connects to `peer`. Dropping the future cancels the connect.
    ///
    /// # Errors
    /// As [`Endpoint::connect`](crate::vsock::Endpoint::connect).
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub async fn connect(
        from: impl Into<EndpointRef<'_>>,
        peer: Address,
    ) -> io::Result<AsyncStream> {
        let stream = AsyncStream::new(from.into().begin_connect(peer)?)?;
        stream.watch.when(|| stream.stream.wait_connected()).await?;
        Ok(stream)
    }

    /// Connects to `port` of the attached process called `name`.
    ///
    /// # Errors
    /// `NotFound` when no attached process has the name, `InvalidInput` for an invalid name; else
    /// as [`connect`](Self::connect).
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub async fn connect_name(
        from: impl Into<EndpointRef<'_>>,
        name: &str,
        port: Port,
    ) -> io::Result<AsyncStream> {
        let from = from.into();
        let resolver = from.resolver(name);
        let cid = spawn_blocking(resolver).await.map_err(io::Error::other)??;
        AsyncStream::connect(from, Address::new(cid, port)).await
    }

    /// The local address.
    pub fn local_addr(&self) -> Address {
        self.stream.local_addr()
    }

    /// The peer's address.
    pub fn peer_addr(&self) -> Address {
        self.stream.peer_addr()
    }

    /// The stream itself. Its calls do not block.
    pub fn get_ref(&self) -> &Stream {
        &self.stream
    }

    /// The stream, taken out of the runtime; its calls block again.
    pub fn into_inner(self) -> Stream {
        // Cannot fail.
        let _ = self.stream.set_nonblocking(false);
        self.stream
    }

    /// As [`Stream::recv`].
    ///
    /// # Errors
    /// As [`Stream::recv`].
    pub async fn recv(&self) -> io::Result<Option<Lease<'_>>> {
        self.watch.when(|| self.stream.recv()).await
    }

    /// As [`Stream::loan`].
    ///
    /// # Errors
    /// As [`Stream::loan`].
    pub async fn loan(&self, max: usize) -> io::Result<Loan<'_>> {
        self.watch.when(|| self.stream.loan(max)).await
    }

    pub(super) fn poll_read(
        &self,
        cx: &Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let out = buf.initialize_unfilled();
        let watch = &self.watch;
        let got = ready!(watch.poll(&watch.reader, cx, || (&self.stream).read(out)))?;
        buf.advance(got);
        Poll::Ready(Ok(()))
    }

    pub(super) fn poll_write(&self, cx: &Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let watch = &self.watch;
        watch.poll(&watch.writer, cx, || (&self.stream).write(bytes))
    }

    pub(super) fn finish(&self) -> io::Result<()> {
        match self.stream.shutdown(Shutdown::Write) {
            // The connection has ended already.
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

    /// As for [`Stream`]: it never blocks.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready((&self.stream).flush())
    }

    /// Sends end of file.
    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.finish())
    }
}

/// A [`Listener`] in a tokio runtime.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (db, web) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/two.rs"));
/// use zerosock::vsock::tokio::{AsyncListener, AsyncStream};
/// use zerosock::{Address, Port};
///
/// let listener = AsyncListener::new(db.listen(Port::new(1), 16)?)?;
/// let there = listener.local_addr();
/// let client = tokio::spawn(async move { AsyncStream::connect(&web, there).await });
/// let (_stream, peer) = listener.accept().await?;
/// assert_eq!(peer, client.await??.local_addr());
/// # Ok(())
/// # }
/// ```
///
/// A forked child must neither use nor drop its copy: see [forks](crate::vsock#forks).
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
        let interest = Interest::Port(listener.local_addr().port);
        let watch = Watched::new(&listener.core, interest)?;
        listener.blocking.set_async();
        Ok(AsyncListener { listener, watch })
    }

    /// The address that is listened on.
    pub fn local_addr(&self) -> Address {
        self.listener.local_addr()
    }

    /// Accepts the oldest pending connection; returns it and the address of its peer.
    ///
    /// # Errors
    /// As [`Listener::accept`].
    pub async fn accept(&self) -> io::Result<(AsyncStream, Address)> {
        let (stream, peer) = self.watch.when(|| self.listener.accept()).await?;
        Ok((AsyncStream::new(stream)?, peer))
    }
}

/// The connections in order; it never ends.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (db, web) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/two.rs"));
/// use futures_util::StreamExt;
/// use zerosock::vsock::tokio::{AsyncListener, AsyncStream};
/// use zerosock::Port;
///
/// let mut listener = AsyncListener::new(db.listen(Port::new(1), 16)?)?;
/// let there = listener.local_addr();
/// let client = tokio::spawn(async move { AsyncStream::connect(&web, there).await });
/// let stream = listener.next().await.expect("it never ends")?;
/// assert_eq!(stream.peer_addr(), client.await??.local_addr());
/// # Ok(())
/// # }
/// ```
impl FutureStream for AsyncListener {
    type Item = io::Result<AsyncStream>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let watch = &self.watch;
        let accepted = ready!(watch.poll(&watch.reader, cx, || self.listener.accept()));
        Poll::Ready(Some(
            accepted.and_then(|(stream, _)| AsyncStream::new(stream)),
        ))
    }
}
