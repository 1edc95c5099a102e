//! What `serve` logs when it starts, reloads and stops.

use std::path::Path;

use tracing::{info, warn};
use zerosock::daemon::{GuestEndpoints, GuestKey, Shares};
use zerosock::forward::Destination;

use super::attach::Attach;
use super::forward::Listen;
use super::settings::Settings;
use super::vm::{Host, Vm};
use crate::sockets;

/// Logs that the daemon serves, and what, before any other line.
pub(super) fn announce_start(settings: &Settings) {
    info!(
        vms = settings.vms.len(),
        attach = settings.attach.is_some(),
        networks = settings.net.len(),
        rules = settings.forward.len() + settings.listen.len(),
        version = env!("CARGO_PKG_VERSION"),
        "serving"
    );
}

/// Logs how descriptors are divided.
pub(super) fn announce_shares(shares: &Shares) {
    info!(
        rlimit_nofile = shares.limit,
        reserved = shares.reserved,
        peers = shares.peers,
        guaranteed_each = shares.guaranteed,
        common = shares.common,
        max_connections = shares.max_connections,
        "descriptors: half of RLIMIT_NOFILE less the reserved ones is guaranteed to the VMs and users \
         in equal parts, the rest is for those that ask first"
    );
}

/// Logs what a VM is served at.
pub(super) fn announce(vm: &Vm) {
    let socket = vm.socket.display();
    match &vm.host {
        Host::Hybrid { path, messages } => {
            let messages = messages.as_deref();
            let shown = messages.map(|path| tracing::field::display(path.display()));
            let uds_path = path.display();
            info!(cid = vm.cid, %socket, %uds_path, uds_path_seqpacket = shown, "serving");
            warn_about_long_ports(path);
            if let Some(path) = messages {
                warn_about_long_ports(path);
            }
        }
        Host::Forward { cid, listen } => {
            info!(cid = vm.cid, %socket, forward_cid = cid, forward_listen = ?listen, "serving");
        }
    }
    if vm.guest_endpoints.is_some() {
        announce_guest_endpoints(vm.cid, vm.guest_endpoints.as_ref());
    }
}

/// Logs which endpoints a guest may have.
pub(super) fn announce_guest_endpoints(cid: u32, options: Option<&GuestEndpoints>) {
    match options {
        None => info!(cid, "the guest may have no endpoints any more"),
        Some(options) if options.key == GuestKey::none() => warn!(
            cid,
            "the guest may have endpoints without a key: each of its processes that may bind a port below 1024, \
             those in containers among them, can read and write all memory of the guest; name a key file"
        ),
        Some(_) => info!(cid, "the guest may have endpoints"),
    }
}

/// Logs where processes may attach, and which users.
pub(super) fn announce_attach(attach: &Attach) {
    let or_own = |uids: &[u32]| match uids {
        [] => vec![rustix::process::geteuid().as_raw()],
        listed => listed.to_vec(),
    };
    info!(
        socket = %attach.socket.display(),
        uids = ?or_own(&attach.uids),
        service_uids = ?or_own(&attach.service_uids),
        "processes may attach"
    );
}

/// Warns when PATH_PORT may exceed a socket address.
fn warn_about_long_ports(path: &Path) {
    let room = sockets::MAX_PATH.saturating_sub(path.as_os_str().len() + 1);
    // The highest port, 4294967294, has ten digits.
    if room < 10 {
        warn!(
            "{}: leaves room for ports of {room} digits only behind `{}_`; the guest's \
             connections to longer ones will be refused: shorten --uds-path",
            path.display(),
            path.display()
        );
    }
}

/// Warns of rules to a CID that no VM has, where no process can attach with it later.
pub(super) fn warn_about_missing_cids(listen: &[Listen], vms: &[Vm], can_attach: bool) {
    for rule in listen {
        if let Destination::Cid(cid, _) = rule.to
            && !can_attach
            && !vms.iter().any(|vm| vm.cid == cid.get())
        {
            warn!(
                "listen {}: no VM has CID {cid}, and no process can attach: clients of this rule are \
                 refused; add the VM, or change the rule",
                rule.shown()
            );
        }
    }
}
