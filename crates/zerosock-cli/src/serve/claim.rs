//! Claims the sockets of VMs, of listening rules and of the attach server: inherited ones, or new ones at their paths.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;

use rustix::net::SocketType;
use zerosock::forward::ListenAddress;

use super::activation::Inherited;
use super::error::ServeError;
use super::forward::Listen;
use super::settings::Settings;
use super::vm::{Host, Vm};
use crate::sockets::{self, SocketFile};
use crate::supervised::{self, KeptEntry, Listener};

/// All claimed sockets.
pub(super) struct Claimed {
    pub(super) vms: Vec<Listeners>,
    pub(super) attach: Option<OwnedFd>,
    /// Those of VMs, by CID.
    pub(super) claims: BTreeMap<u32, Vec<Claim>>,
    pub(super) attach_claim: Option<Claim>,
    /// Sockets of listening rules, in their order.
    pub(super) listen: Vec<OwnedFd>,
    pub(super) listen_claims: ListenClaims,
}

/// The claims of listening rules.
pub(super) type ListenClaims = HashMap<ListenAddress, Claim>;

/// A claimed socket. When it is dropped, no successor gets the socket, and the file at its path is
/// removed if it was made here.
#[derive(Debug)]
pub(super) struct Claim {
    file: Option<SocketFile>,
    _kept: Option<KeptEntry>,
}

impl Drop for Claim {
    fn drop(&mut self) {
        if supervised::is_taking_over() {
            std::mem::forget(self.file.take());
        }
    }
}

/// The sockets of one VM.
pub(super) struct Listeners {
    pub(super) control: UnixListener,
    /// `None` when the VM's connections go to the kernel's AF_VSOCK.
    pub(super) hybrid: Option<UnixListener>,
    /// For SOCK_SEQPACKET, if configured.
    pub(super) messages: Option<OwnedFd>,
}

/// Claims all sockets of these settings; `left`: those of a predecessor of this process.
pub(super) fn claim_sockets(
    settings: &Settings,
    left: Vec<Listener>,
) -> Result<Claimed, ServeError> {
    let mut inherited = Inherited::take()?;
    inherited.add(left);
    let mut claims = BTreeMap::new();
    let mut listeners = Vec::with_capacity(settings.vms.len());
    let only_vm = settings.vms.len() == 1;
    for vm in &settings.vms {
        let (claimed, made) = claim_vm(vm, &mut inherited, settings.access, only_vm)?;
        listeners.push(claimed);
        claims.insert(vm.cid, made);
    }
    let (attach, attach_claim) = match &settings.attach {
        Some(attach) => {
            let access = sockets::Access {
                mode: attach.mode.or(settings.access.mode),
                ..settings.access
            };
            let on = ListenAddress::UnixSeqpacket(attach.socket.clone());
            let bind = || with_file(sockets::bind_packets(&attach.socket, access));
            let (socket, made) = claim(&mut inherited, &on, &[], true, bind)?;
            (Some(socket), Some(made))
        }
        None => (None, None),
    };
    let mut listen = Vec::new();
    let mut listen_claims = HashMap::new();
    for rule in &settings.listen {
        let (socket, made) = claim_listener(rule, &mut inherited, settings.access)?;
        listen.push(socket);
        listen_claims.insert(rule.on.clone(), made);
    }
    inherited.finish()?;
    Ok(Claimed {
        vms: listeners,
        attach,
        claims,
        attach_claim,
        listen,
        listen_claims,
    })
}

/// The socket of a listening rule.
pub(super) fn claim_listener(
    rule: &Listen,
    inherited: &mut Inherited,
    access: sockets::Access,
) -> Result<(OwnedFd, Claim), ServeError> {
    let access = sockets::Access {
        mode: rule.mode.or(access.mode),
        ..access
    };
    let bind = || match &rule.on {
        ListenAddress::Tcp(address) => match sockets::bind_tcp(*address) {
            Ok(socket) => Ok((socket, None)),
            Err(source) => Err(ServeError::Listen {
                on: rule.on.clone(),
                source,
            }),
        },
        ListenAddress::Unix(path) => {
            with_file(sockets::bind_type(path, access, SocketType::STREAM))
        }
        ListenAddress::UnixSeqpacket(path) => {
            with_file(sockets::bind_type(path, access, SocketType::SEQPACKET))
        }
    };
    claim(inherited, &rule.on, &[], false, bind)
}

/// A bound socket and its file.
fn with_file<T: Into<OwnedFd>>(
    bound: Result<(T, SocketFile), sockets::BindError>,
) -> Result<(OwnedFd, Option<SocketFile>), ServeError> {
    let (socket, file) = bound?;
    Ok((socket.into(), Some(file)))
}

/// A socket at this address: an inherited one, perhaps by one of these names, or a new one.
fn claim(
    inherited: &mut Inherited,
    on: &ListenAddress,
    names: &[String],
    reserved: bool,
    bind: impl FnOnce() -> Result<(OwnedFd, Option<SocketFile>), ServeError>,
) -> Result<(OwnedFd, Claim), ServeError> {
    let (listener, file) = match inherited.claim(on, names, reserved) {
        Some(listener) => {
            let file = match on {
                ListenAddress::Unix(path) | ListenAddress::UnixSeqpacket(path)
                    if listener.is_made =>
                {
                    sockets::adopt(path, reserved)
                }
                _ => None,
            };
            (listener, file)
        }
        None => {
            let (socket, file) = bind()?;
            let listener = Listener {
                name: String::new(),
                on: on.clone(),
                socket,
                is_made: true,
            };
            (listener, file)
        }
    };
    let claim = Claim {
        _kept: supervised::keep_listener(&listener),
        file,
    };
    Ok((listener.socket, claim))
}

/// The sockets of one VM.
pub(super) fn claim_vm(
    vm: &Vm,
    inherited: &mut Inherited,
    access: sockets::Access,
    only_vm: bool,
) -> Result<(Listeners, Vec<Claim>), ServeError> {
    let mut claims = Vec::new();
    let names = |role: &str| {
        let mut names = vec![format!("{role}-{}", vm.cid)];
        if only_vm {
            names.push(role.to_string());
        }
        names
    };
    let mut claim = |on: ListenAddress,
                     names: &[String],
                     bind: &dyn Fn() -> Result<(OwnedFd, Option<SocketFile>), ServeError>|
     -> Result<OwnedFd, ServeError> {
        let (socket, made) = claim(inherited, &on, names, true, bind)?;
        claims.push(made);
        Ok(socket)
    };
    let on = ListenAddress::Unix(vm.socket.clone());
    let bind = || with_file(sockets::bind_for_frontends(&vm.socket, access));
    let control = claim(on, &names("socket"), &bind)?;
    let (mut hybrid, mut messages) = (None, None);
    if let Host::Hybrid { path, messages: at } = &vm.host {
        let on = ListenAddress::Unix(path.clone());
        let bind = || with_file(sockets::bind(path, access));
        hybrid = Some(claim(on, &names("uds-path"), &bind)?.into());
        if let Some(path) = at {
            let on = ListenAddress::UnixSeqpacket(path.clone());
            let bind = || with_file(sockets::bind_packets(path, access));
            messages = Some(claim(on, &[], &bind)?);
        }
    }
    claims.push(Claim {
        file: None,
        _kept: supervised::keep_vm(vm.cid),
    });
    let listeners = Listeners {
        control: control.into(),
        hybrid,
        messages,
    };
    Ok((listeners, claims))
}
