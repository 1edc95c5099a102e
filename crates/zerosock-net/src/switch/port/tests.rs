//! Which frames the sender gets back with a batch.

use std::os::fd::OwnedFd;

use zerosock_ring::{Memory, RegionConfig};
use zerosock_sys::memfd;

use super::*;
use crate::backend::ADDRESSES_LEN;

const LEN: usize = 60;

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
        len: 4096,
        fd_offset: 0,
    };
    let file: OwnedFd = memfd::create("guest", region.len, true).unwrap();
    Arc::new(Memory::map(vec![(file, region)]).unwrap())
}

/// Sends frame `number` from port 0.
fn send(sender: &mut Sender, memory: &Arc<Memory>, to: Mac, number: u64) {
    let mut pieces = Vec::new();
    memory.translate(0, LEN as u32, &mut pieces).unwrap();
    let mut addresses = [0; ADDRESSES_LEN];
    addresses[..6].copy_from_slice(&to.0);
    addresses[6..].copy_from_slice(&mac(0).0);
    let frame = Frame {
        header: Header::default(),
        len: LEN,
        first: &addresses,
        memory: Some(memory),
        pieces: &pieces,
        skip: ADDRESSES_LEN,
        slices: &[],
    };
    let sent = sender.send(&frame, number, Instant::ZERO);
    assert!(matches!(sent, Ok(Sent::Held)), "{sent:?}");
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
