//! A guest that writes its rings by hand, so that it can write them wrongly.
//!
//! It does not negotiate the event index and never sleeps: it always kicks, and polls the used
//! index.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use vhost::vhost_user::message::VhostUserProtocolFeatures;
use zerosock::driver::{Address, Cid, Frontend, FrontendError, Port, VringAddr};
use zerosock_proto::vsock::QueuePairs;
use zerosock_proto::vsock::features::F_PAIRS;
use zerosock_proto::vsock::pairs::{rx_queue, tx_queue};
use zerosock_proto::wire::vsock::{HEADER_LEN, Op, Repr, SocketType};
use zerosock_ring::{DriverLayout, Memory, RegionConfig};
use zerosock_sys::memfd;

use super::deadline;

pub(crate) const NEXT: u16 = 1;
pub(crate) const WRITE: u16 = 2;
pub(crate) const INDIRECT: u16 = 4;

pub(crate) const RX: usize = 0;
pub(crate) const TX: usize = 1;
pub(crate) const EVENT: usize = 2;

/// Guest address of the first byte, and its user address.
pub(crate) const GUEST: u64 = 0x4000_0000;
const USER: u64 = 0x7a00_0000_0000;
pub(crate) const LEN: u64 = 8 << 20;
/// Descriptors of each queue.
pub(crate) const SIZE: u16 = 64;
/// Payload bytes of each receive buffer.
pub(crate) const RX_LEN: u32 = 4096;
/// Where rings end and buffers begin.
const BUFFERS: u64 = 0x4_0000;

pub(crate) struct RawGuest {
    pub(crate) frontend: Frontend,
    pub(crate) memory: Arc<Memory>,
    pub(crate) fd: OwnedFd,
    pub(crate) rings: Vec<DriverLayout>,
    pub(crate) cid: Cid,
    /// Those that were negotiated.
    pub(crate) features: u64,
    kicks: Vec<OwnedFd>,
    calls: Vec<OwnedFd>,
    avail: Vec<u16>,
    /// Used elements read so far, for each queue.
    used: Vec<u16>,
    /// Slots of each queue, by its number; only those of transmit queues are used.
    tx_slots: Vec<TxSlots>,
}

/// Pairs of descriptors and buffers for transmission, each named by its first descriptor. A slot is
/// free again when the device has returned the chain with this head: chains come back in any order.
struct TxSlots {
    free: VecDeque<u16>,
    taken: [bool; SIZE as usize],
}

impl TxSlots {
    fn new() -> TxSlots {
        TxSlots {
            free: (0..SIZE).step_by(2).collect(),
            taken: [false; SIZE as usize],
        }
    }

    fn take(&mut self) -> Option<u16> {
        let head = self.free.pop_front()?;
        self.taken[usize::from(head)] = true;
        Some(head)
    }

    /// Frees the slot of the returned chain at `head`. Ignores chains that a test has written
    /// itself.
    fn give_back(&mut self, head: u32) {
        if let Some(taken) = self.taken.get_mut(head as usize)
            && std::mem::take(taken)
        {
            self.free.push_back(head as u16);
        }
    }
}

