//! Guest memory that vanishes: the guard survives it, system calls report it, and any other
//! SIGBUS ends the process as if there were no guard.

use std::io::{self, IoSlice, Read};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output};

use rustix::fs::ftruncate;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use zerosock_ring::{GuestSlice, Memory, Piece, RegionConfig};
use zerosock_sys::{
    PeerFd, fd_passing, memfd, recv_packet_and_rights, recv_slices, send_slices, sigbus,
};

const LEN: usize = 64 * 1024;

/// A memory of one region at guest address 0, and its file.
fn guest() -> (Memory, std::os::fd::OwnedFd) {
    let file = memfd::create("guest", LEN as u64, false).unwrap();
    let config = RegionConfig {
        guest_addr: 0,
        user_addr: 0,
        len: LEN as u64,
        fd_offset: 0,
    };
    (
        Memory::map(vec![(file.try_clone().unwrap(), config)]).unwrap(),
        file,
    )
}

fn pieces(memory: &Memory, guest_addr: u64, len: u32) -> Vec<Piece> {
    let mut pieces = Vec::new();
    memory.translate(guest_addr, len, &mut pieces).unwrap();
    pieces
}

fn slices<'m>(memory: &'m Memory, ranges: &[(u64, u32)]) -> Vec<GuestSlice<'m>> {
    let pieces = ranges
        .iter()
        .flat_map(|(at, len)| pieces(memory, *at, *len));
    pieces.map(|piece| memory.slice(piece).unwrap()).collect()
}

/// The kernel would free the packet and close its descriptors in the receiving thread.
#[test]
fn packet_for_memory_that_vanished_stays_with_its_descriptors() {
    let (lost, file) = guest();
    let (kept, _file) = guest();
    ftruncate(&file, 0).unwrap();
    let flags = SocketFlags::CLOEXEC;
    let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
    let (ours, theirs) = pair.unwrap();
    let ours = PeerFd::from(ours);
    let (passed, mut other) = UnixStream::pair().unwrap();
    other.set_nonblocking(true).unwrap();
    for packet in [&b"first"[..], b"second"] {
        fd_passing::send(&theirs, &[IoSlice::new(packet)], &[passed.as_fd()]).unwrap();
    }
    drop(passed);

    let error = recv_packet_and_rights(&ours, &slices(&lost, &[(0, 8)])).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
    for packet in [&b"first"[..], b"second"] {
        let end = other.read(&mut [0]).map_err(|error| error.kind());
        assert_eq!(end, Err(io::ErrorKind::WouldBlock), "closed already");
        let received = recv_packet_and_rights(&ours, &slices(&kept, &[(0, 8)])).unwrap();
        assert_eq!((received.bytes, received.cut), (packet.len(), true));
        let mut bytes = vec![0; packet.len()];
        kept.read(&pieces(&kept, 0, 8), 0, &mut bytes);
        assert_eq!(bytes, packet);
    }
    let error = recv_packet_and_rights(&ours, &slices(&kept, &[(0, 8)])).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    other.set_nonblocking(false).unwrap();
    assert_eq!(other.read(&mut [0]).unwrap(), 0, "the reaper closes them");
}

#[test]
fn memory_that_vanishes_reads_as_zeros_and_is_lost() {
    sigbus::install().unwrap();
    sigbus::install().unwrap();
    let (lost, file) = guest();
    let (kept, _file) = guest();
    let whole = pieces(&lost, 0, LEN as u32);
    assert_eq!(lost.write(&whole, 0, &[7; LEN]), LEN);
    ftruncate(&file, 4096).unwrap();
    assert!(!lost.is_lost());
    let mut bytes = [1; LEN];
    assert_eq!(lost.read(&whole, 0, &mut bytes), LEN);
    assert!(bytes[..4096].iter().all(|byte| *byte == 7));
    assert!(bytes[4096..].iter().all(|byte| *byte == 0));
    assert!(lost.is_lost());
    assert_eq!(lost.write(&whole, 8192, b"nobody sees it"), 14);
    assert!(!kept.is_lost());
}

