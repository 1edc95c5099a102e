//! Sending and receiving on the guest's own vsock sockets.
//!
//! Kernel AF_VSOCK: runs only inside guests.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Instant;

use rustix::net::{RecvFlags, SendFlags};
use sha2::{Digest, Sha256};
use zerosock_cli::vm::pattern::{Pattern, hex};

use crate::protocol::{Outcome, Source};

const READ: usize = 256 << 10;

/// Sends everything in writes of `chunks` bytes in turn; an error ends it and is reported.
pub(super) fn send(fd: &OwnedFd, source: Source, chunks: &[usize], kept: &[u8]) -> Outcome {
    let start = Instant::now();
    let mut sizes = chunks.iter().copied().filter(|size| *size > 0).cycle();
    let largest = chunks.iter().copied().max().unwrap_or(0).max(1);
    let mut outcome = Outcome::default();
    let error = match source {
        Source::Kept => {
            let mut rest = kept;
            let mut error = None;
            while let (false, Some(size)) = (rest.is_empty(), sizes.next()) {
                let (now, later) = rest.split_at(size.min(rest.len()));
                error = send_all(fd, now, &mut outcome.bytes).err();
                if error.is_some() {
                    break;
                }
                rest = later;
            }
            error
        }
        Source::Pattern { seed, len } => {
            let mut pattern = Pattern::new(seed);
            let mut digest = Sha256::new();
            let mut buffer = vec![0; largest];
            let mut error = None;
            while let (true, Some(size)) = (outcome.bytes < len, sizes.next()) {
                let left = usize::try_from(len - outcome.bytes).unwrap_or(usize::MAX);
                let now = &mut buffer[..size.min(left)];
                pattern.fill(now);
                digest.update(&*now);
                error = send_all(fd, now, &mut outcome.bytes).err();
                if error.is_some() {
                    break;
                }
            }
            outcome.sha256 = Some(hex(digest.finalize().as_slice()));
            error
        }
    };
    outcome.errno = error.map(|error| errno_name(&error));
    outcome.elapsed_us = elapsed(start);
    outcome
}

fn send_all(fd: &OwnedFd, mut data: &[u8], sent: &mut u64) -> io::Result<()> {
    while !data.is_empty() {
        match rustix::net::send(fd, data, SendFlags::NOSIGNAL) {
            Ok(count) => {
                *sent += count as u64;
                data = &data[count..];
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Receives until `limit` bytes, the end or an error. With `keep` the bytes are returned too,
/// and hashed only after the last one has come: a guest in software emulation hashes slowly.
pub(super) fn receive(
    fd: &OwnedFd,
    limit: Option<u64>,
    keep: bool,
    acknowledge: bool,
) -> (Outcome, Vec<u8>) {
    let limit = limit.unwrap_or(u64::MAX);
    let mut digest = Sha256::new();
    let mut buffer = vec![0; READ];
    let mut kept = Vec::new();
    if keep && let Ok(size) = usize::try_from(limit) {
        // Touch all pages now, so that no page fault is measured.
        kept = vec![0xa5; size.min(4 << 30)];
    }
    let start = Instant::now();
    let mut outcome = Outcome::default();
    while outcome.bytes < limit {
        let at = usize::try_from(outcome.bytes).unwrap_or(usize::MAX);
        let want = usize::try_from(limit - outcome.bytes)
            .unwrap_or(usize::MAX)
            .min(READ);
        let into = match kept.get_mut(at..at.saturating_add(want)) {
            Some(slot) if keep => slot,
            _ => &mut buffer[..want],
        };
        match rustix::net::recv(fd, &mut *into, RecvFlags::empty()) {
            Ok((0, _)) => {
                outcome.end = true;
                break;
            }
            Ok((count, _)) => {
                if !keep {
                    digest.update(&into[..count]);
                }
                outcome.bytes += count as u64;
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => {
                outcome.errno = Some(errno_name(&error.into()));
                break;
            }
        }
    }
    outcome.elapsed_us = elapsed(start);
    if acknowledge {
        let mut sent = 0;
        if let Err(error) = send_all(fd, b"\x06", &mut sent) {
            outcome.errno = Some(errno_name(&error));
        }
    }
    if keep {
        kept.truncate(usize::try_from(outcome.bytes).unwrap_or(usize::MAX));
        digest.update(&kept);
    }
    outcome.sha256 = Some(hex(digest.finalize().as_slice()));
    (outcome, kept)
}

/// Echoes until the end.
pub(super) fn echo(fd: &OwnedFd) -> io::Result<()> {
    let mut buffer = vec![0; 64 << 10];
    let mut sent = 0;
    loop {
        let (count, _) = rustix::net::recv(fd, &mut buffer[..], RecvFlags::empty())?;
        if count == 0 {
            return Ok(());
        }
        send_all(fd, &buffer[..count], &mut sent)?;
    }
}

/// Microseconds since `start`.
pub(super) fn elapsed(start: Instant) -> u64 {
    u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX)
}

/// The symbol of an error that a scenario may name, else its text.
pub(super) fn errno_name(error: &io::Error) -> String {
    use rustix::io::Errno;
    let names = [
        (Errno::PIPE, "EPIPE"),
        (Errno::CONNRESET, "ECONNRESET"),
        (Errno::CONNREFUSED, "ECONNREFUSED"),
        (Errno::TIMEDOUT, "ETIMEDOUT"),
        (Errno::NOTCONN, "ENOTCONN"),
        (Errno::NODEV, "ENODEV"),
        (Errno::ADDRINUSE, "EADDRINUSE"),
        (Errno::ADDRNOTAVAIL, "EADDRNOTAVAIL"),
        (Errno::INVAL, "EINVAL"),
        (Errno::HOSTUNREACH, "EHOSTUNREACH"),
        (Errno::NETUNREACH, "ENETUNREACH"),
        (Errno::AGAIN, "EAGAIN"),
        (Errno::FAULT, "EFAULT"),
        (Errno::NOMEM, "ENOMEM"),
        (Errno::NOTTY, "ENOTTY"),
        (Errno::MSGSIZE, "EMSGSIZE"),
        (Errno::OPNOTSUPP, "EOPNOTSUPP"),
    ];
    if error.kind() == io::ErrorKind::TimedOut {
        return "ETIMEDOUT".to_owned();
    }
    let raw = error.raw_os_error();
    names
        .iter()
        .find(|(errno, _)| raw == Some(errno.raw_os_error()))
        .map_or_else(|| error.to_string(), |(_, name)| (*name).to_owned())
}
