//! Relays between sockets of every kind, in every way.

mod datagrams;
mod ends;
mod limits;
mod messages;
mod support;

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::thread;

use self::support::{Endless, Kind, Rig, Sock, pattern, read_all, same};
use super::Way;

const WAYS: [Way; 3] = [Way::Auto, Way::Splice, Way::Copy];
const KINDS: [Kind; 2] = [Kind::Tcp, Kind::Unix];

/// Every kind of stream to every kind, in every way that moves these.
fn matrix(test: impl Fn(Rig)) {
    for way in WAYS {
        for from in KINDS {
            for to in KINDS {
                test(Rig::start(from, to, |config| config.way = way));
            }
        }
    }
}

#[test]
fn contents_pass_both_ways_at_once() {
    matrix(|rig| {
        const LENGTH: usize = 6 << 20;
        let (client, target) = rig.pair();
        let send = |sock: &Sock, seed| {
            let mut sock = sock.try_clone();
            thread::spawn(move || {
                let bytes = pattern(LENGTH, seed);
                // Sizes around those of pages and buffers.
                let mut rest = bytes.as_slice();
                for size in [1, 4095, 4096, 4097, 65536, 300_000].into_iter().cycle() {
                    let (now, later) = rest.split_at(rest.len().min(size));
                    sock.write_all(now).unwrap();
                    rest = later;
                    if rest.is_empty() {
                        break;
                    }
                }
                sock.shutdown(Shutdown::Write);
            })
        };
        let senders = [send(&client, 1), send(&target, 2)];
        let mut other = target.try_clone();
        let receiver = thread::spawn(move || read_all(&mut other));
        let answer = read_all(&mut client.try_clone());
        let question = receiver.join().unwrap();
        senders
            .into_iter()
            .for_each(|sender| sender.join().unwrap());
        assert!(same(&question, &pattern(LENGTH, 1)), "{rig}");
        assert!(same(&answer, &pattern(LENGTH, 2)), "{rig}");
        drop((client, target));
        rig.ended(1);
        let stats = rig.stats();
        assert_eq!(stats.bytes_to_target, LENGTH as u64, "{rig}");
        assert_eq!(stats.bytes_to_source, LENGTH as u64, "{rig}");
        assert_eq!((stats.failed, stats.open), (0, 0), "{rig}");
    });
}

#[test]
fn an_end_of_file_follows_the_last_byte() {
    matrix(|rig| {
        let (client, mut target) = rig.pair();
        let mut sender = client.try_clone();
        let bytes = pattern(3 << 20, 3);
        let sent = bytes.clone();
        let sender = thread::spawn(move || {
            sender.write_all(&sent).unwrap();
            drop(sender);
        });
        drop(client);
        // The whole of it waits somewhere when the sender is gone.
        let got = read_all(&mut target);
        assert!(same(&got, &bytes), "{rig}");
        sender.join().unwrap();
        drop(target);
        rig.ended(1);
    });
}

#[test]
fn what_a_target_sent_before_it_closed_with_bytes_unread_is_delivered() {
    matrix(|rig| {
        let (mut client, mut target) = rig.pair();
        client.write_all(b"unread").unwrap();
        target.peek();
        target.write_all(b"no").unwrap();
        drop(target);
        let mut got = [0; 2];
        client.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"no", "{rig}");
        match client.read(&mut got) {
            Ok(0) => {}
            Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
            other => panic!("{rig}: {other:?}"),
        }
        drop(client);
        rig.ended(1);
    });
}

#[test]
fn a_reader_that_stops_stops_the_writer_and_loses_nothing() {
    let endless = Endless::new();
    matrix(|rig| {
        let (client, mut target) = rig.pair();
        let accepted = client.fill(&endless);
        // Socket buffers of both connections, and one read of the relay.
        assert!(accepted < 64 << 20, "{rig}: {accepted} bytes");
        assert!(rig.stats().bytes_to_target <= accepted as u64, "{rig}");
        // The other direction is not held up.
        target.write_all(b"still here").unwrap();
        let mut got = [0; 10];
        client.try_clone().read_exact(&mut got).unwrap();
        client.shutdown(Shutdown::Write);
        let all = read_all(&mut target);
        assert_eq!(all.len(), accepted, "{rig}");
        assert!(endless.begins_with(&all), "{rig}");
        drop((client, target));
        rig.ended(1);
    });
}

#[test]
fn without_pipes_and_with_small_buffers_contents_pass() {
    for (pipes, buffer) in [(0, 256 << 10), (1, 4096), (1, 16 << 10)] {
        let rig = Rig::start(Kind::Tcp, Kind::Unix, |config| {
            config.pipes = pipes;
            config.buffer = buffer;
        });
        // More connections than pipes, all with bytes that wait.
        let pairs: Vec<_> = (0..3).map(|_| rig.pair()).collect();
        let endless = Endless::new();
        let sent: Vec<usize> = pairs
            .iter()
            .map(|(client, _)| client.fill(&endless))
            .collect();
        for ((client, mut target), sent) in pairs.into_iter().zip(sent) {
            client.shutdown(Shutdown::Write);
            let all = read_all(&mut target);
            assert_eq!(all.len(), sent);
            assert!(endless.begins_with(&all));
        }
        rig.ended(3);
    }
}

#[test]
fn many_short_connections_leave_nothing() {
    let streams = [(Kind::Tcp, Kind::Tcp), (Kind::Unix, Kind::Unix)];
    let streams = streams.map(|(from, to)| Rig::start(from, to, |config| config.workers = 2));
    for rig in streams {
        const CONNECTIONS: usize = 10_000;
        let target = rig.serve_echo();
        let clients: Vec<_> = (0..4)
            .map(|_| {
                let rig = rig.connector();
                thread::spawn(move || {
                    for n in 0..CONNECTIONS / 4 {
                        let mut client = rig.connect();
                        if n % 10 == 0 {
                            client.reset();
                            continue;
                        }
                        client.write_all(b"ping").unwrap();
                        client.shutdown(Shutdown::Write);
                        assert_eq!(read_all(&mut client), b"ping");
                    }
                })
            })
            .collect();
        clients
            .into_iter()
            .for_each(|client| client.join().unwrap());
        rig.ended(CONNECTIONS as u64);
        let stats = rig.stats();
        assert_eq!((stats.open, stats.refused, stats.idle), (0, 0, 0), "{rig}");
        assert_eq!(stats.unreachable, 0, "{rig}");
        drop(target);
    }
}
