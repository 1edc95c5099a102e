//! Buffer sizes and the credit that they give.

use std::time::Instant;

use zerosock_cli::vm::pattern::Pattern;
use zerosock_testkit::calls::{Number, Setting};
use zerosock_testkit::protocol::{Command, Source};

use super::side::{End, Expect, Pair, STEP, Skip, Verdict, port};

pub(crate) fn a_buffer_is_set_before_and_after_connecting(pair: &Pair) -> Verdict {
    let port = port();
    let listener = pair.listener(port, 1);
    let client = pair.client_socket();
    client.set(Setting::BufferSize(100_000)).ok();
    assert_eq!(client.get(Number::BufferSize).bytes, 100_000);
    let served = pair.join(&client, &listener, port);
    assert_eq!(client.get(Number::BufferSize).bytes, 100_000);
    client.set(Setting::BufferSize(1)).ok();
    assert_eq!(client.get(Number::BufferSize).bytes, 128);
    for (asked, got) in [(4096, 4096), (50_000, 50_000), (u32::MAX, 262_144)] {
        client.set(Setting::BufferSize(asked)).ok();
        assert_eq!(client.get(Number::BufferSize).bytes, got, "{asked}");
        // Bytes still arrive with any size. (Not with Linux's smallest: from 6.12.92 on a packet
        // counts for more than 128 bytes.)
        served.send(1, 100).ok();
        client.receive_all(100).is_pattern(1, 100);
    }
    // The bounds also apply to the current size.
    client.set(Setting::BufferBounds(4096, 65_536)).ok();
    assert_eq!(client.get(Number::BufferSize).bytes, 65_536);
    Ok(())
}

pub(crate) fn accepted_sockets_inherit(pair: &Pair) -> Verdict {
    let port = port();
    let listener = pair.server_socket();
    listener.bind(Some(port)).ok();
    listener.set(Setting::BufferBounds(1000, 500_000)).ok();
    listener.set(Setting::BufferSize(300_000)).ok();
    listener.listen(1).ok();
    let client = pair.client_socket();
    let served = pair.join(&client, &listener, port);
    assert_eq!(served.get(Number::BufferSize).bytes, 300_000);
    served.set(Setting::BufferSize(u32::MAX)).ok();
    assert_eq!(served.get(Number::BufferSize).bytes, 500_000);
    Ok(())
}

const BUFFER: usize = 128 << 10;

/// 128 KiB and one byte are sent: the last byte needs a credit update. With a `mark` the reader has
/// read less than half and now waits for all the rest at once; without, it reads what arrives.
fn credit_update(pair: &Pair, mark: bool) -> Verdict {
    /// Whole packets of any receiver: Linux sends credit updates for no others.
    const FIRST: usize = 60 << 10;
    let port = port();
    let listener = pair.server_socket();
    listener.bind(Some(port)).ok();
    listener.set(Setting::BufferSize(BUFFER as u32)).ok();
    listener.listen(1).ok();
    let client = pair.client_socket();
    let served = pair.join(&client, &listener, port);
    let all = Pattern::bytes(10, BUFFER + 1);
    let sending = client.side.start(Command::Send {
        socket: client.id(),
        source: Source::Pattern {
            seed: 10,
            len: BUFFER as u64 + 1,
        },
        chunks: vec![FIRST, 4096],
    });
    if mark {
        served.set(Setting::LowWater(BUFFER as u32)).ok();
        assert!(served.poll(STEP), "the buffer never filled");
        served.set(Setting::LowWater(1)).ok();
        served.receive_all(FIRST as u64).is(&all[..FIRST]);
        let rest = all.len() - FIRST;
        served.set(Setting::LowWater(rest as u32)).ok();
        assert!(served.poll(STEP), "no credit update when the mark was set");
        served.set(Setting::LowWater(1)).ok();
        served.receive_all(rest as u64).is(&all[FIRST..]);
    } else {
        served.receive_all(BUFFER as u64).is(&all[..BUFFER]);
        served.receive_all(1).is(&all[BUFFER..]);
    }
    let sent = sending.wait();
    sent.ok();
    assert_eq!(sent.bytes, BUFFER as u64 + 1);
    Ok(())
}

pub(crate) fn credit_update_at_the_low_water_mark(pair: &Pair) -> Verdict {
    credit_update(pair, true)
}

pub(crate) fn credit_update_without_a_low_water_mark(pair: &Pair) -> Verdict {
    credit_update(pair, false)
}

/// Sends without blocking until there is no more room; returns the number of bytes.
fn fill(end: &End, seed: u64) -> u64 {
    let mut sent = 0;
    loop {
        let outcome = end.send_now(seed, 4096);
        sent += outcome.bytes;
        match outcome.errno.as_deref() {
            None => {}
            Some("EAGAIN") => return sent,
            other => panic!("{other:?}"),
        }
    }
}

