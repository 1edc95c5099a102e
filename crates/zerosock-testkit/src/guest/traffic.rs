//! Endless traffic between a program on pages of a guest and a program of the host. Both check each byte.
//!
//! The program in the guest connects, and sends a random seed. Then each side sends blocks, which are the pattern of the seed
//! but for a number at the start: that of the block from the host, the count of right bytes so far from the guest.

use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use clap::Args;
use rustix::rand::{GetRandomFlags, getrandom};
use zerosock::vsock::{Endpoint, Stream};
use zerosock::{Address, Cid, Port};
use zerosock_cli::vm::pattern::Pattern;

/// Bytes of a block.
pub const BLOCK: usize = 64 << 10;
/// Bytes of the number at its start.
const NUMBER: usize = 8;
const PAUSE: Duration = Duration::from_millis(50);

#[derive(Debug, Args)]
pub(super) struct Options {
    /// The socket of `zerosock guest`
    #[arg(long)]
    socket: PathBuf,
    /// The port of the host
    #[arg(long)]
    port: u32,
}

/// The next block to send.
pub struct Block(Vec<u8>);

impl Block {
    /// The blocks to the host, or from it.
    pub fn new(seed: u64, to_host: bool) -> Block {
        Block(Pattern::bytes(seed ^ u64::from(to_host), BLOCK))
    }

    /// The block with this number.
    pub fn with(&mut self, number: u64) -> &[u8] {
        self.0[..NUMBER].copy_from_slice(&number.to_le_bytes());
        &self.0
    }
}

/// Checks blocks that arrive in pieces.
pub struct Checker {
    block: Vec<u8>,
    number: [u8; NUMBER],
    /// Bytes so far.
    pub bytes: u64,
}

impl Checker {
    /// For the blocks of [`Block::new`].
    pub fn new(seed: u64, to_host: bool) -> Checker {
        let block = Block::new(seed, to_host).0;
        Checker {
            block,
            number: [0; NUMBER],
            bytes: 0,
        }
    }

    /// Checks the next bytes. Returns the last complete number, if there is one in them.
    ///
    /// # Errors
    /// Names the first wrong byte.
    pub fn check(&mut self, mut bytes: &[u8]) -> Result<Option<u64>, String> {
        let mut last = None;
        while !bytes.is_empty() {
            let at = (self.bytes % BLOCK as u64) as usize;
            let end = if at < NUMBER { NUMBER } else { BLOCK };
            let (now, later) = bytes.split_at(bytes.len().min(end - at));
            if at < NUMBER {
                self.number[at..at + now.len()].copy_from_slice(now);
                if at + now.len() == NUMBER {
                    last = Some(u64::from_le_bytes(self.number));
                }
            } else if *now != self.block[at..at + now.len()] {
                let wanted = &self.block[at..];
                let differs = now.iter().zip(wanted).position(|(a, b)| a != b);
                let offset = self.bytes + differs.unwrap_or(0) as u64;
                return Err(format!("byte {offset} of a connection is wrong"));
            }
            self.bytes += now.len() as u64;
            bytes = later;
        }
        Ok(last)
    }
}

/// Attaches again when its endpoint ends. Returns when a byte was wrong.
pub(super) fn run(options: &Options) -> io::Result<()> {
    loop {
        if let Err(error) = exchange(options)
            && error.kind() == io::ErrorKind::InvalidData
        {
            return Err(error);
        }
        thread::sleep(PAUSE);
    }
}

fn exchange(options: &Options) -> io::Result<()> {
    let endpoint = Endpoint::builder()
        .background()
        .queue_size(64)
        .attach(&options.socket)
        .map_err(io::Error::other)?;
    let stream = endpoint.connect(Address::new(Cid::HOST, Port::new(options.port)))?;
    let mut seed = [0; 8];
    getrandom(&mut seed, GetRandomFlags::empty())?;
    send(&stream, &seed)?;
    let (seed, right) = (u64::from_le_bytes(seed), AtomicU64::new(0));
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut block = Block::new(seed, true);
            while send(&stream, block.with(right.load(Ordering::Relaxed))).is_ok() {}
        });
        let received = receive(&stream, seed, &right);
        // The sender ends, too.
        let _ = stream.shutdown(std::net::Shutdown::Both);
        received
    })
}

/// Sends in loans.
fn send(stream: &Stream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        let mut loan = stream.loan(bytes.len())?;
        let len = bytes.len().min(loan.capacity());
        loan.write_at(0, &bytes[..len])?;
        loan.set_filled(len);
        let sent = loan.send()?;
        bytes = &bytes[sent..];
    }
    Ok(())
}

/// Receives in leases until the stream ends.
fn receive(stream: &Stream, seed: u64, right: &AtomicU64) -> io::Result<()> {
    let (mut checker, mut window) = (Checker::new(seed, false), vec![0; BLOCK]);
    let mut next = 0;
    while let Some(lease) = stream.recv()? {
        for offset in (0..lease.len()).step_by(BLOCK) {
            let len = lease.copy_to(offset, &mut window);
            let before = checker.bytes.div_ceil(BLOCK as u64);
            let number = checker
                .check(&window[..len])
                .map_err(|text| io::Error::new(io::ErrorKind::InvalidData, text))?;
            // At most one block begins in a window.
            if number.is_some_and(|number| number != next) {
                let text = format!("block {before} of a connection has number {number:?}");
                return Err(io::Error::new(io::ErrorKind::InvalidData, text));
            }
            next += u64::from(number.is_some());
            right.store(checker.bytes, Ordering::Relaxed);
        }
    }
    Ok(())
}
