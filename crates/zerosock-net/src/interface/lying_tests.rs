//! Devices that lie: what they claim ends the interface or loses a frame, and nothing else.

use zerosock_proto::wire::net::{GSO_TCPV4, Header, MAX_FRAME, NEEDS_CSUM, Offloads};
use zerosock_ring::{DriverError, DriverLayout};

use super::test_device::{TestDevice, frame, pair};
use super::{Interface, InterfaceConfig, InterfaceFailure, LoanError};

/// The interface has failed for this reason, and stays so.
#[track_caller]
fn assert_failed(interface: &Interface, failure: InterfaceFailure) {
    for _ in 0..2 {
        assert!(interface.recv().is_none());
        assert_eq!(interface.failure(), Some(failure));
        assert_eq!(
            interface.loan(60).err(),
            Some(LoanError::Failed(failure)),
            "a loan after a failure"
        );
        assert_eq!(interface.wait(None), Err(failure));
        assert!(interface.arm());
    }
}

/// Sends a frame in buffers of the device's choice; `count` is what the header says.
fn send_as(device: &mut TestDevice, count: u16, bytes: &[u8]) {
    let chains = device.write(Header::default(), bytes);
    let mut header = Header::default();
    header.set_num_buffers(count);
    device.memory.write(chains[0].0.writable(), 0, &header.0);
    device.complete(chains);
}

#[test]
fn a_used_id_out_of_range_or_not_posted_ends_the_interface() {
    for id in [256, 0xffff, u32::MAX, 1 << 16] {
        let (interface, device) = pair(|_, _| {});
        device.forge(0, 0, id, 100);
        assert_failed(&interface, InterfaceFailure::Ring(DriverError::Id(id)));
    }
    // A buffer on lease is not posted.
    let (interface, mut device) = pair(|_, _| {});
    device.send(Header::default(), &frame(60, 1));
    let lease = interface.recv().unwrap();
    device.forge(0, 1, 0, 100);
    assert!(interface.recv().is_none());
    let failure = InterfaceFailure::Ring(DriverError::Id(0));
    assert_eq!(interface.failure(), Some(failure));
    assert_eq!(lease.to_vec(), frame(60, 1));
    drop(lease);
    assert_failed(&interface, failure);
    // The transmit queue: nothing was queued. Its buffers are looked at when no other is free.
    let (interface, device) = pair(|_, _| {});
    let loans: Vec<_> = (0..224).map(|_| interface.loan(60).unwrap()).collect();
    device.forge(1, 0, 3, 0);
    let failure = InterfaceFailure::Ring(DriverError::IndexJump);
    assert_eq!(interface.loan(60).err(), Some(LoanError::Failed(failure)));
    drop(loans);
    assert_failed(&interface, failure);
}

#[test]
fn a_used_index_beyond_what_is_posted_ends_the_interface() {
    let (interface, device) = pair(|_, _| {});
    device.poke(device.rings[0].used + 2, &300u16.to_le_bytes());
    assert_failed(&interface, InterfaceFailure::Ring(DriverError::IndexJump));
}

#[test]
fn a_length_beyond_the_buffer_ends_the_interface() {
    for len in [2049, 1 << 20, u32::MAX] {
        let (interface, mut device) = pair(|_, _| {});
        let (chain, _) = device.write(Header::default(), &frame(60, 1)).remove(0);
        device.rx.complete(chain, 72);
        device.forge(0, 0, 0, len);
        assert_failed(&interface, InterfaceFailure::Length(len));
    }
}

#[test]
fn a_number_of_buffers_that_cannot_be_ends_the_interface() {
    for count in [0, 257, 0xffff] {
        let (interface, mut device) = pair(|_, _| {});
        send_as(&mut device, count, &frame(60, 1));
        assert_failed(&interface, InterfaceFailure::Buffers(count));
    }
}

#[test]
fn a_device_without_mergeable_buffers_need_not_set_their_number() {
    let (interface, mut device) = pair(|_, terms| terms.mergeable = false);
    send_as(&mut device, 0, &frame(60, 1));
    assert_eq!(interface.recv().unwrap().to_vec(), frame(60, 1));
}

