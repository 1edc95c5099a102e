//! Stalled readers, starved queues and full sockets lose no bytes and do not affect others.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread;
use std::time::Duration;

use crate::common::driver::{Directions, Driver, Port, RecvError, SendError, StreamId};
use crate::common::{
    self, TestDaemon, assert_bytes, byte, bytes, connect_guest, deadline, eventually_with, host,
};
use rustix::net::sockopt::{set_socket_recv_buffer_size, set_socket_send_buffer_size};
use zerosock::daemon::Stats;

/// One stream from the guest, of which `len` bytes are to be sent.
struct Sender {
    stream: StreamId,
    seed: u64,
    sent: u64,
    len: u64,
}

impl Sender {
    /// Sends while there is room; true when all was sent and the end said.
    fn pump(&mut self, guest: &mut Driver) -> bool {
        let mut part = [0u8; 8192];
        while self.sent < self.len {
            let want = part.len().min((self.len - self.sent) as usize);
            for (n, at) in part[..want].iter_mut().enumerate() {
                *at = byte(self.seed, self.sent + n as u64);
            }
            match guest.send(self.stream, &part[..want]) {
                Ok(more) => self.sent += more as u64,
                Err(SendError::WouldBlock) => return false,
                Err(error) => panic!("stream {}: {error}", self.seed),
            }
            if self.sent == self.len {
                guest.shutdown(self.stream, Directions::SEND);
            }
        }
        true
    }
}

fn read_all(mut program: UnixStream) -> thread::JoinHandle<Vec<u8>> {
    program.set_read_timeout(Some(common::PATIENCE)).unwrap();
    thread::spawn(move || {
        let mut got = Vec::new();
        program.read_to_end(&mut got).unwrap();
        got
    })
}

/// Whether a host program's socket was full for so long that bytes for it were copied aside; true
/// where the device does not say.
fn has_stalled(daemon: &TestDaemon) -> bool {
    daemon.stats().is_none_or(|stats| stats.copied_bytes > 0)
}

#[test]
fn a_stalled_host_reader_stops_none_of_twenty_others_and_gets_every_byte() {
    let daemon = TestDaemon::new();
    // Linux's 128 entries.
    let mut guest = daemon.guest_of(0, |config| config.queue_size = 128);
    let listener = daemon.host_listener(2000);
    let mut connect = |seed: u64, len: u64| {
        let stream = guest.wait_connect(host(2000), deadline()).unwrap();
        let (program, _) = listener.accept().unwrap();
        (
            Sender {
                stream,
                seed,
                sent: 0,
                len,
            },
            program,
        )
    };
    let (mut stalled, stalled_program) = connect(99, 3 << 20);
    let others: Vec<_> = (0..20).map(|seed| connect(seed, 1 << 20)).collect();
    let mut readers = Vec::new();
    let mut senders = Vec::new();
    for (sender, program) in others {
        senders.push(sender);
        readers.push(read_all(program));
    }
    eventually_with(&mut guest, "twenty streams done", |guest| {
        stalled.pump(guest);
        let mut done = true;
        for sender in &mut senders {
            done &= sender.pump(guest);
        }
        done && readers.iter().all(|reader| reader.is_finished())
    });
    for (seed, reader) in (0..).zip(readers) {
        assert_bytes(&reader.join().unwrap(), &bytes(seed, 1 << 20));
    }
    assert!(
        stalled.sent < stalled.len,
        "the stalled reader did not stall"
    );
    let reader = read_all(stalled_program);
    eventually_with(&mut guest, "the stalled stream done", |guest| {
        stalled.pump(guest) && reader.is_finished()
    });
    assert_bytes(&reader.join().unwrap(), &bytes(99, 3 << 20));
}

