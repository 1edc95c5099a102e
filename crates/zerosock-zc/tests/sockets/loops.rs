//! Event loops, tasks and threads: every event that one waits for arrives, and ends the wait.

use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{Timespec, epoll};
use zerosock_zc::tokio::AsyncSender;
use zerosock_zc::{Copying, Interest, Outgoing, Sender};

use crate::network::{BACKENDS, fill};
use crate::streams::check;

const PATIENCE: Duration = Duration::from_secs(30);
/// Long enough to distinguish a thread that sleeps from one that does not.
const MOMENT: Duration = Duration::from_millis(200);
const SENDS: usize = 256;

fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let socket = TcpStream::connect(listener.local_addr().expect("an address"));
    let far = listener.accept().expect("a stream").0;
    (socket.expect("loopback"), far)
}

/// The result of `act`, on a thread that is abandoned if it does not return.
fn within<T: Send + 'static>(what: &str, act: impl FnOnce() -> T + Send + 'static) -> T {
    let (tell, told) = mpsc::channel();
    thread::spawn(move || tell.send(act()));
    let done = told.recv_timeout(PATIENCE);
    done.unwrap_or_else(|why| panic!("{what}: {why}"))
}

/// An edge-triggered event loop on the descriptor.
fn event_loop(mut sender: Sender<Vec<u8>>, submitted: impl FnOnce()) -> Sender<Vec<u8>> {
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).expect("a descriptor");
    let wanted = match sender.interest() {
        Interest::Readable => epoll::EventFlags::IN,
        _ => epoll::EventFlags::OUT,
    };
    let data = epoll::EventData::new_u64(0);
    let wanted = wanted | epoll::EventFlags::ET;
    epoll::add(&epoll, &sender, data, wanted).expect("an epoll");
    sender.submit().expect("the kernel answers");
    submitted();
    let mut events = [MaybeUninit::uninit(); 4];
    let patience = Timespec::try_from(PATIENCE).expect("it fits");
    while !sender.is_quiet() {
        match epoll::wait(&epoll, &mut events, Some(&patience)) {
            Ok((ready, _)) => assert!(!ready.is_empty(), "nothing comes"),
            Err(error) => assert_eq!(error, rustix::io::Errno::INTR),
        }
        sender.poll().expect("the kernel answers");
    }
    sender
}

fn task(sender: Sender<Vec<u8>>, submitted: impl FnOnce()) -> Sender<Vec<u8>> {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let runtime = builder.enable_io().build().expect("a runtime");
    runtime.block_on(async {
        let mut sender = AsyncSender::try_from(sender).expect("descriptors");
        sender.submit().expect("the kernel answers");
        submitted();
        sender.finish().await.expect("the kernel answers");
        sender.into_inner()
    })
}

fn threads(sender: Sender<Vec<u8>>, submitted: impl FnOnce()) -> Sender<Vec<u8>> {
    let sender = sender.into_shared().expect("descriptors");
    sender.submit().expect("the kernel answers");
    submitted();
    assert!(sender.finish(None).expect("the kernel answers"));
    sender.into_inner().expect("the only handle")
}

/// 256 sends of `len` bytes, submitted at once, and a peer that reads only after that.
fn everything_arrives(len: usize, copying: Copying) {
    for backend in BACKENDS {
        for mode in 0..3 {
            let (socket, far) = pair();
            socket.set_nonblocking(true).expect("a socket");
            let builder = Sender::builder().backend(backend).capacity(SENDS as u32);
            let mut sender: Sender<Vec<u8>> = builder.open(socket).expect("a sender");
            for index in 0..SENDS {
                let mut bytes = vec![0; len];
                fill(&mut bytes, (index * len) as u64);
                let pushed = sender.push(Outgoing::new(bytes).copying(copying));
                pushed.map_err(|refused| refused.why).expect("a place");
            }
            let what = format!("{backend:?}, {mode}, {len} bytes, {copying:?}");
            let received = within(&what, move || {
                let (tell, told) = mpsc::channel();
                let read = || drop(thread::spawn(move || tell.send(check(far))));
                let sender = match mode {
                    0 => event_loop(sender, read),
                    1 => task(sender, read),
                    _ => threads(sender, read),
                };
                assert_eq!(sender.stats().failed, 0);
                drop(sender);
                told.recv().expect("the contents")
            });
            assert_eq!(received, (SENDS * len) as u64, "{what}");
        }
    }
}

/// The sends finish within the submission: no pending event could end a wait.
#[test]
fn sends_that_finish_at_once_end_every_wait() {
    everything_arrives(100, Copying::Always);
}

/// The kernel answers with EAGAIN at once.
#[test]
fn an_event_loop_waits_for_a_full_socket() {
    everything_arrives(1 << 16, Copying::Always);
    everything_arrives(1 << 16, Copying::Never);
}

/// A send that finishes at once, and one that the peer does not read.
fn one_over_and_one_not(sender: &mut Sender<Vec<u8>>) {
    let small = Outgoing::new(vec![1; 100]).slot(0).flush();
    let large = Outgoing::new(vec![2; 64 << 20]);
    for outgoing in [small, large] {
        let pushed = sender.push(outgoing.copying(Copying::Always));
        pushed.map_err(|refused| refused.why).expect("a place");
    }
}

#[test]
fn a_wait_ends_for_events_it_handles_itself() {
    for backend in BACKENDS {
        let (socket, far) = pair();
        let builder = Sender::builder().backend(backend).discard_returned();
        let mut sender: Sender<Vec<u8>> = builder.open(socket).expect("a sender");
        one_over_and_one_not(&mut sender);
        let found = within(&format!("{backend:?}"), move || {
            sender.wait(None).expect("the kernel answers");
            sender.notification()
        });
        assert!(found.is_some(), "{backend:?}");
        drop(far);
    }
}

