//! A vhost-user front-end for drivers outside of a VMM.
//!
//! A [`Frontend`] is one connected control socket. Every call sends one request. It returns when
//! the request is answered or, if the protocol has no answer to it, when the request is written to
//! the socket. Each call ends within the time-out given at [`Frontend::connect`], and before the deadline of
//! [`Frontend::set_deadline`] if there is one.
//!
//! # Invariants
//!
//! - The device is not trusted: version, request code, reply flag and size of a reply are checked
//!   before its payload is used. A bad reply is a [`FrontendError::Protocol`], never a panic.
//!
//! Clauses cited are those of QEMU's `docs/interop/vhost-user.rst`.

mod network;
mod shared;

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::net::SocketType;
use vhost::vhost_user::message::{
    FrontendReq, MAX_ATTACHED_FD_ENTRIES, MAX_MSG_SIZE, VhostUserConfig, VhostUserConfigFlags,
    VhostUserLog, VhostUserMemory, VhostUserMemoryRegion, VhostUserProtocolFeatures,
    VhostUserVirtioFeatures, VhostUserVringAddr, VhostUserVringAddrFlags, VhostUserVringState,
};
use vm_memory::ByteValued;
use zerosock_ring::RegionConfig;
use zerosock_sys::{fd_passing, socket_path, wait_ready};

use crate::codec::request_name;

pub use self::shared::{Plan, QueueEventFds, SharedMemory, SharedMemoryError, SlotPlaces};

/// Bytes of a message header: request, flags, payload size ("Message specification").
const HEADER_LEN: usize = 12;
/// Protocol version, in the two lowest bits of the flags.
const VERSION: u32 = 1;
const FLAG_REPLY: u32 = 1 << 2;
const FLAG_NEED_REPLY: u32 = 1 << 3;
/// "Vring descriptor index": bit 8 of a `u64` vring payload says that no descriptor comes with the
/// message.
const VRING_NO_FD: u64 = 1 << 8;

/// Why a request of a front-end failed.
#[derive(Debug, thiserror::Error)]
pub enum FrontendError {
    /// The device does not listen, or its socket cannot be reached.
    #[error("cannot reach the vhost-user device at {path}: {source}")]
    Connect {
        /// The control socket's path.
        path: String,
        /// The error of connect(2).
        source: io::Error,
    },
    /// The control socket failed.
    #[error("the vhost-user control socket failed: {0}")]
    Io(#[from] io::Error),
    /// The device closed the control socket.
    #[error("the vhost-user device closed its control socket")]
    Closed,
    /// The device gave no answer within the time-out.
    #[error(
        "the vhost-user device did not answer {request} in time: its program is stopped, or no thread drives it"
    )]
    TimedOut {
        /// The request's name.
        request: String,
    },
    /// The device answered with a non-zero status (REPLY_ACK).
    #[error("the vhost-user device refused {request} with status {status}")]
    Refused {
        /// The request's name.
        request: String,
        /// The status it answered.
        status: u64,
    },
    /// The device sent a reply that vhost-user does not allow.
    #[error("the vhost-user device broke the protocol: {0}")]
    Protocol(&'static str),
    /// The caller passed more regions than a message can carry.
    #[error("too many memory regions for one message: {0}")]
    TooManyRegions(usize),
}

/// Addresses of the three parts of a virtqueue for SET_VRING_ADDR: front-end ("user") addresses,
/// translated through the memory table.
#[derive(Copy, Clone, Debug)]
pub struct VringAddr {
    /// Descriptor table.
    pub desc: u64,
    /// Available ring.
    pub avail: u64,
    /// Used ring.
    pub used: u64,
}

/// A connected vhost-user control socket, front-end side.
///
/// ```no_run
/// # use std::{path::Path, time::Duration};
/// use zerosock_vhost_user::frontend::Frontend;
/// let mut device = Frontend::connect(Path::new("/run/vm3.sock"), Duration::from_secs(2))?;
/// let features = device.get_features()?;
/// println!("offered: {features:#x}");
/// # Ok::<(), zerosock_vhost_user::frontend::FrontendError>(())
/// ```
#[derive(Debug)]
pub struct Frontend {
    socket: UnixStream,
    timeout: Duration,
    /// The end of the time for several requests together.
    deadline: Option<Instant>,
    /// Whether REPLY_ACK is negotiated. Then every request is answered.
    reply_ack: bool,
}

