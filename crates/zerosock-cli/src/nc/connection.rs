//! The connection of `nc`: a kernel socket, or a zerosock socket of an attached process; for bytes,
//! messages or datagrams.
//!
//! # Invariants
//! - Calls block; both directions can be used at once.
//! - A message is received whole or not at all. An empty message does not count as the end.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketType, sockopt};
use zerosock::vsock::{MAX_DATAGRAM, SeqPacket, Stream, StreamState};
use zerosock_sys::wait_ready;

use super::datagrams::Datagrams;

/// Buffer size for streams, bytes: large enough to make the cost of system calls small, small
/// enough for a core's cache.
const BUFFER: usize = 256 * 1024;
/// The longest message sent: the default limit of receivers.
const LONGEST_SENT: usize = 64 * 1024;
/// The longest message received. Its buffer's pages are allocated when they are written.
const LONGEST_RECEIVED: usize = 16 << 20;
/// Limit of consecutive empty messages before the end: more than any queue holds.
const MOST_EMPTY: u32 = 4096;

/// Type of a connection.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) enum Kind {
    Bytes,
    Messages,
}

impl Kind {
    pub(super) fn socket_type(self) -> SocketType {
        match self {
            Kind::Bytes => SocketType::STREAM,
            Kind::Messages => SocketType::SEQPACKET,
        }
    }

    /// Wraps a kernel socket of this type.
    pub(super) fn of(self, socket: OwnedFd) -> Connection {
        match self {
            Kind::Bytes => Connection::Socket(socket),
            Kind::Messages => Connection::Packets(socket),
        }
    }
}

/// What bytes are transferred over.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) enum Transport {
    Connection(Kind),
    Datagrams,
}

/// A connection, or a datagram socket with a peer.
pub(crate) enum Connection {
    Socket(OwnedFd),
    Packets(OwnedFd),
    Stream(Stream),
    Messages(SeqPacket),
    Datagrams(Datagrams),
}

impl Connection {
    /// Largest number of bytes per send.
    pub(super) fn sends_at_once(&self) -> usize {
        match self {
            Connection::Socket(_) | Connection::Stream(_) => BUFFER,
            Connection::Packets(_) | Connection::Messages(_) => LONGEST_SENT,
            Connection::Datagrams(_) => MAX_DATAGRAM as usize,
        }
    }

    /// Size of the receive buffer, bytes.
    pub(super) fn receives_at_once(&self) -> usize {
        match self {
            Connection::Socket(_) | Connection::Stream(_) => BUFFER,
            Connection::Packets(_) | Connection::Messages(_) => LONGEST_RECEIVED,
            Connection::Datagrams(_) => MAX_DATAGRAM as usize,
        }
    }

