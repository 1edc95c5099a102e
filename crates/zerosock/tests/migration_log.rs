//! The log of written pages, for live migration: each page that a vsock device has changed is marked,
//! and no page that it has not written.

use std::collections::BTreeSet;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Instant;

use crate::common::raw::{GUEST, LEN, RX, RawGuest, SIZE, TX};
use crate::common::{PATIENCE, TestDaemon, bytes, deadline, eventually};
use crate::hosting::Hosted;
use zerosock::driver::{Address, Cid, Port};
use zerosock_proto::wire::vsock::Op;
use zerosock_sys::memfd;
use zerosock_vhost_user::session::F_LOG_ALL;

const PAGE: u64 = 4096;
const LOG_LEN: u64 = (GUEST + LEN) / PAGE / 8;
/// Pages of the receive buffers, which only the device writes.
fn receive_pages(guest: &RawGuest) -> BTreeSet<u64> {
    (guest.buffer(RX, 0) / PAGE..guest.buffer(RX, SIZE) / PAGE).collect()
}

/// Pages of the rings.
fn ring_pages(guest: &RawGuest) -> BTreeSet<u64> {
    guest.rings.iter().map(|ring| ring.desc / PAGE).collect()
}

struct Log {
    file: OwnedFd,
}

impl Log {
    /// Sends a new log.
    fn send(guest: &mut RawGuest) -> Log {
        Log::send_with(guest, true)
    }

    fn send_with(guest: &mut RawGuest, seal: bool) -> Log {
        let file = memfd::create("log", LOG_LEN, seal).unwrap();
        let frontend = &mut guest.frontend;
        frontend.set_log_base(file.as_fd(), 0, LOG_LEN).unwrap();
        Log { file }
    }

    fn marks(&self) -> BTreeSet<u64> {
        let mut bits = vec![0; LOG_LEN as usize];
        assert_eq!(
            rustix::io::pread(&self.file, &mut bits[..], 0).unwrap(),
            bits.len()
        );
        let is_set = |page: &u64| bits[(page / 8) as usize] & 1 << (page % 8) != 0;
        (0..8 * LOG_LEN).filter(is_set).collect()
    }
}

/// Begins to log as QEMU does: the queues run.
fn begin(guest: &mut RawGuest) -> Log {
    let log = Log::send(guest);
    let frontend = &mut guest.frontend;
    frontend.set_features(guest.features | F_LOG_ALL).unwrap();
    for queue in 0..guest.rings.len() {
        let addresses = guest.vring_addr(queue);
        let used = Some(guest.rings[queue].used);
        let frontend = &mut guest.frontend;
        frontend
            .set_vring_addr_logged(queue as u32, addresses, used)
            .unwrap();
    }
    log
}

fn snapshot(guest: &RawGuest) -> Vec<u8> {
    let mut all = vec![0; LEN as usize];
    guest.read(GUEST, &mut all);
    all
}

/// Compares the memory with what it was, and with the pages that are marked. No queue runs.
#[track_caller]
fn compare(guest: &RawGuest, before: &[u8], marks: &BTreeSet<u64>) {
    let after = snapshot(guest);
    let pages = before
        .chunks(PAGE as usize)
        .zip(after.chunks(PAGE as usize));
    let pages = (GUEST / PAGE..).zip(pages);
    let changed = pages.filter(|(_, (a, b))| a != b).map(|(page, _)| page);
    let changed: BTreeSet<u64> = changed.collect();
    let (buffers, rings) = (receive_pages(guest), ring_pages(guest));
    let of = |set: &BTreeSet<u64>| set.intersection(&buffers).copied().collect::<BTreeSet<_>>();
    assert!(of(&changed).len() > 20, "{}", of(&changed).len());
    assert_eq!(of(&changed), of(marks));
    // The rings of a queue lie in one page, and the driver writes there too.
    for (ring, page) in guest
        .rings
        .iter()
        .zip(guest.rings.iter().map(|it| it.desc / PAGE))
    {
        let at = (ring.used - GUEST) as usize;
        let range = at..at + 6 + 8 * usize::from(SIZE);
        assert!(before[range.clone()] == after[range] || marks.contains(&page));
    }
    // Nothing else: neither what the driver sends nor unused memory.
    let known: BTreeSet<u64> = buffers.union(&rings).copied().collect();
    assert!(marks.is_subset(&known), "{:?}", marks.difference(&known));
}

