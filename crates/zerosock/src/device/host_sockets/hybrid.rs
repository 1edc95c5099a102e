//! Hybrid vsock: the convention by which host programs reach a guest over Unix sockets.
//!
//! A host program connects to `uds_path`, writes `CONNECT <port>\n`, and reads
//! `OK <port>\n` once the guest has accepted; a refusal closes the socket. A guest that connects
//! to port P of the host reaches the program that listens on `uds_path_P`. Bytes after the newline
//! are payload: the line is found with `MSG_PEEK` and only the line is read, so that the payload
//! stays in the socket, from where it is received into guest memory.
//!
//! For messages the sockets are of type SOCK_SEQPACKET, and each line is a packet of its own. A
//! receive returns 0 both for an empty packet and for end of file. With SO_PASSCRED the kernel adds
//! credentials to every packet but not to the end of file, and sets MSG_CTRUNC if there is no room
//! for them: that tells the two apart.

use super::{Attempt, HostSocket};
use rustix::fd::AsFd;
use rustix::io::Errno;
use rustix::net::{self, RecvFlags, SocketAddrUnix, SocketType};
use std::io::{self, IoSliceMut};
use std::path::{Path, PathBuf};
use zerosock_proto::Port;
use zerosock_proto::wire::vsock as wire;
use zerosock_sys::account::Account;
use zerosock_sys::socket_path;

/// Longest CONNECT line with its newline, as in Firecracker and vhost-device-vsock.
const MAX_LINE: usize = 32;

/// Which port the OK line names.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum OkConvention {
    /// The guest's port, as vhost-device-vsock does.
    #[default]
    GuestPort,
    /// The port that was assigned on the host side, as Firecracker and cloud-hypervisor do.
    HostPort,
}

