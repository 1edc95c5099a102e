//! Sends of which the kernel reads the bytes where they lie (MSG_ZEROCOPY), and their completions.

use std::time::{Duration, Instant};

use zerosock_cli::vm::calls::{Call, Part, Setting};
use zerosock_cli::vm::protocol::Outcome;

use super::side::{End, Expect, Pair, STEP, Verdict};

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

/// Aligned and not, one page and many, with nothing in the middle, above the peer's buffer.
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
        // Above the peer's buffer of 256 KiB.
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
    // Either nothing is sent, or what lies before the hole.
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

/// The descriptors come back when the bytes have been taken, not when something else is sent.
pub(crate) fn completions_without_further_traffic(pair: &Pair) -> Verdict {
    needs(pair)?;
    let (client, served) = pair.connected();
    client.set(Setting::ZeroCopy).ok();
    for seed in 0..4 {
        send_parts(&client, seed, &[bytes(16 * PAGE, 0)]).ok();
        served
            .receive_all(16 * PAGE as u64)
            .is_pattern(seed, 16 * PAGE);
        let start = Instant::now();
        let done = completions(&client, STEP);
        done.ok();
        assert_eq!(done.bytes, 1);
        let took = start.elapsed();
        assert!(took < Duration::from_secs(5), "complete after {took:?}");
    }
    Ok(())
}

/// A reader that takes nothing holds the sender's descriptors for a bounded time only.
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

pub(crate) fn empty_error_queue_answers_at_once(pair: &Pair) -> Verdict {
    needs(pair)?;
    let (client, _served) = pair.connected();
    let outcome = completions(&client, Duration::ZERO);
    outcome.fails("EAGAIN");
    assert!(outcome.elapsed_us < 5_000_000);
    Ok(())
}

/// Sockets of the client's system; those that end may take a moment.
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
        // Its error queue has something, which nobody reads.
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
