//! Features that the kernel denies: io_uring by seccomp, and memory by a limit.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};
use zerosock_zc::{Copying, Outgoing, SendBackend, Sender, SenderOpenError};

use crate::alone::alone;
use crate::corks::{datagrams, outcomes, push};
use crate::network::{SINK, fill, with_sink};
use crate::streams::check;

const PATIENCE: Duration = Duration::from_secs(300);

/// On a thread of its own, from which io_uring is forbidden as container runtimes do it.
pub(crate) fn without_uring<T: Send>(test: impl FnOnce() -> T + Send) -> T {
    let filter: BpfProgram = SeccompFilter::new(
        BTreeMap::from([
            (libc::SYS_io_uring_setup, vec![]),
            (libc::SYS_io_uring_enter, vec![]),
            (libc::SYS_io_uring_register, vec![]),
        ]),
        SeccompAction::Allow,
        SeccompAction::Errno(libc::EPERM as u32),
        TargetArch::try_from(std::env::consts::ARCH).expect("a known architecture"),
    )
    .and_then(TryInto::try_into)
    .expect("a filter");
    thread::scope(|scope| {
        let inside = scope.spawn(move || {
            seccompiler::apply_filter(&filter).expect("a filter");
            test()
        });
        inside.join().expect("the test inside")
    })
}

#[test]
fn without_io_uring_the_error_queue_is_used() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let address = listener.local_addr().expect("an address");
    without_uring(|| {
        let socket = TcpStream::connect(address).expect("loopback");
        let peer = listener.accept().expect("a stream").0;
        let again = socket.try_clone().expect("a socket");
        let opened = Sender::builder()
            .backend(SendBackend::Uring)
            .open::<Vec<u8>>(again);
        assert!(
            matches!(
                opened,
                Err(SenderOpenError::Unavailable(SendBackend::Uring) | SenderOpenError::Call(_))
            ),
            "{opened:?}"
        );
        let mut sender: Sender<Vec<u8>> = Sender::builder().open(socket).expect("a sender");
        let report = sender.report();
        assert_eq!(report.backend, SendBackend::ErrorQueue);
        assert_eq!(report.uring_refused, Some(ErrorKind::PermissionDenied));
        let mut bytes = vec![0; 1 << 20];
        fill(&mut bytes, 0);
        let outgoing = Outgoing::new(bytes).copying(Copying::Never);
        let reader = thread::spawn(move || check(peer));
        sender
            .send(outgoing)
            .map_err(|refused| refused.why)
            .expect("a place");
        assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
        assert_eq!(sender.stats().notified, sender.stats().requests);
        drop(sender);
        assert_eq!(reader.join().expect("the contents"), 1 << 20);
    });
}

#[test]
fn io_uring_forbidden_later_frees_unsubmitted_buffers() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let address = listener.local_addr().expect("an address");
    let socket = TcpStream::connect(address).expect("loopback");
    let mut peer = listener.accept().expect("a stream").0;
    let builder = Sender::builder().backend(SendBackend::Uring);
    let mut sender: Sender<Arc<[u8]>> = builder.open(socket).expect("a sender");
    let bytes: Arc<[u8]> = vec![1; 50_000].into();
    let send = |sender: &mut Sender<_>| {
        let outgoing = Outgoing::new(Arc::clone(&bytes)).copying(Copying::Never);
        let pushed = sender.push(outgoing).map_err(|refused| refused.why);
        pushed.expect("a place");
    };
    send(&mut sender);
    sender.submit().expect("the kernel answers");
    without_uring(|| {
        send(&mut sender);
        send(&mut sender);
        let denied = sender.submit().expect_err("it is forbidden");
        assert_eq!(denied.raw_os_error(), Some(libc::EPERM));
        drop(sender);
    });
    // The first send arrives, and its buffer is freed. Buffers that were not submitted are freed as
    // well: the thread of orphans does not send them.
    peer.set_read_timeout(Some(PATIENCE)).expect("a socket");
    peer.read_exact(&mut vec![0; 50_000]).expect("the bytes");
    let begun = Instant::now();
    while Arc::strong_count(&bytes) > 1 {
        assert!(
            begun.elapsed() < PATIENCE,
            "{} are left",
            Arc::strong_count(&bytes) - 1
        );
        thread::yield_now();
    }
    // And so is the socket: the stream was cut short.
    let end = peer.read(&mut [0]).map_err(|error| error.kind());
    assert_eq!(end, Err(ErrorKind::ConnectionReset));
}

