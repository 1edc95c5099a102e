//! A slow reader on a second connection of the measured device.
//!
//! It leases packets until the device lends no more, keeps every lease, and has half of them under
//! a reading throughout the measurement. The rest stays unread until its peer has no credit left.

use std::io::{self, Write};

use zerosock::vsock::{Lease, Stream, StreamError};

use crate::report::line;
use crate::worker::order::Job;
use crate::worker::touch::Fault;

pub(crate) const ALONE: &str = "alone";
pub(crate) const BESIDE: &str = "beside";

/// Bytes per packet: many small packets burden the device more than few large ones.
const PACKET: usize = 4 << 10;

/// Use of the second connection.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Second {
    /// Established; nothing is sent on it.
    Idle,
    SlowReader,
}

/// The use that `how` of an order names, if it is one of this module.
pub(crate) fn parse(how: &str) -> Option<Second> {
    match how {
        ALONE => Some(Second::Idle),
        BESIDE => Some(Second::SlowReader),
        _ => None,
    }
}

/// Runs `measure` while the slow reader holds as much of `window` bytes as the device lends. The
/// receiving side is the slow reader.
pub(crate) fn run(
    mut stream: &Stream,
    window: usize,
    second: Second,
    job: Job,
    measure: impl FnOnce() -> Result<(), Fault>,
) -> Result<(), Fault> {
    if second == Second::Idle {
        return measure();
    }
    if matches!(job, Job::Send | Job::Ping) {
        for _ in 0..window / PACKET {
            stream.write_all(&[0x5a; PACKET]).map_err(line)?;
        }
        return measure();
    }
    let mut leases = Vec::new();
    let mut held = 0;
    while held < window {
        match stream.recv() {
            Ok(lease) => leases.push(lease.ok_or("end of file")?),
            Err(error) if is_lease_limit(&error) => break,
            Err(error) => return Err(line(error)),
        }
        held += leases.last().map_or(0, Lease::len);
    }
    // Only calls drive an endpoint: the remaining bytes must still be received, or the peer would
    // wait for room.
    stream.set_low_water((window - held) as u32).map_err(line)?;
    if held < window {
        stream.wait_readable().map_err(line)?;
    }
    let readings: Vec<_> = leases.iter().step_by(2).map(|lease| lease.read()).collect();
    let outcome = measure();
    let read: usize = readings.iter().map(|reading| reading.len()).sum();
    if read == 0 {
        return Err("the slow reader held no lease".to_owned());
    }
    outcome
}

/// Whether the device lends no more.
fn is_lease_limit(error: &io::Error) -> bool {
    let source = error.get_ref();
    source.and_then(|source| source.downcast_ref()) == Some(&StreamError::TooManyLeases)
}
