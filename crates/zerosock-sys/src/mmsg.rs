//! Many messages with one system call: recvmmsg(2) and sendmmsg(2).
//!
//! A [`Batch`] owns the memory of its messages. It receives messages from one socket, and sends any run of
//! them through another one. Neither call blocks.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::io;
use std::mem::{MaybeUninit, size_of};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};

use crate::fd_passing;
use crate::peer_fd::PeerFd;

/// The most messages of one batch.
pub const MAX_BATCH: usize = 64;

/// Bytes between the ends of two messages' places: neighbours do not begin in the same cache set.
const GAP: usize = 4096 + 64;

/// Messages that were received.
pub struct Batch {
    slots: usize,
    /// Bytes of the longest message.
    size: usize,
    memory: Box<[u8]>,
    received: Vec<Received>,
}

/// One message.
#[derive(Clone, Copy)]
struct Received {
    length: usize,
    /// It was longer than there was room, and its end is lost.
    truncated: bool,
    source: Address,
}

/// The address of an Internet or Unix socket, or none.
#[derive(Clone, Copy)]
pub struct Address {
    storage: Storage,
    length: libc::socklen_t,
}

/// As large as an address of any of these families, and aligned for them.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct Storage([u8; STORAGE]);

const STORAGE: usize = 112;
const _: () = assert!(STORAGE >= size_of::<libc::sockaddr_un>());
const _: () = assert!(STORAGE >= size_of::<libc::sockaddr_in6>());

impl Address {
    /// No address: an unnamed socket.
    pub const NONE: Address = Address {
        storage: Storage([0; STORAGE]),
        length: 0,
    };

    fn bytes(&self) -> &[u8] {
        &self.storage.0[..(self.length as usize).min(STORAGE)]
    }

    fn family(&self) -> Option<libc::c_int> {
        let bytes = self.bytes().first_chunk::<2>()?;
        Some(u16::from_ne_bytes(*bytes).into())
    }

    /// Whether messages can be sent to it.
    pub fn is_named(&self) -> bool {
        self.length as usize > size_of::<libc::sa_family_t>()
    }

    /// The address as one of the Internet, if it is one.
    pub fn ip(&self) -> Option<SocketAddr> {
        let bytes = self.bytes();
        let port = u16::from_be_bytes(*bytes.get(2..)?.first_chunk()?);
        match self.family()? {
            libc::AF_INET => {
                let address: [u8; 4] = *bytes.get(4..)?.first_chunk()?;
                Some(SocketAddr::new(IpAddr::V4(Ipv4Addr::from(address)), port))
            }
            libc::AF_INET6 => {
                let flow = u32::from_be_bytes(*bytes.get(4..)?.first_chunk()?);
                let address: [u8; 16] = *bytes.get(8..)?.first_chunk()?;
                let scope = u32::from_ne_bytes(*bytes.get(24..)?.first_chunk()?);
                let address = Ipv6Addr::from(address);
                Some(SocketAddrV6::new(address, port, flow, scope).into())
            }
            _ => None,
        }
    }
}

impl PartialEq for Address {
    fn eq(&self, other: &Address) -> bool {
        self.bytes() == other.bytes()
    }
}

impl Eq for Address {}

