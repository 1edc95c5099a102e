//! Unit tests of `wire`.

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
