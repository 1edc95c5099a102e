//! The driver half: a process as the guest of a vhost-user vsock device, without
//! a virtual machine.
//!
//! A [`Driver`] owns a piece of shared memory, the driver side of three
//! virtqueues (receive, transmit, event) and a protocol core in the role of a
//! driver. To the device it is a guest like any other: it negotiates over the
//! vhost-user socket, posts buffers, kicks eventfds.
//!
//! # How to drive it
//! The driver has no thread. Its calls never sleep, but for [`Driver::poll`]
//! and the `wait_*` calls, which do so until a deadline that they are given:
//!
//! - **commands** ([`connect`](Driver::connect), [`listen`](Driver::listen),
//!   [`accept`](Driver::accept), [`send`](Driver::send),
//!   [`recv`](Driver::recv), [`shutdown`](Driver::shutdown),
//!   [`close`](Driver::close)) act on the protocol core and the buffers at
//!   once;
//! - [`turn`](Driver::turn) takes in what the device returned and shows it
//!   what the commands have queued, in one batch; [`poll`](Driver::poll) does
//!   so and sleeps when there is nothing to do;
//! - [`poll`](Driver::poll) and [`next_event`](Driver::next_event) hand out
//!   [`DriverEvent`]s.
//!
//! What commands queue becomes visible to the device with the next `turn`,
//! `poll` or `flush`: many small packets cost one kick.
//!
//! # What must hold here
//! The device is not trusted: ring entries and headers are read once into
//! private copies, checked, and only the copies are used. There is no unsafe
//! code here; shared memory is touched through `zerosock-ring` alone. On the
//! packet path nothing is allocated once buffers have grown to their size.

mod arena;
mod blocking;
mod config;
mod errors;
mod events;
mod frontend;
mod intake;
mod link;
mod queues;
mod stream;
mod transfer;

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time;

use zerosock_proto::Instant;
use zerosock_proto::vsock::{ConnectError, ListenError, PortTable, Shard, ShardConfig};
use zerosock_proto::wire::vsock::{HEADER_LEN, Repr, SocketType};

pub use arena::ArenaError;
pub use config::{ConfigError, DriverConfig};
pub use errors::{DriverError, RecvError, SendError, WaitError};
pub use events::{DriverEvent, DriverStats};
pub use frontend::{Frontend, FrontendError, VringAddr};
pub use link::AttachError;
pub use queues::QueueSetupError;
pub use stream::{StreamId, StreamState};
pub use transfer::Loan;
pub use zerosock_proto::vsock::How;
pub use zerosock_proto::{Address, Cid, Port};

use arena::Arena;
use link::{Doorbells, EVENT, Link, RX, TX};
use queues::{EventQueue, RxQueue, TxQueue};
use stream::{News, Streams};

/// A guest without a virtual machine. See the [module](self) for how to drive
/// it.
#[derive(Debug)]
pub struct Driver {
    config: DriverConfig,
    arena: Arena,
    bells: Doorbells,
    /// None between the device's hang-up and the next reconnect.
    link: Option<Link>,
    rx: RxQueue,
    tx: TxQueue,
    event_queue: EventQueue,
    shard: Shard,
    cid: Cid,
    epoch: time::Instant,
    streams: Streams,
    listeners: Vec<Listener>,
    /// Told before anything else.
    reset_seen: bool,
    gone_seen: bool,
    /// Connections that wait for a transmit slot, oldest first.
    waiting_for_slot: VecDeque<StreamId>,
    stats: DriverStats,
    /// Receive buffers are kept from the device: for tests of what it does
    /// then.
    withhold: bool,
    withheld: Vec<u16>,
}

#[derive(Debug)]
struct Listener {
    port: Port,
    backlog: usize,
    waiting: VecDeque<StreamId>,
    /// Connections in `waiting` not told of yet.
    untold: usize,
}