/// Connects; tries again while the device still disconnects its previous guest.
pub(crate) fn connect(socket: &Path) -> Frontend {
    let give_up = deadline();
    loop {
        let attempt =
            Frontend::connect(socket, Duration::from_secs(20)).and_then(|mut frontend| {
                frontend.get_features()?;
                Ok(frontend)
            });
        match attempt {
            Ok(frontend) => return frontend,
            Err(error) => assert!(Instant::now() < give_up, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Writes `queue_pairs` in the configuration space (docs/queue-pairs.md).
pub(crate) fn set_queue_pairs(frontend: &mut Frontend, pairs: u16) -> Result<(), FrontendError> {
    frontend.write_config(10, &pairs.to_le_bytes())
}

impl RawGuest {
    /// Makes all call descriptors full and blocking, so that a write to one never returns.
    pub(crate) fn jam_calls(&self) {
        for call in &self.calls {
            // The counter becomes the largest that a write can reach.
            rustix::io::ioctl_fionbio(call, true).unwrap();
            let give_up = deadline();
            loop {
                let _ = rustix::io::read(call, &mut [0; 8]);
                match rustix::io::write(call, &(u64::MAX - 1).to_ne_bytes()) {
                    Ok(_) => break,
                    // The device has notified since the read.
                    Err(error) => assert!(Instant::now() < give_up, "{error}"),
                }
            }
            rustix::io::ioctl_fionbio(call, false).unwrap();
        }
    }

    /// Whether the device has notified since the previous call.
    pub(crate) fn was_called(&self, queue: usize) -> bool {
        rustix::io::read(&self.calls[queue], &mut [0; 8]).is_ok()
    }

    /// Attaches, starts all queues and posts every receive buffer.
    pub(crate) fn attach(socket: &Path) -> RawGuest {
        RawGuest::attach_with(socket, true)
    }

    pub(crate) fn attach_with(socket: &Path, seal: bool) -> RawGuest {
        RawGuest::over(connect(socket), seal)
    }

    /// Attaches over an open front-end connection, with VERSION_1 and INDIRECT_DESC.
    pub(crate) fn over(frontend: Frontend, seal: bool) -> RawGuest {
        RawGuest::with_features(frontend, seal, 1 << 32 | 1 << 28)
    }

    /// As `over`, with other features.
    pub(crate) fn with_features(frontend: Frontend, seal: bool, features: u64) -> RawGuest {
        RawGuest::with_all(frontend, seal, features, QueuePairs::ONE)
    }

    /// As `over`, with several queue pairs and SEQPACKET.
    pub(crate) fn with_pairs(frontend: Frontend, seal: bool, pairs: QueuePairs) -> RawGuest {
        RawGuest::with_all(frontend, seal, 1 << 32 | 1 << 28 | 1 << 1 | 1, pairs)
    }

    fn with_all(
        mut frontend: Frontend,
        seal: bool,
        mut features: u64,
        pairs: QueuePairs,
    ) -> RawGuest {
        let protocol = VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::RESET_DEVICE
            | VhostUserProtocolFeatures::LOG_SHMFD
            | VhostUserProtocolFeatures::CONFIG;
        if pairs != QueuePairs::ONE {
            features |= F_PAIRS;
        }
        let (agreed, _) = frontend.negotiate(features, protocol).unwrap();
        if pairs != QueuePairs::ONE {
            assert_eq!(agreed & F_PAIRS, F_PAIRS, "no queue pairs are offered");
            set_queue_pairs(&mut frontend, pairs.get()).unwrap();
        }
        let queues = usize::from(pairs.queues());
        let mut cid = [0; 8];
        frontend.read_config(0, &mut cid).unwrap();
        let cid = Cid::try_from(u64::from_le_bytes(cid)).unwrap();
        let fd = memfd::create("raw-guest", LEN, seal).unwrap();
        let region = RegionConfig {
            guest_addr: GUEST,
            user_addr: USER,
            len: LEN,
            fd_offset: 0,
        };
        let memory = Arc::new(Memory::map(vec![(fd.try_clone().unwrap(), region)]).unwrap());
        let rings = (0..queues as u64).map(|n| DriverLayout::at(GUEST + n * 0x4000, SIZE));
        let make = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let mut guest = RawGuest {
            frontend,
            memory,
            fd,
            rings: rings.collect(),
            cid,
            features: agreed,
            kicks: (0..queues).map(|_| make()).collect(),
            calls: (0..queues).map(|_| make()).collect(),
            avail: vec![0; queues],
            used: vec![0; queues],
            tx_slots: (0..queues).map(|_| TxSlots::new()).collect(),
        };
        guest
            .frontend
            .set_mem_table(&[(guest.fd.as_fd(), region)])
            .unwrap();
        guest.start(&vec![0; queues]).unwrap();
        for pair in 0..pairs.get() {
            (0..SIZE).for_each(|index| guest.post(rx_queue(pair).into(), index));
            guest.kick(rx_queue(pair).into());
        }
        guest
    }

    /// Starts the queues at `bases`.
    pub(crate) fn start(&mut self, bases: &[u16]) -> Result<(), FrontendError> {
        for index in 0..bases.len() as u32 {
            let at = index as usize;
            self.frontend.set_vring_num(index, SIZE)?;
            self.frontend.set_vring_base(index, bases[at])?;
            self.frontend.set_vring_addr(index, self.vring_addr(at))?;
            self.frontend
                .set_vring_call(index, Some(self.calls[at].as_fd()))?;
            self.frontend
                .set_vring_kick(index, Some(self.kicks[at].as_fd()))?;
        }
        for index in 0..bases.len() as u32 {
            self.frontend.set_vring_enable(index, true)?;
        }
        self.frontend.sync()
    }

    pub(crate) fn vring_addr(&self, queue: usize) -> VringAddr {
        let ring = self.rings[queue];
        VringAddr {
            desc: ring.desc - GUEST + USER,
            avail: ring.avail - GUEST + USER,
            used: ring.used - GUEST + USER,
        }
    }

    /// The one region of the memory, for another SET_MEM_TABLE.
    pub(crate) fn region(&self) -> RegionConfig {
        RegionConfig {
            guest_addr: GUEST,
            user_addr: USER,
            len: LEN,
            fd_offset: 0,
        }
    }

    pub(crate) fn write(&self, addr: u64, bytes: &[u8]) {
        let mut pieces = Vec::new();
        self.memory
            .translate(addr, bytes.len() as u32, &mut pieces)
            .unwrap();
        assert_eq!(self.memory.write(&pieces, 0, bytes), bytes.len());
    }

    pub(crate) fn read(&self, addr: u64, out: &mut [u8]) {
        let mut pieces = Vec::new();
        self.memory
            .translate(addr, out.len() as u32, &mut pieces)
            .unwrap();
        assert_eq!(self.memory.read(&pieces, 0, out), out.len());
    }

    fn read_u16(&self, addr: u64) -> u16 {
        let mut bytes = [0u8; 2];
        self.read(addr, &mut bytes);
        u16::from_le_bytes(bytes)
    }

    fn read_u32(&self, addr: u64) -> u32 {
        let mut bytes = [0u8; 4];
        self.read(addr, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    /// Writes descriptor `index` of `queue`.
    pub(crate) fn desc(
        &self,
        queue: usize,
        index: u16,
        addr: u64,
        len: u32,
        flags: u16,
        next: u16,
    ) {
        self.write(
            self.rings[queue].desc + u64::from(index) * 16,
            &desc(addr, len, flags, next),
        );
    }

    /// Makes the chain at `head` available, without a kick.
    pub(crate) fn make_available(&mut self, queue: usize, head: u16) {
        let slot = self.avail[queue] % SIZE;
        self.write(
            self.rings[queue].avail + 4 + u64::from(slot) * 2,
            &head.to_le_bytes(),
        );
        self.set_avail(queue, self.avail[queue].wrapping_add(1));
    }

    /// Writes any value into the available index.
    pub(crate) fn set_avail(&mut self, queue: usize, index: u16) {
        fence(Ordering::SeqCst);
        self.avail[queue] = index;
        self.write(self.rings[queue].avail + 2, &index.to_le_bytes());
        fence(Ordering::SeqCst);
    }

    pub(crate) fn avail_index(&self, queue: usize) -> u16 {
        self.avail[queue]
    }

    pub(crate) fn used_index(&self, queue: usize) -> u16 {
        self.read_u16(self.rings[queue].used + 2)
    }

    pub(crate) fn kick(&self, queue: usize) {
        rustix::io::write(&self.kicks[queue], &1u64.to_ne_bytes()).unwrap();
    }

    /// Where buffer `index` of `queue` lies: 8 KiB for each.
    pub(crate) fn buffer(&self, queue: usize, index: u16) -> u64 {
        GUEST + BUFFERS + (queue as u64 * u64::from(SIZE) + u64::from(index)) * 8192
    }

    /// Makes receive buffer `index` available, header and payload in one descriptor.
    fn post(&mut self, queue: usize, index: u16) {
        let len = HEADER_LEN as u32 + RX_LEN;
        self.desc(queue, index, self.buffer(queue, index), len, WRITE, 0);
        self.make_available(queue, index);
    }

    /// The head of the last chain made available.
    pub(crate) fn last_available(&self, queue: usize) -> u16 {
        let slot = self.avail[queue].wrapping_sub(1) % SIZE;
        self.read_u16(self.rings[queue].avail + 4 + u64::from(slot) * 2)
    }

    /// The next used element, if there is one: the head of its chain, and the bytes written.
    fn next_used(&mut self, queue: usize) -> Option<(u32, u32)> {
        fence(Ordering::SeqCst);
        if self.used_index(queue) == self.used[queue] {
            return None;
        }
        fence(Ordering::SeqCst);
        let at = self.rings[queue].used + 4 + u64::from(self.used[queue] % SIZE) * 8;
        self.used[queue] = self.used[queue].wrapping_add(1);
        Some((self.read_u32(at), self.read_u32(at + 4)))
    }

    /// The next packet from the device, without waiting.
    pub(crate) fn try_recv(&mut self) -> Option<(Repr, Vec<u8>)> {
        self.try_recv_on(0)
    }

    /// As `try_recv`, of one queue pair.
    pub(crate) fn try_recv_on(&mut self, pair: u16) -> Option<(Repr, Vec<u8>)> {
        let rx = usize::from(rx_queue(pair));
        let (id, len) = self.next_used(rx)?;
        let id = id as u16;
        let mut bytes = vec![0u8; len as usize];
        if len > 0 {
            self.read(self.buffer(rx, id), &mut bytes);
        }
        self.post(rx, id);
        self.kick(rx);
        let header = Repr::parse(bytes.first_chunk()?).unwrap();
        Some((header, bytes[HEADER_LEN..].to_vec()))
    }

    /// Waits for the next packet for which `wanted` is true; drops others.
    #[track_caller]
    pub(crate) fn recv_where(&mut self, wanted: impl Fn(&Repr) -> bool) -> (Repr, Vec<u8>) {
        let give_up = deadline();
        loop {
            match self.try_recv() {
                Some(packet) if wanted(&packet.0) => return packet,
                Some(_) => {}
                None => {
                    assert!(Instant::now() < give_up, "no such packet");
                    std::thread::sleep(Duration::from_micros(200));
                }
            }
        }
    }

    #[track_caller]
    pub(crate) fn recv_op(&mut self, port: u32, op: Op) -> (Repr, Vec<u8>) {
        self.recv_where(|repr| repr.dst.port.get() == port && repr.op.known() == Some(op))
    }

    /// A header from our `port` to the host's port `to`.
    pub(crate) fn header(&self, port: u32, to: u32, op: Op) -> Repr {
        Repr {
            src: Address::new(self.cid, Port::new(port)),
            dst: Address::new(Cid::HOST, Port::new(to)),
            len: 0,
            socket_type: SocketType::Stream.into(),
            op: op.into(),
            flags: 0,
            buf_alloc: 262_144,
            fwd_cnt: 0,
        }
    }

    /// A free transmit descriptor pair; waits until the device has returned enough.
    pub(crate) fn tx_pair(&mut self) -> u16 {
        let give_up = deadline();
        loop {
            if let Some(index) = self.take_tx_pair(TX) {
                return index;
            }
            assert!(
                Instant::now() < give_up,
                "the device returns no transmit buffers"
            );
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Frees the slots of the chains that the device has returned.
    fn collect_tx(&mut self, tx: usize) {
        while let Some((head, _)) = self.next_used(tx) {
            self.tx_slots[tx].give_back(head);
        }
    }

    fn take_tx_pair(&mut self, tx: usize) -> Option<u16> {
        self.collect_tx(tx);
        self.tx_slots[tx].take()
    }

    /// Sends raw header bytes, with the payload in a second descriptor.
    pub(crate) fn send_bytes(&mut self, header: &[u8], payload: &[u8]) {
        let index = self.tx_pair();
        self.send_at(TX, index, header, payload);
    }

    fn send_at(&mut self, tx: usize, index: u16, header: &[u8], payload: &[u8]) {
        let (at, data) = (self.buffer(tx, index), self.buffer(tx, index + 1));
        self.write(at, header);
        let flags = if payload.is_empty() { 0 } else { NEXT };
        self.desc(tx, index, at, header.len() as u32, flags, index + 1);
        if !payload.is_empty() {
            self.write(data, payload);
            self.desc(tx, index + 1, data, payload.len() as u32, 0, 0);
        }
        self.make_available(tx, index);
        self.kick(tx);
    }

    /// Whether one more packet can be sent through queue pair `pair` now.
    pub(crate) fn may_send_on(&mut self, pair: u16) -> bool {
        let tx = usize::from(tx_queue(pair));
        self.collect_tx(tx);
        !self.tx_slots[tx].free.is_empty()
    }

    /// Chains that were sent through queue pair `pair` and not returned.
    pub(crate) fn outstanding_on(&self, pair: u16) -> u16 {
        let tx = usize::from(tx_queue(pair));
        self.avail[tx].wrapping_sub(self.used_index(tx))
    }

    /// Whether the device has returned everything that was sent through queue pair `pair`.
    pub(crate) fn is_idle_on(&self, pair: u16) -> bool {
        let tx = usize::from(tx_queue(pair));
        self.used_index(tx) == self.avail[tx]
    }

    /// Sends a packet with this header through queue pair `pair`, which must have room.
    pub(crate) fn send_on(&mut self, pair: u16, header: &Repr, payload: &[u8]) {
        let tx = usize::from(tx_queue(pair));
        let index = self.take_tx_pair(tx).expect("there is no room");
        self.send_at(tx, index, &emit(header), payload);
    }

    /// As `send`, with the header unchanged.
    pub(crate) fn send_as(&mut self, header: &Repr, payload: &[u8]) {
        self.send_bytes(&emit(header), payload);
    }

    /// Sends a packet; `header.len` is set from the payload.
    pub(crate) fn send(&mut self, header: Repr, payload: &[u8]) {
        let header = Repr {
            len: payload.len() as u32,
            ..header
        };
        self.send_bytes(&emit(&header), payload);
    }

    /// Connects from the guest's `port` to the host's `to`; the backlog accepts.
    #[track_caller]
    pub(crate) fn connect(&mut self, port: u32, to: u32) {
        self.send(self.header(port, to, Op::Request), &[]);
        self.recv_op(port, Op::Response);
    }

    /// Waits until the device has returned all sent chains.
    #[track_caller]
    pub(crate) fn wait_tx_done(&mut self) {
        let give_up = deadline();
        while self.used_index(TX) != self.avail[TX] {
            assert!(
                Instant::now() < give_up,
                "the device keeps transmit buffers"
            );
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}

/// A descriptor's 16 bytes.
pub(crate) fn desc(addr: u64, len: u32, flags: u16, next: u16) -> [u8; 16] {
    let mut bytes = [0u8; 16];
    bytes[0..8].copy_from_slice(&addr.to_le_bytes());
    bytes[8..12].copy_from_slice(&len.to_le_bytes());
    bytes[12..14].copy_from_slice(&flags.to_le_bytes());
    bytes[14..16].copy_from_slice(&next.to_le_bytes());
    bytes
}

/// A header's 44 bytes.
pub(crate) fn emit(header: &Repr) -> [u8; HEADER_LEN] {
    let mut bytes = [0u8; HEADER_LEN];
    header.emit(&mut bytes);
    bytes
}