#[test]
fn a_frame_longer_than_any_packet_ends_the_interface() {
    let (interface, mut device) = pair(|_, _| {});
    device.send(Header::default(), &frame(MAX_FRAME, 1));
    assert_eq!(interface.recv().unwrap().len(), MAX_FRAME);
    device.send(Header::default(), &frame(MAX_FRAME + 1, 1));
    assert_failed(&interface, InterfaceFailure::FrameLength);
}

/// A frame that says that it has more buffers than it has takes those of the next ones, and no memory.
#[test]
fn frames_that_claim_buffers_of_others_are_limited_by_their_length() {
    let (interface, mut device) = pair(|_, _| {});
    send_as(&mut device, 256, &frame(2000, 1));
    for _ in 0..40 {
        assert!(interface.recv().is_none());
        device.send(Header::default(), &frame(2000, 2));
    }
    assert_failed(&interface, InterfaceFailure::FrameLength);
}

#[test]
fn a_header_that_lies_drops_its_frame_only() {
    let outside = |start, offset| {
        let mut header = Header::default();
        header.set_flags(NEEDS_CSUM);
        header.set_csum_start(start);
        header.set_csum_offset(offset);
        header
    };
    let mut unknown_gso = outside(34, 16);
    unknown_gso.set_gso_type(7);
    let mut empty_segments = outside(34, 16);
    empty_segments.set_gso_type(GSO_TCPV4);
    let mut without_checksum = Header::default();
    without_checksum.set_gso_type(GSO_TCPV4);
    without_checksum.set_gso_size(100);
    let (interface, mut device) = pair(|_, _| {});
    let lies = [
        outside(34, 3000),
        outside(0xffff, 0xffff),
        outside(0, 2),
        unknown_gso,
        empty_segments,
        without_checksum,
    ];
    for (dropped, header) in (1..).zip(lies) {
        // In one buffer and in two.
        let len = if dropped % 2 == 0 { 3000 } else { 100 };
        device.send(header, &frame(len, 1));
        assert!(interface.recv().is_none());
        assert_eq!(interface.stats().rx_dropped, dropped);
        device.send(outside(34, 16), &frame(100, 2));
        assert_eq!(interface.recv().unwrap().to_vec(), frame(100, 2));
    }
    // All buffers have been posted again.
    for round in 0..1000u16 {
        device.send(Header::default(), &frame(100, round as u8));
        assert_eq!(interface.recv().unwrap().to_vec(), frame(100, round as u8));
    }
    assert_eq!(interface.failure(), None);
}

#[test]
fn an_offload_that_was_not_negotiated_drops_the_frame() {
    let (interface, mut device) = pair(|_, terms| terms.from_device = Offloads::default());
    let mut header = Header::default();
    header.set_flags(NEEDS_CSUM);
    header.set_csum_start(34);
    header.set_csum_offset(16);
    device.send(header, &frame(100, 1));
    assert!(interface.recv().is_none());
    assert_eq!(interface.stats().rx_dropped, 1);
}

#[test]
fn buffers_without_a_frame_and_runts_are_posted_again() {
    let (interface, mut device) = pair(|_, _| {});
    for round in 0..600u16 {
        let chain = device.rx.pop().unwrap().unwrap();
        device
            .rx
            .complete(chain, [0, 1, 11][usize::from(round) % 3]);
        let chains = device.write(Header::default(), &frame(13, 1));
        device.complete(chains);
        assert!(interface.recv().is_none());
    }
    assert_eq!(interface.stats().rx_dropped, 1200);
    device.send(Header::default(), &frame(14, 9));
    assert_eq!(interface.recv().unwrap().to_vec(), frame(14, 9));
}

/// The used ring says 14 bytes for each of 200 buffers, but the header is written anew meanwhile.
#[test]
fn a_header_is_read_once() {
    let (interface, mut device) = pair(|_, _| {});
    let chains = device.write(Header::default(), &frame(60, 1));
    let place: Vec<_> = chains[0].0.writable().to_vec();
    device.complete(chains);
    let lease = interface.recv().unwrap();
    let mut header = Header::default();
    header.set_num_buffers(200);
    header.set_flags(NEEDS_CSUM);
    device.memory.write(&place, 0, &header.0);
    assert_eq!(lease.repr(), super::Repr::PLAIN);
    assert_eq!((lease.len(), lease.slices().count()), (60, 1));
    drop(lease);
    assert!(interface.recv().is_none() && interface.failure().is_none());
}

