//! Processes with several queue pairs: connections with leases and loans move while in use.

use std::io::{ErrorKind, Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use zerosock::attach::{self, AttachConfig};
use zerosock::daemon::{Daemon, DaemonConfig};
use zerosock::vsock::{Endpoint, Host};
use zerosock::{Address, Port};

use super::common::PATIENCE;
use super::moves::pattern;

const PORT: Port = Port::new(7000);
const LEN: usize = 2_000_000;

/// A daemon with three queue pairs on two workers, and processes that use them.
fn processes<const N: usize>() -> (Daemon, [Endpoint; N], tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("attach.sock");
    let daemon = Daemon::start(DaemonConfig {
        workers: 2,
        queue_pairs: 3,
        attach: Some(AttachConfig::new(attach::listen(&path).unwrap())),
        ..DaemonConfig::default()
    });
    let attach = |_| Endpoint::builder().queue_pairs(3).attach(&path).unwrap();
    (daemon.unwrap(), std::array::from_fn(attach), dir)
}

/// Moves a stream from pair to pair until `stop`; returns the number of moves.
fn keep_moving(stop: &AtomicBool, mut go: impl FnMut(u16) -> std::io::Result<()>) -> usize {
    let mut moves = 0;
    for pair in (0..3).cycle() {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        match go(pair) {
            Ok(()) => moves += 1,
            // Part of a message is in flight, or the other end has just moved.
            Err(error) if error.kind() == ErrorKind::ResourceBusy => thread::yield_now(),
            Err(error) => panic!("{error}"),
        }
    }
    moves
}

/// Ends the movers when a thread that they wait for has failed, so that the test ends too.
struct StopOnPanic<'a>(&'a AtomicBool);

impl Drop for StopOnPanic<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.store(true, Ordering::Relaxed);
        }
    }
}

#[test]
fn streams_of_processes_move_at_both_ends() {
    let (daemon, [one, two], _dir) = processes();
    let to = Address::new(two.cid(), PORT);
    let listener = two.listen(PORT, 4).unwrap();
    let streams: Vec<_> = (0..3)
        .map(|_| {
            let connecting = one.begin_connect(to).unwrap();
            let (theirs, _) = listener.accept_timeout(PATIENCE).unwrap();
            connecting.wait_connected().unwrap();
            (connecting, theirs)
        })
        .collect();
    let (stop, left) = (
        AtomicBool::new(false),
        std::sync::atomic::AtomicUsize::new(12),
    );
    thread::scope(|scope| {
        let mut movers = Vec::new();
        for (n, (ours, theirs)) in (0u8..).zip(&streams) {
            for (seed, stream) in [(n, ours), (100 + n, theirs)] {
                stream.set_read_timeout(Some(PATIENCE)).unwrap();
                stream.set_write_timeout(Some(PATIENCE)).unwrap();
                let (stop, left) = (&stop, &left);
                let done = || {
                    if left.fetch_sub(1, Ordering::Relaxed) == 1 {
                        stop.store(true, Ordering::Relaxed);
                    }
                };
                scope.spawn(move || {
                    let _end = StopOnPanic(stop);
                    for chunk in pattern(LEN, seed).chunks(30_000) {
                        (&*stream).write_all(chunk).unwrap();
                    }
                    done();
                });
                scope.spawn(move || {
                    let _end = StopOnPanic(stop);
                    let mut bytes = vec![0; LEN];
                    (&*stream).read_exact(&mut bytes).unwrap();
                    let other = if seed < 100 { 100 + seed } else { seed - 100 };
                    assert!(bytes == pattern(LEN, other), "not the bytes that were sent");
                    done();
                });
                movers.push(scope.spawn(|| keep_moving(stop, |to| stream.move_to_queue_pair(to))));
            }
        }
        for mover in movers {
            let moves = mover.join().unwrap();
            assert!(moves > 3, "{moves} moves");
        }
    });
    daemon.shutdown();
}

