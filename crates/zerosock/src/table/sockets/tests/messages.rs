//! The table's messages, compared with a plain queue of messages.

use std::collections::VecDeque;

use super::*;

/// Stores a part if the limits allow.
fn part(table: &mut Table, id: StreamId, bytes: &[u8], ends: MessageEnd) -> bool {
    let free = table.slots.out.iter().position(|out| !out);
    let Some(slot) = free.filter(|_| table.sockets.has_room(0)) else {
        return false;
    };
    table.slots.out[slot] = true;
    let piece = table.slots.pieces[slot];
    table.slots.memory.write(&[piece], 0, bytes);
    let held = HeldBuffer {
        token: slot as u32,
        offset: 0,
        len: bytes.len() as u32,
        since: Some(table.now),
        ends,
    };
    table.sockets.deliver_part(id, held, &mut table.slots);
    true
}

fn read(table: &mut Table, id: StreamId, peek: bool) -> Option<(Vec<u8>, bool)> {
    let mut out = [0; 1000];
    let got = table
        .sockets
        .read_message(id, &mut out, peek, &mut table.slots)?;
    assert_eq!(got.len, got.copied);
    Some((out[..got.len].to_vec(), got.end_of_record))
}

#[test]
fn an_incomplete_message_is_unreadable_and_returns_its_buffers() {
    let mut table = Table::new();
    let id = table.conn_of(SocketType::SeqPacket);
    let flow = table.sockets.get(id).unwrap().flow.unwrap();
    assert!(part(&mut table, id, b"whole", MessageEnd::Message));
    assert!(part(&mut table, id, b"ha", MessageEnd::Nothing));
    assert!(part(&mut table, id, b"lf", MessageEnd::Nothing));
    assert_eq!(table.sockets.unread(id), 5);
    assert_eq!(table.slots.out(), 3);
    table
        .sockets
        .discard_incomplete_message(id, &mut table.slots);
    assert_eq!(table.slots.out(), 1);
    assert_eq!(table.slots.consumed[&flow.index()], 4, "its credit as well");
    assert_eq!(read(&mut table, id, false).unwrap().0, b"whole");
    assert!(read(&mut table, id, false).is_none());
    assert!(matches!(
        table.sockets.lease_message(id, &mut table.slots),
        Err(NoLease::Empty)
    ));
    assert_eq!((table.slots.out(), table.sockets.held(0)), (0, 0));
}

/// An incomplete message holds at most an eighth of the pool; further parts are copied.
#[test]
fn an_incomplete_message_holds_an_eighth_of_the_pool() {
    let mut table = Table::new();
    let id = table.conn_of(SocketType::SeqPacket);
    for number in 0..20 {
        assert!(part(&mut table, id, &[number; 10], MessageEnd::Nothing));
    }
    assert!(part(&mut table, id, b"", MessageEnd::Record));
    assert_eq!(table.slots.out() as u32, SIZE / 8);
    let (leases, ends_record) = table
        .sockets
        .lease_message(id, &mut table.slots)
        .expect("a message");
    assert!(ends_record);
    assert_eq!(leases.iter().map(|lease| lease.len).sum::<usize>(), 200);
    assert_eq!(leases.len() as u32, SIZE / 8 + 1, "and one copy");
    for lease in leases {
        assert!(table.sockets.end_lease(lease.index, &mut table.slots));
    }
    assert_eq!((table.slots.out(), table.sockets.copies(0)), (0, 0));
}

#[test]
fn messages_match_a_plain_queue() {
    for seed in 0..200u64 {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut dice = |most: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % most
        };
        let mut table = Table::new();
        let id = table.conn_of(SocketType::SeqPacket);
        let mut model: VecDeque<(Vec<u8>, bool)> = VecDeque::new();
        let mut half = Vec::new();
        let mut out = Vec::new();
        for _ in 0..400 {
            match dice(12) {
                0..=5 => {
                    let ends = match dice(4) {
                        0 => MessageEnd::Message,
                        1 => MessageEnd::Record,
                        _ => MessageEnd::Nothing,
                    };
                    let len = if ends.any() { dice(20) } else { 1 + dice(20) };
                    let bytes: Vec<u8> = (0..len).map(|_| dice(256) as u8).collect();
                    if half.len() < 500 && part(&mut table, id, &bytes, ends) {
                        half.extend(bytes);
                        if ends.any() {
                            model
                                .push_back((std::mem::take(&mut half), ends == MessageEnd::Record));
                        }
                    }
                }
                6 | 7 => {
                    let peek = dice(2) == 0;
                    let expected = match peek {
                        true => model.front().cloned(),
                        false => model.pop_front(),
                    };
                    assert_eq!(read(&mut table, id, peek), expected);
                }
                8 => match table.sockets.lease_message(id, &mut table.slots) {
                    Ok((leases, ends_record)) => {
                        let (bytes, expected) = model.pop_front().expect("a message");
                        assert_eq!(ends_record, expected);
                        let len: usize = leases.iter().map(|lease| lease.len).sum();
                        assert_eq!(len, bytes.len());
                        out.extend(leases);
                    }
                    Err(NoLease::Empty) => assert!(model.is_empty()),
                    Err(NoLease::TooMany) => assert!(!out.is_empty()),
                },
                9 => {
                    if !out.is_empty() {
                        let lease = out.swap_remove(dice(out.len() as u64) as usize);
                        assert!(table.sockets.end_lease(lease.index, &mut table.slots));
                    }
                }
                10 => {
                    table.now += Duration::from_millis(dice(30));
                    table.sockets.handle_timeout(table.now, &mut table.slots);
                }
                _ => {
                    let unread: usize = model.iter().map(|(bytes, _)| bytes.len()).sum();
                    assert_eq!(table.sockets.unread(id), unread);
                    let whole = table.sockets.get(id).unwrap().messages();
                    assert_eq!(whole, Some(model.len() as u32));
                }
            }
        }
        for lease in out {
            assert!(table.sockets.end_lease(lease.index, &mut table.slots));
        }
        if seed % 2 == 0 {
            table
                .sockets
                .discard_incomplete_message(id, &mut table.slots);
            while let Some(message) = read(&mut table, id, false) {
                assert_eq!(Some(message), model.pop_front());
            }
            assert!(model.is_empty());
        }
        table.sockets.remove(id, &mut table.slots);
        assert_eq!((table.slots.out(), table.sockets.held(0)), (0, 0));
        assert_eq!(table.sockets.copies(0), 0, "no copied bytes remain counted");
        assert_eq!(table.sockets.lent_out(), 0);
    }
}
