//! Joining two sockets, and why it is refused.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, Release};

use rustix::net::sockopt::{socket_cookie, socket_domain, socket_type};
use rustix::net::{AddressFamily, SocketType};
use zerosock_sys::bpf::BpfError;
use zerosock_sys::tcp_written;
use zerosock_sys::vsock::buffer_size;

use super::maps::{MapEntries, Maps, Side};
use super::pair::{RedirectedPair, Redirection, SCRATCH};

/// The maps and the program of a relay. Clones are the same.
#[derive(Clone, Debug)]
pub struct RelayMap(Arc<Maps>);

/// Directions in which a pair redirects.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum Directions {
    /// Both.
    Both,
    /// From the first socket to the second.
    FromA,
    /// From the second socket to the first.
    FromB,
}

/// Why two sockets cannot be joined, with the sockets.
#[derive(thiserror::Error)]
#[error("{error}")]
pub struct InsertError<S> {
    /// The reason.
    pub error: Refusal,
    /// The sockets, as they were.
    pub sockets: [S; 2],
}

impl<S> std::fmt::Debug for InsertError<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("InsertError").field(&self.error).finish()
    }
}

/// Why two sockets cannot be joined.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The map has as many pairs as it was made for.
    #[error("sockmap: no room for another pair")]
    Full,
    /// A stream would have to become datagrams.
    #[error("sockmap: a stream cannot be redirected into a datagram socket")]
    Mixed,
    /// A TCP socket as a source. The kernel gives a program each segment as it came: one that repeats bytes
    /// would be redirected as a whole, so that these bytes arrived twice.
    #[error(
        "sockmap: socket {0:?} is TCP, which can be no source: bytes of overlapping segments would \
         arrive twice"
    )]
    TcpSource(Side),
    /// A vsock socket as a source, with so large a receive buffer that one read does not take all of it:
    /// the kernel would redirect a packet that was read in part once more.
    #[error(
        "sockmap: socket {side:?} has a receive buffer of {bytes} bytes: at most {SCRATCH} can be read at once"
    )]
    Buffer {
        /// Which socket.
        side: Side,
        /// Its receive buffer (SO_VM_SOCKETS_BUFFER_SIZE).
        bytes: u64,
    },
    /// A socket of SOCK_SEQPACKET: the kernel would not keep the bounds of its messages.
    #[error("sockmap: socket {0:?} has messages (SOCK_SEQPACKET), whose bounds would be lost")]
    Messages(Side),
    /// A stream into a socket that is not TCP: the kernel does not tell when such a target has taken
    /// what was redirected, so that the end of the stream could not be passed on behind it.
    #[error(
        "sockmap: socket {0:?} is not TCP, so that the end of a stream into it could not be passed on"
    )]
    NoCount(Side),
    /// A Unix socket of SOCK_STREAM. When its peer shuts down, the kernel takes it out of all maps and
    /// discards the bytes that it holds for it: streams would lose bytes.
    #[error("sockmap: socket {0:?} is a Unix stream, which would lose bytes at a half-close")]
    UnixStream(Side),
    /// The kernel cannot redirect a socket of this kind, or in this state: TCP must be connected with
    /// neither end closed, Unix sockets need Linux 5.15, and vsock needs 6.4.
    #[error(
        "sockmap: this kernel cannot redirect socket {side:?}, or it is not connected both ways: {error}"
    )]
    Unsupported {
        /// Which socket.
        side: Side,
        /// The error of bpf(2).
        error: io::Error,
    },
    /// A call failed.
    #[error("sockmap: socket {side:?}: {error}")]
    System {
        /// For which socket.
        side: Side,
        /// The error.
        error: io::Error,
    },
    /// A Unix socket as a source needs a program of its own, which cannot be made.
    #[error("sockmap: the program for Unix socket {side:?}: {error}")]
    Program {
        /// Which socket.
        side: Side,
        /// The reason.
        error: BpfError,
    },
}

/// What a socket is, as far as it matters here.
#[derive(Copy, Clone, Debug)]
struct Kind {
    datagrams: bool,
    unix: bool,
    /// TCP: bytes that have been written to it.
    written: Option<u64>,
}

impl RelayMap {
    /// Maps for `pairs` pairs, with the program loaded.
    ///
    /// # Errors
    /// See [`BpfError`], which says which capability is missing.
    pub fn new(pairs: u32) -> Result<RelayMap, BpfError> {
        Ok(RelayMap(Arc::new(Maps::new(pairs)?)))
    }

