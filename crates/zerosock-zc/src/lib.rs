//! Zero-copy send on kernel sockets.
//!
//! A [`Sender`] sends owned buffers over a TCP, UDP or vsock socket without a copy, and returns
//! each buffer when the kernel no longer reads it. The application neither reads the error queue
//! nor counts notifications: this crate does, over io_uring or over the error queue, and copies
//! where neither works. Large writes gain by it (from about 10 KB on, according to the kernel's
//! documentation), and memory that is expensive to copy: pages of files, memory that a virtual
//! machine shares.
//!
//! The library `zerosock` has this crate as `zerosock::zc`.
//!
//! # Example
//!
//! ```
//! use std::io::Read;
//! use std::net::{TcpListener, TcpStream};
//! use zerosock_zc::{Outgoing, Sender};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let listener = TcpListener::bind("127.0.0.1:0")?;
//! let socket = TcpStream::connect(listener.local_addr()?)?;
//! let mut peer = listener.accept()?.0;
//!
//! let mut sender: Sender<Vec<u8>> = Sender::builder().open(socket)?;
//! sender.send(Outgoing::new(vec![b'a'; 100_000]))?;
//! // The buffer belongs to the sender until the kernel no longer reads it.
//! let buffer = loop {
//!     match sender.returned() {
//!         Some(returned) => {
//!             returned.outcome?;
//!             break returned.buffer;
//!         }
//!         None => sender.wait(None)?,
//!     }
//! };
//! assert_eq!(buffer.len(), 100_000);
//!
//! assert!(sender.close(None).is_whole());
//! let mut received = Vec::new();
//! peer.read_to_end(&mut received)?;
//! assert_eq!(received, buffer);
//! # Ok(())
//! # }
//! ```
//!
//! # Buffers
//! A buffer is of any type that is [`Stable`]: `Vec<u8>`, `Bytes`, `Arc<[u8]>`, a block of a
//! [`Pool`], which io_uring registers once instead of pinning it for each send, a part of a
//! [`FileMap`], memory that a peer shares ([`Mapped`]), or any of these at run time ([`Buf`]).
//!
//! # Completions
//! An application learns in three ways that a buffer is free, and can use all of them together:
//!
//! - One by one: [`Sender::returned`] returns each buffer, with the result of its send.
//! - By slot: sends attach to the notifier of a slot, a flush closes the notifier, and one
//!   [`Notification`], with the slot's tag and a sequence number, says that all its buffers are
//!   free.
//! - Inline: a send has room for up to 16 [`Completion`]s and fills it with ranges of the numbers
//!   of completed sends (`lo..=hi`). This costs no system call over io_uring, and one that does not
//!   wait over the error queue.
//!
//! Each send that may go without a copy has a number, from 0 on. This example uses two buffers in
//! turn and reuses each when its number has been in a range:
//!
//! ```
//! use std::io::Read;
//! use std::net::{TcpListener, TcpStream};
//! use zerosock_zc::{Completion, Outgoing, Sender};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let listener = TcpListener::bind("127.0.0.1:0")?;
//! let socket = TcpStream::connect(listener.local_addr()?)?;
//! let mut peer = listener.accept()?.0;
//!
//! let mut sender: Sender<Vec<u8>> = Sender::builder().inline_completions().open(socket)?;
//! let mut free = vec![vec![b'a'; 10_000], vec![b'b'; 10_000]];
//! let mut completed = 0;
//! let mut room = [Completion::default(); 16];
//! for _ in 0..6 {
//!     let buffer = loop {
//!         // The sender returns a buffer after its number was in a completion.
//!         free.extend(std::iter::from_fn(|| sender.returned()).map(|returned| returned.buffer));
//!         match free.pop() {
//!             Some(buffer) => break buffer,
//!             None => sender.wait(None)?,
//!         }
//!     };
//!     let count = sender.send_with(Outgoing::new(buffer), &mut room)?;
//!     completed += room[..count].iter().map(|range| range.count()).sum::<u32>();
//! }
//! sender.finish(None)?;
//! let count = sender.completions(&mut room)?;
//! completed += room[..count].iter().map(|range| range.count()).sum::<u32>();
//! assert_eq!(completed, 6);
//! # drop(sender);
//! let mut received = Vec::new();
//! peer.read_to_end(&mut received)?;
//! assert_eq!(received.len(), 60_000);
//! # Ok(())
//! # }
//! ```
//!
//! The pieces of a corked datagram ([`Outgoing::more`]) have a number each. The kernel makes one
//! datagram of them, so they complete together. A send that is always copied ([`Copying::Always`])
//! has no number and is in no range:
//!
//! ```
//! use std::net::UdpSocket;
//! use zerosock_zc::{Completion, Copying, Outgoing, Sender};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let (socket, peer) = (UdpSocket::bind("127.0.0.1:0")?, UdpSocket::bind("127.0.0.1:0")?);
//! socket.connect(peer.local_addr()?)?;
//! let mut sender: Sender<Vec<u8>> = Sender::builder().inline_completions().open(socket)?;
//! let mut room = [Completion::default(); 16];
//!
//! // One datagram of three pieces, and one that is copied.
//! let head = sender.send(Outgoing::new(vec![b'h'; 20]).more())?;
//! let body = sender.send(Outgoing::new(vec![b'b'; 3000]).more())?;
//! let tail = sender.send(Outgoing::new(vec![b't'; 4]))?;
//! let alone = sender.send(Outgoing::new(vec![b'a'; 100]).copying(Copying::Always))?;
//! assert_eq!((head, body, tail, alone), (Some(0), Some(1), Some(2), None));
//!
//! sender.finish(None)?;
//! let count = sender.completions(&mut room)?;
//! let completed: u32 = room[..count].iter().map(|range| range.count()).sum();
//! assert_eq!(completed, 3);
//! let mut bytes = [0; 4096];
//! assert_eq!((peer.recv(&mut bytes)?, peer.recv(&mut bytes)?), (3024, 100));
//! # Ok(())
//! # }
//! ```
//!
//! # Waiting
//! [`Sender::wait`] blocks until a buffer is free or a notification is posted. An event loop waits
//! on the descriptor of the sender ([`Sender::interest`], [`Sender::next_timeout`]) and calls
//! [`Sender::poll`]. A [`SharedSender`] is for several threads, and `tokio::AsyncSender` (with the
//! feature `tokio`) for tasks.
//!
//! # Closing
//! [`Sender::close`] waits until every send is finished, and returns what is left after its
//! timeout. [`Sender::into_socket`] returns the socket when nothing is under way. A sender can also
//! be dropped. When a part of a TCP stream is missing at that time, the stream is reset: its peer
//! gets ECONNRESET instead of an end of file after a part of the data. The reset also frees buffers
//! that wait for a slow receiver. A [limit](SenderBuilder::limit) does the same while the sender is in
//! use, when a send exceeds it.
//!
//! # Invariants
//! - From its acceptance until it is returned, a buffer belongs to the sender. No safe code of the
//!   process can change or free it, also after an error, a time-out, a panic, or a drop of the
//!   sender. A dropped sender with buffers that the kernel still reads goes to a thread that waits
//!   for the kernel; if no thread can be started, the sender is leaked.
//! - Each accepted send is reported exactly once in each way that it takes part in: it is returned
//!   (unless buffers are discarded), it counts for the notifier of its slot if it has one, and its
//!   number is in one range if it has one.
//! - A stream keeps the order of its sends, and what the kernel takes in part is completed. A peer
//!   never takes a part of a TCP stream for the whole, nor a part of a datagram for a datagram.
//! - A lack of memory delays a send or makes it a copy. It never stalls the sender.
//! - Unsafe code is in the module `sys` only, in files that allow it.
//!
//! # Kernel behaviour
//! Interfaces, and the first kernel that has each:
//!
//! | interface | Linux |
//! |---|---|
//! | MSG_ZEROCOPY and completions on the error queue ([`SendBackend::ErrorQueue`]): TCP | 4.14 |
//! | the same: UDP | 5.0 |
//! | the same: vsock streams | 6.7 |
//! | IORING_OP_SEND_ZC, IORING_OP_SENDMSG_ZC, and notifications that say whether the kernel copied ([`SendBackend::Uring`]) | 6.2, and stable releases of 6.1 |
//! | registered memory in a send of several pieces | 6.15 |
//!
//! Documents: `Documentation/networking/msg_zerocopy.rst` of the kernel, io_uring_enter(2) and
//! io_uring_prep_send_zc(3). Facts that the code relies on beyond these are stated, with the
//! functions of the kernel, where they matter:
//!
//! - `sys::requests`: which results of io_uring are followed by a notification, also when a request
//!   is cancelled before it begins.
//! - `sys::uring`: notifications of TCP requests that share a packet are tied together since Linux
//!   6.10, so that a packet must end with a request now and then (MSG_EOR).
//! - `sys::arenas`: when registered memory may be replaced.
//! - `sys::first_id`, `sys::notification_ids` and `sys::in_doubt`: how MSG_ZEROCOPY assigns ids
//!   to sends, also to those that fail.
//! - `cork`: what a socket keeps of a datagram in pieces (MSG_MORE) when a later piece fails.
//!
//! Sends on the following sockets are copied: raw and packet sockets, Unix sockets, TCP with an
//! upper-layer protocol (kernel TLS), and TCP in a sockmap with a program for messages (sk_msg),
//! where the kernel ignores MSG_ZEROCOPY. vsock messages (SOCK_SEQPACKET) are refused
//! ([`SocketKind::VsockMessages`]).
//!
//! If kernel TLS is enabled on a TCP socket that has a sender, later sends are copied, over
//! io_uring with one request at a time, since kernel TLS refuses MSG_WAITALL.
//!
//! What the crate cannot prevent:
//!
//! - A socket is added to a sockmap after its first send over the error queue, and the program
//!   there takes all of the data: the kernel assigns no ids to those sends, and their buffers are
//!   not returned. A socket is removed from the sockmap before the error queue has been read: a
//!   buffer can be returned too early. Neither concerns io_uring, where sends have no ids.
//! - Kernel TLS in Linux 6.1 can drop the last records of a socket that is full when it is closed.
#![deny(unsafe_code)]

mod backend_choice;
mod builder;
mod close;
mod copy_feedback;
mod cork;
mod in_flight;
mod indexed_queue;
mod late_sends;
mod limit;
mod message;
pub mod notifications;
mod pieces;
mod policy;
mod ranges;
mod readiness;
mod results;
mod send_queue;
mod sender;
mod shared;
mod slots;
mod stats;
#[doc(hidden)]
pub mod sys;
#[cfg(feature = "tokio")]
pub mod tokio;

pub use builder::{SenderBuilder, SenderOpenError};
pub use close::{CloseOutcome, Closed, KeepReason, StillBusy};
pub use message::{Copying, Failed, Outgoing, Refusal, Refused, Returned, Sent};
pub use ranges::Completion;
pub use sender::{Interest, Sender};
pub use shared::SharedSender;
pub use slots::{NoSuchSlot, Notification};
pub use stats::{OffReason, SenderReport, SenderStats};
pub use sys::{
    Buf, FileMap, FilePart, Mapped, Pool, PoolBuf, SendBackend, SocketAddress, SocketKind, Stable,
};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
