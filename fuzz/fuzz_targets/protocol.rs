//! Two shards, a driver and a device, joined by delayed queues, under any commands of their callers.
//!
//! The oracle is that of `zerosock-proto/tests/two_shards.rs`: each byte arrives once and in order, no side
//! exceeds its credit, everything ends, and all counts return to zero.
#![no_main]

use arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use zerosock_fuzz::steps;
use zerosock_proto::vsock::Directions;

#[allow(
    dead_code,
    unused_imports,
    reason = "the tests of this file use the rest"
)]
#[path = "../../crates/zerosock-proto/tests/two_shards.rs"]
mod two_shards;

use two_shards::{Config, Step};

fn config(u: &mut Unstructured<'_>) -> Result<Config> {
    let mut buffer = || {
        Ok(match u.arbitrary::<u8>()? {
            0..=63 => u.int_in_range(1..=63)?,
            64..=159 => u.int_in_range(1..=5000)?,
            160..=207 => 65536,
            _ => 262_144,
        })
    };
    Ok(Config {
        buf_alloc: [buffer()?, buffer()?],
        first: match u.arbitrary()? {
            true => 0,
            false => u32::MAX - u.int_in_range(0..=3000)?,
        },
        graceful: u.arbitrary()?,
        caps: u.int_in_range(1..=9)?,
    })
}

fn len(u: &mut Unstructured<'_>) -> Result<u32> {
    match u.int_in_range(0..=2)? {
        0 => u.int_in_range(1..=19),
        1 => u.int_in_range(1..=3000),
        _ => u.int_in_range(60_000..=90_000),
    }
}

fn step(u: &mut Unstructured<'_>) -> Result<Step> {
    let kind = u.arbitrary::<u8>()?;
    let side = usize::from(kind & 1);
    let (end, count) = (usize::from(kind >> 4), usize::from(kind >> 5) + 1);
    Ok(match u.int_in_range(0..=15)? {
        0 => Step::Connect { side },
        1 | 2 => Step::Transmit {
            side,
            count,
            max_payload: match u.int_in_range(0..=2)? {
                0 => 0,
                1 => u.int_in_range(1..=2000)?,
                _ => 65536,
            },
        },
        3 | 4 => Step::Arrive { side, count },
        5 => Step::Events {
            side,
            accept: kind & 14 != 0,
        },
        6 => Step::Send { end, len: len(u)? },
        7 => Step::Reserve { end, max: len(u)? },
        8 => Step::Commit { end, len: len(u)? },
        9 => Step::SendNow { end, len: len(u)? },
        10 => Step::Consume {
            end,
            bytes: len(u)?,
        },
        11 => Step::Buffer {
            end,
            buf_alloc: u.int_in_range(0..=4000)?,
        },
        12 => Step::Shutdown {
            end,
            how: [Directions::RECEIVE, Directions::SEND, Directions::BOTH][usize::from(kind) % 3],
        },
        13 => Step::Wait {
            millis: u.int_in_range(0..=1000)?,
        },
        14 => Step::Cancel { end },
        _ if kind == 0 => Step::TransportReset,
        _ => Step::Reset { end },
    })
}

fuzz_target!(|bytes: &[u8]| {
    let mut u = Unstructured::new(bytes);
    let Ok(config) = config(&mut u) else { return };
    two_shards::run(&config, &steps(&mut u, step));
});
