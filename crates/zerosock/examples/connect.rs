//! A process that connects to the host: the other side of the example `serve`.

use std::io::{Read, Write};
use std::net::Shutdown;

use zerosock::vsock::Endpoint;
use zerosock::{Address, Cid, Port};

type Error = Box<dyn std::error::Error + Send + Sync>;

fn main() -> Result<(), Error> {
    let endpoint = Endpoint::builder().name("web").attach("/tmp/attach.sock")?;
    let mut stream = endpoint.connect(Address::new(Cid::HOST, Port::new(1024)))?;
    stream.write_all(b"hello")?;
    stream.shutdown(Shutdown::Write)?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    println!("{answer}");
    Ok(())
}