#[test]
fn messages_keep_their_ends_on_their_way() {
    let (daemon, [one, two], _dir) = processes();
    let listener = two.listen_seqpacket(PORT, 4).unwrap();
    let to = Address::new(two.cid(), PORT);
    let accept = thread::spawn(move || listener.accept().unwrap().0);
    let ours = one.connect_seqpacket(to).unwrap();
    let theirs = accept.join().unwrap();
    theirs.set_read_timeout(Some(PATIENCE)).unwrap();
    ours.set_write_timeout(Some(PATIENCE)).unwrap();
    let stop = AtomicBool::new(false);
    let len = |n: usize| n * 797 % 50_000 + 1;
    thread::scope(|scope| {
        let moves = scope.spawn(|| keep_moving(&stop, |to| ours.move_to_queue_pair(to)));
        scope.spawn(|| {
            for n in 0..400 {
                let message = pattern(len(n), n as u8);
                if n % 3 > 0 {
                    ours.send(&message).unwrap();
                    continue;
                }
                let mut loan = ours.loan(len(n)).unwrap();
                loan.write_all(&message).unwrap();
                loan.send().unwrap();
            }
        });
        let mut bytes = vec![0; 60_000];
        for n in 0..400 {
            let got = theirs.recv(&mut bytes).unwrap().expect("a message");
            assert_eq!(got.len, len(n));
            assert!(bytes[..got.len] == pattern(len(n), n as u8), "message {n}");
        }
        stop.store(true, Ordering::Relaxed);
        assert!(moves.join().unwrap() > 3);
    });
    daemon.shutdown();
}

#[test]
fn a_connection_that_cannot_move_returns_an_error() {
    let (daemon, [one, two], _dir) = processes();
    let listener = two.listen(PORT, 4).unwrap();
    let to = Address::new(two.cid(), PORT);
    let accept = thread::spawn(move || listener.accept().unwrap().0);
    let ours = one.connect(to).unwrap();
    let theirs = accept.join().unwrap();
    let here = ours.queue_pair();
    ours.move_to_queue_pair(here).unwrap();
    let unused = ours.move_to_queue_pair(3).unwrap_err();
    assert_eq!(unused.kind(), ErrorKind::Unsupported);
    let loan = ours.loan(100).unwrap();
    let busy = ours.move_to_queue_pair((here + 1) % 3).unwrap_err();
    assert_eq!(busy.kind(), ErrorKind::ResourceBusy);
    drop(loan);
    ours.move_to_queue_pair((here + 1) % 3).unwrap();
    assert_eq!(ours.queue_pair(), (here + 1) % 3);
    theirs.reset();
    let mut byte = [0];
    assert!((&ours).read(&mut byte).is_err());
    let gone = ours.move_to_queue_pair(here).unwrap_err();
    assert_eq!(gone.kind(), ErrorKind::NotConnected);
    daemon.shutdown();
}

#[test]
fn connections_of_a_process_are_spread_over_its_pairs() {
    let (daemon, [one, two], _dir) = processes();
    let listener = two.listen(PORT, 64).unwrap();
    let to = Address::new(two.cid(), PORT);
    let mut pairs = [[0; 3]; 2];
    let mut kept = Vec::new();
    for _ in 0..40 {
        let ours = one.begin_connect(to).unwrap();
        let (theirs, _) = listener.accept_timeout(PATIENCE).unwrap();
        ours.wait_connected().unwrap();
        pairs[0][usize::from(ours.queue_pair())] += 1;
        pairs[1][usize::from(theirs.queue_pair())] += 1;
        kept.push((ours, theirs));
    }
    assert!(pairs.iter().flatten().all(|&count| count > 0), "{pairs:?}");
    daemon.shutdown();
}

#[test]
fn an_endpoint_that_requests_too_many_pairs_gets_the_available_ones() {
    let (daemon, [one], dir) = processes();
    assert_eq!(one.queue_pairs(), 3);
    let path = dir.path().join("attach.sock");
    let more = Endpoint::builder().queue_pairs(16).attach(&path).unwrap();
    assert_eq!(more.queue_pairs(), 3);
    let fewer = Endpoint::builder().queue_pairs(2).attach(&path).unwrap();
    assert_eq!(fewer.queue_pairs(), 2);
    assert!(Endpoint::builder().queue_pairs(17).attach(&path).is_err());
    assert_eq!(Endpoint::attach(&path).unwrap().queue_pairs(), 1);
    // A host without the setting has one pair.
    let attach = dir.path().join("host.sock");
    let host = Host::builder().attach(&attach).start().unwrap();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                host.drive().unwrap();
            }
        });
        let endpoint = Endpoint::builder().queue_pairs(3).attach(&attach).unwrap();
        assert_eq!(endpoint.queue_pairs(), 1);
        stop.store(true, Ordering::Relaxed);
    });
    daemon.shutdown();
}