    /// Sends some of `bytes`, or all of them as one message.
    pub(super) fn send(&self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Connection::Socket(socket) | Connection::Packets(socket) => {
                Ok(rustix::net::send(socket, bytes, SendFlags::NOSIGNAL)?)
            }
            Connection::Stream(stream) => (&mut &*stream).write(bytes),
            Connection::Messages(connection) => connection.send(bytes).map(|()| bytes.len()),
            Connection::Datagrams(socket) => socket.send(bytes),
        }
    }

    /// Ends the sending half.
    pub(super) fn finish(&self) -> io::Result<()> {
        match self {
            Connection::Socket(socket) | Connection::Packets(socket) => {
                match rustix::net::shutdown(socket, rustix::net::Shutdown::Write) {
                    // The peer has already closed: nothing remains to be delivered.
                    Ok(()) | Err(Errno::NOTCONN) => Ok(()),
                    Err(errno) => Err(errno.into()),
                }
            }
            Connection::Stream(stream) if stream.state() == StreamState::Connected => {
                stream.shutdown(Shutdown::Write)
            }
            Connection::Messages(connection) if connection.state() == StreamState::Connected => {
                connection.shutdown(Shutdown::Write)
            }
            Connection::Stream(_) | Connection::Messages(_) => Ok(()),
            Connection::Datagrams(socket) => socket.finish(),
        }
    }

    /// Ends a call that receives. For connections of ours only.
    pub(super) fn stop_receiving(&self) {
        // Fails if the connection has ended, and with it the call.
        let _ = match self {
            Connection::Stream(stream) => stream.shutdown(Shutdown::Read),
            Connection::Messages(connection) => connection.shutdown(Shutdown::Read),
            Connection::Socket(_) | Connection::Packets(_) | Connection::Datagrams(_) => Ok(()),
        };
    }

    /// Waits until everything sent will be delivered even if this process ends. Only datagrams need
    /// it: closing a connection waits for the peer.
    pub(super) fn flush(&self) -> io::Result<()> {
        match self {
            Connection::Datagrams(socket) => socket.flush(),
            _ => Ok(()),
        }
    }

    /// Receives bytes, or the next message that is not empty; 0 at the end.
    pub(super) fn receive(&self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Connection::Socket(socket) => super::blocking::read(socket.as_fd(), buffer),
            Connection::Packets(socket) => receive_packet(socket, buffer),
            Connection::Stream(stream) => (&mut &*stream).read(buffer),
            Connection::Messages(connection) => loop {
                match connection.recv(buffer)? {
                    None => return Ok(0),
                    Some(message) if message.len > 0 => return check_fits(message.len, buffer),
                    Some(_) => {}
                }
            },
            Connection::Datagrams(socket) => socket.receive(buffer),
        }
    }

    /// Whether receiving ends by itself after sending has failed.
    pub(super) fn ends_by_itself(&self) -> bool {
        !matches!(self, Connection::Datagrams(_))
    }

    /// Whether the peer receives nothing more. Tests it by sending zero bytes, which sends no
    /// packet; poll(2) does not report it for AF_VSOCK.
    pub(super) fn has_peer_stopped_receiving(&self) -> bool {
        match self {
            // On this socket, sending zero bytes would send a packet.
            Connection::Packets(socket) if !is_vsock(socket) => has_event(socket, PollFlags::HUP),
            Connection::Socket(socket) | Connection::Packets(socket) => matches!(
                rustix::net::send(socket, &[], SendFlags::NOSIGNAL | SendFlags::DONTWAIT),
                Err(Errno::PIPE | Errno::NOTCONN | Errno::CONNRESET)
            ),
            Connection::Stream(stream) => stream.state() != StreamState::Connected,
            Connection::Messages(connection) => connection.state() != StreamState::Connected,
            // There is no such notification for datagrams.
            Connection::Datagrams(_) => false,
        }
    }
}

/// The next packet that is not empty; 0 at the end. recv(2) returns 0 for both. Before the peer's
/// shutdown (RDHUP) it is an empty packet; after it, at most [`MOST_EMPTY`] of them are skipped.
fn receive_packet(socket: &OwnedFd, buffer: &mut [u8]) -> io::Result<usize> {
    let mut empty = 0;
    loop {
        match rustix::net::recv(socket, &mut *buffer, RecvFlags::TRUNC) {
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
            Ok((_, 0)) if !has_event(socket, PollFlags::RDHUP) => {}
            Ok((_, 0)) if empty == MOST_EMPTY => return Ok(0),
            Ok((_, 0)) => empty += 1,
            Ok((_, len)) => return check_fits(len, buffer),
        }
    }
}

/// The length of a received message, or an error if it did not fit the buffer.
fn check_fits(len: usize, buffer: &[u8]) -> io::Result<usize> {
    if len <= buffer.len() {
        return Ok(len);
    }
    let why =
        format!("the peer sent a message of {len} bytes; nc receives at most {LONGEST_RECEIVED}");
    Err(io::Error::new(io::ErrorKind::InvalidData, why))
}

fn is_vsock(socket: &OwnedFd) -> bool {
    sockopt::socket_domain(socket) == Ok(AddressFamily::VSOCK)
}

/// Whether one of `events` is pending on the socket.
fn has_event(socket: &OwnedFd, events: PollFlags) -> bool {
    let pending = wait_ready(socket, events, Some(Duration::ZERO));
    pending.is_ok_and(|pending| pending.intersects(events))
}