impl Driver {
    /// Makes the memory, connects to the device at `config.socket`, negotiates
    /// and starts the queues.
    pub fn attach(config: DriverConfig) -> Result<Driver, AttachError> {
        config.check()?;
        let arena = Arena::new(&config)?;
        let bells = Doorbells::new()?;
        let mut link = Link::connect(&config)?;
        let [rx_ring, tx_ring, event_ring] = arena.rings;
        let mut rx = RxQueue::new(&arena, rx_ring, link.event_idx)?;
        let tx = TxQueue::new(&arena, tx_ring, link.event_idx)?;
        let mut event_queue = EventQueue::new(&arena, event_ring, link.event_idx)?;
        // Posted before the device looks for the first time: no kick is owed
        // for what it finds then, but it costs nothing to be sure.
        let _ = rx.publish();
        let _ = event_queue.publish();
        link.start(&arena, &bells, [0; 3])?;
        bells.kick(RX);
        bells.kick(EVENT);
        let cid = link.cid;
        Ok(Driver {
            shard: new_shard(&config, cid),
            streams: Streams::new(config.slots()),
            arena,
            bells,
            link: Some(link),
            rx,
            tx,
            event_queue,
            cid,
            epoch: time::Instant::now(),
            listeners: Vec::new(),
            reset_seen: false,
            gone_seen: false,
            waiting_for_slot: VecDeque::new(),
            stats: DriverStats::default(),
            withhold: false,
            withheld: Vec::new(),
            config,
        })
    }

    /// Attaches to a restarted device with the memory, the queues and the
    /// listeners as they are: what a VMM does for a guest that knows nothing
    /// of it. Each queue goes on at its used index, so that the new device
    /// works off again what the old one had taken and not returned. Connections
    /// end when the device announces TRANSPORT_RESET, or when the peer's side
    /// answers their next packet with RST.
    pub fn reconnect(&mut self) -> Result<(), AttachError> {
        self.link = None;
        let mut link = Link::connect(&self.config)?;
        let bases = self.used_indices();
        link.start(&self.arena, &self.bells, bases)?;
        for queue in [RX, TX, EVENT] {
            self.bells.kick(queue);
        }
        self.link = Some(link);
        Ok(())
    }

    /// Stops the queues, as a VMM does for a pause or a snapshot; returns the
    /// index at which each can go on. Until [`resume`](Driver::resume) the
    /// device neither reads nor writes our memory.
    pub fn suspend(&mut self) -> Result<[u16; 3], FrontendError> {
        self.link.as_mut().ok_or(FrontendError::Closed)?.stop()
    }

    /// Hands the memory over again and starts the queues at `bases`.
    pub fn resume(&mut self, bases: [u16; 3]) -> Result<(), AttachError> {
        let link = self.link.as_mut().ok_or(FrontendError::Closed)?;
        link.start(&self.arena, &self.bells, bases)?;
        for queue in [RX, TX, EVENT] {
            self.bells.kick(queue);
        }
        Ok(())
    }

    /// Sends the memory table again while the queues run, as a VMM does when
    /// memory is plugged.
    pub fn send_memory_table(&mut self) -> Result<(), FrontendError> {
        let table = [(self.arena.fd.as_fd(), self.arena.region)];
        self.link
            .as_mut()
            .ok_or(FrontendError::Closed)?
            .frontend
            .set_mem_table(&table)
    }

    /// The used index of each queue as it lies in memory: rx, tx, event.
    pub fn used_indices(&self) -> [u16; 3] {
        self.arena.rings.map(|ring| {
            // struct virtq_used { le16 flags; le16 idx; … } (virtio 1.2, 2.7.8)
            let mut index = [0u8; 2];
            let mut pieces = Vec::new();
            if self
                .arena
                .memory
                .translate(ring.used + 2, 2, &mut pieces)
                .is_ok()
            {
                self.arena.memory.read(&pieces, 0, &mut index);
            }
            u16::from_le_bytes(index)
        })
    }

