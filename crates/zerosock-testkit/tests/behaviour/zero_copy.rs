//! MSG_ZEROCOPY sends, of which the kernel reads the bytes in place, and their completions.

use std::time::{Duration, Instant};

use zerosock_testkit::calls::{Call, Kind, Part, Setting};
use zerosock_testkit::protocol::Outcome;

use super::side::{End, Expect, Pair, STEP, Skip, Verdict};

const PAGE: usize = 4096;

fn needs(pair: &Pair) -> Verdict {
    pair.client.needs((6, 7), "sends without a copy")
}

fn bytes(len: usize, offset: usize) -> Part {
    Part::Bytes { len, offset }
}

fn send_parts(end: &End, seed: u64, parts: &[Part]) -> Outcome {
    let (socket, parts) = (end.id(), parts.to_vec());
    end.side.call(Call::SendParts {
        socket,
        seed,
        parts,
    })
}

fn completions(end: &End, time: Duration) -> Outcome {
    let timeout_ms = u32::try_from(time.as_millis()).unwrap_or(u32::MAX);
    let socket = end.id();
    end.side.call(Call::Completions { socket, timeout_ms })
}

fn len(parts: &[Part]) -> usize {
    let len = |part: &Part| match part {
        Part::Bytes { len, .. } | Part::Unmapped { len } => *len,
    };
    parts.iter().map(len).sum()
}

/// Aligned and not, one page and many, with a hole, larger than the peer's buffer.
pub(crate) fn vectors_of_every_shape(pair: &Pair) -> Verdict {
    needs(pair)?;
    let shapes: &[&[Part]] = &[
        &[bytes(PAGE, 0)],
        &[bytes(PAGE, 1)],
        &[bytes(PAGE, 0), bytes(PAGE, 0), bytes(PAGE, 0)],
        &[bytes(PAGE, 0), bytes(2000, 0)],
        &[bytes(1000, 0), bytes(PAGE, 0)],
        &[bytes(PAGE, 0), bytes(PAGE, 100), bytes(PAGE, 0)],
        &[bytes(16 * PAGE, 0)],
        &[bytes(16 * PAGE + 77, 33), bytes(3 * PAGE, 4095)],
        // More than the peer's buffer of 256 KiB.
        &[bytes(100 * PAGE, 0), bytes(PAGE, 0)],
    ];
    for (seed, parts) in shapes.iter().enumerate() {
        let (client, served) = pair.connected();
        client.set(Setting::ZeroCopy).ok();
        let receiving = served.start_receive_all(Some(len(parts) as u64));
        let sent = send_parts(&client, seed as u64, parts);
        sent.ok();
        assert_eq!(sent.bytes, len(parts) as u64, "{parts:?}");
        receiving.wait().is_pattern(seed as u64, len(parts));
        let done = completions(&client, STEP);
        done.ok();
        assert!(done.bytes > 0, "{parts:?}: no completion");
    }
    let (client, served) = pair.connected();
    client.set(Setting::ZeroCopy).ok();
    let hole = [bytes(PAGE, 0), Part::Unmapped { len: PAGE }, bytes(PAGE, 0)];
    let refused = send_parts(&client, 0, &hole);
    // Either nothing is sent, or the bytes before the hole.
    match refused.errno.as_deref() {
        Some("EFAULT" | "ENOMEM") => {}
        None => assert!(refused.bytes <= PAGE as u64, "{refused:?}"),
        other => panic!("{other:?}"),
    }
    client.close().ok();
    let left = served.start_receive_all(None).wait();
    assert_eq!(left.bytes, refused.bytes);
    Ok(())
}

/// The descriptors return when the bytes have been received, not with the next send.
pub(crate) fn completions_without_further_traffic(pair: &Pair) -> Verdict {
    needs(pair)?;
    let (client, served) = pair.connected();
    client.set(Setting::ZeroCopy).ok();
    for seed in 0..4 {
        send_parts(&client, seed, &[bytes(16 * PAGE, 0)]).ok();
        served
            .receive_all(16 * PAGE as u64)
            .is_pattern(seed, 16 * PAGE);
        // No other traffic in either direction before that.
        let done = completions(&client, STEP);
        done.ok();
        assert_eq!(done.bytes, 1);
    }
    Ok(())
}

