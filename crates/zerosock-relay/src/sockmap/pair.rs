//! A pair of joined sockets, and what is done for it by hand.

use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::socket_error;
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};
use zerosock_sys::bpf::Slot;
use zerosock_sys::tcp_written;

use super::maps::{MapEntries, Side};

/// How soon a direction that moves bytes needs its next turn: its limit is what may pass until then.
const SOON: Duration = Duration::from_millis(1);
/// The longest time between turns of a direction that waits for its target.
const LATE: Duration = Duration::from_millis(64);
/// How soon a datagram direction at rest needs a turn, to raise its allowance: no event tells that the
/// kernel redirects again.
const DATAGRAMS: Duration = Duration::from_millis(64);
/// Turns without bytes after which a direction is idle.
const IDLE_TURNS: u32 = 4;
/// Reads by hand in one turn.
const BUDGET: u32 = 64;
/// Bytes of the buffer that a turn needs, and the largest receive buffer of a vsock source: one read then
/// takes all that is there. The kernel would redirect a packet that was read in part once more as a whole.
pub const SCRATCH: usize = 256 << 10;

/// Two joined sockets. Dropping it ends the redirection and drops the sockets.
///
/// Bytes that the kernel has redirected and that the target has not taken are lost then: call
/// [`RedirectedPair::turn`] until [`RedirectState::Ended`] first.
#[derive(Debug)]
pub struct RedirectedPair<S> {
    ends: MapEntries,
    directions: [Redirection; 2],
    sockets: [S; 2],
}

/// What a direction does.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum RedirectState {
    /// The kernel redirects, and bytes pass.
    Redirecting,
    /// The kernel would redirect, and no bytes pass.
    Idle,
    /// Bytes or the end of the stream wait until the target has taken what is before them.
    Waiting,
    /// The target has the last byte and the end of the stream, or the pair has no such direction.
    Ended,
}

/// Outcome of a turn.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Turn {
    /// What the direction does.
    pub state: RedirectState,
    /// When the next turn is due, unless a socket becomes ready earlier.
    pub again: Option<Duration>,
}

/// What one direction has moved so far.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub struct DirectionCounters {
    /// Bytes that the kernel has redirected.
    pub redirected_bytes: u64,
    /// Packets that the kernel has redirected.
    pub redirected_packets: u64,
    /// Bytes that turns have received and sent.
    pub by_hand_bytes: u64,
    /// Empty packets, which the kernel cannot redirect, and datagrams beyond the limit.
    pub empty_packets: u64,
    /// Datagrams received by hand that the target refused.
    pub lost_datagrams: u64,
}

/// A socket of the pair has failed: the connection of the other should be reset too.
#[derive(Debug, thiserror::Error)]
#[error("sockmap: socket {side:?}: {error}")]
pub struct TurnError {
    /// The socket that failed.
    pub side: Side,
    /// Its error, such as ECONNRESET.
    pub error: io::Error,
}

/// State of the direction that begins at one side.
#[derive(Debug)]
pub(super) struct Redirection {
    datagrams: bool,
    /// Bytes that may be under way.
    limit: u64,
    /// Bytes written to the target before the first one of this direction. `None` if its kind has no
    /// such count: then the source has datagrams, which have no end.
    base: Option<u64>,
    /// Bytes received and sent by hand.
    by_hand: u64,
    /// Datagrams that the target refused.
    lost: u64,
    /// Bytes received by hand that the target has not taken. The program redirects no stream meanwhile.
    rest: Vec<u8>,
    /// Redirected bytes at the last turn.
    seen: u64,
    /// Turns since bytes were redirected.
    idle: u32,
    /// Turns that waited without an effect.
    waited: u32,
    ended: bool,
}

/// What poll(2) says of a direction.
#[derive(Copy, Clone, Debug)]
struct Polled {
    /// The source has received the end of its stream.
    end: bool,
    /// The target takes bytes.
    writable: bool,
}

impl Redirection {
    pub(super) fn new(datagrams: bool, limit: u64, base: Option<u64>) -> Redirection {
        Redirection {
            datagrams,
            limit,
            base,
            ended: false,
            ..Redirection::none()
        }
    }

    /// One that the pair does not redirect.
    pub(super) fn none() -> Redirection {
        Redirection {
            datagrams: false,
            limit: 0,
            base: None,
            by_hand: 0,
            lost: 0,
            rest: Vec::new(),
            seen: 0,
            idle: 0,
            waited: 0,
            ended: true,
        }
    }
}

