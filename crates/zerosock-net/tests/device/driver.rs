//! A driver that writes its rings by hand, and knows every byte around its buffers.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use vhost::vhost_user::message::VhostUserProtocolFeatures;
use zerosock_proto::wire::net::{Config, HEADER_LEN, Header};
use zerosock_ring::{DriverLayout, Memory, RegionConfig};
use zerosock_sys::memfd;
use zerosock_vhost_user::frontend::{Frontend, FrontendError, VringAddr};

use super::network::DEADLINE;

pub(crate) const NEXT: u16 = 1;
pub(crate) const WRITE: u16 = 2;
const VERSION_1: u64 = 1 << 32;

pub(crate) const GUEST: u64 = 0x4000_0000;
const USER: u64 = 0x7a00_0000_0000;
pub(crate) const LEN: u64 = 16 << 20;
/// Descriptors of each queue.
pub(crate) const SIZE: u16 = 256;
const RINGS: u64 = 0x4000;
/// Where buffers begin.
const BUFFERS: u64 = 0x10_0000;
/// Bytes on both sides of a buffer, which the device may not write.
const GUARD: u64 = 64;
const CANARY: u8 = 0xa5;

/// The protocol features of the driver, if the device has them.
pub(crate) const PROTOCOL: VhostUserProtocolFeatures = VhostUserProtocolFeatures::MQ
    .union(VhostUserProtocolFeatures::REPLY_ACK)
    .union(VhostUserProtocolFeatures::RESET_DEVICE)
    .union(VhostUserProtocolFeatures::LOG_SHMFD)
    .union(VhostUserProtocolFeatures::CONFIG)
    .union(VhostUserProtocolFeatures::STATUS)
    .union(VhostUserProtocolFeatures::MTU)
    .union(VhostUserProtocolFeatures::RARP);

/// The pieces of a posted chain.
type Chain = Vec<(u64, u32)>;

pub(crate) struct Driver {
    pub(crate) frontend: Frontend,
    pub(crate) features: u64,
    memory: Memory,
    fd: OwnedFd,
    /// A region behind the memory, with nothing in it, and its length.
    more: Option<(OwnedFd, u64)>,
    kicks: Vec<OwnedFd>,
    calls: Vec<OwnedFd>,
    avail: Vec<u16>,
    used: Vec<u16>,
    next_descriptor: Vec<u16>,
    /// Posted chains by queue and head.
    posted: HashMap<(usize, u16), Chain>,
    /// All buffers that were ever posted.
    buffers: Chain,
    next_buffer: u64,
    /// A frame that was dropped may have been read into buffers, so that more than the next frame is in
    /// them.
    pub(crate) lax: bool,
    /// Chains without room for a header are posted, and returned without a frame.
    pub(crate) posts_too_little: bool,
}

impl Driver {
    /// Connects and starts all queues.
    pub(crate) fn attach(socket: &Path, features: u64, queues: usize) -> Driver {
        let mut driver = Driver::connect(socket, features, queues);
        driver.start_all();
        driver
    }

    /// Connects and sends the memory.
    pub(crate) fn connect(socket: &Path, features: u64, queues: usize) -> Driver {
        let mut frontend = Frontend::connect(socket, DEADLINE).unwrap();
        let features = features | VERSION_1;
        let (features, _) = frontend.negotiate(features, PROTOCOL).unwrap();
        let fd = memfd::create("net-driver", LEN, true).unwrap();
        let region = RegionConfig {
            guest_addr: GUEST,
            user_addr: USER,
            len: LEN,
            fd_offset: 0,
        };
        let memory = Memory::map(vec![(fd.try_clone().unwrap(), region)]).unwrap();
        let make = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let mut driver = Driver {
            frontend,
            features,
            memory,
            fd,
            more: None,
            kicks: (0..queues).map(|_| make()).collect(),
            calls: (0..queues).map(|_| make()).collect(),
            avail: vec![0; queues],
            used: vec![0; queues],
            next_descriptor: vec![0; queues],
            posted: HashMap::new(),
            buffers: Vec::new(),
            next_buffer: GUEST + BUFFERS,
            lax: false,
            posts_too_little: false,
        };
        driver.write(GUEST + BUFFERS, &vec![CANARY; (LEN - BUFFERS) as usize]);
        driver.send_memory();
        driver
    }

