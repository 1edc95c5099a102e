//! Which frames the sender gets back with a batch.

use std::os::fd::OwnedFd;

use zerosock_ring::{Memory, RegionConfig};
use zerosock_sys::memfd;

use zerosock_proto::wire::net::{GSO_TCPV4, NEEDS_CSUM};

use super::super::copies::CHUNK;
use super::*;
use crate::backend::ADDRESSES_LEN;

const LEN: usize = 60;
/// Bytes of the memory.
const MEMORY: usize = 128 << 10;

fn addr(number: u32) -> DeviceAddr {
    DeviceAddr { worker: 0, number }
}

fn mac(number: u32) -> Mac {
    Mac([2, 0, 0, 0, 0, number as u8])
}

fn memory() -> Arc<Memory> {
    let region = RegionConfig {
        guest_addr: 0,
        user_addr: 0,
        len: MEMORY as u64,
        fd_offset: 0,
    };
    let file: OwnedFd = memfd::create("guest", region.len, true).unwrap();
    Arc::new(Memory::map(vec![(file, region)]).unwrap())
}

/// Sends frame `number` from port 0.
fn send(sender: &mut Sender, memory: &Arc<Memory>, to: Mac, number: u64) {
    let sent = try_send(sender, memory, (Header::default(), LEN), to, number);
    assert!(matches!(sent, Ok(Sent::Held)), "{sent:?}");
}

/// As `send`, for a frame with this header and of so many bytes.
fn try_send(
    sender: &mut Sender,
    memory: &Arc<Memory>,
    (header, len): (Header, usize),
    to: Mac,
    number: u64,
) -> Result<Sent, FrameError> {
    let mut pieces = Vec::new();
    memory.translate(0, len as u32, &mut pieces).unwrap();
    let mut addresses = [0; ADDRESSES_LEN];
    addresses[..6].copy_from_slice(&to.0);
    addresses[6..].copy_from_slice(&mac(0).0);
    let frame = Frame {
        header,
        len,
        first: &addresses,
        memory: Some(memory),
        pieces: &pieces,
        skip: ADDRESSES_LEN,
        slices: &[],
    };
    sender.send(&frame, number, Instant::ZERO)
}

/// A switch with so many ports in use, which take these offloads.
fn switch(ports: u32, offloads: Offloads) -> Arc<Switch> {
    let switch = Switch::new();
    for number in 0..ports {
        let mut table = switch.table();
        assert!(table.add(addr(number), None));
        table.set_active(addr(number), true);
        table.set_offloads(addr(number), offloads);
    }
    switch
}

fn sender(switch: &Arc<Switch>) -> Sender {
    let mut sender = Sender::new(Arc::clone(switch));
    sender.addr = addr(0);
    sender
}

/// The batches that the sender sends at the end of a turn.
fn batches(sender: &mut Sender) -> Vec<(u32, Batch)> {
    let mut outbox = Outbox::new(0);
    sender.flush(&mut outbox);
    let messages = std::iter::from_fn(|| outbox.pop_local());
    let batches = messages.map(|(to, message)| match message.0 {
        Content::Frames(batch) => (to, batch),
        Content::Returned(_) => panic!("nothing is to be returned"),
    });
    batches.collect()
}

fn returned(sender: &mut Sender) -> Vec<u64> {
    let mut numbers: Vec<_> = std::iter::from_fn(|| sender.pop_returned()).collect();
    numbers.sort_unstable();
    numbers
}

#[test]
fn frames_come_back_with_the_last_batch_that_has_them() {
    let switch = Switch::new();
    for number in 0..3 {
        let assigned = Some(mac(number));
        assert!(switch.table().add(addr(number), assigned));
        switch.table().set_active(addr(number), true);
    }
    let memory = memory();
    let mut sender = Sender::new(Arc::clone(&switch));
    sender.addr = addr(0);
    let broadcast = Mac([0xff; 6]);
    for (number, to) in (0..).zip([mac(1), broadcast, mac(1), mac(2), broadcast]) {
        send(&mut sender, &memory, to, number);
    }
    let first = batches(&mut sender);
    assert_eq!(first.len(), 2);
    assert_eq!(sender.flooded, 4 * MIN_FLOODED);
    // A later turn, before anything has come back.
    send(&mut sender, &memory, mac(1), 5);
    let second = batches(&mut sender);
    for (to, batch) in first {
        let numbers = if to == 1 { &[0, 2][..] } else { &[1, 3, 4] };
        sender.accept_returned(batch);
        assert_eq!(returned(&mut sender), numbers, "of port {to}");
        assert!(!sender.is_idle());
    }
    assert_eq!(sender.flooded, 0);
    for (_, batch) in second {
        sender.accept_returned(batch);
    }
    assert_eq!(returned(&mut sender), [5]);
    assert!(sender.is_idle());
}

