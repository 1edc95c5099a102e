//! Loans for messages: where their bytes are, when the peer sees them, and what returns of loans
//! that are not sent or cannot be.

use std::io::{ErrorKind, Write};

use zerosock::vsock::{MessageLoan, SeqPacket, StreamError, Trust};
use zerosock_proto::vsock::messages::MAX_SENT_EMPTY;
use zerosock_proto::wire::vsock::{HEADER_LEN, Op, Repr, SEQ_EOM, SEQ_EOR};

use super::in_place::place;
use super::paths::Hub;
use super::raw::{OURS, Raw};
use crate::common::raw::{EVENT, RX, RX_LEN, SIZE, TX};
use crate::common::{assert_bytes, bytes, eventually};
use crate::hosting::Hosted;

/// Bytes of a packet with a payload that fills a buffer of the raw guest.
const FULL: u32 = HEADER_LEN as u32 + RX_LEN;

fn places(loan: &mut MessageLoan<'_>) -> Vec<(String, usize)> {
    let slices = loan.as_mut_slices().unwrap();
    slices.iter().map(|slice| place(slice.as_ptr())).collect()
}

fn inner(error: &std::io::Error) -> Option<&StreamError> {
    error.get_ref().and_then(|inner| inner.downcast_ref())
}

#[test]
fn a_message_is_written_where_its_receiver_reads_it() {
    // SAFETY: nothing that is on lease is written in this test, and nothing on loan is read.
    let trust = unsafe { Trust::declare() };
    let hub = Hub::with(|builder| builder.hold(super::FOR_EVER).trust_processes(trust));
    let process = hub.process_with(|builder| builder.trust_host(trust));
    let (ours, theirs) = hub.joined(&process);
    let text = bytes(1, 200_000);
    for (from, to) in [(&theirs, &ours), (&ours, &theirs)] {
        let mut loan = from.loan(200_000).unwrap();
        assert!(loan.is_in_place());
        assert_eq!(loan.capacity(), 200_000);
        let written = places(&mut loan);
        assert!(written.len() >= 4, "{written:?}");
        let mut at = 0;
        for slice in &mut loan.as_mut_slices().unwrap() {
            let len = slice.len();
            slice.copy_from_slice(&text[at..at + len]);
            at += len;
        }
        loan.set_filled(at);
        assert_eq!(loan.send_eor().unwrap(), 200_000);
        let message = to.recv_leases().unwrap().unwrap();
        assert!(message.is_in_place() && message.end_of_record());
        let read: Vec<_> = message.iter().map(|l| place(l.read().as_ptr())).collect();
        assert_eq!(read, written);
        assert_bytes(&message.to_vec(), &text);
    }
    for stats in [hub.host.stats(), process.stats()] {
        assert_eq!((stats.sent, stats.sent_in_place), (200_000, 200_000));
        assert_eq!(stats.received_in_place, 200_000);
        let copies = (stats.copied_in, stats.copied_aside, stats.copied_out);
        assert_eq!(copies, (0, 0, 0));
    }
}

#[test]
fn a_loan_is_not_visible_to_the_receiver_before_it_is_sent() {
    let hosted = Hosted::new();
    let (mut raw, socket) = Raw::joined(&hosted);
    let text = bytes(2, 10_000);
    let mut loan = socket.loan(10_000).unwrap();
    assert!(loan.is_in_place());
    loan.write_all(&text).unwrap();
    assert_eq!(loan.write(b"more").unwrap(), 0, "it is full");
    assert_eq!(socket.unread(), 0);
    // Whatever the host does meanwhile.
    let before = hosted.stats().packets_received;
    let update = raw.header(OURS, Op::CreditUpdate);
    raw.guest.send(update, &[]);
    raw.guest.wait_tx_done();
    eventually("taken in", || hosted.stats().packets_received > before);
    assert_eq!(raw.came_back(), []);
    assert_eq!(loan.send_eor().unwrap(), 10_000);
    let last = HEADER_LEN as u32 + 10_000 - 2 * RX_LEN;
    let first = 1; // The response lay in buffer 0.
    let all = [(first, FULL), (first + 1, FULL), (first + 2, last)];
    assert_eq!(raw.came_back(), all, "at once, and in order");
    let mut got = Vec::new();
    for flags in [0, 0, SEQ_EOM | SEQ_EOR] {
        let (header, payload) = raw.guest.recv_op(OURS, Op::Rw);
        assert_eq!(header.flags, flags);
        got.extend(payload);
    }
    assert_bytes(&got, &text);
}

