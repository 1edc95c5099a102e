//! A program on pages of this guest, of an agent or by itself, which receives in leases and sends back in loans: prints what it has copied.

use std::io;
use std::net::Shutdown;
use std::path::PathBuf;

use clap::Args;
use sha2::{Digest, Sha256};
use zerosock::guest::key::GuestKey;
use zerosock::vsock::{Endpoint, GuestAgent, KeeperEntry};
use zerosock::{Address, Cid, Port};
use zerosock_cli::vm::pattern::Pattern;

/// Of the bytes that are sent.
pub const SEED: u64 = 2;
/// Bytes hashed or written at once.
const WINDOW: usize = 64 << 10;

#[derive(Debug, Args)]
pub(super) struct Options {
    /// The socket of `zerosock guest`
    #[arg(long, required_unless_present = "key")]
    socket: Option<PathBuf>,
    /// Do without `zerosock guest`, with this key
    #[arg(long)]
    key: Option<PathBuf>,
    /// The port of the host
    #[arg(long)]
    port: u32,
    /// Bytes to send, when all have been received
    #[arg(long)]
    bytes: usize,
}

pub(super) fn run(options: &Options) -> io::Result<()> {
    let agent = match &options.key {
        Some(path) => {
            let key = GuestKey::new(&std::fs::read(path)?).map_err(io::Error::other)?;
            let agent = GuestAgent::start(KeeperEntry::enter(), key);
            Some(agent.map_err(io::Error::other)?)
        }
        None => None,
    };
    let builder = Endpoint::builder();
    let endpoint = match (&agent, &options.socket) {
        (Some(agent), _) => builder.attach_guest(agent)?,
        (None, Some(socket)) => builder.attach(socket)?,
        (None, None) => return Err(io::ErrorKind::InvalidInput.into()),
    };
    let stream = endpoint.connect(Address::new(Cid::HOST, Port::new(options.port)))?;
    let (mut hasher, mut window) = (Sha256::new(), vec![0; WINDOW]);
    while let Some(lease) = stream.recv()? {
        for offset in (0..lease.len()).step_by(WINDOW) {
            let len = lease.copy_to(offset, &mut window);
            hasher.update(&window[..len]);
        }
    }
    let mut pattern = Pattern::new(SEED);
    let mut left = options.bytes;
    while left > 0 {
        let mut loan = stream.loan(left.min(WINDOW))?;
        let len = left.min(WINDOW).min(loan.capacity());
        pattern.fill(&mut window[..len]);
        loan.write_at(0, &window[..len])?;
        loan.set_filled(len);
        left -= loan.send()?;
    }
    stream.shutdown(Shutdown::Write)?;
    // The host closes the connection when it has everything.
    while stream.recv()?.is_some() {}
    let stats = stream.stats();
    let hash: String = hasher
        .finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    println!(
        "received={} copied={} sha256={hash}",
        stats.received,
        stats.received - stats.received_in_place
    );
    println!(
        "sent={} copied={}",
        stats.sent,
        stats.sent - stats.sent_in_place
    );
    Ok(())
}
