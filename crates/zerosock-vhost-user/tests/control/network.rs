//! The requests of network devices, the device status, and changes that a device makes to its
//! configuration space.

use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Instant;

use zerosock_sys::account::Budget;
use zerosock_sys::notify::ThreadCount;
use zerosock_vhost_user::codec::Message;
use zerosock_vhost_user::session::{F_LOG_ALL, F_VERSION_1, Session, Step};
use zerosock_vhost_user::{
    DeviceCommand, DeviceModel, FrontendFault, FrontendLink, ProtocolFeatures,
};

use super::fake::*;
use super::faults::faults;

const SEND_RARP: u32 = 19;
const SET_MTU: u32 = 20;
const GET_CONFIG: u32 = 24;
const SET_STATUS: u32 = 39;
const GET_STATUS: u32 = 40;
const RARP: u64 = 1 << 2;
const MTU: u64 = 1 << 4;
const STATUS: u64 = 1 << 16;
const OWN: u64 = RARP | MTU | STATUS;

/// A network device: its configuration space is an MTU, at most 1500, and a byte of status.
#[derive(Debug)]
struct NetworkModel;

impl DeviceModel for NetworkModel {
    fn features(&self) -> u64 {
        F_VERSION_1 | 1
    }

    fn protocol_features(&self) -> ProtocolFeatures {
        ProtocolFeatures::from_bits_truncate(OWN)
    }

    fn feature_name(&self, bit: u32) -> Option<&'static str> {
        (bit == 11).then_some("SEGMENTATION")
    }

    fn max_queues(&self) -> u16 {
        2
    }

    fn config(&self) -> Vec<u8> {
        vec![0, 0, 1]
    }

    fn set_mtu(&self, config: &mut [u8], mtu: u16) -> Result<(), (FrontendFault, String)> {
        if mtu > 1500 {
            return Err((FrontendFault::Unsupported, "too long".into()));
        }
        config[..2].copy_from_slice(&mtu.to_le_bytes());
        Ok(())
    }
}

/// A front-end with these protocol features besides those of all devices.
fn connected(protocol: u64) -> (Harness, Raw, Receiver<DeviceCommand>) {
    let (lab, worker) = Harness::of_model(NetworkModel);
    let commands = worker.answer_all();
    let raw = lab.raw(0);
    raw.send(3, 0, &[], &[]);
    raw.send(16, NEED_REPLY, &u64s(&[PROTOCOL | protocol]), &[]);
    assert_eq!(raw.reply_u64(16), 0);
    (lab, raw, commands)
}

fn ask(raw: &Raw, request: u32, payload: &[u8]) -> u64 {
    raw.send(request, NEED_REPLY, payload, &[]);
    raw.reply_u64(request)
}

/// The configuration space.
fn config(raw: &Raw) -> Vec<u8> {
    let head = [state(0, 3), vec![0; 4], vec![0; 3]].concat();
    raw.send(GET_CONFIG, 0, &head, &[]);
    let (request, reply) = raw.reply();
    assert_eq!(request, GET_CONFIG);
    reply[12..].to_vec()
}

/// Waits for a change by the device without a notification.
fn wait_for_config(raw: &Raw, expected: [u8; 3]) {
    let end = Instant::now() + DEADLINE;
    while config(raw) != expected {
        assert!(Instant::now() < end, "{:?}", config(raw));
    }
}

fn link(commands: &Receiver<DeviceCommand>) -> FrontendLink {
    match wait_for(commands, "Connected") {
        DeviceCommand::Connected { link } => link,
        other => panic!("{other:?}"),
    }
}

#[test]
fn each_request_needs_its_protocol_feature() {
    let requests = [
        (SEND_RARP, RARP),
        (SET_MTU, MTU),
        (SET_STATUS, STATUS),
        (GET_STATUS, STATUS),
    ];
    for (request, feature) in requests {
        let (lab, raw, _commands) = connected(OWN & !feature);
        let payload = if request == GET_STATUS {
            &[][..]
        } else {
            &[1; 8]
        };
        assert_eq!(ask(&raw, request, payload), 1, "{request}");
        assert_eq!(faults(&lab, FrontendFault::Unsupported), 1);
    }
    // A device of another kind offers none of them.
    let (lab, worker) = Harness::one();
    let _commands = worker.answer_all();
    let raw = lab.raw(0);
    raw.send(16, NEED_REPLY, &u64s(&[PROTOCOL]), &[]);
    assert_eq!(raw.reply_u64(16), 0);
    for feature in [RARP, MTU, STATUS] {
        assert_eq!(ask(&raw, 16, &u64s(&[PROTOCOL | feature])), 1);
    }
}

#[test]
fn requests_of_another_length_are_refused() {
    for request in [SEND_RARP, SET_MTU, SET_STATUS] {
        let (lab, raw, commands) = connected(OWN);
        for len in [0, 6, 7, 9, 16] {
            assert_eq!(ask(&raw, request, &vec![0; len]), 1, "{request}: {len}");
        }
        assert_eq!(faults(&lab, FrontendFault::Payload), 5);
        link(&commands);
        assert!(commands.try_recv().is_err(), "a command");
    }
    let (_lab, raw, _commands) = connected(OWN);
    raw.send(GET_STATUS, 0, &[0], &[]);
    raw.expect_end();
}

