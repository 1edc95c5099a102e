//! The event loop, with devices that only record what the worker does.

use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::OwnedFd;
use rustix::pipe::{PipeFlags, pipe_with};
use zerosock_proto::Instant;
use zerosock_sys::notify::{CallFd, CallThread, Notifier, ThreadCount};

use super::{PauseStep, Worker, WorkerMessage};
use crate::mailbox::{Mailbox, Sender};
use crate::numbers::Numbers;
use crate::outbox::DeviceAddr;
use crate::poller::{EventKind, Interest, Token};
use crate::test_device::{Call, Note, TestDevice};

type Message = WorkerMessage<TestDevice>;

fn worker() -> (Sender<Message>, Worker<TestDevice>) {
    let (sender, mailbox) = Mailbox::new().unwrap();
    let worker = Worker::new(0, vec![sender.clone()], mailbox, Default::default());
    (sender, worker.unwrap())
}

fn readable(worker: &Worker<TestDevice>) -> bool {
    let mut fds = [PollFd::new(worker, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec::default())).unwrap() > 0
}

fn calls(worker: &mut Worker<TestDevice>, number: u32) -> Vec<Call> {
    std::mem::take(&mut worker.devices.get_mut(number).unwrap().calls)
}

#[test]
fn a_caller_with_its_own_loop_can_step_a_worker() {
    let (sender, mut worker) = worker();
    worker.start().unwrap();
    assert!(worker.step(Some(Duration::ZERO)).unwrap());
    assert!(worker.is_idle() && worker.next_timeout().is_none() && !readable(&worker));
    sender
        .send(WorkerMessage::RemoveDevice { number: 9 })
        .unwrap();
    assert!(readable(&worker), "a message makes the descriptor readable");
    assert!(worker.step(None).unwrap());
    assert!(worker.is_idle() && !readable(&worker));
    sender.send(WorkerMessage::Shutdown).unwrap();
    assert!(!worker.step(None).unwrap());
}

/// The peer has as many threads as it may have, and all of them are blocked on a pipe.
#[test]
fn a_worker_sleeps_until_the_retry_for_a_notifier_thread() {
    let threads = ThreadCount::default();
    let call = |fd: OwnedFd| CallFd::new(fd.into(), CallThread::new(&threads)).unwrap();
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).unwrap();
    rustix::io::ioctl_fionbio(&writer, true).unwrap();
    while rustix::io::write(&writer, &[0; 4096]).is_ok() {}
    rustix::io::ioctl_fionbio(&writer, false).unwrap();
    for _ in 0..4 {
        Notifier::new().notify(&call(writer.try_clone().unwrap()));
    }
    let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let late = call(event.try_clone().unwrap());

    let (_sender, mut worker) = worker();
    worker.start().unwrap();
    worker.notifier = Notifier::without_aio();
    worker.notifier.notify(&late);
    assert!(worker.next_timeout().is_some());
    drop(reader);
    // Each step sleeps until the retry.
    while worker.next_timeout().is_some() {
        assert!(worker.step(None).unwrap());
    }
    rustix::io::read(&event, &mut [0; 8]).unwrap();
}

#[test]
fn devices_are_added_and_removed_by_message() {
    let (sender, mut worker) = worker();
    let mut numbers = Numbers::default();
    worker.start().unwrap();
    let mut seen = Vec::new();
    for _ in 0..2 {
        let number = numbers.take().unwrap();
        let device = Box::new(TestDevice::new(number));
        sender.send(WorkerMessage::AddDevice(device)).unwrap();
        assert!(worker.step(None).unwrap());
        assert_eq!(worker.devices.numbers(), [number]);
        // A deadline and a turn of the device end with it.
        worker.devices.get_mut(number).unwrap().queues.recheck_at = Some(worker.clock().now());
        worker.activate(number);
        assert!(worker.step(None).unwrap());
        worker.activate(number);
        sender.send(WorkerMessage::RemoveDevice { number }).unwrap();
        assert!(worker.step(None).unwrap());
        assert!(worker.devices.numbers().is_empty() && worker.deadlines.is_empty());
        assert!(worker.is_idle());
        numbers.release(number);
        seen.push(number);
    }
    assert_ne!(seen[0], seen[1], "another generation");
}

#[test]
fn an_event_goes_to_its_device_with_the_key_and_a_turn_follows() {
    let (_sender, mut worker) = worker();
    worker.add(TestDevice::new(0));
    worker.add(TestDevice::new(1));
    let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let token = Token {
        device: 1,
        kind: EventKind::new(14),
        key: 77,
    };
    worker.poller.add(&event, token, Interest::Read).unwrap();
    rustix::io::write(&event, &1u64.to_ne_bytes()).unwrap();
    assert!(worker.step(Some(Duration::ZERO)).unwrap());
    assert_eq!(calls(&mut worker, 1), [Call::Event(77), Call::Turn]);
    assert_eq!(calls(&mut worker, 0), []);
}

