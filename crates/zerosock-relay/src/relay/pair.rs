//! Two sockets that are joined, from the first one's existence to the end of both.
//!
//! # Invariants
//! - Bytes move only when both sockets are connected.
//! - A pair at rest has this structure and its two sockets, nothing else. See the test for its size.
//! - The end of a direction is passed on after its last byte. A reset is passed on as a reset, and bytes
//!   that a socket had received before are delivered first where the kernel still has them.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::io::Errno;
use zerosock_proto::Instant;

use super::direction::{Direction, DirectionEnd, Outcome, Ready, WatchedSocket};
use super::joined::{Joined, Step};
use super::socket::SocketKind;
use super::store::Store;
use super::way::Mode;
use crate::due::{Link, Linked};
use crate::sockmap::{self, Directions, Refusal, RelayMap};

/// Bytes that each direction of a pair moves in a turn before other pairs have theirs.
const BUDGET: usize = 1 << 20;

/// Where a connection came from.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Origin {
    /// A client of a TCP listener.
    Ip(SocketAddr),
    /// A client of a Unix listener.
    Unix,
    /// A client of a listener of AF_VSOCK.
    Vsock { cid: u32, port: u32 },
    /// Both sockets were connected from here.
    Here,
}

/// How far a socket is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum SocketStage {
    /// The connector is asked for it.
    Absent,
    /// connect(2) has not finished.
    Connecting,
    /// Connected to a hybrid socket, which has not answered CONNECT yet.
    Greeting,
    Connected,
}

/// Why a pair ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Reason {
    /// Both directions have ended, and all bytes were delivered.
    Closed,
    /// A socket failed: 0 for the first, 1 for the second.
    Failed(u8, Errno),
    /// No byte moved for the idle time-out.
    Idle,
    /// The relay ends.
    Stopped,
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Pair {
    sides: [WatchedSocket; 2],
    /// The first is from the first socket to the second.
    directions: [Direction; 2],
    stages: [SocketStage; 2],
    /// On the list of pairs that have work.
    pub(super) queued: bool,
    /// The error of a socket that still had bytes to deliver.
    failure: Option<(u8, Errno)>,
    link: Link,
    /// The kernel may join the sockets when they are connected.
    joins: bool,
    /// The sockets while the kernel joins them.
    joined: Option<Box<Joined>>,
    /// Bytes that the kernel has moved, as far as they are counted.
    redirected: [u64; 2],
    /// Tells the pair from its successor in the same slot.
    pub(super) serial: u32,
    pub(super) source: Origin,
    /// The address of the second socket's peer, if it has one.
    pub(super) target: Option<SocketAddr>,
    pub(super) opened: Instant,
    /// When bytes moved last.
    pub(super) moved: Instant,
}

impl Linked for Pair {
    fn link(&mut self) -> &mut Link {
        &mut self.link
    }
}

/// What a turn of a pair ended with.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum PairOutcome {
    /// Nothing to do before the next edge.
    Waiting,
    /// More to do.
    Busy,
    Ended(Reason),
}

impl Pair {
    pub(super) fn new(
        sides: [(WatchedSocket, SocketStage); 2],
        modes: [Mode; 2],
        source: Origin,
        serial: u32,
        now: Instant,
    ) -> Pair {
        let [(first, first_stage), (second, second_stage)] = sides;
        Pair {
            sides: [first, second],
            directions: modes.map(Direction::new),
            stages: [first_stage, second_stage],
            queued: false,
            failure: None,
            link: Link::default(),
            joins: false,
            joined: None,
            redirected: [0; 2],
            serial,
            source,
            target: None,
            opened: now,
            moved: now,
        }
    }

    pub(super) fn side(&self, index: usize) -> &WatchedSocket {
        &self.sides[index & 1]
    }

    pub(super) fn side_mut(&mut self, index: usize) -> &mut WatchedSocket {
        &mut self.sides[index & 1]
    }

    pub(super) fn stage(&self, index: usize) -> SocketStage {
        self.stages[index & 1]
    }

    pub(super) fn set_stage(&mut self, index: usize, stage: SocketStage) {
        self.stages[index & 1] = stage;
    }

    /// Whether both sockets are connected.
    pub(super) fn is_connected(&self) -> bool {
        self.stages == [SocketStage::Connected; 2]
    }

    /// Sends these bytes to the second socket before those of the first.
    pub(super) fn prepend(&mut self, bytes: Vec<u8>, store: &mut Store) {
        self.directions[0].prepend(bytes, store);
    }

