//! The number of siblings' messages that a worker handles in one step.

use zerosock_proto::Instant;

use super::Worker;
use super::messages::WorkerMessage;
use super::tests::worker;
use crate::device::datagrams::tests::datagrams;
use crate::device::sibling_message::SiblingMessage;
use crate::routing::DeviceAddr;

const LEN: usize = 64 << 10;
const NOBODY: DeviceAddr = DeviceAddr { worker: 0, vm: 9 };

/// The queued answers; other queued messages are dropped.
fn answered(worker: &mut Worker) -> usize {
    let all = std::iter::from_fn(|| worker.outbox.pop_local());
    all.filter(|(_, message)| matches!(message, SiblingMessage::DatagramDone { .. }))
        .count()
}

#[test]
fn datagram_bytes_per_step_are_bounded_as_in_a_turn() {
    let (sender, mut worker) = worker();
    for datagram in datagrams(100, LEN) {
        let (vm, message) = (NOBODY.vm, SiblingMessage::Datagram(datagram));
        sender.send(WorkerMessage::Sibling { vm, message }).unwrap();
    }
    let mut steps = Vec::new();
    while worker.has_messages() {
        assert!(worker.take_messages());
        steps.push(answered(&mut worker));
    }
    assert_eq!(steps, [32, 32, 32, 4]);
    assert!(worker.is_idle());
}

#[test]
fn datagram_bytes_between_devices_of_one_worker_are_bounded() {
    let (_sender, mut worker) = worker();
    for datagram in datagrams(100, LEN) {
        worker
            .outbox
            .send(NOBODY, SiblingMessage::Datagram(datagram));
    }
    worker.deliver(Instant::ZERO);
    assert!(!worker.is_idle(), "the rest comes with the next step");
    assert_eq!(answered(&mut worker), 32);
}
