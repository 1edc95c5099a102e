//! Datagrams for tokio.

use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut};
use std::task::{Context, Poll, ready};

use ::tokio::io::ReadBuf;
use zerosock_proto::Address;

use super::calls::{async_socket, awaited};
use super::reactor::Watched;
use crate::vsock::datagram::{Datagram, DatagramLease, DatagramLoan};
use crate::vsock::hub::Interest;
use crate::vsock::message::Message;

/// A [`Datagram`] in a tokio runtime. Any number of tasks may use it at once.
///
/// A cancelled call has sent or received nothing.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (db, web) = include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doc/two.rs"));
/// use std::io::Write;
/// use zerosock::vsock::Datagram;
/// use zerosock::vsock::tokio::AsyncDatagram;
/// use zerosock::{Address, Port};
///
/// let ours = AsyncDatagram::new(Datagram::bind(&db, Port::new(514))?)?;
/// let theirs = AsyncDatagram::new(Datagram::bind(&web, Port::ANY)?)?;
/// theirs.send_to(b"copied", ours.local_addr()).await?;
/// let mut bytes = [0; 100];
/// assert_eq!(ours.recv_from(&mut bytes).await?, (6, theirs.local_addr()));
///
/// let mut loan = theirs.loan(ours.local_addr(), 100).await?;
/// loan.write_all(b"where it is read")?;
/// loan.send().await?;
/// assert_eq!(ours.recv_lease().await?.to_vec(), b"where it is read");
/// # Ok(())
/// # }
/// ```
///
/// A forked child must neither use nor drop its copy: see [forks](crate::vsock#forks).
#[derive(Debug)]
pub struct AsyncDatagram {
    socket: Datagram,
    watch: Watched,
}

async_socket!(AsyncDatagram, Datagram);

impl AsyncDatagram {
    /// Takes a socket into the runtime of the caller. Its time-outs are ignored from now on; use
    /// those of the runtime.
    ///
    /// # Errors
    /// When the system has no descriptor left.
    ///
    /// # Panics
    /// Outside of a tokio runtime, or in one without its I/O driver, as with
    /// [`AsyncStream::new`](super::AsyncStream::new).
    pub fn new(socket: Datagram) -> io::Result<AsyncDatagram> {
        let (core, id) = socket.core_and_id();
        let watch = Watched::new(core, Interest::Datagram(id))?;
        socket.set_async();
        Ok(AsyncDatagram { socket, watch })
    }

    /// The peer that the socket is connected to ([`Datagram::connect`] of
    /// [`get_ref`](Self::get_ref)).
    pub fn peer_addr(&self) -> Option<Address> {
        self.socket.peer_addr()
    }

    awaited! { Datagram:
        send_to(bytes: &[u8], to: Address) -> usize;
        send(bytes: &[u8]) -> usize;
        send_many<B: AsRef<[u8]>>(datagrams: &[(B, Address)]) -> usize;
        send_all<B: AsRef<[u8]>>(datagrams: &[B]) -> usize;
        flush() -> ();
        recv_from(out: &mut [u8]) -> (usize, Address);
        recv(out: &mut [u8]) -> usize;
        peek_from(out: &mut [u8]) -> (usize, Address);
        recv_many<B: AsMut<[u8]>>(buffers: &mut [B]) -> Vec<(usize, Address)>;
        recv_lease() -> DatagramLease<'_>;
    }

    /// As [`Datagram::loan`].
    ///
    /// # Errors
    /// As there.
    pub async fn loan(&self, to: Address, len: usize) -> io::Result<AsyncDatagramLoan<'_>> {
        let loan = self.watch.when(|| self.socket.loan(to, len)).await?;
        Ok(AsyncDatagramLoan {
            loan,
            watch: &self.watch,
        })
    }

    /// As [`Datagram::recv_each`].
    ///
    /// # Errors
    /// As there.
    ///
    /// # Panics
    /// As there.
    pub async fn recv_each(
        &self,
        most: usize,
        mut look: impl FnMut(Message<'_>, Address),
    ) -> io::Result<usize> {
        self.watch
            .when(|| self.socket.recv_each(most, &mut look))
            .await
    }

    /// As [`recv_from`](Self::recv_from), as a poll function. Only the last task that polled is
    /// woken. Bytes that do not fit `out` are lost.
    ///
    /// # Errors
    /// As there.
    pub fn poll_recv_from(
        &self,
        cx: &Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<Address>> {
        let room = out.initialize_unfilled();
        let most = room.len();
        let watch = &self.watch;
        let receive = || self.socket.recv_from(room);
        let (len, source) = ready!(watch.poll(&watch.reader, cx, receive))?;
        out.advance(len.min(most));
        Poll::Ready(Ok(source))
    }

    /// As [`send_to`](Self::send_to), as a poll function. Only the last task that polled is woken.
    ///
    /// # Errors
    /// As there.
    pub fn poll_send_to(
        &self,
        cx: &Context<'_>,
        bytes: &[u8],
        to: Address,
    ) -> Poll<io::Result<usize>> {
        let watch = &self.watch;
        watch.poll(&watch.writer, cx, || self.socket.send_to(bytes, to))
    }
}

/// A [`DatagramLoan`] of an [`AsyncDatagram`], with an async [`send`](Self::send): flow control of
/// the receiver may delay it. Dropped, it is returned unsent.
pub struct AsyncDatagramLoan<'a> {
    loan: DatagramLoan<'a>,
    watch: &'a Watched,
}

impl AsyncDatagramLoan<'_> {
    /// As [`DatagramLoan::send`].
    ///
    /// # Errors
    /// As there.
    pub async fn send(self) -> io::Result<usize> {
        let AsyncDatagramLoan { mut loan, watch } = self;
        watch.when(|| loan.try_send()).await
    }
}

impl<'a> Deref for AsyncDatagramLoan<'a> {
    type Target = DatagramLoan<'a>;

    fn deref(&self) -> &DatagramLoan<'a> {
        &self.loan
    }
}

impl DerefMut for AsyncDatagramLoan<'_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.loan
    }
}

impl fmt::Debug for AsyncDatagramLoan<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.loan.fmt(f)
    }
}