#[test]
fn unused_buffers_are_unpopped() {
    let hosted = Hosted::new();
    let (mut raw, socket) = Raw::joined(&hosted);
    // Dropped unsent, many times.
    for _ in 0..1000 {
        let mut loan = socket.loan(30_000).unwrap();
        assert!(loan.is_in_place());
        loan.write_all(b"lost").unwrap();
    }
    // A loan longer than the message: two buffers of eight are used.
    let mut loan = socket.loan(32_768).unwrap();
    loan.write_all(&[1; 5000]).unwrap();
    loan.send().unwrap();
    // From another thread, with the first in line for the lock.
    let loan = socket.loan(30_000).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || drop(loan));
    });
    socket.send(b"next").unwrap();
    let rest = HEADER_LEN as u32 + 5000 - RX_LEN;
    let next = HEADER_LEN as u32 + 4;
    assert_eq!(raw.came_back(), [(1, FULL), (2, rest), (3, next)]);
    // With a later loan behind them, buffers can only be returned empty.
    let loan = socket.loan(8000).unwrap();
    socket.send(b"next").unwrap();
    assert_eq!(raw.came_back(), [(6, next)]);
    drop(loan);
    eventually("given back", || raw.guest.used_index(RX) == 7);
    assert_eq!(raw.came_back(), [(5, 0), (4, 0)]);
    // All credit is back, except for the sent bytes.
    assert_eq!(socket.loan(262_144 - 5008).unwrap().capacity(), 257_136);
    socket.set_nonblocking(true).unwrap();
    let error = socket.loan(262_144 - 5007).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WouldBlock);
}

#[test]
fn slots_of_what_is_not_sent_are_used_again() {
    let hub = Hub::new();
    let process = hub.process();
    let (ours, theirs) = hub.joined(&process);
    for round in 0..1000 {
        let mut loan = theirs.loan(262_144).unwrap();
        assert!(loan.is_in_place());
        loan.write_all(b"some").unwrap();
        if round % 10 == 0 {
            loan.send().unwrap();
            assert_eq!(ours.recv_leases().unwrap().unwrap().to_vec(), b"some");
        }
    }
    assert_eq!(process.stats().sent_in_place, 400);
}

/// A loan above the window gets EMSGSIZE; any other has credit for all its bytes before it begins.
#[test]
fn a_loan_has_credit_for_all_of_it_or_is_none() {
    let hub = Hub::new();
    let process = hub.process();
    let (ours, theirs) = hub.joined(&process);
    for (from, to) in [(&theirs, &ours), (&ours, &theirs)] {
        let error = from.loan(262_145).unwrap_err();
        assert_eq!(inner(&error), Some(&StreamError::TooLong));
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        assert_eq!(
            inner(&from.loan(usize::MAX).unwrap_err()),
            Some(&StreamError::TooLong)
        );
        from.set_nonblocking(true).unwrap();
        let loan = from.loan(200_000).unwrap();
        let error = from.loan(100_000).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::WouldBlock);
        let error = from.send(&[0; 100_000]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::WouldBlock);
        drop(loan);
        let mut loan = from.loan(262_144).unwrap();
        loan.write_all(&[1; 262_144]).unwrap();
        loan.send().unwrap();
        let error = from.loan(1).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::WouldBlock);
        assert_eq!(to.recv_leases().unwrap().unwrap().len(), 262_144);
        from.set_nonblocking(false).unwrap();
        // It waits until bytes are read.
        let mut loan = from.loan(262_144).unwrap();
        loan.write_all(b"short").unwrap();
        loan.send().unwrap();
        assert_eq!(to.recv_leases().unwrap().unwrap().to_vec(), b"short");
    }
}

#[test]
fn loans_are_sent_in_any_order_and_empty_ones_are_messages() {
    let hub = Hub::new();
    let process = hub.process();
    let (ours, theirs) = hub.joined(&process);
    for (from, to) in [(&theirs, &ours), (&ours, &theirs)] {
        let mut first = from.loan(70_000).unwrap();
        let mut second = from.loan(70_000).unwrap();
        first.write_all(&[1; 70_000]).unwrap();
        // Not at the start of the message.
        second.write_at(69_999, &[2]).unwrap();
        second.write_at(0, &[2; 69_999]).unwrap();
        assert_eq!(second.filled(), 70_000);
        let (empty, none) = (from.loan(10).unwrap(), from.loan(0).unwrap());
        assert_eq!(none.capacity(), 0);
        second.send().unwrap();
        assert_eq!(empty.send_eor().unwrap(), 0);
        first.send().unwrap();
        assert_eq!(none.send().unwrap(), 0);
        from.send(b"last").unwrap();
        let message = to.recv_leases().unwrap().unwrap();
        assert_eq!(message.to_vec(), [2; 70_000]);
        let message = to.recv_leases().unwrap().unwrap();
        assert!(message.is_empty() && message.end_of_record());
        drop(message);
        let message = to.recv_leases().unwrap().unwrap();
        assert_eq!(message.to_vec(), [1; 70_000]);
        drop(message);
        let message = to.recv_leases().unwrap().unwrap();
        assert!(message.is_empty() && !message.end_of_record());
        assert_eq!(to.recv_leases().unwrap().unwrap().to_vec(), b"last");
    }
}

