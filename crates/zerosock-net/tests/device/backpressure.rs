//! Back-ends that have no room, so that frames stay in the driver's ring, and that answer at once.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixDatagram;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use zerosock_net::backend::{Backend, Frame, FrameError, Never, Sent};
use zerosock_net::stats::NetStats;
use zerosock_proto::Instant;
use zerosock_proto::wire::net::Header;
use zerosock_ring::GuestSlice;
use zerosock_sys::send_slices;
use zerosock_virtio::device::Message;
use zerosock_virtio::outbox::{DeviceAddr, Outbox};

use super::driver::Driver;
use super::frames::plain;
use super::network::{DEADLINE, serve, wait_until};

/// A back-end that sends and receives frames as datagrams of a socket, which holds few.
struct Socket(UnixDatagram);

impl Backend for Socket {
    type Message = Never;

    fn descriptor(&self, _: usize) -> Option<BorrowedFd<'_>> {
        Some(self.0.as_fd())
    }

    fn receive(
        &mut self,
        _: usize,
        _: &mut Header,
        _: &[GuestSlice<'_>],
        _: &mut [u8],
    ) -> Result<usize, FrameError> {
        Err(FrameError::NotNow)
    }

    fn send(
        &mut self,
        _: usize,
        frame: &Frame<'_>,
        _: u64,
        _: Instant,
    ) -> Result<Sent, FrameError> {
        match send_slices(self.0.as_fd(), frame.slices) {
            Ok(_) => Ok(Sent::Done),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(FrameError::NotNow),
            Err(_) => Err(FrameError::Refused),
        }
    }

    fn on_message(&mut self, message: Never, _: Instant, _: &mut NetStats) -> bool {
        match message {}
    }

    fn undeliverable(message: Never, _: &mut Outbox<Never>) {
        match message {}
    }
}

#[test]
fn frames_for_a_full_back_end_wait_in_order() {
    const FRAMES: u16 = 200;
    let (ours, theirs) = UnixDatagram::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    theirs.set_read_timeout(Some(DEADLINE)).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("net");
    let server = serve(&socket, None, Socket(ours));
    let mut driver = Driver::attach(&socket, 0, 2);
    for index in 0..FRAMES {
        driver.send(0, &Header::default(), &plain(4000, index as u8), &[12]);
        if index % 60 == 0 {
            // So that the ring is never full.
            while driver.next_used(1).is_some() {}
        }
        if driver.avail_index(1) - driver.used_index(1) > 100 {
            break;
        }
    }
    let sent = driver.avail_index(1);
    let frames = || server.stats()[0].1.tx_frames;
    // The socket is full: the count stands still, and so does the ring.
    wait_until("the back-end is full", || {
        let before = frames();
        std::thread::sleep(Duration::from_millis(200));
        frames() == before
    });
    assert!(frames() < u64::from(sent), "{} of {sent}", frames());
    // A kick does not change that.
    driver.kick(1);
    driver.frontend.sync().unwrap();
    assert_eq!(u64::from(driver.used_index(1)), frames());

    let mut bytes = vec![0; 8000];
    for index in 0..sent {
        let len = theirs.recv(&mut bytes).unwrap();
        assert_eq!(bytes[..len], plain(4000, index as u8), "frame {index}");
    }
    wait_until("all are returned", || driver.used_index(1) == sent);
    driver.check_guards();
    server.shutdown();
}

/// A back-end that answers each frame with the same one, and has no descriptor that reports it.
struct Answering(Option<Vec<u8>>);

impl Backend for Answering {
    type Message = Never;

    fn may_have_answers(&self) -> bool {
        true
    }

    fn receive(
        &mut self,
        _: usize,
        _: &mut Header,
        slices: &[GuestSlice<'_>],
        _: &mut [u8],
    ) -> Result<usize, FrameError> {
        let frame = self.0.take().ok_or(FrameError::NotNow)?;
        Ok(slices[0].write(0, &frame))
    }

    fn send(
        &mut self,
        _: usize,
        frame: &Frame<'_>,
        _: u64,
        _: Instant,
    ) -> Result<Sent, FrameError> {
        let mut bytes = vec![0; frame.len];
        frame.slices[0].read(0, &mut bytes);
        self.0 = Some(bytes);
        Ok(Sent::Done)
    }

    fn on_message(&mut self, message: Never, _: Instant, _: &mut NetStats) -> bool {
        match message {}
    }

    fn undeliverable(message: Never, _: &mut Outbox<Never>) {
        match message {}
    }
}

#[test]
fn an_answer_is_received_in_the_turn_of_its_frame() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("net");
    let server = serve(&socket, None, Answering(None));
    let mut driver = Driver::attach(&socket, 0, 2);
    driver.post_many(0, 10, 2048);
    for seed in 0..10 {
        driver.send(0, &Header::default(), &plain(100, seed), &[]);
        assert_eq!(driver.receive(0).1, plain(100, seed));
    }
    driver.check_guards();
    server.shutdown();
}

