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
    let host = Host::builder().vm(Cid::new(3), "/run/vm3.sock").attach("/run/attach.sock").background().start()?;
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
    // The programs of docs/library.md, and of the front page of the crate, are examples.
    let programs = [
        include_str!("../examples/serve.rs"),
        include_str!("../examples/connect.rs"),
    ]
    .map(|program| {
        let start = program.find("use std::io").unwrap();
        let lines = program[start..].trim_end().lines();
        lines.map(str::trim).collect::<Vec<_>>()
    });
    assert_eq!(library, programs);
    let front = between(
        include_str!("../src/lib.rs"),
        "//! ```no_run\n",
        "//! ```\n",
    );
    let strip = |line: &&'static str| line.trim_start_matches("//!").trim();
    let front: Vec<Vec<_>> = front
        .iter()
        .map(|block| block.iter().map(strip).collect())
        .collect();
    assert_eq!(front, programs);
    assert_eq!(sends, shown[1..]);
}
