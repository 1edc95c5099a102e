//! Test support: an interface and, as its device, the test, which uses the device half of the rings
//! directly. Nothing is negotiated and no notification is sent.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use zerosock_proto::wire::net::{HEADER_LEN, Header, Mac, Offloads};
use zerosock_ring::{Chain, DeviceQueue, DriverLayout, Memory, QueueConfig};
use zerosock_vhost_user::frontend::Frontend;

use super::link::{InterfaceTerms, Link};
use super::{Interface, InterfaceConfig};

/// The device's side.
pub(super) struct TestDevice {
    pub(super) rx: DeviceQueue,
    pub(super) tx: DeviceQueue,
    /// The rings in this mapping, for a device that lies.
    pub(super) rings: [DriverLayout; 2],
    pub(super) memory: Arc<Memory>,
    /// Dropping it hangs up.
    pub(super) socket: Option<UnixStream>,
}

/// An interface with all offloads, the configuration changed by `tune`, and its device.
pub(super) fn pair(
    tune: impl FnOnce(&mut InterfaceConfig, &mut InterfaceTerms),
) -> (Interface, TestDevice) {
    let mut config = InterfaceConfig {
        control_timeout: Duration::from_millis(10),
        ..InterfaceConfig::default()
    };
    let mut terms = InterfaceTerms {
        event_idx: true,
        mergeable: true,
        to_device: Offloads::ALL,
        from_device: Offloads::ALL,
        mac: Mac([2, 0, 0, 0, 0, 1]),
        mtu: None,
        has_status: false,
    };
    tune(&mut config, &mut terms);
    config.check().unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let frontend = Frontend::from_stream(ours, config.control_timeout).unwrap();
    let mut device = None;
    let start = |_: &mut Frontend,
                 shared: &zerosock_vhost_user::frontend::SharedMemory,
                 rings: &[DriverLayout],
                 _: &zerosock_vhost_user::frontend::QueueEventFds,
                 _: &[u16]| {
        // A separate mapping, as another process has it.
        let fd = shared.fd.try_clone().unwrap();
        let memory = Arc::new(Memory::map(vec![(fd, shared.region)]).unwrap());
        let queue = |ring: &DriverLayout| {
            let addr = shared.vring_addr(ring);
            let config = QueueConfig {
                size: ring.size,
                desc: addr.desc,
                avail: addr.avail,
                used: addr.used,
                base: 0,
                event_idx: terms.event_idx,
                indirect: false,
            };
            DeviceQueue::new(memory.clone(), &config).unwrap()
        };
        device = Some((
            queue(&rings[0]),
            queue(&rings[1]),
            [rings[0], rings[1]],
            memory.clone(),
        ));
        Ok(())
    };
    let interface = Interface::start(Link { frontend, terms }, &config, start).unwrap();
    let (rx, tx, rings, memory) = device.unwrap();
    let device = TestDevice {
        rx,
        tx,
        rings,
        memory,
        socket: Some(theirs),
    };
    (interface, device)
}

/// A frame of `len` bytes that can be told from others.
pub(super) fn frame(len: usize, seed: u8) -> Vec<u8> {
    (0..len)
        .map(|index| (index as u32).wrapping_mul(0x9e37_79b1).to_be_bytes()[0] ^ seed)
        .collect()
}

impl TestDevice {
    /// Writes a frame to as many buffers as it takes. Returns their chains and the bytes in each; the
    /// number of buffers is in the header.
    pub(super) fn write(&mut self, mut header: Header, frame: &[u8]) -> Vec<(Chain, u32)> {
        let all = [&header.0, frame].concat();
        let mut bytes = &all[..];
        let mut chains = Vec::new();
        while !bytes.is_empty() {
            let chain = self.rx.pop().unwrap().expect("a posted buffer");
            let (now, later) = bytes.split_at(bytes.len().min(chain.writable_len() as usize));
            self.memory.write(chain.writable(), 0, now);
            chains.push((chain, now.len() as u32));
            bytes = later;
        }
        header.set_num_buffers(chains.len() as u16);
        let (first, _) = &chains[0];
        self.memory.write(first.writable(), 0, &header.0);
        chains
    }

    pub(super) fn complete(&mut self, chains: Vec<(Chain, u32)>) {
        for (chain, written) in chains {
            self.rx.complete(chain, written);
        }
        self.rx.publish_without_notify();
    }

    /// Sends a frame.
    pub(super) fn send(&mut self, header: Header, frame: &[u8]) {
        let chains = self.write(header, frame);
        self.complete(chains);
    }

    /// The next frame of the interface.
    pub(super) fn take(&mut self) -> Option<(Header, Vec<u8>)> {
        let chain = self.tx.pop().unwrap()?;
        let header = self.memory.read_array::<HEADER_LEN>(chain.readable(), 0);
        let mut bytes = vec![0; chain.readable_len() as usize - HEADER_LEN];
        self.memory.read(chain.readable(), HEADER_LEN, &mut bytes);
        self.tx.complete(chain, 0);
        self.tx.publish_without_notify();
        Some((Header(header.unwrap()), bytes))
    }

    /// Writes to the shared memory at a guest address.
    pub(super) fn poke(&self, addr: u64, bytes: &[u8]) {
        let mut pieces = Vec::new();
        let len = bytes.len() as u32;
        self.memory.translate(addr, len, &mut pieces).unwrap();
        assert_eq!(self.memory.write(&pieces, 0, bytes), bytes.len());
    }

    /// Puts an element into the used ring of a queue, at position `index`, and publishes it.
    pub(super) fn forge(&self, queue: usize, index: u16, id: u32, len: u32) {
        let ring = self.rings[queue];
        let at = ring.used + 4 + 8 * u64::from(index % ring.size);
        self.poke(at, &id.to_le_bytes());
        self.poke(at + 4, &len.to_le_bytes());
        self.poke(ring.used + 2, &index.wrapping_add(1).to_le_bytes());
    }
}
