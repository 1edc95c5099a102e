//! What kind of device a front-end gets, as far as the control side knows it.

use std::fmt;

use crate::stats::Fault;

/// The features, the queues and the configuration space of a kind of device.
///
/// The session keeps what a driver has negotiated and written, and hands it to the model, which has
/// no state of its own: one model serves each front-end that connects.
pub trait DeviceModel: fmt::Debug + Send + Sync {
    /// The virtio features that are offered. VHOST_USER_F_PROTOCOL_FEATURES is added to them.
    fn features(&self) -> u64;

    /// The most queues that a driver can have.
    fn max_queues(&self) -> u16;

    /// The number of queues of a driver that has accepted `features` and has left `config` in the
    /// configuration space; at most [`max_queues`](Self::max_queues).
    fn queues(&self, features: u64, config: &[u8]) -> u16 {
        let (_, _) = (features, config);
        self.max_queues()
    }

    /// The configuration space before the driver writes to it.
    fn config(&self) -> Vec<u8>;

    /// Carries out a write of the driver's in `config`, the configuration space as it is.
    ///
    /// # Errors
    /// The kind of the front-end's fault and a text for a log. The default refuses every write.
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
    /// A queue of the device runs.
    pub running: bool,
    /// Where the bytes go.
    pub offset: usize,
    /// The bytes. They need not lie within the configuration space.
    pub bytes: &'a [u8],
}