/// A reader that stops reading holds the sender's descriptors for a bounded time only.
pub(crate) fn completions_while_the_reader_stalls(pair: &Pair) -> Verdict {
    needs(pair)?;
    let (client, served) = pair.connected();
    client.set(Setting::ZeroCopy).ok();
    send_parts(&client, 1, &[bytes(16 * PAGE, 0)]).ok();
    let done = completions(&client, Duration::from_secs(10));
    done.ok();
    assert_eq!(done.bytes, 1);
    served
        .receive_all(16 * PAGE as u64)
        .is_pattern(1, 16 * PAGE);
    Ok(())
}

/// A reader that keeps its leases holds them for a bounded time only.
pub(crate) fn completions_while_the_reader_has_leases(pair: &Pair) -> Verdict {
    needs(pair)?;
    if pair.server.kernel().is_some() {
        return Err(Skip("a kernel has no leases".into()));
    }
    let (client, served) = pair.connected();
    client.set(Setting::ZeroCopy).ok();
    for seed in 0..3 {
        send_parts(&client, seed, &[bytes(16 * PAGE, 0)]).ok();
        served.lease(16 * PAGE).ok();
        let done = completions(&client, Duration::from_secs(10));
        done.ok();
        assert_eq!(done.bytes, 1);
    }
    // The credit is used up; when the leases are dropped, it returns.
    send_parts(&client, 3, &[bytes(16 * PAGE, 0)]).ok();
    let sending = client.start_send(4, 16 * PAGE);
    served.close().ok();
    let _ = sending.wait();
    Ok(())
}

/// Other connections of the same sender continue, and complete, beside one with a stalled reader.
pub(crate) fn a_stalled_reader_delays_no_other_completion(pair: &Pair) -> Verdict {
    needs(pair)?;
    let (stalls, late) = pair.connected();
    stalls.set(Setting::ZeroCopy).ok();
    // As much as the reader's buffer takes.
    for seed in 0..4 {
        send_parts(&stalls, seed, &[bytes(16 * PAGE, 0)]).ok();
    }
    let (client, served) = pair.connected();
    client.set(Setting::ZeroCopy).ok();
    for seed in 0..8 {
        send_parts(&client, seed, &[bytes(16 * PAGE, 7)]).ok();
        served
            .receive_all(16 * PAGE as u64)
            .is_pattern(seed, 16 * PAGE);
        let done = completions(&client, Duration::from_secs(10));
        done.ok();
        assert_eq!(done.bytes, 1);
    }
    assert_eq!(all_completions(&stalls, 4), 4);
    for seed in 0..4 {
        late.receive_all(16 * PAGE as u64)
            .is_pattern(seed, 16 * PAGE);
    }
    Ok(())
}

/// Waits for the given number of completions; returns how many there were.
fn all_completions(end: &End, sends: u64) -> u64 {
    let mut done = 0;
    while done < sends {
        let outcome = completions(end, Duration::from_secs(10));
        outcome.ok();
        done += outcome.bytes;
    }
    done
}

/// Each of many sends completes once, and then the error queue is empty.
pub(crate) fn every_send_is_completed_once(pair: &Pair) -> Verdict {
    const SENDS: u64 = 40;
    needs(pair)?;
    let (client, served) = pair.connected();
    client.set(Setting::ZeroCopy).ok();
    let receiving = served.start_receive_all(Some(SENDS * 3 * PAGE as u64));
    for _ in 0..SENDS {
        let sent = send_parts(&client, 1, &[bytes(2 * PAGE, 0), bytes(PAGE, 50)]);
        sent.ok();
        assert_eq!(sent.bytes, 3 * PAGE as u64);
    }
    let received = receiving.wait();
    received.ok();
    assert_eq!(received.bytes, SENDS * 3 * PAGE as u64);
    assert_eq!(all_completions(&client, SENDS), SENDS);
    completions(&client, Duration::ZERO).fails("EAGAIN");
    Ok(())
}