const BROADCAST: Mac = Mac([0xff; 6]);

/// A TSO frame of 256 segments, each of one byte behind 54 bytes of headers.
fn tiny_segments() -> (Header, usize) {
    let mut header = Header::default();
    header.set_flags(NEEDS_CSUM);
    header.set_csum_start(34);
    header.set_csum_offset(16);
    header.set_gso_type(GSO_TCPV4);
    header.set_gso_size(1);
    (header, 54 + 256)
}

#[test]
fn a_frame_for_several_ports_is_charged_before_it_is_cut() {
    let memory = memory();
    let flood =
        |sender: &mut Sender, number| try_send(sender, &memory, tiny_segments(), BROADCAST, number);
    // 50 944 segments.
    let mut many = sender(&switch(200, Offloads::default()));
    assert!(matches!(flood(&mut many, 0), Err(FrameError::Refused)));
    assert_eq!(
        (many.flooded, batches(&mut many).len()),
        (0, 0),
        "no port has work"
    );
    // The same ports copy it as it is if they take TSO.
    let mut whole = sender(&switch(200, Offloads::ALL));
    assert!(matches!(flood(&mut whole, 0), Ok(Sent::Held)));
    assert_eq!(whole.flooded, 199 * 310);
    // One of 4096 segments passes, and the next one when all have it.
    let mut few = sender(&switch(17, Offloads::default()));
    for number in 0..2 {
        assert!(matches!(flood(&mut few, number), Ok(Sent::Held)));
        assert_eq!(few.flooded, 16 * 256 * MIN_FLOODED);
        assert!(matches!(flood(&mut few, 9), Err(FrameError::Refused)));
        for (_, batch) in batches(&mut few) {
            few.accept_returned(batch);
        }
        assert_eq!((few.flooded, returned(&mut few)), (0, vec![number]));
    }
    // A frame for one port is its own.
    let mut table = few.switch.table();
    assert!(table.add(addr(99), Some(mac(99))));
    drop(table);
    assert!(matches!(
        try_send(&mut few, &memory, tiny_segments(), mac(99), 3),
        Ok(Sent::Held)
    ));
    assert_eq!(few.flooded, 0);
}

/// A port receives frames of 64 KiB, and its driver has no buffers.
#[test]
fn the_memory_of_frames_that_wait_goes_with_them_or_with_the_guest() {
    let switch = switch(1, Offloads::ALL);
    let memory = memory();
    let mut port = SwitchPort::new(Arc::clone(&switch), Some(mac(1)));
    port.start(addr(1)).unwrap();
    port.set_active(0, true).unwrap();
    let mut from = sender(&switch);
    let (mut tally, mut outbox) = (NetStats::default(), Outbox::new(0));
    let fill = |port: &mut SwitchPort, from: &mut Sender, tally: &mut NetStats| {
        for number in 0..100 {
            let sent = try_send(from, &memory, (Header::default(), 64_000), mac(1), number);
            assert!(matches!(sent, Ok(Sent::Held)));
        }
        let (_, batch) = batches(from).pop().unwrap();
        let message = PortMessage(Content::Frames(batch));
        assert!(port.on_message(message, Instant::ZERO, tally));
        port.finish_turn(Instant::ZERO, &mut Outbox::new(0), tally);
        assert!(port.inbox.capacity() >= 4_000_000);
    };
    fill(&mut port, &mut from, &mut tally);
    assert_eq!((tally.rx_copied, tally.rx_no_room), (65 * 64_000, 35));
    // Its driver refills.
    let mut rest = vec![0; 65_536];
    for _ in 0..65 {
        let len = port.receive(0, &mut Header::default(), &[], &mut rest);
        assert!(matches!(len, Ok(64_000)));
    }
    assert_eq!(port.next_len(0), None);
    assert_eq!(port.inbox.capacity(), CHUNK);
    // It goes.
    fill(&mut port, &mut from, &mut tally);
    port.set_active(0, false).unwrap();
    assert_eq!(port.inbox.capacity(), 0);
    port.set_active(0, true).unwrap();
    fill(&mut port, &mut from, &mut tally);
    port.retire(&mut outbox);
    assert_eq!(port.inbox.capacity(), 0);
}