    /// Bytes that were delivered to the second socket, and to the first.
    pub(super) fn bytes(&self) -> [u64; 2] {
        [self.directions[0].bytes, self.directions[1].bytes]
    }

    /// Messages that were not delivered.
    pub(super) fn dropped(&self) -> u32 {
        self.directions[0].dropped + self.directions[1].dropped
    }

    /// Has the kernel join the sockets when they are connected.
    pub(super) fn join_when_connected(&mut self) {
        self.joins = true;
    }

    /// Whether that is still to be tried.
    pub(super) fn joins(&self) -> bool {
        self.joins
    }

    /// What the pair has while the kernel joins its sockets.
    pub(super) fn joined(&mut self) -> Option<&mut Joined> {
        self.joined.as_deref_mut()
    }

    /// Whether bytes that are moved by hand beside a redirection wait for room at their target.
    pub(super) fn needs_room(&self) -> bool {
        let by_hand = self.joined.as_ref().and_then(|joined| joined.by_hand());
        by_hand.is_some_and(|index| !self.sides[1 - index].ready.has(Ready::WRITE))
    }

    pub(super) fn is_joined(&self) -> bool {
        self.joined.is_some()
    }

    /// Has the kernel join the sockets, before anything is read from them. Asked once; whether it does.
    ///
    /// # Errors
    /// Why it cannot; the bytes move as in other ways.
    pub(super) fn join(&mut self, map: &RelayMap, store: &mut Store) -> Result<bool, Refusal> {
        // A header that does not fit into the target's buffer: the bytes move as in other ways.
        let [_, target] = &mut self.sides;
        if !std::mem::take(&mut self.joins) || !self.directions[0].flush(target, store) {
            return Ok(false);
        }
        let [one, two] = &mut self.sides;
        let (Some(a), Some(b)) = (one.socket.take(), two.socket.take()) else {
            return Ok(false);
        };
        // The kernel redirects from vsock to TCP; the other direction is moved by hand.
        let directions = match one.socket.kind() {
            SocketKind::Vsock => Directions::FromA,
            _ => Directions::FromB,
        };
        let inserted = match duplicates([&a, &b]) {
            Ok(copies) => Joined::new(map, [a, b], directions)
                .map(|joined| (joined, copies))
                .map_err(|refused| (refused.error, refused.sockets)),
            Err((side, error)) => Err((Refusal::System { side, error }, [a, b])),
        };
        let (result, sockets) = match inserted {
            Ok((joined, copies)) => {
                self.joined = Some(Box::new(joined));
                for (side, fd) in self.sides.iter_mut().zip(copies) {
                    side.socket.put(fd);
                }
                return Ok(true);
            }
            Err(refused) => refused,
        };
        for (side, fd) in self.sides.iter_mut().zip(sockets) {
            side.socket.put(fd);
        }
        Err(result)
    }

    /// Counts what the kernel has moved since the last time.
    pub(super) fn observe(&mut self, now: Instant) {
        let Some(joined) = &self.joined else { return };
        let bytes = joined.bytes();
        if bytes != self.redirected {
            for (direction, (new, old)) in
                (self.directions.iter_mut()).zip(bytes.into_iter().zip(self.redirected))
            {
                direction.bytes += new - old;
            }
            self.redirected = bytes;
            self.moved = now;
        }
    }

    /// A turn while the kernel joins the sockets.
    pub(super) fn step(&mut self, store: &mut Store, now: Instant) -> Step {
        let Some(joined) = &mut self.joined else {
            return Step::Wait(None);
        };
        let mut step = joined.step(store.scratch(), now);
        if let Some(index) = joined.by_hand() {
            step = self.step_by_hand(index, step, store, now);
        }
        self.observe(now);
        step
    }

    /// Moves the bytes of the direction that the kernel does not redirect. `step` is what the other
    /// direction has come to.
    fn step_by_hand(&mut self, index: usize, step: Step, store: &mut Store, now: Instant) -> Step {
        let [one, two] = &mut self.sides;
        let (from, to) = if index == 0 { (one, two) } else { (two, one) };
        let direction = &mut self.directions[index];
        let before = direction.bytes;
        let outcome = direction.run(from, to, store, &mut { BUDGET });
        if direction.bytes != before {
            self.moved = now;
        }
        match outcome {
            Outcome::Waiting => {}
            Outcome::Exhausted => return Step::Wait(Some(Duration::ZERO)),
            Outcome::Finished => to.socket.finish_sending(),
            Outcome::Failed(DirectionEnd::Source, errno) => return Step::Failed(index, errno),
            Outcome::Failed(DirectionEnd::Target, errno) => {
                direction.abandon(store);
                self.failure.get_or_insert((1 - index as u8, errno));
            }
        }
        match (step, direction.is_done(), self.failure) {
            (Step::Ended, false, _) => Step::Wait(None),
            (Step::Ended, true, Some((side, errno))) => Step::Failed(side.into(), errno),
            _ => step,
        }
    }

