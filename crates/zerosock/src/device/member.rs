//! A device as one of many: who it is, and how it leaves.

use super::{Context, Device};
use crate::routing::DeviceAddr;
use std::fmt;
use zerosock_proto::Cid;

impl Device {
    /// Where it is.
    pub(crate) fn addr(&self) -> DeviceAddr {
        self.addr
    }

    /// Its guest's CID.
    pub(crate) fn cid(&self) -> Cid {
        self.cid
    }

    /// The device leaves for good, most often after `Disconnected` has ended its connections to
    /// siblings: what is left are those whose last bytes a host program has not taken, which end
    /// now. Siblings are told; their chains go back. Chains of its own that siblings still have
    /// stay mapped until they are read, and then come back to nobody.
    pub(crate) fn retire(&mut self, cx: &mut Context<'_>) {
        let keys: Vec<u32> = self.bridges.iter().map(|(key, _)| key as u32).collect();
        for key in keys {
            self.end_bridge(key, cx);
        }
        self.stop_listening(cx);
        self.link = None;
        self.disconnect(cx);
        self.app_retire(cx);
        // Nothing of it is left to be counted.
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