/// Asks for the frames of an [`Endless`] back-end.
#[derive(Debug)]
struct Go;

impl Message for Go {}

const LONG: usize = 65_000;

/// A back-end that has a message sent to itself by the first frame of the driver, and has frames from that
/// message on.
struct Endless {
    addr: Option<DeviceAddr>,
    is_asked: bool,
    has_frames: bool,
    /// Bytes received since the message, and those of before the device had finished with it.
    moved: usize,
    by_message: Arc<AtomicUsize>,
}

impl Backend for Endless {
    type Message = Go;

    fn start(&mut self, addr: DeviceAddr) -> io::Result<()> {
        self.addr = Some(addr);
        Ok(())
    }

    fn receive(
        &mut self,
        _: usize,
        _: &mut Header,
        _: &[GuestSlice<'_>],
        _: &mut [u8],
    ) -> Result<usize, FrameError> {
        if !self.has_frames {
            return Err(FrameError::NotNow);
        }
        self.moved += LONG;
        Ok(LONG)
    }

    fn send(&mut self, _: usize, _: &Frame<'_>, _: u64, _: Instant) -> Result<Sent, FrameError> {
        self.is_asked = true;
        Ok(Sent::Done)
    }

    fn on_message(&mut self, _: Go, _: Instant, _: &mut NetStats) -> bool {
        self.has_frames = true;
        true
    }

    fn finish_turn(&mut self, _: Instant, outbox: &mut Outbox<Go>, _: &mut NetStats) {
        if self.has_frames && self.by_message.load(Ordering::Relaxed) == 0 {
            self.by_message.store(self.moved, Ordering::Relaxed);
        }
        if std::mem::take(&mut self.is_asked)
            && let Some(addr) = self.addr
        {
            outbox.send(addr, Go);
        }
    }

    fn undeliverable(_: Go, _: &mut Outbox<Go>) {}
}

/// Other devices of the worker have their turns between.
#[test]
fn a_message_moves_no_more_than_a_turn() {
    const BUFFERS: u64 = 60;
    let by_message = Arc::<AtomicUsize>::default();
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("net");
    let backend = Endless {
        addr: None,
        is_asked: false,
        has_frames: false,
        moved: 0,
        by_message: Arc::clone(&by_message),
    };
    let server = serve(&socket, None, backend);
    let mut driver = Driver::attach(&socket, 0, 2);
    for _ in 0..BUFFERS {
        driver.post(0, &[LONG as u32 + 12]);
    }
    driver.send(0, &Header::default(), &plain(60, 0), &[]);
    wait_until("all buffers are filled", || {
        server.stats()[0].1.rx_frames == BUFFERS
    });
    let moved = by_message.load(Ordering::Relaxed);
    assert!((1..=(1 << 20) + LONG).contains(&moved), "{moved}");
    server.shutdown();
}

/// A back-end with a frame that is longer than any frame may be, and then one that is not.
struct TooLong(u32);

impl Backend for TooLong {
    type Message = Never;

    fn may_have_answers(&self) -> bool {
        true
    }

    fn next_len(&mut self, _: usize) -> Option<usize> {
        (self.0 < 2).then_some(LONG)
    }

    fn receive(
        &mut self,
        _: usize,
        _: &mut Header,
        slices: &[GuestSlice<'_>],
        _: &mut [u8],
    ) -> Result<usize, FrameError> {
        self.0 += 1;
        match self.0 {
            1 => Ok(4 * LONG),
            2 => Ok(slices[0].write(0, &plain(100, 3))),
            _ => Err(FrameError::NotNow),
        }
    }

    fn send(&mut self, _: usize, _: &Frame<'_>, _: u64, _: Instant) -> Result<Sent, FrameError> {
        self.0 = 0;
        Ok(Sent::Done)
    }

    fn on_message(&mut self, message: Never, _: Instant, _: &mut NetStats) -> bool {
        match message {}
    }

    fn undeliverable(message: Never, _: &mut Outbox<Never>) {
        match message {}
    }
}

/// Its chain was popped; chains that were read ahead with it are used after it.
#[test]
fn the_chain_of_a_frame_that_is_too_long_is_used_next() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("net");
    let server = serve(&socket, None, TooLong(2));
    let mut driver = Driver::attach(&socket, 0, 2);
    driver.post(0, &[2048]);
    let first = driver.last_buffer();
    driver.post_many(0, 9, 2048);
    driver.send(0, &Header::default(), &plain(60, 0), &[]);
    let (chain, _) = driver.wait_used(0, DEADLINE).expect("a frame");
    assert_eq!(chain, [(first, 2048)]);
    wait_until("the long one is counted", || {
        server.stats()[0].1.rx_no_room == 1
    });
    server.shutdown();
}