    /// Joins two connected sockets. A source is UDP, a Unix datagram socket, or vsock into TCP, which has
    /// no direction back. The direction from a vsock socket begins with the first [`RedirectedPair::turn`] for
    /// it; until then its bytes wait. Its receive buffer must not grow later.
    ///
    /// `limit` bounds the bytes of each direction that may be under way inside the kernel. What
    /// exceeds it passes through the buffer of the caller: slower, and with back-pressure.
    ///
    /// # Errors
    /// See [`Refusal`]; the sockets come back.
    pub fn insert_pair<S: AsFd>(
        &self,
        a: S,
        b: S,
        limit: u64,
        directions: Directions,
    ) -> Result<RedirectedPair<S>, InsertError<S>> {
        match self.insert(&a, &b, limit, directions) {
            Ok((ends, states)) => Ok(RedirectedPair::new(ends, states, [a, b])),
            Err(error) => Err(InsertError {
                error,
                sockets: [a, b],
            }),
        }
    }

    fn insert<S: AsFd>(
        &self,
        a: &S,
        b: &S,
        limit: u64,
        directions: Directions,
    ) -> Result<(MapEntries, [Redirection; 2]), Refusal> {
        let sockets = [a, b];
        let kinds = [Kind::of(Side::A, a)?, Kind::of(Side::B, b)?];
        let sides: &[Side] = match directions {
            Directions::Both => &[Side::A, Side::B],
            Directions::FromA => &[Side::A],
            Directions::FromB => &[Side::B],
        };
        // From here on whatever is in the maps is removed with `ends`.
        let mut ends = MapEntries {
            maps: self.0.clone(),
            ends: [None, None],
        };
        let mut states = [Redirection::none(), Redirection::none()];
        for side in sides.iter().copied() {
            let (source, target) = (kinds[side.index()], kinds[side.other().index()]);
            if target.datagrams && !source.datagrams {
                return Err(Refusal::Mixed);
            }
            let system = |error: rustix::io::Errno| Refusal::System {
                side,
                error: error.into(),
            };
            if !source.datagrams {
                if source.written.is_some() {
                    return Err(Refusal::TcpSource(side));
                }
                let bytes = buffer_size(sockets[side.index()]);
                let bytes = bytes.map_err(|error| Refusal::System { side, error })?;
                if bytes > SCRATCH as u64 {
                    return Err(Refusal::Buffer { side, bytes });
                }
            }
            let cookie = socket_cookie(sockets[side.index()]).map_err(system)?;
            let end = self.0.allocate(cookie).ok_or(Refusal::Full)?;
            let number = end.number;
            ends.ends[side.index()] = Some(end);
            // Datagrams need no order. A vsock socket begins with a turn, which reads its queue.
            let allowance = if source.datagrams { limit } else { 0 };
            let slot = self.0.slot(number);
            slot.whole.store(source.datagrams.into(), Relaxed);
            slot.allowance.store(allowance, Relaxed);
            slot.cookie.store(cookie, Release);
            let numbered = self.0.numbers.insert(cookie, number);
            numbered.map_err(|error| Refusal::System { side, error })?;
            let other = side.other();
            let targeted = self.0.targets.insert(number, sockets[other.index()]);
            targeted.map_err(|error| Refusal::of(other, error))?;
            if target.written.is_none() && !source.datagrams {
                return Err(Refusal::NoCount(other));
            }
            states[side.index()] = Redirection::new(source.datagrams, limit, target.written);
        }
        for side in sides.iter().copied() {
            if let Some(end) = &mut ends.ends[side.index()] {
                let socket = sockets[side.index()];
                if kinds[side.index()].unix {
                    let own = self.0.program_for(end.cookie);
                    let own = own.map_err(|error| Refusal::Program { side, error })?;
                    let own = end.own.insert(own);
                    own.map().insert(0, socket)
                } else {
                    self.0.sources.map().insert(end.number, socket)
                }
                .map_err(|error| Refusal::of(side, error))?;
            }
        }
        Ok((ends, states))
    }
}

impl Kind {
    fn of(side: Side, socket: &impl AsFd) -> Result<Kind, Refusal> {
        let system = |error: rustix::io::Errno| Refusal::System {
            side,
            error: error.into(),
        };
        let kind = socket_type(socket).map_err(system)?;
        if kind == SocketType::SEQPACKET {
            return Err(Refusal::Messages(side));
        }
        let datagrams = kind == SocketType::DGRAM;
        let unix = socket_domain(socket).map_err(system)? == AddressFamily::UNIX;
        if unix && !datagrams {
            return Err(Refusal::UnixStream(side));
        }
        Ok(Kind {
            datagrams,
            unix,
            written: tcp_written(socket).ok(),
        })
    }
}

impl Refusal {
    fn of(side: Side, error: io::Error) -> Refusal {
        use rustix::io::Errno;
        match Errno::from_io_error(&error) {
            // ENODEV: a vsock socket without a transport, thus not connected.
            Some(Errno::OPNOTSUPP | Errno::INVAL | Errno::NODEV) => {
                Refusal::Unsupported { side, error }
            }
            _ => Refusal::System { side, error },
        }
    }
}
