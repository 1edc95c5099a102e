//! The shard: the connections of one queue pair.
//!
//! # Invariants
//! Connections change state only in [`Shard::apply_action`](Shard) and [`Shard::end`](Shard), as
//! the state table says.
//!
//! The operations of most packets have a *fast path*: `handle_packet`, `commit`, `send_now` and
//! `consume` first check for the common case (connected, both directions open, credit available, no
//! waiter) and then change only what such a packet changes. All other cases are in a function
//! `*_slow`, which is also correct for the common case: a test runs both and compares.
//!
//! # Files
//! `receive` handles packets, `commands` and `messages` the calls of the caller, `coalescing` small
//! packets, `transmit` returns headers, events and timers, `closing` ends connections, `flow_log` writes them down,
//! `snapshot` hands them to a successor,
//! `table` and `list` store them.

mod closing;
mod coalescing;
mod commands;
mod error;
#[cfg(test)]
mod fast_path_tests;
mod flow_log;
mod list;
mod messages;
mod receive;
mod snapshot;
mod stats;
mod table;
mod transmit;

use core::fmt;
use core::hash::BuildHasher;
use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use hashbrown::DefaultHashBuilder;

pub use error::{
    CommitError, ConnectError, ConsumeError, FlowError, ListenError, ReserveError, SendError,
};
pub use snapshot::check_snapshot_version;
pub use stats::ShardStats;

use self::list::{CONTROL, DATA, EVENTS, List};
use self::table::Table;
use super::config::{Role, ShardConfig};
use super::connection::{Connection, End, FlowInfo, Key};
use super::credit::Stall;
use super::flow_id::FlowId;
use super::flow_log::Logging;
use super::ports::PortTable;
use super::state::{Action, State};
use crate::addr::Cid;
use crate::time::Instant;
use crate::wire::vsock::{Repr, SocketType};

