//! Attaching a driver to its device: memory, queues, and the requests that start and stop them.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time;

use zerosock_proto::Cid;
use zerosock_proto::vsock::{PortTable, Shard, ShardConfig};
use zerosock_ring::DriverLayout;

use super::arena::{Arena, PairSlots};
use super::datagrams::Datagrams;
use super::doorbell::Doorbell;
use super::link::{DriverAttachError, EVENT, Link, NO_FRONTEND};
use super::queue_pairs::{QueuePair, QueuePairId, QueuePairSet};
use super::queues::{EventQueue, RxQueue, TxQueue};
use super::store::Buffers;
use super::{Driver, DriverConfig, DriverStats, FrontendError, HOLD, MOST_COPIED};
use crate::table::leases::Leases;
use crate::table::listeners::Listeners;
use crate::table::loans::Loans;
use crate::table::sockets::Sockets;
use crate::table::tally::Tally;
use zerosock_vhost_user::frontend::{Plan, QueueEventFds};

impl Driver {
    /// Creates the memory, connects to the device at `config.socket`, negotiates and starts the
    /// queues.
    pub fn attach(config: DriverConfig) -> Result<Driver, DriverAttachError> {
        Driver::build(config, Link::connect)
    }

    /// As [`attach`](Driver::attach), over a connected vhost-user socket, as a process has it that
    /// [attaches](crate::control::attach) to a daemon. [`reconnect`](Driver::reconnect) would
    /// connect to `config.socket`.
    pub fn attach_over(
        socket: UnixStream,
        config: DriverConfig,
    ) -> Result<Driver, DriverAttachError> {
        Driver::build(config, |config| Link::over(socket, config))
    }

    fn build(
        config: DriverConfig,
        connect: impl FnOnce(&DriverConfig) -> Result<Link, DriverAttachError>,
    ) -> Result<Driver, DriverAttachError> {
        config.check()?;
        let link = connect(&config)?;
        let arena = Arena::new(&config, link.pairs, Plan::default())?;
        let event_fds = QueueEventFds::new(link.pairs.queues());
        let doorbell = Doorbell::Eventfds(event_fds.map_err(DriverAttachError::Eventfd)?);
        let mut driver = Driver::over(config, link, arena, doorbell)?;
        let bases = vec![0; driver.store.arena.rings.len()];
        driver.start(&bases)?;
        driver.kick_posted();
        Ok(driver)
    }

    /// Creates the queues for a connected device, which has not started yet.
    pub(super) fn over(
        config: DriverConfig,
        link: Link,
        (arena, slots): (Arena, Vec<PairSlots>),
        doorbell: Doorbell,
    ) -> Result<Driver, DriverAttachError> {
        let watch = doorbell.watch(link.connection());
        let watch = watch.map_err(DriverAttachError::Eventfd)?;
        let mut event_queue = EventQueue::new(&arena, arena.rings[EVENT], link.event_idx)?;
        let cid = link.cid;
        let ports = Arc::new(match &config.host_ports {
            Some(ports) => PortTable::with_ephemeral(ports.clone()),
            None => PortTable::new(),
        });
        // Each slot can be on a lease or a loan, and as many copies on lease.
        let count = usize::from(config.slots());
        let lease_table = Leases::new((4 * count * slots.len()).max(256));
        let mut datagrams = Datagrams::new(cid);
        datagrams.negotiated(link.datagrams, link.datagram_flow);
        let mut sockets = Sockets::new(Arc::new(lease_table), HOLD, MOST_COPIED);
        let mut queue_pairs = Vec::new();
        for slots in slots {
            let queue_pair = QueuePairId::of_pool(sockets.add_pool(config.slots().into()));
            let (rx, tx) = (arena.rings[queue_pair.rx()], arena.rings[queue_pair.tx()]);
            let mut rx = RxQueue::new(&slots, rx, link.event_idx)?;
            let tx = TxQueue::new(&slots, tx, link.event_idx)?;
            // The device has not started yet and needs no kick.
            let _ = rx.publish();
            let mut shard = new_shard(&config, cid, &ports);
            link.apply_features(&mut shard);
            queue_pairs.push(QueuePair::new(rx, tx, slots, shard));
        }
        let _ = event_queue.publish();
        let mut queue_pairs = queue_pairs.into_iter();
        // There is always at least one pair.
        let first = queue_pairs
            .next()
            .ok_or(DriverAttachError::Missing("a queue pair"))?;
        let queue_pairs = QueuePairSet::new(first, queue_pairs.collect());
        Ok(Driver {
            store: Buffers::new(arena, queue_pairs),
            sockets,
            loans: Loans::default(),
            tally: Tally::default(),
            datagrams,
            doorbell,
            watch,
            link: Some(link),
            event_queue,
            cid,
            epoch: time::Instant::now(),
            listeners: Listeners::default(),
            stats: DriverStats::default(),
            armed: false,
            idle_turns: 0,
            trusted: false,
            config,
        })
    }