fn stop(guest: &mut RawGuest) -> Vec<u16> {
    let queues = 0..guest.rings.len() as u32;
    let stop = |queue| guest.frontend.get_vring_base(queue).unwrap();
    queues.map(stop).collect()
}

/// Receives so many bytes of a connection, and returns credit.
fn receive(guest: &mut RawGuest, port: u32, total: usize, got: &mut Vec<u8>) {
    while got.len() < total {
        let before = got.len();
        got.extend(guest.recv_op(port, Op::Rw).1);
        if before / 50_000 < got.len() / 50_000 {
            let mut header = guest.header(port, 2000, Op::CreditUpdate);
            header.fwd_cnt = got.len() as u32;
            guest.send(header, &[]);
        }
    }
}

/// A guest that has connected to a host program.
fn connected(daemon: &TestDaemon) -> (RawGuest, UnixStream) {
    let listener = daemon.host_listener(2000);
    let mut guest = RawGuest::attach(&daemon.vms[0].socket);
    guest.connect(5000, 2000);
    (guest, listener.accept().unwrap().0)
}

#[test]
fn each_written_page_is_marked_and_no_other() {
    let daemon = TestDaemon::new();
    let (mut guest, mut program) = connected(&daemon);
    let before = snapshot(&guest);
    let log = begin(&mut guest);
    // Frames of all sizes, and what the guest sends is read only.
    let mut want = Vec::new();
    let mut got = Vec::new();
    for round in 0..30 {
        let part = bytes(round, 1 + 577 * round as usize);
        program.write_all(&part).unwrap();
        want.extend(part);
        guest.send(guest.header(5000, 2000, Op::Rw), &[round as u8; 700]);
        receive(&mut guest, 5000, want.len(), &mut got);
    }
    assert_eq!(got, want);
    stop(&mut guest);
    compare(&guest, &before, &log.marks());
    assert!(log.marks().contains(&(guest.rings[TX].desc / PAGE)));
}

#[test]
fn buffers_of_a_program_that_embeds_the_device_are_marked() {
    let hosted = Hosted::new();
    let listener = hosted.listen(Port::new(2000), 4).unwrap();
    let mut guest = hosted.raw_guest();
    guest.connect(5000, 2000);
    let (mut stream, _) = listener.accept_timeout(PATIENCE).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    // This loan is written to before the log is there, and sent after it.
    let mut early = stream.loan(3000).unwrap();
    assert!(early.is_in_place());
    let before = snapshot(&guest);
    early.write_all(&[1; 3000]).unwrap();
    let log = begin(&mut guest);
    early.send().unwrap();
    let mut total = 3000;
    for round in 0..15 {
        let mut loan = stream.loan(4000).unwrap();
        let part = bytes(round, 1 + 250 * round as usize);
        loan.write_all(&part).unwrap();
        total += loan.send().unwrap();
        stream.write_all(&bytes(100 + round, 3000)).unwrap();
        total += 3000;
    }
    let mut got = Vec::new();
    receive(&mut guest, 5000, total, &mut got);
    stop(&mut guest);
    compare(&guest, &before, &log.marks());
}

#[test]
fn buffers_that_another_guest_fills_are_marked() {
    let daemon = TestDaemon::with(2, |_| {});
    let mut guest = RawGuest::attach(&daemon.vms[1].socket);
    let mut sender = daemon.guest_of(0, |_| {});
    let to = Address::new(Cid::new(4), Port::new(5000));
    let stream = sender.connect(to).unwrap();
    let give_up = deadline();
    let request = loop {
        sender.drive().unwrap();
        match guest.try_recv() {
            Some((repr, _)) if repr.op.known() == Some(Op::Request) => break repr,
            _ => assert!(Instant::now() < give_up, "no request"),
        }
    };
    let before = snapshot(&guest);
    let log = begin(&mut guest);
    let mut response = guest.header(5000, 2000, Op::Response);
    response.dst = request.src;
    guest.send(response, &[]);
    let want = bytes(1, 150_000);
    let (mut sent, mut got) = (0, Vec::new());
    while got.len() < want.len() {
        assert!(Instant::now() < give_up, "the bytes do not arrive");
        sender.drive().unwrap();
        sent += sender.send(stream, &want[sent..]).unwrap_or(0);
        sender.flush();
        while let Some((_, payload)) = guest.try_recv() {
            got.extend(payload);
        }
    }
    assert_eq!(got, want);
    stop(&mut guest);
    compare(&guest, &before, &log.marks());
}

