//! Sockets for tokio: [`AsyncRead`], [`AsyncWrite`], and leases that are awaited.
//!
//! Each endpoint that is used here has one task in the runtime that does for all its sockets what
//! a blocked call does otherwise: it waits for the endpoint's descriptor and the next time-out,
//! lets the engine work, and wakes the tasks whose sockets have news. It ends with the last async
//! socket of the endpoint; if its runtime ends before, the next socket that waits starts another.
//!
//! What must hold: a task that is told to wait was enlisted before the last look. A socket has a
//! place for its reader and one for its writer, and each call that is awaited has one of its own as
//! long as it is awaited: so nobody's list grows with tasks that have given up.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, ready};

use ::tokio::io::unix::AsyncFd;
use ::tokio::io::{AsyncRead, AsyncWrite, Interest as IoInterest, ReadBuf};
use ::tokio::runtime::Handle;
use ::tokio::task::{JoinHandle, spawn_blocking};
use zerosock_proto::{Address, Port};

use super::hub::{Bell, Core, Ending, Interest, any_of};
use super::lease::Lease;
use super::listener::Listener;
use super::loan::Loan;
use super::stream::Stream;
use super::{Endpoint, Host};

/// The task of an endpoint.
#[derive(Debug)]
pub(crate) struct Reactor {
    task: JoinHandle<()>,
}

impl Reactor {
    /// The endpoint's task, started if it does not run.
    fn of(core: &Arc<Core>) -> io::Result<Arc<Reactor>> {
        let mut place = locked(core.reactor());
        if let Some(running) = place.upgrade().filter(|it| it.is_running()) {
            return Ok(running);
        }
        let bell = Arc::new(Bell::new()?);
        let fd = any_of([core.engine_fd(), bell.as_fd()])?;
        #[allow(
            deprecated,
            reason = "the newer way is unsafe, to have promised what an OwnedFd does by itself: \
                      that it stays open and the same"
        )]
        let fd = AsyncFd::with_interest(fd, IoInterest::READABLE)?;
        let post = Post {
            core: Arc::downgrade(core),
            bell,
        };
        let task = ::tokio::spawn(work(post, fd));
        let reactor = Arc::new(Reactor { task });
        *place = Arc::downgrade(&reactor);
        Ok(reactor)
    }

    fn is_running(&self) -> bool {
        !self.task.is_finished()
    }
}

