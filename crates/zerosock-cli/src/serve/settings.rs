//! Validated settings of `zerosock serve`.
//!
//! Every error names the option as it was written, its value and the valid values.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use zerosock::access::{AccessList, Cids};
use zerosock::daemon::DaemonConfig;
use zerosock::forward::{self, ForwardRule, ListenAddress, RuleError};
use zerosock::{Cid, Port};

use super::access::{AccessEntry, unknown_group};
use super::args::{DaemonFlags, OkPort, ServeArgs};
use super::attach::Attach;
use super::attach_flags::RawAttach;
use super::forward::{Forward, Listen};
use super::taken::{Taken, absolute};
use super::validate::{OptionSource, SettingsError, check_path, parse_groups, place_of, wrong};
use super::vm::{Host, RawVm, Vm};
use super::{access, cpus, uds_paths};
use crate::net::network::Network;
use crate::number;
use crate::sockets;

/// Everything that `serve` needs to start.
#[derive(Debug)]
pub(crate) struct Settings {
    /// At least one, unless processes may attach or there are networks; CIDs, paths and forwarded ports differ between
    /// them.
    pub(crate) vms: Vec<Vm>,
    /// Settings of the attach socket, if any.
    pub(crate) attach: Option<Attach>,
    /// Each of its groups is one of a VM or of attached processes.
    pub(crate) rules: AccessList,
    /// Without conflicts; each of their groups is one of a VM or of attached processes.
    pub(crate) forward: Vec<ForwardRule>,
    /// Their addresses differ.
    pub(crate) listen: Vec<Listen>,
    /// Sockets and interfaces are used once.
    pub(crate) net: Vec<Network>,
    /// The files of guests' keys.
    pub(crate) key_files: Vec<PathBuf>,
    pub(crate) ok_port: OkPort,
    pub(crate) access: sockets::Access,
    /// At least 1. `None`: as many as the descriptors allow.
    pub(crate) max_connections: Option<usize>,
    /// Limit of mapped memory, bytes: of one VM, or of all processes of one user. Not zero.
    pub(crate) max_memory: u64,
    /// Limit of mapped memory of all VMs and processes, bytes. Not zero.
    pub(crate) max_memory_total: u64,
    /// Guests of networks must have sealed memory.
    pub(crate) sealed_memory: bool,
    /// 1 to 16.
    pub(crate) queue_pairs: u16,
    /// At most a second; zero: no polling.
    pub(crate) spin: Duration,
    /// Not zero.
    pub(crate) connect_timeout: Duration,
    /// From 1 to the number of VMs, or more if processes may attach.
    pub(crate) workers: usize,
    /// Empty: not pinned. Otherwise worker `i` is pinned to entry `i` modulo the length.
    pub(crate) cpus: Vec<usize>,
}

const DEFAULT_CID: Cid = Cid::new(3);
const DEFAULT_TX_BUFFER_SIZE: u32 = 256 * 1024;
const DEFAULT_QUEUE_SIZE: u64 = 1024;
const DEFAULT_GROUP: &str = "default";
/// Linux's default of SO_VM_SOCKETS_BUFFER_MIN_SIZE.
const MIN_TX_BUFFER_SIZE: u32 = 128;
const MAX_TX_BUFFER_SIZE: u32 = 1 << 30;
/// The virtio specification's limit of a split virtqueue.
const MAX_QUEUE_SIZE: u64 = 32768;

