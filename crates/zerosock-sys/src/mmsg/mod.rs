//! Many messages with one system call: recvmmsg(2) and sendmmsg(2).
//!
//! A [`Batch`] owns the memory of its messages. It receives messages from one socket, and sends any run of
//! them through another one. Neither call blocks.
//!
//! Between UDP sockets the kernel passes many datagrams of one size as one packet (UDP_GRO and
//! UDP_SEGMENT, udp(7)). [`coalesce_datagrams`] asks for that; the batch
//! still has each datagram as a message of its own.

mod address;

use std::fmt;
use std::io;
use std::mem::{MaybeUninit, size_of};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};

use self::address::{STORAGE, Storage};
use crate::fd_passing;
use crate::peer_fd::PeerFd;
use crate::slices::outcome;
use crate::socket_option;

pub use self::address::KernelAddress;

/// The most messages of one batch.
pub const MAX_BATCH: usize = 64;

/// Bytes between the ends of two messages' places: neighbours do not begin in the same cache set.
const GAP: usize = 4096 + 64;

/// The most datagrams that the kernel takes as one packet (UDP_MAX_SEGMENTS before Linux 6.9).
const MAX_SEGMENTS: usize = 64;

/// The most datagrams of a packet that is received (UDP_MAX_SEGMENTS from Linux 6.9 on). A guest's network
/// card can have more put into one, down to one byte each.
const MAX_SEGMENTS_RECEIVED: usize = 128;

/// The most packets of one call that may each be many datagrams: less than 1 MiB, and no more than 2048
/// datagrams.
const MAX_COALESCED: usize = 16;

/// Messages that were received.
pub struct Batch {
    slots: usize,
    /// Bytes of the longest message.
    size: usize,
    memory: Box<[u8]>,
    received: Vec<Received>,
    /// The source of each slot.
    sources: Vec<KernelAddress>,
}

/// One message.
#[derive(Clone, Copy)]
struct Received {
    slot: usize,
    /// Where it begins in the memory.
    start: usize,
    length: usize,
    /// It was longer than there was room, and its end is lost; or a packet of too many datagrams.
    truncated: bool,
}

/// Room for one control message with an `int`.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct Control([u8; CONTROL]);

/// `CMSG_SPACE(sizeof(int))`: the header and the padded value.
const CONTROL: usize = size_of::<libc::cmsghdr>() + 8;

/// What control messages a call may receive.
#[derive(Clone, Copy, Eq, PartialEq)]
enum Controls {
    /// None. On a Unix socket the kernel then closes descriptors that come.
    No,
    /// The size of the datagrams in a packet.
    SegmentSize,
}

impl fmt::Debug for Batch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batch")
            .field("slots", &self.slots)
            .field("size", &self.size)
            .field("messages", &self.received.len())
            .finish_non_exhaustive()
    }
}

impl Batch {
    /// Room for so many messages (at most [`MAX_BATCH`]) of at most `size` bytes each. The memory is used
    /// only as far as messages need it.
    pub fn new(slots: usize, size: usize) -> Batch {
        let slots = slots.clamp(1, MAX_BATCH);
        Batch {
            slots,
            size,
            memory: vec![0; slots * (size + GAP)].into_boxed_slice(),
            received: Vec::with_capacity(slots),
            sources: Vec::with_capacity(slots),
        }
    }

    /// The number of messages.
    pub fn len(&self) -> usize {
        self.received.len()
    }

    /// Whether there are no messages.
    pub fn is_empty(&self) -> bool {
        self.received.is_empty()
    }

    /// The number of packets in which the messages came: one each, except for
    /// [`receive_coalesced`](Self::receive_coalesced).
    pub fn packets(&self) -> usize {
        self.sources.len()
    }

    /// The bytes of all messages.
    pub fn bytes(&self) -> usize {
        self.received.iter().map(|one| one.length).sum()
    }

    /// A message. Empty if there is no such one.
    pub fn message(&self, index: usize) -> &[u8] {
        match self.received.get(index) {
            Some(received) => &self.memory[received.start..received.start + received.length],
            None => &[],
        }
    }

    /// Whether the end of a message is lost because it was too long, or the message is a packet of more
    /// datagrams than any kernel sends. Such a one is not to be sent on.
    pub fn is_truncated(&self, index: usize) -> bool {
        self.received.get(index).is_some_and(|one| one.truncated)
    }

    /// Where a message came from.
    pub fn source(&self, index: usize) -> &KernelAddress {
        let slot = self.received.get(index).map(|one| one.slot);
        slot.and_then(|slot| self.sources.get(slot))
            .unwrap_or(&KernelAddress::NONE)
    }