impl Drop for Reactor {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Where the task is told. When it ends, nobody relies on it any more.
struct Post {
    core: Weak<Core>,
    bell: Arc<Bell>,
}

impl Drop for Post {
    fn drop(&mut self) {
        if let Some(core) = self.core.upgrade() {
            core.end(Ending::Bell(self.bell.clone()));
        }
    }
}

async fn work(post: Post, fd: AsyncFd<OwnedFd>) {
    loop {
        let watched = {
            let Some(core) = post.core.upgrade() else {
                return;
            };
            let mut locked = core.lock();
            if locked.turn().is_err() {
                // Everybody was told.
                return;
            }
            post.bell.silence();
            locked.watch_by(&post.bell)
        };
        let Ok(due) = watched else {
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

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What async streams are connected from: an [`Endpoint`] or a [`Host`].
pub trait Connector: sealed::Connect {}

impl Connector for Endpoint {}
impl Connector for Host {}

mod sealed {
    use super::*;
    use zerosock_proto::Cid;

    /// Finds the CID of a name; may wait for the attach socket's answer.
    pub(super) type Resolver = Box<dyn FnOnce() -> io::Result<Cid> + Send>;

    pub trait Connect {
        fn begin(&self, peer: Address) -> io::Result<Stream>;
        fn resolver(&self, name: &str) -> Resolver;
    }

    impl Connect for Endpoint {
        fn begin(&self, peer: Address) -> io::Result<Stream> {
            self.begin_connect(peer)
        }

        fn resolver(&self, name: &str) -> Resolver {
            let (core, name) = (self.core.clone(), name.to_owned());
            Box::new(move || crate::vsock::endpoint::resolve(&core, &name))
        }
    }

    impl Connect for Host {
        fn begin(&self, peer: Address) -> io::Result<Stream> {
            self.begin_connect(peer)
        }

        fn resolver(&self, name: &str) -> Resolver {
            let cid = self.resolve(name);
            Box::new(move || cid)
        }
    }
}

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
    reactor: Mutex<Arc<Reactor>>,
    /// Those who were told to wait by `poll_read` and by `poll_write`.
    reader: Seat,
    writer: Seat,
}

/// A place among those who are told: the ticket of who had it last.
#[derive(Debug, Default)]
struct Seat(Mutex<u64>);

/// A call that is awaited, with a seat of its own.
struct Visit<'w> {
    watched: &'w Watched,
    seat: Seat,
}

impl Watched {
    fn new(core: &Arc<Core>, interest: Interest) -> io::Result<Watched> {
        Ok(Watched {
            reactor: Mutex::new(Reactor::of(core)?),
            core: core.clone(),
            interest,
            reader: Seat::default(),
            writer: Seat::default(),
        })
    }

    /// Tries, is enlisted, and tries once more.
    fn poll<T>(
        &self,
        seat: &Seat,
        cx: &Context<'_>,
        mut attempt: impl FnMut() -> io::Result<T>,
    ) -> Poll<io::Result<T>> {
        match attempt() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            result => return Poll::Ready(result),
        }
        self.see_to_reactor()?;
        self.core
            .enlist_task(&mut locked(&seat.0), self.interest, cx.waker());
        match attempt() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Poll::Pending,
            result => Poll::Ready(result),
        }
    }

    /// A runtime that has ended takes the endpoint's task with it, but not its sockets.
    fn see_to_reactor(&self) -> io::Result<()> {
        let mut reactor = locked(&self.reactor);
        if !reactor.is_running() {
            Handle::try_current().map_err(io::Error::other)?;
            *reactor = Reactor::of(&self.core)?;
        }
        Ok(())
    }

    /// Awaits `attempt`.
    async fn when<T>(&self, mut attempt: impl FnMut() -> io::Result<T>) -> io::Result<T> {
        let visit = Visit {
            watched: self,
            seat: Seat::default(),
        };
        std::future::poll_fn(|cx| self.poll(&visit.seat, cx, &mut attempt)).await
    }

    fn leave(&self, seat: &Seat) {
        let ticket = std::mem::take(&mut *locked(&seat.0));
        if ticket != 0 {
            self.core.end(Ending::Task(ticket));
        }
    }
}