#[test]
fn a_wait_sleeps_while_older_buffers_are_not_taken() {
    for backend in BACKENDS {
        let (socket, far) = pair();
        let mut sender: Sender<Vec<u8>> = Sender::builder()
            .backend(backend)
            .open(socket)
            .expect("a sender");
        one_over_and_one_not(&mut sender);
        sender.wait(Some(PATIENCE)).expect("the kernel answers");
        let waits = |wait: &mut dyn FnMut(Duration)| {
            let until = Instant::now() + MOMENT;
            let mut waits = 0;
            while Instant::now() < until {
                wait(until.saturating_duration_since(Instant::now()));
                waits += 1;
            }
            waits
        };
        // The peer's buffer may grow a few times meanwhile.
        let alone = waits(&mut |left| sender.wait(Some(left)).expect("the kernel answers"));
        assert!(alone < 100, "{backend:?}: {alone}");
        let sender = sender.into_shared().expect("descriptors");
        let shared = waits(&mut |left| sender.wait(Some(left)).expect("the kernel answers"));
        assert!(shared < 100, "{backend:?}: {shared}");
        assert!(sender.returned().is_some(), "{backend:?}");
        drop(far);
    }
}

/// Waits until that thread of this process sleeps.
fn until_asleep(thread: i32) {
    let path = format!("/proc/self/task/{thread}/stat");
    let until = Instant::now() + PATIENCE;
    loop {
        let stat = std::fs::read_to_string(&path).expect("the thread");
        let state = stat.rsplit(')').next().expect("a state").trim_start();
        if state.starts_with('S') {
            return;
        }
        assert!(Instant::now() < until, "it does not sleep: {stat}");
        thread::yield_now();
    }
}

#[test]
fn a_flush_and_a_cancellation_end_a_wait() {
    for backend in BACKENDS {
        let (socket, far) = pair();
        let sender: Sender<Vec<u8>> = Sender::builder()
            .backend(backend)
            .open(socket)
            .expect("a sender");
        let sender = sender.into_shared().expect("descriptors");
        let sent = sender.send(Outgoing::new(vec![1; 100]).slot(0).copying(Copying::Always));
        sent.map_err(|refused| refused.why).expect("a place");
        let sent = sender.send(Outgoing::new(vec![2; 64 << 20]).copying(Copying::Always));
        sent.map_err(|refused| refused.why).expect("a place");
        let (tell, told) = mpsc::channel();
        let (own, news) = (sender.clone(), tell.clone());
        thread::spawn(move || {
            own.wait(None).expect("the kernel answers");
            // SAFETY: gettid(2) cannot fail and touches no memory.
            news.send(unsafe { libc::gettid() }).expect("the test");
            while own.notification().is_none() {
                own.wait(None).expect("the kernel answers");
            }
            news.send(1).expect("the test");
        });
        until_asleep(told.recv_timeout(PATIENCE).expect("a thread"));
        sender.flush(0..1).expect("a slot");
        assert_eq!(told.recv_timeout(PATIENCE), Ok(1), "{backend:?}: a flush");
        // One thread waits for the kernel, the other one for that thread.
        for _ in 0..2 {
            let (own, tell) = (sender.clone(), tell.clone());
            thread::spawn(move || {
                // SAFETY: gettid(2) cannot fail and touches no memory.
                tell.send(unsafe { libc::gettid() }).expect("the test");
                let finished = own.finish(None).expect("the kernel answers");
                tell.send(i32::from(finished)).expect("the test");
            });
        }
        for _ in 0..2 {
            until_asleep(told.recv_timeout(PATIENCE).expect("a thread"));
        }
        sender.cancel().expect("the kernel answers");
        for _ in 0..2 {
            let finished = told.recv_timeout(PATIENCE);
            assert_eq!(finished, Ok(1), "{backend:?}");
        }
        assert_eq!(sender.stats().failed, 1, "{backend:?}");
        drop(far);
    }
}

/// One thread waits for the kernel on behalf of both, and leaves after its timeout.
#[test]
fn a_waiting_thread_takes_over_when_the_watch_leaves() {
    for backend in BACKENDS {
        let (socket, far) = pair();
        let sender: Sender<Vec<u8>> = Sender::builder()
            .backend(backend)
            .open(socket)
            .expect("a sender");
        let sender = sender.into_shared().expect("descriptors");
        let sent = sender.send(Outgoing::new(vec![0; 32 << 20]).copying(Copying::Always));
        sent.map_err(|refused| refused.why).expect("a place");
        let (tell, told) = mpsc::channel();
        let first = sender.clone();
        let (sleeps, asleep) = mpsc::channel();
        let impatient = thread::spawn(move || {
            // SAFETY: gettid(2) cannot fail and touches no memory.
            sleeps.send(unsafe { libc::gettid() }).expect("the test");
            first.finish(Some(MOMENT * 5))
        });
        until_asleep(asleep.recv_timeout(PATIENCE).expect("a thread"));
        let second = sender.clone();
        thread::spawn(move || tell.send(second.finish(None).expect("the kernel answers")));
        let finished = impatient.join().expect("a thread");
        assert!(!finished.expect("the kernel answers"), "{backend:?}");
        let reader = thread::spawn(move || std::io::copy(&mut &far, &mut std::io::sink()));
        assert_eq!(told.recv_timeout(PATIENCE), Ok(true), "{backend:?}");
        drop(sender);
        drop(reader.join());
    }
}