pub(crate) fn a_small_buffer_of_the_sender_bounds_what_is_queued(pair: &Pair) -> Verdict {
    if pair.client.kernel().is_some() {
        // Present in kernels of 2026, absent from those tested here.
        return Err(Skip(
            "these kernels go by the receiver's buffer alone".into(),
        ));
    }
    const SMALL: u32 = 32 << 10;
    let (client, served) = pair.connected();
    client.set(Setting::BufferSize(SMALL)).ok();
    let sent = fill(&client, 11);
    // Between two guests of a device, each has credit with the device: forwarded bytes are in the
    // receiver's buffer.
    let passed_on = if pair.has_host() { 0 } else { 256 << 10 };
    let most = u64::from(SMALL) + passed_on;
    assert!(sent <= most, "{sent} bytes are queued");
    assert!(sent > 0);
    served.receive_all(sent).ok();
    Ok(())
}

/// Fills the receiver's default buffer and waits until all bytes have arrived.
fn until_full(end: &End) {
    const ROOM: usize = 256 << 10;
    let give_up = Instant::now() + STEP;
    loop {
        let there = end.peek(ROOM);
        there.ok();
        if there.bytes == ROOM as u64 {
            return;
        }
        assert!(Instant::now() < give_up, "only {} bytes", there.bytes);
    }
}

/// Bytes in flight when a buffer shrinks still arrive, and the smaller buffer suffices to continue.
pub(crate) fn a_buffer_shrinks_under_way(pair: &Pair) -> Verdict {
    const LEN: u64 = 1 << 20;
    let (client, served) = pair.connected();
    let sending = client.side.start(Command::Send {
        socket: client.id(),
        source: Source::Pattern { seed: 12, len: LEN },
        chunks: vec![65_536],
    });
    if served.side.kernel().is_some() {
        // A kernel has no room then for the bytes in flight: wait until there are none.
        until_full(&served);
    } else {
        assert!(served.poll(STEP), "nothing came");
    }
    served.set(Setting::BufferSize(8192)).ok();
    let receiving = served.start_receive_all(Some(LEN));
    let sent = sending.wait();
    sent.ok();
    assert_eq!(sent.bytes, LEN);
    receiving.wait().is_pattern(12, LEN as usize);
    Ok(())
}

/// Sizes of small writes, as the public test suite of vsock draws them.
pub(super) const SMALL: &[usize] = &[129, 512, 200, 333, 130, 480, 257];

/// Lets packets in flight arrive: waits until something is readable, and for the given number of
/// round trips to the side of this end.
pub(super) fn lag(end: &End, times: u32) {
    assert!(end.poll(STEP), "nothing came");
    for _ in 0..times {
        end.get(Number::BufferSize).ok();
    }
}

/// Many small packets to a reader that starts late: no reset, no loss.
pub(crate) fn small_packets_under_back_pressure(pair: &Pair) -> Verdict {
    const LEN: u64 = 1_000_000;
    for both in [false, true] {
        let (client, served) = pair.connected();
        let (from, to) = if both {
            (&served, &client)
        } else {
            (&client, &served)
        };
        let sending = from.side.start(Command::Send {
            socket: from.id(),
            source: Source::Pattern { seed: 13, len: LEN },
            chunks: SMALL.to_vec(),
        });
        // As many as possible are in flight when the reader starts.
        lag(to, 200);
        to.receive_all(LEN).is_pattern(13, LEN as usize);
        let sent = sending.wait();
        sent.ok();
        assert_eq!(sent.bytes, LEN);
    }
    Ok(())
}

/// A request answered with more small packets than Linux keeps unread for one socket: from 6.12.92
/// on it resets a connection with about 455 of them in its buffer of 256 KiB.
pub(crate) fn a_request_answered_in_tiny_packets(pair: &Pair) -> Verdict {
    const ANSWER: u64 = 6000;
    let (client, served) = pair.connected();
    client.send(14, 10).ok();
    served.receive_all(10).is_pattern(14, 10);
    let answering = served.side.start(Command::Send {
        socket: served.id(),
        source: Source::Pattern {
            seed: 15,
            len: ANSWER,
        },
        chunks: vec![1, 2, 3, 7],
    });
    // No reader for a while: as much as possible is in flight.
    lag(&client, 200);
    client.receive_all(ANSWER).is_pattern(15, ANSWER as usize);
    let sent = answering.wait();
    sent.ok();
    assert_eq!(sent.bytes, ANSWER);
    Ok(())
}
