//! Flow control: a reader that stops reading stops only its own senders.

use std::io::Write;
use std::thread;
use std::time::Duration;

use zerosock_cli::vm::pattern::{Pattern, sha256};
use zerosock_testkit::protocol::{Command, SocketOption};

use crate::lab::{Lab, STEP, expected, read_exact, read_to_end, write};

const STALLED: u64 = 12 << 20;
const OTHERS: u64 = 1 << 20;
/// Sizes of small writes, as the public test suite of vsock draws them.
const SMALL: &[usize] = &[129, 512, 200, 333, 130, 480, 257];

pub(crate) fn stalled_host_reader(lab: &Lab) {
    let vm = &lab.a;
    let (stalled, unread) = vm.to_host();
    let stuck = vm.send(stalled, 60, STALLED, &[65536]);
    let others: Vec<_> = (0..20).map(|_| vm.to_host()).collect();
    let sending: Vec<_> = others
        .iter()
        .enumerate()
        .map(|(seed, (socket, _))| vm.send(*socket, seed as u64, OTHERS, &[65536]))
        .collect();
    thread::scope(|scope| {
        let reading: Vec<_> = others
            .iter()
            .map(|(_, stream)| scope.spawn(|| read_exact(stream, OTHERS)))
            .collect();
        for (seed, reading) in reading.into_iter().enumerate() {
            assert_eq!(reading.join().expect("read"), expected(seed as u64, OTHERS));
        }
    });
    for each in sending {
        assert_eq!(each.wait(STEP).expect("sent").errno, None);
    }
    // The stalled reader continues now and gets every byte.
    assert_eq!(read_exact(&unread, STALLED), expected(60, STALLED));
    assert_eq!(stuck.wait(STEP).expect("sent").bytes, STALLED);
    vm.close(stalled);
    others.iter().for_each(|(socket, _)| vm.close(*socket));
}

pub(crate) fn stalled_guest_reader(lab: &Lab) {
    let vm = &lab.a;
    let (stalled, stuck) = vm.to_guest();
    let writing = thread::spawn(move || write(&stuck, 61, STALLED, &[65536]));
    let others: Vec<_> = (0..20).map(|_| vm.to_guest()).collect();
    let receiving: Vec<_> = others
        .iter()
        .map(|(socket, _)| vm.receive(*socket, Some(OTHERS)))
        .collect();
    thread::scope(|scope| {
        for (seed, (_, stream)) in others.iter().enumerate() {
            scope.spawn(move || write(stream, seed as u64, OTHERS, &[65536]));
        }
    });
    for (seed, each) in receiving.into_iter().enumerate() {
        let digest = each.wait(STEP).expect("received").sha256;
        assert_eq!(digest, Some(expected(seed as u64, OTHERS)));
    }
    let received = vm.receive(stalled, None).wait(STEP).expect("received");
    assert_eq!(received.bytes, STALLED);
    assert_eq!(received.sha256, Some(writing.join().expect("written")));
    vm.close(stalled);
    others.iter().for_each(|(socket, _)| vm.close(*socket));
}

/// 128 KiB and one byte are sent into a buffer of 128 KiB: the last byte needs a credit update. A
/// receiver that has read half of it and now waits for the rest at once must be woken. Linux sends
/// that update when SO_RCVLOWAT is set only since 6.8; an older one answers when the device asks,
/// which it does while the window stays full.
pub(crate) fn receive_low_water(lab: &Lab) {
    const BUFFER: u64 = 128 << 10;
    let vm = &lab.a;
    let (socket, stream) = vm.to_guest();
    let set = |option| assert_eq!(vm.run(Command::Set { socket, option }).errno, None);
    set(SocketOption::BufferSize(BUFFER));
    set(SocketOption::ReceiveLowWater(BUFFER as u32));
    let all = Pattern::bytes(70, BUFFER as usize + 1);
    let (most, last) = all.split_at(BUFFER as usize - 1000);
    (&stream).write_all(most).expect("written");
    // The mark is tested here, so only time remains to wait for.
    let early = vm.run(Command::Poll {
        socket,
        timeout_ms: 200,
    });
    assert!(!early.end, "readable below the mark");
    (&stream).write_all(last).expect("written");
    let timeout_ms = Duration::from_secs(30).as_millis() as u32;
    let full = vm.run(Command::Poll { socket, timeout_ms });
    assert!(full.end, "the buffer never filled");
    let first = 64 << 10;
    let head = vm
        .receive(socket, Some(first))
        .wait(STEP)
        .expect("received");
    assert_eq!(head.sha256, Some(expected(70, first)));
    let rest = BUFFER + 1 - first;
    set(SocketOption::ReceiveLowWater(rest as u32));
    let woken = vm.run(Command::Poll { socket, timeout_ms });
    assert!(
        woken.end,
        "no credit update, or the device did not act on it"
    );
    let tail = vm.receive(socket, Some(rest)).wait(STEP).expect("received");
    assert_eq!(tail.sha256, Some(sha256(&all[first as usize..])));
    vm.close(socket);
}

/// Many small packets to a reader that starts late: no reset, no loss.
pub(crate) fn small_packets_to_host(lab: &Lab) {
    const LEN: u64 = 1_500_000;
    let vm = &lab.a;
    let (socket, stream) = vm.to_host();
    let sending = vm.send(socket, 80, LEN, SMALL);
    // Another connection's exchange shows that the device has continued meanwhile.
    let (other, there) = vm.to_host();
    let also = vm.send(other, 81, OTHERS, &[65536]);
    assert_eq!(read_exact(&there, OTHERS), expected(81, OTHERS));
    assert_eq!(also.wait(STEP).expect("sent").errno, None);
    assert_eq!(read_exact(&stream, LEN), expected(80, LEN));
    let sent = sending.wait(STEP).expect("sent");
    assert_eq!((sent.errno, sent.bytes), (None, LEN));
    vm.close(other);
    vm.close(socket);
    assert_eq!(read_to_end(&stream).1, 0);
}

/// The same to the guest. Linux from 6.12.92 resets a connection with about 455 unread packets of
/// any size: the device must send fewer and larger ones.
pub(crate) fn small_packets_to_guest(lab: &Lab) {
    const LEN: u64 = 1_500_000;
    let vm = &lab.a;
    let (socket, stream) = vm.to_guest();
    let writing = thread::spawn(move || write(&stream, 82, LEN, SMALL));
    let (other, there) = vm.to_guest();
    let also = vm.receive(other, Some(OTHERS));
    let digest = write(&there, 83, OTHERS, &[65536]);
    assert_eq!(also.wait(STEP).expect("received").sha256, Some(digest));
    let received = vm.receive(socket, None).wait(STEP).expect("received");
    assert_eq!((received.errno, received.bytes), (None, LEN));
    assert_eq!(received.sha256, Some(writing.join().expect("written")));
    vm.close(other);
    vm.close(socket);
}
