//! Sends owned buffers with `zerosock::zc` over sockets of a guest's kernel: vsock, TCP, and TCP
//! under kernel TLS.
//!
//! Kernel AF_VSOCK: runs only inside guests.

use std::io::{self, Read};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::sockopt::set_socket_send_buffer_size;
use sha2::{Digest, Sha256};
use zerosock::zc::{Copying, Outgoing, Returned, SendBackend, Sender};
use zerosock_cli::vm::pattern::{Pattern, hex};
use zerosock_sys::network;

use super::stream::errno_name;
use crate::protocol::{Keys, Outcome};

const PATIENCE: Duration = Duration::from_secs(300);
/// Buffers in flight: for small ones more than one request carries, so that the next request can be
/// made while the first completes.
const CAPACITY: u32 = 64;
/// SO_SNDBUF of TCP; the kernel doubles it.
const SEND_BUFFER: usize = 96 << 10;

/// Sends `len` bytes of a pattern in buffers of `chunk`, which are reused as soon as they are free.
/// An error ends it and is reported; an unavailable back-end is an error of the command.
pub(super) fn send(
    fd: &OwnedFd,
    seed: u64,
    len: u64,
    chunk: usize,
    backend: &str,
) -> Result<Outcome, String> {
    let socket = fd.try_clone().map_err(|error| error.to_string())?;
    send_over(&mut open(socket, backend)?, seed, len, chunk)
}

/// As [`send`], over TCP. With `keys` the kernel encrypts at one end and decrypts at the other.
pub(super) fn send_tcp(
    seed: u64,
    len: u64,
    chunk: usize,
    backend: &str,
    keys: Keys,
) -> Result<Outcome, String> {
    let (near, mut far) = pair().map_err(|error| format!("TCP: {error}"))?;
    let no_keys = |error: io::Error| format!("keys: {error}");
    if keys != Keys::Never {
        decrypt(&far).map_err(no_keys)?;
    }
    if keys == Keys::First {
        encrypt(&near).map_err(no_keys)?;
    }
    let mut sender = open(near, backend)?;
    if keys == Keys::Then {
        encrypt(sender.socket()).map_err(no_keys)?;
    }
    let (tell, told) = channel();
    let receiver = thread::spawn(move || {
        let mut digest = Sha256::new();
        let mut bytes = vec![0; 1 << 16];
        let mut left = len;
        loop {
            match far.read(&mut bytes)? {
                0 => return Ok(hex(digest.finalize().as_slice())),
                count => {
                    digest.update(&bytes[..count]);
                    left = left.saturating_sub(count as u64);
                }
            }
            if left == 0 {
                // The receiver may have closed.
                let _ = tell.send(());
            }
        }
    });
    let sent = send_over(&mut sender, seed, len, chunk)?;
    if keys != Keys::Never {
        // The kernel's TLS queues encrypted bytes without room, and drops them when the socket is
        // closed: Linux 6.1 does so after it has reported them as sent. The digest shows such a
        // loss.
        let _ = told.recv_timeout(PATIENCE / 4);
    }
    drop(sender);
    let received: io::Result<String> = receiver.join().map_err(|_| "the receiver panicked")?;
    let sha256 = received.map_err(|error| format!("received: {error}"))?;
    Ok(Outcome {
        sha256: Some(sha256),
        ..sent
    })
}

/// Encrypts everything sent from here on.
fn encrypt(socket: impl AsFd) -> io::Result<()> {
    network::set_upper_layer(&socket, "tls")?;
    network::encrypt(&socket)
}

/// Decrypts everything received from here on.
fn decrypt(socket: impl AsFd) -> io::Result<()> {
    network::set_upper_layer(&socket, "tls")?;
    network::decrypt(&socket)
}

/// Two connected sockets; the first takes less at a time than a request of many buffers has.
fn pair() -> io::Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let near = TcpStream::connect(listener.local_addr()?)?;
    let far = listener.accept()?.0;
    set_socket_send_buffer_size(&near, SEND_BUFFER)?;
    far.set_read_timeout(Some(PATIENCE))?;
    Ok((near, far))
}

fn open(socket: impl Into<OwnedFd>, backend: &str) -> Result<Sender<Vec<u8>>, String> {
    let builder = Sender::builder().capacity(CAPACITY);
    let builder = match backend {
        "any" => builder,
        "uring" => builder.backend(SendBackend::Uring),
        "error queue" => builder.backend(SendBackend::ErrorQueue),
        "copy" => builder.backend(SendBackend::Copy),
        other => return Err(format!("{other} is not a back-end")),
    };
    builder.open(socket).map_err(|error| error.to_string())
}

/// Submits all free buffers together, as far as there are slots, and waits for some to complete.
fn send_over(
    sender: &mut Sender<Vec<u8>>,
    seed: u64,
    len: u64,
    chunk: usize,
) -> Result<Outcome, String> {
    let mut pattern = Pattern::new(seed);
    let mut spare: Vec<Vec<u8>> = Vec::new();
    let mut outcome = Outcome::default();
    let (mut left, mut given_back) = (len, 0);
    let mut until = Instant::now() + PATIENCE;
    while left > 0 {
        while left > 0 && sender.room() > 0 {
            let now = usize::try_from(left).unwrap_or(usize::MAX).min(chunk);
            let mut buffer = spare.pop().unwrap_or_default();
            buffer.resize(now, 0);
            pattern.fill(&mut buffer);
            left -= now as u64;
            let outgoing = Outgoing::new(buffer).copying(Copying::Never);
            let pushed = sender.push(outgoing);
            pushed.map_err(|refused| refused.to_string())?;
        }
        let waited = sender.wait(Some(PATIENCE));
        waited.map_err(|error| error.to_string())?;
        let before = given_back;
        given_back += take(sender, &mut spare, &mut outcome);
        if outcome.errno.is_some() {
            break;
        }
        if given_back > before {
            until = Instant::now() + PATIENCE;
        } else if Instant::now() > until {
            return Err("no buffer comes back".to_owned());
        }
    }
    let finished = sender.finish(Some(PATIENCE));
    let finished = finished.map_err(|error| error.to_string())?;
    given_back += take(sender, &mut spare, &mut outcome);
    if !finished {
        return Err("buffers are missing".to_owned());
    }
    let stats = sender.stats();
    outcome.bytes = stats.bytes;
    outcome.text = Some(format!(
        "{:?}: {} in place, {} notified, {} requests, {} sends, {} given back",
        sender.report().backend,
        stats.in_place,
        stats.notified,
        stats.requests,
        stats.accepted,
        given_back,
    ));
    Ok(outcome)
}

/// Collects completed buffers; returns their number.
fn take(sender: &mut Sender<Vec<u8>>, spare: &mut Vec<Vec<u8>>, outcome: &mut Outcome) -> usize {
    let before = spare.len();
    while let Some(Returned {
        buffer,
        outcome: sent,
        ..
    }) = sender.returned()
    {
        if let Err(failed) = sent {
            outcome.errno.get_or_insert(errno_name(&failed.error));
        }
        spare.push(buffer);
    }
    spare.len() - before
}
