//! Split virtqueues (virtio 1.2, section 2.7): the device half and the driver half.

mod chain;
mod device;
mod driver;
mod layout;

pub use chain::{Chain, ChainFault};
pub use device::{BrokenReason, DeviceQueue, PopError};
pub use driver::{AddError, Buffer, DriverError, DriverQueue, Used};
pub use layout::{DriverLayout, MAX_QUEUE_SIZE, QueueConfig, QueueError};
