//! The system calls of senders, and the owner of buffers while the kernel reads them.
//!
//! A zero-copy send ends twice: when the call has its result, and when the kernel no longer reads the
//! buffer. Until then the buffer belongs to a [`ZcSocket`], which sends over io_uring (`ring`: SEND_ZC and
//! SENDMSG_ZC) or over sendmsg(2) (`calls`: with MSG_ZEROCOPY and the error queue, or with copies). All are
//! used in the same way: [`put`](ZcSocket::put) stores a buffer in a place, [`start`](ZcSocket::start) makes a
//! request of it (on a stream, of several places), [`submit`](ZcSocket::submit) hands requests to the
//! kernel, [`event`](ZcSocket::event) returns results and notifications, and [`take`](ZcSocket::take) takes
//! the buffer out of an idle place.
//!
//! Programs use a [`Sender`](crate::Sender), which decides which requests are made, in which order, and
//! which are made again. This module is public for benchmarks and tests of single requests.
//!
//! # Invariants
//! A buffer leaves its place only when the kernel owes neither a result nor a notification for it. A
//! `ZcSocket` that is dropped before that goes with its buffers to a thread that waits for the kernel
//! (`orphans`); if that thread cannot be started, the buffers are leaked.

mod address;
mod arenas;
pub mod bare;
mod buffers;
mod error_queue;
mod file;
mod first_id;
mod notification_ids;
mod orphans;
mod places;
mod pool;
mod requests;
mod sendmsg;
mod socket;
mod unresolved;
mod uring;
mod zc_socket;

use std::io;

pub use address::Address;
pub use buffers::{Buf, Mapped, Piece, Stable};
pub use file::{FileMap, FilePart};
pub use places::Key;
pub use pool::{Pool, PoolBuf};
pub use socket::{Kind, permit_zero_copy};
pub(crate) use socket::{forget_pieces, kind, reset};
pub use zc_socket::{Backend, ZcSocket};

/// Whether the kernel may keep the buffer.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum SendMode {
    /// It copies: the buffer is free with the result.
    Copy,
    /// It may read the buffer until it notifies.
    ZeroCopy,
}

/// How one request is made of what lies in places.
#[derive(Copy, Clone, Debug)]
pub struct Submission {
    /// With a copy or without.
    pub mode: SendMode,
    /// Bytes of the first place that have been sent already.
    pub from: usize,
    /// Of a stream: all of it or an error (MSG_WAITALL), so that others can be linked to it.
    pub whole: bool,
    /// What is started next, once all of these places are, waits for the success of this. Of use to a
    /// ring alone.
    pub linked: bool,
    /// MSG_MORE: what follows the last place belongs to it.
    pub more: bool,
    /// Made only once the socket is writable, after WouldBlock.
    pub when_writable: bool,
}

/// A request that was started.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Started {
    /// How many places it is of, from the first on.
    pub places: usize,
    /// What is started next waits for its success.
    pub linked: bool,
    /// It is from memory that is registered with the kernel.
    pub registered: bool,
}

/// What the kernel said of a place.
#[derive(Debug)]
pub enum Event {
    /// A request has ended: so many bytes of this place were taken.
    Done(Key, io::Result<usize>),
    /// The kernel does not read the buffer any more on behalf of one request.
    Notified {
        /// Of which place.
        key: Key,
        /// Whether it made a copy after all, so that the cost of both ways was paid. Of a request
        /// that took nothing there is nothing to be said, whatever its notification says.
        copied: Option<bool>,
        /// Of the places that one notification is of, the first that bytes were taken of.
        is_first: bool,
    },
}

/// Why a request could not be started.
#[derive(Debug, Eq, PartialEq)]
pub enum NotStarted {
    /// There is nothing in that place.
    Vacant,
    /// The submission queue is full: submit first.
    QueueFull,
    /// More pieces than one call takes (IOV_MAX, 1024).
    TooManyPieces,
}
