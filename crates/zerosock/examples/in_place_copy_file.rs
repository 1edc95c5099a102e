//! Copies a file from one process to another without a buffer in between.
//!
//! The sender's `read(2)` puts the bytes into memory that the receiver reads (a loan), and the
//! receiver's `write(2)` takes them from there (a lease). Neither process copies them itself.
//!
//! ```sh
//! cargo run --release --example in_place_copy_file -- FROM TO
//! ```
//!
//! Without arguments it creates a file, copies it, and compares the two.

use std::fs::File;
use std::net::Shutdown;
use std::path::Path;
use std::thread;
use std::time::Instant;

use zerosock::vsock::{Endpoint, Host};
use zerosock::{Address, Cid, Port};

type Error = Box<dyn std::error::Error + Send + Sync>;

const PORT: Port = Port::new(7);
/// The largest packet.
const PIECE: usize = 64 << 10;

fn main() -> Result<(), Error> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [from, to] = &args[..] {
        return copy(from.as_ref(), to.as_ref()).map(|_| ());
    }
    let dir = tempfile::tempdir()?;
    let (from, to) = (dir.path().join("from"), dir.path().join("to"));
    let content: Vec<u8> = (0..8_000_000u32).flat_map(u32::to_le_bytes).collect();
    std::fs::write(&from, &content)?;
    let in_place = copy(&from, &to)?;
    assert_eq!(in_place, content.len() as u64, "all of it in place");
    assert!(std::fs::read(&to)? == content, "the copy is a copy");
    Ok(())
}

/// Returns the number of bytes that were in place on both sides.
fn copy(from: &Path, to: &Path) -> Result<u64, Error> {
    let dir = tempfile::tempdir()?;
    let socket = dir.path().join("sender.sock");
    let host = Host::builder()
        .vm(Cid::new(3), &socket)
        .window(4 << 20)
        .start()?;
    let listener = host.listen(PORT, 1)?;
    let file = File::open(from)?;
    let sender = thread::spawn(move || send(&socket, &file));

    let began = Instant::now();
    let out = File::create(to)?;
    let (stream, _) = listener.accept()?;
    let mut bytes = 0;
    while let Some(lease) = stream.recv()? {
        let mut written = lease.write_to(&out)?;
        while written < lease.len() {
            // Short only on a full disk or a signal; then the rest is copied.
            let rest = &lease.to_vec()[written..];
            written += rustix::io::write(&out, rest)?;
        }
        bytes += lease.len() as u64;
    }
    let seconds = began.elapsed().as_secs_f64();
    println!(
        "{bytes} bytes in {seconds:.3} s: {:.2} GB/s",
        bytes as f64 / seconds / 1e9
    );
    drop(stream);
    let sent = sender.join().expect("the sender does not panic")?;
    Ok(sent.min(host.stats().received_in_place))
}

fn send(socket: &Path, file: &File) -> Result<u64, Error> {
    let endpoint = Endpoint::builder().attach_device(socket)?;
    let stream = endpoint.connect(Address::new(Cid::HOST, PORT))?;
    loop {
        let mut loan = stream.loan(PIECE)?;
        if loan.read_from(file)? == 0 {
            break;
        }
        loan.send()?;
    }
    stream.shutdown(Shutdown::Write)?;
    // The receiver closes the stream when it has finished.
    assert!(stream.recv()?.is_none());
    Ok(endpoint.stats().sent_in_place)
}
