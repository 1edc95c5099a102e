//! Entry point of the fuzz target `device` (docs/fuzzing.md): a worker with the devices of two VMs.

use std::path::Path;
use std::sync::{Arc, Once};
use std::time::Duration;

use zerosock_proto::Cid;
use zerosock_sys::account::Budget;
use zerosock_sys::socket_path;
use zerosock_virtio::device::WorkerDevice;
use zerosock_virtio::mailbox::Mailbox;
use zerosock_virtio::outbox::DeviceAddr;
use zerosock_virtio::worker::Worker;

use super::factory::{Member, MemberState, Terms};
use super::host_sockets::hybrid::OkConvention;
use super::traffic::TrafficBoard;
use super::{Device, DriverKind, HostAccess, Limits, Shared};
use crate::routing::Routes;

/// What the target does with a worker.
pub trait Drive {
    /// Until the front-ends of all devices have disconnected.
    fn drive<D: WorkerDevice>(self, worker: Worker<D>) -> Worker<D>;
}

/// Lends the target a worker with devices 0 and 1, which have CIDs 3 and 4. No connection and no bridge is left
/// afterwards. Sockets of host programs are at `vm3_PORT` and `vm4_PORT` of this directory.
pub fn vsock_worker(dir: &Path, target: impl Drive) {
    let worker = target.drive(worker(dir));
    for device in (0..2).filter_map(|number| worker.devices.get(number)) {
        let left = (device.bridges.len(), device.shard.occupied());
        assert_eq!(left, (0, 0), "a connection is left");
    }
}

fn worker(dir: &Path) -> Worker<Device> {
    let (sender, mailbox) = Mailbox::new().expect("a descriptor is left");
    static MOUNTS: Once = Once::new();
    MOUNTS.call_once(|| socket_path::learn_mounts().expect("the mounts are readable"));
    let hour = Duration::from_secs(3600);
    let limits = Limits {
        handshake: hour,
        connect: hour,
        hold: Duration::ZERO,
        overflow: 1 << 16,
        old_memory: 0,
        handshakes: 4,
        lingering: 4,
        linger: hour,
        ok: OkConvention::GuestPort,
    };
    let shared = Shared {
        routes: Default::default(),
        counters: Default::default(),
        limits,
        connector: None,
        mailbox: Some(sender.clone()),
        app: None,
    };
    let mut worker = Worker::new(0, vec![sender], mailbox, shared).expect("a descriptor is left");
    let terms = Terms {
        traffic: TrafficBoard::default(),
        max_connections: 16,
        connect_timeout: hour,
        queue_pairs: zerosock_proto::vsock::QueuePairs::ONE,
    };
    let mut routes = Routes::default();
    for number in 0..2 {
        let cid = Cid::new(3 + number);
        let addr = DeviceAddr { worker: 0, number };
        routes.add(cid, addr, &["default".to_owned()]);
        let member = Member {
            cid,
            host: HostAccess::Hybrid {
                services: dir.join(format!("vm{cid}")).into(),
                listener: None,
                messages: None,
            },
            buf_alloc: 4096,
            service: None,
            driver: DriverKind::Vm,
            account: Budget::unlimited().account(),
            stopped_timeout: None,
            guests: None,
            state: MemberState::default(),
        };
        let pairs: Arc<[DeviceAddr]> = Arc::new([addr]);
        for device in terms.devices(&pairs, member) {
            worker.add(device);
        }
    }
    worker.shared.routes = Arc::new(routes);
    worker
}
