//! The client's loops: wait, dequeue, until the end, with a clock around the dequeue calls.

use std::io::{self, Read};
use std::time::{Duration, Instant};

use zerosock::vsock::rxmap::{CLOSED, DATA, EMPTY, RxMapConfig};
use zerosock::vsock::{RxMap, Stream};

use super::bytes::ByteChecker;
use super::settings::{Client, Mode};

/// Counters.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub(super) struct Counted {
    pub(super) bytes: u64,
    /// Time of the whole loop, waiting included.
    pub(super) total: Duration,
    /// Time in the dequeue calls.
    pub(super) dequeue: Duration,
    /// Dequeues: one for each wake-up.
    pub(super) dequeues: u64,
}

/// "In copy mode client uses 'read()' system call": waits by `wait`, reads by `read`.
pub(super) fn copy(
    buffer: usize,
    checker: &mut ByteChecker,
    mut wait: impl FnMut() -> io::Result<()>,
    mut read: impl FnMut(&mut [u8]) -> io::Result<usize>,
) -> io::Result<Counted> {
    // Touch all pages now, so that no page fault is measured.
    let mut buffer = vec![0xa5; buffer];
    let mut counted = Counted::default();
    let began = Instant::now();
    loop {
        wait()?;
        let call = Instant::now();
        let got = read(&mut buffer)?;
        counted.dequeue += call.elapsed();
        counted.dequeues += 1;
        if got == 0 {
            counted.total = began.elapsed();
            return Ok(counted);
        }
        counted.bytes += got as u64;
        checker.check_slice(&buffer[..got])?;
    }
}

/// All three modes on a stream of an endpoint.
pub(super) fn on_stream(
    stream: &Stream,
    client: &Client,
    buffer: usize,
    checker: &mut ByteChecker,
) -> io::Result<Counted> {
    stream.set_low_water(client.low_water)?;
    match client.mode {
        Mode::Copy => copy(
            buffer,
            checker,
            || stream.wait_readable(),
            |out| {
                let mut stream = stream;
                // The low-water mark has been reached; a read that waits for it again would be
                // timed.
                stream.set_low_water(1)?;
                let got = stream.read(out);
                stream.set_low_water(client.low_water)?;
                got
            },
        ),
        Mode::InPlace => map(stream, buffer, checker, |map| Ok(map.wait()?)),
        Mode::InPlacePolling => map(stream, buffer, checker, |map| {
            loop {
                let value = map.poll_value()?;
                if value != EMPTY {
                    return Ok(value);
                }
                std::hint::spin_loop();
            }
        }),
    }
}

/// "In zerocopy mode client uses 'mmap()'/'getsockopt()' to dequeue data": here by fill and
/// release.
fn map<'s>(
    stream: &'s Stream,
    buffer: usize,
    checker: &mut ByteChecker,
    mut wait: impl FnMut(&mut RxMap<&'s Stream>) -> io::Result<u32>,
) -> io::Result<Counted> {
    let mut map = RxMap::new(stream, RxMapConfig::default().bytes(buffer))?;
    let mut counted = Counted::default();
    let began = Instant::now();
    loop {
        let value = wait(&mut map)?;
        debug_assert!(value == DATA || value == CLOSED);
        let call = Instant::now();
        let headers = map.fill()?;
        counted.dequeue += call.elapsed();
        counted.dequeues += 1;
        for packet in map.packets() {
            let len = packet.len();
            counted.bytes += len as u64;
            checker.check(len, |at, out| packet.copy_to(at, out))?;
        }
        let call = Instant::now();
        map.release(0..headers)?;
        counted.dequeue += call.elapsed();
        if headers == 0 && value == CLOSED {
            counted.total = began.elapsed();
            return Ok(counted);
        }
    }
}