/// The result of reading the CONNECT line.
#[derive(Debug, Eq, PartialEq)]
pub(crate) enum Line {
    /// The whole line was read: connect to this port.
    Connect(Port),
    /// The line is incomplete.
    Partial,
    /// Not a CONNECT line, or the program has gone.
    Bad(&'static str),
}

impl Line {
    /// The program shut down sending, or closed its socket, before the line was complete.
    pub(crate) const CLOSED: Line = Line::Bad("closed before its CONNECT line was complete");
}

/// Reads the CONNECT line from `socket` and no byte after it. In a socket of packets the line must be the
/// whole first packet. An end of file behind an incomplete line of a stream is reported as
/// [`Line::Partial`]: the poller tells that.
pub(crate) fn read_line(socket: &HostSocket, socket_type: wire::SocketType) -> Line {
    match socket_type {
        wire::SocketType::SeqPacket => read_packet(socket),
        _ => read_stream(socket),
    }
}

fn read_stream(socket: &HostSocket) -> Line {
    let mut line = [0u8; MAX_LINE];
    let seen = match net::recv(socket, &mut line[..], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
        Ok((_, 0)) => return Line::CLOSED,
        Ok((_, n)) => n,
        Err(Errno::AGAIN | Errno::INTR) => return Line::Partial,
        Err(_) => return Line::Bad("failed before its CONNECT line was complete"),
    };
    let parsed = parse_line(&line[..seen]);
    if let Parsed::Port(_, len) = parsed {
        // Read exactly the line, which the peek has shown to be there.
        match socket.recv(&mut line[..len]) {
            Ok(n) if n == len => {}
            _ => return Line::Bad("the CONNECT line could not be read"),
        }
    }
    match parsed {
        Parsed::Port(port, _) => Line::Connect(port),
        Parsed::Partial => Line::Partial,
        Parsed::Bad => Line::Bad("the first line is not CONNECT <port>"),
    }
}

fn read_packet(socket: &HostSocket) -> Line {
    // One more byte detects a longer packet.
    let mut line = [0u8; MAX_LINE + 1];
    let seen = match socket.recv(&mut line) {
        Ok(0) => return Line::CLOSED,
        Ok(n) => n,
        Err(Errno::AGAIN | Errno::INTR) => return Line::Partial,
        Err(_) => return Line::Bad("failed before its CONNECT line was complete"),
    };
    match parse_line(&line[..seen]) {
        Parsed::Port(port, len) if len == seen && configure_packets(socket) => Line::Connect(port),
        _ => Line::Bad("the first packet is not CONNECT <port>"),
    }
}

/// Enables the distinction of empty packets from end of file, and enlarges the send buffer.
pub(crate) fn configure_packets(socket: impl AsFd) -> bool {
    // Best effort: a packet that does not fit is reported when it is sent.
    let _ = net::sockopt::set_socket_send_buffer_size(&socket, LONGEST);
    net::sockopt::set_socket_passcred(&socket, true).is_ok()
}

/// Send buffer size that is requested: the longest packet a socket should take.
const LONGEST: usize = 1 << 20;

/// The next item in a socket of packets.
#[derive(Debug, Eq, PartialEq)]
pub(crate) enum Ahead {
    /// A packet of this many bytes, possibly 0.
    Message(usize),
    Nothing,
    EndOfFile,
    /// The program has gone.
    Gone,
    /// An earlier datagram could not be delivered, or the like: there may be others.
    Failed,
}

/// Inspects the next packet without reading it. A socket of datagrams has no end of file, and an error
/// of it is over once it was returned here.
pub(crate) fn look_ahead(socket: &HostSocket) -> Ahead {
    let datagrams = socket.has_datagrams();
    let mut byte = [0u8; 1];
    let mut slices = [IoSliceMut::new(&mut byte)];
    let flags = RecvFlags::PEEK | RecvFlags::TRUNC | RecvFlags::DONTWAIT;
    let mut nothing = net::RecvAncillaryBuffer::default();
    match net::recvmsg(socket, &mut slices, &mut nothing, flags) {
        Ok(got) if got.bytes > 0 || datagrams || got.flags.contains(net::ReturnFlags::CTRUNC) => {
            Ahead::Message(got.bytes)
        }
        Ok(_) => Ahead::EndOfFile,
        Err(Errno::AGAIN | Errno::INTR) => Ahead::Nothing,
        Err(_) if datagrams => Ahead::Failed,
        Err(_) => Ahead::Gone,
    }
}

#[derive(Debug, Eq, PartialEq)]
enum Parsed {
    Port(Port, usize),
    Partial,
    Bad,
}

/// Parses the CONNECT line as the other programs of this convention do: two words, in any case, with blanks
/// before, between and after them; further words are ignored.
fn parse_line(bytes: &[u8]) -> Parsed {
    const WORD: &[u8] = b"connect";
    let Some(end) = bytes.iter().position(|&byte| byte == b'\n') else {
        // A program of another protocol is told as soon as its first bytes show it.
        let word = bytes.trim_ascii_start();
        let seen = word.len().min(WORD.len());
        let may_follow = word.get(WORD.len()).is_none_or(u8::is_ascii_whitespace);
        let matches = word[..seen].eq_ignore_ascii_case(&WORD[..seen]) && may_follow;
        return match matches && bytes.len() < MAX_LINE {
            true => Parsed::Partial,
            false => Parsed::Bad,
        };
    };
    let words = bytes[..end].split(u8::is_ascii_whitespace);
    let mut words = words.filter(|word| !word.is_empty());
    if !words
        .next()
        .is_some_and(|word| word.eq_ignore_ascii_case(WORD))
    {
        return Parsed::Bad;
    }
    let port = words.next().and_then(|word| std::str::from_utf8(word).ok());
    // `u32::from_str` accepts a plus sign and leading zeros, as those programs do.
    match port.map(str::parse) {
        Some(Ok(port)) => Parsed::Port(Port::new(port), end + 1),
        _ => Parsed::Bad,
    }
}

/// Writes the OK line. It is the first data on this socket, so it fits; returns false if it does
/// not, because then the program has shrunk the socket's buffer. A program that has already gone
/// needs no answer, and what it wrote is still delivered.
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

/// The sockets of host programs: the one for port P is at the base path with `_P` appended.
#[derive(Debug)]
pub(crate) struct Services {
    base: PathBuf,
}

impl From<PathBuf> for Services {
    fn from(base: PathBuf) -> Services {
        Services { base }
    }
}

impl Services {
    /// The path without a port.
    pub(crate) fn base(&self) -> &Path {
        &self.base
    }

