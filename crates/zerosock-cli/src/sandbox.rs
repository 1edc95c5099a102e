//! `--sandbox` and `--user`: what `serve`, `net` and `relay` give up once they no longer need it.
//!
//! Each command says what it [`Needs`]; `zerosock_sys::sandbox` confines the process to that. What is not possible on
//! this kernel, or without the right, is named in the log, and the rest is done.

use std::collections::BTreeSet;
use std::env;
use std::path::{Component, Path, PathBuf};

use clap::{Args, ValueEnum};
use rustix::net::AddressFamily;
use tracing::{debug, info, warn};
use zerosock_relay::Target;
use zerosock_sys::bpf;
use zerosock_sys::sandbox::{self, CallPolicy, CapabilitySet, Files, User};

use crate::failure::Failure;
use crate::user;

/// Whether the process is confined.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum SandboxMode {
    /// Files, system calls and capabilities that the configuration does not need are refused
    On,
    /// Nothing is refused; the log names the system calls that would be
    Log,
    /// Nothing is refused
    Off,
}

/// The flags.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Confinement")]
pub(crate) struct SandboxFlags {
    /// Refuse what the configuration does not need, so that taking over this process gains an attacker little:
    /// docs/sandbox.md
    #[arg(long, value_enum, value_name = "MODE", default_value_t = SandboxMode::On)]
    pub(crate) sandbox: SandboxMode,

    /// Become this user of /etc/passwd, or a number, and the user's groups; needs root
    ///
    /// The user makes the sockets: it needs write permission for their directories, and read permission for files
    /// that are read again on SIGHUP.
    #[arg(long, value_name = "USER", value_parser = user::lookup)]
    pub(crate) user: Option<User>,
}

/// What a command needs while it serves.
#[derive(Clone, Debug)]
pub(crate) struct Needs {
    files: Files,
    calls: CallPolicy,
    capabilities: CapabilitySet,
    /// The kernel pins guest memory for it: zero-copy sends, AF_XDP.
    locks_memory: bool,
    /// The group that it gives its sockets.
    group: Option<u32>,
}

impl Needs {
    /// Those of every command; `group`: the group that it gives its sockets.
    pub(crate) fn new(group: Option<u32>) -> Needs {
        let mut files = Files::default();
        files.devices.insert("/dev/null".into());
        // Another service manager may have an abstract socket, which begins with `@`.
        let manager = env::var_os("NOTIFY_SOCKET").map(PathBuf::from);
        files.read.extend(manager.filter(|path| path.is_absolute()));
        Needs {
            files,
            calls: CallPolicy::default(),
            capabilities: CapabilitySet::empty(),
            locks_memory: false,
            group,
        }
    }

    /// The directory of a socket that it makes or connects to. `{cid}` and other placeholders end the path.
    pub(crate) fn socket(&mut self, path: &Path) {
        self.files.write.insert(directory_of(path));
    }

    /// A file that it reads again. Its directory is needed: a file that replaces it is another one.
    pub(crate) fn reads(&mut self, path: &Path) {
        self.files.read.insert(directory_of(path));
        // It may be a link to another directory.
        self.reads_now(path);
    }

    /// A file that is read as it is now.
    pub(crate) fn reads_now(&mut self, path: &Path) {
        self.files.read.insert(path.to_owned());
    }

    /// A target of connections.
    pub(crate) fn target(&mut self, target: &Target) {
        match target {
            Target::Unix(path) | Target::UnixSeqpacket(path) | Target::UnixDatagram(path) => {
                self.socket(path);
            }
            Target::Tcp { .. } | Target::Udp { .. } => self.network_target(),
        }
    }

    /// Connections to, or datagrams for, addresses or names.
    pub(crate) fn network_target(&mut self) {
        self.files.tcp_connect = true;
        self.locks_memory = true;
        self.family(AddressFamily::INET);
        self.family(AddressFamily::INET6);
        self.reads_now(Path::new("/etc/resolv.conf"));
        self.reads_now(Path::new("/etc/hosts"));
        // For the numbers of queries, by a program with a static C library.
        for device in ["/dev/random", "/dev/urandom"] {
            self.files.devices.insert(device.into());
        }
    }

    /// A listener, on a port that may be one of root's.
    pub(crate) fn network_listener(&mut self) {
        self.files.tcp_listen = true;
        self.family(AddressFamily::INET);
        self.family(AddressFamily::INET6);
    }