#[test]
fn a_paused_worker_handles_messages_in_order_and_nothing_else() {
    let (sender, mut worker) = worker();
    worker.add(TestDevice::new(0));
    let event = eventfd(1, EventfdFlags::CLOEXEC).unwrap();
    let token = Token {
        device: 0,
        kind: EventKind::new(14),
        key: 77,
    };
    worker.poller.add(&event, token, Interest::Read).unwrap();
    let note = |number| WorkerMessage::Device {
        number: 0,
        message: Note::Number(number),
    };
    let (seen, found) = std::sync::mpsc::channel();
    let (done, is_done) = std::sync::mpsc::channel();
    let step = |is_paused| {
        let seen = seen.clone();
        WorkerMessage::Pause(PauseStep {
            is_paused,
            call: Box::new(move |device: &mut TestDevice, _| {
                seen.send(std::mem::take(&mut device.calls)).unwrap();
            }),
            done: done.clone(),
        })
    };
    for message in [
        note(1),
        step(true),
        note(2),
        step(true),
        note(3),
        step(false),
        note(4),
    ] {
        sender.send(message).unwrap();
    }
    while !worker.is_idle() || worker.has_messages() || readable(&worker) {
        assert!(worker.step(Some(Duration::ZERO)).unwrap());
    }
    let found: Vec<_> = found.try_iter().collect();
    assert_eq!(
        found,
        [
            vec![Call::Note(1)],
            vec![Call::Note(2)],
            vec![Call::Note(3)]
        ]
    );
    assert_eq!(is_done.try_iter().count(), 3);
    let after = calls(&mut worker, 0);
    assert_eq!(after.last(), Some(&Call::Turn));
    assert!(after.contains(&Call::Note(4)) && after.contains(&Call::Event(77)));
}

const SIZE: usize = 64 << 10;

#[test]
fn bytes_of_messages_per_step_are_bounded() {
    let (sender, mut worker) = worker();
    worker.add(TestDevice::new(0));
    for _ in 0..100 {
        let message = Note::Bytes(SIZE);
        sender
            .send(WorkerMessage::Device { number: 0, message })
            .unwrap();
    }
    let mut steps = Vec::new();
    while worker.has_messages() {
        assert!(worker.take_messages());
        steps.push(std::mem::take(&mut worker.shared.0).len());
    }
    assert_eq!(steps, [32, 32, 32, 4]);
}

#[test]
fn bytes_between_devices_of_one_worker_are_bounded() {
    let (_sender, mut worker) = worker();
    worker.add(TestDevice::new(0));
    for _ in 0..100 {
        let to = DeviceAddr {
            worker: 0,
            number: 0,
        };
        worker.outbox.send(to, Note::Bytes(SIZE));
    }
    worker.deliver(Instant::ZERO);
    assert!(!worker.is_idle(), "the rest comes with the next step");
    assert_eq!(worker.shared.0, [SIZE; 32]);
}

#[test]
fn the_receiver_of_a_message_has_its_turn_in_the_same_step() {
    let (_sender, mut worker) = worker();
    worker.add(TestDevice::new(0));
    worker.add(TestDevice::new(1));
    let to = DeviceAddr {
        worker: 0,
        number: 1,
    };
    worker.outbox.send(to, Note::Number(7));
    worker.activate(0);
    assert!(worker.step(Some(Duration::ZERO)).unwrap());
    assert_eq!(calls(&mut worker, 0), [Call::Turn]);
    assert_eq!(calls(&mut worker, 1), [Call::Note(7), Call::Turn]);
    assert!(worker.is_idle());
}

#[test]
fn a_message_to_a_device_that_was_removed_is_answered() {
    let (sender, mut worker) = worker();
    worker.add(TestDevice::new(0));
    let message = Note::Number(1);
    sender
        .send(WorkerMessage::Device { number: 5, message })
        .unwrap();
    assert!(worker.step(None).unwrap());
    assert_eq!(calls(&mut worker, 0), [Call::Note(1), Call::Turn]);
}

#[test]
fn shared_state_changes_by_message_and_shutdown_ends_all_devices() {
    let (sender, mut worker) = worker();
    worker.add(TestDevice::new(0));
    let update = |shared: &mut (Vec<usize>, usize)| shared.1 = 9;
    sender
        .send(WorkerMessage::Update(Box::new(update)))
        .unwrap();
    sender.send(WorkerMessage::Shutdown).unwrap();
    assert!(!worker.step(None).unwrap());
    assert_eq!(worker.shared.1, 9);
    assert_eq!(calls(&mut worker, 0), [Call::Ended]);
}
