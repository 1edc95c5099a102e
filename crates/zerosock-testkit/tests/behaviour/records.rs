//! SEQPACKET: message boundaries.

use std::time::Duration;

use zerosock_cli::vm::pattern::Pattern;
use zerosock_testkit::calls::{Call, Kind, RecvFlags, Setting};
use zerosock_testkit::protocol::{Outcome, ShutdownDirection};

use super::buffers::{SMALL, lag};
use super::side::{End, Expect, Pair, STEP, Skip, Verdict, port};

fn connected<'a>(pair: &Pair<'a>) -> Result<(End<'a>, End<'a>), Skip> {
    pair.connected_of(Kind::SeqPacket)
}

/// Receives a record that is available.
fn receive_as(end: &End, len: usize, flags: RecvFlags) -> Outcome {
    let outcome = end.receive_as(len, flags);
    outcome.ok();
    outcome
}

const WHOLE: RecvFlags = RecvFlags {
    peek: false,
    dontwait: false,
    trunc: true,
};
const PEEK: RecvFlags = RecvFlags {
    peek: true,
    dontwait: false,
    trunc: false,
};

pub(crate) fn record_bounds(pair: &Pair) -> Verdict {
    let (client, served) = connected(pair)?;
    // Two records fill the buffer, of which the last update may have announced less.
    let lens = [
        1, 100, 4096, 65_536, 70_000, 200_000, 262_144, 100_000, 262_144, 3,
    ];
    for (seed, len) in lens.into_iter().enumerate() {
        let sending = client.start_send(seed as u64, len);
        served.receive(1 << 20).is_pattern(seed as u64, len);
        sending.wait().ok();
    }
    // Two waiting records stay two.
    client.send(1, 10).ok();
    client.send(2, 20).ok();
    served.receive(100).is_pattern(1, 10);
    served.receive(100).is_pattern(2, 20);
    Ok(())
}

/// MSG_EOR is reported with the message that was sent with it, and with no other.
pub(crate) fn ends_of_records(pair: &Pair) -> Verdict {
    let (client, served) = connected(pair)?;
    for (seed, len) in [10, 70_000, 1, 5000].into_iter().enumerate() {
        let (seed, ends) = (seed as u64, seed % 2 == 0);
        match ends {
            true => client.send_record(seed, len).ok(),
            false => client.send(seed, len).ok(),
        }
        let outcome = served.receive(1 << 17);
        outcome.is_pattern(seed, len);
        assert_eq!(outcome.ends_record, ends, "{len} bytes");
    }
    Ok(())
}

pub(crate) fn truncated_record_tells_its_length(pair: &Pair) -> Verdict {
    let (client, served) = connected(pair)?;
    for len in [32, 20_000] {
        client.send(3, len).ok();
        client.send(4, 5).ok();
        let outcome = receive_as(&served, 16, WHOLE);
        assert_eq!(outcome.bytes, len as u64, "the record's length");
        assert!(outcome.truncated);
        // The bytes that did not fit are discarded.
        let outcome = served.receive(100);
        outcome.is_pattern(4, 5);
        assert!(!outcome.truncated);
    }
    // Without MSG_TRUNC the call reports the copied length, and that the record is longer.
    client.send(5, 100).ok();
    let outcome = served.receive(60);
    outcome.is(&Pattern::bytes(5, 100)[..60]);
    assert!(outcome.truncated);
    Ok(())
}

pub(crate) fn peek_at_records(pair: &Pair) -> Verdict {
    let (client, served) = connected(pair)?;
    let now = RecvFlags {
        dontwait: true,
        ..PEEK
    };
    served.receive_as(32, now).fails("EAGAIN");
    client.send(6, 5000).ok();
    client.send(7, 10).ok();
    let all = Pattern::bytes(6, 5000);
    let first = served.peek(16);
    let kernel = served.side.kernel();
    if kernel.is_some_and(|kernel| kernel < (6, 6)) && first.errno.is_some() {
        return Err(Skip("kernels peek at records since Linux 6.6".into()));
    }
    first.is(&all[..16]);
    served.peek(5000).is(&all);
    let whole = RecvFlags {
        trunc: true,
        ..PEEK
    };
    assert_eq!(receive_as(&served, 16, whole).bytes, 5000);
    served.receive(8000).is(&all);
    served.peek(100).is_pattern(7, 10);
    served.receive(100).is_pattern(7, 10);
    served.receive_now(1).fails("EAGAIN");
    Ok(())
}

pub(crate) fn record_receive_time_out(pair: &Pair) -> Verdict {
    let (_client, served) = connected(pair)?;
    served.set(Setting::ReceiveTimeout(1000)).ok();
    let outcome = served.receive(1);
    outcome.fails("EAGAIN");
    let took = Duration::from_micros(outcome.elapsed_us);
    assert!(took >= Duration::from_millis(750), "after {took:?}");
    assert!(took < Duration::from_secs(8), "after {took:?}");
    Ok(())
}

