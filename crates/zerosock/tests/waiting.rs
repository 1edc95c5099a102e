//! Every kind of wait is woken when another thread or the peer changes what it waits for.

use std::io::{BufRead, ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use crate::common::driver::{Driver, DriverConfig};
use crate::common::{self, PATIENCE, TestDaemon, deadline, eventually};
use rustix::buffer::spare_capacity;
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use zerosock::vsock::{Endpoint, Host, Listener, Poller, Readiness, Stream, StreamState, Wait};
use zerosock::{Address, Cid, Port};

const PORT: Port = Port::new(5);

fn there() -> Address {
    Address::new(Cid::new(4), PORT)
}

fn endpoints(daemon: &TestDaemon) -> [Endpoint; 2] {
    [0, 1].map(|index| {
        Endpoint::builder()
            .queue_pairs(common::pairs())
            .attach_device(&daemon.vms[index].socket)
            .unwrap()
    })
}

/// The output of `wait`. Panics if it took long: then no event woke it, and its time-out did.
fn told<T>(wait: impl FnOnce() -> T) -> T {
    let began = Instant::now();
    let found = wait();
    assert!(began.elapsed() < PATIENCE, "never told");
    found
}

/// One connection more, between the first and the second endpoint.
fn connected(client: &Endpoint, listener: &Listener) -> (Stream, Stream) {
    let pair = thread::scope(|scope| {
        let accepting = scope.spawn(|| listener.accept_timeout(PATIENCE).unwrap().0);
        (client.connect(there()).unwrap(), accepting.join().unwrap())
    });
    for stream in [&pair.0, &pair.1] {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
    }
    pair
}

/// Sends back what comes, until the end; told by a poller of its own when there is something.
fn echo(stream: Stream, wait: Wait) {
    stream.set_nonblocking(true).unwrap();
    let mut poller = Poller::new(wait);
    poller.add_stream(&stream, 7, Readiness::READABLE);
    let mut word = [0; 8];
    loop {
        let ready = told(|| poller.wait(Some(PATIENCE)).unwrap());
        assert!(!ready.is_empty());
        match (&stream).read(&mut word) {
            Ok(0) => return,
            Ok(got) => (&stream).write_all(&word[..got]).unwrap(),
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
    }
}

#[test]
fn pollers_sleepers_and_spinners_share_an_endpoint() {
    const ROUNDS: u64 = 500;
    let daemon = TestDaemon::with(2, |_| {});
    let [client, server] = endpoints(&daemon);
    let listener = server.listen(PORT, 8).unwrap();
    let waits = [Wait::Sleep, Wait::Sleep, Wait::Sleep, Wait::ADAPTIVE];
    thread::scope(|scope| {
        for (index, wait) in waits.into_iter().enumerate() {
            let (near, far) = connected(&client, &listener);
            if index == 0 {
                scope.spawn(move || {
                    let mut word = [0; 8];
                    while (&far).read(&mut word).unwrap() > 0 {
                        (&far).write_all(&word).unwrap();
                    }
                });
            } else {
                scope.spawn(move || echo(far, wait));
            }
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    (&near).write_all(&round.to_le_bytes()).unwrap();
                    let mut back = [0; 8];
                    (&near).read_exact(&mut back).unwrap();
                    assert_eq!(u64::from_le_bytes(back), round);
                }
            });
        }
    });
}

/// An endpoint's loop as mio has it: it sleeps on the endpoint's descriptor, edge-triggered, and asks
/// [`Poller::poll`] which sockets are ready. Echoes until its connections have ended.
fn serve_by_edges(server: &Endpoint, listener: &Listener, connections: usize) {
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    let edges = epoll::EventFlags::IN | epoll::EventFlags::ET;
    epoll::add(&epoll, server, epoll::EventData::new_u64(0), edges).unwrap();
    listener.set_nonblocking(true).unwrap();
    let mut poller = Poller::new(Wait::Sleep);
    poller.add_listener(listener, 0);
    let mut streams: Vec<Stream> = Vec::new();
    let mut open = connections;
    while open > 0 {
        let ready = poller.poll().unwrap();
        if ready.is_empty() {
            let mut events = Vec::with_capacity(4);
            let limit = Timespec {
                tv_sec: PATIENCE.as_secs() as i64,
                tv_nsec: 0,
            };
            epoll::wait(&epoll, spare_capacity(&mut events), Some(&limit)).unwrap();
            assert!(!events.is_empty(), "no edge in time");
            continue;
        }
        for ready in ready {
            let Some(index) = (ready.key as usize).checked_sub(1) else {
                let (stream, _) = listener.accept().unwrap();
                stream.set_nonblocking(true).unwrap();
                streams.push(stream);
                let stream = streams.last().unwrap();
                poller.add_stream(stream, streams.len() as u64, Readiness::READABLE);
                continue;
            };
            let mut word = [0; 8];
            match (&streams[index]).read(&mut word) {
                Ok(0) => {
                    poller.remove(ready.key);
                    open -= 1;
                }
                Ok(got) => (&streams[index]).write_all(&word[..got]).unwrap(),
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
            }
        }
    }
}

