//! The listening sockets of a device on the host.

use std::time::Duration;

use rustix::fd::{AsFd, BorrowedFd};
use rustix::io::Errno;
use rustix::net::SocketFlags;
use zerosock_proto::Port;
use zerosock_proto::wire::vsock::SocketType;
use zerosock_sys::PeerFd;
use zerosock_virtio::poller::Interest;

use super::state::timers::Timer;
use super::virtio::LISTENER;
use super::{Context, Device};
use crate::device::host_sockets::HostSocket;
use crate::device::state::host::{Caller, HostAccess};
use crate::stats::RefusalCause;

/// Pause after an accept that failed for lack of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Connections accepted per call.
const ACCEPT_BUDGET: usize = 64;

/// Poller keys of a hybrid device's listeners.
const STREAMS: u32 = 0;
const MESSAGES: u32 = 1;

impl Device {
    /// Adds the listeners to the poller. The worker that owns the device calls it once.
    pub(crate) fn listen(&mut self, cx: &Context<'_>) -> std::io::Result<()> {
        let watch = |listener: BorrowedFd<'_>, key| {
            let token = self.token(LISTENER, key);
            cx.poller.add(listener, token, Interest::Read)
        };
        match &self.host {
            HostAccess::Hybrid {
                listener, messages, ..
            } => {
                if let Some(listener) = listener {
                    watch(listener.as_fd(), STREAMS)?;
                }
                if let Some((_, Some(listener))) = messages {
                    watch(listener.as_fd(), MESSAGES)?;
                }
                Ok(())
            }
            HostAccess::Forward { listeners, .. } => {
                for (key, (_, listener)) in listeners.iter().enumerate() {
                    watch(listener.as_fd(), key as u32)?;
                }
                Ok(())
            }
            HostAccess::None => Ok(()),
        }
    }

    /// Removes the listeners from the poller. The reaper closes them later; until then they would
    /// be reported again and again.
    pub(super) fn stop_listening(&self, cx: &Context<'_>) {
        if let HostAccess::Hybrid {
            listener, messages, ..
        } = &self.host
        {
            let of_messages = messages.iter().flat_map(|(_, listener)| listener);
            for listener in listener.iter().chain(of_messages) {
                cx.poller.remove(listener);
            }
        }
    }

    /// Accepts pending connections of a listener, up to a budget.
    pub(crate) fn accept(&mut self, key: u32, cx: &mut Context<'_>) {
        if self.account.is_clogged() {
            // Closes of this account's earlier sockets are stuck: accept no more for now.
            self.timers.set(cx.now + ACCEPT_PAUSE, Timer::Accept(key));
            return;
        }
        for _ in 0..ACCEPT_BUDGET {
            let mut socket_type = SocketType::Stream;
            let found = match &self.host {
                HostAccess::Hybrid {
                    messages: Some((_, Some(listener))),
                    ..
                } if key == MESSAGES => {
                    socket_type = SocketType::SeqPacket;
                    Some((listener.as_fd(), None))
                }
                HostAccess::Hybrid { listener, .. } => {
                    listener.as_ref().map(|one| (one.as_fd(), None))
                }
                HostAccess::Forward { listeners, .. } => {
                    let of_port = listeners.get(key as usize);
                    of_port.map(|(port, listener)| (listener.as_fd(), Some(*port)))
                }
                HostAccess::None => None,
            };
            let Some((listener, port)) = found else {
                return;
            };
            let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
            match rustix::net::accept_with(listener, flags) {
                Ok(socket) => match (port, self.account.take_descriptors(1)) {
                    (_, Err(exceeded)) => {
                        // No HostSocket was made of it yet, so its close waits for the program
                        // only if descriptors are queued in it.
                        drop(PeerFd::from(socket).owned_by(&self.account));
                        cx.shared.counters.refuse(RefusalCause::Limit);
                        self.warn(&format!("host program refused: {exceeded}"));
                    }
                    (None, Ok(permit)) => {
                        let socket = HostSocket::accepted(socket, permit);
                        self.begin_handshake(socket, socket_type, cx);
                    }
                    (Some(port), Ok(permit)) => {
                        let socket = HostSocket::vsock(socket, permit);
                        let caller = Caller {
                            socket,
                            socket_type,
                            to: Port::new(port),
                            wants_ok: false,
                            forwarded: None,
                        };
                        self.call_guest(caller, false, cx);
                    }
                },
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(e) => {
                    // Most likely out of descriptors. The edge is used up: retry after a pause.
                    self.warn(&format!(
                        "cannot accept a connection of a host program: {e}"
                    ));
                    self.timers.set(cx.now + ACCEPT_PAUSE, Timer::Accept(key));
                    return;
                }
            }
        }
        // There may be more and the edge is used up: continue in the next turn.
        let next = cx.now + Duration::from_nanos(1);
        self.timers.set(next, Timer::Accept(key));
    }
}
