//! A program that is the host: it contains the vsock device, reads received bytes where the guests
//! wrote them, and writes answers where the guests read them.
//!
//! With a path, it waits there for a VMM; the guest is CID 3:
//!
//! ```sh
//! cargo run --example embed_host -- /run/vm3.sock
//! qemu-system-x86_64 … \
//!   -object memory-backend-memfd,id=mem,size=512M,share=on -numa node,memdev=mem \
//!   -chardev socket,id=c0,path=/run/vm3.sock -device vhost-user-vsock-pci,chardev=c0
//! guest$ echo hello | socat - VSOCK-CONNECT:2:1024
//! ```
//!
//! Without a path, a thread of the program attaches in place of a guest.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::path::Path;
use std::thread;

use zerosock::vsock::{Endpoint, Host, Stream};
use zerosock::{Address, Cid, Port};

type Error = Box<dyn std::error::Error + Send + Sync>;

const PORT: Port = Port::new(1024);

fn main() -> Result<(), Error> {
    if let Some(path) = std::env::args().nth(1) {
        let host = Host::builder().vm(Cid::new(3), path).start()?;
        let listener = host.listen(PORT, 16)?;
        loop {
            let (stream, guest) = listener.accept()?;
            println!("{guest} has connected");
            match shout(&stream) {
                Ok(bytes) => println!("{guest}: {bytes} bytes"),
                Err(error) => println!("{guest}: {error}"),
            }
        }
    }

    let dir = tempfile::tempdir()?;
    let path = dir.path().join("vm3.sock");
    let host = Host::builder().vm(Cid::new(3), &path).start()?;
    let listener = host.listen(PORT, 16)?;
    let guest = thread::spawn(move || guest(&path));
    let (stream, _) = listener.accept()?;
    let bytes = shout(&stream)?;
    drop(stream);
    // The guest's last packets arrive only while a thread drives the host.
    while !guest.is_finished() {
        host.drive()?;
        thread::yield_now();
    }
    let answer = guest.join().expect("the guest does not panic")?;
    assert_eq!(answer, "HELLO FROM THE GUEST");
    let stats = host.stats();
    assert_eq!(stats.received_in_place, bytes as u64);
    assert_eq!(stats.sent_in_place, bytes as u64);
    println!("{answer}: {bytes} bytes each way, none of them copied by the host");
    Ok(())
}

/// Echoes everything in capital letters; returns how many bytes.
fn shout(stream: &Stream) -> Result<usize, Error> {
    let mut total = 0;
    while let Some(lease) = stream.recv()? {
        let mut at = 0;
        while at < lease.len() {
            let mut loan = stream.loan(lease.len() - at)?;
            // A guest may write its memory at any time: each byte is read once.
            let mut piece = [0; 256];
            while loan.filled() < loan.capacity() {
                let room = (loan.capacity() - loan.filled()).min(piece.len());
                let got = lease.copy_to(at, &mut piece[..room]);
                piece[..got].make_ascii_uppercase();
                loan.write_all(&piece[..got])?;
                at += got;
            }
            stream.send(loan)?;
        }
        total += lease.len();
    }
    stream.shutdown(Shutdown::Write)?;
    Ok(total)
}

/// The guest's side.
fn guest(path: &Path) -> Result<String, Error> {
    let endpoint = Endpoint::builder().attach_device(path)?;
    let mut stream = endpoint.connect(Address::new(Cid::HOST, PORT))?;
    stream.write_all(b"hello from the guest")?;
    stream.shutdown(Shutdown::Write)?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}