/// A reader that closes without having read leaves no send without its completion.
pub(crate) fn sends_complete_when_the_reader_closes(pair: &Pair) -> Verdict {
    needs(pair)?;
    let (client, served) = pair.connected();
    client.set(Setting::ZeroCopy).ok();
    for seed in 0..3 {
        send_parts(&client, seed, &[bytes(16 * PAGE, 0)]).ok();
    }
    served.close().ok();
    assert_eq!(all_completions(&client, 3), 3);
    Ok(())
}

/// Records can be sent in this way too, and keep their boundaries.
pub(crate) fn records_without_a_copy(pair: &Pair) -> Verdict {
    needs(pair)?;
    let (client, served) = pair.connected_of(Kind::SeqPacket)?;
    client.set(Setting::ZeroCopy).ok();
    let shapes: &[&[Part]] = &[
        &[bytes(PAGE, 0)],
        &[bytes(PAGE, 1), bytes(2000, 0)],
        &[bytes(16 * PAGE, 0), bytes(PAGE, 100)],
        &[bytes(40 * PAGE + 77, 33)],
    ];
    for (seed, parts) in shapes.iter().enumerate() {
        send_parts(&client, seed as u64, parts).ok();
        served
            .receive(100 * PAGE)
            .is_pattern(seed as u64, len(parts));
        let done = completions(&client, STEP);
        done.ok();
        assert_eq!(done.bytes, 1, "{parts:?}");
    }
    completions(&client, Duration::ZERO).fails("EAGAIN");
    Ok(())
}

pub(crate) fn empty_error_queue_answers_at_once(pair: &Pair) -> Verdict {
    needs(pair)?;
    let (client, _served) = pair.connected();
    let outcome = completions(&client, Duration::ZERO);
    outcome.fails("EAGAIN");
    assert!(outcome.elapsed_us < 5_000_000);
    Ok(())
}

/// Number of sockets of the client's system; closing ones may take a moment.
fn comes_back_to(pair: &Pair, before: u64) {
    let give_up = Instant::now() + STEP;
    loop {
        let now = pair.client.call(Call::SocketsUsed);
        now.ok();
        if now.bytes <= before {
            return;
        }
        assert!(
            Instant::now() < give_up,
            "{} sockets, not {before}",
            now.bytes
        );
    }
}

const TIMES: u64 = 16;

pub(crate) fn unread_completions_leak_nothing(pair: &Pair) -> Verdict {
    needs(pair)?;
    let before = pair.client.call(Call::SocketsUsed).bytes;
    for seed in 0..TIMES {
        let (client, served) = pair.connected();
        client.set(Setting::ZeroCopy).ok();
        send_parts(&client, seed, &[bytes(2 * PAGE, 0)]).ok();
        served
            .receive_all(2 * PAGE as u64)
            .is_pattern(seed, 2 * PAGE);
        // Its error queue has an unread entry.
        client.close().ok();
    }
    comes_back_to(pair, before);
    Ok(())
}

pub(crate) fn closing_before_completion_leaks_nothing(pair: &Pair) -> Verdict {
    needs(pair)?;
    let before = pair.client.call(Call::SocketsUsed).bytes;
    for seed in 0..TIMES {
        let (client, served) = pair.connected();
        client.set(Setting::ZeroCopy).ok();
        send_parts(&client, seed, &[bytes(2 * PAGE, 0)]).ok();
        client.close().ok();
        served
            .receive_all(2 * PAGE as u64)
            .is_pattern(seed, 2 * PAGE);
        served.receive(1).is(&[]);
    }
    comes_back_to(pair, before);
    Ok(())
}
