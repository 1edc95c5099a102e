//! The counters of a sender, and what it has found out.

use std::io;

use super::Backend;
use crate::sys::Kind;

/// Counts of a sender since it was opened.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct Stats {
    /// Sends that were accepted.
    pub accepted: u64,
    /// Of those, how many are over: all of it was taken, or it failed. Its buffer may be owed yet. A
    /// datagram's pieces that are copied after all are not over until they are again.
    pub over: u64,
    /// Bytes that the kernel took.
    pub bytes: u64,
    /// Requests that were made of the kernel: more than sends where one took several, fewer where
    /// several sends of a stream were gathered.
    pub requests: u64,
    /// Of those, how many from memory of a pool that is registered with the kernel.
    pub registered: u64,
    /// Sends whose buffer the device or the receiver read itself.
    pub in_place: u64,
    /// Sends that the kernel has taken bytes of without a copy, and has let go of; again for each request
    /// that one took. One notification can be of several.
    pub notified: u64,
    /// Of those, how many the kernel copied after all.
    pub copied_by_kernel: u64,
    /// Sends copied because the kernel had no memory to do without.
    pub copied_for_memory: u64,
    /// System calls for sending, asking and waiting.
    pub system_calls: u64,
    /// Sends that failed.
    pub failed: u64,
    /// Of those, how many because their time was up ([`Builder::limit`](super::Builder::limit)).
    pub timed_out: u64,
    /// Messages of the socket's error queue that were about something else (ICMP errors, timestamps),
    /// read in search of notifications and dropped: over the error queue back-end alone.
    pub foreign: u64,
}

/// How a [threshold](Report::threshold) is known, or that there is none.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum Basis {
    /// The builder was told.
    Configured,
    /// No length is decided yet, or none ever will be: the back-end copies.
    Unknown,
    /// The length below it and the one above have been measured, as far as they are decided.
    Measured,
    /// One of them could not be measured, because sockets were full or sends of several lengths went
    /// together: such lengths go in place from 16 KiB on, until they are measured anew.
    Assumed,
}

/// What a sender is, and what it has learnt.
#[derive(Copy, Clone, Debug)]
#[non_exhaustive]
pub struct Report {
    /// What carries its sends.
    pub backend: Backend,
    /// Why io_uring does not, if it was to be had and the kernel refused: `PermissionDenied` where it
    /// is forbidden, `Unsupported` before Linux 6.2 and
    /// the stable releases of 6.1 that have its flags.
    pub uring_refused: Option<io::ErrorKind>,
    /// The kind of its socket.
    pub socket: Kind,
    /// From which length on it sends in place. As told; or the shortest from which on every length
    /// that is decided goes in place, over this kind of socket and back-end in the whole process.
    /// None while there is no such length. Lengths are decided in classes, each up to twice as long;
    /// those that have not been are sent both ways for now, also above the threshold, and each is
    /// measured anew after a million sends. What the kernel copies all the same is told by `off`.
    pub threshold: Option<usize>,
    /// How that is known.
    pub threshold_is: Basis,
    /// The same for memory of a pool; over io_uring that is registered, and costs less.
    pub registered_threshold: Option<usize>,
    /// How that is known.
    pub registered_threshold_is: Basis,
    /// Zero copy is off: for good, or because the kernel copied all the same.
    pub off: bool,
    /// Arenas of pools (of up to 1 GiB each) that are registered with the kernel: 64 at most. Sends
    /// from others are counted, and measured, as sends from other memory.
    pub registered: usize,
}
