//! Datagram sockets in a tokio runtime.

use std::io::{ErrorKind, Write};
use std::sync::Arc;
use std::task::Poll;
use std::time::Instant;

use tokio::io::ReadBuf;
use tokio::time::timeout;
use zerosock::vsock::tokio::AsyncDatagram;

use super::*;
use crate::common::{assert_bytes, bytes, deadline};

fn task(socket: Datagram) -> AsyncDatagram {
    AsyncDatagram::new(socket).unwrap()
}

/// The output of `wait`. Panics if it took long: then no event woke it, and its time-out did.
async fn told<T>(wait: impl Future<Output = T>) -> T {
    let began = Instant::now();
    let found = timeout(PATIENCE, wait).await.expect("never told");
    assert!(began.elapsed() < PATIENCE, "never told");
    found
}

async fn told_of(socket: &AsyncDatagram) -> (Vec<u8>, Address) {
    let mut all = vec![0; 65536];
    let (len, from) = told(socket.recv_from(&mut all)).await.unwrap();
    all.truncate(len);
    (all, from)
}

/// Echoes until a datagram is empty.
async fn echo(socket: AsyncDatagram) {
    loop {
        let (bytes, from) = told_of(&socket).await;
        if bytes.is_empty() {
            return;
        }
        told(socket.send_to(&bytes, from)).await.unwrap();
    }
}

