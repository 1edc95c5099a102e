//! A vhost-user front-end that sends given bytes.

use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use super::driver::Driver;
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use zerosock_sys::fd_passing;

use super::process::{DEADLINE, wait_until};

pub(crate) const GET_FEATURES: u32 = 1;
pub(crate) const SET_OWNER: u32 = 3;
pub(crate) const SET_MEM_TABLE: u32 = 5;
pub(crate) const SET_VRING_KICK: u32 = 12;
pub(crate) const SET_VRING_CALL: u32 = 13;
pub(crate) const SET_VRING_ERR: u32 = 14;
pub(crate) const SET_BACKEND_REQ_FD: u32 = 21;

/// How a front-end sends a descriptor.
#[derive(Copy, Clone, Debug)]
pub(crate) enum Way {
    /// With a complete message. The vring requests are about the first one.
    With(u32),
    /// With the first half of a message, before it disconnects.
    InHalfMessage,
    /// With an out-of-band byte before a message.
    WithUrgentByte,
}

pub(crate) const WAYS: [Way; 7] = [
    Way::With(SET_VRING_CALL),
    Way::With(SET_VRING_KICK),
    Way::With(SET_VRING_ERR),
    Way::With(SET_BACKEND_REQ_FD),
    Way::With(GET_FEATURES),
    Way::InHalfMessage,
    Way::WithUrgentByte,
];

pub(crate) struct RawFrontend(pub(crate) UnixStream);

impl RawFrontend {
    /// Waits until the daemon answers: the previous front-end may still be connected.
    pub(crate) fn connect(path: &Path) -> RawFrontend {
        let mut frontend = None;
        wait_until("a place for a front-end", || {
            let socket = UnixStream::connect(path).unwrap();
            socket.set_read_timeout(Some(DEADLINE)).unwrap();
            let raw = RawFrontend(socket);
            let served = raw.ask_features().is_some();
            frontend = served.then_some(raw);
            served
        });
        frontend.unwrap()
    }

    /// The answer to GET_FEATURES; `None` when the connection ends.
    pub(crate) fn ask_features(&self) -> Option<u64> {
        self.send(&message(GET_FEATURES, &[]), &[]).ok()?;
        self.answer()
    }

    /// The next answer with a number.
    pub(crate) fn answer(&self) -> Option<u64> {
        let mut answer = [0; 20];
        (&self.0).read_exact(&mut answer).ok()?;
        Some(u64::from_ne_bytes(answer[12..].try_into().unwrap()))
    }

    pub(crate) fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> std::io::Result<usize> {
        fd_passing::send(&self.0, &[IoSlice::new(bytes)], fds)
    }

    /// Sends descriptors and keeps no copies. With half a message, it disconnects.
    pub(crate) fn pass(self, way: Way, fds: Vec<OwnedFd>) -> Option<RawFrontend> {
        let borrowed: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        let mut with_message = &borrowed[..];
        if let Way::WithUrgentByte = way {
            send_urgent(&self.0, &borrowed).unwrap();
            with_message = &[];
        }
        let bytes = match way {
            Way::With(GET_FEATURES) | Way::WithUrgentByte => message(GET_FEATURES, &[]),
            Way::With(SET_MEM_TABLE) => {
                // One region: guest address, size, user address, offset.
                let table = [1, 0, 4096, 0x7000_0000_0000, 0];
                let table: Vec<u8> = table.into_iter().flat_map(u64::to_ne_bytes).collect();
                message(SET_MEM_TABLE, &table)
            }
            Way::With(request) => message(request, &0u64.to_ne_bytes()),
            Way::InHalfMessage => message(GET_FEATURES, &[])[..6].to_vec(),
        };
        assert_eq!(self.send(&bytes, with_message).unwrap(), bytes.len());
        (!matches!(way, Way::InHalfMessage)).then_some(self)
    }
}

/// Sends an out-of-band byte with descriptors. Without CONFIG_AF_UNIX_OOB, an ordinary one.
pub(crate) fn send_urgent(socket: &UnixStream, fds: &[BorrowedFd<'_>]) -> std::io::Result<usize> {
    let send = |flags| {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        sendmsg(socket, &[IoSlice::new(b"u")], &mut control, flags)
    };
    let sent = match send(SendFlags::OOB) {
        Err(Errno::OPNOTSUPP) => send(SendFlags::empty()),
        sent => sent,
    };
    Ok(sent?)
}

/// The front-end of a guest sends a message without an answer.
pub(crate) fn send_by(driver: &mut Driver, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
    let frontend = driver.frontend().expect("attached");
    frontend.send_raw(&message(request, payload), fds).unwrap();
}

/// A message of version 1.
pub(crate) fn message(request: u32, payload: &[u8]) -> Vec<u8> {
    let header = [request, 1, payload.len() as u32];
    let header = header.into_iter().flat_map(u32::to_ne_bytes);
    header.chain(payload.iter().copied()).collect()
}
