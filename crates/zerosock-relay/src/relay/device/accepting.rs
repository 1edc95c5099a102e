//! Accepting connections, and joining those of two listeners.

use std::net::SocketAddr;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{SocketFlags, acceptfrom_with};
use zerosock_sys::vsock;
use zerosock_virtio::outbox::DeviceAddr;

use super::{Context, Listener, Message, RelayDevice, side};
use crate::relay::direction::Ready;
use crate::relay::pair::{Origin, SocketStage};
use crate::relay::socket::{Socket, SocketKind};

/// Connections that one listener accepts in a turn.
const ACCEPTS: usize = 64;

/// How long nothing is accepted when there is no descriptor or memory for a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Connections of one end that wait for one of the other, if both ends listen.
const MOST_WAITING: usize = 1024;

impl RelayDevice {
    /// Accepts what waits at a listener, within a budget.
    pub(super) fn accept(&mut self, index: usize, cx: &mut Context<'_>) {
        for _ in 0..ACCEPTS {
            let Some(listener) = self.listeners.get_mut(index).filter(|one| one.readable) else {
                return;
            };
            match accept_one(listener) {
                Ok((socket, source)) => {
                    let end = listener.end;
                    self.admit(end, socket, source, cx);
                }
                Err(Errno::AGAIN) => listener.readable = false,
                // The client is gone already, or the network had an error for it (accept(2)).
                Err(
                    Errno::INTR
                    | Errno::CONNABORTED
                    | Errno::PROTO
                    | Errno::NETDOWN
                    | Errno::NOPROTOOPT
                    | Errno::HOSTDOWN
                    | Errno::HOSTUNREACH
                    | Errno::NETUNREACH
                    | Errno::OPNOTSUPP,
                ) => {}
                Err(errno) => {
                    if let Some(suppressed) = self.plan.warnings.admit(std::time::Instant::now()) {
                        tracing::warn!(
                            suppressed,
                            "cannot accept a connection: {errno}; accepting again when there are \
                             descriptors and memory (see RLIMIT_NOFILE)"
                        );
                    }
                    self.paused = Some(cx.now + ACCEPT_PAUSE);
                    return;
                }
            }
            self.paused = None;
        }
    }

    /// Takes an accepted connection, or refuses it if there are too many.
    fn admit(&mut self, end: usize, socket: Socket, source: Origin, cx: &mut Context<'_>) {
        if !self.plan.admit() {
            self.counters.refused.add(1);
            socket.reset_on_close();
            return;
        }
        if self.plan.destinations.iter().all(Option::is_none) {
            return self.meet(end, socket, source, cx);
        }
        if self.workers > 1 {
            self.next_worker = (self.next_worker + 1) % self.workers;
            if self.next_worker != self.addr.worker {
                let to = DeviceAddr {
                    worker: self.next_worker,
                    number: self.addr.number,
                };
                cx.outbox.send(to, Message::Accepted(socket, source));
                return;
            }
        }
        self.begin(Some(socket), source, cx);
    }

    /// Joins a connection to the one of the other end that has waited longest.
    fn meet(&mut self, end: usize, socket: Socket, source: Origin, cx: &mut Context<'_>) {
        let Some((other, other_source)) = self.waiting[1 - end].pop_front() else {
            if self.waiting[end].len() < MOST_WAITING {
                self.waiting[end].push_back((socket, source));
            } else {
                self.counters.refused.add(1);
                self.plan.dismiss();
                socket.reset_on_close();
            }
            return;
        };
        // Two connections are one pair.
        self.plan.dismiss();
        let (sockets, source) = match end {
            0 => ([socket, other], source),
            _ => ([other, socket], other_source),
        };
        let sides = sockets.map(|socket| (side(socket, Ready::default()), SocketStage::Connected));
        self.add(sides, source, cx);
    }
}

fn accept_one(listener: &Listener) -> Result<(Socket, Origin), Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    if listener.kind == SocketKind::Vsock {
        let (fd, cid, port) = vsock::accept(&listener.fd)
            .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
        let socket = Socket::new(fd, listener.kind, true);
        return Ok((socket, Origin::Vsock { cid, port }));
    }
    let (fd, address) = acceptfrom_with(&listener.fd, flags)?;
    let source = match address.map(SocketAddr::try_from) {
        Some(Ok(address)) => Origin::Ip(address),
        _ => Origin::Unix,
    };
    let socket = Socket::new(fd, listener.kind, listener.refuses_rights);
    Ok((socket, source))
}
