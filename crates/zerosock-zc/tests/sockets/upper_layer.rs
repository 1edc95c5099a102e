//! TCP with an upper-layer protocol: kernel TLS encrypts, and refuses flags that it does not know,
//! such as MSG_ZEROCOPY and MSG_WAITALL. Everything arrives, by copies, and is reported as copied.
//! The same runs over the kernels of stock guests (`owned_buffers_over_kernel_tls`).

use std::io::{self, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::thread;
use std::time::Duration;

use zerosock_sys::network;
use zerosock_zc::{Copying, OffReason, Outgoing, SendBackend, Sender, SenderOpenError, Sent};

use crate::network::{BACKENDS, fill};
use crate::streams::check;

const PATIENCE: Duration = Duration::from_secs(300);
const CHUNK: usize = 1 << 16;
const CHUNKS: usize = 16;

/// Enables encryption for later bytes.
fn encrypt(socket: impl AsFd) {
    network::set_upper_layer(&socket, "tls").expect("kernel TLS");
    network::encrypt(&socket).expect("keys");
}

fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let near = TcpStream::connect(listener.local_addr().expect("an address"));
    (
        near.expect("loopback"),
        listener.accept().expect("a stream").0,
    )
}

/// Two ends of which the far one decrypts; none, by name, where the kernel has no TLS.
fn pair_with_keys(name: &str) -> Option<(TcpStream, TcpStream)> {
    let (near, far) = pair();
    if let Err(why) = network::set_upper_layer(&far, "tls") {
        let _ = writeln!(io::stderr(), "\nSKIPPED tls: {name}: no kernel TLS: {why}");
        return None;
    }
    network::decrypt(&far).expect("keys");
    Some((near, far))
}

/// Sends from the `at`th byte of the stream on.
fn send(sender: &mut Sender<Vec<u8>>, at: &mut u64, wish: Copying) {
    let mut bytes = vec![0; CHUNK];
    fill(&mut bytes, *at);
    *at += bytes.len() as u64;
    let pushed = sender.push(Outgoing::new(bytes).copying(wish));
    pushed.map_err(|refused| refused.why).expect("a place");
}

/// The rest of the stream, several sends to a submission. All of it must be copied.
fn send_all(mut sender: Sender<Vec<u8>>, mut at: u64, wish: Copying) -> u64 {
    for _ in 0..CHUNKS / 4 {
        (0..4).for_each(|_| send(&mut sender, &mut at, wish));
        assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
    }
    for returned in std::iter::from_fn(|| sender.returned()) {
        assert_eq!(returned.outcome.expect("it was sent"), Sent::Copied);
    }
    assert_eq!((sender.stats().failed, sender.stats().bytes), (0, at));
    assert_eq!(sender.report().off, Some(OffReason::RefusedByKernel));
    at
}

fn open(socket: TcpStream, backend: SendBackend) -> Result<Sender<Vec<u8>>, SenderOpenError> {
    Sender::builder().backend(backend).open(socket)
}

#[test]
fn sends_on_a_kernel_tls_socket_are_copied() {
    let name = "sends_on_a_kernel_tls_socket_are_copied";
    let Some((near, far)) = pair_with_keys(name) else {
        return;
    };
    encrypt(&near);
    for wanted in [SendBackend::Uring, SendBackend::ErrorQueue] {
        let opened = open(near.try_clone().expect("a socket"), wanted);
        assert!(matches!(opened, Err(SenderOpenError::Unavailable(found)) if found == wanted));
    }
    let sender = Sender::builder().open(near).expect("a sender");
    assert_eq!(sender.report().backend, SendBackend::Copy);
    let reader = thread::spawn(move || check(far));
    let sent = send_all(sender, 0, Copying::Never);
    assert_eq!(reader.join().expect("the contents"), sent);
}

#[test]
fn sends_are_copied_after_kernel_tls_is_enabled() {
    let name = "sends_are_copied_after_kernel_tls_is_enabled";
    for backend in BACKENDS {
        for wish in [Copying::Never, Copying::Always] {
            let Some((near, far)) = pair_with_keys(name) else {
                return;
            };
            let sender = match open(near, backend) {
                Err(SenderOpenError::Unavailable(SendBackend::Uring)) => {
                    let _ = writeln!(io::stderr(), "\nSKIPPED io_uring: {name}");
                    continue;
                }
                opened => opened.expect("a sender"),
            };
            encrypt(sender.socket());
            let reader = thread::spawn(move || check(far));
            let sent = send_all_either(sender, wish);
            assert_eq!(reader.join().expect("the contents"), sent, "{backend:?}");
        }
    }
}

/// As `send_all`, for a sender that may copy from the first send on.
fn send_all_either(mut sender: Sender<Vec<u8>>, wish: Copying) -> u64 {
    let mut at = 0;
    if wish == Copying::Always {
        (0..4).for_each(|_| send(&mut sender, &mut at, wish));
        assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
    }
    send_all(sender, at, Copying::Never)
}

/// The kernel marks a socket as one that cannot send without a copy before it finds out that the
/// protocol is none for programs. MPTCP's is such a one, and built into many kernels.
#[test]
fn sends_are_copied_after_the_socket_loses_zero_copy() {
    let (near, far) = pair();
    let mut sender = match open(near, SendBackend::Uring) {
        Err(SenderOpenError::Unavailable(_)) => {
            return eprintln!("SKIPPED io_uring: a_socket_that_cannot_any_more");
        }
        opened => opened.expect("a sender"),
    };
    let reader = thread::spawn(move || check(far));
    let mut at = 0;
    send(&mut sender, &mut at, Copying::Never);
    assert!(sender.finish(Some(PATIENCE)).expect("the kernel answers"));
    assert_eq!(sender.report().off, None);
    match network::set_upper_layer(sender.socket(), "mptcp").map_err(|why| why.raw_os_error()) {
        Err(Some(libc::EOPNOTSUPP)) => {}
        other => return eprintln!("SKIPPED mptcp: a_socket_that_cannot_any_more: {other:?}"),
    }
    let sent = send_all(sender, at, Copying::Never);
    assert_eq!(reader.join().expect("the contents"), sent);
}