impl Settings {
    /// Validates all options. Reads the file of --config, /etc/group for --socket-group and this
    /// process's CPU affinity; changes nothing.
    pub(crate) fn new(args: ServeArgs) -> Result<Settings, SettingsError> {
        let config = args.config;
        let mut flags = args.daemon;
        let mut written = Vec::new();
        let mut rules = Vec::new();
        let (mut forward, mut listen) = (args.forward.forward, args.forward.listen);
        let mut net = Vec::new();
        let attach = Some(args.attach).filter(|raw| *raw != RawAttach::default());
        let mut attach = attach.map(|raw| (OptionSource::Flags, raw));
        if let Some(path) = &config {
            let file = super::file::read(path)?;
            let both = |option: &str, key: &str| SettingsError::Both {
                option: format!("--{}", option.replace('_', "-")),
                other: format!("{}: {key}", path.display()),
            };
            for (key, flag, in_file) in [
                ("spin_us", &mut flags.spin_us, file.spin_us),
                ("max_memory", &mut flags.max_memory, file.max_memory),
                (
                    "max_memory_total",
                    &mut flags.max_memory_total,
                    file.max_memory_total,
                ),
            ] {
                if flag.is_some() && in_file.is_some() {
                    return Err(both(key, key));
                }
                *flag = flag.or(in_file);
            }
            for (index, vm) in file.vms.into_iter().enumerate() {
                written.push((OptionSource::File { path, index }, vm));
            }
            rules = file.access;
            net = file.net;
            if !forward.is_empty() && !file.forward.is_empty() {
                return Err(both("forward", "forward"));
            }
            if !listen.is_empty() && !file.listen.is_empty() {
                return Err(both("listen", "listen"));
            }
            forward.extend(file.forward.into_iter().map(|Forward(rule)| rule));
            listen.extend(file.listen);
            let source = OptionSource::File { path, index: 0 };
            attach = match (attach, file.attach) {
                (Some(_), Some(_)) => return Err(both("attach-socket", "attach")),
                (flags, raw) => flags.or(raw.map(|raw| (source, raw))),
            };
        } else if !args.vm.is_empty() {
            written.extend(args.vm.into_iter().map(|vm| (OptionSource::Vm, vm)));
        } else if let Some(vm) = args.vm_flags.into_vm()? {
            written.push((OptionSource::Flags, vm));
        } else if attach.is_none() {
            return Err(SettingsError::NoVm);
        }
        let mut vms = Vec::with_capacity(written.len());
        let mut taken = Taken::default();
        let mut named = Vec::new();
        let mut key_files = Vec::new();
        for (source, raw) in written {
            let ports = raw.uds_path.ports.clone();
            let key = raw.guest_endpoints.as_ref().and_then(|raw| raw.key_file());
            key_files.extend(key.map(Path::to_owned));
            let vm = Vm::new(source, raw)?;
            for (port, path) in ports {
                let rule = rule_of_path(source, &vm, port, &path)?;
                taken.take_port(source, &vm, port, &path, &rule);
                named.push((source, path, rule));
            }
            taken.take(source, &vm)?;
            vms.push(vm);
        }
        for (index, network) in net.iter().enumerate() {
            taken.take_network(config.as_deref(), index, network)?;
        }
        let attach = match attach {
            None => None,
            Some((source, raw)) => {
                let attach = Attach::new(source, raw)?;
                taken.take_attach(source, &attach)?;
                Some(attach)
            }
        };
        let groups = vms.iter().flat_map(|vm| &vm.groups);
        let groups = groups.chain(attach.iter().flat_map(|attach| &attach.groups));
        let groups: BTreeSet<&str> = groups.map(String::as_str).collect();
        let parties = rules.iter().map(AccessEntry::parties);
        if let Some((index, group)) = unknown_group(parties, &groups) {
            let path = config.as_deref().unwrap_or(Path::new(""));
            let known = groups.into_iter().collect::<Vec<_>>().join(", ");
            return Err(wrong(
                format!("{}: access[{index}]", path.display()),
                format_args!("group:{group}"),
                format!("no VM or process is in this group; the groups are {known}"),
            ));
        }
        let senders = forward.iter().map(|rule| &rule.from);
        if let Some((index, group)) = unknown_group(senders, &groups) {
            return Err(wrong(
                format!("forward[{index}]: from"),
                format_args!("group:{group}"),
                "no VM or process is in this group",
            ));
        }
        // Behind the others, which errors and counters name by number.
        let first_named = forward.len();
        forward.extend(named.iter().map(|(.., rule)| rule.clone()));
        check_rules(config.as_deref(), &forward, &listen, &taken).map_err(|error| match error {
            SettingsError::Rules {
                error:
                    RuleError::Overlap {
                        first,
                        second,
                        port,
                    },
                ..
            } if second >= first_named => {
                let (source, path, _) = &named[second - first_named];
                let fix = format!(
                    "forward[{first}] matches the same connections; change its ports or `from`, or \
                     remove one of the two"
                );
                source.wrong("uds-path", format_args!("{port}={}", path.display()), fix)
            }
            error => error,
        })?;
        taken.check_derived(config.as_deref(), &listen)?;
        let access = access::list(rules);
        access.check().map_err(|same| SettingsError::Rules {
            place: place_of(config.as_deref()),
            error: same.into(),
        })?;
        let rules = Rules {
            access,
            forward,
            listen,
        };
        let mut settings = daemon(flags, vms, attach, rules, net)?;
        settings.key_files = key_files;
        Ok(settings)
    }
}

