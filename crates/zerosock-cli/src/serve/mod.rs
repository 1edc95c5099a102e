//! `zerosock serve`: from the command line to running devices, and an orderly end.
//!
//! Steps: validate all options; claim all sockets; start the devices; notify READY; wait for a
//! signal; notify STOPPING; stop the devices; remove the sockets. A failure before READY leaves
//! nothing behind. SIGHUP reads the file of --config again.

mod access;
mod activation;
pub(crate) mod args;
mod attach;
mod attach_flags;
mod backend;
mod cpus;
mod file;
mod group;
mod list;
mod reload;
mod settings;
mod stuck;
mod validate;
pub(crate) mod vm;
mod watchdog;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::Path;

use rustix::process::{Resource, Rlimit};
use sd_notify::NotifyState;
use tracing::{info, warn};
use zerosock::daemon::{Daemon, Shares};

use self::activation::{ActivationError, Inherited};
use self::args::ServeArgs;
use self::reload::Running;
use self::settings::{Host, Settings, Vm};
use self::stuck::StuckCalls;
use self::watchdog::Watchdog;
use crate::failure::Failure;
use crate::logging;
use crate::signals::{Signals, Wake};
use crate::sockets::{self, SocketFile};

/// Runs until SIGINT or SIGTERM.
pub(crate) fn main(args: ServeArgs) -> Result<(), Failure> {
    let (level, format) = (args.daemon.log_level, args.daemon.log_format);
    let settings = Settings::new(args.clone()).map_err(Failure::usage)?;
    logging::start(level, format);
    run(&args, settings).map_err(Failure::runtime)
}

