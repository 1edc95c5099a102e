//! How the guest reaches host programs and they reach the guest.

use std::path::PathBuf;
use std::sync::Arc;

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use zerosock_proto::wire::vsock::SocketType;
use zerosock_proto::{Instant, Port};
use zerosock_sys::PeerFd;

use super::forwarded::Forwarded;
use crate::device::host_sockets::HostSocket;
use crate::device::host_sockets::hybrid::{self, Services};

/// How the guest reaches host programs and they reach the guest.
#[derive(Debug)]
pub(crate) enum HostAccess {
    /// Hybrid vsock: Unix sockets of host programs, and a listener if programs may connect.
    Hybrid {
        services: Services,
        listener: Option<PeerFd>,
        /// The same for messages, if enabled: sockets of type SOCK_SEQPACKET.
        messages: Option<(Services, Option<PeerFd>)>,
    },
    /// The machine's own AF_VSOCK: the CID to connect to, and listeners with their ports.
    Forward {
        cid: u32,
        listeners: Vec<(u32, OwnedFd)>,
    },
    /// No host side: the guest reaches siblings only.
    None,
}

/// A listening socket on the host.
#[derive(Debug)]
pub(in crate::device) struct ListeningSocket<'a> {
    pub(in crate::device) socket: BorrowedFd<'a>,
    pub(in crate::device) socket_type: SocketType,
    /// The port of the guest; `None`: programs name it in their CONNECT lines.
    pub(in crate::device) port: Option<Port>,
}

impl HostAccess {
    /// The listening sockets, with their keys in the poller.
    pub(in crate::device) fn listeners(&self) -> impl Iterator<Item = (u32, ListeningSocket<'_>)> {
        let end = match self {
            HostAccess::Forward { listeners, .. } => listeners.len() as u32,
            _ => 2,
        };
        (0..end).filter_map(|key| Some((key, self.listener(key)?)))
    }

    /// The listening socket with this key.
    pub(in crate::device) fn listener(&self, key: u32) -> Option<ListeningSocket<'_>> {
        let (socket, socket_type, port) = match (self, key) {
            (HostAccess::Hybrid { listener, .. }, 0) => {
                (listener.as_ref()?.as_fd(), SocketType::Stream, None)
            }
            (HostAccess::Hybrid { messages, .. }, _) => {
                let (_, listener) = messages.as_ref()?;
                (listener.as_ref()?.as_fd(), SocketType::SeqPacket, None)
            }
            (HostAccess::Forward { listeners, .. }, _) => {
                let (port, listener) = listeners.get(key as usize)?;
                let port = Some(Port::new(*port));
                (listener.as_fd(), SocketType::Stream, port)
            }
            (HostAccess::None, _) => return None,
        };
        Some(ListeningSocket {
            socket,
            socket_type,
            port,
        })
    }

    /// The socket of the program that serves `port`, for the log.
    pub(crate) fn service_path(&self, port: Port, messages: bool) -> Option<PathBuf> {
        let services = match self {
            HostAccess::Hybrid {
                messages: Some((services, _)),
                ..
            } if messages => services,
            HostAccess::Hybrid { services, .. } if !messages => services,
            _ => return None,
        };
        Some(hybrid::service_path(services.base(), port))
    }

    /// A copy without the listeners: for connections from the guest only.
    pub(crate) fn outward(&self) -> HostAccess {
        match self {
            HostAccess::Hybrid {
                services, messages, ..
            } => HostAccess::Hybrid {
                services: services.base().to_owned().into(),
                listener: None,
                messages: messages
                    .as_ref()
                    .map(|(services, _)| (services.base().to_owned().into(), None)),
            },
            HostAccess::Forward { cid, .. } => HostAccess::Forward {
                cid: *cid,
                listeners: Vec::new(),
            },
            HostAccess::None => HostAccess::None,
        }
    }
}

/// A host program that has not sent its complete CONNECT line yet.
#[derive(Debug)]
pub(crate) struct Handshake {
    pub(in crate::device) socket: HostSocket,
    pub(in crate::device) socket_type: SocketType,
    pub(in crate::device) deadline: Instant,
}

/// A host program that connects to the guest.
#[derive(Debug)]
pub(crate) struct Caller {
    pub(in crate::device) socket: HostSocket,
    pub(in crate::device) socket_type: SocketType,
    /// The guest's port.
    pub(in crate::device) to: Port,
    /// The program sent CONNECT and waits for the OK line.
    pub(in crate::device) wants_ok: bool,
    /// The rule that the connection is made by, if it is.
    pub(in crate::device) forwarded: Option<Box<Forwarded>>,
}

/// A client of a listening rule, on its way to the device that it is connected to.
#[derive(Debug)]
pub(crate) struct Client {
    /// Counts against the account of the listeners.
    pub(crate) socket: HostSocket,
    pub(crate) socket_type: SocketType,
    /// The port of the guest.
    pub(crate) to: Port,
    pub(crate) forwarded: Box<Forwarded>,
    /// The number of clones is the number of clients on their way.
    pub(crate) _under_way: Arc<()>,
}
