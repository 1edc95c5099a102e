//! The demo's program in the guest: `zerosock demo-guest`, started by init.
//!
//! It connects to the host's port [`DATA`] by the kernel's AF_VSOCK, and then to [`ENDPOINT`] from an endpoint on pages
//! of the guest. A connection begins with [`READY`], or with the reason why there is no endpoint. The host sends the
//! length of a payload (eight bytes, little-endian), and its bytes. The guest answers with [`RECEIVED`] after the last
//! byte, then with the payload's SHA-256 in hexadecimal, and sends the payload back. If the length is 0, it echoes. A
//! connection that the host ends without a length is the last one to its port.
//!
//! Kernel AF_VSOCK: runs only inside guests.

use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use zerosock::vsock::Endpoint;
use zerosock::{Address, Cid, Port};
use zerosock_sys::vsock;

use crate::failure::Failure;
use crate::vm::pattern::sha256;

/// Port of the host for connections by AF_VSOCK.
pub(super) const DATA: u32 = 5000;
/// Port of the host for connections from an endpoint.
pub(super) const ENDPOINT: u32 = 5001;
/// The first byte of a connection.
pub(super) const READY: u8 = 5;
/// Sent after the last byte of a payload.
pub(super) const RECEIVED: u8 = 6;
/// Size of a write, in both directions.
pub(super) const CHUNK: usize = 64 << 10;
/// Memory of the endpoint, of huge pages.
pub(super) const ENDPOINT_MIB: u64 = 64;
/// Prefix of the line on the serial port; the kernel's release follows.
pub(super) const BOOTED: &str = "zerosock demo-guest: ";

/// CID 2: the host.
const HOST: u32 = 2;
const READ: usize = 256 << 10;
const CONNECT: Duration = Duration::from_secs(10);
/// Where the agent lets processes attach.
const SOCKET: &str = "/run/zerosock/attach.sock";
/// How long the agent may take to start.
const AGENT: Duration = Duration::from_secs(30);

/// Run the demo's program in its guest
#[derive(Debug, Args)]
pub(crate) struct GuestArgs {
    /// The serial line on which the program reports that it runs
    #[arg(long, value_name = "PATH")]
    tty: PathBuf,
}

/// Runs `zerosock demo-guest`, until the guest is killed or a connection fails.
pub(crate) fn main(args: &GuestArgs) -> Result<(), Failure> {
    run(&args.tty).map_err(|error| Failure::runtime(format!("demo-guest: {error}")))
}

fn run(tty: &Path) -> io::Result<()> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    let mut line = OpenOptions::new().write(true).open(tty)?;
    // The first newline ends any partial line of firmware and kernel.
    line.write_all(format!("\n{BOOTED}{}\n", release.trim()).as_bytes())?;
    // Only read and write are used, which all stream sockets share.
    let by_kernel = |port| vsock::connect_blocking(HOST, port, CONNECT).map(UnixStream::from);
    serve(|| by_kernel(DATA))?;
    match attach() {
        Ok(endpoint) => {
            let host = Address::new(Cid::HOST, Port::new(ENDPOINT));
            serve(|| endpoint.connect(host))?;
        }
        Err(error) => by_kernel(ENDPOINT)?.write_all(error.to_string().as_bytes())?,
    }
    // The end of this program would be that of the guest, before the host has read everything.
    loop {
        thread::park();
    }
}

/// Starts the agent, and attaches as soon as it lets processes do so.
fn attach() -> io::Result<Endpoint> {
    let pages = (ENDPOINT_MIB / 2).to_string();
    fs::write("/proc/sys/vm/nr_hugepages", pages)?;
    // No other program in this guest could name pages.
    let memory = format!("{ENDPOINT_MIB}M");
    let mut agent = Command::new(std::env::current_exe()?)
        .args(["guest", "--port-only", "--memory", &memory])
        .spawn()?;
    let deadline = Instant::now() + AGENT;
    loop {
        match Endpoint::attach(SOCKET) {
            Err(_) if agent.try_wait()?.is_none() && Instant::now() < deadline => {
                thread::sleep(Duration::from_millis(20));
            }
            result => return result.map_err(io::Error::other),
        }
    }
}

/// Makes one connection after another, and serves it.
fn serve<S: Read + Write>(connect: impl Fn() -> io::Result<S>) -> io::Result<()> {
    loop {
        let mut stream = connect()?;
        stream.write_all(&[READY])?;
        let mut len = [0; 8];
        if stream.read_exact(&mut len).is_err() {
            return Ok(());
        }
        match usize::try_from(u64::from_le_bytes(len)).map_err(io::Error::other)? {
            0 => echo(&mut stream)?,
            len => stream_back(&mut stream, len)?,
        }
    }
}

fn stream_back(stream: &mut (impl Read + Write), len: usize) -> io::Result<()> {
    // Touch all pages now, so that receiving causes no page faults.
    let mut payload = vec![0xa5; len];
    for chunk in payload.chunks_mut(READ) {
        stream.read_exact(chunk)?;
    }
    stream.write_all(&[RECEIVED])?;
    // Hash afterwards: a guest in software emulation hashes slowly.
    stream.write_all(sha256(&payload).as_bytes())?;
    for chunk in payload.chunks(CHUNK) {
        stream.write_all(chunk)?;
    }
    // The host closes the connection when it has read everything.
    let _ = stream.read(&mut [0]);
    Ok(())
}

fn echo(stream: &mut (impl Read + Write)) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK];
    loop {
        match stream.read(&mut buffer)? {
            0 => return Ok(()),
            count => stream.write_all(&buffer[..count])?,
        }
    }
}
