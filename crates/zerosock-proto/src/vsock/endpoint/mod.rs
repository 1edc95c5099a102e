//! The shard: the connections of one queue pair.
//!
//! What each file does: `receive` packets in, `commands` what the caller
//! wants, `messages` whole messages out, `transmit` headers, events and timers
//! out, `move_state` connections to and from other shards, `closing` how they end,
//! `table` and `list` where connections live; here what they share. States
//! change in [`Shard::act`](Shard) and [`Shard::expire`](Shard) only, as the state
//! table says.
//!
//! What most packets need has a *straight path*: `handle_packet`, `commit`,
//! `send_now` and `consume` first ask whether all is as usual (connected, open,
//! credit there, nobody waiting) and if so touch what changes and nothing
//! else. Everything else is in a function behind it, `*_other`, which is right
//! without the straight path as well: a test runs both and compares.

mod closing;
mod coalescing;
mod commands;
mod error;
#[cfg(test)]
mod fast_path_tests;
mod list;
mod messages;
mod moving;
mod receive;
mod stats;
mod table;
mod transmit;

use core::fmt;
use core::hash::BuildHasher;
use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use hashbrown::DefaultHashBuilder;

pub use error::{
    CommitError, ConnectError, ConsumeError, FlowError, ListenError, MoveError, ReserveError,
    SendError,
};
pub use moving::Handoff;
pub use stats::ShardStats;

use self::list::{CONTROL, DATA, EVENTS, List};
use self::table::Table;
use super::config::{LocalCids, Role, ShardConfig};
use super::connection::{Connection, End, FlowId, FlowInfo, Key};
use super::credit::Stall;
use super::ports::PortTable;
use super::state::{Action, State};
use crate::addr::Cid;
use crate::time::Instant;
use crate::wire::vsock::{Repr, SocketType};

