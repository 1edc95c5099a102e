//! One direction of a pair: what is read from one socket and written to the other.
//!
//! # Invariants
//! - Nothing is read while bytes are held that the target did not take, nor while the target is known to
//!   take nothing: the source's sender feels the back-pressure of the target.
//! - Bytes are held in a chunk, a pipe or as messages only between a read and the write that takes the
//!   last of them.
//! - Sockets are watched for edges. A socket counts as ready until a call says otherwise.

use std::time::Duration;

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::pipe::{SpliceFlags, splice};
use zerosock_sys::mmsg::Batch;
use zerosock_sys::wait_ready;

use super::socket::{Socket, SocketKind};
use super::store::{BATCH, Chunk, Pipe, Store};
use super::way::Mode;
use crate::held_messages::HeldMessages;

/// What is known about a socket from its edges and from calls.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) struct Ready(u8);

impl Ready {
    pub(super) const READ: Ready = Ready(1);
    pub(super) const WRITE: Ready = Ready(2);
    /// The peer sends no more: a short read does not tell that all was read.
    pub(super) const FINISHED: Ready = Ready(4);
    /// There was an out-of-band byte, at which reads stop.
    pub(super) const URGENT: Ready = Ready(8);
    /// The socket has an error, or both of its directions are closed.
    pub(super) const HUNG_UP: Ready = Ready(16);

    pub(super) fn has(self, other: Ready) -> bool {
        self.0 & other.0 != 0
    }

    pub(super) fn set(&mut self, other: Ready) {
        self.0 |= other.0;
    }

    pub(super) fn clear(&mut self, other: Ready) {
        self.0 &= !other.0;
    }
}

/// A socket of a pair with its readiness.
#[derive(Debug)]
pub(super) struct WatchedSocket {
    pub(super) socket: Socket,
    pub(super) ready: Ready,
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Direction {
    held: Held,
    mode: Mode,
    state: SourceState,
    /// The last read found so much that a pipe pays. See [`Mode::Adaptive`].
    bulk: bool,
    /// Packets of messages to receive at once: few at first, because those that the target does not take are held.
    batch: u8,
    /// Bytes written to the target.
    pub(super) bytes: u64,
    /// Messages that were dropped because they were too long or the target refused them.
    pub(super) dropped: u32,
}

#[derive(Debug)]
enum Held {
    Nothing,
    Chunk(Chunk),
    Pipe(Pipe, u32),
    Messages(Box<HeldMessages>),
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum SourceState {
    Open,
    /// The source has ended, and what is held of it was not written yet.
    Ending,
    /// The source has ended and all of it was written, or the target takes no more.
    Done,
}

/// What ended a call of [`Direction::run`].
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Outcome {
    /// Nothing to do before an edge of one of the sockets.
    Waiting,
    /// The budget is used up.
    Exhausted,
    /// The source has ended and the target has all of it. Returned once.
    Finished,
    /// A socket has failed.
    Failed(DirectionEnd, Errno),
}

/// The ends of a direction.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum DirectionEnd {
    Source,
    Target,
}

/// Bytes of a read from which on the next one goes through a pipe.
const BULK: usize = 16 << 10;

/// What an error costs of the budget: peers can cause many, and one of the system may stay.
const ERROR_COST: usize = 1 << 10;

type Moved = Result<(), (DirectionEnd, Errno)>;

impl Direction {
    pub(super) fn new(mode: Mode) -> Direction {
        Direction {
            held: Held::Nothing,
            mode,
            state: SourceState::Open,
            bulk: false,
            batch: 4,
            bytes: 0,
            dropped: 0,
        }
    }

    /// Sends these bytes before anything is read.
    pub(super) fn prepend(&mut self, bytes: Vec<u8>, store: &mut Store) {
        store.lend(bytes.len());
        self.held = Held::Chunk(Chunk::of(bytes));
    }

    /// Writes what is held; false if something is left or the target has failed.
    pub(super) fn flush(&mut self, to: &mut WatchedSocket, store: &mut Store) -> bool {
        matches!(self.write_held(to, store), Ok(true))
    }

    pub(super) fn mode(&self) -> Mode {
        self.mode
    }

    pub(super) fn is_done(&self) -> bool {
        self.state == SourceState::Done
    }

