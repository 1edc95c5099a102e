//! A process takes its memory back, or exits with it, while the host reads or writes that memory
//! with declared trust; and closures that panic. The process writes its rings by hand.

use std::io::{ErrorKind, Write};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc;
use std::{io, thread};

use zerosock::attach::{AttachRequest, Client};
use zerosock::driver::{Frontend, FrontendError};
use zerosock::vsock::{Stream, StreamError};
use zerosock_proto::wire::vsock::Op;

use super::hub::Hub;
use super::trust::trust;
use super::{FOR_EVER, PORT, patient};
use crate::common::raw::{GUEST, NEXT, RX, RawGuest, TX, WRITE, emit};
use crate::common::{PATIENCE, assert_bytes, bytes, eventually, this_thread, until_asleep};

/// An attached process, and the client that has its lease.
pub(crate) fn process(hub: &Hub) -> (RawGuest, Client) {
    let attached = Client::connect(&hub.path(), &AttachRequest::default()).unwrap();
    let frontend = Frontend::from_stream(attached.socket, PATIENCE).unwrap();
    (RawGuest::over(frontend, true), attached.control)
}

fn hub() -> Hub {
    Hub::with(|builder| builder.hold(FOR_EVER).trust_processes(trust()))
}

fn joined(hub: &Hub, guest: &mut RawGuest) -> Stream {
    let listener = hub.listen(PORT, 4).unwrap();
    guest.connect(77, PORT.get());
    patient(listener.accept_timeout(PATIENCE).unwrap().0)
}

fn send(guest: &mut RawGuest, text: &[u8]) {
    guest.send(guest.header(77, PORT.get(), Op::Rw), text);
}

#[test]
fn a_queue_that_stops_waits_for_a_trusted_read() {
    let hub = hub();
    let (mut guest, _place) = process(&hub);
    let stream = joined(&hub, &mut guest);
    send(&mut guest, b"bytes");
    let lease = stream.recv().unwrap().unwrap();
    let reading = lease.read();
    let used = guest.used_index(TX);
    thread::scope(|scope| {
        let (tell, told) = mpsc::channel();
        let frontend = &mut guest.frontend;
        let stop = scope.spawn(move || {
            tell.send(this_thread()).unwrap();
            frontend.get_vring_base(TX as u32).unwrap()
        });
        // It has asked, and waits for the answer; and what is asked later has been done: it goes
        // the same way, through the thread that controls and the one that works.
        until_asleep(&told.recv().unwrap());
        drop(process(&hub));
        assert!(!stop.is_finished() && !reading.is_revoked());
        assert_eq!(reading.as_slice().unwrap(), b"bytes");
        drop(reading);
        assert_eq!(stop.join().unwrap(), used.wrapping_add(1));
    });
    let reading = lease.read();
    assert!(!reading.is_revoked(), "moved");
    assert_eq!(reading.as_slice().unwrap(), b"bytes");
}

#[test]
fn a_trusted_read_beyond_the_time_limit_costs_the_process_its_device() {
    let hub = hub();
    let (mut guest, _place) = process(&hub);
    let stream = joined(&hub, &mut guest);
    send(&mut guest, b"bytes");
    let lease = stream.recv().unwrap().unwrap();
    let reading = lease.read();
    let used = guest.used_index(TX);
    let error = guest.frontend.get_vring_base(TX as u32).unwrap_err();
    let closed = matches!(error, FrontendError::Closed | FrontendError::Io(_));
    assert!(closed, "{error}");
    assert!(reading.is_revoked());
    assert_eq!(guest.used_index(TX), used, "it has not got it back");
    // The bytes can still be copied; no slice of them is given.
    assert_eq!(reading.as_slice(), None);
    assert_eq!(reading.to_vec(), b"bytes");
    drop(reading);
    let (error, lease) = lease.into_bytes().unwrap_err();
    assert_eq!(error, StreamError::Revoked);
    assert!(lease.read().is_revoked());
    let error = stream.recv().map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
}