/// The connections of one queue pair, without its queues, its clock, or a
/// byte of payload.
///
/// # How to drive it
///
/// Four kinds of calls:
///
/// - *getters* such as [`flow`](Shard::flow), [`has_transmit`](Shard::has_transmit)
///   and [`is_backlogged`](Shard::is_backlogged) change nothing;
/// - *`handle_*`* tell it what happened: [`handle_packet`](Shard::handle_packet),
///   [`handle_timeout`](Shard::handle_timeout),
///   [`handle_released`](Shard::handle_released),
///   [`handle_transport_reset`](Shard::handle_transport_reset);
/// - *commands* tell it what is wanted: [`connect`](Shard::connect),
///   [`listen`](Shard::listen), [`accept`](Shard::accept), [`send`](Shard::send),
///   [`reserve`](Shard::reserve), [`send_now`](Shard::send_now), [`consume`](Shard::consume),
///   [`shutdown`](Shard::shutdown), ...;
/// - *`poll_*`* ask what is to be done: [`poll_event`](Shard::poll_event),
///   [`poll_transmit`](Shard::poll_transmit), [`poll_timeout`](Shard::poll_timeout).
///
/// After any number of `handle_*` and commands, poll in this order:
/// `poll_event` until `None` (events lead to commands), then `poll_transmit`
/// while there are buffers to put packets into, then `poll_timeout` for when
/// to come back. Each may be called at any time; nothing is lost by waiting.
///
/// What must hold:
///
/// - Packets are handled in the order in which they came, and headers go out
///   in the order in which `poll_transmit`, `commit` and `send_now` returned
///   them.
/// - While `is_backlogged`, packets wait in the peer's queue: answers that
///   belong to no connection have a bounded place. It clears as `poll_transmit`
///   is given buffers.
/// - [`Disposition::Deliver`](super::Disposition::Deliver) is obeyed at once
///   (before the next packet), and the bytes are reported with `consume` when
///   the caller has got rid of them. Bytes delivered before an
///   [`Event::Closed`](super::Event::Closed) remain the caller's to use.
/// - A [`FlowId`] is invalid from the moment that its end is decided; its
///   `Closed` or `Refused` follows, once. Calls with a stale id fail and do
///   nothing.
///
/// Payload takes one of two ways out. *In place*: `reserve`, fill the packet's
/// buffer, `commit`, write the header in front; or, when the payload is there
/// and its length known, `send_now` for both. *Queued*: `send`, and
/// `poll_transmit` names the [`Span`](super::Span) to put behind each header;
/// report it with `handle_released` when its memory is free again. Both keep
/// the order of their calls within one connection.
///
/// # Bounds
///
/// Connections are capped, with those included whose RST has not left or whose
/// end has not been polled. A control packet of each kind, and an event of
/// each kind, is a flag of its connection. RSTs without a connection have a
/// queue of fixed size. No call but `handle_transport_reset` looks at all
/// connections, and packets of existing connections allocate nothing.
///
/// # Cost
///
/// Packets in the middle of a connection's life cost some ten nanoseconds a
/// side. Three habits keep it so: bytes of many packets are consumed with one
/// `consume`; packets of one connection are handled in runs, because the last
/// connection is found without its hash; and headers are emitted where they
/// are returned, not put by: a header copied from place to place costs as much
/// as the call that made it.
///
/// # Example
///
/// A guest and a host, joined by two queues that never fill:
///
/// ```
/// use std::sync::Arc;
/// use zerosock_proto::vsock::{Disposition, Event, How, PortTable, Shard, ShardConfig};
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
/// // Moves every waiting packet from one to the other and returns what was
/// // delivered. The payload itself would lie behind the header.
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
/// // Queued: cut into packets of up to 4096 bytes as it is polled.
/// guest.send(client, 10_000, 0).unwrap();
/// assert_eq!(transfer(now, &mut guest, &mut host), 10_000);
///
/// // In place: credit first, then the payload, then the header.
/// let room = host.reserve(served, 4096).unwrap();
/// let header = host.commit(room, 100, 0).unwrap();
/// let Disposition::Deliver { flow, len: 100, .. } = guest.handle_packet(now, &header) else {
///     panic!()
/// };
/// guest.consume(flow, 100).unwrap();
///
/// // Close: SHUTDOWN, answered with RST.
/// guest.shutdown(now, client, How::BOTH).unwrap();
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
    /// Whether connections may be moved to other shards.
    moves: bool,
    ports: Arc<PortTable>,
    table: Table<S>,
    live: usize,
    /// Connections that hold a port in `ports`: those that were asked for on this side.
    held_ports: usize,
    /// Connections in `Incoming`.
    undecided: usize,
    control: List<CONTROL>,
    data: List<DATA>,
    events: List<EVENTS>,
    timers: BTreeSet<(Instant, u32)>,
    /// RSTs that belong to no connection, and MOVEDs of those that were.
    resets: VecDeque<Repr>,
    stats: ShardStats,
    /// No call takes its straight path.
    #[cfg(test)]
    slow_path_only: bool,
}

impl Shard {
    /// A shard without connections, its hash keyed at random. Shards of one
    /// address share `ports`.
    pub fn new(config: ShardConfig, ports: Arc<PortTable>) -> Shard {
        Shard::with_hasher(config, ports, DefaultHashBuilder::default())
    }
}

impl<S: BuildHasher> Shard<S> {
    /// A shard with a hash of the caller's. Peers choose ports: key it.
    pub fn with_hasher(config: ShardConfig, ports: Arc<PortTable>, hasher: S) -> Shard<S> {
        Shard {
            resets: VecDeque::with_capacity(config.max_pending_resets),
            config,
            seqpacket: false,
            moves: false,
            ports,
            table: Table::new(hasher),
            live: 0,
            held_ports: 0,
            undecided: 0,
            control: List::new(),
            data: List::new(),
            events: List::new(),
            timers: BTreeSet::new(),
            stats: ShardStats::default(),
            #[cfg(test)]
            slow_path_only: false,
        }
    }

    /// Whether calls take the straight path where it can be taken: always, but in the test that
    /// compares the two.
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

    /// Places taken of [`ShardConfig::max_connections`]: live connections, and
    /// those whose RST has not left or whose end has not been polled.
    pub fn occupied(&self) -> usize {
        self.table.occupied()
    }

