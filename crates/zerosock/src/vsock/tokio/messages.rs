//! Connections that carry messages, awaited.
//!
//! # Invariants
//! - A cancelled send has sent nothing or the whole message.
//! - A call that has begun a message waits until all of it is sent, because the reactor ends with
//!   the endpoint's last socket.

use std::io::{self, IoSlice};
use std::ops::{Deref, DerefMut};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use ::tokio::task::spawn_blocking;
use futures_core::Stream as FutureStream;
use zerosock_proto::{Address, Port};

use super::calls::{async_connection, async_listener, async_socket, awaited};
use super::reactor::Watched;
use crate::vsock::endpoint_ref::EndpointRef;
use crate::vsock::hub::Interest;
use crate::vsock::seqpacket::{MessageLeases, MessageLoan, Received, SeqPacket, SeqPacketListener};

/// A [`SeqPacket`] in a tokio runtime.
///
/// Its calls take `&self`, so several tasks may share one in an `Arc`. Dropping the future of a
/// call cancels it: a cancelled receive takes no message, a cancelled send sends nothing of its
/// message.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (db, web) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/two.rs"));
/// use std::io::Write;
/// use zerosock::vsock::tokio::{AsyncSeqPacket, AsyncSeqPacketListener};
/// use zerosock::{Address, Port};
///
/// let listener = AsyncSeqPacketListener::new(db.listen_seqpacket(Port::new(1), 16)?)?;
/// let there = Address::new(db.cid(), Port::new(1));
/// let connecting = AsyncSeqPacket::connect(&web, there);
/// let (accepted, connected) = tokio::join!(listener.accept(), connecting);
/// let ((ours, _peer), theirs) = (accepted?, connected?);
///
/// theirs.send(b"copied").await?;
/// let mut out = [0; 16];
/// assert_eq!(ours.recv(&mut out).await?.expect("a message").len, 6);
///
/// let mut loan = theirs.loan(100_000).await?;
/// loan.write_all(b"written where it will be read")?;
/// loan.send_eor().await?;
/// let message = ours.recv_leases().await?.expect("a message");
/// assert!(message.end_of_record());
/// assert_eq!(message.to_vec(), b"written where it will be read");
/// # Ok(())
/// # }
/// ```
///
/// A forked child must neither use nor drop its copy: see [forks](crate::vsock#forks).
#[derive(Debug)]
pub struct AsyncSeqPacket {
    socket: SeqPacket,
    watch: Watched,
}

async_connection!(AsyncSeqPacket, SeqPacket, connect_seqpacket);

impl AsyncSeqPacket {
    awaited! { SeqPacket:
        recv(out: &mut [u8]) -> Option<Received>;
        peek(out: &mut [u8]) -> Option<Received>;
        recv_leases() -> Option<MessageLeases<'_>>;
    }

    /// As [`SeqPacket::send`]. A message of which a part was sent when buffers ran out arrives even
    /// if the call is cancelled then, provided that this socket or another of the endpoint lives
    /// until it has.
    ///
    /// # Errors
    /// As [`SeqPacket::send`].
    pub async fn send(&self, message: &[u8]) -> io::Result<()> {
        self.put(&[IoSlice::new(message)], false).await
    }

    /// As [`send`](Self::send), and ends a record: MSG_EOR.
    ///
    /// # Errors
    /// As [`SeqPacket::send`].
    pub async fn send_eor(&self, message: &[u8]) -> io::Result<()> {
        self.put(&[IoSlice::new(message)], true).await
    }

