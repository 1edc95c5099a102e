//! Several threads, and tasks, over one sender.

use std::collections::BTreeSet;
use std::net::{Shutdown, TcpListener, TcpStream, UdpSocket};
use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use zerosock_zc::tokio::AsyncSender;
use zerosock_zc::{Completion, Copying, Outgoing, SendBackend, Sender, SharedSender};

use crate::network::{BACKENDS, SINK, accept, fill, with_cable, with_sink};
use crate::streams::check;

const PATIENCE: Duration = Duration::from_secs(300);
const THREADS: u32 = 4;
const EACH: u32 = 500;

/// Two threads ask inline and two take buffers back; what one finds out, the other does not.
#[test]
fn several_threads_get_every_report_once() {
    with_sink("several_threads", || {
        for (backend, kernel_copies) in
            BACKENDS.map(|backend| (backend, backend == SendBackend::Copy))
        {
            let socket = UdpSocket::bind("0.0.0.0:0").expect("an address");
            socket.connect(SINK[0]).expect("a route");
            let builder = Sender::builder().backend(backend).capacity(16);
            let builder = builder.inline_completions();
            let sender: Sender<Vec<u8>> = builder.open(socket).expect("a sender");
            let sender = sender.into_shared().expect("descriptors");
            let told = Mutex::new(Vec::new());
            let back = Mutex::new(BTreeSet::new());
            let take = || {
                while let Some(returned) = sender.returned() {
                    returned.outcome.expect("it was sent");
                    let number = returned.number.expect("it was not to be copied");
                    assert!(back.lock().expect("alive").insert(number), "twice");
                }
            };
            thread::scope(|scope| {
                for index in 0..THREADS {
                    let (sender, told, take) = (sender.clone(), &told, &take);
                    scope.spawn(move || {
                        let mut room = [Completion::default(); 16];
                        for _ in 0..EACH {
                            let outgoing = Outgoing::new(vec![1; 3000]).copying(Copying::Never);
                            if index % 2 == 0 {
                                let count = sender
                                    .send_with(outgoing, &mut room)
                                    .map_err(|refused| refused.why)
                                    .expect("it is accepted");
                                told.lock()
                                    .expect("alive")
                                    .extend_from_slice(&room[..count]);
                            } else {
                                sender
                                    .send(outgoing)
                                    .map_err(|refused| refused.why)
                                    .expect("it is accepted");
                            }
                            take();
                        }
                    });
                }
                // And one that only waits until nothing is under way, now and then.
                let sender = sender.clone();
                scope.spawn(move || {
                    for _ in 0..20 {
                        assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
                    }
                });
            });
            assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
            take();
            let mut told = told.into_inner().expect("alive");
            let mut room = [Completion::default(); 16];
            loop {
                let count = sender.completions(&mut room).expect("the kernel answers");
                told.extend_from_slice(&room[..count]);
                if count == 0 {
                    break;
                }
            }
            let mut numbers = BTreeSet::new();
            for range in told {
                assert_eq!(range.copied, kernel_copies, "{backend:?}: {range:?}");
                for number in range.lo..=range.hi {
                    assert!(numbers.insert(number), "{backend:?}: {number} twice");
                }
            }
            let all: BTreeSet<u32> = (0..THREADS * EACH).collect();
            assert_eq!(numbers, all, "{backend:?}");
            assert_eq!(back.into_inner().expect("alive"), all, "{backend:?}");
        }
    });
}

#[test]
fn threads_that_wait_for_a_place_get_one_when_the_peer_reads() {
    for backend in BACKENDS {
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
        let socket = TcpStream::connect(listener.local_addr().expect("an address"));
        let far = listener.accept().expect("a stream").0;
        let builder = Sender::builder().backend(backend).capacity(2);
        let socket = socket.expect("loopback");
        let sender = builder.open::<Vec<u8>>(socket.try_clone().expect("a descriptor"));
        let sender = sender.expect("a sender");
        let sender: SharedSender<Vec<u8>> = sender.into_shared().expect("descriptors");
        let total = thread::scope(|scope| {
            for _ in 0..THREADS {
                let sender = sender.clone();
                scope.spawn(move || {
                    for _ in 0..8 {
                        // More than the sockets can hold: all threads wait until the peer reads.
                        let outgoing = Outgoing::new(vec![0; 1 << 20]).copying(Copying::Never);
                        sender
                            .send(outgoing)
                            .map_err(|refused| refused.why)
                            .expect("it is accepted");
                        while sender.returned().is_some() {}
                    }
                });
            }
            let reader = scope.spawn(move || std::io::copy(&mut &far, &mut std::io::sink()));
            // Threads end while what they sent is under way: it goes on without them.
            while sender.stats().accepted < u64::from(THREADS * 8) {
                sender.wait(Some(PATIENCE)).expect("the kernel answers");
                thread::yield_now();
            }
            assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
            assert_eq!(sender.stats().failed, 0, "{backend:?}");
            socket.shutdown(Shutdown::Write).expect("open");
            reader.join().expect("a reader").expect("the bytes")
        });
        assert_eq!(total, (u64::from(THREADS) * 8) << 20, "{backend:?}");
    }
}