    /// Stops all queues and continues them at the device behind `socket`, as in a migration; `prepare` is
    /// called before the queues start.
    pub(crate) fn move_to(&mut self, socket: &Path, prepare: impl FnOnce(&mut Frontend)) {
        let queues = 0..self.kicks.len();
        let stop = |queue| self.frontend.get_vring_base(queue as u32).unwrap();
        let bases: Vec<u16> = queues.clone().map(stop).collect();
        // Ends the old connection, after which the device may be that of the new one.
        let (nowhere, _) = UnixStream::pair().unwrap();
        self.frontend = Frontend::from_stream(nowhere, DEADLINE).unwrap();
        self.frontend = Frontend::connect(socket, DEADLINE).unwrap();
        let (agreed, _) = self.frontend.negotiate(self.features, PROTOCOL).unwrap();
        assert_eq!(agreed, self.features);
        prepare(&mut self.frontend);
        self.send_memory();
        queues
            .zip(bases)
            .for_each(|(queue, base)| self.start(queue, base));
    }

    /// The configuration space.
    pub(crate) fn config(&mut self) -> [u8; Config::LEN] {
        let mut config = [0; Config::LEN];
        self.frontend.read_config(0, &mut config).unwrap();
        config
    }

    /// Adds a region of `len` bytes to the next memory table. Nothing is in it.
    pub(crate) fn grow(&mut self, len: u64) {
        self.more = Some((memfd::create("net-driver-more", len, false).unwrap(), len));
    }

    /// Changes the size of the file of that region.
    pub(crate) fn truncate(&self, len: u64) {
        let (fd, _) = self.more.as_ref().unwrap();
        rustix::fs::ftruncate(fd, len).unwrap();
    }

    /// Bytes of that region that the kernel has allocated.
    pub(crate) fn allocated(&self) -> u64 {
        let (fd, _) = self.more.as_ref().unwrap();
        rustix::fs::fstat(fd).unwrap().st_blocks as u64 * 512
    }

    pub(crate) fn send_memory(&mut self) {
        self.try_send_memory().unwrap();
    }

    pub(crate) fn try_send_memory(&mut self) -> Result<(), FrontendError> {
        let region = |offset, len| RegionConfig {
            guest_addr: GUEST + offset,
            user_addr: USER + offset,
            len,
            fd_offset: 0,
        };
        let first = (self.fd.as_fd(), region(0, LEN));
        let more = self.more.iter();
        let more = more.map(|(fd, len)| (fd.as_fd(), region(LEN, *len)));
        let table: Vec<_> = [first].into_iter().chain(more).collect();
        self.frontend.set_mem_table(&table)
    }

    pub(crate) fn start_all(&mut self) {
        (0..self.kicks.len()).for_each(|queue| self.start(queue, 0));
    }

    pub(crate) fn layout(queue: usize) -> DriverLayout {
        DriverLayout::at(GUEST + queue as u64 * RINGS, SIZE)
    }

    pub(crate) fn addresses(queue: usize) -> VringAddr {
        let layout = Driver::layout(queue);
        VringAddr {
            desc: layout.desc - GUEST + USER,
            avail: layout.avail - GUEST + USER,
            used: layout.used - GUEST + USER,
        }
    }

    /// Starts a queue at `base`, and enables it.
    pub(crate) fn start(&mut self, queue: usize, base: u16) {
        self.set_up(queue, base);
        self.send_kick(queue).unwrap();
        let frontend = &mut self.frontend;
        frontend.set_vring_enable(queue as u32, true).unwrap();
        frontend.sync().unwrap();
    }

    /// Sends what a queue needs before it starts.
    pub(crate) fn set_up(&mut self, queue: usize, base: u16) {
        let (addresses, index) = (Driver::addresses(queue), queue as u32);
        let frontend = &mut self.frontend;
        frontend.set_vring_num(index, SIZE).unwrap();
        frontend.set_vring_base(index, base).unwrap();
        frontend.set_vring_addr(index, addresses).unwrap();
        let call = Some(self.calls[queue].as_fd());
        frontend.set_vring_call(index, call).unwrap();
    }

    /// Sends the descriptor that starts a queue.
    pub(crate) fn send_kick(&mut self, queue: usize) -> Result<(), FrontendError> {
        let kick = Some(self.kicks[queue].as_fd());
        self.frontend.set_vring_kick(queue as u32, kick)
    }

    pub(crate) fn write(&self, addr: u64, bytes: &[u8]) {
        let mut pieces = Vec::new();
        let len = bytes.len() as u32;
        self.memory.translate(addr, len, &mut pieces).unwrap();
        assert_eq!(self.memory.write(&pieces, 0, bytes), bytes.len());
    }

    pub(crate) fn read(&self, addr: u64, len: usize) -> Vec<u8> {
        let mut pieces = Vec::new();
        let mut out = vec![0; len];
        self.memory
            .translate(addr, len as u32, &mut pieces)
            .unwrap();
        assert_eq!(self.memory.read(&pieces, 0, &mut out), len);
        out
    }

    fn read_u16(&self, addr: u64) -> u16 {
        u16::from_le_bytes(self.read(addr, 2).try_into().unwrap())
    }

