//! Bad messages are refused and counted, and do not disturb other VMs.

use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};

use zerosock_vhost_user::{DeviceCommand, FrontendFault};

use super::fake::*;

pub(crate) fn faults(lab: &Harness, fault: FrontendFault) -> u64 {
    lab.control.stats(0).unwrap().faults(fault)
}

#[test]
fn a_queue_with_rings_that_overlap_a_running_queue_is_not_started() {
    let (lab, worker) = Harness::one();
    let commands = worker.answer_all();
    let raw = lab.raw(0);
    start(&raw);
    let kick = event();
    let begin = |desc: u64| {
        raw.send(8, 0, &state(2, 64), &[]);
        let all = addresses(2, desc, USER + 0x22000, USER + 0x21000);
        raw.send(9, 0, &all, &[]);
        raw.send(12, NEED_REPLY, &u64s(&[2]), &[kick.as_fd()]);
        raw.reply_u64(12)
    };
    // The last of 128 descriptors, and the end of a used ring of 1030 bytes, of queues 0 and 1.
    for desc in [USER, USER + 127 * 16, USER + 0x1_2000 + 1024] {
        assert_eq!(begin(desc), 1, "{desc:#x}");
    }
    assert_eq!(faults(&lab, FrontendFault::Payload), 3);
    assert_eq!(begin(USER + 128 * 16), 0, "they may touch");
    let starts = commands.try_iter();
    let started = |command: &DeviceCommand| matches!(command, DeviceCommand::StartQueue { .. });
    assert_eq!(starts.filter(started).count(), 3);
}

#[test]
fn a_running_queue_cannot_be_changed() {
    let (lab, worker) = Harness::one();
    let commands = worker.answer_all();
    let raw = lab.raw(0);
    start(&raw);
    let kick = event();
    let changes: [(u32, Vec<u8>, Option<&OwnedFd>); 5] = [
        (8, state(0, 64), None),
        (9, addresses(0, USER, USER + 0x4000, USER + 0x1000), None),
        (10, state(0, 1), None),
        (12, u64s(&[0]), Some(&kick)),
        (2, u64s(&[1 << 32]), None),
    ];
    for (request, payload, fd) in changes {
        let fds: Vec<_> = fd.into_iter().map(|fd| fd.as_fd()).collect();
        raw.send(request, NEED_REPLY, &payload, &fds);
        assert_eq!(raw.reply_u64(request), 1, "request {request}");
    }
    assert_eq!(faults(&lab, FrontendFault::Order), 5);
    // An unchanged queue can be stopped; then it can be changed.
    raw.send(11, 0, &state(0, 0), &[]);
    assert_eq!(raw.reply(), (11, state(0, 77)));
    raw.send(8, NEED_REPLY, &state(0, 64), &[]);
    assert_eq!(raw.reply_u64(8), 0);
    wait_for(&commands, "StopQueue");
}

