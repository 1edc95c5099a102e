//! Front-ends that connect and disconnect, and shutdown of the control thread.

use std::os::fd::AsFd;

use zerosock_vhost_user::{DeviceCommand, FrontendFault};

use super::fake::*;

#[test]
fn front_ends_reconnect_any_number_of_times() {
    let (lab, worker) = Harness::one();
    let commands = worker.answer_all();
    for _ in 0..50 {
        start(&lab.raw(0));
        wait_for(&commands, "Connected");
        wait_for(&commands, "Disconnected");
    }
    assert_eq!(lab.control.stats(0).unwrap().connections, 50);
}

#[test]
fn a_front_end_may_disconnect_within_any_message() {
    let (lab, worker) = Harness::one();
    let commands = worker.answer_all();
    let whole = start_sequence().len();
    for messages in 0..=whole {
        // Then a part of the next message: none, half a header, the header, all but a byte.
        for part in 0..4 {
            let raw = lab.raw(0);
            for (at, (request, payload, fds)) in start_sequence().into_iter().enumerate() {
                let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
                if at < messages {
                    raw.send(request, 0, &payload, &fds);
                    continue;
                }
                let mut bytes = header(request, 1, payload.len() as u32).to_vec();
                bytes.extend(payload);
                let end = [0, 6, 12, bytes.len() - 1][part];
                if end > 0 {
                    raw.send_bytes(&bytes[..end], &fds).unwrap();
                }
                break;
            }
            drop(raw);
            wait_for(&commands, "Connected");
            wait_for(&commands, "Disconnected");
        }
    }
    start(&lab.raw(0));
}

#[test]
fn the_next_front_end_waits_until_disconnected_is_answered() {
    let (lab, worker) = Harness::one();
    let first = lab.raw(0);
    worker.done("Connected");
    drop(first);
    let (_, let_go) = worker.expect("Disconnected");
    let second = lab.raw(0);
    // A third front-end is turned away. After that, the second one has been accepted.
    let third = lab.raw(0);
    third.expect_end();
    assert!(worker.is_quiet());
    let_go.done();
    worker.done("Connected");
    second.ping();
    assert_eq!(lab.control.stats(0).unwrap().faults(FrontendFault::Busy), 1);
    let _commands = worker.answer_all();
}

#[test]
fn a_second_front_end_is_turned_away() {
    let (lab, worker) = Harness::one();
    let _commands = worker.answer_all();
    let first = lab.raw(0);
    first.ping();
    let second = lab.raw(0);
    second.expect_end();
    first.ping();
    assert_eq!(lab.control.stats(0).unwrap().faults(FrontendFault::Busy), 1);
}

#[test]
fn a_front_end_may_disconnect_during_a_command() {
    let (lab, mut workers) = Harness::new(2);
    let _second = workers.remove(1).answer_all();
    let worker = workers.remove(0);
    let raw = lab.raw(0);
    let (_, slow) = worker.expect("Connected");
    lab.raw(1).ping();
    drop(raw);
    // At once, though the first command is unanswered.
    let (_, let_go) = worker.expect("Disconnected");
    slow.done();
    let raw = lab.raw(0);
    lab.raw(1).ping();
    assert!(
        worker.is_quiet(),
        "the answer to Connected is not taken for that to Disconnected"
    );
    let_go.done();
    worker.done("Connected");
    raw.ping();
    // The same with a queue that is being stopped.
    let _commands = worker.answer_all();
}

#[test]
fn a_worker_can_close_the_connection_and_only_that_one() {
    let (lab, worker) = Harness::one();
    let raw = lab.raw(0);
    let DeviceCommand::Connected { link } = worker.done("Connected") else {
        panic!()
    };
    raw.ping();
    link.close("guest memory has vanished");
    raw.expect_end();
    worker.done("Disconnected");
    let raw = lab.raw(0);
    worker.done("Connected");
    link.close("too late");
    raw.ping();
    raw.ping();
    let _commands = worker.answer_all();
}

#[test]
fn a_worker_that_refuses_connected_ends_the_connection() {
    let (lab, worker) = Harness::one();
    let raw = lab.raw(0);
    worker.expect("Connected").1.failed("full");
    raw.expect_end();
    worker.done("Disconnected");
    let raw = lab.raw(0);
    worker.done("Connected");
    raw.ping();
    let _commands = worker.answer_all();
}

#[test]
fn shutdown_disconnects_all_front_ends_and_joins() {
    let (lab, workers) = Harness::new(3);
    let commands: Vec<_> = workers.into_iter().map(Worker::answer_all).collect();
    let fronts: Vec<_> = (0..2).map(|vm| lab.raw(vm)).collect();
    fronts.iter().for_each(Raw::ping);
    start(&fronts[0]);
    fronts[1].send_bytes(&[1, 0], &[]).unwrap();
    lab.control.shutdown();
    for (front, commands) in fronts.iter().zip(&commands) {
        front.expect_end();
        wait_for(commands, "Disconnected");
    }
    // The third VM had no front-end, so its worker gets no command.
    assert!(commands[2].recv_timeout(DEADLINE).is_err());
}

#[test]
fn a_silent_front_end_is_disconnected_after_ten_seconds_and_other_vms_are_served() {
    let (lab, mut workers) = Harness::new(2);
    let _neighbour = workers.remove(1).answer_all();
    let _commands = workers.remove(0).answer_all();
    let silent = lab.raw(0);
    let waiting = lab.raw(0);
    waiting.0.set_read_timeout(Some(4 * DEADLINE)).unwrap();
    lab.raw(1).ping();
    // Returns after the silent front-end was disconnected.
    waiting.ping();
    silent.expect_end();
    assert_eq!(
        lab.control.stats(0).unwrap().faults(FrontendFault::Silent),
        1
    );
    assert_eq!(lab.control.stats(0).unwrap().faults(FrontendFault::Busy), 0);
    lab.raw(1).ping();
}
