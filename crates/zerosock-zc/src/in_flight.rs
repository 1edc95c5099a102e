//! One send, from its acceptance until its place is free.

use std::io;

use super::calibration::Class;
use super::message::{Failed, Sent};
use super::slots::{Attached, Ticket};
use crate::sys::SendMode;

pub(super) struct InFlightSend {
    /// Sends accepted before it: what the order of a stream is kept by.
    pub(super) ordinal: u64,
    pub(super) number: Option<u32>,
    pub(super) ticket: Option<Ticket>,
    pub(super) attached: Option<Attached>,
    pub(super) total: usize,
    pub(super) sent: usize,
    pub(super) mode: SendMode,
    /// Its class is that of registered memory.
    pub(super) registered: bool,
    /// Kept by the policy's class while that is measured.
    pub(super) class: Option<Class>,
    pub(super) failure: Option<i32>,
    pub(super) rounds: u8,
    /// Bytes of its last request, if that was of sends behind it, too.
    pub(super) gathered: usize,
    pub(super) flush: bool,
    pub(super) more: bool,
    pub(super) part: Part,
    /// The turn in which its last request was made.
    pub(super) submission: u64,
    pub(super) started: bool,
    pub(super) finished: bool,
    /// Over for now: a piece that may be asked again (`cork`).
    pub(super) kept: bool,
    /// It is not to be asked again, and fails with this.
    pub(super) cancelled: Option<i32>,
    /// Some request of it was made without a copy, and some was copied.
    pub(super) in_place: bool,
    pub(super) copied: bool,
}

/// What a send is of a datagram that is sent in pieces (MSG_MORE).
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) enum Part {
    /// All of it; every send on a stream.
    Whole,
    First,
    Later,
}

impl InFlightSend {
    /// What lies beside a place that has never been used.
    pub(super) fn vacant() -> Self {
        Self {
            ordinal: 0,
            number: None,
            ticket: None,
            attached: None,
            total: 0,
            sent: 0,
            mode: SendMode::Copy,
            registered: false,
            class: None,
            failure: None,
            rounds: 0,
            gathered: 0,
            flush: false,
            more: false,
            part: Part::Whole,
            submission: 0,
            started: false,
            finished: false,
            kept: false,
            cancelled: None,
            in_place: false,
            copied: false,
        }
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

/// The error of this number; 0 is that the kernel took nothing and did not say why.
pub(super) fn error(code: i32) -> io::Error {
    match code {
        0 => io::ErrorKind::WriteZero.into(),
        code => io::Error::from_raw_os_error(code),
    }
}
