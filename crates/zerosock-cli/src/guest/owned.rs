//! Sending owned buffers by `zerosock::zc` over sockets that only a guest's kernel has: vsock, and TCP
//! under kernel TLS.
//!
//! Kernel AF_VSOCK: runs only inside guests.

use std::io::{self, Read};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::thread;
use std::time::Duration;

use sha2::{Digest, Sha256};
use zerosock::zc::{Backend, Copying, Outgoing, Returned, Sender};
use zerosock_cli::vm::pattern::{Pattern, hex};
use zerosock_cli::vm::protocol::Outcome;
use zerosock_sys::network;

use super::stream::errno_name;

const PATIENCE: Duration = Duration::from_secs(60);

/// Sends `len` bytes of a pattern in buffers of `chunk`, which are used again as soon as they are
/// free. An error ends it and is reported; a back-end that cannot be is an error of the command.
pub(super) fn send(
    fd: &OwnedFd,
    seed: u64,
    len: u64,
    chunk: usize,
    backend: &str,
) -> Result<Outcome, String> {
    let socket = fd.try_clone().map_err(|error| error.to_string())?;
    send_over(open(socket, backend)?, seed, len, chunk)
}

/// As [`send`], over TCP that the kernel encrypts at one end and decrypts at the other.
pub(super) fn send_encrypted(
    seed: u64,
    len: u64,
    chunk: usize,
    backend: &str,
    keys_first: bool,
) -> Result<Outcome, String> {
    let (near, mut far) = encrypted_pair().map_err(|error| format!("kernel TLS: {error}"))?;
    let keys = |error: io::Error| format!("keys: {error}");
    let sender = if keys_first {
        encrypt(&near).map_err(keys)?;
        open(near, backend)?
    } else {
        let sender = open(near, backend)?;
        encrypt(sender.socket()).map_err(keys)?;
        sender
    };
    let receiver = thread::spawn(move || {
        let mut digest = Sha256::new();
        let mut bytes = vec![0; 1 << 16];
        loop {
            match far.read(&mut bytes)? {
                0 => return Ok(hex(digest.finalize().as_slice())),
                count => digest.update(&bytes[..count]),
            }
        }
    });
    let sent = send_over(sender, seed, len, chunk)?;
    let received: io::Result<String> = receiver.join().map_err(|_| "the receiver panicked")?;
    let sha256 = received.map_err(|error| format!("received: {error}"))?;
    Ok(Outcome {
        sha256: Some(sha256),
        ..sent
    })
}

/// What is sent from here on is encrypted.
fn encrypt(socket: impl AsFd) -> io::Result<()> {
    network::set_upper_layer(&socket, "tls")?;
    network::encrypt(&socket)
}

/// Two ends of which the far one decrypts.
fn encrypted_pair() -> io::Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let near = TcpStream::connect(listener.local_addr()?)?;
    let far = listener.accept()?.0;
    far.set_read_timeout(Some(PATIENCE))?;
    network::set_upper_layer(&far, "tls")?;
    network::decrypt(&far)?;
    Ok((near, far))
}

fn open(socket: impl Into<OwnedFd>, backend: &str) -> Result<Sender<Vec<u8>>, String> {
    let builder = Sender::builder().capacity(8);
    let builder = match backend {
        "any" => builder,
        "uring" => builder.backend(Backend::Uring),
        "error queue" => builder.backend(Backend::ErrorQueue),
        "copy" => builder.backend(Backend::Copy),
        other => return Err(format!("{other} is no back-end")),
    };
    builder.open(socket).map_err(|error| error.to_string())
}

fn send_over(
    mut sender: Sender<Vec<u8>>,
    seed: u64,
    len: u64,
    chunk: usize,
) -> Result<Outcome, String> {
    let mut pattern = Pattern::new(seed);
    let mut digest = Sha256::new();
    let mut spare: Vec<Vec<u8>> = Vec::new();
    let mut outcome = Outcome::default();
    let mut left = len;
    let mut given_back = 0;
    let mut take = |sender: &mut Sender<Vec<u8>>, spare: &mut Vec<Vec<u8>>| {
        while let Some(Returned {
            buffer,
            outcome: sent,
            ..
        }) = sender.returned()
        {
            if let Err(failed) = sent {
                outcome.errno.get_or_insert(errno_name(&failed.error));
            }
            given_back += 1;
            spare.push(buffer);
        }
        outcome.errno.is_none()
    };
    while left > 0 && take(&mut sender, &mut spare) {
        let now = usize::try_from(left).unwrap_or(usize::MAX).min(chunk);
        let mut buffer = spare.pop().unwrap_or_default();
        buffer.resize(now, 0);
        pattern.fill(&mut buffer);
        digest.update(&buffer);
        left -= now as u64;
        let outgoing = Outgoing::new(buffer).copying(Copying::Never);
        if let Err(refused) = sender.send(outgoing) {
            return Err(refused.to_string());
        }
    }
    let finished = sender.finish(Some(PATIENCE));
    let finished = finished.map_err(|error| error.to_string())?;
    take(&mut sender, &mut spare);
    if !finished {
        return Err("buffers are missing".to_owned());
    }
    let stats = sender.stats();
    outcome.bytes = stats.bytes;
    outcome.sha256 = Some(hex(digest.finalize().as_slice()));
    outcome.text = Some(format!(
        "{:?}: {} in place, {} notified, {} given back",
        sender.report().backend,
        stats.in_place,
        stats.notified,
        given_back,
    ));
    Ok(outcome)
}
