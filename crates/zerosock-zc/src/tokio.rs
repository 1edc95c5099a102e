//! A sender for tasks of a tokio runtime.

use std::future::poll_fn;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use ::tokio::io::Interest;
use ::tokio::io::unix::AsyncFd;

use super::readiness::Readiness;
use super::{
    Closed, Completion, NoSuchSlot, Notification, Outgoing, Refusal, Refused, Returned, Sender,
    SenderOpenError,
};
use crate::sys::{Buf, Stable};

/// A [`Sender`] with asynchronous waiting.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use tokio::net::UdpSocket;
/// use zerosock_zc::tokio::AsyncSender;
/// use zerosock_zc::{Outgoing, Sender, Stable};
///
/// let peer = UdpSocket::bind("127.0.0.1:0").await?;
/// let socket = UdpSocket::bind("127.0.0.1:0").await?;
/// socket.connect(peer.local_addr()?).await?;
/// let mut sender: AsyncSender = Sender::open(socket.into_std()?)?.try_into()?;
/// sender.send(Outgoing::new(vec![7; 1000])).await?;
/// let returned = sender.returned().await?.expect("one is under way");
/// assert_eq!(returned.buffer.total(), 1000);
/// assert_eq!(peer.recv(&mut [0; 2000]).await?, 1000);
/// # Ok(())
/// # }
/// ```
///
/// Each future here may be dropped before it is ready. Buffers that were accepted stay with the
/// sender. A buffer that waits for its place in [`send`](Self::send) is dropped with the future: to
/// keep it, await [`room`](Self::room) first.
///
/// A forked child must neither use nor drop its copy: the runtime's descriptors are the parent's.
pub struct AsyncSender<B: Stable = Buf> {
    // Before the sender: it must be taken out of the runtime while it is open.
    readiness: AsyncFd<Readiness>,
    sender: Sender<B>,
}

impl<B: Stable> TryFrom<Sender<B>> for AsyncSender<B> {
    type Error = SenderOpenError;

    /// Registers the sender with the runtime of the current task.
    fn try_from(sender: Sender<B>) -> Result<Self, SenderOpenError> {
        let readiness = Readiness::of(sender.as_fd()).map_err(SenderOpenError::Call)?;
        #[allow(
            deprecated,
            reason = "the newer function is unsafe, to have promised what an OwnedFd does by itself: \
                      that it stays open and the same"
        )]
        let readiness =
            AsyncFd::with_interest(readiness, Interest::READABLE).map_err(SenderOpenError::Call)?;
        Ok(Self { readiness, sender })
    }
}

impl<B: Stable> AsyncSender<B> {
    /// Accepts a send once there is a place for it, and submits it. Returns its number; none if it
    /// is to be copied.
    ///
    /// # Errors
    /// As [`Sender::send`].
    pub async fn send(&mut self, outgoing: Outgoing<B>) -> Result<Option<u32>, Refused<B>> {
        if let Err(error) = self.room().await {
            let why = Refusal::Call(error);
            return Err(Refused { outgoing, why });
        }
        let number = self.sender.push(outgoing)?;
        // The send is accepted even if the call fails: the next submission repeats it.
        let _ = self.sender.submit();
        Ok(number)
    }

    /// Sends, and takes the completions of earlier sends, as [`Sender::send_with`].
    ///
    /// # Errors
    /// As there.
    pub async fn send_with(
        &mut self,
        outgoing: Outgoing<B>,
        room: &mut [Completion],
    ) -> Result<usize, Refused<B>> {
        if let Err(why) = self.sender.check_room(room) {
            return Err(Refused { outgoing, why });
        }
        self.send(outgoing).await?;
        Ok(self.sender.take_completions(room))
    }

    /// Waits until there is a place.
    ///
    /// # Errors
    /// What the kernel answers.
    pub async fn room(&mut self) -> io::Result<()> {
        poll_fn(|cx| self.poll_room(cx)).await
    }

    /// The next buffer that is free; none if none is under way.
    ///
    /// # Errors
    /// What the kernel answers.
    pub async fn returned(&mut self) -> io::Result<Option<Returned<B>>> {
        poll_fn(|cx| self.poll_returned(cx)).await
    }

    /// The next notification of a slot; none if nothing is under way.
    ///
    /// # Errors
    /// What the kernel answers.
    pub async fn notification(&mut self) -> io::Result<Option<Notification>> {
        poll_fn(|cx| {
            self.poll_until(cx, |sender| match sender.notification() {
                None if sender.is_quiet() => Some(None),
                None => None,
                some => Some(some),
            })
        })
        .await
    }

    /// Flushes every slot and waits until the sender [is quiet](Sender::is_quiet).
    ///
    /// # Errors
    /// What the kernel answers.
    pub async fn finish(&mut self) -> io::Result<()> {
        self.sender.flush_all();
        poll_fn(|cx| self.poll_until(cx, |sender| sender.is_quiet().then_some(()))).await
    }

