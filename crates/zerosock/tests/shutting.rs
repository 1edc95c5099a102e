//! SHUT_RD at the side that calls it: reads return the end at once, and every kind of waiting
//! reader is woken. For the backends of both sides.

use std::io::{BufRead, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::thread;
use std::time::{Duration, Instant};

use crate::common::raw::RawGuest;
use crate::common::{self, PATIENCE, bytes, deadline, eventually};
use crate::hosting::Hosted;
use zerosock::vsock::{Endpoint, Poller, Readiness, SeqPacket, Stream, Wait};
use zerosock::{Address, Cid, Port};
use zerosock_proto::wire::vsock::Op;

const PORT: Port = Port::new(9);
const THERE: Address = Address::new(Cid::HOST, PORT);

/// A host, a process, and one connection between them.
struct Joined<S> {
    _hosted: Hosted,
    _process: Endpoint,
    host: S,
    guest: S,
}

impl<S> Joined<S> {
    /// The side under test, and its peer.
    fn sides(&self, host_first: bool) -> (&S, &S) {
        match host_first {
            true => (&self.host, &self.guest),
            false => (&self.guest, &self.host),
        }
    }
}

fn endpoint(hosted: &Hosted) -> Endpoint {
    Endpoint::builder()
        .queue_pairs(common::pairs())
        .attach_device(hosted.socket_path(0))
        .unwrap()
}

fn streams() -> Joined<Stream> {
    let hosted = Hosted::new();
    let process = endpoint(&hosted);
    let listener = hosted.listen(PORT, 1).unwrap();
    let guest = process.connect(THERE).unwrap();
    let host = listener.accept_timeout(PATIENCE).unwrap().0;
    for stream in [&host, &guest] {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
    }
    Joined {
        _hosted: hosted,
        _process: process,
        host,
        guest,
    }
}

fn messages() -> Joined<SeqPacket> {
    let hosted = Hosted::new();
    let process = endpoint(&hosted);
    let listener = hosted.listen_seqpacket(PORT, 1).unwrap();
    let guest = process.connect_seqpacket(THERE).unwrap();
    let host = listener.accept_timeout(PATIENCE).unwrap().0;
    for socket in [&host, &guest] {
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        socket.set_write_timeout(Some(PATIENCE)).unwrap();
    }
    Joined {
        _hosted: hosted,
        _process: process,
        host,
        guest,
    }
}

/// Runs `wait` in a thread, `act` when that thread sleeps, and returns what `wait` found. At the
/// end of its patience a wait looks once more: the result counts only if it came before.
fn woken<T: Send>(wait: impl FnOnce() -> T + Send, act: impl FnOnce()) -> T {
    thread::scope(|scope| {
        let (tell, told) = std::sync::mpsc::channel();
        let waiting = scope.spawn(move || {
            tell.send(rustix::thread::gettid()).unwrap();
            let began = Instant::now();
            let found = wait();
            assert!(began.elapsed() < PATIENCE, "never told");
            found
        });
        let thread = told.recv().unwrap().as_raw_nonzero();
        let path = format!("/proc/self/task/{thread}/stat");
        // Asleep for good, and not for a moment, on the lock. One that has ended already fails
        // below.
        let (give_up, mut asleep) = (deadline(), 0);
        while asleep < 1000 && !waiting.is_finished() {
            assert!(Instant::now() < give_up, "it never sleeps");
            let stat = std::fs::read_to_string(&path).unwrap_or_default();
            asleep = if stat.contains(") S ") { asleep + 1 } else { 0 };
        }
        assert!(!waiting.is_finished(), "there was nothing to wait for");
        act();
        waiting.join().unwrap()
    })
}

/// `len` bytes have arrived and are unread.
fn has_come(stream: &Stream, len: usize) {
    let mut out = vec![0; len + 1];
    let mark = stream.low_water();
    stream.set_low_water(1).unwrap();
    eventually("the bytes", || stream.peek(&mut out).unwrap() == len);
    stream.set_low_water(mark).unwrap();
}

#[test]
fn shutdown_read_ends_a_read_that_waits_for_the_low_water_mark() {
    for host_first in [true, false] {
        let joined = streams();
        let (near, mut far) = joined.sides(host_first);
        near.set_low_water(100).unwrap();
        far.write_all(b"few").unwrap();
        let mut out = [0; 100];
        let got = woken(
            || (&*near).read(&mut out),
            || near.shutdown(Shutdown::Read).unwrap(),
        );
        assert_eq!(got.unwrap(), 0);
        assert_eq!((&*near).read(&mut out).unwrap(), 0, "and again");
        near.wait_readable().unwrap();
    }
}

#[test]
fn shutdown_read_is_readable_for_a_poller() {
    for host_first in [true, false] {
        let joined = streams();
        let (near, _far) = joined.sides(host_first);
        let mut poller = Poller::new(Wait::Sleep);
        poller.add_stream(near, 7, Readiness::READABLE);
        let ready = woken(
            || poller.wait(Some(PATIENCE)).unwrap(),
            || near.shutdown(Shutdown::Read).unwrap(),
        );
        assert_eq!(ready.len(), 1);
        assert_eq!(ready[0].readiness, Readiness::READABLE);

        let joined = messages();
        let (near, _far) = joined.sides(host_first);
        let mut poller = Poller::new(Wait::Sleep);
        poller.add_seqpacket(near, 7, Readiness::READABLE);
        let ready = woken(
            || poller.wait(Some(PATIENCE)).unwrap(),
            || near.shutdown(Shutdown::Read).unwrap(),
        );
        assert_eq!(ready.len(), 1);
        assert_eq!(ready[0].readiness, Readiness::READABLE);
    }
}

#[test]
fn shutdown_read_releases_calls_that_wait_for_bytes_and_messages() {
    for host_first in [true, false] {
        let joined = streams();
        let (near, _far) = joined.sides(host_first);
        let shut = || near.shutdown(Shutdown::Read).unwrap();
        woken(|| near.wait_readable(), shut).unwrap();

        let joined = streams();
        let (near, _far) = joined.sides(host_first);
        let shut = || near.shutdown(Shutdown::Both).unwrap();
        assert!(woken(|| near.recv().unwrap().is_none(), shut));

        let joined = messages();
        let (near, _far) = joined.sides(host_first);
        let shut = || near.shutdown(Shutdown::Read).unwrap();
        woken(|| near.wait_readable(), shut).unwrap();

        let joined = messages();
        let (near, _far) = joined.sides(host_first);
        let shut = || near.shutdown(Shutdown::Read).unwrap();
        assert!(woken(|| near.recv(&mut [0; 8]).unwrap().is_none(), shut));
    }
}

/// As Linux does: also what had arrived before is not read any more.
#[test]
fn reads_after_shutdown_read_give_the_end_at_once() {
    for host_first in [true, false] {
        let mut joined = streams();
        let (near, mut far) = joined.sides(host_first);
        far.write_all(b"unread").unwrap();
        has_come(near, 6);
        near.shutdown(Shutdown::Read).unwrap();
        // Nothing waits from here on.
        near.set_nonblocking(true).unwrap();
        let mut out = [0; 10];
        assert_eq!((&*near).read(&mut out).unwrap(), 0);
        assert_eq!(near.peek(&mut out).unwrap(), 0);
        assert!(near.recv().unwrap().is_none());
        assert_eq!(near.recv_each(4, |_| panic!("a packet")).unwrap(), 0);
        let near = match host_first {
            true => &mut joined.host,
            false => &mut joined.guest,
        };
        assert_eq!(near.fill_buf().unwrap(), b"");
        // The other way is open.
        near.set_nonblocking(false).unwrap();
        near.write_all(b"answer").unwrap();
        let (_, mut far) = joined.sides(host_first);
        far.read_exact(&mut out[..6]).unwrap();
        assert_eq!(&out[..6], b"answer");

        let joined = messages();
        let (near, far) = joined.sides(host_first);
        far.send(b"unread").unwrap();
        far.send(b"").unwrap();
        near.wait_readable().unwrap();
        near.shutdown(Shutdown::Read).unwrap();
        near.set_nonblocking(true).unwrap();
        assert!(near.recv(&mut out).unwrap().is_none());
        assert!(near.peek(&mut out).unwrap().is_none());
        assert!(near.recv_leases().unwrap().is_none());
    }
}

#[test]
fn shutdown_read_discards_bytes_returned_by_fill_buf() {
    let mut joined = streams();
    joined.guest.write_all(b"shown").unwrap();
    assert_eq!(joined.host.fill_buf().unwrap(), b"shown");
    joined.host.consume(2);
    joined.host.shutdown(Shutdown::Read).unwrap();
    assert_eq!(joined.host.fill_buf().unwrap(), b"");
    joined.host.consume(0);
}

/// The peer's buffers are not held for a reader that will never come, neither those that were
/// unread nor those of packets that crossed the shutdown.
#[test]
fn buffers_are_returned_after_shutdown_read() {
    let hosted = Hosted::with_hold(1, Duration::from_secs(3600));
    let listener = hosted.listen(PORT, 4).unwrap();
    let mut guest = hosted.raw_guest();
    guest.connect(5000, PORT.get());
    let (stream, _) = listener.accept_timeout(PATIENCE).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let send = |guest: &mut RawGuest, seed| {
        let header = guest.header(5000, PORT.get(), Op::Rw);
        guest.send(header, &bytes(seed, 1000));
    };
    send(&mut guest, 1);
    let lease = stream.recv().unwrap().unwrap();
    send(&mut guest, 2);
    stream.wait_readable().unwrap();
    stream.shutdown(Shutdown::Read).unwrap();
    send(&mut guest, 3);
    // What is on lease stays with its reader.
    assert_eq!(lease.to_vec(), bytes(1, 1000));
    drop(lease);
    guest.wait_tx_done();
    assert_eq!((&stream).read(&mut [0; 10]).unwrap(), 0);
}

#[test]
fn the_peer_s_end_is_seen_below_the_low_water_mark() {
    for host_first in [true, false] {
        let joined = streams();
        let (mut near, mut far) = joined.sides(host_first);
        near.set_low_water(100).unwrap();
        far.write_all(b"the rest").unwrap();
        let shut = || far.shutdown(Shutdown::Write).unwrap();
        let lease = woken(|| near.recv().unwrap().map(|lease| lease.to_vec()), shut);
        assert_eq!(lease.as_deref(), Some(&b"the rest"[..]));
        let mut poller = Poller::new(Wait::Sleep);
        poller.add_stream(near, 7, Readiness::READABLE);
        assert_eq!(poller.wait(Some(PATIENCE)).unwrap().len(), 1);
        assert_eq!(near.read(&mut [0; 10]).unwrap(), 0);
    }
}

/// A blocking call of the same stream may go on sending.
#[test]
fn shutdown_read_is_reported_to_the_sender() {
    for host_first in [true, false] {
        let joined = streams();
        let (near, mut far) = joined.sides(host_first);
        near.shutdown(Shutdown::Read).unwrap();
        let give_up = deadline();
        let error = loop {
            match far.write_all(&[0; 1000]) {
                Ok(()) => assert!(Instant::now() < give_up, "no broken pipe"),
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), ErrorKind::BrokenPipe);
    }
}

#[cfg(feature = "tokio")]
mod tasks {
    use std::task::Poll;

    use tokio::io::AsyncReadExt;
    use tokio::time::timeout;
    use zerosock::vsock::tokio::{AsyncSeqPacket, AsyncStream};

    use super::*;

    /// Polls `wait` once, which finds nothing; then `act`; then `wait` is told.
    async fn woken<T>(wait: impl Future<Output = T>, act: impl FnOnce()) -> T {
        let mut wait = std::pin::pin!(wait);
        let first = std::future::poll_fn(|cx| Poll::Ready(wait.as_mut().poll(cx)));
        assert!(first.await.is_pending(), "there was nothing to wait for");
        act();
        timeout(PATIENCE, wait).await.expect("never told")
    }

    #[tokio::test]
    async fn shutdown_read_ends_what_tasks_wait_for() {
        for host_first in [true, false] {
            let joined = streams();
            let Joined {
                _hosted,
                _process,
                host,
                guest,
            } = joined;
            let (near, mut far) = if host_first {
                (host, guest)
            } else {
                (guest, host)
            };
            near.set_low_water(100).unwrap();
            far.write_all(b"few").unwrap();
            let near = AsyncStream::new(near).unwrap();
            let shut = || near.get_ref().shutdown(Shutdown::Read).unwrap();
            assert!(woken(near.recv(), shut).await.unwrap().is_none());
            let mut near = near;
            assert_eq!(near.read(&mut [0; 10]).await.unwrap(), 0);

            let joined = messages();
            let Joined {
                _hosted,
                _process,
                host,
                guest,
            } = joined;
            let (near, _far) = if host_first {
                (host, guest)
            } else {
                (guest, host)
            };
            let near = AsyncSeqPacket::new(near).unwrap();
            let shut = || near.get_ref().shutdown(Shutdown::Read).unwrap();
            let mut out = [0; 8];
            assert!(woken(near.recv(&mut out), shut).await.unwrap().is_none());
        }
    }
}