#[test]
fn an_edge_triggered_event_loop_learns_of_each_ready_socket() {
    const ROUNDS: u64 = 300;
    let daemon = TestDaemon::with(2, |_| {});
    let [client, server] = endpoints(&daemon);
    let listener = server.listen(PORT, 8).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| serve_by_edges(&server, &listener, 3));
        for _ in 0..3 {
            scope.spawn(|| {
                let mut stream = client.connect(there()).unwrap();
                stream.set_read_timeout(Some(PATIENCE)).unwrap();
                for round in 0..ROUNDS {
                    stream.write_all(&round.to_le_bytes()).unwrap();
                    let mut back = [0; 8];
                    stream.read_exact(&mut back).unwrap();
                    assert_eq!(u64::from_le_bytes(back), round);
                }
            });
        }
    });
}

#[test]
fn a_poller_waits_over_two_endpoints_and_a_listener() {
    for wait in [Wait::Sleep, Wait::Spin, Wait::ADAPTIVE] {
        let daemon = TestDaemon::with(3, |_| {});
        let attach = |index: usize| {
            Endpoint::builder()
                .queue_pairs(common::pairs())
                .attach_device(&daemon.vms[index].socket)
                .unwrap()
        };
        let (one, two, other) = (attach(0), attach(1), attach(2));
        let listener = one.listen(Port::new(1), 4).unwrap();
        let far = other.listen(PORT, 4).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                // CID 5: answers the one, and calls the other.
                let (stream, _) = far.accept_timeout(PATIENCE).unwrap();
                other
                    .connect(Address::new(Cid::new(3), Port::new(1)))
                    .unwrap();
                (&stream).write_all(b"now").unwrap();
                assert_eq!((&stream).read(&mut [0]).unwrap(), 0);
            });
            let stream = two.connect(Address::new(Cid::new(5), PORT)).unwrap();
            stream.set_nonblocking(true).unwrap();
            listener.set_nonblocking(true).unwrap();
            let mut poller = Poller::new(wait);
            poller.add_listener(&listener, 1);
            poller.add_stream(&stream, 2, Readiness::READABLE);
            let mut seen = Vec::new();
            while seen.len() < 2 {
                for ready in told(|| poller.wait(Some(PATIENCE)).unwrap()) {
                    assert_eq!(ready.readiness, Readiness::READABLE);
                    match ready.key {
                        1 => drop(listener.accept().unwrap()),
                        _ => assert_eq!((&stream).read(&mut [0; 8]).unwrap(), 3),
                    }
                    seen.push(ready.key);
                }
            }
            assert_eq!(seen, [1, 2]);
            assert!(poller.wait(Some(Duration::ZERO)).unwrap().is_empty());
            drop(stream);
        });
    }
}

/// Sleeps on a descriptor as a loop of the caller's own does.
fn sleep_on(fd: impl AsFd) {
    let patience = Timespec {
        tv_sec: PATIENCE.as_secs() as i64,
        tv_nsec: 0,
    };
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    assert_eq!(poll(&mut fds, Some(&patience)).unwrap(), 1, "never told");
}