    /// Ends the direction; what is held is lost.
    pub(super) fn abandon(&mut self, store: &mut Store) {
        self.state = SourceState::Done;
        match std::mem::replace(&mut self.held, Held::Nothing) {
            Held::Nothing => {}
            Held::Chunk(chunk) => store.release(chunk),
            Held::Pipe(pipe, _) => store.discard_pipe(pipe),
            Held::Messages(messages) => store.unlend(messages.memory()),
        }
    }

    /// Moves bytes until a socket has to be waited for or `budget` is used up.
    pub(super) fn run(
        &mut self,
        from: &mut WatchedSocket,
        to: &mut WatchedSocket,
        store: &mut Store,
        budget: &mut usize,
    ) -> Outcome {
        if self.state == SourceState::Done {
            return Outcome::Waiting;
        }
        loop {
            match self.write_held(to, store) {
                Ok(true) => {}
                Ok(false) => return Outcome::Waiting,
                Err(errno) => return Outcome::Failed(DirectionEnd::Target, errno),
            }
            if self.state == SourceState::Ending {
                self.state = SourceState::Done;
                return Outcome::Finished;
            }
            if !from.ready.has(Ready::READ) || !to.ready.has(Ready::WRITE) {
                return Outcome::Waiting;
            }
            if *budget == 0 {
                return Outcome::Exhausted;
            }
            let moved = match self.mode {
                Mode::Adaptive if !self.bulk => self.copy(from, to, store, budget),
                Mode::Splice | Mode::Adaptive => self.splice(from, to, store, budget),
                Mode::Copy => self.copy(from, to, store, budget),
                Mode::Messages => self.relay_messages(from, to, store, budget),
            };
            if let Err((end, errno)) = moved {
                return Outcome::Failed(end, errno);
            }
        }
    }

    /// Reads once into the worker's buffer and writes what was read.
    fn copy(
        &mut self,
        from: &mut WatchedSocket,
        to: &mut WatchedSocket,
        store: &mut Store,
        budget: &mut usize,
    ) -> Moved {
        let buffer = store.buffer();
        let room = buffer.len();
        let got = match from.socket.receive(buffer) {
            Ok(0) => {
                self.state = SourceState::Ending;
                return Ok(());
            }
            Ok(got) => got,
            Err(Errno::AGAIN) => {
                from.ready.clear(Ready::READ);
                return Ok(());
            }
            Err(errno) => return Err((DirectionEnd::Source, errno)),
        };
        self.bulk = got >= BULK;
        // Later bytes are another edge.
        if got < room && short_read_is_all(from) {
            from.ready.clear(Ready::READ);
        }
        *budget = budget.saturating_sub(got);
        let sent = match to.socket.send(&buffer[..got]) {
            Ok(sent) => sent,
            Err(Errno::AGAIN) => 0,
            Err(errno) => return Err((DirectionEnd::Target, errno)),
        };
        self.bytes += sent as u64;
        if sent < got {
            note_short_write(to, sent);
            self.held = Held::Chunk(store.keep(sent, got));
        }
        Ok(())
    }

    /// Moves pages from the source into a pipe, and from there into the target.
    fn splice(
        &mut self,
        from: &mut WatchedSocket,
        to: &mut WatchedSocket,
        store: &mut Store,
        budget: &mut usize,
    ) -> Moved {
        // Descriptors would be closed by this thread.
        if from.socket.carries_rights() {
            return self.copy(from, to, store, budget);
        }
        let Some(pipe) = store.take_pipe() else {
            return self.copy(from, to, store, budget);
        };
        let most = store.read_size();
        let fd = from
            .socket
            .fd()
            .map_err(|errno| (DirectionEnd::Source, errno))?;
        // The pipe is empty, so that EAGAIN speaks of the socket. A short read does not tell that all was
        // read: a pipe also fills up by the number of its pages.
        let got = loop {
            match splice(fd, None, &pipe.write, None, most, FLAGS) {
                Err(Errno::INTR) => {}
                got => break got,
            }
        };
        match got {
            Ok(0) => self.state = SourceState::Ending,
            Ok(got) => {
                self.bulk = got >= BULK;
                *budget = budget.saturating_sub(got);
                self.held = Held::Pipe(pipe, got as u32);
                return Ok(());
            }
            Err(Errno::AGAIN) => from.ready.clear(Ready::READ),
            Err(errno) => {
                store.release_pipe(pipe);
                return match errno {
                    // Some kernels cannot splice from this kind of socket.
                    Errno::INVAL => {
                        self.mode = Mode::Copy;
                        Ok(())
                    }
                    errno => Err((DirectionEnd::Source, errno)),
                };
            }
        }
        store.release_pipe(pipe);
        Ok(())
    }

