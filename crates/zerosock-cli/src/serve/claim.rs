//! Claims the sockets of VMs, of listening rules and of the attach server: inherited ones, or new ones at their paths.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::Path;

use rustix::net::SocketType;
use zerosock::forward::ListenAddress;

use super::activation::Inherited;
use super::error::ServeError;
use super::forward::Listen;
use super::settings::Settings;
use super::vm::{Host, Vm};
use crate::sockets::{self, SocketFile};

/// All claimed sockets.
pub(super) struct Claimed {
    pub(super) vms: Vec<Listeners>,
    pub(super) attach: Option<OwnedFd>,
    /// Socket files made here: removed at the end, or with their VM.
    pub(super) files: BTreeMap<u32, Vec<SocketFile>>,
    pub(super) attach_file: Option<SocketFile>,
    /// Sockets of listening rules, in their order, and their files.
    pub(super) listen: Vec<OwnedFd>,
    pub(super) listen_files: ListenFiles,
}

/// Files of listening Unix sockets: removed at the end, or with their rule.
pub(super) type ListenFiles = HashMap<ListenAddress, SocketFile>;

/// The sockets of one VM.
pub(super) struct Listeners {
    pub(super) control: UnixListener,
    /// `None` when the VM's connections go to the kernel's AF_VSOCK.
    pub(super) hybrid: Option<UnixListener>,
    /// For SOCK_SEQPACKET, if configured.
    pub(super) messages: Option<OwnedFd>,
}

/// Claims all sockets of these settings.
pub(super) fn claim_sockets(settings: &Settings) -> Result<Claimed, ServeError> {
    let mut inherited = Inherited::take()?;
    let mut files = BTreeMap::new();
    let mut listeners = Vec::with_capacity(settings.vms.len());
    let only_vm = settings.vms.len() == 1;
    let passed = settings.listen.iter();
    let passed: Vec<_> = passed.map(|rule| inherited.claim_for(&rule.on)).collect();
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
    let mut listen = Vec::new();
    let mut listen_files = HashMap::new();
    for (rule, passed) in settings.listen.iter().zip(passed) {
        let (socket, file) = match passed {
            Some(socket) => (socket, None),
            None => claim_listener(rule, settings.access)?,
        };
        listen.push(socket);
        listen_files.extend(file.map(|file| (rule.on.clone(), file)));
    }
    Ok(Claimed {
        vms: listeners,
        attach,
        files,
        attach_file,
        listen,
        listen_files,
    })
}

/// The socket of a listening rule, and its file.
pub(super) fn claim_listener(
    rule: &Listen,
    access: sockets::Access,
) -> Result<(OwnedFd, Option<SocketFile>), ServeError> {
    let access = sockets::Access {
        mode: rule.mode.or(access.mode),
        ..access
    };
    let (path, kind) = match &rule.on {
        ListenAddress::Tcp(address) => {
            let socket = sockets::bind_tcp(*address);
            return match socket {
                Ok(socket) => Ok((socket, None)),
                Err(source) => Err(ServeError::Listen {
                    on: rule.on.clone(),
                    source,
                }),
            };
        }
        ListenAddress::Unix(path) => (path, SocketType::STREAM),
        ListenAddress::UnixSeqpacket(path) => (path, SocketType::SEQPACKET),
    };
    let (socket, file) = sockets::bind_type(path, access, kind)?;
    Ok((socket, Some(file)))
}

/// Makes a listener at a path.
type Bind = fn(&Path, sockets::Access) -> Result<(UnixListener, SocketFile), sockets::BindError>;

/// The sockets of one VM, and the socket files made for them.
pub(super) fn claim_vm(
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
