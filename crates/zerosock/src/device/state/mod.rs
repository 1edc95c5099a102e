//! What a device consists of. The modules here have the data and what concerns nothing else; the
//! modules above have what a device does with them.

pub(crate) mod app;
pub(crate) mod associations;
pub(crate) mod backlogs;
pub(crate) mod bridge;

pub(crate) mod bridge_state;
pub(crate) mod bridges;
pub(crate) mod datagrams;
pub(crate) mod flags;
pub(crate) mod flow_table;
pub(crate) mod forwarded;
pub(crate) mod guest_backlogs;
pub(crate) mod guests;
pub(crate) mod host;
pub(crate) mod lingering;
pub(crate) mod messages;
pub(crate) mod peer;
pub(crate) mod program;
pub(crate) mod queue_index;
pub(crate) mod queue_pairs;
pub(crate) mod saved;
pub(crate) mod sibling_message;
pub(crate) mod stop;
pub(crate) mod succession;
pub(crate) mod teardown;
pub(crate) mod timers;
pub(crate) mod turn_budget;
pub(crate) mod zero_copy;

use std::collections::VecDeque;
use std::fmt;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use slab::Slab;
use zerosock_proto::vsock::Shard;
use zerosock_proto::{Cid, Instant, Port};
use zerosock_relay::connector::Connector;
use zerosock_sys::LogLimit;
use zerosock_sys::account::{Account, Budget};
use zerosock_virtio::mailbox::Sender;
use zerosock_virtio::outbox::DeviceAddr;
use zerosock_virtio::queues::QueueSet;
use zerosock_virtio::ring::Ring;

use self::app::AppState;
use self::backlogs::Backlogs;
use self::bridges::Bridges;
use self::datagrams::Datagrams;
use self::guest_backlogs::GuestBacklogs;
use self::guests::Guests;
use self::host::{Handshake, HostAccess};
use self::lingering::Lingering;
use self::program::App;
pub(crate) use self::queue_index::{EVENT, RX, TX};
use self::queue_pairs::QueuePairSet;
use self::stop::Stop;
use self::succession::Succession;
use self::teardown::Teardown;
use self::timers::Timers;
use self::turn_budget::TurnBudget;
use crate::device::host_sockets::hybrid::OkConvention;
use crate::device::traffic::Traffic;
use crate::routing::Routes;
use crate::stats::{Counters, Gauges};
use crate::table::coalesced::CoalescedWrites;
use crate::table::outgoing::Outgoing;

/// Limits of each device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Time from accepting a host program to its complete CONNECT line.
    pub(crate) handshake: Duration,
    /// Time for which a connect to a host socket with a full backlog is retried.
    pub(crate) connect: Duration,
    /// Time for which a stalled connection may hold chains of the guest.
    pub(crate) hold: Duration,
    /// Bytes that all connections of a device together may have in overflow buffers. Connections
    /// with the embedding program have a second limit of the same size.
    pub(crate) overflow: usize,
    /// Bytes of replaced guest memory that leases may keep mapped; at least twice the size of the
    /// guest's current memory is allowed.
    pub(crate) old_memory: u64,
    /// Accepted host programs with an incomplete CONNECT line, at most.
    pub(crate) handshakes: usize,
    /// Host sockets of ended connections that still have bytes to take, at most.
    pub(crate) lingering: usize,
    /// Time after which a lingering socket that takes no byte is closed.
    pub(crate) linger: Duration,
    pub(crate) ok: OkConvention,
}

/// State that all devices of a worker share.
pub(crate) struct Shared {
    pub(crate) routes: Arc<Routes>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) limits: Limits,
    /// Resolves names and makes connections that take time; `None`: no rule needs it.
    pub(crate) connector: Option<Connector>,
    /// The worker's own mailbox, for answers of the connector.
    pub(crate) mailbox: Option<Sender<WorkerMessage>>,
    /// The embedding program's state, if a program embeds the devices.
    pub(crate) app: Option<Box<App>>,
}

/// What the worker lends a device for one call.
pub(crate) type Context<'a> = zerosock_virtio::device::Context<'a, Device>;

/// A worker of vsock devices.
pub(crate) type Worker = zerosock_virtio::worker::Worker<Device>;

/// A message to a worker of vsock devices.
pub(crate) type WorkerMessage = zerosock_virtio::worker::WorkerMessage<Device>;

/// The rings of a queue pair.
#[derive(Debug, Default)]
pub(crate) struct VsockRings {
    pub(crate) rx: Option<Ring>,
    pub(crate) tx: Option<Ring>,
    /// Only the first pair has an event queue.
    pub(crate) event: Option<Ring>,
}

/// What the driver of a device is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum DriverKind {
    /// A VM.
    Vm,
    /// An attached process, on memory of its own.
    Process,
    /// A guest endpoint: a process in a VM with this device, on pages of the guest.
    GuestEndpoint { vm: DeviceAddr },
}