#[test]
fn a_stalled_guest_reader_stops_none_of_the_others() {
    let daemon = TestDaemon::new();
    let mut guest = daemon.guest_of(0, |config| config.queue_size = 128);
    guest.listen(Port::new(1000), 64).unwrap();
    let uds_path = daemon.uds_path();
    let mut writers = Vec::new();
    for seed in 0..6u64 {
        let uds_path = uds_path.clone();
        writers.push(thread::spawn(move || {
            let mut program = connect_guest(&uds_path, 1000).unwrap();
            // Identifies the connection: accept order is not spawn order.
            program.write_all(&[seed as u8]).unwrap();
            program.write_all(&bytes(seed, 1 << 20)).unwrap();
            program.shutdown(Shutdown::Write).unwrap();
        }));
    }
    let mut streams = Vec::new();
    for _ in 0..6 {
        let stream = guest.wait_accept(Port::new(1000), deadline()).unwrap();
        let mut seed = [0u8; 1];
        guest
            .wait_recv_exact(stream, &mut seed, deadline())
            .unwrap();
        streams.push((stream, u64::from(seed[0]), Vec::new()));
    }
    let (stalled, others) = streams.split_first_mut().unwrap();
    for (stream, seed, got) in others {
        guest.wait_recv_to_end(*stream, got, deadline()).unwrap();
        assert_bytes(got, &bytes(*seed, 1 << 20));
    }
    let (stream, seed, got) = stalled;
    // Its writer may not have run before the others were done.
    eventually_with(&mut guest, "unread bytes of the stalled one", |guest| {
        guest.unread(*stream) > 0
    });
    guest.wait_recv_to_end(*stream, got, deadline()).unwrap();
    assert_bytes(got, &bytes(*seed, 1 << 20));
    for writer in writers {
        writer.join().unwrap();
    }
}

#[test]
fn a_guest_without_buffers_loses_nothing_once_it_has_some() {
    let daemon = TestDaemon::new();
    let mut guest = daemon.guest_of(0, |config| config.queue_size = 32);
    guest.listen(Port::new(1000), 8).unwrap();
    let uds_path = daemon.uds_path();
    let program = thread::spawn(move || {
        let mut program = connect_guest(&uds_path, 1000).unwrap();
        program.write_all(&bytes(5, 2 << 20)).unwrap();
        program.shutdown(Shutdown::Write).unwrap();
        let mut got = Vec::new();
        program.read_to_end(&mut got).unwrap();
        got
    });
    let stream = guest.wait_accept(Port::new(1000), deadline()).unwrap();
    let mut got = Vec::new();
    let mut part = [0u8; 4096];
    let mut echo = Sender {
        stream,
        seed: 6,
        sent: 0,
        len: 1 << 20,
    };
    for _ in 0..5 {
        // Nothing more is posted: the device runs out of buffers.
        guest.withhold_buffers(true).unwrap();
        eventually_with(&mut guest, "all buffers used up", |guest| {
            match guest.recv(stream, &mut part) {
                Ok(more) => got.extend_from_slice(&part[..more]),
                Err(RecvError::WouldBlock) => {}
                Err(error) => panic!("{error}"),
            }
            guest.withheld_buffers() == 16
        });
        // The other way does not depend on it, as far as credit goes.
        echo.pump(&mut guest);
        guest.withhold_buffers(false).unwrap();
        guest.flush();
    }
    let mut ended = false;
    eventually_with(&mut guest, "both ways done", |guest| {
        while !ended {
            match guest.recv(stream, &mut part) {
                Ok(0) => ended = true,
                Ok(more) => got.extend_from_slice(&part[..more]),
                Err(RecvError::WouldBlock) => break,
                Err(error) => panic!("{error}"),
            }
        }
        echo.pump(guest) && ended && program.is_finished()
    });
    assert_bytes(&got, &bytes(5, 2 << 20));
    assert_bytes(&program.join().unwrap(), &bytes(6, 1 << 20));
}

#[test]
fn a_socket_that_takes_little_at_a_time_gets_every_byte() {
    let daemon = TestDaemon::new();
    let mut guest = daemon.guest();
    let listener: UnixListener = daemon.host_listener(2000);
    let stream = guest.wait_connect(host(2000), deadline()).unwrap();
    let (mut program, _) = listener.accept().unwrap();
    set_socket_recv_buffer_size(&program, 4096).unwrap();
    set_socket_send_buffer_size(&program, 4096).unwrap();
    program.set_read_timeout(Some(common::PATIENCE)).unwrap();
    let reader = thread::spawn(move || {
        let mut got = Vec::new();
        let mut part = [0u8; 777];
        loop {
            match program.read(&mut part).unwrap() {
                0 => return got,
                more => got.extend_from_slice(&part[..more]),
            }
            if got.len() % 5 == 0 {
                thread::sleep(Duration::from_micros(50));
            }
        }
    });
    let mut sender = Sender {
        stream,
        seed: 3,
        sent: 0,
        len: 3 << 20,
    };
    eventually_with(&mut guest, "all read", |guest| {
        sender.pump(guest) && reader.is_finished()
    });
    assert_bytes(&reader.join().unwrap(), &bytes(3, 3 << 20));
}

