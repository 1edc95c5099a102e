//! Datagrams that wait for the guest's buffers while a command of the VMM is pending.

use std::sync::Arc;

use zerosock_proto::vsock::datagram::{Control, F_DGRAM, F_DGRAM_FLOW};
use zerosock_proto::{Address, Cid, Port};
use zerosock_ring::{
    Buffer, DeviceQueue, DriverLayout, DriverQueue, Memory, QueueConfig, RegionConfig,
};

use super::NotPut;
use crate::device::lab::DeviceFixture;
use crate::device::state::datagrams::WaitingDatagram;
use crate::device::{RX, TX};
use zerosock_vhost_user::Reply;
use zerosock_virtio::command;
use zerosock_virtio::device::WorkerDevice;
use zerosock_virtio::queues::PendingCommand;
use zerosock_virtio::ring::Ring;

fn host() -> Address {
    Address::new(Cid::HOST, Port::new(1))
}

fn guest() -> Address {
    Address::new(Cid::new(3), Port::new(1))
}

/// A running queue with one buffer for the guest.
fn queue() -> Ring {
    let len = 1 << 16;
    let fd = zerosock_sys::memfd::create("datagrams", len, true).unwrap();
    let region = RegionConfig {
        guest_addr: 0,
        user_addr: 0,
        len,
        fd_offset: 0,
    };
    let memory = Arc::new(Memory::map(vec![(fd, region)]).unwrap());
    let layout = DriverLayout::at(0, 256);
    let mut driver = DriverQueue::new(memory.clone(), layout, false).unwrap();
    let buffer = Buffer {
        addr: 0x8000,
        len: 4096,
        writable: true,
    };
    driver.add(&[buffer], 0).unwrap();
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
    let queue = DeviceQueue::new(memory, &config).unwrap();
    let kick = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
    Ring::new(queue, kick.into(), None, None, true, 1)
}

#[test]
fn datagram_behind_a_pending_command_does_not_keep_the_worker_awake() {
    let mut lab = DeviceFixture::new();
    let (device, mut cx) = lab.lend();
    device.queues.rings.rx = Some(queue());
    device.datagrams.waiting.push_back(WaitingDatagram {
        from: Address::new(Cid::new(4), Port::new(1)),
        to: guest(),
        bytes: vec![7; 100],
    });
    assert!(device.has_work_for_guest());
    device.queues.pending = Some(PendingCommand::Reset(Reply::discarded()));
    assert!(!device.has_work_for_guest(), "the worker would never sleep");
    assert!(!device.transmit(&mut cx));
    assert_eq!(device.datagrams.waiting.len(), 1, "the queue is stopped");
    // After the command the datagram gets its buffer.
    device.queues.pending = None;
    assert!(device.has_work_for_guest());
    device.transmit(&mut cx);
    assert!(device.datagrams.waiting.is_empty() && !device.has_work_for_guest());
}

#[test]
fn program_is_woken_for_buffers_after_a_pending_command() {
    let mut lab = DeviceFixture::new();
    let (device, mut cx) = lab.lend();
    device.queues.rings.rx = Some(queue());
    device.queues.pending = Some(PendingCommand::Stop(RX, Reply::discarded()));
    let put = device
        .half(&mut cx)
        .send_datagram(host(), guest(), b"later");
    assert_eq!(put, Err(NotPut::NoRoom));
    // A flow-control packet finds no room either.
    device.datagrams.set_features(F_DGRAM | F_DGRAM_FLOW);
    assert!(
        !device
            .datagrams_with(&mut cx)
            .put_control(&Control::Unsupported.emit(host(), guest()))
    );
    for _ in 0..2 {
        assert!(
            !device.has_available_chains() && !device.enable_kicks(),
            "the worker would not sleep"
        );
        assert!(!device.transmit(&mut cx));
    }
    assert!(device.program_waits());
    // The command fails without its queue; a later one completes.
    let rx = device.queues.rings.rx.take();
    command::finish(device, &mut cx);
    assert!(!device.queues.is_command_pending() && !device.has_available_chains());
    device.queues.pending = Some(PendingCommand::Stop(TX, Reply::discarded()));
    device.queues.rings.rx = rx;
    command::finish(device, &mut cx);
    assert!(
        device.has_available_chains(),
        "the buffer was posted all the time"
    );
    device.transmit(&mut cx);
    assert!(!device.program_waits() && !device.has_available_chains());
    let put = device.half(&mut cx).send_datagram(host(), guest(), b"now");
    assert_eq!(put, Ok(()));
}
