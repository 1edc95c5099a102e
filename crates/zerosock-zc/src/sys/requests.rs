//! The requests that the kernel has: the places of each, and what the kernel owes for it.
//!
//! A request is of one place or, on a stream, of several in a row. A result of a request is a result of
//! each of its places: if a part of the request was taken, the first places are complete, one may be
//! taken in part, and the others were not begun, as if each had been a request of its own, linked to the
//! one before. There is one notification for all of them.
//!
//! A place can have many requests: after one that was cancelled or taken in part there is another one,
//! and then those of the next buffer. Each request has a number, which its completions carry besides its
//! index. It is needed because a notification can come although no result announced it by F_MORE: a
//! zero-copy request that the kernel never began, because an earlier one in its chain failed, ends with
//! ECANCELED, or with the error of its preparation, without F_MORE (`io_req_tw_fail_links` clears the
//! flags). Its notification, which `io_send_zc_prep` makes before, is posted all the same when the request
//! is freed. That is later, and much later if the thread that submitted it has ended; its index may then
//! belong to another request. This is so in Linux 6.1 to 6.18.
//!
//! A request that was begun says F_MORE however it ends (`io_send_zc`, `io_sendmsg_zc`, and
//! `io_sendrecv_fail` for those that fail outside of them), and only a request that was begun can have
//! given its buffers to the network. So after a result without F_MORE the kernel does not read for this
//! request, and a later notification of it is ignored. For a call over the error queue, a number means what
//! F_MORE means here.
//!
//! # Invariants
//! A place is idle only when each of its requests has had its result and, if the result said F_MORE and
//! either took bytes of the place or failed, its notification. What a request refers to does not change
//! until its result.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use io_uring::cqueue;

use super::places::{Places, header};
use super::{Address, Event, Key, NotStarted, Piece, Stable, Submission};

/// `IORING_NOTIF_USAGE_ZC_COPIED`, in a notification's result.
pub(super) const COPIED: u32 = 1 << 31;

/// A list of more pieces is not kept to be used again.
const MAX_KEPT_PIECES: usize = 64;

/// Where a request is kept, until nothing is owed for it.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) struct RequestId(pub(super) u32);

/// One request.
#[derive(Default)]
pub(super) struct Request {
    /// Counts those that were kept here.
    number: u32,
    members: Vec<Member>,
    /// Of all members, as sendmsg(2) reads them.
    pieces: Vec<libc::iovec>,
    /// What refers to those, when the kernel is to read them from there.
    header: Option<Box<libc::msghdr>>,
    /// The number of the arena that it names, until its result.
    pub(super) arena: Option<u16>,
    /// The last of its places has more than one request takes.
    pub(super) is_cut: bool,
    /// Its result is to come.
    open: bool,
    /// Notifications that are to come.
    notes: u32,
}

// SAFETY: what is not Send by itself are the pointers in `pieces` and `header`. They point to memory
// that the buffers of its places, which are Send, keep in place, to an address in a place, and to
// `pieces` itself; only the kernel follows them.
unsafe impl Send for Request {}

/// What of a place a request is of.
struct Member {
    key: Key,
    /// Bytes of the request that are its.
    len: usize,
    /// Some of them were taken: the notification says what became of them, and frees memory.
    took: bool,
    /// Its notifications are this place's, too. Of a part the kernel has nothing that is behind it.
    is_notified: bool,
}

impl Request {
    /// How many places it is of.
    pub(super) fn places(&self) -> usize {
        self.members.len()
    }

    /// What it is of, in order; nothing if it is empty.
    pub(super) fn pieces(&self) -> &[libc::iovec] {
        &self.pieces
    }

    /// How many bytes it is of.
    pub(super) fn total(&self) -> usize {
        self.members.iter().map(|member| member.len).sum()
    }

    /// The header of its message, to `address`, which must stay where it is until the result.
    pub(super) fn header(&mut self, address: Option<&Address>) -> *const libc::msghdr {
        let made = header(&self.pieces, address);
        let header = self.header.get_or_insert_with(|| Box::new(made));
        **header = made;
        &raw const **header
    }

