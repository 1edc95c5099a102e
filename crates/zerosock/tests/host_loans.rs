//! Loans of a program that embeds the device: where their bytes are, and what happens to them when
//! the guest takes its buffers back or posts others.

use std::io::{ErrorKind, IoSlice, Seek, SeekFrom, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Instant;

use crate::common::driver::{Driver, StreamId};
use crate::common::raw::{RX, SIZE, WRITE};
use crate::common::{PATIENCE, assert_bytes, bytes, deadline, eventually, host};
use crate::hosting::Hosted;
use zerosock::Port;
use zerosock::vsock::Stream;
use zerosock_proto::vsock::pairs::rx_queue;
use zerosock_proto::wire::vsock::HEADER_LEN;

const PORT: Port = Port::new(701);

/// A connection of the guest's, and the program's side of it.
fn pair(hosted: &Hosted, guest: &mut Driver) -> (StreamId, Stream) {
    let listener = hosted.listen(PORT, 4).unwrap();
    let id = guest.wait_connect(host(701), deadline()).unwrap();
    let (stream, _) = listener.accept_timeout(PATIENCE).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    (id, stream)
}

#[test]
fn a_pause_does_not_wait_for_a_read_into_a_loan_that_blocks() {
    let hosted = Hosted::new();
    let mut guest = hosted.guest();
    let (id, stream) = pair(&hosted, &mut guest);
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (from, into) = rustix::pipe::pipe().unwrap();
    let ends: [(OwnedFd, OwnedFd); 2] = [(ours.into(), theirs.into()), (from, into)];
    for (from, into) in ends {
        let mut loan = stream.loan(1000).unwrap();
        assert!(loan.is_in_place());
        loan.write_all(b"before, ").unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        thread::scope(|scope| {
            let reader = scope.spawn(move || {
                tell.send(rustix::thread::gettid()).unwrap();
                loan.read_from(&from).map(|_| loan)
            });
            // It has nothing else to sleep on.
            let reading = told.recv().unwrap().as_raw_nonzero();
            eventually("in its read", || {
                let stat = std::fs::read_to_string(format!("/proc/self/task/{reading}/stat"));
                stat.unwrap().rsplit_once(") ").unwrap().1.starts_with('S')
            });
            // The main loop of a VMM does not wait for what our program reads.
            let bases = guest.suspend().unwrap();
            let rx = rx_queue(guest.queue_pair(id).unwrap());
            assert!(bases[usize::from(rx)] > 0 && !reader.is_finished());
            rustix::io::write(&into, b"written").unwrap();
            let loan = reader.join().unwrap().unwrap();
            assert_eq!((loan.filled(), loan.is_in_place()), (15, false));
            guest.resume(&bases).unwrap();
            assert_eq!(loan.send().unwrap(), 15);
        });
        let mut got = [0; 15];
        guest.wait_recv_exact(id, &mut got, deadline()).unwrap();
        assert_eq!(&got, b"before, written");
    }
}

#[test]
fn a_loan_is_filled_from_files_pipes_and_sockets() {
    let hosted = Hosted::new();
    let mut guest = hosted.guest();
    let (id, stream) = pair(&hosted, &mut guest);
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(b"a file").unwrap();
    file.seek(SeekFrom::Start(2)).unwrap();
    let mut loan = stream.loan(1000).unwrap();
    assert!(loan.is_in_place());
    assert_eq!(loan.read_from(&file).unwrap(), 4);
    assert_eq!(loan.read_from(&file).unwrap(), 0, "the end");
    assert_eq!(loan.read_at_from(&file, 1).unwrap(), 5);
    let (from, into) = rustix::pipe::pipe().unwrap();
    rustix::io::write(&into, b", a pipe").unwrap();
    assert_eq!(loan.read_from(&from).unwrap(), 8);
    let error = loan.read_at_from(&from, 0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotSeekable);
    rustix::io::ioctl_fionbio(&from, true).unwrap();
    let error = loan.read_from(&from).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WouldBlock);
    drop(into);
    assert_eq!(loan.read_from(&from).unwrap(), 0);
    let (from, mut into) = UnixStream::pair().unwrap();
    into.write_all(b", a socket").unwrap();
    assert_eq!(loan.read_from(&from).unwrap(), 10);
    let slices = [IoSlice::new(b", "), IoSlice::new(b"slices")];
    assert_eq!(loan.write_vectored(&slices).unwrap(), 8);
    assert_eq!(loan.send().unwrap(), 35);
    let slices = [b", and ", &b""[..], b"more"].map(IoSlice::new);
    assert_eq!((&stream).write_vectored(&slices).unwrap(), 10);
    let mut got = [0; 45];
    guest.wait_recv_exact(id, &mut got, deadline()).unwrap();
    assert_eq!(&got[..], b"file file, a pipe, a socket, slices, and more");
}

