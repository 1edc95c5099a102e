//! Endpoints in a tokio runtime.
#![cfg(feature = "tokio")]

mod common;

use std::time::Duration;

use common::{PATIENCE, TestDaemon, bytes};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;
use zerosock::vsock::Endpoint;
use zerosock::vsock::tokio::{AsyncListener, AsyncStream};
use zerosock::{Address, Cid, Port};

const PORT: Port = Port::new(9);

fn endpoints(daemon: &TestDaemon) -> (Endpoint, Endpoint) {
    let attach = |index: usize| {
        Endpoint::builder()
            .attach_device(&daemon.vms[index].socket)
            .unwrap()
    };
    (attach(0), attach(1))
}

fn there() -> Address {
    Address::new(Cid::new(4), PORT)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_tasks_talk_through_two_endpoints() {
    const TASKS: u64 = 16;
    const LEN: usize = 300_000;
    let daemon = TestDaemon::with(2, |_| {});
    let (client, server) = endpoints(&daemon);
    let listener = AsyncListener::new(server.listen(PORT, 64).unwrap()).unwrap();
    let serving = tokio::spawn(async move {
        for _ in 0..TASKS {
            let (stream, peer) = listener.accept().await.unwrap();
            assert_eq!(peer.cid, Cid::new(3));
            tokio::spawn(async move {
                let (mut reader, mut writer) = stream.into_split();
                tokio::io::copy(&mut reader, &mut writer).await.unwrap();
            });
        }
        listener
    });
    let mut clients = Vec::new();
    for task in 0..TASKS {
        let stream = timeout(PATIENCE, AsyncStream::connect(&client, there()))
            .await
            .unwrap()
            .unwrap();
        clients.push(tokio::spawn(async move {
            let (mut reader, mut writer) = stream.into_split();
            let sending = tokio::spawn(async move {
                writer.write_all(&bytes(task, LEN)).await.unwrap();
            });
            let mut back = Vec::new();
            timeout(PATIENCE, reader.read_to_end(&mut back))
                .await
                .unwrap()
                .unwrap();
            assert!(back == bytes(task, LEN), "task {task}");
            sending.await.unwrap();
        }));
    }
    for client in clients {
        client.await.unwrap();
    }
    drop(serving.await.unwrap());
}

#[tokio::test]
async fn leases_and_loans_are_awaited() {
    let daemon = TestDaemon::with(2, |_| {});
    let (client, server) = endpoints(&daemon);
    let listener = AsyncListener::new(server.listen(PORT, 64).unwrap()).unwrap();
    let connecting = AsyncStream::connect(&client, there());
    let (accepted, connected) = tokio::join!(listener.accept(), connecting);
    let (one, two) = (connected.unwrap(), accepted.unwrap().0);
    let receiving = async {
        let lease = timeout(PATIENCE, two.recv()).await.unwrap().unwrap();
        assert_eq!(lease.unwrap().to_vec(), b"in place");
        let end = timeout(PATIENCE, two.recv()).await.unwrap().unwrap();
        assert!(end.is_none());
    };
    let sending = async {
        // Long enough for the other side to be told to wait.
        tokio::time::sleep(Duration::from_millis(10)).await;
        let mut loan = one.loan(100).await.unwrap();
        loan.write_at(0, b"in place").unwrap();
        loan.send().unwrap();
        tokio::task::yield_now().await;
        drop(one);
    };
    tokio::join!(receiving, sending);
}

#[tokio::test]
async fn a_refused_connect_says_so_and_a_cancelled_one_leaves_nothing() {
    let daemon = TestDaemon::with(2, |_| {});
    let (client, server) = endpoints(&daemon);
    let _listener = AsyncListener::new(server.listen(Port::new(1), 1).unwrap()).unwrap();
    let error = timeout(PATIENCE, AsyncStream::connect(&client, there()))
        .await
        .unwrap()
        .unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused);
    let open = AsyncStream::connect(&client, Address::new(Cid::new(4), Port::new(1)))
        .await
        .unwrap();
    let gave_up = timeout(Duration::from_millis(20), open.recv()).await;
    assert!(gave_up.is_err());
}