#[test]
fn a_device_that_writes_to_the_available_ring_and_descriptors_harms_itself_only() {
    let (interface, mut device) = pair(|_, _| {});
    let ring = device.rings[0];
    device.poke(ring.desc, &[0xff; 16 * 256]);
    device.poke(ring.avail, &[0xff; 6 + 2 * 256]);
    device.forge(0, 0, 5, 72);
    // The frame is the one in buffer 5: nothing was written there.
    assert!(interface.recv().is_none());
    assert_eq!(interface.failure(), Some(InterfaceFailure::Buffers(0)));
    let _ = device.tx.pop();
}

#[test]
fn a_device_that_goes_is_reported_after_its_last_frames() {
    let (interface, mut device) = pair(|config: &mut InterfaceConfig, _| {
        config.rx_queue_size = 8;
    });
    device.send(Header::default(), &frame(60, 1));
    device.socket = None;
    let gone = InterfaceFailure::Disconnected;
    interface.clear().expect("a frame is left");
    assert_eq!(interface.wait(None), Ok(true));
    let lease = interface.recv().unwrap();
    assert!(interface.recv().is_none());
    assert_eq!(interface.wait(None), Err(gone));
    assert_eq!(interface.loan(60).err(), Some(LoanError::Failed(gone)));
    assert_eq!(lease.to_vec(), frame(60, 1));
}

/// Numbers that are the same in each run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 8) % limit
    }
}

/// Whatever a device writes, and wherever: frames that are received lie in memory and can be read, and
/// nothing panics.
#[test]
fn a_device_that_writes_anything_anywhere_is_survived() {
    let mut numbers = Numbers(0x9e37_79b9_7f4a_7c15);
    let (mut received, mut failed) = (0, 0);
    for _ in 0..400 {
        let (interface, mut device) = pair(|config, terms| {
            config.rx_queue_size = 8;
            config.tx_queue_size = 8;
            config.large_loans = 2;
            terms.mergeable = numbers.below(4) > 0;
        });
        let mut leases = Vec::new();
        for _ in 0..numbers.below(60) {
            match numbers.below(8) {
                // A used element, often with a length that can be.
                0..=2 => {
                    let queue = numbers.below(2) as usize;
                    let at = device.rings[queue].used + 2;
                    let mut pieces = Vec::new();
                    device.memory.translate(at, 2, &mut pieces).unwrap();
                    let index = device.memory.read_array::<2>(&pieces, 0).unwrap();
                    let index = u16::from_le_bytes(index);
                    let (id, len) = (numbers.below(9) as u32, numbers.below(2200) as u32);
                    device.forge(queue, index, id, len);
                }
                // A header.
                3 | 4 => {
                    let Ok(Some(chain)) = device.rx.pop() else {
                        continue;
                    };
                    let mut header = [0; 12];
                    header[0] = numbers.below(4) as u8;
                    header[1] = [0, 1, 4, 0x81][numbers.below(4) as usize];
                    for byte in &mut header[2..10] {
                        *byte = numbers.below(64) as u8;
                    }
                    header[10] = numbers.below(4) as u8;
                    device.memory.write(chain.writable(), 0, &header);
                    device.rx.complete(chain, numbers.below(2049) as u32);
                    device.rx.publish_without_notify();
                }
                // Any bytes of a ring.
                5 if numbers.below(4) == 0 => {
                    let ring = device.rings[numbers.below(2) as usize];
                    let at = ring.desc + numbers.below(DriverLayout::bytes_needed(8));
                    device.poke(at, &[numbers.below(256) as u8]);
                }
                6 => {
                    if let Ok(mut loan) = interface.loan(14 + numbers.below(3000) as usize) {
                        loan.write(0, &frame(100, 1));
                        let _ = loan.queue(&super::Repr::PLAIN);
                    }
                    interface.flush();
                }
                _ => leases.truncate(numbers.below(8) as usize),
            }
            while let Some(lease) = interface.recv() {
                received += 1;
                assert!((14..=MAX_FRAME).contains(&lease.len()));
                let sum: usize = lease.slices().map(|slice| slice.len()).sum();
                assert_eq!(sum, lease.len());
                assert_eq!(lease.to_vec().len(), lease.len());
                leases.push(lease);
            }
            assert!(leases.len() <= 8);
            let _ = interface.arm();
        }
        failed += u32::from(interface.failure().is_some());
    }
    assert!(received > 100 && failed > 100, "{received} {failed}");
}
