//! A server that echoes on any number of connections, and clients of it: many that stay, and many
//! that come and go.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::sockopt::socket_error;
use rustix::net::{self, AddressFamily, SocketFlags, SocketType};

use crate::report::line;
use crate::worker::jobs::percentile;
use crate::worker::touch::stream as pattern;

/// Bytes that a client sends on each connection and gets back.
const MESSAGE: usize = 64;
/// Connections that are being made or used at a time.
const AT_A_TIME: usize = 64;
/// Longest time without progress.
const PATIENCE: Duration = Duration::from_secs(30);

/// An echo server on a thread of its own; ends when dropped.
pub(super) struct Server {
    pub(super) address: SocketAddr,
    /// Dropping it ends the thread.
    stop: Option<OwnedFd>,
    thread: Option<JoinHandle<Result<(), String>>>,
}

impl Server {
    /// The thread inherits the core of the calling one.
    pub(super) fn start() -> Result<Server, String> {
        // As many as the kernel allows: the bursts of a relay must not overflow the backlog.
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(line)?;
        net::listen(&listener, 4096).map_err(line)?;
        listener.set_nonblocking(true).map_err(line)?;
        let address = listener.local_addr().map_err(line)?;
        let (stopped, stop) = rustix::pipe::pipe().map_err(line)?;
        let thread = thread::spawn(move || serve(&listener, &stopped));
        Ok(Server {
            address,
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(Ok(Err(reason))) = self.thread.take().map(JoinHandle::join) {
            eprintln!("the echo server failed: {reason}");
        }
    }
}

/// Tokens of the server's epoll beside those of connections.
const LISTENER: u64 = u64::MAX;
const STOP: u64 = u64::MAX - 1;

fn serve(listener: &TcpListener, stopped: &OwnedFd) -> Result<(), String> {
    let poller = Poller::new()?;
    poller.add(listener, LISTENER, EventFlags::IN)?;
    poller.add(stopped, STOP, EventFlags::IN)?;
    let mut streams: Vec<Option<TcpStream>> = Vec::new();
    let mut free: Vec<usize> = Vec::new();
    let mut events = Vec::with_capacity(256);
    let mut bytes = [0; 4096];
    loop {
        poller.wait(&mut events, PATIENCE)?;
        for &(token, _) in &events {
            match token {
                STOP => return Ok(()),
                LISTENER => loop {
                    let stream = match listener.accept() {
                        Ok((stream, _)) => stream,
                        Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                        // The client has given up.
                        Err(error) if error.kind() == ErrorKind::ConnectionAborted => continue,
                        Err(error) => return Err(format!("accept: {error}")),
                    };
                    stream.set_nonblocking(true).map_err(line)?;
                    stream.set_nodelay(true).map_err(line)?;
                    let at = free.pop().unwrap_or_else(|| {
                        streams.push(None);
                        streams.len() - 1
                    });
                    poller.add(&stream, at as u64, EventFlags::IN)?;
                    streams[at] = Some(stream);
                },
                token => {
                    let at = token as usize;
                    let Some(stream) = streams.get_mut(at).and_then(Option::as_mut) else {
                        continue;
                    };
                    if !echo(stream, &mut bytes) {
                        streams[at] = None;
                        free.push(at);
                    }
                }
            }
        }
    }
}

/// Sends back what has arrived; false when the connection has ended.
fn echo(stream: &mut TcpStream, bytes: &mut [u8]) -> bool {
    match stream.read(bytes) {
        Ok(0) => false,
        // A message always fits into the send buffer, because its client waits for it.
        Ok(got) => stream.write_all(&bytes[..got]).is_ok(),
        Err(error) => error.kind() == ErrorKind::WouldBlock,
    }
}

/// Makes `count` connections, one after the other. Each has carried a message both ways.
pub(super) fn hold(to: SocketAddr, count: usize) -> Result<Vec<TcpStream>, String> {
    let mut all = Vec::with_capacity(count);
    for number in 0..count {
        let failed = |error| format!("connection {number} of {count}: {error}");
        let mut stream = TcpStream::connect(to).map_err(failed)?;
        stream.set_read_timeout(Some(PATIENCE)).map_err(failed)?;
        let (mut sent, mut back) = ([0; MESSAGE], [0; MESSAGE]);
        pattern::fill(position(number as u64), &mut sent);
        stream.write_all(&sent).map_err(failed)?;
        stream.read_exact(&mut back).map_err(failed)?;
        pattern::check(position(number as u64), &back)?;
        all.push(stream);
    }
    Ok(all)
}

fn position(number: u64) -> u64 {
    number * MESSAGE as u64
}

/// Short connections that were made.
#[derive(Clone, Debug, Default)]
pub(super) struct Short {
    /// Connections that ended within the measured time.
    pub(super) count: u64,
    pub(super) time: Duration,
    /// From the connect to the answer, of 99 of 100 connections, nanoseconds.
    pub(super) p99: u64,
}

/// Makes connections, [`AT_A_TIME`] at a time: each sends a message, waits for the answer and
/// closes. `go_on` gets the number of connections that have ended; the measured time is that of the
/// connections from the first `Count`, as long as `go_on` says so.
pub(super) fn short(
    to: SocketAddr,
    mut go_on: impl FnMut(u64) -> Result<Phase, String>,
) -> Result<Short, String> {
    let poller = Poller::new()?;
    let mut clients: Vec<Client> = Vec::new();
    let mut events = Vec::with_capacity(AT_A_TIME);
    let (mut begun, mut done) = (0, 0);
    let mut counted_from = None;
    let mut times = Vec::new();
    for at in 0..AT_A_TIME {
        clients.push(Client::connect(to, begun, at, &poller)?);
        begun += 1;
    }
    loop {
        match (go_on(done)?, counted_from) {
            (Phase::Warm, _) | (Phase::Count, Some(_)) => {}
            (Phase::Count, None) => counted_from = Some((Instant::now(), done)),
            (Phase::End, Some((from, before))) => {
                times.sort_unstable();
                return Ok(Short {
                    count: done - before,
                    time: from.elapsed(),
                    p99: percentile(&times, 99).ok_or("no connection")?,
                });
            }
            (Phase::End, None) => return Err("ended before the measurement".to_owned()),
        }
        poller.wait(&mut events, PATIENCE)?;
        if events.is_empty() {
            return Err(format!(
                "no progress in {PATIENCE:?}, after {done} connections"
            ));
        }
        for &(token, _) in &events {
            let at = token as usize;
            let client = &mut clients[at];
            if client.advance(&poller)? {
                if counted_from.is_some() {
                    let time = client.begun.elapsed().as_nanos();
                    times.push(u64::try_from(time).unwrap_or(u64::MAX));
                }
                done += 1;
                // The assignment closes the connection before it.
                *client = Client::connect(to, begun, at, &poller)?;
                begun += 1;
            }
        }
    }
}

/// What [`short`] is to do next.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Phase {
    Warm,
    Count,
    End,
}

/// A short connection.
struct Client {
    stream: TcpStream,
    number: u64,
    begun: Instant,
    /// Token of its events.
    at: usize,
    is_sent: bool,
    /// Bytes of the answer.
    back: usize,
    answer: [u8; MESSAGE],
}

impl Client {
    fn connect(to: SocketAddr, number: u64, at: usize, poller: &Poller) -> Result<Client, String> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let begun = Instant::now();
        let socket = net::socket_with(AddressFamily::INET, SocketType::STREAM, flags, None);
        let socket = socket.map_err(line)?;
        match net::connect(&socket, &to) {
            Ok(()) | Err(Errno::INPROGRESS) => {}
            Err(error) => return Err(format!("connect: {error}")),
        }
        poller.add(&socket, at as u64, EventFlags::OUT)?;
        Ok(Client {
            stream: socket.into(),
            number,
            begun,
            at,
            is_sent: false,
            back: 0,
            answer: [0; MESSAGE],
        })
    }