/// The kernel ends what a thread submitted when that exits, in whatever order.
#[test]
fn a_stream_keeps_its_order_when_threads_end() {
    const EACH_LEN: usize = (1 << 20) + 77;
    for backend in BACKENDS {
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
        let socket = TcpStream::connect(listener.local_addr().expect("an address"));
        let far = listener.accept().expect("a stream").0;
        let builder = Sender::builder().backend(backend).capacity(64);
        let sender: Sender<Vec<u8>> = builder.open(socket.expect("loopback")).expect("a sender");
        let sender = sender.into_shared().expect("descriptors");
        let mut at = 0;
        for turn in 0..8 {
            let (sender, from) = (sender.clone(), at);
            let thread = thread::spawn(move || {
                for index in 0..8 {
                    // More than any buffer between the two takes, of the first at least.
                    let mut bytes = vec![0; EACH_LEN];
                    fill(&mut bytes, from + (index * EACH_LEN) as u64);
                    let copying = [Copying::Never, Copying::Always][turn % 2];
                    let pushed = sender.push(Outgoing::new(bytes).copying(copying));
                    pushed.map_err(|refused| refused.why).expect("a place");
                }
                sender.submit().expect("the kernel answers");
            });
            thread.join().expect("the thread");
            at += 8 * EACH_LEN as u64;
        }
        let reader = thread::spawn(move || check(far));
        assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
        assert_eq!(sender.stats().failed, 0, "{backend:?}");
        drop(sender);
        assert_eq!(reader.join().expect("the contents"), at, "{backend:?}");
    }
}

fn runtime() -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_io().build().expect("a runtime")
}

#[test]
fn awaited_sends_arrive_and_are_returned() {
    const TOTAL: u64 = 16 << 20;
    for backend in BACKENDS {
        let (here, there) = (std::sync::mpsc::channel(), std::sync::mpsc::channel());
        let ((say, hear), (tell, heed)) = (here, there);
        with_cable(
            "what_is_awaited",
            move || {
                tell.send(()).expect("the far end");
                let address: std::net::SocketAddr = hear.recv().expect("the far end");
                let socket = TcpStream::connect(address).expect("a route");
                runtime().block_on(async {
                    let builder = Sender::builder().backend(backend).capacity(8);
                    let sender: Sender<Vec<u8>> = builder.open(socket).expect("a sender");
                    let mut sender = AsyncSender::try_from(sender).expect("descriptors");
                    let mut at = 0;
                    let mut spare = Vec::new();
                    while at < TOTAL {
                        let mut bytes: Vec<u8> = spare.pop().unwrap_or_else(|| vec![0; 1 << 18]);
                        fill(&mut bytes, at);
                        at += bytes.len() as u64;
                        let outgoing = Outgoing::new(bytes).copying(Copying::Never);
                        sender
                            .send(outgoing)
                            .await
                            .map_err(|refused| refused.why)
                            .expect("it is accepted");
                        if sender.get_ref().room() == 0 {
                            let returned = sender.returned().await.expect("the kernel answers");
                            let returned = returned.expect("eight are under way");
                            returned.outcome.expect("it was sent");
                            spare.push(returned.buffer);
                        }
                    }
                    sender.finish().await.expect("the kernel answers");
                    while let Some(returned) = sender.returned().await.expect("the kernel answers")
                    {
                        returned.outcome.expect("it was sent");
                    }
                    let stats = sender.into_inner().stats();
                    assert_eq!((stats.bytes, stats.failed), (TOTAL, 0), "{backend:?}");
                });
            },
            move || {
                heed.recv().expect("the near end");
                let listener = TcpListener::bind("10.8.0.2:0").expect("an address");
                say.send(listener.local_addr().expect("an address"))
                    .expect("the near end");
                assert_eq!(check(accept(&listener)), TOTAL);
            },
        );
    }
}

#[test]
fn dropping_a_future_loses_no_accepted_buffer() {
    for backend in BACKENDS {
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
        let socket = TcpStream::connect(listener.local_addr().expect("an address"));
        let far = listener.accept().expect("a stream").0;
        runtime().block_on(async {
            let builder = Sender::builder().backend(backend).capacity(2);
            let sender: Sender<Vec<u8>> = builder.open(socket.expect("loopback")).expect("one");
            let mut sender = AsyncSender::try_from(sender).expect("descriptors");
            for _ in 0..2 {
                // More than the buffers between the two take.
                let outgoing = Outgoing::new(vec![5; 32 << 20]).copying(Copying::Never);
                let sent = sender.send(outgoing).await;
                sent.map_err(|refused| refused.why).expect("a place");
            }
            {
                let waiting = std::pin::pin!(sender.returned());
                let waker = std::task::Waker::noop();
                let mut context = std::task::Context::from_waker(waker);
                assert!(waiting.poll(&mut context).is_pending());
            }
            let reader = thread::spawn(move || std::io::copy(&mut &far, &mut std::io::sink()));
            for _ in 0..2 {
                let returned = sender.returned().await.expect("the kernel answers");
                returned.expect("under way").outcome.expect("it was sent");
            }
            assert!(sender.returned().await.expect("an answer").is_none());
            drop(sender);
            let total = reader.join().expect("a reader").expect("the bytes");
            assert_eq!(total, 64 << 20, "{backend:?}");
        });
    }
}
