//! For tests: a device with the test itself as its guest, which uses the driver half of the rings.
//!
//! There is no feature negotiation and no kick: the test calls the device, or starts its queues by commands.

use std::collections::BTreeMap;
use std::sync::Arc;

use rustix::event::{EventfdFlags, eventfd};
use zerosock_proto::vsock::datagram::DGRAM_EOM;
use zerosock_proto::wire::vsock::{HEADER_LEN, Op, Repr, SEQ_EOM, SocketType};
use zerosock_proto::{Address, Cid, Port};
use zerosock_ring::{
    Buffer, DeviceQueue, DriverLayout, DriverQueue, Memory, QueueConfig, RegionConfig,
};

use super::Device;
use zerosock_virtio::ring::Ring;

/// Descriptors of each queue.
pub(crate) const SIZE: u16 = 1024;
/// A packet to the device takes two descriptors.
const PACKETS: u16 = SIZE / 2;
/// Bytes of each buffer for the guest.
const BUFFER: u32 = 4096;
/// Receive window of the guest in bytes.
const WINDOW: u32 = 16 << 20;

pub(crate) const TX: u64 = 0;
/// Rings of a queue that the guest does not use.
pub(crate) const EVENT: u64 = 0x8000;
pub(crate) const RX: u64 = 0x1_0000;
const HEADERS: u64 = 0x2_0000;
/// Address of the payload that all packets share.
const BYTES: u64 = 0x3_0000;
const BUFFERS: u64 = 0x4_0000;
pub(crate) const LEN: u64 = BUFFERS + SIZE as u64 * BUFFER as u64;

/// The guest's half of the rings.
pub(crate) struct Guest {
    cid: Cid,
    memory: Arc<Memory>,
    tx: DriverQueue,
    rx: DriverQueue,
    /// Packet slots that the device does not hold.
    free: Vec<u16>,
    /// Bytes received and read, by local port.
    read: BTreeMap<u32, u32>,
    /// The receive window that it announces, in bytes.
    pub(crate) window: u32,
    /// Bytes that arrive for this port stay unread.
    pub(crate) unread: Option<u32>,
}

/// The configuration of the device's half of a queue, whose rings begin at this address.
pub(crate) fn config(at: u64) -> QueueConfig {
    let layout = DriverLayout::at(at, SIZE);
    QueueConfig {
        size: SIZE,
        desc: layout.desc,
        avail: layout.avail,
        used: layout.used,
        base: 0,
        event_idx: false,
        indirect: false,
    }
}

fn ring(memory: &Arc<Memory>, at: u64, base: u16) -> Ring {
    let config = QueueConfig { base, ..config(at) };
    let queue = DeviceQueue::new(memory.clone(), &config).unwrap();
    let kick = eventfd(0, EventfdFlags::CLOEXEC).unwrap().into();
    Ring::new(queue, kick, None, None, true, 1)
}

/// Starts the queues of a device, with all buffers posted.
pub(crate) fn start(device: &mut Device) -> Guest {
    let fd = zerosock_sys::memfd::create("test-guest", LEN, true).unwrap();
    let region = RegionConfig {
        guest_addr: 0,
        user_addr: 0,
        len: LEN,
        fd_offset: 0,
    };
    let memory = Arc::new(Memory::map(vec![(fd, region)]).unwrap());
    resume(device, &memory, [0, 0]);
    Guest::on(device.cid, memory, |_| true)
}

/// Starts the queues of a device on rings that another device has used up to here: the transmit queue and the
/// receive queue.
pub(crate) fn resume(device: &mut Device, memory: &Arc<Memory>, [tx, rx]: [u16; 2]) {
    let rings = &mut device.queues.rings;
    (rings.tx, rings.rx) = (Some(ring(memory, TX, tx)), Some(ring(memory, RX, rx)));
    device.queues.memory = Some(memory.clone());
}

/// Starts the event queue of a device, which has one buffer.
pub(crate) fn start_event(device: &mut Device, memory: &Arc<Memory>) -> DriverQueue {
    device.queues.rings.event = Some(ring(memory, EVENT, 0));
    let mut queue = DriverQueue::new(memory.clone(), DriverLayout::at(EVENT, SIZE), false).unwrap();
    let buffer = Buffer {
        addr: BYTES,
        len: 8,
        writable: true,
    };
    queue.add(&[buffer], 0).unwrap();
    let _ = queue.publish();
    queue
}

impl Guest {
    /// The guest with this memory, of at least [`LEN`] bytes from 0 on. Posts the buffers that end where `posts` says.
    pub(crate) fn on(cid: Cid, memory: Arc<Memory>, posts: impl Fn(u64) -> bool) -> Guest {
        let queue = |at| {
            let layout = DriverLayout::at(at, SIZE);
            DriverQueue::new(memory.clone(), layout, false).unwrap()
        };
        let (tx, rx) = (queue(TX), queue(RX));
        let mut guest = Guest {
            cid,
            memory,
            tx,
            rx,
            free: (0..PACKETS).collect(),
            read: BTreeMap::new(),
            window: WINDOW,
            unread: None,
        };
        for at in 0..u64::from(SIZE) {
            if posts(BUFFERS + (at + 1) * u64::from(BUFFER)) {
                guest.post(at);
            }
        }
        let _ = guest.rx.publish();
        guest
    }

