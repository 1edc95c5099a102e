//! The end of connections of a device with stopped queues, with time as an argument.

use std::time::Duration;

use zerosock_proto::Instant;
use zerosock_proto::wire::vsock::Op;
use zerosock_vhost_user::{DeviceCommand, Reply};
use zerosock_virtio::command::{QueueStarted, VirtioDevice};
use zerosock_virtio::device::WorkerDevice;

use crate::device::lab::DeviceFixture;
use crate::device::test_guest::{self, Guest};
use crate::device::{RX, TX};

const LIMIT: Duration = Duration::from_secs(300);
/// A queue that goes on where it was stopped.
const STARTED: QueueStarted = QueueStarted {
    resumed: false,
    base: 1,
    recovered: 0,
    stopped_at: Some(1),
};

/// A device with a connection, and its guest.
fn device(limit: Option<Duration>) -> (DeviceFixture, Guest) {
    let mut lab = DeviceFixture::new();
    lab.device.stop.limit = limit;
    let mut guest = test_guest::start(&mut lab.device);
    lab.ready();
    turn(&mut lab, Instant::ZERO);
    let [request] = guest.received().try_into().unwrap();
    guest.send(request.dst.port.get(), request.src, Op::Response, 0);
    assert_eq!(turn(&mut lab, Instant::ZERO), 1);
    (lab, guest)
}

fn stop(lab: &mut DeviceFixture, at: Instant) {
    for index in [RX, TX] {
        let (device, mut cx) = lab.lend();
        cx.now = at;
        device.command(
            DeviceCommand::StopQueue { index },
            Reply::discarded(),
            &mut cx,
        );
        assert!(!device.queues.is_command_pending());
    }
}

fn turn(lab: &mut DeviceFixture, at: Instant) -> usize {
    let (device, mut cx) = lab.lend();
    cx.now = at;
    device.turn(&mut cx);
    device.bridges.len()
}

#[test]
fn connections_end_when_the_queues_have_been_stopped_for_the_limit() {
    let (mut lab, _guest) = device(Some(LIMIT));
    let from = Instant::ZERO + Duration::from_secs(7);
    stop(&mut lab, from);
    assert_eq!(lab.device.timers.len(), 1, "one for the device");
    let almost = from + (LIMIT - Duration::from_nanos(1));
    assert_eq!(turn(&mut lab, almost), 1);
    assert_eq!(turn(&mut lab, from + LIMIT), 0);
    assert_eq!(lab.device.shard.occupied(), 0);
    // The driver goes on: it has to be told.
    let (device, mut cx) = lab.lend();
    device.queue_started(TX, STARTED, &mut cx);
    assert!(device.announce_reset);
}

#[test]
fn the_next_driver_is_told_nothing() {
    let (mut lab, _guest) = device(Some(LIMIT));
    stop(&mut lab, Instant::ZERO);
    assert_eq!(turn(&mut lab, Instant::ZERO + LIMIT), 0);
    let (device, mut cx) = lab.lend();
    device.command(DeviceCommand::ResetDevice, Reply::discarded(), &mut cx);
    device.queue_started(TX, STARTED, &mut cx);
    assert!(!device.announce_reset);
}

#[test]
fn connections_outlast_a_stop_that_ends_before_the_limit() {
    let (mut lab, _guest) = device(Some(LIMIT));
    stop(&mut lab, Instant::ZERO);
    let (device, mut cx) = lab.lend();
    device.queue_started(RX, STARTED, &mut cx);
    assert_eq!(device.stop.ends_at, None);
    assert_eq!(turn(&mut lab, Instant::ZERO + 2 * LIMIT), 1);
    assert!(!lab.device.announce_reset);
}

#[test]
fn connections_outlast_any_stop_without_a_limit() {
    let (mut lab, _guest) = device(None);
    stop(&mut lab, Instant::ZERO);
    assert_eq!(lab.device.stop.ends_at, None);
    assert_eq!(turn(&mut lab, Instant::ZERO + 1000 * LIMIT), 1);
}
