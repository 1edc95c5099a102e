//! Guest endpoints beside what happens to their VM: the pages are checked before the first write, do not change from the
//! first stop of a queue of the VM until it goes on, and never again after the end. Streams outlast a pause, and end with
//! everything else.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use zerosock_proto::Port;
use zerosock_proto::wire::vsock::Op;
use zerosock_ring::DirtyLog;
use zerosock_sys::account::{Budget, Limits};
use zerosock_vhost_user::session::{F_LOG_ALL, F_VERSION_1};
use zerosock_vhost_user::{DeviceCommand, DeviceReply};

use super::guest_orders::{AttachmentKey, GuestEvent, GuestOrder, GuestReports};
use super::guest_test_lab::*;
use super::{EVENT, RX, TX, test_guest};
use crate::registration::key::Nonce;
use crate::registration::page_value::PAGE;
use crate::registration::{REGISTRATION_PORT, Reason, Refusal, Start, Token};
use zerosock_ring::Extent;
use zerosock_virtio::outbox::DeviceAddr;

#[track_caller]
fn assert_ended(event: GuestEvent, of: AttachmentKey, why: Reason) {
    match event {
        GuestEvent::Ended { key, reason } => assert_eq!((key, reason), (of, why)),
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn assert_refused(event: GuestEvent, of: AttachmentKey, reason: Reason, index: u32) {
    let refusal = Err(Refusal { reason, index });
    match event {
        GuestEvent::Checked { key, result } => assert_eq!((key, result), (of, refusal)),
        other => panic!("{other:?}"),
    }
}

/// Whatever the programs and the worker do, no byte of the pages changes.
#[track_caller]
fn assert_still(lab: &mut GuestLab, endpoint: &TestEndpoint, before: &[u8], when: &str) {
    lab.settle();
    let after = read(&endpoint.view);
    let changed = before.iter().zip(&after).position(|(a, b)| a != b);
    assert_eq!(changed, None, "{when}");
}

/// An endpoint and its stream, with bytes of both sides on their way.
fn busy(lab: &mut GuestLab) -> (TestEndpoint, Stream) {
    let mut endpoint = lab.endpoint(&PAGES);
    let mut stream = lab.stream(&mut endpoint);
    lab.exchange(&mut endpoint, &mut stream, 10_000);
    lab.send(&mut endpoint, &mut stream, 1000);
    stream.write(100_000);
    (endpoint, stream)
}

#[test]
fn an_endpoint_exchanges_bytes_with_a_program_of_the_host() {
    let mut lab = GuestLab::new();
    let mut endpoint = lab.endpoint(&PAGES);
    let mut stream = lab.stream(&mut endpoint);
    for _ in 0..20 {
        lab.exchange(&mut endpoint, &mut stream, 40_000);
    }
    // A second endpoint of the same VM.
    let mut other = lab.endpoint(&OTHER_PAGES);
    let mut second = lab.stream(&mut other);
    lab.exchange(&mut other, &mut second, 10_000);
    lab.exchange(&mut endpoint, &mut stream, 10_000);
    lab.no_event();
}

#[test]
fn pages_are_refused_by_name() {
    let mut lab = GuestLab::new();
    let extent = |page, len| Extent {
        addr: page * HUGE,
        len: len * HUGE,
    };
    let unaligned = Extent {
        addr: 4 * HUGE + PAGE,
        len: HUGE,
    };
    let cases = [
        (vec![extent(4, 1), unaligned], Reason::UNALIGNED, 1),
        (vec![extent(11, 2)], Reason::OUTSIDE, 0),
        (vec![extent(4, 2), extent(5, 1)], Reason::OVERLAP, 1),
        (vec![], Reason::BAD_REQUEST, 0),
        (vec![extent(4, 1); 513], Reason::TOO_MANY_EXTENTS, 0),
        // No page has a value.
        (vec![extent(4, 1)], Reason::FAILED, 0),
    ];
    for (extents, reason, index) in cases {
        let key = AttachmentKey(lab.next_number().into());
        let nonce = Nonce([7; 32]);
        lab.order(GuestOrder::Check {
            key,
            extents,
            nonce,
        });
        assert_refused(lab.event(), key, reason, index);
    }
    let before = lab.accepted(&PAGES);
    for pages in [&[7, 4][..], &[3, 7, 6], &[5]] {
        let (key, event) = lab.check(pages);
        let index = pages.iter().position(|page| PAGES.contains(page)).unwrap();
        assert_refused(event, key, Reason::IN_USE, index as u32);
    }
    // One that ends before it is checked.
    let key = lab.order_check(&OTHER_PAGES);
    let reason = Reason::REQUESTED;
    lab.order(GuestOrder::End { key, reason });
    assert_refused(lab.event(), key, reason, 0);
    let key = before.key;
    lab.order(GuestOrder::End { key, reason });
    assert_ended(lab.event(), key, reason);
    let (_, event) = lab.check(&[5]);
    assert!(matches!(
        event,
        GuestEvent::Checked {
            result: Ok(HUGE),
            ..
        }
    ));
    lab.no_event();
}

#[test]
fn a_page_of_another_place_of_the_list_is_found() {
    let mut lab = GuestLab::new();
    let (extents, _) = lab.view(&[5, 4, 6]);
    // The values are those of another order.
    let key = lab.order_check(&PAGES);
    assert!(matches!(
        lab.event(),
        GuestEvent::Checked { result: Ok(_), .. }
    ));
    let reason = Reason::REQUESTED;
    lab.order(GuestOrder::End { key, reason });
    assert_ended(lab.event(), key, reason);
    let key = AttachmentKey(100);
    let nonce = Nonce([1; 32]);
    lab.order(GuestOrder::Check {
        key,
        extents,
        nonce,
    });
    assert_refused(lab.event(), key, Reason::FAILED, 0);
}

#[test]
fn a_vm_without_running_queues_has_no_endpoint() {
    let mut lab = GuestLab::new();
    lab.done(DeviceCommand::ResetDevice);
    let (key, event) = lab.check(&PAGES);
    assert_refused(event, key, Reason::NOT_READY, 0);
    lab.start_queue(RX, 0);
    let (key, event) = lab.check(&PAGES);
    assert_refused(event, key, Reason::NOT_READY, 0);
}

#[test]
fn queues_that_do_not_lie_in_the_pages_are_refused() {
    let rings = [test_guest::RX, test_guest::TX, test_guest::EVENT];
    let start = |rings| Start {
        features: F_VERSION_1,
        queue_size: test_guest::SIZE,
        rings,
    };
    let good = start(rings);
    let cases = [
        (start([rings[0], rings[1], 3 * HUGE - 64]), Reason::RINGS),
        (start([rings[0], rings[1], u64::MAX - 8]), Reason::RINGS),
        (start([rings[0], rings[1], rings[1] + 64]), Reason::RINGS),
        (start([rings[0] + 1, rings[1], rings[2]]), Reason::RINGS),
        (
            Start {
                queue_size: 100,
                ..good
            },
            Reason::RINGS,
        ),
        (
            Start {
                queue_size: 0,
                ..good
            },
            Reason::RINGS,
        ),
        (
            Start {
                features: 0,
                ..good
            },
            Reason::BAD_REQUEST,
        ),
        (
            Start {
                features: u64::MAX,
                ..good
            },
            Reason::BAD_REQUEST,
        ),
    ];
    let mut lab = GuestLab::new();
    for (start, reason) in cases {
        let endpoint = lab.accepted(&PAGES);
        let before = read(&endpoint.view);
        let key = endpoint.key;
        lab.order(GuestOrder::Start { key, start });
        assert_ended(lab.event(), key, reason);
        assert_still(&mut lab, &endpoint, &before, "refused");
    }
    // A second order to start.
    let endpoint = lab.endpoint(&PAGES);
    lab.order_start(&endpoint);
    assert_ended(lab.event(), endpoint.key, Reason::BAD_REQUEST);
}

#[test]
fn pages_do_not_change_in_a_pause_and_the_stream_goes_on() {
    let mut lab = GuestLab::new();
    let (mut endpoint, mut stream) = busy(&mut lab);
    for round in 0..3 {
        let mut bases = [0; 3];
        bases[0] = lab.stop_queue(RX);
        let before = read(&endpoint.view);
        stream.write(1000);
        assert_still(&mut lab, &endpoint, &before, "one queue stopped");
        bases[1] = lab.stop_queue(TX);
        bases[2] = lab.stop_queue(EVENT);
        stream.write(1000);
        if round == 1 {
            lab.set_memory(RAM);
        }
        assert_still(&mut lab, &endpoint, &before, "paused");
        lab.start_queue(RX, bases[0]);
        lab.start_queue(EVENT, bases[2]);
        assert_still(&mut lab, &endpoint, &before, "one queue still stopped");
        lab.start_queue(TX, bases[1]);
        lab.finish_to_endpoint(&mut endpoint, &mut stream);
        lab.finish_from_endpoint(&mut stream);
        lab.exchange(&mut endpoint, &mut stream, 10_000);
        lab.send(&mut endpoint, &mut stream, 500);
        stream.write(50_000);
    }
    lab.no_event();
}

/// A VMM that stops and starts one queue only, as some do to change its descriptors.
#[test]
fn one_queue_that_stops_is_a_pause_too() {
    let mut lab = GuestLab::new();
    let (mut endpoint, mut stream) = busy(&mut lab);
    let base = lab.stop_queue(EVENT);
    let before = read(&endpoint.view);
    assert_still(&mut lab, &endpoint, &before, "one queue stopped");
    lab.start_queue(EVENT, base);
    lab.finish_to_endpoint(&mut endpoint, &mut stream);
    lab.no_event();
}

#[test]
fn what_is_ordered_in_a_pause_is_done_after_it() {
    let mut lab = GuestLab::new();
    let mut endpoint = lab.accepted(&PAGES);
    lab.open_doorbell(endpoint.doorbell, &endpoint.token.0);
    let bases = lab.pause();
    lab.order_start(&endpoint);
    let key = lab.order_check(&OTHER_PAGES);
    let before = read(&endpoint.view);
    lab.no_event();
    assert_still(&mut lab, &endpoint, &before, "paused");
    lab.resume(bases);
    let events = [lab.event(), lab.event()];
    let started =
        |it: &GuestEvent| matches!(it, GuestEvent::Started { key } if *key == endpoint.key);
    let checked = |it: &GuestEvent| matches!(it, GuestEvent::Checked { key: of, result: Ok(_) } if *of == key);
    assert!(
        events.iter().any(started) && events.iter().any(checked),
        "{events:?}"
    );
    let mut stream = lab.stream(&mut endpoint);
    lab.exchange(&mut endpoint, &mut stream, 10_000);
}

/// Bases that are not those of the stop, or are 0.
#[test]
fn another_base_ends_the_endpoint_before_it_is_touched_again() {
    for (queue, base) in [
        (RX, |base: u16| base.wrapping_add(1)),
        (TX, |base: u16| base.wrapping_add(1)),
        (RX, |_| 0),
        (TX, |_| 0),
        (EVENT, |base: u16| base.wrapping_add(1)),
    ] as [(u16, fn(u16) -> u16); 5]
    {
        let mut lab = GuestLab::new();
        let (endpoint, mut stream) = busy(&mut lab);
        let bases = lab.pause();
        let before = read(&endpoint.view);
        let base = base(bases[usize::from(queue)]);
        lab.start_queue(queue, base);
        assert_still(&mut lab, &endpoint, &before, "started elsewhere");
        assert_ended(lab.event(), endpoint.key, Reason::DEVICE_RESET);
        stream.try_write(1000);
        assert_still(&mut lab, &endpoint, &before, "ended");
        stream.ended(&mut lab);
    }
}

#[test]
fn a_page_without_its_value_ends_the_endpoint() {
    for page in 0..PAGES.len() as u64 {
        let mut lab = GuestLab::new();
        let (endpoint, mut stream) = busy(&mut lab);
        let bases = lab.pause();
        endpoint.lose_value(page);
        let before = read(&endpoint.view);
        lab.resume(bases);
        assert_ended(lab.event(), endpoint.key, Reason::MEMORY_CHANGED);
        assert_still(&mut lab, &endpoint, &before, "ended");
        stream.ended(&mut lab);
    }
}

#[test]
fn the_same_memory_table_while_queues_run_changes_nothing() {
    let mut lab = GuestLab::new();
    let (mut endpoint, mut stream) = busy(&mut lab);
    for _ in 0..5 {
        lab.set_memory(RAM);
        lab.finish_to_endpoint(&mut endpoint, &mut stream);
        stream.write(10_000);
    }
    lab.finish_to_endpoint(&mut endpoint, &mut stream);
    lab.finish_from_endpoint(&mut stream);
    lab.exchange(&mut endpoint, &mut stream, 10_000);
    lab.no_event();
}

#[test]
fn memory_without_the_pages_ends_the_endpoint() {
    for paused in [false, true] {
        let mut lab = GuestLab::new();
        let (endpoint, mut stream) = busy(&mut lab);
        if paused {
            lab.pause();
        }
        // Without the last of its pages.
        lab.set_memory(6 * HUGE);
        let before = read(&endpoint.view);
        assert_ended(lab.event(), endpoint.key, Reason::MEMORY_CHANGED);
        assert_still(&mut lab, &endpoint, &before, "ended");
        stream.ended(&mut lab);
    }
}

#[test]
fn a_reset_and_a_disconnect_end_the_endpoint_before_they_are_answered() {
    for (command, reason) in [
        (DeviceCommand::ResetDevice, Reason::DEVICE_RESET),
        (DeviceCommand::Disconnected, Reason::FRONTEND_GONE),
    ] {
        for paused in [false, true] {
            let mut lab = GuestLab::new();
            let (endpoint, mut stream) = busy(&mut lab);
            let other = lab.accepted(&OTHER_PAGES);
            if paused {
                lab.pause();
            }
            let command = match command {
                DeviceCommand::ResetDevice => DeviceCommand::ResetDevice,
                _ => DeviceCommand::Disconnected,
            };
            let answer = lab.command(command);
            let before = lab.until("an answer", |_| {
                let answer = answer.try_recv().ok()?;
                assert_eq!(answer, DeviceReply::Done);
                Some(read(&endpoint.view))
            });
            stream.try_write(1000);
            assert_still(&mut lab, &endpoint, &before, "answered");
            let mut ended = [lab.event(), lab.event()].map(|event| match event {
                GuestEvent::Ended { key, reason } => (key, reason.0),
                other => panic!("{other:?}"),
            });
            ended.sort_unstable();
            assert_eq!(ended, [endpoint.key, other.key].map(|key| (key, reason.0)));
            stream.ended(&mut lab);
            lab.no_event();
            if reason == Reason::FRONTEND_GONE {
                lab.vm = super::test_guest::Guest::on(cid(VM), lab.view(&[0, 1, 2]).1, |_| true);
                lab.connect_vm();
                // The pages are free.
                lab.accepted(&PAGES);
            }
        }
    }
}

#[test]
fn a_vm_that_is_removed_leaves_no_queue_of_an_endpoint() {
    let mut lab = GuestLab::new();
    let (endpoint, mut stream) = busy(&mut lab);
    lab.remove_device(VM);
    let before = read(&endpoint.view);
    stream.try_write(1000);
    assert_still(&mut lab, &endpoint, &before, "removed");
    stream.ended(&mut lab);
}

#[test]
fn an_order_ends_the_endpoint_at_any_stage() {
    let mut lab = GuestLab::new();
    let reason = Reason::REQUESTED;
    for stage in 0..5 {
        let (endpoint, stream) = match stage {
            0 => (lab.accepted(&PAGES), None),
            1 => {
                let endpoint = lab.accepted(&PAGES);
                lab.open_doorbell(endpoint.doorbell, &endpoint.token.0);
                (endpoint, None)
            }
            2 => {
                // The commands that start it are on their way.
                let endpoint = lab.accepted(&PAGES);
                lab.order_start(&endpoint);
                (endpoint, None)
            }
            3 => (lab.endpoint(&PAGES), None),
            _ => {
                let (endpoint, stream) = busy(&mut lab);
                (endpoint, Some(stream))
            }
        };
        let key = endpoint.key;
        lab.order(GuestOrder::End { key, reason });
        let before = lab.until("the end", |lab| match lab.try_event()? {
            GuestEvent::Started { .. } => None,
            event => {
                assert_ended(event, key, reason);
                Some(read(&endpoint.view))
            }
        });
        assert_still(&mut lab, &endpoint, &before, "ended");
        if let Some(mut stream) = stream {
            stream.ended(&mut lab);
        }
        // Once.
        lab.order(GuestOrder::End { key, reason });
        lab.no_event();
        lab.remove_device(key.0 as u32);
    }
}

/// The timer for pages to check replaces that for an attachment that ends.
#[test]
fn a_device_has_one_timer_for_its_attachments() {
    let mut lab = GuestLab::new();
    let endpoint = lab.endpoint(&PAGES);
    let now = lab.worker.clock().now();
    let (device, _) = lab.worker.lend(endpoint.number, now);
    let held = device.unwrap().queues.memory.clone().unwrap();
    let (key, reason) = (endpoint.key, Reason::REQUESTED);
    lab.order(GuestOrder::End { key, reason });
    lab.settle();
    for _ in 0..5 {
        let other = lab.order_check(&OTHER_PAGES);
        let event = lab.until("the check", |lab| {
            let (device, _) = lab.worker.lend(VM, now);
            assert_eq!(device.unwrap().timers.len(), 1);
            lab.try_event()
        });
        assert!(matches!(event, GuestEvent::Checked { result: Ok(_), .. }));
        lab.order(GuestOrder::End { key: other, reason });
        assert_ended(lab.event(), other, reason);
    }
    drop(held);
    assert_ended(lab.event(), key, reason);
}

/// Something else that has the memory delays the end.
#[test]
fn the_end_is_reported_when_nothing_has_the_memory() {
    let mut lab = GuestLab::new();
    let endpoint = lab.endpoint(&PAGES);
    let now = lab.worker.clock().now();
    let (device, _) = lab.worker.lend(endpoint.key.0 as u32, now);
    let held = device.unwrap().queues.memory.clone().unwrap();
    let (key, reason) = (endpoint.key, Reason::REQUESTED);
    lab.order(GuestOrder::End { key, reason });
    lab.no_event();
    // Nor may another attachment have the pages.
    let (other, event) = lab.check(&[4]);
    assert_refused(event, other, Reason::IN_USE, 0);
    // It survives a change of the VM's memory.
    lab.set_memory(RAM);
    lab.no_event();
    drop(held);
    assert_ended(lab.event(), key, reason);
}

#[test]
fn memory_that_vanishes_ends_the_endpoint() {
    zerosock_sys::sigbus::install().unwrap();
    let mut lab = GuestLab::with(false);
    let (endpoint, mut stream) = busy(&mut lab);
    rustix::fs::ftruncate(&lab.ram, 3 * HUGE).unwrap();
    stream.try_write(1000);
    assert_ended(lab.event(), endpoint.key, Reason::MEMORY_LOST);
    stream.ended(&mut lab);
}

/// A log of the VM, and its file.
fn log() -> (OwnedFd, Arc<DirtyLog>) {
    let len = RAM / PAGE / 8;
    let file = zerosock_sys::memfd::create("log", len, true).unwrap();
    let log = DirtyLog::map(file.as_fd(), 0, len, None).unwrap();
    (file, Arc::new(log))
}

fn marks(file: &OwnedFd) -> Vec<u8> {
    let mut bits = vec![0; (RAM / PAGE / 8) as usize];
    rustix::io::pread(file, &mut bits[..], 0).unwrap();
    bits
}

/// Asserts that all pages of the endpoint that have changed are marked. Returns how many there are.
#[track_caller]
fn assert_marked(endpoint: &TestEndpoint, before: &[u8], after: &[u8], bits: &[u8]) -> usize {
    let changed = (0..after.len()).step_by(PAGE as usize).filter(|&at| {
        let page = at..at + PAGE as usize;
        before[page.clone()] != after[page]
    });
    let mut count = 0;
    for at in changed {
        let extent = endpoint.extents[at / HUGE as usize];
        let page = (extent.addr + at as u64 % HUGE) / PAGE;
        let is_marked = bits[(page / 8) as usize] & 1 << (page % 8) != 0;
        assert!(is_marked, "page {page:#x}");
        count += 1;
    }
    count
}

#[test]
fn changed_pages_are_marked_in_the_log_of_the_vm() {
    let mut lab = GuestLab::new();
    let (mut endpoint, mut stream) = busy(&mut lab);
    let mut before = read(&endpoint.view);
    for round in 0..2 {
        let (file, log) = log();
        lab.done(DeviceCommand::SetLog(log));
        if round == 0 {
            lab.done(DeviceCommand::SetFeatures(F_VERSION_1 | F_LOG_ALL));
        }
        lab.finish_to_endpoint(&mut endpoint, &mut stream);
        lab.exchange(&mut endpoint, &mut stream, 20_000);
        stream.write(10_000);
        let bases = lab.pause();
        let after = read(&endpoint.view);
        let bits = marks(&file);
        let count = assert_marked(&endpoint, &before, &after, &bits);
        assert!(count > 5, "{count}");
        // Nothing of other pages. After a pause of the VM, the next log has all pages marked.
        let page = 9 * HUGE / PAGE;
        assert_eq!(bits[(page / 8) as usize] == 0, round == 0);
        before = after;
        lab.resume(bases);
    }
    lab.no_event();
}

/// The VM stops before the endpoint's device has the log.
#[test]
fn a_stop_that_overtakes_the_log_leaves_no_page_unmarked() {
    let mut lab = GuestLab::new();
    let (endpoint, mut stream) = busy(&mut lab);
    lab.settle();
    let (file, log) = log();
    let before = read(&endpoint.view);
    stream.write(1000);
    lab.command(DeviceCommand::SetLog(log));
    lab.command(DeviceCommand::SetFeatures(F_VERSION_1 | F_LOG_ALL));
    lab.pause();
    let after = read(&endpoint.view);
    let count = assert_marked(&endpoint, &before, &after, &marks(&file));
    assert!(count > 0, "the endpoint has written nothing");
}

/// A VM may be paused for as long as its user likes: its endpoints do not end with the time limit of connections.
#[test]
fn a_pause_beyond_the_time_limit_ends_nothing() {
    let mut lab = GuestLab::new();
    let (mut endpoint, mut stream) = busy(&mut lab);
    let bases = lab.pause();
    // The limit of the VM is a millisecond.
    lab.no_event();
    lab.no_event();
    lab.resume(bases);
    lab.finish_to_endpoint(&mut endpoint, &mut stream);
    lab.exchange(&mut endpoint, &mut stream, 10_000);
    lab.no_event();
}

/// An attachment that has ended, and of which something still has the memory, does not keep connections open.
#[test]
fn connections_end_with_the_time_limit_behind_an_attachment_that_has_ended() {
    let mut lab = GuestLab::new();
    let endpoint = lab.endpoint(&PAGES);
    lab.vm.send(1023, host(REGISTRATION_PORT), Op::Request, 0);
    lab.expect(1023, Op::Response);
    let GuestEvent::Stream(stream) = lab.event() else {
        panic!("no stream");
    };
    let now = lab.worker.clock().now();
    let (device, _) = lab.worker.lend(endpoint.number, now);
    let held = device.unwrap().queues.memory.clone().unwrap();
    lab.pause();
    lab.no_event();
    let mut byte = [0];
    let mut ends = || rustix::io::read(&stream, &mut byte) == Ok(0);
    assert!(!ends());
    let (key, reason) = (endpoint.key, Reason::REQUESTED);
    lab.order(GuestOrder::End { key, reason });
    lab.until("the end of the stream", |_| ends().then_some(()));
    drop(held);
    assert_ended(lab.event(), key, reason);
}

#[test]
fn orders_for_attachments_that_do_not_exist_do_nothing() {
    let mut lab = GuestLab::new();
    let endpoint = lab.accepted(&PAGES);
    let (key, reason) = (AttachmentKey(99), Reason::REQUESTED);
    let (device, token) = (
        DeviceAddr {
            worker: 0,
            number: 7,
        },
        Token([1; 16]),
    );
    lab.order(GuestOrder::Accept { key, device, token });
    let other = TestEndpoint { key, ..endpoint };
    lab.order_start(&other);
    lab.order(GuestOrder::End { key, reason });
    lab.no_event();
}

#[test]
fn the_descriptors_of_an_endpoint_are_charged_to_the_vm() {
    let mut lab = GuestLab::new();
    let account = |lab: &mut GuestLab| {
        let now = lab.worker.clock().now();
        lab.worker.lend(VM, now).0.unwrap().account.clone()
    };
    let before = account(&mut lab).descriptors();
    let endpoint = lab.accepted(&PAGES);
    lab.settle();
    assert_eq!(account(&mut lab).descriptors(), before + 7);
    let (key, reason) = (endpoint.key, Reason::REQUESTED);
    lab.order(GuestOrder::End { key, reason });
    assert_ended(lab.event(), key, reason);
    assert_eq!(account(&mut lab).descriptors(), before);
    // One less than it needs.
    let limits = Limits {
        descriptors: 6,
        ..Budget::unlimited().limits()
    };
    let now = lab.worker.clock().now();
    let (device, _) = lab.worker.lend(VM, now);
    device
        .unwrap()
        .set_account(Budget::new(limits, 1).account());
    let endpoint = lab.accepted(&OTHER_PAGES);
    assert_ended(lab.event(), endpoint.key, Reason::FULL);
}

/// The time limits of agents do not run while the VM is stopped, and a reset opens a port that was shut.
#[test]
fn stops_and_resets_of_the_vm_are_reported_once() {
    let mut lab = GuestLab::new();
    let next = |lab: &mut GuestLab| {
        lab.no_event();
        std::mem::take(&mut lab.phases)
    };
    assert_eq!(next(&mut lab), ["running"]);
    // So that no queue stops at 0.
    lab.vm.send(1023, host(Port::new(1)), Op::Request, 0);
    lab.expect(1023, Op::Rst);
    let bases = lab.pause();
    // Longer than connections outlast.
    assert_eq!(next(&mut lab), ["stopped"]);
    lab.resume(bases);
    assert_eq!(next(&mut lab), ["running"]);
    // Another driver, without and with a reset that the VMM tells of.
    lab.pause();
    lab.vm = super::test_guest::Guest::on(cid(VM), lab.view(&[0, 1, 2]).1, |_| true);
    lab.resume([0; 3]);
    assert_eq!(next(&mut lab), ["stopped", "reset", "running"]);
    // A driver of which the event queue starts first, after one that has used it.
    lab.stop_queue(EVENT);
    lab.start_queue(EVENT, 1);
    assert_eq!(next(&mut lab), ["stopped", "reset", "running"]);
    lab.stop_queue(EVENT);
    lab.start_queue(EVENT, 0);
    assert_eq!(next(&mut lab), ["stopped", "reset", "running"]);
    lab.done(DeviceCommand::ResetDevice);
    assert_eq!(next(&mut lab), ["reset"]);
    lab.done(DeviceCommand::Disconnected);
    lab.vm = super::test_guest::Guest::on(cid(VM), lab.view(&[0, 1, 2]).1, |_| true);
    lab.connect_vm();
    assert_eq!(next(&mut lab), ["running"]);
    lab.done(DeviceCommand::Disconnected);
    assert_eq!(next(&mut lab), ["reset"]);
}

#[test]
fn the_ports_close_and_open_while_the_vm_runs() {
    let mut lab = GuestLab::new();
    let mut port = 900;
    let mut connect = |lab: &mut GuestLab| {
        port += 1;
        lab.vm.send(port, host(REGISTRATION_PORT), Op::Request, 0);
        lab.packet(port).0.op.known()
    };
    assert_eq!(connect(&mut lab), Some(Op::Response));
    let GuestEvent::Stream(_open) = lab.event() else {
        panic!("no stream");
    };
    lab.order(GuestOrder::Allow(None));
    assert_eq!(connect(&mut lab), Some(Op::Rst));
    lab.no_event();
    let (report, _reports) = std::sync::mpsc::channel();
    let reports = GuestReports::new(move |cid, event| drop(report.send((cid, event))));
    lab.order(GuestOrder::Allow(Some(reports)));
    assert_eq!(connect(&mut lab), Some(Op::Response));
    assert!(matches!(lab.event(), GuestEvent::Stream(_)));
}