    /// Timers that run: of connections that come about, close, or wait for credit.
    pub fn timers(&self) -> usize {
        self.timers.len()
    }

    /// Live connections that hold a port: those that this side has asked for. Each counts in the
    /// shard where it is now, so that shards with a table in common can be added up.
    pub fn held_ports(&self) -> usize {
        self.held_ports
    }

    /// The table of listeners and ports.
    pub fn ports(&self) -> &PortTable {
        &self.ports
    }

    /// About one connection; `None` when it has ended.
    pub fn flow(&self, flow: FlowId) -> Option<FlowInfo> {
        self.table.get(flow).map(Connection::info)
    }

    /// Whether [`Shard::poll_transmit`] has something for a buffer large
    /// enough.
    pub fn has_transmit(&self) -> bool {
        !self.resets.is_empty() || self.control.front().is_some() || self.data.front().is_some()
    }

    /// Whether [`Shard::poll_transmit`] has payload of queued sends for a buffer large enough.
    #[inline]
    pub fn has_data(&self) -> bool {
        self.data.front().is_some()
    }

    /// Whether [`Shard::poll_event`] may have something.
    #[inline]
    pub fn has_events(&self) -> bool {
        self.events.front().is_some()
    }

    /// Whether packets must wait until [`Shard::poll_transmit`] has been given
    /// buffers.
    pub fn is_backlogged(&self) -> bool {
        self.resets.len() >= self.config.max_pending_resets
    }

    /// Counters.
    pub fn stats(&self) -> &ShardStats {
        &self.stats
    }

    /// What it was made with, and what was set since.
    pub fn config(&self) -> &ShardConfig {
        &self.config
    }

    /// The CIDs for which a device answers. Connections stay.
    pub fn set_local_cids(&mut self, local: LocalCids) {
        self.config.local = local;
    }

    /// The CID that a driver has now, re-read after TRANSPORT_RESET. No effect
    /// on a device.
    pub fn set_driver_cid(&mut self, cid: Cid) {
        if let Role::Driver { local } = &mut self.config.role {
            *local = cid;
        }
    }

    /// Whether VIRTIO_VSOCK_F_SEQPACKET was negotiated; at first it is not,
    /// and REQUESTs of that type are reset.
    pub fn set_seqpacket(&mut self, negotiated: bool) {
        self.seqpacket = negotiated;
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

    /// Whether there may be one connection more, and there is memory for it.
    fn can_open(&mut self) -> bool {
        self.ports.occupied() < self.config.max_connections && self.table.reserve_one()
    }

    fn add_connection(&mut self, connection: Connection) -> u32 {
        self.live += 1;
        self.ports.occupy();
        self.stats.opened += 1;
        self.table.insert(connection)
    }

    /// Carries out what the state table says about a connection.
    fn act(&mut self, now: Instant, index: u32, next: State, action: Action) {
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
                    // Nothing comes that gathered bytes could wait for.
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

    /// Puts a connection into the lists it belongs to, and out of the others.
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

    /// After anything that may have changed what a connection can send.
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
            // The probe stays set, and finds nothing when it fires: stalls come and go with every
            // window, and most of their timers would be set in vain.
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

    /// Brings a connection's timer to the earlier of what it waits for.
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

/// Gives ports back that other shards may want.
impl<S> Drop for Shard<S> {
    fn drop(&mut self) {
        let connections = self.table.slots.iter_mut();
        for connection in connections.filter_map(|slot| slot.connection.as_mut()) {
            if let Some(port_ref) = connection.port_ref.take() {
                self.ports.release(connection.key.local, port_ref);
            }
        }
        self.ports.vacate(self.table.occupied());
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

    /// DESIGN: below 1 KiB for each connection at rest, of a switch that has two of them and as
    /// many joins: its place, its entry in the map (a place, a control byte, at a load of half),
    /// its port, its place in the free list.
    #[test]
    fn a_connection_at_rest_is_small() {
        let entry = 2 * (size_of::<u32>() + 1);
        let port = 2 * (size_of::<(Address, u32)>() + 1);
        let size = size_of::<Slot>() + entry + port + size_of::<u32>();
        assert!(size <= 280, "{size}");
    }
}