/// The connections of one queue pair, without its queues, its clock, or a byte of payload.
///
/// # How to drive it
///
/// Four kinds of calls:
///
/// - *getters* such as [`flow`](Shard::flow), [`has_transmit`](Shard::has_transmit) and
///   [`is_backlogged`](Shard::is_backlogged) change nothing;
/// - *`handle_*`* report what happened: [`handle_packet`](Shard::handle_packet),
///   [`handle_timeout`](Shard::handle_timeout), [`handle_released`](Shard::handle_released),
///   [`handle_transport_reset`](Shard::handle_transport_reset);
/// - *commands* say what the caller wants: [`connect`](Shard::connect), [`listen`](Shard::listen),
///   [`accept`](Shard::accept), [`send`](Shard::send), [`reserve`](Shard::reserve),
///   [`send_now`](Shard::send_now), [`consume`](Shard::consume), [`shutdown`](Shard::shutdown),
///   ...;
/// - *`poll_*`* return what is to be done: [`poll_event`](Shard::poll_event),
///   [`poll_transmit`](Shard::poll_transmit), [`poll_timeout`](Shard::poll_timeout).
///
/// After any number of `handle_*` and commands, poll in this order: `poll_event` until `None`
/// (events lead to commands), then `poll_transmit` while there are buffers to put packets into,
/// then `poll_timeout` for the time of the next call. Each may be called at any time; nothing is
/// lost by waiting.
///
/// # Invariants
///
/// - The caller handles packets in the order in which they arrived, and sends headers in the order
///   in which `poll_transmit`, `commit` and `send_now` returned them.
/// - While `is_backlogged`, the caller leaves packets in the peer's queue: the queue of answers
///   that belong to no connection is bounded. The backlog shrinks as `poll_transmit` returns
///   answers.
/// - The caller obeys [`Disposition::Deliver`](super::Disposition::Deliver) at once (before the
///   next packet), and reports the bytes with `consume` when it has no more use for them. Bytes
///   delivered before an [`Event::Closed`](super::Event::Closed) remain the caller's to use.
/// - A [`FlowId`] is invalid as soon as the connection has ended; its `Closed` or `Refused` event
///   follows, once. Calls with a stale id fail and do nothing.
///
/// Payload is sent in one of two ways. *In place*: `reserve`, fill the packet's buffer, `commit`,
/// write the header in front; or, when the payload and its length are known, `send_now` for both.
/// *Queued*: `send`, and `poll_transmit` names the [`Span`](super::Span) to put behind each header;
/// report it with `handle_released` when its memory is free again. Both keep the order of their
/// calls within one connection.
///
/// # Bounds
///
/// Connections are limited, including closed ones until their RST has been sent and their end
/// polled. A control packet of each kind, and an event of each kind, is a flag of its connection.
/// RSTs without a connection have a queue of fixed size. No call but `handle_transport_reset`
/// visits all connections, and packets of existing connections allocate nothing.
///
/// # Cost
///
/// Packets of an established connection cost about ten nanoseconds per side. Three habits of the
/// caller keep it so: one `consume` reports the bytes of many packets; packets of one connection
/// are handled in runs, because the last connection is found without hashing; and headers are
/// written where they are returned, because copying a header costs as much as the call that made
/// it.
///
/// # Example
///
/// A guest and a host, joined by two queues that never fill:
///
/// ```
/// use std::sync::Arc;
/// use zerosock_proto::vsock::{Disposition, Event, Directions, PortTable, Shard, ShardConfig};
/// use zerosock_proto::wire::vsock::SocketType;
/// use zerosock_proto::{Address, Cid, Instant, Port};
///
/// let now = Instant::ZERO;
/// let guest_cid = Cid::new(3);
/// let server = Address::new(Cid::HOST, Port::new(1024));
/// let any = Address::new(Cid::ANY, Port::ANY);
///
/// let mut guest = Shard::new(ShardConfig::driver(guest_cid), Arc::new(PortTable::new()));
/// let mut host = Shard::new(ShardConfig::device(guest_cid), Arc::new(PortTable::new()));
///
/// // Moves every waiting packet from one to the other and returns the bytes
/// // delivered. The payload itself would be behind the header.
/// fn transfer(now: Instant, from: &mut Shard, to: &mut Shard) -> u32 {
///     let mut delivered = 0;
///     while let Some(packet) = from.poll_transmit(now, 4096) {
///         if let Disposition::Deliver { flow, len, .. } = to.handle_packet(now, &packet.header) {
///             delivered += len;
///             to.consume(flow, len).unwrap();
///         }
///         if let Some(span) = packet.span {
///             from.handle_released(span);
///         }
///     }
///     delivered
/// }
///
/// host.listen(server.port, 16).unwrap();
/// let client = guest.connect(now, any, server, SocketType::Stream).unwrap();
/// transfer(now, &mut guest, &mut host); // REQUEST
/// let Some(Event::Incoming { flow: served, peer, .. }) = host.poll_event() else { panic!() };
/// assert_eq!(peer.cid, guest_cid);
/// host.accept(now, served).unwrap();
/// transfer(now, &mut host, &mut guest); // RESPONSE
/// assert_eq!(guest.poll_event(), Some(Event::Connected { flow: client }));
///
/// // Queued: divided into packets of up to 4096 bytes as it is polled.
/// guest.send(client, 10_000, 0).unwrap();
/// assert_eq!(transfer(now, &mut guest, &mut host), 10_000);
///
/// // In place: credit first, then the payload, then the header.
/// let reservation = host.reserve(served, 4096).unwrap();
/// let header = host.commit(reservation, 100, 0).unwrap();
/// let Disposition::Deliver { flow, len: 100, .. } = guest.handle_packet(now, &header) else {
///     panic!()
/// };
/// guest.consume(flow, 100).unwrap();
///
/// // Close: SHUTDOWN, answered with RST.
/// guest.shutdown(now, client, Directions::BOTH).unwrap();
/// transfer(now, &mut guest, &mut host);
/// transfer(now, &mut host, &mut guest);
/// assert!(matches!(host.poll_event(), Some(Event::Closed { flow, .. }) if flow == served));
/// assert!(matches!(guest.poll_event(), Some(Event::Closed { flow, .. }) if flow == client));
/// assert_eq!(guest.connections() + host.connections(), 0);
/// ```
pub struct Shard<S = DefaultHashBuilder> {
    config: ShardConfig,
    /// Whether F_SEQPACKET was negotiated.
    seqpacket: bool,
    /// The queue pair to name when MOVE of an older driver is declined, if that was negotiated.
    declines_moves: Option<u16>,
    ports: Arc<PortTable>,
    table: Table<S>,
    live: usize,
    /// Connections that refer to a port in `ports`: those that this side has requested.
    held_ports: usize,
    /// Connections in `Incoming`.
    undecided: usize,
    control: List<CONTROL>,
    data: List<DATA>,
    events: List<EVENTS>,
    timers: BTreeSet<(Instant, u32)>,
    /// RSTs that belong to no connection.
    resets: VecDeque<Repr>,
    /// Where connections are written down, if they are.
    logging: Option<Logging>,
    stats: ShardStats,
    /// No call takes its fast path.
    #[cfg(test)]
    slow_path_only: bool,
}

