//! One shard, with packets and calls of any kind.
//!
//! The oracle is that of `zerosock-proto/tests/hostile.rs`: no limit is exceeded, no answer is lost while the
//! caller obeys `is_backlogged`, bytes that are delivered are counted as unread, and no state is left at the end.
#![no_main]

use arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use zerosock_fuzz::{number, steps};
use zerosock_proto::wire::vsock::{Repr, WireOp, WireType};
use zerosock_proto::{Address, Cid, Port};

#[allow(
    dead_code,
    unused_imports,
    reason = "the tests of this file use the rest"
)]
#[path = "../../crates/zerosock-proto/tests/hostile.rs"]
mod hostile;

use hostile::Step;

fn packet(u: &mut Unstructured<'_>) -> Result<Repr> {
    let kind = u.arbitrary::<u16>()?;
    let flag = |bit: u32| kind >> bit & 7 == 7;
    let cid = if flag(0) { number(u)? } else { 3 };
    let host = if flag(1) { number(u)? } else { 2 };
    let port = u32::from(kind >> 6);
    Ok(Repr {
        src: Address::new(Cid::new(cid), Port::new(port & 3)),
        dst: Address::new(Cid::new(host), Port::new(port >> 2 & 3)),
        len: match u.arbitrary()? {
            true => u.int_in_range(0..=3)?,
            false => u.int_in_range(0..=65537)?,
        },
        socket_type: WireType::from(match kind >> 10 & 15 {
            0 => u.arbitrary()?,
            1..=3 => 2,
            _ => 1u16,
        }),
        op: WireOp::from(match u.arbitrary::<u8>()? {
            255 => u.arbitrary()?,
            254 => 0x7a10,
            253 => 0x7a11,
            op => u16::from(op % 8),
        }),
        flags: number(u)?,
        buf_alloc: number(u)?,
        fwd_cnt: number(u)?,
    })
}

fn step(u: &mut Unstructured<'_>) -> Result<Step> {
    let kind = u.arbitrary::<u8>()?;
    let (flow, port) = (usize::from(kind >> 5), u32::from(kind >> 6));
    Ok(match kind & 31 {
        0..=11 => Step::Packet(packet(u)?),
        12 => Step::Rude(packet(u)?),
        13..=15 => Step::Event,
        16 | 17 => Step::Transmit(number(u)?),
        18 => Step::Connect(u.int_in_range(0..=4)?, u.int_in_range(0..=4)?),
        19 | 20 => Step::Accept(flow),
        21 => Step::Reject(flow),
        22 => Step::Consume(flow, number(u)?),
        23 => Step::Reserve(flow, number(u)?),
        24 => Step::Commit(number(u)?),
        25 => Step::Cancel,
        26 => Step::Send(flow, number(u)?),
        27 => Step::Shutdown(flow, u.arbitrary()?, u.arbitrary()?),
        28 => Step::Buffer(flow, number(u)?),
        29 => Step::Reset(flow),
        30 => Step::Wait(u.int_in_range(0..=10_000)?),
        _ => match kind >> 5 {
            0 => Step::TransportReset,
            1..=4 => Step::Listen(port),
            _ => Step::Unlisten(port),
        },
    })
}

fuzz_target!(|bytes: &[u8]| {
    let mut u = Unstructured::new(bytes);
    let Ok((first, accept_all, seqpacket)) = u.arbitrary::<(bool, bool, bool)>() else {
        return;
    };
    let first = if first { 0 } else { u32::MAX - 2000 };
    hostile::run(first, accept_all, seqpacket, steps(&mut u, step));
});