#[test]
fn wrong_values_are_refused_and_the_session_continues() {
    let (lab, worker) = Harness::one();
    let _commands = worker.answer_all();
    let raw = lab.raw(0);
    raw.send(16, 0, &u64s(&[PROTOCOL]), &[]);
    let file = memory(MEMORY);
    let event = event();
    let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    let epoll = rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC).unwrap();
    let (_reader, pipe) = rustix::pipe::pipe().unwrap();
    let (file, event) = (file.as_fd(), event.as_fd());
    let (socket, epoll, pipe) = (socket.as_fd(), epoll.as_fd(), pipe.as_fd());
    let one = |region: [u64; 4]| table(&[region]);
    let good = [0, MEMORY, USER, 0];
    type Case<'a> = (
        FrontendFault,
        u32,
        Vec<u8>,
        Vec<std::os::fd::BorrowedFd<'a>>,
    );
    let cases: Vec<Case<'_>> = vec![
        // Sizes of queues.
        (FrontendFault::Payload, 8, state(0, 0), vec![]),
        (FrontendFault::Payload, 8, state(0, 100), vec![]),
        (FrontendFault::Payload, 8, state(0, 2048), vec![]),
        (FrontendFault::Payload, 8, state(0, 65536), vec![]),
        (FrontendFault::Payload, 8, state(0, 65536 + 64), vec![]),
        (FrontendFault::Payload, 8, state(3, 64), vec![]),
        (FrontendFault::Payload, 8, state(u32::MAX, 64), vec![]),
        (
            FrontendFault::Payload,
            8,
            state(0, 64)[..7].to_vec(),
            vec![],
        ),
        (FrontendFault::Payload, 10, state(0, 65536), vec![]),
        // Addresses.
        (
            FrontendFault::Payload,
            9,
            addresses(0, USER + 8, USER, USER),
            vec![],
        ),
        (
            FrontendFault::Payload,
            9,
            addresses(0, USER, USER + 2, USER),
            vec![],
        ),
        (
            FrontendFault::Payload,
            9,
            addresses(0, USER, USER, USER + 1),
            vec![],
        ),
        (
            FrontendFault::Payload,
            9,
            addresses(3, USER, USER, USER),
            vec![],
        ),
        // Descriptors.
        (FrontendFault::Descriptors, 2, u64s(&[0]), vec![event]),
        (FrontendFault::Descriptors, 3, vec![], vec![event]),
        (FrontendFault::Descriptors, 12, u64s(&[0]), vec![]),
        (
            FrontendFault::Descriptors,
            12,
            u64s(&[0]),
            vec![event, event],
        ),
        (FrontendFault::Descriptors, 12, u64s(&[0]), vec![file]),
        (FrontendFault::Descriptors, 13, u64s(&[0x100]), vec![event]),
        (FrontendFault::Descriptors, 13, u64s(&[0]), vec![file]),
        (FrontendFault::Descriptors, 14, u64s(&[0]), vec![]),
        // Sockets, which could be the front-end's own end of the connection, and other kinds.
        (FrontendFault::Descriptors, 12, u64s(&[0]), vec![socket]),
        (FrontendFault::Descriptors, 14, u64s(&[0]), vec![socket]),
        (FrontendFault::Descriptors, 13, u64s(&[0]), vec![epoll]),
        // A pipe can only be a call descriptor.
        (FrontendFault::Descriptors, 12, u64s(&[0]), vec![pipe]),
        (FrontendFault::Descriptors, 14, u64s(&[0]), vec![pipe]),
        (FrontendFault::Descriptors, 21, vec![], vec![]),
        (FrontendFault::Payload, 13, u64s(&[0xff]), vec![event]),
        (FrontendFault::Payload, 13, u64s(&[1 << 40]), vec![event]),
        // Memory.
        (FrontendFault::Descriptors, 5, one(good), vec![]),
        (FrontendFault::Descriptors, 5, one(good), vec![file, file]),
        (FrontendFault::Descriptors, 5, one(good), vec![event]),
        (FrontendFault::Descriptors, 5, state(0, 0), vec![file]),
        (
            FrontendFault::Descriptors,
            5,
            state(u32::MAX, 0),
            vec![file],
        ),
        (
            FrontendFault::Payload,
            5,
            one(good)[..39].to_vec(),
            vec![file],
        ),
        (FrontendFault::Payload, 5, state(1, 0), vec![file]),
        (FrontendFault::Memory, 5, one([0, 0, USER, 0]), vec![file]),
        (
            FrontendFault::Memory,
            5,
            one([0, MEMORY + 1, USER, 0]),
            vec![file],
        ),
        (
            FrontendFault::Memory,
            5,
            one([0, MEMORY, USER, 4096]),
            vec![file],
        ),
        (
            FrontendFault::Memory,
            5,
            one([u64::MAX, MEMORY, USER, 0]),
            vec![file],
        ),
        (
            FrontendFault::Memory,
            5,
            one([0, MEMORY, u64::MAX, 0]),
            vec![file],
        ),
        (
            FrontendFault::Memory,
            5,
            one([0, MEMORY, USER, u64::MAX]),
            vec![file],
        ),
        (
            FrontendFault::Memory,
            5,
            table(&[good, good]),
            vec![file, file],
        ),
        (
            FrontendFault::Memory,
            38,
            u64s(&[0, 0, MEMORY, USER, 0]),
            vec![],
        ),
        // Wrong order, and features that were not offered.
        (FrontendFault::Order, 12, u64s(&[0]), vec![event]),
        (FrontendFault::Unsupported, 12, u64s(&[0x100]), vec![]),
        (FrontendFault::Unsupported, 2, u64s(&[1 << 34]), vec![]),
        (
            FrontendFault::Unsupported,
            16,
            u64s(&[PROTOCOL | 1 << 12]),
            vec![],
        ),
        (FrontendFault::Unsupported, 39, u64s(&[0]), vec![]),
        (FrontendFault::Unsupported, 0, vec![], vec![]),
        (FrontendFault::Unsupported, 1000, vec![1; 100], vec![event]),
    ];
    for (case, (fault, request, payload, fds)) in cases.into_iter().enumerate() {
        let before = faults(&lab, fault);
        raw.send(request, NEED_REPLY, &payload, &fds);
        assert_eq!(raw.reply_u64(request), 1, "case {case}, request {request}");
        assert_eq!(
            faults(&lab, fault),
            before + 1,
            "case {case}, request {request}: {fault:?}"
        );
    }
    raw.send(5, NEED_REPLY, &one(good), &[file]);
    assert_eq!(raw.reply_u64(5), 0);
    start(&raw);
}

