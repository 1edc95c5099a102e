//! A correct front-end, and the commands that the worker gets.

use std::os::fd::{AsFd, AsRawFd};

use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserHeaderFlag};
use vhost::vhost_user::{Frontend, VhostUserFrontend, VhostUserProtocolFeatures};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;
use zerosock_vhost_user::{DeviceCommand, FrontendFault};

use super::fake::*;

fn region(file: &impl AsRawFd) -> VhostUserMemoryRegionInfo {
    VhostUserMemoryRegionInfo {
        guest_phys_addr: 0,
        memory_size: MEMORY,
        userspace_addr: USER,
        mmap_offset: 0,
        mmap_handle: file.as_raw_fd(),
    }
}

fn ring(index: u64) -> VringConfigData {
    let at = USER + index * 0x10000;
    VringConfigData {
        queue_max_size: 128,
        queue_size: 128,
        flags: 0,
        desc_table_addr: at,
        avail_ring_addr: at + 0x1000,
        used_ring_addr: at + 0x2000,
        log_addr: None,
    }
}

#[test]
fn the_vhost_crates_front_end_starts_and_stops_queues() {
    let (lab, worker) = Harness::one();
    let commands = worker.answer_all();
    let mut front = Frontend::from_stream(lab.connect(0), 3);
    front.set_owner().unwrap();
    let features = front.get_features().unwrap();
    // Streams and messages, and by docs/datagrams.md datagrams and their flow control. For the
    // front-end: VHOST_F_LOG_ALL.
    let offered = 1 << 32 | 1 << 30 | 1 << 29 | 1 << 28 | 1 << 26 | 1 << 22 | 1 << 3 | 0b11;
    assert_eq!(features, offered);
    let protocol = front.get_protocol_features().unwrap();
    assert_eq!(protocol.bits(), PROTOCOL);
    front.set_protocol_features(protocol).unwrap();
    front.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    assert_eq!(front.get_queue_num().unwrap(), 3);
    let (_, config) = front
        .get_config(0, 8, VhostUserConfigFlags::WRITABLE, &[0; 8])
        .unwrap();
    assert_eq!(config, 3u64.to_le_bytes());
    let channel = event();
    front.set_backend_request_fd(&channel).unwrap();
    front.set_features(features).unwrap();
    let file = memory(MEMORY);
    front.set_mem_table(&[region(&file)]).unwrap();
    let call = EventFd::new(0).unwrap();
    let kick = EventFd::new(0).unwrap();
    for index in 0..2 {
        front.set_vring_num(index, 128).unwrap();
        front.set_vring_base(index, 5).unwrap();
        front.set_vring_addr(index, &ring(index as u64)).unwrap();
        front.set_vring_call(index, &call).unwrap();
        front.set_vring_err(index, &call).unwrap();
        front.set_vring_kick(index, &kick).unwrap();
        front.set_vring_enable(index, true).unwrap();
    }
    assert_eq!(front.get_vring_base(1).unwrap(), 77);
    assert_eq!(front.get_vring_base(2).unwrap(), 0, "never started");

    assert!(matches!(
        commands.recv().unwrap(),
        DeviceCommand::Connected { .. }
    ));
    assert!(matches!(commands.recv().unwrap(), DeviceCommand::SetFeatures(f) if f == features));
    assert!(matches!(
        commands.recv().unwrap(),
        DeviceCommand::SetMemory(_)
    ));
    for index in 0..2 {
        let DeviceCommand::StartQueue {
            index: got,
            config,
            call,
            err,
            enabled,
            ..
        } = commands.recv().unwrap()
        else {
            panic!("not a start")
        };
        let at = USER + u64::from(index) * 0x10000;
        assert_eq!(got, index);
        assert_eq!((config.size, config.base), (128, 5));
        assert_eq!(
            (config.desc, config.avail, config.used),
            (at, at + 0x1000, at + 0x2000)
        );
        assert!(config.event_idx && config.indirect);
        assert!(call.is_some() && err.is_some());
        assert!(!enabled, "only by SET_VRING_ENABLE");
        let enable = commands.recv().unwrap();
        assert!(
            matches!(enable, DeviceCommand::EnableQueue { index: i, enabled: true } if i == index)
        );
    }
    assert!(matches!(
        commands.recv().unwrap(),
        DeviceCommand::StopQueue { index: 1 }
    ));

    // Restarted at the index where it stopped, with its earlier call descriptor.
    front.set_vring_kick(1, &kick).unwrap();
    match commands.recv().unwrap() {
        DeviceCommand::StartQueue {
            index: 1,
            config,
            call: Some(_),
            enabled: true,
            ..
        } => {
            assert_eq!(config.base, 77);
        }
        other => panic!("{other:?}"),
    }
    front.reset_device().unwrap();
    assert!(matches!(
        commands.recv().unwrap(),
        DeviceCommand::ResetDevice
    ));
    assert!(
        front.set_vring_kick(1, &kick).is_err(),
        "the reset has forgotten its size"
    );
    drop(front);
    assert!(matches!(
        commands.recv().unwrap(),
        DeviceCommand::Disconnected
    ));
}