    /// Our CID, by the device's configuration space.
    pub fn cid(&self) -> Cid {
        self.cid
    }

    /// Counters since the driver was attached.
    pub fn stats(&self) -> DriverStats {
        self.stats
    }

    /// Whether a device is attached: false between
    /// [`DriverEvent::DeviceGone`] and a successful
    /// [`reconnect`](Driver::reconnect).
    pub fn is_attached(&self) -> bool {
        self.link.is_some()
    }

    /// The control socket, to say more than the driver says by itself.
    pub fn frontend(&mut self) -> Option<&mut Frontend> {
        self.link.as_mut().map(|link| &mut link.frontend)
    }

    /// Connections with a handle, those that have ended but are not closed
    /// included.
    pub fn connections(&self) -> usize {
        self.streams.len()
    }

    /// Begins to connect to `peer`. [`DriverEvent::Connected`] or
    /// [`DriverEvent::Refused`] follows.
    pub fn connect(&mut self, peer: Address) -> Result<StreamId, ConnectError> {
        self.connect_from(Port::ANY, peer)
    }

    /// As [`connect`](Driver::connect), from a port of our choice.
    pub fn connect_from(&mut self, port: Port, peer: Address) -> Result<StreamId, ConnectError> {
        let now = self.now();
        let local = Address {
            cid: self.cid,
            port,
        };
        let flow = self.shard.connect(now, local, peer, SocketType::Stream)?;
        let local = self.shard.flow(flow).map_or(local, |info| info.local);
        Ok(self
            .streams
            .insert(flow, StreamState::Connecting, local, peer))
    }

    /// Listens on `port`. At most `backlog` connections wait to be accepted;
    /// further requests are answered with RST.
    pub fn listen(&mut self, port: Port, backlog: usize) -> Result<(), ListenError> {
        self.shard.listen(port, backlog)?;
        self.listeners.push(Listener {
            port,
            backlog,
            waiting: VecDeque::new(),
            untold: 0,
        });
        Ok(())
    }

    /// Listens no longer on `port`; connections that wait to be accepted are
    /// reset.
    pub fn unlisten(&mut self, port: Port) {
        // Nothing to do for a port that nobody listens on.
        let _ = self.shard.unlisten(port);
        if let Some(at) = self
            .listeners
            .iter()
            .position(|listener| listener.port == port)
        {
            for stream in self.listeners.swap_remove(at).waiting {
                self.abort(stream);
            }
        }
    }

    /// The oldest connection that waits on `port`.
    pub fn accept(&mut self, port: Port) -> Option<StreamId> {
        let listener = self
            .listeners
            .iter_mut()
            .find(|listener| listener.port == port)?;
        let stream = listener.waiting.pop_front();
        listener.untold = listener.untold.min(listener.waiting.len());
        stream
    }

    /// Where a connection stands; `None` for one that was closed.
    pub fn state(&self, stream: StreamId) -> Option<StreamState> {
        self.streams.get(stream).map(|stream| stream.state)
    }

    /// Our and the peer's address.
    pub fn addresses(&self, stream: StreamId) -> Option<(Address, Address)> {
        self.streams
            .get(stream)
            .map(|stream| (stream.local, stream.peer))
    }

    /// Says that we will read no more, send no more, or both. What was sent
    /// before still arrives.
    pub fn shutdown(&mut self, stream: StreamId, how: How) {
        let now = self.now();
        let Some(entry) = self.streams.get_mut(stream) else {
            return;
        };
        entry.finished |= how.send;
        if let Some(flow) = entry.flow {
            // A flow that ended meanwhile needs no shutdown.
            let _ = self.shard.shutdown(now, flow, how);
        }
    }

    /// Gives a connection up in good order: what was sent still arrives, what
    /// was not read is thrown away. The handle is dead afterwards.
    pub fn close(&mut self, stream: StreamId) -> Result<(), DriverError> {
        self.shutdown(
            stream,
            How {
                receive: true,
                send: true,
            },
        );
        self.forget(stream)
    }