impl<S: AsFd> RedirectedPair<S> {
    pub(super) fn new(
        ends: MapEntries,
        directions: [Redirection; 2],
        sockets: [S; 2],
    ) -> RedirectedPair<S> {
        RedirectedPair {
            ends,
            directions,
            sockets,
        }
    }

    /// A socket of the pair. Do not receive from it, and do not send while its direction has not ended.
    pub fn socket(&self, side: Side) -> &S {
        &self.sockets[side.index()]
    }

    /// Ends the redirection, and returns the sockets.
    pub fn into_sockets(self) -> [S; 2] {
        let RedirectedPair { ends, sockets, .. } = self;
        drop(ends);
        sockets
    }

    /// What the direction from this side has moved.
    pub fn counters(&self, from: Side) -> DirectionCounters {
        let direction = &self.directions[from.index()];
        let Some(slot) = self.ends.slot(from) else {
            return DirectionCounters::default();
        };
        DirectionCounters {
            redirected_bytes: slot.bytes.load(Acquire),
            redirected_packets: slot.packets.load(Acquire),
            by_hand_bytes: direction.by_hand,
            empty_packets: slot.dropped.load(Acquire),
            lost_datagrams: direction.lost,
        }
    }

    /// Goes on redirecting to a socket after an error that a send of the caller has taken. Only datagrams
    /// may be sent besides turns, because they need no order.
    ///
    /// # Errors
    /// Errors of bpf(2).
    pub fn insert_again(&self, side: Side) -> io::Result<()> {
        self.ends.insert_again(side, self.socket(side))
    }

    /// Whether the target has taken all that was redirected to it, for an end after a failure of the
    /// source. Datagrams count as taken.
    pub fn has_delivered(&self, from: Side) -> bool {
        let direction = &self.directions[from.index()];
        let (Some(slot), Some(base)) = (self.ends.slot(from), direction.base) else {
            return true;
        };
        let passed = slot.bytes.load(Acquire) + direction.by_hand;
        let written = tcp_written(&self.sockets[from.other().index()]);
        direction.ended || written.is_ok_and(|written| written >= base + passed)
    }

    /// Does by hand what is due in the direction from this side. It does not block.
    ///
    /// `scratch` is for what passes by hand, of [`SCRATCH`] bytes or more; it holds nothing between calls.
    /// After an error the direction does not work any more.
    ///
    /// # Errors
    /// See [`TurnError`]; `InvalidInput` for a smaller `scratch`. Errors of datagram sockets, such as ECONNREFUSED, are no errors of the
    /// direction.
    pub fn turn(&mut self, from: Side, scratch: &mut [u8]) -> Result<Turn, TurnError> {
        let direction = &mut self.directions[from.index()];
        let (Some(slot), false) = (self.ends.slot(from), direction.ended) else {
            return Ok(Turn {
                state: RedirectState::Ended,
                again: None,
            });
        };
        if scratch.len() < SCRATCH {
            let error = io::ErrorKind::InvalidInput.into();
            return Err(TurnError { side: from, error });
        }
        let target = &self.sockets[from.other().index()];
        let mut work = Work {
            from,
            source: &self.sockets[from.index()],
            target,
            slot,
            direction,
            refused: false,
        };
        let turn = work.run(scratch);
        if work.refused {
            let again = self.ends.insert_again(from.other(), target);
            let side = from.other();
            again.map_err(|error| TurnError { side, error })?;
        }
        turn
    }
}

/// One turn of one direction.
struct Work<'a, S> {
    from: Side,
    source: &'a S,
    target: &'a S,
    slot: &'a Slot,
    direction: &'a mut Redirection,
    /// The target of datagrams has reported an error.
    refused: bool,
}

/// How far forwarding by hand came.
enum Handed {
    /// Nothing is left at the source.
    Drained,
    /// The source has no more bytes, and the target has all of them.
    End,
    /// The target has to take bytes first, or the budget is used up.
    Waiting,
}