#[test]
fn bytes_go_straight_between_a_socket_and_the_guest() {
    let (memory, _file) = guest();
    let whole = pieces(&memory, 0, LEN as u32);
    memory.write(&whole, 100, b"hello ");
    memory.write(&whole, 9000, b"world");
    let (a, b) = UnixStream::pair().unwrap();
    let from = slices(&memory, &[(100, 6), (9000, 5)]);
    assert_eq!(send_slices(a.as_fd(), &from).unwrap(), 11);
    let into = slices(&memory, &[(20000, 3), (30000, 1), (40000, 100)]);
    assert_eq!(recv_slices(b.as_fd(), &into).unwrap().bytes, 11);
    let mut got = [0; 11];
    memory.read(&whole, 20000, &mut got[..3]);
    memory.read(&whole, 30000, &mut got[3..4]);
    memory.read(&whole, 40000, &mut got[4..]);
    assert_eq!(&got, b"hello world");

    let error = recv_slices(b.as_fd(), &into).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    // Shut down rather than closed: a process that another test starts may hold the socket for a moment.
    a.shutdown(Shutdown::Both).unwrap();
    assert_eq!(recv_slices(b.as_fd(), &into).unwrap().bytes, 0);
    let error = send_slices(b.as_fd(), &into).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
}

#[test]
fn a_full_socket_takes_a_part_and_then_nothing() {
    let (memory, _file) = guest();
    let (a, _b) = UnixStream::pair().unwrap();
    // More slices than one call uses.
    let many = slices(&memory, &[(0, 16); zerosock_sys::MAX_SLICES + 5]);
    assert_eq!(
        send_slices(a.as_fd(), &many).unwrap(),
        16 * zerosock_sys::MAX_SLICES
    );
    let whole = slices(&memory, &[(0, LEN as u32); 100]);
    let mut partial = false;
    loop {
        match send_slices(a.as_fd(), &whole) {
            Ok(bytes) => partial |= bytes < 100 * LEN,
            Err(error) => {
                assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
                break;
            }
        }
    }
    assert!(partial);
}

#[test]
fn system_calls_on_vanished_memory_fail_without_a_signal() {
    let (memory, file) = guest();
    ftruncate(&file, 0).unwrap();
    let (a, b) = UnixStream::pair().unwrap();
    let gone = slices(&memory, &[(0, 4096)]);
    assert_eq!(
        send_slices(a.as_fd(), &gone).unwrap_err().raw_os_error(),
        Some(libc::EFAULT)
    );
    io::Write::write_all(&mut &a, b"x").unwrap();
    assert_eq!(
        recv_slices(b.as_fd(), &gone).unwrap_err().raw_os_error(),
        Some(libc::EFAULT)
    );
}

/// Runs one of the ignored tests below in a process of its own.
fn run_alone(test: &str) -> Output {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--ignored", "--nocapture"])
        .output()
        .unwrap()
}

#[test]
fn a_foreign_fault_still_ends_the_process() {
    let output = run_alone("foreign_fault");
    assert_eq!(output.status.signal(), Some(libc::SIGBUS), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("about to fault"));
}

#[test]
fn a_signal_of_a_process_has_its_previous_effect() {
    let output = run_alone("sent_signal");
    assert_eq!(output.status.signal(), Some(libc::SIGBUS), "{output:?}");
}

#[test]
fn the_previous_handler_is_called() {
    let output = run_alone("earlier_handler");
    assert_eq!(output.status.code(), Some(42), "{output:?}");
}

/// Accesses a mapping of a truncated file that is not guest memory.
fn fault() {
    let file = memfd::create("ours", 4096, false).unwrap();
    let flags = (rustix::mm::ProtFlags::READ, rustix::mm::MapFlags::SHARED);
    // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
    let at = unsafe { rustix::mm::mmap(std::ptr::null_mut(), 4096, flags.0, flags.1, &file, 0) };
    ftruncate(&file, 0).unwrap();
    println!("about to fault");
    // SAFETY: the address is mapped; the access faults, which is the purpose of this test.
    unsafe { at.unwrap().cast::<u8>().read_volatile() };
}

#[test]
#[ignore = "ends the process; run by another test"]
fn foreign_fault() {
    sigbus::install().unwrap();
    fault();
}

#[test]
#[ignore = "ends the process; run by another test"]
fn sent_signal() {
    sigbus::install().unwrap();
    // The handler before ours is that of Rust's library, which answers what it does not know by
    // restoring the default action, in the belief that the fault comes again. So the second ends
    // the process, with the guard and without.
    for _ in 0..2 {
        // SAFETY: raises a signal in this thread; its handlers are async-signal-safe.
        unsafe { libc::raise(libc::SIGBUS) };
    }
    std::process::exit(0);
}

extern "C" fn leave(_: libc::c_int) {
    // SAFETY: _exit is async-signal-safe.
    unsafe { libc::_exit(42) };
}

#[test]
#[ignore = "ends the process; run by another test"]
fn earlier_handler() {
    let handler: extern "C" fn(libc::c_int) = leave;
    // SAFETY: `leave` has the signature of a handler and is async-signal-safe.
    unsafe { libc::signal(libc::SIGBUS, handler as libc::sighandler_t) };
    sigbus::install().unwrap();
    fault();
}