/// Why serving could not start, or ended early.
#[derive(Debug, thiserror::Error)]
enum ServeError {
    #[error(transparent)]
    Activation(#[from] ActivationError),
    #[error(transparent)]
    Bind(#[from] sockets::BindError),
    #[error("signals cannot be caught: {0}")]
    Signals(io::Error),
    #[error("a worker thread has ended, see the log: its VMs have no device any more")]
    WorkerEnded,
    #[error(transparent)]
    Start(#[from] zerosock::daemon::StartError),
    #[error(
        "the limit of open files is {}, and {} VMs and users need at least {}: raise it (LimitNOFILE= of \
         the unit, ulimit -Hn)",
        .0.limit, .0.peers, .0.minimum
    )]
    FewDescriptors(Shares),
}

/// All claimed sockets.
struct Claimed {
    vms: Vec<Listeners>,
    attach: Option<OwnedFd>,
    /// Socket files made here: removed at the end, or with their VM.
    files: BTreeMap<u32, Vec<SocketFile>>,
    attach_file: Option<SocketFile>,
}

/// The sockets of one VM.
struct Listeners {
    control: UnixListener,
    /// `None` when the VM's connections go to the kernel's AF_VSOCK.
    hybrid: Option<UnixListener>,
    /// For SOCK_SEQPACKET, if configured.
    messages: Option<OwnedFd>,
}

fn run(args: &ServeArgs, settings: Settings) -> Result<(), ServeError> {
    let mut signals = Signals::catch().map_err(ServeError::Signals)?;
    if args.config.is_some() {
        signals.catch_hangup().map_err(ServeError::Signals)?;
    }
    raise_descriptor_limit();
    let claimed = claim_sockets(&settings)?;
    let daemon = backend::start(&settings, claimed.vms, claimed.attach)?;
    let shares = daemon.shares();
    if shares.limit < shares.minimum {
        daemon.shutdown();
        return Err(ServeError::FewDescriptors(shares));
    }
    announce_shares(&shares);
    for vm in &settings.vms {
        announce(vm);
    }
    if let Some(attach) = &settings.attach {
        info!(socket = %attach.socket.display(), uids = ?attach.uids, "processes may attach");
    }
    notify(&[NotifyState::Ready, NotifyState::Status(&status(&settings))]);
    let mut running = Running {
        settings,
        files: claimed.files,
    };
    let mut watchdog = Watchdog::new();
    let signal = wait_for_signal(&signals, &daemon, &mut watchdog, || {
        // Both in one message: the service manager ignores either alone (sd_notify(3)).
        let now = NotifyState::monotonic_usec_now().ok();
        notify(&[[NotifyState::Reloading].as_slice(), now.as_slice()].concat());
        running.reload(args, &daemon);
        let status = status(&running.settings);
        notify(&[NotifyState::Ready, NotifyState::Status(&status)]);
    })?;
    info!("{signal}: stopping");
    notify(&[NotifyState::Stopping]);
    let stats = daemon.stats();
    daemon.shutdown();
    info!(
        in_place_bytes = stats.in_place_bytes,
        copied_bytes = stats.copied_bytes,
        connections = stats.conns_added,
        connections_now = stats.connections_now,
        joins_now = stats.joins_now,
        timers_now = stats.timers_now,
        ports_now = stats.ports_now,
        refused = stats.conns_refused,
        bad_packets = stats.bad_packets,
        bad_chains = stats.bad_chains,
        bad_handshakes = stats.bad_handshakes,
        overflow_resets = stats.overflow_resets,
        message_resets = stats.message_resets,
        datagrams_dropped = stats.datagrams_dropped,
        devices_lost = stats.devices_lost,
        control_faults = stats.control_faults,
        attach_refused = stats.attach_refused,
        descriptors_refused = stats.descriptors_refused,
        reaper_stuck = stats.reaper_stuck,
        reaper_pending = stats.reaper_pending,
        "stopped"
    );
    drop((running, claimed.attach_file));
    Ok(())
}

fn claim_sockets(settings: &Settings) -> Result<Claimed, ServeError> {
    let mut inherited = Inherited::take()?;
    let mut files = BTreeMap::new();
    let mut listeners = Vec::with_capacity(settings.vms.len());
    let only_vm = settings.vms.len() == 1;
    for vm in &settings.vms {
        let (claimed, made) = claim_vm(vm, &mut inherited, settings.access, only_vm)?;
        listeners.push(claimed);
        files.insert(vm.cid, made);
    }
    inherited.finish()?;
    let (attach, attach_file) = match &settings.attach {
        Some(attach) => {
            let access = sockets::Access {
                mode: attach.mode.or(settings.access.mode),
                ..settings.access
            };
            let (socket, file) = sockets::bind_packets(&attach.socket, access)?;
            (Some(socket), Some(file))
        }
        None => (None, None),
    };
    Ok(Claimed {
        vms: listeners,
        attach,
        files,
        attach_file,
    })
}

/// Makes a listener at a path.
type Bind = fn(&Path, sockets::Access) -> Result<(UnixListener, SocketFile), sockets::BindError>;

/// The sockets of one VM, and the socket files made for them.
fn claim_vm(
    vm: &Vm,
    inherited: &mut Inherited,
    access: sockets::Access,
    only_vm: bool,
) -> Result<(Listeners, Vec<SocketFile>), ServeError> {
    let mut files = Vec::new();
    let mut claim = |path: &Path, role: &str, bind: Bind| -> Result<UnixListener, ServeError> {
        let mut names = vec![format!("{role}-{}", vm.cid)];
        if only_vm {
            names.push(role.to_string());
        }
        if let Some(listener) = inherited.claim(path, &names) {
            return Ok(listener);
        }
        let (listener, file) = bind(path, access)?;
        files.push(file);
        Ok(listener)
    };
    let control = claim(&vm.socket, "socket", sockets::bind_for_frontends)?;
    let hybrid = match &vm.host {
        Host::Hybrid { path, .. } => Some(claim(path, "uds-path", sockets::bind)?),
        Host::Forward { .. } => None,
    };
    let messages = match &vm.host {
        Host::Hybrid {
            messages: Some(path),
            ..
        } => {
            let (listener, file) = sockets::bind_packets(path, access)?;
            files.push(file);
            Some(listener)
        }
        _ => None,
    };
    let listeners = Listeners {
        control,
        hybrid,
        messages,
    };
    Ok((listeners, files))
}

/// Raises the soft limit of descriptors: every connection of a guest to a program uses one, and the
/// usual limit of 1024 exists for programs that use select(2).
fn raise_descriptor_limit() {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    if let Err(errno) = rustix::process::setrlimit(Resource::Nofile, raised) {
        warn!(
            "cannot raise the limit of open files (RLIMIT_NOFILE) above {:?}: {errno}",
            limit.current
        );
    }
}

/// Logs how descriptors are divided.
fn announce_shares(shares: &Shares) {
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

fn announce(vm: &Vm) {
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

fn status(settings: &Settings) -> String {
    match settings.vms.as_slice() {
        [vm] => format!("serving CID {}", vm.cid),
        [] => "serving processes that attach".into(),
        vms => format!("serving {} virtual machines", vms.len()),
    }
}

fn wait_for_signal(
    signals: &Signals,
    daemon: &Daemon,
    watchdog: &mut Watchdog,
    mut reload: impl FnMut(),
) -> Result<&'static str, ServeError> {
    let mut stuck_calls = StuckCalls::default();
    loop {
        let interval = watchdog.interval();
        let interval = interval.map_or(stuck::LOOK, |interval| interval.min(stuck::LOOK));
        let wake = signals.wait(daemon.worker_ended(), Some(interval));
        match wake.map_err(ServeError::Signals)? {
            Wake::Signal(name) => return Ok(name),
            Wake::Other => return Err(ServeError::WorkerEnded),
            Wake::Hangup => reload(),
            Wake::TimeIsUp => {}
        }
        watchdog.look(daemon);
        stuck_calls.look(daemon);
    }
}

/// Does nothing without a service manager; a failure is logged and does not stop serving.
fn notify(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        warn!("cannot notify the service manager: {error}");
    }
}
