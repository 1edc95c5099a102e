//! Zero-copy send on the kernel's sockets, without the book-keeping.
//!
//! A [`Sender`] sends owned buffers over a TCP, UDP, raw, packet or vsock socket and gives each
//! back when the kernel has let go of it. How it knows is its own business: over io_uring, over the
//! error queue, or because it copied. Whatever the back-end, everything below works the same. From raw
//! and packet sockets, and from TCP that encrypts (kernel TLS), it copies.
//!
//! # Knowing that a buffer is free
//! There are three ways, to be mixed at will:
//!
//! - [`Sender::returned`] gives buffers back one by one, with how each went.
//! - *Slots*: sends attach to the notifier of a slot; a flush closes it; and one [`Notification`],
//!   with the slot's tag and a sequence number, says that all of them are free.
//! - *Inline*: a send carries room for up to 16 [`Completion`]s and comes back with ranges of the
//!   numbers of earlier sends that are over, `lo..=hi`. That costs no system call over io_uring,
//!   one that does not wait with the error queue, and never a poll.
//!
//! # An example of the inline way
//! Each send that may go without a copy has a number, from 0 on. Two buffers take turns here: before
//! one is used again its number must have been named.
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
//! let mut over = 0;
//! let mut room = [Completion::default(); 16];
//! for _ in 0..6 {
//!     let buffer = loop {
//!         // A buffer that is named by a completion can be had back.
//!         free.extend(std::iter::from_fn(|| sender.returned()).map(|returned| returned.buffer));
//!         match free.pop() {
//!             Some(buffer) => break buffer,
//!             None => sender.wait(None)?,
//!         }
//!     };
//!     let told = sender.send_with(Outgoing::new(buffer), &mut room)?;
//!     over += room[..told].iter().map(|range| range.count()).sum::<u32>();
//! }
//! sender.finish(None)?;
//! let told = sender.completions(&mut room)?;
//! over += room[..told].iter().map(|range| range.count()).sum::<u32>();
//! assert_eq!(over, 6);
//! # drop(sender);
//! let mut received = Vec::new();
//! peer.read_to_end(&mut received)?;
//! assert_eq!(received.len(), 60_000);
//! # Ok(())
//! # }
//! ```
//!
//! Sends that are corked ([`Outgoing::more`]), and some that are always copied ([`Copying::Always`])
//! among others, change nothing in this. The pieces of a corked datagram have a number each, which
//! are over together, since the kernel makes one datagram of them. What is always copied has no
//! number, and is in no range:
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
//! let told = sender.completions(&mut room)?;
//! let over: u32 = room[..told].iter().map(|range| range.count()).sum();
//! assert_eq!(over, 3);
//! let mut bytes = [0; 4096];
//! assert_eq!((peer.recv(&mut bytes)?, peer.recv(&mut bytes)?), (3024, 100));
//! # Ok(())
//! # }
//! ```
//!
//! # How it ends
//! [`Sender::close`] waits until everything is over and says so, or what is left when its time is up;
//! [`Sender::into_socket`] gives the socket back when nothing is under way; and a sender can be
//! dropped. A TCP stream of which something is missing then is reset: its peer meets ECONNRESET, not
//! an end that looks like one of the whole. A buffer that a slow receiver holds is free with that, too.
//! Senders of several threads ([`SharedSender::close`]) and of tasks end alike. What the kernel has taken
//! is its own to send; seen to fail at that is kernel TLS in Linux 6.1, which can drop the last records
//! of a socket that is full when it is closed.
//!
//! A sender that goes on can have a limit ([`Builder::limit`]): when a send takes longer than that, its
//! TCP stream is reset, and buffers that only a slow receiver held come back at once.
//!
//! # What must hold
//! A buffer is the sender's from its acceptance until it is given back: nobody can touch or free it
//! meanwhile, also after an error, a time-out, a drop of the sender or a panic. Every accepted send
//! is told of exactly once each way that it takes part in: given back unless buffers are discarded,
//! by its slot's notifier if it has a slot, and inline if it has a number. Streams keep their order,
//! and short sends are completed.

#![deny(unsafe_code)]

mod answers;
mod calibration;
mod close;
mod cork;
mod flight;
mod flights;
mod limit;
mod line;
mod message;
mod policy;
mod ranges;
mod readiness;
mod sender;
mod shared;
mod slots;
mod stats;
pub mod sys;
#[cfg(feature = "tokio")]
pub mod tokio;
mod turn;

pub use close::{Closed, End, Keeping, Kept};
pub use message::{Copying, Failed, Outgoing, Refusal, Refused, Returned, Sent};
pub use policy::Threshold;
pub use ranges::Completion;
pub use sender::{Builder, Interest, OpenError, Sender};
pub use shared::SharedSender;
pub use slots::{NoSuchSlot, Notification};
pub use stats::{Basis, Report, Stats};
pub use sys::{Address, Backend, Buf, FileMap, FilePart, Kind, Mapped, Pool, PoolBuf, Stable};
