//! Settings of `zerosock relay`, validated.

use rustix::fs::{Gid, Mode};
use zerosock_relay::relay::{KernelEndpoint, RelayConfig, Way};
use zerosock_sys::sandbox::CapabilitySet;

use super::args::RelayArgs;
use crate::endpoint::EndpointArg;
use crate::failure::Failure;
use crate::sandbox::Needs;

/// Most workers without --workers.
const WORKERS: usize = 8;

/// The configuration of a relay between kernel sockets; `None` if an end is attached.
pub(super) fn kernel_config(args: &RelayArgs) -> Result<Option<RelayConfig>, Failure> {
    check(args)?;
    let (EndpointArg::Kernel(first), EndpointArg::Kernel(second)) = (&args.first, &args.second)
    else {
        return Ok(None);
    };
    let mut config = RelayConfig::new([first.clone(), second.clone()]);
    config.way = args.way;
    config.workers = match args.workers {
        Some(workers) => workers as usize,
        None => std::thread::available_parallelism().map_or(1, |n| n.get().min(WORKERS)),
    };
    config.max_connections = args.max_connections as usize;
    config.connect_timeout = args.connect_timeout;
    config.idle_timeout = args.idle_timeout;
    config.datagram_timeout = args.udp_timeout;
    config.keepalive = (!args.keepalive.is_zero()).then_some(args.keepalive);
    config.buffer = args.buffer as usize;
    config.pipes = args.pipes as usize;
    config.proxy_protocol = args.proxy_protocol;
    let access = args.sockets.access()?;
    config.socket_mode = access.mode.map(Mode::as_raw_mode);
    config.socket_group = access.gid.map(Gid::as_raw);
    Ok(Some(config))
}

/// What the ends need of the sandbox.
pub(super) fn needs(args: &RelayArgs) -> Result<Needs, Failure> {
    let mut needs = Needs::new(args.sockets.access()?.gid.map(Gid::as_raw));
    for end in [&args.first, &args.second] {
        match end {
            EndpointArg::Attached(attached) => needs.socket(&attached.path),
            EndpointArg::Kernel(KernelEndpoint::Connect(target)) => needs.target(target),
            EndpointArg::Kernel(
                KernelEndpoint::TcpListen(address) | KernelEndpoint::UdpListen(address),
            ) => {
                needs.network_listener();
                if address.port() < 1024 {
                    // The sockets are made when the threads run.
                    needs.capability(CapabilitySet::NET_BIND_SERVICE);
                }
            }
            EndpointArg::Kernel(
                KernelEndpoint::UnixListen(path)
                | KernelEndpoint::UnixSeqpacketListen(path)
                | KernelEndpoint::UnixDatagramListen(path)
                | KernelEndpoint::Hybrid { path, .. },
            ) => needs.socket(path),
            EndpointArg::Kernel(
                KernelEndpoint::Vsock { .. } | KernelEndpoint::VsockListen { .. },
            ) => needs.kernel_vsock(),
        }
    }
    if args.way == Way::Sockmap {
        needs.bpf_maps();
    }
    Ok(needs)
}

/// Limits that the types of the flags do not say.
fn check(args: &RelayArgs) -> Result<(), Failure> {
    match args.workers {
        Some(0) => return Err(Failure::usage("--workers: give at least 1")),
        Some(1025..) => return Err(Failure::usage("--workers: give at most 1024")),
        _ => {}
    }
    if args.max_connections == 0 {
        return Err(Failure::usage("--max-connections: give at least 1"));
    }
    for (name, time) in [
        ("--connect-timeout", Some(args.connect_timeout)),
        ("--idle-timeout", args.idle_timeout),
        ("--udp-timeout", Some(args.udp_timeout)),
    ] {
        if time.is_some_and(|time| time.is_zero()) {
            return Err(Failure::usage(format_args!(
                "{name}: give more than 0 seconds"
            )));
        }
    }
    match args.buffer {
        0x1000..=0x100_0000 => Ok(()),
        _ => Err(Failure::usage("--buffer: give 4K to 16M")),
    }
}
