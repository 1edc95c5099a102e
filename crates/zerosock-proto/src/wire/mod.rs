//! Wire formats, each in one fixed form: field offsets, a raw `Packet` over
//! bytes, and a valid `Repr` with `parse` and `emit`.

pub mod net;
pub mod vsock;
