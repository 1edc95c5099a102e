//! Writes datagrams and flow-control packets into the guest's posted buffers.
//!
//! # Invariants
//! - A datagram is written completely or not at all.
//! - Its fragments are contiguous in the queue.

use std::time::Duration;

use rustix::io::Errno;
use zerosock_proto::Address;
use zerosock_proto::vsock::datagram::data;
use zerosock_proto::wire::vsock::{HEADER_LEN, Repr};
use zerosock_ring::{Chain, Memory, SliceBuf};

use crate::device::datagrams::GuestDatagrams;
use crate::device::events::emit;
use crate::device::host_sockets::HostSocket;
use crate::device::state::program::App;
use crate::fallible;
use crate::stats::Counters;

/// Interval of retries for a datagram that needs several buffers.
const RETRY: Duration = Duration::from_millis(1);

/// Most pieces of memory in one receive.
const PIECES: usize = 128;

/// The payload of a datagram.
#[derive(Copy, Clone)]
pub(super) enum DatagramPayload<'a> {
    Bytes(&'a [u8]),
    /// The given number of bytes of a chain, behind the header.
    Chain(&'a Memory, &'a Chain, usize),
    /// The next datagram of a socket, which has this length.
    Socket(&'a HostSocket, usize),
}

/// Why a datagram was not sent to the guest.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) enum NotPut {
    /// Too few buffers are posted.
    NoRoom,
    /// It does not fit into a full queue of such buffers.
    TooLong,
    /// The socket has no such datagram any more; or, if true, the guest's memory has vanished.
    NotReceived(bool),
}

impl DatagramPayload<'_> {
    pub(super) fn len(self) -> usize {
        match self {
            DatagramPayload::Bytes(bytes) => bytes.len(),
            DatagramPayload::Chain(_, _, len) | DatagramPayload::Socket(_, len) => len,
        }
    }

    /// Fills the payload parts of `chains`, which have room for it, in their order.
    #[inline]
    fn fill(self, memory: &Memory, chains: &[Chain], counters: &Counters) -> Result<(), NotPut> {
        if let DatagramPayload::Socket(socket, len) = self {
            return receive(socket, len, memory, chains, counters);
        }
        let mut at = 0;
        for chain in chains {
            let part = room(chain).min(self.len() - at);
            self.copy(at, part, memory, chain);
            at += part;
        }
        Ok(())
    }

    /// Copies `len` bytes from offset `at` into the payload part of `chain`.
    fn copy(self, at: usize, len: usize, memory: &Memory, chain: &Chain) {
        match self {
            // Received by `fill`.
            DatagramPayload::Socket(..) => {}
            DatagramPayload::Bytes(bytes) => {
                let bytes = bytes.get(at..at + len).unwrap_or(&[]);
                memory.write(chain.writable(), HEADER_LEN, bytes);
            }
            DatagramPayload::Chain(from, source, _) => {
                let source = (from, source.readable(), HEADER_LEN + at);
                Memory::copy(source, (memory, chain.writable(), HEADER_LEN), len);
            }
        }
    }
}

/// Bytes of payload that fit into a buffer.
fn room(chain: &Chain) -> usize {
    (chain.writable_len() as usize).saturating_sub(HEADER_LEN)
}

/// Receives a datagram of `len` bytes into the payload parts of `chains`; by a copy if they have too
/// many pieces.
fn receive(
    socket: &HostSocket,
    len: usize,
    memory: &Memory,
    chains: &[Chain],
    counters: &Counters,
) -> Result<(), NotPut> {
    let mut slices = SliceBuf::<PIECES>::new();
    let mut reached = 0;
    for chain in chains {
        let want = room(chain).min(len - reached);
        reached += memory.slices(chain.writable(), HEADER_LEN, want, &mut slices);
    }
    if reached < len {
        let mut bytes = fallible::zeroed(len).map_err(|_| NotPut::NotReceived(false))?;
        if socket.recv(&mut bytes) != Ok(len) {
            return Err(NotPut::NotReceived(false));
        }
        counters.copied_bytes.add(len as u64);
        return DatagramPayload::Bytes(&bytes).fill(memory, chains, counters);
    }
    match socket.recv_packet(&slices) {
        Ok(got) if got.bytes == len => {
            counters.in_place_bytes.add(len as u64);
            Ok(())
        }
        Ok(_) => Err(NotPut::NotReceived(false)),
        Err(error) => {
            let vanished = Errno::from_io_error(&error) == Some(Errno::FAULT);
            Err(NotPut::NotReceived(vanished))
        }
    }
}

