//! Senders whose datagrams the kernel moves (`--way sockmap`).
//!
//! A sender of several datagrams gets a connected socket with the address of the listener, which the kernel
//! joins to the association's socket to the target. Where that does not work, its datagrams go on coming
//! at the listener.
//!
//! # Invariants
//! - A socket of a sender receives the datagrams of that sender only (see
//!   [`allow_connected`](crate::relay::listen::allow_connected)).
//! - It is joined, or closed, in the turn in which it was made.

use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use zerosock_proto::Instant;
use zerosock_sys::mmsg::Batch;

use super::{Associations, Ended, Opener, SenderAssociation, TurnCounts};
use crate::relay::direction::Ready;
use crate::relay::joined::{Joining, Step};
use crate::relay::listen::connected_beside;
use crate::relay::pair::SocketStage;
use crate::relay::store::{BATCH, Store};

/// Datagrams of one sender from which on the kernel may join it to its socket: a question and its answer
/// are not worth two more system calls.
const JOIN_AFTER: usize = 4;

/// Most senders that are joined. Before Linux 6.13 the kernel searches the sockets of one address one
/// after the other for each datagram.
const MOST_JOINED: usize = 256;

impl Associations {
    /// Gives a sender with several datagrams a socket of its own, to be joined to the one to the target.
    /// Its later datagrams come there; those that wait at the listener are sent before.
    pub(super) fn connect_sender(&mut self, key: u32, received: usize) {
        let (Some(address), Some(association)) = (self.connects_at, self.table.get_mut(key)) else {
            return;
        };
        association.received += received;
        let ready = association.stage == SocketStage::Connected && association.held.is_empty();
        if association.received < JOIN_AFTER
            || !ready
            || self.joined >= MOST_JOINED
            || !matches!(association.joining, Joining::No)
        {
            return;
        }
        let Some(sender) = association.source.ip() else {
            return;
        };
        match connected_beside(address, sender) {
            Ok(socket) => {
                association.joining = Joining::Soon(socket);
                self.joined += 1;
                self.joining.push(key);
            }
            Err(error) => {
                tracing::debug!(%sender, "cannot make a socket for a sender: {error}");
                association.joining = Joining::Refused;
            }
        }
    }

    /// Has the kernel join the sockets of an association.
    pub(super) fn join(
        &mut self,
        key: u32,
        store: &mut Store,
        opener: &mut impl Opener,
        done: &mut TurnCounts,
    ) {
        let Some(association) = self.table.get_mut(key) else {
            return;
        };
        let sender = match std::mem::replace(&mut association.joining, Joining::Refused) {
            Joining::Soon(sender) => sender,
            other => {
                association.joining = other;
                return;
            }
        };
        let Some(target) = association.side.socket.take() else {
            self.joined -= 1;
            return;
        };
        match opener.join([sender, target], key) {
            Ok(joined) => {
                association.joining = Joining::Yes(Box::new(joined));
                self.set_ready(key, Ready::default());
            }
            Err([sender, target]) => {
                self.joined -= 1;
                association.side.socket.put(target);
                // What came there meanwhile.
                let batch = store.batch();
                while let (Ok(got @ 1..), Ok(fd)) =
                    (batch.receive(&sender, BATCH), association.target())
                {
                    let sent = batch.send(fd, 0..got, None).unwrap_or(0);
                    let bytes: usize = (0..sent).map(|n| batch.message(n).len()).sum();
                    association.bytes[0] += bytes as u64;
                    done.bytes[0] += bytes as u64;
                    association.dropped += (got - sent) as u64;
                    done.dropped += (got - sent) as u64;
                }
            }
        }
    }

    /// A turn of an association whose sockets the kernel joins. Returns why it ends, if it does.
    pub(super) fn step(
        &mut self,
        key: u32,
        store: &mut Store,
        opener: &mut impl Opener,
        now: Instant,
        done: &mut TurnCounts,
    ) -> Option<Ended> {
        let Joining::Yes(joined) = &mut self.table.get_mut(key)?.joining else {
            return None;
        };
        let step = joined.step(store.scratch(), now);
        if let Step::Wait(again) = step {
            opener.watch(joined, key);
            self.turns.plan(key, joined, again.map(|again| now + again));
        }
        self.observe(key, now, done);
        match step {
            Step::Wait(_) => None,
            Step::Ended => Some(Ended::Closed),
            Step::Failed(_, errno) => Some(Ended::Failed(errno)),
        }
    }
}

impl SenderAssociation {
    /// The socket to the target.
    pub(super) fn target(&self) -> Result<BorrowedFd<'_>, Errno> {
        match &self.joining {
            Joining::Yes(joined) => Ok(joined.socket(1)),
            _ => self.side.socket.fd(),
        }
    }

    /// Sends a run of messages to the target.
    pub(super) fn send(&self, batch: &Batch, messages: Range<usize>) -> io::Result<usize> {
        match &self.joining {
            Joining::Yes(joined) => batch.send(joined.socket(1), messages, None),
            _ => self.side.socket.send_batch(batch, messages, None),
        }
    }

    /// Whether the kernel joins its sockets.
    pub(in crate::relay) fn is_joined(&self) -> bool {
        matches!(self.joining, Joining::Yes(_))
    }

    /// Counts the datagrams that the kernel has moved since the last call; returns whether there are any.
    pub(super) fn observe(&mut self, done: &mut TurnCounts) -> bool {
        let Joining::Yes(joined) = &self.joining else {
            return false;
        };
        let ((bytes, lost), before) = ((joined.bytes(), joined.lost()), self.redirected);
        if (bytes, lost) == before {
            return false;
        }
        for (end, (now, before)) in bytes.into_iter().zip(before.0).enumerate() {
            self.bytes[end] += now - before;
            done.bytes[end] += now - before;
        }
        self.dropped += lost - before.1;
        done.dropped += lost - before.1;
        self.redirected = (bytes, lost);
        true
    }
}
