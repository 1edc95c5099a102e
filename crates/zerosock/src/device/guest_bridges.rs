//! The view of a device for its bridges: connections between the guest and sockets of the host, sockets
//! outside, or other VMs.

use super::{Context, Device};

/// The bridges of a device, with what the worker lends it for a turn.
pub(crate) struct GuestBridges<'a, 'c> {
    pub(super) device: &'a mut Device,
    pub(super) cx: &'a mut Context<'c>,
}

impl Device {
    #[inline]
    pub(crate) fn bridges_with<'a, 'c>(
        &'a mut self,
        cx: &'a mut Context<'c>,
    ) -> GuestBridges<'a, 'c> {
        GuestBridges { device: self, cx }
    }
}
