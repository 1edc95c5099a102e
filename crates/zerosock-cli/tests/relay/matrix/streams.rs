//! Streams: contents, half-close and abrupt close.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

use zerosock::vsock::Stream;

use super::Rig;
use super::ends::Kind;
use super::messages::wait_readable;
use crate::pattern;
use crate::process::DEADLINE;

/// The test's end of a connection.
pub(super) enum Sock {
    Tcp(TcpStream),
    Unix(UnixStream),
    Attached(Stream),
}

trait Both: Read + Write {}
impl<T: Read + Write> Both for T {}

impl Sock {
    fn io(&self) -> Box<dyn Both + '_> {
        match self {
            Sock::Tcp(sock) => Box::new(sock),
            Sock::Unix(sock) => Box::new(sock),
            Sock::Attached(sock) => Box::new(sock),
        }
    }

    pub(super) fn limit(&self) {
        let limit = Some(DEADLINE);
        match self {
            Sock::Tcp(sock) => sock
                .set_read_timeout(limit)
                .and(sock.set_write_timeout(limit)),
            Sock::Unix(sock) => sock
                .set_read_timeout(limit)
                .and(sock.set_write_timeout(limit)),
            Sock::Attached(sock) => sock
                .set_read_timeout(limit)
                .and(sock.set_write_timeout(limit)),
        }
        .unwrap();
    }

    fn write(&self, bytes: &[u8]) {
        self.io().write_all(bytes).unwrap();
    }

    /// Reads so many bytes, or fewer and why there are no more.
    fn read(&self, length: usize) -> Received {
        let mut bytes = Vec::new();
        let end = self.io().take(length as u64).read_to_end(&mut bytes).err();
        Received { bytes, end }
    }

    /// Reads to the end.
    fn read_all(&self) -> Received {
        self.read(usize::MAX)
    }

    fn finish(&self) {
        match self {
            Sock::Tcp(sock) => sock.shutdown(Shutdown::Write),
            Sock::Unix(sock) => sock.shutdown(Shutdown::Write),
            Sock::Attached(sock) => sock.shutdown(Shutdown::Write),
        }
        .unwrap();
    }

    /// Closes it abruptly after a byte has arrived, which stays unread: that makes the close of a Unix socket
    /// a reset too.
    fn reset(self) {
        match &self {
            Sock::Tcp(sock) => {
                wait_readable(sock.as_fd());
                rustix::net::sockopt::set_socket_linger(sock, Some(Duration::ZERO)).unwrap();
            }
            Sock::Unix(sock) => wait_readable(sock.as_fd()),
            Sock::Attached(sock) => {
                sock.wait_readable().unwrap();
                sock.set_linger(Some(Duration::ZERO));
            }
        }
    }
}

/// What was read, and the error that ended it.
struct Received {
    bytes: Vec<u8>,
    end: Option<io::Error>,
}

impl Received {
    fn assert_is(&self, sent: &[u8], rig: &Rig<'_>) {
        let pairs = self.bytes.iter().zip(sent);
        let differs = pairs.clone().position(|(got, sent)| got != sent);
        let at = differs.unwrap_or(pairs.len());
        assert!(
            self.end.is_none() && self.bytes == sent,
            "{} of {} bytes, the first difference at {at}, {:?}: {}",
            self.bytes.len(),
            sent.len(),
            self.end,
            rig.about()
        );
    }
}

pub(super) fn run(rig: &mut Rig<'_>) {
    for first in [0, 1] {
        contents_and_half_close(rig, first);
        abrupt_close(rig, first);
    }
}

/// The two ends of a connection, that of end `first` first.
fn connect(rig: &mut Rig<'_>, first: usize) -> [Sock; 2] {
    rig.start();
    let mut socks = [None, None];
    // Clients first: the relay connects when they are there. The accept of an attached process lets the
    // relay's connect go on.
    let turn = |kind: Kind| match kind.listens() {
        true => 0,
        false => 2 - i32::from(kind.is_attached()),
    };
    for now in 0..3 {
        for (end, sock) in rig.ends.iter().zip(&mut socks) {
            if turn(end.kind) == now {
                *sock = Some(end.stream(rig.world));
            }
        }
    }
    let [one, other] = socks.map(Option::unwrap);
    match first {
        0 => [one, other],
        _ => [other, one],
    }
}

fn contents_and_half_close(rig: &mut Rig<'_>, first: usize) {
    const LENGTH: usize = 2 << 20;
    let all = pattern(2 * LENGTH);
    let (there, back) = all.split_at(LENGTH);
    let [one, other] = &connect(rig, first);
    thread::scope(|scope| {
        scope.spawn(|| {
            one.write(there);
            one.finish();
        });
        scope.spawn(|| other.write(back));
        let received = scope.spawn(|| one.read(LENGTH));
        other.read_all().assert_is(there, rig);
        received.join().unwrap().assert_is(back, rig);
    });
    // The other direction is still open.
    other.write(b"after the end");
    one.read(13).assert_is(b"after the end", rig);
    other.finish();
    one.read_all().assert_is(b"", rig);
}

fn abrupt_close(rig: &mut Rig<'_>, first: usize) {
    let [one, other] = connect(rig, first);
    one.write(b"x");
    other.read(1).assert_is(b"x", rig);
    other.write(b"y");
    one.reset();
    let end = other.io().read(&mut [0]);
    // docs/relay.md: a Unix socket gets an end of file.
    let ends = rig.kinds()[1 - first].is_unix();
    match end {
        Ok(0) if ends => {}
        Err(error) if !ends && error.kind() == ErrorKind::ConnectionReset => {}
        end => panic!("{end:?} after a reset of {first}: {}", rig.about()),
    }
}
