//! Frames that arrive in guest memory or in private chunks.

use std::time::Duration;

use zerosock_sys::xdp::{
    FRAME_OFFSET, InterfaceOptions, LongFrames, MAX_FRAME, PROBES, Probe, Registered, Umem, Verdict,
};

use super::support::{
    APART, DEADLINE, Guest, Link, SIZES, frame, isolated, isolated_each, listen, next_frame, take,
    wait_readable, wait_until,
};

/// Bytes of a buffer of stock Linux guests, and of the header in it.
const BUFFER: u32 = 1536;
const HEADER: usize = 12;

/// Each length goes to a buffer at another place: the first and the last that are possible in the
/// memory, both sides of a border of two regions, and odd addresses. All other bytes of the guest stay as they
/// were.
#[test]
fn frames_of_all_lengths_arrive_in_place_and_nothing_else_is_written() {
    isolated_each("frames_of_all_lengths_arrive_in_place", |options| {
        let link = Link::open(options);
        let guest = Guest::new(&[8192, 8192]);
        guest.fill();
        let mut socket = link.bind(guest.umem(0));
        let places = [
            512,
            8192 - u64::from(BUFFER),
            APART,
            APART + 1,
            APART + 4096 - 700,
            APART + 8192 - u64::from(BUFFER),
        ];
        let mut expected = guest.contents();
        for len in 14..=MAX_FRAME as usize {
            let place = places[len % places.len()];
            let pieces = guest.pieces(place, BUFFER);
            let chunk = socket.chunk_for(&pieces, HEADER).expect("usable");
            assert!(socket.post(chunk));
            assert!(socket.wake().unwrap());
            let sent = frame(len, len as u8);
            link.send(&sent);
            let received = take(&mut socket);
            assert_eq!(received.chunk, chunk);
            assert_eq!(received.offset, FRAME_OFFSET);
            assert_eq!(received.len as usize, len);
            let at = (place % APART + place / APART * 8192) as usize + HEADER;
            expected[at..at + len].copy_from_slice(&sent);
            assert!(guest.contents() == expected, "frame of {len} bytes");
        }
    });
}

#[test]
fn buffers_without_room_for_every_frame_are_not_used_in_place() {
    let guest = Guest::new(&[8192, 8192]);
    let umem = guest.umem(0);
    let usable = |addr, len| umem.chunk_for(&guest.pieces(addr, len), HEADER);
    assert_eq!(usable(512, BUFFER), Some(0));
    // The chunk would begin in front of the memory.
    assert_eq!(usable(511, BUFFER), None);
    assert_eq!(usable(1000, BUFFER - 1), None);
    // The chunk begins in the region before.
    assert_eq!(usable(APART, BUFFER), Some(8192 - 512));
    // Header and frame in descriptors of their own.
    let two = [guest.pieces(4000, 12), guest.pieces(1000, MAX_FRAME)].concat();
    let chunk = 1000 - u64::from(FRAME_OFFSET);
    assert_eq!(umem.chunk_for(&two, HEADER), Some(chunk));
    let short = [guest.pieces(4000, 12), guest.pieces(1000, MAX_FRAME - 1)].concat();
    assert_eq!(umem.chunk_for(&short, HEADER), None);
    assert_eq!(umem.chunk_for(&[], HEADER), None);
}

#[test]
fn long_frames_are_passed_to_the_stack_or_dropped_and_counted() {
    for long_frames in [LongFrames::Pass, LongFrames::Drop] {
        isolated_each_with(long_frames, |options| {
            let link = Link::open(options);
            let stack = listen("near");
            // Without a socket all frames are the stack's.
            link.send(&frame(MAX_FRAME as usize + 1, 1));
            assert_eq!(next_frame(&stack), frame(MAX_FRAME as usize + 1, 1));
            assert_eq!(link.interface.long_frames(0), 0);
            let mut socket = link.bind(Umem::map(None, 8).unwrap());
            for _ in 0..2 {
                let chunk = socket.umem_mut().take_chunk().unwrap();
                assert!(socket.post(chunk));
            }
            socket.wake().unwrap();
            link.send(&frame(MAX_FRAME as usize + 1, 2));
            link.send(&frame(100, 3));
            let received = take(&mut socket);
            assert_eq!(received.len, 100);
            assert_eq!(link.interface.long_frames(0), 1);
            assert_eq!(socket.receive().unwrap(), None);
            drop(socket);
            if options.long_frames == LongFrames::Pass {
                assert_eq!(next_frame(&stack), frame(MAX_FRAME as usize + 1, 2));
            }
            // A program that another test starts holds a copy of the socket until it is executed. Frames are the
            // socket's until then, and lost.
            wait_until("a frame for the stack", || {
                link.send(&frame(100, 4));
                wait_readable(&stack, Duration::from_millis(10))
            });
            assert_eq!(next_frame(&stack), frame(100, 4));
        });
    }
}

fn isolated_each_with(long_frames: LongFrames, test: fn(InterfaceOptions)) {
    use zerosock_sys::xdp::AttachMode;
    for attach in [AttachMode::Driver, AttachMode::Generic] {
        let options = InterfaceOptions {
            long_frames,
            attach: Some(attach),
            ..InterfaceOptions::default()
        };
        isolated(
            "long_frames_are_passed_to_the_stack_or_dropped",
            move || {
                test(options);
            },
        );
    }
}

