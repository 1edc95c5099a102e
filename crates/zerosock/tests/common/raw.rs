//! A guest that writes its rings by hand, so that it can write them wrongly.
//!
//! It knows no event index and never sleeps: it kicks always and looks at the used index.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use vhost::vhost_user::message::VhostUserProtocolFeatures;
use zerosock::driver::{Address, Cid, Frontend, FrontendError, Port, VringAddr};
use zerosock_proto::wire::vsock::{HEADER_LEN, Op, Packet, Repr, SocketType};
use zerosock_ring::{DriverLayout, Memory, RegionConfig};
use zerosock_sys::memfd;

use super::deadline;

pub(crate) const NEXT: u16 = 1;
pub(crate) const WRITE: u16 = 2;
pub(crate) const INDIRECT: u16 = 4;

pub(crate) const RX: usize = 0;
pub(crate) const TX: usize = 1;
pub(crate) const EVENT: usize = 2;

/// Guest address of the first byte, and the user address that stands for it.
pub(crate) const GUEST: u64 = 0x4000_0000;
const USER: u64 = 0x7a00_0000_0000;
const LEN: u64 = 4 << 20;
/// Descriptors of each queue.
pub(crate) const SIZE: u16 = 64;
/// Payload bytes of each receive buffer.
pub(crate) const RX_LEN: u32 = 4096;
/// Where rings end and buffers begin.
const BUFFERS: u64 = 0x1_0000;

pub(crate) struct RawGuest {
    pub(crate) frontend: Frontend,
    pub(crate) memory: Arc<Memory>,
    pub(crate) fd: OwnedFd,
    pub(crate) rings: [DriverLayout; 3],
    pub(crate) cid: Cid,
    kicks: Vec<OwnedFd>,
    calls: Vec<OwnedFd>,
    avail: [u16; 3],
    used: [u16; 3],
    next_tx: u16,
}

/// Connects, with the patience that a device needs which is still seeing its last guest off.
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

impl RawGuest {
    /// Makes a plain write to any of the call descriptors wait for ever: full, and blocking.
    pub(crate) fn jam_calls(&self) {
        for call in &self.calls {
            // The counter becomes the largest that a write can reach.
            rustix::io::ioctl_fionbio(call, true).unwrap();
            let mut count = [0; 8];
            let _ = rustix::io::read(call, &mut count);
            rustix::io::write(call, &(u64::MAX - 1).to_ne_bytes()).unwrap();
            rustix::io::ioctl_fionbio(call, false).unwrap();
        }
    }

    /// Attaches, starts all queues and posts every receive buffer.
    pub(crate) fn attach(socket: &Path) -> RawGuest {
        RawGuest::attach_with(socket, true)
    }

    pub(crate) fn attach_with(socket: &Path, seal: bool) -> RawGuest {
        RawGuest::over(connect(socket), seal)
    }

    /// As the guest of a device that is there already.
    pub(crate) fn over(mut frontend: Frontend, seal: bool) -> RawGuest {
        let protocol = VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::CONFIG;
        // VERSION_1 and INDIRECT_DESC.
        frontend.negotiate(1 << 32 | 1 << 28, protocol).unwrap();
        let cid = Cid::guest(frontend.guest_cid().unwrap()).unwrap();
        let fd = memfd::create("raw-guest", LEN, seal).unwrap();
        let region = RegionConfig {
            guest_addr: GUEST,
            user_addr: USER,
            len: LEN,
            fd_offset: 0,
        };
        let memory = Arc::new(Memory::map(vec![(fd.try_clone().unwrap(), region)]).unwrap());
        let rings = [0, 1, 2].map(|n| DriverLayout::at(GUEST + n * 0x4000, SIZE));
        let make = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let mut guest = RawGuest {
            frontend,
            memory,
            fd,
            rings,
            cid,
            kicks: (0..3).map(|_| make()).collect(),
            calls: (0..3).map(|_| make()).collect(),
            avail: [0; 3],
            used: [0; 3],
            next_tx: 0,
        };
        guest
            .frontend
            .set_mem_table(&[(guest.fd.as_fd(), region)])
            .unwrap();
        guest.start([0; 3]).unwrap();
        guest.post_rx(SIZE);
        guest
    }

