//! Single calls on a socket, for tests of what each of them does: one variant, one system call.
//!
//! The agent in a guest makes them on the kernel's sockets; tests make them on the library's own.
//! An error of a system call is part of the outcome.

use serde::{Deserialize, Serialize};

/// The number of a socket in the agent.
pub type Socket = u32;

/// Kinds of sockets.
#[derive(Copy, Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum Kind {
    /// SOCK_STREAM.
    Stream,
    /// SOCK_SEQPACKET.
    SeqPacket,
}

/// A number that getsockopt(2) or ioctl(2) returns.
#[derive(Copy, Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum Number {
    /// SIOCOUTQ: bytes sent and not yet received.
    Unsent,
    /// SIOCINQ: bytes available to a read.
    Unread,
    /// SO_VM_SOCKETS_BUFFER_SIZE.
    BufferSize,
}

/// Socket options that a single call sets.
#[derive(Copy, Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum Setting {
    /// SO_VM_SOCKETS_BUFFER_MIN_SIZE and _MAX_SIZE, bytes.
    BufferBounds(u32, u32),
    /// SO_VM_SOCKETS_BUFFER_SIZE, bytes: the bounds are left as they are.
    BufferSize(u32),
    /// SO_VM_SOCKETS_CONNECT_TIMEOUT, milliseconds.
    ConnectTimeout(u32),
    /// SO_RCVLOWAT, bytes.
    LowWater(u32),
    /// SO_LINGER, seconds (a kernel has no smaller unit).
    Linger(Option<u32>),
    /// SO_RCVTIMEO, milliseconds; 0 is none.
    ReceiveTimeout(u32),
    /// SO_ZEROCOPY.
    ZeroCopy,
}

/// One of the parts sent with one call.
#[derive(Copy, Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum Part {
    /// Mapped bytes at an offset in a page.
    Bytes {
        /// Number of bytes.
        len: usize,
        /// Offset of the first byte in its page.
        offset: usize,
    },
    /// Unmapped addresses.
    Unmapped {
        /// Number of bytes.
        len: usize,
    },
}

/// Flags of recv(2).
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct RecvFlags {
    /// MSG_PEEK.
    pub peek: bool,
    /// MSG_DONTWAIT.
    pub dontwait: bool,
    /// MSG_TRUNC: return the length of the message even if it exceeds the buffer.
    pub trunc: bool,
}

/// One call.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum Call {
    /// socket(2).
    Socket {
        /// Its type.
        kind: Kind,
    },
    /// bind(2).
    Bind {
        /// The socket.
        socket: Socket,
        /// CID; `None`: any local one.
        cid: Option<u32>,
        /// Port; `None`: any free one.
        port: Option<u32>,
    },
    /// connect(2), blocking.
    Connect {
        /// The socket.
        socket: Socket,
        /// CID of the peer.
        cid: u32,
        /// Port of the peer.
        port: u32,
    },
    /// connect(2) without waiting, and close(2) at once.
    ConnectAndClose {
        /// CID of the peer.
        cid: u32,
        /// Port of the peer.
        port: u32,
        /// Number of repetitions.
        times: u32,
    },
    /// listen(2).
    Listen {
        /// The socket.
        socket: Socket,
        /// Length of the accept queue.
        backlog: u32,
    },
    /// accept(2) with a timeout: `ETIMEDOUT` without a connection.
    Accept {
        /// The listener.
        socket: Socket,
        /// Milliseconds.
        timeout_ms: u32,
    },
    /// getsockname(2); the answer is in `peer`.
    Name {
        /// The socket.
        socket: Socket,
    },
    /// One send(2) of the first `len` bytes of a pattern.
    Send {
        /// The socket.
        socket: Socket,
        /// The pattern's seed.
        seed: u64,
        /// Number of bytes.
        len: usize,
        /// MSG_DONTWAIT.
        now: bool,
    },
    /// As `Send`, with MSG_EOR.
    SendRecord {
        /// The socket.
        socket: Socket,
        /// The pattern's seed.
        seed: u64,
        /// Number of bytes.
        len: usize,
    },
    /// One sendmsg(2) of a pattern's bytes from several parts, with MSG_ZEROCOPY if they are a page
    /// or more.
    SendParts {
        /// The socket.
        socket: Socket,
        /// The pattern's seed.
        seed: u64,
        /// The parts.
        parts: Vec<Part>,
    },
    /// Waits for an entry of the error queue and reads the queue: `bytes` sends are complete. With
    /// a timeout of 0 it does not wait: `EAGAIN` when the queue is empty.
    Completions {
        /// The socket.
        socket: Socket,
        /// Milliseconds.
        timeout_ms: u32,
    },
    /// One recv(2).
    Receive {
        /// The socket.
        socket: Socket,
        /// Bytes of the buffer.
        len: usize,
        /// Flags of recv(2).
        flags: RecvFlags,
    },
    /// Receives at least `len` bytes in leases, which are kept until the socket is closed; the
    /// answer is in `bytes`. Only sockets of the library support it.
    Lease {
        /// The socket.
        socket: Socket,
        /// Number of bytes.
        len: usize,
    },
    /// One recv(2) into unmapped memory.
    ReceiveNowhere {
        /// The socket.
        socket: Socket,
        /// Requested number of bytes.
        len: usize,
    },
    /// setsockopt(2).
    Set {
        /// The socket.
        socket: Socket,
        /// The option and its value.
        setting: Setting,
    },
    /// getsockopt(2) and ioctl(2); the answer is in `bytes`.
    Get {
        /// The socket.
        socket: Socket,
        /// The number.
        number: Number,
    },
    /// How many sockets the system has (`sockets: used` of /proc/net/sockstat), in `bytes`.
    SocketsUsed,
}

impl Call {
    /// The socket of the call, if it has one.
    pub fn socket(&self) -> Option<Socket> {
        match *self {
            Call::Socket { .. } | Call::ConnectAndClose { .. } | Call::SocketsUsed => None,
            Call::Bind { socket, .. }
            | Call::Connect { socket, .. }
            | Call::Listen { socket, .. }
            | Call::Accept { socket, .. }
            | Call::Name { socket }
            | Call::Send { socket, .. }
            | Call::SendRecord { socket, .. }
            | Call::SendParts { socket, .. }
            | Call::Completions { socket, .. }
            | Call::Receive { socket, .. }
            | Call::Lease { socket, .. }
            | Call::ReceiveNowhere { socket, .. }
            | Call::Set { socket, .. }
            | Call::Get { socket, .. } => Some(socket),
        }
    }
}
