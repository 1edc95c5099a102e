//! Frames between the driver and the device of a network, both in one thread.
//!
//! The device copies each frame out of the driver's buffer, or into one: what every back-end without
//! system calls does.

use std::cell::RefCell;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use zerosock_net::backend::{Backend, Frame, FrameError, Never, Sent};
use zerosock_net::interface::{Interface, InterfaceConfig, Repr};
use zerosock_net::server::SteppedServer;
use zerosock_net::stats::NetStats;
use zerosock_proto::Instant;
use zerosock_proto::wire::net::Header;
use zerosock_ring::GuestSlice;
use zerosock_virtio::outbox::Outbox;

use super::scenario::{ROUND, Side, end_scenario, run_scenario};
use crate::tables::net::rings;

/// Lengths of frames: those of the rows "rings" of the table `net`.
const LENGTHS: [usize; 2] = [64, 1500];
/// Bytes of a buffer of the back-end.
const BUFFER: usize = 2048;

/// A back-end that stores the frames of the driver, and returns as many as it is told to.
struct Store {
    buffers: Vec<[u8; BUFFER]>,
    /// The next one to be overwritten.
    next: usize,
    len: usize,
    orders: Arc<Orders>,
}

/// What the device is to send.
struct Orders {
    frames: AtomicUsize,
    event: OwnedFd,
}

impl Orders {
    /// Lets the device send a round of frames in its next turn.
    fn give(&self) {
        self.frames.store(ROUND, Ordering::Relaxed);
        rustix::io::write(&self.event, &1_u64.to_ne_bytes()).expect("an eventfd");
    }
}

impl Store {
    fn advance(&mut self) -> &mut [u8; BUFFER] {
        self.next = (self.next + 1) % self.buffers.len();
        &mut self.buffers[self.next]
    }
}

impl Backend for Store {
    type Message = Never;

    fn descriptor(&self, _: usize) -> Option<BorrowedFd<'_>> {
        Some(self.orders.event.as_fd())
    }

    fn next_len(&mut self, _: usize) -> Option<usize> {
        (self.orders.frames.load(Ordering::Relaxed) > 0).then_some(self.len)
    }

    #[inline]
    fn receive(
        &mut self,
        _: usize,
        header: &mut Header,
        slices: &[GuestSlice<'_>],
        _: &mut [u8],
    ) -> Result<usize, FrameError> {
        let left = self.orders.frames.load(Ordering::Relaxed);
        let left = left.checked_sub(1).ok_or(FrameError::NotNow)?;
        self.orders.frames.store(left, Ordering::Relaxed);
        *header = Header::default();
        let (len, mut done) = (self.len, 0);
        let buffer = self.advance();
        for slice in slices {
            done += slice.write(0, &buffer[done..len]);
        }
        assert_eq!(done, len, "a frame fits into one buffer");
        Ok(len)
    }

    #[inline]
    fn send(
        &mut self,
        _: usize,
        frame: &Frame<'_>,
        _: u64,
        _: Instant,
    ) -> Result<Sent, FrameError> {
        let len = frame.len.min(BUFFER);
        let buffer = self.advance();
        let mut done = 0;
        for slice in frame.slices {
            done += slice.read(0, &mut buffer[done..len]);
        }
        Ok(Sent::Done)
    }

    fn on_message(&mut self, message: Never, _: Instant, _: &mut NetStats) -> bool {
        match message {}
    }

    fn undeliverable(message: Never, _: &mut Outbox<Never>) {
        match message {}
    }
}

/// Runs the scenarios.
pub(super) fn run(dir: &Path) {
    for len in LENGTHS {
        run_length(&dir.join(format!("net-{len}.sock")), len);
    }
}

fn run_length(path: &Path, len: usize) {
    let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
    let orders = Arc::new(Orders {
        frames: AtomicUsize::new(0),
        event: event.expect("an eventfd"),
    });
    let store = Store {
        buffers: vec![[0; BUFFER]; 2 * ROUND],
        next: 0,
        len,
        orders: Arc::clone(&orders),
    };
    let guest = rings::guest(path).expect("a socket");
    let server = RefCell::new(SteppedServer::start(guest, store).expect("a device"));
    let step = |wait| server.borrow_mut().step(wait).expect("a running device");
    let at = path.to_owned();
    let connecting = thread::spawn(move || Interface::connect(&at, &InterfaceConfig::default()));
    while !connecting.is_finished() {
        step(Duration::from_millis(1));
    }
    let port = connecting.join().expect("no panic").expect("an interface");
    let name = format!("net {len}");
    let frame = vec![7; len];
    for side in [Side::Sender, Side::Receiver] {
        run_scenario(side, || send(&port, &frame), || step(Duration::ZERO));
        end_scenario(&name, "driver", "device", side);
    }
    for side in [Side::Sender, Side::Receiver] {
        run_scenario(
            side,
            || {
                orders.give();
                step(Duration::ZERO);
            },
            || receive(&port, len),
        );
        end_scenario(&name, "device", "driver", side);
    }
    drop(port);
    server.into_inner().shutdown();
}

fn send(port: &Interface, frame: &[u8]) {
    for _ in 0..ROUND {
        let mut loan = port.loan(frame.len()).expect("a free buffer");
        loan.write(0, frame);
        loan.queue(&Repr::PLAIN).expect("a plain frame");
    }
    port.flush();
}

fn receive(port: &Interface, len: usize) {
    let mut bytes = [0; BUFFER];
    for _ in 0..ROUND {
        let frame = port.recv().expect("a frame");
        assert_eq!(frame.first().read(0, &mut bytes), len);
    }
    // Publishes the buffers.
    assert!(port.recv().is_none());
}
