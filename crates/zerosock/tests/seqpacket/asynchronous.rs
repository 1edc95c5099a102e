//! Messages in a tokio runtime.

use std::io::{ErrorKind, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::time::timeout;
use zerosock::vsock::tokio::{AsyncSeqPacket, AsyncSeqPacketListener};
use zerosock::vsock::{Endpoint, StreamError};
use zerosock::{Address, Cid};

use super::paths::{Hub, TestDaemon};
use super::{PORT, ends_record, message};
use crate::common::{PATIENCE, assert_bytes, bytes, pairs};

/// The output of `wait`. Panics if it took long: then no event woke it, and its time-out did.
async fn told<T>(wait: impl Future<Output = T>) -> T {
    let began = Instant::now();
    let found = timeout(PATIENCE, wait).await.expect("never told");
    assert!(began.elapsed() < PATIENCE, "never told");
    found
}

/// Sends with each call in turn.
async fn send(socket: &AsyncSeqPacket, number: u64) {
    let message = message(number);
    let eor = ends_record(number);
    if number % 4 < 2 {
        match eor {
            true => socket.send_eor(&message).await.unwrap(),
            false => socket.send(&message).await.unwrap(),
        }
        return;
    }
    let mut loan = socket.loan(message.len()).await.unwrap();
    loan.write_all(&message).unwrap();
    let sent = match eor {
        true => loan.send_eor().await.unwrap(),
        false => loan.send().await.unwrap(),
    };
    assert_eq!(sent, message.len());
}

/// Receives with each call in turn.
async fn receive(socket: &AsyncSeqPacket, number: u64) {
    let expected = message(number);
    if number.is_multiple_of(2) {
        let mut out = vec![0; 262_144];
        let got = told(socket.recv(&mut out)).await.unwrap().expect("no end");
        assert_eq!(
            (got.len, got.end_of_record),
            (expected.len(), ends_record(number))
        );
        assert_bytes(&out[..got.len], &expected);
        return;
    }
    let got = told(socket.recv_leases()).await.unwrap().expect("no end");
    assert_eq!(got.end_of_record(), ends_record(number));
    assert_bytes(&got.to_vec(), &expected);
}

/// Two processes at a daemon, each with tasks on two threads.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_tasks_exchange_messages() {
    const TASKS: u64 = 8;
    const EACH: u64 = 60;
    let daemon = TestDaemon::new(1);
    let attach = || {
        let builder = Endpoint::builder().queue_pairs(pairs());
        // Small: messages are longer than all slots together.
        let builder = builder.queue_size(32).transmit_buffers(4096);
        builder.attach(daemon.path()).unwrap()
    };
    let (server, client) = (attach(), attach());
    let listener = AsyncSeqPacketListener::new(server.listen_seqpacket(PORT, 64).unwrap()).unwrap();
    let there = Address::new(server.cid(), PORT);
    assert_eq!(listener.local_addr(), there);
    let serving = tokio::spawn(async move {
        let mut tasks = Vec::new();
        for _ in 0..TASKS {
            let (socket, peer) = told(listener.accept()).await.unwrap();
            assert_eq!(socket.peer_addr(), peer);
            let socket = Arc::new(socket);
            let reader = socket.clone();
            tasks.push(tokio::spawn(async move {
                for number in 0..EACH {
                    receive(&reader, number).await;
                }
                assert!(told(reader.recv(&mut [])).await.unwrap().is_none());
            }));
            tasks.push(tokio::spawn(async move {
                for number in 0..EACH {
                    send(&socket, number).await;
                }
            }));
        }
        for task in tasks {
            task.await.unwrap();
        }
    });
    let mut tasks = Vec::new();
    for _ in 0..TASKS {
        let socket = told(AsyncSeqPacket::connect(&client, there)).await.unwrap();
        tasks.push(tokio::spawn(async move {
            let sending = async {
                for number in 0..EACH {
                    send(&socket, number).await;
                }
            };
            let receiving = async {
                for number in 0..EACH {
                    receive(&socket, number).await;
                }
            };
            tokio::join!(sending, receiving);
        }));
    }
    for task in tasks {
        told(task).await.unwrap();
    }
    told(serving).await.unwrap();
}

/// The two ends of a connection between a host and a process, in the caller's runtime.
async fn joined(hub: &Hub, process: &Endpoint) -> (AsyncSeqPacket, AsyncSeqPacket) {
    let (ours, theirs) = hub.joined(process);
    for socket in [&ours, &theirs] {
        socket.set_read_timeout(None).unwrap();
        socket.set_write_timeout(None).unwrap();
    }
    let ours = AsyncSeqPacket::new(ours).unwrap();
    (ours, AsyncSeqPacket::new(theirs).unwrap())
}

/// The sender may be dropped: the message has left, however few buffers there were.
#[tokio::test]
async fn what_was_sent_has_left_when_the_call_returns() {
    let hub = Hub::new();
    let narrow = |builder: zerosock::vsock::EndpointBuilder| {
        let builder = builder.queue_size(32);
        builder.transmit_buffers(4096).receive_buffers(4096)
    };
    let process = hub.process_with(narrow);
    let long = bytes(1, 250_000);
    for by_loan in [false, true] {
        for from_host in [false, true] {
            let (ours, theirs) = joined(&hub, &process).await;
            let (from, to) = if from_host {
                (ours, theirs)
            } else {
                (theirs, ours)
            };
            let sending = async {
                match by_loan {
                    true => {
                        let mut loan = from.loan(250_000).await.unwrap();
                        loan.write_all(&long).unwrap();
                        assert_eq!(loan.send().await.unwrap(), 250_000);
                    }
                    false => from.send(&long).await.unwrap(),
                }
                drop(from);
            };
            let receiving = async {
                let got = told(to.recv_leases()).await.unwrap().expect("not the end");
                assert_bytes(&got.to_vec(), &long);
                drop(got);
                assert!(told(to.recv(&mut [])).await.unwrap().is_none());
            };
            told(async { tokio::join!(sending, receiving) }).await;
        }
    }
}