    fn read_u32(&self, addr: u64) -> u32 {
        u32::from_le_bytes(self.read(addr, 4).try_into().unwrap())
    }

    /// Begins a page of its own for the buffers that follow. Returns its number.
    pub(crate) fn begin_page(&mut self) -> u64 {
        self.next_buffer = self.next_buffer.next_multiple_of(4096);
        self.next_buffer / 4096
    }

    /// A buffer between two guards.
    fn buffer(&mut self, len: u32) -> u64 {
        let at = self.next_buffer + GUARD;
        self.next_buffer = (at + u64::from(len) + GUARD).next_multiple_of(64);
        assert!(self.next_buffer <= GUEST + LEN, "the memory is used up");
        self.buffers.push((at, len));
        at
    }

    /// The address of the last buffer.
    pub(crate) fn last_buffer(&self) -> u64 {
        self.buffers.last().unwrap().0
    }

    /// Makes a chain of these pieces available, without a kick; each with WRITE or not.
    fn make_available(&mut self, queue: usize, pieces: &[(u64, u32, u16)]) {
        let layout = Driver::layout(queue);
        let head = self.next_descriptor[queue] % SIZE;
        for (at, &(addr, len, flags)) in pieces.iter().enumerate() {
            let index = (head + at as u16) % SIZE;
            let next = (index + 1) % SIZE;
            let flags = if at + 1 < pieces.len() {
                flags | NEXT
            } else {
                flags
            };
            let mut bytes = addr.to_le_bytes().to_vec();
            bytes.extend(len.to_le_bytes());
            bytes.extend(flags.to_le_bytes());
            bytes.extend(next.to_le_bytes());
            self.write(layout.desc + u64::from(index) * 16, &bytes);
        }
        self.next_descriptor[queue] = (head + pieces.len() as u16) % SIZE;
        let slot = u64::from(self.avail[queue] % SIZE);
        self.write(layout.avail + 4 + slot * 2, &head.to_le_bytes());
        fence(Ordering::SeqCst);
        self.avail[queue] = self.avail[queue].wrapping_add(1);
        self.write(layout.avail + 2, &self.avail[queue].to_le_bytes());
        fence(Ordering::SeqCst);
        let chain = pieces.iter().map(|&(addr, len, _)| (addr, len)).collect();
        self.posted.insert((queue, head), chain);
    }

    pub(crate) fn kick(&self, queue: usize) {
        rustix::io::write(&self.kicks[queue], &1_u64.to_ne_bytes()).unwrap();
    }

    /// Posts one chain of receive buffers with these lengths to a pair, and kicks.
    pub(crate) fn post(&mut self, pair: usize, lens: &[u32]) {
        let pieces = lens.iter().map(|&len| (self.buffer(len), len, WRITE));
        let pieces: Vec<_> = pieces.collect();
        self.make_available(2 * pair, &pieces);
        self.kick(2 * pair);
    }

    /// Posts so many receive buffers of `len` bytes, and kicks once.
    pub(crate) fn post_many(&mut self, pair: usize, count: usize, len: u32) {
        for _ in 0..count {
            let piece = (self.buffer(len), len, WRITE);
            self.make_available(2 * pair, &[piece]);
        }
        self.kick(2 * pair);
    }

    /// The next used element of a queue: its chain and the bytes written.
    pub(crate) fn next_used(&mut self, queue: usize) -> Option<(Chain, u32)> {
        let layout = Driver::layout(queue);
        fence(Ordering::SeqCst);
        if self.read_u16(layout.used + 2) == self.used[queue] {
            return None;
        }
        fence(Ordering::SeqCst);
        let at = layout.used + 4 + u64::from(self.used[queue] % SIZE) * 8;
        self.used[queue] = self.used[queue].wrapping_add(1);
        let head = self.read_u32(at) as u16;
        let chain = self.posted.remove(&(queue, head)).expect("a posted chain");
        Some((chain, self.read_u32(at + 4)))
    }

