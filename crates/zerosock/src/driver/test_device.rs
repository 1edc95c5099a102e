//! Test support: a driver and, as its device, the test, which uses the device half of the rings
//! directly. Nothing is negotiated and no notification is sent.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use zerosock_proto::vsock::QueuePairs;
use zerosock_proto::vsock::pairs::{rx_queue, tx_queue};
use zerosock_proto::wire::vsock::{HEADER_LEN, Op, Repr, SocketType};
use zerosock_proto::{Address, Cid, Port};
use zerosock_ring::{Chain, DeviceQueue, Extent, Memory, QueueConfig, RegionConfig};
use zerosock_vhost_user::frontend::{Plan, QueueEventFds, SharedMemory};

use super::arena::Arena;
use super::doorbell::Doorbell;
use super::link::Link;
use super::{Driver, DriverConfig, Frontend, StreamId, StreamState};
use crate::table::backend::Backend;

/// The driver's CID.
pub(super) const CID: Cid = Cid::new(3);
/// The peer that connections are made to.
pub(super) const SERVER: Address = Address::new(Cid::HOST, Port::new(1024));

/// The device's side.
pub(super) struct TestDevice {
    pub(super) rx: DeviceQueue,
    pub(super) tx: DeviceQueue,
    /// The queues of further pairs, receive and transmit; `rx` and `tx` change places with them.
    pub(super) others: Vec<(DeviceQueue, DeviceQueue)>,
    /// Dropping it hangs up.
    pub(super) socket: Option<UnixStream>,
    /// Header for packets of the connection made last.
    pub(super) header: Repr,
    /// Payload bytes sent on the connection.
    pub(super) sent: u32,
    pub(super) their_fwd_cnt: u32,
}

/// A driver with the configuration changed by `tune`, and its device.
pub(super) fn pair(tune: impl FnOnce(&mut DriverConfig)) -> (Driver, TestDevice) {
    pairs(QueuePairs::ONE, tune)
}

/// As `pair`, with `pairs` queue pairs.
pub(super) fn pairs(
    pairs: QueuePairs,
    tune: impl FnOnce(&mut DriverConfig),
) -> (Driver, TestDevice) {
    build(pairs, Plan::default(), map_again, by_eventfds, tune)
}

/// As `pair`, for a driver in a guest: the device sees each huge page at another place, and its socket is the doorbell.
pub(super) fn guest_pair(tune: impl FnOnce(&mut DriverConfig)) -> (Driver, TestDevice) {
    build(
        QueuePairs::ONE,
        Plan::of_huge_pages(),
        map_scattered,
        by_stream,
        tune,
    )
}

/// A separate mapping, as another process has it.
fn map_again(shared: &SharedMemory) -> Arc<Memory> {
    let fd = shared.fd.try_clone().unwrap();
    Arc::new(Memory::map(vec![(fd, shared.region)]).unwrap())
}

/// The memory of a VM in which the huge pages of `shared` lie in the opposite order, with a gap behind each, and the
/// memory that consists of them.
pub(super) fn map_scattered(shared: &SharedMemory) -> Arc<Memory> {
    const HUGE: u64 = Extent::HUGE_PAGE;
    let pages = shared.region.len / HUGE;
    let addr = |page| (1 << 32) + 2 * (pages - page) * HUGE;
    let region = |page| RegionConfig {
        guest_addr: addr(page),
        user_addr: addr(page),
        len: HUGE,
        fd_offset: page * HUGE,
    };
    let table = (0..pages).map(|page| (shared.fd.try_clone().unwrap(), region(page)));
    let vm = Arc::new(Memory::map(table.collect()).unwrap());
    let extents = (0..pages).map(|page| Extent {
        addr: addr(page),
        len: HUGE,
    });
    let extents: Vec<Extent> = extents.collect();
    Arc::new(Memory::of_extents(&vm, &extents).unwrap())
}

fn by_eventfds(socket: UnixStream, pairs: QueuePairs) -> (Option<Frontend>, Doorbell) {
    let frontend = Frontend::from_stream(socket, Duration::from_millis(10)).unwrap();
    let event_fds = QueueEventFds::new(pairs.queues()).unwrap();
    (Some(frontend), Doorbell::Eventfds(event_fds))
}

fn by_stream(socket: UnixStream, _: QueuePairs) -> (Option<Frontend>, Doorbell) {
    (None, Doorbell::Stream(socket.into(), AtomicBool::default()))
}

