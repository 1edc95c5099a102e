//! What a driver has negotiated, and what ends the service of a device.

use zerosock_proto::wire::net::{
    ETHERNET_LEN, F_CTRL_VQ, F_GUEST_ANNOUNCE, F_MQ, F_MRG_RXBUF, F_MTU, F_STATUS, MAX_FRAME, Mac,
    Offloads,
};

use crate::backend::FrameError;

/// Frames of a burst, for each queue pair and direction.
pub(super) const BURST: usize = 32;
/// Bursts of a turn.
pub(super) const BURSTS: usize = 8;
/// Bytes moved in one turn, likewise: about a tenth of a millisecond of copying in the kernel.
pub(super) const BYTES: u64 = 1 << 20;
/// Bytes of two VLAN tags, which an MTU does not include.
const VLAN_TAGS: usize = 8;

/// What a driver must have accepted to be asked for an announcement.
const ANNOUNCEMENT: u64 = F_GUEST_ANNOUNCE | F_STATUS | F_CTRL_VQ;

/// What does not depend on the driver.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fixed {
    /// What the configuration space says, in bytes.
    pub(super) mtu: Option<u16>,
    /// See [`Terms`].
    pub(super) needs_addresses: bool,
    /// See [`Terms`].
    pub(super) only_mac: Option<Mac>,
}

/// What a driver has negotiated.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    /// A received frame may take several buffers.
    pub(super) mergeable: bool,
    /// The offloads of frames that the driver takes.
    pub(super) of_driver: Offloads,
    /// The offloads of frames that the device takes.
    pub(super) of_device: Offloads,
    /// Most bytes of a frame of the driver that is no TSO frame.
    pub(super) max_frame: usize,
    /// There may be several queue pairs.
    pub(super) multi_queue: bool,
    /// There is a control queue, for us or for the front-end.
    pub(super) control: bool,
    /// The driver announces itself when the configuration space asks for it. Never set if the
    /// front-end keeps the control queue.
    pub(super) announces: bool,
    /// Frames are sent with their addresses in a private copy.
    pub(super) needs_addresses: bool,
    /// The only source address of frames of the driver.
    pub(super) only_mac: Option<Mac>,
}

impl Terms {
    pub(super) fn new(features: u64, fixed: &Fixed) -> Terms {
        let mtu = fixed.mtu.filter(|_| features & F_MTU != 0);
        Terms {
            mergeable: features & F_MRG_RXBUF != 0,
            of_driver: Offloads::of_driver(features),
            of_device: Offloads::of_device(features),
            max_frame: mtu.map_or(MAX_FRAME, |mtu| usize::from(mtu) + ETHERNET_LEN + VLAN_TAGS),
            multi_queue: features & F_MQ != 0,
            control: features & F_CTRL_VQ != 0,
            announces: features & ANNOUNCEMENT == ANNOUNCEMENT,
            needs_addresses: fixed.needs_addresses || fixed.only_mac.is_some(),
            only_mac: fixed.only_mac,
        }
    }
}

/// What ends the service.
#[derive(Debug)]
pub(super) enum Fatal {
    /// For this front-end.
    MemoryLost,
    /// For all: the back-end has gone.
    BackendGone(std::io::Error),
}

impl Fatal {
    /// The fault behind the error of a frame; `None` if only that frame is lost.
    pub(super) fn of(error: FrameError) -> Option<Fatal> {
        match error {
            FrameError::MemoryLost => Some(Fatal::MemoryLost),
            FrameError::BackendGone(error) => Some(Fatal::BackendGone(error)),
            FrameError::NotNow | FrameError::Refused | FrameError::LinkDown => None,
        }
    }
}
