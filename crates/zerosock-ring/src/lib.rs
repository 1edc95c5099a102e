//! Shared memory and split virtqueues, device half and driver half.
#![deny(unsafe_code)]

mod fault;
mod memory;
mod slice;
pub mod split;

pub use fault::handle_fault;
pub use memory::{MAX_REGIONS, MapError, Memory, RegionConfig, TranslateError};
pub use slice::{GuestSlice, Piece, SliceBuf};
pub use split::{
    AddError, BrokenReason, Buffer, Chain, ChainFault, DeviceQueue, DriverError, DriverLayout,
    DriverQueue, MAX_QUEUE_SIZE, PopError, QueueConfig, QueueError, Used,
};
