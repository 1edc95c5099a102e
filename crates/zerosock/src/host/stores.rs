//! Finds the device of held buffers when they may belong to any device: for leases that are returned
//! by number, and for time-outs.

use std::sync::Arc;

use zerosock_proto::vsock::FlowId;
use zerosock_ring::{Memory, Piece};

use crate::device::Device;
use crate::device::state::program::HostToken;
use crate::table::sockets::Store;
use zerosock_virtio::worker::Devices;

/// The buffers of all devices.
pub(crate) struct AllStores<'a> {
    pub(super) devices: &'a mut Devices<Device>,
    /// The device of each pool.
    pub(super) pools: &'a [Option<u32>],
    /// Devices with changes that the guest has not been shown.
    pub(super) touched: &'a mut Vec<u32>,
}

impl AllStores<'_> {
    #[inline]
    fn device(&mut self, vm: u32) -> Option<&mut Device> {
        let device = self.devices.get_mut(vm)?;
        if !std::mem::replace(&mut device.touched, true) {
            self.touched.push(vm);
        }
        Some(device)
    }
}

impl Store for AllStores<'_> {
    type Token = HostToken;

    fn memory(&self, token: &HostToken) -> Option<&Arc<Memory>> {
        self.devices.get(token.vm)?.memory_of(token)
    }

    #[inline]
    fn pieces<'a>(&'a self, token: &'a HostToken) -> &'a [Piece] {
        token.chain.readable()
    }

    #[inline]
    fn release(&mut self, token: HostToken) {
        if let Some(device) = self.device(token.vm) {
            device.store().release(token);
        }
    }

    /// Leases are made with the store of their device.
    fn may_return_later(&self, _: u32, _: FlowId) -> bool {
        false
    }

    #[inline]
    fn consumed(&mut self, pool: u32, flow: FlowId, bytes: u32) {
        let vm = self.pools.get(pool as usize).copied().flatten();
        if let Some(device) = vm.and_then(|vm| self.device(vm)) {
            device.store().consumed(pool, flow, bytes);
        }
    }

    fn consumed_empty(&mut self, pool: u32, flow: FlowId, messages: u16) {
        let vm = self.pools.get(pool as usize).copied().flatten();
        if let Some(device) = vm.and_then(|vm| self.device(vm)) {
            device.store().consumed_empty(pool, flow, messages);
        }
    }
}
