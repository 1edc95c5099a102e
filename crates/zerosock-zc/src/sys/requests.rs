//! The requests that the kernel has: the places of each, and its pending result and notifications.
//!
//! A request is of one place or, on a stream, of several in a row. A result of a request is a
//! result of each of its places: if a part of the request was taken, the first places are complete,
//! one may be taken in part, and the others were not begun, as if each had been a request of its
//! own, linked to the one before. There is one notification for all of them.
//!
//! A place can have many requests: after one that was cancelled or taken in part there is another
//! one, and then those of the next buffer. Each request has a number, which its completions carry
//! besides its index. It is needed because a notification can come although no result announced it
//! by F_MORE: a zero-copy request that the kernel never began, because an earlier one in its chain
//! failed, ends with ECANCELED, or with the error of its preparation, without F_MORE
//! (`io_req_tw_fail_links` clears the flags). Its notification, which `io_send_zc_prep` makes
//! before, is posted all the same when the request is freed. That is later, and much later if the
//! thread that submitted it has ended; its index may then belong to another request. This is so in
//! Linux 6.1 to 6.18.
//!
//! A request that was begun says F_MORE however it ends (`io_send_zc`, `io_sendmsg_zc`, and
//! `io_sendrecv_fail` for those that fail outside of them), and only a request that was begun can
//! have given its buffers to the network. So after a result without F_MORE the kernel does not read
//! for this request, and a later notification of it is ignored. For a call over the error queue, a
//! notification id means what F_MORE means here.
//!
//! # Invariants
//! A place is idle only when each of its requests has had its result and, if the result said F_MORE
//! and either took bytes of the place or failed, its notification. What a request refers to does
//! not change until its result.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use io_uring::cqueue;

use super::places::{Places, header};
use super::{Event, Key, NotStarted, Piece, SocketAddress, Stable, Submission};

/// `IORING_NOTIF_USAGE_ZC_COPIED`, in a notification's result.
pub(super) const COPIED: u32 = 1 << 31;

/// The largest capacity of a list of pieces that is kept for reuse.
const MAX_KEPT_PIECES: usize = 64;

/// The index of a request, until its result and notifications have arrived.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) struct RequestId(pub(super) u32);

/// One request.
#[derive(Default)]
pub(super) struct Request {
    /// Number of requests at this index so far: distinguishes late completions of earlier ones.
    number: u32,
    members: Vec<Member>,
    /// Sum of the lengths of all members, in bytes.
    total: usize,
    /// The pieces of all members, as sendmsg(2) reads them.
    pieces: Vec<libc::iovec>,
    /// The message header that refers to `pieces`, if the request has one.
    header: Option<Box<libc::msghdr>>,
    /// The number of the registered arena that it names, until its result.
    pub(super) arena: Option<u16>,
    /// The last member is longer than the request: a later request must follow.
    pub(super) is_cut: bool,
    /// The result is pending.
    open: bool,
    /// Number of pending notifications.
    notifications: u32,
}

// SAFETY: only the pointers in `pieces` and `header` are not Send by themselves. They point to
// memory that the buffers of its places, which are Send, keep in place, to an address in a place,
// and to `pieces` itself; only the kernel follows them.
unsafe impl Send for Request {}

/// The part of a request that is the buffer of one place.
struct Member {
    key: Key,
    /// Length in bytes.
    len: usize,
    /// The kernel took some of the bytes: the notification says whether it copied, and frees
    /// memory.
    took: bool,
    /// Notifications of the request are pending for this place as well. False for places after the
    /// bytes that the kernel took.
    is_notified: bool,
}

impl Request {
    /// Number of places.
    pub(super) fn places(&self) -> usize {
        self.members.len()
    }

    /// The pieces in order; none if the request is empty.
    pub(super) fn pieces(&self) -> &[libc::iovec] {
        &self.pieces
    }

    /// Length in bytes.
    pub(super) fn total(&self) -> usize {
        self.total
    }

    /// The message header, with destination `address`, which must not move until the result.
    pub(super) fn header(&mut self, address: Option<&SocketAddress>) -> *const libc::msghdr {
        let made = header(&self.pieces, address);
        let header = self.header.get_or_insert_with(|| Box::new(made));
        **header = made;
        &raw const **header
    }

