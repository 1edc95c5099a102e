//! AF_XDP: Ethernet frames between the queue of a network interface and memory that the program
//! chooses, such as the memory of a guest.
//!
//! An [`XdpInterface`] attaches a program of a few instructions (XDP) that hands the frames of a queue to the
//! [`XdpSocket`] of this queue. The memory of a socket (UMEM) is one range: the regions of a guest's
//! [`Memory`](zerosock_ring::Memory), and private chunks behind them ([`Umem`]).
//!
//! | ring | entries | direction |
//! |---|---|---|
//! | fill | chunks for frames to come | to the kernel |
//! | receive | frames in such chunks | from the kernel |
//! | transmit | frames anywhere in the UMEM | to the kernel |
//! | completion | frames that the kernel does not read any more | from the kernel |
//!
//! # Invariants
//! - The kernel writes a received frame of at most [`MAX_FRAME`] bytes to [`FRAME_OFFSET`] bytes behind the
//!   address of its chunk. The program lets no longer frame through. Whether the driver of an
//!   interface writes anything else is found out in private chunks ([`Probe`]).
//! - Chunks in the fill ring cannot be recalled: the socket has to be closed ([`XdpSocket::close`]).
//! - Frames complete in the order in which they were sent ([`XdpSocket::completed`]), in whichever order the
//!   kernel returns them.
//! - Registering memory, binding and closing can take long: the kernel pins all of the memory, and
//!   waits for other processors. They run on threads of their own ([`Task`]), for which no other has to wait.
//! - An address or a length from the kernel is checked against the UMEM.
//!
//! # Use
//! Open the interface, which needs CAP_BPF and CAP_NET_ADMIN; both can be dropped then
//! ([`drop_bpf_capabilities`](crate::bpf::drop_bpf_capabilities)). A socket needs CAP_NET_RAW: make a
//! [`Umem`], [`register`](Registered::create) it, and [`bind`](Registered::bind) it to a queue. Memory that is
//! locked counts against RLIMIT_MEMLOCK, unless the thread has CAP_IPC_LOCK.

mod error;
mod frame;
mod interface;
mod probe;
mod program;
mod registered;
mod ring;
mod sent;
mod socket;
mod task;
mod umem;
mod watch;

pub use error::XdpError;
pub use frame::{MAX_PARTS, XdpFrame};
pub use interface::{AttachMode, InterfaceOptions, MAX_QUEUES, XdpInterface};
pub use probe::{Probe, Verdict};
pub use program::LongFrames;
pub use registered::Registered;
pub use ring::RingSizes;
pub use socket::{Closing, ReceivedChunk, SendError, XdpSocket};
pub use task::Task;
pub use umem::{PROBES, Umem};
pub use watch::LinkWatch;

/// Bytes of a chunk of the fill ring, and the most bytes that one descriptor sends.
pub const CHUNK: u32 = 2048;
/// Bytes in front of each frame that the kernel keeps free (XDP_PACKET_HEADROOM).
const KERNEL_HEADROOM: u32 = 256;
/// Bytes that it keeps free on request: with these a frame ends at the end of a guest's buffer of 1536
/// bytes, behind a virtio-net header of 12 bytes.
const HEADROOM: u32 = 268;
/// Where the kernel writes a frame, in bytes from the address of its chunk.
pub const FRAME_OFFSET: u32 = KERNEL_HEADROOM + HEADROOM;
/// Most bytes of a received frame: the rest of a chunk.
pub const MAX_FRAME: u32 = CHUNK - FRAME_OFFSET;
