//! A program that embeds the device does not read, or does not drop its leases: what this costs
//! other connections, and how it ends when the guest takes its memory back.

use std::io::{ErrorKind, Read, Write};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use crate::common::driver::{Driver, StreamState};
use crate::common::{
    self, PATIENCE, assert_bytes, bytes, deadline, eventually, eventually_with, host,
};
use crate::hosting::{self, Hosted};
use zerosock::vsock::{Datagram, Poller, Readiness, Stream, Wait};
use zerosock::{Address, Cid, Port};
use zerosock_proto::wire::vsock::Op;

const PORT: Port = Port::new(700);

/// A connection of the guest, and the program's side of it.
fn pair(hosted: &Hosted, guest: &mut Driver) -> (crate::common::driver::StreamId, Stream) {
    let listener = hosted.listen(PORT, 4).unwrap();
    let id = guest.wait_connect(host(700), deadline()).unwrap();
    let (stream, _) = listener.accept_timeout(PATIENCE).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    (id, stream)
}

/// Sends at least `least` bytes, and continues until credit or buffers have been used up for longer
/// than the hold time. Returns the number of bytes.
fn flood(
    guest: &mut Driver,
    id: crate::common::driver::StreamId,
    part: &[u8],
    least: usize,
) -> usize {
    let give_up = deadline();
    let mut sent = 0;
    let mut since = Instant::now();
    while sent < least || since.elapsed() < Duration::from_millis(500) {
        assert!(Instant::now() < give_up, "{sent} bytes in all this time");
        if let Ok(more) = guest.send(id, part) {
            sent += more;
            since = Instant::now();
        }
        let soon = Instant::now() + Duration::from_millis(1);
        guest.poll(Some(soon)).unwrap();
    }
    sent
}

#[test]
fn a_reader_that_never_reads_does_not_stop_others() {
    let hosted = Hosted::new();
    let mut guest = hosted.guest();
    let (stalled, _unread) = pair(&hosted, &mut guest);
    // Up to its credit.
    let sent = flood(&mut guest, stalled, &bytes(1, 1000), 150_000);
    let (id, mut stream) = pair(&hosted, &mut guest);
    for round in 0..50 {
        guest
            .wait_send(id, &bytes(round, 5000), deadline())
            .unwrap();
        let mut got = vec![0; 5000];
        stream.read_exact(&mut got).unwrap();
        assert_bytes(&got, &bytes(round, 5000));
        stream.write_all(&got).unwrap();
        guest.wait_recv_exact(id, &mut got, deadline()).unwrap();
    }
    guest.abort(stalled);
    guest.drive().unwrap();
    let mut end = vec![0; 300_000];
    let mut got = 0;
    let error = loop {
        match (&_unread).read(&mut end) {
            Ok(more) => got += more,
            Err(error) => break error,
        }
    };
    assert_eq!((got, error.kind()), (sent, ErrorKind::ConnectionReset));
}

/// How often this thread has given up its core to wait.
fn sleeps() -> u64 {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
    let count = |line: &str| {
        line.strip_prefix("voluntary_ctxt_switches:")?
            .trim()
            .parse()
            .ok()
    };
    status.lines().find_map(count).unwrap()
}

