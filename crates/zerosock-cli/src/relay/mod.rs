//! `zerosock relay`: joins sockets of the kernel, or those of attached endpoints, to each other.
//!
//! Steps: validate all options; listen; relay until a signal, or until the only pair has ended.

pub(crate) mod args;
mod attached;
mod settings;

use sd_notify::NotifyState;
use tracing::{info, warn};
use zerosock_relay::relay::{Relay, RelayConfig, RelayStats, StartError, Way};

use self::args::RelayArgs;
use crate::failure::Failure;
use crate::logging;
use crate::sandbox::Sandbox;
use crate::service_manager::notify;
use crate::signals::{Signals, signals_failed};
use crate::sockets::raise_descriptor_limit;

/// Runs until SIGINT or SIGTERM, or the end of the only pair.
pub(crate) fn main(args: RelayArgs) -> Result<(), Failure> {
    let config = settings::kernel_config(&args)?;
    let mut sandbox = Sandbox::enter(&args.sandbox, settings::needs(&args)?)?;
    let _logging = logging::start(&args.log);
    let signals = Signals::catch().map_err(signals_failed)?;
    if let Err(reason) = raise_descriptor_limit() {
        warn!("{reason}");
    }
    match config {
        Some(config) => run(config, &signals, sandbox),
        None => {
            if args.way != Way::Auto {
                warn!(
                    "--way {}: an end is attached: bytes move in place",
                    args.way
                );
            }
            sandbox.drop_capabilities()?;
            sandbox.close();
            attached::run(&args, &signals)
        }
    }
}

fn run(mut config: RelayConfig, signals: &Signals, mut sandbox: Sandbox) -> Result<(), Failure> {
    if config.way == Way::Sockmap
        && let Err(reason) = config.make_map()
    {
        warn!("--way sockmap: {reason}: auto is used");
        config.way = Way::Auto;
    }
    // Before other threads start.
    sandbox.drop_capabilities()?;
    sandbox.close();
    if config.way == Way::Splice && !config.can_splice() {
        warn!("--way splice: both ends have to be TCP or Unix streams: auto is used");
        config.way = Way::Auto;
    }
    let ends = config.ends.clone();
    let (way, workers) = (config.way, config.workers);
    let relay = Relay::start(config).map_err(|error| match error {
        StartError::Bounds(..)
        | StartError::TwoReceivers(..)
        | StartError::NoReceiver(..)
        | StartError::ProxyProtocol(_) => Failure::usage(error),
        _ => Failure::runtime(error),
    })?;
    for (end, address) in ends.iter().zip(relay.addresses()) {
        match address {
            Some(address) => info!(%end, %address, "listening"),
            None if end.listens() => info!(%end, "listening"),
            None => {}
        }
    }
    info!(from = %ends[0], to = %ends[1], %way, workers, "relaying");
    notify(&[NotifyState::Ready]);
    let report = || log_counters(&relay.stats(), "counters");
    let ended = signals.wait_for_end(relay.over(), report);
    let ended = ended.map_err(signals_failed)?;
    if let Some(name) = ended {
        info!("{name}: stopping");
    }
    let succeeded = ended.is_some() || relay.succeeded();
    log_counters(&relay.shutdown(), "stopped");
    match succeeded {
        true => Ok(()),
        false => Err(Failure::runtime(format_args!(
            "{} and {} were not joined to the end: the log has the reason",
            ends[0], ends[1]
        ))),
    }
}

fn log_counters(stats: &RelayStats, what: &str) {
    info!(
        opened = stats.opened,
        open = stats.open,
        refused = stats.refused,
        unreachable = stats.unreachable,
        failed = stats.failed,
        idle = stats.idle,
        replaced = stats.replaced,
        joined = stats.joined,
        bytes_to_target = stats.bytes_to_target,
        bytes_to_source = stats.bytes_to_source,
        dropped = stats.dropped,
        "{what}"
    );
}
