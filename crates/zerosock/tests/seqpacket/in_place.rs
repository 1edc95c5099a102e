//! No copy of a message between a process and the host, shown by counters and by address.

use zerosock::vsock::Trust;
use zerosock_proto::wire::vsock::{Op, SEQ_EOM};

use super::paths::Hub;
use super::raw::{OURS, Raw};
use crate::common::raw::{EVENT, RX, TX};
use crate::common::{assert_bytes, bytes};
use crate::hosting::Hosted;

/// File and offset of a byte: the same in every process that has it mapped.
pub(crate) fn place(at: *const u8) -> (String, usize) {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    for line in maps.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let hex = |word| usize::from_str_radix(word, 16).unwrap();
        let (from, to) = words[0].split_once('-').unwrap();
        if (hex(from)..hex(to)).contains(&at.addr()) {
            let file = format!("{} {}", words[3], words[4]);
            return (file, hex(words[2]) + at.addr() - hex(from));
        }
    }
    panic!("{at:?} is not mapped");
}

/// The file of the memory that a process shares, found by the place of a loan.
fn shared_by(stream: &zerosock::vsock::Stream) -> String {
    let mut loan = stream.loan(1).unwrap();
    assert!(loan.is_in_place());
    let slice = loan.as_mut_slice().unwrap();
    place(slice.as_ptr()).0
}

#[test]
fn a_message_is_received_where_its_sender_has_it() {
    // SAFETY: nothing that is on lease is written in this test.
    let trust = unsafe { Trust::declare() };
    let hub = Hub::new();
    let process = hub.process_with(|builder| builder.trust_host(trust));
    let streams = hub.host.listen(zerosock::Port::new(1), 1).unwrap();
    let to = zerosock::Address::new(zerosock::Cid::HOST, zerosock::Port::new(1));
    let stream = process.connect(to).unwrap();
    let memory = shared_by(&stream);
    drop(streams);
    let (ours, theirs) = hub.joined(&process);
    // Four packets of the process: 65536 bytes each, and the rest.
    theirs.send(&[5; 200_000]).unwrap();
    let message = ours.recv_leases().unwrap().unwrap();
    assert!(message.is_in_place());
    let lens: Vec<usize> = message.iter().map(|lease| lease.len()).collect();
    assert_eq!(lens, [65_536, 65_536, 65_536, 3392]);
    for lease in &message {
        assert_eq!(place(lease.read().as_ptr()).0, memory);
    }
    assert_eq!(message.to_vec(), [5; 200_000]);
    drop(message);
    // In the other direction: the process reads where the host has written.
    ours.send(&[6; 200_000]).unwrap();
    let message = theirs.recv_leases().unwrap().unwrap();
    assert!(message.is_in_place() && message.len() == 200_000);
    for lease in &message {
        assert_eq!(place(lease.read().as_ptr()).0, memory);
    }
    drop(message);
    for stats in [ours.stats(), theirs.stats()] {
        assert_eq!((stats.received, stats.sent), (200_000, 200_000));
        assert_eq!((stats.received_in_place, stats.sent_in_place), (200_000, 0));
    }
    for stats in [hub.host.stats(), process.stats()] {
        assert_eq!(stats.received_in_place, 200_000);
        assert_eq!((stats.copied_aside, stats.copied_out), (0, 0));
    }
}

/// Leases hold credit: the credit of a message returns as its leases are dropped.
#[test]
fn each_dropped_lease_returns_its_credit() {
    let hub = Hub::new();
    let process = hub.process();
    let (ours, theirs) = hub.joined(&process);
    theirs.send(&[1; 200_000]).unwrap();
    theirs.set_nonblocking(true).unwrap();
    let message = ours.recv_leases().unwrap().unwrap();
    assert!(theirs.send(&[2; 100_000]).is_err(), "62144 are free");
    let mut leases = message.into_iter();
    drop(leases.next());
    theirs.set_nonblocking(false).unwrap();
    theirs.send(&[2; 100_000]).unwrap();
    drop(leases);
    assert_eq!(ours.recv_leases().unwrap().unwrap().to_vec(), [2; 100_000]);
}

/// Leased bytes stay, whatever the guest does; its buffers return, and its credit returns once.
#[test]
fn leases_of_a_message_outlast_a_pause_and_a_reset() {
    let hosted = Hosted::new();
    let (mut raw, socket) = Raw::joined(&hosted);
    let text = bytes(7, 9000);
    let send = |raw: &mut Raw, flags: u32| {
        raw.part(OURS, 0, &text[..4000]);
        raw.part(OURS, 0, &text[4000..8000]);
        raw.part(OURS, flags, &text[8000..]);
    };
    send(&mut raw, SEQ_EOM);
    let paused = socket.recv_leases().unwrap().unwrap();
    assert_eq!(paused.iter().len(), 3);
    assert!(paused.is_in_place());
    // A message without an end yet is complete after the guest continues.
    raw.part(OURS, 0, b"half ");
    raw.part(OURS, 0, b"a ");
    let stop = |queue: usize| raw.guest.frontend.get_vring_base(queue as u32).unwrap();
    let bases: Vec<u16> = [RX, TX, EVENT].map(stop).to_vec();
    raw.guest.wait_tx_done();
    assert_bytes(&paused.to_vec(), &text);
    raw.guest.start(&bases).unwrap();
    raw.part(OURS, SEQ_EOM, b"message");
    let message = socket.recv_leases().unwrap().unwrap();
    assert_eq!(message.to_vec(), b"half a message");
    // All credit returns, also of leases that were moved.
    drop((message, paused));
    socket.send(b"told").unwrap();
    let (header, _) = raw.guest.recv_op(OURS, Op::Rw);
    assert_eq!(header.fwd_cnt, 9000 + 14);
    // Bytes leased at a reset stay until the lease is dropped.
    send(&mut raw, SEQ_EOM);
    let kept = socket.recv_leases().unwrap().unwrap();
    raw.part(OURS, 0, b"never ended");
    let reset = raw.header(OURS, Op::Rst);
    raw.guest.send(reset, &[]);
    let error = socket.recv(&mut []).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    assert_bytes(&kept.to_vec(), &text);
    drop(kept);
    raw.guest.wait_tx_done();
}
