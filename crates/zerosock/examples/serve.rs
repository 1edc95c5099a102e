//! The host of a VM and of processes: sends back what it receives, in capital letters.
//!
//! ```sh
//! cargo run --example serve
//! cargo run --example connect     # in another terminal
//! ```

use std::io::Write;
use std::thread;

use zerosock::vsock::{Host, Stream};
use zerosock::{Cid, Port};

type Error = Box<dyn std::error::Error + Send + Sync>;

fn main() -> Result<(), Error> {
    let host = Host::builder()
        .vm(Cid::new(3), "/tmp/vm3.sock") // the vhost-user socket of a VM
        .attach("/tmp/attach.sock") // processes attach here
        .background() // a thread moves packets while the program does other work
        .start()?;
    let listener = host.listen(Port::new(1024), 16)?;
    for stream in listener.incoming() {
        let stream = stream?;
        thread::spawn(move || {
            let peer = stream.peer_addr();
            if let Err(error) = echo(stream) {
                eprintln!("{peer}: {error}");
            }
        });
    }
    Ok(())
}

fn echo(stream: Stream) -> Result<(), Error> {
    // A lease is a packet where the peer wrote it; `None` is the end of the stream.
    while let Some(lease) = stream.recv()? {
        let answer = lease.to_vec().to_ascii_uppercase();
        (&stream).write_all(&answer)?;
    }
    Ok(())
}