    /// Takes in what lies behind the first `from` bytes of a buffer, up to `most` bytes. False, and
    /// nothing, if these are too many pieces.
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
        self.members.push(Member {
            key,
            len: most - left,
            took: false,
            is_notified: false,
        });
        true
    }
}

/// Which places go together.
#[derive(Copy, Clone, Debug)]
pub(super) struct GatherRules {
    /// Several may.
    pub(super) many: bool,
    /// What lies in the memory of a pool, only with what lies there, too.
    pub(super) by_arena: bool,
    /// The longest request, in bytes.
    pub(super) longest: usize,
}

/// What is to be said of a request beside its result.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) enum NotificationDue {
    /// Nothing, or what was said before ([`expect_notification`](Requests::expect_notification)).
    None,
    /// A notification is to come.
    Follows,
    /// It was to go without a copy, and has been copied at once.
    Copied,
}

/// A completion, as the kernel posts it.
#[derive(Copy, Clone)]
pub(super) struct CompletionEntry {
    pub(super) user_data: u64,
    pub(super) result: i32,
    pub(super) flags: u32,
}

/// All requests that something is owed for.
#[derive(Default)]
pub(super) struct Requests {
    all: Vec<Request>,
    vacant: Vec<u32>,
    /// What is to be told.
    pub(super) events: VecDeque<Event>,
}

impl Requests {
    /// A request of what lies in the first of these places, and in those behind it that go together
    /// with it, to be [`begun`](Self::begun).
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

    /// It has been made, and owes a result.
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

    /// Its result: so many bytes, or why none; and what else is to be said of it.
    pub(super) fn result<B>(
        &mut self,
        places: &mut Places<B>,
        id: RequestId,
        result: io::Result<usize>,
        note: NotificationDue,
    ) {
        let request = &mut self.all[id.0 as usize];
        request.open = false;
        request.notes += u32::from(note == NotificationDue::Follows);
        let failed = result.is_err();
        let (mut left, mut error) = match result {
            Ok(sent) => (sent, None),
            Err(error) => (0, Some(error)),
        };
        let mut is_first = true;
        for (ahead, member) in request.members.iter_mut().enumerate() {
            // What the first one is told, none of the others has been begun.
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
            for _ in 0..request.notes * u32::from(member.is_notified) {
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

    /// A notification is to come for one that has failed: it took a number.
    pub(super) fn expect_notification<B>(&mut self, places: &mut Places<B>, id: RequestId) {
        let request = &mut self.all[id.0 as usize];
        request.notes += 1;
        if !request.open {
            for member in request.members.iter().filter(|member| member.is_notified) {
                places.expect_notification(member.key, member.took);
            }
        }
    }

    /// One of its notifications has come.
    pub(super) fn notified<B>(&mut self, places: &mut Places<B>, id: RequestId, copied: bool) {
        let request = &mut self.all[id.0 as usize];
        let Some(notes) = request.notes.checked_sub(1) else {
            return;
        };
        request.notes = notes;
        // One whose result is to come has told its places of nothing yet.
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

    /// The kernel has not been told of it, and will not be.
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
        if !request.open && request.notes == 0 {
            if request.pieces.capacity() > MAX_KEPT_PIECES {
                request.pieces = Vec::new();
            }
            self.vacant.push(id.0);
        }
    }

    /// What its completions carry. No request is kept at u32::MAX.
    pub(super) fn user_data(&self, id: RequestId) -> u64 {
        u64::from(self.get(id).number) << 32 | u64::from(id.0)
    }

    /// The request that such user data is of, if something is owed for it.
    fn find(&self, user_data: u64) -> Option<RequestId> {
        let id = RequestId(user_data as u32);
        let request = self.all.get(id.0 as usize)?;
        let is_it = request.number == (user_data >> 32) as u32;
        (is_it && (request.open || request.notes > 0)).then_some(id)
    }

    /// Takes in a completion; nothing, if it is a notification that is not awaited. The arena that is
    /// not named any more.
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
