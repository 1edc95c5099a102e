//! Frames sent from guest memory.

use zerosock_sys::xdp::{
    AttachMode, CHUNK, InterfaceOptions, MAX_PARTS, SendError, Umem, XdpFrame, XdpSocket,
};

use super::support::{APART, Guest, Link, SIZES, frame, ip, isolated, isolated_each, wait_until};

/// Has the kernel send, and waits until `frames` are completed.
#[track_caller]
fn complete(socket: &mut XdpSocket, frames: usize) {
    let mut done = 0;
    wait_until("completion", || {
        socket.wake().unwrap();
        done += socket.completed();
        done == frames
    });
    assert_eq!(socket.in_flight(), 0);
}

#[test]
fn frames_of_all_lengths_are_sent_from_any_address() {
    isolated_each("frames_of_all_lengths_are_sent", |options| {
        let link = Link::open(options);
        let guest = Guest::new(&[8192, 8192]);
        let mut socket = link.bind(guest.umem(0));
        for len in 14..=1614_usize {
            // Up to the last byte, across pages, at odd addresses.
            let places = [0, 8192 - len, 4096 - len / 2, APART as usize + len];
            let place = places[len % places.len()] as u64;
            let sent = frame(len, len as u8);
            guest.write(place, &sent);
            let frame = socket.frame_of(&guest.pieces(place, len as u32), 0);
            socket.send(&frame.expect("one part")).unwrap();
            complete(&mut socket, 1);
            assert_eq!(link.receive(), sent);
        }
    });
}

/// A header is in front of the frame, in a part of its own, with it, or across the border of two.
#[test]
fn parts_are_joined_and_the_header_left_out() {
    isolated("parts_are_joined_and_the_header_left_out", || {
        let link = Link::open(InterfaceOptions::default());
        let guest = Guest::small();
        let mut socket = link.bind(guest.umem(0));
        let sent = frame(1000, 9);
        let bytes = [&[0xee; 12][..], &sent].concat();
        for lengths in [vec![1012], vec![12, 1000], vec![6, 7, 999], vec![512, 500]] {
            let mut pieces = Vec::new();
            let mut done = 0;
            for (index, len) in lengths.into_iter().enumerate() {
                let place = 4096 * index as u64 + 5;
                guest.write(place, &bytes[done..done + len]);
                pieces.extend(guest.pieces(place, len as u32));
                done += len;
            }
            socket
                .send(&socket.frame_of(&pieces, 12).expect("a few parts"))
                .unwrap();
            complete(&mut socket, 1);
            assert_eq!(link.receive(), sent);
        }
        assert!(socket.frame_of(&guest.pieces(0, 12), 12).is_none());
    });
}

#[test]
fn large_frames_have_up_to_eighteen_parts() {
    isolated("large_frames_have_up_to_eighteen_parts", || {
        ip("link set near mtu 9000");
        ip("link set far mtu 9000");
        let link = Link::open(InterfaceOptions {
            attach: Some(AttachMode::Generic),
            ..InterfaceOptions::default()
        });
        let guest = Guest::small();
        let mut socket = link.bind(guest.umem(0));
        if !socket.has_segments() {
            println!("SKIPPED large_frames_have_up_to_eighteen_parts: Linux before 6.6");
            return;
        }
        let sent = frame(9000, 3);
        // One piece, which takes several descriptors.
        guest.write(100, &sent);
        let whole = socket.frame_of(&guest.pieces(100, 9000), 0).unwrap();
        assert_eq!(whole.parts().len(), 9000_usize.div_ceil(CHUNK as usize));
        socket.send(&whole).unwrap();
        complete(&mut socket, 1);
        assert_eq!(link.receive(), sent);

        let scattered = |count: usize| {
            let len = sent.len().div_ceil(count);
            let mut pieces = Vec::new();
            for (index, bytes) in sent.chunks(len).enumerate() {
                let place = 700 * index as u64 + 3;
                guest.write(place, bytes);
                pieces.extend(guest.pieces(place, bytes.len() as u32));
            }
            assert_eq!(pieces.len(), count);
            pieces
        };
        let most = socket.frame_of(&scattered(MAX_PARTS), 0).unwrap();
        socket.send(&most).unwrap();
        complete(&mut socket, 1);
        assert_eq!(link.receive(), sent);
        assert!(socket.frame_of(&scattered(MAX_PARTS + 1), 0).is_none());
    });
}

#[test]
fn frames_that_the_kernel_would_lose_are_refused() {
    isolated("frames_that_the_kernel_would_lose_are_refused", || {
        let link = Link::open(InterfaceOptions::default());
        let guest = Guest::small();
        let mut socket = link.bind(guest.umem(0));
        let size = socket.umem().locked();
        let refused = [
            XdpFrame::default(),
            XdpFrame::of_one(0, 0),
            XdpFrame::of_one(0, CHUNK + 1),
            XdpFrame::of_one(size - 99, 100),
            XdpFrame::of_one(u64::MAX, 100),
        ];
        for frame in refused {
            assert_eq!(socket.send(&frame), Err(SendError::Invalid), "{frame:?}");
        }
        let good = XdpFrame::of_one(size - 100, 100);
        for _ in 0..SIZES.transmit {
            socket.send(&good).unwrap();
        }
        assert_eq!(socket.send(&good), Err(SendError::Full));
        complete(&mut socket, SIZES.transmit as usize);
        socket.send(&good).unwrap();
        assert_eq!(socket.statistics().unwrap().tx_invalid_descs, 0);
    });
}

#[test]
fn private_chunks_are_sent_beside_the_guests_memory() {
    isolated("private_chunks_are_sent", || {
        let link = Link::open(InterfaceOptions::default());
        let guest = Guest::small();
        for umem in [guest.umem(4), Umem::map(None, 4).unwrap()] {
            let mut socket = link.bind(umem);
            let sent = frame(1514, 1);
            let chunk = socket.umem_mut().take_chunk().unwrap();
            assert!(socket.umem().is_private(chunk));
            let memory = socket.umem().private(chunk, sent.len()).unwrap();
            assert_eq!(memory.write(0, &sent), sent.len());
            socket.send(&XdpFrame::of_one(chunk, 1514)).unwrap();
            complete(&mut socket, 1);
            assert_eq!(link.receive(), sent);
        }
    });
}