    /// Connects to the program that serves `port`.
    pub(crate) fn connect(&self, port: Port, kind: SocketType, account: &Account) -> Attempt {
        let path = service_path(&self.base, port);
        connect_to(&path, kind, account).unwrap_or_else(Attempt::Refused)
    }
}

/// Connects to the socket at `path`.
pub(super) fn connect_to(path: &Path, kind: SocketType, account: &Account) -> io::Result<Attempt> {
    SocketAddrUnix::new(path).map_err(|_| {
        let path = path.display();
        let text = format!("path too long for a socket address (107 bytes): {path}");
        io::Error::new(io::ErrorKind::InvalidInput, text)
    })?;
    let Some(found) = socket_path::find_cached(path)? else {
        return Ok(Attempt::NeedsConnector);
    };
    let socket = HostSocket::unconnected(kind, account)?;
    if kind == SocketType::SEQPACKET && !configure_packets(&socket) {
        return Err(io::ErrorKind::Unsupported.into());
    }
    if kind == SocketType::DGRAM {
        // An address chosen by the kernel, so that the program can answer.
        net::bind(&socket, &SocketAddrUnix::new_unnamed())?;
    }
    match net::connect(&socket, found.address()) {
        Ok(()) => Ok(Attempt::Ready(socket)),
        Err(Errno::INPROGRESS) => Ok(Attempt::InProgress(socket)),
        Err(Errno::AGAIN) => Ok(Attempt::Later),
        Err(e) => Err(e.into()),
    }
}

#[cfg(fuzzing)]
pub(crate) mod fuzz {
    use super::{MAX_LINE, Parsed, parse_line};