    /// Passes the queues to the device, each to start at its index in `bases`.
    fn start(&mut self, bases: &[u16]) -> Result<(), DriverAttachError> {
        let link = self.link.as_mut().ok_or(FrontendError::Closed)?;
        link.start(&self.store.arena, &self.doorbell, bases)
    }

    /// Notifies a device that has just started of the buffers that are posted.
    pub(super) fn kick_posted(&self) {
        if self.doorbell.is_shared() {
            return self.doorbell.kick_all();
        }
        for queue_pair in self.store.queue_pairs.ids() {
            self.doorbell.kick(queue_pair.rx());
        }
        self.doorbell.kick(EVENT);
    }

    /// Attaches to a restarted device with the existing memory, queues and listeners, as a VMM does
    /// without the guest's help. Each queue continues at its used index, so that the new device
    /// processes again what the old one had taken and not returned. Connections have ended with the
    /// old device.
    pub fn reconnect(&mut self) -> Result<(), DriverAttachError> {
        if self.doorbell.is_shared() {
            return Err(NO_FRONTEND);
        }
        if self.link.is_some() {
            self.device_gone();
        }
        let mut link = Link::connect(&self.config)?;
        if usize::from(link.pairs.queues()) != self.store.arena.rings.len() {
            return Err(DriverAttachError::Missing("as many queue pairs as before"));
        }
        if let Some(connection) = link.connection() {
            let watched = self.watch.device(connection);
            watched.map_err(DriverAttachError::Eventfd)?;
        }
        let bases = self.used_indices();
        link.start(&self.store.arena, &self.doorbell, &bases)?;
        self.doorbell.kick_all();
        for queue_pair in self.store.queue_pairs.iter_mut() {
            link.apply_features(&mut queue_pair.shard);
        }
        self.datagrams
            .negotiated(link.datagrams, link.datagram_flow);
        self.link = Some(link);
        Ok(())
    }

    /// Passes the memory table again and starts the queues at `bases`, one index each.
    pub fn resume(&mut self, bases: &[u16]) -> Result<(), DriverAttachError> {
        self.start(bases)?;
        self.doorbell.kick_all();
        Ok(())
    }

    /// Sends the memory table again while the queues run, as a VMM does for memory hot-plug.
    pub fn send_memory_table(&mut self) -> Result<(), FrontendError> {
        let frontend = self.link.as_mut().and_then(Link::frontend);
        let table = self.store.arena.shared.table();
        frontend.ok_or(FrontendError::Closed)?.set_mem_table(&table)
    }

    /// The used index of each queue in shared memory: receive, transmit, event, then those of
    /// further pairs.
    pub fn used_indices(&self) -> Vec<u16> {
        let memory = &self.store.arena.memory;
        let index = |ring: &DriverLayout| {
            // struct virtq_used { le16 flags; le16 idx; … } (virtio 1.2, 2.7.8)
            let mut index = [0u8; 2];
            let mut pieces = Vec::new();
            if memory.translate(ring.used + 2, 2, &mut pieces).is_ok() {
                memory.read(&pieces, 0, &mut index);
            }
            u16::from_le_bytes(index)
        };
        self.store.arena.rings.iter().map(index).collect()
    }
}

fn new_shard(config: &DriverConfig, cid: Cid, ports: &Arc<PortTable>) -> Shard {
    let shard_config = ShardConfig {
        buf_alloc: config.buf_alloc,
        max_connections: config.max_connections,
        connect_timeout: config.connect_timeout,
        ..ShardConfig::driver(cid)
    };
    Shard::new(shard_config, ports.clone())
}