#[test]
fn a_memory_table_may_be_longer_than_its_count() {
    let (lab, worker) = Harness::one();
    let commands = worker.answer_all();
    let raw = lab.raw(0);
    raw.send(16, 0, &u64s(&[PROTOCOL]), &[]);
    let mut payload = table(&[[0, MEMORY, USER, 0]]);
    payload.extend([0; 32]);
    let file = memory(MEMORY);
    raw.send(5, NEED_REPLY, &payload, &[file.as_fd()]);
    assert_eq!(raw.reply_u64(5), 0);
    wait_for(&commands, "SetMemory");
}

#[test]
fn an_unsealed_memory_file_is_accepted_by_default() {
    let (lab, worker) = Harness::one();
    let commands = worker.answer_all();
    let raw = lab.raw(0);
    let file = zerosock_sys::memfd::create("guest", MEMORY, false).unwrap();
    raw.send(5, 0, &table(&[[0, MEMORY, USER, 0]]), &[file.as_fd()]);
    wait_for(&commands, "SetMemory");
}

#[test]
fn memory_slots_are_added_and_removed() {
    let (lab, worker) = Harness::one();
    let commands = worker.answer_all();
    let mut front = Frontend::from_stream(lab.connect(0), 3);
    front.get_features().unwrap();
    front.get_protocol_features().unwrap();
    let protocol = VhostUserProtocolFeatures::from_bits(PROTOCOL).unwrap();
    front.set_protocol_features(protocol).unwrap();
    front.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    assert_eq!(front.get_max_mem_slots().unwrap(), 32);
    let file = memory(MEMORY);
    let first = region(&file);
    let second = VhostUserMemoryRegionInfo {
        guest_phys_addr: MEMORY,
        userspace_addr: USER + MEMORY,
        ..first
    };
    front.add_mem_region(&first).unwrap();
    front.add_mem_region(&second).unwrap();
    assert!(
        front.add_mem_region(&second).is_err(),
        "it is there already"
    );
    front.remove_mem_region(&first).unwrap();
    assert!(front.remove_mem_region(&first).is_err(), "it is gone");
    for expect in [1, 2, 1] {
        let DeviceCommand::SetMemory(memory) = wait_for(&commands, "SetMemory") else {
            panic!()
        };
        let mut pieces = Vec::new();
        let found = [0, MEMORY]
            .iter()
            .filter(|at| memory.translate(**at, 16, &mut pieces).is_ok());
        assert_eq!(found.count(), expect);
    }
}

#[test]
fn the_reply_to_a_memory_table_waits_for_the_worker() {
    let (lab, worker) = Harness::one();
    let raw = lab.raw(0);
    worker.done("Connected");
    raw.send(16, NEED_REPLY, &u64s(&[PROTOCOL]), &[]);
    assert_eq!(raw.reply_u64(16), 0);
    let file = memory(MEMORY);
    raw.send(
        5,
        NEED_REPLY,
        &table(&[[0, MEMORY, USER, 0]]),
        &[file.as_fd()],
    );
    // A later message is not handled before the answer.
    raw.send(1, 0, &[], &[]);
    let (_, reply) = worker.expect("SetMemory");
    raw.0.set_nonblocking(true).unwrap();
    let nothing = std::io::Read::read(&mut &raw.0, &mut [0]).unwrap_err();
    assert_eq!(nothing.kind(), std::io::ErrorKind::WouldBlock);
    raw.0.set_nonblocking(false).unwrap();
    reply.done();
    assert_eq!(raw.reply_u64(5), 0);
    assert_ne!(raw.reply_u64(1), 0);
}

#[test]
fn without_protocol_features_a_started_queue_is_enabled_and_nothing_is_acknowledged() {
    let (lab, worker) = Harness::one();
    let commands = worker.answer_all();
    let raw = lab.raw(0);
    for (request, payload, fds) in start_sequence() {
        let payload = match request {
            2 => u64s(&[1 << 32]),
            16 | 18 | 21 => continue,
            _ => payload,
        };
        let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        raw.send(request, NEED_REPLY, &payload, &fds);
    }
    raw.ping();
    let DeviceCommand::StartQueue {
        enabled, config, ..
    } = wait_for(&commands, "StartQueue")
    else {
        panic!()
    };
    assert!(enabled);
    assert!(!config.event_idx && !config.indirect);
}