/// The rule of one `PORT=PATH` of a VM.
fn rule_of_path(
    source: OptionSource<'_>,
    vm: &Vm,
    port: Port,
    path: &Path,
) -> Result<ForwardRule, SettingsError> {
    check_path(source, "uds-path", path)?;
    let wrong = |reason: String| source.wrong("uds-path", path.display(), reason);
    let cid = Cid::new(vm.cid);
    let vm = Cids::new(cid, cid).map_err(|error| wrong(error.to_string()))?;
    uds_paths::rule(vm, port, path).map_err(|error| wrong(error.to_string()))
}

/// The rules of the daemon.
struct Rules {
    access: AccessList,
    forward: Vec<ForwardRule>,
    listen: Vec<Listen>,
}

/// Finds conflicts of forwarding and listening rules.
fn check_rules(
    file: Option<&Path>,
    rules: &[ForwardRule],
    listen: &[Listen],
    taken: &Taken,
) -> Result<(), SettingsError> {
    let place = place_of(file);
    let refused = |error| SettingsError::Rules {
        place: place.clone(),
        error,
    };
    forward::check(rules).map_err(refused)?;
    let without_sockets: Vec<_> = listen.iter().map(|listen| listen.rule(None)).collect();
    forward::check_listeners(&without_sockets).map_err(refused)?;
    for (index, listen) in listen.iter().enumerate() {
        if let ListenAddress::Unix(path) | ListenAddress::UnixSeqpacket(path) = &listen.on {
            let wrong = |fix: String| wrong(format!("{place}listen[{index}]: on"), &listen.on, fix);
            sockets::check_path(path).map_err(|reason| wrong(reason.to_string()))?;
            if let Some(other) = taken.paths.get(&absolute(path)) {
                return Err(wrong(format!("already used by {other}")));
            }
        }
    }
    Ok(())
}