/// The device half of one queue pair: see the module.
pub(crate) struct Device {
    pub(in crate::device) addr: DeviceAddr,
    pub(in crate::device) cid: Cid,
    pub(in crate::device) shard: Shard,
    pub(in crate::device) host: HostAccess,
    /// Set if the guest is a host service (CID 2): it may connect from these ports and from ports
    /// that it has claimed, so that no two services use the same address.
    pub(in crate::device) service: Option<RangeInclusive<Port>>,
    pub(in crate::device) queue_pairs: QueuePairSet,
    /// The descriptor budget that host sockets count against.
    pub(in crate::device) account: Account,
    pub(in crate::device) warnings: LogLimit,
    /// Bounds the lines about connections that are denied, so that they hide no warning.
    pub(in crate::device) denials: LogLimit,
    /// Bounds the lines of the access log, of all queue pairs together.
    pub(in crate::device) access_log: Arc<LogLimit>,

    pub(in crate::device) queues: QueueSet<VsockRings>,
    /// A TRANSPORT_RESET event has to be sent to the driver.
    pub(in crate::device) announce_reset: bool,

    pub(in crate::device) bridges: Bridges,
    pub(in crate::device) teardown: Teardown,
    pub(in crate::device) stop: Stop,
    pub(in crate::device) succession: Succession,
    /// A queue has broken, or TRANSPORT_RESET was sent, and the connections from this bridge and from this flow of the program on have
    /// not been reset yet.
    pub(in crate::device) reset_next: Option<(u32, usize)>,
    pub(in crate::device) lingering: Lingering,
    pub(in crate::device) backlogs: Backlogs,
    pub(in crate::device) guest_backlogs: GuestBacklogs,
    pub(in crate::device) handshakes: Slab<Handshake>,
    /// Messages with remaining bytes that wait for buffers of the guest.
    pub(in crate::device) outgoing: VecDeque<Outgoing>,
    /// Small writes of the embedding program, coalesced into larger packets.
    pub(in crate::device) coalesced: CoalescedWrites,
    pub(in crate::device) timers: Timers,
    /// When the pending command stops waiting for zero-copy sends.
    pub(in crate::device) sends_end_by: Option<Instant>,
    /// Connection requests to siblings without an answer.
    pub(in crate::device) unanswered: usize,
    /// Payload bytes moved in this turn in the current direction.
    pub(in crate::device) moved: usize,
    /// The bound of `moved` for packets from the guest. Devices of an embedding program keep the smallest.
    pub(in crate::device) from_guest_budget: TurnBudget,
    /// The bound of `moved` for packets to the guest, and of the bytes of one read from a host socket.
    pub(in crate::device) to_guest_budget: TurnBudget,
    /// The guest had no buffer for something that is to be sent to it.
    pub(in crate::device) starved: bool,
    pub(in crate::device) app: AppState,
    pub(in crate::device) datagrams: Datagrams,

    pub(crate) driver: DriverKind,
    /// The rings have unpublished changes that [`flush`](Self::app_flush) publishes.
    pub(crate) touched: bool,
    /// The values last reported to the worker's counters.
    pub(in crate::device) counted: Gauges,
    pub(in crate::device) traffic: Traffic,
    /// The guest endpoints, if the guest may have any. Only the first queue pair of a VM has them.
    pub(in crate::device) guests: Option<Box<Guests>>,
}

impl Device {
    pub(crate) fn new(
        addr: DeviceAddr,
        cid: Cid,
        shard: Shard,
        host: HostAccess,
        service: Option<RangeInclusive<Port>>,
    ) -> Device {
        Device {
            addr,
            cid,
            shard,
            host,
            service,
            queue_pairs: QueuePairSet::one(addr),
            account: Budget::unlimited().account(),
            warnings: LogLimit::default(),
            denials: LogLimit::default(),
            access_log: Arc::default(),
            queues: QueueSet::new(0),
            announce_reset: false,
            bridges: Bridges::default(),
            teardown: Teardown::default(),
            stop: Stop::default(),
            succession: Succession::default(),
            reset_next: None,
            lingering: Lingering::default(),
            backlogs: Backlogs::default(),
            guest_backlogs: GuestBacklogs::default(),
            handshakes: Slab::new(),
            outgoing: VecDeque::new(),
            coalesced: CoalescedWrites::default(),
            timers: Timers::default(),
            sends_end_by: None,
            unanswered: 0,
            moved: 0,
            from_guest_budget: TurnBudget::default(),
            to_guest_budget: TurnBudget::default(),
            starved: false,
            app: AppState::default(),
            datagrams: Datagrams::new(),
            driver: DriverKind::Vm,
            touched: false,
            counted: Gauges::default(),
            traffic: Traffic::default(),
            guests: None,
        }
    }

    /// Sets the bound of the access log.
    pub(crate) fn set_access_log(&mut self, limit: Arc<LogLimit>) {
        self.access_log = limit;
    }

    /// Sets where the device counts what it passes.
    pub(crate) fn set_traffic(&mut self, traffic: Traffic) {
        self.traffic = traffic;
    }

    /// Sets the budget that the device's host sockets count against.
    pub(crate) fn set_account(&mut self, account: Account) {
        self.account = account;
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device")
            .field("addr", &self.addr)
            .field("cid", &self.cid)
            .finish_non_exhaustive()
    }
}