#[test]
fn the_worker_gets_the_address_of_a_guest_that_has_moved() {
    let (_lab, raw, commands) = connected(OWN);
    assert_eq!(ask(&raw, SEND_RARP, &[0x52, 0x54, 0, 1, 2, 3, 9, 9]), 0);
    let command = wait_for(&commands, "SendRarp");
    assert!(
        matches!(command, DeviceCommand::SendRarp([0x52, 0x54, 0, 1, 2, 3])),
        "{command:?}"
    );
}

#[test]
fn an_announcement_that_was_not_sent_is_refused() {
    let (lab, worker) = Harness::of_model(NetworkModel);
    let raw = lab.raw(0);
    worker.done("Connected");
    assert_eq!(ask(&raw, 16, &u64s(&[PROTOCOL | OWN])), 0);
    raw.send(SEND_RARP, NEED_REPLY, &[2; 8], &[]);
    let (_, reply) = worker.expect("SendRarp");
    reply.failed("not now");
    assert_eq!(raw.reply_u64(SEND_RARP), 1);
    assert_eq!(faults(&lab, FrontendFault::Worker), 1);
}

#[test]
fn an_mtu_is_checked_told_to_the_worker_and_kept_for_the_next_features() {
    let (lab, raw, commands) = connected(OWN);
    let mtu = |wanted: u64| ask(&raw, SET_MTU, &u64s(&[wanted]));
    // More than the model takes, and more than an MTU can be.
    assert_eq!((mtu(1501), mtu(0x1_0000 + 1400), mtu(u64::MAX)), (1, 1, 1));
    assert_eq!(faults(&lab, FrontendFault::Unsupported), 1);
    assert_eq!(faults(&lab, FrontendFault::Payload), 2);
    assert_eq!(config(&raw), [0, 0, 1]);
    assert_eq!(mtu(1400), 0);
    let expected = [0x78, 0x05, 1];
    assert_eq!(config(&raw), expected);
    let command = wait_for(&commands, "SetConfig");
    assert!(
        matches!(&command, DeviceCommand::SetConfig(config) if **config == expected),
        "{command:?}"
    );
    // QEMU sends the MTU before the features.
    assert_eq!(ask(&raw, 2, &u64s(&[1 << 32 | 1 << 30])), 0);
    assert_eq!(config(&raw), expected);
    assert_eq!(ask(&raw, 34, &[]), 0);
    assert_eq!(config(&raw), expected);
    // The next front-end begins anew.
    drop(raw);
    wait_for(&commands, "Disconnected");
    let raw = lab.raw(0);
    assert_eq!(ask(&raw, 16, &u64s(&[PROTOCOL | OWN])), 0);
    assert_eq!(config(&raw), [0, 0, 1]);
}

#[test]
fn the_status_is_kept_and_changes_nothing() {
    let (lab, raw, commands) = connected(OWN);
    let status = |raw: &Raw| {
        raw.send(GET_STATUS, 0, &[], &[]);
        raw.reply_u64(GET_STATUS)
    };
    assert_eq!(status(&raw), 0);
    for value in [1, 3, 11, 15, 0, 143] {
        assert_eq!(ask(&raw, SET_STATUS, &u64s(&[value])), 0);
        assert_eq!(status(&raw), value);
    }
    // Bits that no driver sets.
    for value in [16, 32, 64, 256, 1 << 32, u64::MAX] {
        assert_eq!(ask(&raw, SET_STATUS, &u64s(&[value])), 1);
        assert_eq!(status(&raw), 143);
    }
    assert_eq!(faults(&lab, FrontendFault::Payload), 6);
    link(&commands);
    assert!(commands.try_recv().is_err(), "the worker is not concerned");
    assert_eq!(ask(&raw, 34, &[]), 0);
    assert_eq!(status(&raw), 0, "RESET_DEVICE resets it");
}

/// As QEMU 7.2 stops a device.
#[test]
fn a_status_of_zero_keeps_the_indices_of_the_queues() {
    let (lab, worker) = Harness::of_model(NetworkModel);
    let _commands = worker.answer_all();
    let raw = lab.raw(0);
    for (request, payload, fds) in start_sequence() {
        let payload = match request {
            16 => u64s(&[PROTOCOL | OWN]),
            2 => u64s(&[1 << 32 | 1 << 30]),
            _ => payload,
        };
        let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        raw.send(request, 0, &payload, &fds);
    }
    assert_eq!(ask(&raw, SET_STATUS, &u64s(&[15])), 0);
    assert_eq!(ask(&raw, SET_STATUS, &u64s(&[0])), 0);
    raw.send(11, 0, &state(1, 0), &[]);
    assert_eq!(raw.reply(), (11, state(1, 77)));
}