impl GuestDatagrams<'_, '_> {
    /// Sends the guest a flow-control packet. Returns false if there is no buffer.
    pub(crate) fn put_control(&mut self, control: &Repr) -> bool {
        if !self.device.datagrams.flow_control {
            // The driver has not negotiated flow control.
            return true;
        }
        let pending = self.device.queues.is_command_pending();
        let rx = self.device.queues.rings.rx.as_mut().filter(|_| !pending);
        let popped = rx.and_then(|rx| Some((rx.pop_if(HEADER_LEN, true)?, rx)));
        let Some((chain, rx)) = popped else {
            self.device.request_buffers();
            return false;
        };
        emit(rx, chain, control, 0);
        self.cx.shared.counters.tx_packets.add(1);
        true
    }

    /// Sends the guest the flow-control packets of the program's sockets.
    pub(in crate::device) fn put_app_controls(&mut self) {
        let cid = self.device.cid;
        let has = |app: &mut App| app.inboxes.table.has_control();
        if !self.cx.shared.app.as_deref_mut().is_some_and(has) {
            return;
        }
        let now = self.cx.time();
        loop {
            let app = self.cx.shared.app.as_deref_mut();
            let poll = |app: &mut App| app.inboxes.table.poll_control(now, |to| to.cid == cid);
            let Some(control) = app.and_then(poll) else {
                break;
            };
            if !self.put_control(&control)
                && let Some(app) = self.cx.shared.app.as_deref_mut()
            {
                app.inboxes.table.retry_control(now, |to| to.cid == cid);
                break;
            }
        }
    }

    /// Sends a datagram in as many of the guest's buffers as it needs.
    pub(super) fn put_datagram(
        &mut self,
        from: Address,
        to: Address,
        source: DatagramPayload<'_>,
    ) -> Result<(), NotPut> {
        let len = source.len();
        let least = HEADER_LEN + usize::from(len > 0);
        let pending = self.device.queues.is_command_pending();
        let rx = self.device.queues.rings.rx.as_mut().filter(|_| !pending);
        let Some(rx) = rx else {
            return Err(NotPut::NoRoom);
        };
        let Some(first) = rx.pop_if(least, true) else {
            self.device.starved = true;
            return Err(NotPut::NoRoom);
        };
        if first.writable_len() as usize >= HEADER_LEN + len {
            let (memory, chains) = (rx.queue.memory(), std::slice::from_ref(&first));
            if let Err(error) = source.fill(memory, chains, &self.cx.shared.counters) {
                rx.queue.unpop(first);
                return Err(error);
            }
            emit(rx, first, &data(from, to, len as u32, true), len);
            self.cx.shared.counters.tx_packets.add(1);
            self.cx.shared.counters.tx_bytes.add(len as u64);
            return Ok(());
        }
        self.put_fragments(first, from, to, source)
    }

    #[cold]
    fn put_fragments(
        &mut self,
        first: Chain,
        from: Address,
        to: Address,
        source: DatagramPayload<'_>,
    ) -> Result<(), NotPut> {
        let Some(rx) = self.device.queues.rings.rx.as_mut() else {
            return Err(NotPut::NoRoom);
        };
        let len = source.len();
        let mut chains = std::mem::take(&mut self.device.datagrams.spare_chains);
        let mut room = first.writable_len() as usize - HEADER_LEN;
        if chains.try_reserve(1).is_err() {
            rx.queue.unpop(first);
            self.device.datagrams.spare_chains = chains;
            self.device.datagrams.retry = Some(self.cx.time() + RETRY);
            return Err(NotPut::NoRoom);
        }
        chains.push(first);
        // Without memory for the list: as without buffers.
        while room < len && chains.try_reserve(1).is_ok() {
            let Some(chain) = rx.pop_if(HEADER_LEN + 1, false) else {
                break;
            };
            room += chain.writable_len() as usize - HEADER_LEN;
            chains.push(chain);
        }
        if room < len {
            // The room of a queue full of such buffers.
            let descriptors: usize = chains.iter().map(|c| usize::from(c.descriptors())).sum();
            let most = room * usize::from(rx.queue.size()) / descriptors.max(1);
            while let Some(chain) = chains.pop() {
                rx.queue.unpop(chain);
            }
            self.device.datagrams.spare_chains = chains;
            if most < len {
                return Err(NotPut::TooLong);
            }
            self.device.datagrams.retry = Some(self.cx.time() + RETRY);
            return Err(NotPut::NoRoom);
        }
        if let Err(error) = source.fill(rx.queue.memory(), &chains, &self.cx.shared.counters) {
            while let Some(chain) = chains.pop() {
                rx.queue.unpop(chain);
            }
            self.device.datagrams.spare_chains = chains;
            return Err(error);
        }
        let mut at = 0;
        for chain in chains.drain(..) {
            let part = self::room(&chain).min(len - at);
            at += part;
            emit(rx, chain, &data(from, to, part as u32, at == len), part);
            self.cx.shared.counters.tx_packets.add(1);
        }
        self.device.datagrams.spare_chains = chains;
        self.cx.shared.counters.tx_bytes.add(len as u64);
        Ok(())
    }
}
