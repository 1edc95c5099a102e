//! The demo's program in the guest: `zerosock demo-guest`, started by init.
//!
//! On port [`DATA`] it receives a payload: eight bytes with its length (little-endian), then its
//! bytes. It answers with [`RECEIVED`] after the last byte, then with the payload's SHA-256 in
//! hexadecimal, and sends the payload back over a new connection to the host's port [`DATA`]. Port
//! [`ECHO`] echoes.
//!
//! Kernel AF_VSOCK: runs only inside guests.

use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use clap::Args;
use zerosock_sys::vsock;

use crate::failure::Failure;
use crate::vm::pattern::sha256;

/// Port of payloads, in the guest and on the host.
pub(super) const DATA: u32 = 5000;
/// Port that echoes.
pub(super) const ECHO: u32 = 5001;
/// Sent after the last byte of a payload.
pub(super) const RECEIVED: u8 = 6;
/// Size of a write, in both directions.
pub(super) const CHUNK: usize = 64 << 10;
/// Prefix of the line on the serial port; the kernel's release follows.
pub(super) const BOOTED: &str = "zerosock demo-guest: ";

/// CID 2: the host.
const HOST: u32 = 2;
const READ: usize = 256 << 10;
const CONNECT: Duration = Duration::from_secs(10);

/// Run the demo's program in its guest
#[derive(Debug, Args)]
pub(crate) struct GuestArgs {
    /// The serial line on which the program reports that it runs
    #[arg(long, value_name = "PATH")]
    tty: PathBuf,
}

/// Runs `zerosock demo-guest`, until a connection fails.
pub(crate) fn main(args: &GuestArgs) -> Result<(), Failure> {
    run(&args.tty).map_err(|error| Failure::runtime(format!("demo-guest: {error}")))
}

fn run(tty: &Path) -> io::Result<()> {
    let data = vsock::listen(vsock::CID_ANY, DATA, 8)?;
    let echo = vsock::listen(vsock::CID_ANY, ECHO, 8)?;
    thread::spawn(move || {
        while let Ok(stream) = accept(&echo) {
            thread::spawn(move || send_back(stream));
        }
    });
    let release = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    let mut line = OpenOptions::new().write(true).open(tty)?;
    // The first newline ends any partial line of firmware and kernel.
    line.write_all(format!("\n{BOOTED}{}\n", release.trim()).as_bytes())?;
    loop {
        let payload = take(accept(&data)?)?;
        let mut back = stream(vsock::connect_blocking(HOST, DATA, CONNECT)?);
        for chunk in payload.chunks(CHUNK) {
            back.write_all(chunk)?;
        }
    }
}

fn take(mut from: UnixStream) -> io::Result<Vec<u8>> {
    let mut len = [0; 8];
    from.read_exact(&mut len)?;
    let len = usize::try_from(u64::from_le_bytes(len)).map_err(io::Error::other)?;
    // Touch all pages now, so that receiving causes no page faults.
    let mut payload = vec![0xa5; len];
    for chunk in payload.chunks_mut(READ) {
        from.read_exact(chunk)?;
    }
    from.write_all(&[RECEIVED])?;
    // Hash afterwards: a guest in software emulation hashes slowly.
    from.write_all(sha256(&payload).as_bytes())?;
    Ok(payload)
}

fn send_back(mut stream: UnixStream) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK];
    loop {
        match stream.read(&mut buffer)? {
            0 => return Ok(()),
            count => stream.write_all(&buffer[..count])?,
        }
    }
}

fn accept(listener: &OwnedFd) -> io::Result<UnixStream> {
    Ok(stream(vsock::accept_blocking(listener)?.0))
}

/// Only read and write are used, which all stream sockets share.
fn stream(fd: OwnedFd) -> UnixStream {
    UnixStream::from(fd)
}
