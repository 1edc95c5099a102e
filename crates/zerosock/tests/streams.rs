//! Streams between a guest and host programs: connects, refusals, bytes, ends.

use std::collections::HashSet;
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use crate::common::driver::{
    Directions, Driver, DriverEvent, Port, StreamId, StreamState, WaitError,
};
use crate::common::{
    self, TestDaemon, assert_bytes, bytes, connect_guest, deadline, eventually_with, host, hybrid,
    read_ok,
};

const PORT: Port = Port::new(1000);

/// A guest with a listener on [`PORT`] and a connection through the hybrid socket.
fn joined(daemon: &TestDaemon) -> (Driver, StreamId, UnixStream) {
    let mut guest = daemon.guest();
    guest.listen(PORT, 8).unwrap();
    let uds_path = daemon.uds_path();
    let program = thread::spawn(move || connect_guest(&uds_path, PORT.get()).unwrap());
    let stream = guest.wait_accept(PORT, deadline()).unwrap();
    // OK comes with our RESPONSE, which is out.
    let program = program.join().unwrap();
    (guest, stream, program)
}

/// As [`joined`], but the guest connected to the host's `port`.
fn joined_to_host(daemon: &TestDaemon, port: u32) -> (Driver, StreamId, UnixStream) {
    let mut guest = daemon.guest();
    let listener = daemon.host_listener(port);
    let stream = guest.wait_connect(host(port), deadline()).unwrap();
    let (program, _) = listener.accept().unwrap();
    program.set_read_timeout(Some(common::PATIENCE)).unwrap();
    (guest, stream, program)
}

/// Both ways at once, every byte compared.
fn exchange(mut guest: Driver, stream: StreamId, mut program: UnixStream, len: usize) {
    let mut writer = program.try_clone().unwrap();
    let to_guest = thread::spawn(move || {
        writer.write_all(&bytes(1, len)).unwrap();
        writer.shutdown(Shutdown::Write).unwrap();
    });
    let to_host = thread::spawn(move || {
        let mut got = Vec::new();
        program.read_to_end(&mut got).unwrap();
        got
    });
    let (ours, mut sent) = (bytes(2, len), 0);
    let mut got = Vec::new();
    let mut part = vec![0u8; 50_000];
    let mut ended = false;
    eventually_with(&mut guest, "both ways done", |guest| {
        while sent < ours.len() {
            match guest.send(stream, &ours[sent..ours.len().min(sent + 100_000)]) {
                Ok(more) => sent += more,
                Err(crate::common::driver::SendError::WouldBlock) => break,
                Err(error) => panic!("after {sent} bytes: {error}"),
            }
            if sent == ours.len() {
                guest.shutdown(stream, Directions::SEND);
            }
        }
        while !ended {
            match guest.recv(stream, &mut part) {
                Ok(0) => ended = true,
                Ok(more) => got.extend_from_slice(&part[..more]),
                Err(crate::common::driver::RecvError::WouldBlock) => break,
                Err(error) => panic!("after {} bytes: {error}", got.len()),
            }
        }
        ended && sent == ours.len() && to_host.is_finished()
    });
    to_guest.join().unwrap();
    assert_bytes(&got, &bytes(1, len));
    assert_bytes(&to_host.join().unwrap(), &ours);
}

#[test]
fn bytes_both_ways_on_a_connection_from_the_host() {
    let daemon = TestDaemon::new();
    let (guest, stream, program) = joined(&daemon);
    exchange(guest, stream, program, 6 << 20);
}

#[test]
fn bytes_both_ways_on_a_connection_from_the_guest() {
    let daemon = TestDaemon::new();
    let (guest, stream, program) = joined_to_host(&daemon, 2000);
    exchange(guest, stream, program, 6 << 20);
}

#[test]
fn bytes_both_ways_with_large_receive_buffers_and_small_queues() {
    let daemon = TestDaemon::new();
    let mut guest = daemon.guest_of(0, |config| {
        config.rx_buffer_size = 65536;
        config.queue_size = 16;
    });
    let listener = daemon.host_listener(2000);
    let stream = guest.wait_connect(host(2000), deadline()).unwrap();
    let (program, _) = listener.accept().unwrap();
    exchange(guest, stream, program, 6 << 20);
}

#[test]
fn bytes_both_ways_without_event_index() {
    let daemon = TestDaemon::new();
    let mut guest = daemon.guest_of(0, |config| config.event_idx = false);
    let listener = daemon.host_listener(2000);
    let stream = guest.wait_connect(host(2000), deadline()).unwrap();
    let (program, _) = listener.accept().unwrap();
    exchange(guest, stream, program, 2 << 20);
}