impl Shard {
    /// A shard without connections, with a randomly keyed hash. Shards of one address share
    /// `ports`.
    pub fn new(config: ShardConfig, ports: Arc<PortTable>) -> Shard {
        Shard::with_hasher(config, ports, DefaultHashBuilder::default())
    }
}

impl<S: BuildHasher> Shard<S> {
    /// A shard with a hash of the caller's. Key it: peers choose ports.
    pub fn with_hasher(config: ShardConfig, ports: Arc<PortTable>, hasher: S) -> Shard<S> {
        Shard {
            resets: VecDeque::with_capacity(config.max_pending_resets),
            config,
            seqpacket: false,
            declines_moves: None,
            ports,
            table: Table::new(hasher),
            live: 0,
            held_ports: 0,
            undecided: 0,
            control: List::new(),
            data: List::new(),
            events: List::new(),
            timers: BTreeSet::new(),
            logging: None,
            stats: ShardStats::default(),
            #[cfg(test)]
            slow_path_only: false,
        }
    }

    /// Whether calls may take the fast path: always, except in the test that compares the two.
    #[inline(always)]
    fn uses_fast_path(&self) -> bool {
        #[cfg(test)]
        return !self.slow_path_only;
        #[cfg(not(test))]
        true
    }

    /// Live connections, undecided ones included.
    pub fn connections(&self) -> usize {
        self.live
    }

    /// Entries that count against [`ShardConfig::max_connections`]: live connections, and closed
    /// ones until their RST has been sent and their end polled.
    pub fn occupied(&self) -> usize {
        self.table.occupied()
    }

    /// Running timers: of connections that are connecting, closing, or waiting for credit.
    pub fn timers(&self) -> usize {
        self.timers.len()
    }

    /// Live connections that refer to a port: those that this side has requested.
    pub fn held_ports(&self) -> usize {
        self.held_ports
    }

    /// The table of listeners and ports.
    pub fn ports(&self) -> &PortTable {
        &self.ports
    }

    /// Describes one connection; `None`: it has ended.
    pub fn flow(&self, flow: FlowId) -> Option<FlowInfo> {
        self.table.get(flow).map(Connection::info)
    }

    /// Whether [`Shard::poll_transmit`] has a packet for a large enough buffer.
    #[inline]
    pub fn has_transmit(&self) -> bool {
        !self.resets.is_empty() || self.control.front().is_some() || self.data.front().is_some()
    }

    /// Whether [`Shard::poll_transmit`] has payload of queued sends for a large enough buffer.
    #[inline]
    pub fn has_data(&self) -> bool {
        self.data.front().is_some()
    }