#[test]
fn without_need_reply_a_refusal_is_silent() {
    let (lab, worker) = Harness::one();
    let _commands = worker.answer_all();
    let raw = lab.raw(0);
    raw.send(16, 0, &u64s(&[PROTOCOL]), &[]);
    raw.send(8, 0, &state(0, 3), &[]);
    raw.ping();
    // No acknowledgement without REPLY_ACK.
    raw.send(16, 0, &u64s(&[PROTOCOL & !8]), &[]);
    raw.send(8, NEED_REPLY, &state(0, 3), &[]);
    raw.ping();
    assert_eq!(faults(&lab, FrontendFault::Payload), 2);
    // A request that needs a protocol feature which was not negotiated is unknown.
    raw.send(16, 0, &u64s(&[8]), &[]);
    raw.send(34, NEED_REPLY, &[], &[]);
    assert_eq!(raw.reply_u64(34), 1);
    assert_eq!(faults(&lab, FrontendFault::Unsupported), 1);
}

#[test]
fn a_failed_request_with_a_reply_of_its_own_ends_the_connection() {
    let (lab, worker) = Harness::one();
    let commands = worker.answer_all();
    let raw = lab.raw(0);
    raw.send(11, NEED_REPLY, &state(3, 0), &[]);
    raw.expect_end();
    wait_for(&commands, "Disconnected");
    assert_eq!(faults(&lab, FrontendFault::Payload), 1);
}

