//! Streams in two halves, owned by two tasks.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use ::tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use zerosock_proto::Address;

use super::stream::AsyncStream;
#[cfg(doc)]
use crate::vsock::Stream;
use crate::vsock::lease::Lease;
use crate::vsock::loan::Loan;

impl AsyncStream {
    /// Two halves for two tasks.
    pub fn into_split(self) -> (OwnedReadHalf, OwnedWriteHalf) {
        let stream = Arc::new(self);
        let write = OwnedWriteHalf {
            stream: stream.clone(),
            ends: true,
        };
        (OwnedReadHalf(stream), write)
    }
}

/// The half of an [`AsyncStream`] that reads.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (db, web) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/two.rs"));
/// use tokio::io::{AsyncReadExt, AsyncWriteExt};
/// # use zerosock::vsock::tokio::{AsyncListener, AsyncStream};
/// # use zerosock::{Address, Port};
/// # let listener = AsyncListener::new(db.listen(Port::new(1), 16)?)?;
/// # let there = listener.local_addr();
/// # let (accepted, connected) = tokio::join!(listener.accept(), AsyncStream::connect(&web, there));
/// # let ((mut ours, _peer), mut theirs) = (accepted?, connected?);
/// let (mut reads, mut writes) = theirs.into_split();
/// let reader = tokio::spawn(async move {
///     let mut all = String::new();
///     reads.read_to_string(&mut all).await.map(|_| all)
/// });
/// writes.write_all(b"ping").await?;
/// drop(writes);
/// // It has sent end of file.
/// let mut asked = String::new();
/// ours.read_to_string(&mut asked).await?;
/// ours.write_all(asked.to_uppercase().as_bytes()).await?;
/// ours.shutdown().await?;
/// assert_eq!(reader.await??, "PING");
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct OwnedReadHalf(pub(super) Arc<AsyncStream>);

/// The half of an [`AsyncStream`] that writes. Dropping it sends end of file: see the example of
/// [`OwnedReadHalf`].
#[derive(Debug)]
pub struct OwnedWriteHalf {
    pub(super) stream: Arc<AsyncStream>,
    /// Dropping it sends end of file.
    pub(super) ends: bool,
}

/// The halves are not of one stream. The error returns both.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (db, web) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/two.rs"));
/// use tokio::io::{AsyncReadExt, AsyncWriteExt};
/// # use zerosock::vsock::tokio::{AsyncListener, AsyncStream};
/// # use zerosock::{Address, Port};
/// # let listener = AsyncListener::new(db.listen(Port::new(1), 16)?)?;
/// # let there = listener.local_addr();
/// # let (accepted, connected) = tokio::join!(listener.accept(), AsyncStream::connect(&web, there));
/// # let ((mut ours, _peer), mut theirs) = (accepted?, connected?);
/// let (reads, writes) = theirs.into_split();
/// let (others, _) = ours.into_split();
/// let error = others.reunite(writes).unwrap_err();
/// // Both are there still.
/// let theirs = reads.reunite(error.1)?;
/// assert_eq!(theirs.peer_addr(), there);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, thiserror::Error)]
#[error("the halves are not of the same stream")]
pub struct ReuniteError(pub OwnedReadHalf, pub OwnedWriteHalf);

impl OwnedReadHalf {
    fn stream(&self) -> &AsyncStream {
        &self.0
    }

    /// The stream that was split. Nothing is sent.
    ///
    /// # Errors
    /// When `other` is the half of another stream.
    pub fn reunite(self, mut other: OwnedWriteHalf) -> Result<AsyncStream, ReuniteError> {
        if !Arc::ptr_eq(&self.0, &other.stream) {
            return Err(ReuniteError(self, other));
        }
        other.ends = false;
        drop(other);
        // A stream has two halves, and the other one was dropped above.
        Arc::try_unwrap(self.0).map_err(|_| unreachable!("a stream has exactly two halves"))
    }
}

impl OwnedWriteHalf {
    fn stream(&self) -> &AsyncStream {
        &self.stream
    }
}

impl Drop for OwnedWriteHalf {
    fn drop(&mut self) {
        if self.ends {
            // A connection that has ended needs no end of file.
            let _ = self.stream.finish();
        }
    }
}

/// What a half that reads has, and one that writes.
macro_rules! half {
    (reads $half:ty) => {
        impl $half {
            half!(addresses);

            /// As [`AsyncStream::recv`].
            ///
            /// # Errors
            /// As [`Stream::recv`].
            pub async fn recv(&self) -> io::Result<Option<Lease<'_>>> {
                self.stream().recv().await
            }
        }

        impl AsyncRead for $half {
            fn poll_read(
                self: Pin<&mut Self>,
                cx: &mut Context<'_>,
                buf: &mut ReadBuf<'_>,
            ) -> Poll<io::Result<()>> {
                self.stream().poll_read(cx, buf)
            }
        }
    };
    (writes $half:ty) => {
        impl $half {
            half!(addresses);

            /// As [`AsyncStream::loan`].
            ///
            /// # Errors
            /// As [`Stream::loan`].
            pub async fn loan(&self, max: usize) -> io::Result<Loan<'_>> {
                self.stream().loan(max).await
            }
        }

        impl AsyncWrite for $half {
            fn poll_write(
                self: Pin<&mut Self>,
                cx: &mut Context<'_>,
                bytes: &[u8],
            ) -> Poll<io::Result<usize>> {
                self.stream().poll_write(cx, bytes)
            }

            /// As for [`Stream`](crate::vsock::Stream): it never blocks.
            fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
                Poll::Ready(io::Write::flush(&mut &self.stream().socket))
            }

            /// Sends end of file.
            fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
                Poll::Ready(self.stream().finish())
            }
        }
    };
    (addresses) => {
        /// The local address.
        pub fn local_addr(&self) -> Address {
            self.stream().local_addr()
        }

        /// The peer's address.
        pub fn peer_addr(&self) -> Address {
            self.stream().peer_addr()
        }
    };
}

half!(reads OwnedReadHalf);
half!(writes OwnedWriteHalf);
