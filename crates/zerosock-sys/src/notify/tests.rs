use super::*;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd};
use rustix::fd::OwnedFd;
use rustix::pipe::{PipeFlags, pipe_with};
use std::fs::File;
use std::io::Read;
use std::os::unix::net::UnixStream;

fn count(fd: &OwnedFd) -> u64 {
    let mut bytes = [0; 8];
    rustix::io::read(fd, &mut bytes).unwrap();
    u64::from_ne_bytes(bytes)
}

fn call(fd: &OwnedFd, threads: &ThreadCount) -> io::Result<CallFd> {
    CallFd::new(fd.try_clone().unwrap().into(), CallThread::new(threads))
}

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC).unwrap()
}

#[test]
fn an_eventfd_counts_every_notification() {
    let notifier = Notifier::new();
    assert!(notifier.is_direct(), "no asynchronous I/O on this machine");
    let fd = event();
    let call = call(&fd, &ThreadCount::default()).unwrap();
    // More than the queue has room for.
    for _ in 0..1000 {
        notifier.notify(&call);
    }
    assert_eq!(count(&fd), 1000);
}

/// The peer clears O_NONBLOCK and fills the counter: a write would wait.
#[test]
fn a_full_eventfd_does_not_block() {
    let fd = event();
    rustix::io::write(&fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    for notifier in [Notifier::new(), Notifier::without_aio()] {
        notifier.notify(&call(&fd, &ThreadCount::default()).unwrap());
    }
    // Lets the thread go.
    count(&fd);
}

#[test]
fn a_full_pipe_blocks_its_own_thread_only() {
    let notifier = Notifier::new();
    let threads = ThreadCount::default();
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).unwrap();
    rustix::io::ioctl_fionbio(&writer, true).unwrap();
    let mut filled = 0;
    while let Ok(bytes) = rustix::io::write(&writer, &[0; 4096]) {
        filled += bytes;
    }
    rustix::io::ioctl_fionbio(&writer, false).unwrap();
    let full = call(&writer, &threads).unwrap();
    for _ in 0..1000 {
        notifier.notify(&full);
    }
    drop((full, writer));
    // What was asked for while it waited is one more write, or none.
    let mut rest = Vec::new();
    File::from(reader).read_to_end(&mut rest).unwrap();
    assert!([filled + 8, filled + 16].contains(&rest.len()));
}

/// Without a thread: the peer has used up its own.
#[test]
fn a_socket_is_notified_by_the_caller_also_when_it_is_full() {
    if sending_can_collect() {
        let test = "a_socket_is_notified_by_the_caller_also_when_it_is_full";
        return println!("SKIPPED {test}: Linux before 6.8");
    }
    let threads = ThreadCount::default();
    let _reader = use_up_threads(&threads);
    let (mut other, socket) = UnixStream::pair().unwrap();
    let call = call(&socket.into(), &threads).unwrap();
    let notifier = Notifier::new();
    notifier.notify(&call);
    let mut bytes = [0; 8];
    other.read_exact(&mut bytes).unwrap();
    assert_eq!(u64::from_ne_bytes(bytes), 1);
    // More than the socket has room for.
    for _ in 0..100_000 {
        notifier.notify(&call);
    }
    assert!(notifier.retry_in().is_none());
    other.read_exact(&mut bytes).unwrap();
    drop(other);
    notifier.notify(&call);
    assert!(notifier.retry_in().is_none(), "nor when the peer has gone");
}

/// The way of kernels before 6.8, on any kernel: a full socket makes only the thread wait.
#[test]
fn a_socket_is_notified_by_the_thread_where_a_sender_can_wait() {
    let (mut other, socket) = UnixStream::pair().unwrap();
    socket.set_nonblocking(true).unwrap();
    let mut filled = 0;
    while let Ok(bytes) = rustix::io::write(&socket, &[0; 4096]) {
        filled += bytes;
    }
    socket.set_nonblocking(false).unwrap();
    let call = CallFd {
        target: Target::new(PeerFd::from(OwnedFd::from(socket))),
        thread: CallThread::new(&ThreadCount::default()),
        way: Way::Thread,
    };
    let notifier = Notifier::new();
    for _ in 0..1000 {
        notifier.notify(&call);
    }
    drop(call);
    // What was asked for while it waited is one more write, or none.
    let mut all = Vec::new();
    other.read_to_end(&mut all).unwrap();
    assert!([filled + 8, filled + 16].contains(&all.len()));
}

