//! Messages to the control thread: answers of workers, requests to close, the end.
//!
//! An unbounded channel and an eventfd that wakes the control thread. It holds at most two answers
//! for each VM (a command's and `Disconnected`'s), so it stays short.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{read, write};

use super::DeviceReply;
use crate::pulse::Question;

/// What arrives at the control thread.
#[derive(Debug)]
pub(super) enum Mail {
    /// A worker's answer to the command with this number.
    Reply {
        vm: usize,
        sequence: u64,
        reply: DeviceReply,
    },
    /// A worker asks that the connection of this number be closed.
    Close {
        vm: usize,
        connection: u64,
        reason: String,
    },
    /// A [`Notice`] of this number was dropped.
    Notice(u64),
    /// The extension is wanted.
    Knock,
    /// To be answered at once.
    Pulse(Question),
    /// Disconnect everything and end.
    Shutdown,
}

/// The sending half.
#[derive(Clone, Debug)]
pub(super) struct MailSender {
    channel: Sender<Mail>,
    wake: Arc<OwnedFd>,
}

impl MailSender {
    /// Sends and wakes the control thread. Nothing happens when that thread has ended.
    pub(super) fn send(&self, mail: Mail) {
        if self.channel.send(mail).is_ok() {
            // The counter cannot reach its limit, so this neither blocks nor fails; when the
            // control thread has ended, the write goes to an eventfd that nobody reads.
            let _ = write(&self.wake, &1u64.to_ne_bytes());
        }
    }
}

/// The receiving half.
#[derive(Debug)]
pub(super) struct Mailbox {
    channel: Receiver<Mail>,
    wake: Arc<OwnedFd>,
}

impl Mailbox {
    /// Makes a mailbox and its first sender.
    pub(super) fn new() -> io::Result<(Mailbox, MailSender)> {
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let (sender, channel) = mpsc::channel();
        let sender = MailSender {
            channel: sender,
            wake: Arc::clone(&wake),
        };
        Ok((Mailbox { channel, wake }, sender))
    }

    /// Takes back the wake-up. To be called before the last `next`: what is sent after it wakes
    /// again.
    pub(super) fn clear(&self) {
        let mut count = [0; 8];
        let _ = read(&self.wake, &mut count);
    }

    /// The next message, if there is one.
    pub(super) fn next(&self) -> Option<Mail> {
        self.channel.try_recv().ok()
    }
}

impl AsFd for Mailbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

/// The right, and the duty, to answer one [`DeviceCommand`](super::DeviceCommand). May be sent to
/// any thread. Dropping it answers `Failed`.
#[must_use = "a reply that is dropped answers that the command failed"]
pub struct Reply {
    to: To,
    answered: bool,
}

/// Where an answer goes.
enum To {
    Control {
        sender: MailSender,
        vm: usize,
        sequence: u64,
    },
    /// It is one of several, and the last of them is given on.
    Joint(Arc<Joint>),
    Discard,
}

/// Several answers that make one.
struct Joint {
    /// Taken by the last.
    whole: Mutex<Option<Reply>>,
    left: AtomicUsize,
    failed: Mutex<Option<String>>,
}

impl Reply {
    pub(super) fn new(sender: MailSender, vm: usize, sequence: u64) -> Reply {
        Reply {
            to: To::Control {
                sender,
                vm,
                sequence,
            },
            answered: false,
        }
    }

    /// A token whose answer is discarded, for tests of devices.
    pub fn discarded() -> Reply {
        Reply {
            to: To::Discard,
            answered: false,
        }
    }

    /// As many tokens, all of which are to be answered before this one is: `Done`, or with a failure
    /// if there is one.
    pub fn split(self, count: usize) -> impl Iterator<Item = Reply> {
        let joint = Arc::new(Joint {
            whole: Mutex::new(Some(self)),
            left: AtomicUsize::new(count),
            failed: Mutex::new(None),
        });
        (0..count).map(move |_| Reply {
            to: To::Joint(Arc::clone(&joint)),
            answered: false,
        })
    }

