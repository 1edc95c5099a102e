//! Guest endpoints beside what happens to their VM: pages and queues are checked before the first write, and the pages
//! never change after the end.

use zerosock_proto::wire::vsock::Op;
use zerosock_ring::Extent;
use zerosock_sys::account::{Budget, Limits};
use zerosock_vhost_user::session::F_VERSION_1;
use zerosock_vhost_user::{DeviceCommand, DeviceReply};
use zerosock_virtio::mailbox::Mailbox;

use super::guest_orders::{AttachmentKey, GuestEvent, GuestOrder};
use super::guest_test_lab::*;
use super::{RX, test_guest};
use crate::registration::key::Nonce;
use crate::registration::page_value::PAGE;
use crate::registration::{REGISTRATION_PORT, Reason, Start, Token};

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
            token: Token([1; 16]),
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
    assert!(matches!(event, GuestEvent::Checked { result: Ok(()), .. }));
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
        token: Token([1; 16]),
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
        let (key, device) = (endpoint.key, addr(endpoint.number));
        lab.order(GuestOrder::Start { key, device, start });
        assert_ended(lab.event(), key, reason);
        assert_still(&mut lab, &endpoint, &before, "refused");
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

#[test]
fn orders_for_attachments_that_do_not_exist_do_nothing() {
    let mut lab = GuestLab::new();
    let endpoint = lab.accepted(&PAGES);
    let (key, reason) = (AttachmentKey(99), Reason::REQUESTED);
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
    let (key, event) = lab.check(&OTHER_PAGES);
    assert_refused(event, key, Reason::FULL, 0);
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
    let (reports, _inbox) = Mailbox::new().unwrap();
    lab.order(GuestOrder::Allow(Some(reports)));
    assert_eq!(connect(&mut lab), Some(Op::Response));
    assert!(matches!(lab.event(), GuestEvent::Stream(_)));
}
