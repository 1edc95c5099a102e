//! Makes the devices and the model of a VM or process.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use zerosock_proto::vsock::{LocalCids, PortTable, QueuePairs, Shard, ShardConfig};
use zerosock_proto::{Cid, Port};
use zerosock_ring::{InflightRecord, StateMap};
use zerosock_sys::LogLimit;
use zerosock_sys::account::Account;
use zerosock_vhost_user::{DeviceModel, DevicePort};
use zerosock_virtio::outbox::DeviceAddr;

use super::guest_orders::GuestReports;
use super::model::VsockModel;
use super::queue_pair_ports::QueuePairPorts;
use super::state::flow_table::table_len;
use super::state::guests::Guests;
use super::state::succession::SavedDevice;
use super::traffic::TrafficBoard;
use super::{Device, DriverKind, HostAccess};

/// Resets that may wait for a receive buffer of the guest. Beyond them its packets are not read.
const MAX_PENDING_RESETS: usize = 1024;

/// Lines of the access log in 10 s, of a VM or process.
const ACCESS_LINES: u32 = 1000;

/// Room for connections in a flow log, at least.
const LOGGED_CONNECTIONS: usize = 1 << 17;

/// Bytes of the records of the queues of a queue pair.
const RECORDS_LEN: usize = QUEUES * InflightRecord::LEN;

/// Queues of a queue pair: receive, transmit and event queue.
const QUEUES: usize = 3;

/// Limits of every device.
#[derive(Clone, Debug)]
pub(crate) struct Terms {
    pub(crate) max_connections: usize,
    pub(crate) connect_timeout: Duration,
    /// Largest number of queue pairs of a device.
    pub(crate) queue_pairs: QueuePairs,
    /// Where devices count what they pass.
    pub(crate) traffic: TrafficBoard,
}

/// The parameters of a device.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) cid: Cid,
    pub(crate) host: HostAccess,
    pub(crate) buf_alloc: u32,
    /// Set for a host service: the ports it may connect from, beside those that it has claimed.
    pub(crate) service: Option<RangeInclusive<Port>>,
    pub(crate) driver: DriverKind,
    /// The account of its host programs.
    pub(crate) account: Account,
    /// The longest stop of the queues that connections outlast; `None`: any.
    pub(crate) stopped_timeout: Option<Duration>,
    /// Set if the guest may register endpoints: where the first queue pair reports.
    pub(crate) guests: Option<GuestReports>,
    /// What outlives the process.
    pub(crate) state: MemberState,
}

/// Memory of a device that outlives the process, where there is any.
#[derive(Debug, Default)]
pub(crate) struct MemberState {
    /// [`Terms::state_len`] bytes; `None`: nothing outlives the process.
    pub(crate) memory: Option<StateMap>,
    /// The process succeeds another one, and the front-end of that one starts the queues again.
    pub(crate) awaits_queues: bool,
    /// What another process has saved of queue pairs.
    pub(crate) saved: Vec<(u16, SavedDevice)>,
}

impl Terms {
    /// Makes the devices with these addresses: one for each queue pair, in their order.
    pub(crate) fn devices(&self, queue_pairs: &Arc<[DeviceAddr]>, member: Member) -> Vec<Device> {
        let Member {
            cid,
            host,
            buf_alloc,
            service,
            driver,
            account,
            stopped_timeout,
            guests,
            state,
        } = member;
        let ports = Arc::new(PortTable::new());
        let access_log = Arc::new(LogLimit::new(ACCESS_LINES));
        // Host programs connect through the first queue pair; the guest connects to them through
        // any.
        let outward = host.outward();
        let hosts = std::iter::once(host).chain(std::iter::repeat_with(|| outward.outward()));
        let MemberState {
            memory: mut rest,
            awaits_queues,
            mut saved,
        } = state;
        let devices = (0..).zip(queue_pairs.iter()).zip(hosts);
        devices
            .map(|((pair, &queue_pair), host)| {
                let shard = self.shard(cid, buf_alloc, &ports);
                let mut device = Device::new(queue_pair, cid, shard, host, service.clone());
                device.driver = driver;
                device.set_queue_pair(pair, queue_pairs.clone());
                device.set_account(account.clone());
                device.stop.limit = stopped_timeout;
                if let Some(mut flows) = rest.take() {
                    let records = flows.split_off(self.flow_log_len());
                    if let Some(mut records) = records {
                        rest = records.split_off(RECORDS_LEN);
                        device.queues.set_state(records);
                    }
                    device.set_former_process(Some(flows), awaits_queues);
                    let own = saved.iter().position(|&(of, _)| of == pair);
                    device.succession.saved = own.map(|at| saved.swap_remove(at).1);
                }
                device.set_access_log(Arc::clone(&access_log));
                device.set_traffic(self.traffic.enter(cid));
                let reports = guests.clone().filter(|_| pair == 0);
                device.guests = reports.map(|reports| Box::new(Guests::new(reports)));
                device
            })
            .collect()
    }

    /// Bytes of the memory of a device that outlives the process: for each queue pair a log of flows and
    /// the records of its queues. Most pages of it are never used.
    pub(crate) fn state_len(&self) -> usize {
        usize::from(self.queue_pairs.get()) * (self.flow_log_len() + RECORDS_LEN)
    }

    /// Bytes of a flow log that has room for the connections of a queue pair. The same for most limits of
    /// connections, which depend on the number of VMs: a successor may have others.
    fn flow_log_len(&self) -> usize {
        table_len(self.max_connections.max(LOGGED_CONNECTIONS))
    }

    fn shard(&self, cid: Cid, buf_alloc: u32, ports: &Arc<PortTable>) -> Shard {
        let config = ShardConfig {
            buf_alloc,
            max_connections: self.max_connections,
            connect_timeout: self.connect_timeout,
            max_pending_resets: MAX_PENDING_RESETS,
            accept_all: true,
            // The routes decide which endpoints may connect when a connection is requested.
            local: LocalCids::All,
            // The guest's own receive buffer is the only limit for data sent to it.
            send_limit: Some(u32::MAX),
            ..ShardConfig::device(cid)
        };
        Shard::new(config, ports.clone())
    }

    /// The model for the front-end of the device with this CID.
    pub(crate) fn model(&self, cid: Cid) -> Arc<dyn DeviceModel> {
        Arc::new(VsockModel {
            cid,
            max_pairs: self.queue_pairs,
        })
    }

    /// One port for commands, of the ports of all queue pairs.
    pub(crate) fn port(&self, mut ports: Vec<Box<dyn DevicePort>>) -> Option<Box<dyn DevicePort>> {
        match ports.len() {
            1 => ports.pop(),
            _ => Some(Box::new(QueuePairPorts::new(self.queue_pairs, ports))),
        }
    }
}