    /// Answers, and wakes the control thread. Never blocks.
    pub fn send(mut self, reply: DeviceReply) {
        self.answer(reply);
    }

    /// Answers [`DeviceReply::Done`].
    pub fn done(self) {
        self.send(DeviceReply::Done);
    }

    /// Answers [`DeviceReply::Base`].
    pub fn base(self, index: u16) {
        self.send(DeviceReply::Base(index));
    }

    /// Answers [`DeviceReply::Failed`].
    pub fn failed(self, reason: impl fmt::Display) {
        self.send(DeviceReply::Failed(reason.to_string()));
    }

    fn answer(&mut self, reply: DeviceReply) {
        self.answered = true;
        match &self.to {
            To::Control {
                sender,
                vm,
                sequence,
            } => sender.send(Mail::Reply {
                vm: *vm,
                sequence: *sequence,
                reply,
            }),
            To::Joint(joint) => joint.answer(reply),
            To::Discard => {}
        }
    }
}

impl Joint {
    fn answer(&self, reply: DeviceReply) {
        if let DeviceReply::Failed(reason) = reply {
            *lock(&self.failed) = Some(reason);
        }
        // Pairs with itself: the last sees what the others have noted.
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1
            && let Some(whole) = lock(&self.whole).take()
        {
            match lock(&self.failed).take() {
                Some(reason) => whole.failed(reason),
                None => whole.done(),
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What is in there is whole, whoever has panicked meanwhile.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Reply {
    fn drop(&mut self) {
        if !self.answered {
            self.answer(DeviceReply::Failed("the worker dropped the command".into()));
        }
    }
}

impl fmt::Debug for Reply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.to {
            To::Control { vm, sequence, .. } => f
                .debug_struct("Reply")
                .field("vm", vm)
                .field("sequence", sequence)
                .finish(),
            To::Joint(_) => f.write_str("Reply(one of several)"),
            To::Discard => f.write_str("Reply(discarded)"),
        }
    }
}

/// A worker's hold on one connection of a front-end.
#[derive(Clone)]
pub struct FrontendLink {
    sender: MailSender,
    vm: usize,
    connection: u64,
    /// The device was lost during this connection, and that was reported. Shared by the queue pairs.
    lost: Arc<AtomicBool>,
}

impl FrontendLink {
    pub(super) fn new(sender: MailSender, vm: usize, connection: u64) -> FrontendLink {
        FrontendLink {
            sender,
            vm,
            connection,
            lost: Arc::default(),
        }
    }

    /// Notes that the device is lost. True for the first of its queue pairs to see that, which is
    /// to report it.
    pub fn note_loss(&self) -> bool {
        !self.lost.swap(true, Ordering::Relaxed)
    }

    /// Closes the connection; `reason` goes to the log. The worker then gets `Disconnected`.
    /// Without effect on a connection that is gone, and on later ones. Never blocks.
    pub fn close(&self, reason: impl fmt::Display) {
        self.sender.send(Mail::Close {
            vm: self.vm,
            connection: self.connection,
            reason: reason.to_string(),
        });
    }
}

impl fmt::Debug for FrontendLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FrontendLink")
            .field("vm", &self.vm)
            .field("connection", &self.connection)
            .finish()
    }
}

/// Tells the control thread, by being dropped, that everybody who held it is done. Shared in an
/// [`Arc`] with whoever is waited for; one that is gone for good counts as done.
#[derive(Debug)]
pub struct Notice {
    sender: MailSender,
    number: u64,
}

impl Notice {
    pub(super) fn new(sender: MailSender, number: u64) -> Notice {
        Notice { sender, number }
    }
}

impl Drop for Notice {
    fn drop(&mut self) {
        self.sender.send(Mail::Notice(self.number));
    }
}
