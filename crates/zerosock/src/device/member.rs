//! A device as one of many: how it joins its worker, learns who its siblings are, and leaves.

use super::{Context, Device};
use crate::switch::{DeviceAddr, Routes};
use std::fmt;
use zerosock_proto::Cid;
use zerosock_proto::vsock::LocalCids;

impl Device {
    /// Where it is.
    pub(crate) fn addr(&self) -> DeviceAddr {
        self.addr
    }

    /// Its guest's CID.
    pub(crate) fn cid(&self) -> Cid {
        self.cid
    }

    /// The table of endpoints has changed for the CID `changed` from `old` to `new`: the guest may
    /// reach one sibling more, or one less. Connections stay; those to a device that has gone are
    /// ended by that device.
    pub(crate) fn routes_changed(&mut self, changed: Cid, old: &Routes, new: &Routes) {
        let before = old.sibling(self.cid, changed).is_some();
        let after = new.sibling(self.cid, changed).is_some();
        if before != after || changed == self.cid {
            let siblings = new.siblings(self.cid);
            self.shard.set_local_cids(LocalCids::host_and(siblings));
        }
    }

    /// The device leaves for good, most often after `Disconnected` has ended its connections to
    /// siblings: what is left are those whose last bytes a host program has not taken, which end
    /// now. Siblings are told; their chains go back. Chains of its own that siblings still have
    /// stay mapped until they are read, and then come back to nobody.
    pub(crate) fn retire(&mut self, cx: &mut Context<'_>) {
        let keys: Vec<u32> = self.joins.iter().map(|(key, _)| key as u32).collect();
        for key in keys {
            self.end_join(key, cx);
        }
        self.link = None;
        self.disconnect(cx);
        self.app_retire(cx);
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