impl Drop for Visit<'_> {
    fn drop(&mut self) {
        self.watched.leave(&self.seat);
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.leave(&self.reader);
        self.leave(&self.writer);
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
        let watch = Watched::new(&stream.core, Interest::Conn(stream.id))?;
        stream.blocking.set_told();
        Ok(AsyncStream { stream, watch })
    }

    /// Connects to `peer`. To give up waiting is to drop what this returns.
    ///
    /// # Errors
    /// As [`Endpoint::connect`].
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub async fn connect(from: &impl Connector, peer: Address) -> io::Result<AsyncStream> {
        let stream = AsyncStream::new(from.begin(peer)?)?;
        stream.watch.when(|| stream.stream.wait_connected()).await?;
        Ok(stream)
    }

    /// Connects to `port` of the attached process called `name`.
    ///
    /// # Errors
    /// `NotFound` when nobody has the name, `InvalidInput` for one that none can have; else as
    /// [`connect`](Self::connect).
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub async fn connect_name(
        from: &impl Connector,
        name: &str,
        port: Port,
    ) -> io::Result<AsyncStream> {
        let resolver = from.resolver(name);
        let cid = spawn_blocking(resolver).await.map_err(io::Error::other)??;
        AsyncStream::connect(from, Address::new(cid, port)).await
    }

    /// Our address.
    pub fn local_addr(&self) -> Address {
        self.stream.local_addr()
    }

    /// The peer's address.
    pub fn peer_addr(&self) -> Address {
        self.stream.peer_addr()
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
        self.watch.when(|| self.stream.recv()).await
    }

    /// As [`Stream::loan`].
    ///
    /// # Errors
    /// As [`Stream::loan`].
    pub async fn loan(&self, max: usize) -> io::Result<Loan<'_>> {
        self.watch.when(|| self.stream.loan(max)).await
    }

    /// Two halves for one task, or for several that it waits for.
    pub fn split(&mut self) -> (ReadHalf<'_>, WriteHalf<'_>) {
        (ReadHalf(self), WriteHalf(self))
    }

    /// Two halves for two tasks.
    pub fn into_split(self) -> (OwnedReadHalf, OwnedWriteHalf) {
        let stream = Arc::new(self);
        let write = OwnedWriteHalf {
            stream: stream.clone(),
            ends: true,
        };
        (OwnedReadHalf(stream), write)
    }

    fn poll_read(&self, cx: &Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let out = buf.initialize_unfilled();
        let watch = &self.watch;
        let got = ready!(watch.poll(&watch.reader, cx, || (&self.stream).read(out)))?;
        buf.advance(got);
        Poll::Ready(Ok(()))
    }

    fn poll_write(&self, cx: &Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let watch = &self.watch;
        watch.poll(&watch.writer, cx, || (&self.stream).write(bytes))
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

/// The half of an [`AsyncStream`] that reads, borrowed.
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
/// let (mut reads, mut writes) = theirs.split();
/// let (mut asked, mut answer) = ([0; 4], [0; 4]);
/// tokio::try_join!(writes.write_all(b"ping"), ours.read_exact(&mut asked))?;
/// tokio::try_join!(ours.write_all(b"pong"), reads.read_exact(&mut answer))?;
/// assert_eq!(&answer, b"pong");
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct ReadHalf<'a>(&'a AsyncStream);

/// The half of an [`AsyncStream`] that writes, borrowed.
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
/// let (mut reads, mut writes) = theirs.split();
/// let (mut asked, mut answer) = ([0; 4], [0; 4]);
/// tokio::try_join!(writes.write_all(b"ping"), ours.read_exact(&mut asked))?;
/// tokio::try_join!(ours.write_all(b"pong"), reads.read_exact(&mut answer))?;
/// assert_eq!(&answer, b"pong");
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct WriteHalf<'a>(&'a AsyncStream);

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
pub struct OwnedReadHalf(Arc<AsyncStream>);

/// The half of an [`AsyncStream`] that writes. Dropping it sends end of file.
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
pub struct OwnedWriteHalf {
    stream: Arc<AsyncStream>,
    /// Dropping it says so to the peer.
    ends: bool,
}

/// Two halves that were not of one stream; here they are again.
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
#[derive(Debug)]
pub struct ReuniteError(pub OwnedReadHalf, pub OwnedWriteHalf);

impl fmt::Display for ReuniteError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the halves are not of the same stream")
    }
}

impl std::error::Error for ReuniteError {}

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
        // There are two halves, and one of them is gone.
        Arc::try_unwrap(self.0).map_err(|_| unreachable!("a half was there twice"))
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

impl ReadHalf<'_> {
    fn stream(&self) -> &AsyncStream {
        self.0
    }
}

impl WriteHalf<'_> {
    fn stream(&self) -> &AsyncStream {
        self.0
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

            fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
                Poll::Ready(Ok(()))
            }

            /// Sends end of file.
            fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
                Poll::Ready(self.stream().finish())
            }
        }
    };
    (addresses) => {
        /// Our address.
        pub fn local_addr(&self) -> Address {
            self.stream().local_addr()
        }

        /// The peer's address.
        pub fn peer_addr(&self) -> Address {
            self.stream().peer_addr()
        }
    };
}

