//! The identity of a device, and its removal.

use super::{Context, Device};
use crate::routing::DeviceAddr;
use std::fmt;
use zerosock_proto::Cid;

impl Device {
    /// The address of the device.
    pub(crate) fn addr(&self) -> DeviceAddr {
        self.addr
    }

    /// The guest's CID.
    pub(crate) fn cid(&self) -> Cid {
        self.cid
    }

    /// Removes the device from service, usually after `Disconnected`. Remaining bridges, most of
    /// them lingering, end now; siblings are told and get their chains back. Memory of this guest
    /// that siblings still read stays mapped until they have read it.
    pub(crate) fn retire(&mut self, cx: &mut Context<'_>) {
        let keys: Vec<u32> = self.bridges.iter().map(|(key, _)| key as u32).collect();
        for key in keys {
            self.end_bridge(key, cx);
        }
        self.stop_listening(cx);
        self.link = None;
        self.disconnect(cx);
        self.app_retire(cx);
        // The device no longer counts in the worker's totals.
        let before = std::mem::take(&mut self.counted);
        cx.counters.hold(before, self.counted);
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device")
            .field("addr", &self.addr)
            .field("cid", &self.cid)
            .finish_non_exhaustive()
    }
}
