//! Single calls on a socket, for tests of what each of them does: one variant, one system call.
//!
//! The agent in a guest makes them on the kernel's sockets; tests make them on the library's own.
//! What a system call refuses is part of the outcome.

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

/// A number that can be asked of a socket.
#[derive(Copy, Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum Number {
    /// SIOCOUTQ: bytes sent that have not been taken.
    Unsent,
    /// SIOCINQ: bytes that a read would give.
    Unread,
    /// SO_VM_SOCKETS_BUFFER_SIZE.
    BufferSize,
}

/// Options of a socket, that single calls set.
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

/// A part of what is sent with one call.
#[derive(Copy, Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum Part {
    /// So many bytes, which begin so far behind the beginning of a page.
    Bytes {
        /// How many.
        len: usize,
        /// Where in a page they begin.
        offset: usize,
    },
    /// So many bytes of addresses at which there is nothing.
    Unmapped {
        /// How many.
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
        /// Of which kind.
        kind: Kind,
    },
    /// bind(2).
    Bind {
        /// Which socket.
        socket: Socket,
        /// Which CID; nothing: any of one's own.
        cid: Option<u32>,
        /// Which port; nothing: any that is free.
        port: Option<u32>,
    },
    /// connect(2), blocking.
    Connect {
        /// Which socket.
        socket: Socket,
        /// To which endpoint.
        cid: u32,
        /// To which of its ports.
        port: u32,
    },
    /// connect(2) without waiting, and close(2) at once.
    ConnectAndClose {
        /// To which endpoint.
        cid: u32,
        /// To which of its ports.
        port: u32,
        /// How often.
        times: u32,
    },
    /// listen(2).
    Listen {
        /// Which socket.
        socket: Socket,
        /// How many may wait.
        backlog: u32,
    },
    /// accept(2), for a time. `ETIMEDOUT` when nobody comes.
    Accept {
        /// The listener.
        socket: Socket,
        /// How long, in milliseconds.
        timeout_ms: u32,
    },
    /// getsockname(2); the answer is in `peer`.
    Name {
        /// Which socket.
        socket: Socket,
    },
    /// One send(2) of the first `len` bytes of a pattern.
    Send {
        /// Over which socket.
        socket: Socket,
        /// The pattern's seed.
        seed: u64,
        /// How many bytes.
        len: usize,
        /// MSG_DONTWAIT.
        now: bool,
    },
    /// As `Send`, with MSG_EOR.
    SendRecord {
        /// Over which socket.
        socket: Socket,
        /// The pattern's seed.
        seed: u64,
        /// How many bytes.
        len: usize,
    },
    /// One sendmsg(2) of a pattern's bytes that lie in parts, with MSG_ZEROCOPY if it is a page or
    /// more.
    SendParts {
        /// Over which socket.
        socket: Socket,
        /// The pattern's seed.
        seed: u64,
        /// Where the bytes lie.
        parts: Vec<Part>,
    },
    /// Waits until the error queue has something and reads it: `bytes` sends are complete. With a
    /// time of 0 it does not wait: `EAGAIN` when it is empty.
    Completions {
        /// Of which socket.
        socket: Socket,
        /// How long, in milliseconds.
        timeout_ms: u32,
    },
    /// One recv(2).
    Receive {
        /// From which socket.
        socket: Socket,
        /// Bytes of the buffer.
        len: usize,
        /// Flags of recv(2).
        flags: RecvFlags,
    },
    /// Takes all that is there, and what comes, in leases, and keeps them until the socket is closed;
    /// `bytes` so many bytes at least. Only sockets of the library can.
    Lease {
        /// From which socket.
        socket: Socket,
        /// How many bytes.
        len: usize,
    },
    /// One recv(2) to where there is no memory.
    ReceiveNowhere {
        /// From which socket.
        socket: Socket,
        /// Bytes that are asked for.
        len: usize,
    },
    /// setsockopt(2).
    Set {
        /// Of which socket.
        socket: Socket,
        /// Which, to what.
        setting: Setting,
    },
    /// getsockopt(2) and ioctl(2); the answer is in `bytes`.
    Get {
        /// Of which socket.
        socket: Socket,
        /// Which.
        number: Number,
    },
    /// How many sockets the system has (`sockets: used` of /proc/net/sockstat), in `bytes`.
    SocketsUsed,
}

impl Call {
    /// The socket that it is about.
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