    /// Whether [`Shard::poll_event`] may return an event.
    #[inline]
    pub fn has_events(&self) -> bool {
        self.events.front().is_some()
    }

    /// Whether the caller must handle no packet until [`Shard::poll_transmit`] has returned queued
    /// RSTs.
    pub fn is_backlogged(&self) -> bool {
        self.resets.len() >= self.config.max_pending_resets
    }

    /// Counters.
    pub fn stats(&self) -> &ShardStats {
        &self.stats
    }

    /// The current configuration.
    pub fn config(&self) -> &ShardConfig {
        &self.config
    }

    /// Sets the driver's CID, re-read after TRANSPORT_RESET. No effect on a device.
    pub fn set_driver_cid(&mut self, cid: Cid) {
        if let Role::Driver { local } = &mut self.config.role {
            *local = cid;
        }
    }

    /// Sets whether VIRTIO_VSOCK_F_SEQPACKET was negotiated. Initially it is not, and REQUESTs of
    /// that type are reset.
    pub fn set_seqpacket(&mut self, negotiated: bool) {
        self.seqpacket = negotiated;
    }

    /// Sets the queue pair to name in the answer to MOVE, which asks that a connection continue at another
    /// pair: an older driver may send it, and waits for MOVED. With `None`, as initially, MOVE is an unknown
    /// operation.
    pub fn set_declines_moves(&mut self, pair: Option<u16>) {
        self.declines_moves = pair;
    }

    fn new_connection(&self, key: Key, socket_type: SocketType, state: State) -> Connection {
        let buf_alloc = self.config.buf_alloc;
        Connection::new(
            key,
            socket_type,
            state,
            self.config.first_count,
            buf_alloc,
            self.config.send_limit.unwrap_or(buf_alloc),
        )
    }

    fn add_connection(&mut self, connection: Connection) -> u32 {
        self.live += 1;
        self.ports.occupy();
        self.stats.opened += 1;
        let index = self.table.insert(connection);
        self.log_opened(index);
        index
    }

    /// Performs the action that the state table gives for a connection.
    fn apply_action(&mut self, now: Instant, index: u32, next: State, action: Action) {
        let Some(connection) = self.table.at(index) else {
            return;
        };
        match action {
            Action::Refuse { rst, reason } => {
                return self.finish(index, rst, End::Refused(reason));
            }
            Action::End { rst, reason } => return self.end(index, rst, reason),
            _ => connection.state = next,
        }
        match action {
            Action::SendRequest => {
                connection.control.request = true;
                connection.deadline = Some(now + self.config.connect_timeout);
                self.rearm(index);
            }
            Action::SendResponse => {
                connection.control.response = true;
                self.undecided -= 1;
                if let Some(port_ref) = connection.port_ref.take() {
                    self.ports.release(connection.key.local, port_ref);
                }
            }
            Action::Connected => {
                connection.pending.connected = true;
                connection.deadline = None;
                self.rearm(index);
            }
            Action::CreditUpdate => {
                connection.rx.handle_credit_request();
                let messages = connection.messages.as_mut();
                let later = messages.is_some_and(|messages| messages.rx.defer_update());
                connection.control.credit_update |= !later || connection.rx.has_unannounced();
            }
            Action::PeerShutdown => {
                connection.pending.peer_shutdown = true;
                let (_, peer) = connection.shutdown_directions();
                if peer.receive {
                    connection.drop_queue();
                    connection.wants_credit = false;
                    connection.pending.writable = false;
                    connection.control.credit_request = false;
                }
            }
            Action::SendShutdown => {
                let (local, _) = connection.shutdown_directions();
                if local.send {
                    // No more bytes follow that coalesced bytes could wait for.
                    connection.delays_small = false;
                    connection.wants_credit = false;
                    connection.rare.set_wants_space(false);
                    connection.pending.writable = false;
                }
                if local.is_both() {
                    connection.deadline = Some(now + self.config.close_timeout);
                    self.rearm(index);
                }
            }
            _ => return,
        }
        self.update_lists(index);
    }