/// As QEMU does: SET_VRING_ENABLE before SET_FEATURES.
#[test]
fn a_queue_may_be_enabled_before_the_features_are_set() {
    for enabled in [1, 0] {
        let (lab, worker) = Harness::one();
        let commands = worker.answer_all();
        let raw = lab.raw(0);
        raw.send(16, 0, &u64s(&[PROTOCOL]), &[]);
        raw.send(18, NEED_REPLY, &state(0, enabled), &[]);
        assert_eq!(raw.reply_u64(18), 0);
        for (request, payload, fds) in start_sequence() {
            if request != 18 {
                let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
                raw.send(request, 0, &payload, &fds);
            }
        }
        raw.ping();
        let DeviceCommand::StartQueue { enabled: got, .. } = wait_for(&commands, "StartQueue")
        else {
            panic!()
        };
        assert_eq!(got, enabled == 1);
    }
    // A front-end that has set features without VHOST_USER_F_PROTOCOL_FEATURES cannot enable a
    // queue.
    let (lab, worker) = Harness::one();
    let _commands = worker.answer_all();
    let raw = lab.raw(0);
    raw.send(16, 0, &u64s(&[PROTOCOL]), &[]);
    raw.send(2, NEED_REPLY, &u64s(&[1 << 32]), &[]);
    assert_eq!(raw.reply_u64(2), 0);
    raw.send(18, NEED_REPLY, &state(0, 1), &[]);
    assert_eq!(raw.reply_u64(18), 1);
    assert_eq!(
        lab.control.stats(0).unwrap().faults(FrontendFault::Order),
        1
    );
}

/// Found by the fuzz target `vhost_user`: a successor started the queue enabled.
#[test]
fn a_running_queue_is_not_disabled_without_protocol_features() {
    let (lab, worker) = Harness::one();
    let commands = worker.answer_all();
    let raw = lab.raw(0);
    for (request, payload, fds) in start_sequence() {
        if ![2, 18].contains(&request) {
            let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
            raw.send(request, 0, &payload, &fds);
        }
    }
    let command = wait_for(&commands, "StartQueue");
    assert!(matches!(
        command,
        DeviceCommand::StartQueue { enabled: true, .. }
    ));
    for enabled in [0, 1] {
        raw.send(18, NEED_REPLY, &state(0, enabled), &[]);
        assert_eq!(raw.reply_u64(18), 1);
    }
}

#[test]
fn a_running_queue_gets_new_call_and_error_descriptors() {
    let (lab, worker) = Harness::one();
    let commands = worker.answer_all();
    let raw = lab.raw(0);
    start(&raw);
    let call = event();
    raw.send(13, NEED_REPLY, &u64s(&[1]), &[call.as_fd()]);
    assert_eq!(raw.reply_u64(13), 0);
    raw.send(14, NEED_REPLY, &u64s(&[0x101]), &[]);
    assert_eq!(raw.reply_u64(14), 0);
    let command = wait_for(&commands, "SetCall");
    assert!(matches!(
        command,
        DeviceCommand::SetCall {
            index: 1,
            call: Some(_)
        }
    ));
    let command = wait_for(&commands, "SetErr");
    assert!(matches!(
        command,
        DeviceCommand::SetErr {
            index: 1,
            err: None
        }
    ));
}

#[test]
fn the_configuration_space_has_eight_bytes() {
    let (lab, worker) = Harness::one();
    let _commands = worker.answer_all();
    let raw = lab.raw(0);
    raw.send(16, 0, &u64s(&[PROTOCOL]), &[]);
    let ask = |offset: u32, size: u32| {
        let mut payload = [offset, size, 0].map(u32::to_ne_bytes).concat();
        payload.extend(vec![0; size.min(256) as usize]);
        raw.send(24, 0, &payload, &[]);
        let (request, reply) = raw.reply();
        assert_eq!(request, 24);
        // The size of the reply tells the front-end that the request failed.
        assert_eq!(reply[4..8], (reply.len() as u32 - 12).to_ne_bytes());
        reply[12..].to_vec()
    };
    assert_eq!(ask(0, 8), 3u64.to_le_bytes());
    assert_eq!(ask(0, 4), 3u32.to_le_bytes());
    assert_eq!(ask(7, 1), [0]);
    for (offset, size) in [
        (0, 9),
        (8, 1),
        (1, 8),
        (u32::MAX, 2),
        (2, u32::MAX),
        (0, 0),
        (0, 256),
    ] {
        assert_eq!(ask(offset, size), [0; 0], "{offset} {size}");
    }
    let mut write = [0; 20];
    write[4] = 8;
    raw.send(25, NEED_REPLY, &write, &[]);
    assert_eq!(raw.reply_u64(25), 1, "read-only");
    assert_eq!(
        lab.control
            .stats(0)
            .unwrap()
            .faults(FrontendFault::Unsupported),
        1
    );
    write[4] = 9;
    raw.send(25, NEED_REPLY, &write, &[]);
    assert_eq!(raw.reply_u64(25), 1, "fewer bytes than the size says");
    assert_eq!(
        lab.control.stats(0).unwrap().faults(FrontendFault::Payload),
        1
    );
}
