//! The receiver on a socket of a veth pair. The kernel gets chunks in another order than the receiver has them, as
//! if a driver used some again, or another process wrote to the fill ring.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use zerosock_ring::RegionConfig;
use zerosock_sys::memfd;
use zerosock_sys::xdp::{Registered, Umem};

use super::super::sizes::CHUNKS;
use super::super::test_veth::{DEADLINE, VethPair, frame, with_pair};
use super::*;

const NOT_POSTED: &str = "a frame came in a chunk that was not posted, or came back before";
const OUT_OF_ORDER: &str = "the driver does not use the guest's buffers in their order";

struct Link {
    receiver: XdpReceiver,
    socket: XdpSocket,
    pair: VethPair,
}

fn with_link(
    test_name: &'static str,
    memory: Option<Arc<Memory>>,
    test: impl FnOnce(Link) + Send + 'static,
) {
    with_pair(test_name, move |pair| {
        let umem = Umem::map(memory, CHUNKS).unwrap();
        let registered = Registered::create(umem, SIZES).unwrap();
        let socket = registered.bind(&pair.near, 0, DEADLINE).unwrap();
        let mut receiver = XdpReceiver::new(false);
        receiver.attach(&socket);
        test(Link {
            receiver,
            socket,
            pair,
        });
    });
}

impl Link {
    fn note_private(&mut self, chunk: u64) {
        let number = self.socket.umem().chunk_number(chunk).unwrap();
        self.receiver.posted.push_private(number);
    }

    fn post(&mut self, chunks: impl IntoIterator<Item = u64>) {
        for chunk in chunks {
            assert!(self.socket.post(chunk));
        }
        assert!(self.socket.wake().unwrap());
    }

    /// The next frame, or why the socket has to be closed.
    fn next(&mut self) -> Result<ReceivedChunk, String> {
        let end = Instant::now() + DEADLINE;
        loop {
            match self.receiver.next(&mut self.socket, "test") {
                Ok(received) => return Ok(received),
                Err(Failure::Driver(reason)) => return Err(reason),
                Err(Failure::Frame(error)) => {
                    assert!(matches!(error, FrameError::NotNow), "{error:?}");
                }
            }
            let left = end.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "no frame within the deadline");
            let left = Timespec::try_from(left).unwrap();
            poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&left)).unwrap();
        }
    }
}

#[test]
fn frames_in_private_chunks_that_are_used_out_of_order_are_received() {
    with_link("frames_in_private_chunks", None, |mut link| {
        let chunks: Vec<u64> = (0..64)
            .map(|_| link.socket.umem_mut().take_chunk().unwrap())
            .collect();
        chunks.iter().for_each(|chunk| link.note_private(*chunk));
        link.post(chunks.into_iter().rev());
        (0..64).for_each(|seed| link.pair.send(seed));
        for seed in 0..64 {
            let received = link.next().unwrap();
            let mut bytes = vec![0; 100];
            assert_eq!(copy(&link.socket, &received, &[], &mut bytes), 100);
            assert_eq!(bytes, frame(seed));
        }
        assert!(!link.receiver.has_posted());
    });
}

#[test]
fn private_chunk_that_was_not_posted_or_comes_back_twice_ends_the_socket() {
    with_link("private_chunk_that_was_not_posted", None, |mut link| {
        let chunks: Vec<u64> = (0..4)
            .map(|_| link.socket.umem_mut().take_chunk().unwrap())
            .collect();
        chunks[..3]
            .iter()
            .for_each(|chunk| link.note_private(*chunk));
        // The first one twice, and one that the receiver does not know.
        link.post([chunks[0], chunks[0], chunks[3], chunks[1]]);
        (0..4).for_each(|seed| link.pair.send(seed));
        assert_eq!(link.next().unwrap().chunk, chunks[0]);
        assert_eq!(link.next().unwrap_err(), NOT_POSTED);
        assert_eq!(link.next().unwrap_err(), NOT_POSTED);
        assert_eq!(link.receiver.take_lost(), 2);
        // What is left is counted when the socket is closed.
        let end = Instant::now() + DEADLINE;
        let mut lost = 0;
        while lost == 0 {
            assert!(Instant::now() < end, "no frame within the deadline");
            link.receiver.detach(&mut link.socket);
            lost += link.receiver.take_lost();
        }
        assert_eq!(lost, 1);
    });
}

#[test]
fn chunk_of_the_guest_that_is_used_out_of_order_ends_the_socket() {
    let region = RegionConfig {
        guest_addr: 0,
        user_addr: 0,
        len: 64 << 10,
        fd_offset: 0,
    };
    let file: OwnedFd = memfd::create("guest", region.len, true).unwrap();
    let memory = Arc::new(Memory::map(vec![(file, region)]).unwrap());
    with_link(
        "chunk_of_the_guest",
        Some(Arc::clone(&memory)),
        move |mut link| {
            let chunks: Vec<u64> = (1..4)
                .map(|index| {
                    let mut pieces = Vec::new();
                    let addr = 4096 * index;
                    memory.translate(addr, 1536, &mut pieces).unwrap();
                    link.socket.chunk_for(&pieces, HEADER_LEN).unwrap()
                })
                .collect();
            chunks[..2]
                .iter()
                .for_each(|chunk| link.receiver.posted.push_own(*chunk));
            link.post([chunks[0], chunks[2], chunks[0]]);
            (0..3).for_each(|seed| link.pair.send(seed));
            assert_eq!(link.next().unwrap().chunk, chunks[0]);
            assert_eq!(link.next().unwrap_err(), NOT_POSTED);
            // It was posted again behind the second one, which has no frame.
            link.receiver.posted.push_own(chunks[0]);
            assert_eq!(link.next().unwrap_err(), OUT_OF_ORDER);
        },
    );
}
