//! Small writes to a peer that does not read: the packets stay within what a kernel that counts
//! them accepts.
//!
//! Coalesced writes become few packets, and no byte is lost, reordered, or left behind. Shown by
//! counters, at a host and at an endpoint.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::thread;
use std::time::Instant;

use crate::common::driver::{Driver, DriverConfig};
use crate::common::raw::RawGuest;
use crate::common::{self, PATIENCE, TestDaemon, bytes, deadline, eventually};
use crate::hosting::Hosted;
use zerosock::vsock::{Endpoint, Stream};
use zerosock::{Address, Cid, Port};
use zerosock_proto::wire::vsock::{Op, Repr, SHUTDOWN_SEND};

const PORT: Port = Port::new(700);
/// What a guest offers for a buffer, and the packets of a kernel's book-keeping that it has room
/// for.
const BUFFER: usize = 262_144;
const MOST_PACKETS: usize = BUFFER / 576;
/// Packets that are sent however small they are, and bytes from which one is not small.
const FREE: usize = 281;
const LONG: usize = 2048;

/// Writes until there is no room, in pieces of `piece` bytes; how many bytes were taken.
fn write_all_that_is_taken(mut stream: &Stream, all: &[u8], piece: usize) -> usize {
    let mut taken = 0;
    for part in all.chunks(piece) {
        match stream.write(part) {
            Ok(more) => taken += more,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::WouldBlock);
                break;
            }
        }
    }
    taken
}

/// A guest that writes its rings by hand, and takes packets from the ring without reading their
/// bytes.
struct Kernel {
    guest: RawGuest,
    /// Unread packets, by their bytes.
    queue: Vec<usize>,
    got: Vec<u8>,
    ended: bool,
}

impl Kernel {
    /// Takes what is there.
    fn take(&mut self) {
        while let Some((header, payload)) = self.guest.try_recv() {
            match header.op.known() {
                Some(Op::Rw) => {
                    self.queue.push(payload.len());
                    assert!(self.queue.len() <= MOST_PACKETS, "Linux would reset it");
                    self.got.extend_from_slice(&payload);
                    assert!(self.queue.iter().sum::<usize>() <= BUFFER);
                }
                Some(Op::Shutdown) => self.ended |= header.flags & SHUTDOWN_SEND != 0,
                Some(Op::CreditRequest | Op::CreditUpdate) => {}
                other => panic!("{other:?}"),
            }
        }
    }

    /// The reader reads everything, and the sender is told.
    fn read(&mut self) {
        self.queue.clear();
        let mut header = self.guest.header(5000, PORT.get(), Op::CreditUpdate);
        header.fwd_cnt = self.got.len() as u32;
        self.guest.send(header, &[]);
    }
}

fn kernel() -> (Hosted, Kernel, Stream) {
    let hosted = Hosted::new();
    let listener = hosted.listen(PORT, 4).unwrap();
    let mut guest = hosted.raw_guest();
    guest.connect(5000, PORT.get());
    let (stream, _) = listener.accept_timeout(PATIENCE).unwrap();
    stream.set_nonblocking(true).unwrap();
    let kernel = Kernel {
        guest,
        queue: Vec::new(),
        got: Vec::new(),
        ended: false,
    };
    (hosted, kernel, stream)
}

/// Writes in pieces until nothing is taken any more; how many bytes were.
fn fill(kernel: &mut Kernel, stream: &Stream, all: &[u8], piece: usize) -> usize {
    let give_up = deadline();
    let (mut written, mut refused) = (0, 0);
    while refused < 3 {
        // As few as leave it buffers: it has 64 of them.
        let part = &all[written..all.len().min(written + 20 * piece)];
        let taken = write_all_that_is_taken(stream, part, piece);
        written += taken;
        refused = if taken == 0 { refused + 1 } else { 0 };
        kernel.take();
        assert!(Instant::now() < give_up, "{written} taken, and no end");
    }
    written
}

#[test]
fn a_host_sends_no_more_packets_than_a_kernel_has_room_for_however_small() {
    let (mut hosted, mut kernel, stream) = kernel();
    hosted.stop();
    let written = fill(&mut kernel, &stream, &bytes(6, BUFFER), 1);
    // Packets of their own, and all of them visible.
    assert_eq!(written, kernel.got.len());
    assert_eq!(kernel.queue.len(), BUFFER / 640);
}