    fn post(&mut self, at: u64) {
        let buffer = Buffer {
            addr: BUFFERS + at * u64::from(BUFFER),
            len: BUFFER,
            writable: true,
        };
        self.rx.add(&[buffer], at).unwrap();
    }

    /// Sends a packet from our `port`. Returns false if the queue is full.
    pub(crate) fn try_send(&mut self, port: u32, to: Address, op: Op, len: u32) -> bool {
        self.try_send_as(SocketType::Stream, 0, port, to, op, len)
    }

    /// Sends a whole message from our `port` in one packet.
    #[track_caller]
    pub(crate) fn send_message(&mut self, port: u32, to: Address, len: u32) {
        let sent = self.try_send_as(SocketType::SeqPacket, SEQ_EOM, port, to, Op::Rw, len);
        assert!(sent, "the queue is full");
    }

    /// Sends a datagram from our `port`.
    #[track_caller]
    pub(crate) fn send_datagram(&mut self, port: u32, to: Address, len: u32) {
        let sent = self.try_send_as(SocketType::Datagram, DGRAM_EOM, port, to, Op::Rw, len);
        assert!(sent, "the queue is full");
    }

    fn try_send_as(
        &mut self,
        socket_type: SocketType,
        flags: u32,
        port: u32,
        to: Address,
        op: Op,
        len: u32,
    ) -> bool {
        self.take_returned();
        let Some(place) = self.free.pop() else {
            return false;
        };
        let header = Repr {
            src: Address::new(self.cid, Port::new(port)),
            dst: to,
            len,
            socket_type: socket_type.into(),
            op: op.into(),
            flags,
            buf_alloc: self.window,
            fwd_cnt: *self.read.entry(port).or_default(),
        };
        let mut bytes = [0; HEADER_LEN];
        header.emit(&mut bytes);
        let addr = HEADERS + 64 * u64::from(place);
        let mut pieces = Vec::new();
        let of = (addr, HEADER_LEN as u32);
        self.memory.translate(of.0, of.1, &mut pieces).unwrap();
        self.memory.write(&pieces, 0, &bytes);
        let piece = |addr, len| Buffer {
            addr,
            len,
            writable: false,
        };
        let chain = [piece(addr, HEADER_LEN as u32), piece(BYTES, len.max(1))];
        self.tx.add(&chain, place.into()).unwrap();
        let _ = self.tx.publish();
        true
    }

    /// Takes the packets back that the device has returned. Returns how many there were.
    pub(crate) fn take_returned(&mut self) -> usize {
        let before = self.free.len();
        while let Some(used) = self.tx.poll().unwrap() {
            self.free.push(used.token as u16);
        }
        self.free.len() - before
    }

    /// As `try_send`; panics if the queue is full.
    #[track_caller]
    pub(crate) fn send(&mut self, port: u32, to: Address, op: Op, len: u32) {
        assert!(self.try_send(port, to, op, len), "the queue is full");
    }

    /// Sends these bytes in one packet from our `port`.
    #[track_caller]
    pub(crate) fn send_bytes(&mut self, port: u32, to: Address, bytes: &[u8]) {
        // All packets share the place, so the ones before must have been read.
        assert!(self.is_drained(), "a packet is held");
        let mut pieces = Vec::new();
        let len = bytes.len() as u32;
        self.memory.translate(BYTES, len, &mut pieces).unwrap();
        self.memory.write(&pieces, 0, bytes);
        self.send(port, to, Op::Rw, len);
    }

    /// Shuts a connection down in these directions (the flags of the header).
    #[track_caller]
    pub(crate) fn shut_down(&mut self, port: u32, to: Address, how: u32) {
        let sent = self.try_send_as(SocketType::Stream, how, port, to, Op::Shutdown, 0);
        assert!(sent, "the queue is full");
    }

    /// Whether the device has returned all packets.
    pub(crate) fn is_drained(&mut self) -> bool {
        self.take_returned();
        self.free.len() == usize::from(PACKETS)
    }

    /// Reads all received packets and posts their buffers again.
    pub(crate) fn received(&mut self) -> Vec<Repr> {
        let packets = self.received_bytes().into_iter();
        packets.map(|(header, _)| header).collect()
    }

    /// As `received`, with the payload.
    pub(crate) fn received_bytes(&mut self) -> Vec<(Repr, Vec<u8>)> {
        let mut all = Vec::new();
        while let Some(used) = self.rx.poll().unwrap() {
            let addr = BUFFERS + used.token * u64::from(BUFFER);
            let mut pieces = Vec::new();
            self.memory.translate(addr, BUFFER, &mut pieces).unwrap();
            let bytes = self.memory.read_array::<HEADER_LEN>(&pieces, 0).unwrap();
            let header = Repr::parse(&bytes).unwrap();
            let port = header.dst.port.get();
            if self.unread != Some(port) {
                self.read_more(port, header.len);
            }
            let mut payload = vec![0; header.len as usize];
            self.memory.read(&pieces, HEADER_LEN, &mut payload);
            all.push((header, payload));
            self.post(used.token);
        }
        let _ = self.rx.publish();
        all
    }

    /// Reads so many bytes that have arrived for a port.
    pub(crate) fn read_more(&mut self, port: u32, bytes: u32) {
        let read = self.read.entry(port).or_default();
        *read = read.wrapping_add(bytes);
    }
}
