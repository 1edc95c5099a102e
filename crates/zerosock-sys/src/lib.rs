//! The system calls of zerosock that no safe crate offers, as small safe functions.
//!
//! Each module covers one kernel interface:
//!
//! - [`send_slices`] and [`recv_slices`] move bytes between a socket and guest memory in place.
//! - [`sigbus`] handles faults in guest memory that its owner truncated, [`memfd`] creates memory that
//!   cannot shrink.
//! - [`fd_passing`] sends descriptors over Unix sockets, [`socket_file`] creates Unix sockets with a
//!   path, [`vsock`] opens kernel vsock sockets.
//! - [`mailbox`] passes messages to an event loop, [`wait_ready`] waits for a descriptor.
//! - [`mmsg`] receives and sends many messages with one call.
//! - [`reaper`] has the threads that close the descriptor of a [`PeerFd`], [`notify`] wakes peers, and
//!   [`account`] limits the descriptors and memory of each peer.
//! - [`bpf`] redirects packets between sockets inside the kernel, [`tcp_written`] counts what is on its way.
//! - [`tun`] moves Ethernet frames between TAP interfaces and guest memory, [`xdp`] between queues of
//!   other interfaces and guest memory (AF_XDP).
//! - [`hugetlbfs`] has files of huge pages, [`pin`] keeps their pages in place, and [`pagemap`] knows where that is.
//! - [`sandbox`] confines this process: capabilities, files and system calls.
//! - [`PrivateMemory`] goes back to the system when it is dropped.
//! - [`affinity`] pins threads, [`network`] isolates them, [`OwnerLock`] knows which of them holds it.
//!
//! # Invariants
//! No function panics on input of a peer. Only the SIGBUS handler and the reaper keep state. Each `unsafe`
//! block has a SAFETY argument. Where rustix offers a safe call, it is used instead of libc.

pub mod account;
pub mod affinity;
pub mod bpf;
pub mod fd_passing;
pub mod hugetlbfs;
mod kernel_release;
mod log_limit;
pub mod mailbox;
pub mod memfd;
pub mod mmsg;
pub mod mounts;
pub mod network;
pub mod notify;
mod owner_lock;
pub mod pagemap;
mod peer_fd;
pub mod pin;
mod private_memory;
mod ready;
pub mod reaper;
pub mod reuseport;
mod rtnetlink;
pub mod sandbox;
pub mod sigbus;
mod slices;
pub mod socket_file;
mod socket_option;
pub mod socket_path;
mod tcp_counts;
pub mod tun;
pub mod vsock;
pub mod xdp;

pub use log_limit::LogLimit;
pub use owner_lock::{OwnerGuard, OwnerLock};
pub use peer_fd::PeerFd;
pub use private_memory::PrivateMemory;
pub use ready::wait_ready;
pub use slices::{
    MAX_SLICES, ReceivedBytes, read_slices, read_slices_at, read_slices_now,
    recv_packet_and_rights, recv_slices, recv_slices_and_rights, send_slices,
    send_slices_zero_copy, write_slices,
};
pub use tcp_counts::tcp_written;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