#[test]
fn a_broken_frame_ends_the_connection() {
    let (lab, worker) = Harness::one();
    let commands = worker.answer_all();
    let many: Vec<OwnedFd> = (0..200).map(|_| event()).collect();
    let many: Vec<_> = many.iter().map(|fd| fd.as_fd()).collect();
    for (fault, bytes, fds) in [
        (FrontendFault::Header, header(1, 0, 0), &[][..]),
        (FrontendFault::Header, header(1, 2, 0), &[]),
        (FrontendFault::Header, header(1, 5, 0), &[]),
        (FrontendFault::PayloadTooLong, header(5, 1, 4097), &[]),
        (FrontendFault::PayloadTooLong, header(5, 1, u32::MAX), &[]),
        // In either half of the message.
        (
            FrontendFault::TooManyDescriptors,
            header(1, 1, 0),
            &many[..],
        ),
    ] {
        let before = faults(&lab, fault);
        let raw = lab.raw(0);
        let (head, tail) = bytes.split_at(6);
        raw.send_bytes(head, fds).unwrap();
        // The connection may have ended already.
        let _ = raw.send_bytes(tail, fds);
        raw.expect_end();
        wait_for(&commands, "Disconnected");
        assert_eq!(faults(&lab, fault), before + 1, "{fault:?}");
    }
    // The same total, spread over parts.
    let raw = lab.raw(0);
    raw.send_bytes(&header(5, 1, 8), &many[..200]).unwrap();
    raw.send_bytes(&[0; 4], &many[..54]).unwrap();
    raw.expect_end();
    wait_for(&commands, "Disconnected");
    assert_eq!(faults(&lab, FrontendFault::TooManyDescriptors), 2);
    for half in [&header(1, 1, 0)[..5], &header(2, 1, 8)[..]] {
        let raw = lab.raw(0);
        // The connection is not read before the worker has answered `Connected`.
        raw.ping();
        raw.send_bytes(half, &[]).unwrap();
        drop(raw);
        wait_for(&commands, "Disconnected");
    }
    assert_eq!(faults(&lab, FrontendFault::Truncated), 2);
}

#[test]
fn half_a_message_does_not_delay_other_vms() {
    let (lab, mut workers) = Harness::new(2);
    let _second = workers.remove(1).answer_all();
    let _first = workers.remove(0).answer_all();
    let silent = lab.raw(0);
    silent.ping();
    silent.send_bytes(&header(2, 1, 8)[..7], &[]).unwrap();
    start(&lab.raw(1));
    // The rest, byte by byte.
    for byte in &header(2, 9, 8)[7..] {
        (&silent.0).write_all(&[*byte]).unwrap();
        lab.raw(1).ping();
    }
    silent.send_bytes(&u64s(&[1 << 32]), &[]).unwrap();
    silent.ping();
}

#[test]
fn unread_replies_do_not_delay_other_vms() {
    let (lab, mut workers) = Harness::new(2);
    let _second = workers.remove(1).answer_all();
    let _first = workers.remove(0).answer_all();
    let deaf = lab.raw(0);
    deaf.0.set_nonblocking(true).unwrap();
    // Until the socket is full in both directions.
    let mut sent = 0;
    let ask = header(1, 1, 0);
    let mut settled = 0;
    while settled < 50 {
        match deaf.send_bytes(&ask, &[]) {
            Ok(bytes) => {
                assert_eq!(bytes, ask.len());
                sent += 1;
                settled = 0;
            }
            Err(_) => {
                // The other VM has a turn only after this one had its turn.
                lab.raw(1).ping();
                settled += 1;
            }
        }
    }
    start(&lab.raw(1));
    deaf.0.set_nonblocking(false).unwrap();
    for _ in 0..sent {
        assert_ne!(deaf.reply_u64(1), 0);
    }
    deaf.ping();
}

#[test]
fn a_command_refused_by_the_worker_is_refused_to_the_front_end() {
    let (lab, worker) = Harness::one();
    let raw = lab.raw(0);
    worker.done("Connected");
    raw.send(16, 0, &u64s(&[PROTOCOL]), &[]);
    raw.send(2, NEED_REPLY, &u64s(&[FEATURES]), &[]);
    worker.expect("SetFeatures").1.failed("no");
    assert_eq!(raw.reply_u64(2), 1);
    raw.send(2, NEED_REPLY, &u64s(&[FEATURES]), &[]);
    drop(worker.expect("SetFeatures"));
    assert_eq!(raw.reply_u64(2), 1, "dropped");
    raw.send(2, NEED_REPLY, &u64s(&[FEATURES]), &[]);
    worker.expect("SetFeatures").1.base(4);
    assert_eq!(raw.reply_u64(2), 1, "an answer to something else");
    assert_eq!(faults(&lab, FrontendFault::Worker), 3);
    raw.send(2, NEED_REPLY, &u64s(&[FEATURES]), &[]);
    worker.done("SetFeatures");
    assert_eq!(raw.reply_u64(2), 0);
    let _commands = worker.answer_all();
}
