//! A client of the agent in this guest, step by step: prints what it gets.

use std::io::{self, IoSlice, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use rustix::event::PollFlags;
use rustix::fs::{fstat, ftruncate};
use rustix::net::{RecvFlags, SendFlags, SocketType, recv, send};
use zerosock::attach::codec::{ANSWER_LEN, Answer, Request, decode_answer, encode_request};
use zerosock::attach::{AttachRequest, Start, Status};
use zerosock_ring::Extent;
use zerosock_sys::{fd_passing, socket_path, wait_ready};

use super::pages;

const LIMIT: Duration = Duration::from_secs(60);
/// VIRTIO_F_VERSION_1 and the streams of vsock.
const FEATURES: u64 = 1 << 32 | 1;

#[derive(Debug, Args)]
pub(super) struct Options {
    #[arg(long)]
    socket: PathBuf,
    /// Bytes of memory to take; 0: it takes none
    #[arg(long)]
    memory: u64,
    /// Frees the pages of its file when the queues run
    #[arg(long)]
    free: bool,
    /// Stays until the agent closes the connection, and looks at its memory when the agent has removed the file
    #[arg(long)]
    stay: bool,
}

pub(super) fn run(options: &Options) -> io::Result<()> {
    let socket = socket_path::connect(&options.socket, SocketType::SEQPACKET, LIMIT)?;
    let request = match options.memory {
        0 => Request::Attach(AttachRequest::default()),
        len => Request::AttachMemory(AttachRequest::default(), len),
    };
    let (answer, fds) = ask(&socket, &request)?;
    println!("attach={:?}", answer.status);
    let Ok([file, doorbell]) = <[OwnedFd; 2]>::try_from(fds) else {
        return Ok(());
    };
    let (len, offered) = (answer.memory, answer.features);
    println!("cid={} memory={len}", answer.cid);
    println!("clear={}", is_clear(&file, len)?);
    // Takes nothing from the start.
    let name = "web".parse().map_err(io::Error::other)?;
    let (answer, _) = ask(&socket, &Request::Resolve(name))?;
    println!("resolve={:?}", answer.status);
    let start = Start {
        features: FEATURES & offered,
        queue_size: 256,
        rings: [0, 0x4000, 0x8000],
    };
    let (answer, _) = ask(&socket, &Request::Start(start))?;
    println!("start={:?} features={:#x}", answer.status, answer.features);
    let (second, _) = ask(&socket, &Request::Start(start))?;
    println!("again={:?}", second.status);
    if answer.status == Status::Ok {
        send(&doorbell, b"k", SendFlags::NOSIGNAL)?;
        println!("doorbell={}", receive(&doorbell)?);
    }
    if options.free {
        ftruncate(&file, 0)?;
    }
    if options.stay {
        println!("running");
        io::stdout().flush()?;
        println!("end={} doorbell={}", receive(&socket)?, receive(&doorbell)?);
        if !options.free {
            // The name is the last that the agent takes from the file.
            wait_until_removed(&file)?;
            println!("kept={}", is_clear(&file, len)?);
        }
    }
    Ok(())
}

fn wait_until_removed(file: &OwnedFd) -> io::Result<()> {
    let deadline = Instant::now() + LIMIT;
    while fstat(file)?.st_nlink > 0 {
        if Instant::now() > deadline {
            return Err(io::ErrorKind::TimedOut.into());
        }
        thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// Receives at most a byte.
fn receive(socket: &OwnedFd) -> io::Result<usize> {
    wait_ready(socket, PollFlags::IN, Some(LIMIT))?;
    match recv(socket, &mut [0; 1], RecvFlags::empty()) {
        Ok((len, _)) => Ok(len),
        Err(rustix::io::Errno::CONNRESET) => Ok(0),
        Err(errno) => Err(errno.into()),
    }
}

fn ask(socket: &OwnedFd, request: &Request) -> io::Result<(Answer, Vec<OwnedFd>)> {
    let bytes = encode_request(request).ok_or(io::ErrorKind::InvalidInput)?;
    // A server that refuses the connection may have closed it.
    let _ = fd_passing::send(socket, &[IoSlice::new(&bytes)], &[]);
    wait_ready(socket, PollFlags::IN, Some(LIMIT))?;
    let (mut bytes, mut fds) = ([0; ANSWER_LEN], Vec::new());
    let received = match fd_passing::recv(socket.as_fd(), &mut bytes, &mut fds) {
        // The kernel reports once that the request was not read.
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
            fd_passing::recv(socket.as_fd(), &mut bytes, &mut fds)?
        }
        received => received?,
    };
    let answer = decode_answer(&bytes[..received.bytes]).map_err(io::Error::other)?;
    let fds = fds.into_iter().map(zerosock_sys::PeerFd::into_trusted);
    Ok((answer, fds.collect()))
}

/// Whether all bytes are zero but the last line of each huge page.
fn is_clear(file: &OwnedFd, len: u64) -> io::Result<bool> {
    const LINE: u64 = 64;
    let memory = pages::map(file)?;
    assert_eq!(memory.size(), len);
    let mut bytes = vec![0; (Extent::HUGE_PAGE - LINE) as usize];
    for start in (0..len).step_by(Extent::HUGE_PAGE as usize) {
        let mut pieces = Vec::new();
        let found = memory.translate(start, bytes.len() as u32, &mut pieces);
        found.map_err(io::Error::other)?;
        memory.read(&pieces, 0, &mut bytes);
        if bytes.iter().any(|&byte| byte != 0) {
            return Ok(false);
        }
    }
    Ok(true)
}
