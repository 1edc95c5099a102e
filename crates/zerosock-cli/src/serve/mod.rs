//! `zerosock serve`: from the command line to running devices, and an orderly end.
//!
//! Steps: validate all options; claim all sockets; start the devices; notify READY; wait for a
//! signal; notify STOPPING; stop the devices; remove the sockets. A failure before READY leaves
//! nothing behind. SIGHUP reads the file of --config again; SIGUSR1 logs the counters.

mod access;
mod activation;
mod announce;
pub(crate) mod args;
mod attach;
mod attach_flags;
mod backend;
mod claim;
mod cpus;
mod derived;
mod error;
mod file;
pub(crate) mod forward;
mod guest_endpoints;
mod list;
mod needs;
mod networks;
mod reload;
mod report;
mod settings;
mod stuck;
mod taken;
mod uds_paths;
mod validate;
pub(crate) mod vm;
mod watchdog;

use sd_notify::NotifyState;
use tracing::{error, info, warn};
use zerosock::daemon::Daemon;
use zerosock_supervisor::Client;

use self::activation::Inherited;
use self::announce::{
    announce, announce_attach, announce_shares, announce_start, warn_about_missing_cids,
};
use self::args::ServeArgs;
use self::claim::claim_sockets;
use self::error::ServeError;
use self::reload::SettingsInEffect;
use self::report::{report, report_sums};
use self::settings::Settings;
use self::stuck::StuckCalls;
use self::watchdog::Watchdog;
use crate::failure::Failure;
use crate::logging;
use crate::sandbox::{self, Sandbox};
use crate::service_manager::notify;
use crate::signals::{Signals, Wake};
use crate::sockets::raise_descriptor_limit;
use crate::supervised;

/// Validates all options; returns the settings as text.
#[cfg(fuzzing)]
pub(crate) fn checked(args: ServeArgs) -> Result<String, String> {
    let settings = Settings::new(args).map_err(|error| error.to_string())?;
    Ok(format!("{settings:?}"))
}

/// Runs until SIGINT or SIGTERM.
pub(crate) fn main(args: ServeArgs) -> Result<(), Failure> {
    let settings = Settings::new(args.clone()).map_err(Failure::usage)?;
    if args.wants_supervisor() && !Client::is_supervised() {
        let logging = logging::start(&args.daemon.log);
        if let Err(reason) = raise_descriptor_limit() {
            warn!("{reason}");
        }
        let passed = Inherited::take().map_err(Failure::usage)?;
        sandbox::confine_supervisor(&args.daemon.sandbox);
        let code = supervised::supervise(passed.into_listeners())?;
        drop(logging);
        std::process::exit(code);
    }
    let sandbox = Sandbox::enter(&args.daemon.sandbox, needs::of(&settings, &args))?;
    let _logging = logging::start(&args.daemon.log);
    run(&args, settings, sandbox).map_err(Failure::runtime)
}

fn run(args: &ServeArgs, settings: Settings, mut sandbox: Sandbox) -> Result<(), ServeError> {
    let mut signals = Signals::catch().map_err(ServeError::Signals)?;
    signals.catch_hangup().map_err(ServeError::Signals)?;
    if Client::is_supervised() {
        signals.catch_upgrade().map_err(ServeError::Signals)?;
    }
    let raised = raise_descriptor_limit();
    let mut predecessor = supervised::begin()?;
    let left = std::mem::take(&mut predecessor.listeners);
    let claimed = claim_sockets(&settings, left)?;
    // Before any line of interfaces, devices and front-ends: front-ends may have connected already.
    announce_start(&settings);
    if let Err(reason) = raised {
        warn!("{reason}");
    }
    let networks = networks::open(&settings, &sandbox)?;
    // All that follows happens at a reload as well.
    sandbox.close();
    let (attach, listen) = (claimed.attach, claimed.listen);
    let daemon = backend::start(&settings, claimed.vms, attach, listen, &mut predecessor)?;
    predecessor.finish();
    let shares = daemon.shares();
    if shares.limit < shares.minimum {
        daemon.shutdown();
        return Err(ServeError::FewDescriptors(shares));
    }
    let mut networks = match networks.serve() {
        Ok(networks) => networks,
        Err(error) => {
            daemon.shutdown();
            return Err(error);
        }
    };
    for vm in &settings.vms {
        announce(vm);
    }
    if let Some(attach) = &settings.attach {
        announce_attach(attach);
    }
    for rule in daemon.forward_stats() {
        info!(rule = rule.rule, "forwarding");
    }
    warn_about_missing_cids(&settings.listen, &settings.vms, settings.attach.is_some());
    announce_shares(&shares);
    supervised::has_taken_over();
    notify(&[NotifyState::Ready, NotifyState::Status(&status(&settings))]);
    let mut running = SettingsInEffect {
        settings,
        claims: claimed.claims,
        listen_claims: claimed.listen_claims,
        sandbox,
    };
    let mut watchdog = Watchdog::new();
    let signal = wait_for_signal(
        &signals,
        &daemon,
        &mut watchdog,
        &mut networks,
        |wake, networks| {
            if wake == Wake::Upgrade {
                if networks.are_served() {
                    return error!("no upgrade: networks cannot be handed over");
                }
                return supervised::hand_over(&daemon);
            }
            if wake == Wake::User {
                let sums = report(&daemon, &running.settings);
                networks.report();
                return report_sums(&sums, "counters");
            }
            if args.config.is_none() {
                return warn!(
                    "SIGHUP: nothing is reloaded: there is no file; give one with --config"
                );
            }
            // Both in one message: the service manager ignores either alone (sd_notify(3)).
            let now = NotifyState::monotonic_usec_now().ok();
            notify(&[[NotifyState::Reloading].as_slice(), now.as_slice()].concat());
            running.reload(args, &daemon, networks);
            let status = status(&running.settings);
            notify(&[NotifyState::Ready, NotifyState::Status(&status)]);
        },
    )?;
    info!("{signal}: stopping");
    notify(&[NotifyState::Stopping]);
    supervised::stopping();
    let stats = report(&daemon, &running.settings);
    networks.shutdown();
    daemon.shutdown();
    report_sums(&stats, "stopped");
    drop((running, claimed.attach_claim));
    Ok(())
}

fn status(settings: &Settings) -> String {
    match settings.vms.as_slice() {
        [vm] => format!("serving CID {}", vm.cid),
        [] if settings.attach.is_none() => "serving networks".into(),
        [] => "serving processes that attach".into(),
        vms => format!("serving {} virtual machines", vms.len()),
    }
}

fn wait_for_signal(
    signals: &Signals,
    daemon: &Daemon,
    watchdog: &mut Watchdog,
    networks: &mut networks::RunningNetworks,
    mut handle: impl FnMut(Wake, &mut networks::RunningNetworks),
) -> Result<&'static str, ServeError> {
    let mut stuck_calls = StuckCalls::default();
    loop {
        let interval = watchdog.interval();
        let interval = interval.map_or(stuck::LOOK, |interval| interval.min(stuck::LOOK));
        let wake = signals.wait(daemon.worker_ended(), Some(interval));
        match wake.map_err(ServeError::Signals)? {
            Wake::Signal(name) => return Ok(name),
            Wake::Other => {
                supervised::leave_to_successor();
                return Err(ServeError::WorkerEnded);
            }
            wake @ (Wake::Hangup | Wake::User | Wake::Upgrade) => handle(wake, networks),
            Wake::TimeIsUp => {}
        }
        watchdog.check(daemon);
        stuck_calls.check(daemon);
        networks.check();
    }
}