    /// A CONNECT line that arrives byte by byte: it is incomplete up to its newline, and then not read past it.
    pub fn connect_line(bytes: &[u8]) {
        let bytes = &bytes[..bytes.len().min(MAX_LINE)];
        let Parsed::Port(port, len) = parse_line(bytes) else {
            return;
        };
        assert!(
            len <= bytes.len() && bytes[len - 1] == b'\n' && !bytes[..len - 1].contains(&b'\n')
        );
        assert!(
            matches!(parse_line(&bytes[..len]), Parsed::Port(other, all) if (other, all) == (port, len))
        );
        for part in 0..len {
            assert!(
                matches!(parse_line(&bytes[..part]), Parsed::Partial),
                "refused too early"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::socket::tests::pair;
    use super::*;
    use std::fs::Permissions;
    use std::io::Write;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::os::unix::net::UnixListener;
    use zerosock_sys::account::Budget;

    fn attempt(services: &Services, port: u32) -> Attempt {
        let account = Budget::unlimited().account();
        services.connect(Port::new(port), SocketType::STREAM, &account)
    }

    /// The forms of the line, and what the other programs of this convention make of each (F:
    /// Firecracker, V: vhost-device-vsock, C: cloud-hypervisor; a small letter: refused).
    ///
    /// F and V read ten bytes, then single bytes up to a newline or 32 bytes, split at Unicode white space,
    /// compare the first word with `connect` in lower case, and parse the second as a `u32`. C compares with
    /// `connect ` and `CONNECT `, and parses what follows up to the newline as a `u32`, without blanks at
    /// its ends. Differences from F and V: only ASCII white space separates words, the first newline ends
    /// the line even where F and V would still take it for a blank, and 32 bytes without a newline are no
    /// line.
    #[test]
    fn forms_of_the_line_are_those_of_other_programs() {
        let accepted: [(&[u8], u32); 21] = [
            (b"CONNECT 7007\n", 7007),             // FVC
            (b"connect 7007\n", 7007),             // FVC
            (b"CoNNect 7007\n", 7007),             // FVc
            (b"CONNECT 7007\r\n", 7007),           // FVC
            (b"CONNECT 7007 \n", 7007),            // FVC
            (b"CONNECT 7007\t\n", 7007),           // FVC
            (b"CONNECT 7007 \r\n", 7007),          // FVC
            (b"CONNECT  7007\n", 7007),            // FVC
            (b"CONNECT \t7007\n", 7007),           // FVC
            (b"CONNECT\t7007\n", 7007),            // FVc
            (b"CONNECT\r7007\n", 7007),            // FVc
            (b" CONNECT 7007\n", 7007),            // FVc
            (b"\t \tCONNECT 7007\n", 7007),        // FVc
            (b"CONNECT 7007 x\n", 7007),           // FVc
            (b"CONNECT 7007 7008 7009\n", 7007),   // FVc
            (b"CONNECT +7007\n", 7007),            // FVC
            (b"CONNECT 0007007\n", 7007),          // FVC
            (b"CONNECT 0\n", 0),                   // FVC
            (b"CONNECT 1\n", 1),                   // FVC
            (b"CONNECT 4294967295\n", u32::MAX),   // FVC
            (b"CONNECT 4294967295\r\n", u32::MAX), // FVC
        ];
        for (line, port) in accepted {
            let named = String::from_utf8_lossy(line).into_owned();
            let want = Parsed::Port(Port::new(port), line.len());
            assert_eq!(parse_line(line), want, "{named:?}");
            // Bytes of the guest follow, a second line among them.
            let mut more = line.to_vec();
            more.extend_from_slice(b"CONNECT 1\n\0\xff");
            more.truncate(MAX_LINE);
            assert_eq!(parse_line(&more), want, "{named:?} and payload");
            for end in 0..line.len() {
                assert_eq!(
                    parse_line(&line[..end]),
                    Parsed::Partial,
                    "{:?}",
                    &line[..end]
                );
            }
        }
        for refused in [
            &b"CONNECT\n"[..],
            b"CONNECT \n",
            b" \n",
            b"\n",
            b"\nCONNECT 7007\n", // FVc
            b"CONNECT\n7007\n",  // FVc
            b"CONNECT -1\n",
            b"CONNECT 4294967296\n",
            b"CONNECT 0x7\n",
            b"CONNECT 7,\n",
            b"CONNECT x 7007\n",
            b"CONNECT7007\n",
            b"CONNECTS 7007\n",
            b"7007\n",
            b"CONNECT \xff7\n",
            b"CONNECT\xc2\xa07007\n", // FVc: a no-break space
        ] {
            assert_eq!(parse_line(refused), Parsed::Bad, "{refused:?}");
        }
        // Refused before there is a newline.
        for early in [
            &b"G"[..],
            b"\0",
            b"connet",
            b" x",
            b"CONNECT7",
            &[b' '; MAX_LINE],
            &b"CONNECT 000000000000000000000007"[..],
        ] {
            assert_eq!(parse_line(early), Parsed::Bad, "{early:?}");
        }
        for partial in [
            &b""[..],
            b" ",
            b"\t",
            b"C",
            b" conn",
            b"CONNECT",
            b"CONNECT x",
        ] {
            assert_eq!(parse_line(partial), Parsed::Partial, "{partial:?}");
        }
    }

    #[test]
    fn the_payload_behind_the_newline_stays_in_the_socket() {
        let (b, mut a) = pair();
        a.write_all(b" CONNECT  5").unwrap();
        assert_eq!(read_stream(&b), Line::Partial);
        a.write_all(b"2 x\nhello").unwrap();
        assert_eq!(read_stream(&b), Line::Connect(Port::new(52)));
        let mut rest = [0; 8];
        assert_eq!(b.recv(&mut rest), Ok(5));
        assert_eq!(&rest[..5], b"hello");
    }

    #[test]
    fn read_line_reports_a_closed_program() {
        let (b, mut a) = pair();
        a.write_all(b"CONN").unwrap();
        drop(a);
        assert_eq!(read_stream(&b), Line::Partial);
        let (b, a) = pair();
        drop(a);
        assert!(matches!(read_stream(&b), Line::Bad(_)));
    }

    #[test]
    fn overlong_path_is_named_in_the_error() {
        let base = PathBuf::from(format!("/tmp/{}", "x".repeat(104)));
        let Attempt::Refused(e) = attempt(&Services::from(base), 1) else {
            panic!("connected")
        };
        assert!(e.to_string().contains("too long"), "{e}");
    }

    /// The result of an attempt after the list of mounts was read.
    fn decided(services: &Services, port: u32) -> Attempt {
        for _ in 0..100 {
            socket_path::learn_mounts().unwrap();
            let attempt = attempt(services, port);
            // A mount that comes or goes anywhere in the system empties the list.
            if !matches!(attempt, Attempt::NeedsConnector) {
                return attempt;
            }
        }
        Attempt::NeedsConnector
    }

    #[test]
    fn links_are_left_to_the_connector_and_all_else_is_decided_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().join("vm");
        let services = Services::from(base.clone());
        let _listener = UnixListener::bind(service_path(&base, Port::new(1))).unwrap();
        if matches!(decided(&services, 1), Attempt::NeedsConnector) {
            return println!("SKIPPED: the temporary directory is not on a local file system");
        }
        for mode in [0o755, 0o720, 0o702] {
            std::fs::set_permissions(dir.path(), Permissions::from_mode(mode)).unwrap();
            assert!(matches!(decided(&services, 1), Attempt::Ready(_)));
        }

        let link = service_path(&base, Port::new(2));
        symlink(service_path(&base, Port::new(1)), &link).unwrap();
        assert!(matches!(decided(&services, 2), Attempt::NeedsConnector));

        std::fs::write(service_path(&base, Port::new(3)), "no socket").unwrap();
        let Attempt::Refused(error) = decided(&services, 3) else {
            panic!("connected to a file")
        };
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
        let Attempt::Refused(error) = decided(&services, 4) else {
            panic!("connected to nothing")
        };
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
