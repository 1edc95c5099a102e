//! The order of the commands to the device of an endpoint, and what their answers mean.

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use zerosock_ring::RegionConfig;
use zerosock_sys::account::Budget;

use super::*;

fn attachment() -> Attachment {
    let file = memfd_create("vm", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, Extent::HUGE_PAGE).unwrap();
    let region = RegionConfig {
        guest_addr: 0,
        user_addr: 0,
        len: Extent::HUGE_PAGE,
        fd_offset: 0,
    };
    let parent = Arc::new(Memory::map(vec![(file, region)]).unwrap());
    let extents = vec![Extent {
        addr: 0,
        len: Extent::HUGE_PAGE,
    }];
    let view = Memory::of_extents(&parent, &extents).unwrap();
    let mut attachment = Attachment::new(extents, Nonce([0; 32]), view);
    attachment.check = PageCheck::Done;
    let (worker, number) = (0, 1);
    let kick = Arc::new(new_eventfd().unwrap());
    let permit = Budget::unlimited().account().take_nothing();
    let mut endpoint = Endpoint::new(DeviceAddr { worker, number }, kick, permit).unwrap();
    endpoint.start = Some(Start {
        features: 0,
        queue_size: 1,
        rings: [0; 3],
    });
    attachment.endpoint = Some(endpoint);
    attachment
}

/// Takes all steps, and answers each.
fn run(attachment: &mut Attachment, may_run: bool, logs: bool) -> Vec<Step> {
    let mut steps = Vec::new();
    while let Some(step) = attachment.next_step(may_run, logs) {
        let endpoint = attachment.endpoint.as_mut().unwrap();
        let serial = endpoint.begin(step);
        assert_eq!(attachment.next_step(may_run, logs), None, "one at a time");
        assert!(!attachment.is_at_rest());
        let reply = match step {
            Step::Stop(index) => DeviceReply::Base(10 + index),
            _ => DeviceReply::Done,
        };
        let endpoint = attachment.endpoint.as_mut().unwrap();
        endpoint.answered(serial, &reply);
        steps.push(step);
    }
    steps
}

const fn start(index: u16, base: u16) -> Step {
    Step::Start { index, base }
}

#[test]
fn commands_have_the_order_of_a_front_end() {
    let mut it = attachment();
    assert_eq!(run(&mut it, false, false), []);
    let expected = [
        Step::Connect,
        Step::SetFeatures { logs: false },
        Step::SetMemory,
        start(RX, 0),
        start(TX, 0),
        start(EVENT, 0),
    ];
    assert_eq!(run(&mut it, true, false), expected);
    assert!(!it.is_at_rest());
    let stops = [RX, TX, EVENT].map(Step::Stop);
    assert_eq!(run(&mut it, false, false), stops);
    assert!(it.is_at_rest());
    it.endpoint.as_mut().unwrap().has_memory = false;
    assert_eq!(run(&mut it, false, false), [Step::SetMemory]);
    let starts = [start(RX, 10), start(TX, 11), start(EVENT, 12)];
    // Not before the pages have shown their values.
    it.check_again();
    assert_eq!(run(&mut it, true, false), []);
    it.check = PageCheck::Done;
    assert_eq!(run(&mut it, true, false), starts);
    let logs = [Step::SetLog, Step::SetFeatures { logs: true }];
    assert_eq!(run(&mut it, true, true), logs);
    it.endpoint.as_mut().unwrap().log_changed();
    assert_eq!(run(&mut it, true, true), [Step::SetLog]);
    let off = [Step::SetFeatures { logs: false }];
    assert_eq!(run(&mut it, true, false), off);
    let (reason, at_once) = (Reason::REQUESTED, false);
    it.end = Some(End { reason, at_once });
    assert!(!it.is_over());
    let mut steps = stops.to_vec();
    steps.push(Step::Disconnect);
    assert_eq!(run(&mut it, true, false), steps);
    assert!(it.is_over());
}

#[test]
fn a_disconnect_at_once_overtakes_and_other_answers_are_ignored() {
    let mut it = attachment();
    run(&mut it, true, false);
    let endpoint = it.endpoint.as_mut().unwrap();
    let stop = endpoint.begin(Step::Stop(RX));
    let (reason, at_once) = (Reason::DEVICE_RESET, true);
    it.end = Some(End { reason, at_once });
    assert_eq!(it.next_step(true, false), Some(Step::Disconnect));
    let endpoint = it.endpoint.as_mut().unwrap();
    let disconnect = endpoint.begin(Step::Disconnect);
    assert_eq!(it.next_step(true, false), None);
    let failed = DeviceReply::Failed("overtaken".into());
    let endpoint = it.endpoint.as_mut().unwrap();
    assert_eq!(endpoint.answered(stop, &failed), Answered::Next);
    assert!(!it.is_at_rest());
    let endpoint = it.endpoint.as_mut().unwrap();
    endpoint.answered(disconnect, &DeviceReply::Done);
    assert!(it.is_over());
}

