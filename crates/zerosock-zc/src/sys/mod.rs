//! Sends whose buffers the kernel keeps for a while: who owns them meanwhile.
//!
//! A zero-copy send is over twice: when the call has its result, and when the kernel no longer reads
//! the buffer. Whatever lies between belongs to a [`Carrier`]: over io_uring (`ring`: SEND_ZC and
//! SENDMSG_ZC) or over sendmsg(2) (`calls`: with MSG_ZEROCOPY and the error queue, or without). It is
//! driven alike whichever it is: [`put`](Carrier::put) gives a buffer into a place of its own,
//! [`start`](Carrier::start) makes a request of it, on streams of several at once,
//! [`submit`](Carrier::submit) hands requests to the kernel, and [`event`](Carrier::event) tells what
//! has become of them; when a place is idle, [`take`](Carrier::take) gives the buffer back.
//!
//! What must hold: a buffer leaves its place only when the kernel owes nothing for it: no result
//! and no notification. A carrier that is dropped before goes, with its buffers, to a thread that
//! waits for what is owed (`orphans`); if there can be no such thread, the buffers are leaked.
//! Which sends are made, in which order and again after which errors is not decided here.

mod address;
mod arenas;
pub mod bare;
mod buffers;
mod calls;
mod carrier;
mod counter;
mod doubt;
mod error_queue;
mod file;
mod numbers;
mod orphans;
mod places;
mod pool;
mod requests;
mod ring;
mod socket;

use std::io;

pub use address::Address;
pub use buffers::{Buf, Mapped, Piece, Stable};
pub use carrier::{Backend, Carrier};
pub use file::{FileMap, FilePart};
pub use places::Key;
pub use pool::{Pool, PoolBuf};
pub use ring::LONGEST;
pub use socket::{Kind, forget_pieces, kind, permit_zero_copy, reset};

/// Whether the kernel may keep the buffer.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum Way {
    /// It copies: the buffer is free with the result.
    Copy,
    /// It may read the buffer until it notifies.
    ZeroCopy,
}

/// How one request is made of what lies in places.
#[derive(Copy, Clone, Debug)]
pub struct Order {
    /// With a copy or without.
    pub way: Way,
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
    Noted {
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
