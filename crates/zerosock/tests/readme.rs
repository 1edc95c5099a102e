//! What README.md shows of the library compiles: it is here, word for word.

use std::fs::File;

use zerosock::vsock::{Endpoint, Host};
use zerosock::{Cid, Port};

#[rustfmt::skip]
#[allow(dead_code, unused_variables, reason = "it is shown, not run")]
fn shown(file: File) -> Result<(), Box<dyn std::error::Error>> {
    // From here on
    // The host: CID 2 to VMs, and to processes that attach.
    let host = Host::builder().vm(Cid::guest(3)?, "/run/vm3.sock").attach("/run/attach.sock").start()?;
    let (stream, who) = host.listen(Port::new(1024), 16)?.accept()?;
    while let Some(lease) = stream.recv()? {       // the bytes where the guest wrote them
        lease.write_to(&file)?;                    // straight from there to a file
    }

    // A process: by name, with or without a VM in sight.
    let endpoint = Endpoint::builder().name("web").attach("/run/attach.sock")?;
    let stream = endpoint.connect_name("db", Port::new(5432))?;
    let mut loan = stream.loan(65536)?;            // a buffer that the peer will read
    loan.read_from(&file)?;                        // straight from the file into it
    loan.send()?;
    // up to here
    Ok(())
}

#[test]
fn the_readme_shows_what_compiles() {
    let (_, shown) = include_str!("readme.rs")
        .split_once("// From here on\n")
        .unwrap();
    let (shown, _) = shown.split_once("    // up to here").unwrap();
    let readme = include_str!("../../../README.md");
    let (_, block) = readme.split_once("```rust\n").unwrap();
    let (block, rest) = block.split_once("```").unwrap();
    assert!(!rest.contains("```rust"), "another one, which is not here");
    let shown: Vec<_> = shown.lines().map(str::trim).collect();
    let block: Vec<_> = block.lines().map(str::trim).collect();
    assert_eq!(shown, block);
}
