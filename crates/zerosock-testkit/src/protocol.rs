//! The lines between the host and the agent in a guest: one JSON object a line.
//!
//! Commands are small steps on numbered sockets, each run on a thread of its own in the guest, so
//! that scenarios are written on the host, which checks the outcomes. An error of a system call is
//! part of the outcome, never a failed command.

use serde::{Deserialize, Serialize};

use super::calls::Call;
pub use super::calls::Socket;

/// A command with the id of its reply.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Request {
    /// Chosen by the host, repeated in the reply.
    pub id: u64,
    /// The command.
    pub command: Command,
}

/// The agent reports when it has read so many bytes.
pub const READ_REPORT: usize = 1024;

/// Messages of the agent.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum FromGuest {
    /// The guest has (re)booted and takes commands.
    Hello {
        /// `uname -r`.
        release: String,
    },
    /// The agent has read so many more bytes of commands: at least [`READ_REPORT`].
    Read {
        /// Bytes since the last report.
        bytes: usize,
    },
    /// A command is done.
    Reply {
        /// The number of the request.
        id: u64,
        /// The outcome, or an error text when the command was invalid.
        outcome: Result<Outcome, String>,
    },
}

/// Which bytes to send.
#[derive(Copy, Clone, Debug, Serialize, Deserialize)]
pub enum Source {
    /// The first `len` bytes of a [`zerosock_cli::vm::pattern::Pattern`].
    Pattern {
        /// Its seed.
        seed: u64,
        /// Number of bytes.
        len: u64,
    },
    /// The bytes that an earlier [`Command::Receive`] kept.
    Kept,
}

/// Directions of a shutdown.
#[derive(Copy, Clone, Debug, Serialize, Deserialize)]
pub enum ShutdownDirection {
    /// SHUT_RD.
    Receive,
    /// SHUT_WR.
    Send,
    /// SHUT_RDWR.
    Both,
}

/// Options of a socket.
#[derive(Copy, Clone, Debug, Serialize, Deserialize)]
pub enum SocketOption {
    /// SO_RCVLOWAT, bytes.
    ReceiveLowWater(u32),
    /// SO_VM_SOCKETS_BUFFER_SIZE, bytes.
    BufferSize(u64),
}

/// When a TCP socket gets its TLS keys.
#[derive(Copy, Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum Keys {
    /// Before a sender is opened over the socket.
    First,
    /// After the sender is opened, before anything is sent.
    Then,
    /// Never: unencrypted.
    Never,
}

/// What the agent does with patterns in the memory of its guest. Results are in `text`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum PatternStep {
    /// Fills all free memory: bytes that were filled, and pages of former endpoints among them.
    Fill {
        /// Address and length of the extents that former endpoints had.
        former: Vec<(u64, u64)>,
        /// Huge pages to leave for the endpoints of this boot.
        huge_pages: u64,
        /// Of the pattern.
        seed: u64,
    },
    /// Describes the first byte that has changed; nothing if none has.
    Check,
    /// The extents of the files of endpoints, one a line.
    Locate {
        /// The mount of hugetlbfs with the files.
        dir: String,
    },
}

/// One step.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Command {
    /// Connects (blocking).
    Connect {
        /// CID of the peer.
        cid: u32,
        /// Port of the peer.
        port: u32,
    },
    /// Binds and listens.
    Listen {
        /// Port.
        port: u32,
    },
    /// Accepts one connection (blocking).
    Accept {
        /// The listener.
        socket: Socket,
    },
    /// Accepts forever and echoes, each connection on a thread of its own.
    Echo {
        /// The listener.
        socket: Socket,
    },
    /// Sends everything (blocking).
    Send {
        /// The socket.
        socket: Socket,
        /// What.
        source: Source,
        /// Sizes of the writes, in turn.
        chunks: Vec<usize>,
    },
    /// Sends a pattern through a `zerosock::zc::Sender`, zero-copy where possible, with as many
    /// buffers in flight as it has slots. The back-end and its counters are in `text`.
    SendOwned {
        /// Over which socket; a duplicate of it is the sender's.
        socket: Socket,
        /// The pattern's seed.
        seed: u64,
        /// Number of bytes.
        len: u64,
        /// Bytes per buffer.
        chunk: usize,
        /// Back-end: `uring`, `error queue`, `copy`, or `any`.
        backend: String,
    },
    /// As [`Command::SendOwned`], over TCP on the guest's loopback device, with or without kernel
    /// TLS. `sha256` is of the bytes that the other end, also in the guest, has received and
    /// decrypted.
    SendOwnedTcp {
        /// The pattern's seed.
        seed: u64,
        /// Number of bytes.
        len: u64,
        /// Bytes per buffer.
        chunk: usize,
        /// Back-end: `uring`, `error queue`, `copy`, or `any`.
        backend: String,
        /// When encryption begins.
        keys: Keys,
    },
    /// Receives until `limit` bytes or the end of the stream.
    Receive {
        /// The socket.
        socket: Socket,
        /// Limit of bytes; `None`: to the end.
        limit: Option<u64>,
        /// Keeps the bytes for [`Source::Kept`] and hashes them at the end.
        keep: bool,
        /// Sends one byte back when done, before anything is hashed.
        acknowledge: bool,
    },
    /// Waits until the socket is readable.
    Poll {
        /// The socket.
        socket: Socket,
        /// Milliseconds.
        timeout_ms: u32,
    },
    /// Shuts down.
    Shutdown {
        /// The socket.
        socket: Socket,
        /// The directions.
        how: ShutdownDirection,
    },
    /// Sets an option.
    Set {
        /// The socket.
        socket: Socket,
        /// The option and its value.
        option: SocketOption,
    },
    /// Closes.
    Close {
        /// The socket.
        socket: Socket,
    },
    /// One call on a socket.
    Call(Call),
    /// Runs a program to its end; its output is in `text`, its status in `bytes`.
    Run {
        /// Program and arguments.
        argv: Vec<String>,
    },
    /// Starts a program and leaves it running; its output goes to the console.
    Start {
        /// Program and arguments.
        argv: Vec<String>,
    },
    /// A step with patterns in memory.
    Patterns(PatternStep),
    /// Reboots at once.
    Reboot,
    /// Powers off at once.
    PowerOff,
}

/// Outcome of a step; fields that do not apply are left at their defaults.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Outcome {
    /// The new socket.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub socket: Option<Socket>,
    /// CID and port of the peer of an accepted connection.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer: Option<(u32, u32)>,
    /// Bytes sent or received, or the exit status of a program.
    pub bytes: u64,
    /// SHA-256 of them, in hexadecimal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
    /// The stream ended, or the socket became readable.
    pub end: bool,
    /// The message that was received ends a record: MSG_EOR.
    pub ends_record: bool,
    /// It was longer than the buffer: MSG_TRUNC.
    pub truncated: bool,
    /// The name of the error that ended the step, as `EPIPE`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub errno: Option<String>,
    /// How long it took, in microseconds.
    pub elapsed_us: u64,
    /// Output of a program.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
}
