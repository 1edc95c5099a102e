//! Two sockets that the kernel joins (`--way sockmap`): their turns, events and counters.
//!
//! # Invariants
//! - The sockets belong to the [`sockmap::RedirectedPair`]: nothing else receives from them.
//! - A socket whose direction moves bytes is not watched for bytes, which would wake the worker for each
//!   packet; turns come by time then. A socket whose direction is idle is watched, and needs no time.
//! - Where the kernel redirects one direction only, from vsock to TCP, the pair moves the other one by hand
//!   through duplicates of the descriptors, and the target of the redirection is watched for everything.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{SocketType, sockopt};
use zerosock_proto::Instant;
use zerosock_virtio::poller::{Interest, Poller, Token};

use crate::sockmap::{self, Directions, InsertError, RedirectState, RelayMap, Side};

/// Bytes of a stream that may be under way inside the kernel.
const LIMIT: u64 = 4 << 20;

/// Bytes of datagrams that may pass between two turns, which are 64 ms apart after a rest and later when the
/// processors are busy: more are dropped. Datagrams wait inside the kernel only while a full socket buffer
/// holds the target up, and a turn then allows no more.
const DATAGRAM_LIMIT: u64 = 64 << 20;

/// How long bytes that a socket had sent before it failed may take to reach the other socket.
const LINGER: Duration = Duration::from_secs(1);

/// How often that is looked at.
const LOOK: Duration = Duration::from_millis(1);

const SIDES: [Side; 2] = [Side::A, Side::B];

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Joined {
    pair: sockmap::RedirectedPair<OwnedFd>,
    /// The direction from each socket is idle.
    idle: [bool; 2],
    /// The events for which each socket is registered; `None`: others than are needed here.
    watched: [Option<Interest>; 2],
    /// When the next turn is due: its place in [`Turns`].
    due: Option<Instant>,
    /// A socket has failed, and until when its last bytes are waited for.
    failed: Option<(usize, Errno, Instant)>,
    /// The direction that is moved by hand: 0 from the first socket, 1 from the second.
    by_hand: Option<usize>,
}

/// Whether the kernel joins an association's sockets.
#[derive(Debug)]
pub(super) enum Joining {
    /// Not, or not yet.
    No,
    /// It did not work.
    Refused,
    /// The socket that receives the sender's datagrams exists.
    Soon(OwnedFd),
    Yes(Box<Joined>),
}

/// What a turn ended with.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Step {
    /// Until an event, or for so long.
    Wait(Option<Duration>),
    /// Both directions have ended.
    Ended,
    /// A socket has failed.
    Failed(usize, Errno),
}

impl Joined {
    /// Joins two connected sockets.
    ///
    /// # Errors
    /// The reason, with the sockets.
    pub(super) fn new(
        map: &RelayMap,
        [a, b]: [OwnedFd; 2],
        directions: Directions,
    ) -> Result<Joined, InsertError<OwnedFd>> {
        let is_udp = sockopt::socket_type(&a) == Ok(SocketType::DGRAM);
        let limit = if is_udp { DATAGRAM_LIMIT } else { LIMIT };
        let pair = map.insert_pair(a, b, limit, directions)?;
        Ok(Joined {
            pair,
            idle: [false; 2],
            watched: [None; 2],
            due: None,
            failed: None,
            by_hand: match directions {
                Directions::Both => None,
                Directions::FromA => Some(1),
                Directions::FromB => Some(0),
            },
        })
    }

