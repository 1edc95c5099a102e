//! Wire format of datagrams: the headers, and the two operations of the flow control.

use super::DGRAM_EOM;
use crate::addr::Address;
use crate::wire::vsock::{Op, Repr, SocketType, WireOp};

/// VIRTIO_VSOCK_F_DGRAM: device and driver accept datagrams. A proposal, not in the specification.
pub const F_DGRAM: u64 = 1 << 3;
/// Feature of this project: both sides understand [`Control`]. Valid only with [`F_DGRAM`].
pub const F_DGRAM_FLOW: u64 = 1 << 22;

const STOP: u16 = 0x7a20;
const START: u16 = 0x7a21;
/// STOP, bit 0: the endpoint does not support datagrams.
const STOP_UNSUPPORTED: u32 = 1 << 0;
/// STOP and START, bit 1: the queue of a switch is full or free, not the receiver.
const AT_SWITCH: u32 = 1 << 1;

/// Which queue is full, or has space again.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Debug)]
pub enum PauseSource {
    /// The receiver's.
    Receiver,
    /// The queue of a switch in front of the receiver.
    Switch,
}

/// A flow control packet from a receiver to one of the sources that send to it. A switch sends it
/// on behalf of the receiver.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Debug)]
pub enum Control {
    /// Do not send to this receiver until START with the same [`PauseSource`], or for
    /// [`STOP_DURATION`](super::STOP_DURATION).
    Stop(PauseSource),
    /// The endpoint has not negotiated datagrams: no datagram will arrive.
    Unsupported,
    /// Send again.
    Start(PauseSource),
}

impl Control {
    /// Parses a packet of type DGRAM; `None`: it is not a flow control packet.
    #[inline]
    pub fn parse(header: &Repr) -> Option<Control> {
        let place = match header.flags & AT_SWITCH {
            0 => PauseSource::Receiver,
            _ => PauseSource::Switch,
        };
        match header.op.get() {
            STOP if header.flags & STOP_UNSUPPORTED != 0 => Some(Control::Unsupported),
            STOP => Some(Control::Stop(place)),
            START => Some(Control::Start(place)),
            _ => None,
        }
    }

    /// The header of the packet that the receiver `about` sends to the source `to`.
    pub fn emit(self, receiver: Address, source: Address) -> Repr {
        let (op, flags) = match self {
            Control::Stop(PauseSource::Receiver) => (STOP, 0),
            Control::Stop(PauseSource::Switch) => (STOP, AT_SWITCH),
            Control::Unsupported => (STOP, STOP_UNSUPPORTED),
            Control::Start(PauseSource::Receiver) => (START, 0),
            Control::Start(PauseSource::Switch) => (START, AT_SWITCH),
        };
        header(receiver, source, 0, WireOp::from(op), flags)
    }
}

/// The header of a packet with `len` bytes of a datagram; `last`: it is the last fragment.
#[inline]
pub fn data(from: Address, source: Address, len: u32, last: bool) -> Repr {
    let flags = if last { DGRAM_EOM } else { 0 };
    header(from, source, len, Op::Rw.into(), flags)
}

#[inline]
fn header(src: Address, dst: Address, len: u32, op: WireOp, flags: u32) -> Repr {
    Repr {
        src,
        dst,
        len,
        socket_type: SocketType::Datagram.into(),
        op,
        flags,
        buf_alloc: 0,
        fwd_cnt: 0,
    }
}

#[cfg(test)]
#[path = "wire_tests.rs"]
mod tests;