    /// Resets a connection at once. The handle is dead afterwards.
    pub fn abort(&mut self, stream: StreamId) {
        if let Some(flow) = self.streams.get(stream).and_then(|entry| entry.flow) {
            // A flow that ended meanwhile needs no reset.
            let _ = self.shard.reset(flow);
        }
        // Posting a slot that was just returned always has room.
        let _ = self.forget(stream);
    }

    /// Takes in what the device returned, and shows it what is queued. Returns
    /// whether anything was taken in.
    pub fn turn(&mut self) -> Result<bool, DriverError> {
        let now = self.now();
        let mut busy = self.tx.reap()?;
        busy |= self.take_events(now)?;
        busy |= self.take_packets(now)?;
        if self.shard.poll_timeout().is_some_and(|at| at <= now) {
            self.shard.handle_timeout(now);
        }
        self.take_core_events(now);
        self.transmit_control(now)?;
        self.tell_of_slots();
        self.flush();
        Ok(busy)
    }

    /// Shows the device what is queued, without taking anything in.
    pub fn flush(&mut self) {
        for (index, ring) in [
            (RX, self.rx.publish()),
            (TX, self.tx.publish()),
            (EVENT, self.event_queue.publish()),
        ] {
            if ring {
                self.bells.kick(index);
                self.stats.kicks += 1;
            }
        }
    }

    /// The next event, if there is one; takes nothing in from the device.
    pub fn next_event(&mut self) -> Option<DriverEvent> {
        if std::mem::take(&mut self.gone_seen) {
            return Some(DriverEvent::DeviceGone);
        }
        if std::mem::take(&mut self.reset_seen) {
            return Some(DriverEvent::TransportReset);
        }
        if let Some(listener) = self
            .listeners
            .iter_mut()
            .find(|listener| listener.untold > 0)
        {
            listener.untold -= 1;
            return Some(DriverEvent::Incoming {
                port: listener.port,
            });
        }
        let (stream, news) = self.streams.next_news()?;
        let entry = self.streams.get(stream)?;
        Some(match news {
            News::Connected => DriverEvent::Connected { stream },
            News::Readable => DriverEvent::Readable { stream },
            News::Writable => DriverEvent::Writable { stream },
            News::PeerShutdown => DriverEvent::PeerShutdown {
                stream,
                receive: entry.peer_deaf,
                send: entry.peer_finished,
            },
            News::Refused => DriverEvent::Refused {
                stream,
                peer: entry.peer,
            },
            News::Closed => DriverEvent::Closed {
                stream,
                reset: entry.state == StreamState::Reset,
            },
        })
    }

    /// Works and sleeps until there is an event, or until `deadline` (`None`
    /// waits for ever). `Ok(None)`: the deadline passed.
    pub fn poll(
        &mut self,
        deadline: Option<time::Instant>,
    ) -> Result<Option<DriverEvent>, DriverError> {
        loop {
            let busy = self.turn()?;
            if let Some(event) = self.next_event() {
                return Ok(Some(event));
            }
            if deadline.is_some_and(|at| at <= time::Instant::now()) {
                return Ok(None);
            }
            if !busy {
                self.sleep(deadline)?;
            }
        }
    }

    /// Sleeps until the device calls, the protocol core's next time-out or
    /// `deadline`; returns at once when something came while we went to sleep.
    fn sleep(&mut self, deadline: Option<time::Instant>) -> Result<(), DriverError> {
        let wants_slots = !self.waiting_for_slot.is_empty() || self.shard.has_transmit();
        let mut more = self.rx.want_calls(true);
        more |= self.event_queue.want_calls(true);
        more |= wants_slots && self.tx.want_calls(true);
        if !more {
            let timeout = self
                .shard
                .poll_timeout()
                .map(|at| self.epoch + time::Duration::from_nanos(at.as_nanos()));
            let until = match (deadline, timeout) {
                (Some(one), Some(other)) => Some(one.min(other)),
                (one, other) => one.or(other),
            };
            self.stats.sleeps += 1;
            if link::wait(&self.bells, self.link.as_ref(), until)? {
                self.link = None;
                self.gone_seen = true;
            }
        }
        self.rx.want_calls(false);
        self.event_queue.want_calls(false);
        self.tx.want_calls(false);
        Ok(())
    }