#[test]
fn the_guests_end_of_file_leaves_the_other_way_open() {
    let daemon = TestDaemon::new();
    let (mut guest, stream, mut program) = joined(&daemon);
    guest.wait_send(stream, b"question", deadline()).unwrap();
    guest.shutdown(stream, Directions::SEND);
    let answer = thread::spawn(move || {
        let mut question = Vec::new();
        program.read_to_end(&mut question).unwrap();
        assert_eq!(question, b"question");
        program.write_all(b"answer").unwrap();
    });
    let mut got = Vec::new();
    guest
        .wait_recv_to_end(stream, &mut got, deadline())
        .unwrap();
    assert_eq!(got, b"answer");
    answer.join().unwrap();
}

#[test]
fn the_hosts_end_of_file_leaves_the_other_way_open() {
    let daemon = TestDaemon::new();
    let (mut guest, stream, mut program) = joined(&daemon);
    program.write_all(b"question").unwrap();
    program.shutdown(Shutdown::Write).unwrap();
    let mut got = Vec::new();
    guest
        .wait_recv_to_end(stream, &mut got, deadline())
        .unwrap();
    assert_eq!(got, b"question");
    guest.wait_send(stream, b"answer", deadline()).unwrap();
    guest.shutdown(stream, Directions::SEND);
    guest.drive().unwrap();
    let mut answer = Vec::new();
    let reader = thread::spawn(move || {
        program.read_to_end(&mut answer).unwrap();
        answer
    });
    eventually_with(&mut guest, "the answer read", |_| reader.is_finished());
    assert_eq!(reader.join().unwrap(), b"answer");
}

#[test]
fn a_guest_that_shuts_down_receiving_gives_the_host_a_broken_pipe() {
    let daemon = TestDaemon::new();
    let (mut guest, stream, mut program) = joined(&daemon);
    guest.shutdown(stream, Directions::RECEIVE);
    guest.drive().unwrap();
    let writer = thread::spawn(move || {
        let give_up = deadline();
        loop {
            match program.write_all(&[0u8; 1000]) {
                Err(error) => return (error.kind(), program),
                Ok(()) => assert!(Instant::now() < give_up, "no broken pipe"),
            }
        }
    });
    eventually_with(&mut guest, "a broken pipe", |_| writer.is_finished());
    let (kind, mut program) = writer.join().unwrap();
    assert_eq!(kind, ErrorKind::BrokenPipe);
    // The other way still works.
    guest.wait_send(stream, b"still here", deadline()).unwrap();
    let mut got = [0u8; 10];
    program.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"still here");
}

#[test]
fn a_guest_cannot_send_after_the_host_has_closed() {
    let daemon = TestDaemon::new();
    let (mut guest, stream, program) = joined(&daemon);
    drop(program);
    eventually_with(&mut guest, "a send that fails", |guest| {
        matches!(
            guest.send(stream, &[0u8; 100]),
            Err(crate::common::driver::SendError::ShutDown
                | crate::common::driver::SendError::Reset)
        )
    });
}

#[test]
fn a_host_port_without_a_listener_refuses_the_guest_at_once() {
    // What is given up is refused as well, but beyond the patience of this test.
    let daemon = TestDaemon::with(1, |config| config.connect_timeout = 2 * common::PATIENCE);
    let mut guest = daemon.guest();
    let refused = guest.wait_connect(host(4242), deadline());
    assert!(matches!(refused, Err(WaitError::Refused)), "{refused:?}");
}

#[test]
fn a_guest_that_does_not_listen_refuses_the_host_at_once() {
    // Of the two ends that the program could see, the time-out is beyond its patience.
    let daemon = TestDaemon::with(1, |config| config.connect_timeout = 2 * common::PATIENCE);
    let mut guest = daemon.guest();
    let uds_path = daemon.uds_path();
    let program = thread::spawn(move || connect_guest(&uds_path, 4242).map(drop));
    eventually_with(&mut guest, "refused", |_| program.is_finished());
    let refused = program.join().unwrap().unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::UnexpectedEof, "{refused}");
}

#[test]
fn payload_right_behind_the_connect_line_is_kept() {
    let daemon = TestDaemon::new();
    let mut guest = daemon.guest();
    guest.listen(PORT, 8).unwrap();
    let payload = bytes(7, 100_000);
    let mut program = hybrid(&daemon.uds_path());
    let mut message = b"\tconnect  +1000 x\r\n".to_vec();
    message.extend_from_slice(&payload);
    let writer = thread::spawn(move || {
        program.write_all(&message).unwrap();
        let port = read_ok(&mut program).unwrap();
        assert_eq!(
            port, 1000,
            "the guest's port, as vhost-device-vsock says it"
        );
        program.shutdown(Shutdown::Write).unwrap();
        program
    });
    let stream = guest.wait_accept(PORT, deadline()).unwrap();
    let mut got = Vec::new();
    guest
        .wait_recv_to_end(stream, &mut got, deadline())
        .unwrap();
    assert_bytes(&got, &payload);
    writer.join().unwrap();
}