async fn many_tasks_talk_to(server: Datagram, clients: Vec<Datagram>) {
    const ROUNDS: u64 = 200;
    let there = server.local_addr();
    let serving = tokio::spawn(echo(task(server)));
    let ask = |(number, socket): (usize, Datagram)| {
        let socket = task(socket);
        tokio::spawn(async move {
            for round in 0..ROUNDS {
                let sent = bytes(round, 1 + number * 100 + round as usize);
                told(socket.send_to(&sent, there)).await.unwrap();
                let (back, from) = told_of(&socket).await;
                assert_eq!(from, there);
                assert_bytes(&back, &sent);
            }
            socket
        })
    };
    let mut last = None;
    for client in clients.into_iter().enumerate().map(ask).collect::<Vec<_>>() {
        last = Some(client.await.unwrap());
    }
    told(last.unwrap().send_to(b"", there)).await.unwrap();
    serving.await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_tasks_talk_to_one() {
    let hub = Hub::new();
    let process = hub.process();
    let clients = (0..8).map(|_| at_host(&hub, Port::ANY)).collect();
    many_tasks_talk_to(at(&process, PORT), clients).await;
    let clients = (0..8).map(|_| at(&process, Port::ANY)).collect();
    many_tasks_talk_to(at_host(&hub, PORT), clients).await;
}

#[tokio::test]
async fn siblings_talk_in_tasks_of_one_thread() {
    let serve = Serve::new(1);
    let (from, to) = (serve.process(), serve.process());
    let clients = (0..4).map(|_| at(&from, Port::ANY)).collect();
    many_tasks_talk_to(at(&to, PORT), clients).await;
}

/// A sender that is told to stop waits in its task and is woken; no datagram is lost, and the other
/// task of the same thread continues.
#[tokio::test]
async fn a_task_paused_by_stop_does_not_delay_others() {
    const MOST: u64 = 2000;
    let hub = Hub::with(|builder| builder);
    let process = hub.process();
    let (full, free) = (at_host(&hub, PORT), at_host(&hub, Port::ANY));
    // Three quarters of the buffer are for datagrams in flight.
    full.set_receive_buffer(700 << 10);
    let sender = at(&process, Port::ANY);
    sender.set_send_buffer(32 << 10);
    let (full, free) = (task(full), task(free));
    let (to_full, to_free) = (full.local_addr(), free.local_addr());
    let sender = Arc::new(task(sender));
    let stopped = tokio::spawn({
        let sender = sender.clone();
        async move {
            for number in 0..MOST {
                sender.send_to(&bytes(number, 1000), to_full).await.unwrap();
            }
        }
    });
    let give_up = deadline();
    while sender.get_ref().stats().stopped == 0 {
        assert!(Instant::now() < give_up, "nobody says stop");
        tokio::task::yield_now().await;
    }
    for number in 0..MOST {
        told(sender.send_to(&bytes(number, 500), to_free))
            .await
            .unwrap();
        assert_bytes(&told_of(&free).await.0, &bytes(number, 500));
    }
    assert!(!stopped.is_finished());
    for number in 0..MOST {
        assert_bytes(&told_of(&full).await.0, &bytes(number, 1000));
    }
    told(stopped).await.unwrap();
    assert_eq!(full.get_ref().drops().full, 0);
}

/// A loan can be older than its receiver's STOP.
#[tokio::test]
async fn leases_and_loans_are_awaited() {
    let hub = Hub::new();
    let process = hub.process();
    let ours = at_host(&hub, PORT);
    ours.set_receive_buffer(40_000);
    let (ours, theirs) = (task(ours), task(at(&process, Port::ANY)));
    let to = ours.local_addr();
    let mut loan = told(theirs.loan(to, 100)).await.unwrap();
    loan.write_all(b"before").unwrap();
    assert_eq!((loan.capacity(), loan.filled()), (100, 6));
    // Fills the receiver until it sends STOP.
    let mut sent = 0;
    let give_up = deadline();
    loop {
        match theirs.get_ref().send_to(&[1; 1000], to) {
            Ok(_) => sent += 1,
            Err(_) if theirs.get_ref().stats().stopped > 0 => break,
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
        assert!(Instant::now() < give_up, "nobody says stop");
        tokio::task::yield_now().await;
    }
    let mut sending = Box::pin(loan.send());
    let first = std::future::poll_fn(|cx| Poll::Ready(sending.as_mut().poll(cx))).await;
    assert!(first.is_pending(), "he has asked to stop");
    let reading = async {
        for _ in 0..sent {
            let lease = told(ours.recv_lease()).await.unwrap();
            assert_eq!((lease.len(), lease.source()), (1000, theirs.local_addr()));
        }
        let lease = told(ours.recv_lease()).await.unwrap();
        assert_eq!(lease.to_vec(), b"before");
    };
    let (sent, ()) = tokio::join!(told(sending), reading);
    assert_eq!(sent.unwrap(), 6);
}

#[tokio::test]
async fn batches_in_tasks_and_manual_polling() {
    let hub = Hub::new();
    let process = hub.process();
    let (ours, theirs) = (task(at_host(&hub, PORT)), task(at(&process, Port::ANY)));
    let to = ours.local_addr();
    theirs.get_ref().connect(to);
    assert_eq!(theirs.peer_addr(), Some(to));
    let receiving = async {
        let mut buffers = [[0; 8]; 5];
        let mut got = Vec::new();
        while got.len() < 5 {
            let first = got.len();
            got.extend(told(ours.recv_many(&mut buffers[first..])).await.unwrap());
        }
        let lengths: Vec<usize> = got.iter().map(|(len, _)| *len).collect();
        assert_eq!(lengths, [1, 2, 9, 4, 5]);
        let mut seen = 0;
        while seen < 2 {
            let look = |shown: zerosock::vsock::Message<'_>, _| assert_eq!(shown.to_vec(), b"each");
            seen += told(ours.recv_each(8, look)).await.unwrap();
        }
    };
    let sending = async {
        // The other side gets STOP.
        tokio::task::yield_now().await;
        let three: [(&[u8], Address); 3] = [(b"1", to), (b"22", to), (b"999999999", to)];
        assert_eq!(told(theirs.send_many(&three)).await.unwrap(), 3);
        let two: [&[u8]; 2] = [b"4444", b"55555"];
        assert_eq!(told(theirs.send_all(&two)).await.unwrap(), 2);
        for _ in 0..2 {
            told(theirs.send(b"each")).await.unwrap();
        }
    };
    tokio::join!(receiving, sending);
    let mut peeked = [0; 3];
    let receiving = async {
        assert_eq!(
            told(ours.peek_from(&mut peeked)).await.unwrap(),
            (6, theirs.local_addr())
        );
        let mut place = [0; 4];
        let mut out = ReadBuf::new(&mut place);
        let from = told(std::future::poll_fn(|cx| ours.poll_recv_from(cx, &mut out))).await;
        assert_eq!(
            (from.unwrap(), out.filled()),
            (theirs.local_addr(), &b"poll"[..])
        );
        let mut next = [0; 4];
        assert_eq!(told(ours.recv(&mut next)).await.unwrap(), 4);
        assert_eq!(&next, b"next");
    };
    let sending = async {
        tokio::task::yield_now().await;
        let send = |cx: &mut std::task::Context<'_>| theirs.poll_send_to(cx, b"polled", to);
        assert_eq!(told(std::future::poll_fn(send)).await.unwrap(), 6);
        tokio::task::yield_now().await;
        told(theirs.send(b"next")).await.unwrap();
    };
    tokio::join!(receiving, sending);
    assert_eq!(&peeked, b"pol");
    // Outside the runtime it blocks again.
    let waits = ours.into_inner();
    waits
        .set_read_timeout(Some(Duration::from_millis(20)))
        .unwrap();
    assert_eq!(
        waits.recv(&mut [0]).unwrap_err().kind(),
        ErrorKind::TimedOut
    );
}

#[tokio::test]
async fn a_task_hears_that_its_endpoint_is_over() {
    let mut serve = Serve::new(1);
    let process = serve.process();
    let theirs = task(at(&process, PORT));
    let waiting = tokio::spawn(async move { theirs.recv(&mut [0]).await });
    tokio::task::yield_now().await;
    let daemon = serve.daemon.take().unwrap();
    tokio::task::spawn_blocking(|| daemon.shutdown())
        .await
        .unwrap();
    let error = told(waiting).await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionAborted);
}