impl Hash for Address {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.bytes().hash(state);
    }
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(address) = self.ip() {
            return address.fmt(f);
        }
        match self.bytes().get(size_of::<libc::sa_family_t>()..) {
            None | Some([]) => f.write_str("unnamed"),
            Some([0, name @ ..]) => write!(f, "@{}", name.escape_ascii()),
            Some(path) => {
                let path = path.strip_suffix(&[0]).unwrap_or(path);
                write!(f, "{}", path.escape_ascii())
            }
        }
    }
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

    /// A message. Empty if there is no such one.
    pub fn message(&self, index: usize) -> &[u8] {
        match self.received.get(index) {
            Some(received) => {
                let start = index * (self.size + GAP);
                &self.memory[start..start + received.length]
            }
            None => &[],
        }
    }

    /// Whether the end of a message is lost because it was too long.
    pub fn is_truncated(&self, index: usize) -> bool {
        self.received.get(index).is_some_and(|one| one.truncated)
    }

    /// Where a message came from.
    pub fn source(&self, index: usize) -> &Address {
        self.received
            .get(index)
            .map_or(&Address::NONE, |one| &one.source)
    }

    /// Receives at most `most` messages, and returns how many there are. The earlier ones are gone.
    ///
    /// # Errors
    /// `WouldBlock` when nothing is there; otherwise errors of recvmmsg(2).
    pub fn receive(&mut self, fd: impl AsFd, most: usize) -> io::Result<usize> {
        self.received.clear();
        let most = most.clamp(1, self.slots);
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
        }
        let got = loop {
            // SAFETY: the first `most` headers are initialised (`most` is at most the number of places).
            // Each names its own vector and source, which live until the call returns; the vector names
            // `size` bytes of this batch's memory, which is borrowed mutably, and the source has room for
            // the STORAGE bytes that are named. There is no control data. Without a time-out the last
            // argument is null.
            let got = unsafe {
                libc::recvmmsg(
                    fd.as_fd().as_raw_fd(),
                    headers.as_mut_ptr().cast(),
                    most as libc::c_uint,
                    libc::MSG_DONTWAIT as _,
                    std::ptr::null_mut(),
                )
            };
            if got >= 0 {
                break got as usize;
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        };
        for index in 0..got.min(most) {
            // SAFETY: initialised above.
            let header = unsafe { headers[index].assume_init_ref() };
            let named = header.msg_hdr.msg_namelen.min(STORAGE as libc::socklen_t);
            let mut source = Address::NONE;
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
            self.received.push(Received {
                length: (header.msg_len as usize).min(self.size),
                truncated: header.msg_hdr.msg_flags & libc::MSG_TRUNC != 0,
                source,
            });
        }
        Ok(self.received.len())
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
        let buffer = &mut self.memory[..self.size];
        let (received, source) = fd_passing::recv_from(fd, buffer, fds)?;
        let mut address = Address::NONE;
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
        self.received.push(Received {
            length: received.bytes.min(self.size),
            truncated: received.truncated,
            source: address,
        });
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
        to: Option<&Address>,
    ) -> io::Result<usize> {
        let first = messages.start.min(self.len());
        let count = messages.end.min(self.len()) - first.min(messages.end);
        if count == 0 {
            return Ok(0);
        }
        let mut headers = [const { MaybeUninit::<libc::mmsghdr>::zeroed() }; MAX_BATCH];
        let mut vectors = [const { MaybeUninit::<libc::iovec>::uninit() }; MAX_BATCH];
        for index in 0..count {
            let message = self.message(first + index);
            let vector = vectors[index].write(libc::iovec {
                iov_base: message.as_ptr().cast_mut().cast(),
                iov_len: message.len(),
            });
            // SAFETY: as in `receive`.
            let header = unsafe { headers[index].assume_init_mut() };
            header.msg_hdr.msg_iov = vector;
            header.msg_hdr.msg_iovlen = 1;
            if let Some(to) = to {
                header.msg_hdr.msg_name = (&raw const to.storage).cast_mut().cast();
                header.msg_hdr.msg_namelen = to.length;
            }
        }
        loop {
            // SAFETY: the first `count` headers are initialised, and `count` is at most MAX_BATCH, the
            // number of messages that a batch has. Each names its own vector, and that a message of this
            // batch; the kernel only reads them and the address `to`, and all outlive the call.
            let sent = unsafe {
                libc::sendmmsg(
                    fd.as_fd().as_raw_fd(),
                    headers.as_mut_ptr().cast(),
                    count as libc::c_uint,
                    (libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) as _,
                )
            };
            if sent >= 0 {
                return Ok(sent as usize);
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
    }
}

/// Sends one message to an address. Does not block.
///
/// # Errors
/// `WouldBlock` when the socket takes none now; otherwise errors of sendto(2).
pub fn send_to(fd: impl AsFd, message: &[u8], to: &Address) -> io::Result<()> {
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
        if sent >= 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::os::unix::net::{UnixDatagram, UnixStream};

    use super::*;

    #[test]
    fn messages_keep_their_bounds_and_sources() {
        let receiver = UdpSocket::bind("127.0.0.1:0").unwrap();
        let to = receiver.local_addr().unwrap();
        let [one, two] = [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").unwrap());
        one.send_to(b"first", to).unwrap();
        two.send_to(b"", to).unwrap();
        one.send_to(&[7; 100], to).unwrap();
        let mut batch = Batch::new(8, 64);
        assert_eq!(batch.receive(&receiver, 8).unwrap(), 3);
        assert_eq!(batch.message(0), b"first");
        assert_eq!(batch.message(1), b"");
        assert_eq!(batch.message(2), [7; 64]);
        assert!(!batch.is_truncated(0) && batch.is_truncated(2));
        assert_eq!(batch.source(0).ip(), one.local_addr().ok());
        assert_eq!(batch.source(1).ip(), two.local_addr().ok());
        assert_eq!(batch.source(0), batch.source(2));
        assert_ne!(batch.source(0), batch.source(1));
        let error = batch.receive(&receiver, 8).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        assert!(batch.is_empty());
    }

    #[test]
    fn a_run_of_messages_is_sent_on_with_their_bounds() {
        let [source, target] = [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").unwrap());
        let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
        let mut batch = Batch::new(4, 2000);
        for length in [0, 1, 1400, 3, 5] {
            sender
                .send_to(&vec![length as u8; length], source.local_addr().unwrap())
                .unwrap();
        }
        assert_eq!(batch.receive(&source, 64).unwrap(), 4, "as many as fit");
        // To an address that was received before.
        target
            .send_to(b"here", source.local_addr().unwrap())
            .unwrap();
        let mut other = Batch::new(4, 10);
        assert_eq!(other.receive(&source, 1).unwrap(), 1, "the fifth");
        assert_eq!(other.receive(&source, 1).unwrap(), 1);
        let address = *other.source(0);
        assert_eq!(batch.send(&source, 1..4, Some(&address)).unwrap(), 3);
        assert_eq!(batch.send(&source, 4..9, Some(&address)).unwrap(), 0);
        send_to(&source, b"last", &address).unwrap();
        for wanted in [vec![1; 1], vec![120; 1400], vec![3; 3], b"last".to_vec()] {
            let mut got = [0; 2000];
            let length = target.recv(&mut got).unwrap();
            assert_eq!(got[..length], wanted);
        }
    }

    #[test]
    fn a_unix_source_is_named_or_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let receiver = UnixDatagram::bind(&path).unwrap();
        let named = UnixDatagram::bind(dir.path().join("n")).unwrap();
        named.send_to(b"a", &path).unwrap();
        let unnamed = UnixDatagram::unbound().unwrap();
        unnamed.send_to(b"b", &path).unwrap();
        let mut batch = Batch::new(8, 64);
        assert_eq!(batch.receive(&receiver, 8).unwrap(), 2);
        assert!(batch.source(0).is_named() && !batch.source(1).is_named());
        let shown = batch.source(0).to_string();
        assert!(shown.ends_with("/n"), "{shown}");
        assert_eq!(batch.source(1).to_string(), "unnamed");
        batch
            .send(&receiver, 0..1, Some(&batch.source(0).clone()))
            .unwrap();
        let mut got = [0; 8];
        assert_eq!(named.recv(&mut got).unwrap(), 1);
    }

    #[test]
    fn a_message_is_received_with_its_descriptors_and_source() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let receiver = UnixDatagram::bind(&path).unwrap();
        let sender = UnixDatagram::bind(dir.path().join("n")).unwrap();
        sender.connect(&path).unwrap();
        let mut batch = Batch::new(8, 64);
        let mut fds = Vec::new();
        let error = batch.receive_with_rights(&receiver, &mut fds).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        let data = [io::IoSlice::new(b"with")];
        fd_passing::send(&sender, &data, &[dir_fd(&dir).as_fd(); 3]).unwrap();
        sender.send(&[7; 65]).unwrap();
        assert_eq!(batch.receive_with_rights(&receiver, &mut fds).unwrap(), 1);
        assert_eq!((batch.len(), batch.message(0)), (1, &b"with"[..]));
        assert_eq!((batch.is_truncated(0), fds.len()), (false, 3));
        let source = *batch.source(0);
        assert!(source.to_string().ends_with("/n"), "{source}");
        batch.send(&receiver, 0..1, Some(&source)).unwrap();
        assert_eq!(sender.recv(&mut [0; 8]).unwrap(), 4);
        batch.receive_with_rights(&receiver, &mut fds).unwrap();
        assert_eq!((batch.message(0).len(), batch.is_truncated(0)), (64, true));
    }

    fn dir_fd(dir: &tempfile::TempDir) -> std::fs::File {
        std::fs::File::open(dir.path()).unwrap()
    }

    #[test]
    fn errors_of_the_first_message_are_returned() {
        let (one, two) = UnixStream::pair().unwrap();
        let mut batch = Batch::new(8, 64);
        std::io::Write::write_all(&mut (&one), b"x").unwrap();
        assert_eq!(batch.receive(&two, 1).unwrap(), 1);
        drop(one);
        let error = batch.send(&two, 0..1, None).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }
}
