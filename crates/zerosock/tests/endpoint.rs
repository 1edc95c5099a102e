//! Endpoints of two processes (here: threads) that are connected through the daemon: the sockets'
//! API.

use std::io::{BufRead, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::thread;
use std::time::Duration;

use crate::common::{self, PATIENCE, TestDaemon, bytes};
use zerosock::vsock::{Endpoint, EndpointBuilder, Poller, Readiness, Stream, Trust, Wait};
use zerosock::{Address, Cid, Port};

const PORT: Port = Port::new(77);

fn there() -> Address {
    Address::new(Cid::new(4), PORT)
}

fn endpoint(
    daemon: &TestDaemon,
    index: usize,
    tune: impl FnOnce(EndpointBuilder) -> EndpointBuilder,
) -> Endpoint {
    tune(Endpoint::builder().queue_pairs(common::pairs()))
        .attach_device(&daemon.vms[index].socket)
        .unwrap()
}

/// Runs `one` with a connected stream of CID 3's, and `two` with the other end, of CID 4's.
fn pair(
    wait: Wait,
    trust: bool,
    one: impl FnOnce(Stream, Endpoint) + Send,
    two: impl FnOnce(Stream, Endpoint) + Send,
) {
    let daemon = TestDaemon::with(2, |_| {});
    let tune = |builder: EndpointBuilder| {
        let builder = builder.wait(wait);
        if trust {
            // SAFETY: the device is ours, in this process, and keeps to leases.
            builder.trust_host(unsafe { Trust::declare() })
        } else {
            builder
        }
    };
    let client = endpoint(&daemon, 0, tune);
    let server = endpoint(&daemon, 1, tune);
    let listener = server.listen(PORT, 4).unwrap();
    thread::scope(|scope| {
        scope.spawn(move || {
            let (stream, peer) = listener.accept_timeout(PATIENCE).unwrap();
            assert_eq!(peer.cid, Cid::new(3));
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            stream.set_write_timeout(Some(PATIENCE)).unwrap();
            two(stream, server);
        });
        let stream = client.connect(there()).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        one(stream, client);
    });
}

#[test]
fn bytes_are_copied_both_ways_and_ends_arrive() {
    for wait in [Wait::Sleep, Wait::Spin, Wait::ADAPTIVE] {
        const LEN: usize = 3 << 20;
        pair(
            wait,
            false,
            |mut stream, _endpoint| {
                stream.write_all(&bytes(1, LEN)).unwrap();
                stream.shutdown(Shutdown::Write).unwrap();
                let mut back = Vec::new();
                stream.read_to_end(&mut back).unwrap();
                assert_eq!(back, bytes(2, LEN));
                assert_eq!(
                    stream.write(b"late").unwrap_err().kind(),
                    ErrorKind::BrokenPipe
                );
            },
            |mut stream, _endpoint| {
                let mut got = Vec::new();
                stream.read_to_end(&mut got).unwrap();
                assert_eq!(got, bytes(1, LEN));
                stream.write_all(&bytes(2, LEN)).unwrap();
            },
        );
    }
}

/// As on Linux: one more than the backlog, so that a listener of backlog 0 is reached.
#[test]
fn one_more_connection_waits_than_the_backlog() {
    let daemon = TestDaemon::with(2, |_| {});
    let client = endpoint(&daemon, 0, |builder| builder);
    let server = &endpoint(&daemon, 1, |builder| builder);
    thread::scope(|scope| {
        let (done, over) = std::sync::mpsc::channel::<()>();
        // The server's backend works as long as the clients connect.
        let (streams, messages) = (
            server.listen(PORT, 0).unwrap(),
            server.listen_seqpacket(Port::new(78), 2).unwrap(),
        );
        let serving = scope.spawn(move || {
            while over.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty) {
                server.drive().unwrap();
            }
        });
        let refused =
            |error: std::io::Error| assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
        let one = client.connect(there()).unwrap();
        refused(client.connect(there()).unwrap_err());
        let (accepted, _) = streams.accept_timeout(PATIENCE).unwrap();
        let next = client.connect(there()).unwrap();
        let of_messages = Address::new(Cid::new(4), Port::new(78));
        let three = [(); 3].map(|()| client.connect_seqpacket(of_messages).unwrap());
        refused(client.connect_seqpacket(of_messages).unwrap_err());
        drop(done);
        serving.join().unwrap();
        drop((one, accepted, next, three, messages));
    });
}

