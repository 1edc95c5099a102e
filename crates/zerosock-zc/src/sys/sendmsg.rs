//! The back-end over sendmsg(2), with the error queue or with copies only.
//!
//! A request is one call, made when it is started. The kernel assigns consecutive ids to the
//! zero-copy sends of a socket (`notification_ids`) and reports them in its error queue
//! (`error_queue`). The id of the first send is found out before it is made (`first_id`). From then
//! on all ids must be those of this `ZcSocket`: another sender with MSG_ZEROCOPY on a duplicate of
//! the socket breaks the assignment. A failed send that may have taken one keeps its buffer until that
//! is known (`in_doubt`).
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt;

use super::error_queue::{BATCH, ErrorQueue, ReportedRange};
use super::first_id::{ErrorQueueClaim, has_sent_nothing, probe};
use super::in_doubt::{
    TURN, UnresolvedSend, has_no_unreported_id, may_have_taken_id, sockopt_is_set,
};
use super::notification_ids::NotificationIds;
use super::places::header;
use super::requests::{GatherRules, NotificationDue};
use super::socket_state::SocketState;
use super::{Key, NotStarted, SendMode, SocketAddress, SocketKind, Stable, Started, Submission};

/// The most reads of the error queue in a row: peers can fill it as well (IP_RECVERR).
const MAX_READS: usize = 64;

/// Sends with one sendmsg(2) call per request.
pub(super) struct SendmsgBackend {
    zero_copy: bool,
    ids: NotificationIds,
    /// `ids` has been started.
    ids_prepared: bool,
    /// The right to the socket's error queue and ids.
    claim: Option<ErrorQueueClaim>,
    /// The kernel is known to assign ids to the sends of this socket.
    assigns_ids: bool,
    /// Ranges that were reported while the first id was unknown.
    unmatched: Vec<ReportedRange>,
    kind: SocketKind,
    /// A send that failed and may have taken the last id of `ids`. All later ones are copied.
    in_doubt: Option<UnresolvedSend>,
    /// The socket is UDP: a send can fail after it took an id.
    datagrams: bool,
    /// The last send had MSG_MORE.
    corked: bool,
    /// The error of the socket that a wait found. The next request has it as its result.
    error: Option<io::Error>,
    /// The last request failed with WouldBlock.
    full: bool,
    /// Number of requests since the error queue was read.
    sends_since_read: usize,
    queue: Box<ErrorQueue>,
}

impl SendmsgBackend {
    /// A back-end for a socket of this kind; `zero_copy` if SO_ZEROCOPY is set.
    pub(super) fn new(kind: SocketKind, zero_copy: bool) -> Self {
        Self {
            zero_copy,
            ids: NotificationIds::default(),
            ids_prepared: false,
            claim: None,
            assigns_ids: !kind.is_tcp(),
            unmatched: Vec::new(),
            kind,
            in_doubt: None,
            datagrams: matches!(kind, SocketKind::Udp4 | SocketKind::Udp6),
            corked: false,
            error: None,
            full: false,
            sends_since_read: 0,
            queue: Box::default(),
        }
    }

    /// Makes one call, which does not block.
    pub(super) fn start<B: Stable>(
        &mut self,
        state: &mut SocketState<B>,
        keys: &[Key],
        submission: Submission,
    ) -> Result<Started, NotStarted> {
        let &first = keys.first().ok_or(NotStarted::Vacant)?;
        let buffer = state.places.buffer(first).ok_or(NotStarted::Vacant)?;
        // An empty datagram, or an empty piece of one, may or may not take an id. It is copied,
        // which costs nothing and takes none.
        let wished = submission.mode == SendMode::ZeroCopy && buffer.total() > submission.from;
        let mut zero_copy = wished && self.zero_copy;
        if zero_copy && self.in_doubt.is_some() {
            self.resolve_doubt(state);
            zero_copy = self.in_doubt.is_none() && self.zero_copy;
        }
        zero_copy = zero_copy && self.prepare_ids(state, first);
        let mode = match zero_copy {
            true => SendMode::ZeroCopy,
            false => SendMode::Copy,
        };
        let rules = GatherRules {
            many: state.gathers(mode),
            by_arena: false,
            longest: state.longest(mode),
        };
        let id = state
            .requests
            .gather(&state.places, keys, &submission, rules)?;
        let request = state.requests.get(id);
        let (places, total) = (request.places(), request.total());
        let told = self.error.take();
        let made = told.is_none();
        let result = match told {
            Some(error) => Err(error),
            None => {
                let more = if submission.more { libc::MSG_MORE } else { 0 };
                let flags = libc::MSG_DONTWAIT | more;
                state.system_calls += 1;
                let address = state.places.address(first);
                let socket = state.socket.as_fd();
                send(socket, request.pieces(), address, zero_copy, flags)
            }
        };
        self.full = matches!(&result, Err(error) if error.kind() == io::ErrorKind::WouldBlock);
        state.requests.begun(&mut state.places, id);
        let mut note = NotificationDue::None;
        match &result {
            Ok(sent) => {
                self.corked = submission.more;
                if zero_copy && *sent > 0 && self.took_id(state) {
                    self.ids.assign(id);
                    note = NotificationDue::Follows;
                } else if wished && !(zero_copy && self.zero_copy) {
                    note = NotificationDue::Copied;
                }
            }
            Err(error) if made && zero_copy && self.datagrams => {
                let code = error.raw_os_error().unwrap_or(0);
                if may_have_taken_id(state.socket.as_fd(), code, total) {
                    // An error drops the collected pieces.
                    self.corked = false;
                    self.ids.assign(id);
                    self.in_doubt = Some(UnresolvedSend::new(id));
                    state.requests.expect_notification(&mut state.places, id);
                    self.resolve_doubt(state);
                }
            }
            Err(_) => {}
        }
        state.requests.result(&mut state.places, id, result, note);
        self.sends_since_read += 1;
        if self.sends_since_read >= BATCH {
            // One call reads this many notifications, so an application that only sends gets its
            // buffers back as well. An error is reported again by the next call that polls.
            let _ = self.reap(state);
        }
        Ok(Started {
            places,
            linked: false,
            registered: false,
        })
    }

