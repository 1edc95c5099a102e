//! Converts validated settings to the library's daemon.

use std::os::fd::OwnedFd;

use rustix::fs::{Gid, Mode};
use zerosock::Cid;
use zerosock::attach::{AttachConfig, AttachHost, AttachTerms};
use zerosock::daemon::{
    Daemon, DaemonConfig, HostSide, HybridMessages, OkConvention, StartError, VmConfig,
};

use super::args::OkPort;
use super::attach::{Attach, Hybrid};
use super::claim::Listeners;
use super::settings::Settings;
use super::vm::{Host, Vm};
use crate::sockets;
use crate::supervised::Predecessor;

/// Starts one device per VM; `listeners` are in the order of the VMs, `listen` in that of the rules. `predecessor`: what
/// a predecessor of this process has left.
pub(super) fn start(
    settings: &Settings,
    listeners: Vec<Listeners>,
    attach: Option<OwnedFd>,
    listen: Vec<OwnedFd>,
    predecessor: &mut Predecessor,
) -> Result<Daemon, StartError> {
    let vms = settings
        .vms
        .iter()
        .zip(listeners)
        .map(|(vm, listeners)| convert(vm, listeners, predecessor));
    Daemon::start(DaemonConfig {
        vms: vms.collect(),
        workers: settings.workers,
        cpus: settings.cpus.clone(),
        max_connections: settings.max_connections,
        max_memory: settings.max_memory,
        max_memory_total: settings.max_memory_total,
        queue_pairs: settings.queue_pairs,
        spin: settings.spin,
        ok: match settings.ok_port {
            OkPort::Guest => OkConvention::GuestPort,
            OkPort::Host => OkConvention::HostPort,
        },
        connect_timeout: settings.connect_timeout,
        attach: settings
            .attach
            .as_ref()
            .zip(attach)
            .map(|(attach, listener)| convert_attach(attach, listener, settings.access)),
        access: settings.rules.clone(),
        forward: settings.forward.clone(),
        listen: settings
            .listen
            .iter()
            .zip(listen)
            .map(|(rule, socket)| rule.rule(Some(socket)))
            .collect(),
        ..DaemonConfig::default()
    })
}

/// The terms of attaching that a reload may change.
pub(super) fn terms(attach: &Attach) -> AttachTerms {
    let or_ours = |uids: &[u32]| match uids {
        [] => vec![rustix::process::geteuid().as_raw()],
        uids => uids.to_vec(),
    };
    AttachTerms {
        allowed_uids: or_ours(&attach.uids),
        groups: attach.groups.clone(),
        max_processes: attach.max,
        service_uids: or_ours(&attach.service_uids),
        max_services: attach.service_max,
    }
}

fn convert_attach(attach: &Attach, listener: OwnedFd, access: sockets::Access) -> AttachConfig {
    let mut config = AttachConfig::new(listener);
    config.set_terms(terms(attach));
    config.host = match &attach.hybrid {
        None => AttachHost::None,
        Some(Hybrid::Shared(path)) => AttachHost::Hybrid { path: path.clone() },
        Some(Hybrid::Each(path)) => AttachHost::HybridEach {
            path: path.clone(),
            mode: access.mode.map(Mode::as_raw_mode),
            group: access.gid.map(Gid::as_raw),
        },
    };
    config
}

pub(super) fn convert(vm: &Vm, listeners: Listeners, predecessor: &mut Predecessor) -> VmConfig {
    let host = match (&vm.host, listeners.hybrid) {
        (Host::Hybrid { path, messages }, Some(listener)) => HostSide::Hybrid {
            path: path.clone(),
            listener,
            messages: messages
                .clone()
                .zip(listeners.messages)
                .map(|(path, listener)| HybridMessages { path, listener }),
        },
        // Every hybrid side has been given its listener; without one, siblings remain.
        (Host::Hybrid { .. }, None) => HostSide::None,
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
        require_sealed_memory: vm.require_sealed_memory,
        stopped_timeout: vm.stopped_timeout.filter(|limit| !limit.is_zero()),
        guest_endpoints: vm.guest_endpoints.clone(),
        succession: predecessor.succession(vm.cid),
    }
}