/// The reader gets to run only when the writer's process has gone, and has few buffers.
#[test]
fn what_a_process_sent_before_it_went_arrives_at_its_sibling() {
    const LEN: usize = 200 << 10;
    let daemon = TestDaemon::with(2, |_| {});
    let client = endpoint(&daemon, 0, |builder| builder);
    let server = endpoint(&daemon, 1, |builder| {
        builder.receive_buffers(4096).queue_size(16)
    });
    let listener = server.listen(PORT, 4).unwrap();
    let ours = thread::scope(|scope| {
        let accepted = scope.spawn(|| listener.accept_timeout(PATIENCE).unwrap().0);
        let theirs = client.connect(there()).unwrap();
        theirs.set_write_timeout(Some(PATIENCE)).unwrap();
        let ours = accepted.join().unwrap();
        (&theirs).write_all(&bytes(5, LEN)).unwrap();
        drop(theirs);
        ours
    });
    drop(client);
    ours.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut got = Vec::new();
    (&ours).read_to_end(&mut got).unwrap();
    assert_eq!(got, bytes(5, LEN));
}

#[test]
fn leases_show_what_was_sent_and_loans_arrive() {
    const LEN: usize = 1 << 20;
    pair(
        Wait::Sleep,
        false,
        |stream, endpoint| {
            let all = bytes(3, LEN);
            let mut rest = &all[..];
            while !rest.is_empty() {
                let mut loan = stream.loan(rest.len()).unwrap();
                let took = loan.write(rest).unwrap();
                assert_eq!(took, loan.capacity().min(rest.len()));
                let in_place = loan.is_in_place();
                assert_eq!(loan.as_mut_slice().is_err(), in_place);
                assert_eq!(stream.send(loan).unwrap(), took);
                rest = &rest[took..];
            }
            drop(stream.loan(100).unwrap());
            stream.shutdown(Shutdown::Write).unwrap();
            assert!(stream.recv().unwrap().is_none(), "end of file");
            let stats = endpoint.stats();
            assert_eq!(stats.sent, LEN as u64);
            assert_eq!(stats.sent_in_place, LEN as u64, "{stats:?}");
            assert_eq!(stats.copied_in, 0);
        },
        |stream, endpoint| {
            let mut got = Vec::new();
            while let Some(lease) = stream.recv().unwrap() {
                let reading = lease.read();
                assert_eq!(reading.as_slice().is_none(), lease.is_in_place());
                assert!(!reading.is_revoked());
                got.extend_from_slice(&reading.to_vec());
            }
            assert_eq!(got, bytes(3, LEN));
            let stats = endpoint.stats();
            assert_eq!(stats.received, LEN as u64);
            assert_eq!(stats.received_in_place + stats.copied_aside, LEN as u64);
            assert!(stats.received_in_place > 0, "{stats:?}");
        },
    );
}

#[test]
fn with_trust_there_are_plain_slices_and_shared_bytes() {
    const LEN: usize = 4096;
    pair(
        Wait::Sleep,
        true,
        |stream, _endpoint| {
            let mut loan = stream.loan(LEN).unwrap();
            loan.as_mut_slice().unwrap().copy_from_slice(&bytes(4, LEN));
            loan.set_filled(LEN);
            loan.send().unwrap();
            let mut word = [0; 4];
            (&stream).read_exact(&mut word).unwrap();
            assert_eq!(&word, b"done");
        },
        |stream, _endpoint| {
            let lease = stream.recv().unwrap().unwrap();
            let reading = lease.read();
            assert_eq!(reading.as_slice().unwrap(), bytes(4, LEN));
            assert!(reading.as_ptr().addr().is_multiple_of(64), "aligned");
            let words = reading.view::<[u64; 8]>().unwrap();
            assert_eq!(words[0].to_ne_bytes(), bytes(4, LEN)[..8]);
            drop(reading);
            let shared = lease.into_bytes().unwrap();
            let other = shared.clone().slice(10..20);
            let reader = thread::spawn(move || assert_eq!(other, &bytes(4, LEN)[10..20]));
            reader.join().unwrap();
            assert_eq!(shared, bytes(4, LEN));
            drop(shared);
            (&stream).write_all(b"done").unwrap();
        },
    );
}