half!(reads ReadHalf<'_>);
half!(reads OwnedReadHalf);
half!(writes WriteHalf<'_>);
half!(writes OwnedWriteHalf);

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
        listener.blocking.set_told();
        Ok(AsyncListener { listener, watch })
    }

    /// The address that is listened on.
    pub fn local_addr(&self) -> Address {
        self.listener.local_addr()
    }

    /// The oldest connection that waits, and who it is from.
    ///
    /// # Errors
    /// As [`Listener::accept`].
    pub async fn accept(&self) -> io::Result<(AsyncStream, Address)> {
        let (stream, peer) = self.watch.when(|| self.listener.accept()).await?;
        Ok((AsyncStream::new(stream)?, peer))
    }
}

#[cfg(test)]
mod tests {
    use super::super::fake::{core, info};
    use super::super::sockets::{StreamId, StreamState};
    use super::super::waiting::Wait;
    use super::*;

    const THERE: Address = Address::new(zerosock_proto::Cid::new(4), Port::new(1));

    /// What the endpoint of a fake engine is to [`AsyncStream::connect`].
    struct From(Arc<Core>);

    impl Connector for From {}

    impl sealed::Connect for From {
        fn begin(&self, peer: Address) -> io::Result<Stream> {
            crate::vsock::endpoint::begin_connect(&self.0, peer, Wait::Sleep)
        }

        fn resolver(&self, _: &str) -> sealed::Resolver {
            unreachable!()
        }
    }

    async fn some_turns() {
        for _ in 0..10 {
            ::tokio::task::yield_now().await;
        }
    }

    #[::tokio::test]
    async fn tasks_that_gave_up_are_not_remembered() {
        let (core, _) = core();
        let state = info(StreamState::Connected);
        let stream = Stream::new(core.clone(), StreamId::FIRST, &state, Wait::Sleep);
        let stream = Arc::new(AsyncStream::new(stream).unwrap());
        some_turns().await;
        let before = core.waiters();
        for _ in 0..100 {
            let task = {
                let stream = stream.clone();
                ::tokio::spawn(async move { stream.recv().await.map(|_| ()) })
            };
            some_turns().await;
            task.abort();
            assert!(task.await.unwrap_err().is_cancelled());
        }
        assert_eq!(core.waiters(), before, "recv");
        let mut stream = Some(Arc::into_inner(stream).unwrap());
        for _ in 0..100 {
            let mut mine = stream.take().unwrap();
            let task = ::tokio::spawn(async move {
                std::future::poll_fn(|cx| {
                    let mut byte = [0];
                    assert!(
                        Pin::new(&mut mine)
                            .poll_read(cx, &mut ReadBuf::new(&mut byte))
                            .is_pending()
                    );
                    assert!(Pin::new(&mut mine).poll_write(cx, b"x").is_pending());
                    Poll::Ready(())
                })
                .await;
                mine
            });
            stream = Some(task.await.unwrap());
        }
        assert_eq!(core.waiters(), before + 2, "a reader and a writer");
        drop(stream);
        some_turns().await;
        assert_eq!(core.waiters(), 0, "the endpoint's task has left as well");
    }

    #[::tokio::test]
    async fn a_connect_that_is_given_up_leaves_nothing() {
        let (core, script) = core();
        let from = From(core.clone());
        let task = ::tokio::spawn(async move {
            let connected = AsyncStream::connect(&from, THERE).await;
            connected.map(|_| ())
        });
        some_turns().await;
        assert_eq!(core.waiters(), 2, "the endpoint's task, and ours");
        task.abort();
        assert!(task.await.unwrap_err().is_cancelled());
        some_turns().await;
        let script = script.lock().unwrap();
        assert_eq!((script.connected, script.closed), (1, 1));
        drop(script);
        assert_eq!(core.waiters(), 0);
    }
}