pub(crate) fn bad_receive_buffer_loses_one_record(pair: &Pair) -> Verdict {
    pair.server.needs((0, 0), "to receive to a bad address")?;
    let (client, served) = connected(pair)?;
    client.send(5, 100).ok();
    client.send(6, 100).ok();
    let (socket, len) = (served.id(), 100);
    let failed = served.side.call(Call::ReceiveNowhere { socket, len });
    assert!(failed.errno.is_some(), "{failed:?}");
    served.receive(100).is_pattern(6, 100);
    Ok(())
}

pub(crate) fn a_record_above_the_buffer_is_refused(pair: &Pair) -> Verdict {
    let (client, served) = connected(pair)?;
    // Linux before 6.3 has one name for all errors.
    let old = client.side.kernel().is_some_and(|kernel| kernel < (6, 3));
    let errno = if old { "ENOMEM" } else { "EMSGSIZE" };
    client.send(7, (256 << 10) + 1).fails(errno);
    client.send(8, 100).ok();
    served.receive(200).is_pattern(8, 100);
    Ok(())
}

/// The peer of a closed socket receives the last record, then the end, and cannot send.
pub(crate) fn records_end(pair: &Pair) -> Verdict {
    for client_first in [true, false] {
        let (client, served) = connected(pair)?;
        let (first, other) = match client_first {
            true => (client, served),
            false => (served, client),
        };
        first.send(1, 100).ok();
        first.close().ok();
        other.receive(200).is_pattern(1, 100);
        other.receive(200).is(&[]);
        other.send(0, 1).fails("EPIPE");
    }
    let (client, served) = connected(pair)?;
    client.send(2, 100).ok();
    client.shut(ShutdownDirection::Send).ok();
    client.send(0, 1).fails("EPIPE");
    served.receive(200).is_pattern(2, 100);
    served.receive(1).is(&[]);
    served.send(3, 100).ok();
    client.receive(200).is_pattern(3, 100);
    Ok(())
}

/// Without a listener, and with a listener of the other socket type.
pub(crate) fn connections_of_another_kind_are_refused(pair: &Pair) -> Verdict {
    let cid = pair.server.cid();
    let (nobody, streams, records) = (port(), port(), port());
    let _streams = pair.listener(streams, 1);
    let _records = pair.listener_of(Kind::SeqPacket, records, 1)?;
    let socket = Pair::socket(pair.client, Kind::SeqPacket)?;
    socket.connect(cid, nobody).refused();
    socket.connect(cid, streams).refused();
    pair.client_socket().connect(cid, records).refused();
    // It can be repeated.
    socket.connect(cid, records).ok();
    Ok(())
}

/// SIOCINQ and SIOCOUTQ also count bytes of records.
pub(crate) fn unsent_and_unread_bytes_of_records(pair: &Pair) -> Verdict {
    let (client, served) = connected(pair)?;
    client.send(1, 1000).ok();
    client.send(2, 251).ok();
    super::bytes::counts(&client, &served, 1251, || {
        served.receive(2000).is_pattern(1, 1000);
        served.receive(2000).is_pattern(2, 251);
    })
}

/// More small records than a receiver keeps, to a reader that starts late: no reset, no loss, all
/// unchanged.
pub(crate) fn small_records_under_back_pressure(pair: &Pair) -> Verdict {
    const TIMES: usize = 400;
    for both in [false, true] {
        let (client, served) = connected(pair)?;
        let (from, to) = if both {
            (&served, &client)
        } else {
            (&client, &served)
        };
        let lens: Vec<usize> = SMALL.iter().copied().cycle().take(TIMES).collect();
        let len = lens.iter().sum::<usize>();
        let sending = from.start_send_all(13, len as u64, SMALL);
        lag(to, 200);
        let (all, mut at) = (Pattern::bytes(13, len), 0);
        // Some of them one by one; no call for many keeps the boundaries.
        for len in &lens[..40] {
            to.receive(1000).is(&all[at..at + len]);
            at += len;
        }
        to.receive_all((len - at) as u64).is(&all[at..]);
        let sent = sending.wait();
        sent.ok();
        assert_eq!(sent.bytes, len as u64);
    }
    Ok(())
}

/// Records are received correctly after poll(2).
pub(crate) fn poll_waits_for_a_record(pair: &Pair) -> Verdict {
    let (client, served) = connected(pair)?;
    assert!(!served.poll(Duration::ZERO), "nothing was sent");
    client.send(1, 70_000).ok();
    assert!(served.poll(STEP), "nothing came");
    served.receive(70_000).is_pattern(1, 70_000);
    assert!(!served.poll(Duration::ZERO), "nothing is left");
    Ok(())
}
