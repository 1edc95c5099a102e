//! Sends a file from loans into leases: no program of the two copies a byte of it into a buffer of its own.
//!
//! The host's side embeds the device of a VM, and sends the file to each endpoint that connects. The other side attaches
//! to a socket: to that of `zerosock guest` in the VM, or to that of the host's side on the host. It is the same program.
//!
//! ```sh
//! stream_file host VHOST KEY ATTACH FILE   # on the host; VHOST is for the VMM, ATTACH for processes of the host
//! stream_file attach SOCKET                # in the guest, or on the host with ATTACH
//! ```
//!
//! Without arguments it makes a file, and does both in one process.

use std::fs::File;
use std::io::{self, Read};
use std::net::Shutdown;
use std::path::Path;
use std::thread;
use std::time::Instant;

use sha2::{Digest, Sha256};
use zerosock::daemon::{GuestEndpoints, GuestKey};
use zerosock::vsock::{Endpoint, Host, Stream};
use zerosock::{Address, Cid, Port};

type Error = Box<dyn std::error::Error + Send + Sync>;

const PORT: Port = Port::new(7);
const VM: Cid = Cid::new(3);
/// The largest packet.
const PIECE: usize = 64 << 10;
/// Bytes hashed at once.
const WINDOW: usize = 8 << 10;

fn main() -> Result<(), Error> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["host", vhost, key, attach, file] => {
            let key = GuestKey::new(&std::fs::read(key)?)?;
            let host = Host::builder()
                .vm(VM, vhost)
                .guest_endpoints(VM, GuestEndpoints::new(key))
                .attach(attach)
                .start()?;
            println!("waiting on port {PORT}");
            let listener = host.listen(PORT, 16)?;
            for stream in listener.incoming() {
                let stream = stream?;
                let peer = stream.peer_addr();
                if let Err(error) = send(&stream, file.as_ref()) {
                    eprintln!("{peer}: {error}");
                }
            }
            Ok(())
        }
        ["attach", socket] => receive(socket.as_ref()).map(drop),
        [] => alone(),
        _ => Err("stream_file host VHOST KEY ATTACH FILE | attach SOCKET".into()),
    }
}

/// Sends a file between two endpoints of this process.
fn alone() -> Result<(), Error> {
    let dir = tempfile::tempdir()?;
    let (attach, file) = (dir.path().join("attach"), dir.path().join("file"));
    let content: Vec<u8> = (0..4_000_000u32).flat_map(u32::to_le_bytes).collect();
    std::fs::write(&file, &content)?;
    let host = Host::builder().attach(&attach).start()?;
    let listener = host.listen(PORT, 1)?;
    let receiver = thread::spawn(move || receive(&attach));
    let (stream, _) = listener.accept()?;
    let sent = send(&stream, &file)?;
    let received = receiver.join().expect("the receiver does not panic")?;
    assert_eq!(sent, received, "the hashes are equal");
    Ok(())
}

/// Sends a file, and returns its hash.
fn send(stream: &Stream, path: &Path) -> Result<String, Error> {
    let file = File::open(path)?;
    loop {
        // The receiver's own buffer: the kernel reads the file into it.
        let mut loan = stream.loan(PIECE)?;
        if loan.read_from(&file)? == 0 {
            break;
        }
        loan.send()?;
    }
    stream.shutdown(Shutdown::Write)?;
    // The receiver closes the stream when it has finished.
    if stream.recv()?.is_some() {
        return Err("the receiver has sent something".into());
    }
    let stats = stream.stats();
    let hash = hash(&mut File::open(path)?)?;
    let copied = stats.sent - stats.sent_in_place;
    println!("sent {} bytes, {copied} copied, SHA-256 {hash}", stats.sent);
    Ok(hash)
}

/// Attaches, receives the file, and returns its hash.
fn receive(socket: &Path) -> Result<String, Error> {
    let endpoint = Endpoint::builder().attach(socket)?;
    let stream = endpoint.connect(Address::new(Cid::HOST, PORT))?;
    let began = Instant::now();
    let mut hasher = Sha256::new();
    let mut window = [0; WINDOW];
    while let Some(lease) = stream.recv()? {
        // The bytes lie where the sender has put them. The window protects from a sender that changes them meanwhile.
        for offset in (0..lease.len()).step_by(WINDOW) {
            let len = lease.copy_to(offset, &mut window);
            hasher.update(&window[..len]);
        }
    }
    let seconds = began.elapsed().as_secs_f64();
    let stats = stream.stats();
    let hash = text(hasher);
    let copied = stats.received - stats.received_in_place;
    println!(
        "received {} bytes in {seconds:.2} s, {copied} copied, SHA-256 {hash}",
        stats.received
    );
    Ok(hash)
}

fn hash(from: &mut impl Read) -> io::Result<String> {
    let (mut hasher, mut window) = (Sha256::new(), [0; WINDOW]);
    loop {
        match from.read(&mut window)? {
            0 => return Ok(text(hasher)),
            len => hasher.update(&window[..len]),
        }
    }
}

fn text(hasher: Sha256) -> String {
    let hash = hasher.finalize();
    hash.iter().map(|byte| format!("{byte:02x}")).collect()
}
