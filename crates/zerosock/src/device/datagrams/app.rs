//! Datagrams of the program that embeds the device: shown as they are taken in, and sent.

use zerosock_proto::vsock::datagram::{DGRAM_EOM, DatagramId};
use zerosock_proto::wire::vsock::{HEADER_LEN, SocketType};
use zerosock_proto::{Address, Cid};
use zerosock_ring::{Chain, SliceBuf};

use super::put::{NotPut, Source};
use super::{COPY, Datagrams, wake_all};
use crate::device::{Context, Device};
use crate::header;
use crate::table::backend::Payload;

/// Packets taken in for one datagram of the program's.
const BUDGET: usize = 256;

/// Bytes of datagrams that were looked at, after which their sender gets its buffers back: a part of
/// the usual send buffer, so that one writes while the other reads.
const RETURN: usize = 64 << 10;

impl Device {
    /// Shows the next datagram for a socket of the program's, of which nothing is held, as it is
    /// taken in, and gives its chain back at once; packets before it go their way. False: there was
    /// none.
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
            let app = cx.app.as_deref();
            app.is_some_and(|app| app.inboxes.is_empty(id))
        };
        while !shown
            && taken < BUDGET
            && !self.receive_blocked()
            && !self.app_is_full(cx)
            // One of several packets may have come before.
            && (!others || empty(cx))
        {
            let Some(chain) = self.tx.as_mut().and_then(|tx| tx.pop()) else {
                break;
            };
            taken += 1;
            if self.is_for(id, &chain, cx) {
                shown = self.show_chain(id, chain, look, cx);
            } else {
                others = true;
                let before = self.datagrams.charged;
                self.packet(chain, cx);
                // None is left of them when the packet was the device's end.
                taken += self.datagrams.charged.saturating_sub(before) / COPY * 16;
            }
        }
        cx.counters.rx_packets.add(taken as u64);
        if let Some(app) = cx.app.as_deref_mut() {
            app.tally.packets_received += taken as u64;
        }
        if others {
            cx.time();
            self.drain_events(cx);
            self.flush_dirty(cx);
        }
        shown
    }

    /// Whether a packet of the guest's seems to be a whole datagram for a socket of the program's.
    fn is_for(&mut self, id: DatagramId, chain: &Chain, cx: &mut Context<'_>) -> bool {
        let (Some(tx), Some(app)) = (&self.tx, cx.app.as_deref_mut()) else {
            return false;
        };
        if let Some(payload) = tx
            .queue
            .memory()
            .contiguous(chain.readable(), HEADER_LEN, 1)
        {
            // The payload comes near while the header does.
            payload.prefetch();
        }
        let Ok(header) = header::read(tx.queue.memory(), chain.readable()) else {
            return false;
        };
        self.datagrams.agreed
            && header.socket_type.get() == SocketType::Datagram as u16
            && !self.datagrams.assembler.is_open()
            && header.dst.cid == Cid::HOST
            && cx.routes.service(header.dst.port).is_none()
            && app.inboxes.table.find(header.dst.port) == Some(id)
    }

    /// Shows a packet that seemed to be a datagram; what it is, its header decides that is read
    /// here.
    fn show_chain(
        &mut self,
        id: DatagramId,
        chain: Chain,
        look: &mut dyn FnMut(Address, Payload<'_>),
        cx: &mut Context<'_>,
    ) -> bool {
        let (Some(tx), Some(app)) = (self.tx.as_mut(), cx.app.as_deref_mut()) else {
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
                    && cx.routes.service(header.dst.port).is_none()
                    && app.inboxes.table.find(header.dst.port) == Some(id)
                    && cx.routes.may_reach(self.cid, header.dst)
                    && header.len as usize <= chain.readable_len() as usize - HEADER_LEN =>
            {
                header
            }
            _ => {
                self.packet(chain, cx);
                return false;
            }
        };
        let len = header.len as usize;
        let flow = self.datagrams.flow;
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
            // In more places than are worth naming.
            let mut bytes = vec![0; len];
            memory.read(chain.readable(), HEADER_LEN, &mut bytes);
            look(header.src, Payload::copied(&bytes));
        }
        tx.complete(chain, 0);
        self.datagrams.returned += len;
        if self.datagrams.returned >= RETURN {
            // Its sender may have no more under way than a few of these, and has no credit to tell
            // that it waits.
            self.datagrams.returned = 0;
            tx.publish(cx.notifier);
        }
        cx.counters.rx_bytes.add(len as u64);
        true
    }

    /// Copies a datagram of the program's into buffers of the guest.
    pub(crate) fn app_send_datagram(
        &mut self,
        from: Address,
        to: Address,
        bytes: &[u8],
        cx: &mut Context<'_>,
    ) -> Result<(), NotPut> {
        let put = self.put_datagram(from, to, Source::Bytes(bytes), cx);
        match put {
            Ok(()) => {
                if let Some(app) = cx.app.as_deref_mut() {
                    app.tally.sent += bytes.len() as u64;
                    app.tally.copied_in += bytes.len() as u64;
                    app.tally.packets_sent += 1;
                }
            }
            Err(NotPut::NoRoom) if self.datagrams.retry.is_none() => self.want_datagram_room(),
            Err(NotPut::NoRoom) => {}
            Err(NotPut::TooLong) => {}
        }
        put
    }

    /// A send found too few buffers: all sockets are told when there are some.
    pub(crate) fn want_datagram_room(&mut self) {
        self.starve();
        self.datagrams.wanted = true;
    }

    /// Whether a datagram that needs one buffer would find it.
    pub(crate) fn has_datagram_room(&mut self) -> bool {
        let waits = self.waiting.is_some();
        let rx = self.rx.as_mut().filter(|rx| !waits && rx.live());
        rx.is_some_and(|rx| rx.queue.available() > 0)
    }

    /// Tells the program's sockets that there are buffers again.
    pub(in crate::device) fn tell_of_datagram_room(&mut self, cx: &mut Context<'_>) {
        if !self.datagrams.wanted {
            return;
        }
        if !self.has_datagram_room() {
            self.starve();
            return;
        }
        self.datagrams.wanted = false;
        wake_all(cx);
    }
}
