//! Datagrams of the embedding program: received in place, and sent.

use crate::device::state::datagrams::Datagrams;
use zerosock_proto::vsock::datagram::{DGRAM_EOM, DatagramId};
use zerosock_proto::wire::vsock::{HEADER_LEN, SocketType};
use zerosock_proto::{Address, Cid};
use zerosock_ring::{Chain, SliceBuf};

use super::put::{DatagramPayload, NotPut};
use super::{COPY, wake_all};
use crate::device::{Context, Device};
use crate::header;
use crate::table::transfers::Payload;

/// Packets processed per received datagram.
const BUDGET: usize = 256;

/// Bytes of consumed datagrams after which their buffers are published: a part of the usual send
/// buffer, so that the sender writes while the receiver reads.
const RETURN: usize = 64 << 10;

impl Device {
    /// Passes the next datagram for a socket that holds none to `look` and completes its chain at
    /// once; earlier packets are processed as usual. Returns false if there was none.
    pub(crate) fn app_show_datagram(
        &mut self,
        id: DatagramId,
        look: &mut dyn FnMut(Address, Payload<'_>),
        cx: &mut Context<'_>,
    ) -> bool {
        let mut taken = 0;
        let mut shown = false;
        let mut others = false;
        let empty = |cx: &Context<'_>| {
            let app = cx.shared.app.as_deref();
            app.is_some_and(|app| app.inboxes.is_empty(id))
        };
        while !shown
            && taken < BUDGET
            && !self.receive_blocked()
            && !self.app_is_full(cx)
            // A datagram assembled from several packets may have arrived.
            && (!others || empty(cx))
        {
            let Some(chain) = self.queues.rings.tx.as_mut().and_then(|tx| tx.pop()) else {
                break;
            };
            taken += 1;
            if self.is_for(id, &chain, cx) {
                shown = self.show_chain(id, chain, look, cx);
            } else {
                others = true;
                let before = self.datagrams.charged;
                self.receive_packet(chain, cx);
                // The difference saturates: the packet may have ended the device, which clears
                // `charged`.
                taken += self.datagrams.charged.saturating_sub(before) / COPY * 16;
            }
        }
        cx.shared.counters.rx_packets.add(taken as u64);
        if let Some(app) = cx.shared.app.as_deref_mut() {
            app.tally.packets_received += taken as u64;
        }
        if others {
            cx.time();
            self.drain_events(cx);
            self.flush_dirty(cx);
        }
        shown
    }

    /// Whether a packet seems to be a whole datagram for this socket of the program.
    fn is_for(&mut self, id: DatagramId, chain: &Chain, cx: &mut Context<'_>) -> bool {
        let (Some(tx), Some(app)) = (&self.queues.rings.tx, cx.shared.app.as_deref_mut()) else {
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
        self.datagrams.negotiated
            && header.socket_type.get() == SocketType::Datagram as u16
            && !self.datagrams.assembler.is_open()
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
        cx: &mut Context<'_>,
    ) -> bool {
        let (Some(tx), Some(app)) = (self.queues.rings.tx.as_mut(), cx.shared.app.as_deref_mut())
        else {
            return false;
        };
        let memory = tx.queue.memory();
        let header = match header::read(memory, chain.readable()) {
            Ok(header)
                if Datagrams::is_data(&header)
                    && header.socket_type.get() == SocketType::Datagram as u16
                    && header.flags & DGRAM_EOM != 0
                    && header.src.cid == self.cid
                    && header.dst.cid == Cid::HOST
                    && cx.shared.routes.service(header.dst.port).is_none()
                    && app.inboxes.table.find(header.dst.port) == Some(id)
                    && cx.shared.routes.may_reach(self.cid, header.dst)
                    && header.len as usize <= chain.readable_len() as usize - HEADER_LEN =>
            {
                header
            }
            _ => {
                self.receive_packet(chain, cx);
                return false;
            }
        };
        let len = header.len as usize;
        let flow = self.datagrams.flow_control;
        let (now, clock) = (cx.now, cx.clock);
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
        self.datagrams.returned += len;
        if self.datagrams.returned >= RETURN {
            // The sender may have no more than this in flight, and datagrams have no credit by
            // which it could tell that it waits.
            self.datagrams.returned = 0;
            tx.publish(cx.notifier);
        }
        cx.shared.counters.rx_bytes.add(len as u64);
        true
    }

    /// Copies a datagram of the program into buffers of the guest.
    pub(crate) fn app_send_datagram(
        &mut self,
        from: Address,
        to: Address,
        bytes: &[u8],
        cx: &mut Context<'_>,
    ) -> Result<(), NotPut> {
        let put = self.put_datagram(from, to, DatagramPayload::Bytes(bytes), cx);
        match put {
            Ok(()) => {
                if let Some(app) = cx.shared.app.as_deref_mut() {
                    app.tally.sent += bytes.len() as u64;
                    app.tally.copied_in += bytes.len() as u64;
                    app.tally.packets_sent += 1;
                }
            }
            Err(NotPut::NoRoom) if self.datagrams.retry.is_none() => self.want_datagram_room(),
            Err(NotPut::NoRoom) => {}
            Err(NotPut::TooLong | NotPut::NotReceived(_)) => {}
        }
        put
    }

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

    /// Wakes the program's sockets if there are buffers again.
    pub(in crate::device) fn wake_datagram_waiters(&mut self, cx: &mut Context<'_>) {
        if !self.datagrams.room_wanted {
            return;
        }
        if !self.has_datagram_room() {
            self.request_buffers();
            return;
        }
        self.datagrams.room_wanted = false;
        wake_all(cx);
    }
}