    /// Prepares `ids` for the first zero-copy send, which is that of place `key`. Returns false if
    /// the send must be copied because the first id cannot be found out now.
    fn prepare_ids<B>(&mut self, state: &mut SocketState<B>, key: Key) -> bool {
        if self.ids_prepared {
            return true;
        }
        if self.claim.is_none() {
            self.claim = ErrorQueueClaim::of(state.socket.as_fd());
        }
        // Ids that were reported earlier belong to other senders.
        if self.claim.is_none() || self.drain_error_queue(state).is_err() {
            return false;
        }
        let next = match self.kind {
            SocketKind::Tcp4 | SocketKind::Tcp6 if has_sent_nothing(state.socket.as_fd()) => {
                Some(0)
            }
            SocketKind::Udp4 | SocketKind::Udp6 => {
                // A probe would be appended to the datagram that the socket is collecting.
                let corked = self.corked
                    || sockopt_is_set(state.socket.as_fd(), libc::SOL_UDP, libc::UDP_CORK);
                if corked {
                    return false;
                }
                state.system_calls += 1;
                probe(state.socket.as_fd(), state.places.address(key));
                match self.drain_error_queue(state) {
                    Ok(Some(last)) => Some(last.wrapping_add(1)),
                    // A filter dropped the probe, or memory is short: a later send tries again.
                    _ => return false,
                }
            }
            _ => None,
        };
        self.ids.start(next);
        self.ids_prepared = true;
        true
    }

    /// Empties the error queue. Returns the last id that was reported there.
    fn drain_error_queue<B>(&mut self, state: &mut SocketState<B>) -> io::Result<Option<u32>> {
        let mut last = None;
        for _ in 0..MAX_READS {
            state.system_calls += 1;
            let count = self.queue.receive(state.socket.as_fd())?;
            for index in 0..count {
                match self.queue.range(index) {
                    Some((_, hi, _)) => last = Some(hi),
                    None => state.foreign += 1,
                }
            }
            if count < BATCH {
                return Ok(last);
            }
        }
        Err(io::ErrorKind::WouldBlock.into())
    }

    /// Whether the kernel assigned an id to the send that it has just taken. If a BPF program
    /// (sk_msg) sees the bytes of a TCP socket, the kernel copies them, and bytes that the program
    /// holds back or redirects have no id, so none would be reported. The first send is checked.
    fn took_id<B>(&mut self, state: &mut SocketState<B>) -> bool {
        if !self.assigns_ids {
            state.system_calls += 1;
            self.assigns_ids = !has_no_unreported_id(state.socket.as_fd());
            self.zero_copy &= self.assigns_ids;
        }
        self.assigns_ids
    }