#[test]
fn a_connect_line_split_in_bytes_is_understood() {
    let daemon = TestDaemon::new();
    let mut guest = daemon.guest();
    guest.listen(PORT, 8).unwrap();
    let mut program = hybrid(&daemon.uds_path());
    let writer = thread::spawn(move || {
        for byte in b"CONNECT 1000\nhello" {
            program.write_all(&[*byte]).unwrap();
            thread::sleep(Duration::from_millis(1));
        }
        read_ok(&mut program).unwrap();
        program
    });
    let stream = guest.wait_accept(PORT, deadline()).unwrap();
    let mut got = [0u8; 5];
    guest.wait_recv_exact(stream, &mut got, deadline()).unwrap();
    assert_eq!(&got, b"hello");
    writer.join().unwrap();
}

#[test]
fn what_is_no_connect_line_is_closed() {
    let daemon = TestDaemon::new();
    let _guest = daemon.guest();
    for bad in [
        &b"HELLO 1000\n"[..],
        b"CONNECT\n",
        b"CONNECT x\n",
        b"CONNECT -1\n",
        b"CONNECT 4294967296\n",
        b"\n",
        b"\0\0\0\0",
        b"CONNECT 00000000000000000000000000000000000000000001000\n",
        &[b' '; 4096],
        &[b'C'; 4096],
    ] {
        let mut program = hybrid(&daemon.uds_path());
        // The device may close before all is written.
        let _ = program.write_all(bad);
        let mut answer = Vec::new();
        match program.read_to_end(&mut answer) {
            Ok(_) => assert_eq!(answer, b"", "to {:?}", String::from_utf8_lossy(bad)),
            Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}"),
        }
    }
}

#[test]
fn a_missing_connect_line_times_out_without_effect_on_others() {
    let daemon = TestDaemon::with(1, |config| {
        config.connect_timeout = Duration::from_millis(300)
    });
    let mut silent: Vec<UnixStream> = (0..20).map(|_| hybrid(&daemon.uds_path())).collect();
    for (n, program) in silent.iter_mut().enumerate() {
        program.write_all(&b"CONNECT 10"[..n % 10]).unwrap();
    }
    let (guest, stream, program) = joined(&daemon);
    exchange(guest, stream, program, 100_000);
    for mut program in silent {
        let mut answer = Vec::new();
        match program.read_to_end(&mut answer) {
            Ok(_) => assert_eq!(answer, b""),
            Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}"),
        }
    }
}

#[test]
fn a_hundred_and_fifty_connections_at_once() {
    const COUNT: usize = 150;
    let daemon = TestDaemon::new();
    let mut guest = daemon.guest();
    guest.listen(PORT, COUNT).unwrap();
    let uds_path = daemon.uds_path();
    let programs = thread::spawn(move || {
        let mut programs: Vec<UnixStream> = (0..COUNT)
            .map(|_| connect_guest(&uds_path, PORT.get()).unwrap())
            .collect();
        for (n, program) in programs.iter_mut().enumerate() {
            program.write_all(&bytes(n as u64, 3000)).unwrap();
            program.shutdown(Shutdown::Write).unwrap();
        }
        for (n, program) in programs.iter_mut().enumerate() {
            let mut got = Vec::new();
            program.read_to_end(&mut got).unwrap();
            assert_bytes(&got, &bytes(n as u64, 3000));
        }
    });
    // The guest echoes on all of them, as their events come.
    let mut part = [0u8; 4096];
    let give_up = deadline();
    let mut echoed = HashSet::new();
    while echoed.len() < COUNT {
        assert!(
            Instant::now() < give_up,
            "{} of {COUNT} echoed",
            echoed.len()
        );
        match guest.poll(Some(give_up)).unwrap() {
            Some(DriverEvent::Incoming { port }) => {
                assert!(guest.accept(port).is_some());
                while guest.accept(port).is_some() {}
            }
            Some(DriverEvent::Ready { stream }) => {
                while let Ok(more) = guest.recv(stream, &mut part) {
                    if more == 0 {
                        guest.shutdown(stream, Directions::SEND);
                        echoed.insert(stream);
                        break;
                    }
                    guest.wait_send(stream, &part[..more], give_up).unwrap();
                }
            }
            _ => {}
        }
    }
    eventually_with(&mut guest, "all programs content", |_| {
        programs.is_finished()
    });
    programs.join().unwrap();
}

