//! Streams to the registration port: opening, reading, answering.
//!
//! # Invariants
//! - At most one request of a stream is kept.
//! - Streams without a valid request keep no agent with the key from a stream.
//! - A stream with its last answer is read until the agent closes it, for a limited time: closing a socket with unread
//!   bytes would take the answer from the agent.

use std::io::IoSlice;
use std::time::Instant;

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::{RecvFlags, Shutdown, recv, shutdown};
use rustix::rand::{GetRandomFlags, getrandom};
use zerosock_proto::Cid;
use zerosock_sys::{PeerFd, fd_passing};

use super::super::key::Nonce;
use super::super::wire::{Answer, AttachmentId, Reason, Refusal, Request, RequestReader};
use super::super::wire::{WireError, encode_answer};
use super::state::{
    ControlContext, FIRST_KEY, GuestServer, GuestStream, MAX_FAILURES, MAX_RETIRED, MAX_UNATTACHED,
    Stage, StreamState,
};

/// Reads of one stream before other descriptors are polled.
const BUDGET: usize = 4;

/// Random bytes of the system, which does not wait for them.
pub(super) fn random<const N: usize>() -> Result<[u8; N], Errno> {
    let mut bytes = [0; N];
    match getrandom(&mut bytes, GetRandomFlags::NONBLOCK)? {
        // Up to 256 bytes come in one piece.
        len if len == N => Ok(bytes),
        _ => Err(Errno::AGAIN),
    }
}

/// Sends an answer. The answers of a stream are short and few, so its socket has room for them; false: it is closed.
fn send(socket: &PeerFd, answer: &Answer) -> bool {
    let bytes = encode_answer(answer);
    let sent = fd_passing::send(socket, &[IoSlice::new(&bytes)], &[]);
    sent.is_ok_and(|len| len == bytes.len())
}

impl GuestServer {
    /// Takes a stream that the guest has opened.
    pub(super) fn open(&mut self, vm: Cid, socket: PeerFd, cx: &mut ControlContext<'_>) {
        let key = self.free_key();
        let watch = |admitted| match cx.frontends.watch(&socket, key, EventFlags::IN) {
            Ok(()) => Ok(admitted),
            Err(_) => Err(Reason::SERVER_FAILED),
        };
        let (nonce, reader) = match self.admit_stream(vm).and_then(watch) {
            Ok(admitted) => admitted,
            Err(reason) => {
                self.count_refusal(vm, reason.into());
                send(&socket, &Answer::Refused(reason.into()));
                return;
            }
        };
        let stream = GuestStream {
            vm,
            socket,
            epoll: cx.frontends.epoll(),
            nonce,
            reader,
            is_valid: false,
            received: Vec::new(),
            state: StreamState::New,
            until: Some(Instant::now() + self.limits.request),
            retired: Vec::new(),
        };
        self.streams.insert(key, stream);
        self.answer(key, &Answer::Hello(nonce), cx);
    }

    /// Whether a VM may open one more stream. Makes room for it.
    fn admit_stream(&mut self, vm: Cid) -> Result<(Nonce, RequestReader), Reason> {
        let state = self.vms.get(&vm).ok_or(Reason::REMOVED)?;
        let options = state.share.options.as_ref().ok_or(Reason::REMOVED)?;
        if state.failures >= MAX_FAILURES {
            return Err(Reason::FAILED);
        }
        let nonce = Nonce(random().map_err(|_| Reason::SERVER_FAILED)?);
        let reader = RequestReader::new(&options.key, &nonce);
        let streams = self.streams.iter().filter(|(_, it)| it.vm == vm);
        let mut unattached =
            streams.filter(|(_, it)| !matches!(it.state, StreamState::Attached(_)));
        if unattached.clone().count() >= MAX_UNATTACHED {
            // Else a process without the key could keep all places. The keys are in the order of opening.
            let oldest = unattached.find(|(_, it)| !it.is_valid);
            let oldest = oldest.map(|(&key, _)| key).ok_or(Reason::FULL)?;
            self.refuse(oldest, Reason::FULL.into());
            self.streams.remove(&oldest);
        }
        Ok((nonce, reader))
    }

    fn free_key(&mut self) -> u32 {
        loop {
            self.last_stream = self.last_stream.wrapping_add(1) | FIRST_KEY;
            if self.last_stream != FIRST_KEY && !self.streams.contains_key(&self.last_stream) {
                return self.last_stream;
            }
        }
    }

