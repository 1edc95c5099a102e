//! SEQPACKET messages from a sibling to the guest. The test is the sibling and also sends what no
//! correct sibling sends.

use std::sync::Arc;
use std::time::Duration;
use zerosock_proto::vsock::Shard;
use zerosock_proto::wire::vsock::{Op, Repr};
use zerosock_proto::{Address, Cid, Instant, Port};
use zerosock_virtio::device::WorkerDevice;
use zerosock_virtio::outbox::DeviceAddr;

use super::lab::DeviceFixture;
use super::test_guest::{self, Guest};
use super::*;
use crate::device::host_sockets::HostSocket;
use crate::device::state::bridge_state::BridgeEvent;
use crate::device::state::flags::Flags;
use crate::device::state::peer::Peer;
use crate::device::state::program::App;
use crate::device::state::sibling_message::SiblingMessage;
use crate::table::leases::Leases;
use crate::table::outgoing::Outgoing;
use crate::table::send_calls::SendCalls;
use crate::table::sockets::MessageEnd;

/// The address of the sibling's service.
const THERE: Address = Address::new(Cid::HOST, Port::new(9));
const HERE: Address = Address::new(Cid::new(3), Port::new(5));

/// A SEQPACKET connection between a guest and a sibling.
struct Joined {
    lab: DeviceFixture,
    guest: Guest,
    flow: FlowId,
}

impl Joined {
    fn new() -> Joined {
        let mut lab = DeviceFixture::new();
        let (device, mut cx) = lab.lend();
        let guest = test_guest::start(device);
        device.shard.set_seqpacket(true);
        let connect = SiblingMessage::Connect {
            from: Peer {
                device: DeviceAddr {
                    worker: 0,
                    number: 7,
                },
                flow: some_flow(),
            },
            local: THERE,
            peer: HERE,
            socket_type: SocketType::SeqPacket,
        };
        device.bridges_with(&mut cx).handle_sibling_message(connect);
        device.turn(&mut cx);
        let response = Repr {
            src: HERE,
            dst: THERE,
            len: 0,
            socket_type: SocketType::SeqPacket.into(),
            op: Op::Response.into(),
            flags: 0,
            buf_alloc: 1 << 20,
            fwd_cnt: 0,
        };
        let _ = device.shard.handle_packet(cx.now, &response);
        device.turn(&mut cx);
        let sent: Vec<SiblingMessage> = sent(&mut lab);
        let is_accepted =
            |message: &SiblingMessage| matches!(message, SiblingMessage::Accepted { .. });
        assert!(sent.iter().any(is_accepted), "{sent:?}");
        let asked = sent.iter().find_map(|message| match message {
            SiblingMessage::Asking { from, .. } => Some(from.flow),
            _ => None,
        });
        let mut joined = Joined {
            flow: asked.expect("the guest was asked"),
            lab,
            guest,
        };
        assert_eq!(joined.guest.received().len(), 1, "the request");
        joined
    }

    /// Delivers messages of the sibling; returns the operations and lengths that the guest
    /// receives.
    fn deliver(&mut self, messages: impl IntoIterator<Item = SiblingMessage>) -> Vec<(Op, u32)> {
        let (device, mut cx) = self.lab.lend();
        for message in messages {
            device.bridges_with(&mut cx).handle_sibling_message(message);
        }
        while device.turn(&mut cx) {}
        let received = self.guest.received();
        let told = |header: &Repr| (header.op.known().unwrap(), header.len);
        received.iter().map(told).collect()
    }

    fn bytes(&self, len: usize) -> SiblingMessage {
        SiblingMessage::Copied {
            to: self.flow,
            bytes: vec![7; len],
        }
    }

    fn end(&self, len: u32) -> SiblingMessage {
        let ends = MessageEnd::Message;
        SiblingMessage::Ended {
            to: self.flow,
            len,
            ends,
        }
    }
}

/// A flow of another device.
fn some_flow() -> FlowId {
    let ports = Arc::new(zerosock_proto::vsock::PortTable::new());
    let config = zerosock_proto::vsock::ShardConfig::driver(Cid::new(4));
    let mut shard = Shard::new(config, ports);
    let stream = SocketType::Stream;
    shard
        .connect(
            Instant::ZERO,
            Address::new(Cid::new(4), THERE.port),
            HERE,
            stream,
        )
        .unwrap()
}