    /// A socket of the pair, to send to it.
    pub(super) fn socket(&self, index: usize) -> BorrowedFd<'_> {
        self.pair.socket(SIDES[index & 1]).as_fd()
    }

    /// The direction that is moved by hand; `None` while the bytes before the end of the pair are waited
    /// for.
    pub(super) fn by_hand(&self) -> Option<usize> {
        self.by_hand.filter(|_| self.failed.is_none())
    }

    /// Goes on redirecting to a socket to which a datagram could not be sent.
    pub(super) fn insert_again(&self, index: usize) {
        if let Err(error) = self.pair.insert_again(SIDES[index & 1]) {
            tracing::debug!("cannot insert a socket again: {error}");
        }
    }

    /// Does what is due in both directions. `scratch` has room for any datagram.
    pub(super) fn step(&mut self, scratch: &mut [u8], now: Instant) -> Step {
        if self.failed.is_none() {
            let mut again: Option<Duration> = None;
            let mut ended = true;
            for (index, side) in SIDES.into_iter().enumerate() {
                match self.pair.turn(side, scratch) {
                    Ok(turn) => {
                        ended &= turn.state == RedirectState::Ended;
                        self.idle[index] = turn.state == RedirectState::Idle;
                        again = again.into_iter().chain(turn.again).min();
                    }
                    Err(error) => {
                        tracing::debug!("{error}");
                        let errno = Errno::from_io_error(&error.error).unwrap_or(Errno::NOBUFS);
                        let failed = usize::from(error.side == Side::B);
                        self.failed = Some((failed, errno, now + LINGER));
                        break;
                    }
                }
            }
            if self.failed.is_none() {
                return match ended {
                    true => Step::Ended,
                    false => Step::Wait(again),
                };
            }
        }
        match self.failed {
            Some((index, errno, until))
                if now >= until || self.pair.has_delivered(SIDES[index & 1]) =>
            {
                Step::Failed(index, errno)
            }
            _ => Step::Wait(Some(LOOK)),
        }
    }

    /// Registers the sockets for the events that their directions need. `needs_room`: bytes that are moved
    /// by hand wait for room. (A vsock socket tells of room with each packet that arrives.)
    pub(super) fn watch(&mut self, poller: &Poller, tokens: [Token; 2], needs_room: bool) {
        for (index, token) in tokens.into_iter().enumerate() {
            if self.by_hand == Some(index) {
                continue;
            }
            let wanted = match (self.idle[index], needs_room) {
                (true, false) => Interest::ReadUntilEnd,
                (true, true) => Interest::All,
                (false, false) => Interest::End,
                (false, true) => Interest::WriteUntilEnd,
            };
            if self.watched[index] == Some(wanted) {
                continue;
            }
            self.watched[index] = Some(wanted);
            if let Err(error) = poller.change(self.socket(index), token, wanted) {
                tracing::warn!("cannot wait for the events of a socket: {error}");
            }
        }
    }

    /// Bytes that have passed to the second socket, and to the first.
    pub(super) fn bytes(&self) -> [u64; 2] {
        SIDES.map(|side| {
            let counters = self.pair.counters(side);
            counters.redirected_bytes + counters.by_hand_bytes
        })
    }

    /// Datagrams that did not pass.
    pub(super) fn lost(&self) -> u64 {
        let lost = SIDES.map(|side| {
            let counters = self.pair.counters(side);
            counters.empty_packets + counters.lost_datagrams
        });
        lost.iter().sum()
    }

    /// Ends the redirection.
    pub(super) fn into_sockets(self) -> [OwnedFd; 2] {
        let [forth, back] = SIDES.map(|side| self.pair.counters(side));
        tracing::debug!(
            redirected = forth.redirected_bytes + back.redirected_bytes,
            by_hand = forth.by_hand_bytes + back.by_hand_bytes,
            "the kernel no longer joins two sockets"
        );
        self.pair.into_sockets()
    }
}

/// When joined pairs have their next turns.
#[derive(Debug, Default)]
pub(super) struct Turns(BTreeSet<(Instant, u32)>);

impl Turns {
    /// Plans the next turn of the pair `key`; `None`: none by time.
    pub(super) fn plan(&mut self, key: u32, joined: &mut Joined, at: Option<Instant>) {
        if joined.due == at {
            return;
        }
        if let Some(before) = std::mem::replace(&mut joined.due, at) {
            self.0.remove(&(before, key));
        }
        if let Some(at) = at {
            self.0.insert((at, key));
        }
    }

    /// When the first turn is due.
    pub(super) fn next(&self) -> Option<Instant> {
        self.0.first().map(|(at, _)| *at)
    }

    /// Removes a pair whose turn is due. Its [`Joined`] is told by [`plan`](Self::plan).
    pub(super) fn pop(&mut self, now: Instant) -> Option<u32> {
        let (at, key) = *self.0.first()?;
        (at <= now).then(|| {
            self.0.remove(&(at, key));
            key
        })
    }
}