impl<S: AsFd> Work<'_, S> {
    fn run(&mut self, scratch: &mut [u8]) -> Result<Turn, TurnError> {
        let ready = self.poll()?;
        if self.direction.datagrams {
            self.forward_datagrams(scratch)?;
            self.allow(ready)?;
            return Ok(self.redirecting(Some(DATAGRAMS)));
        }
        if ready.end {
            // What a peer sent behind its end must not pass beside the reads of `forward`.
            self.slot.allowance.store(0, Release);
        }
        if !self.is_open() {
            let before = self.direction.by_hand;
            match self.forward(ready, scratch)? {
                Handed::Drained => self.direction.waited = 0,
                Handed::End => {
                    self.direction.ended = true;
                    return Ok(Turn {
                        state: RedirectState::Ended,
                        again: None,
                    });
                }
                Handed::Waiting => {
                    if self.direction.by_hand > before {
                        self.direction.waited = 0;
                    }
                    let again = SOON * (1 << self.direction.waited.min(6));
                    self.direction.waited += 1;
                    return Ok(Turn {
                        state: RedirectState::Waiting,
                        again: Some(again.min(LATE)),
                    });
                }
            }
        }
        self.allow(ready)?;
        if !self.is_open() {
            // More came while the last turn's bytes were on their way.
            return Ok(Turn {
                state: RedirectState::Waiting,
                again: Some(SOON),
            });
        }
        Ok(self.redirecting(None))
    }

    /// Whether the program redirects.
    fn is_open(&self) -> bool {
        let slot = self.slot;
        slot.allowance.load(Acquire) > 0 && self.is_handled()
    }

    /// Whether everything that the program has left at the source was sent on.
    fn is_handled(&self) -> bool {
        self.slot.passed.load(Acquire) == self.slot.handled.load(Acquire)
    }

    /// The turn of a direction that redirects. `at_rest` is its time when no bytes pass.
    fn redirecting(&mut self, at_rest: Option<Duration>) -> Turn {
        let bytes = self.slot.bytes.load(Acquire);
        let direction = &mut *self.direction;
        if bytes == direction.seen {
            direction.idle = direction.idle.saturating_add(1);
        } else {
            direction.idle = 0;
            direction.seen = bytes;
        }
        if direction.idle >= IDLE_TURNS {
            return Turn {
                state: RedirectState::Idle,
                again: at_rest,
            };
        }
        Turn {
            state: RedirectState::Redirecting,
            again: Some(SOON),
        }
    }

    /// Raises the number of bytes that the program may redirect.
    fn allow(&mut self, ready: Polled) -> Result<(), TurnError> {
        let direction = &*self.direction;
        let allowance = match direction.base {
            Some(base) => {
                let taken = self.written()?.saturating_sub(base + direction.by_hand);
                taken.saturating_add(direction.limit)
            }
            None if ready.writable => self.slot.bytes.load(Acquire) + direction.limit,
            None => return Ok(()),
        };
        self.slot.allowance.store(allowance, Release);
        Ok(())
    }

    /// Whether the target has taken everything that was redirected.
    fn is_taken(&mut self) -> Result<bool, TurnError> {
        let bytes = self.slot.bytes.load(Acquire);
        let Some(base) = self.direction.base else {
            return Ok(false);
        };
        Ok(self.written()? >= base + bytes + self.direction.by_hand)
    }

    /// Sends on what the program has left at the source, once the target has what came before.
    ///
    /// It is called only while the program redirects nothing ([`is_open`](Self::is_open) is false), and that
    /// changes only here, in [`handle`](Self::handle), or in [`allow`](Self::allow) after it. So nothing is
    /// redirected between the look at what the target has taken and the last send below, and the bytes
    /// that are read follow all that were redirected before.
    fn forward(&mut self, ready: Polled, scratch: &mut [u8]) -> Result<Handed, TurnError> {
        if !self.is_taken()? || !self.send_rest()? {
            return Ok(Handed::Waiting);
        }
        for _ in 0..BUDGET {
            // What the program leaves here after this line is not handled by the read below.
            let passed = self.slot.passed.load(Acquire);
            let received = match recv(self.source, &mut *scratch, RecvFlags::DONTWAIT) {
                Ok((received, _)) => received,
                Err(Errno::INTR) => continue,
                // A vsock socket with a program says this also at the end of its stream.
                Err(Errno::AGAIN) if ready.end => 0,
                Err(Errno::AGAIN) => {
                    self.handle(passed);
                    return Ok(Handed::Drained);
                }
                Err(error) => return Err(self.failed(self.from, error)),
            };
            if received == 0 {
                self.handle(passed);
                if !self.is_taken()? || !self.is_handled() {
                    return Ok(Handed::Waiting);
                }
                return self.end();
            }
            let sent = self.send(&scratch[..received])?;
            if sent < received {
                self.direction
                    .rest
                    .extend_from_slice(&scratch[sent..received]);
                return Ok(Handed::Waiting);
            }
        }
        Ok(Handed::Waiting)
    }

    /// Lets the program redirect if nothing that it has left is still to come. `passed` was read before
    /// a read that found nothing: the kernel makes readable what the program leaves before it gives the
    /// socket to that read. All of it is in the target's send queue, and what the program redirects from
    /// here on comes after it. What it has left meanwhile it does not find in `handled`.
    fn handle(&self, passed: u64) {
        self.slot.handled.store(passed, Release);
    }

    /// Passes the end of the stream on.
    fn end(&self) -> Result<Handed, TurnError> {
        match shutdown(self.target, Shutdown::Write) {
            // Not connected: the other end has reset the connection, which the direction back sees.
            Ok(()) | Err(Errno::NOTCONN) => Ok(Handed::End),
            Err(error) => Err(self.failed(self.from.other(), error)),
        }
    }

    /// Sends what the target did not take earlier; whether all of it is gone.
    fn send_rest(&mut self) -> Result<bool, TurnError> {
        let mut rest = std::mem::take(&mut self.direction.rest);
        let sent = self.send(&rest)?;
        if sent < rest.len() {
            rest.drain(..sent);
            self.direction.rest = rest;
            return Ok(false);
        }
        Ok(true)
    }

    /// Sends by hand as much as the target takes.
    fn send(&mut self, bytes: &[u8]) -> Result<usize, TurnError> {
        let mut sent = 0;
        while sent < bytes.len() {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match send(self.target, &bytes[sent..], flags) {
                Ok(count) => sent += count,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(error) => return Err(self.failed(self.from.other(), error)),
            }
        }
        self.direction.by_hand += sent as u64;
        Ok(sent)
    }

    /// Sends on datagrams that were there before the program ran, or that it left.
    fn forward_datagrams(&mut self, scratch: &mut [u8]) -> Result<(), TurnError> {
        for _ in 0..BUDGET {
            let passed = self.slot.passed.load(Acquire);
            if !self.send_rest()? {
                return Ok(());
            }
            let received = match recv(self.source, &mut *scratch, RecvFlags::DONTWAIT) {
                Ok((received, _)) => received,
                Err(Errno::AGAIN) => {
                    self.slot.handled.store(passed, Release);
                    return Ok(());
                }
                // Interrupted, or what an ICMP message has reported.
                Err(_) => continue,
            };
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match send(self.target, &scratch[..received], flags) {
                Ok(sent) => {
                    self.direction.by_hand += sent as u64;
                    // A stream as the target may take a part.
                    self.direction
                        .rest
                        .extend_from_slice(&scratch[sent..received]);
                }
                Err(_) => self.direction.lost += 1,
            }
        }
        Ok(())
    }

    fn poll(&mut self) -> Result<Polled, TurnError> {
        let mut sockets = [
            PollFd::new(self.source, PollFlags::RDHUP),
            PollFd::new(self.target, PollFlags::OUT),
        ];
        if let Err(error) = poll(&mut sockets, Some(&Timespec::default())) {
            return Err(self.failed(self.from, error));
        }
        let [source, target] = sockets.map(|socket| socket.revents());
        for (side, socket, events) in [
            (self.from, self.source, source),
            (self.from.other(), self.target, target),
        ] {
            let source = side == self.from;
            if !events.contains(PollFlags::ERR) || (self.direction.datagrams && source) {
                // The error of a source of datagrams is one of the direction back.
                continue;
            }
            if let Ok(Err(error)) = socket_error(socket) {
                if !self.direction.datagrams {
                    return Err(self.failed(side, error));
                }
                self.refused = true;
            }
        }
        Ok(Polled {
            end: source.intersects(PollFlags::RDHUP | PollFlags::HUP),
            writable: target.contains(PollFlags::OUT),
        })
    }

    fn written(&self) -> Result<u64, TurnError> {
        tcp_written(self.target).map_err(|error| TurnError {
            side: self.from.other(),
            error,
        })
    }

    fn failed(&self, side: Side, error: Errno) -> TurnError {
        TurnError {
            side,
            error: error.into(),
        }
    }
}
