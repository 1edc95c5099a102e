//! The features, queues and configuration space of a kind of device.

use std::fmt;

use crate::stats::Fault;

/// The features, the queues and the configuration space of a kind of device.
///
/// A model has no state: the session keeps what a driver has negotiated and written, and passes it
/// in. One model serves every front-end that connects.
pub trait DeviceModel: fmt::Debug + Send + Sync {
    /// The virtio features to offer. The session adds VHOST_USER_F_PROTOCOL_FEATURES.
    fn features(&self) -> u64;

    /// The largest number of queues that a driver can use.
    fn max_queues(&self) -> u16;

    /// The number of queues for a driver that accepted `features` and wrote `config` to the
    /// configuration space; at most [`max_queues`](Self::max_queues).
    fn queues(&self, features: u64, config: &[u8]) -> u16 {
        let (_, _) = (features, config);
        self.max_queues()
    }

    /// The configuration space before the first write by the driver.
    fn config(&self) -> Vec<u8>;

    /// Applies a write by the driver to `config`, the current configuration space.
    ///
    /// # Errors
    /// The kind of fault and a text for the log. The default refuses every write.
    fn write_config(
        &self,
        config: &mut [u8],
        write: ConfigWrite<'_>,
    ) -> Result<(), (Fault, String)> {
        let (_, offset) = (config, write.offset);
        let text = format!("offset {offset} of the configuration space cannot be written");
        Err((Fault::Unsupported, text))
    }
}

/// A driver's write to the configuration space.
#[derive(Copy, Clone, Debug)]
pub struct ConfigWrite<'a> {
    /// The features that the driver has accepted.
    pub features: u64,
    /// Whether a queue of the device runs.
    pub running: bool,
    /// Offset of the first byte in the configuration space.
    pub offset: usize,
    /// The bytes to write. They may lie beyond the end of the configuration space.
    pub bytes: &'a [u8],
}