#[test]
fn many_small_packets_are_shown_in_one_go_and_each_by_itself() {
    const COUNT: u64 = 20_000;
    pair(
        Wait::Sleep,
        false,
        |stream, _endpoint| {
            let mut next = 0;
            while next < COUNT {
                let mut batch = stream.batch();
                for _ in 0..32.min(COUNT - next) {
                    batch.write(&next.to_le_bytes()).unwrap();
                    next += 1;
                }
            }
            stream.shutdown(Shutdown::Write).unwrap();
            let mut end = [0];
            assert_eq!((&stream).read(&mut end).unwrap(), 0);
        },
        |stream, _endpoint| {
            let mut got = Vec::new();
            while stream
                .recv_each(64, |message| got.extend_from_slice(&message.to_vec()))
                .unwrap()
                > 0
            {}
            let words: Vec<u64> = got
                .chunks(8)
                .map(|word| u64::from_le_bytes(word.try_into().unwrap()))
                .collect();
            assert!(words.iter().copied().eq(0..COUNT));
        },
    );
}

#[test]
fn a_read_waits_for_the_low_water_mark_and_gives_up_in_time() {
    pair(
        Wait::Sleep,
        false,
        |stream, _endpoint| {
            (&stream).write_all(b"12").unwrap();
            let mut word = [0; 2];
            (&stream).read_exact(&mut word).unwrap();
            (&stream).write_all(b"345").unwrap();
            assert_eq!((&stream).read(&mut word).unwrap(), 0);
        },
        |mut stream, _endpoint| {
            stream.set_low_water(5).unwrap();
            stream
                .set_read_timeout(Some(Duration::from_millis(50)))
                .unwrap();
            let mut out = [0; 16];
            let error = stream.read(&mut out).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::TimedOut);
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            stream.set_low_water(2).unwrap();
            assert_eq!(stream.peek(&mut out).unwrap(), 2);
            assert_eq!(&out[..2], b"12");
            stream.set_low_water(5).unwrap();
            stream.write_all(b"go").unwrap();
            assert_eq!(stream.read(&mut out).unwrap(), 5);
            assert_eq!(&out[..5], b"12345");
        },
    );
}

#[test]
fn lines_are_read_from_the_buffer() {
    pair(
        Wait::Sleep,
        false,
        |stream, _endpoint| (&stream).write_all(b"one\ntwo\nthree").unwrap(),
        |mut stream, _endpoint| {
            let mut line = String::new();
            stream.read_line(&mut line).unwrap();
            assert_eq!(line, "one\n");
            let mut peeked = [0; 3];
            assert_eq!(stream.peek(&mut peeked).unwrap(), 3);
            assert_eq!(&peeked, b"two");
            let rest: Vec<String> = stream.lines().map(Result::unwrap).collect();
            assert_eq!(rest, ["two", "three"]);
        },
    );
}

#[test]
fn a_connect_without_a_listener_is_refused() {
    // What the daemon gives up is refused as well, but after the client's patience.
    let daemon = TestDaemon::with(2, |config| config.connect_timeout = 2 * PATIENCE);
    let client = endpoint(&daemon, 0, |builder| builder.connect_timeout(PATIENCE));
    let server = endpoint(&daemon, 1, |builder| builder);
    let waiting = server.listen(Port::new(1), 1).unwrap();
    assert_eq!(
        server.listen(Port::new(1), 1).unwrap_err().kind(),
        ErrorKind::AddrInUse
    );
    thread::scope(|scope| {
        // A thread must run the server's backend.
        scope.spawn(|| waiting.accept_timeout(PATIENCE).unwrap());
        let error = client.connect(there()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
        client
            .connect(Address::new(Cid::new(4), Port::new(1)))
            .unwrap();
    });
}

#[test]
fn threads_share_an_endpoint() {
    const THREADS: u64 = 4;
    const ROUNDS: u64 = 200;
    let daemon = TestDaemon::with(2, |_| {});
    let client = endpoint(&daemon, 0, |builder| builder);
    let server = endpoint(&daemon, 1, |builder| builder);
    let listener = server.listen(PORT, 16).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..THREADS {
                let (mut stream, _) = listener.accept_timeout(PATIENCE).unwrap();
                stream.set_read_timeout(Some(PATIENCE)).unwrap();
                scope.spawn(move || {
                    let mut word = [0; 8];
                    for _ in 0..ROUNDS {
                        stream.read_exact(&mut word).unwrap();
                        stream.write_all(&word).unwrap();
                    }
                });
            }
        });
        for thread in 0..THREADS {
            let mut stream = client.connect(there()).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            // One that spins among those that sleep.
            stream.set_wait(if thread == 0 {
                Wait::ADAPTIVE
            } else {
                Wait::Sleep
            });
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    let word = (thread << 32 | round).to_le_bytes();
                    stream.write_all(&word).unwrap();
                    let mut back = [0; 8];
                    stream.read_exact(&mut back).unwrap();
                    assert_eq!(back, word);
                }
            });
        }
    });
}

