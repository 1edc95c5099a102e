//! Single calls on the guest's own vsock sockets. Kernel AF_VSOCK: runs only inside guests.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{SendFlags, SocketFlags, SocketType, sockopt};
use zerosock_cli::vm::pattern::{Pattern, sha256};
use zerosock_sys::vsock;

use super::stream::errno_name;
use super::vsock_calls;
use crate::calls::{Call, Kind, Number, Part, RecvFlags, Setting};
use crate::protocol::Outcome;

const PAGE: usize = 4096;

/// Result of a call: nothing, a number, a new socket with its name, a name, bytes.
pub(super) enum Made {
    Nothing,
    Count(u64),
    Socket(OwnedFd, Option<(u32, u32)>),
    Name(u32, u32),
    Received {
        bytes: u64,
        digest: String,
        flags: i32,
    },
}

/// Makes a call on `socket`, or one that needs no socket.
pub(super) fn make(call: &Call, socket: Option<&OwnedFd>) -> io::Result<Made> {
    let fd = || socket.ok_or_else(|| io::Error::from(io::ErrorKind::NotFound));
    Ok(match *call {
        Call::Socket { kind } => {
            let kind = match kind {
                Kind::SeqPacket => SocketType::SEQPACKET,
                Kind::Stream => SocketType::STREAM,
            };
            Made::Socket(vsock::socket(kind, SocketFlags::empty())?, None)
        }
        Call::Bind { cid, port, .. } => {
            let any = u32::MAX;
            vsock::bind(fd()?, cid.unwrap_or(any), port.unwrap_or(any))?;
            Made::Nothing
        }
        Call::Connect { cid, port, .. } => {
            vsock::connect_socket(fd()?, cid, port)?;
            Made::Nothing
        }
        Call::ConnectAndClose { cid, port, times } => {
            for _ in 0..times {
                // Refused or not: what is over is over.
                drop(vsock::connect(cid, port));
            }
            Made::Nothing
        }
        Call::Listen { backlog, .. } => {
            rustix::net::listen(fd()?, backlog.try_into().unwrap_or(i32::MAX))?;
            Made::Nothing
        }
        Call::Accept { timeout_ms, .. } => {
            if !wait(fd()?, PollFlags::IN, timeout_ms)? {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let (socket, cid, port) = vsock::accept_blocking(fd()?)?;
            Made::Socket(socket, Some((cid, port)))
        }
        Call::Name { .. } => {
            let (cid, port) = vsock::local_address(fd()?)?;
            Made::Name(cid, port)
        }
        Call::Send { seed, len, now, .. } => {
            let bytes = Pattern::bytes(seed, len);
            let now = if now {
                SendFlags::DONTWAIT
            } else {
                SendFlags::empty()
            };
            let sent = rustix::net::send(fd()?, &bytes, SendFlags::NOSIGNAL | now)?;
            Made::Count(sent as u64)
        }
        Call::SendRecord { seed, len, .. } => {
            let bytes = Pattern::bytes(seed, len);
            let flags = SendFlags::NOSIGNAL | SendFlags::EOR;
            Made::Count(rustix::net::send(fd()?, &bytes, flags)? as u64)
        }
        Call::SendParts {
            seed, ref parts, ..
        } => Made::Count(send_parts(fd()?, seed, parts)?),
        Call::Completions { timeout_ms, .. } => {
            let limit = Instant::now() + Duration::from_millis(timeout_ms.into());
            Made::Count(completions(fd()?, limit)?)
        }
        Call::Receive { len, flags, .. } => {
            let RecvFlags {
                peek,
                dontwait,
                trunc,
            } = flags;
            let flag = |on, flag| if on { flag } else { 0 };
            let flags = flag(peek, libc_flags::PEEK)
                | flag(dontwait, libc_flags::DONTWAIT)
                | flag(trunc, libc_flags::TRUNC);
            let mut buffer = vec![0; len];
            let got = vsock_calls::receive(fd()?, &mut buffer, flags)?;
            Made::Received {
                bytes: got.len as u64,
                digest: sha256(&buffer[..got.len.min(len)]),
                flags: got.flags,
            }
        }
        Call::Lease { .. } => return Err(io::ErrorKind::Unsupported.into()),
        Call::ReceiveNowhere { len, .. } => {
            Made::Count(vsock_calls::receive_nowhere(fd()?, len)? as u64)
        }
        Call::Set { setting, .. } => {
            set(fd()?, setting)?;
            Made::Nothing
        }
        Call::Get { number, .. } => Made::Count(match number {
            Number::Unsent => vsock_calls::unsent(fd()?)?.into(),
            Number::Unread => vsock_calls::unread(fd()?)?.into(),
            Number::BufferSize => vsock::buffer_size(fd()?)?,
        }),
        Call::SocketsUsed => Made::Count(sockets_used()?),
    })
}

/// The values of recvmsg(2)'s flags, the same on every architecture.
mod libc_flags {
    pub(super) const PEEK: i32 = 2;
    pub(super) const TRUNC: i32 = 0x20;
    pub(super) const DONTWAIT: i32 = 0x40;
    pub(super) const EOR: i32 = 0x80;
}

fn set(fd: impl AsFd, setting: Setting) -> io::Result<()> {
    match setting {
        Setting::BufferBounds(min, max) => {
            vsock_calls::set_buffer_bounds(fd, min.into(), max.into())
        }
        Setting::BufferSize(bytes) => vsock_calls::set_buffer_size(fd, bytes.into()),
        Setting::ConnectTimeout(ms) => vsock_calls::set_connect_timeout(fd, ms),
        Setting::LowWater(bytes) => vsock::set_receive_low_water(fd, bytes),
        Setting::Linger(seconds) => {
            let time = seconds.map(|it| Duration::from_secs(it.into()));
            Ok(sockopt::set_socket_linger(fd, time)?)
        }
        Setting::ReceiveTimeout(ms) => {
            let time = (ms > 0).then(|| Duration::from_millis(ms.into()));
            Ok(sockopt::set_socket_timeout(
                fd,
                sockopt::Timeout::Recv,
                time,
            )?)
        }
        Setting::ZeroCopy => vsock_calls::set_zero_copy(fd),
    }
}

/// Sends a pattern's bytes from memory laid out as `parts` say. The memory is kept until the kernel
/// has released it: sent bytes must not change in flight.
fn send_parts(fd: &OwnedFd, seed: u64, parts: &[Part]) -> io::Result<u64> {
    let mut pattern = Pattern::new(seed);
    let mut buffers = Vec::new();
    for part in parts {
        if let Part::Bytes { len, offset } = *part {
            let mut buffer = vec![0; len + offset + PAGE];
            let start = buffer.as_ptr().align_offset(PAGE) + offset;
            pattern.fill(&mut buffer[start..start + len]);
            buffers.push((buffer, start, len));
        }
    }
    let mut made = buffers.iter();
    let vectors: Vec<_> = parts
        .iter()
        .map(|part| match part {
            Part::Unmapped { len } => vsock_calls::Part::Unmapped(*len),
            Part::Bytes { .. } => match made.next() {
                Some((buffer, start, len)) => {
                    vsock_calls::Part::Bytes(&buffer[*start..*start + *len])
                }
                None => vsock_calls::Part::Bytes(&[]),
            },
        })
        .collect();
    let sent = vsock_calls::send_parts(fd, &vectors, true);
    // The kernel reads them after the call; the agent runs for one test only.
    std::mem::forget(buffers);
    Ok(sent? as u64)
}

/// Reads the error queue once it has an entry; at least once.
fn completions(fd: &OwnedFd, limit: Instant) -> io::Result<u64> {
    loop {
        match vsock_calls::completions(fd) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < limit => {}
            result => return result.map(u64::from),
        }
        let left = limit.saturating_duration_since(Instant::now());
        let ms = u32::try_from(left.as_millis()).unwrap_or(u32::MAX);
        // POLLERR is always reported.
        wait(fd, PollFlags::empty(), ms.max(1))?;
    }
}

