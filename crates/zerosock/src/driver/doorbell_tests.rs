//! A doorbell that is a stream: each side wakes the other while it sleeps, also if the device drops wake-ups as long as
//! one is unread; no side waits for the other; the end of the stream is that of the device.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::fs::{OFlags, fcntl_getfl};
use rustix::io::ioctl_fionread;
use zerosock_proto::wire::vsock::Op;
use zerosock_virtio::poller::Events;

use super::*;
use crate::driver::test_device::{TestDevice, connect, guest_pair};
use crate::driver::{Driver, IDLE_TURNS, StreamId, StreamState};
use crate::table::backend::Backend;
use crate::table::calls::ConnectionCalls;
use crate::table::sending::SendingCalls;
use crate::table::transfers::Publish;

fn connected() -> (Driver, TestDevice, StreamId) {
    let (mut driver, mut peer) = guest_pair(|config| config.queue_size = 64);
    let id = connect(&mut driver, &mut peer);
    while driver.next_ready().is_some() {}
    (driver, peer, id)
}

fn stream(driver: &Driver) -> &OwnedFd {
    let Doorbell::Stream(stream, _) = &driver.doorbell else {
        panic!("a doorbell of eventfds");
    };
    stream
}

/// Wakes the driver as a daemon does: unless a wake-up is unread.
fn wake(socket: &mut UnixStream, other_end: impl AsFd) {
    if ioctl_fionread(other_end).unwrap() == 0 {
        socket.write_all(&[0]).unwrap();
    }
}

/// Takes the bytes that the driver has sent.
fn rung(peer: &TestDevice) -> usize {
    let mut socket = peer.socket.as_ref().unwrap();
    socket.set_nonblocking(true).unwrap();
    let (mut all, mut bytes) = (0, [0; 1024]);
    loop {
        match socket.read(&mut bytes) {
            Ok(len) => all += len,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return all,
            Err(error) => panic!("{error}"),
        }
    }
}

/// Sleeps until an event, at most `limit`, and handles it. Returns whether there was one.
fn sleep(driver: &mut Driver, limit: Duration) -> bool {
    let mut events = Events::default();
    events.wait(driver.fd(), Some(limit)).unwrap();
    let event = driver.watch.has_device_event(&events);
    driver.handle_events(&events);
    event
}

const LONG: Duration = Duration::from_secs(300);

#[test]
fn a_wake_up_is_read_when_its_event_is_handled() {
    let (mut driver, mut peer, id) = connected();
    assert!(!Backend::arm(&mut driver));
    peer.send(Op::Rw, b"hello");
    peer.socket.as_mut().unwrap().write_all(&[0; 3]).unwrap();
    assert!(sleep(&mut driver, LONG));
    assert_eq!(ioctl_fionread(stream(&driver)).unwrap(), 0);
    assert!(!sleep(&mut driver, Duration::ZERO), "it was the only one");
    driver.disarm();
    Backend::drive(&mut driver).unwrap();
    assert_eq!(driver.unread(id), 5);
    assert!(driver.is_attached());
}

#[test]
fn one_byte_wakes_the_device_for_all_queues_and_only_if_it_asked() {
    let (mut driver, mut peer, id) = connected();
    rung(&peer);
    peer.tx.disable_notifications();
    peer.rx.disable_notifications();
    assert_eq!(driver.write(id, b"x", Publish::Now), Ok(1));
    assert_eq!(rung(&peer), 0);
    // The device has used all buffers, so it waits for buffers and for packets.
    while peer.take().is_some() {}
    while peer.try_send(Op::Rw, b"hello") {}
    Backend::drive(&mut driver).unwrap();
    assert!(!peer.tx.enable_notifications() && !peer.rx.enable_notifications());
    assert_eq!(driver.read(id, &mut [0; 64], false), Ok(64));
    assert_eq!(driver.write(id, b"y", Publish::Later), Ok(1));
    assert_eq!(rung(&peer), 0);
    Backend::flush(&mut driver);
    assert_eq!(peer.take().map(|(_, bytes)| bytes), Some(b"y".to_vec()));
    assert!(peer.rx.posted() > 0);
    assert_eq!(rung(&peer), 1);
}

#[test]
fn kicks_that_the_device_does_not_read_neither_wait_nor_change_the_descriptor() {
    let (mut driver, mut peer, _) = connected();
    rung(&peer);
    peer.socket
        .as_mut()
        .unwrap()
        .set_nonblocking(false)
        .unwrap();
    let flags = fcntl_getfl(stream(&driver)).unwrap();
    assert!(!flags.contains(OFlags::NONBLOCK), "a call could block");
    let mut kicks = 0;
    while ioctl_fionread(peer.socket.as_ref().unwrap()).unwrap() == kicks && kicks < 1 << 20 {
        driver.doorbell.kick(0);
        kicks += 1;
    }
    assert!(kicks > 1 && kicks < 1 << 20, "{kicks} kicks and never full");
    driver.doorbell.kick_all();
    assert_eq!(fcntl_getfl(stream(&driver)).unwrap(), flags);
    // The last one is not lost: the driver sends it again before it sleeps.
    assert!(Backend::arm(&mut driver));
    assert!(rung(&peer) > 0, "wake-ups are pending");
    assert!(!Backend::arm(&mut driver));
    assert_eq!(rung(&peer), 1);
    assert!(!Backend::arm(&mut driver));
    assert_eq!(rung(&peer), 0);
    // A device that is gone is not waited for, and raises no signal.
    peer.socket = None;
    driver.doorbell.kick(0);
    assert!(!driver.doorbell.has_unsent_kick());
}