/// Nothing but the calls runs the host, and the guest takes nothing: an attempt that fails must not look like
/// work, or the call neither ends in time nor sleeps.
#[test]
fn calls_that_wait_for_a_guest_that_does_not_read_end_in_time_and_sleep() {
    const LIMIT: Duration = Duration::from_millis(50);
    for wait in [Wait::Sleep, Wait::Spin, Wait::ADAPTIVE] {
        let mut hosted = Hosted::with(1, wait);
        let mut guest = hosted.guest();
        let (_, stream) = pair(&hosted, &mut guest);
        let datagrams = Datagram::bind(&*hosted, PORT).unwrap();
        datagrams.set_write_timeout(Some(LIMIT)).unwrap();
        stream.set_write_timeout(Some(LIMIT)).unwrap();
        hosted.stop();
        let (tell, results) = mpsc::channel();
        let caller = thread::spawn(move || {
            let mut results = Vec::new();
            let mut call = |name, call: &mut dyn FnMut() -> std::io::Result<()>| {
                let before = sleeps();
                let error = loop {
                    if let Err(error) = call() {
                        break error.kind();
                    }
                };
                results.push((name, error, sleeps() > before));
            };
            let mut loans = Vec::new();
            let mut private = loop {
                let loan = stream.loan(100).unwrap();
                if !loan.is_in_place() {
                    break Some(loan);
                }
                loans.push(loan);
            };
            private.as_mut().unwrap().write_all(&bytes(1, 100)).unwrap();
            let part = bytes(1, 1000);
            call("write", &mut || (&stream).write(&part).map(drop));
            call("loan", &mut || stream.loan(1000).map(drop));
            call("send", &mut || private.take().unwrap().send().map(drop));
            let to = Address::new(Cid::new(3), PORT);
            call("send_to", &mut || datagrams.send_to(&part, to).map(drop));
            call("poll", &mut || {
                let mut poller = Poller::new(wait);
                poller.add_stream(&stream, 1, Readiness::WRITABLE);
                match poller.wait(Some(LIMIT))?.len() {
                    0 => Err(ErrorKind::TimedOut.into()),
                    _ => Ok(()),
                }
            });
            tell.send(results).unwrap();
        });
        let results = results.recv_timeout(PATIENCE).expect("a call does not end");
        for (name, error, has_slept) in results {
            assert_eq!(error, ErrorKind::TimedOut, "{name}, {wait:?}");
            assert!(has_slept || wait == Wait::Spin, "{name}, {wait:?}");
        }
        caller.join().unwrap();
        drop(guest);
    }
}

#[test]
fn leases_that_are_never_dropped_do_not_stop_others() {
    let hosted = Hosted::new();
    let mut guest = hosted.guest();
    let (hoarded, hoarder) = pair(&hosted, &mut guest);
    let mut leases = Vec::new();
    for round in 0..100 {
        guest
            .wait_send(hoarded, &bytes(round, 2000), deadline())
            .unwrap();
        leases.push(hoarder.recv().unwrap().unwrap());
    }
    // Half of them are being read.
    let readings: Vec<_> = leases.iter().step_by(2).map(|lease| lease.read()).collect();
    let (id, mut stream) = pair(&hosted, &mut guest);
    for round in 0..50 {
        guest
            .wait_send(id, &bytes(round, 5000), deadline())
            .unwrap();
        let mut got = vec![0; 5000];
        stream.read_exact(&mut got).unwrap();
        assert_bytes(&got, &bytes(round, 5000));
    }
    for (n, reading) in readings.iter().enumerate() {
        assert!(!reading.is_revoked());
        assert_bytes(&reading.to_vec(), &bytes(2 * n as u64, 2000));
    }
    drop(readings);
    for (n, lease) in leases.iter().enumerate() {
        assert_bytes(&lease.to_vec(), &bytes(n as u64, 2000));
    }
    // A guest that disconnects meanwhile takes no bytes with it.
    drop(guest);
    let error = hoarder.recv().map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    for (n, lease) in leases.iter().enumerate() {
        assert_bytes(&lease.to_vec(), &bytes(n as u64, 2000));
    }
}

