//! The code in README.md and in two guides compiles: this file has the same code, word for word.

use std::fs::File;
use std::net::TcpStream;

use bytes::Bytes;
use zerosock::vsock::{Endpoint, Host, OwnedLease};
use zerosock::zc::{Outgoing, Sender};
use zerosock::{Cid, Port};

#[rustfmt::skip]
#[allow(dead_code, unused_variables, reason = "it is shown, not run")]
fn sockets(file: File) -> Result<(), Box<dyn std::error::Error>> {
    // From here on
    // The host: CID 2 for VMs, and for processes that attach.
    let host = Host::builder().vm(Cid::guest(3)?, "/run/vm3.sock").attach("/run/attach.sock").start()?;
    let (stream, peer) = host.listen(Port::new(1024), 16)?.accept()?;
    while let Some(lease) = stream.recv()? {       // the bytes where the guest wrote them
        lease.write_to(&file)?;                    // straight from there to a file
    }

    // A process: connects to another one by name. No VM is needed.
    let endpoint = Endpoint::builder().name("web").attach("/run/attach.sock")?;
    let stream = endpoint.connect_name("db", Port::new(5432))?;
    let mut loan = stream.loan(65536)?;            // a buffer that the peer will read
    loan.read_from(&file)?;                        // straight from the file into it
    loan.send()?;
    // Up to here
    Ok(())
}

#[rustfmt::skip]
#[allow(dead_code, unused_variables, reason = "it is shown, not run")]
fn zero_copy(socket: TcpStream, bytes: Bytes, lease: OwnedLease) -> Result<(), Box<dyn std::error::Error>> {
    // From here on
    let mut sender: Sender = Sender::open(socket)?;            // io_uring, the error queue, or copying
    sender.send(Outgoing::new(bytes))?;                        // Bytes, Vec, Arc<[u8]>, a block of a Pool
    let buffer = lease.into_zc_buf().map_err(|(error, _)| error)?; // a guest's memory, from where it lies
    sender.send(Outgoing::new(buffer))?;
    sender.poll()?;                                            // collects completions
    while let Some(free) = sender.returned() { /* free.buffer is yours again */ }
    // Up to here
    Ok(())
}

#[test]
fn the_examples_of_the_readme_and_of_the_guides_compile() {
    let between = |text: &'static str, from: &str, to: &str| -> Vec<Vec<&'static str>> {
        let blocks = text.split(from).skip(1);
        let blocks = blocks.map(|rest| rest.split(to).next().unwrap().trim_end());
        blocks
            .map(|block| block.lines().map(str::trim).collect())
            .collect()
    };
    let shown = between(
        include_str!("readme.rs"),
        "    // From here on\n",
        "    // Up to here\n",
    );
    let readme = between(include_str!("../../../README.md"), "```rust\n", "```");
    let library = between(include_str!("../../../docs/library.md"), "```rust\n", "```");
    let sends = between(
        include_str!("../../../docs/zero-copy-send.md"),
        "```rust\n",
        "```",
    );
    assert_eq!(readme, shown[..1]);
    assert_eq!(library, shown[..1]);
    assert_eq!(sends, shown[1..]);
}
