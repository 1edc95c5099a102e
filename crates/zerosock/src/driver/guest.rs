//! A driver on memory that it was given, as in a guest: it creates no memory and has no vhost-user connection. Its caller
//! passes the request that starts the queues to the device.

use std::sync::atomic::AtomicBool;

use zerosock_proto::vsock::QueuePairs;
use zerosock_vhost_user::frontend::{Plan, SharedMemory};

use super::Driver;
use super::arena::{Arena, ArenaError, Layout};
use super::config::{ConfigError, DriverConfig};
use super::doorbell::Doorbell;
use super::guest_device::GuestDevice;
use super::link::{DriverAttachError, Link};
use crate::registration::Start;

impl DriverConfig {
    /// Bytes of memory that a driver with this configuration needs if it does not create it itself: whole huge pages
    /// of 2 MiB.
    ///
    /// # Errors
    /// [`ConfigError`]: the first invalid setting.
    pub fn memory_len(&self) -> Result<u64, ConfigError> {
        self.check()?;
        Ok(layout(self).len())
    }
}

/// Each huge page can lie anywhere in the memory of the guest, and there is one queue pair.
fn layout(config: &DriverConfig) -> Layout {
    Layout::new(config, QueuePairs::ONE, Plan::of_huge_pages())
}

impl Driver {
    /// Lays out the queues in the memory of `device`, and passes them on by `start`, which returns the features in use.
    ///
    /// # Errors
    /// Those of `start`, and [`DriverAttachError`]: a setting is out of its range, the memory cannot be mapped, or the
    /// device has not the features that it needs.
    pub fn attach_guest<E: From<DriverAttachError>>(
        device: GuestDevice,
        config: DriverConfig,
        start: impl FnOnce(&Start) -> Result<u64, E>,
    ) -> Result<Driver, E> {
        let (driver, request) = Driver::on_memory(device, config)?;
        let (asked, started) = (request.features, start(&request)?);
        if asked != started {
            return Err(DriverAttachError::Missing("the features that were accepted").into());
        }
        driver.kick_posted();
        Ok(driver)
    }

    /// The driver, and the request that starts its queues.
    fn on_memory(
        device: GuestDevice,
        config: DriverConfig,
    ) -> Result<(Driver, Start), DriverAttachError> {
        config.check()?;
        let layout = layout(&config);
        let (link, features) = Link::of_guest(&device, &config)?;
        let shared = SharedMemory::of_file(device.memory, layout.plan());
        let shared = shared.map_err(ArenaError::Shared)?;
        let arena = Arena::in_memory(&config, layout, shared)?;
        let start = Start {
            features,
            queue_size: config.queue_size,
            rings: [0, 1, 2].map(|queue| arena.0.rings.get(queue).map_or(0, |ring| ring.desc)),
        };
        let doorbell = Doorbell::Stream(device.doorbell, AtomicBool::default());
        Ok((Driver::over(config, link, arena, doorbell)?, start))
    }
}

#[cfg(test)]
#[path = "guest_tests.rs"]
mod tests;
