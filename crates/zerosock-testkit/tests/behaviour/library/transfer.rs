//! Transfers over a connection, with outcomes in a kernel's terms.

use std::io::{self, ErrorKind, Read, Write};

use sha2::{Digest, Sha256};
use zerosock::vsock::{SeqPacket, Stream, StreamError};
use zerosock_cli::vm::pattern::{Pattern, hex};
use zerosock_testkit::calls::RecvFlags;
use zerosock_testkit::protocol::Outcome;

/// A connection of either type.
pub(super) trait Flow {
    /// Sends everything, as one message on SEQPACKET.
    fn put(&self, bytes: &[u8]) -> io::Result<()>;
    /// Receives what is available; 0 at the end.
    fn get(&self, out: &mut [u8]) -> io::Result<usize>;
}

impl Flow for Stream {
    fn put(&self, bytes: &[u8]) -> io::Result<()> {
        (&mut &*self).write_all(bytes)
    }

    fn get(&self, out: &mut [u8]) -> io::Result<usize> {
        (&mut &*self).read(out)
    }
}

impl Flow for SeqPacket {
    fn put(&self, bytes: &[u8]) -> io::Result<()> {
        self.send(bytes)
    }

    fn get(&self, out: &mut [u8]) -> io::Result<usize> {
        Ok(self.recv(out)?.map_or(0, |received| received.copied))
    }
}

pub(super) fn counted(bytes: usize) -> Outcome {
    Outcome {
        bytes: bytes as u64,
        ..Outcome::default()
    }
}

/// A kernel's name of the error.
pub(super) fn of(result: io::Result<()>) -> Outcome {
    let inside = |error: &io::Error| {
        let inner = error.get_ref().and_then(|it| it.downcast_ref());
        inner.copied()
    };
    let name = |error: io::Error| match error.kind() {
        _ if matches!(inside(&error), Some(StreamError::TooLong)) => "EMSGSIZE".to_owned(),
        ErrorKind::BrokenPipe => "EPIPE".to_owned(),
        ErrorKind::ConnectionReset => "ECONNRESET".to_owned(),
        ErrorKind::ConnectionRefused => "ECONNREFUSED".to_owned(),
        ErrorKind::AddrInUse => "EADDRINUSE".to_owned(),
        ErrorKind::AddrNotAvailable => "EADDRNOTAVAIL".to_owned(),
        ErrorKind::HostUnreachable => "EHOSTUNREACH".to_owned(),
        // A kernel has no other name for a receive that timed out.
        ErrorKind::WouldBlock | ErrorKind::TimedOut => "EAGAIN".to_owned(),
        _ => error.to_string(),
    };
    Outcome {
        errno: result.err().map(name),
        ..Outcome::default()
    }
}

pub(super) fn sent(len: usize, result: io::Result<()>) -> Outcome {
    match result {
        Ok(()) => counted(len),
        Err(error) => of(Err(error)),
    }
}

/// As recvmsg(2) reports it: the number of copied bytes, or with MSG_TRUNC the length of the
/// record.
pub(super) fn receive_record(records: &SeqPacket, len: usize, flags: RecvFlags) -> Outcome {
    let mut buffer = vec![0; len];
    records
        .set_nonblocking(flags.dontwait)
        .expect("never fails");
    let received = if flags.peek {
        records.peek(&mut buffer)
    } else {
        records.recv(&mut buffer)
    };
    records.set_nonblocking(false).expect("never fails");
    let received = match received {
        Ok(received) => received,
        Err(error) => return of(Err(error)),
    };
    let (len, copied) = received.map_or((0, 0), |it| (it.len, it.copied));
    Outcome {
        sha256: Some(hex(Sha256::digest(&buffer[..copied]).as_slice())),
        ends_record: received.is_some_and(|it| it.end_of_record),
        truncated: received.is_some_and(|it| it.is_truncated()),
        ..counted(if flags.trunc { len } else { copied })
    }
}

/// A non-blocking call.
pub(super) fn nonblocking(
    stream: &Stream,
    call: impl FnOnce(&Stream) -> io::Result<usize>,
) -> Outcome {
    let set = |on| stream.set_nonblocking(on).expect("never fails");
    set(true);
    let result = call(stream);
    set(false);
    match result {
        Ok(bytes) => counted(bytes),
        Err(error) => of(Err(error)),
    }
}

pub(super) fn receive(stream: &Stream, len: usize, flags: RecvFlags) -> Outcome {
    let mut buffer = vec![0; len];
    let mut call = |mut stream: &Stream| {
        if flags.peek {
            stream.peek(&mut buffer)
        } else {
            stream.read(&mut buffer)
        }
    };
    let outcome = if flags.dontwait {
        nonblocking(stream, &mut call)
    } else {
        match call(stream) {
            Ok(bytes) => counted(bytes),
            Err(error) => of(Err(error)),
        }
    };
    let got = usize::try_from(outcome.bytes).unwrap_or(0);
    Outcome {
        sha256: Some(hex(Sha256::digest(&buffer[..got]).as_slice())),
        ..outcome
    }
}

pub(super) fn send_all(flow: &dyn Flow, seed: u64, len: u64, chunks: &[usize]) -> Outcome {
    let mut pattern = Pattern::new(seed);
    let mut sizes = chunks.iter().copied().filter(|size| *size > 0).cycle();
    let mut sent = 0;
    while let (true, Some(size)) = (sent < len, sizes.next()) {
        let mut chunk = vec![0; size.min((len - sent) as usize)];
        pattern.fill(&mut chunk);
        if let Err(error) = flow.put(&chunk) {
            return Outcome {
                bytes: sent,
                ..of(Err(error))
            };
        }
        sent += chunk.len() as u64;
    }
    counted(sent as usize)
}

pub(super) fn receive_all(flow: &dyn Flow, limit: Option<u64>) -> Outcome {
    let limit = limit.unwrap_or(u64::MAX);
    let mut digest = Sha256::new();
    let mut buffer = vec![0; 256 << 10];
    let mut outcome = Outcome::default();
    while outcome.bytes < limit {
        let want = usize::try_from(limit - outcome.bytes)
            .unwrap_or(usize::MAX)
            .min(buffer.len());
        match flow.get(&mut buffer[..want]) {
            Ok(0) => {
                outcome.end = true;
                break;
            }
            Ok(count) => {
                digest.update(&buffer[..count]);
                outcome.bytes += count as u64;
            }
            Err(error) => {
                outcome.errno = of(Err(error)).errno;
                break;
            }
        }
    }
    outcome.sha256 = Some(hex(digest.finalize().as_slice()));
    outcome
}
