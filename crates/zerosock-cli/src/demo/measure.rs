//! Streams the payload between host and guest, and measures throughput and round trips.
//!
//! All times are by the host's clock. To the guest: from the first write until the guest answers
//! with one byte that it has read everything. To the host: from the end of the first read to the
//! end of the last. Both sides compute hashes outside of these times. [`super::guest`] is the other
//! end: first by AF_VSOCK, then from an endpoint in the guest.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::environment::Environment;
use super::guest::{CHUNK, READY, RECEIVED};
use crate::failure::Failure;
use crate::vm::hybrid;
use crate::vm::pattern;

/// Timeout of each connect, accept, read and write.
const TIMEOUT: Duration = Duration::from_secs(60);
const WARM_UP: usize = 300;
const ROUND_TRIPS: usize = 3000;
/// Limit on the time of all round trips: a slow machine measures fewer of them.
const ROUND_TRIP_TIME: Duration = Duration::from_secs(5);

/// Results of the demo.
pub(super) struct Measured {
    /// Whether the bytes received at both ends, in each round, have the payload's digest.
    pub(super) verified: bool,
    /// The payload's SHA-256.
    pub(super) digest: String,
    /// By the guest kernel's AF_VSOCK.
    pub(super) kernel: Figures,
    /// From an endpoint in the guest, or why there are none; not measured on a device that the demo has not started.
    pub(super) endpoint: Option<Result<Figures, Failure>>,
}

/// The figures of one kind of socket in the guest.
pub(super) struct Figures {
    /// Megabytes (10^6 bytes) a second.
    pub(super) to_host_mb_s: f64,
    /// Megabytes (10^6 bytes) a second.
    pub(super) to_guest_mb_s: f64,
    /// The median, microseconds.
    pub(super) rtt_us: f64,
    /// Number of round trips.
    pub(super) round_trips: usize,
}

/// Streams `payload` to the guest and back, `rounds` times, then measures round trips.
pub(super) fn run(
    environment: &Environment,
    payload: &[u8],
    digest: &str,
    rounds: u32,
    quiet: bool,
) -> Result<Measured, Failure> {
    let mut verified = true;
    let mut measure = |listener| {
        let (mut to_guest, mut to_host) = (Vec::new(), Vec::new());
        let mut buffer = vec![0; payload.len()];
        for _ in 0..rounds {
            let stream = accept(listener)?;
            let (speed, arrived) = stream_to_guest(&stream, payload, quiet)?;
            verified &= arrived == digest;
            to_guest.push(speed);
            buffer.fill(0);
            let speed = stream_to_host(&stream, &mut buffer, quiet)?;
            verified &= pattern::sha256(&buffer) == digest;
            to_host.push(speed);
        }
        let mut trips = round_trips(&accept(listener)?)?;
        // Closed without a request: the guest makes no further connection to this port.
        accept(listener)?;
        Ok(Figures {
            to_host_mb_s: median(&mut to_host),
            to_guest_mb_s: median(&mut to_guest),
            rtt_us: median(&mut trips),
            round_trips: trips.len(),
        })
    };
    let kernel = measure(&environment.data)?;
    let has_endpoints = environment.stats().is_some();
    let endpoint = has_endpoints.then(|| measure(&environment.endpoint));
    Ok(Measured {
        verified,
        digest: digest.to_owned(),
        kernel,
        endpoint,
    })
}

fn stream_to_guest(
    mut stream: &UnixStream,
    payload: &[u8],
    quiet: bool,
) -> Result<(f64, String), Failure> {
    let len = (payload.len() as u64).to_le_bytes();
    stream
        .write_all(&len)
        .map_err(stream_failure("to the guest"))?;
    let bar = bar("to the guest", payload.len(), quiet);
    let start = Instant::now();
    for chunk in payload.chunks(CHUNK) {
        stream
            .write_all(chunk)
            .map_err(stream_failure("to the guest"))?;
        bar.inc(chunk.len() as u64);
    }
    let mut answer = [0];
    stream
        .read_exact(&mut answer)
        .map_err(stream_failure("to the guest"))?;
    let elapsed = start.elapsed();
    bar.finish_and_clear();
    if answer != [RECEIVED] {
        return Err(Failure::runtime(format!(
            "the guest answered with byte {}, not {RECEIVED}",
            answer[0]
        )));
    }
    let mut digest = String::new();
    stream
        .take(64)
        .read_to_string(&mut digest)
        .map_err(stream_failure("to the guest"))?;
    Ok((speed(payload.len(), elapsed), digest))
}