#[test]
fn many_small_packets_under_back_pressure_reset_nothing() {
    let daemon = TestDaemon::new();
    let mut guest = daemon.guest();
    let listener = daemon.host_listener(2000);
    let stream = guest.wait_connect(host(2000), deadline()).unwrap();
    let (program, _) = listener.accept().unwrap();
    let want = bytes(8, 600_000);
    let mut sent = 0;
    let mut size = 129;
    // The reader starts when the socket is full.
    let mut reader = None;
    let mut program = Some(program);
    eventually_with(&mut guest, "all read", |guest| {
        let mut blocked = sent == want.len();
        while sent < want.len() {
            let end = want.len().min(sent + size);
            match guest.send(stream, &want[sent..end]) {
                Ok(more) => sent += more,
                Err(SendError::WouldBlock) => {
                    blocked = true;
                    break;
                }
                Err(error) => panic!("after {sent} bytes: {error}"),
            }
            size = 129 + (size * 7) % 383;
            if sent == want.len() {
                guest.shutdown(stream, Directions::SEND);
            }
        }
        if reader.is_none() && blocked && has_stalled(&daemon) {
            reader = program.take().map(read_all);
        }
        reader.as_ref().is_some_and(|reader| reader.is_finished())
    });
    assert_bytes(&reader.unwrap().join().unwrap(), &want);
}

#[test]
fn a_close_against_a_full_socket_loses_nothing() {
    let daemon = TestDaemon::new();
    let mut guest = daemon.guest();
    let listener = daemon.host_listener(2000);
    let stream = guest.wait_connect(host(2000), deadline()).unwrap();
    let (program, _) = listener.accept().unwrap();
    let marker = guest.wait_connect(host(2000), deadline()).unwrap();
    let (mut echo, _) = listener.accept().unwrap();
    echo.set_read_timeout(Some(common::PATIENCE)).unwrap();
    let want = bytes(4, 4 << 20);
    let mut sent = 0;
    eventually_with(&mut guest, "the socket is full", |guest| {
        match guest.send(stream, &want[sent..]) {
            Ok(more) => sent += more,
            Err(SendError::WouldBlock) => {
                // All that was sent has come, and nothing is to be done with it in time.
                let settled = |stats: Stats| stats.rx_bytes == sent as u64 && stats.timers_now == 0;
                return has_stalled(&daemon) && daemon.stats().is_none_or(settled);
            }
            Err(error) => panic!("{error}"),
        }
        false
    });
    assert!(sent > 200_000 && sent < want.len());
    // An echo comes in a later turn of the device: by then it has taken what was sent before, and
    // has counted its timers. None may run that could cut off what the socket has yet to take.
    let mut only_so_many_timers_run = |guest: &mut Driver, timers| {
        let mut byte = [0];
        assert_eq!(guest.send(marker, b"x").unwrap(), 1);
        guest.flush();
        echo.read_exact(&mut byte).unwrap();
        echo.write_all(&byte).unwrap();
        guest
            .wait_recv_exact(marker, &mut byte, deadline())
            .unwrap();
        if let Some(stats) = daemon.stats() {
            assert_eq!((stats.bridges_now, stats.timers_now), (2, timers));
        }
    };
    guest.shutdown(stream, Directions::BOTH);
    only_so_many_timers_run(&mut guest, 0);
    // As a guest does that has waited in vain for an answer, after 8 s.
    guest.abort(stream);
    eventually_with(&mut guest, "the end of the connection", |_| {
        daemon
            .stats()
            .is_none_or(|stats| stats.connections_now == 1)
    });
    // The one that ends what makes no progress for 60 s.
    only_so_many_timers_run(&mut guest, 1);
    let reader = read_all(program);
    eventually_with(&mut guest, "all read", |_| reader.is_finished());
    assert_bytes(&reader.join().unwrap(), &want[..sent]);
    eventually_with(&mut guest, "nothing is left of it", |_| {
        daemon.stats().is_none_or(|stats| stats.bridges_now == 1)
    });
}

#[test]
fn connections_above_the_cap_are_refused_until_others_end() {
    let daemon = TestDaemon::with(1, |config| config.max_connections = Some(4));
    if !daemon.is_ours("connections_above_the_cap_are_refused_until_others_end") {
        return;
    }
    let mut guest = daemon.guest();
    let listener = daemon.host_listener(2000);
    let mut open = Vec::new();
    for _ in 0..4 {
        open.push(guest.wait_connect(host(2000), deadline()).unwrap());
    }
    assert!(guest.wait_connect(host(2000), deadline()).is_err());
    let (first, _) = listener.accept().unwrap();
    guest.close(open.pop().unwrap());
    guest.close(open.pop().unwrap());
    drop(first);
    eventually_with(&mut guest, "room again", |guest| {
        guest.wait_connect(host(2000), deadline()).is_ok()
    });
}
