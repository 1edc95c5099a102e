//! Endpoints in a tokio runtime.
#![cfg(feature = "tokio")]

use std::time::{Duration, Instant};

use crate::common::{self, PATIENCE, TestDaemon, bytes};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;
use zerosock::vsock::tokio::{AsyncListener, AsyncStream};
use zerosock::vsock::{Endpoint, Host};
use zerosock::{Address, Cid, Port};

/// The output of `wait`. Panics if it took long: then no event woke it, and its time-out did.
async fn told<T>(wait: impl Future<Output = T>) -> T {
    let began = Instant::now();
    let found = timeout(PATIENCE, wait).await.expect("never told");
    assert!(began.elapsed() < PATIENCE, "never told");
    found
}

const PORT: Port = Port::new(9);

fn endpoints(daemon: &TestDaemon) -> (Endpoint, Endpoint) {
    let attach = |index: usize| {
        Endpoint::builder()
            .queue_pairs(common::pairs())
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
async fn a_refused_connect_is_reported_and_a_receive_can_be_cancelled() {
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

#[tokio::test]
async fn a_connect_without_an_answer_times_out() {
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
    // The endpoint's task sleeps without a timer. The device has received a first packet and
    // notifies its completion; the runtime polls descriptors only from time to time.
    let _listener = AsyncListener::new(client.listen(PORT, 4).unwrap()).unwrap();
    let nobody = AsyncStream::connect(&client, Address::new(Cid::HOST, PORT)).await;
    assert!(nobody.is_err());
    for _ in 0..1000 {
        tokio::task::yield_now().await;
    }
    let error = told(AsyncStream::connect(&client, there()))
        .await
        .unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::TimedOut);
}

/// A host with an attach socket, and a thread in which processes attach: the host must be driven
/// meanwhile.
fn host(dir: &tempfile::TempDir) -> (Host, std::path::PathBuf) {
    let path = dir.path().join("attach.sock");
    (Host::builder().attach(&path).start().unwrap(), path)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_serves_tasks() {
    const TASKS: u64 = 8;
    const LEN: usize = 100_000;
    let dir = tempfile::tempdir().unwrap();
    let (host, path) = host(&dir);
    let listener = AsyncListener::new(host.listen(PORT, 64).unwrap()).unwrap();
    assert_eq!(listener.local_addr(), Address::new(Cid::HOST, PORT));
    let serving = tokio::spawn(async move {
        for _ in 0..TASKS {
            let (stream, peer) = listener.accept().await.unwrap();
            assert_eq!(stream.peer_addr(), peer);
            tokio::spawn(async move {
                let (mut reader, mut writer) = stream.into_split();
                tokio::io::copy(&mut reader, &mut writer).await.unwrap();
            });
        }
        listener
    });
    let attach = move || Endpoint::builder().name("worker").attach(path).unwrap();
    let process = tokio::task::spawn_blocking(attach).await.unwrap();
    let mut tasks = Vec::new();
    for task in 0..TASKS {
        let to = Address::new(Cid::HOST, PORT);
        let stream = AsyncStream::connect(&process, to).await.unwrap();
        assert_eq!(stream.peer_addr(), to);
        assert_eq!(stream.local_addr().cid, process.cid());
        tasks.push(tokio::spawn(async move {
            let (mut reader, mut writer) = stream.into_split();
            let (sent, mut back) = (bytes(task, LEN), Vec::new());
            let sending = async {
                writer.write_all(&sent).await.unwrap();
                writer.shutdown().await.unwrap();
            };
            let (read, ()) = tokio::join!(reader.read_to_end(&mut back), sending);
            read.unwrap();
            assert!(back == sent, "task {task}");
        }));
    }
    for task in tasks {
        told(task).await.unwrap();
    }
    drop(told(serving).await.unwrap());
    // In the other direction, by name.
    let mine = AsyncListener::new(process.listen(PORT, 4).unwrap()).unwrap();
    let connecting = AsyncStream::connect_name(&host, "worker", PORT);
    let (stream, accepted) = tokio::join!(connecting, mine.accept());
    let (mut stream, (accepted, _)) = (stream.unwrap(), accepted.unwrap());
    let error = AsyncStream::connect_name(&process, "nobody", PORT).await;
    assert_eq!(error.unwrap_err().kind(), std::io::ErrorKind::NotFound);
    // The halves are reunited without a packet to the peer.
    let (reader, writer) = accepted.into_split();
    let (other, _writer) = stream.into_split();
    let error = other.reunite(writer).unwrap_err();
    stream = error.0.reunite(_writer).unwrap();
    let mut accepted = reader.reunite(error.1).unwrap();
    stream.write_all(b"whole").await.unwrap();
    accepted.write_all(b"again").await.unwrap();
    for (stream, word) in [(&mut stream, b"again"), (&mut accepted, b"whole")] {
        let mut got = [0; 5];
        told(stream.read_exact(&mut got)).await.unwrap();
        assert_eq!(&got, word);
    }
}

fn runtime() -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_all().build().unwrap()
}

/// Two ends of a connection. The tasks of both endpoints run in `runtime`.
fn connected_on(
    runtime: &tokio::runtime::Runtime,
    daemon: &TestDaemon,
) -> (AsyncStream, AsyncStream) {
    let (client, server) = endpoints(daemon);
    let listener = server.listen(PORT, 4).unwrap();
    runtime.block_on(async {
        let listener = AsyncListener::new(listener).unwrap();
        let connecting = AsyncStream::connect(&client, there());
        let (near, far) = tokio::join!(connecting, listener.accept());
        (near.unwrap(), far.unwrap().0)
    })
}

#[test]
fn sockets_outlive_their_runtime() {
    let daemon = TestDaemon::with(2, |_| {});
    let first = runtime();
    let (mut near, mut far) = connected_on(&first, &daemon);
    drop(first);
    runtime().block_on(async {
        let mut word = [0; 4];
        let reading = told(far.read_exact(&mut word));
        let writing = async {
            tokio::task::yield_now().await;
            near.write_all(b"word").await.unwrap();
        };
        let (read, ()) = tokio::join!(reading, writing);
        read.unwrap();
        assert_eq!(&word, b"word");
    });
}

#[test]
fn a_runtime_that_ends_wakes_the_tasks_of_another() {
    let daemon = TestDaemon::with(2, |_| {});
    let first = runtime();
    let (mut near, mut far) = connected_on(&first, &daemon);
    runtime().block_on(async {
        let reading = tokio::spawn(async move {
            let mut word = [0; 4];
            far.read_exact(&mut word).await.map(|_| word)
        });
        // It starts and waits. A task of the first runtime runs its endpoint.
        tokio::task::yield_now().await;
        std::thread::spawn(move || drop(first)).join().unwrap();
        tokio::task::yield_now().await;
        near.write_all(b"word").await.unwrap();
        assert_eq!(&told(reading).await.unwrap().unwrap(), b"word");
    });
}

#[test]
fn a_runtime_needs_no_timer() {
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
    let (done, outcome) = std::sync::mpsc::channel();
    let connecting = std::thread::spawn(move || {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        let runtime = builder.enable_io().build().unwrap();
        let connected = runtime.block_on(AsyncStream::connect(&client, there()));
        done.send(connected.map(drop)).unwrap();
    });
    let error = outcome.recv_timeout(PATIENCE).expect("never told");
    assert_eq!(error.unwrap_err().kind(), std::io::ErrorKind::TimedOut);
    connecting.join().unwrap();
}
