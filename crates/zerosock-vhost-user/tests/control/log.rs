//! The log of written pages: what a front-end sends when a migration begins and ends, and logs that
//! are refused.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use rustix::fs::ftruncate;
use zerosock_ring::DirtyLog;
use zerosock_sys::account::{Budget, Limits};
use zerosock_vhost_user::session::F_LOG_ALL;
use zerosock_vhost_user::{DeviceCommand, FrontendFault};

use super::fake::*;
use super::faults::faults;

/// Bytes of a log for `MEMORY`.
const LOG: u64 = MEMORY / 4096 / 8;

/// As `addresses` of `start_sequence`, logged at this guest address.
fn logged(index: u32, guest_addr: u64) -> Vec<u8> {
    let at = USER + u64::from(index) * 0x10000;
    let mut bytes = addresses(index, at, at + 0x2000, at + 0x1000);
    bytes[4] = 1;
    bytes[32..].copy_from_slice(&guest_addr.to_ne_bytes());
    bytes
}

fn next(commands: &Receiver<DeviceCommand>) -> DeviceCommand {
    commands.recv_timeout(DEADLINE).unwrap()
}

fn set_log(raw: &Raw, file: &OwnedFd, size: u64, offset: u64) {
    let payload = u64s(&[size, offset]);
    // QEMU does not ask for a reply, and gets one.
    raw.send(6, 0, &payload, &[file.as_fd()]);
    assert_eq!(raw.reply(), (6, payload));
}

fn ask(raw: &Raw, request: u32, payload: &[u8]) -> u64 {
    raw.send(request, NEED_REPLY, payload, &[]);
    raw.reply_u64(request)
}

fn byte(file: &OwnedFd, at: u64) -> u8 {
    let mut byte = [0];
    rustix::io::pread(file, &mut byte, at).unwrap();
    byte[0]
}

/// A front-end with two queues that run, and the commands that follow.
fn started() -> (Harness, Raw, Receiver<DeviceCommand>) {
    let (lab, worker) = Harness::one();
    let commands = worker.answer_all();
    let raw = lab.raw(0);
    start(&raw);
    while !matches!(next(&commands), DeviceCommand::EnableQueue { index: 1, .. }) {}
    (lab, raw, commands)
}

#[test]
fn logging_is_turned_on_and_off_while_queues_run() {
    let (lab, raw, commands) = started();
    let file = memory(4096 + LOG);
    for round in 0..2 {
        set_log(&raw, &file, LOG, 4096);
        let DeviceCommand::SetLog(log) = next(&commands) else {
            panic!("no log");
        };
        // It is the file that was sent, from the offset on.
        log.mark(MEMORY - 1, 1);
        assert_eq!(byte(&file, 4096 + LOG - 1), 0x80);
        assert_eq!(ask(&raw, 2, &u64s(&[FEATURES | F_LOG_ALL])), 0);
        assert!(
            matches!(next(&commands), DeviceCommand::SetFeatures(f) if f == FEATURES | F_LOG_ALL)
        );
        for index in 0..2 {
            let at = 0x2000 + u64::from(index) * 0x10000;
            // The second time it changes nothing.
            for _ in 0..2 {
                assert_eq!(ask(&raw, 9, &logged(index, at)), 0);
            }
            let command = next(&commands);
            let DeviceCommand::SetUsedLog {
                index: of,
                guest_addr,
            } = command
            else {
                panic!("{command:?}");
            };
            assert_eq!((u32::from(of), guest_addr), (index, Some(at)), "{round}");
        }
        // A larger log replaces one that is in use.
        let larger = memory(8 * LOG);
        set_log(&raw, &larger, 8 * LOG, 0);
        assert!(
            matches!(next(&commands), DeviceCommand::SetLog(log) if log.bytes() == 8 * LOG as usize)
        );
        assert_eq!(ask(&raw, 2, &u64s(&[FEATURES])), 0);
        assert!(matches!(next(&commands), DeviceCommand::SetFeatures(f) if f == FEATURES));
        for index in 0..2 {
            let at = USER + u64::from(index) * 0x10000;
            let plain = addresses(index, at, at + 0x2000, at + 0x1000);
            assert_eq!(ask(&raw, 9, &plain), 0);
            let command = next(&commands);
            assert!(matches!(
                command,
                DeviceCommand::SetUsedLog {
                    guest_addr: None,
                    ..
                }
            ));
        }
    }
    // Nothing but the bit may change while queues run.
    let other = FEATURES & !(1 << 29) | F_LOG_ALL;
    assert_eq!(ask(&raw, 2, &u64s(&[other])), 1);
    assert_eq!(faults(&lab, FrontendFault::Order), 1);
}

