//! The snapshot of a shard with connections in any state, which a successor restores as it is, or forged.
//!
//! A snapshot that was not changed is restored with the same connections. After a forged one
//! nothing panics, and no state is left when all connections are reset.
#![no_main]

use std::sync::Arc;

use arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use zerosock_proto::vsock::{Event, PortTable, Shard, ShardConfig};
use zerosock_proto::wire::vsock::{Repr, WireOp, WireType};
use zerosock_proto::{Address, Cid, Instant, Port};

const GUEST: Cid = Cid::new(3);
const CAP: usize = 6;

fn shard() -> Shard {
    let mut config = ShardConfig::device(GUEST);
    config.buf_alloc = 1000;
    config.max_connections = CAP;
    config.accept_all = true;
    let mut shard = Shard::new(config, Arc::new(PortTable::new()));
    shard.set_seqpacket(true);
    shard
}

/// A packet arrives, and the caller does something with one of its connections.
fn step(shard: &mut Shard, u: &mut Unstructured<'_>) -> Result<()> {
    let now = Instant::ZERO;
    let (port, op) = u.arbitrary::<(u8, u8)>()?;
    let header = Repr {
        src: Address::new(GUEST, Port::new((port & 7).into())),
        dst: Address::new(Cid::HOST, Port::new(1)),
        len: u.int_in_range(0..=300)?,
        socket_type: WireType::from(if port & 8 == 0 { 1 } else { 2 }),
        op: WireOp::from([1, 1, 3, 4, 5, 5, 6, 7][usize::from(op & 7)]),
        flags: u32::from(op >> 6),
        buf_alloc: if op & 8 == 0 { 4096 } else { 10 },
        fwd_cnt: 0,
    };
    if !shard.is_backlogged() {
        let _ = shard.handle_packet(now, &header);
    }
    match shard.poll_event() {
        Some(Event::Incoming { flow, .. }) if op & 16 == 0 => {
            let _ = shard.accept(now, flow);
            let _ = shard.send(flow, 1 + u32::from(port) * 8, 0);
        }
        Some(Event::Incoming { flow, .. }) => drop(shard.reject(flow)),
        _ => {}
    }
    if op & 32 != 0 {
        let _ = shard.poll_transmit(now, 100).and_then(|packet| packet.span);
    }
    Ok(())
}

fn run(u: &mut Unstructured<'_>) -> Result<()> {
    let mut old = shard();
    let forged: Vec<(u16, u8)> = u.arbitrary::<[(u16, u8); 3]>()?.into_iter().collect();
    let is_forged: bool = u.arbitrary()?;
    while !u.is_empty() {
        step(&mut old, u)?;
    }
    let mut bytes = old.save(Instant::ZERO);
    for (at, byte) in forged.into_iter().filter(|_| is_forged) {
        let at = usize::from(at) % bytes.len();
        bytes[at] = byte;
    }
    let mut new = shard();
    let restored = new.restore(Instant::ZERO, &bytes);
    assert!(is_forged || restored.is_ok(), "{restored:?}");
    let Ok(flows) = restored else {
        assert_eq!((new.connections(), new.occupied()), (0, 0));
        return Ok(());
    };
    if !is_forged {
        assert_eq!(new.connections(), old.connections());
    }
    new.finish_restore();
    let mut alive = flows;
    for _ in 0..1000 {
        while let Some(event) = new.poll_event() {
            if let Event::Incoming { flow, .. } = event {
                alive.push(flow);
            }
        }
        for flow in alive.drain(..) {
            let _ = new.reset(flow);
        }
        if new.poll_transmit(Instant::ZERO, 4096).is_none() && !new.has_events() {
            break;
        }
    }
    assert_eq!((new.connections(), new.occupied()), (0, 0), "state is left");
    Ok(())
}

fuzz_target!(|bytes: &[u8]| {
    // Too few bytes are no input.
    let _ = run(&mut Unstructured::new(bytes));
});
