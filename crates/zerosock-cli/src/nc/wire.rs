//! What `nc` is connected by: a socket of the kernel's, or one of ours as a process that has
//! attached; for bytes, messages or datagrams.
//!
//! What must hold: calls block, and both directions may be used at once; no message is cut, and one
//! without a byte is not taken for the end.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketType, sockopt};
use zerosock::vsock::{MAX_DATAGRAM, SeqPacket, Stream, StreamState};

use super::datagrams::Datagrams;

/// Of a stream at once. Large enough that system calls do not matter, small enough for a core's
/// cache.
const BUFFER: usize = 256 * 1024;
/// The longest message that is sent: what any receiver takes that was not told otherwise.
const LONGEST_SENT: usize = 64 * 1024;
/// The longest message that is received. Memory for it is taken only as far as it is used.
const LONGEST_RECEIVED: usize = 16 << 20;
/// Messages without a byte that may stand before the end: more than any queue keeps of them.
const MOST_EMPTY: u32 = 4096;

/// What a connection carries.
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

    /// A socket of the kernel's, of this kind.
    pub(super) fn of(self, socket: OwnedFd) -> Wire {
        match self {
            Kind::Bytes => Wire::Socket(socket),
            Kind::Messages => Wire::Packets(socket),
        }
    }
}

/// What is asked for.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) enum Wanted {
    Connection(Kind),
    Datagrams,
}

/// See the module.
pub(crate) enum Wire {
    Socket(OwnedFd),
    Packets(OwnedFd),
    Stream(Stream),
    Messages(SeqPacket),
    Datagrams(Datagrams),
}

impl Wire {
    /// Bytes to be sent at once, at most.
    pub(super) fn sends_at_once(&self) -> usize {
        match self {
            Wire::Socket(_) | Wire::Stream(_) => BUFFER,
            Wire::Packets(_) | Wire::Messages(_) => LONGEST_SENT,
            Wire::Datagrams(_) => MAX_DATAGRAM as usize,
        }
    }

    /// Bytes that there is to be room for.
    pub(super) fn receives_at_once(&self) -> usize {
        match self {
            Wire::Socket(_) | Wire::Stream(_) => BUFFER,
            Wire::Packets(_) | Wire::Messages(_) => LONGEST_RECEIVED,
            Wire::Datagrams(_) => MAX_DATAGRAM as usize,
        }
    }

    /// Sends some of `bytes`; all of them, as one message.
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
                    // The peer was faster: it has closed, and nothing is left to be delivered.
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

    /// Waits until it no longer takes us to deliver what was sent. A connection's end waits for its
    /// peer by itself.
    pub(super) fn flush(&self) -> io::Result<()> {
        match self {
            Wire::Datagrams(socket) => socket.flush(),
            _ => Ok(()),
        }
    }

    /// Receives bytes, or the next message that has some; 0 at the end.
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

    /// Whether what is received comes to an end when nothing can be sent any more.
    pub(super) fn ends_by_itself(&self) -> bool {
        !matches!(self, Wire::Datagrams(_))
    }

    /// Whether the peer takes nothing more. Sending no bytes sends no packet, but asks the
    /// question; poll() would not tell for AF_VSOCK.
    pub(super) fn is_deaf(&self) -> bool {
        match self {
            // To send no bytes by this one sends a packet.
            Wire::Packets(socket) if !is_vsock(socket) => is_there(socket, PollFlags::HUP),
            Wire::Socket(socket) | Wire::Packets(socket) => matches!(
                rustix::net::send(socket, &[], SendFlags::NOSIGNAL | SendFlags::DONTWAIT),
                Err(Errno::PIPE | Errno::NOTCONN | Errno::CONNRESET)
            ),
            Wire::Stream(stream) => stream.state() != StreamState::Connected,
            Wire::Messages(connection) => connection.state() != StreamState::Connected,
            // Nobody would say so.
            Wire::Datagrams(_) => false,
        }
    }
}

/// The next packet that has bytes; 0 at the end. Of a packet without a byte recv(2) says what it
/// says at the end: but an end has come before it says so, and behind it there is nothing else.
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

/// The length of a message, if it has fitted.
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