#[test]
fn a_pause_takes_leases_back_and_tears_those_that_are_read() {
    let hosted = Hosted::with_hold(1, Duration::from_secs(600));
    let mut guest = hosted.guest();
    let (id, mut stream) = pair(&hosted, &mut guest);
    let mut leases = Vec::new();
    for round in 0..4 {
        guest
            .wait_send(id, &bytes(round, 2000), deadline())
            .unwrap();
        leases.push(stream.recv().unwrap().unwrap().into_owned());
    }
    guest.wait_send(id, &bytes(9, 2000), deadline()).unwrap();
    eventually("there, unread", || stream.unread() == 2000);
    let read = leases[1].read();
    assert!(!read.is_revoked());
    let bases = guest.suspend().unwrap();
    assert_eq!(guest.used_indices()[1], bases[1], "every chain is back");
    assert!(read.is_revoked());
    assert_bytes(&read.to_vec(), &bytes(1, 2000));
    drop(read);
    for (n, lease) in leases.iter().enumerate() {
        let reading = lease.read();
        assert_eq!(reading.is_revoked(), n == 1);
        assert_bytes(&reading.to_vec(), &bytes(n as u64, 2000));
    }
    guest.resume(&bases).unwrap();
    let mut got = vec![0; 2000];
    stream.read_exact(&mut got).unwrap();
    assert_bytes(&got, &bytes(9, 2000));
    drop(leases);
    stream.write_all(&bytes(8, 5000)).unwrap();
    let mut got = vec![0; 5000];
    guest.wait_recv_exact(id, &mut got, deadline()).unwrap();
    assert_bytes(&got, &bytes(8, 5000));
}

#[test]
fn a_new_memory_table_takes_leases_and_loans_back() {
    let hosted = Hosted::with_hold(1, Duration::from_secs(600));
    let mut guest = hosted.guest();
    let (id, stream) = pair(&hosted, &mut guest);
    guest.wait_send(id, &bytes(1, 2000), deadline()).unwrap();
    let lease = stream.recv().unwrap().unwrap();
    assert!(lease.is_in_place());
    let mut loan = stream.loan(1000).unwrap();
    assert!(loan.is_in_place());
    loan.write_all(&bytes(2, 500)).unwrap();
    guest.send_memory_table().unwrap();
    guest.frontend().unwrap().sync().unwrap();
    assert_bytes(&lease.to_vec(), &bytes(1, 2000));
    // Earlier bytes of the loan are kept, and later ones follow them.
    loan.write_all(&bytes(3, 500)).unwrap();
    assert!(!loan.is_in_place());
    assert_eq!(loan.send().unwrap(), 1000);
    let mut got = vec![0; 1000];
    guest.wait_recv_exact(id, &mut got, deadline()).unwrap();
    assert_bytes(&got[..500], &bytes(2, 500));
    assert_bytes(&got[500..], &bytes(3, 500));
    let stats = hosted.stats();
    assert_eq!((stats.sent, stats.sent_in_place), (1000, 0));
}

#[test]
fn memory_kept_by_revoked_leases_is_capped() {
    let hosted = Hosted::tuned(|builder| builder.old_memory(0).hold(Duration::from_secs(600)));
    let mut guest = hosted.guest();
    let (id, stream) = pair(&hosted, &mut guest);
    let mut next = || {
        guest.wait_send(id, b"bytes", deadline()).unwrap();
        let lease = stream.recv().unwrap().unwrap().into_owned();
        guest.send_memory_table().unwrap();
        guest.frontend().unwrap().sync().unwrap();
        lease
    };
    // Twice the guest's memory may be kept, however small it is: the first table is old when the
    // second arrives, and so on.
    let leases: Vec<_> = (0..5).map(|_| next()).collect();
    let in_place: Vec<_> = leases.iter().map(|lease| lease.is_in_place()).collect();
    assert_eq!(in_place, [true, true, true, false, false]);
    drop(leases);
    assert!(next().is_in_place(), "nothing is kept alive any more");
}

