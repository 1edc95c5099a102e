//! The system calls of senders, and the owner of buffers while the kernel reads them.
//!
//! A zero-copy send ends twice: when the call has its result, and when the kernel no longer reads
//! the buffer. Until then the buffer belongs to a [`ZcSocket`], which sends over io_uring (`uring`:
//! SEND_ZC and SENDMSG_ZC) or over sendmsg(2) (`sendmsg`: with MSG_ZEROCOPY and the error queue, or
//! with copies). All are used in the same way: [`put`](ZcSocket::put) stores a buffer in a place,
//! [`start`](ZcSocket::start) makes a request of it (on a stream, of several places),
//! [`submit`](ZcSocket::submit) hands requests to the kernel, [`event`](ZcSocket::event) returns
//! results and notifications, and [`take`](ZcSocket::take) takes the buffer out of an idle place.
//!
//! Programs use a [`Sender`](crate::Sender), which decides which requests are made, in which order,
//! and which are made again. This module is public for tests of single requests.
//!
//! # Invariants
//! A buffer leaves its place only when neither a result nor a notification for it is pending. A
//! `ZcSocket` that is dropped before that is moved with its buffers to a thread that waits for the
//! kernel (`orphans`); if that thread cannot be started, the buffers are leaked, and so is a buffer of
//! which the kernel never tells whether it reads it (`in_doubt`).

mod address;
mod arenas;
mod buffers;
mod error_queue;
mod file;
mod first_id;
mod in_doubt;
mod notification_ids;
mod orphans;
mod places;
mod pool;
mod requests;
mod sendmsg;
mod socket;
mod socket_state;
mod stable;
mod uring;
mod zc_socket;

use std::io;

pub use address::SocketAddress;
pub use buffers::{Buf, Mapped};
pub(crate) use error_queue::read_ranges;
pub use file::{FileMap, FilePart};
pub use in_doubt::leaked_buffers;
pub(crate) use in_doubt::option_memory;
pub use places::Key;
pub use pool::{Pool, PoolBuf};
pub use socket::{SocketKind, permit_zero_copy};
pub(crate) use socket::{forget_pieces, kind, reset};
pub use stable::{Piece, Stable};
pub use zc_socket::{SendBackend, ZcSocket};

/// Whether a request copies the buffer.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum SendMode {
    /// The kernel copies: the buffer is free with the result.
    Copy,
    /// The kernel may read the buffer until its notification.
    ZeroCopy,
}

/// How one request is made of the buffers in places.
#[derive(Copy, Clone, Debug)]
pub struct Submission {
    /// Whether the kernel copies.
    pub mode: SendMode,
    /// Number of bytes of the first place that were sent already.
    pub from: usize,
    /// On a stream, MSG_WAITALL: the request sends all of its bytes or fails, so that others can be
    /// linked to it.
    pub whole: bool,
    /// The next request, after those of all these places, waits for the success of this one. Used
    /// by io_uring only.
    pub linked: bool,
    /// MSG_MORE: the next request continues the last place.
    pub more: bool,
    /// The request waits until the socket is writable, after WouldBlock.
    pub when_writable: bool,
}

/// A request that was started.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Started {
    /// Number of places in the request, from the first on.
    pub places: usize,
    /// The next request waits for the success of this one.
    pub linked: bool,
    /// The request sends from memory that is registered with the kernel.
    pub registered: bool,
}

/// An event of a place.
#[derive(Debug)]
pub enum Event {
    /// A request has its result: the number of bytes that the kernel took of this place.
    Done(Key, io::Result<usize>),
    /// The kernel no longer reads the buffer for one request.
    Notified {
        /// The place of the buffer.
        key: Key,
        /// Whether the kernel copied after all. None for a request that took nothing: its
        /// notification says nothing about copies.
        copied: Option<bool>,
        /// True for one of the places that share the notification: the first of which bytes were
        /// taken.
        is_first: bool,
    },
}

/// Why a request could not be started.
#[derive(Debug, Eq, PartialEq)]
pub enum NotStarted {
    /// The place is empty.
    Vacant,
    /// The submission queue is full: submit first.
    QueueFull,
    /// The buffer has more pieces than one call takes (IOV_MAX, 1024).
    TooManyPieces,
}