    /// Does what the socket is ready for; true when the whole answer has arrived.
    fn advance(&mut self, poller: &Poller) -> Result<bool, String> {
        let failed = |error: std::io::Error| format!("a short connection: {error}");
        if !self.is_sent {
            socket_error(&self.stream)
                .and_then(|error| error)
                .map_err(|error| format!("connect: {error}"))?;
            let mut message = [0; MESSAGE];
            pattern::fill(position(self.number), &mut message);
            self.stream.write_all(&message).map_err(failed)?;
            self.is_sent = true;
            poller.change(&self.stream, self.at as u64, EventFlags::IN)?;
            return Ok(false);
        }
        match self.stream.read(&mut self.answer[self.back..]) {
            Ok(0) => return Err("a connection ended before its answer".to_owned()),
            Ok(got) => self.back += got,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(failed(error)),
        }
        if self.back < MESSAGE {
            return Ok(false);
        }
        pattern::check(position(self.number), &self.answer)?;
        Ok(true)
    }
}

/// An epoll instance.
struct Poller(OwnedFd);

impl Poller {
    fn new() -> Result<Poller, String> {
        epoll::create(CreateFlags::CLOEXEC)
            .map(Poller)
            .map_err(line)
    }

    fn add(&self, socket: impl AsFd, token: u64, flags: EventFlags) -> Result<(), String> {
        epoll::add(&self.0, socket, EventData::new_u64(token), flags).map_err(line)
    }

    fn change(&self, socket: impl AsFd, token: u64, flags: EventFlags) -> Result<(), String> {
        epoll::modify(&self.0, socket, EventData::new_u64(token), flags).map_err(line)
    }

    /// Waits for events: tokens and flags. None after `timeout`.
    fn wait(&self, found: &mut Vec<(u64, EventFlags)>, timeout: Duration) -> Result<(), String> {
        let mut events = Vec::with_capacity(found.capacity().max(1));
        let timeout = rustix::time::Timespec::try_from(timeout).map_err(line)?;
        let spare = rustix::buffer::spare_capacity(&mut events);
        match epoll::wait(&self.0, spare, Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(line(error)),
        }
        found.clear();
        found.extend(events.iter().map(|event| (event.data.u64(), event.flags)));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_that_stay_and_clients_that_go_are_all_answered() {
        let server = Server::start().unwrap();
        let held = hold(server.address, 100).unwrap();
        assert_eq!(held.len(), 100);
        let phases = |done| match done {
            0..100 => Phase::Warm,
            100..500 => Phase::Count,
            _ => Phase::End,
        };
        let short = short(server.address, |done| Ok(phases(done))).unwrap();
        assert!(short.count >= 300, "{short:?}");
        assert!(short.p99 > 0 && short.time > Duration::ZERO, "{short:?}");
    }

    /// A server that answers with other bytes, or with too few of them, is noticed.
    #[test]
    fn a_wrong_answer_ends_the_measurement() {
        for answer in [&[0u8; MESSAGE][..], &[1]] {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            let to = listener.local_addr().unwrap();
            thread::spawn(move || {
                while let Ok((mut stream, _)) = listener.accept() {
                    let mut message = [0; MESSAGE];
                    if stream.read_exact(&mut message).is_ok() {
                        let _ = stream.write_all(answer);
                    }
                }
            });
            assert!(hold(to, 1).is_err());
            assert!(short(to, |_| Ok(Phase::Warm)).is_err());
        }
    }
}