    /// Adds a connection to the lists it belongs to, and removes it from the others.
    fn update_lists(&mut self, index: u32) {
        let Some(connection) = self.table.at(index) else {
            return;
        };
        let control = connection.has_control();
        let data = connection.has_data();
        let events = connection.pending.any();
        let slots = &mut self.table.slots;
        self.control.set(slots, index, control);
        self.data.set(slots, index, data);
        self.events.set(slots, index, events);
    }

    /// Called after every change of what a connection can send: wakes its waiter or requests
    /// credit.
    fn credit_changed(&mut self, index: u32) {
        let most = self.config.max_queued_sends;
        let Some(connection) = self.table.at(index) else {
            return;
        };
        if connection.stall() == Stall::None {
            connection.credit_requested = false;
            connection.probe_wait = 0;
            connection.delays_small = false;
            connection.control.credit_request = false;
            if connection.wants_credit
                && connection.may_send()
                && !connection.has_queued
                && !connection.control.response
                && !connection.message_in_progress()
            {
                connection.wants_credit = false;
                if let Some(messages) = &mut connection.messages {
                    messages.tx.wanted = 1;
                    messages.tx.wants_empty = false;
                }
                connection.pending.writable = true;
            }
            // The probe timer stays armed and does nothing when it fires: stalls begin and end with
            // every window, and cancelling each timer would cost more.
        } else {
            self.request_credit(index);
        }
        let Some(connection) = self.table.at(index) else {
            return;
        };
        if connection.rare.wants_space()
            && connection.may_send()
            && connection.queued() <= most / 2
            && !connection.message_blocked()
        {
            connection.rare.set_wants_space(false);
            if let Some(messages) = &mut connection.messages {
                messages.tx.wants_empty = false;
            }
            connection.pending.writable = true;
        }
        self.update_lists(index);
    }

    /// Arms a connection's timer for the earlier of its two deadlines.
    fn rearm(&mut self, index: u32) {
        let Some(connection) = self.table.at(index) else {
            return;
        };
        let wanted = match (connection.deadline, connection.probe_at) {
            (Some(deadline), Some(probe)) => Some(deadline.min(probe)),
            (deadline, probe) => deadline.or(probe),
        };
        let armed = core::mem::replace(&mut connection.armed, wanted);
        if armed != wanted {
            if let Some(armed) = armed {
                self.timers.remove(&(armed, index));
            }
            if let Some(wanted) = wanted {
                self.timers.insert((wanted, index));
            }
        }
    }
}

/// Releases ports that other shards may want.
impl<S> Drop for Shard<S> {
    fn drop(&mut self) {
        let connections = self.table.slots.iter_mut();
        for connection in connections.filter_map(|slot| slot.connection.as_mut()) {
            if let Some(port_ref) = connection.port_ref.take() {
                self.ports.release(connection.key.local, port_ref);
            }
        }
        let ended = self
            .logging
            .as_ref()
            .map_or(0, |logging| logging.ended.len());
        self.ports.vacate(self.table.occupied() + ended);
    }
}

impl<S> fmt::Debug for Shard<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shard")
            .field("role", &self.config.role)
            .field("connections", &self.live)
            .field("stats", &self.stats)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::table::Slot;
    use crate::addr::Address;

    /// An idle connection through a switch must take less than 1 KiB; the switch has two
    /// connections and two bridges for it. This counts one: its slot, its map entry (an index and a
    /// control byte, at half load), its port, its entry in the free list.
    #[test]
    fn an_idle_connection_takes_at_most_280_bytes() {
        let entry = 2 * (size_of::<u32>() + 1);
        let port = 2 * (size_of::<(Address, u32)>() + 1);
        let size = size_of::<Slot>() + entry + port + size_of::<u32>();
        assert!(size <= 280, "{size}");
    }
}