/// Loans of empty messages are bounded by their reader.
#[test]
fn empty_loans_wait_for_their_reader() {
    let hub = Hub::new();
    let process = hub.process();
    let (ours, theirs) = hub.joined(&process);
    theirs.set_nonblocking(true).unwrap();
    let mut sent = 0;
    let late = loop {
        match theirs.loan(1).unwrap().try_send() {
            Ok(_) => sent += 1,
            Err((error, loan)) => {
                assert_eq!(error.kind(), ErrorKind::WouldBlock);
                break loan;
            }
        }
        assert!(sent < 1000, "there is no bound");
    };
    for _ in 0..sent {
        assert_eq!(ours.recv(&mut []).unwrap().unwrap().len, 0);
    }
    theirs.set_nonblocking(false).unwrap();
    late.send().unwrap();
    assert_eq!(ours.recv(&mut []).unwrap().unwrap().len, 0);
}

/// A loan with private memory takes one of the guest's buffers when it is sent, and none if it may
/// not begin.
#[test]
fn a_loan_that_may_not_begin_takes_no_buffer() {
    let hosted = Hosted::new();
    let (mut raw, socket) = Raw::joined(&hosted);
    socket.set_nonblocking(true).unwrap();
    let mut in_place = Vec::new();
    let mut late = loop {
        let loan = socket.loan(1).unwrap();
        match loan.is_in_place() {
            true => in_place.push(loan),
            false => break loan,
        }
    };
    assert_eq!(in_place.len(), usize::from(SIZE) / 8);
    // The guest never returns credit.
    for _ in 0..MAX_SENT_EMPTY {
        socket.send(b"").unwrap();
        for (buffer, _) in raw.came_back() {
            raw.guest.make_available(RX, buffer);
        }
        raw.guest.kick(RX);
    }
    for _ in 0..1000 {
        let (error, again) = late.try_send().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::WouldBlock);
        late = again;
    }
    drop((late, in_place));
    // Every buffer is used or returned.
    while socket.send(b"x").is_ok() {}
    eventually("all buffers back", || {
        raw.guest.used_index(RX) == raw.guest.avail_index(RX)
    });
}

/// Beyond an eighth of the queue a loan gets no posted buffer; its bytes arrive as a copy.
#[test]
fn beyond_the_bounds_a_loan_is_copied() {
    let hub = Hub::new();
    // 16 buffers of 8 KiB in each direction: two may be lent, or four of 32.
    let process = hub.process_with(|builder| {
        builder
            .queue_size(32)
            .transmit_buffers(8192)
            .receive_buffers(8192)
    });
    let (ours, theirs) = hub.joined(&process);
    let long = bytes(3, 250_000);
    let loan = |socket: &SeqPacket| -> Vec<u8> {
        let mut loan = socket.loan(250_000).unwrap();
        assert!(!loan.is_in_place());
        loan.write_all(&long[..100]).unwrap();
        loan.write_at(100, &long[100..]).unwrap();
        loan.send().unwrap();
        long.clone()
    };
    for (from, to, stats) in [
        (&theirs, &ours, &(|| process.stats()) as &dyn Fn() -> _),
        (&ours, &theirs, &|| hub.host.stats()),
    ] {
        std::thread::scope(|scope| {
            scope.spawn(|| loan(from));
            let message = to.recv_leases().unwrap().unwrap();
            assert_bytes(&message.to_vec(), &long);
        });
        let stats: zerosock::vsock::EndpointStats = stats();
        assert!((8192..50_000).contains(&stats.sent_in_place), "{stats:?}");
        assert_eq!(stats.sent_in_place + stats.copied_in, 250_000);
    }
}