    /// Starts the queues at `bases`.
    pub(crate) fn start(&mut self, bases: [u16; 3]) -> Result<(), FrontendError> {
        for index in 0..3u32 {
            let at = index as usize;
            self.frontend.set_vring_num(index, SIZE)?;
            self.frontend.set_vring_base(index, bases[at])?;
            self.frontend.set_vring_addr(index, self.vring_addr(at))?;
            self.frontend
                .set_vring_call(index, Some(self.calls[at].as_fd()))?;
            self.frontend
                .set_vring_kick(index, Some(self.kicks[at].as_fd()))?;
        }
        for index in 0..3 {
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

    /// The memory's one region, for another SET_MEM_TABLE.
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

    /// Writes the available index, whatever it may be.
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

    /// Posts `count` receive buffers, header and payload in one descriptor each.
    pub(crate) fn post_rx(&mut self, count: u16) {
        for _ in 0..count {
            let index = self.avail[RX] % SIZE;
            let len = HEADER_LEN as u32 + RX_LEN;
            self.desc(RX, index, self.buffer(RX, index), len, WRITE, 0);
            self.make_available(RX, index);
        }
        self.kick(RX);
    }

    /// The next packet from the device, if one is there now.
    pub(crate) fn try_recv(&mut self) -> Option<(Repr, Vec<u8>)> {
        fence(Ordering::SeqCst);
        if self.used_index(RX) == self.used[RX] {
            return None;
        }
        let at = self.rings[RX].used + 4 + u64::from(self.used[RX] % SIZE) * 8;
        let (id, len) = (self.read_u32(at) as u16, self.read_u32(at + 4));
        self.used[RX] = self.used[RX].wrapping_add(1);
        let mut bytes = vec![0u8; len as usize];
        if len > 0 {
            self.read(self.buffer(RX, id), &mut bytes);
        }
        self.post_rx(1);
        let header = Repr::parse(&Packet::new_checked(bytes.get(..HEADER_LEN)?).ok()?).unwrap();
        Some((header, bytes[HEADER_LEN..].to_vec()))
    }

    /// Waits for the next packet that `wanted` likes; drops others.
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
        while self.avail[TX].wrapping_sub(self.used_index(TX)) >= SIZE / 2 - 1 {
            assert!(
                Instant::now() < give_up,
                "the device returns no transmit buffers"
            );
            std::thread::sleep(Duration::from_micros(200));
        }
        let index = self.next_tx;
        self.next_tx = (self.next_tx + 2) % SIZE;
        index
    }

    /// Sends raw header bytes with payload in a descriptor of its own.
    pub(crate) fn send_bytes(&mut self, header: &[u8], payload: &[u8]) {
        let index = self.tx_pair();
        let (at, data) = (self.buffer(TX, index), self.buffer(TX, index + 1));
        self.write(at, header);
        let flags = if payload.is_empty() { 0 } else { NEXT };
        self.desc(TX, index, at, header.len() as u32, flags, index + 1);
        if !payload.is_empty() {
            self.write(data, payload);
            self.desc(TX, index + 1, data, payload.len() as u32, 0, 0);
        }
        self.make_available(TX, index);
        self.kick(TX);
    }

    /// Sends a packet; `header.len` is set from the payload.
    pub(crate) fn send(&mut self, header: Repr, payload: &[u8]) {
        let header = Repr {
            len: payload.len() as u32,
            ..header
        };
        self.send_bytes(&emit(&header), payload);
    }

    /// Connects from our `port` to the host's `to`; the listener accepts by itself (backlog).
    #[track_caller]
    pub(crate) fn connect(&mut self, port: u32, to: u32) {
        self.send(self.header(port, to, Op::Request), &[]);
        self.recv_op(port, Op::Response);
    }

    /// Waits until the device has returned everything it was sent.
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
