//! A front-end that sends any messages with any descriptors, whole or in parts, and successors that get its journal.
//!
//! The VM waits for its front-end after a bounded number of calls; its replies are whole. A successor accepts all
//! requests of the journal and comes to the same features, configuration, memory and queues; with a forged one nothing
//! panics. When all have ended, the process has the descriptors that it had before.
#![no_main]

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::LazyLock;
use std::time::Duration;

use arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use rustix::event::{EventfdFlags, epoll, eventfd};
use zerosock_fuzz::{memory_file, number, open_descriptors};
use zerosock_sys::reaper;
use zerosock_vhost_user::fuzz::World;
use zerosock_vhost_user::session::{F_EVENT_IDX, F_LOG_ALL, F_VERSION_1};

const MIB: u64 = 1 << 20;
/// Guest addresses are user addresses minus this.
const USER: u64 = 0x7000_0000_0000;
/// F_PROTOCOL_FEATURES, and whether a message of a queue comes without a descriptor.
const PROTOCOL: u64 = 1 << 30;
const NO_FD: u64 = 1 << 8;
/// MQ, LOG_SHMFD, REPLY_ACK, BACKEND_REQ, CONFIG, RESET_DEVICE and CONFIGURE_MEM_SLOTS.
const FEATURES: u64 = 0xa22b;

/// Eventfds, memory, and what no request takes.
static FDS: LazyLock<Vec<OwnedFd>> = LazyLock::new(|| {
    let event = || eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let (first, second) = UnixStream::pair().unwrap();
    let (reader, writer) = std::io::pipe().unwrap();
    vec![
        event(),
        event(),
        memory_file(4 * MIB),
        memory_file(2 * MIB),
        writer.into(),
        reader.into(),
        first.into(),
        second.into(),
        File::open("/dev/null").unwrap().into(),
        epoll::create(epoll::CreateFlags::CLOEXEC).unwrap(),
    ]
});

fn words<const N: usize>(words: [u32; N]) -> Vec<u8> {
    words.map(u32::to_ne_bytes).concat()
}

fn quads<const N: usize>(words: [u64; N]) -> Vec<u8> {
    words.map(u64::to_ne_bytes).concat()
}

fn region(u: &mut Unstructured<'_>) -> Result<[u64; 4]> {
    let at = u.int_in_range(0..=3u64)? * MIB;
    let len = if u.ratio(1, 16)? {
        number(u)?.into()
    } else {
        MIB
    };
    Ok([
        at,
        len,
        USER + at,
        if u.ratio(1, 16)? {
            u.arbitrary()?
        } else {
            at % (2 * MIB)
        },
    ])
}

/// A request: its number, payload, and descriptors.
fn request(u: &mut Unstructured<'_>) -> Result<(u32, Vec<u8>, Vec<usize>)> {
    let queue = if u.ratio(1, 32)? {
        u.arbitrary()?
    } else {
        u.int_in_range(0..=3u32)?
    };
    let kind = u.int_in_range(0..=21u8)?;
    let mut fds = Vec::new();
    let (request, payload) = match kind {
        0 => (u.int_in_range(0..=45)?, u.arbitrary::<Vec<u8>>()?),
        // Requests without a payload: GET_FEATURES, SET_OWNER, GET_PROTOCOL_FEATURES, GET_QUEUE_NUM,
        // GET_MAX_MEM_SLOTS, RESET_DEVICE, GET_STATUS.
        1 => ([1, 3, 15, 17, 36, 34, 40][u.choose_index(7)?], vec![]),
        2 => {
            let bits = [0, F_VERSION_1, F_EVENT_IDX, F_LOG_ALL];
            let all = bits.iter().try_fold(PROTOCOL, |all, bit| {
                Ok(all | bit * u64::from(u.arbitrary::<bool>()?))
            });
            (2, quads([all?]))
        }
        3 => (
            16,
            quads([if u.ratio(1, 4)? {
                u.arbitrary()?
            } else {
                FEATURES
            }]),
        ),
        4 | 5 => {
            let count = u.int_in_range(1..=3u8)?;
            let mut payload = words([count.into(), 0]);
            for _ in 0..count {
                payload.extend(quads(region(u)?));
                fds.push(2 + usize::from(u.ratio(1, 4)?));
            }
            (5, payload)
        }
        // ADD_MEM_REG, REM_MEM_REG.
        6 | 7 => {
            fds.extend((kind == 6).then_some(2));
            let payload = [quads([0]), quads(region(u)?)].concat();
            (31 + u32::from(kind), payload)
        }
        8 => {
            fds.push(2);
            (6, quads([if u.arbitrary()? { 4096 } else { MIB }, 0]))
        }
        // NUM, BASE, ENABLE, GET_VRING_BASE.
        9 => (8, words([queue, 1 << u.int_in_range(0..=8u32)?])),
        10 => (10, words([queue, u.arbitrary::<u16>()?.into()])),
        11 | 12 => (18, words([queue, u.arbitrary::<bool>()?.into()])),
        13 => (11, words([queue, 0])),
        14 | 15 => {
            let at = USER
                + u64::from(queue) * 0x10000
                + u64::from(u.ratio(1, 8)?) * u64::from(number(u)?);
            let log = u.ratio(1, 4)?;
            let rest = quads([
                at,
                at + 0x8000,
                at + 0x4000,
                if log { at - USER + 0x8000 } else { 0 },
            ]);
            (9, [words([queue, log.into()]), rest].concat())
        }
        // KICK, CALL, ERR.
        16..=18 => {
            let is_polled = u.ratio(1, 4)?;
            fds.extend((!is_polled).then_some(usize::from(u.ratio(1, 2)?)));
            (
                12 + u32::from(kind) - 16,
                quads([u64::from(queue) | if is_polled { NO_FD } else { 0 }]),
            )
        }
        19 => {
            let (offset, size) = (u.int_in_range(0..=9u32)?, u.int_in_range(0..=9u32)?);
            let payload = [words([offset, size, 0]), u.bytes(size as usize)?.to_vec()].concat();
            (24 + u.int_in_range(0..=1)?, payload)
        }
        20 => {
            fds.push(4 + usize::from(u.ratio(1, 2)?) * 2);
            (21, vec![])
        }
        _ => (39, quads([u.arbitrary::<u8>()?.into()])),
    };
    if u.ratio(1, 12)? {
        for _ in 0..u.int_in_range(0..=3u8)? {
            fds.push(u.choose_index(FDS.len())?);
        }
    }
    Ok((request, payload, fds))
}

