//! Datagrams between devices: the share that streams leave, and bounds.

use std::sync::Arc;
use zerosock_proto::vsock::datagram::{F_DGRAM, data};

use rustix::event::{EventfdFlags, eventfd};
use zerosock_proto::{Address, Cid, Port};
use zerosock_ring::{
    Buffer, DeviceQueue, DriverLayout, DriverQueue, Memory, QueueConfig, RegionConfig,
};

use super::*;
use crate::device::lab::DeviceFixture;
use crate::device::state::sibling_message::{
    SiblingDatagram, SiblingMessage, SiblingPayload, return_lent,
};
use zerosock_virtio::outbox::DeviceAddr;

const SOURCE: DeviceAddr = DeviceAddr {
    worker: 0,
    number: 8,
};
const FROM: Address = Address::new(Cid::new(4), Port::new(1));
const TO: Address = Address::new(Cid::new(3), Port::new(2));

/// A queue with `n` posted chains of `len` bytes.
fn queue(n: usize, len: u32, writable: bool) -> DeviceQueue {
    const DATA: u64 = 0x8000;
    let bytes = (DATA + n as u64 * u64::from(len)).next_multiple_of(4096);
    let fd = zerosock_sys::memfd::create("datagrams", bytes, true).unwrap();
    let config = RegionConfig {
        guest_addr: 0,
        user_addr: 0,
        len: bytes,
        fd_offset: 0,
    };
    let memory = Arc::new(Memory::map(vec![(fd, config)]).unwrap());
    let layout = DriverLayout::at(0, 256);
    let mut driver = DriverQueue::new(memory.clone(), layout, false).unwrap();
    for at in 0..n as u64 {
        let addr = DATA + at * u64::from(len);
        let buffer = Buffer {
            addr,
            len,
            writable,
        };
        driver.add(&[buffer], at).unwrap();
    }
    let _ = driver.publish();
    let config = QueueConfig {
        size: 256,
        desc: layout.desc,
        avail: layout.avail,
        used: layout.used,
        base: 0,
        event_idx: false,
        indirect: false,
    };
    DeviceQueue::new(memory, &config).unwrap()
}

fn ring(n: usize, len: u32, writable: bool) -> Ring {
    let kick = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    Ring::new(queue(n, len, writable), kick.into(), None, None, true, 0)
}

/// `n` assembled datagrams of a sibling, each of `len` bytes.
pub(crate) fn datagrams(n: usize, len: usize) -> Vec<SiblingDatagram> {
    let mut queue = queue(n, 64, false);
    let one = |_| SiblingDatagram {
        from: SOURCE,
        flow: false,
        header: data(FROM, TO, len as u32, true),
        payload: SiblingPayload::Copied(vec![7; len].into_boxed_slice()),
        chain: queue.pop().unwrap().unwrap(),
        epoch: 0,
    };
    (0..n).map(one).collect()
}

fn receiver(buffers: usize) -> DeviceFixture {
    let mut lab = DeviceFixture::new();
    lab.device.datagrams.set_features(F_DGRAM);
    lab.device.queues.rings.rx = Some(ring(buffers, 4096, true));
    lab
}

fn posted(lab: &mut DeviceFixture) -> u16 {
    lab.device.queues.rings.rx.as_mut().unwrap().queue.posted()
}

#[test]
fn ready_streams_keep_half_of_the_buffers() {
    let mut lab = receiver(8);
    lab.ready();
    let (device, mut cx) = lab.lend();
    for datagram in datagrams(8, 100) {
        device.datagrams_with(&mut cx).sibling_datagram(datagram);
    }
    assert_eq!(device.datagrams.waiting.len(), 4);
    device.datagrams_with(&mut cx).transmit_datagrams();
    assert_eq!(
        device.datagrams.waiting.len(),
        4,
        "streams have had no turn"
    );
    assert!(device.has_work_for_guest(), "datagrams wait for the guest");
    assert_eq!(posted(&mut lab), 4);
    // Streams have had their turn and took no buffer.
    let (device, mut cx) = lab.lend();
    device.renew_share();
    device.datagrams_with(&mut cx).transmit_datagrams();
    assert_eq!(device.datagrams.waiting.len(), 2);
    device.bridges.clear_ready();
    device.datagrams_with(&mut cx).transmit_datagrams();
    assert_eq!(device.datagrams.waiting.len(), 0);
    assert_eq!(posted(&mut lab), 0);
}

#[test]
fn datagrams_get_all_buffers_without_ready_streams() {
    let mut lab = receiver(8);
    let (device, mut cx) = lab.lend();
    for datagram in datagrams(9, 100) {
        device.datagrams_with(&mut cx).sibling_datagram(datagram);
    }
    assert_eq!(device.datagrams.waiting.len(), 1);
    assert_eq!(posted(&mut lab), 0);
}

#[test]
fn assembled_datagrams_in_flight_are_bounded() {
    const LEN: usize = 64 << 10;
    let mut lab = DeviceFixture::new();
    let mut tx = ring(20, 64, false);
    let chains: Vec<Chain> = (0..20).map(|_| tx.pop().unwrap()).collect();
    lab.device.queues.rings.tx = Some(tx);
    let group = ["all".to_string()];
    Arc::make_mut(&mut lab.shared.routes).add(TO.cid, lab.device.addr, &group);
    Arc::make_mut(&mut lab.shared.routes).add(FROM.cid, SOURCE, &group);
    let (device, mut cx) = lab.lend();
    let header = data(TO, FROM, LEN as u32, true);
    let send = |device: &mut Device, chain, cx: &mut Context<'_>| {
        device
            .datagrams_with(cx)
            .lend_to_sibling(chain, header, Some(vec![0; LEN]));
    };
    for chain in chains {
        send(device, chain, &mut cx);
    }
    let mut lent = Vec::new();
    while let Some((vm, message)) = cx.outbox.pop_local() {
        let SiblingMessage::Datagram(mut datagram) = message else {
            panic!("{message:?}");
        };
        assert_eq!(vm, SOURCE.number);
        datagram.from = SOURCE;
        lent.push(datagram);
    }
    assert_eq!(lent.len() * LEN, siblings::UNDER_WAY);
    let back = device.queues.rings.tx.as_ref().unwrap().unpublished;
    assert_eq!(back, 4, "chains of the dropped datagrams");
    // A restarted driver does not free room; an answer does.
    device.datagrams.forget();
    assert_eq!(device.datagrams.under_way, siblings::UNDER_WAY);
    let (_, done) = return_lent(lent.pop().unwrap());
    device.bridges_with(&mut cx).handle_sibling_message(done);
    assert_eq!(device.datagrams.under_way, siblings::UNDER_WAY - LEN);
    send(device, lent.pop().unwrap().chain, &mut cx);
    assert!(cx.outbox.pop_local().is_some());
}