fn daemon(
    flags: DaemonFlags,
    mut vms: Vec<Vm>,
    attach: Option<Attach>,
    rules: Rules,
    net: Vec<Network>,
) -> Result<Settings, SettingsError> {
    let access = flags.sockets.access();
    let access = access.map_err(|it| wrong(it.option, it.value, it.fix))?;
    let pinned = match &flags.cpus {
        None => Vec::new(),
        Some(text) => {
            cpus::parse(text).map_err(|reason| wrong("--cpus", text, reason.to_string()))?
        }
    };
    let max_connections = match flags.max_connections {
        None => None,
        Some(number) => match usize::try_from(number) {
            Ok(n @ 1..=MAX_CONNECTIONS) => Some(n),
            _ => {
                let fix = format!("give a number from 1 to {MAX_CONNECTIONS}");
                return Err(wrong("--max-connections", number, fix));
            }
        },
    };
    for (option, bytes) in [
        ("--max-memory", flags.max_memory),
        ("--max-memory-total", flags.max_memory_total),
    ] {
        if bytes == Some(0) {
            let fix = "no VM works without memory; give bytes, such as 64G";
            return Err(wrong(option, 0, fix));
        }
    }
    if let (Some(each), Some(total)) = (flags.max_memory, flags.max_memory_total)
        && total < each
    {
        let fix = format!("give at least what one VM may have, {each} (--max-memory)");
        return Err(wrong("--max-memory-total", total, fix));
    }
    let defaults = DaemonConfig::default();
    let max_memory = flags.max_memory.unwrap_or(defaults.max_memory);
    let max_memory_total = flags
        .max_memory_total
        .unwrap_or(defaults.max_memory_total.max(max_memory));
    let queue_pairs = u16::try_from(flags.queue_pairs)
        .ok()
        .filter(|pairs| (1..=16).contains(pairs))
        .ok_or_else(|| {
            let fix = "give a number from 1 to 16";
            wrong("--queue-pairs", flags.queue_pairs, fix)
        })?;
    let spin = flags.spin_us.unwrap_or(0);
    if spin > MAX_SPIN_US {
        let fix = format!("give microseconds from 0 (never) to {MAX_SPIN_US}, such as 50");
        return Err(wrong("--spin-us", spin, fix));
    }
    if flags.connect_timeout.is_zero() {
        let fix = "no connection can come about in no time; give seconds, such as 2";
        return Err(wrong("--connect-timeout", 0, fix));
    }
    let workers = match flags.workers {
        Some(0) => {
            let fix = "give at least 1: workers move the data";
            return Err(wrong("--workers", 0, fix));
        }
        Some(n) => usize::try_from(n).unwrap_or(usize::MAX),
        None if !pinned.is_empty() => pinned.len(),
        None => std::thread::available_parallelism().map_or(1, usize::from),
    };
    for vm in &mut vms {
        vm.require_sealed_memory |= flags.require_sealed_memory;
        vm.stopped_timeout.get_or_insert(flags.stopped_timeout);
    }
    Ok(Settings {
        // A worker without a VM would only use memory.
        workers: match &attach {
            // A worker without a VM may serve processes.
            Some(attach) => {
                let most = vms.len() + attach.max + attach.service_max;
                workers.min(most.saturating_mul(queue_pairs.into()))
            }
            None => workers.min(vms.len().max(1)),
        },
        vms,
        attach,
        rules: rules.access,
        forward: rules.forward,
        listen: rules.listen,
        net,
        key_files: Vec::new(),
        ok_port: flags.ok_port,
        access,
        max_connections,
        max_memory,
        max_memory_total,
        sealed_memory: flags.require_sealed_memory,
        queue_pairs,
        spin: Duration::from_micros(spin),
        connect_timeout: flags.connect_timeout,
        cpus: pinned,
    })
}

/// Polling longer than this costs far more than it saves.
const MAX_SPIN_US: u64 = 1_000_000;
/// More would exceed the descriptors that Linux grants a process (fs.nr_open).
const MAX_CONNECTIONS: usize = 1 << 20;

