//! `zerosock net`: virtio-net devices on a TAP interface, or on a switch.
//!
//! Steps: validate the options; make the interface and the sockets; drop what only that needs; serve until
//! a signal, or until the interface is removed.

pub(crate) mod args;
pub(crate) mod network;
pub(crate) mod xdp;

use std::time::Duration;

use rustix::fs::Gid;
use sd_notify::NotifyState;
use tracing::info;

use self::args::NetArgs;
use self::network::{Common, Network};
use self::xdp::Interfaces;
use crate::failure::Failure;
use crate::logging;
use crate::sandbox::{Needs, Sandbox};
use crate::service_manager::notify;
use crate::signals::{Signals, signals_failed};

/// Runs until SIGINT or SIGTERM, or the end of the interface.
pub(crate) fn main(args: NetArgs) -> Result<(), Failure> {
    let common = Common {
        access: args.sockets.access()?,
        max_memory: args.max_memory,
        sealed_memory: args.require_sealed_memory,
        spin: Duration::from_micros(args.spin_us),
    };
    let (log, flags) = (args.log.clone(), args.sandbox.clone());
    let network = network(args)?;
    let mut needs = Needs::new(common.access.gid.map(Gid::as_raw));
    network.needs(&mut needs);
    let mut sandbox = Sandbox::enter(&flags, needs)?;
    let _logging = logging::start(&log);
    let signals = Signals::catch().map_err(signals_failed)?;
    let opened = network.open(&common, &mut Interfaces::default())?;
    // Before other threads start.
    sandbox.drop_capabilities()?;
    sandbox.close();
    let serving = opened.serve()?;
    notify(&[NotifyState::Ready]);
    let ended = signals.wait_for_end(serving.over(), || serving.report());
    let ended = ended.map_err(signals_failed)?;
    if let Some(name) = ended {
        info!("{name}: stopping");
    }
    serving.shutdown();
    match ended {
        Some(_) => Ok(()),
        None => Err(Failure::runtime(ENDED)),
    }
}

/// Why networks end by themselves.
pub(crate) const ENDED: &str =
    "the interface was removed, or its thread has failed: the log has the reason";

fn network(args: NetArgs) -> Result<Network, Failure> {
    let mut guests = args.socket;
    if let [guest] = guests.as_mut_slice() {
        guest.mac = args.mac.or(guest.mac);
        guest.mac_filter |= args.mac_filter;
    } else if args.mac.is_some() || args.mac_filter {
        return Err(Failure::usage(
            "--mac, --mac-filter: with several guests, give each its own: \
             --socket PATH,mac=MAC,mac-filter",
        ));
    }
    let network = Network {
        tap: args.tap,
        tap_fd: args.tap_fd,
        share_tap: args.share_tap,
        xdp: args.xdp,
        xdp_drop_long: args.xdp_drop_long,
        xdp_copy: args.xdp_copy,
        bridge: args.bridge,
        mtu: args.mtu,
        queues: args.queues,
        guests,
    };
    let option = |key: &str| format!("--{key}");
    network.check(option).map_err(Failure::usage)?;
    Ok(network)
}
