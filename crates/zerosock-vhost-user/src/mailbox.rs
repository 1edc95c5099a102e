//! Messages to the control thread: answers of workers, and requests of other threads.
//!
//! The mailbox holds at most two answers for each VM (a command's and `Disconnected`'s), and the few
//! changes that a device makes to its configuration space, so it stays short.

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use zerosock_sys::mailbox::{Mailbox, Sender};

use crate::liveness::LivenessQuery;

/// A worker's answer to a [`DeviceCommand`](super::DeviceCommand).
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum DeviceReply {
    /// The command was carried out.
    Done,
    /// The queue has stopped; the index of its next available entry.
    Base(u16),
    /// The command was not carried out, and why. The front-end gets an error where the protocol
    /// allows one.
    Failed(String),
}

/// A device's change to its configuration space.
#[derive(Debug)]
pub(super) struct ConfigChange {
    /// Offset of the first byte.
    pub(super) offset: usize,
    /// The bytes from there on.
    pub(super) bytes: Vec<u8>,
    /// The driver is to be notified.
    pub(super) notify: bool,
}

/// A message to the control thread.
#[derive(Debug)]
pub(super) enum Mail {
    /// A worker's answer to the command with this sequence number.
    Reply {
        vm: usize,
        sequence: u64,
        reply: DeviceReply,
    },
    /// A worker's request to close the connection with this number.
    Close {
        vm: usize,
        connection: u64,
        reason: String,
    },
    /// A worker's change to the configuration space of the connection with this number.
    ConfigChange {
        vm: usize,
        connection: u64,
        change: ConfigChange,
    },
    /// The last clone of the [`Notice`] with this number was dropped.
    Notice(u64),
    /// Calls [`ControlExtension::woken`](super::ControlExtension::woken).
    WakeExtension,
    /// Answered as soon as it is received.
    Liveness(LivenessQuery),
    /// Disconnect all front-ends and end the thread.
    Shutdown,
}

/// The sending half of the control thread's mailbox.
#[derive(Clone, Debug)]
pub(super) struct MailSender(Sender<Mail>);

impl MailSender {
    /// The mailbox of a control thread, and its first sender.
    pub(super) fn new() -> io::Result<(MailSender, Mailbox<Mail>)> {
        let (sender, mailbox) = Mailbox::new()?;
        Ok((MailSender(sender), mailbox))
    }

    /// Sends and wakes the control thread. Has no effect once that thread has ended.
    pub(super) fn send(&self, mail: Mail) {
        let _ = self.0.send(mail);
    }
}

/// The obligation to answer one [`DeviceCommand`](super::DeviceCommand). It may be sent to any
/// thread. Dropping it answers `Failed`.
#[must_use = "a reply that is dropped answers that the command failed"]
pub struct Reply {
    destination: Destination,
    answered: bool,
}

/// Destination of an answer.
enum Destination {
    Control {
        sender: MailSender,
        vm: usize,
        sequence: u64,
    },
    /// One part of a reply that was split.
    Part(Arc<SplitReply>),
    /// A front-end in this process. `None` once it was called.
    Callback(Option<Box<dyn FnOnce(DeviceReply) + Send>>),
}

/// The reply that was split, and the state of its parts.
struct SplitReply {
    /// Taken by the last part that is answered.
    original: Mutex<Option<Reply>>,
    unanswered: AtomicUsize,
    failed: Mutex<Option<String>>,
}

impl Reply {
    pub(super) fn new(sender: MailSender, vm: usize, sequence: u64) -> Reply {
        Reply {
            destination: Destination::Control {
                sender,
                vm,
                sequence,
            },
            answered: false,
        }
    }

    /// A reply whose answer is passed to `answer`, for a front-end in this process. It is called once, by the thread
    /// that answers or drops the reply, so it must not block.
    pub fn to(answer: impl FnOnce(DeviceReply) + Send + 'static) -> Reply {
        Reply {
            destination: Destination::Callback(Some(Box::new(answer))),
            answered: false,
        }
    }

    /// A reply that discards its answer, for tests of devices.
    pub fn discarded() -> Reply {
        Reply::channel().0
    }

    /// A reply, and where its answer goes, for tests of devices.
    pub fn channel() -> (Reply, Receiver<DeviceReply>) {
        let (sender, receiver) = mpsc::channel();
        // The receiver may be gone.
        let reply = Reply::to(move |reply| drop(sender.send(reply)));
        (reply, receiver)
    }

    /// Splits the reply into `count` parts. It is answered when all parts are: `Done`, or `Failed`
    /// if a part failed.
    pub fn split(self, count: usize) -> impl Iterator<Item = Reply> {
        let split = Arc::new(SplitReply {
            original: Mutex::new(Some(self)),
            unanswered: AtomicUsize::new(count),
            failed: Mutex::new(None),
        });
        (0..count).map(move |_| Reply {
            destination: Destination::Part(Arc::clone(&split)),
            answered: false,
        })
    }

    /// Sends the answer and wakes the control thread. Never blocks.
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
        match &mut self.destination {
            Destination::Control {
                sender,
                vm,
                sequence,
            } => sender.send(Mail::Reply {
                vm: *vm,
                sequence: *sequence,
                reply,
            }),
            Destination::Part(split) => split.answer(reply),
            Destination::Callback(callback) => {
                if let Some(callback) = callback.take() {
                    callback(reply);
                }
            }
        }
    }
}

impl SplitReply {
    fn answer(&self, reply: DeviceReply) {
        if let DeviceReply::Failed(reason) = reply {
            *lock(&self.failed) = Some(reason);
        }
        // Release publishes this part's failure; acquire lets the last part see all of them.
        if self.unanswered.fetch_sub(1, Ordering::AcqRel) == 1
            && let Some(original) = lock(&self.original).take()
        {
            match lock(&self.failed).take() {
                Some(reason) => original.failed(reason),
                None => original.done(),
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every update is a single assignment, so a poisoned lock guards a consistent value.
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
        match &self.destination {
            Destination::Control { vm, sequence, .. } => f
                .debug_struct("Reply")
                .field("vm", vm)
                .field("sequence", sequence)
                .finish(),
            Destination::Part(_) => f.write_str("Reply(part)"),
            Destination::Callback(_) => f.write_str("Reply(callback)"),
        }
    }
}

/// A completion barrier. The extension hands clones of its [`Arc`] to workers. When the last clone
/// is dropped, the control thread calls [`notice_dropped`](super::ControlExtension::notice_dropped)
/// with the number. A worker that has ended has dropped its clones.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A front-end that waits for an answer must not wait for ever.
    #[test]
    fn a_callback_gets_the_answer_or_learns_that_the_reply_was_dropped() {
        let (sender, answers) = mpsc::channel();
        let reply = || {
            let sender = sender.clone();
            Reply::to(move |answer| sender.send(answer).unwrap())
        };
        reply().base(7);
        assert_eq!(answers.try_recv(), Ok(DeviceReply::Base(7)));
        drop(reply());
        let dropped = answers.try_recv().unwrap();
        assert!(matches!(dropped, DeviceReply::Failed(_)), "{dropped:?}");
        // Once each.
        assert!(answers.try_recv().is_err());
        let [first, second] = reply().split(2).collect::<Vec<_>>().try_into().unwrap();
        first.done();
        assert!(answers.try_recv().is_err());
        second.done();
        assert_eq!(answers.try_recv(), Ok(DeviceReply::Done));
    }
}
