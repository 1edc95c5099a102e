//! Hybrid vsock: the convention by which host programs reach a guest over Unix sockets.
//!
//! A host program connects to `uds_path`, writes `CONNECT <port>\n`, and reads
//! `OK <port>\n` once the guest has accepted; a refusal closes the socket. A guest that connects
//! to port P of the host reaches the program that listens on `uds_path_P`. Whatever follows the
//! newline is payload: the line is looked at with `MSG_PEEK` and only the line is taken, so that
//! the payload stays in the socket, from where it is received into guest memory.
//!
//! For messages the sockets are of type SOCK_SEQPACKET, and the lines are packets of their own. What
//! tells a packet without a byte from the end of all packets, at both of which a receive gives 0:
//! with SO_PASSCRED the kernel has credentials to give with every packet and none with the end, and
//! says so (MSG_CTRUNC) when there is no room for them.

use super::Attempt;
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType};
use std::io::IoSliceMut;
use std::path::{Path, PathBuf};
use zerosock_proto::Port;

/// Longest line that is still a CONNECT: the word, a space, ten digits, CR and LF.
const MAX_LINE: usize = "CONNECT 4294967295\r\n".len();

/// Which port the OK line names.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum OkConvention {
    /// The guest's port, as vhost-device-vsock does.
    #[default]
    GuestPort,
    /// The port that the host side was given, as Firecracker and cloud-hypervisor do.
    HostPort,
}