/// A queue that starts during a migration is logged from its start.
#[test]
fn a_queue_starts_with_the_address_of_its_log() {
    let (_lab, raw, commands) = started();
    raw.send(11, 0, &state(0, 0), &[]);
    raw.reply();
    assert_eq!(ask(&raw, 9, &logged(0, 0x2000)), 0);
    let kick = event();
    raw.send(12, NEED_REPLY, &u64s(&[0]), &[kick.as_fd()]);
    assert_eq!(raw.reply_u64(12), 0);
    let command = wait_for(&commands, "StartQueue");
    let DeviceCommand::StartQueue { used_log, .. } = command else {
        panic!("{command:?}");
    };
    assert_eq!(used_log, Some(0x2000));
}

#[test]
fn a_log_that_cannot_be_used_ends_the_connection() {
    // What a connection that ended had mapped counts until the reaper has unmapped it: there is room for the
    // memory of all cases.
    let whole = Limits {
        descriptors: 256,
        numbers: 512,
        mapped: 64 << 20,
        mapped_each: 32 << 20,
    };
    let sealed = || zerosock_sys::memfd::create("log", 1 << 20, true).unwrap();
    let open = rustix::fs::memfd_create("log", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&open, 1 << 20).unwrap();
    let pipe = || rustix::pipe::pipe().unwrap().1;
    let ok = u64s(&[LOG, 0]);
    let cases: Vec<(FrontendFault, Vec<u8>, Vec<OwnedFd>)> = vec![
        // Too small for the memory.
        (FrontendFault::Memory, u64s(&[LOG - 1, 0]), vec![sealed()]),
        (FrontendFault::Memory, u64s(&[0, 0]), vec![sealed()]),
        // Beyond its file, or beyond all addresses.
        (
            FrontendFault::Memory,
            u64s(&[LOG, (1 << 20) - LOG + 1]),
            vec![sealed()],
        ),
        (
            FrontendFault::Memory,
            u64s(&[LOG, u64::MAX]),
            vec![sealed()],
        ),
        (FrontendFault::Memory, u64s(&[u64::MAX, 0]), vec![sealed()]),
        (
            FrontendFault::Memory,
            u64s(&[u64::MAX, u64::MAX]),
            vec![sealed()],
        ),
        (
            FrontendFault::Memory,
            u64s(&[1 << 63, 1 << 63]),
            vec![sealed()],
        ),
        // Beyond the limit of this front-end.
        (
            FrontendFault::Memory,
            u64s(&[33 << 20, 0]),
            vec![memory(33 << 20)],
        ),
        // Memory that can shrink, and what is no memory.
        (FrontendFault::Unsealed, ok.clone(), vec![open]),
        (FrontendFault::Descriptors, ok.clone(), vec![event()]),
        (FrontendFault::Descriptors, ok.clone(), vec![pipe()]),
        (FrontendFault::Descriptors, ok.clone(), vec![]),
        (FrontendFault::Descriptors, ok, vec![sealed(), sealed()]),
        (FrontendFault::Payload, u64s(&[LOG]), vec![sealed()]),
        (FrontendFault::Payload, u64s(&[LOG, 0, 0]), vec![sealed()]),
    ];
    let (lab, mut workers) = Harness::with_limits(1, true, &Budget::new(whole, 1));
    let commands = workers.remove(0).answer_all();
    for (case, (fault, payload, fds)) in cases.into_iter().enumerate() {
        let raw = lab.raw(0);
        start(&raw);
        let before = faults(&lab, fault);
        let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        raw.send(6, NEED_REPLY, &payload, &fds);
        raw.expect_end();
        wait_for(&commands, "Disconnected");
        assert_eq!(faults(&lab, fault), before + 1, "case {case}: {fault:?}");
    }
    let raw = lab.raw(0);
    start(&raw);
    set_log(&raw, &sealed(), LOG, 0);
}

#[test]
fn the_log_has_a_bit_for_each_page_of_memory_and_used_rings() {
    let (lab, raw, commands) = started();
    let log = memory(8 * LOG);
    set_log(&raw, &log, LOG, 0);
    // The used ring has 1030 bytes.
    for guest_addr in [MEMORY - 1029, MEMORY, u64::MAX] {
        assert_eq!(ask(&raw, 9, &logged(0, MEMORY - 1030)), 0);
        assert_eq!(ask(&raw, 2, &u64s(&[FEATURES | F_LOG_ALL])), 0);
        assert_eq!(ask(&raw, 9, &logged(0, guest_addr)), 1, "{guest_addr:#x}");
        assert_eq!(ask(&raw, 2, &u64s(&[FEATURES])), 0);
    }
    assert_eq!(faults(&lab, FrontendFault::Memory), 3);
    // Memory that the log does not reach is refused while pages are logged, and only then.
    let guest = memory(2 * MEMORY);
    let table = table(&[[0, 2 * MEMORY, USER, 0]]);
    let set_memory = || {
        raw.send(5, NEED_REPLY, &table, &[guest.as_fd()]);
        raw.reply_u64(5)
    };
    assert_eq!(ask(&raw, 2, &u64s(&[FEATURES | F_LOG_ALL])), 0);
    assert_eq!(set_memory(), 1);
    // A front-end that has a larger memory sends a larger log first.
    set_log(&raw, &log, 2 * LOG, 0);
    assert_eq!(set_memory(), 0);
    assert_eq!(ask(&raw, 2, &u64s(&[FEATURES])), 0);
    // A log cannot be turned on that is too small by now.
    let guest = memory(4 * MEMORY);
    let larger = super::fake::table(&[[0, 4 * MEMORY, USER, 0]]);
    raw.send(5, NEED_REPLY, &larger, &[guest.as_fd()]);
    assert_eq!(raw.reply_u64(5), 0);
    assert_eq!(ask(&raw, 2, &u64s(&[FEATURES | F_LOG_ALL])), 1);
    set_log(&raw, &log, 4 * LOG, 0);
    assert_eq!(ask(&raw, 2, &u64s(&[FEATURES | F_LOG_ALL])), 0);
    drop(commands);
}

