//! A device without queues, for tests of what it does by itself.

use std::sync::Arc;
use std::time::Duration;
use zerosock_proto::vsock::{PortTable, Shard, ShardConfig};
use zerosock_proto::{Address, Cid, Instant, Port};
use zerosock_sys::notify::Notifier;
use zerosock_virtio::outbox::{DeviceAddr, Outbox};
use zerosock_virtio::poller::Poller;

use super::*;
use crate::device::host_sockets::hybrid::OkConvention;
use crate::device::state::bridge_state::BridgeEvent;
use crate::device::state::flags::Flags;
use crate::device::state::sibling_message::SiblingMessage;
use crate::stats::Counters;

pub(super) struct DeviceFixture {
    poller: Poller,
    outbox: Outbox<SiblingMessage>,
    notifier: Notifier,
    pub(super) shared: Shared,
    pub(super) device: Device,
}

impl DeviceFixture {
    pub(super) fn new() -> DeviceFixture {
        DeviceFixture::of(Arc::new(PortTable::new()))
    }

    /// One queue pair of a device; `ports` is the port table that its pairs share.
    pub(super) fn of(ports: Arc<PortTable>) -> DeviceFixture {
        DeviceFixture::made(ports, |_| ())
    }

    /// With these changes of the configuration of its protocol core.
    pub(super) fn with(change: impl FnOnce(&mut ShardConfig)) -> DeviceFixture {
        DeviceFixture::made(Arc::new(PortTable::new()), change)
    }

    fn made(ports: Arc<PortTable>, change: impl FnOnce(&mut ShardConfig)) -> DeviceFixture {
        let second = Duration::from_secs(1);
        let addr = DeviceAddr {
            worker: 0,
            number: 0,
        };
        let cid = Cid::new(3);
        let mut config = ShardConfig::device(cid);
        change(&mut config);
        let shard = Shard::new(config, ports);
        DeviceFixture {
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
            device: Device::new(addr, cid, shard, HostAccess::None, None),
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
        let (device, mut cx) = self.lend();
        let local = Address::new(Cid::HOST, Port::ANY);
        let peer = Address::new(Cid::new(3), Port::new(1));
        let stream = zerosock_proto::wire::vsock::SocketType::Stream;
        let flow = device.shard.connect(cx.now, local, peer, stream).unwrap();
        assert!(device.bridges_with(&mut cx).reserve_bridge(flow));
        let key = device
            .bridges_with(&mut cx)
            .add_bridge(flow, BridgePeer::Asked(None));
        let bridge = device.bridges.get_mut(key).unwrap();
        bridge.state.apply(BridgeEvent::Connected);
        bridge.flags.insert(Flags::READABLE);
        device.bridges.enqueue(key);
        key
    }
}
