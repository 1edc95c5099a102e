//! The connection of `nc`: a kernel socket, or a zerosock socket of an attached process; for bytes,
//! messages or datagrams.
//!
//! # Invariants
//! - Calls block; both directions can be used at once.
//! - No message is cut, and an empty message is not taken for the end.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketType, sockopt};
use zerosock::vsock::{MAX_DATAGRAM, SeqPacket, Stream, StreamState};

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
    pub(super) fn of(self, socket: OwnedFd) -> Wire {
        match self {
            Kind::Bytes => Wire::Socket(socket),
            Kind::Messages => Wire::Packets(socket),
        }
    }
}

/// What the caller asks for.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) enum Wanted {
    Connection(Kind),
    Datagrams,
}

/// A connection; see the module.
pub(crate) enum Wire {
    Socket(OwnedFd),
    Packets(OwnedFd),
    Stream(Stream),
    Messages(SeqPacket),
    Datagrams(Datagrams),
}

impl Wire {
    /// Largest number of bytes per send.
    pub(super) fn sends_at_once(&self) -> usize {
        match self {
            Wire::Socket(_) | Wire::Stream(_) => BUFFER,
            Wire::Packets(_) | Wire::Messages(_) => LONGEST_SENT,
            Wire::Datagrams(_) => MAX_DATAGRAM as usize,
        }
    }

    /// Size of the receive buffer, bytes.
    pub(super) fn receives_at_once(&self) -> usize {
        match self {
            Wire::Socket(_) | Wire::Stream(_) => BUFFER,
            Wire::Packets(_) | Wire::Messages(_) => LONGEST_RECEIVED,
            Wire::Datagrams(_) => MAX_DATAGRAM as usize,
        }
    }

    /// Sends some of `bytes`, or all of them as one message.
    pub(super) fn send(&self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Wire::Socket(socket) | Wire::Packets(socket) => {
                Ok(rustix::net::send(socket, bytes, SendFlags::NOSIGNAL)?)
            }
            Wire::Stream(stream) => (&mut &*stream).write(bytes),
            Wire::Messages(connection) => connection.send(bytes).map(|()| bytes.len()),
            Wire::Datagrams(socket) => socket.send(bytes),
        }
    }

    /// Ends the sending half.
    pub(super) fn finish(&self) -> io::Result<()> {
        match self {
            Wire::Socket(socket) | Wire::Packets(socket) => {
                match rustix::net::shutdown(socket, rustix::net::Shutdown::Write) {
                    // The peer has already closed: nothing remains to be delivered.
                    Ok(()) | Err(Errno::NOTCONN) => Ok(()),
                    Err(errno) => Err(errno.into()),
                }
            }
            Wire::Stream(stream) if stream.state() == StreamState::Connected => {
                stream.shutdown(Shutdown::Write)
            }
            Wire::Messages(connection) if connection.state() == StreamState::Connected => {
                connection.shutdown(Shutdown::Write)
            }
            Wire::Stream(_) | Wire::Messages(_) => Ok(()),
            Wire::Datagrams(socket) => socket.finish(),
        }
    }

    /// Waits until everything sent will be delivered even if this process ends. Only datagrams need
    /// it: closing a connection waits for the peer.
    pub(super) fn flush(&self) -> io::Result<()> {
        match self {
            Wire::Datagrams(socket) => socket.flush(),
            _ => Ok(()),
        }
    }

    /// Receives bytes, or the next message that is not empty; 0 at the end.
    pub(super) fn receive(&self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Wire::Socket(socket) => super::blocking::read(socket.as_fd(), buffer),
            Wire::Packets(socket) => receive_packet(socket, buffer),
            Wire::Stream(stream) => (&mut &*stream).read(buffer),
            Wire::Messages(connection) => loop {
                match connection.recv(buffer)? {
                    None => return Ok(0),
                    Some(message) if message.len > 0 => return whole(message.len, buffer),
                    Some(_) => {}
                }
            },
            Wire::Datagrams(socket) => socket.receive(buffer),
        }
    }

    /// Whether receiving ends by itself after sending has failed.
    pub(super) fn ends_by_itself(&self) -> bool {
        !matches!(self, Wire::Datagrams(_))
    }

    /// Whether the peer receives nothing more. Asks by sending zero bytes, which sends no packet;
    /// poll(2) does not tell for AF_VSOCK.
    pub(super) fn is_deaf(&self) -> bool {
        match self {
            // On this socket, sending zero bytes would send a packet.
            Wire::Packets(socket) if !is_vsock(socket) => is_there(socket, PollFlags::HUP),
            Wire::Socket(socket) | Wire::Packets(socket) => matches!(
                rustix::net::send(socket, &[], SendFlags::NOSIGNAL | SendFlags::DONTWAIT),
                Err(Errno::PIPE | Errno::NOTCONN | Errno::CONNRESET)
            ),
            Wire::Stream(stream) => stream.state() != StreamState::Connected,
            Wire::Messages(connection) => connection.state() != StreamState::Connected,
            // There is no such notification for datagrams.
            Wire::Datagrams(_) => false,
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
            Ok((_, 0)) if !is_there(socket, PollFlags::RDHUP) => {}
            Ok((_, 0)) if empty == MOST_EMPTY => return Ok(0),
            Ok((_, 0)) => empty += 1,
            Ok((_, len)) => return whole(len, buffer),
        }
    }
}

/// The length of a message, or an error if it did not fit.
fn whole(len: usize, buffer: &[u8]) -> io::Result<usize> {
    if len <= buffer.len() {
        return Ok(len);
    }
    let why = format!("a message of {len} bytes, and there is room for {LONGEST_RECEIVED}");
    Err(io::Error::new(io::ErrorKind::InvalidData, why))
}

fn is_vsock(socket: &OwnedFd) -> bool {
    sockopt::socket_domain(socket) == Ok(AddressFamily::VSOCK)
}

fn is_there(socket: &OwnedFd, events: PollFlags) -> bool {
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let mut asked = [PollFd::new(socket, events)];
    poll(&mut asked, Some(&now)).is_ok() && asked[0].revents().intersects(events)
}