    /// Receives a batch of messages and sends them.
    fn relay_messages(
        &mut self,
        from: &mut WatchedSocket,
        to: &mut WatchedSocket,
        store: &mut Store,
        budget: &mut usize,
    ) -> Moved {
        let has_end = from.socket.kind().has_end();
        let most = match store.read_size() < store.buffer_size() {
            true => 1,
            false => usize::from(self.batch),
        };
        let batch = store.batch();
        let got = match from.socket.receive_batch(batch, most) {
            Ok(got) => got,
            Err(error) => {
                return match Errno::from_io_error(&error).unwrap_or(Errno::IO) {
                    Errno::AGAIN => {
                        from.ready.clear(Ready::READ);
                        Ok(())
                    }
                    // An ICMP message about an earlier datagram.
                    _ if !has_end => {
                        *budget = budget.saturating_sub(ERROR_COST);
                        Ok(())
                    }
                    errno => Err((DirectionEnd::Source, errno)),
                };
            }
        };
        let packets = batch.packets();
        self.batch = match packets < most {
            true => 4.max(packets as u8),
            false => (self.batch * 2).min(BATCH as u8),
        };
        let end = end_of_messages(batch, got, from);
        let count = end.unwrap_or(got);
        if end.is_some() {
            self.state = SourceState::Ending;
        }
        // Of a connection no message may be missing.
        let long = (0..count).find(|&n| has_end && batch.is_truncated(n));
        self.send_messages(long.unwrap_or(count), to, store, budget)
            .map_err(|errno| (DirectionEnd::Target, errno))?;
        match long {
            Some(_) => Err((DirectionEnd::Source, Errno::MSGSIZE)),
            None => Ok(()),
        }
    }

    /// Sends the first messages of the worker's batch; holds those that the target does not take now.
    fn send_messages(
        &mut self,
        count: usize,
        to: &mut WatchedSocket,
        store: &mut Store,
        budget: &mut usize,
    ) -> Result<(), Errno> {
        let batch = store.batch();
        let mut next = 0;
        while next < count {
            if batch.is_truncated(next) {
                self.dropped += 1;
                next += 1;
                continue;
            }
            let end = (next..count).find(|&n| batch.is_truncated(n));
            match to
                .socket
                .send_batch(batch, next..end.unwrap_or(count), None)
            {
                Ok(sent) => {
                    for index in next..next + sent {
                        let length = batch.message(index).len();
                        self.bytes += length as u64;
                        *budget = budget.saturating_sub(length.max(64));
                    }
                    next += sent;
                }
                Err(error) => match Errno::from_io_error(&error).unwrap_or(Errno::IO) {
                    Errno::AGAIN => {
                        to.ready.clear(Ready::WRITE);
                        self.batch = 1;
                        let mut held = HeldMessages::default();
                        for index in (next..count).filter(|&n| !batch.is_truncated(n)) {
                            self.dropped += u32::from(!held.push(batch.message(index)));
                        }
                        store.lend(held.memory());
                        self.held = Held::Messages(Box::new(held));
                        return Ok(());
                    }
                    errno => {
                        if self.is_fatal(errno, to) {
                            return Err(errno);
                        }
                        self.dropped += 1;
                        next += 1;
                    }
                },
            }
        }
        Ok(())
    }

    /// Whether an error of a send ends the pair; otherwise it concerns one message.
    fn is_fatal(&self, errno: Errno, to: &WatchedSocket) -> bool {
        to.socket.kind().has_end() && errno != Errno::MSGSIZE && errno != Errno::NOBUFS
    }