    /// Receives at most `most` messages, and returns how many there are. The earlier ones are gone.
    ///
    /// # Errors
    /// `WouldBlock` when nothing is there; otherwise errors of recvmmsg(2).
    pub fn receive(&mut self, fd: impl AsFd, most: usize) -> io::Result<usize> {
        self.receive_with(fd, most, Controls::No)
    }

    /// As [`receive`](Self::receive), from a UDP socket that has
    /// [`coalesce_datagrams`]: at most `most` packets and no more than 16, each of one or more datagrams.
    /// They are less than 1 MiB.
    ///
    /// # Errors
    /// As [`receive`](Self::receive).
    pub fn receive_coalesced(&mut self, fd: impl AsFd, most: usize) -> io::Result<usize> {
        self.receive_with(fd, most.min(MAX_COALESCED), Controls::SegmentSize)
    }

    fn receive_with(
        &mut self,
        fd: impl AsFd,
        most: usize,
        controls: Controls,
    ) -> io::Result<usize> {
        self.received.clear();
        self.sources.clear();
        let most = most.clamp(1, self.slots);
        let mut control = [Control([0; CONTROL]); MAX_BATCH];
        let mut headers = [const { MaybeUninit::<libc::mmsghdr>::zeroed() }; MAX_BATCH];
        let mut vectors = [const { MaybeUninit::<libc::iovec>::uninit() }; MAX_BATCH];
        let mut sources = [const { MaybeUninit::<Storage>::uninit() }; MAX_BATCH];
        let places = self.memory.chunks_exact_mut(self.size + GAP).take(most);
        for (index, place) in places.enumerate() {
            let vector = vectors[index].write(libc::iovec {
                iov_base: place.as_mut_ptr().cast(),
                iov_len: self.size,
            });
            // SAFETY: a `mmsghdr` consists of integers and raw pointers, for which all zeroes is a value.
            let header = unsafe { headers[index].assume_init_mut() };
            header.msg_hdr.msg_iov = vector;
            header.msg_hdr.msg_iovlen = 1;
            header.msg_hdr.msg_name = sources[index].as_mut_ptr().cast();
            header.msg_hdr.msg_namelen = STORAGE as libc::socklen_t;
            if controls == Controls::SegmentSize {
                header.msg_hdr.msg_control = control[index].0.as_mut_ptr().cast();
                header.msg_hdr.msg_controllen = CONTROL as _;
            }
        }
        let got = loop {
            // SAFETY: the first `most` headers are initialised (`most` is at most the number of places).
            // Each names its own vector and source, which live until the call returns; the vector names
            // `size` bytes of this batch's memory, which is borrowed mutably, the source has room for the
            // STORAGE bytes that are named, and the control data, if any is named, for CONTROL bytes.
            // Without a time-out the last argument is null.
            let got = unsafe {
                libc::recvmmsg(
                    fd.as_fd().as_raw_fd(),
                    headers.as_mut_ptr().cast(),
                    most as libc::c_uint,
                    libc::MSG_DONTWAIT as _,
                    std::ptr::null_mut(),
                )
            };
            if let Some(result) = outcome(got as isize) {
                break result?;
            }
        };
        for index in 0..got.min(most) {
            // SAFETY: initialised above.
            let header = unsafe { headers[index].assume_init_ref() };
            let named = header.msg_hdr.msg_namelen.min(STORAGE as libc::socklen_t);
            let mut source = KernelAddress::NONE;
            source.length = named;
            // SAFETY: the kernel has written so many bytes of the source, which are at most STORAGE, and
            // the two do not overlap. A connected socket of type SOCK_SEQPACKET has no source: length 0.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    sources[index].as_ptr().cast::<u8>(),
                    source.storage.0.as_mut_ptr(),
                    named as usize,
                );
            }
            self.sources.push(source);
            let used = header.msg_hdr.msg_controllen.min(CONTROL);
            let segment = match controls {
                Controls::No => None,
                Controls::SegmentSize => segment_size(&control[index].0[..used]),
            };
            let truncated = header.msg_hdr.msg_flags & libc::MSG_TRUNC != 0;
            self.note(
                index,
                (header.msg_len as usize).min(self.size),
                segment,
                truncated,
            );
        }
        Ok(self.received.len())
    }

    /// Adds the messages of a slot: one, or as many as there are pieces of `segment` bytes. Too many are one
    /// message that is truncated.
    fn note(&mut self, slot: usize, length: usize, segment: Option<usize>, truncated: bool) {
        let first = slot * (self.size + GAP);
        let mut step = segment.unwrap_or(length).max(1);
        let mut truncated = truncated;
        if length.div_ceil(step) > MAX_SEGMENTS_RECEIVED {
            (step, truncated) = (length, true);
        }
        let mut at = 0;
        loop {
            self.received.push(Received {
                slot,
                start: first + at,
                length: step.min(length - at),
                truncated,
            });
            at += step;
            if at >= length {
                return;
            }
        }
    }

    /// Receives one message with the descriptors that a peer has sent with it, which are appended to `fds`.
    /// For Unix sockets on which descriptors can arrive: [`receive`](Self::receive) would make the kernel
    /// close them in this thread, which may wait (see [`fd_passing`]).
    ///
    /// # Errors
    /// `WouldBlock` when nothing is there; otherwise errors of recvmsg(2).
    pub fn receive_with_rights(
        &mut self,
        fd: impl AsFd,
        fds: &mut Vec<PeerFd>,
    ) -> io::Result<usize> {
        self.received.clear();
        self.sources.clear();
        let buffer = &mut self.memory[..self.size];
        let (received, source) = fd_passing::recv_from(fd, buffer, fds)?;
        let mut address = KernelAddress::NONE;
        if let Some(source) = source {
            let length = (source.addr_len() as usize).min(STORAGE);
            // SAFETY: the address has `addr_len` initialised bytes, of which at most STORAGE are copied to
            // another place.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    source.as_ptr().cast::<u8>(),
                    address.storage.0.as_mut_ptr(),
                    length,
                );
            }
            address.length = length as libc::socklen_t;
        }
        self.sources.push(address);
        self.note(0, received.bytes.min(self.size), None, received.truncated);
        Ok(1)
    }

    /// Sends a run of the messages, to `to` or to the socket's peer. Returns how many the socket took.
    ///
    /// # Errors
    /// `WouldBlock` when it takes none now; otherwise errors of sendmmsg(2) for the first message.
    pub fn send(
        &self,
        fd: impl AsFd,
        messages: Range<usize>,
        to: Option<&KernelAddress>,
    ) -> io::Result<usize> {
        self.send_grouped(fd, messages, to, 1)
    }

    /// As [`send`](Self::send), over a UDP socket: datagrams that came as one packet leave as one. Where
    /// the kernel cannot divide it, for instance because a datagram is longer than the device's MTU, they
    /// are sent one by one.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn send_coalesced(
        &self,
        fd: impl AsFd,
        messages: Range<usize>,
        to: Option<&KernelAddress>,
    ) -> io::Result<usize> {
        let first = self.group(messages.start, messages.end, MAX_SEGMENTS);
        let sent = self.send_grouped(&fd, messages.clone(), to, MAX_SEGMENTS);
        match sent.as_ref().err().and_then(io::Error::raw_os_error) {
            Some(libc::EINVAL | libc::EIO | libc::EMSGSIZE | libc::EOPNOTSUPP) if first > 1 => {
                let end = messages.start + first;
                self.send_grouped(fd, messages.start..end, to, 1)
            }
            _ => sent,
        }
    }

    /// How many messages from `index` on and before `end` can be sent as one packet: neighbours in the
    /// memory of one length, of which the last one may be shorter.
    fn group(&self, index: usize, end: usize, most: usize) -> usize {
        let Some(run) = self.received.get(index..end.min(self.len())) else {
            return 0;
        };
        let Some(first) = run.first() else { return 0 };
        let mut count = 1;
        for pair in run.windows(2).take(most - 1) {
            let [last, next] = pair else { break };
            let follows = next.slot == last.slot && next.start == last.start + last.length;
            if !follows || last.length != first.length || next.length > first.length {
                break;
            }
            count += 1;
        }
        count
    }

    fn send_grouped(
        &self,
        fd: impl AsFd,
        messages: Range<usize>,
        to: Option<&KernelAddress>,
        most: usize,
    ) -> io::Result<usize> {
        let mut headers = [const { MaybeUninit::<libc::mmsghdr>::zeroed() }; MAX_BATCH];
        let mut vectors = [const { MaybeUninit::<libc::iovec>::uninit() }; MAX_BATCH];
        let mut control = [Control([0; CONTROL]); MAX_BATCH];
        let mut sizes = [0; MAX_BATCH];
        let mut next = messages.start;
        let mut count = 0;
        while count < MAX_BATCH {
            let size = self.group(next, messages.end, most);
            let (Some(first), Some(last)) = (
                self.received.get(next),
                self.received.get(next + size.saturating_sub(1)),
            ) else {
                break;
            };
            if size == 0 {
                break;
            }
            let bytes = &self.memory[first.start..last.start + last.length];
            let vector = vectors[count].write(libc::iovec {
                iov_base: bytes.as_ptr().cast_mut().cast(),
                iov_len: bytes.len(),
            });
            // SAFETY: as in `receive_with`.
            let header = unsafe { headers[count].assume_init_mut() };
            header.msg_hdr.msg_iov = vector;
            header.msg_hdr.msg_iovlen = 1;
            if size > 1 {
                control[count] = segment_control(first.length);
                header.msg_hdr.msg_control = control[count].0.as_mut_ptr().cast();
                header.msg_hdr.msg_controllen = CONTROL as _;
            }
            if let Some(to) = to {
                header.msg_hdr.msg_name = (&raw const to.storage).cast_mut().cast();
                header.msg_hdr.msg_namelen = to.length;
            }
            sizes[count] = size;
            next += size;
            count += 1;
        }
        if count == 0 {
            return Ok(0);
        }
        loop {
            // SAFETY: the first `count` headers are initialised, and `count` is at most MAX_BATCH. Each
            // names its own vector and control data, and the vector bytes of this batch's memory; the
            // kernel only reads them and the address `to`, and all outlive the call.
            let sent = unsafe {
                libc::sendmmsg(
                    fd.as_fd().as_raw_fd(),
                    headers.as_mut_ptr().cast(),
                    count as libc::c_uint,
                    (libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) as _,
                )
            };
            if let Some(result) = outcome(sent as isize) {
                return result.map(|sent| sizes.iter().take(sent).sum());
            }
        }
    }
}