#[test]
fn every_byte_before_a_close_arrives_at_the_host() {
    let daemon = TestDaemon::new();
    let mut guest = daemon.guest();
    let listener = daemon.host_listener(2000);
    for round in 0..20 {
        let len = 50_000 + 30_000 * round as usize;
        let stream = guest.wait_connect(host(2000), deadline()).unwrap();
        let (mut program, _) = listener.accept().unwrap();
        let reader = thread::spawn(move || {
            // Late, so that the close overtakes the reading.
            thread::sleep(Duration::from_millis(10));
            let mut got = Vec::new();
            program.read_to_end(&mut got).unwrap();
            got
        });
        guest
            .wait_send(stream, &bytes(round, len), deadline())
            .unwrap();
        guest.close(stream);
        eventually_with(&mut guest, "everything read", |_| reader.is_finished());
        assert_bytes(&reader.join().unwrap(), &bytes(round, len));
    }
}

#[test]
fn every_byte_before_a_close_arrives_at_the_guest() {
    let daemon = TestDaemon::new();
    let mut guest = daemon.guest();
    guest.listen(PORT, 8).unwrap();
    for round in 0..20 {
        let len = 50_000 + 30_000 * round as usize;
        let uds_path = daemon.uds_path();
        let writer = thread::spawn(move || {
            let mut program = connect_guest(&uds_path, PORT.get()).unwrap();
            program.write_all(&bytes(round, len)).unwrap();
        });
        let stream = guest.wait_accept(PORT, deadline()).unwrap();
        let mut got = Vec::new();
        guest
            .wait_recv_to_end(stream, &mut got, deadline())
            .unwrap();
        assert_bytes(&got, &bytes(round, len));
        guest.close(stream);
        writer.join().unwrap();
    }
    eventually_with(&mut guest, "all closed", |guest| guest.connections() == 0);
}

#[test]
fn a_reset_by_the_guest_closes_the_host_socket() {
    let daemon = TestDaemon::new();
    let (mut guest, stream, mut program) = joined(&daemon);
    guest.abort(stream);
    guest.drive().unwrap();
    let mut rest = Vec::new();
    match program.read_to_end(&mut rest) {
        Ok(_) => assert_eq!(rest, b""),
        Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
    }
}

#[test]
fn both_ends_closed_leaves_nothing_behind() {
    let daemon = TestDaemon::new();
    let (mut guest, stream, program) = joined(&daemon);
    drop(program);
    eventually_with(&mut guest, "finished", |guest| {
        guest.shutdown(stream, Directions::BOTH);
        let mut part = [0u8; 10];
        let _ = guest.recv(stream, &mut part);
        guest.state(stream) == Some(StreamState::Finished)
    });
    guest.close(stream);
    assert_eq!(guest.connections(), 0);
    if let Some(stats) = daemon.stats() {
        common::eventually("the connection counted out", || {
            daemon
                .stats()
                .is_some_and(|stats| stats.conns_removed == stats.conns_added)
        });
        assert_eq!(stats.conns_added, 1);
    }
}

/// What the host had written and the guest never read lies in the socket when it is closed: the
/// guest's own stream ends in order all the same, not with ECONNRESET.
#[test]
fn bytes_that_a_deaf_guest_never_read_do_not_spoil_the_end() {
    unread_at_the_end(true, b"bye");
}

/// The same when the guest closes both ways at once.
#[test]
fn bytes_that_a_closing_guest_never_read_do_not_spoil_the_end() {
    unread_at_the_end(false, b"bye");
}

/// And when it has nothing to say itself, so that its close is all that comes.
#[test]
fn bytes_that_a_silent_guest_never_read_do_not_spoil_the_end() {
    unread_at_the_end(false, b"");
}

fn unread_at_the_end(deaf_first: bool, last: &'static [u8]) {
    let daemon = TestDaemon::new();
    let (mut guest, stream, mut program) = joined(&daemon);
    program.set_nonblocking(true).unwrap();
    // More than the guest's buffer and the sockets take: the guest reads nothing.
    let written = |stats: zerosock::daemon::Stats| stats.tx_bytes >= 200_000;
    eventually_with(&mut guest, "a full socket", |_| {
        let full = program.write(&[1u8; 10_000]).is_err();
        full && daemon.stats().is_none_or(written)
    });
    if deaf_first {
        guest.shutdown(stream, Directions::RECEIVE);
        eventually_with(&mut guest, "a broken pipe", |_| {
            program
                .write(&[1])
                .is_err_and(|e| e.kind() == ErrorKind::BrokenPipe)
        });
    }
    guest.wait_send(stream, last, deadline()).unwrap();
    guest.close(stream);
    guest.drive().unwrap();
    program.set_nonblocking(false).unwrap();
    let reader = thread::spawn(move || {
        let mut got = Vec::new();
        program.read_to_end(&mut got).map(|_| got)
    });
    eventually_with(&mut guest, "the end", |_| reader.is_finished());
    assert_eq!(reader.join().unwrap().unwrap(), last);
}
