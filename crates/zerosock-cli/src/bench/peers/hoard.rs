//! A connection beside the measured one, on the same device, whose reader never gives anything
//! back: it leases packet after packet until its peer has no credit left, keeps every lease, and
//! reads in half of them all the time.

use std::io::Write;

use zerosock::vsock::Stream;

use crate::bench::peers::ours::WINDOW;
use crate::bench::worker::order::Job;
use crate::bench::worker::touch::Fault;

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
        let lease = second.recv().map_err(text)?.ok_or("end of file")?;
        held += lease.len();
        leases.push(lease);
    }
    let readings: Vec<_> = leases.iter().step_by(2).map(|lease| lease.read()).collect();
    let outcome = measure();
    let read: usize = readings.iter().map(|reading| reading.len()).sum();
    if read == 0 {
        return Err("the hoarder held nothing".to_owned());
    }
    outcome
}

fn text(error: impl ToString) -> Fault {
    error.to_string()
}
