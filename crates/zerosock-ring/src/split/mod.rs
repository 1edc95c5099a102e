//! Split virtqueues (virtio 1.2, section 2.7): the device half and the driver half.

mod index;

#[cfg(not(loom))]
mod chain;
#[cfg(not(loom))]
mod device;
#[cfg(not(loom))]
mod driver;
#[cfg(not(loom))]
mod layout;
#[cfg(not(loom))]
mod record;
#[cfg(not(loom))]
#[allow(unsafe_code)]
mod rings;

#[cfg(all(test, loom))]
#[allow(unsafe_code)]
mod loom_tests;
#[cfg(all(test, not(loom)))]
mod tests;

/// Behind each store of the device half that a successor can find. Tests end the process here.
#[cfg(not(loom))]
#[inline(always)]
fn stored() {
    #[cfg(all(test, not(miri)))]
    tests::inflight::stored();
}

#[cfg(not(loom))]
pub use {
    chain::{Chain, ChainFault},
    device::{BrokenReason, DeviceQueue, FrontChain, FrontToken, PopError, Single, Singles},
    driver::{AddError, Buffer, DriverError, DriverQueue, FixedChain, Used},
    layout::{DriverLayout, MAX_QUEUE_SIZE, QueueConfig, QueueError},
    record::{InflightRecord, LostChains},
};