/// What a look at the CONNECT line found.
#[derive(Debug, Eq, PartialEq)]
pub(crate) enum Line {
    /// The whole line was there and was taken: connect to this port.
    Connect(Port),
    /// Not yet a whole line.
    Partial,
    /// Not a CONNECT line, or the program has gone.
    Bad(&'static str),
}

/// Looks for the CONNECT line on `socket` without taking a byte behind it.
pub(crate) fn read_line(socket: impl AsFd) -> Line {
    let mut line = [0u8; MAX_LINE];
    let seen = match net::recv(
        &socket,
        &mut line[..],
        RecvFlags::PEEK | RecvFlags::DONTWAIT,
    ) {
        Ok((_, 0)) => return Line::Bad("closed before it said CONNECT"),
        Ok((_, n)) => n,
        Err(Errno::AGAIN | Errno::INTR) => return Line::Partial,
        Err(_) => return Line::Bad("failed before it said CONNECT"),
    };
    let parsed = parse_line(&line[..seen]);
    if let Parsed::Port(_, len) = parsed {
        // Exactly the line: these bytes are there, as the peek has shown.
        match net::recv(&socket, &mut line[..len], RecvFlags::DONTWAIT) {
            Ok((_, n)) if n == len => {}
            _ => return Line::Bad("lost its CONNECT line"),
        }
    }
    match parsed {
        Parsed::Port(port, _) => Line::Connect(port),
        Parsed::Partial => Line::Partial,
        Parsed::Bad => Line::Bad("did not say CONNECT <port>"),
    }
}

/// As [`read_line`], for a socket of packets: the line is the whole of the first one.
pub(crate) fn read_packet(socket: impl AsFd) -> Line {
    // One byte more shows a packet that is longer.
    let mut line = [0u8; MAX_LINE + 1];
    let seen = match net::recv(&socket, &mut line[..], RecvFlags::DONTWAIT) {
        Ok((_, 0)) => return Line::Bad("closed before it said CONNECT"),
        Ok((_, n)) => n,
        Err(Errno::AGAIN | Errno::INTR) => return Line::Partial,
        Err(_) => return Line::Bad("failed before it said CONNECT"),
    };
    match parse_line(&line[..seen]) {
        Parsed::Port(port, len) if len == seen && prepare(&socket) => Line::Connect(port),
        _ => Line::Bad("did not say CONNECT <port> in a packet of its own"),
    }
}

/// Has ends told apart from packets without a byte, and makes room for long ones to be sent.
fn prepare(socket: impl AsFd) -> bool {
    // As much as the system gives: the rest is for the packets to show.
    let _ = net::sockopt::set_socket_send_buffer_size(&socket, LONGEST);
    net::sockopt::set_socket_passcred(&socket, true).is_ok()
}

/// Bytes of a packet that a socket should take.
const LONGEST: usize = 1 << 20;

/// What is next on a socket of packets.
#[derive(Debug, Eq, PartialEq)]
pub(crate) enum Ahead {
    /// A packet of so many bytes, perhaps none.
    Message(usize),
    Nothing,
    End,
    /// The program has gone.
    Gone,
}

/// Looks at the next packet without taking it.
pub(crate) fn look_ahead(socket: impl AsFd) -> Ahead {
    let mut byte = [0u8; 1];
    let mut slices = [IoSliceMut::new(&mut byte)];
    let flags = RecvFlags::PEEK | RecvFlags::TRUNC | RecvFlags::DONTWAIT;
    let mut nothing = net::RecvAncillaryBuffer::default();
    match net::recvmsg(socket, &mut slices, &mut nothing, flags) {
        Ok(got) if got.bytes > 0 || got.flags.contains(net::ReturnFlags::CTRUNC) => {
            Ahead::Message(got.bytes)
        }
        Ok(_) => Ahead::End,
        Err(Errno::AGAIN | Errno::INTR) => Ahead::Nothing,
        Err(_) => Ahead::Gone,
    }
}

#[derive(Debug, Eq, PartialEq)]
enum Parsed {
    Port(Port, usize),
    Partial,
    Bad,
}

fn parse_line(bytes: &[u8]) -> Parsed {
    const WORD: &[u8] = b"connect ";
    let word = &bytes[..bytes.len().min(WORD.len())];
    if !word.eq_ignore_ascii_case(&WORD[..word.len()]) {
        return Parsed::Bad;
    }
    let Some(end) = bytes.iter().position(|&b| b == b'\n') else {
        return if bytes.len() < MAX_LINE {
            Parsed::Partial
        } else {
            Parsed::Bad
        };
    };
    let digits = bytes.get(WORD.len()..end).unwrap_or_default();
    let digits = digits.strip_suffix(b"\r").unwrap_or(digits);
    match std::str::from_utf8(digits)
        .ok()
        .filter(|d| d.bytes().all(|b| b.is_ascii_digit()))
    {
        Some(d) => match d.parse::<u32>() {
            Ok(port) => Parsed::Port(Port::new(port), end + 1),
            Err(_) => Parsed::Bad,
        },
        None => Parsed::Bad,
    }
}

/// Writes the OK line. It is the first thing that this socket is sent, so there is room for it:
/// false if there is not, because then a program plays tricks. One that has already gone needs no
/// answer, and what it wrote is still delivered.
pub(crate) fn write_ok(socket: impl AsFd, port: Port) -> bool {
    let line = format!("OK {}\n", port.get());
    let flags = net::SendFlags::NOSIGNAL | net::SendFlags::DONTWAIT;
    match net::send(socket, line.as_bytes(), flags) {
        Ok(n) => n == line.len(),
        Err(Errno::PIPE | Errno::CONNRESET) => true,
        Err(_) => false,
    }
}

/// The socket of the program that serves `port` on the host.
pub(crate) fn service_path(base: &Path, port: Port) -> PathBuf {
    let mut path = base.as_os_str().to_owned();
    path.push(format!("_{}", port.get()));
    path.into()
}

/// Connects to the program that serves `port` on the host.
pub(crate) fn connect(base: &Path, port: Port, kind: SocketType) -> Attempt {
    let path = service_path(base, port);
    let address = match SocketAddrUnix::new(&path) {
        Ok(address) => address,
        Err(_) => {
            return Attempt::Refused(std::io::Error::new(
                std::io::ErrorKind::InvalidInput,
                format!(
                    "path too long for a socket address (107 bytes): {}",
                    path.display()
                ),
            ));
        }
    };
    let socket: OwnedFd = match net::socket_with(
        AddressFamily::UNIX,
        kind,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    ) {
        Ok(socket) => socket,
        Err(e) => return Attempt::Refused(e.into()),
    };
    if kind == SocketType::SEQPACKET && !prepare(&socket) {
        return Attempt::Refused(std::io::ErrorKind::Unsupported.into());
    }
    match net::connect(&socket, &address) {
        Ok(()) => Attempt::Ready(socket),
        Err(Errno::INPROGRESS) => Attempt::InProgress(socket),
        Err(Errno::AGAIN) => Attempt::Later,
        Err(e) => Attempt::Refused(e.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_line_is_parsed_whole_or_not_at_all() {
        let port = |p, n| Parsed::Port(Port::new(p), n);
        assert_eq!(parse_line(b"CONNECT 1024\n"), port(1024, 13));
        assert_eq!(parse_line(b"connect 7\r\nrest"), port(7, 11));
        assert_eq!(parse_line(b"CONNECT 4294967295\r\n"), port(u32::MAX, 20));
        for partial in [&b""[..], b"C", b"CONNECT", b"CONNECT ", b"CONNECT 12"] {
            assert_eq!(parse_line(partial), Parsed::Partial, "{partial:?}");
        }
        for bad in [
            &b"GET / HTTP/1.1\r\n"[..],
            b"CONNECT \n",
            b"CONNECT -1\n",
            b"CONNECT +1\n",
            b"CONNECT 4294967296\n",
            b"CONNECT 1 2\n",
            b"CONNECT\t1\n",
            b"\n",
            b"CONNECT 00000000000000",
        ] {
            assert_eq!(parse_line(bad), Parsed::Bad, "{bad:?}");
        }
    }

    #[test]
    fn the_payload_behind_the_newline_stays_in_the_socket() {
        let (mut a, mut b) = UnixStream::pair().unwrap();
        a.write_all(b"CONNECT 5").unwrap();
        assert_eq!(read_line(&b), Line::Partial);
        a.write_all(b"2\nhello").unwrap();
        assert_eq!(read_line(&b), Line::Connect(Port::new(52)));
        let mut rest = [0; 5];
        b.read_exact(&mut rest).unwrap();
        assert_eq!(&rest, b"hello");
    }

    #[test]
    fn a_program_that_leaves_is_noticed() {
        let (mut a, b) = UnixStream::pair().unwrap();
        a.write_all(b"CONN").unwrap();
        drop(a);
        assert_eq!(read_line(&b), Line::Partial);
        let (a, b) = UnixStream::pair().unwrap();
        drop(a);
        assert!(matches!(read_line(&b), Line::Bad(_)));
    }

    #[test]
    fn a_path_too_long_is_named() {
        let base = PathBuf::from(format!("/tmp/{}", "x".repeat(104)));
        let Attempt::Refused(e) = connect(&base, Port::new(1), SocketType::STREAM) else {
            panic!("connected")
        };
        assert!(e.to_string().contains("too long"), "{e}");
    }
}
