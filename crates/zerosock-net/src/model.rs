//! The net device model for the control side of vhost-user.

use zerosock_proto::wire::net::{
    Config, F_CSUM, F_CTRL_RX, F_CTRL_VQ, F_GUEST_ANNOUNCE, F_GUEST_CSUM, F_GUEST_ECN,
    F_GUEST_TSO4, F_GUEST_TSO6, F_HOST_ECN, F_HOST_TSO4, F_HOST_TSO6, F_MAC, F_MQ, F_MRG_RXBUF,
    F_MTU, F_STATUS, HEADER_LEN, MIN_MTU, Mac,
};
use zerosock_vhost_user::session::{F_EVENT_IDX, F_INDIRECT_DESC, F_VERSION_1};
use zerosock_vhost_user::{DeviceModel, FrontendFault, ProtocolFeatures};

/// The features of a back-end with all offloads.
pub const ALL_OFFLOADS: u64 = F_CSUM
    | F_GUEST_CSUM
    | F_GUEST_TSO4
    | F_GUEST_TSO6
    | F_GUEST_ECN
    | F_HOST_TSO4
    | F_HOST_TSO6
    | F_HOST_ECN;

/// The names of the features of virtio-net that some device here has, and of those that its drivers may
/// bring from another one.
const FEATURE_NAMES: &[(u64, &str)] = &[
    (F_CSUM, "CSUM"),
    (F_GUEST_CSUM, "GUEST_CSUM"),
    (F_MTU, "MTU"),
    (F_MAC, "MAC"),
    (F_GUEST_TSO4, "GUEST_TSO4"),
    (F_GUEST_TSO6, "GUEST_TSO6"),
    (F_GUEST_ECN, "GUEST_ECN"),
    (1 << 10, "GUEST_UFO"),
    (F_HOST_TSO4, "HOST_TSO4"),
    (F_HOST_TSO6, "HOST_TSO6"),
    (F_HOST_ECN, "HOST_ECN"),
    (1 << 14, "HOST_UFO"),
    (F_MRG_RXBUF, "MRG_RXBUF"),
    (F_STATUS, "STATUS"),
    (F_CTRL_VQ, "CTRL_VQ"),
    (F_CTRL_RX, "CTRL_RX"),
    (1 << 19, "CTRL_VLAN"),
    (F_GUEST_ANNOUNCE, "GUEST_ANNOUNCE"),
    (F_MQ, "MQ"),
    (1 << 54, "GUEST_USO4"),
    (1 << 55, "GUEST_USO6"),
    (1 << 56, "HOST_USO"),
    (1 << 57, "HASH_REPORT"),
    (1 << 60, "RSS"),
];

/// Why a device here cannot serve a driver.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum FeaturesError {
    /// With neither VERSION_1 nor MRG_RXBUF, headers have no `num_buffers` (virtio 1.3, 5.1.6.1).
    #[error(
        "a legacy driver without MRG_RXBUF: its headers have 10 bytes, those of the device {HEADER_LEN}; \
         with QEMU leave out disable-modern=on or mrg_rxbuf=off"
    )]
    ShortHeader,
}

/// The most queue pairs that a device here has.
pub const MAX_PAIRS: u16 = 16;

/// What a device tells its driver.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct NetModel {
    /// The MAC address; `None`: the front-end or the driver chooses one.
    pub mac: Option<Mac>,
    /// The MTU; `None`: the driver chooses one.
    pub mtu: Option<u16>,
    /// The largest MTU that a front-end may set; `None`: that of the device, if it has one.
    pub max_mtu: Option<u16>,
    /// Queue pairs, 1 to [`MAX_PAIRS`].
    pub pairs: u16,
    /// The features of the back-end.
    pub offloads: u64,
}

impl DeviceModel for NetModel {
    /// VIRTIO_F_RING_RESET is not among them: QEMU offers it to the guest and does not tell the device when
    /// a queue is reset, which then finds a new ring at an old position.
    fn features(&self) -> u64 {
        let always = F_VERSION_1
            | F_EVENT_IDX
            | F_INDIRECT_DESC
            | F_MRG_RXBUF
            | F_STATUS
            | F_CTRL_VQ
            | F_CTRL_RX
            | F_GUEST_ANNOUNCE;
        let optional = [
            (self.mac.is_some(), F_MAC),
            (self.mtu.is_some(), F_MTU),
            (self.pairs > 1, F_MQ),
        ];
        let set = optional.iter().filter(|(set, _)| *set);
        set.fold(always | self.offloads, |all, (_, bit)| all | bit)
    }

    fn check_features(&self, features: u64) -> Result<(), (FrontendFault, String)> {
        match features & (F_VERSION_1 | F_MRG_RXBUF) {
            0 => {
                let text = FeaturesError::ShortHeader.to_string();
                Err((FrontendFault::Unsupported, text))
            }
            _ => Ok(()),
        }
    }

    /// QEMU 7.2 adds each region once for each queue pair, which is refused: the regions overlap. It sends
    /// a table of all regions once only.
    fn has_memory_slots(&self) -> bool {
        self.pairs == 1
    }

    fn protocol_features(&self) -> ProtocolFeatures {
        ProtocolFeatures::STATUS | ProtocolFeatures::MTU | ProtocolFeatures::RARP
    }

    fn feature_name(&self, bit: u32) -> Option<&'static str> {
        let names = FEATURE_NAMES.iter();
        let mut found = names.filter(|(feature, _)| *feature == 1 << bit);
        found.next().map(|(_, name)| *name)
    }

    /// The queue pairs, and the control queue behind them.
    fn max_queues(&self) -> u16 {
        2 * self.pairs + 1
    }

    /// Front-ends of network devices take the number for that of queue pairs.
    fn announced_queues(&self) -> u16 {
        self.pairs
    }

    fn config(&self) -> Vec<u8> {
        let config = Config {
            mac: self.mac.unwrap_or(Mac([0; 6])),
            link_up: true,
            announce: false,
            max_queue_pairs: self.pairs,
            mtu: self.mtu.unwrap_or_default(),
        };
        config.emit().to_vec()
    }

    /// At most the MTU of the device, and what its back-end carries. Otherwise the front-end decides.
    fn set_mtu(&self, config: &mut [u8], mtu: u16) -> Result<(), (FrontendFault, String)> {
        if mtu < MIN_MTU {
            let text = format!("an MTU of {mtu} bytes: the least is {MIN_MTU}");
            return Err((FrontendFault::Payload, text));
        }
        let most = self.mtu.into_iter().chain(self.max_mtu).min();
        if let Some(most) = most.filter(|most| mtu > *most) {
            let text = format!("an MTU of {mtu} bytes: the interface has {most}");
            return Err((FrontendFault::Unsupported, text));
        }
        if let Some(field) = config.get_mut(Config::MTU) {
            field.copy_from_slice(&mtu.to_le_bytes());
        }
        Ok(())
    }
}