    /// Adds the bytes of a buffer from `from` on, at most `most`. Returns false, and adds nothing,
    /// if these are too many pieces.
    fn add(&mut self, key: Key, buffer: &impl Stable, from: usize, most: usize) -> bool {
        let before = self.pieces.len();
        let (mut skip, mut left) = (from, most);
        buffer.pieces(&mut |piece: Piece| {
            let Some(mut piece) = piece.behind(&mut skip).filter(|_| left > 0) else {
                return;
            };
            piece.len = piece.len.min(left);
            left -= piece.len;
            self.pieces.push(piece.vector());
        });
        if self.pieces.len() > libc::UIO_MAXIOV as usize {
            self.pieces.truncate(before);
            return false;
        }
        self.total += most - left;
        self.members.push(Member {
            key,
            len: most - left,
            took: false,
            is_notified: false,
        });
        true
    }
}

/// Which places can form one request.
#[derive(Copy, Clone, Debug)]
pub(super) struct GatherRules {
    /// A request can have several places.
    pub(super) many: bool,
    /// All places of a request must be in the same pool arena, or in none.
    pub(super) by_arena: bool,
    /// Length of the longest request, in bytes.
    pub(super) longest: usize,
}

/// What follows the result of a request.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) enum NotificationDue {
    /// No notification, or one that was added with
    /// [`expect_notification`](Requests::expect_notification).
    None,
    /// A notification.
    Follows,
    /// No notification: a zero-copy request was copied at once.
    Copied,
}

/// A completion, as the kernel posts it.
#[derive(Copy, Clone)]
pub(super) struct CompletionEntry {
    pub(super) user_data: u64,
    pub(super) result: i32,
    pub(super) flags: u32,
}

/// All requests with a pending result or notification.
#[derive(Default)]
pub(super) struct Requests {
    all: Vec<Request>,
    vacant: Vec<u32>,
    /// Events that were not taken.
    pub(super) events: VecDeque<Event>,
}

impl Requests {
    /// Prepares a request of the first of these places and those next ones that can join it. The
    /// caller makes it and calls [`begun`](Self::begun).
    pub(super) fn gather<B: Stable>(
        &mut self,
        places: &Places<B>,
        keys: &[Key],
        submission: &Submission,
        rules: GatherRules,
    ) -> Result<RequestId, NotStarted> {
        let (&first, rest) = keys.split_first().ok_or(NotStarted::Vacant)?;
        let buffer = places.buffer(first).ok_or(NotStarted::Vacant)?;
        let index = self.vacant.pop().unwrap_or(self.all.len() as u32);
        if self.all.len() <= index as usize {
            self.all.push(Request::default());
        }
        let request = &mut self.all[index as usize];
        request.number = request.number.wrapping_add(1);
        request.members.clear();
        request.total = 0;
        request.pieces.clear();
        if !request.add(first, buffer, submission.from, rules.longest) {
            self.vacant.push(index);
            return Err(NotStarted::TooManyPieces);
        }
        let len = request.total();
        request.is_cut = buffer.total().saturating_sub(submission.from) > len;
        let arena = |buffer: &'_ B| buffer.arena().filter(|_| rules.by_arena).map(Arc::as_ptr);
        let first_arena = arena(buffer);
        let has_address = |key| places.address(key).is_some();
        let mut left = rules.longest - len;
        if rules.many && !request.is_cut && !has_address(first) {
            for &key in rest {
                let Some(buffer) = places.buffer(key) else {
                    break;
                };
                let total = buffer.total();
                let differs = has_address(key) || arena(buffer) != first_arena;
                if differs || total > left || !request.add(key, buffer, 0, total) {
                    break;
                }
                left -= total;
            }
        }
        Ok(RequestId(index))
    }

    /// Takes note that a request was made: its result is pending.
    pub(super) fn begun<B>(&mut self, places: &mut Places<B>, id: RequestId) {
        let request = &mut self.all[id.0 as usize];
        request.open = true;
        for member in &request.members {
            places.begun(member.key);
        }
    }

    pub(super) fn get(&self, id: RequestId) -> &Request {
        &self.all[id.0 as usize]
    }

    pub(super) fn get_mut(&mut self, id: RequestId) -> &mut Request {
        &mut self.all[id.0 as usize]
    }

