//! Datagrams that fail after they took a notification id, and timestamps in front of notifications:
//! every other buffer is returned when the kernel no longer reads it, and not before.

use std::iter;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::AsRawFd;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use zerosock_zc::sys::{Event, SendMode, Submission, ZcSocket, leaked_buffers};
use zerosock_zc::{Copying, Outgoing, Returned, SendBackend, Sender, Sent};

use crate::alone::alone;
use crate::faults::limit_locked_memory;
use crate::network::{SINK, ip, tc, with_sink};

const PATIENCE: Duration = Duration::from_secs(30);

fn set(socket: &UdpSocket, level: i32, option: i32) {
    let on: libc::c_int = 1;
    // SAFETY: an int that outlives the call, with its length.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            option,
            (&raw const on).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

const SUBMISSION: Submission = Submission {
    mode: SendMode::ZeroCopy,
    from: 0,
    whole: false,
    linked: false,
    more: false,
    when_writable: false,
};

/// Waits until nothing is busy_places.
fn wait_until_idle(calls: &mut ZcSocket<Vec<u8>>) {
    let begun = Instant::now();
    while calls.busy_places() > 0 {
        assert!(begun.elapsed() < PATIENCE);
        calls.wait(Some(PATIENCE)).expect("the kernel answers");
        while calls.event().is_some() {}
    }
}

/// A queue in front of the device that passes 3000 bytes, queues as much, and drops the rest.
fn delay_packets() {
    tc("qdisc replace dev sink0 root tbf rate 8bit burst 3000 limit 3000");
}

fn socket(to: &str) -> UdpSocket {
    let v6 = to.starts_with('[');
    let socket = UdpSocket::bind(if v6 { "[::]:0" } else { "0.0.0.0:0" }).expect("an address");
    socket.connect(to).expect("a route");
    // Without IP_RECVERR, UDP does not report a full queue.
    if v6 {
        set(&socket, libc::SOL_IPV6, libc::IPV6_RECVERR);
    }
    set(&socket, libc::SOL_IP, libc::IP_RECVERR);
    socket
}

fn sender(to: &str) -> Sender<Vec<u8>> {
    let builder = Sender::builder().backend(SendBackend::ErrorQueue);
    builder.open(socket(to)).expect("a sender")
}

fn send(sender: &mut Sender<Vec<u8>>, len: usize, mark: u8) {
    let outgoing = Outgoing::new(vec![mark; len]).copying(Copying::Never);
    let sent = sender.send(outgoing).map_err(|refused| refused.why);
    sent.expect("it is accepted");
}

/// The returned buffers: the first byte and the outcome of each.
fn back(sender: &mut Sender<Vec<u8>>) -> Vec<(u8, Option<Sent>)> {
    sender.poll().expect("the kernel answers");
    let outcome = |one: Returned<Vec<u8>>| (one.buffer[0], one.outcome.ok());
    std::iter::from_fn(|| sender.returned())
        .map(outcome)
        .collect()
}

#[test]
fn a_late_error_frees_no_other_buffer() {
    with_sink("a_late_error_frees_no_other_buffer", || {
        for to in SINK {
            delay_packets();
            let mut sender = sender(to);
            // Through, and what follows has to wait.
            send(&mut sender, 2500, 1);
            assert_eq!(back(&mut sender), [(1, Some(Sent::InPlace))], "{to}");
            for round in 0..10 {
                // Never through, with a number and a notification.
                send(&mut sender, 4000, 2);
                assert_eq!(back(&mut sender), [(2, None)], "{to}, {round}");
                // Fails before it has a number.
                send(&mut sender, 70_000, 3);
                assert_eq!(back(&mut sender), [(3, None)], "{to}, {round}");
            }
            send(&mut sender, 2500, 4);
            // It waits in the queue, and so does its buffer.
            assert_eq!(back(&mut sender), [], "{to}");
            assert!(!sender.finish(Some(Duration::from_millis(100))).expect("it"));
            assert_eq!(back(&mut sender), [], "{to}");
            tc("qdisc del dev sink0 root");
            assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
            assert_eq!(back(&mut sender), [(4, Some(Sent::InPlace))], "{to}");
            // The ids are still in step: the next send is notified when its id is reported.
            for mark in 5..20 {
                send(&mut sender, 2500, mark);
                let found = back(&mut sender);
                assert_eq!(found, [(mark, Some(Sent::InPlace))], "{to}");
            }
        }
    });
}

#[test]
fn a_datagram_that_failed_in_part_keeps_its_buffer() {
    with_sink("a_datagram_that_failed_in_part", || {
        for to in SINK {
            let mtu = ["link", "set", "sink0", "mtu", "1500"];
            let status = Command::new("ip").args(mtu).status();
            assert!(status.expect("ip(8)").success());
            tc("qdisc replace dev sink0 root tbf rate 8bit burst 3000 limit 6000");
            let socket = socket(to);
            let opened = ZcSocket::open(socket.into(), 4, Some(SendBackend::ErrorQueue));
            let mut calls: ZcSocket<Vec<u8>> = opened.expect("a zc_socket");
            let start = |calls: &mut ZcSocket<_>, len| {
                let key = calls.put(vec![1; len], None).expect("a place");
                calls.start(&[key], SUBMISSION).expect("it is made");
                let done = iter::from_fn(|| calls.event()).find_map(|event| match event {
                    Event::Done(of, result) if of == key => Some(result),
                    _ => None,
                });
                (key, done.expect("a result"))
            };
            // Its first fragments are sent, some are queued, and the others are dropped.
            let (parts, result) = start(&mut calls, 20_000);
            assert_eq!(
                result.map_err(|why| why.raw_os_error()),
                Err(Some(libc::ENOBUFS))
            );
            let (next, result) = start(&mut calls, 300);
            assert_eq!(result.expect("it is copied"), 300);
            calls.reap().expect("the kernel answers");
            assert!(!calls.idle(parts) && calls.idle(next), "{to}");
            tc("qdisc del dev sink0 root");
            wait_until_idle(&mut calls);
            assert!(calls.idle(parts) && calls.idle(next), "{to}");
        }
    });
}

/// The error queue back-end counts messages that are no notifications; the other back-ends leave
/// them to the application.
#[test]
fn network_errors_in_the_error_queue_are_counted_or_left() {
    for backend in [SendBackend::ErrorQueue, SendBackend::Uring] {
        let closed = UdpSocket::bind("127.0.0.1:0").expect("loopback");
        let address = closed.local_addr().expect("an address");
        drop(closed);
        let socket = UdpSocket::bind("127.0.0.1:0").expect("loopback");
        set(&socket, libc::SOL_IP, libc::IP_RECVERR);
        let own = socket.try_clone().expect("a descriptor");
        let mut sender: Sender<Vec<u8>> = Sender::builder()
            .backend(backend)
            .open(socket)
            .expect("a sender");
        let to = zerosock_zc::SocketAddress::new(&address).expect("it is short");
        let outgoing = Outgoing::new(vec![1; 3000]).copying(Copying::Never).to(to);
        let sent = sender.send(outgoing).map_err(|refused| refused.why);
        sent.expect("it is accepted");
        assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
        // SAFETY: no memory is named.
        let left = unsafe {
            let flags = libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT;
            libc::recv(own.as_raw_fd(), std::ptr::null_mut(), 0, flags)
        };
        let found = (sender.stats().foreign, left >= 0);
        let expected = match backend {
            SendBackend::ErrorQueue => (1, false),
            _ => (0, true),
        };
        assert_eq!(found, expected, "{backend:?}");
    }
}

#[test]
fn a_timestamp_does_not_hide_a_notification() {
    with_sink("a_timestamp_in_front_of_a_name", || {
        for to in SINK {
            let socket = socket(to);
            set(&socket, libc::SOL_SOCKET, libc::SO_TIMESTAMP);
            set(&socket, libc::SOL_SOCKET, libc::SO_RXQ_OVFL);
            let builder = Sender::builder().backend(SendBackend::ErrorQueue);
            let mut sender: Sender<Vec<u8>> = builder.open(socket).expect("a sender");
            let begun = Instant::now();
            for _ in 0..100 {
                send(&mut sender, 5000, 1);
            }
            assert!(
                sender.finish(Some(PATIENCE)).expect("it"),
                "{to}: {begun:?}"
            );
            assert_eq!(sender.stats().in_place, 100, "{to}");
        }
    });
}

/// The kernel assigns an id to an empty zero-copy datagram.
#[test]
fn an_empty_datagram_takes_no_other_id() {
    with_sink("an_empty_datagram_takes_no_other_id", || {
        for to in SINK {
            delay_packets();
            let opened = ZcSocket::open(socket(to).into(), 8, Some(SendBackend::ErrorQueue));
            let mut calls: ZcSocket<Vec<u8>> = opened.expect("a zc_socket");
            let start = |calls: &mut ZcSocket<_>, len, more| {
                let key = calls.put(vec![1; len], None).expect("a place");
                let submission = Submission { more, ..SUBMISSION };
                calls.start(&[key], submission).expect("it is made");
                key
            };
            // All of it passes: one of two pieces, the second of them empty, and empty ones.
            let mut through = vec![start(&mut calls, 2000, true)];
            through.extend([0, 0, 0, 0].map(|len| start(&mut calls, len, false)));
            // The next send must wait. The error queue was not read in between.
            let held = [1300, 0, 1200].map(|len| start(&mut calls, len, false));
            calls.reap().expect("the kernel answers");
            assert!(through.iter().all(|&key| calls.idle(key)), "{to}");
            assert!(!calls.idle(held[0]) && !calls.idle(held[2]), "{to}");
            assert!(calls.idle(held[1]), "{to}");
            tc("qdisc del dev sink0 root");
            wait_until_idle(&mut calls);
        }
    });
}

const ELSEWHERE: &str = "10.9.1.2:9";

/// A second device, with a queue that delays packets.
fn add_elsewhere() {
    ip("link add sink1 type ifb");
    ip("addr add 10.9.1.1/24 dev sink1");
    ip("link set sink1 mtu 65535 up");
    ip("neigh add 10.9.1.2 lladdr 02:00:00:00:00:03 dev sink1 nud permanent");
    tc("qdisc replace dev sink1 root tbf rate 8bit burst 3000 limit 100000");
}

/// Queues `sends` sends of two pages in a device that the test does not use otherwise.
fn hold_elsewhere(to: &str, sends: u32) -> ZcSocket<Vec<u8>> {
    let opened = ZcSocket::open(socket(to).into(), 16, Some(SendBackend::ErrorQueue));
    let mut other: ZcSocket<Vec<u8>> = opened.expect("a zc_socket");
    // The first is through.
    for _ in 0..=sends {
        let key = other.put(vec![2; 2500], None).expect("a place");
        other.start(&[key], SUBMISSION).expect("it is made");
        other.reap().expect("the kernel answers");
    }
    assert_eq!(other.reading(), sends);
    other
}

#[test]
fn locked_memory_of_others_does_not_free_a_failed_send() {
    let name = "late_errors::locked_memory_of_others_does_not_free_a_failed_send";
    alone(name, || {
        let _ = with_sink(name, || {
            ip("link set sink0 mtu 1500");
            add_elsewhere();
            for to in SINK {
                tc("qdisc replace dev sink0 root tbf rate 8bit burst 3000 limit 6000");
                let unprivileged = || {
                    let _ = limit_locked_memory(16 << 12);
                    let other = hold_elsewhere(ELSEWHERE, 5);
                    let opened =
                        ZcSocket::open(socket(to).into(), 4, Some(SendBackend::ErrorQueue));
                    let mut calls: ZcSocket<Vec<u8>> = opened.expect("a zc_socket");
                    // Six pages: some of its fragments wait, others are dropped, and what is left
                    // of the memory is less than any send needs.
                    let key = calls.put(vec![1; 20_000], None).expect("a place");
                    calls.start(&[key], SUBMISSION).expect("it is made");
                    (other, calls, key)
                };
                let thread = thread::scope(|scope| scope.spawn(unprivileged).join());
                let (mut other, mut calls, key) = thread.expect("the thread");
                let done = iter::from_fn(|| calls.event()).find_map(|event| match event {
                    Event::Done(_, result) => result.err(),
                    Event::Notified { .. } => None,
                });
                let code = done.and_then(|error| error.raw_os_error());
                assert_eq!(code, Some(libc::ENOBUFS), "{to}");
                assert!(!calls.idle(key), "{to}: the queue has some of it");
                tc("qdisc del dev sink0 root");
                wait_until_idle(&mut calls);
                tc("qdisc del dev sink1 root");
                wait_until_idle(&mut other);
                tc("qdisc replace dev sink1 root tbf rate 8bit burst 3000 limit 100000");
            }
        });
    });
}

#[test]
fn a_send_that_never_has_memory_is_not_in_doubt() {
    let name = "late_errors::a_send_that_never_has_memory_is_not_in_doubt";
    alone(name, || {
        let _ = with_sink(name, || {
            // Less than any send needs.
            let _ = limit_locked_memory(1 << 12);
            for to in SINK {
                let mut sender = sender(to);
                for mark in 0..10 {
                    send(&mut sender, 3000, mark);
                    assert_eq!(back(&mut sender), [(mark, Some(Sent::Copied))], "{to}");
                }
            }
        });
    });
}

/// Locked memory that others use up makes a send fail, and a multicast group is charged to the option
/// memory of the socket: no report comes, and the socket does not show that none will.
#[test]
fn a_failed_send_in_doubt_keeps_its_buffer_but_nothing_else() {
    let name = "late_errors::a_failed_send_in_doubt_keeps_its_buffer_but_nothing_else";
    alone(name, || {
        let _ = with_sink(name, || {
            add_elsewhere();
            let (group, interface) = (Ipv4Addr::new(224, 0, 0, 99), Ipv4Addr::new(10, 9, 0, 1));
            let open = || {
                let socket = socket(SINK[0]);
                let own = socket.try_clone().expect("a descriptor");
                own.join_multicast_v4(&group, &interface).expect("a group");
                let builder = Sender::builder().backend(SendBackend::ErrorQueue);
                let mut sender: Sender<Vec<u8>> = builder.open(socket).expect("a sender");
                // Its ids are known before there is no memory to find them out.
                send(&mut sender, 300, 0);
                assert_eq!(back(&mut sender), [(0, Some(Sent::InPlace))]);
                (own, sender)
            };
            let in_doubt = move || {
                let _ = limit_locked_memory(16 << 12);
                let mut all = [open(), open(), open()];
                let other = hold_elsewhere(ELSEWHERE, 8);
                for (_, sender) in &mut all {
                    send(sender, 300, 1);
                    assert_eq!(back(sender), [], "it is not known");
                }
                (all, other)
            };
            let thread = thread::scope(|scope| scope.spawn(in_doubt).join());
            let ([(own, mut sender), closed, dropped], mut other) = thread.expect("the thread");
            // There is memory again.
            tc("qdisc del dev sink1 root");
            wait_until_idle(&mut other);
            send(&mut sender, 300, 2);
            assert_eq!(back(&mut sender), [(2, Some(Sent::Copied))], "meanwhile");
            own.leave_multicast_v4(&group, &interface)
                .expect("the group");
            send(&mut sender, 300, 3);
            let mut marks: Vec<_> = back(&mut sender).iter().map(|&(mark, _)| mark).collect();
            marks.sort_unstable();
            assert_eq!(marks, [1, 3], "drained");
            assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));

            // Nothing waits for ever.
            let ((_, mut closed), (own, dropped)) = (closed, dropped);
            let shared = dropped.into_shared().expect("a shared sender");
            let held = thread::scope(|scope| {
                let other = scope.spawn(|| !shared.finish(None).expect("it"));
                !closed.finish(None).expect("it") && other.join().expect("the thread")
            });
            assert!(held, "a buffer is held");
            assert!(closed.is_quiet() && back(&mut closed).is_empty());
            closed.wait(None).expect("it");
            let Err(busy) = closed.into_socket() else {
                panic!("the kernel may read the buffer");
            };
            assert_eq!(busy.sender.close(None).held, 1);
            let port = own.local_addr().expect("an address");
            drop((own, shared));
            let begun = Instant::now();
            while UdpSocket::bind(port).is_err() {
                assert!(begun.elapsed() < PATIENCE, "the descriptor is not closed");
                thread::sleep(Duration::from_millis(1));
            }
            while leaked_buffers() < 2 {
                assert!(begun.elapsed() < PATIENCE);
                thread::sleep(Duration::from_millis(1));
            }
        });
    });
}