#[test]
fn a_poller_waits_for_sockets_and_descriptors() {
    for wait in [Wait::Sleep, Wait::Spin, Wait::ADAPTIVE] {
        pair(
            wait,
            false,
            |stream, _endpoint| {
                let mut word = [0; 4];
                (&stream).read_exact(&mut word).unwrap();
                (&stream).write_all(&word).unwrap();
                assert_eq!((&stream).read(&mut word).unwrap(), 0);
            },
            move |stream, _endpoint| {
                stream.set_nonblocking(true).unwrap();
                let (pipe_out, mut pipe_in) = std::io::pipe().unwrap();
                let mut poller = Poller::new(wait);
                poller.add_stream(&stream, 1, Readiness::READABLE);
                poller.add_fd(&pipe_out, 2, Readiness::READABLE).unwrap();
                assert!(
                    poller
                        .wait(Some(Duration::from_millis(20)))
                        .unwrap()
                        .is_empty()
                );
                pipe_in.write_all(b"x").unwrap();
                let ready = poller.wait(Some(PATIENCE)).unwrap();
                assert_eq!(ready.iter().map(|ready| ready.key).collect::<Vec<_>>(), [2]);
                poller.remove(2);
                poller.want(1, Readiness::BOTH);
                let ready = poller.wait(Some(PATIENCE)).unwrap();
                assert_eq!(ready[0].readiness, Readiness::WRITABLE);
                poller.want(1, Readiness::READABLE);
                let mut word = *b"ping";
                let error = (&stream).read(&mut word).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::WouldBlock);
                (&stream).write_all(&word).unwrap();
                let mut got = 0;
                while got < 4 {
                    poller.wait(Some(PATIENCE)).unwrap();
                    match (&stream).read(&mut word[got..]) {
                        Ok(more) => got += more,
                        Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
                    }
                }
                assert_eq!(&word, b"ping");
            },
        );
    }
}

#[test]
fn a_loan_that_could_not_be_sent_is_returned_once() {
    pair(
        Wait::Sleep,
        false,
        |stream, _endpoint| {
            let mut loan = stream.loan(100).unwrap();
            loan.write_all(b"never").unwrap();
            let mut byte = [0];
            (&stream).write_all(b"?").unwrap();
            let error = (&stream).read(&mut byte).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ConnectionReset);
            let (error, mut loan) = loan.try_send().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ConnectionReset);
            // Its slot may have been reused.
            assert!(!loan.is_in_place());
            loan.write_at(0, b"harmless").unwrap();
            assert!(loan.try_send().is_err());
        },
        |stream, _endpoint| {
            (&stream).read_exact(&mut [0]).unwrap();
            stream.reset();
        },
    );
}

/// Processor time of this thread.
fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[test]
fn an_idle_endpoint_uses_no_processor() {
    for wait in [Wait::Sleep, Wait::ADAPTIVE] {
        pair(
            wait,
            false,
            |stream, _endpoint| {
                let mut word = [0; 8];
                // Some rounds, so that the adaptive one has something to learn from.
                for _ in 0..100 {
                    (&stream).write_all(&word).unwrap();
                    (&stream).read_exact(&mut word).unwrap();
                }
                assert_eq!((&stream).read(&mut word).unwrap(), 0);
            },
            move |stream, _endpoint| {
                let mut word = [0; 8];
                for _ in 0..100 {
                    (&stream).read_exact(&mut word).unwrap();
                    (&stream).write_all(&word).unwrap();
                }
                let idle = Duration::from_millis(500);
                stream.set_read_timeout(Some(idle)).unwrap();
                let before = processor_time();
                let error = (&stream).read(&mut word).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::TimedOut);
                let used = processor_time() - before;
                assert!(used < idle / 20, "{wait:?}: {used:?} of {idle:?}");
            },
        );
    }
}