    /// [`room`](Self::room), for a hand-written future.
    ///
    /// # Errors
    /// What the kernel answers.
    pub fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_until(cx, |sender| (sender.room() > 0).then_some(()))
    }

    /// [`returned`](Self::returned), for a hand-written future.
    ///
    /// # Errors
    /// What the kernel answers.
    pub fn poll_returned(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Option<Returned<B>>>> {
        self.poll_until(cx, |sender| match sender.returned() {
            None if sender.is_quiet() => Some(None),
            None => None,
            some => Some(some),
        })
    }

    /// Closes the sender as [`Sender::close`] does, when every buffer is free or after `timeout`. A
    /// timeout needs a runtime with timers enabled. Dropping the future drops the sender.
    pub async fn close(mut self, timeout: Option<Duration>) -> Closed<B> {
        let closing = poll_fn(|cx| self.poll_close(cx));
        match timeout {
            None => closing.await,
            Some(timeout) => match ::tokio::time::timeout(timeout, closing).await {
                Ok(closed) => closed,
                Err(_) => self.sender.end(Ok(false)),
            },
        }
    }

    /// [`close`](Self::close) without a timeout, for a hand-written future. Nothing is accepted
    /// from now on. To close at once instead, use [`into_inner`](Self::into_inner) and
    /// [`Sender::close`] with a timeout of zero.
    pub fn poll_close(&mut self, cx: &mut Context<'_>) -> Poll<Closed<B>> {
        self.sender.begin_close();
        let waited = ready!(self.poll_until(cx, |sender| sender.may_end().then_some(true)));
        Poll::Ready(self.sender.end(waited))
    }

    /// As [`Sender::push`].
    ///
    /// # Errors
    /// As there.
    pub fn push(&mut self, outgoing: Outgoing<B>) -> Result<Option<u32>, Refused<B>> {
        self.sender.push(outgoing)
    }

    /// As [`Sender::submit`].
    ///
    /// # Errors
    /// As there.
    pub fn submit(&mut self) -> io::Result<()> {
        self.sender.submit()
    }

    /// As [`Sender::cancel`].
    ///
    /// # Errors
    /// As there.
    pub fn cancel(&mut self) -> io::Result<()> {
        self.sender.cancel()
    }

    /// As [`Sender::flush`].
    ///
    /// # Errors
    /// As there.
    pub fn flush(&mut self, slots: Range<u32>) -> Result<(), NoSuchSlot> {
        self.sender.flush(slots)
    }

    /// As [`Sender::set_tag`].
    ///
    /// # Errors
    /// As there.
    pub fn set_tag(&mut self, slot: u32, tag: u64) -> Result<(), NoSuchSlot> {
        self.sender.set_tag(slot, tag)
    }

    /// As [`Sender::completions`].
    ///
    /// # Errors
    /// As there.
    pub fn completions(&mut self, room: &mut [Completion]) -> io::Result<usize> {
        self.sender.completions(room)
    }

    /// The oldest buffer that is free, as [`Sender::returned`]: without waiting for one.
    pub fn try_returned(&mut self) -> Option<Returned<B>> {
        self.sender.returned()
    }

    /// The oldest notification of a slot, as [`Sender::notification`]: without waiting for one.
    pub fn try_notification(&mut self) -> Option<Notification> {
        self.sender.notification()
    }

    /// A shared reference to the sender. There is no mutable one: the runtime waits on the
    /// descriptor of this sender, and would miss the events of another one in its place.
    #[must_use]
    pub fn get_ref(&self) -> &Sender<B> {
        &self.sender
    }

    /// Removes the sender from the runtime and returns it.
    #[must_use]
    pub fn into_inner(self) -> Sender<B> {
        self.sender
    }

    fn poll_until<T>(
        &mut self,
        cx: &mut Context<'_>,
        mut done: impl FnMut(&mut Sender<B>) -> Option<T>,
    ) -> Poll<io::Result<T>> {
        loop {
            if let Some(done) = done(&mut self.sender) {
                return Poll::Ready(Ok(done));
            }
            self.sender.submit()?;
            self.sender.poll()?;
            if let Some(done) = done(&mut self.sender) {
                return Poll::Ready(Ok(done));
            }
            if let Some(timeout) = self.sender.next_timeout() {
                self.readiness.get_ref().wake_after(timeout)?;
            }
            let mut ready = ready!(self.readiness.poll_read_ready(cx))?;
            // The loop handles the events that are cleared here.
            ready.get_inner().wait(Some(std::time::Duration::ZERO))?;
            ready.clear_ready();
        }
    }
}

impl<B: Stable> std::fmt::Debug for AsyncSender<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("AsyncSender").field(&self.sender).finish()
    }
}
