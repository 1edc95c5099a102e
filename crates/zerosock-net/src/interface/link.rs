//! What an interface negotiates with its device over the control socket.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::os::unix::net::UnixStream;
use std::path::Path;

use vhost::vhost_user::message::VhostUserProtocolFeatures;
use zerosock_proto::wire::net::{
    Config, ETHERNET_LEN, F_CSUM, F_GUEST_CSUM, F_GUEST_ECN, F_GUEST_TSO4, F_GUEST_TSO6,
    F_HOST_ECN, F_HOST_TSO4, F_HOST_TSO6, F_MAC, F_MRG_RXBUF, F_MTU, F_STATUS, HEADER_LEN, Mac,
    Offloads,
};
use zerosock_vhost_user::frontend::{Frontend, FrontendError};
use zerosock_vhost_user::session::{F_EVENT_IDX, F_VERSION_1};

use super::config::{InterfaceConfig, InterfaceConnectError};

/// Bytes of a VLAN tag.
const VLAN_TAG: usize = 4;
/// Bytes of the configuration space up to the MAC address, and up to the status.
const MAC_LEN: usize = 6;
const STATUS_LEN: usize = 8;

/// A connected device and what was negotiated with it. No queue has started.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) frontend: Frontend,
    pub(super) terms: InterfaceTerms,
}

/// What was negotiated.
#[derive(Clone, Copy, Debug)]
pub(super) struct InterfaceTerms {
    pub(super) event_idx: bool,
    /// A received frame may take several buffers.
    pub(super) mergeable: bool,
    /// The offloads that the device takes.
    pub(super) to_device: Offloads,
    /// Those that the device may use.
    pub(super) from_device: Offloads,
    pub(super) mac: Mac,
    pub(super) mtu: Option<u16>,
    /// The configuration space has the link status.
    pub(super) has_status: bool,
}

impl Link {
    pub(super) fn connect(
        path: &Path,
        config: &InterfaceConfig,
    ) -> Result<Link, InterfaceConnectError> {
        let frontend = Frontend::connect(path, config.control_timeout)?;
        Link::negotiate(frontend, config)
    }

    /// As [`connect`](Self::connect), over a connected socket.
    pub(super) fn over(
        socket: UnixStream,
        config: &InterfaceConfig,
    ) -> Result<Link, InterfaceConnectError> {
        let frontend = Frontend::from_stream(socket, config.control_timeout)?;
        Link::negotiate(frontend, config)
    }

    fn negotiate(
        mut frontend: Frontend,
        config: &InterfaceConfig,
    ) -> Result<Link, InterfaceConnectError> {
        let offered = frontend.get_features()?;
        // Older devices may have headers of 10 bytes.
        if offered & F_VERSION_1 == 0 {
            return Err(InterfaceConnectError::Missing("VIRTIO_F_VERSION_1"));
        }
        let protocol = VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::CONFIG;
        let (features, protocol) = frontend.negotiate(wanted(offered, config), protocol)?;
        // Without a configuration space, which a VMM would have, the fields in it are unknown.
        let known = match protocol.contains(VhostUserProtocolFeatures::CONFIG) {
            true => features,
            false => features & !(F_MAC | F_MTU | F_STATUS),
        };
        let space = read_config(&mut frontend, known)?;
        let mac = config.mac.unwrap_or_else(|| match known & F_MAC {
            0 => random_mac(),
            _ => space.mac,
        });
        let terms = InterfaceTerms {
            event_idx: features & F_EVENT_IDX != 0,
            mergeable: features & F_MRG_RXBUF != 0,
            to_device: Offloads::of_device(features),
            from_device: Offloads::of_driver(features),
            mac,
            mtu: (known & F_MTU != 0).then_some(space.mtu),
            has_status: known & F_STATUS != 0,
        };
        if let Some(mtu) = terms.mtu
            && !terms.mergeable
            && HEADER_LEN + ETHERNET_LEN + VLAN_TAG + usize::from(mtu)
                > config.rx_buffer_size as usize
        {
            return Err(InterfaceConnectError::Mtu(mtu));
        }
        Ok(Link { frontend, terms })
    }
}

/// The features to accept of those offered. Without mergeable buffers, frames with TSO would need
/// buffers of 64 KiB and are not accepted.
fn wanted(offered: u64, config: &InterfaceConfig) -> u64 {
    let mut wanted = F_VERSION_1 | F_MRG_RXBUF | F_MAC | F_MTU | F_STATUS;
    if config.event_idx {
        wanted |= F_EVENT_IDX;
    }
    let Offloads {
        csum,
        tso4,
        tso6,
        ecn,
    } = config.offloads;
    // TSO needs checksums, and ECN needs TSO (5.1.3.1).
    let mut add = |csum_bit, tso4_bit, tso6_bit, ecn_bit, with_tso: bool| {
        if !csum || offered & csum_bit == 0 {
            return;
        }
        wanted |= csum_bit;
        let mut tso_bits = 0;
        if with_tso && tso4 {
            tso_bits |= offered & tso4_bit;
        }
        if with_tso && tso6 {
            tso_bits |= offered & tso6_bit;
        }
        if tso_bits != 0 && ecn {
            tso_bits |= ecn_bit;
        }
        wanted |= tso_bits;
    };
    add(F_CSUM, F_HOST_TSO4, F_HOST_TSO6, F_HOST_ECN, true);
    let mergeable = offered & F_MRG_RXBUF != 0;
    add(
        F_GUEST_CSUM,
        F_GUEST_TSO4,
        F_GUEST_TSO6,
        F_GUEST_ECN,
        mergeable,
    );
    wanted
}

/// Reads the part of the configuration space that the features make valid; the rest is 0.
pub(super) fn read_config(frontend: &mut Frontend, features: u64) -> Result<Config, FrontendError> {
    let len = if features & F_MTU != 0 {
        Config::LEN
    } else if features & F_STATUS != 0 {
        STATUS_LEN
    } else if features & F_MAC != 0 {
        MAC_LEN
    } else {
        0
    };
    let mut bytes = [0; Config::LEN];
    if len > 0 {
        frontend.read_config(0, &mut bytes[..len])?;
    }
    Ok(Config::parse(&bytes))
}

/// A random address of local significance.
fn random_mac() -> Mac {
    // The standard library seeds it at random.
    let random = RandomState::new().build_hasher().finish().to_le_bytes();
    let [first, b, c, d, e, f, ..] = random;
    Mac([first & 0xfc | 2, b, c, d, e, f])
}

#[cfg(test)]
#[path = "link_tests.rs"]
mod tests;