impl Frontend {
    /// Connects to the device's control socket. `timeout` bounds this and each later call.
    pub fn connect(path: &Path, timeout: Duration) -> Result<Frontend, FrontendError> {
        let socket = socket_path::connect(path, SocketType::STREAM, timeout).map_err(|source| {
            FrontendError::Connect {
                path: path.display().to_string(),
                source,
            }
        })?;
        Frontend::from_stream(socket.into(), timeout)
    }

    /// Uses a control socket that is connected already.
    pub fn from_stream(socket: UnixStream, timeout: Duration) -> Result<Frontend, FrontendError> {
        socket.set_nonblocking(true)?;
        Ok(Frontend {
            socket,
            timeout,
            deadline: None,
            reply_ack: false,
        })
    }

    /// Sets the time limit of each later call.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// Sets a time at which calls end at the latest, until this is called again.
    pub fn set_deadline(&mut self, deadline: Option<Instant>) {
        self.deadline = deadline;
    }

    /// The time at which a call that begins now has to end; `None` if the clock cannot represent it.
    fn call_deadline(&self) -> Option<Instant> {
        let own = Instant::now().checked_add(self.timeout);
        own.into_iter().chain(self.deadline).min()
    }

    /// GET_FEATURES: the virtio features that the device offers, including
    /// VHOST_USER_F_PROTOCOL_FEATURES (bit 30).
    pub fn get_features(&mut self) -> Result<u64, FrontendError> {
        self.request_u64(FrontendReq::GET_FEATURES)
    }

    /// SET_FEATURES: the features that the driver accepts.
    pub fn set_features(&mut self, features: u64) -> Result<(), FrontendError> {
        self.send_request(FrontendReq::SET_FEATURES, &features.to_ne_bytes(), &[])
    }

    /// GET_PROTOCOL_FEATURES.
    pub fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures, FrontendError> {
        self.request_u64(FrontendReq::GET_PROTOCOL_FEATURES)
            .map(VhostUserProtocolFeatures::from_bits_truncate)
    }

    /// SET_PROTOCOL_FEATURES. If `features` contains REPLY_ACK, every later request is
    /// acknowledged.
    pub fn set_protocol_features(
        &mut self,
        features: VhostUserProtocolFeatures,
    ) -> Result<(), FrontendError> {
        self.send_request(
            FrontendReq::SET_PROTOCOL_FEATURES,
            &features.bits().to_ne_bytes(),
            &[],
        )?;
        self.reply_ack = features.contains(VhostUserProtocolFeatures::REPLY_ACK);
        Ok(())
    }

    /// Negotiates: accepts those virtio features of `wanted` and those protocol features of
    /// `protocol` that the device offers, and returns both sets. Sends SET_OWNER in between.
    pub fn negotiate(
        &mut self,
        wanted: u64,
        protocol: VhostUserProtocolFeatures,
    ) -> Result<(u64, VhostUserProtocolFeatures), FrontendError> {
        let offered = self.get_features()?;
        let mut agreed_protocol = VhostUserProtocolFeatures::empty();
        if offered & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() != 0 {
            agreed_protocol = self.get_protocol_features()? & protocol;
            self.set_protocol_features(agreed_protocol)?;
        }
        self.set_owner()?;
        let agreed = offered & (wanted | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits());
        self.set_features(agreed)?;
        Ok((agreed, agreed_protocol))
    }

    /// GET_QUEUE_NUM (needs MQ): the number of virtqueues of the device.
    pub fn get_queue_num(&mut self) -> Result<u64, FrontendError> {
        self.request_u64(FrontendReq::GET_QUEUE_NUM)
    }

    /// SET_OWNER.
    pub fn set_owner(&mut self) -> Result<(), FrontendError> {
        self.send_request(FrontendReq::SET_OWNER, &[], &[])
    }

    /// RESET_DEVICE (needs RESET_DEVICE): stops all rings and resets the state of the device.
    pub fn reset_device(&mut self) -> Result<(), FrontendError> {
        self.send_request(FrontendReq::RESET_DEVICE, &[], &[])
    }

