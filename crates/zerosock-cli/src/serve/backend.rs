//! The thin conversion from validated settings to the library's daemon.

use zerosock::Cid;
use zerosock::daemon::{Daemon, DaemonConfig, HostSide, OkConvention, StartError, VmConfig};

use super::Listeners;
use super::args::OkPort;
use super::settings::{Host, Settings, Vm};

/// Starts one device per VM; `listeners` are in the order of the VMs.
pub(super) fn start(settings: &Settings, listeners: Vec<Listeners>) -> Result<Daemon, StartError> {
    let vms = settings
        .vms
        .iter()
        .zip(listeners)
        .map(|(vm, listeners)| convert(vm, listeners));
    Daemon::start(DaemonConfig {
        vms: vms.collect(),
        workers: settings.workers,
        cpus: settings.cpus.clone(),
        max_connections: settings.max_connections,
        ok: match settings.ok_port {
            OkPort::Guest => OkConvention::GuestPort,
            OkPort::Host => OkConvention::HostPort,
        },
        connect_timeout: settings.connect_timeout,
        ..DaemonConfig::default()
    })
}

fn convert(vm: &Vm, listeners: Listeners) -> VmConfig {
    let host = match (&vm.host, listeners.hybrid) {
        (Host::Hybrid(path), Some(listener)) => HostSide::Hybrid {
            path: path.clone(),
            listener,
        },
        // Every hybrid side has been given its listener; without one, siblings remain.
        (Host::Hybrid(_), None) => HostSide::None,
        (Host::Forward { cid, listen }, _) => HostSide::Forward {
            cid: *cid,
            listen: listen.clone(),
        },
    };
    VmConfig {
        cid: Cid::new(vm.cid),
        listener: listeners.control,
        host,
        buf_alloc: vm.tx_buffer_size,
        queue_size: vm.queue_size,
        groups: vm.groups.clone(),
    }
}