/// The queue stops during a loan: the loan's bytes are kept, and sent when the queue runs again.
#[test]
fn a_loan_outlasts_a_pause_of_its_guest() {
    let hosted = Hosted::new();
    let (mut raw, socket) = Raw::joined(&hosted);
    let text = bytes(4, 20_000);
    let mut loan = socket.loan(20_000).unwrap();
    loan.write_all(&text[..10_000]).unwrap();
    assert!(loan.is_in_place());
    let stop = |queue: usize| raw.guest.frontend.get_vring_base(queue as u32).unwrap();
    let bases: Vec<u16> = [RX, TX, EVENT].map(stop).to_vec();
    let back = raw.came_back();
    assert_eq!(back.len(), 5, "{back:?}");
    assert!(back.iter().all(|(_, len)| *len == 0));
    loan.write_all(&text[10_000..]).unwrap();
    assert!(!loan.is_in_place());
    raw.guest.start(&bases).unwrap();
    assert_eq!(loan.send().unwrap(), 20_000);
    let mut got = Vec::new();
    loop {
        let (header, payload) = raw.guest.recv_op(OURS, Op::Rw);
        got.extend(payload);
        if header.flags & SEQ_EOM != 0 {
            break;
        }
    }
    assert_bytes(&got, &text);
}

/// A reset during a loan: the loan cannot be sent, and its buffers return to the guest.
#[test]
fn a_loan_of_an_ended_connection_is_returned() {
    let hosted = Hosted::new();
    let (mut raw, socket) = Raw::joined(&hosted);
    let mut loan = socket.loan(20_000).unwrap();
    loan.write_all(&[1; 20_000]).unwrap();
    let reset = raw.header(OURS, Op::Rst);
    raw.guest.send(reset, &[]);
    let error = socket.recv(&mut []).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    let (error, loan) = loan.try_send().unwrap_err();
    assert_eq!(inner(&error), Some(&StreamError::Reset));
    let (error, loan) = loan.try_send().unwrap_err();
    assert_eq!(inner(&error), Some(&StreamError::Reset));
    drop(loan);
    assert_eq!(
        inner(&socket.loan(1).unwrap_err()),
        Some(&StreamError::Reset)
    );
    drop(socket);
    // All can be lent except a quarter: an eighth to each connection.
    let sockets: Vec<SeqPacket> = (0..5).map(|n| raw.connect(&hosted, 6000 + n)).collect();
    let loans: Vec<_> = sockets.iter().map(|s| s.loan(32_768).unwrap()).collect();
    let whole = loans.iter().filter(|loan| loan.is_in_place()).count();
    assert!(whole >= 4, "{loans:?}; of {SIZE}");
}

/// The peer shuts its receiving side during a loan.
#[test]
fn a_loan_to_a_peer_that_has_shut_receiving_is_refused() {
    let hosted = Hosted::new();
    let (mut raw, socket) = Raw::joined(&hosted);
    let mut loan = socket.loan(5000).unwrap();
    loan.write_all(&[1; 5000]).unwrap();
    let deaf = Repr {
        flags: 1,
        ..raw.header(OURS, Op::Shutdown)
    };
    raw.guest.send(deaf, &[]);
    socket.set_nonblocking(true).unwrap();
    eventually("heard", || {
        socket
            .send(b"")
            .is_err_and(|e| e.kind() == ErrorKind::BrokenPipe)
    });
    let error = loan.send().unwrap_err();
    assert_eq!(inner(&error), Some(&StreamError::PeerShutdown));
}

#[test]
fn bytes_of_a_loan_that_were_skipped_are_zeros() {
    let hub = Hub::new();
    let process = hub.process();
    let (ours, theirs) = hub.joined(&process);
    for (from, to) in [(&theirs, &ours), (&ours, &theirs)] {
        // Every buffer has held earlier bytes.
        for _ in 0..64 {
            from.send(&[0xee; 70_000]).unwrap();
            assert_eq!(to.recv_leases().unwrap().unwrap().len(), 70_000);
        }
        let check = |fill: &dyn Fn(&mut MessageLoan<'_>), expected: Vec<u8>| {
            let mut loan = from.loan(70_000).unwrap();
            assert!(loan.is_in_place());
            fill(&mut loan);
            assert_eq!(loan.filled(), expected.len());
            loan.send().unwrap();
            assert_bytes(&to.recv_leases().unwrap().unwrap().to_vec(), &expected);
        };
        let across = |loan: &mut MessageLoan<'_>| {
            loan.write_at(3, b"some").unwrap();
            assert_eq!(loan.write_at(69_990, b"at the end").unwrap(), 10);
        };
        let middle = vec![0; 69_990 - 7];
        let expected = [&[0; 3], &b"some"[..], &middle, b"at the end"].concat();
        check(&across, expected);
        let none = |loan: &mut MessageLoan<'_>| {
            assert_eq!(loan.write_at(10, b"").unwrap(), 0);
            assert_eq!(loan.write_at(70_000, b"too far").unwrap(), 0);
        };
        check(&none, vec![]);
        let told = |loan: &mut MessageLoan<'_>| {
            loan.write_at(1, b"x").unwrap();
            loan.set_filled(69_000);
        };
        check(&told, [&b"\0x"[..], &[0; 68_998]].concat());
    }
}