#[test]
fn unread_connections_with_most_copies_are_reset_at_the_limit() {
    const MOST: usize = 1 << 20;
    let hosted = Hosted::tuned(|builder| builder.queue_pairs(1).max_copied(MOST));
    let mut guest = hosted.guest();
    let listener = hosted.listen(PORT, 32).unwrap();
    let ids: Vec<_> = (0..24)
        .map(|_| guest.wait_connect(host(700), deadline()).unwrap())
        .collect();
    let part = bytes(1, 4000);
    let give_up = deadline();
    let mut sent = 0;
    let stands = |guest: &Driver, id| guest.state(id) == Some(StreamState::Connected);
    while ids.iter().all(|id| stands(&guest, *id)) {
        assert!(
            Instant::now() < give_up,
            "{sent} bytes, and nobody is reset"
        );
        for id in &ids {
            sent += guest.send(*id, &part).unwrap_or(0);
        }
        let soon = Instant::now() + Duration::from_millis(1);
        guest.poll(Some(soon)).unwrap();
    }
    assert!(sent > MOST, "not before: {sent}");
    let streams: Vec<_> = ids
        .iter()
        .map(|_| listener.accept_timeout(PATIENCE).unwrap().0)
        .collect();
    let unread: usize = streams.iter().map(Stream::unread).sum();
    // Including bytes held in place; no more connections are reset than necessary.
    assert!(unread < MOST + 600_000, "{unread}");
    assert!(unread > MOST / 2, "{unread}");
    drop(streams);
    drop(listener);
    let (id, mut stream) = pair(&hosted, &mut guest);
    guest.wait_send(id, &part, deadline()).unwrap();
    let mut got = vec![0; part.len()];
    stream.read_exact(&mut got).unwrap();
    assert_bytes(&got, &part);
}

#[test]
fn a_quarter_of_the_buffers_is_never_lent() {
    // The bound is for each queue; this counts one of them.
    let hosted = Hosted::tuned(|builder| builder.queue_pairs(1));
    let mut guest = hosted.guest();
    let listener = hosted.listen(PORT, 16).unwrap();
    let mut streams = Vec::new();
    for _ in 0..8 {
        let id = guest.wait_connect(host(700), deadline()).unwrap();
        streams.push((id, listener.accept_timeout(PATIENCE).unwrap().0));
    }
    // The guest's queue has 256 entries, and each buffer uses two: the header has its own.
    let (size, posted) = (256, 128);
    let mut loans = Vec::new();
    let mut in_place = 0;
    for (_, stream) in &streams {
        let mut ours = 0;
        for _ in 0..40 {
            let loan = stream.loan(10).unwrap();
            ours += usize::from(loan.is_in_place());
            loans.push(loan);
        }
        assert!(ours <= size / 8, "{ours} for one of them");
        in_place += ours;
    }
    assert_eq!(in_place, posted / 4 * 3);
    // Control packets and bytes of other connections pass.
    let id = guest.wait_connect(host(700), deadline()).unwrap();
    let (mut last, _) = listener.accept_timeout(PATIENCE).unwrap();
    last.set_write_timeout(Some(PATIENCE)).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| last.write_all(&bytes(5, 100_000)).unwrap());
        let mut got = vec![0; 100_000];
        guest.wait_recv_exact(id, &mut got, deadline()).unwrap();
        assert_bytes(&got, &bytes(5, 100_000));
    });
    // Loans in place can be sent in any order although no buffer is free; other loans are dropped.
    let mut want = vec![0; streams.len()];
    for (n, mut loan) in loans.into_iter().enumerate().rev() {
        if n % 3 > 0 && loan.is_in_place() {
            loan.write_all(&[n as u8; 10]).unwrap();
            assert_eq!(loan.send().unwrap(), 10);
            want[n / 40] += 10;
        }
    }
    assert!(want.iter().sum::<usize>() > 0);
    for ((id, _), want) in streams.iter().zip(want) {
        let mut got = vec![0; want];
        guest.wait_recv_exact(*id, &mut got, deadline()).unwrap();
    }
}