#[test]
fn a_loan_of_a_detached_process_cannot_be_written() {
    let hub = hub();
    let (mut guest, place) = process(&hub);
    let stream = joined(&hub, &mut guest);
    let (mut empty, mut begun) = (stream.loan(100).unwrap(), stream.loan(100).unwrap());
    assert!(empty.is_in_place() && begun.is_in_place());
    begun.write_all(b"begun").unwrap();
    let (memory, used) = (guest.memory.clone(), guest.rings[RX].used + 2);
    assert_eq!(guest.used_index(RX), 1);
    let mut slices = [empty.as_mut_slice().unwrap(), begun.as_mut_slice().unwrap()];
    drop((guest, place));
    eventually("gone", || {
        stream.state() != zerosock::driver::StreamState::Connected
    });
    slices[0][0] = 1;
    drop(slices);
    empty.write_all(b"too late").unwrap();
    assert!(!empty.is_in_place());
    let error = begun.write_all(b"too late").unwrap_err();
    let source = error
        .get_ref()
        .and_then(|e| e.downcast_ref::<StreamError>());
    assert_eq!(source, Some(&StreamError::Revoked));
    assert_eq!(
        begun.read_from(io::stdin()).unwrap_err().kind(),
        ErrorKind::ConnectionReset
    );
    let read = |addr, len| {
        let (mut pieces, mut out) = (Vec::new(), vec![0; len]);
        memory.translate(addr, len as u32, &mut pieces).unwrap();
        memory.read(&pieces, 0, &mut out);
        out
    };
    assert_eq!(read(used, 2), [1, 0], "it has not got them back");
    let all = read(GUEST, 4 << 20);
    assert!(!all.windows(8).any(|at| at == b"too late"));
    assert!(all.windows(5).any(|at| at == b"begun"));
}

#[test]
fn bytes_in_several_pieces_are_filled_by_slices_and_shared_by_copying() {
    let hub = hub();
    let (mut guest, _place) = process(&hub);
    let stream = joined(&hub, &mut guest);
    // The next receive buffer: the header, and two parts.
    let head = 1;
    guest.desc(RX, head, guest.buffer(RX, head), 44, WRITE | NEXT, 62);
    guest.desc(RX, 62, guest.buffer(RX, 62), 1000, WRITE | NEXT, 63);
    guest.desc(RX, 63, guest.buffer(RX, 63), 1000, WRITE, 0);
    let mut loan = stream.loan(1500).unwrap();
    assert!(loan.is_in_place());
    assert_eq!(loan.as_mut_slice().err(), Some(StreamError::Scattered));
    loan.write_all(b"front").unwrap();
    let mut text = &bytes(1, 1495)[..];
    let filled = loan.with_io_slices(|slices| {
        assert_eq!(slices.len(), 2);
        io::Read::read_vectored(&mut text, slices)
    });
    assert_eq!(filled.unwrap(), 1495);
    assert_eq!(loan.send().unwrap(), 1500);
    eventually("there", || guest.used_index(RX) == 2);
    let mut got = vec![0; 1500];
    let (one, two) = got.split_at_mut(1000);
    guest.read(guest.buffer(RX, 62), one);
    guest.read(guest.buffer(RX, 63), two);
    assert_eq!(&got[..5], b"front");
    assert_bytes(&got[5..], &bytes(1, 1495));
    // In the other direction.
    let (a, b) = (guest.tx_pair(), guest.tx_pair());
    let mut header = guest.header(77, PORT.get(), Op::Rw);
    header.len = 2000;
    guest.write(guest.buffer(TX, a), &emit(&header));
    guest.write(guest.buffer(TX, a + 1), &bytes(2, 1000));
    guest.write(guest.buffer(TX, b), &bytes(3, 1000));
    guest.desc(TX, a, guest.buffer(TX, a), 44, NEXT, a + 1);
    guest.desc(TX, a + 1, guest.buffer(TX, a + 1), 1000, NEXT, b);
    guest.desc(TX, b, guest.buffer(TX, b), 1000, 0, 0);
    guest.make_available(TX, a);
    guest.kick(TX);
    let lease = stream.recv().unwrap().unwrap().into_owned();
    assert!(lease.is_in_place() && lease.read().as_slice().is_none());
    assert_eq!(lease.read_as::<u8>(1000), Some(bytes(3, 1)[0]));
    let shared = lease.into_bytes().unwrap();
    assert_bytes(&shared, &[bytes(2, 1000), bytes(3, 1000)].concat());
}

#[test]
fn a_look_that_panics_loses_neither_buffer_nor_credit() {
    let hub = Hub::with(|builder| builder);
    let process = hub.process("p");
    let (ours, theirs) = hub.joined(&process);
    let message = bytes(1, 1000);
    let received = |to| match std::ptr::eq(to, &ours) {
        true => hub.stats().received,
        false => process.stats().received,
    };
    for (from, to) in [(&ours, &theirs), (&theirs, &ours)] {
        let before = received(to);
        // More than the window, and than the queue has buffers. What has arrived is taken straight
        // from the ring, or, every other time, from what was held.
        for round in 0..1000 {
            (&*from).write_all(&message).unwrap();
            if round % 2 == 0 {
                to.wait_readable().unwrap();
            }
            let look = || to.recv_each(8, |_| resume_unwind(Box::new("in the middle")));
            catch_unwind(AssertUnwindSafe(look)).unwrap_err();
        }
        assert_eq!(to.unread(), 0);
        assert_eq!(received(to) - before, 1_000_000);
        (&*from).write_all(b"last").unwrap();
        assert_eq!(to.recv().unwrap().unwrap().to_vec(), b"last");
    }
}