/// Gives up the capability that lifts the limit of locked memory, and sets it, for this thread and
/// this process. Only for a process that does nothing else. Returns the hard limit.
pub(crate) fn limit_locked_memory(bytes: u64) -> u64 {
    const CAP_IPC_LOCK: u32 = 14;
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: a complete `rlimit` that outlives the calls.
    unsafe {
        assert_eq!(libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut limit), 0);
        limit.rlim_cur = bytes;
        assert_eq!(libc::setrlimit(libc::RLIMIT_MEMLOCK, &limit), 0);
    }
    #[repr(C)]
    struct Header {
        version: u32,
        pid: i32,
    }
    let mut header = Header {
        version: 0x2008_0522,
        pid: 0,
    };
    let mut sets = [[0u32; 3]; 2];
    // SAFETY: version 3 has two sets of three words; both outlive the calls. The last call has no
    // memory to look at.
    unsafe {
        assert_eq!(libc::syscall(libc::SYS_capget, &mut header, &mut sets), 0);
        for word in &mut sets[0] {
            *word &= !(1 << CAP_IPC_LOCK);
        }
        assert_eq!(libc::syscall(libc::SYS_capset, &mut header, &sets), 0);
        // Locked memory is accounted per user, not per process: this thread changes to a user of
        // its own, so that locked memory of other processes does not count. Without the right to do
        // so the test runs as the only user.
        let user = 100_000 + std::process::id();
        let _ = libc::syscall(libc::SYS_setresuid, user, user, user);
    }
    limit.rlim_max
}

#[test]
fn a_limit_of_locked_memory_does_not_stall_a_sender() {
    // The limit and the capability belong to the process.
    let name = "faults::a_limit_of_locked_memory_does_not_stall_a_sender";
    alone(name, || {
        let _ = with_sink(name, send_with_little_locked_memory);
    });
}

fn send_with_little_locked_memory() {
    let _ = limit_locked_memory(64 << 10);
    for backend in [SendBackend::Uring, SendBackend::ErrorQueue] {
        let socket = UdpSocket::bind("0.0.0.0:0").expect("an address");
        socket.connect(SINK[0]).expect("a route");
        let builder = Sender::builder().backend(backend).capacity(64);
        let mut sender: Sender<Vec<u8>> = builder.open(socket).expect("a sender");
        // One send alone is above the limit; those of 8000 bytes are together.
        for len in [65_000, 8000] {
            for _ in 0..200 {
                let outgoing = Outgoing::new(vec![3; len]).copying(Copying::Never);
                sender
                    .send(outgoing)
                    .map_err(|refused| refused.why)
                    .expect("a place");
                while let Some(returned) = sender.returned() {
                    returned.outcome.expect("it was sent");
                }
            }
        }
        assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
        let stats = sender.stats();
        assert_eq!((stats.accepted, stats.failed), (400, 0), "{backend:?}");
        assert_eq!(stats.bytes, 200 * 65_000 + 200 * 8000, "{backend:?}");
        assert!(stats.copied_for_memory > 0, "{backend:?}: {stats:?}");
        assert_eq!(stats.freed(), 400, "{backend:?}: {stats:?}");
    }
}

#[test]
fn pieces_without_memory_are_in_no_other_datagram() {
    let name = "faults::pieces_without_memory_are_in_no_other_datagram";
    alone(name, send_pieces_with_little_locked_memory);
}

fn send_pieces_with_little_locked_memory() {
    let _ = limit_locked_memory(64 << 10);
    for backend in [SendBackend::Uring, SendBackend::ErrorQueue] {
        let (mut sender, receiver) = datagrams(backend);
        for together in [true, false] {
            push(&mut sender, 1000, true, Copying::Always);
            if !together {
                sender.submit().expect("the kernel answers");
            }
            push(&mut sender, 64_000, false, Copying::Never);
            push(&mut sender, 10, false, Copying::Always);
            let outcomes = outcomes(&mut sender);
            assert_eq!(outcomes, [(10, true), (1000, true), (64_000, true)]);
            let mut bytes = vec![0; 70_000];
            let mut receive = || receiver.recv(&mut bytes).expect("a datagram");
            assert_eq!(receive(), 65_000, "{backend:?}, {together}");
            assert_eq!(receive(), 10, "{backend:?}, {together}");
        }
    }
}
