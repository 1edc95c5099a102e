//! A back-end that cannot read a frame.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

use rustix::net::SendFlags;
use zerosock_net::backend::{Backend, Frame, FrameError, Never, Sent};
use zerosock_net::stats::NetStats;
use zerosock_net::tap::TapBackend;
use zerosock_proto::Instant;
use zerosock_proto::wire::net::{F_MRG_RXBUF, Header, Offloads};
use zerosock_ring::GuestSlice;
use zerosock_sys::network;
use zerosock_sys::tun::{InterfaceName, Tap};
use zerosock_virtio::outbox::Outbox;

use super::driver::Driver;
use super::frames::plain;
use super::network::{isolated, serve, wait_until};

/// A TAP of which so many reads fail.
struct Failing(TapBackend, Arc<AtomicU32>);

impl Backend for Failing {
    type Message = Never;

    fn queues(&self) -> u16 {
        self.0.queues()
    }

    fn features(&self) -> u64 {
        self.0.features()
    }

    fn descriptor(&self, queue: usize) -> Option<BorrowedFd<'_>> {
        self.0.descriptor(queue)
    }

    fn set_offloads(&mut self, offloads: Offloads) -> io::Result<()> {
        self.0.set_offloads(offloads)
    }

    fn set_active(&mut self, queue: usize, active: bool) -> io::Result<()> {
        self.0.set_active(queue, active)
    }

    fn receive(
        &mut self,
        queue: usize,
        header: &mut Header,
        slices: &[GuestSlice<'_>],
        rest: &mut [u8],
    ) -> Result<usize, FrameError> {
        let fails = |left: u32| left.checked_sub(1);
        match self.1.fetch_update(SeqCst, SeqCst, fails) {
            Ok(_) => Err(FrameError::Refused),
            Err(_) => self.0.receive(queue, header, slices, rest),
        }
    }

    fn send(
        &mut self,
        queue: usize,
        frame: &Frame<'_>,
        number: u64,
        now: Instant,
    ) -> Result<Sent, FrameError> {
        self.0.send(queue, frame, number, now)
    }

    fn on_message(&mut self, message: Never, _: Instant, _: &mut NetStats) -> bool {
        match message {}
    }

    fn undeliverable(message: Never, _: &mut Outbox<Never>) {
        match message {}
    }
}

/// The frame that could not be read is not the last one: no event reports the others.
#[test]
fn reading_goes_on_after_an_error() {
    isolated("reading_goes_on_after_an_error", || {
        let tap: InterfaceName = "guest".parse().unwrap();
        let backend = TapBackend::new(Tap::open(&tap, 1).unwrap()).unwrap();
        tap.bring_up().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("net");
        let errors = Arc::new(AtomicU32::new(0));
        let server = serve(&socket, None, Failing(backend, Arc::clone(&errors)));
        let host = network::packet_socket(&tap).unwrap();
        let send = |frame: &[u8]| {
            let bytes = [&[0; 10][..], frame].concat();
            rustix::net::send(&host, &bytes, SendFlags::empty())
        };
        let mut driver = Driver::attach(&socket, F_MRG_RXBUF, 2);
        driver.post(0, &[2048]);
        wait_until("a frame", || {
            let _ = send(&plain(60, 0));
            driver
                .try_receive(0, std::time::Duration::from_millis(50))
                .is_some()
        });
        for count in [1, 5] {
            // Without buffers the frame stays in the interface.
            send(&plain(60, 1)).unwrap();
            // The device has had a turn, and has seen the event of the frame.
            driver.send(0, &Header::default(), &[0; 4], &[]);
            driver.wait_sent(0);
            let dropped = || server.stats()[0].1.rx_dropped;
            let before = dropped();
            errors.store(count, SeqCst);
            driver.post_many(0, 64, 2048);
            loop {
                if driver.receive(0).1 == plain(60, 1) {
                    break;
                }
            }
            assert_eq!(errors.load(SeqCst), 0);
            wait_until("counted", || dropped() - before == u64::from(count));
            // The rest of the buffers.
            wait_until("all buffers are used", || {
                let _ = send(&plain(60, 0));
                while driver.next_used(0).is_some() {}
                driver.used_index(0) == driver.avail_index(0)
            });
        }
        server.shutdown();
    });
}
