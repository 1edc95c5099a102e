//! Sends a file over TCP: by `std::io::copy`, and by a zero-copy sender from the page cache.
//!
//! ```sh
//! cargo run --release --example send_file_zero_copy            # 256 MiB of its own, 9 rounds
//! cargo run --release --example send_file_zero_copy -- FILE 21
//! ```
//!
//! Both send the same file to a thread that reads it over the loopback device, in turn; the sum of
//! the bytes is compared. `std::io::copy` uses sendfile(2), in pieces of 64 KiB inside the kernel;
//! the sender submits parts of 1 MiB.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use zerosock::zc::{FileMap, FilePart, Outgoing, Sender};

type Error = Box<dyn std::error::Error + Send + Sync>;

const PART: usize = 1 << 20;
const LINE: usize = 64;
/// Most parts in flight.
const AHEAD: u32 = 16;

fn main() -> Result<(), Error> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (file, rounds) = match &args[..] {
        [] => (own_file()?, 9),
        [path] => (File::open(path)?, 9),
        [path, rounds] => (File::open(path)?, rounds.parse()?),
        _ => return Err("usage: send_file_zero_copy [FILE [ROUNDS]]".into()),
    };
    let mut times = [Vec::new(), Vec::new()];
    let mut sums = Vec::new();
    for round in 0..rounds {
        for step in 0..2 {
            let method = (round + step) % 2;
            let (time, sum) = timed(|socket| match method {
                0 => by_copy(&file, socket),
                _ => by_sender(&file, socket),
            })?;
            times[method].push(time);
            sums.push(sum);
        }
    }
    if sums.windows(2).any(|pair| pair[0] != pair[1]) {
        return Err("what arrived differs".into());
    }
    let [copy, sender] = times.map(|mut times| {
        times.sort();
        times.get(times.len() / 2).copied().unwrap_or_default()
    });
    println!("std::io::copy {copy:?}, zerosock::zc {sender:?}, medians of {rounds}");
    let times = copy.as_secs_f64() / sender.as_secs_f64();
    println!("{times:.2} times as fast");
    Ok(())
}

/// Sends the whole file with sendfile(2).
fn by_copy(mut file: &File, mut socket: TcpStream) -> Result<(), Error> {
    use io::Seek;
    file.seek(io::SeekFrom::Start(0))?;
    io::copy(&mut file, &mut socket)?;
    Ok(())
}

/// Sends the whole file from its mapping.
fn by_sender(file: &File, socket: TcpStream) -> Result<(), Error> {
    let file = FileMap::new(file)?;
    let builder = Sender::builder().capacity(AHEAD).discard_returned();
    let mut sender: Sender<FilePart> = builder.open(socket)?;
    for from in (0..file.len()).step_by(PART) {
        sender
            .send(Outgoing::new(file.part(from, PART)))
            .map_err(|refused| refused.why)?;
    }
    sender.finish(None)?;
    match sender.stats().failed {
        0 => Ok(()),
        failed => Err(format!("{failed} parts were not sent").into()),
    }
}

/// Returns the time until the last byte was read, and the checksum of the read bytes.
fn timed(send: impl FnOnce(TcpStream) -> Result<(), Error>) -> Result<(Duration, u64), Error> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let socket = TcpStream::connect(listener.local_addr()?)?;
    let mut peer = listener.accept()?.0;
    let receiver = thread::spawn(move || -> io::Result<u64> {
        let (mut bytes, mut at, mut sum) = (vec![0; PART], 0usize, 0u64);
        loop {
            let count = peer.read(&mut bytes)?;
            if count == 0 {
                return Ok(sum + at as u64);
            }
            // One byte of each cache line: a full checksum would dominate the measured time.
            let lines = bytes[..count].iter().skip(at.wrapping_neg() % LINE);
            sum += lines
                .step_by(LINE)
                .map(|&byte| u64::from(byte))
                .sum::<u64>();
            at += count;
        }
    });
    let begin = Instant::now();
    send(socket)?;
    let sum = receiver.join().map_err(|_| "the receiver panicked")??;
    Ok((begin.elapsed(), sum))
}

/// A temporary file to send.
fn own_file() -> Result<File, Error> {
    let mut file = tempfile::tempfile()?;
    let part: Vec<u8> = (0..PART).map(|index| (index % 251) as u8).collect();
    for _ in 0..256 {
        file.write_all(&part)?;
    }
    Ok(file)
}