#[test]
fn a_loan_that_left_in_part_comes_back_with_the_rest() {
    let hosted = Hosted::new();
    let listener = hosted.listen(PORT, 4).unwrap();
    let mut guest = hosted.raw_guest();
    guest.connect(5000, PORT.get());
    let (stream, _) = listener.accept_timeout(PATIENCE).unwrap();
    let mut loans: Vec<_> = (0..9).map(|_| stream.loan(4000).unwrap()).collect();
    let mut loan = loans.pop().unwrap();
    assert!(!loan.is_in_place(), "beyond an eighth of 64");
    drop(loans);
    let text = bytes(1, 4000);
    loan.write_all(&text).unwrap();
    stream.set_nonblocking(true).unwrap();
    while (&stream).write(b"x").is_ok() {}
    // One small buffer, and then what it takes.
    let small = HEADER_LEN as u32 + 100;
    let index = guest.avail_index(RX) % SIZE;
    guest.desc(RX, index, guest.buffer(RX, index), small, WRITE, 0);
    guest.make_available(RX, index);
    guest.kick(RX);
    let give_up = deadline();
    while loan.filled() == 4000 {
        assert!(Instant::now() < give_up, "nothing has left");
        let (error, back) = loan.try_send().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::WouldBlock);
        loan = back;
    }
    assert_eq!((loan.filled(), loan.capacity()), (3900, 3900));
    // What has left is not to be changed any more; the rest is.
    loan.write_at(0, b"new").unwrap();
    stream.set_nonblocking(false).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    // Another one, of the usual size; the guest looks at the two where they lie.
    guest.make_available(RX, index + 1);
    guest.kick(RX);
    assert_eq!(loan.send().unwrap(), 4000);
    let mut got = vec![0; 4000];
    let (first, rest) = got.split_at_mut(100);
    guest.read(guest.buffer(RX, index) + HEADER_LEN as u64, first);
    guest.read(guest.buffer(RX, index + 1) + HEADER_LEN as u64, rest);
    assert_bytes(&got[..100], &text[..100]);
    assert_eq!(&got[100..103], b"new");
    assert_bytes(&got[103..], &text[103..]);
}

#[test]
fn bytes_of_a_loan_that_were_skipped_are_zeros() {
    let hosted = Hosted::new();
    let mut guest = hosted.guest();
    let (id, stream) = pair(&hosted, &mut guest);
    let old = [0xee; 3000];
    let mut got = [0; 3000];
    // Every buffer of the guest has held something.
    for _ in 0..1000 {
        (&stream).write_all(&old).unwrap();
        guest.wait_recv_exact(id, &mut got, deadline()).unwrap();
    }
    let mut loan = stream.loan(3000).unwrap();
    assert!(loan.is_in_place());
    loan.write_at(3, b"some").unwrap();
    loan.write_at(2990, b"at the end").unwrap();
    assert_eq!(loan.send().unwrap(), 3000);
    guest.wait_recv_exact(id, &mut got, deadline()).unwrap();
    let expected = [&[0; 3], &b"some"[..], &[0; 2983], b"at the end"].concat();
    assert_bytes(&got, &expected);
    // Nor does a length alone show what was there.
    let mut loan = stream.loan(3000).unwrap();
    loan.write_at(0, b"x").unwrap();
    loan.set_filled(3000);
    assert_eq!(loan.send().unwrap(), 3000);
    guest.wait_recv_exact(id, &mut got, deadline()).unwrap();
    assert_bytes(&got, &[&b"x"[..], &[0; 2999]].concat());
}

#[test]
fn a_loan_that_is_moved_keeps_no_bytes_of_earlier_packets() {
    let hosted = Hosted::new();
    let mut guest = hosted.guest();
    let (id, stream) = pair(&hosted, &mut guest);
    let mut got = [0; 3000];
    for _ in 0..1000 {
        (&stream).write_all(&[0xee; 3000]).unwrap();
        guest.wait_recv_exact(id, &mut got, deadline()).unwrap();
    }
    let mut loan = stream.loan(3000).unwrap();
    loan.write_all(b"before").unwrap();
    assert!(loan.is_in_place());
    let bases = guest.suspend().unwrap();
    guest.resume(&bases).unwrap();
    loan.write_at(2990, b"at the end").unwrap();
    assert!(!loan.is_in_place());
    assert_eq!(loan.send().unwrap(), 3000);
    guest.wait_recv_exact(id, &mut got, deadline()).unwrap();
    let expected = [&b"before"[..], &[0; 2984], b"at the end"].concat();
    assert_bytes(&got, &expected);
}
