//! The lines between the host and the agent in a guest: one JSON object a line.
//!
//! Commands are small steps on numbered sockets, each run on a thread of its own in the guest,
//! so that a scenario is written where it is judged: on the host. What a system call refuses is
//! part of the outcome, never a failed command.

use serde::{Deserialize, Serialize};

use super::calls::Call;
pub use super::calls::Socket;

/// A step with the number under which it is answered.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Request {
    /// Chosen by the host, repeated in the reply.
    pub id: u64,
    /// What to do.
    pub command: Command,
}

/// What the agent says.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum FromGuest {
    /// The guest has (re)booted and takes commands.
    Hello {
        /// `uname -r`.
        release: String,
    },
    /// A command is done.
    Reply {
        /// The number of the request.
        id: u64,
        /// What came of it; a text when the command itself made no sense.
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
        /// How many bytes.
        len: u64,
    },
    /// What an earlier [`Command::Receive`] kept.
    Kept,
}

/// Directions of a shutdown.
#[derive(Copy, Clone, Debug, Serialize, Deserialize)]
pub enum How {
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

/// When a TCP socket has its keys for TLS, and encrypts.
#[derive(Copy, Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum Keys {
    /// Before a sender is opened over it.
    First,
    /// Then, before anything is sent.
    Then,
    /// It sends as it is.
    Never,
}

/// One step.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Command {
    /// Connects (blocking).
    Connect {
        /// To which endpoint.
        cid: u32,
        /// To which of its ports.
        port: u32,
    },
    /// Binds and listens.
    Listen {
        /// On which port.
        port: u32,
    },
    /// Accepts one connection (blocking).
    Accept {
        /// The listener.
        socket: Socket,
    },
    /// Accepts for ever and sends back what comes, each connection on a thread of its own.
    Echo {
        /// The listener.
        socket: Socket,
    },
    /// Sends everything (blocking).
    Send {
        /// Over which socket.
        socket: Socket,
        /// What.
        source: Source,
        /// Sizes of the writes, in turn.
        chunks: Vec<usize>,
    },
    /// Sends a pattern through a `zerosock::zc::Sender`, without a copy where that is possible, as
    /// many buffers at once as it has places for. What carried it, and its counts, are in `text`.
    SendOwned {
        /// Over which socket; a duplicate of it is the sender's.
        socket: Socket,
        /// The pattern's seed.
        seed: u64,
        /// How many bytes.
        len: u64,
        /// In buffers of so many.
        chunk: usize,
        /// Over which back-end: `uring`, `error queue`, `copy`, or `any`.
        backend: String,
    },
    /// As [`Command::SendOwned`], over TCP on the guest's loopback device, which its kernel encrypts
    /// (TLS) or not. `sha256` is of what the other end, which is the guest's own, has received and
    /// decrypted.
    SendOwnedTcp {
        /// The pattern's seed.
        seed: u64,
        /// How many bytes.
        len: u64,
        /// In buffers of so many.
        chunk: usize,
        /// Over which back-end: `uring`, `error queue`, `copy`, or `any`.
        backend: String,
        /// When it begins to be encrypted.
        keys: Keys,
    },
    /// Receives until `limit` bytes or the end of the stream.
    Receive {
        /// From which socket.
        socket: Socket,
        /// At most so many bytes; nothing: to the end.
        limit: Option<u64>,
        /// Keeps the bytes for [`Source::Kept`]; hashes them after the last has come.
        keep: bool,
        /// Sends one byte back when done, before anything is hashed.
        acknowledge: bool,
    },
    /// Waits until the socket is readable.
    Poll {
        /// Which socket.
        socket: Socket,
        /// How long, in milliseconds.
        timeout_ms: u32,
    },
    /// Shuts down.
    Shutdown {
        /// Which socket.
        socket: Socket,
        /// Which directions.
        how: How,
    },
    /// Sets an option.
    Set {
        /// Of which socket.
        socket: Socket,
        /// Which, to what.
        option: SocketOption,
    },
    /// Closes.
    Close {
        /// Which socket.
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
    /// Reboots at once.
    Reboot,
    /// Powers off at once.
    PowerOff,
}

/// What came of a step; fields that do not apply are left at their defaults.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Outcome {
    /// The socket that was made.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub socket: Option<Socket>,
    /// Who is at the other end of an accepted connection.
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
    /// What a program printed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
}
