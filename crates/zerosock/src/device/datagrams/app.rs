//! Datagrams of the embedding program: received in place, and sent.

use crate::device::half::DeviceHalf;
use crate::device::state::datagrams::Datagrams;
use zerosock_proto::vsock::datagram::{DGRAM_EOM, DatagramId};
use zerosock_proto::wire::vsock::{HEADER_LEN, SocketType};
use zerosock_proto::{Address, Cid};
use zerosock_ring::{Chain, SliceBuf};

use super::put::{DatagramPayload, NotPut};
use super::{COPY, wake_all};
use crate::device::Device;
use crate::header;
use crate::table::transfers::Payload;

/// Packets processed per received datagram.
const BUDGET: usize = 256;

/// Bytes of consumed datagrams after which their buffers are published: a part of the usual send
/// buffer, so that the sender writes while the receiver reads.
const RETURN: usize = 64 << 10;

impl DeviceHalf<'_, '_> {
    /// Passes the next datagram for a socket that holds none to `look` and completes its chain at
    /// once; earlier packets are processed as usual. Returns false if there was none.
    pub(crate) fn show_datagram(
        &mut self,
        id: DatagramId,
        look: &mut dyn FnMut(Address, Payload<'_>),
    ) -> bool {
        let mut taken = 0;
        let mut shown = false;
        let mut others = false;
        while !shown
            && taken < BUDGET
            && !self.device.receive_blocked()
            && !self.device.app_is_full(self.cx)
            // A datagram assembled from several packets may have arrived.
            && (!others || self.is_inbox_empty(id))
        {
            let Some(chain) = self.device.queues.rings.tx.as_mut().and_then(|tx| tx.pop()) else {
                break;
            };
            taken += 1;
            if self.is_for(id, &chain) {
                shown = self.show_chain(id, chain, look);
            } else {
                others = true;
                let before = self.device.datagrams.charged;
                self.device.receive_packet(chain, self.cx);
                // The difference saturates: the packet may have ended the device, which clears
                // `charged`.
                taken += self.device.datagrams.charged.saturating_sub(before) / COPY * 16;
            }
        }
        self.cx.shared.counters.rx_packets.add(taken as u64);
        if let Some(app) = self.cx.shared.app.as_deref_mut() {
            app.tally.packets_received += taken as u64;
        }
        if others {
            self.cx.time();
            self.device.drain_events(self.cx);
            self.device.bridges_with(self.cx).flush_dirty();
        }
        shown
    }

    fn is_inbox_empty(&self, id: DatagramId) -> bool {
        let app = self.cx.shared.app.as_deref();
        app.is_some_and(|app| app.inboxes.is_empty(id))
    }

    /// Whether a packet seems to be a whole datagram for this socket of the program.
    fn is_for(&mut self, id: DatagramId, chain: &Chain) -> bool {
        let Self { device, cx } = self;
        let (Some(tx), Some(app)) = (&device.queues.rings.tx, cx.shared.app.as_deref_mut()) else {
            return false;
        };
        if let Some(payload) = tx
            .queue
            .memory()
            .contiguous(chain.readable(), HEADER_LEN, 1)
        {
            // Overlap the cache miss of the payload with that of the header.
            payload.prefetch();
        }
        let Ok(header) = header::read(tx.queue.memory(), chain.readable()) else {
            return false;
        };
        device.datagrams.negotiated
            && header.socket_type.get() == SocketType::Datagram as u16
            && !device.datagrams.assembler.is_open()
            && header.dst.cid == Cid::HOST
            && cx.shared.routes.service(header.dst.port).is_none()
            && app.inboxes.table.find(header.dst.port) == Some(id)
    }

    /// Shows a packet that seems to be a datagram. The guest may have changed the header since:
    /// only the copy read here decides.
    fn show_chain(
        &mut self,
        id: DatagramId,
        chain: Chain,
        look: &mut dyn FnMut(Address, Payload<'_>),
    ) -> bool {
        let (Some(tx), Some(app)) = (
            self.device.queues.rings.tx.as_mut(),
            self.cx.shared.app.as_deref_mut(),
        ) else {
            return false;
        };
        let memory = tx.queue.memory();
        let header = match header::read(memory, chain.readable()) {
            Ok(header)
                if Datagrams::is_data(&header)
                    && header.socket_type.get() == SocketType::Datagram as u16
                    && header.flags & DGRAM_EOM != 0
                    && header.src.cid == self.device.cid
                    && header.dst.cid == Cid::HOST
                    && self.cx.shared.routes.service(header.dst.port).is_none()
                    && app.inboxes.table.find(header.dst.port) == Some(id)
                    && self.cx.shared.routes.may_reach(self.device.cid, header.dst)
                    && header.len as usize <= chain.readable_len() as usize - HEADER_LEN =>
            {
                header
            }
            _ => {
                self.device.receive_packet(chain, self.cx);
                return false;
            }
        };
        let len = header.len as usize;
        let flow = self.device.datagrams.flow_control;
        let (now, clock) = (self.cx.now, self.cx.clock);
        let now = || clock.map_or(now, |clock| clock.now());
        let table = &mut app.inboxes.table;
        if table
            .receive(header.src, header.dst, header.len, flow, now)
            .is_err()
        {
            tx.complete(chain, 0);
            return false;
        }
        table.consume(id, header.len);
        let mut slices = SliceBuf::<4>::new();
        if memory.slices(chain.readable(), HEADER_LEN, len, &mut slices) == len {
            look(header.src, Payload::in_place(&slices));
        } else {
            // Too many pieces: copy.
            let mut bytes = vec![0; len];
            memory.read(chain.readable(), HEADER_LEN, &mut bytes);
            look(header.src, Payload::copied(&bytes));
        }
        tx.complete(chain, 0);
        self.device.datagrams.returned += len;
        if self.device.datagrams.returned >= RETURN {
            // The sender may have no more than this in flight, and datagrams have no credit by
            // which it could tell that it waits.
            self.device.datagrams.returned = 0;
            tx.publish(self.cx.notifier);
        }
        self.cx.shared.counters.rx_bytes.add(len as u64);
        true
    }

    /// Copies a datagram of the program into buffers of the guest.
    pub(crate) fn send_datagram(
        &mut self,
        from: Address,
        to: Address,
        bytes: &[u8],
    ) -> Result<(), NotPut> {
        let Self { device, cx } = self;
        let put = device
            .datagrams_with(cx)
            .put_datagram(from, to, DatagramPayload::Bytes(bytes));
        match put {
            Ok(()) => {
                if let Some(app) = cx.shared.app.as_deref_mut() {
                    app.tally.sent += bytes.len() as u64;
                    app.tally.copied_in += bytes.len() as u64;
                    app.tally.packets_sent += 1;
                }
            }
            Err(NotPut::NoRoom) if device.datagrams.retry.is_none() => device.want_datagram_room(),
            Err(NotPut::NoRoom) => {}
            Err(NotPut::TooLong | NotPut::NotReceived(_)) => {}
        }
        put
    }

    /// Wakes the program's sockets if there are buffers again.
    pub(in crate::device) fn wake_datagram_waiters(&mut self) {
        if !self.device.datagrams.room_wanted {
            return;
        }
        if !self.device.has_datagram_room() {
            self.device.request_buffers();
            return;
        }
        self.device.datagrams.room_wanted = false;
        wake_all(self.cx);
    }
}

impl Device {
    /// Registers that a send found too few buffers: all sockets are woken when there are some.
    pub(crate) fn want_datagram_room(&mut self) {
        self.request_buffers();
        self.datagrams.room_wanted = true;
    }

    /// Whether a datagram that needs one buffer would find it.
    pub(crate) fn has_datagram_room(&mut self) -> bool {
        let waits = self.queues.is_command_pending();
        let rx = self
            .queues
            .rings
            .rx
            .as_mut()
            .filter(|rx| !waits && rx.live());
        rx.is_some_and(|rx| rx.queue.available() > 0)
    }
}