/// Has the kernel give datagrams that came as one packet together to a receiver of UDP (UDP_GRO), which has
/// to call [`Batch::receive_coalesced`]: other calls take them for one datagram.
///
/// # Errors
/// ENOPROTOOPT before Linux 5.0; otherwise those of setsockopt(2).
pub fn coalesce_datagrams(socket: impl AsFd) -> io::Result<()> {
    socket_option::set_int(socket, libc::SOL_UDP, libc::UDP_GRO, 1)
}

/// The size of the datagrams in a packet, from the control data that came with it.
fn segment_size(control: &[u8]) -> Option<usize> {
    // `struct cmsghdr`: its length with itself, the level and the type.
    const WORD: usize = size_of::<usize>();
    let int = |at: usize| {
        let bytes = control.get(at..at + 4)?;
        Some(i32::from_ne_bytes(bytes.try_into().ok()?))
    };
    let wanted = (int(WORD)?, int(WORD + 4)?) == (libc::SOL_UDP, libc::UDP_GRO);
    let size = usize::try_from(int(size_of::<libc::cmsghdr>())?).ok()?;
    (wanted && size > 0).then_some(size)
}

/// The control data that has the kernel divide a packet into datagrams of `size` bytes.
fn segment_control(size: usize) -> Control {
    const HEADER: usize = size_of::<libc::cmsghdr>();
    let mut control = Control([0; CONTROL]);
    let (header, value) = control.0.split_at_mut(HEADER);
    // `CMSG_LEN(sizeof(u16))`, the level and the type.
    let (length, kind) = header.split_at_mut(size_of::<usize>());
    length.copy_from_slice(&(HEADER + size_of::<u16>()).to_ne_bytes());
    let (level, kind) = kind.split_at_mut(size_of::<libc::c_int>());
    level.copy_from_slice(&libc::SOL_UDP.to_ne_bytes());
    kind.copy_from_slice(&libc::UDP_SEGMENT.to_ne_bytes());
    if let Some(value) = value.first_chunk_mut() {
        *value = (size as u16).to_ne_bytes();
    }
    control
}

/// Sends one message to an address. Does not block.
///
/// # Errors
/// `WouldBlock` when the socket takes none now; otherwise errors of sendto(2).
pub fn send_to(fd: impl AsFd, message: &[u8], to: &KernelAddress) -> io::Result<()> {
    loop {
        // SAFETY: the message and the address live until the call returns, which only reads the bytes
        // that their lengths name; the length of an address is at most STORAGE.
        let sent = unsafe {
            libc::sendto(
                fd.as_fd().as_raw_fd(),
                message.as_ptr().cast(),
                message.len(),
                libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
                (&raw const to.storage).cast(),
                to.length,
            )
        };
        if let Some(result) = outcome(sent) {
            return result.map(drop);
        }
    }
}

#[cfg(test)]
mod tests;