/// Writes to the guest until the connection ends.
fn flood(mut program: UnixStream) -> thread::JoinHandle<()> {
    thread::spawn(move || {
        for round in 0.. {
            if program.write_all(&bytes(round, 9000)).is_err() {
                return;
            }
        }
    })
}

#[test]
fn a_log_moves_and_is_switched_off_while_traffic_runs() {
    let daemon = TestDaemon::new();
    let (mut guest, program) = connected(&daemon);
    let before = snapshot(&guest);
    let mut log = begin(&mut guest);
    let flood = flood(program);
    let (mut marks, mut got) = (BTreeSet::new(), Vec::new());
    for _ in 0..20 {
        let total = got.len() + 50_000;
        receive(&mut guest, 5000, total, &mut got);
        let next = Log::send(&mut guest);
        let old = log.marks();
        let total = got.len() + 5000;
        receive(&mut guest, 5000, total, &mut got);
        assert_eq!(log.marks(), old, "marked in a log that was replaced");
        marks.extend(old);
        log = next;
    }
    let bases = stop(&mut guest);
    marks.extend(log.marks());
    compare(&guest, &before, &marks);
    guest.start(&bases).unwrap();
    guest.frontend.set_features(guest.features).unwrap();
    let old = log.marks();
    let total = got.len() + 200_000;
    receive(&mut guest, 5000, total, &mut got);
    assert_eq!(log.marks(), old, "marked in a log that was switched off");
    drop(guest);
    flood.join().unwrap();
}

/// QEMU's order when the driver of a guest starts again during a migration.
#[test]
fn a_log_that_follows_the_start_of_the_queues_has_all_pages() {
    let daemon = TestDaemon::new();
    let (mut guest, program) = connected(&daemon);
    let first = begin(&mut guest);
    let bases = stop(&mut guest);
    drop(first);
    guest.start(&bases).unwrap();
    let flood = flood(program);
    let mut got = Vec::new();
    receive(&mut guest, 5000, 50_000, &mut got);
    let log = Log::send(&mut guest);
    let all: BTreeSet<u64> = (GUEST / PAGE..(GUEST + LEN) / PAGE).collect();
    assert_eq!(log.marks(), all);
    // The next one has what is written from now on.
    let log = Log::send(&mut guest);
    receive(&mut guest, 5000, 800_000, &mut got);
    let marks = log.marks();
    assert!(marks.len() > 10 && marks.is_subset(&receive_pages(&guest)));
    drop(guest);
    flood.join().unwrap();
}

#[test]
fn a_log_that_vanishes_ends_the_service_of_that_guest_only() {
    let daemon = TestDaemon::with(2, |_| {});
    let (mut guest, program) = connected(&daemon);
    let mut other = daemon.guest_of(1, |_| {});
    begin(&mut guest);
    let log = Log::send_with(&mut guest, false);
    let flood = flood(program);
    let mut got = Vec::new();
    receive(&mut guest, 5000, 50_000, &mut got);
    rustix::fs::ftruncate(&log.file, 0).unwrap();
    eventually("disconnected", || {
        while guest.try_recv().is_some() {}
        guest.frontend.is_closed()
    });
    drop(guest);
    flood.join().unwrap();
    // The other guest goes on, and the next front-end is served.
    other.drive().unwrap();
    assert!(other.is_attached());
    let mut next = RawGuest::attach(&daemon.vms[0].socket);
    let listener = daemon.host_listener(2001);
    next.connect(5001, 2001);
    listener.accept().unwrap();
    // A log that is not in use may vanish.
    let log = Log::send_with(&mut next, false);
    rustix::fs::ftruncate(&log.file, 0).unwrap();
    next.connect(5002, 2001);
}