#[test]
fn coalesced_host_writes_fill_the_buffer_of_a_guest_that_does_not_read() {
    for piece in [1, 100, 129, 511, 2000] {
        let (mut hosted, mut kernel, stream) = kernel();
        stream.set_coalesce(true);
        hosted.stop();
        let all = bytes(7, BUFFER + 60_000);
        let began = Instant::now();
        let mut written = fill(&mut kernel, &stream, &all, piece);
        assert!(
            written <= BUFFER,
            "{written}: more than there is credit for"
        );
        // What waits for long goes as it is: 2 ms, then twice as long each time, a second at most.
        let packets = kernel.queue.len();
        let hurried = 12 + began.elapsed().as_secs() as usize;
        let free = FREE.min(BUFFER / piece + 1);
        let short = kernel.queue.iter().filter(|&&len| len < LONG).count();
        assert!(short <= free + hurried, "{short} short ones of {packets}");
        let full = written >= BUFFER - LONG;
        assert!(full || packets >= BUFFER / 640 - hurried, "{written}");
        let give_up = deadline();
        kernel.read();
        while kernel.got.len() < all.len() {
            hosted.drive().unwrap();
            written += write_all_that_is_taken(&stream, &all[written..], piece);
            kernel.take();
            kernel.read();
            assert!(Instant::now() < give_up, "{} came", kernel.got.len());
        }
        assert!(kernel.got == all, "out of order, or not the same");
    }
}

/// What waits for more is sent by a flush, in front of a loan, at the end of what is sent, and at
/// the end of the connection.
#[test]
fn what_waits_leaves_at_once_when_nothing_can_be_added() {
    type End = fn(Stream) -> (&'static [u8], Option<Stream>);
    let ends: [(End, bool); 5] = [
        (
            |stream| {
                (&stream).flush().unwrap();
                (b"", Some(stream))
            },
            false,
        ),
        (
            |stream| {
                // As a stream that is owned, which is another implementation.
                let mut writer = std::io::BufWriter::new(stream);
                writer.flush().unwrap();
                (b"", writer.into_inner().ok())
            },
            false,
        ),
        (
            |stream| {
                let mut loan = stream.loan(4).unwrap();
                loan.write_all(b"loan").unwrap();
                loan.send().unwrap();
                (b"loan", Some(stream))
            },
            false,
        ),
        (
            |stream| {
                stream.shutdown(Shutdown::Write).unwrap();
                (b"", Some(stream))
            },
            true,
        ),
        (
            |stream| {
                drop(stream);
                (b"", None)
            },
            true,
        ),
    ];
    for (end, ended) in ends {
        let (mut hosted, mut kernel, stream) = kernel();
        stream.set_coalesce(true);
        let mut all = bytes(8, 3 * FREE);
        let mut rest = &all[..];
        while !rest.is_empty() {
            let part = &rest[..rest.len().min(30)];
            assert_eq!(write_all_that_is_taken(&stream, part, 1), part.len());
            kernel.take();
            rest = &rest[part.len()..];
        }
        // The timer does not fire any more.
        hosted.stop();
        kernel.take();
        // What waited for long already goes with what is added to it.
        let waits = (0..20).any(|_| {
            let unread = kernel.queue.len();
            assert_eq!((&stream).write(b"waits").unwrap(), 5);
            all.extend_from_slice(b"waits");
            kernel.take();
            kernel.queue.len() == unread
        });
        assert!(waits, "it does not wait");
        let (more, _stream) = end(stream);
        all.extend_from_slice(more);
        kernel.take();
        assert_eq!(kernel.got.len(), all.len());
        assert!(kernel.got == all);
        assert_eq!(kernel.ended, ended);
    }
}

/// A stream of the process's, and the host's end.
fn connected(hosted: &Hosted, endpoint: &Endpoint) -> (Stream, Stream) {
    let listener = hosted.listen(PORT, 4).unwrap();
    let (near, far) = thread::scope(|scope| {
        let accepting = scope.spawn(|| listener.accept_timeout(PATIENCE).unwrap().0);
        let near = endpoint.connect(Address::new(Cid::HOST, PORT)).unwrap();
        (near, accepting.join().unwrap())
    });
    for stream in [&near, &far] {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
    }
    (near, far)
}

/// A host that listens, and a process at it; a stream of the process's and the host's end.
fn process() -> (Hosted, Endpoint, Stream, Stream) {
    let hosted = Hosted::new();
    let endpoint = Endpoint::builder()
        .queue_pairs(common::pairs())
        .attach_device(hosted.socket_path(0))
        .unwrap();
    let (near, far) = connected(&hosted, &endpoint);
    (hosted, endpoint, near, far)
}

#[test]
fn small_writes_coalesce_into_few_packets_while_the_peer_does_not_read() {
    const LEN: usize = 100_000;
    let (_hosted, endpoint, near, mut far) = process();
    let all = bytes(9, LEN);
    let before = endpoint.stats();
    near.set_coalesce(true);
    for piece in all.chunks(10) {
        (&near).write_all(piece).unwrap();
    }
    (&near).flush().unwrap();
    let after = endpoint.stats();
    assert_eq!(after.sent - before.sent, LEN as u64);
    assert_eq!(after.copied_in - before.copied_in, LEN as u64);
    // With each that is longer goes one that asks how much was read.
    let packets = after.packets_sent - before.packets_sent;
    let few = FREE + 2 * (LEN / LONG) + 60;
    assert!(packets <= few as u64, "{packets} packets for 10000 writes");
    assert_eq!(
        near.unsent(),
        LEN,
        "what waits is not sent, and nobody has read"
    );
    let mut got = vec![0; LEN];
    far.read_exact(&mut got).unwrap();
    assert!(got == all);
    eventually("all read", || near.unsent() == 0);
}

/// Both wait for the other otherwise: the reader for more bytes than packets have room for, the
/// writer for the reader.
#[test]
fn a_reader_with_a_high_low_water_mark_gets_its_bytes_in_small_packets() {
    for from_host in [false, true] {
        let (_hosted, _endpoint, near, far) = process();
        let (reader, writer) = if from_host { (near, far) } else { (far, near) };
        let all = bytes(10, 50_000);
        writer.set_coalesce(true);
        reader.set_low_water(all.len() as u32).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                for piece in all.chunks(7) {
                    (&writer).write_all(piece).unwrap();
                }
                // It makes no flush, but one call that waits: for the answer.
                let mut answer = [0];
                (&writer).read_exact(&mut answer).unwrap();
            });
            let mut got = vec![0; all.len()];
            reader.wait_readable().unwrap();
            assert_eq!(reader.unread(), all.len());
            (&reader).read_exact(&mut got).unwrap();
            assert!(got == all);
            (&reader).write_all(b"!").unwrap();
        });
    }
}