/// The VM stops while its log is on the way to the endpoint's device.
#[test]
fn a_stop_without_the_log_leaves_the_pages_unmarked() {
    for done in 0..=2 {
        let mut it = attachment();
        run(&mut it, true, false);
        for _ in 0..done {
            let step = it.next_step(true, true).unwrap();
            let endpoint = it.endpoint.as_mut().unwrap();
            let serial = endpoint.begin(step);
            endpoint.answered(serial, &DeviceReply::Done);
        }
        let endpoint = it.endpoint.as_mut().unwrap();
        let expected = match done {
            2 => Answered::Next,
            _ => Answered::Unmarked,
        };
        let stop = endpoint.begin(Step::Stop(RX));
        assert_eq!(endpoint.answered(stop, &DeviceReply::Base(1)), expected);
        // One that overtakes another command.
        endpoint.begin(Step::Stop(TX));
        let disconnect = endpoint.begin(Step::Disconnect);
        assert_eq!(endpoint.answered(disconnect, &DeviceReply::Done), expected);
    }
}

#[test]
fn a_program_that_writes_delays_the_vm_and_one_that_reads_does_not() {
    for (queue, rest) in [(RX, Rest::Written), (TX, Rest::Done)] {
        let mut it = attachment();
        run(&mut it, true, false);
        let view = Arc::clone(&it.view);
        let mut steps = [RX, TX, EVENT].into_iter();
        let stopped = steps.find(|index| {
            let endpoint = it.endpoint.as_mut().unwrap();
            let serial = endpoint.begin(Step::Stop(*index));
            let reply = match *index == queue {
                true => DeviceReply::Failed("in use".into()),
                false => DeviceReply::Base(1),
            };
            endpoint.answered(serial, &reply) == Answered::Failed(Reason::NOT_STOPPED)
        });
        assert_eq!(stopped, Some(queue));
        let (reason, at_once) = (Reason::NOT_STOPPED, false);
        it.end = Some(End { reason, at_once });
        run(&mut it, false, false);
        assert!(it.is_at_rest() && !it.is_over());
        let mut guests = Guests::new(GuestReports::new(|_, _| {}));
        guests.attachments.insert(AttachmentKey(1), it);
        assert_eq!(guests.rest(), rest);
        drop(view);
        assert_eq!(guests.rest(), Rest::Done);
        assert!(guests.attachments[&AttachmentKey(1)].is_over());
    }
}

#[test]
fn failures_end_the_attachment_by_name() {
    let failed = DeviceReply::Failed("no".into());
    for (step, reason) in [
        (Step::Connect, Reason::SERVER_FAILED),
        (Step::SetLog, Reason::SERVER_FAILED),
        (Step::SetMemory, Reason::SERVER_FAILED),
        (start(RX, 0), Reason::RINGS),
        (Step::Stop(TX), Reason::NOT_STOPPED),
    ] {
        let mut it = attachment();
        let endpoint = it.endpoint.as_mut().unwrap();
        let serial = endpoint.begin(step);
        assert_eq!(endpoint.answered(serial, &failed), Answered::Failed(reason));
    }
}

#[test]
fn extents_of_others_are_found_wherever_they_overlap() {
    let extent = |addr, len| Extent { addr, len };
    let mut guests = Guests::new(GuestReports::new(|_, _| {}));
    let mut it = attachment();
    it.extents = vec![extent(100, 50), extent(10, 10), extent(300, 1)];
    guests.attachments.insert(AttachmentKey(1), it);
    for (extents, found) in [
        (vec![extent(0, 10), extent(20, 80), extent(150, 150)], None),
        (vec![extent(301, 10), extent(0, 11)], Some(1)),
        (vec![extent(20, 81), extent(0, 5)], Some(0)),
        (vec![extent(0, 1), extent(120, 1), extent(5, 10)], Some(1)),
        (vec![extent(0, 400)], Some(0)),
        (vec![extent(149, 10), extent(299, 2)], Some(0)),
        (vec![], None),
    ] {
        assert_eq!(guests.find_used(&extents), found, "{extents:?}");
    }
}

#[test]
fn a_vm_goes_on_only_where_all_its_queues_were_stopped() {
    let started = |base, stopped_at| QueueStarted {
        resumed: false,
        base,
        stopped_at,
    };
    for (index, start, goes_on) in [
        (RX, started(5, Some(5)), true),
        (RX, started(6, Some(5)), false),
        (RX, started(0, Some(0)), false),
        (TX, started(5, None), false),
        (EVENT, started(0, Some(0)), true),
        (EVENT, started(1, Some(0)), false),
    ] {
        let mut pause = Pause::default();
        pause.queue_stops(index);
        assert!(!pause.allows());
        assert_eq!(pause.queue_started(index, start), goes_on, "{start:?}");
        // One that was not stopped.
        assert!(pause.queue_started(index, start));
    }
    let mut pause = Pause::default();
    pause.queue_stops(RX);
    pause.queue_stops(TX);
    assert!(pause.queue_started(TX, started(5, Some(5))));
    assert!(!pause.allows());
    pause.replaces_memory = true;
    assert!(pause.queue_started(RX, started(5, Some(5))));
    assert!(!pause.allows());
    pause.replaces_memory = false;
    assert!(pause.allows());
}
