//! Receiving: peeking, parts of packets, low-water marks, time-outs, counts.

use std::time::{Duration, Instant};

use zerosock_cli::vm::pattern::Pattern;
use zerosock_testkit::calls::{Call, Number, RecvFlags, Setting};

use super::side::{End, Expect, Pair, STEP, Skip, Verdict};

pub(crate) fn peek_at_nothing(pair: &Pair) -> Verdict {
    let (_client, served) = pair.connected();
    let flags = RecvFlags {
        peek: true,
        dontwait: true,
        ..RecvFlags::default()
    };
    served.receive_as(32, flags).fails("EAGAIN");
    Ok(())
}

pub(crate) fn peek_at_a_part(pair: &Pair) -> Verdict {
    let (client, served) = pair.connected();
    client.send(1, 32).ok();
    served.peek(16).is_pattern(1, 16);
    served.peek(16).is_pattern(1, 16);
    served.receive_all(32).is_pattern(1, 32);
    served.receive_now(1).fails("EAGAIN");
    Ok(())
}

pub(crate) fn peek_at_all(pair: &Pair) -> Verdict {
    let (client, served) = pair.connected();
    client.send(2, 32).ok();
    served.peek(32).is_pattern(2, 32);
    served.peek(64).is_pattern(2, 32);
    served.receive_all(32).is_pattern(2, 32);
    Ok(())
}

pub(crate) fn peek_after_a_partial_receive(pair: &Pair) -> Verdict {
    let (client, served) = pair.connected();
    client.send(3, 64).ok();
    let all = Pattern::bytes(3, 64);
    served.receive(10).is(&all[..10]);
    served.peek(64).is(&all[10..]);
    served.receive(20).is(&all[10..30]);
    served.peek(34).is(&all[30..]);
    served.receive(64).is(&all[30..]);
    Ok(())
}

/// Packets that a receiver may merge, one of which is partly read when the next one arrives.
pub(crate) fn small_packets_and_partial_reads(pair: &Pair) -> Verdict {
    let (client, served) = pair.connected();
    let (first, second) = (Pattern::bytes(4, 7), Pattern::bytes(5, 9));
    client.send(4, 7).ok();
    served.receive(2).is(&first[..2]);
    client.send(5, 9).ok();
    let rest = [&first[2..], &second].concat();
    served.receive_all(rest.len() as u64).is(&rest);
    served.receive_now(1).fails("EAGAIN");
    Ok(())
}

pub(crate) fn bad_receive_buffer_keeps_the_bytes(pair: &Pair) -> Verdict {
    pair.server.needs((0, 0), "to receive to a bad address")?;
    let (client, served) = pair.connected();
    client.send(6, 100).ok();
    let (socket, len) = (served.id(), 100);
    let failed = served.side.call(Call::ReceiveNowhere { socket, len });
    // Linux before 6.8 (and some later releases) answers ENOMEM or EFAULT.
    assert!(failed.errno.is_some(), "{failed:?}");
    served.receive_all(100).is_pattern(6, 100);
    Ok(())
}

pub(crate) fn poll_waits_for_the_low_water_mark(pair: &Pair) -> Verdict {
    const MARK: usize = 128;
    let (client, served) = pair.connected();
    client.send(7, MARK - 1).ok();
    // They have arrived: the mark is 1 at first.
    assert!(served.poll(STEP), "at the mark of 1");
    served.set(Setting::LowWater(MARK as u32)).ok();
    assert!(!served.poll(Duration::ZERO), "below the mark");
    client.send(8, 1).ok();
    assert!(served.poll(STEP), "not at the mark");
    served.receive_all(MARK as u64).ok();
    Ok(())
}

pub(crate) fn receive_time_out(pair: &Pair) -> Verdict {
    let (_client, served) = pair.connected();
    served.set(Setting::ReceiveTimeout(1000)).ok();
    let outcome = served.receive(1);
    outcome.fails("EAGAIN");
    let took = Duration::from_micros(outcome.elapsed_us);
    // At most a quarter of a second early; a busy machine may be late.
    assert!(took >= Duration::from_millis(750), "after {took:?}");
    assert!(took < Duration::from_secs(8), "after {took:?}");
    Ok(())
}

pub(crate) fn unsent_and_unread_bytes(pair: &Pair) -> Verdict {
    let (client, served) = pair.connected();
    client.send(9, 1251).ok();
    counts(&client, &served, 1251, || {
        served.receive_all(1251).is_pattern(9, 1251);
    })
}

/// The server counts the given number of unread bytes until it has received them; then the client
/// counts none unsent.
pub(super) fn counts(client: &End, served: &End, bytes: u64, receive: impl FnOnce()) -> Verdict {
    let give_up = Instant::now() + STEP;
    assert!(served.poll(STEP), "nothing came");
    let counts_unread = loop {
        let unread = served.get(Number::Unread);
        match unread.errno.as_deref() {
            None if unread.bytes == bytes => break true,
            // The last packet may be in flight.
            None => assert!(
                unread.bytes < bytes && Instant::now() < give_up,
                "{unread:?}"
            ),
            // Linux: since 6.17.
            Some("ENOTTY" | "EOPNOTSUPP") if served.side.kernel().is_some() => break false,
            other => panic!("{other:?}"),
        }
    };
    receive();
    if counts_unread {
        assert_eq!(served.get(Number::Unread).bytes, 0);
    }
    loop {
        let unsent = client.get(Number::Unsent);
        match unsent.errno.as_deref() {
            None if unsent.bytes == 0 => break,
            None => assert!(Instant::now() < give_up, "{} unsent", unsent.bytes),
            // Linux: since 6.11.
            Some("ENOTTY" | "EOPNOTSUPP")
                if client.side.kernel().is_some_and(|it| it < (6, 11)) =>
            {
                return Err(Skip("the client's kernel counts no unsent bytes".into()));
            }
            other => panic!("{other:?}"),
        }
    }
    if counts_unread {
        Ok(())
    } else {
        let shown = "unsent bytes only: the server's kernel counts no unread ones";
        Err(Skip(shown.into()))
    }
}