    /// Sockets of the kernel's AF_VSOCK.
    pub(crate) fn kernel_vsock(&mut self) {
        self.family(AddressFamily::VSOCK);
    }

    /// A TAP, or queues of an interface.
    pub(crate) fn interface(&mut self, uses_xdp: bool) {
        self.files.devices.insert("/dev/net/tun".into());
        // Whether an interface is the port of a bridge.
        self.files.read.insert("/sys".into());
        // The owner of a TAP; whether an interface is still there.
        self.family(AddressFamily::NETLINK);
        if uses_xdp {
            self.family(AddressFamily::XDP);
            // A socket of AF_XDP is made for each guest that connects.
            self.capabilities |= CapabilitySet::NET_RAW;
            self.locks_memory = true;
            self.bpf_maps();
        }
    }

    /// Entries of BPF maps that are made later. Before Linux 5.19 capabilities are needed for them.
    pub(crate) fn bpf_maps(&mut self) {
        self.calls.bpf_maps = true;
        if bpf::inserting_needs_capabilities() {
            self.capabilities |= CapabilitySet::BPF | CapabilitySet::NET_ADMIN;
        }
    }

    /// A capability that it needs for as long as it runs.
    pub(crate) fn capability(&mut self, capability: CapabilitySet) {
        self.capabilities |= capability;
    }

    fn family(&mut self, family: AddressFamily) {
        if !self.calls.families.contains(&family) {
            self.calls.families.push(family);
        }
    }

    /// What of `wanted` these needs do not include.
    fn lacks(&self, wanted: &Needs) -> Option<String> {
        let families = &wanted.calls.families;
        if families.iter().any(|it| !self.calls.families.contains(it)) {
            return Some("sockets of another address family".to_owned());
        }
        let (own, other) = (&self.files, &wanted.files);
        let tcp = (other.tcp_listen && !own.tcp_listen) || (other.tcp_connect && !own.tcp_connect);
        if tcp {
            return Some("TCP listeners or TCP targets, of which there were none".to_owned());
        }
        if wanted.calls.bpf_maps && !self.calls.bpf_maps {
            return Some("AF_XDP".to_owned());
        }
        if let Some(device) = other.devices.difference(&own.devices).next() {
            return Some(format!("the device {}", device.display()));
        }
        let covers = |all: &[&BTreeSet<PathBuf>], path: &Path| {
            all.iter()
                .any(|all| all.iter().any(|own| path.starts_with(own)))
        };
        let mut missing = other
            .write
            .iter()
            .filter(|path| !covers(&[&own.write], path));
        let both = [&own.write, &own.read];
        let mut unread = other.read.iter().filter(|path| !covers(&both, path));
        let first = missing.next().or_else(|| unread.next());
        first.map(|path| format!("the directory {}", path.display()))
    }
}