/// QEMU's order when a guest restarts its driver during a migration: the log comes last, and the one
/// before may be too small for the memory.
#[test]
fn the_log_may_follow_the_start_of_the_queues() {
    let (_lab, raw, commands) = started();
    set_log(&raw, &memory(LOG), LOG, 0);
    assert_eq!(ask(&raw, 2, &u64s(&[FEATURES | F_LOG_ALL])), 0);
    for index in 0..2 {
        raw.send(11, 0, &state(index, 0), &[]);
        raw.reply();
    }
    assert_eq!(ask(&raw, 2, &u64s(&[FEATURES | F_LOG_ALL])), 0);
    let guest = memory(2 * MEMORY);
    let table = table(&[[0, 2 * MEMORY, USER, 0]]);
    raw.send(5, NEED_REPLY, &table, &[guest.as_fd()]);
    assert_eq!(raw.reply_u64(5), 0);
    let kick = event();
    raw.send(12, NEED_REPLY, &u64s(&[0]), &[kick.as_fd()]);
    assert_eq!(raw.reply_u64(12), 0);
    set_log(&raw, &memory(2 * LOG), 2 * LOG, 0);
    let log: Arc<DirtyLog> = loop {
        if let DeviceCommand::SetLog(log) = wait_for(&commands, "SetLog")
            && log.bytes() as u64 == 2 * LOG
        {
            break log;
        }
    };
    assert!(log.covers(2 * MEMORY));
}

#[test]
fn without_the_protocol_feature_there_is_no_log() {
    let (lab, worker) = Harness::one();
    let commands = worker.answer_all();
    let raw = lab.raw(0);
    raw.send(16, 0, &u64s(&[PROTOCOL & !2]), &[]);
    raw.send(6, NEED_REPLY, &u64s(&[LOG, 0]), &[memory(LOG).as_fd()]);
    assert_eq!(raw.reply_u64(6), 1);
    assert_eq!(faults(&lab, FrontendFault::Unsupported), 1);
    // The descriptor that would signal writes is closed, and with it the other end of a pipe.
    let (read, write) = rustix::pipe::pipe().unwrap();
    raw.send(7, NEED_REPLY, &[], &[write.as_fd()]);
    assert_eq!(raw.reply_u64(7), 0);
    drop(write);
    assert_eq!(rustix::io::read(&read, &mut [0]).unwrap(), 0);
    assert!(
        commands
            .try_iter()
            .all(|command| !matches!(command, DeviceCommand::SetLog(_)))
    );
}

/// Whatever sizes, offsets and lengths of files a front-end sends: it is answered or its connection
/// ends.
#[test]
fn random_logs_are_taken_or_refused() {
    zerosock_sys::sigbus::install().unwrap();
    let (lab, worker) = Harness::one();
    let commands = worker.answer_all();
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        // Small numbers as often as large ones.
        seed >> (seed % 64)
    };
    let (mut taken, mut refused) = (0, 0);
    let mut raw = lab.raw(0);
    start(&raw);
    for _ in 0..300 {
        let (size, offset, length) = (random(), random(), random() % (1 << 24));
        let payload = u64s(&[size, offset]);
        let file = rustix::fs::memfd_create("log", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, length).unwrap();
        raw.send(6, 0, &payload, &[file.as_fd()]);
        let fits = size >= LOG && size.checked_add(offset).is_some_and(|end| end <= length);
        if fits {
            assert_eq!(raw.reply(), (6, payload));
            let DeviceCommand::SetLog(log) = wait_for(&commands, "SetLog") else {
                panic!("no log");
            };
            // A mark in a file that has shrunk is lost, and no fault ends the process.
            ftruncate(&file, 0).unwrap();
            log.mark(random(), random());
            taken += 1;
        } else {
            raw.expect_end();
            raw = lab.raw(0);
            start(&raw);
            refused += 1;
        }
    }
    assert!(taken > 20 && refused > 20, "{taken} {refused}");
}