    /// Writes what is held. Returns whether nothing is left.
    fn write_held(&mut self, to: &mut WatchedSocket, store: &mut Store) -> Result<bool, Errno> {
        let mut held = match std::mem::replace(&mut self.held, Held::Nothing) {
            Held::Nothing => return Ok(true),
            held => held,
        };
        let result = self.write(&mut held, to);
        match (result, held) {
            (Ok(true), Held::Chunk(chunk)) => store.release(chunk),
            (Ok(true), Held::Pipe(pipe, _)) => store.release_pipe(pipe),
            (Ok(true), Held::Messages(messages)) => store.unlend(messages.memory()),
            (_, held) => self.held = held,
        }
        result
    }

    fn write(&mut self, held: &mut Held, to: &mut WatchedSocket) -> Result<bool, Errno> {
        loop {
            let left = match held {
                Held::Nothing => 0,
                Held::Chunk(chunk) => chunk.unsent().len(),
                Held::Pipe(_, left) => *left as usize,
                Held::Messages(messages) => messages.len(),
            };
            if left == 0 {
                return Ok(true);
            }
            if !to.ready.has(Ready::WRITE) {
                return Ok(false);
            }
            let wrote = match held {
                Held::Nothing => Ok(0),
                Held::Chunk(chunk) => to.socket.send(chunk.unsent()),
                Held::Pipe(pipe, left) => {
                    match splice(
                        &pipe.read,
                        None,
                        to.socket.fd()?,
                        None,
                        *left as usize,
                        FLAGS,
                    ) {
                        Err(Errno::INTR) => continue,
                        wrote => wrote,
                    }
                }
                Held::Messages(messages) => to.socket.send(messages.first()),
            };
            let wrote = match wrote {
                Ok(wrote) => wrote,
                Err(Errno::AGAIN) => {
                    to.ready.clear(Ready::WRITE);
                    return Ok(false);
                }
                Err(errno) => match held {
                    Held::Messages(messages) if !self.is_fatal(errno, to) => {
                        self.dropped += 1;
                        messages.pop();
                        continue;
                    }
                    _ => return Err(errno),
                },
            };
            self.bytes += wrote as u64;
            match held {
                Held::Nothing => {}
                Held::Chunk(chunk) => chunk.advance(wrote),
                Held::Pipe(_, left) => *left = left.saturating_sub(wrote as u32),
                Held::Messages(messages) => {
                    messages.pop();
                    continue;
                }
            }
            if wrote < left {
                note_short_write(to, wrote);
            }
        }
    }
}

const FLAGS: SpliceFlags = SpliceFlags::MOVE.union(SpliceFlags::NONBLOCK);

/// Whether a read that returned less than there was room for has emptied the socket. A Unix socket ends
/// a read behind descriptors too, and TCP at an out-of-band byte.
fn short_read_is_all(from: &WatchedSocket) -> bool {
    from.socket.kind() == SocketKind::Tcp
        && !from.ready.has(Ready::FINISHED)
        && !from.ready.has(Ready::URGENT)
}

/// The number of messages before the end of a connection, if the last of a batch is its end: that reads as
/// empty messages.
pub(super) fn end_of_messages(
    batch: &Batch,
    got: usize,
    from: &mut WatchedSocket,
) -> Option<usize> {
    let last_is_empty = batch.message(got.checked_sub(1)?).is_empty();
    if !from.socket.kind().has_end() || !last_is_empty || !is_finished(from) {
        return None;
    }
    let last = (0..got).rfind(|&n| !batch.message(n).is_empty());
    Some(last.map_or(0, |last| last + 1))
}

/// Whether the peer sends no more messages. Asks the kernel if no edge has told it yet, because an empty
/// message may be one.
fn is_finished(from: &mut WatchedSocket) -> bool {
    if !from.ready.has(Ready::FINISHED)
        && let Ok(fd) = from.socket.fd()
    {
        let events = wait_ready(fd, PollFlags::RDHUP, Some(Duration::ZERO));
        if events.is_ok_and(|events| !events.is_empty()) {
            from.ready.set(Ready::FINISHED);
        }
    }
    from.ready.has(Ready::FINISHED)
}

/// After a write that took only a part: TCP and Unix sockets will say when there is room.
fn note_short_write(to: &mut WatchedSocket, wrote: usize) {
    if wrote == 0 || to.socket.kind() != SocketKind::Vsock {
        to.ready.clear(Ready::WRITE);
    }
}
