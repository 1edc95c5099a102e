//! Shared memory and split virtqueues, device half and driver half.
//!
//! This crate maps memory that a peer writes ([`Memory`]), finds the bytes behind guest addresses
//! ([`Piece`], [`GuestSlice`]), and takes descriptor chains from a queue and returns them
//! ([`DeviceQueue`]), or posts them and gets them back ([`DriverQueue`]). It knows no protocol,
//! does not interpret the contents of buffers, and does no input or output: kicks, calls and
//! payload belong to the caller. The specification is virtio 1.2, section 2.7; clause numbers are
//! its.
//!
//! # Invariants
//! The peer is hostile: it writes its memory at any moment, and a front-end can even truncate it.
//! - Everything that a peer can write is read once, into a private copy with a name that says so
//!   (`head_copy`, `descriptor_copy`), checked, and only the copy is used.
//! - Payload is never behind a Rust reference; [`GuestSlice`] copies it without a data race, also
//!   where two threads of safe code read and write the same bytes. The exception are peer processes
//!   for which [`Trust`] was declared: payload only, never a ring.
//! - A malformed chain is returned as [`PopError::Malformed`] and affects no other chain; a
//!   malformed ring ([`PopError::Broken`], [`DriverError`]) stops the queue. No peer input panics,
//!   and no peer makes us hold or walk more than an honest one of the same queue size could.
//! - Memory that vanishes raises SIGBUS; [`handle_fault`] maps zeros there and marks that memory
//!   lost ([`Memory::is_lost`]). Other memories are unaffected.
//!
//! # Ownership
//! A [`Memory`] never changes: a new memory table is a new `Memory`. One can consist of parts of
//! another, which it keeps ([`Memory::of_extents`]). Queues hold an `Arc` of the memory that contains
//! their rings; a [`GuestSlice`] borrows it; a [`Piece`] consists of numbers that the memory checks
//! when it resolves them, so a stale one may be wrong but stays within memory. A [`Chain`] is a token:
//! popped from a queue, and returned to the same queue by [`complete`](DeviceQueue::complete), where
//! every write into peer memory ends, or by [`unpop`](DeviceQueue::unpop). Each half of a queue has
//! one owner at a time (`&mut self`); the peer has the other half.
//!
//! # Memory ordering
//! The two rings of a queue follow one protocol with the roles exchanged; `split/index.rs` has it
//! once, and loom checks it there.
//!
//! | written by | pairs with | so that |
//! |---|---|---|
//! | producer: index, Release, in `publish` | consumer: index, Acquire, in `available`, `pop`, `poll` | ring entries, descriptors and payload are visible before the index that announces them |
//! | producer: index, then SeqCst fence, then reads flags or event index | consumer: flags or event index, then SeqCst fence, then reads the index, in `enable_notifications` | at least one of the two sees the other: no kick and no call is lost |
//! | consumer: its own ring's index, Release, after it read the entries | producer: that index, Acquire, before it uses the descriptors again | an entry is not overwritten while it is read |
//! | ring entries, descriptors, flags: Relaxed atomics | the index that announces them | each is read once, and untorn |
//!
//! Descriptors in indirect tables and payload are copied by `copy/mod.rs`, which orders nothing: the
//! index orders them, and a peer that writes them at other times makes only its own bytes
//! unspecified.
//!
//! # Cost
//! Per batch: one load of the peer's index, one store of ours, one fence and one read of the peer's
//! notification request. Per chain: one read of each entry and descriptor, and a comparison per
//! buffer as long as buffers stay in one region. No allocation once warm, no lock, no system call.
#![deny(unsafe_code)]

#[cfg_attr(loom, allow(dead_code))] // only the loom tests use it then
mod event_idx;
#[cfg_attr(loom, allow(dead_code))] // likewise
mod split;
mod sync;

#[cfg(not(loom))]
#[allow(unsafe_code)]
mod copy;
#[cfg(not(loom))]
#[allow(unsafe_code)]
mod dirty;
#[cfg(not(loom))]
#[allow(unsafe_code)]
mod fault;
#[cfg(not(loom))]
#[allow(unsafe_code)]
mod memory;
#[cfg(not(loom))]
#[allow(unsafe_code)]
mod slice;
#[cfg(not(loom))]
#[allow(unsafe_code)]
mod state_map;

#[cfg(not(loom))]
#[allow(unsafe_code)]
mod trust;

#[cfg(not(loom))]
pub use {
    dirty::{DirtyLog, LOG_PAGE},
    fault::handle_fault,
    memory::{
        Extent, ExtentError, FlatError, FlatMapping, MAX_REGIONS, MapError, Memory, RegionConfig,
        RetiredRegion, TranslateError, Unmapper,
    },
    slice::{GuestSlice, Piece, SliceBuf},
    split::{
        AddError, BrokenReason, Buffer, Chain, ChainFault, DeviceQueue, DriverError, DriverLayout,
        DriverQueue, FixedChain, FrontChain, FrontToken, InflightRecord, LostChains,
        MAX_QUEUE_SIZE, PopError, QueueConfig, QueueError, Single, Singles, Used,
    },
    state_map::{StateArray, StateMap, StateMapError, StateWord},
    trust::{Claim, Trust},
};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