#[test]
fn a_loop_of_the_callers_own_loses_no_wake_up() {
    const ROUNDS: u32 = 2000;
    let daemon = TestDaemon::with(2, |_| {});
    let [client, server] = endpoints(&daemon);
    let listener = server.listen(PORT, 8).unwrap();
    let pairs = [(); 2].map(|()| connected(&client, &listener));
    thread::scope(|scope| {
        let [(one, far_one), (two, far_two)] = pairs;
        for near in [one, two] {
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    (&near).write_all(&round.to_le_bytes()).unwrap();
                    let mut back = [0; 4];
                    (&near).read_exact(&mut back).unwrap();
                    assert_eq!(u32::from_le_bytes(back), round);
                }
            });
        }
        let mut open = vec![far_one, far_two];
        for stream in &open {
            stream.set_nonblocking(true).unwrap();
        }
        while !open.is_empty() {
            let mut word = [0; 4];
            open.retain(|mut stream| {
                loop {
                    match stream.read(&mut word) {
                        Ok(0) => return false,
                        Ok(got) => stream.write_all(&word[..got]).unwrap(),
                        Err(error) => {
                            assert_eq!(error.kind(), ErrorKind::WouldBlock);
                            return true;
                        }
                    }
                }
            });
            if !open.is_empty() {
                sleep_on(&listener);
            }
        }
    });
}

#[test]
fn a_poller_reports_the_result_of_a_begun_connect() {
    let daemon = TestDaemon::with(2, |config| {
        config.connect_timeout = Duration::from_secs(600);
    });
    let client = Endpoint::builder()
        .connect_timeout(Duration::from_millis(100))
        .attach_device(&daemon.vms[0].socket)
        .unwrap();
    // It exists, but no thread runs it: no answer arrives.
    let silent = Endpoint::builder()
        .attach_device(&daemon.vms[1].socket)
        .unwrap();
    let _silent = silent.listen(PORT, 4).unwrap();
    // By the descriptor.
    let stream = client.begin_connect(there()).unwrap();
    stream.set_nonblocking(true).unwrap();
    let ended = loop {
        match stream.wait_connected() {
            Err(error) if error.kind() == ErrorKind::WouldBlock => sleep_on(&stream),
            ended => break ended,
        }
    };
    assert_eq!(ended.unwrap_err().kind(), ErrorKind::TimedOut);
    // By a poller.
    let stream = client.begin_connect(there()).unwrap();
    assert_eq!(stream.state(), StreamState::Connecting);
    let mut poller = Poller::new(Wait::Sleep);
    poller.add_stream(&stream, 1, Readiness::WRITABLE);
    assert_eq!(told(|| poller.wait(Some(PATIENCE)).unwrap().len()), 1);
    assert_eq!(stream.state(), StreamState::Reset);
}

#[test]
fn a_connect_is_begun_and_answered_later() {
    let daemon = TestDaemon::with(2, |_| {});
    let [client, server] = endpoints(&daemon);
    let listener = server.listen(PORT, 8).unwrap();
    let stream = client.begin_connect(there()).unwrap();
    thread::scope(|scope| {
        let accepting = scope.spawn(|| listener.accept_timeout(PATIENCE).unwrap());
        stream.wait_connected().unwrap();
        assert_eq!(stream.state(), StreamState::Connected);
        accepting.join().unwrap();
    });
}

#[test]
fn a_device_that_hangs_up_ends_every_wait() {
    for wait in [Wait::Sleep, Wait::Spin, Wait::ADAPTIVE] {
        let mut daemon = TestDaemon::with(2, |_| {});
        let [client, server] = endpoints(&daemon);
        let listener = server.listen(PORT, 8).unwrap();
        let (near, far) = connected(&client, &listener);
        (&near).write_all(b"last words").unwrap();
        far.wait_readable().unwrap();
        listener.set_wait(wait);
        far.set_wait(wait);
        thread::scope(|scope| {
            let accepting = scope.spawn(|| told(|| listener.accept_timeout(PATIENCE).unwrap_err()));
            daemon.stop();
            let error = accepting.join().unwrap();
            assert_eq!(error.kind(), ErrorKind::ConnectionAborted, "{wait:?}");
        });
        let error = listener.accept().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionAborted);
        let mut poller = Poller::new(wait);
        poller.add_listener(&listener, 1);
        assert_eq!(poller.wait(Some(PATIENCE)).unwrap().len(), 1);
        // What had come is still there.
        let mut words = [0; 10];
        (&far).read_exact(&mut words).unwrap();
        assert_eq!(&words, b"last words");
        let error = (&far).read(&mut words).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    }
}

