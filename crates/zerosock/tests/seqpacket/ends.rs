//! Ends of messages, of records and of streams, and time-outs.

use std::io::ErrorKind;
use std::net::Shutdown;
use std::time::{Duration, Instant};

use zerosock::vsock::{Poller, Readiness, Received, StreamError, StreamState, Wait};

use super::paths::{Hub, TestDaemon, siblings};
use crate::common::PATIENCE;

#[test]
fn a_truncated_message_loses_its_end_and_its_full_length_is_returned() {
    let hub = Hub::new();
    let process = hub.process();
    let (ours, theirs) = hub.joined(&process);
    for (from, to) in [(&ours, &theirs), (&theirs, &ours)] {
        from.send(&[1; 100_000]).unwrap();
        from.send(b"next").unwrap();
        let mut out = [0; 10];
        let Received { len, copied, .. } = to.recv(&mut out).unwrap().unwrap();
        assert_eq!((len, copied, out), (100_000, 10, [1; 10]));
        let next = to.recv(&mut out).unwrap().unwrap();
        assert_eq!(
            (&out[..next.len], next.is_truncated()),
            (&b"next"[..], false)
        );
        // Neither an empty buffer nor a peek returns it.
        from.send(b"seen").unwrap();
        from.send(b"last").unwrap();
        let seen = to.peek(&mut out).unwrap().unwrap();
        assert_eq!(&out[..seen.len], b"seen");
        assert_eq!(to.peek(&mut []).unwrap().unwrap().len, 4);
        assert_eq!(to.recv(&mut []).unwrap().unwrap().len, 4);
        let last = to.recv(&mut out).unwrap().unwrap();
        assert_eq!(&out[..last.len], b"last");
    }
    assert_eq!(hub.host.stats().copied_aside, 0);
}

#[test]
fn an_empty_message_is_not_the_end() {
    let daemon = TestDaemon::new(1);
    let plain = |builder| builder;
    let ((_one, ours), (_two, theirs)) = siblings(&daemon.path(), [plain, plain]);
    theirs.send(b"").unwrap();
    theirs.send_eor(b"").unwrap();
    let got = ours.recv(&mut [0; 4]).unwrap().expect("a message");
    assert_eq!((got.len, got.end_of_record), (0, false));
    let got = ours.recv_leases().unwrap().expect("a message");
    assert!(got.is_empty() && got.end_of_record() && got.iter().next().is_none());
    theirs.send(b"").unwrap();
    theirs.shutdown(Shutdown::Write).unwrap();
    ours.wait_readable().unwrap();
    assert_eq!(ours.recv(&mut []).unwrap().unwrap().len, 0);
    assert_eq!(ours.recv(&mut []).unwrap(), None);
    assert!(ours.recv_leases().unwrap().is_none());
    // The other direction is open, and then shut too.
    ours.send(b"still").unwrap();
    assert_eq!(theirs.recv_leases().unwrap().unwrap().to_vec(), b"still");
    let error = theirs.send(b"late").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::BrokenPipe);
}

#[test]
fn all_that_was_sent_arrives_before_the_end() {
    let hub = Hub::with(|builder| builder);
    let process = hub.process_with(|builder| builder.queue_size(16).transmit_buffers(4096));
    let (ours, theirs) = hub.joined(&process);
    // More messages than slots: the rest is queued, and leaves before the end.
    theirs.send(&[7; 200_000]).unwrap();
    drop(theirs);
    // Also of an endpoint that is being dropped.
    drop(process);
    assert_eq!(ours.recv_leases().unwrap().unwrap().to_vec(), [7; 200_000]);
    assert!(ours.recv_leases().unwrap().is_none());
}

/// The receive time-out of the public test suite: 1 s, within 0.25 s.
#[test]
fn calls_that_wait_give_up_in_time() {
    let hub = Hub::new();
    let process = hub.process();
    let (ours, theirs) = hub.joined(&process);
    theirs
        .set_read_timeout(Some(Duration::from_secs(1)))
        .unwrap();
    let began = Instant::now();
    let error = theirs.recv(&mut [0; 4]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    let took = began.elapsed();
    assert!(took >= Duration::from_millis(750), "{took:?}");
    assert!(took < Duration::from_secs(10), "{took:?}");
    theirs.set_nonblocking(true).unwrap();
    let error = theirs.recv_leases().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WouldBlock);
    assert!(theirs.set_read_timeout(Some(Duration::ZERO)).is_err());
    // No part of a message is sent that does not fit the free space.
    theirs.send(&[1; 200_000]).unwrap();
    let error = theirs.send(&[2; 100_000]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WouldBlock);
    assert_eq!(ours.recv_leases().unwrap().unwrap().to_vec(), [1; 200_000]);
    let mut poller = Poller::new(Wait::Sleep);
    poller.add_seqpacket(&theirs, 1, Readiness::WRITABLE);
    assert_eq!(
        poller.wait(Some(PATIENCE)).unwrap().len(),
        1,
        "there is room"
    );
    theirs.send(&[3; 100_000]).unwrap();
    assert_eq!(ours.recv_leases().unwrap().unwrap().to_vec(), [3; 100_000]);
}

#[test]
fn a_poller_reports_readable_for_complete_messages_only() {
    let hub = Hub::new();
    let process = hub.process();
    let listener = process.listen_seqpacket(super::PORT, 1).unwrap();
    let mut poller = Poller::new(Wait::Sleep);
    poller.add_seqpacket_listener(&listener, 1);
    assert!(poller.wait(Some(Duration::ZERO)).unwrap().is_empty());
    let to = zerosock::Address::new(process.cid(), super::PORT);
    let ours = hub.host.begin_connect_seqpacket(to).unwrap();
    assert_eq!(poller.wait(Some(PATIENCE)).unwrap()[0].key, 1);
    let (theirs, _) = listener.accept().unwrap();
    ours.wait_connected().unwrap();
    let mut poller = Poller::new(Wait::Sleep);
    poller.add_seqpacket(&theirs, 2, Readiness::READABLE);
    assert!(poller.wait(Some(Duration::ZERO)).unwrap().is_empty());
    ours.send(b"").unwrap();
    assert_eq!(
        poller.wait(Some(PATIENCE)).unwrap()[0].key,
        2,
        "an empty one too"
    );
    assert_eq!(theirs.unread(), 1);
    theirs.recv(&mut []).unwrap().unwrap();
    assert!(poller.wait(Some(Duration::ZERO)).unwrap().is_empty());
    ours.shutdown(Shutdown::Write).unwrap();
    assert_eq!(poller.wait(Some(PATIENCE)).unwrap()[0].key, 2);
    assert_eq!(theirs.recv(&mut []).unwrap(), None);
}

#[test]
fn a_reset_is_reported_after_complete_messages() {
    let hub = Hub::new();
    let process = hub.process();
    let (ours, theirs) = hub.joined(&process);
    theirs.send(b"whole").unwrap();
    ours.wait_readable().unwrap();
    theirs.reset();
    let reset = |error: &std::io::Error| error.kind() == ErrorKind::ConnectionReset;
    let mut out = [0; 10];
    assert_eq!(ours.recv(&mut out).unwrap().unwrap().len, 5);
    let error = ours.recv(&mut out).unwrap_err();
    assert!(reset(&error), "{error}");
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
    assert_eq!(inner, Some(&StreamError::Reset));
    assert_eq!(ours.state(), StreamState::Reset);
    assert!(reset(&ours.send(b"late").unwrap_err()));
}
