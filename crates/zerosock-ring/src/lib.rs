//! Shared memory and split virtqueues, device half and driver half.
#![deny(unsafe_code)]

mod event_idx;
mod split;
mod sync;

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
pub use {
    fault::handle_fault,
    memory::{MAX_REGIONS, MapError, Memory, RegionConfig, TranslateError},
    slice::{GuestSlice, Piece, SliceBuf},
    split::{
        AddError, BrokenReason, Buffer, Chain, ChainFault, DeviceQueue, DriverError, DriverLayout,
        DriverQueue, MAX_QUEUE_SIZE, PopError, QueueConfig, QueueError, Used,
    },
};