    /// Reads and handles requests of a stream.
    pub(super) fn serve(&mut self, key: u32, cx: &mut ControlContext<'_>) {
        for _ in 0..BUDGET {
            let Some(stream) = self.streams.get_mut(&key) else {
                return;
            };
            let mut bytes = [0; 4096];
            let received = match recv(&stream.socket, &mut bytes, RecvFlags::DONTWAIT) {
                Ok((_, received)) => received,
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR) => continue,
                Err(_) => 0,
            };
            if received == 0 {
                return self.lose(key, cx);
            }
            let bytes = bytes.get(..received).unwrap_or_default();
            stream.received.extend_from_slice(bytes);
            while self.serve_one(key, cx) {}
        }
    }

    /// Handles the next request of a stream. False: it is not complete, or nothing more is read.
    fn serve_one(&mut self, key: u32, cx: &mut ControlContext<'_>) -> bool {
        let Some(stream) = self.streams.get_mut(&key) else {
            return false;
        };
        let is_read = match stream.state {
            StreamState::New => true,
            StreamState::Attached(key) => self
                .attachments
                .get(&key)
                .is_some_and(|it| !matches!(it.stage, Stage::Ending(_) | Stage::Removing(..))),
            StreamState::Delayed(_) | StreamState::Closing => false,
        };
        if !is_read {
            stream.received = Vec::new();
            return false;
        }
        match stream.reader.decode(&stream.received) {
            Ok(None) => return false,
            Ok(Some((request, len))) => {
                stream.received.drain(..len);
                stream.is_valid = true;
                self.handle(key, request, cx);
            }
            Err(error) => self.handle_error(key, error, cx),
        }
        true
    }

    fn handle(&mut self, key: u32, request: Request, cx: &mut ControlContext<'_>) {
        let Some(stream) = self.streams.get(&key) else {
            return;
        };
        match (stream.state, request) {
            (StreamState::New, Request::Register(register)) => {
                self.register(key, register, cx);
            }
            (StreamState::New, Request::Query(attachment)) => {
                // An older stream may be in the inbox.
                self.take_reports(cx);
                self.query(key, attachment);
            }
            (StreamState::New, Request::End) => {
                self.finish(key, &Answer::Ended(Reason::REQUESTED));
            }
            (StreamState::New, Request::Start(_)) => self.refuse(key, Reason::BAD_REQUEST.into()),
            (StreamState::Attached(key), Request::Start(start)) => self.start(key, start, cx),
            (StreamState::Attached(key), Request::End) => self.end(key, Reason::REQUESTED, cx),
            (StreamState::Attached(key), _) => self.end(key, Reason::BAD_REQUEST, cx),
            (StreamState::Delayed(_) | StreamState::Closing, _) => {}
        }
    }

    fn handle_error(&mut self, key: u32, error: WireError, cx: &mut ControlContext<'_>) {
        let Some(stream) = self.streams.get(&key) else {
            return;
        };
        let (vm, state) = (stream.vm, stream.state);
        self.warn(vm, &format!("an agent is refused: {error}"));
        match state {
            StreamState::Attached(key) => self.end(key, error.refusal().reason, cx),
            _ => {
                self.directory.guests.refused.add(1);
                self.finish(key, &Answer::Refused(error.refusal()));
            }
        }
    }

    /// Answers whether an attachment is in use. If it is not, no older stream may register it any more.
    fn query(&mut self, key: u32, attachment: AttachmentId) {
        let Some(vm) = self.streams.get(&key).map(|it| it.vm) else {
            return;
        };
        let mut attachments = self.attachments.values();
        if attachments.any(|it| it.vm == vm && it.id == attachment) {
            return self.finish(key, &Answer::Known(true));
        }
        let others = self
            .streams
            .iter_mut()
            .filter(|(other, it)| **other != key && it.vm == vm && it.state == StreamState::New);
        let mut others: Vec<_> = others.map(|(_, it)| &mut it.retired).collect();
        if others.iter().any(|retired| retired.len() >= MAX_RETIRED) {
            return self.refuse(key, Reason::FULL.into());
        }
        others
            .iter_mut()
            .for_each(|retired| retired.push(attachment));
        self.finish(key, &Answer::Known(false));
    }

    /// Sends an answer behind which others may follow.
    pub(super) fn answer(&mut self, key: u32, answer: &Answer, cx: &mut ControlContext<'_>) {
        let is_lost = self
            .streams
            .get(&key)
            .is_some_and(|it| !send(&it.socket, answer));
        if is_lost {
            self.lose(key, cx);
        }
    }

    /// Sends the last answer of a stream. Nothing of it is attached any more.
    pub(super) fn finish(&mut self, key: u32, answer: &Answer) {
        let Some(stream) = self.streams.get_mut(&key) else {
            return;
        };
        if !send(&stream.socket, answer) || shutdown(&stream.socket, Shutdown::Write).is_err() {
            self.streams.remove(&key);
            return;
        }
        stream.state = StreamState::Closing;
        stream.until = Some(Instant::now() + self.limits.close);
    }

    /// Refuses the request of a stream.
    pub(super) fn refuse(&mut self, key: u32, refusal: Refusal) {
        if let Some(vm) = self.streams.get(&key).map(|it| it.vm) {
            self.count_refusal(vm, refusal);
            self.finish(key, &Answer::Refused(refusal));
        }
    }

    pub(super) fn count_refusal(&self, vm: Cid, refusal: Refusal) {
        self.directory.guests.refused.add(1);
        let Refusal { reason, index } = refusal;
        let text = format!("an agent is refused: {reason} (extent {index})");
        self.warn(vm, &text);
    }

    /// The stream is over: its attachment ends.
    pub(super) fn lose(&mut self, key: u32, cx: &mut ControlContext<'_>) {
        let Some(stream) = self.streams.remove(&key) else {
            return;
        };
        if let StreamState::Attached(key) = stream.state {
            if let Some(attachment) = self.attachments.get_mut(&key) {
                attachment.stream = None;
            }
            self.end(key, Reason::REQUESTED, cx);
        }
    }
}