/// The directory of a file, absolute.
fn directory_of(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let parent = path.parent().unwrap_or(Path::new("/")).components();
    let is_fixed =
        |component: &Component<'_>| !component.as_os_str().as_encoded_bytes().contains(&b'{');
    parent.take_while(is_fixed).collect()
}

/// The confinement of this process.
#[derive(Debug)]
pub(crate) struct Sandbox {
    mode: SandboxMode,
    needs: Needs,
    /// Other files are out of reach.
    has_files: bool,
    in_effect: Vec<&'static str>,
    /// Why one of two mechanisms for files is not in effect.
    one_is_missing: Vec<String>,
    missing: Vec<String>,
}

impl Sandbox {
    /// Leaves the files of `needs` to this process, and becomes the user of the flags. To be called before the first
    /// thread starts, and before sockets are made.
    pub(crate) fn enter(flags: &SandboxFlags, mut needs: Needs) -> Result<Sandbox, Failure> {
        let (mut in_effect, mut missing) = (Vec::new(), Vec::new());
        if flags.sandbox == SandboxMode::On {
            (in_effect, missing) = sandbox::confine_files(&needs.files);
        }
        // One of the two is enough; which one depends on the kernel and on the user.
        let has_files = !in_effect.is_empty();
        let one_is_missing = if has_files {
            std::mem::take(&mut missing)
        } else {
            Vec::new()
        };
        if flags.sandbox != SandboxMode::Off {
            if needs.locks_memory && !sandbox::raise_locked_memory() {
                needs.capabilities |= CapabilitySet::IPC_LOCK;
            }
            // After the drop, a socket can be given to a group of this process only.
            needs.group.into_iter().for_each(sandbox::join_group);
        }
        if let Some(user) = &flags.user {
            let failed = |error| Failure::runtime(format_args!("--user: {error}; this needs root"));
            sandbox::become_user(user).map_err(failed)?;
        }
        if flags.sandbox == SandboxMode::On
            && let Err(error) = sandbox::refuse_dumps()
        {
            missing.push(format!("core dumps: {error}"));
        }
        Ok(Sandbox {
            mode: flags.sandbox,
            needs,
            has_files,
            one_is_missing,
            in_effect,
            missing,
        })
    }

    /// Drops the capabilities that only set-up needs. To be called before threads start, except that of the log, which
    /// drops its own.
    pub(crate) fn drop_capabilities(&self) -> Result<(), Failure> {
        let keep = self.needs.capabilities;
        let dropped = match self.mode {
            SandboxMode::On => sandbox::drop_capabilities(keep),
            _ if keep.contains(CapabilitySet::NET_ADMIN) => Ok(()),
            _ => bpf::drop_bpf_capabilities(),
        };
        if keep.contains(CapabilitySet::NET_ADMIN) {
            info!("CAP_BPF and CAP_NET_ADMIN are kept: before Linux 5.19 each socket needs them");
        }
        dropped.map_err(|error| Failure::runtime(format_args!("cannot drop capabilities: {error}")))
    }

    /// Refuses system calls from now on, in all threads: set-up is over.
    pub(crate) fn close(&mut self) {
        let filtered = match self.mode {
            SandboxMode::Off => return,
            SandboxMode::On => sandbox::filter_calls(&self.needs.calls),
            SandboxMode::Log => sandbox::log_refused_calls(&self.needs.calls, |call| {
                warn!("sandbox: would be refused: {call}");
            }),
        };
        match filtered {
            Ok(()) => self.in_effect.push("a filter of system calls"),
            Err(error) => self
                .missing
                .push(format!("no filter of system calls: {error}")),
        }
        if self.mode == SandboxMode::On {
            for thread in sandbox::threads_with_capabilities(self.needs.capabilities) {
                self.missing
                    .push(format!("the thread {thread} has capabilities"));
            }
        }
        info!(mode = ?self.mode, has = self.in_effect.join(", "), "sandbox");
        for missing in &self.one_is_missing {
            debug!("sandbox: {missing}");
        }
        for missing in &self.missing {
            warn!("sandbox: {missing}");
        }
    }

    /// Refuses a configuration that needs more than that of the start.
    pub(crate) fn permits(&self, wanted: &Needs) -> Result<(), String> {
        let mut wanted = wanted.clone();
        if !self.has_files {
            wanted.files = Files::default();
        }
        let lacks = (self.mode == SandboxMode::On).then(|| self.needs.lacks(&wanted));
        match lacks.flatten() {
            None => Ok(()),
            Some(what) => Err(format!(
                "the sandbox of this process does not permit {what}: restart it, or start it with --sandbox off"
            )),
        }
    }
}

/// Confines a supervisor: its successors inherit what it gives up, so that is what none of them needs.
pub(crate) fn confine_supervisor(flags: &SandboxFlags) {
    /// What a worker process needs for its own sandbox and set-up, and the supervisor to end one of another user.
    const KEEP: CapabilitySet = CapabilitySet::SYS_ADMIN
        .union(CapabilitySet::NET_ADMIN)
        .union(CapabilitySet::NET_RAW)
        .union(CapabilitySet::NET_BIND_SERVICE)
        .union(CapabilitySet::BPF)
        .union(CapabilitySet::IPC_LOCK)
        .union(CapabilitySet::SYS_RESOURCE)
        .union(CapabilitySet::SETUID)
        .union(CapabilitySet::SETGID)
        .union(CapabilitySet::SETPCAP)
        .union(CapabilitySet::KILL)
        .union(CapabilitySet::CHOWN)
        .union(CapabilitySet::FOWNER)
        .union(CapabilitySet::DAC_OVERRIDE);
    if flags.sandbox != SandboxMode::On {
        return;
    }
    let limited = sandbox::limit_capabilities(KEEP);
    let limited = limited.and_then(|()| sandbox::refuse_dumps());
    if let Err(error) = limited.and_then(|()| sandbox::filter_supervisor_calls()) {
        warn!("sandbox: the supervisor is not confined: {error}");
    }
}

#[cfg(test)]
#[path = "sandbox_tests.rs"]
mod tests;