/// Messages of the device to the sibling.
fn sent(lab: &mut DeviceFixture) -> Vec<SiblingMessage> {
    let (_, cx) = lab.lend();
    std::iter::from_fn(|| cx.outbox.pop_local())
        .map(|(_, message)| message)
        .collect()
}

#[test]
fn messages_behind_an_empty_message_are_sent_in_place() {
    use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, socketpair};
    let mut joined = Joined::new();
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let kind = SocketType::SEQPACKET;
    let (socket, program) = socketpair(AddressFamily::UNIX, kind, flags, None).unwrap();
    let key = joined.lab.device.bridges.key_of(joined.flow).unwrap();
    let permit = joined.lab.device.account.take_descriptors(1).unwrap();
    let socket = HostSocket::accepted(socket, permit);
    let bridge = joined.lab.device.bridges.get_mut(key).unwrap();
    bridge.peer = BridgePeer::Socket { socket, ok: None };
    bridge.state.apply(BridgeEvent::Connected);
    bridge.flags.insert(Flags::WRITABLE);
    let lengths = [0, 1000, 0, 0, 2000, 3000, 0];
    for len in lengths {
        joined.guest.send_message(HERE.port.get(), THERE, len);
    }
    let (device, mut cx) = joined.lab.lend();
    while device.turn(&mut cx) {}
    for len in lengths {
        let mut packet = [0; 4096];
        let (_, got) = rustix::net::recv(&program, &mut packet[..], RecvFlags::empty()).unwrap();
        assert_eq!(got, len as usize);
    }
    let mut stats = crate::stats::Stats::default();
    joined.lab.counters().add_to(&mut stats);
    assert_eq!((stats.copied_bytes, stats.in_place_bytes), (0, 6000));
}

#[test]
fn complete_messages_are_passed_to_the_guest() {
    let mut joined = Joined::new();
    let messages = [joined.bytes(3000), joined.bytes(2000), joined.end(5000)];
    let received = joined.deliver(messages);
    assert!(received.iter().all(|(op, _)| *op == Op::Rw), "{received:?}");
    assert_eq!(received.iter().map(|(_, len)| len).sum::<u32>(), 5000);
    let empty = [joined.end(0)];
    assert_eq!(joined.deliver(empty), [(Op::Rw, 0)]);
}

#[test]
fn message_length_without_its_bytes_resets_the_connection() {
    for have in [0, 60] {
        let mut joined = Joined::new();
        let mut messages = vec![joined.end(100)];
        if have > 0 {
            messages.insert(0, joined.bytes(have));
        }
        let received = joined.deliver(messages);
        let mut expected = vec![(Op::Rst, 0)];
        if have > 0 {
            expected.insert(0, (Op::Rw, have as u32));
        }
        assert_eq!(received, expected, "{have} of 100 bytes");
        let sent = sent(&mut joined.lab);
        let told = sent
            .iter()
            .any(|one| matches!(one, SiblingMessage::Reset { .. }));
        assert!(told, "{sent:?}");
    }
}

/// The rest of a message of a host socket waits in the same queue as those of the embedding program.
#[test]
fn a_message_of_a_host_socket_does_not_count_as_sent_by_the_program() {
    let mut joined = Joined::new();
    let leases = Arc::new(Leases::new(8));
    let app = App::new(leases, Duration::from_secs(1), 0, false);
    joined.lab.shared.app = Some(Box::new(app));
    let (device, mut cx) = joined.lab.lend();
    let room = device.shard.reserve_message(joined.flow, 100).unwrap();
    let message = Outgoing::new(room, vec![7; 100], false);
    device.half(&mut cx).keep_outgoing(message);
    while device.turn(&mut cx) {}
    let app = cx.shared.app.as_deref().unwrap();
    assert_eq!((app.tally.sent, app.tally.packets_sent), (0, 0));
    let received = joined.guest.received();
    assert_eq!(received.iter().map(|header| header.len).sum::<u32>(), 100);
}