#[test]
fn packets_with_invalid_lengths_are_not_delivered() {
    let hosted = Hosted::new();
    let listener = hosted.listen(PORT, 4).unwrap();
    let mut guest = hosted.raw_guest();
    guest.connect(5000, PORT.get());
    let (stream, _) = listener.accept_timeout(PATIENCE).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    // A length above the bytes in the packet; above the maximum; a header that is too short.
    for len in [6, 4096, 65537, u32::MAX] {
        let mut raw = common::raw::emit(&guest.header(5000, PORT.get(), Op::Rw));
        raw[24..28].copy_from_slice(&len.to_le_bytes());
        guest.send_bytes(&raw, b"short");
    }
    guest.send_bytes(&[0; 20], &[]);
    hosting::raw_send(&mut guest, 5000, PORT.get(), b"honest");
    let lease = stream.recv().unwrap().unwrap();
    assert_eq!(lease.to_vec(), b"honest");
    drop(lease);
    guest.wait_tx_done();
    // Beyond its credit: that connection is reset, and no other.
    guest.connect(5001, PORT.get());
    let (other, _) = listener.accept_timeout(PATIENCE).unwrap();
    other.set_read_timeout(Some(PATIENCE)).unwrap();
    for _ in 0..70 {
        hosting::raw_send(&mut guest, 5000, PORT.get(), &[7; 4096]);
    }
    guest.recv_op(5000, Op::Rst);
    let mut got = 0;
    let mut part = [0; 65536];
    let error = loop {
        match (&stream).read(&mut part) {
            Ok(more) => got += more,
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    assert_eq!(got, 262_144, "what it had credit for");
    hosting::raw_send(&mut guest, 5001, PORT.get(), b"fine");
    assert_eq!(other.recv().unwrap().unwrap().to_vec(), b"fine");
}

#[test]
fn a_guest_that_rewrites_payload_header_and_ring_under_a_lease_affects_only_itself() {
    let hosted = Hosted::with(2, zerosock::vsock::Wait::Sleep);
    let listener = hosted.listen(PORT, 4).unwrap();
    let mut neighbour = hosted.guest_of(1);
    let kept = neighbour.wait_connect(host(700), deadline()).unwrap();
    let (alive, _) = listener.accept_timeout(PATIENCE).unwrap();
    let mut guest = hosted.raw_guest();
    guest.connect(5000, PORT.get());
    let (stream, _) = listener.accept_timeout(PATIENCE).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let at = hosting::raw_send(&mut guest, 5000, PORT.get(), b"hello");
    let lease = stream.recv().unwrap().unwrap();
    let reading = lease.read();
    // The header has a larger length, the descriptors point elsewhere, the index is far ahead.
    for index in 0..common::raw::SIZE {
        let buffer = guest.buffer(common::raw::TX, index);
        if buffer != at {
            guest.write(buffer, &[0xff; 44]);
        }
        guest.desc(common::raw::TX, index, u64::MAX - 7, u32::MAX, 3, index);
    }
    guest.write(at, b"j");
    let index = guest.avail_index(common::raw::TX);
    guest.set_avail(common::raw::TX, index.wrapping_add(1000));
    guest.kick(common::raw::TX);
    assert_eq!(reading.len(), 5);
    assert_eq!(
        reading.to_vec()[1..],
        b"ello"[..],
        "its own bytes, and no others"
    );
    neighbour.wait_send(kept, b"here", deadline()).unwrap();
    let mut got = [0; 4];
    (&alive).read_exact(&mut got).unwrap();
    assert_eq!(&got, b"here");
    // Detected at once, not only when the front-end disconnects.
    let error = stream.recv().map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    drop(guest);
    assert_eq!(reading.to_vec().len(), 5, "still mapped");
}

#[test]
fn a_host_that_ends_resets_everybody() {
    let mut hosted = Hosted::new();
    let mut guest = hosted.guest();
    let (id, stream) = pair(&hosted, &mut guest);
    guest.wait_send(id, b"unread", deadline()).unwrap();
    drop(stream.loan(10));
    hosted.stop();
    drop(stream);
    drop(hosted);
    eventually_with(&mut guest, "over", |guest| {
        !guest.is_attached() || guest.state(id) != Some(StreamState::Connected)
    });
}
