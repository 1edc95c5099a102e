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
mod tests {
    use super::*;
    use crate::addr::{Cid, Port};
    use crate::wire::vsock::HEADER_LEN;

    const A: Address = Address::new(Cid::new(3), Port::new(0x400));
    const B: Address = Address::new(Cid::HOST, Port::new(9));

    fn bytes(header: Repr) -> [u8; HEADER_LEN] {
        let mut out = [0xaa; HEADER_LEN];
        header.emit(&mut out);
        out
    }

    /// The examples of docs/datagrams.md.
    #[test]
    fn headers_match_the_documented_bytes() {
        let mut want = [0; HEADER_LEN];
        want[0] = 3;
        want[8] = 2;
        want[17] = 4;
        want[20] = 9;
        want[24] = 5;
        want[28] = 3;
        want[30] = 5;
        want[32] = 1;
        assert_eq!(bytes(data(A, B, 5, true)), want);
        want[32] = 0;
        assert_eq!(bytes(data(A, B, 5, false)), want);
        want[24] = 0;
        want[30..32].copy_from_slice(&[0x20, 0x7a]);
        assert_eq!(bytes(Control::Stop(PauseSource::Receiver).emit(A, B)), want);
        want[32] = 1;
        assert_eq!(bytes(Control::Unsupported.emit(A, B)), want);
        want[32] = 2;
        assert_eq!(bytes(Control::Stop(PauseSource::Switch).emit(A, B)), want);
        want[30] = 0x21;
        assert_eq!(bytes(Control::Start(PauseSource::Switch).emit(A, B)), want);
        want[32] = 0;
        assert_eq!(
            bytes(Control::Start(PauseSource::Receiver).emit(A, B)),
            want
        );
    }

    #[test]
    fn control_packets_parse_with_unknown_flags_set() {
        for control in [
            Control::Stop(PauseSource::Receiver),
            Control::Stop(PauseSource::Switch),
            Control::Unsupported,
            Control::Start(PauseSource::Receiver),
            Control::Start(PauseSource::Switch),
        ] {
            let mut header = control.emit(A, B);
            header.flags |= 0xfffc;
            assert_eq!(Control::parse(&header), Some(control));
        }
        assert_eq!(Control::parse(&data(A, B, 0, true)), None);
    }
}
