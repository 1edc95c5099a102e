//! The order of the commands to the device of an endpoint, and what their answers mean.

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use zerosock_sys::account::Budget;

use super::super::queue_index::TX;
use super::*;

fn attachment() -> Attachment {
    let file = memfd_create("vm", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, Extent::HUGE_PAGE).unwrap();
    let parent = Arc::new(Memory::of_file(file, Extent::HUGE_PAGE).unwrap());
    let extents = vec![Extent {
        addr: 0,
        len: Extent::HUGE_PAGE,
    }];
    let view = Memory::of_extents(&parent, &extents).unwrap();
    let permit = Budget::unlimited().account().take_nothing();
    let (nonce, token) = (Nonce([0; 32]), Token([0; 16]));
    let mut attachment = Attachment::new(extents, nonce, token, view, permit).unwrap();
    attachment.unchecked = 0..0;
    let device = DeviceAddr {
        worker: 0,
        number: 1,
    };
    let start = Start {
        features: 0,
        queue_size: 1,
        rings: [0; 3],
    };
    attachment.start = Some((device, start));
    attachment
}

/// Takes all steps, and answers each.
fn run(attachment: &mut Attachment, may_run: bool) -> Vec<Step> {
    let mut steps = Vec::new();
    while let Some(step) = attachment.next_step(may_run) {
        attachment.begin(step);
        assert_eq!(attachment.next_step(may_run), None, "one at a time");
        assert!(!attachment.is_at_rest());
        let reply = match step {
            Step::Stop(index) => DeviceReply::Base(10 + index),
            _ => DeviceReply::Done,
        };
        let is_first = attachment.answered(step, &reply).unwrap();
        assert_eq!(is_first, step == start(EVENT, 0));
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
    assert_eq!(run(&mut it, false), []);
    let expected = [
        Step::SetFeatures,
        Step::SetMemory,
        start(RX, 0),
        start(TX, 0),
        start(EVENT, 0),
    ];
    assert_eq!(run(&mut it, true), expected);
    assert!(!it.is_at_rest());
    let stops = [RX, TX, EVENT].map(Step::Stop);
    assert_eq!(run(&mut it, false), stops);
    assert!(it.is_at_rest());
    it.has_memory = false;
    assert_eq!(run(&mut it, false), [Step::SetMemory]);
    let starts = [start(RX, 10), start(TX, 11), start(EVENT, 12)];
    // Not before the pages have shown their values.
    it.check_again();
    assert_eq!(run(&mut it, true), []);
    it.unchecked = 0..0;
    assert_eq!(run(&mut it, true), starts);
    it.end = Some(Reason::REQUESTED);
    assert!(!it.is_over());
    let mut steps = stops.to_vec();
    steps.push(Step::Disconnect);
    assert_eq!(run(&mut it, true), steps);
    assert!(it.is_over());
}

#[test]
fn a_disconnect_at_once_overtakes_and_other_answers_are_ignored() {
    let mut it = attachment();
    run(&mut it, true);
    it.begin(Step::Stop(RX));
    (it.end, it.ends_at_once) = (Some(Reason::DEVICE_RESET), true);
    assert_eq!(it.next_step(true), Some(Step::Disconnect));
    it.begin(Step::Disconnect);
    assert_eq!(it.next_step(true), None);
    let failed = DeviceReply::Failed("overtaken".into());
    assert_eq!(it.answered(Step::Stop(RX), &failed), Ok(false));
    assert!(!it.is_at_rest());
    assert_eq!(it.answered(Step::Disconnect, &DeviceReply::Done), Ok(false));
    assert!(it.is_over());
}

#[test]
fn a_program_that_writes_delays_the_vm_and_one_that_reads_does_not() {
    for queue in [RX, TX] {
        let mut it = attachment();
        run(&mut it, true);
        let view = Arc::clone(&it.view);
        let mut steps = [RX, TX, EVENT].into_iter();
        let stopped = steps.find(|&index| {
            let step = Step::Stop(index);
            it.begin(step);
            let reply = match index == queue {
                true => DeviceReply::Failed("in use".into()),
                false => DeviceReply::Base(1),
            };
            it.answered(step, &reply) == Err(Reason::NOT_STOPPED)
        });
        assert_eq!(stopped, Some(queue));
        it.end = Some(Reason::NOT_STOPPED);
        run(&mut it, false);
        assert!(it.is_at_rest() && !it.is_over());
        let mut guests = Guests::new(reports());
        guests.attachments.insert(AttachmentKey(1), it);
        let waits = matches!(guests.quiesced(), Quiesced::Unknown(_));
        assert_eq!(waits, queue == RX);
        drop(view);
        assert_eq!(guests.quiesced(), Quiesced::Done);
        assert!(guests.attachments[&AttachmentKey(1)].is_over());
    }
}

#[test]
fn failures_end_the_attachment_by_name() {
    let failed = DeviceReply::Failed("no".into());
    for (step, reason) in [
        (Step::SetFeatures, Reason::SERVER_FAILED),
        (Step::SetMemory, Reason::SERVER_FAILED),
        (start(RX, 0), Reason::RINGS),
        (Step::Stop(TX), Reason::NOT_STOPPED),
    ] {
        let mut it = attachment();
        it.begin(step);
        assert_eq!(it.answered(step, &failed), Err(reason));
    }
}

fn reports() -> GuestReports {
    zerosock_sys::mailbox::Mailbox::new().unwrap().0
}

#[test]
fn extents_of_others_are_found_wherever_they_overlap() {
    let extent = |addr, len| Extent { addr, len };
    let mut guests = Guests::new(reports());
    let mut it = attachment();
    it.extents = vec![extent(100, 50), extent(10, 10), extent(300, 1)];
    guests.attachments.insert(AttachmentKey(1), it);
    for (extents, found) in [
        (vec![extent(0, 10), extent(20, 80), extent(150, 150)], None),
        (vec![extent(301, 10), extent(0, 11)], Some(1)),
        (vec![extent(20, 81), extent(0, 5)], Some(0)),
        (vec![extent(0, 1), extent(120, 1), extent(5, 10)], Some(2)),
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
        recovered: 0,
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
