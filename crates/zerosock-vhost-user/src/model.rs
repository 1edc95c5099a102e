//! The features, queues and configuration space of a kind of device.

use std::fmt;

use vhost::vhost_user::message::VhostUserProtocolFeatures;

use crate::stats::FrontendFault;

/// The features, the queues and the configuration space of a kind of device.
///
/// A model has no state: the session keeps what a driver has negotiated and written, and passes it
/// in. One model serves every front-end that connects.
pub trait DeviceModel: fmt::Debug + Send + Sync {
    /// The virtio features to offer. The session adds VHOST_USER_F_PROTOCOL_FEATURES and
    /// VHOST_F_LOG_ALL.
    fn features(&self) -> u64;

    /// The protocol features that this kind of device has beyond
    /// [`PROTOCOL_FEATURES`](crate::session::PROTOCOL_FEATURES).
    fn protocol_features(&self) -> VhostUserProtocolFeatures {
        VhostUserProtocolFeatures::empty()
    }

    /// Whether the device can serve a driver that has accepted these features, all of them offered.
    ///
    /// # Errors
    /// The kind of fault and a text for the log. The default accepts every set.
    fn check_features(&self, features: u64) -> Result<(), (FrontendFault, String)> {
        let _ = features;
        Ok(())
    }

    /// Whether front-ends may add and remove memory regions one by one (CONFIGURE_MEM_SLOTS), instead
    /// of sending all of them at once.
    fn has_memory_slots(&self) -> bool {
        true
    }

    /// The name of a virtio feature in logs, by its bit; `None`: its number is enough.
    fn feature_name(&self, bit: u32) -> Option<&'static str> {
        let _ = bit;
        None
    }

    /// Whether a driver makes buffers available as soon as its queues run. If it does not, its memory is
    /// probably not shared, and the log says so.
    fn is_given_buffers_at_once(&self) -> bool {
        false
    }

    /// The largest number of queues that a driver can use.
    fn max_queues(&self) -> u16;

    /// The answer to GET_QUEUE_NUM. Front-ends of network devices expect the number of queue pairs.
    fn announced_queues(&self) -> u16 {
        self.max_queues()
    }

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
    ) -> Result<(), (FrontendFault, String)> {
        let (_, offset) = (config, write.offset);
        let text = format!("offset {offset} of the configuration space cannot be written");
        Err((FrontendFault::Unsupported, text))
    }

    /// Applies the MTU of a front-end, in bytes, to `config`, a new configuration space
    /// (NET_SET_MTU).
    ///
    /// # Errors
    /// The kind of fault and a text for the log. The default refuses every MTU.
    fn set_mtu(&self, config: &mut [u8], mtu: u16) -> Result<(), (FrontendFault, String)> {
        let (_, _) = (config, mtu);
        Err((FrontendFault::Unsupported, "the device has no MTU".into()))
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
