//! The state of one send, from its acceptance until its place is free.

use std::io;

use super::message::{Failed, Sent};
use super::slots::{Attached, Ticket};
use super::stats::CopyReason;
use crate::sys::SendMode;

/// The error number of a cancelled send.
pub(super) const CANCELLED: i32 = rustix::io::Errno::CANCELED.raw_os_error();
/// The error number of a send that exceeds the limit.
pub(super) const TIMED_OUT: i32 = rustix::io::Errno::TIMEDOUT.raw_os_error();

pub(super) struct InFlightSend {
    /// Number of sends accepted before this one. The order of requests on a stream.
    pub(super) ordinal: u64,
    /// The number reported to the application; none if the send is always copied.
    pub(super) number: Option<u32>,
    /// The position among the sends of its slot, until it is reported to the slot.
    pub(super) ticket: Option<Ticket>,
    /// The notifier it is attached to, until its buffer is free.
    pub(super) attached: Option<Attached>,
    /// Length of the buffer, in bytes.
    pub(super) total: usize,
    /// Bytes that the kernel has taken.
    pub(super) sent: usize,
    /// Why its next request is a copy; none if it is made without one.
    pub(super) copy_reason: Option<CopyReason>,
    /// The error number with which it failed.
    pub(super) failure: Option<i32>,
    /// How often it waited for memory.
    pub(super) rounds: u8,
    /// Length of its last request in bytes, if that contained later sends as well; otherwise 0.
    pub(super) gathered: usize,
    /// Flushes its slot if it succeeds.
    pub(super) flush: bool,
    /// Sent with MSG_MORE.
    pub(super) more: bool,
    pub(super) part: DatagramPart,
    /// A request was made of it.
    pub(super) started: bool,
    /// The kernel took all of it, or it failed.
    pub(super) finished: bool,
    /// A finished piece that may be requested again (`cork`).
    pub(super) kept: bool,
    /// It is not requested again, and fails with this error number.
    pub(super) cancelled: Option<i32>,
    /// A request of it was made without a copy.
    pub(super) in_place: bool,
    /// A request of it was copied, by us or by the kernel.
    pub(super) copied: bool,
}

/// The position of a send in a datagram that is sent in pieces (MSG_MORE).
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) enum DatagramPart {
    /// A whole datagram; on a stream, every send.
    Whole,
    First,
    Later,
}

impl InFlightSend {
    /// The state of a place that has never been used.
    pub(super) fn vacant() -> Self {
        Self {
            ordinal: 0,
            number: None,
            ticket: None,
            attached: None,
            total: 0,
            sent: 0,
            copy_reason: None,
            failure: None,
            rounds: 0,
            gathered: 0,
            flush: false,
            more: false,
            part: DatagramPart::Whole,
            started: false,
            finished: false,
            kept: false,
            cancelled: None,
            in_place: false,
            copied: false,
        }
    }

    /// How its next request is made.
    pub(super) fn mode(&self) -> SendMode {
        match self.copy_reason {
            Some(_) => SendMode::Copy,
            None => SendMode::ZeroCopy,
        }
    }

    /// Copies it from now on.
    pub(super) fn copy_for(&mut self, reason: CopyReason) {
        self.copy_reason.get_or_insert(reason);
    }

    pub(super) fn outcome(&self) -> Result<Sent, Failed> {
        match self.failure {
            None if self.in_place && !self.copied => Ok(Sent::InPlace),
            None => Ok(Sent::Copied),
            Some(code) => Err(Failed {
                sent: self.sent,
                error: error(code),
            }),
        }
    }
}

/// The error of this number; 0 means that the kernel took nothing and gave no reason.
pub(super) fn error(code: i32) -> io::Error {
    match code {
        0 => io::ErrorKind::WriteZero.into(),
        code => io::Error::from_raw_os_error(code),
    }
}