    /// Handles the result of a request: the number of bytes taken or an error, and what follows.
    pub(super) fn result<B>(
        &mut self,
        places: &mut Places<B>,
        id: RequestId,
        result: io::Result<usize>,
        note: NotificationDue,
    ) {
        let request = &mut self.all[id.0 as usize];
        request.open = false;
        request.notifications += u32::from(note == NotificationDue::Follows);
        let failed = result.is_err();
        let (mut left, mut error) = match result {
            Ok(sent) => (sent, None),
            Err(error) => (0, Some(error)),
        };
        let mut is_first = true;
        for (ahead, member) in request.members.iter_mut().enumerate() {
            // The error is that of the first member; the others were not begun.
            let cancelled = || io::Error::from_raw_os_error(libc::ECANCELED);
            let result = match error.take() {
                Some(why) => Err(why),
                None if ahead > 0 && left == 0 && member.len > 0 => Err(cancelled()),
                None => Ok(left.min(member.len)),
            };
            let took = *result.as_ref().unwrap_or(&0);
            left -= took;
            if result.is_err() || took < member.len {
                error = Some(cancelled());
            }
            member.took = took > 0;
            member.is_notified = member.took || failed;
            for _ in 0..request.notifications * u32::from(member.is_notified) {
                places.expect_notification(member.key, member.took);
            }
            places.ended(member.key);
            if member.took && note == NotificationDue::Copied {
                self.events.push_back(Event::Notified {
                    key: member.key,
                    copied: Some(true),
                    is_first: std::mem::take(&mut is_first),
                });
            }
            self.events.push_back(Event::Done(member.key, result));
        }
        self.free_if_finished(id);
    }

    /// Adds a pending notification to a request: a failed send that took an id, or may have.
    pub(super) fn expect_notification<B>(&mut self, places: &mut Places<B>, id: RequestId) {
        let request = &mut self.all[id.0 as usize];
        request.notifications += 1;
        if !request.open {
            for member in request.members.iter().filter(|member| member.is_notified) {
                places.expect_notification(member.key, member.took);
            }
        }
    }

    /// Handles one notification of a request.
    pub(super) fn notified<B>(&mut self, places: &mut Places<B>, id: RequestId, copied: bool) {
        let request = &mut self.all[id.0 as usize];
        let Some(notifications) = request.notifications.checked_sub(1) else {
            return;
        };
        request.notifications = notifications;
        // Before the result, the notification was not added to the places.
        if !request.open {
            let mut is_first = true;
            for member in request.members.iter().filter(|member| member.is_notified) {
                places.notified(member.key, member.took);
                self.events.push_back(Event::Notified {
                    key: member.key,
                    copied: member.took.then_some(copied),
                    is_first: member.took && std::mem::take(&mut is_first),
                });
            }
        }
        self.free_if_finished(id);
    }

    /// Ends a request that was not submitted to the kernel, and will not be.
    pub(super) fn abandoned<B>(&mut self, places: &mut Places<B>, user_data: u64) {
        if let Some(id) = self.find(user_data) {
            let request = &mut self.all[id.0 as usize];
            request.open = false;
            for member in &request.members {
                places.ended(member.key);
            }
            self.free_if_finished(id);
        }
    }

    fn free_if_finished(&mut self, id: RequestId) {
        let request = &mut self.all[id.0 as usize];
        if !request.open && request.notifications == 0 {
            if request.pieces.capacity() > MAX_KEPT_PIECES {
                request.pieces = Vec::new();
            }
            self.vacant.push(id.0);
        }
    }

    /// The user data of the completions of a request. It is never u64::MAX: no index is u32::MAX.
    pub(super) fn user_data(&self, id: RequestId) -> u64 {
        u64::from(self.get(id).number) << 32 | u64::from(id.0)
    }

    /// The request with this user data, if a result or notification is pending.
    fn find(&self, user_data: u64) -> Option<RequestId> {
        let id = RequestId(user_data as u32);
        let request = self.all.get(id.0 as usize)?;
        let is_it = request.number == (user_data >> 32) as u32;
        (is_it && (request.open || request.notifications > 0)).then_some(id)
    }

    /// Handles a completion; ignores a notification that is not pending. Returns the number of the
    /// arena that the request no longer names.
    pub(super) fn posted<B>(
        &mut self,
        places: &mut Places<B>,
        posted: CompletionEntry,
    ) -> Option<u16> {
        let id = self.find(posted.user_data)?;
        let request = self.get_mut(id);
        if cqueue::notif(posted.flags) {
            if !request.open {
                self.notified(places, id, posted.result as u32 & COPIED != 0);
            }
            return None;
        }
        let arena = request.arena.take();
        let result = match usize::try_from(posted.result) {
            Ok(sent) => Ok(sent),
            Err(_) => Err(io::Error::from_raw_os_error(-posted.result)),
        };
        let note = match cqueue::more(posted.flags) {
            true => NotificationDue::Follows,
            false => NotificationDue::None,
        };
        self.result(places, id, result, note);
        arena
    }
}

#[cfg(test)]
#[path = "requests_tests.rs"]
mod tests;