/// What starts a queue.
fn bring_up(queue: u32, base: u16) -> [(u32, Vec<u8>, Vec<usize>); 9] {
    let at = USER + u64::from(queue) * 0x10000;
    let table = [words([1, 0]), quads([0, 4 * MIB, USER, 0])].concat();
    let rings = quads([at, at + 0x8000, at + 0x4000, 0]);
    let index = quads([queue.into()]);
    [
        (16, quads([FEATURES]), vec![]),
        (2, quads([F_VERSION_1 | PROTOCOL]), vec![]),
        (5, table, vec![2]),
        (8, words([queue, 64]), vec![]),
        (10, words([queue, base.into()]), vec![]),
        (9, [words([queue, 0]), rings].concat(), vec![]),
        (13, index.clone(), vec![1]),
        (12, index, vec![0]),
        (18, words([queue, 1]), vec![]),
    ]
}

fn send(
    world: &mut World,
    request: (u32, Vec<u8>, Vec<usize>),
    u: &mut Unstructured<'_>,
) -> Result<()> {
    let (request, payload, fds) = request;
    let need_reply = u32::from(u.arbitrary::<bool>()?) << 3;
    let mut bytes = words([request, 1 | need_reply, payload.len() as u32]);
    bytes.extend(payload);
    if u.ratio(1, 64)? {
        let at = u.choose_index(bytes.len())?;
        bytes[at] = u.arbitrary()?;
    }
    let fds: Vec<BorrowedFd<'_>> = fds.iter().map(|at| FDS[*at].as_fd()).collect();
    let part = if u.ratio(1, 32)? {
        u.choose_index(bytes.len())?
    } else {
        0
    };
    world.send(&bytes[..part], &[]);
    world.send(&bytes[part..], &fds);
    Ok(())
}

fn step(world: &mut World, u: &mut Unstructured<'_>, has_journal: bool) -> Result<()> {
    match u.int_in_range(0..=15u8)? {
        0 if has_journal => world.succeed(),
        1 if has_journal && u.ratio(1, 4)? => {
            let (record, at, byte) = u.arbitrary::<(u8, u8, u8)>()?;
            world.succeed_forged(record.into(), at.into(), byte);
        }
        2 => {
            for request in bring_up(u.int_in_range(0..=1)?, u.arbitrary()?) {
                send(world, request, u)?;
            }
        }
        _ => {
            let request = request(u)?;
            send(world, request, u)?;
        }
    }
    Ok(())
}

fuzz_target!(|bytes: &[u8]| {
    LazyLock::force(&FDS);
    let mut u = Unstructured::new(bytes);
    let Ok(has_journal) = u.arbitrary() else {
        return;
    };
    // The first input starts threads, which have descriptors.
    static WARM: std::sync::Once = std::sync::Once::new();
    WARM.call_once(|| {
        World::new(true).end();
        assert!(reaper::drain(Duration::from_secs(10)));
    });
    let before = open_descriptors();
    let mut world = World::new(has_journal);
    while !u.is_empty() && world.is_connected() {
        if step(&mut world, &mut u, has_journal).is_err() {
            break;
        }
    }
    world.end();
    assert!(
        reaper::drain(Duration::from_secs(9)),
        "a descriptor is never closed"
    );
    assert_eq!(open_descriptors(), before, "descriptors are lost");
});
