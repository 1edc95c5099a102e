//! Property test of the table against plain queues of bytes: after any steps each byte arrives once
//! and in order, each buffer returns once, and the limits hold at every step.

use std::collections::VecDeque;
use std::time::Duration;

use proptest::prelude::*;

use super::*;

#[derive(Clone, Debug)]
enum Step {
    Deliver { conn: usize, offset: u32, len: u32 },
    Read { conn: usize, len: usize },
    Peek { conn: usize, len: usize },
    Skip { conn: usize, len: usize },
    Each { conn: usize, most: usize },
    Lease { conn: usize },
    Enter { lease: usize },
    Leave { lease: usize },
    GiveBack { lease: usize },
    Pass { millis: u64 },
    Recall,
}

fn step() -> impl Strategy<Value = Step> {
    let conn = 0..3usize;
    prop_oneof![
        8 => (conn.clone(), 0..8u32, 1..56u32)
            .prop_map(|(conn, offset, len)| Step::Deliver { conn, offset, len }),
        3 => (conn.clone(), 0..200usize).prop_map(|(conn, len)| Step::Read { conn, len }),
        1 => (conn.clone(), 0..200usize).prop_map(|(conn, len)| Step::Peek { conn, len }),
        2 => (conn.clone(), 0..100usize).prop_map(|(conn, len)| Step::Skip { conn, len }),
        1 => (conn.clone(), 0..4usize).prop_map(|(conn, most)| Step::Each { conn, most }),
        4 => conn.prop_map(|conn| Step::Lease { conn }),
        1 => (0..64usize).prop_map(|lease| Step::Enter { lease }),
        1 => (0..64usize).prop_map(|lease| Step::Leave { lease }),
        3 => (0..64usize).prop_map(|lease| Step::GiveBack { lease }),
        2 => (0..25u64).prop_map(|millis| Step::Pass { millis }),
        1 => Just(Step::Recall),
    ]
}

/// A lease that is out: its connection, its expected bytes, the number of its readers.
struct Out {
    parts: LeaseParts,
    conn: usize,
    want: Vec<u8>,
    entered: u32,
    revoked: bool,
}