#[test]
fn a_flood_of_wake_ups_is_read_in_bounded_pieces() {
    let (mut driver, mut peer, id) = connected();
    let socket = peer.socket.as_mut().unwrap();
    socket.set_nonblocking(true).unwrap();
    let mut sent = 0;
    while let Ok(len) = socket.write(&[0; 4096]) {
        sent += len as u64;
    }
    let most = MOST_READS * 256;
    assert!(sent > 2 * most as u64, "{sent} bytes fill the doorbell");
    let mut left = ioctl_fionread(stream(&driver)).unwrap();
    assert_eq!(left, sent);
    assert!(sleep(&mut driver, LONG));
    while left > 0 {
        let now = ioctl_fionread(stream(&driver)).unwrap();
        assert!(now < left && left - now <= most as u64, "{left} {now}");
        left = now;
        assert!(!driver.doorbell.has_hung_up());
    }
    assert_eq!(driver.state(id), Some(StreamState::Connected));
}

#[test]
fn the_end_of_the_doorbell_is_that_of_the_device() {
    // Alone, and behind wake-ups that arrive with it.
    for bytes in [0, 2] {
        let (mut driver, mut peer, id) = connected();
        assert!(!Backend::arm(&mut driver));
        peer.send(Op::Rw, b"the last bytes");
        let mut socket = peer.socket.take().unwrap();
        socket.write_all(&vec![0; bytes]).unwrap();
        drop(socket);
        assert!(sleep(&mut driver, LONG));
        driver.disarm();
        assert!(!driver.is_attached());
        assert!(Backend::drive(&mut driver).is_err());
        assert_eq!(driver.state(id), Some(StreamState::Reset));
        assert_eq!(driver.unread(id), 14);
    }
    // An agent ends it by shutdown, because copies of the descriptor live on.
    let (mut driver, peer, _) = connected();
    let copy = stream(&driver).try_clone().unwrap();
    rustix::net::shutdown(&copy, rustix::net::Shutdown::Both).unwrap();
    assert!(sleep(&mut driver, LONG));
    assert!(!driver.is_attached());
    drop(peer);
}

#[test]
fn a_spinning_caller_notices_the_end_and_not_a_wake_up() {
    let (mut driver, mut peer, id) = connected();
    for _ in 0..3 * IDLE_TURNS {
        peer.socket.as_mut().unwrap().write_all(&[0]).unwrap();
        Backend::drive(&mut driver).unwrap();
    }
    peer.socket = None;
    assert!((0..=IDLE_TURNS).any(|_| Backend::drive(&mut driver).is_err()));
    assert_eq!(driver.state(id), Some(StreamState::Reset));
}

#[test]
fn a_device_without_a_connection_takes_no_vhost_user_requests() {
    let (mut driver, _peer, _) = connected();
    assert!(driver.frontend().is_none());
    driver.send_memory_table().unwrap_err();
    driver.resume(&[0; 3]).unwrap_err();
    driver.reconnect().unwrap_err();
    assert!(driver.is_attached());
}

/// Both sides sleep each time, and the device drops each wake-up for which another is unread.
#[test]
fn no_wake_up_is_lost_while_both_sides_sleep() {
    const ROUNDS: u32 = 3000;
    let (mut driver, mut peer, id) = connected();
    rung(&peer);
    let mut socket = peer.socket.take().unwrap();
    socket.set_nonblocking(false).unwrap();
    socket.set_read_timeout(Some(LONG)).unwrap();
    let other_end = stream(&driver).try_clone().unwrap();
    std::thread::scope(|scope| {
        let device = scope.spawn(move || {
            let mut echoed = 0;
            while echoed < ROUNDS {
                let mut sent = false;
                while let Some((header, bytes)) = peer.take() {
                    if header.op.known() == Some(Op::Rw) {
                        peer.send(Op::Rw, &bytes);
                        echoed += 1;
                        sent = true;
                    }
                }
                if sent {
                    wake(&mut socket, &other_end);
                } else if !peer.tx.enable_notifications() {
                    assert_ne!(socket.read(&mut [0; 64]).unwrap(), 0);
                }
            }
            // The device does not hang up before the driver has read all.
            (peer, socket)
        });
        for round in 0..ROUNDS {
            assert_eq!(driver.write(id, &round.to_le_bytes(), Publish::Now), Ok(4));
            while driver.unread(id) < 4 {
                if !Backend::arm(&mut driver) {
                    assert!(sleep(&mut driver, LONG), "no wake-up in round {round}");
                }
                driver.disarm();
                Backend::drive(&mut driver).unwrap();
            }
            let mut echo = [0; 4];
            assert_eq!(driver.read(id, &mut echo, false), Ok(4));
            assert_eq!(u32::from_le_bytes(echo), round);
            Backend::flush_after_read(&mut driver);
        }
        drop(device.join().unwrap());
    });
    let kicks = Backend::stats(&driver).notifications;
    assert!(kicks <= 2 * u64::from(ROUNDS) + 64, "{kicks}");
}