#[test]
fn pipes_and_sockets_are_notified_and_other_kinds_refused() {
    let threads = ThreadCount::default();
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).unwrap();
    let pipe = call(&writer, &threads).unwrap();
    Notifier::new().notify(&pipe);
    assert_eq!(count(&reader), 1);

    let epoll = rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC).unwrap();
    let (mut other, socket) = UnixStream::pair().unwrap();
    let socket = call(&socket.into(), &threads).unwrap();
    Notifier::new().notify(&socket);
    other.read_exact(&mut [0; 8]).unwrap();
    let null = File::open("/dev/null").unwrap();
    for fd in [epoll, null.into()] {
        let error = call(&fd, &threads).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }
}

#[test]
fn without_asynchronous_io_a_thread_signals_until_it_is_to_be_had() {
    let fd = event();
    let call = call(&fd, &ThreadCount::default()).unwrap();
    let notifier = Notifier::without_aio();
    notifier.notify(&call);
    assert_eq!(count(&fd), 1);
    assert!(!notifier.is_direct());
    notifier.asked.set(Instant::now() - RETRY);
    notifier.notify(&call);
    assert!(notifier.is_direct());
    assert_eq!(count(&fd), 1);
}

#[test]
fn a_thread_signals_when_a_request_of_asynchronous_io_fails() {
    let fd = event();
    let call = call(&fd, &ThreadCount::default()).unwrap();
    let notifier = Notifier::without_aio();
    notifier.queue.replace(Some(Queue::broken()));
    rustix::io::ioctl_fionbio(&fd, true).unwrap();
    notifier.notify(&call);
    let mut ready = [PollFd::new(&fd, PollFlags::IN)];
    let limit = Timespec::try_from(Duration::from_secs(60)).unwrap();
    rustix::event::poll(&mut ready, Some(&limit)).unwrap();
    assert_eq!(count(&fd), 1);
}

#[test]
fn threads_of_one_peer_are_bounded() {
    let threads = ThreadCount::default();
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).unwrap();
    rustix::io::ioctl_fionbio(&writer, true).unwrap();
    while rustix::io::write(&writer, &[0; 4096]).is_ok() {}
    rustix::io::ioctl_fionbio(&writer, false).unwrap();
    for _ in 0..4 {
        let call = call(&writer, &threads).unwrap();
        Notifier::new().notify(&call);
    }
    let error = call(&writer, &threads).unwrap_err();
    assert!(error.to_string().contains("threads"), "{error}");
    drop(reader);
}

/// Starts as many threads as one peer may have; they wait until the reader is dropped.
fn use_up_threads(threads: &ThreadCount) -> OwnedFd {
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).unwrap();
    rustix::io::ioctl_fionbio(&writer, true).unwrap();
    while rustix::io::write(&writer, &[0; 4096]).is_ok() {}
    rustix::io::ioctl_fionbio(&writer, false).unwrap();
    for _ in 0..4 {
        Notifier::new().notify(&call(&writer, threads).unwrap());
    }
    reader
}

#[test]
fn a_notification_for_which_there_is_no_thread_is_made_when_there_is_one() {
    let threads = ThreadCount::default();
    let reader = use_up_threads(&threads);
    let fd = event();
    rustix::io::ioctl_fionbio(&fd, true).unwrap();
    let notifier = Notifier::without_aio();
    let late = call(&fd, &threads).unwrap();
    notifier.notify(&late);
    notifier.notify(&late);
    assert!(notifier.retry_in().is_some_and(|left| left <= THREAD_RETRY));
    rustix::io::read(&fd, &mut [0; 8]).unwrap_err();
    drop(reader);
    let end = Instant::now() + Duration::from_secs(60);
    while notifier.retry_in().is_some() {
        assert!(Instant::now() < end);
        notifier.retry();
        std::thread::yield_now();
    }
    rustix::io::ioctl_fionbio(&fd, false).unwrap();
    assert_eq!(count(&fd), 1);
}

#[test]
fn no_thread_is_requested_for_a_dropped_call_descriptor() {
    let threads = ThreadCount::default();
    let _reader = use_up_threads(&threads);
    let notifier = Notifier::without_aio();
    let late = call(&event(), &threads).unwrap();
    notifier.notify(&late);
    drop(late);
    notifier.retry_at.set(Some(Instant::now()));
    notifier.retry();
    assert!(notifier.retry_in().is_none());
}