proptest! {
    /// Three connections against three queues of bytes: order, tokens released once, bytes consumed
    /// once, limits at every step.
    #[test]
    fn the_table_matches_plain_queues(steps in prop::collection::vec(step(), 1..200)) {
        let mut table = Table::new();
        let ids: Vec<_> = (0..3).map(|_| table.conn()).collect();
        let flows: Vec<_> = ids
            .iter()
            .map(|id| table.sockets.get(*id).unwrap().flow.unwrap().index())
            .collect();
        let mut queues: Vec<VecDeque<u8>> = vec![VecDeque::new(); 3];
        let mut done = [0u64; 3];
        let mut out: Vec<Out> = Vec::new();
        let mut byte = 0u8;
        for step in steps {
            match step {
                Step::Deliver { conn, offset, len } => {
                    let bytes: Vec<u8> = (0..len).map(|n| byte.wrapping_add(n as u8)).collect();
                    if table.deliver(ids[conn], offset, &bytes) {
                        byte = byte.wrapping_add(len as u8);
                        queues[conn].extend(&bytes);
                    }
                }
                Step::Read { conn, len } => {
                    let got = table.read(ids[conn], len, false);
                    let len = len.min(queues[conn].len());
                    let want: Vec<u8> = queues[conn].drain(..len).collect();
                    prop_assert_eq!(&got, &want);
                    done[conn] += got.len() as u64;
                }
                Step::Peek { conn, len } => {
                    let got = table.read(ids[conn], len, true);
                    let want: Vec<u8> = queues[conn].iter().copied().take(len).collect();
                    prop_assert_eq!(got, want);
                }
                Step::Skip { conn, len } => {
                    let Table { sockets, slots, .. } = &mut table;
                    let want = len.min(queues[conn].len());
                    prop_assert_eq!(sockets.skip(ids[conn], len, slots), want);
                    queues[conn].drain(..want);
                    done[conn] += want as u64;
                }
                Step::Each { conn, most } => {
                    let mut got = Vec::new();
                    let look = &mut |payload: Payload<'_>| {
                        match payload {
                            Payload::Copied(bytes) => got.extend_from_slice(bytes),
                            Payload::InPlace(slices) => for slice in slices {
                                let mut part = vec![0; slice.len()];
                                slice.read(0, &mut part);
                                got.extend_from_slice(&part);
                            },
                        }
                        true
                    };
                    let Table { sockets, slots, .. } = &mut table;
                    prop_assert!(sockets.consume_in_place(ids[conn], most, look, slots) <= most);
                    let want: Vec<u8> = queues[conn].drain(..got.len()).collect();
                    prop_assert_eq!(&got, &want);
                    done[conn] += got.len() as u64;
                }
                Step::Lease { conn } => {
                    let Table { sockets, slots, .. } = &mut table;
                    match sockets.lease(ids[conn], slots) {
                        Ok(parts) => {
                            let want = queues[conn].drain(..parts.len).collect();
                            out.push(Out { parts, conn, want, entered: 0, revoked: false });
                        }
                        Err(NoLease::Empty) => prop_assert!(queues[conn].is_empty()),
                        Err(NoLease::TooMany) => {
                            let its = out.iter().filter(|out| out.conn == conn).count();
                            prop_assert!(its >= 64 - out.len(), "{its} of {}", out.len());
                        }
                    }
                }
                Step::Enter { lease } => {
                    if let Some(lease) = out.get_mut(lease)
                        && table.is_in_place(&lease.parts)
                        && table.sockets.lease_table().enter(lease.parts.index) == Entered::InPlace
                    {
                        lease.entered += 1;
                    }
                }
                Step::Leave { lease } => {
                    if let Some(lease) = out.get_mut(lease).filter(|lease| lease.entered > 0) {
                        lease.entered -= 1;
                        let revoked = table.sockets.lease_table().is_revoked(lease.parts.index);
                        prop_assert_eq!(revoked, lease.revoked);
                        table.leave(lease.parts.index);
                    }
                }
                Step::GiveBack { lease } => {
                    if lease < out.len() {
                        let lease = out.swap_remove(lease);
                        for _ in 0..lease.entered {
                            table.leave(lease.parts.index);
                        }
                        let Table { sockets, slots, .. } = &mut table;
                        prop_assert!(sockets.end_lease(lease.parts.index, slots));
                        prop_assert!(!sockets.end_lease(lease.parts.index, slots));
                        done[lease.conn] += lease.want.len() as u64;
                    }
                }
                Step::Pass { millis } => table.pass(Duration::from_millis(millis)),
                Step::Recall => {
                    for lease in &mut out {
                        lease.revoked |= lease.entered > 0;
                    }
                    let Table { sockets, slots, .. } = &mut table;
                    prop_assert!(sockets.recall(0, false, slots));
                    prop_assert_eq!(slots.out(), 0, "all buffers are returned");
                }
            }
            for (conn, queue) in queues.iter().enumerate() {
                prop_assert_eq!(table.sockets.unread(ids[conn]), queue.len());
                let consumed = table.slots.consumed.get(&flows[conn]).copied();
                prop_assert_eq!(consumed.unwrap_or(0), done[conn]);
            }
            for lease in out.iter().filter(|lease| !lease.revoked) {
                let parts = &lease.parts;
                let got = table.look(parts.index, parts.len, &parts.place);
                prop_assert_eq!(&got, &lease.want);
            }
            prop_assert_eq!(table.slots.out(), table.sockets.held(0) as usize);
            prop_assert!(table.sockets.held(0) <= SIZE / 4 * 3);
            // No timer runs if everything held has readers.
            let timer = table.sockets.next_timeout().is_some();
            let read = out.iter().any(|lease| lease.entered > 0);
            prop_assert!(timer == (table.sockets.held(0) > 0) || (read && !timer));
            let in_copies: usize = table.sockets.copies(0);
            prop_assert!(in_copies <= queues.iter().map(VecDeque::len).sum());
        }
        for lease in out {
            for _ in 0..lease.entered {
                table.leave(lease.parts.index);
            }
            let Table { sockets, slots, .. } = &mut table;
            prop_assert!(sockets.end_lease(lease.parts.index, slots));
            done[lease.conn] += lease.want.len() as u64;
        }
        for (conn, id) in ids.into_iter().enumerate() {
            let Table { sockets, slots, .. } = &mut table;
            sockets.remove(id, slots);
            done[conn] += queues[conn].len() as u64;
            prop_assert_eq!(slots.consumed.get(&flows[conn]).copied().unwrap_or(0), done[conn]);
        }
        prop_assert_eq!((table.slots.out(), table.sockets.held(0)), (0, 0));
        prop_assert_eq!(table.sockets.copies(0), 0);
        prop_assert_eq!((table.sockets.lent_out(), table.sockets.len()), (0, 0));
    }
}