    /// Packets that the protocol core wants out, while there are slots.
    fn transmit_control(&mut self, now: Instant) -> Result<(), DriverError> {
        while self.shard.has_transmit() {
            let Some(slot) = self.tx.control_slot() else {
                break;
            };
            // We queue no payload with the core, so a packet carries none.
            match self.shard.poll_transmit(now, 0) {
                Some(transmit) => self.transmit(slot, &transmit.header)?,
                None => {
                    self.tx.put_back(slot);
                    break;
                }
            }
        }
        Ok(())
    }

    /// Writes the header into slot `slot` and queues the packet; its payload,
    /// if it has any, lies in the slot already.
    fn transmit(&mut self, slot: u16, header: &Repr) -> Result<(), DriverError> {
        let mut bytes = [0u8; HEADER_LEN];
        header.emit(&mut bytes);
        self.arena
            .memory
            .write(self.arena.tx_headers.pieces(slot), 0, &bytes);
        self.tx.push(&self.arena, slot, header.len)?;
        self.stats.tx_packets += 1;
        self.stats.tx_bytes += u64::from(header.len);
        Ok(())
    }

    /// Tells those who wait for a slot that there are some.
    fn tell_of_slots(&mut self) {
        if !self.tx.has_data_slot() {
            return;
        }
        while let Some(stream) = self.waiting_for_slot.pop_front() {
            if let Some(entry) = self.streams.get_mut(stream) {
                entry.wants_room = false;
                self.streams.announce(stream, News::Writable);
            }
        }
    }

    /// Frees a handle and the receive slots that it holds.
    fn forget(&mut self, stream: StreamId) -> Result<(), DriverError> {
        while let Some(slot) = self.streams.drop_slot(stream) {
            self.give_back(slot)?;
        }
        self.streams.remove(stream);
        Ok(())
    }

    /// Posts a receive slot again.
    fn give_back(&mut self, slot: u16) -> Result<(), DriverError> {
        if self.withhold {
            self.withheld.push(slot);
            return Ok(());
        }
        Ok(self.rx.post(&self.arena, slot)?)
    }

    /// Keeps receive buffers from the device as they come back, or posts all
    /// that were kept: a guest that is slow to refill its queue.
    #[doc(hidden)]
    pub fn withhold_buffers(&mut self, withhold: bool) -> Result<(), DriverError> {
        self.withhold = withhold;
        if !withhold {
            for slot in std::mem::take(&mut self.withheld) {
                self.rx.post(&self.arena, slot)?;
            }
        }
        Ok(())
    }

    /// Receive buffers kept from the device now.
    #[doc(hidden)]
    pub fn withheld_buffers(&self) -> usize {
        self.withheld.len()
    }

    fn now(&self) -> Instant {
        let since = self.epoch.elapsed().as_nanos();
        Instant::from_nanos(u64::try_from(since).unwrap_or(u64::MAX))
    }
}

impl Drop for Driver {
    /// Stops the queues before the memory goes, so that the device works off
    /// what it took; a device that does not answer is left alone.
    fn drop(&mut self) {
        if let Some(link) = &mut self.link {
            let _ = link.stop();
        }
    }
}

fn new_shard(config: &DriverConfig, cid: Cid) -> Shard {
    let shard_config = ShardConfig {
        buf_alloc: config.buf_alloc,
        max_connections: config.max_connections,
        connect_timeout: config.connect_timeout,
        ..ShardConfig::driver(cid)
    };
    Shard::new(shard_config, Arc::new(PortTable::new()))
}
