//! A client of the agent that streams both ways and checks what it receives. On an order it frees the pages of its file,
//! and goes on until it is killed.

use std::io::{self, Read, Write};
use std::path::PathBuf;
use std::process;
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use zerosock::attach::AttachError;
use zerosock::vsock::{Endpoint, OpenError, Stream};
use zerosock::{Address, Cid, Port};
use zerosock_cli::vm::pattern::Pattern;

use super::exchange::{ENDLESS, Expected, Header};
use super::own_pages::free_own_pages;
use super::terms::{LIMIT, Order, POLL};

/// Bytes each way after which a client says that it runs.
const RUNNING: u64 = 64 << 10;
/// Bytes sent and looked at at once.
const WINDOW: usize = 8 << 10;
/// Entries of queues and bytes of a buffer: of an endpoint with few huge pages.
const QUEUE_SIZE: u16 = 128;
const BUFFER: u32 = 4096;

#[derive(Debug, Args)]
pub(in crate::guest) struct Options {
    /// The socket of `zerosock guest`
    #[arg(long)]
    socket: PathBuf,
    /// The port of the host
    #[arg(long)]
    port: u32,
    /// Of the patterns
    #[arg(long)]
    seed: u64,
    /// The host sends slowly
    #[arg(long)]
    paced: bool,
    /// Attaches and detaches so many times instead, and exchanges so many bytes each time
    #[arg(long, num_args = 2)]
    cycles: Vec<u64>,
}

pub(super) fn run(options: &Options) -> io::Result<()> {
    if let &[cycles, len] = &options.cycles[..] {
        for cycle in 0..cycles {
            exchange(options, options.seed + cycle, len)?;
        }
        return Ok(());
    }
    static ORDER: OnceLock<Order> = OnceLock::new();
    thread::spawn(|| {
        let line = io::stdin().lines().next();
        match line.and_then(Result::ok).and_then(|line| line.parse().ok()) {
            Some(order) => ORDER.set(order),
            // Its parent has gone.
            None => process::exit(0),
        }
    });
    let header = Header {
        seed: options.seed,
        len: ENDLESS,
        is_paced: options.paced,
    };
    let endpoint = attach(options)?;
    let mut client = Streaming::open(&endpoint, options.port, header)?;
    let (mut told, mut is_free) = (false, false);
    loop {
        // Bytes of pages that it has freed mean nothing.
        match client.step(!is_free) {
            Ok(true) => {}
            Ok(false) if !is_free => {
                println!("ended");
                return Ok(());
            }
            Err(error) if !is_free => return Err(error),
            Ok(false) | Err(_) => park(),
        }
        if !told && client.received.count > RUNNING && client.sent > RUNNING {
            told = true;
            println!("running");
        }
        if let Some(order) = ORDER.get().filter(|_| told && !is_free) {
            free_own_pages(order.how)?;
            is_free = true;
            println!("freed");
            if !order.goes_on {
                park();
            }
        }
    }
}

/// Until it is killed.
fn park() -> ! {
    loop {
        thread::park();
    }
}

fn attach(options: &Options) -> io::Result<Endpoint> {
    let deadline = Instant::now() + LIMIT;
    loop {
        let endpoint = Endpoint::builder()
            .queue_size(QUEUE_SIZE)
            .receive_buffers(BUFFER)
            .transmit_buffers(BUFFER)
            .connect_timeout(LIMIT)
            .attach_timeout(LIMIT)
            .attach(&options.socket);
        match endpoint {
            // Pages of the endpoint before may not be free yet.
            Err(OpenError::Place(AttachError::Full)) if Instant::now() < deadline => {
                thread::sleep(POLL);
            }
            endpoint => return endpoint.map_err(io::Error::other),
        }
    }
}

/// Attaches, sends and receives patterns of this length, and detaches.
fn exchange(options: &Options, seed: u64, len: u64) -> io::Result<()> {
    let endpoint = attach(options)?;
    let header = Header {
        seed,
        len,
        is_paced: false,
    };
    let mut stream = connect(&endpoint, options.port, header)?;
    let mut bytes = vec![0; usize::try_from(len).map_err(io::Error::other)?];
    header.to_host().fill(&mut bytes);
    stream.write_all(&bytes)?;
    stream.read_exact(&mut bytes)?;
    Expected::new(header.from_host()).check(&bytes)
}

fn connect(endpoint: &Endpoint, port: u32, header: Header) -> io::Result<Stream> {
    let mut stream = endpoint.connect(Address::new(Cid::HOST, Port::new(port)))?;
    stream.write_all(&header.encode())?;
    Ok(stream)
}

/// A connection with traffic both ways.
struct Streaming {
    stream: Stream,
    pattern: Pattern,
    chunk: Vec<u8>,
    /// Bytes of `chunk` that are not sent.
    left: usize,
    sent: u64,
    received: Expected,
    window: Vec<u8>,
}

impl Streaming {
    fn open(endpoint: &Endpoint, port: u32, header: Header) -> io::Result<Streaming> {
        let stream = connect(endpoint, port, header)?;
        // Both ways are served in turn.
        stream.set_read_timeout(Some(Duration::from_millis(1)))?;
        stream.set_write_timeout(Some(Duration::from_millis(1)))?;
        Ok(Streaming {
            stream,
            pattern: header.to_host(),
            chunk: vec![0; WINDOW],
            left: 0,
            sent: 0,
            received: Expected::new(header.from_host()),
            window: vec![0; WINDOW],
        })
    }

    /// Sends and receives a little. False: the connection has ended.
    fn step(&mut self, checks: bool) -> io::Result<bool> {
        if self.left == 0 {
            self.pattern.fill(&mut self.chunk);
            self.left = WINDOW;
        }
        match (&self.stream).write(&self.chunk[WINDOW - self.left..]) {
            Ok(len) => {
                self.left -= len;
                self.sent += len as u64;
            }
            Err(error) if is_empty(&error) => {}
            Err(_) => return Ok(false),
        }
        let lease = match self.stream.recv() {
            Ok(Some(lease)) => lease,
            Err(error) if is_empty(&error) => return Ok(true),
            Ok(None) | Err(_) => return Ok(false),
        };
        for offset in (0..lease.len()).step_by(WINDOW) {
            let len = lease.copy_to(offset, &mut self.window);
            if checks {
                self.received.check(&self.window[..len])?;
            }
        }
        Ok(true)
    }
}

fn is_empty(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
    )
}
