//! Shared memory and split virtqueues, device half and driver half.
//!
//! The room between a peer's memory and everybody who has a use for what lies in it. It maps
//! memory that others write ([`Memory`]), finds the bytes behind guest addresses ([`Piece`],
//! [`GuestSlice`]), and takes chains of buffers from a queue and puts them back ([`DeviceQueue`]),
//! or posts them and gets them back ([`DriverQueue`]). It knows no protocol, makes no decision
//! about what a buffer holds, and does no input or output: kicks, calls and payload are the
//! caller's. The specification is virtio 1.2, section 2.7; clause numbers are its.
//!
//! # Whom it trusts
//! Nobody. The peer writes its memory at any moment, and a front-end can even take it away.
//! - Whatever a peer can write is read once, into a private copy that is named so (`head_copy`,
//!   `descriptor_copy`), checked, and only the copy is used.
//! - Payload is never under a Rust reference; [`GuestSlice`] copies it without a data race, also
//!   where two threads of safe code read and write the same bytes. The exception are peers that
//!   are processes and whose opener declared [`Trust`]: payload only, never a ring.
//! - A chain that is nonsense is handed out as [`PopError::Malformed`] and costs itself; a ring
//!   that is nonsense ([`PopError::Broken`], [`DriverError`]) costs the queue. Nothing panics, and
//!   no peer makes us hold or walk more than an honest one of the same queue size could.
//! - Memory that vanishes raises SIGBUS; [`handle_fault`] puts zeros there and marks that memory
//!   lost ([`Memory::is_lost`]), and nobody else notices.
//!
//! # Who owns what
//! A [`Memory`] never changes: a new memory table is a new one. Queues hold an `Arc` of the memory
//! that their rings lie in; a [`GuestSlice`] borrows it; a [`Piece`] is only numbers, checked
//! again by the memory that resolves it, so a stale one cannot leave memory, merely be wrong.
//! A [`Chain`] is a token: popped from a queue, and given back to the same queue by
//! [`complete`](DeviceQueue::complete), the one end of every write into peer memory, or by
//! [`unpop`](DeviceQueue::unpop). Each half of a queue has one owner at a time (`&mut self`); the
//! peer has the other half.
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
//! | ring entries, descriptors, flags: Relaxed atomics | the index they go with | they are read once, and whole |
//!
//! Descriptors in indirect tables and payload are copied by `copy.rs`, which orders nothing: the
//! index orders them, and a peer that writes them at other times makes only its own bytes
//! unspecified.
//!
//! # Cost
//! One load of the peer's index, one store of ours, one fence and one look at the peer's wish per
//! batch; per chain one read of each entry and descriptor, and a comparison per buffer as long as
//! buffers stay in one region. Nothing is allocated once warm, nothing locked, no system call made.
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
mod fault;
#[cfg(not(loom))]
#[allow(unsafe_code)]
mod memory;
#[cfg(not(loom))]
#[allow(unsafe_code)]
mod slice;

#[cfg(not(loom))]
#[allow(unsafe_code)]
mod trust;

#[cfg(not(loom))]
pub use {
    fault::handle_fault,
    memory::{
        MAX_REGIONS, MapError, Memory, RegionConfig, RetiredRegion, TranslateError, Unmapper,
    },
    slice::{GuestSlice, Piece, PieceBuf, SliceBuf},
    split::{
        AddError, BrokenReason, Buffer, Chain, ChainFault, DeviceQueue, DriverError, DriverLayout,
        DriverQueue, FixedChain, MAX_QUEUE_SIZE, PopError, QueueConfig, QueueError, Used,
    },
    trust::{Claim, Trust},
};
