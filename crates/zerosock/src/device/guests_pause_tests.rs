//! Guest endpoints in a pause of their VM, with other memory, and with its log: the pages do not change from the first
//! stop of a queue of the VM until it goes on where it was stopped. Streams outlast that, and end with everything else.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use zerosock_proto::Port;
use zerosock_proto::wire::vsock::Op;
use zerosock_ring::DirtyLog;
use zerosock_vhost_user::DeviceCommand;
use zerosock_vhost_user::session::{F_LOG_ALL, F_VERSION_1};

use super::guest_orders::{GuestEvent, GuestOrder};
use super::guest_test_lab::*;
use super::{EVENT, RX, TX};
use crate::registration::page_value::PAGE;
use crate::registration::{REGISTRATION_PORT, Reason};

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
        // All pages of the endpoint, and nothing of others. After a pause of the VM, the next log has all pages marked.
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

/// A reset opens a port that was shut, and a pause does not.
#[test]
fn resets_of_the_vm_are_reported_and_pauses_are_not() {
    let mut lab = GuestLab::new();
    let reset = |lab: &mut GuestLab| {
        lab.no_event();
        std::mem::take(&mut lab.resets) > 0
    };
    assert!(reset(&mut lab), "the first driver");
    // So that no queue stops at 0.
    lab.vm.send(1023, host(Port::new(1)), Op::Request, 0);
    lab.expect(1023, Op::Rst);
    let bases = lab.pause();
    // Longer than connections outlast.
    assert!(!reset(&mut lab));
    lab.resume(bases);
    assert!(!reset(&mut lab));
    // Another driver, without and with a reset that the VMM tells of.
    lab.pause();
    lab.vm = super::test_guest::Guest::on(cid(VM), lab.view(&[0, 1, 2]).1, |_| true);
    lab.resume([0; 3]);
    assert!(reset(&mut lab));
    // A driver of which the event queue starts first, after one that has used it.
    lab.stop_queue(EVENT);
    lab.start_queue(EVENT, 1);
    assert!(reset(&mut lab));
    lab.done(DeviceCommand::ResetDevice);
    lab.vm = super::test_guest::Guest::on(cid(VM), lab.view(&[0, 1, 2]).1, |_| true);
    lab.resume([0; 3]);
    assert!(reset(&mut lab));
    lab.done(DeviceCommand::Disconnected);
    lab.vm = super::test_guest::Guest::on(cid(VM), lab.view(&[0, 1, 2]).1, |_| true);
    lab.connect_vm();
    assert!(reset(&mut lab));
}
