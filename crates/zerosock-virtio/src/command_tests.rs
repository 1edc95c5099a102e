//! Commands of the VMM to a device that returns its buffers at once, later, or never.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use zerosock_proto::Instant;
use zerosock_ring::{
    Buffer, DriverLayout, DriverQueue, InflightRecord, Memory, QueueConfig, RegionConfig, StateMap,
};
use zerosock_sys::notify::{CallFd, CallThread, Notifier, ThreadCount};
use zerosock_vhost_user::{DeviceCommand, DeviceReply, Reply};

use super::{QUIESCE_TIMEOUT, RECHECK_INTERVAL, command, finish, forget, give_up};
use crate::device::Context;
use crate::outbox::Outbox;
use crate::poller::Poller;
use crate::queues::{Quiesced, Scope};
use crate::test_device::{Call, TestDevice};

const SIZE: u16 = 8;
const LEN: u64 = 1 << 16;

struct Harness {
    device: TestDevice,
    poller: Poller,
    outbox: Outbox<crate::test_device::Note>,
    notifier: Notifier,
    shared: (Vec<usize>, usize),
    now: Instant,
    /// The number of the next queue start.
    start: u64,
}

impl Harness {
    /// A device with memory.
    fn new() -> Harness {
        let mut harness = Harness {
            device: TestDevice::new(0),
            poller: Poller::new().unwrap(),
            outbox: Outbox::new(0),
            notifier: Notifier::new(),
            shared: Default::default(),
            now: Instant::ZERO,
            start: 0,
        };
        harness.command(DeviceCommand::SetMemory(memory(LEN)));
        harness.device.calls.clear();
        harness
    }

