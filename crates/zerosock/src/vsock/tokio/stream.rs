//! Streams and their listeners, awaited.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use ::tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use ::tokio::task::spawn_blocking;
use futures_core::Stream as FutureStream;
use zerosock_proto::{Address, Port};

use super::calls::{async_connection, async_listener, async_socket, awaited};
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
    pub(super) socket: Stream,
    watch: Watched,
}

async_connection!(AsyncStream, Stream, connect);

impl AsyncStream {
    awaited! { Stream:
        recv() -> Option<Lease<'_>>;
        loan(max: usize) -> Loan<'_>;
    }

    pub(super) fn poll_read(
        &self,
        cx: &Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let out = buf.initialize_unfilled();
        let watch = &self.watch;
        let got = ready!(watch.poll(&watch.reader, cx, || (&self.socket).read(out)))?;
        buf.advance(got);
        Poll::Ready(Ok(()))
    }

    pub(super) fn poll_write(&self, cx: &Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let watch = &self.watch;
        watch.poll(&watch.writer, cx, || (&self.socket).write(bytes))
    }

    pub(super) fn finish(&self) -> io::Result<()> {
        match self.socket.shutdown(Shutdown::Write) {
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
        Poll::Ready((&self.socket).flush())
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
    socket: Listener,
    watch: Watched,
}

async_listener!(AsyncListener, Listener, AsyncStream);

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
        self.poll_accept(cx)
    }
}