    /// As [`SeqPacket::send_vectored`].
    ///
    /// # Errors
    /// As [`SeqPacket::send`].
    pub async fn send_vectored(&self, slices: &[IoSlice<'_>]) -> io::Result<()> {
        self.put(slices, false).await
    }

    /// As [`SeqPacket::send_vectored_eor`].
    ///
    /// # Errors
    /// As [`SeqPacket::send`].
    pub async fn send_vectored_eor(&self, slices: &[IoSlice<'_>]) -> io::Result<()> {
        self.put(slices, true).await
    }

    async fn put(&self, slices: &[IoSlice<'_>], ends_record: bool) -> io::Result<()> {
        let attempt = || self.socket.begin(slices, ends_record);
        if !self.watch.when(attempt).await? {
            self.wait_queued_sent().await;
        }
        Ok(())
    }

    /// As [`SeqPacket::loan`].
    ///
    /// # Errors
    /// As [`SeqPacket::loan`].
    pub async fn loan(&self, len: usize) -> io::Result<AsyncMessageLoan<'_>> {
        let loan = self.watch.when(|| self.socket.loan(len)).await?;
        Ok(AsyncMessageLoan { loan, of: self })
    }

    async fn wait_queued_sent(&self) {
        // The message is sent in any case.
        let _ = self
            .watch
            .when(|| self.socket.conn.wait_queued_sent())
            .await;
    }
}

/// A [`MessageLoan`] of an [`AsyncSeqPacket`], with an async [`send`](Self::send).
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (db, web) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/two.rs"));
/// # use zerosock::vsock::tokio::{AsyncSeqPacket, AsyncSeqPacketListener};
/// # use zerosock::{Address, Port};
/// # let listener = AsyncSeqPacketListener::new(db.listen_seqpacket(Port::new(1), 16)?)?;
/// # let there = listener.local_addr();
/// # let connecting = AsyncSeqPacket::connect(&web, there);
/// # let (accepted, connected) = tokio::join!(listener.accept(), connecting);
/// # let ((ours, _peer), theirs) = (accepted?, connected?);
/// let mut loan = theirs.loan(3).await?;
/// assert_eq!(loan.write_at(0, b"one")?, 3);
/// let next = theirs.loan(0).await?;
/// assert_eq!((loan.send().await?, next.send().await?), (3, 0));
/// assert_eq!(ours.recv_leases().await?.expect("a message").to_vec(), b"one");
/// assert!(ours.recv_leases().await?.expect("a message").is_empty());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct AsyncMessageLoan<'a> {
    loan: MessageLoan<'a>,
    of: &'a AsyncSeqPacket,
}

impl<'a> AsyncMessageLoan<'a> {
    /// As [`MessageLoan::send`]. Cancelled before it has begun to send, it sends nothing and
    /// returns the loan.
    ///
    /// # Errors
    /// As [`MessageLoan::send`].
    pub async fn send(self) -> io::Result<usize> {
        self.put(false).await
    }

    /// As [`send`](Self::send), and ends a record: MSG_EOR.
    ///
    /// # Errors
    /// As [`MessageLoan::send`].
    pub async fn send_eor(self) -> io::Result<usize> {
        self.put(true).await
    }

    /// The loan itself. Its calls do not block.
    pub fn into_inner(self) -> MessageLoan<'a> {
        self.loan
    }

    async fn put(self, ends_record: bool) -> io::Result<usize> {
        let AsyncMessageLoan { loan, of } = self;
        let mut kept = Some(loan);
        let attempt = || match kept.take().map(|loan| loan.begin(ends_record)) {
            Some(Ok(sent)) => Ok(sent),
            Some(Err((error, loan))) => {
                kept = Some(loan);
                Err(error)
            }
            // Polled again after it has completed.
            None => Err(io::ErrorKind::BrokenPipe.into()),
        };
        let (len, all) = of.watch.when(attempt).await?;
        if !all {
            of.wait_queued_sent().await;
        }
        Ok(len)
    }
}

impl<'a> Deref for AsyncMessageLoan<'a> {
    type Target = MessageLoan<'a>;

    fn deref(&self) -> &MessageLoan<'a> {
        &self.loan
    }
}

impl<'a> DerefMut for AsyncMessageLoan<'a> {
    fn deref_mut(&mut self) -> &mut MessageLoan<'a> {
        &mut self.loan
    }
}

/// A [`SeqPacketListener`] in a tokio runtime.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (db, web) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/two.rs"));
/// use zerosock::vsock::tokio::{AsyncSeqPacket, AsyncSeqPacketListener};
/// use zerosock::Port;
///
/// let listener = AsyncSeqPacketListener::new(db.listen_seqpacket(Port::new(1), 16)?)?;
/// let there = listener.local_addr();
/// let client = tokio::spawn(async move { AsyncSeqPacket::connect(&web, there).await });
/// let (_connection, peer) = listener.accept().await?;
/// assert_eq!(peer, client.await??.local_addr());
/// # Ok(())
/// # }
/// ```
///
/// A forked child must neither use nor drop its copy: see [forks](crate::vsock#forks).
#[derive(Debug)]
pub struct AsyncSeqPacketListener {
    socket: SeqPacketListener,
    watch: Watched,
}

async_listener!(AsyncSeqPacketListener, SeqPacketListener, AsyncSeqPacket);

/// The connections in order; it never ends.
impl FutureStream for AsyncSeqPacketListener {
    type Item = io::Result<AsyncSeqPacket>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.poll_accept(cx)
    }
}