#[test]
fn frames_are_received_in_the_order_of_their_chunks() {
    isolated_each(
        "frames_are_received_in_the_order_of_their_chunks",
        |options| {
            let link = Link::open(options);
            let mut socket = link.bind(Umem::map(None, 200).unwrap());
            // More than the rings have entries, so that indices wrap.
            for round in 0..20_u8 {
                let mut posted = Vec::new();
                while let Some(chunk) = socket.umem_mut().take_chunk() {
                    if !socket.post(chunk) {
                        socket.umem_mut().return_chunk(chunk);
                        break;
                    }
                    posted.push(chunk);
                }
                assert_eq!(posted.len(), SIZES.receive as usize);
                socket.wake().unwrap();
                for index in 0..posted.len() {
                    link.send(&frame(60 + index, round));
                }
                for (index, chunk) in posted.into_iter().enumerate() {
                    let received = take(&mut socket);
                    assert_eq!(received.chunk, chunk);
                    let at = chunk + u64::from(received.offset);
                    let mut bytes = vec![0; received.len as usize];
                    let memory = socket.umem().private(at, bytes.len()).unwrap();
                    memory.read(0, &mut bytes);
                    assert_eq!(bytes, frame(60 + index, round));
                    socket.umem_mut().return_chunk(chunk);
                }
            }
        },
    );
}

#[test]
fn frames_without_a_chunk_are_dropped_and_counted_by_the_kernel() {
    isolated_each("frames_without_a_chunk_are_dropped", |options| {
        let link = Link::open(options);
        let socket = link.bind(Umem::map(None, 8).unwrap());
        link.send(&frame(100, 1));
        wait_until("the counter of the kernel", || {
            let statistics = socket.statistics().unwrap();
            statistics.rx_fill_ring_empty_descs == Some(1)
        });
    });
}

#[test]
fn chunks_outside_the_memory_are_refused() {
    isolated("chunks_outside_the_memory_are_refused", || {
        let link = Link::open(InterfaceOptions::default());
        let guest = Guest::small();
        let mut socket = link.bind(guest.umem(0));
        let size = socket.umem().locked();
        assert!(socket.post(size - 2048));
        for chunk in [size - 2047, size, u64::MAX, u64::MAX - 2047] {
            assert!(!socket.post(chunk), "{chunk}");
        }
    });
}

#[test]
fn probe_finds_that_frames_can_be_received_in_place() {
    isolated_each("probe_finds_that_frames_can_be_received", |options| {
        let link = Link::open(options);
        let guest = Guest::small();
        let registered = Registered::create(guest.umem(40), SIZES).unwrap();
        let mut socket = registered.bind(&link.interface, 0, DEADLINE).unwrap();
        assert!(!socket.is_zero_copy());
        let mut probe = Probe::new(socket.umem(), false);
        for len in [14, 60, 1514, MAX_FRAME as usize] {
            let chunk = socket.umem_mut().take_chunk().unwrap();
            socket.post(chunk);
            socket.wake().unwrap();
            link.send(&frame(len, 0));
            let received = take(&mut socket);
            probe.examine(socket.umem(), &received);
            assert_eq!(probe.verdict(), Verdict::InPlace, "{len}");
            // Used chunks show it as well as new ones.
            socket.umem_mut().return_chunk(chunk);
        }
        // Bytes around the place, as a driver would write them that does not keep the rule.
        for offset in [-1024, -1, FRAME_OFFSET as i64 - 1, 2048, 3071] {
            let mut probe = Probe::new(socket.umem(), false);
            let chunk = socket.umem_mut().take_chunk().unwrap();
            socket.post(chunk);
            socket.wake().unwrap();
            link.send(&frame(1514, 0));
            let received = take(&mut socket);
            let at = chunk.checked_add_signed(offset).unwrap();
            let byte = socket.umem().private(at, 1).unwrap();
            byte.write(0, &[byte.read_array::<1>(0).unwrap()[0] ^ 1]);
            probe.examine(socket.umem(), &received);
            assert_eq!(probe.verdict(), Verdict::Copy, "{offset}");
            socket.umem_mut().return_chunk(chunk);
        }
    });
}

#[test]
fn probe_of_a_driver_that_writes_memory_itself_waits_for_a_long_frame() {
    let mut umem = Umem::map(None, 40).unwrap();
    let mut probe = Probe::new(&umem, true);
    let mut received = zerosock_sys::xdp::ReceivedChunk {
        chunk: umem.take_chunk().unwrap(),
        offset: FRAME_OFFSET,
        len: 100,
    };
    probe.examine(&umem, &received);
    assert_eq!(probe.verdict(), Verdict::Open);
    received.len = 1500;
    probe.examine(&umem, &received);
    assert_eq!(probe.verdict(), Verdict::InPlace);
    received.offset -= 12;
    probe.examine(&umem, &received);
    assert_eq!(probe.verdict(), Verdict::Copy);
    // Other chunks show nothing.
    let mut probe = Probe::new(&umem, false);
    let rest: Vec<u64> = std::iter::from_fn(|| umem.take_chunk()).collect();
    received.chunk = rest[PROBES];
    probe.examine(&umem, &received);
    assert_eq!(probe.verdict(), Verdict::Open);
}
