//! Datagrams of a worker process to its supervisor.
//!
//! What is accepted has one encoding; a batch is applied as a whole or not at all, within the limits of the store, and
//! each descriptor is in the store or is returned to be closed.
#![no_main]

use arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use zerosock_fuzz::steps;
use zerosock_supervisor::fuzz::World;

const KEYS: [&[u8]; 6] = [b"a", b"a/b", b"a/b/c", b"ab", b"vm/3/front", b"vm/3"];

fn operation(u: &mut Unstructured<'_>, out: &mut Vec<u8>, fds: &mut usize) -> Result<()> {
    let kind = u.int_in_range(0..=9u8)?;
    let key = match u.arbitrary::<u8>()? {
        0 => u.arbitrary::<&[u8]>()?,
        at => KEYS[usize::from(at) % KEYS.len()],
    };
    let key = if (1..=4).contains(&kind) { key } else { &[] };
    let bytes = match kind {
        2 | 5 | 7 => &[],
        3 => KEYS[u.choose_index(KEYS.len())?],
        6 => [&b"READY=1"[..], b"STATUS=x\nRELOADING=1", b"MAINPID=1"][u.choose_index(3)?],
        _ => u.arbitrary::<&[u8]>()?,
    };
    let count = if kind == 1 {
        u.int_in_range(0..=3u8)?
    } else {
        0
    };
    *fds += usize::from(count);
    out.extend([kind, count]);
    out.extend((key.len() as u16).to_le_bytes());
    out.extend((bytes.len() as u32).to_le_bytes());
    out.extend(key);
    out.extend(bytes);
    Ok(())
}

fn datagram(u: &mut Unstructured<'_>) -> Result<(Vec<u8>, usize, bool)> {
    if u.ratio(1, 16)? {
        return u
            .arbitrary::<(Vec<u8>, u8, bool)>()
            .map(|(bytes, fds, commits)| (bytes, fds.into(), commits));
    }
    let count = u.int_in_range(0..=5u8)?;
    let mut bytes = vec![1, 0, count, 0];
    let mut fds = 0;
    for _ in 0..count {
        operation(u, &mut bytes, &mut fds)?;
    }
    if u.ratio(1, 32)? {
        let at = u.choose_index(bytes.len())?;
        bytes[at] = u.arbitrary()?;
    }
    let more = usize::from(u.ratio(1, 32)?);
    Ok((bytes, fds + more, !u.ratio(1, 8)?))
}

fuzz_target!(|bytes: &[u8]| {
    let mut world = World::default();
    for (bytes, fds, commits) in steps(&mut Unstructured::new(bytes), datagram) {
        world.datagram(&bytes, fds, commits);
    }
});
