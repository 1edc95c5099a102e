//! Settings of `zerosock relay`, validated.

use zerosock_relay::relay::{Endpoint, RelayConfig};

use super::args::RelayArgs;
use super::end::End;
use crate::failure::Failure;

/// Most workers without --workers.
const WORKERS: usize = 8;

/// The configuration of a relay between kernel sockets.
pub(super) fn kernel_config(args: &RelayArgs, ends: [Endpoint; 2]) -> Result<RelayConfig, Failure> {
    let mut config = RelayConfig::new(ends);
    config.way = args.way;
    config.workers = match args.workers {
        Some(0) => return Err(Failure::usage("--workers: give at least 1")),
        Some(workers) if workers > 1024 => {
            return Err(Failure::usage("--workers: give at most 1024"));
        }
        Some(workers) => workers as usize,
        None => std::thread::available_parallelism().map_or(1, |n| n.get().min(WORKERS)),
    };
    if args.max_connections == 0 {
        return Err(Failure::usage("--max-connections: give at least 1"));
    }
    config.max_connections = args.max_connections as usize;
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
    config.connect_timeout = args.connect_timeout;
    config.idle_timeout = args.idle_timeout;
    config.datagram_timeout = args.udp_timeout;
    config.keepalive = (!args.keepalive.is_zero()).then_some(args.keepalive);
    config.buffer = match args.buffer {
        bytes @ 0x1000..=0x100_0000 => bytes as usize,
        _ => return Err(Failure::usage("--buffer: give 4K to 16M")),
    };
    config.pipes = args.pipes as usize;
    config.proxy_protocol = args.proxy_protocol;
    Ok(config)
}

/// The ends, if both are kernel sockets.
pub(super) fn kernel_ends(args: &RelayArgs) -> Option<[Endpoint; 2]> {
    match (&args.first, &args.second) {
        (End::Kernel(first), End::Kernel(second)) => Some([first.clone(), second.clone()]),
        _ => None,
    }
}