/// A cancelled send sends nothing, and a cancelled receive loses nothing.
#[tokio::test]
async fn calls_may_be_given_up() {
    const SOON: Duration = Duration::from_millis(20);
    let hub = Hub::new();
    let process = hub.process();
    let (ours, theirs) = joined(&hub, &process).await;
    for (from, to) in [(&theirs, &ours), (&ours, &theirs)] {
        assert!(timeout(SOON, to.recv(&mut [])).await.is_err());
        assert!(timeout(SOON, to.recv_leases()).await.is_err());
        // All the credit.
        from.send(&[1; 200_000]).await.unwrap();
        assert!(timeout(SOON, from.send(&[2; 100_000])).await.is_err());
        assert!(timeout(SOON, from.loan(100_000)).await.is_err());
        let error = from.send(&[3; 262_145]).await.unwrap_err();
        let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
        assert_eq!(inner, Some(&StreamError::TooLong));
        let peeked = told(to.peek(&mut [0])).await.unwrap().unwrap();
        assert_eq!((peeked.len, peeked.copied), (200_000, 1));
        let reading = async {
            tokio::task::yield_now().await;
            let got = told(to.recv_leases()).await.unwrap().unwrap();
            assert_eq!(got.to_vec(), [1; 200_000]);
        };
        let (sent, ()) = tokio::join!(told(from.send(&[4; 100_000])), reading);
        sent.unwrap();
        let got = told(to.recv_leases()).await.unwrap().unwrap();
        assert_eq!(got.to_vec(), [4; 100_000]);
    }
}

/// A loan that may not begin yet waits, and is woken.
#[tokio::test]
async fn loans_wait_for_their_turn() {
    let hub = Hub::new();
    let process = hub.process();
    let (ours, theirs) = joined(&hub, &process).await;
    for (from, to) in [(&theirs, &ours), (&ours, &theirs)] {
        let late = from.loan(1).await.unwrap();
        let mut sent = 0;
        while timeout(Duration::from_millis(20), from.send(b""))
            .await
            .is_ok()
        {
            sent += 1;
            assert!(sent < 1000, "there is no bound");
        }
        let (given_up, sending) = (from.loan(1).await.unwrap(), late.send());
        assert!(
            timeout(Duration::from_millis(20), given_up.send())
                .await
                .is_err()
        );
        let reading = async {
            tokio::task::yield_now().await;
            for _ in 0..sent {
                assert_eq!(told(to.recv(&mut [])).await.unwrap().unwrap().len, 0);
            }
        };
        let (last, ()) = tokio::join!(told(sending), reading);
        assert_eq!(last.unwrap(), 0);
        assert_eq!(told(to.recv(&mut [])).await.unwrap().unwrap().len, 0);
        assert_eq!(to.get_ref().unread(), 0);
        from.send(b"and on").await.unwrap();
        let got = told(to.recv_leases()).await.unwrap().unwrap();
        assert_eq!(got.to_vec(), b"and on");
    }
}

/// Waiting tasks get a reset, a refusal, and the error for an unknown name.
#[tokio::test]
async fn waiting_tasks_get_resets_refusals_and_unknown_names() {
    let hub = Hub::new();
    let process = hub.process_with(|builder| builder.name("worker"));
    let (ours, theirs) = joined(&hub, &process).await;
    ours.send(&[1; 262_144]).await.unwrap();
    let reset = async {
        tokio::task::yield_now().await;
        theirs.into_inner().reset();
    };
    let (received, sent, ()) =
        tokio::join!(told(ours.recv(&mut [])), told(ours.send(&[2; 9])), reset);
    for error in [received.unwrap_err(), sent.unwrap_err()] {
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    }
    let nobody = Address::new(Cid::HOST, PORT);
    let error = told(AsyncSeqPacket::connect(&process, nobody)).await;
    assert_eq!(error.unwrap_err().kind(), ErrorKind::ConnectionRefused);
    let error = told(AsyncSeqPacket::connect_name(&process, "nobody", PORT)).await;
    assert_eq!(error.unwrap_err().kind(), ErrorKind::NotFound);
    let listener = process.listen_seqpacket(PORT, 4).unwrap();
    let listener = AsyncSeqPacketListener::new(listener).unwrap();
    let connecting = AsyncSeqPacket::connect_name(&*hub.host, "worker", PORT);
    let (ours, theirs) = tokio::join!(told(connecting), told(listener.accept()));
    let (ours, (theirs, peer)) = (ours.unwrap(), theirs.unwrap());
    assert_eq!(
        (peer, theirs.local_addr()),
        (ours.local_addr(), ours.peer_addr())
    );
    // A socket that has left the runtime blocks again.
    let theirs = theirs.into_inner();
    std::thread::spawn(move || theirs.send(b"by a thread").unwrap())
        .join()
        .unwrap();
    let got = told(ours.recv_leases()).await.unwrap().unwrap();
    assert_eq!(got.to_vec(), b"by a thread");
}