#[test]
fn a_poller_heeds_the_low_water_mark() {
    for wait in [Wait::Sleep, Wait::Spin, Wait::ADAPTIVE] {
        let daemon = TestDaemon::with(2, |_| {});
        let [client, server] = endpoints(&daemon);
        let listener = server.listen(PORT, 8).unwrap();
        let (near, far) = connected(&client, &listener);
        far.set_low_water(5).unwrap();
        (&near).write_all(b"123").unwrap();
        let mut poller = Poller::new(wait);
        poller.add_stream(&far, 1, Readiness::READABLE);
        let give_up = common::deadline();
        while far.unread() < 3 {
            assert!(std::time::Instant::now() < give_up, "they never come");
            server.drive().unwrap();
        }
        assert!(poller.wait(Some(Duration::ZERO)).unwrap().is_empty());
        // Also one that is told by another thread which takes the rest in.
        thread::scope(|scope| {
            let polling = scope.spawn(|| told(|| poller.wait(Some(PATIENCE)).unwrap().len()));
            (&near).write_all(b"45").unwrap();
            while far.unread() < 5 {
                server.drive().unwrap();
            }
            assert_eq!(polling.join().unwrap(), 1);
        });
        far.set_nonblocking(true).unwrap();
        assert_eq!((&far).read(&mut [0; 8]).unwrap(), 5);
    }
}

#[test]
fn a_line_and_then_a_lease_keep_their_order() {
    let daemon = TestDaemon::with(2, |_| {});
    let [client, server] = endpoints(&daemon);
    let listener = server.listen(PORT, 8).unwrap();
    let (near, mut far) = connected(&client, &listener);
    (&near).write_all(b"length: 4\nbodyanother\nlast").unwrap();
    let mut line = String::new();
    far.read_line(&mut line).unwrap();
    assert_eq!(line, "length: 4\n");
    assert_eq!(far.unread(), 16);
    far.wait_readable().unwrap();
    let mut body = [0; 4];
    (&far).read_exact(&mut body).unwrap();
    assert_eq!(&body, b"body");
    // Bytes of `fill_buf` that another read has taken are not consumed twice.
    assert_eq!(far.fill_buf().unwrap(), b"another\nlast");
    (&far).read_exact(&mut body).unwrap();
    far.consume(5);
    assert_eq!(far.fill_buf().unwrap(), b"er\nlast");
    far.consume(3);
    let lease = far.recv().unwrap().unwrap();
    assert_eq!(lease.to_vec(), b"last");
    drop(lease);
    (&near).write_all(b"more").unwrap();
    assert_eq!(far.fill_buf().unwrap(), b"more");
    let shown = far.recv_each(1, |message| assert_eq!(message.to_vec(), b"more"));
    assert_eq!(shown.unwrap(), 1);
    far.consume(4);
    drop(near);
    assert!(far.fill_buf().unwrap().is_empty(), "the end");
}

#[test]
fn lines_that_are_longer_than_the_window_are_read() {
    const LEN: usize = 1 << 20;
    let daemon = TestDaemon::with(2, |_| {});
    let [client, server] = endpoints(&daemon);
    let listener = server.listen(PORT, 8).unwrap();
    let (near, mut far) = connected(&client, &listener);
    thread::scope(|scope| {
        scope.spawn(move || {
            let mut line = vec![b'a'; LEN];
            line.push(b'\n');
            (&near).write_all(&line).unwrap();
            (&near).write_all(&line).unwrap();
        });
        let mut line = String::new();
        assert_eq!(far.read_line(&mut line).unwrap(), LEN + 1);
        assert_eq!(
            far.lines().map(|line| line.unwrap().len()).sum::<usize>(),
            LEN
        );
    });
}

