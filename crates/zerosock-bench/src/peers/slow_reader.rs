//! A connection beside the measured one, on the same device, whose reader never gives anything
//! back: it leases packet after packet until it gets no more, keeps every lease, and reads in half
//! of them all the time. What it does not get stays unread, until its peer has no credit left.

use std::io::{self, Write};

use zerosock::vsock::{Lease, Stream, StreamError};

use crate::peers::ours::WINDOW;
use crate::worker::order::Job;
use crate::worker::touch::Fault;

pub(crate) const ALONE: &str = "alone";
pub(crate) const BESIDE: &str = "beside";

/// Bytes of each of its packets: many of them are worse than large ones.
const PACKET: usize = 4 << 10;

/// Who is on the second connection.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Beside {
    /// It is there, and nothing is sent on it.
    Nobody,
    Hoarder,
}

/// What `how` of an order says, if it is about this.
pub(crate) fn beside(how: &str) -> Option<Beside> {
    match how {
        ALONE => Some(Beside::Nobody),
        BESIDE => Some(Beside::Hoarder),
        _ => None,
    }
}

/// Runs the measurement, with as much held as ever can be. Who receives is the hoarder.
pub(crate) fn run(
    mut second: &Stream,
    beside: Beside,
    job: Job,
    measure: impl FnOnce() -> Result<(), Fault>,
) -> Result<(), Fault> {
    if beside == Beside::Nobody {
        return measure();
    }
    if matches!(job, Job::Send | Job::Ping) {
        for _ in 0..WINDOW as usize / PACKET {
            second.write_all(&[0x5a; PACKET]).map_err(text)?;
        }
        return measure();
    }
    let mut leases = Vec::new();
    let mut held = 0;
    while held < WINDOW as usize {
        match second.recv() {
            Ok(lease) => leases.push(lease.ok_or("end of file")?),
            Err(error) if is_bound(&error) => break,
            Err(error) => return Err(text(error)),
        }
        held += leases.last().map_or(0, Lease::len);
    }
    // An endpoint is driven by its calls alone: what it does not get must come all the same, or
    // its peer would wait for room.
    second
        .set_low_water((WINDOW as usize - held) as u32)
        .map_err(text)?;
    if held < WINDOW as usize {
        second.wait_readable().map_err(text)?;
    }
    let readings: Vec<_> = leases.iter().step_by(2).map(|lease| lease.read()).collect();
    let outcome = measure();
    let read: usize = readings.iter().map(|reading| reading.len()).sum();
    if read == 0 {
        return Err("the hoarder held nothing".to_owned());
    }
    outcome
}

/// Whether no more leases are to be had.
fn is_bound(error: &io::Error) -> bool {
    let source = error.get_ref();
    source.and_then(|source| source.downcast_ref()) == Some(&StreamError::TooManyLeases)
}

fn text(error: impl ToString) -> Fault {
    error.to_string()
}
