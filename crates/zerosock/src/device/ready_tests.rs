//! The ready list: each bridge is on it at most once, and entries of removed bridges are swept.

use std::sync::Arc;
use std::time::Duration;
use zerosock_proto::vsock::{PortTable, Shard, ShardConfig};
use zerosock_proto::{Address, Cid, Instant, Port};
use zerosock_sys::notify::Notifier;
use zerosock_virtio::outbox::{DeviceAddr, Outbox};
use zerosock_virtio::poller::Poller;

use super::*;
use crate::device::host_sockets::hybrid::OkConvention;
use crate::device::state::sibling_message::SiblingMessage;
use crate::stats::Counters;

pub(super) struct Lab {
    poller: Poller,
    outbox: Outbox<SiblingMessage>,
    notifier: Notifier,
    pub(super) shared: Shared,
    pub(super) device: Device,
}

impl Lab {
    pub(super) fn new() -> Lab {
        Lab::of(Arc::new(PortTable::new()))
    }

    /// One queue pair of a device; `ports` is the port table that its pairs share.
    pub(super) fn of(ports: Arc<PortTable>) -> Lab {
        let second = Duration::from_secs(1);
        let addr = DeviceAddr {
            worker: 0,
            number: 0,
        };
        let cid = Cid::new(3);
        let shard = Shard::new(ShardConfig::device(cid), ports);
        Lab {
            poller: Poller::new().unwrap(),
            outbox: Outbox::new(0),
            notifier: Notifier::new(),
            shared: Shared {
                routes: Arc::default(),
                counters: Arc::default(),
                limits: Limits {
                    handshake: second,
                    connect: second,
                    hold: second,
                    overflow: 1 << 20,
                    old_memory: 0,
                    handshakes: 1,
                    lingering: 1,
                    linger: second,
                    ok: OkConvention::GuestPort,
                },
                connector: None,
                mailbox: None,
                app: None,
            },
            device: Device::new(addr, cid, shard, HostEnd::None, None),
        }
    }

    pub(super) fn counters(&self) -> &Counters {
        &self.shared.counters
    }

    pub(super) fn lend(&mut self) -> (&mut Device, Context<'_>) {
        let cx = Context {
            now: Instant::ZERO,
            clock: None,
            poller: &self.poller,
            outbox: &mut self.outbox,
            notifier: &self.notifier,
            spins: false,
            shared: &mut self.shared,
        };
        (&mut self.device, cx)
    }

    /// A bridge that may have something for the guest.
    pub(super) fn ready(&mut self) -> u32 {
        let (device, cx) = self.lend();
        let local = Address::new(Cid::HOST, Port::ANY);
        let peer = Address::new(Cid::new(3), Port::new(1));
        let stream = zerosock_proto::wire::vsock::SocketType::Stream;
        let flow = device.shard.connect(cx.now, local, peer, stream).unwrap();
        let key = device.add_bridge(flow, BridgePeer::Asked(None), &cx);
        let bridge = device.bridges.get_mut(key as usize).unwrap();
        (bridge.open, bridge.readable) = (true, true);
        device.enqueue(key);
        device.enqueue(key);
        key
    }

    fn remove(&mut self, key: u32) {
        let (device, mut cx) = self.lend();
        let bridge = device.remove_bridge(key, &mut cx).unwrap();
        let _ = device.shard.reset(bridge.flow.unwrap());
        while device.shard.poll_event().is_some() {}
    }

    /// Takes the bridges off the list in the order of their turns, as `transmit` does.
    fn turns(&mut self) -> Vec<u32> {
        let mut all = Vec::new();
        while let Some(key) = self.device.ready.pop_front() {
            if let Some(bridge) = self.device.bridges.get_mut(key as usize)
                && std::mem::take(&mut bridge.in_ready)
            {
                all.push(key);
            }
        }
        all
    }
}

#[test]
fn ready_bridges_are_listed_once_in_order() {
    let mut lab = Lab::new();
    let keys: Vec<u32> = (0..10).map(|_| lab.ready()).collect();
    assert_eq!(lab.device.ready.len(), 10);
    assert_eq!(lab.turns(), keys);
}

#[test]
fn entries_of_removed_bridges_are_swept() {
    let mut lab = Lab::new();
    let stays: Vec<u32> = (0..10).map(|_| lab.ready()).collect();
    for _ in 0..10_000 {
        let key = lab.ready();
        lab.remove(key);
        let entries = lab.device.ready.len();
        assert!(entries <= 10 + 2 * 66, "{entries} entries for 10 bridges");
    }
    // A bridge with a reused key is listed once, and every other bridge keeps its turn.
    let last = lab.ready();
    let mut turns = lab.turns();
    assert_eq!(turns.iter().filter(|&&key| key == last).count(), 1);
    turns.retain(|key| *key != last);
    assert_eq!(turns, stays);
}