    pub(super) fn wait<B>(
        &mut self,
        state: &mut SocketState<B>,
        timeout: Option<Duration>,
    ) -> io::Result<()> {
        if !state.requests.events.is_empty() || (state.places.busy == 0 && !self.full) {
            return Ok(());
        }
        let wanted = if self.full {
            PollFlags::OUT
        } else {
            PollFlags::empty()
        };
        let mut descriptors = [PollFd::new(&state.socket, wanted)];
        let turn = self.only_unresolved_left().map(|_| TURN);
        let timeout = timeout.into_iter().chain(turn).min();
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        state.system_calls += 1;
        match poll(&mut descriptors, timeout.as_ref()) {
            Ok(0) => {
                self.resolve_doubt(state);
                return Ok(());
            }
            Err(rustix::io::Errno::INTR) => return Ok(()),
            Ok(_) => {}
            Err(error) => return Err(error.into()),
        }
        let found = descriptors[0].revents();
        if found.contains(PollFlags::OUT) {
            self.full = false;
        }
        if self.reap(state)? == 0 && !found.contains(PollFlags::OUT) {
            // The event is not from the error queue. An error of the socket is the result of the
            // next request; a hangup is reported by every poll.
            if let Ok(Err(error)) = sockopt::socket_error(&state.socket) {
                self.error = Some(error.into());
                self.full = false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Reads the error queue once, if a notification is pending. Returns the number of messages.
    pub(super) fn reap<B>(&mut self, state: &mut SocketState<B>) -> io::Result<usize> {
        if self.ids.is_empty() {
            return Ok(0);
        }
        let count = self.read_error_queue(state)?;
        self.resolve_doubt(state);
        Ok(count)
    }

    fn read_error_queue<B>(&mut self, state: &mut SocketState<B>) -> io::Result<usize> {
        state.system_calls += 1;
        self.sends_since_read = 0;
        let count = self.queue.receive(state.socket.as_fd())?;
        for index in 0..count {
            let Some(named) = self.queue.range(index) else {
                state.foreign += 1;
                continue;
            };
            if self.ids.is_first_id_known() {
                self.complete_range(state, named);
                continue;
            }
            self.unmatched.push(named);
            if self.ids.infer_first_id(named.0, named.1) {
                for named in std::mem::take(&mut self.unmatched) {
                    self.complete_range(state, named);
                }
            }
        }
        Ok(count)
    }

    /// Handles a reported range: the kernel no longer reads the buffers of these ids.
    fn complete_range<B>(&mut self, state: &mut SocketState<B>, (lo, hi, copied): ReportedRange) {
        let all_ours = self.ids.complete(lo, hi, |id| {
            state.requests.notified(&mut state.places, id, copied);
        });
        // Another sender took an id, or a BPF program split a send: later ids may not be ours.
        self.zero_copy &= all_ours;
    }

    /// Reads the error queue until it is empty, or [`MAX_READS`] times. Returns whether it is
    /// empty.
    fn read_until_empty<B>(&mut self, state: &mut SocketState<B>) -> bool {
        (0..MAX_READS).any(|_| {
            self.read_error_queue(state)
                .is_ok_and(|count| count < BATCH)
        })
    }

    /// Ends the doubt about a failed send if that is possible now: its id was reported, or the socket
    /// has no unreported id at all.
    fn resolve_doubt<B>(&mut self, state: &mut SocketState<B>) {
        let Some(UnresolvedSend { request, .. }) = self.in_doubt else {
            return;
        };
        if !self.read_until_empty(state) {
            return;
        }
        if self.ids.is_last_outstanding() {
            if !has_no_unreported_id(state.socket.as_fd()) {
                return;
            }
            self.ids.withdraw_last();
            state.requests.notified(&mut state.places, request, false);
        }
        self.in_doubt = None;
    }

    /// The doubt about a failed send, if nothing else is pending.
    pub(super) fn only_unresolved_left(&self) -> Option<&UnresolvedSend> {
        let doubt = self.in_doubt.as_ref();
        doubt.filter(|_| self.ids.is_only_last_outstanding())
    }

    /// Reads the error queue until it is empty, or [`MAX_READS`] times.
    pub(super) fn reap_all<B>(&mut self, state: &mut SocketState<B>) {
        let _ = (0..MAX_READS).all(|_| self.reap(state).is_ok_and(|count| count > 0));
    }
}

/// Makes one sendmsg(2) call, again if a signal interrupts it.
pub(super) fn send(
    socket: BorrowedFd<'_>,
    pieces: &[libc::iovec],
    address: Option<&SocketAddress>,
    zero_copy: bool,
    flags: i32,
) -> io::Result<usize> {
    let zero_copy = if zero_copy { libc::MSG_ZEROCOPY } else { 0 };
    let flags = flags | zero_copy | libc::MSG_NOSIGNAL;
    let header = header(pieces, address);
    loop {
        // SAFETY: the header refers to the pieces and to the address, both of which outlive the
        // call; the pieces refer to a buffer that does not move (`Stable`), and that its place,
        // also in the thread of `orphans`, keeps until the kernel has reported the id of the send
        // (`Places::take`).
        let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &header, flags) };
        if let Ok(sent) = usize::try_from(sent) {
            return Ok(sent);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}
