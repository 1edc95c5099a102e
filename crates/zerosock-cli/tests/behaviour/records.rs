//! SEQPACKET: records with bounds.

use std::time::Duration;

use zerosock_cli::vm::calls::{Call, Kind, Manner, Setting};

use super::side::{Expect, Pair, Verdict};

pub(crate) fn record_bounds(pair: &Pair) -> Verdict {
    let (client, served) = pair.connected_of(Kind::SeqPacket)?;
    let lens = [1, 100, 4096, 65_536, 70_000, 200_000, 3];
    for (seed, len) in lens.into_iter().enumerate() {
        let sending = client.start_send(seed as u64, len);
        served.receive(1 << 20).is_pattern(seed as u64, len);
        sending.wait().ok();
    }
    // Two that wait stay two.
    client.send(1, 10).ok();
    client.send(2, 20).ok();
    served.receive(100).is_pattern(1, 10);
    served.receive(100).is_pattern(2, 20);
    Ok(())
}

pub(crate) fn truncated_record_tells_its_length(pair: &Pair) -> Verdict {
    let (client, served) = pair.connected_of(Kind::SeqPacket)?;
    client.send(3, 32).ok();
    client.send(4, 5).ok();
    let how = Manner {
        whole: true,
        ..Manner::default()
    };
    let outcome = served.receive_as(16, how);
    outcome.ok();
    assert_eq!(outcome.bytes, 32, "the record's length");
    // What did not fit is gone with it.
    served.receive(100).is_pattern(4, 5);
    Ok(())
}

pub(crate) fn record_receive_time_out(pair: &Pair) -> Verdict {
    let (_client, served) = pair.connected_of(Kind::SeqPacket)?;
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
    let (client, served) = pair.connected_of(Kind::SeqPacket)?;
    client.send(5, 100).ok();
    client.send(6, 100).ok();
    let (socket, len) = (served.id(), 100);
    let failed = served.side.call(Call::ReceiveNowhere { socket, len });
    assert!(failed.errno.is_some(), "{failed:?}");
    served.receive(100).is_pattern(6, 100);
    Ok(())
}

pub(crate) fn a_record_above_the_buffer_is_refused(pair: &Pair) -> Verdict {
    let (client, served) = pair.connected_of(Kind::SeqPacket)?;
    // Linux before 6.3 has one name for all errors.
    let old = client.side.kernel().is_some_and(|kernel| kernel < (6, 3));
    let errno = if old { "ENOMEM" } else { "EMSGSIZE" };
    client.send(7, (256 << 10) + 1).fails(errno);
    client.send(8, 100).ok();
    served.receive(200).is_pattern(8, 100);
    Ok(())
}