/// A poller reports a stream writable while further bytes would wait with others, and reports it
/// again when there is room again.
#[test]
fn a_poller_reports_writable_when_waiting_bytes_fit() {
    use zerosock::vsock::{Poller, Readiness, Wait};
    const LEN: usize = 600_000;
    let (_hosted, _endpoint, near, mut far) = process();
    near.set_nonblocking(true).unwrap();
    near.set_coalesce(true);
    let all = bytes(11, LEN);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut poller = Poller::new(Wait::Sleep);
            poller.add_stream(&near, 1, Readiness::WRITABLE);
            let mut written = 0;
            while written < LEN {
                let ready = poller.wait(Some(PATIENCE)).unwrap();
                assert!(!ready.is_empty(), "never told");
                written += write_all_that_is_taken(&near, &all[written..], 9);
            }
            (&near).flush().unwrap();
            near.set_nonblocking(false).unwrap();
            (&near).read_exact(&mut [0]).unwrap();
        });
        let mut got = vec![0; LEN];
        for part in got.chunks_mut(1000) {
            far.read_exact(part).unwrap();
        }
        assert!(got == all);
        far.write_all(b"!").unwrap();
    });
}

/// A guest with buffers shorter than the gathered bytes gets them in several packets.
#[test]
fn what_is_gathered_fits_no_single_buffer_of_the_guests() {
    let hosted = Hosted::new();
    let mut config = DriverConfig::new(hosted.socket_path(0));
    config.rx_buffer_size = 700;
    let mut guest = Driver::attach(config).unwrap();
    let listener = hosted.listen(PORT, 4).unwrap();
    let id = guest
        .wait_connect(common::host(PORT.get()), deadline())
        .unwrap();
    let (stream, _) = listener.accept_timeout(PATIENCE).unwrap();
    stream.set_nonblocking(true).unwrap();
    stream.set_coalesce(true);
    let all = bytes(14, 20_000);
    let (mut written, give_up) = (0, deadline());
    while written < all.len() {
        let part = &all[written..all.len().min(written + 300)];
        written += write_all_that_is_taken(&stream, part, 3);
        guest.drive().unwrap();
        assert!(Instant::now() < give_up, "{written} taken");
    }
    (&stream).flush().unwrap();
    let mut got = vec![0; all.len()];
    guest.wait_recv_exact(id, &mut got, deadline()).unwrap();
    assert!(got == all);
}

/// SO_VM_SOCKETS_BUFFER_SIZE may be 128. With nothing outstanding each byte leaves at once, and not
/// after a timer that doubles up to a second.
#[test]
fn small_packets_to_a_small_window_wait_for_no_timer() {
    const BYTES: usize = 300;
    let daemon = TestDaemon::with(1, |_| {});
    let listener = daemon.host_listener(PORT.get());
    let mut guest = RawGuest::attach(&daemon.vms[0].socket);
    let header = |guest: &RawGuest, op| Repr {
        buf_alloc: 128,
        ..guest.header(5000, PORT.get(), op)
    };
    guest.send(header(&guest, Op::Request), &[]);
    guest.recv_op(5000, Op::Response);
    let (mut program, _) = listener.accept().unwrap();
    let sent = bytes(8, BYTES);
    let give_up = deadline();
    let mut got = Vec::new();
    for byte in &sent {
        program.write_all(&[*byte]).unwrap();
        got.extend(guest.recv_op(5000, Op::Rw).1);
        let update = Repr {
            fwd_cnt: got.len() as u32,
            ..header(&guest, Op::CreditUpdate)
        };
        guest.send(update, &[]);
        assert!(Instant::now() < give_up, "{} of {BYTES} bytes", got.len());
    }
    assert_eq!(got, sent);
}