    /// How the bytes move.
    pub(super) fn modes(&self) -> [Mode; 2] {
        [self.directions[0].mode(), self.directions[1].mode()]
    }

    /// Moves bytes both ways.
    pub(super) fn run(&mut self, store: &mut Store, now: Instant) -> PairOutcome {
        let before = self.directions[0].bytes + self.directions[1].bytes;
        let turn = self.run_directions(store);
        if self.directions[0].bytes + self.directions[1].bytes != before {
            self.moved = now;
        }
        turn
    }

    fn run_directions(&mut self, store: &mut Store) -> PairOutcome {
        // A socket that has failed may still have received bytes: they are read before a write takes the
        // error away.
        let first = usize::from(self.sides[1].ready.has(Ready::HUNG_UP));
        let mut busy = false;
        for index in 0..2 {
            // Datagrams have no end: a pair with them is over when the other peer is gone.
            let is_gone = self.sides[index].ready.has(Ready::HUNG_UP);
            if is_gone
                && self.directions[index].is_done()
                && !self.sides[1 - index].socket.kind().has_end()
            {
                return PairOutcome::Ended(Reason::Closed);
            }
        }
        for index in [first, 1 - first] {
            let [one, two] = &mut self.sides;
            let (from, to) = if index == 0 { (one, two) } else { (two, one) };
            let mut budget = BUDGET;
            match self.directions[index].run(from, to, store, &mut budget) {
                Outcome::Waiting => {}
                Outcome::Exhausted => busy = true,
                Outcome::Finished => {
                    // For the check above.
                    busy |= !self.sides[1 - index].socket.kind().has_end();
                    if !self.directions[1 - index].is_done() {
                        self.sides[1 - index].socket.finish_sending();
                    }
                }
                Outcome::Failed(DirectionEnd::Source, errno) => {
                    self.directions[index].abandon(store);
                    return PairOutcome::Ended(Reason::Failed(index as u8, errno));
                }
                Outcome::Failed(DirectionEnd::Target, errno) => {
                    self.directions[index].abandon(store);
                    self.failure.get_or_insert((1 - index as u8, errno));
                    // It may still have sent bytes, and will then end or fail.
                    self.sides[1 - index].ready.set(Ready::READ);
                    busy |= index != first;
                }
            }
        }
        if self.directions.iter().all(Direction::is_done) {
            return PairOutcome::Ended(match self.failure {
                Some((side, errno)) => Reason::Failed(side, errno),
                None => Reason::Closed,
            });
        }
        match busy {
            true => PairOutcome::Busy,
            false => PairOutcome::Waiting,
        }
    }

    /// Ends both directions and the sockets. After anything but an orderly end, the peers of TCP sockets
    /// get a reset.
    pub(super) fn close(mut self, reason: Reason, store: &mut Store) {
        if let Some(joined) = self.joined.take() {
            for (side, fd) in self.sides.iter_mut().zip(joined.into_sockets()) {
                side.socket.put(fd);
            }
        }
        for direction in &mut self.directions {
            direction.abandon(store);
        }
        // EPIPE: the socket's peer had ended in order, and did not want more bytes. The other peer has got
        // all that this one sent, and the kernel resets its connection if it sends more.
        if !matches!(reason, Reason::Closed | Reason::Failed(_, Errno::PIPE)) {
            for side in &self.sides {
                side.socket.reset_on_close();
            }
        }
    }
}

/// Descriptors of the same sockets.
fn duplicates(sockets: [&OwnedFd; 2]) -> Result<[OwnedFd; 2], (sockmap::Side, std::io::Error)> {
    let [a, b] = sockets;
    Ok([
        a.try_clone().map_err(|error| (sockmap::Side::A, error))?,
        b.try_clone().map_err(|error| (sockmap::Side::B, error))?,
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pair at rest uses this, its place in a slab that doubles as it grows, and entries of the kernel.
    #[test]
    fn a_pair_is_small() {
        let size = size_of::<Pair>();
        assert!(size <= 320, "{size} bytes");
    }
}
