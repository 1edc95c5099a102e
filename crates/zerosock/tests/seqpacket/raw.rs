//! A guest that writes its rings by hand, with a connection for messages.

use std::path::Path;

use zerosock::vsock::SeqPacket;
use zerosock_proto::wire::vsock::{Op, Repr, SocketType};

use super::{PORT, with_time_outs};
use crate::common::PATIENCE;
use crate::common::raw::{RX, RawGuest, SIZE, connect};
use crate::hosting::Hosted;

/// VERSION_1, INDIRECT_DESC, SEQPACKET.
const FEATURES: u64 = 1 << 32 | 1 << 28 | 1 << 1;

/// The guest's port.
pub(crate) const OURS: u32 = 5001;

/// The guest, and what it has received.
pub(crate) struct Raw {
    pub(crate) guest: RawGuest,
    /// Received packets that were processed.
    seen: u16,
}

impl Raw {
    /// A guest at a VM's socket, without a connection.
    pub(crate) fn at(socket: &Path) -> Raw {
        Raw {
            guest: RawGuest::with_features(connect(socket), true, FEATURES),
            seen: 0,
        }
    }

    /// A guest, and the program's side of its connection.
    pub(crate) fn joined(hosted: &Hosted) -> (Raw, SeqPacket) {
        let mut raw = Raw::at(hosted.socket_path(0));
        let socket = raw.connect(hosted, OURS);
        (raw, socket)
    }

    /// One more connection, from `port`.
    pub(crate) fn connect(&mut self, hosted: &Hosted, port: u32) -> SeqPacket {
        let listener = hosted.listen_seqpacket(PORT, 4).unwrap();
        self.request(port);
        self.seen = self.guest.used_index(RX);
        let (socket, _) = listener.accept_timeout(PATIENCE).unwrap();
        with_time_outs(socket)
    }

    /// Connects from `port`, to a listener.
    #[track_caller]
    pub(crate) fn request(&mut self, port: u32) {
        let request = self.header(port, Op::Request);
        self.guest.send(request, &[]);
        self.guest.recv_op(port, Op::Response);
    }

    /// Checks that `port` has received only credit, and that the device has processed all sent
    /// packets.
    #[track_caller]
    pub(crate) fn is_quiet(&mut self, port: u32) {
        self.guest.wait_tx_done();
        while let Some((header, _)) = self.guest.try_recv() {
            let op = header.op.known();
            assert!(
                header.dst.port.get() != port || op == Some(Op::CreditUpdate),
                "{header:?}"
            );
        }
    }

    /// A header from the guest's `port` to the program's.
    pub(crate) fn header(&self, port: u32, op: Op) -> Repr {
        Repr {
            socket_type: SocketType::SeqPacket.into(),
            ..self.guest.header(port, PORT.get(), op)
        }
    }

    /// Sends a part of a message with these flags.
    pub(crate) fn part(&mut self, port: u32, flags: u32, payload: &[u8]) {
        let header = Repr {
            flags,
            ..self.header(port, Op::Rw)
        };
        self.guest.send(header, payload);
    }

    /// The buffers that returned since the previous call, with the bytes in each.
    pub(crate) fn came_back(&mut self) -> Vec<(u16, u32)> {
        let mut back = Vec::new();
        while self.seen != self.guest.used_index(RX) {
            let mut element = [0; 8];
            let slot = u64::from(self.seen % SIZE);
            self.guest
                .read(self.guest.rings[RX].used + 4 + slot * 8, &mut element);
            let word = |at: usize| u32::from_le_bytes(element[at..at + 4].try_into().unwrap());
            back.push((word(0) as u16, word(4)));
            self.seen = self.seen.wrapping_add(1);
        }
        back
    }
}