fn build(
    pairs: QueuePairs,
    plan: Plan,
    map: impl FnOnce(&SharedMemory) -> Arc<Memory>,
    connect: impl FnOnce(UnixStream, QueuePairs) -> (Option<Frontend>, Doorbell),
    tune: impl FnOnce(&mut DriverConfig),
) -> (Driver, TestDevice) {
    let mut config = DriverConfig::new("/nowhere");
    config.control_timeout = Duration::from_millis(10);
    tune(&mut config);
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (frontend, doorbell) = connect(ours, pairs);
    let link = Link {
        seqpacket: true,
        frontend,
        pairs,
        event_idx: true,
        datagrams: true,
        datagram_flow: true,
        cid: CID,
    };
    let size = config.queue_size;
    let arena = Arena::new(&config, pairs, plan).unwrap();
    let driver = Driver::over(config, link, arena, doorbell).unwrap();
    let arena = &driver.store.arena;
    let memory = map(&arena.shared);
    let queue = |at: usize| {
        let ring = arena.shared.vring_addr(&arena.rings[at]);
        let config = QueueConfig {
            size,
            desc: ring.desc,
            avail: ring.avail,
            used: ring.used,
            base: 0,
            event_idx: true,
            indirect: false,
        };
        DeviceQueue::new(memory.clone(), &config).unwrap()
    };
    let peer = TestDevice {
        rx: queue(rx_queue(0).into()),
        tx: queue(tx_queue(0).into()),
        others: (1..pairs.get())
            .map(|pair| (queue(rx_queue(pair).into()), queue(tx_queue(pair).into())))
            .collect(),
        socket: Some(theirs),
        header: Repr {
            src: SERVER,
            dst: Address::new(CID, Port::ANY),
            len: 0,
            socket_type: SocketType::Stream.into(),
            op: Op::Rw.into(),
            flags: 0,
            buf_alloc: 1 << 20,
            fwd_cnt: 0,
        },
        sent: 0,
        their_fwd_cnt: 0,
    };
    (driver, peer)
}

impl Driver {
    /// The state of a connection; `None` if it was closed.
    pub(super) fn state(&self, id: StreamId) -> Option<StreamState> {
        Some(self.sockets.get(id)?.state)
    }

    /// Received bytes that are not read.
    pub(super) fn unread(&self, id: StreamId) -> usize {
        self.sockets.unread(id)
    }
}

/// Opens a connection from the driver to its device.
pub(super) fn connect(driver: &mut Driver, peer: &mut TestDevice) -> StreamId {
    let id = Backend::connect(driver, Port::ANY, SERVER, SocketType::Stream).unwrap();
    Backend::flush(driver);
    let request = peer.take_op(Op::Request);
    peer.header.dst = request.src;
    peer.header.fwd_cnt = 0;
    (peer.sent, peer.their_fwd_cnt) = (0, 0);
    peer.send(Op::Response, &[]);
    assert!(Backend::drive(driver).unwrap());
    assert_eq!(driver.state(id), Some(StreamState::Connected));
    id
}

fn header(queue: &DeviceQueue, chain: &Chain) -> Repr {
    let bytes = queue
        .memory()
        .read_array::<HEADER_LEN>(chain.readable(), 0)
        .unwrap();
    Repr::parse(&bytes).unwrap()
}

impl TestDevice {
    /// Uses queue pair `pair` (from 1) from now on; the current one takes its place in `others`.
    pub(super) fn swap(&mut self, pair: usize) {
        let other = &mut self.others[pair - 1];
        std::mem::swap(&mut self.rx, &mut other.0);
        std::mem::swap(&mut self.tx, &mut other.1);
    }

    /// The next packet and its payload.
    pub(super) fn take(&mut self) -> Option<(Repr, Vec<u8>)> {
        let chain = self.tx.pop().unwrap()?;
        let header = header(&self.tx, &chain);
        let mut bytes = vec![0; header.len as usize];
        let read = self
            .tx
            .memory()
            .read(chain.readable(), HEADER_LEN, &mut bytes);
        assert_eq!(read, bytes.len());
        self.tx.complete(chain, 0);
        self.tx.publish_without_notify();
        self.their_fwd_cnt = header.fwd_cnt;
        self.header.fwd_cnt = self.header.fwd_cnt.wrapping_add(header.len);
        Some((header, bytes))
    }

    /// The next packet of that kind; others are dropped.
    pub(super) fn take_op(&mut self, op: Op) -> Repr {
        loop {
            let (header, _) = self.take().expect("a packet");
            if header.op.known() == Some(op) {
                return header;
            }
        }
    }

    /// Sends a packet of the connection; returns false if the driver has posted no buffer.
    pub(super) fn try_send(&mut self, op: Op, payload: &[u8]) -> bool {
        let Some(chain) = self.rx.pop().unwrap() else {
            return false;
        };
        let mut bytes = [0; HEADER_LEN];
        Repr {
            op: op.into(),
            len: payload.len() as u32,
            ..self.header
        }
        .emit(&mut bytes);
        let memory = self.rx.memory();
        memory.write(chain.writable(), 0, &bytes);
        assert_eq!(
            memory.write(chain.writable(), HEADER_LEN, payload),
            payload.len()
        );
        self.rx.complete(chain, (HEADER_LEN + payload.len()) as u32);
        self.sent = self.sent.wrapping_add(payload.len() as u32);
        self.rx.publish_without_notify();
        true
    }

    /// Sends a packet of the connection.
    #[track_caller]
    pub(super) fn send(&mut self, op: Op, payload: &[u8]) {
        assert!(self.try_send(op, payload), "no receive buffer is posted");
    }
}