impl Vm {
    fn new(source: OptionSource<'_>, mut raw: RawVm) -> Result<Vm, SettingsError> {
        let cid = raw.guest_cid.unwrap_or(DEFAULT_CID);
        let cid = cid
            .for_guest()
            .map_err(|error| source.wrong("guest-cid", cid, error.to_string()))?
            .get();
        let socket = raw.socket.ok_or_else(|| SettingsError::Missing {
            option: source.option("socket"),
            fix: "name the Unix socket to which the virtual machine monitor connects",
        })?;
        check_path(source, "socket", &socket)?;
        let host = match (raw.uds_path.base, raw.forward_cid, raw.forward_listen) {
            (Some(path), None, None) => {
                check_path(source, "uds-path", &path)?;
                let messages = raw.uds_path_seqpacket.take();
                if let Some(path) = &messages {
                    check_path(source, "uds-path-seqpacket", path)?;
                }
                Host::Hybrid { path, messages }
            }
            (None, Some(cid), listen) => Host::Forward {
                cid: match cid {
                    Cid::HYPERVISOR => {
                        let fix = "give a CID that can be connected to: 1 (this host by \
                                   loopback), 2 (the host), or a guest's";
                        return Err(source.wrong("forward-cid", cid, fix));
                    }
                    cid => cid.get(),
                },
                listen: parse_ports(source, listen.as_deref())?,
            },
            (None, None, None) => {
                return Err(SettingsError::Missing {
                    option: source.option("uds-path"),
                    fix: "name the Unix socket to which host programs connect, or give \
                          forward-cid instead",
                });
            }
            (None, None, Some(_)) => {
                return Err(SettingsError::Missing {
                    option: source.option("forward-cid"),
                    fix: "forward-listen needs it",
                });
            }
            (Some(_), cid, _) => {
                let other = if cid.is_some() {
                    "forward-cid"
                } else {
                    "forward-listen"
                };
                return Err(SettingsError::Both {
                    option: source.option("uds-path"),
                    other: source.option(other),
                });
            }
        };
        if raw.uds_path_seqpacket.is_some() {
            return Err(SettingsError::Missing {
                option: source.option("uds-path"),
                fix: "uds-path-seqpacket needs it",
            });
        }
        let tx_buffer_size = raw.tx_buffer_size.unwrap_or(DEFAULT_TX_BUFFER_SIZE);
        if !(MIN_TX_BUFFER_SIZE..=MAX_TX_BUFFER_SIZE).contains(&tx_buffer_size) {
            let fix = format!("give bytes from {MIN_TX_BUFFER_SIZE} to {MAX_TX_BUFFER_SIZE}");
            return Err(source.wrong("tx-buffer-size", tx_buffer_size, fix));
        }
        let queue_size = raw.queue_size.unwrap_or(DEFAULT_QUEUE_SIZE);
        if !queue_size.is_power_of_two() || queue_size > MAX_QUEUE_SIZE {
            let fix = format!("give a power of two from 1 to {MAX_QUEUE_SIZE}, such as 1024");
            return Err(source.wrong("queue-size", queue_size, fix));
        }
        let groups = raw.groups.as_deref().unwrap_or(DEFAULT_GROUP);
        let groups = parse_groups(groups).map_err(|fix| source.wrong("groups", groups, fix))?;
        let guest_endpoints = raw.guest_endpoints;
        let guest_endpoints = guest_endpoints.map(|raw| {
            let wrong = |(value, fix)| source.wrong("guest-endpoints", value, fix);
            raw.validate().map_err(wrong)
        });
        // At most 32768, checked above.
        let queue_size = queue_size as u16;
        Ok(Vm {
            cid,
            socket,
            host,
            tx_buffer_size,
            queue_size,
            groups,
            require_sealed_memory: raw.require_sealed_memory.unwrap_or(false),
            stopped_timeout: raw.stopped_timeout,
            guest_endpoints: guest_endpoints.transpose()?,
        })
    }
}

fn parse_ports(source: OptionSource<'_>, text: Option<&str>) -> Result<Vec<u32>, SettingsError> {
    let Some(text) = text else {
        return Ok(Vec::new());
    };
    let mut ports = Vec::new();
    for item in text.trim().split('+') {
        let port = number::port(item).map_err(|_| {
            let fix = format!(
                "`{item}` is not a port; give numbers from 0 to 4294967294 joined by `+`, such as \
                 9001+9002"
            );
            source.wrong("forward-listen", text, fix)
        })?;
        let port = port.get();
        if ports.contains(&port) {
            let fix = format!("port {port} is named twice: leave one");
            return Err(source.wrong("forward-listen", text, fix));
        }
        ports.push(port);
    }
    Ok(ports)
}

#[cfg(test)]
#[path = "settings_tests.rs"]
mod tests;