fn stream_to_host(mut stream: &UnixStream, buffer: &mut [u8], quiet: bool) -> Result<f64, Failure> {
    let bar = bar("to the host", buffer.len(), quiet);
    let first = stream.read(buffer).map_err(stream_failure("to the host"))?;
    let start = Instant::now();
    let mut filled = first;
    while filled < buffer.len() {
        let end = (filled + 4 * CHUNK).min(buffer.len());
        match stream
            .read(&mut buffer[filled..end])
            .map_err(stream_failure("to the host"))?
        {
            0 => return Err(Failure::runtime("the guest's stream ended early")),
            count => {
                filled += count;
                bar.inc(count as u64);
            }
        }
    }
    let elapsed = start.elapsed();
    bar.finish_and_clear();
    // The time begins after the first read, so its bytes do not count unless there are no others.
    let timed = if first < buffer.len() {
        buffer.len() - first
    } else {
        first
    };
    Ok(speed(timed, elapsed))
}

/// The times of single-byte round trips from the host to the guest, microseconds.
fn round_trips(mut stream: &UnixStream) -> Result<Vec<f64>, Failure> {
    stream
        .write_all(&0u64.to_le_bytes())
        .map_err(stream_failure("round trip"))?;
    let mut trips = Vec::with_capacity(ROUND_TRIPS);
    let begin = Instant::now();
    for trip in 0..WARM_UP + ROUND_TRIPS {
        let start = Instant::now();
        stream
            .write_all(b"z")
            .map_err(stream_failure("round trip"))?;
        stream
            .read_exact(&mut [0])
            .map_err(stream_failure("round trip"))?;
        if trip >= WARM_UP {
            trips.push(start.elapsed().as_secs_f64() * 1e6);
            if begin.elapsed() > ROUND_TRIP_TIME {
                break;
            }
        }
    }
    Ok(trips)
}

/// The next connection of the guest. Its timeouts turn a peer that hangs into an error.
fn accept(listener: &UnixListener) -> Result<UnixStream, Failure> {
    let failed = stream_failure("of the guest");
    let mut stream = hybrid::accept(listener, TIMEOUT).map_err(&failed)?;
    stream.set_read_timeout(Some(TIMEOUT)).map_err(&failed)?;
    stream.set_write_timeout(Some(TIMEOUT)).map_err(&failed)?;
    let mut first = [0];
    stream.read_exact(&mut first).map_err(&failed)?;
    if first != [READY] {
        let mut reason = first.to_vec();
        stream.read_to_end(&mut reason).map_err(&failed)?;
        return Err(Failure::runtime(String::from_utf8_lossy(&reason)));
    }
    Ok(stream)
}

/// Converts an I/O error of the stream `what`.
fn stream_failure(what: &'static str) -> impl Fn(std::io::Error) -> Failure {
    move |error| Failure::runtime(format!("stream {what}: {error}"))
}

fn speed(bytes: usize, elapsed: Duration) -> f64 {
    bytes as f64 / 1e6 / elapsed.as_secs_f64().max(1e-9)
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

fn bar(name: &'static str, len: usize, quiet: bool) -> ProgressBar {
    let target = if quiet {
        ProgressDrawTarget::hidden()
    } else {
        ProgressDrawTarget::stderr_with_hz(10)
    };
    let bar = ProgressBar::with_draw_target(Some(len as u64), target);
    let template = "{msg:14} {wide_bar} {bytes:>10} {bytes_per_sec:>13}";
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.with_message(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_value_and_zero_without_values() {
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&mut []), 0.0);
    }

    #[test]
    fn speeds_are_in_millions_of_bytes() {
        assert_eq!(speed(5_000_000, Duration::from_secs(2)), 2.5);
    }
}