    pub(crate) fn wait_used(&mut self, queue: usize, timeout: Duration) -> Option<(Chain, u32)> {
        let end = Instant::now() + timeout;
        loop {
            if let Some(used) = self.next_used(queue) {
                return Some(used);
            }
            if Instant::now() >= end {
                return None;
            }
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// The bytes that the device has written to a chain. Nothing behind them has changed.
    fn contents(&self, chain: &Chain, written: u32) -> Vec<u8> {
        let mut left = written as usize;
        let mut bytes = Vec::new();
        for &(addr, len) in chain {
            let all = self.read(addr, len as usize);
            let (used, unused) = all.split_at(left.min(all.len()));
            bytes.extend(used);
            left -= used.len();
            let clean = unused.iter().all(|byte| *byte == CANARY);
            assert!(clean || self.lax, "written behind the end of a frame");
        }
        assert_eq!(left, 0, "more bytes than the chain has");
        bytes
    }

    /// The next frame, with the number of its buffers in the header.
    pub(crate) fn try_receive(
        &mut self,
        pair: usize,
        timeout: Duration,
    ) -> Option<(Header, Vec<u8>)> {
        let (chain, written) = loop {
            match self.wait_used(2 * pair, timeout)? {
                (_, 0) if self.posts_too_little => (),
                used => break used,
            }
        };
        let mut bytes = self.contents(&chain, written);
        let frame = bytes.split_off(HEADER_LEN);
        let header = Header(bytes.try_into().unwrap());
        let mut frame = frame;
        assert!(header.num_buffers() >= 1);
        for _ in 1..header.num_buffers() {
            // All of them are published together.
            let (chain, written) = self.next_used(2 * pair).expect("the next buffer");
            frame.extend(self.contents(&chain, written));
        }
        Some((header, frame))
    }

    /// The next frame that is no probe.
    #[track_caller]
    pub(crate) fn receive(&mut self, pair: usize) -> (Header, Vec<u8>) {
        loop {
            let frame = self.try_receive(pair, DEADLINE).expect("a frame");
            if !super::frames::is_probe(&frame.1) {
                return frame;
            }
        }
    }

    /// Makes a frame available in buffers of these lengths, the last as long as necessary; the header
    /// is in front of the frame. Kicks.
    pub(crate) fn send(&mut self, pair: usize, header: &Header, frame: &[u8], lens: &[usize]) {
        self.send_bytes(2 * pair + 1, &[&header.0, frame].concat(), lens);
    }

    /// Makes a frame available in one buffer, without a kick.
    pub(crate) fn queue(&mut self, pair: usize, header: &Header, frame: &[u8]) {
        let bytes = [&header.0, frame].concat();
        let addr = self.buffer(bytes.len() as u32);
        self.write(addr, &bytes);
        self.make_available(2 * pair + 1, &[(addr, bytes.len() as u32, 0)]);
    }

    pub(crate) fn send_bytes(&mut self, queue: usize, mut bytes: &[u8], lens: &[usize]) {
        let mut pieces = Vec::new();
        let mut lens = lens.iter();
        while !bytes.is_empty() {
            let len = lens
                .next()
                .map_or(bytes.len(), |len| *len.min(&bytes.len()));
            let (now, later) = bytes.split_at(len);
            let addr = self.buffer(len as u32);
            self.write(addr, now);
            pieces.push((addr, len as u32, 0));
            bytes = later;
        }
        self.make_available(queue, &pieces);
        self.kick(queue);
    }

    /// Waits until the device has returned the last chain of a transmit queue.
    #[track_caller]
    pub(crate) fn wait_sent(&mut self, pair: usize) {
        let (_, written) = self.wait_used(2 * pair + 1, DEADLINE).expect("returned");
        assert_eq!(written, 0);
    }

    /// A command on a control queue; returns the answer.
    pub(crate) fn command(&mut self, queue: usize, bytes: &[u8]) -> u8 {
        let request = self.buffer(bytes.len() as u32);
        self.write(request, bytes);
        let answer = self.buffer(1);
        let len = bytes.len() as u32;
        self.make_available(queue, &[(request, len, 0), (answer, 1, WRITE)]);
        self.kick(queue);
        let (_, written) = self.wait_used(queue, DEADLINE).expect("an answer");
        assert_eq!(written, 1);
        self.read(answer, 1)[0]
    }

    /// The guards around all buffers are as they were.
    pub(crate) fn check_guards(&self) {
        for &(addr, len) in &self.buffers {
            let before = self.read(addr - GUARD, GUARD as usize);
            let after = self.read(addr + u64::from(len), GUARD as usize);
            let mut guards = before.iter().chain(&after);
            assert!(guards.all(|byte| *byte == CANARY), "written at {addr:#x}");
        }
    }

    /// Whether the device has notified a queue since the last call.
    pub(crate) fn was_called(&self, queue: usize) -> bool {
        rustix::io::read(&self.calls[queue], &mut [0; 8]).is_ok()
    }

    pub(crate) fn used_index(&self, queue: usize) -> u16 {
        self.read_u16(Driver::layout(queue).used + 2)
    }

    pub(crate) fn avail_index(&self, queue: usize) -> u16 {
        self.avail[queue]
    }

    /// Forgets everything that was posted, as a driver does that resets the device.
    pub(crate) fn forget(&mut self) {
        for queue in 0..self.kicks.len() {
            let layout = Driver::layout(queue);
            self.write(layout.avail + 2, &[0; 2]);
            self.write(layout.used + 2, &[0; 2]);
            (self.avail[queue], self.used[queue]) = (0, 0);
        }
        self.posted.clear();
    }
}