/// As a driver that comes from a device with more features.
#[test]
fn features_that_are_not_offered_are_refused_by_name() {
    let (lab, raw, commands) = connected(OWN);
    let more = u64s(&[1 << 32 | 1 << 30 | 1 << 11 | 1 << 40]);
    assert_eq!(ask(&raw, 2, &more), 1);
    // The driver's attempt to go on fails where it reads the status.
    assert_eq!(ask(&raw, SET_STATUS, &u64s(&[11])), 0);
    raw.send(GET_STATUS, 0, &[], &[]);
    assert_eq!(raw.reply_u64(GET_STATUS), 3, "no FEATURES_OK");
    assert_eq!(ask(&raw, 2, &u64s(&[1 << 32 | 1 << 30])), 0);
    assert_eq!(ask(&raw, SET_STATUS, &u64s(&[11])), 0);
    raw.send(GET_STATUS, 0, &[], &[]);
    assert_eq!(raw.reply_u64(GET_STATUS), 11);
    // A front-end that waits for no answer cannot go on with other features than the device.
    raw.send(2, 0, &more, &[]);
    raw.expect_end();
    wait_for(&commands, "Disconnected");
    assert_eq!(faults(&lab, FrontendFault::Unsupported), 2);
}

#[test]
fn the_refusal_of_features_has_their_names() {
    let account = Budget::unlimited().account();
    let threads = ThreadCount::default();
    let mut session = Session::new(Arc::new(NetworkModel), 1024, account, &threads);
    let outcome = session.handle_message(Message {
        request: 2,
        need_reply: false,
        payload: u64s(&[1 << 32 | 1 << 11 | 1 << 40]),
        fds: Vec::new(),
        number: 0,
    });
    assert!(matches!(outcome.step, Step::Close));
    assert_eq!(
        outcome.refusal.unwrap().text,
        "SET_FEATURES: features that were not offered: SEGMENTATION, RING_RESET"
    );
}

#[test]
fn a_device_changes_its_configuration_space_and_notifies_the_driver() {
    let (_lab, raw, commands) = connected(OWN);
    let link = link(&commands);
    let (ours, theirs) = UnixStream::pair().unwrap();
    raw.send(21, NEED_REPLY, &[], &[theirs.as_fd()]);
    assert_eq!(raw.reply_u64(21), 0);
    drop(theirs);
    ours.set_read_timeout(Some(DEADLINE)).unwrap();
    let mut message = [0; 12];
    for value in [3, 1] {
        link.change_config(2, &[value], true);
        (&ours).read_exact(&mut message).unwrap();
        // CONFIG_CHANGE_MSG, which asks for no reply.
        assert_eq!(message, header(2, 1, 0));
        assert_eq!(config(&raw), [0, 0, value]);
    }
    // Without a notification, and beyond the end.
    link.change_config(2, &[7, 8], false);
    link.change_config(usize::MAX, &[9], false);
    link.change_config(1, &[5], true);
    (&ours).read_exact(&mut message).unwrap();
    assert_eq!(config(&raw), [0, 5, 7]);
    ours.set_nonblocking(true).unwrap();
    let nothing = (&ours).read(&mut message).unwrap_err();
    assert_eq!(nothing.kind(), std::io::ErrorKind::WouldBlock);
    // Other features begin with another configuration space; logging does not.
    assert_eq!(ask(&raw, 2, &u64s(&[1 << 32 | 1 << 30])), 0);
    assert_eq!(config(&raw), [0, 0, 1]);
    link.change_config(2, &[3], false);
    wait_for_config(&raw, [0, 0, 3]);
    assert_eq!(ask(&raw, 2, &u64s(&[1 << 32 | 1 << 30 | F_LOG_ALL])), 0);
    assert_eq!(config(&raw), [0, 0, 3]);
}

/// A front-end that never reads its channel, has closed it, or has sent a pipe, delays nothing.
#[test]
fn notifications_of_changes_wait_for_no_front_end() {
    let (lab, raw, commands) = connected(OWN);
    let link = link(&commands);
    let (ours, theirs) = UnixStream::pair().unwrap();
    raw.send(21, NEED_REPLY, &[], &[theirs.as_fd()]);
    assert_eq!(raw.reply_u64(21), 0);
    drop(theirs);
    for _ in 0..5000 {
        link.change_config(2, &[1], true);
    }
    raw.ping();
    drop(ours);
    link.change_config(2, &[1], true);
    raw.ping();
    let (_reader, writer) = rustix::pipe::pipe().unwrap();
    raw.send(21, NEED_REPLY, &[], &[writer.as_fd()]);
    assert_eq!(raw.reply_u64(21), 0);
    link.change_config(2, &[4], true);
    wait_for_config(&raw, [0, 0, 4]);
    // A change for a connection that has ended.
    drop(raw);
    wait_for(&commands, "Disconnected");
    let raw = lab.raw(0);
    raw.send(16, 0, &u64s(&[PROTOCOL | OWN]), &[]);
    link.change_config(2, &[9], true);
    self::link(&commands).change_config(1, &[5], true);
    wait_for_config(&raw, [0, 5, 1]);
}