    fn with(&mut self, act: impl FnOnce(&mut TestDevice, &mut Context<'_, TestDevice>)) {
        let mut cx = Context {
            now: self.now,
            clock: None,
            poller: &self.poller,
            outbox: &mut self.outbox,
            notifier: &self.notifier,
            spins: false,
            shared: &mut self.shared,
        };
        act(&mut self.device, &mut cx);
    }

    fn command(&mut self, order: DeviceCommand) -> Vec<Call> {
        self.command_with(order, Reply::discarded())
    }

    fn command_with(&mut self, order: DeviceCommand, reply: Reply) -> Vec<Call> {
        self.with(|device, cx| command(device, order, reply, cx));
        std::mem::take(&mut self.device.calls)
    }

    fn finish_at(&mut self, now: Instant) -> Vec<Call> {
        self.now = now;
        self.with(finish);
        std::mem::take(&mut self.device.calls)
    }

    fn start(&mut self, index: u16, base: u16) -> Vec<Call> {
        self.start_with(index, base, None)
    }

    fn start_with(&mut self, index: u16, base: u16, call: Option<CallFd>) -> Vec<Call> {
        let layout = DriverLayout::at(0x1000 * u64::from(index), SIZE);
        let config = QueueConfig {
            size: SIZE,
            desc: layout.desc,
            avail: layout.avail,
            used: layout.used,
            base,
            event_idx: false,
            indirect: false,
        };
        if let Some(memory) = &self.device.queues.memory
            && base == 0
        {
            DriverQueue::new(memory.clone(), layout, false).unwrap();
        }
        self.command(DeviceCommand::StartQueue {
            index,
            config,
            kick: eventfd(0, EventfdFlags::CLOEXEC).unwrap().into(),
            call,
            err: None,
            used_log: None,
            enabled: true,
            start: self.start,
        })
    }

    /// The device of a process that was killed is replaced by one that gets the same memory and state.
    fn killed(self, state: &OwnedFd) -> Harness {
        let memory = self.device.queues.memory.clone().unwrap();
        let mut harness = Harness::new();
        harness.command(DeviceCommand::SetMemory(memory));
        harness.device.calls.clear();
        harness.device.queues.set_state(map(state));
        harness.start = self.start;
        harness
    }

    fn runs(&self, index: usize) -> bool {
        self.device.queues.rings[index].is_some()
    }
}

fn memory(len: u64) -> Arc<Memory> {
    let fd = zerosock_sys::memfd::create("command", len, true).unwrap();
    let region = RegionConfig {
        guest_addr: 0,
        user_addr: 0,
        len,
        fd_offset: 0,
    };
    Arc::new(Memory::map(vec![(fd, region)]).unwrap())
}

#[test]
fn a_queue_starts_and_stops() {
    let mut harness = Harness::new();
    let started = |index, resumed| Call::Started { index, resumed };
    assert_eq!(harness.start(0, 0), [started(0, false)]);
    assert_eq!(harness.start(1, 0), [started(1, false)]);
    let epochs = harness.device.queues.rings.each_ref();
    let epochs = epochs.map(|ring| ring.as_ref().unwrap().epoch);
    assert_eq!(epochs, [1, 2], "each start has an epoch of its own");
    let calls = harness.command(DeviceCommand::StopQueue { index: 0 });
    assert_eq!(calls, [Call::Release(Scope::Queue(0)), Call::Finished]);
    assert!(!harness.runs(0) && harness.runs(1));
    assert_eq!(harness.start(7, 0), [], "the device has two queues");
}

#[test]
fn a_first_queue_with_a_base_has_a_driver_of_an_earlier_device() {
    let mut harness = Harness::new();
    let started = |index, resumed| Call::Started { index, resumed };
    assert_eq!(harness.start(0, 3), [started(0, true)]);
    assert_eq!(harness.start(1, 5), [started(1, false)]);
}

#[test]
fn a_later_queue_may_be_the_first_with_a_base() {
    let mut harness = Harness::new();
    let started = |index, resumed| Call::Started { index, resumed };
    assert_eq!(harness.start(0, 0), [started(0, false)]);
    assert_eq!(harness.start(1, 5), [started(1, true)]);
}

#[test]
fn a_queue_that_was_stopped_here_continues_its_own_device() {
    let mut harness = Harness::new();
    let started = |index, resumed| Call::Started { index, resumed };
    harness.start(0, 0);
    harness.command(DeviceCommand::StopQueue { index: 0 });
    assert_eq!(harness.start(0, 5), [started(0, false)]);
}

#[test]
fn a_base_of_zero_after_another_base_means_that_the_driver_has_rebooted() {
    let mut harness = Harness::new();
    harness.start(0, 3);
    harness.command(DeviceCommand::StopQueue { index: 0 });
    let reset = Call::Reset { stopped: false };
    let started = Call::Started {
        index: 0,
        resumed: false,
    };
    assert_eq!(harness.start(0, 0), [reset, started, Call::Finished]);
    harness.command(DeviceCommand::StopQueue { index: 0 });
    let started = Call::Started {
        index: 0,
        resumed: false,
    };
    assert_eq!(harness.start(0, 0), [started], "it was stopped at zero");
}

#[test]
fn a_driver_is_notified_when_its_queue_starts() {
    let mut harness = Harness::new();
    let was_notified = |harness: &mut Harness, base| {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let thread = CallThread::new(&ThreadCount::default());
        let call = CallFd::new(fd.try_clone().unwrap().into(), thread).unwrap();
        harness.start_with(0, base, Some(call));
        harness.command(DeviceCommand::StopQueue { index: 0 });
        rustix::io::read(&fd, &mut [0; 8]).is_ok()
    };
    assert!(was_notified(&mut harness, 3));
    // The index may have wrapped at the device before this one.
    assert!(was_notified(&mut harness, 0));
}

#[test]
fn a_command_waits_until_the_device_has_its_buffers_back() {
    let mut harness = Harness::new();
    harness.start(0, 0);
    harness.device.quiesced = Quiesced::Waits;
    let calls = harness.command(DeviceCommand::StopQueue { index: 0 });
    assert_eq!(calls, [Call::Release(Scope::Queue(0))]);
    assert!(harness.runs(0) && harness.device.queues.is_command_pending());
    assert_eq!(
        harness.device.queues.next_timeout(),
        None,
        "it is told when they come"
    );
    let later = Instant::ZERO + 10 * QUIESCE_TIMEOUT;
    assert_eq!(harness.finish_at(later), []);
    harness.device.quiesced = Quiesced::Done;
    assert_eq!(harness.finish_at(later), [Call::Finished]);
    assert!(!harness.runs(0) && !harness.device.queues.is_command_pending());
}

#[test]
fn a_front_end_is_dropped_when_buffers_stay_in_use_for_too_long() {
    let mut harness = Harness::new();
    harness.start(0, 0);
    harness.device.features = 7;
    harness.device.quiesced = Quiesced::Unknown("a test");
    harness.command(DeviceCommand::SetMemory(memory(LEN)));
    let look = Instant::ZERO + RECHECK_INTERVAL;
    assert_eq!(harness.device.queues.next_timeout(), Some(look));
    let last = Instant::ZERO + (QUIESCE_TIMEOUT - Duration::from_nanos(1));
    assert_eq!(harness.finish_at(last), []);
    let calls = harness.finish_at(Instant::ZERO + QUIESCE_TIMEOUT);
    let had = Call::MemoryReplaced { had: true };
    assert_eq!(calls, [Call::Reset { stopped: true }, had]);
    assert!(!harness.runs(0) && harness.device.queues.memory.is_none());
    assert_eq!(harness.device.features, 0);
    assert_eq!(harness.device.queues.next_timeout(), None);
}

#[test]
fn a_running_queue_continues_in_new_memory_that_contains_its_rings_and_fails_in_other_memory() {
    let mut harness = Harness::new();
    harness.start(0, 0);
    let calls = harness.command(DeviceCommand::SetMemory(memory(LEN)));
    let release = Call::Release(Scope::Memory);
    let had = Call::MemoryReplaced { had: true };
    assert_eq!(calls, [release, had, Call::Finished]);
    let live = |harness: &Harness| harness.device.queues.rings[0].as_ref().unwrap().live();
    assert!(live(&harness));
    harness.command(DeviceCommand::SetMemory(memory(1 << 6)));
    assert!(!live(&harness), "its rings are not in this memory");
}

#[test]
fn a_reset_and_a_disconnect_stop_all_queues() {
    for order in [DeviceCommand::ResetDevice, DeviceCommand::Disconnected] {
        let mut harness = Harness::new();
        harness.start(0, 0);
        harness.start(1, 0);
        let disconnects = matches!(order, DeviceCommand::Disconnected);
        let calls = harness.command(order);
        assert!(calls.contains(&Call::Reset { stopped: true }), "{calls:?}");
        assert!(!harness.runs(0) && !harness.runs(1));
        assert_eq!(harness.device.queues.memory.is_none(), disconnects);
    }
}

/// Whether the control thread has the answer to a command, and which.
fn answer(received: &Receiver<DeviceReply>) -> Option<DeviceReply> {
    received.try_recv().ok()
}

#[test]
fn a_reset_is_answered_when_all_connections_have_ended() {
    let mut harness = Harness::new();
    harness.start(0, 0);
    harness.device.parts = 2;
    let part = || Call::ResetPart { stopped: true };
    let (reply, received) = Reply::channel();
    let calls = harness.command_with(DeviceCommand::ResetDevice, reply);
    assert_eq!(calls, [Call::Release(Scope::Reset), part()]);
    // Buffers were returned before the first part.
    harness.device.quiesced = Quiesced::Waits;
    assert_eq!(harness.finish_at(Instant::ZERO), [part()]);
    assert!(harness.runs(0) && harness.device.queues.is_resetting());
    assert_eq!(answer(&received), None);
    let calls = harness.finish_at(Instant::ZERO);
    assert_eq!(calls, [Call::Reset { stopped: true }, Call::Finished]);
    assert!(!harness.runs(0) && !harness.device.queues.is_resetting());
    assert_eq!(answer(&received), Some(DeviceReply::Done));
}

#[test]
fn a_queue_of_the_next_driver_starts_when_all_connections_have_ended() {
    let mut harness = Harness::new();
    harness.start(0, 3);
    harness.command(DeviceCommand::StopQueue { index: 0 });
    harness.device.parts = 1;
    assert_eq!(harness.start(0, 0), [Call::ResetPart { stopped: false }]);
    assert!(!harness.runs(0) && harness.device.queues.is_command_pending());
    let (reset, index, resumed) = (Call::Reset { stopped: false }, 0, false);
    let calls = harness.finish_at(Instant::ZERO);
    let started = Call::Started { index, resumed };
    assert_eq!(calls, [reset, started, Call::Finished]);
    assert!(harness.runs(0));
}

/// The memory stays until the last part: bytes of the guest may still lie there.
#[test]
fn a_front_end_that_disconnects_during_a_reset_is_answered_after_the_last_part() {
    let mut harness = Harness::new();
    harness.start(0, 0);
    harness.device.parts = 3;
    let (reset, reset_answer) = Reply::channel();
    harness.command_with(DeviceCommand::ResetDevice, reset);
    let (gone, gone_answer) = Reply::channel();
    let calls = harness.command_with(DeviceCommand::Disconnected, gone);
    assert_eq!(calls, [Call::ResetPart { stopped: true }]);
    assert!(harness.runs(0) && harness.device.queues.memory.is_some());
    // The control thread sends no such command, and it changes nothing.
    let (other, other_answer) = Reply::channel();
    let set = harness.command_with(DeviceCommand::SetMemory(memory(LEN)), other);
    assert_eq!(set, []);
    assert!(matches!(
        answer(&other_answer),
        Some(DeviceReply::Failed(_))
    ));
    harness.finish_at(Instant::ZERO);
    assert_eq!((answer(&reset_answer), answer(&gone_answer)), (None, None));
    let had = Call::MemoryReplaced { had: true };
    let calls = harness.finish_at(Instant::ZERO);
    assert_eq!(calls, [Call::Reset { stopped: true }, had]);
    assert!(!harness.runs(0) && harness.device.queues.memory.is_none());
    assert_eq!(answer(&gone_answer), Some(DeviceReply::Done));
    assert!(matches!(
        answer(&reset_answer),
        Some(DeviceReply::Failed(_))
    ));
}

#[test]
fn a_device_that_gives_up_its_front_end_answers_the_disconnect_after_the_last_part() {
    let mut harness = Harness::new();
    harness.start(0, 0);
    harness.device.parts = 1;
    harness.with(|device, cx| give_up(device, "a test", cx));
    let (gone, received) = Reply::channel();
    harness.command_with(DeviceCommand::Disconnected, gone);
    assert_eq!(answer(&received), Some(DeviceReply::Done));
    assert!(harness.device.queues.memory.is_none());
}

/// The driver goes on while its connections end.
#[test]
fn a_command_that_comes_while_connections_of_a_stopped_driver_end_is_carried_out_afterwards() {
    let mut harness = Harness::new();
    harness.start(0, 3);
    harness.command(DeviceCommand::StopQueue { index: 0 });
    harness.device.parts = 2;
    harness.with(forget);
    assert_eq!(harness.start(0, 5), [Call::ResetPart { stopped: false }]);
    assert_eq!(
        harness.finish_at(Instant::ZERO),
        [Call::ResetPart { stopped: false }]
    );
    let (reset, index, resumed) = (Call::Reset { stopped: false }, 0, false);
    let calls = harness.finish_at(Instant::ZERO);
    let started = Call::Started { index, resumed };
    assert_eq!(calls, [reset, Call::Forgotten, started]);
    assert!(harness.runs(0));
}

#[test]
fn a_disconnect_that_comes_while_connections_of_a_stopped_driver_end_is_answered_at_their_end() {
    let mut harness = Harness::new();
    harness.device.parts = 2;
    harness.with(forget);
    let (gone, received) = Reply::channel();
    harness.command_with(DeviceCommand::Disconnected, gone);
    assert_eq!(answer(&received), None);
    harness.finish_at(Instant::ZERO);
    assert_eq!(answer(&received), Some(DeviceReply::Done));
    assert!(harness.device.queues.memory.is_none());
}

const STATE_LEN: usize = 2 * InflightRecord::LEN;

fn map(state: &OwnedFd) -> StateMap {
    StateMap::map(state, STATE_LEN).unwrap()
}

/// A device is killed with one chain in use, one completed and published, one completed, and one posted; its
/// queue starts again with that number. Returns the base, and the chains that the driver got with their
/// written bytes.
fn after_a_kill(next_start: u64, index: u16) -> (u16, Vec<(u64, u32)>) {
    let state = zerosock_sys::memfd::create("state", STATE_LEN as u64, true).unwrap();
    let mut harness = Harness::new();
    harness.device.queues.set_state(map(&state));
    harness.start = 3;
    harness.start(index, 0);
    let memory = harness.device.queues.memory.clone().unwrap();
    let layout = DriverLayout::at(0x1000 * u64::from(index), SIZE);
    let mut driver = DriverQueue::new(memory, layout, false).unwrap();
    for token in 0..4 {
        let buffer = Buffer {
            addr: 0x8000,
            len: 16,
            writable: true,
        };
        driver.add(&[buffer], token).unwrap();
    }
    let _ = driver.publish();
    let ring = harness.device.queues.rings[usize::from(index)].as_mut();
    let ring = ring.unwrap();
    let held = [ring.pop(), ring.pop(), ring.pop()];
    let [first, second, third] = held.map(Option::unwrap);
    // Out of order; the last one is not published.
    ring.complete(second, 2);
    ring.publish(&Notifier::without_aio());
    ring.complete(third, 3);
    drop(first);
    let mut harness = harness.killed(&state);
    harness.start = next_start;
    let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
    let thread = CallThread::new(&ThreadCount::default());
    let call = CallFd::new(fd.try_clone().unwrap().into(), thread).unwrap();
    // As `start_with`, which prepares the rings for a base of 0.
    harness.start_with(index, 1, Some(call));
    assert!(rustix::io::read(&fd, &mut [0; 8]).is_ok(), "not notified");
    let mut returned = Vec::new();
    while let Some(used) = driver.poll().unwrap() {
        returned.push((used.token, used.len));
    }
    let ring = harness.device.queues.rings[usize::from(index)].as_ref();
    (ring.unwrap().queue.base(), returned)
}

#[test]
fn a_successor_returns_the_chains_that_its_predecessor_was_killed_with() {
    for index in [0, 1] {
        let (base, returned) = after_a_kill(3, index);
        assert_eq!((base, returned), (3, vec![(1, 2), (2, 3), (0, 0)]));
    }
}

#[test]
fn another_start_of_a_queue_takes_nothing_from_the_record() {
    for number in [0, 4] {
        let (base, returned) = after_a_kill(number, 1);
        assert_eq!((base, returned), (1, vec![(1, 2)]));
    }
}

#[test]
fn a_queue_beyond_the_state_runs_without_a_record() {
    let mut harness = Harness::new();
    let state = zerosock_sys::memfd::create("state", STATE_LEN as u64, true).unwrap();
    let mut short = map(&state);
    let _ = short.split_off(STATE_LEN - 4096);
    harness.device.queues.set_state(short);
    assert_eq!(harness.device.queues.records.len(), 1);
    let started = |index, resumed| Call::Started { index, resumed };
    assert_eq!(harness.start(1, 3), [started(1, true)]);
}