    /// SET_MEM_TABLE: the complete memory table, with a descriptor for each region.
    pub fn set_mem_table(
        &mut self,
        regions: &[(BorrowedFd<'_>, RegionConfig)],
    ) -> Result<(), FrontendError> {
        if regions.len() > MAX_ATTACHED_FD_ENTRIES {
            return Err(FrontendError::TooManyRegions(regions.len()));
        }
        // At most MAX_ATTACHED_FD_ENTRIES, checked above.
        let mut payload = VhostUserMemory::new(regions.len() as u32)
            .as_slice()
            .to_vec();
        for (_, it) in regions {
            let region =
                VhostUserMemoryRegion::new(it.guest_addr, it.len, it.user_addr, it.fd_offset);
            payload.extend_from_slice(region.as_slice());
        }
        let fds: Vec<_> = regions.iter().map(|(fd, _)| *fd).collect();
        self.send_request(FrontendReq::SET_MEM_TABLE, &payload, &fds)
    }

    /// SET_LOG_BASE (needs LOG_SHMFD): the log of written pages lies at `offset` of the file and has
    /// `len` bytes. When this returns, the device marks no page in an earlier log.
    pub fn set_log_base(
        &mut self,
        file: BorrowedFd<'_>,
        offset: u64,
        len: u64,
    ) -> Result<(), FrontendError> {
        let request = FrontendReq::SET_LOG_BASE;
        let mut log = VhostUserLog::new(len, offset);
        self.send(request, 0, log.as_slice(), &[file])?;
        self.receive_reply(request, log.as_mut_slice())
    }

    /// SET_VRING_NUM: the number of entries of the queue.
    pub fn set_vring_num(&mut self, index: u32, size: u16) -> Result<(), FrontendError> {
        self.set_vring_state(FrontendReq::SET_VRING_NUM, index, size.into())
    }

    /// SET_VRING_BASE: the available index at which the device starts.
    pub fn set_vring_base(&mut self, index: u32, base: u16) -> Result<(), FrontendError> {
        self.set_vring_state(FrontendReq::SET_VRING_BASE, index, base.into())
    }

    /// SET_VRING_ADDR.
    pub fn set_vring_addr(&mut self, index: u32, addr: VringAddr) -> Result<(), FrontendError> {
        self.set_vring_addr_logged(index, addr, None)
    }

    /// SET_VRING_ADDR, with VHOST_VRING_F_LOG and the guest address of the used ring if `used_log` is
    /// set.
    pub fn set_vring_addr_logged(
        &mut self,
        index: u32,
        addr: VringAddr,
        used_log: Option<u64>,
    ) -> Result<(), FrontendError> {
        let mut flags = VhostUserVringAddrFlags::empty();
        flags.set(
            VhostUserVringAddrFlags::VHOST_VRING_F_LOG,
            used_log.is_some(),
        );
        let (desc, used, avail) = (addr.desc, addr.used, addr.avail);
        let log = used_log.unwrap_or_default();
        let payload = VhostUserVringAddr::new(index, flags, desc, used, avail, log);
        self.send_request(FrontendReq::SET_VRING_ADDR, payload.as_slice(), &[])
    }

    /// SET_VRING_KICK: the eventfd that the driver writes to; `None`: the device polls.
    pub fn set_vring_kick(
        &mut self,
        index: u32,
        kick: Option<BorrowedFd<'_>>,
    ) -> Result<(), FrontendError> {
        self.vring_fd(FrontendReq::SET_VRING_KICK, index, kick)
    }

    /// SET_VRING_CALL: the eventfd that the device writes to; `None`: the driver polls.
    pub fn set_vring_call(
        &mut self,
        index: u32,
        call: Option<BorrowedFd<'_>>,
    ) -> Result<(), FrontendError> {
        self.vring_fd(FrontendReq::SET_VRING_CALL, index, call)
    }

    /// SET_VRING_ERR: the eventfd that the device writes to when the queue breaks.
    pub fn set_vring_err(
        &mut self,
        index: u32,
        err: Option<BorrowedFd<'_>>,
    ) -> Result<(), FrontendError> {
        self.vring_fd(FrontendReq::SET_VRING_ERR, index, err)
    }

    /// SET_VRING_ENABLE.
    pub fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<(), FrontendError> {
        self.set_vring_state(FrontendReq::SET_VRING_ENABLE, index, enable.into())
    }

    /// GET_VRING_BASE: stops the queue and returns its next available index. After that the device
    /// does not access the queue or its buffers.
    pub fn get_vring_base(&mut self, index: u32) -> Result<u16, FrontendError> {
        let request = FrontendReq::GET_VRING_BASE;
        let mut state = VhostUserVringState::new(index, 0);
        self.send(request, 0, state.as_slice(), &[])?;
        self.receive_reply(request, state.as_mut_slice())?;
        let (queue, base) = (state.index, state.num);
        if queue != index {
            return Err(FrontendError::Protocol(
                "GET_VRING_BASE answered for another queue",
            ));
        }
        u16::try_from(base)
            .map_err(|_| FrontendError::Protocol("GET_VRING_BASE answered an index above 16 bits"))
    }

    /// GET_CONFIG (needs CONFIG): reads `out.len()` bytes, at most 256, of the configuration space
    /// at `offset`.
    pub fn read_config(&mut self, offset: u32, out: &mut [u8]) -> Result<(), FrontendError> {
        let request = FrontendReq::GET_CONFIG;
        let len = out.len().min(256);
        let head = VhostUserConfig::new(offset, len as u32, VhostUserConfigFlags::empty());
        let mut payload = [0u8; 12 + 256];
        payload[..12].copy_from_slice(head.as_slice());
        self.send(request, 0, &payload[..12 + len], &[])?;
        let mut reply = [0u8; 12 + 256];
        self.receive_reply(request, &mut reply[..12 + len])?;
        for (to, from) in out.iter_mut().zip(&reply[12..12 + len]) {
            *to = *from;
        }
        Ok(())
    }

    /// SET_CONFIG (needs CONFIG): writes `bytes`, at most 256, to the configuration space at
    /// `offset`.
    pub fn write_config(&mut self, offset: u32, bytes: &[u8]) -> Result<(), FrontendError> {
        let none = VhostUserConfigFlags::empty();
        let head = VhostUserConfig::new(offset, bytes.len() as u32, none);
        let payload = [head.as_slice(), bytes].concat();
        self.send_request(FrontendReq::SET_CONFIG, &payload, &[])
    }

    /// Waits until the device has handled every request sent so far, even without REPLY_ACK.
    pub fn sync(&mut self) -> Result<(), FrontendError> {
        self.get_features().map(drop)
    }

    /// Sends bytes and descriptors as they are, and waits for no reply. For tests of malformed
    /// messages.
    pub fn send_raw(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), FrontendError> {
        let request = bytes
            .first_chunk()
            .map_or(0, |number| u32::from_ne_bytes(*number));
        self.send_bytes(request, bytes, fds)
    }

    /// Whether the device has closed the connection. Does not block.
    pub fn is_closed(&self) -> bool {
        let events = wait_ready(&self.socket, PollFlags::RDHUP, Some(Duration::ZERO));
        let over = PollFlags::HUP | PollFlags::RDHUP | PollFlags::ERR;
        events.is_ok_and(|events| events.intersects(over))
    }

    fn request_u64(&mut self, request: FrontendReq) -> Result<u64, FrontendError> {
        self.send(request, 0, &[], &[])?;
        let mut reply = [0u8; 8];
        self.receive_reply(request, &mut reply)?;
        Ok(u64::from_ne_bytes(reply))
    }

    /// Sends a request that has no reply of its own, and waits for the acknowledgement if REPLY_ACK
    /// is negotiated.
    pub(crate) fn send_request(
        &mut self,
        request: FrontendReq,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), FrontendError> {
        let flags = if self.reply_ack { FLAG_NEED_REPLY } else { 0 };
        self.send(request, flags, payload, fds)?;
        if !self.reply_ack {
            return Ok(());
        }
        let mut reply = [0u8; 8];
        self.receive_reply(request, &mut reply)?;
        match u64::from_ne_bytes(reply) {
            0 => Ok(()),
            status => Err(FrontendError::Refused {
                request: request_name(request as u32),
                status,
            }),
        }
    }

    fn set_vring_state(
        &mut self,
        request: FrontendReq,
        index: u32,
        num: u32,
    ) -> Result<(), FrontendError> {
        let state = VhostUserVringState::new(index, num);
        self.send_request(request, state.as_slice(), &[])
    }

    fn vring_fd(
        &mut self,
        request: FrontendReq,
        index: u32,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<(), FrontendError> {
        match fd {
            Some(fd) => self.send_request(request, &u64::from(index).to_ne_bytes(), &[fd]),
            None => {
                let value = u64::from(index) | VRING_NO_FD;
                self.send_request(request, &value.to_ne_bytes(), &[])
            }
        }
    }

    fn send(
        &mut self,
        request: FrontendReq,
        flags: u32,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), FrontendError> {
        let mut message = Vec::with_capacity(HEADER_LEN + payload.len());
        message.extend_from_slice(&(request as u32).to_ne_bytes());
        message.extend_from_slice(&(VERSION | flags).to_ne_bytes());
        message.extend_from_slice(&(payload.len() as u32).to_ne_bytes());
        message.extend_from_slice(payload);
        self.send_bytes(request as u32, &message, fds)
    }

    fn send_bytes(
        &mut self,
        request: u32,
        mut bytes: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), FrontendError> {
        let deadline = self.call_deadline();
        let mut fds = fds;
        while !bytes.is_empty() {
            match fd_passing::send(self.socket.as_fd(), &[IoSlice::new(bytes)], fds) {
                Ok(sent) => {
                    bytes = bytes.get(sent..).unwrap_or(&[]);
                    // Descriptors go with the first byte.
                    fds = &[];
                }
                Err(error) => self.wait(error, PollFlags::OUT, deadline, request)?,
            }
        }
        Ok(())
    }

    /// Receives the reply to `request`, exactly `out.len()` bytes of payload.
    fn receive_reply(&mut self, request: FrontendReq, out: &mut [u8]) -> Result<(), FrontendError> {
        let deadline = self.call_deadline();
        let mut header = [0u8; HEADER_LEN];
        self.receive_exact(request, &mut header, deadline)?;
        let (code, flags, size) = (ne_u32(&header, 0), ne_u32(&header, 4), ne_u32(&header, 8));
        if code != request as u32 {
            return Err(FrontendError::Protocol("reply to another request"));
        }
        if flags & 3 != VERSION || flags & FLAG_REPLY == 0 {
            return Err(FrontendError::Protocol("reply with wrong flags"));
        }
        let size = size as usize;
        if size > MAX_MSG_SIZE || size != out.len() {
            return Err(FrontendError::Protocol("reply of a wrong size"));
        }
        self.receive_exact(request, out, deadline)
    }

    fn receive_exact(
        &mut self,
        request: FrontendReq,
        mut out: &mut [u8],
        deadline: Option<Instant>,
    ) -> Result<(), FrontendError> {
        // No expected reply carries descriptors; dropping the vector closes any that come.
        let mut unwanted = Vec::new();
        while !out.is_empty() {
            match fd_passing::recv(self.socket.as_fd(), out, &mut unwanted) {
                Ok(received) if received.bytes == 0 => return Err(FrontendError::Closed),
                Ok(received) => {
                    let rest = out.len().min(received.bytes);
                    out = &mut out[rest..];
                }
                Err(error) => self.wait(error, PollFlags::IN, deadline, request as u32)?,
            }
        }
        Ok(())
    }

    /// Handles an error of send or receive: polls for `flags` if it was EAGAIN, until the deadline.
    fn wait(
        &self,
        error: io::Error,
        flags: PollFlags,
        deadline: Option<Instant>,
        request: u32,
    ) -> Result<(), FrontendError> {
        match error.kind() {
            io::ErrorKind::Interrupted => return Ok(()),
            io::ErrorKind::WouldBlock => {}
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => {
                return Err(FrontendError::Closed);
            }
            _ => return Err(error.into()),
        }
        let left = deadline.map(|end| end.saturating_duration_since(Instant::now()));
        match wait_ready(&self.socket, flags, left)?.is_empty() {
            true => Err(FrontendError::TimedOut {
                request: request_name(request),
            }),
            false => Ok(()),
        }
    }
}

impl AsFd for Frontend {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Four bytes at `at`; the arrays of all callers are long enough by their type.
fn ne_u32(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0u8; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_ne_bytes(word)
}

#[cfg(test)]
mod tests;
