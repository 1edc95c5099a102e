//! Closing: how each side learns of it, which bytes still arrive, which calls block.

use std::thread;
use std::time::Duration;

use zerosock_testkit::calls::Setting;
use zerosock_testkit::protocol::ShutdownDirection;

use super::side::{BEFORE_CLOSING_TIMES_OUT, End, Expect, Pair, STEP, Skip, Verdict};

/// The peer of a closed socket: a send fails with EPIPE, the byte sent before can be read, then the
/// stream ends.
fn closes_first(first: End, other: &End) {
    first.send(1, 1).ok();
    first.close().ok();
    assert_eq!(other.send_until_error(), "EPIPE");
    other.receive(1).is_pattern(1, 1);
    other.receive(1).is(&[]);
    other.send(0, 1).fails("EPIPE");
}

pub(crate) fn client_closes_first(pair: &Pair) -> Verdict {
    let (client, served) = pair.connected();
    closes_first(client, &served);
    Ok(())
}

pub(crate) fn server_closes_first(pair: &Pair) -> Verdict {
    let (client, served) = pair.connected();
    closes_first(served, &client);
    Ok(())
}

pub(crate) fn shut_sending(pair: &Pair) -> Verdict {
    let (client, served) = pair.connected();
    for (one, other) in [(&client, &served), (&served, &client)] {
        one.send(2, 1000).ok();
        one.shut(ShutdownDirection::Send).ok();
        one.send(0, 1).fails("EPIPE");
        other.receive_all(1000).is_pattern(2, 1000);
        other.receive(1).is(&[]);
    }
    Ok(())
}

pub(crate) fn shut_receiving(pair: &Pair) -> Verdict {
    let (client, served) = pair.connected();
    served.send(2, 100).ok();
    assert!(client.poll(STEP), "nothing has come");
    client.shut(ShutdownDirection::Receive).ok();
    // At once, although there are unread bytes.
    assert!(client.poll(STEP), "the end is readable");
    client.receive(1).is(&[]);
    assert_eq!(served.send_until_error(), "EPIPE");
    client.receive(1).is(&[]);
    // The other direction is open.
    client.send(3, 1000).ok();
    served.receive_all(1000).is_pattern(3, 1000);
    Ok(())
}

/// As much as fits into the peer's buffer, unread.
const LEN: usize = 60_000;

pub(crate) fn linger_until_the_peer_has_taken_all(pair: &Pair) -> Verdict {
    let (client, served) = pair.connected();
    client.set(Setting::Linger(Some(30))).ok();
    client.send(4, LEN).ok();
    // Linux lingers until its peer has received the bytes, read or not; between two guests of a
    // device, the device receives them.
    let waits = client.side.kernel().is_none() && pair.has_host();
    let closing = client.start_close();
    let unread = Duration::from_millis(100);
    if waits {
        // Only waiting shows that nothing happens.
        thread::sleep(unread);
    }
    served.receive_all(LEN as u64).is_pattern(4, LEN);
    served.receive(1).is(&[]);
    let closed = closing.wait();
    closed.ok();
    let took = Duration::from_micros(closed.elapsed_us);
    assert!(!waits || took >= unread / 2, "over after {took:?}");
    assert!(took < BEFORE_CLOSING_TIMES_OUT, "not woken in {took:?}");
    Ok(())
}

pub(crate) fn linger_with_nothing_under_way(pair: &Pair) -> Verdict {
    let (client, served) = pair.connected();
    client.send(5, 10).ok();
    served.receive_all(10).is_pattern(5, 10);
    client.set(Setting::Linger(Some(30))).ok();
    let closed = client.close();
    closed.ok();
    let took = Duration::from_micros(closed.elapsed_us);
    assert!(took < Duration::from_secs(10), "lingered for {took:?}");
    Ok(())
}

pub(crate) fn linger_of_no_time_resets(pair: &Pair) -> Verdict {
    if pair.client.kernel().is_some() {
        return Err(Skip(
            "Linux closes vsock sockets in good order even so".into(),
        ));
    }
    let (client, served) = pair.connected();
    client.set(Setting::Linger(Some(0))).ok();
    client.close().ok();
    let outcome = served.receive(1);
    match served.side.kernel() {
        None => outcome.fails("ECONNRESET"),
        // A reset also ends the stream.
        Some(_) => outcome.is(&[]),
    }
    Ok(())
}