fn wait(fd: impl AsFd, flags: PollFlags, timeout_ms: u32) -> io::Result<bool> {
    let limit = Timespec {
        tv_sec: i64::from(timeout_ms / 1000),
        tv_nsec: i64::from(timeout_ms % 1000) * 1_000_000,
    };
    loop {
        match poll(&mut [PollFd::new(&fd, flags)], Some(&limit)) {
            Err(rustix::io::Errno::INTR) => {}
            result => return Ok(result? > 0),
        }
    }
}

fn sockets_used() -> io::Result<u64> {
    let text = std::fs::read_to_string("/proc/net/sockstat")?;
    let used = text
        .lines()
        .find_map(|line| line.strip_prefix("sockets: used "))
        .and_then(|count| count.trim().parse().ok());
    used.ok_or_else(|| io::Error::other("no count of sockets"))
}

/// An outcome without a socket.
pub(super) fn outcome(result: io::Result<Made>) -> Outcome {
    let none = Outcome::default();
    match result {
        Ok(Made::Nothing | Made::Socket(..)) => none,
        Ok(Made::Count(bytes)) => Outcome { bytes, ..none },
        Ok(Made::Name(cid, port)) => Outcome {
            peer: Some((cid, port)),
            ..none
        },
        Ok(Made::Received {
            bytes,
            digest,
            flags,
        }) => Outcome {
            bytes,
            sha256: Some(digest),
            ends_record: flags & libc_flags::EOR != 0,
            truncated: flags & libc_flags::TRUNC != 0,
            ..none
        },
        Err(error) => Outcome {
            errno: Some(errno_name(&error)),
            ..none
        },
    }
}