#[test]
fn a_read_of_one_stream_frees_room_for_a_sleeping_reader_of_another() {
    // Held for so long that no timer helps.
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("vm3.sock");
    let host = Host::builder()
        .vm(Cid::new(3), &path)
        .hold(Duration::from_secs(3600))
        .start()
        .unwrap();
    let listener = host.listen(PORT, 8).unwrap();
    thread::scope(|scope| {
        let accepting =
            scope.spawn(|| [(); 2].map(|()| listener.accept_timeout(PATIENCE).unwrap().0));
        let mut guest = Driver::attach(DriverConfig::new(&path)).unwrap();
        let to = Address::new(Cid::HOST, PORT);
        let ids = [(); 2].map(|()| guest.wait_connect(to, deadline()).unwrap());
        let [full, other] = accepting.join().unwrap();
        let sleeping = scope.spawn(move || {
            other.set_read_timeout(Some(PATIENCE)).unwrap();
            told(|| other.recv().unwrap().unwrap().to_vec())
        });
        // As many as may be held, and one for the sleeping reader, which cannot have it yet.
        let most = usize::from(DriverConfig::default().queue_size / 2 / 4 * 3);
        for _ in 0..most {
            guest.send(ids[0], b"x").unwrap();
        }
        guest.flush();
        eventually("all that may be held", || {
            host.stats().received == most as u64
        });
        guest.send(ids[1], b"for the sleeper").unwrap();
        guest.flush();
        assert_eq!((&full).read(&mut vec![0; most]).unwrap(), most);
        assert_eq!(sleeping.join().unwrap(), b"for the sleeper");
    });
}

#[test]
fn the_longest_time_is_for_ever() {
    let daemon = TestDaemon::with(2, |_| {});
    let attach = |index: usize| {
        Endpoint::builder()
            .connect_timeout(Duration::MAX)
            .queue_pairs(common::pairs())
            .attach_device(&daemon.vms[index].socket)
            .unwrap()
    };
    let (client, server) = (attach(0), attach(1));
    let listener = server.listen(PORT, 4).unwrap();
    let (near, far) = thread::scope(|scope| {
        let accepting = scope.spawn(|| listener.accept_timeout(Duration::MAX).unwrap().0);
        (client.connect(there()).unwrap(), accepting.join().unwrap())
    });
    (&near).write_all(b"x").unwrap();
    let mut poller = Poller::new(Wait::Sleep);
    poller.add_stream(&far, 1, Readiness::READABLE);
    assert_eq!(poller.wait(Some(Duration::MAX)).unwrap().len(), 1);
}

#[test]
fn a_sleeping_round_trip_costs_each_side_few_sleeps_and_notifications() {
    const ROUNDS: u64 = 500;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("attach.sock");
    let host = Host::builder().attach(&path).start().unwrap();
    let listener = host.listen(PORT, 1).unwrap();
    let (begun, beginning) = mpsc::channel();
    let (ended, ending) = mpsc::channel();
    let exchange = |stream: &Stream, begins: bool, rounds: u64| {
        let (mut stream, mut message) = (stream, [7; 64]);
        for _ in 0..rounds {
            if begins {
                stream.write_all(&message).unwrap();
            }
            stream.read_exact(&mut message).unwrap();
            if !begins {
                stream.write_all(&message).unwrap();
            }
        }
    };
    // The counters between the first round trip and the last. The channels order the two sides:
    // neither is counted while the other still works.
    let costs = thread::scope(|scope| {
        let attached = scope.spawn(move || {
            let endpoint = Endpoint::builder().attach(path).unwrap();
            let stream = endpoint.connect(Address::new(Cid::HOST, PORT)).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            exchange(&stream, true, 1);
            let before = endpoint.stats();
            begun.send(()).unwrap();
            exchange(&stream, true, ROUNDS);
            let after = endpoint.stats();
            ending.recv_timeout(PATIENCE).unwrap();
            (before, after)
        });
        let (stream, _) = listener.accept_timeout(PATIENCE).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        exchange(&stream, false, 1);
        beginning.recv_timeout(PATIENCE).unwrap();
        let before = host.stats();
        exchange(&stream, false, ROUNDS);
        let after = host.stats();
        ended.send(()).unwrap();
        [(before, after), attached.join().unwrap()]
    });
    for (before, after) in costs {
        // One of each, unless a notification crosses the other side's way to sleep: how often depends
        // on the scheduler.
        let most = 2 * ROUNDS;
        assert!(after.sleeps - before.sleeps <= most, "{before:?} {after:?}");
        let notifications = after.notifications - before.notifications;
        assert!(notifications <= most, "{before:?} {after:?}");
    }
}
