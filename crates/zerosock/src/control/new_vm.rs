//! A VM that is about to be added.
//!
//! # Invariants
//!
//! - The reaper closes the sockets of a VM that is dropped: connections in the backlog of a
//!   listener can carry descriptors, which are closed with it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use zerosock_proto::Cid;
use zerosock_ring::StateMap;
use zerosock_sys::account::Account;
use zerosock_sys::{PeerFd, fd_passing, memfd};
use zerosock_vhost_user::journal::VmJournal;
use zerosock_vhost_user::{DevicePort, FrontendSocket, VmSpec};

use super::config::{HostSide, SavedQueuePair, StartError, Succession, VmConfig, system};
use super::guest::options::GuestEndpoints;
use super::guest::server::GuestShare;
use super::registry::DeviceRegistry;
use crate::device::factory::{Member, MemberState};
use crate::device::guest_orders::GuestReports;
use crate::device::host_sockets::forward;
use crate::device::{DriverKind, HostAccess, SavedDevice};
use crate::routing::forward::RuleBoard;
use zerosock_virtio::outbox::DeviceAddr;

/// See the [module](self). The fields are those of [`VmConfig`].
#[derive(Debug)]
pub(super) struct NewVm {
    pub(super) cid: Cid,
    pub(super) listener: PeerFd,
    host: HostAccess,
    /// Host AF_VSOCK ports to listen on.
    listen: Vec<u32>,
    pub(super) buf_alloc: u32,
    queue_size: u16,
    pub(super) groups: Vec<String>,
    require_sealed_memory: bool,
    stopped_timeout: Option<Duration>,
    guest_endpoints: Option<GuestEndpoints>,
    succession: Option<Succession>,
    journal: Option<VmJournal>,
    /// The account of the front-end.
    account: Account,
    /// That of the host programs, in the same share.
    programs: Account,
}

impl NewVm {
    pub(super) fn new(vm: VmConfig, account: Account) -> NewVm {
        let programs = account.part();
        let owned = |fd: OwnedFd| PeerFd::from(fd).owned_by(&programs);
        let (host, listen) = match vm.host {
            HostSide::Hybrid {
                path,
                listener,
                messages,
            } => {
                let host = HostAccess::Hybrid {
                    services: path.into(),
                    listener: Some(owned(listener.into())),
                    messages: messages.map(|it| (it.path.into(), Some(owned(it.listener)))),
                };
                (host, Vec::new())
            }
            HostSide::Forward { cid, listen } => {
                let listeners = Vec::with_capacity(listen.len());
                (HostAccess::Forward { cid, listeners }, listen)
            }
            HostSide::None => (HostAccess::None, Vec::new()),
        };
        NewVm {
            cid: vm.cid,
            listener: PeerFd::from(OwnedFd::from(vm.listener)).owned_by(&account),
            host,
            listen,
            buf_alloc: vm.buf_alloc,
            queue_size: vm.queue_size,
            groups: vm.groups,
            require_sealed_memory: vm.require_sealed_memory,
            stopped_timeout: vm.stopped_timeout,
            guest_endpoints: vm.guest_endpoints,
            succession: vm.succession,
            journal: None,
            account,
            programs,
        }
    }

    /// Whether its guest connects to host programs by path.
    pub(super) fn has_paths(&self) -> bool {
        matches!(self.host, HostAccess::Hybrid { .. })
    }

    /// What the guest endpoints of the VM get; its device has this address.
    pub(super) fn guest_share(&self, addr: DeviceAddr) -> GuestShare {
        GuestShare {
            addr,
            host: self.host.outward(),
            buf_alloc: self.buf_alloc,
            groups: self.groups.clone(),
            account: self.programs.clone(),
            stopped_timeout: self.stopped_timeout,
            options: self.guest_endpoints.clone(),
        }
    }

    /// Makes the member of the registry. To be called once: it takes the host side.
    /// Its memory that outlives the process has `state_len` bytes.
    pub(super) fn take_member(
        &mut self,
        reports: &GuestReports,
        state_len: usize,
        rules: &Arc<RuleBoard>,
    ) -> Result<Member, StartError> {
        Ok(Member {
            cid: self.cid,
            host: self.take_host()?,
            buf_alloc: self.buf_alloc,
            service: None,
            driver: DriverKind::Vm,
            account: self.programs.clone(),
            stopped_timeout: self.stopped_timeout,
            guests: self.guest_endpoints.as_ref().map(|_| reports.clone()),
            state: self.take_state(state_len, rules)?,
        })
    }

    /// Maps the memory that outlives the process: that of the process before, or a new one. Without the
    /// former the connection of the front-end is not continued.
    fn take_state(
        &mut self,
        len: usize,
        rules: &Arc<RuleBoard>,
    ) -> Result<MemberState, StartError> {
        let Some(succession) = self.succession.take() else {
            return Ok(MemberState::default());
        };
        let Succession {
            mut journal,
            state,
            saved,
            keep_state,
        } = succession;
        let left = state.filter(|file| memfd::len(file).is_ok_and(|found| found == len as u64));
        let left = left.and_then(|file| StateMap::map(file, len).ok());
        let memory = match left {
            Some(memory) => memory,
            None => {
                if let Some(former) = journal.restored.take() {
                    tracing::error!(
                        cid = %self.cid,
                        "the connection of the front-end ends: there is no usable state of the device"
                    );
                    journal.writer.disconnected();
                    drop(former.socket.owned_by(&self.account));
                }
                let file = memfd::create("zerosock-state", len as u64, true);
                let file = file.map_err(system("make a memory file"))?;
                keep_state(file.as_fd());
                let map = StateMap::map(&file, len).map_err(io::Error::other);
                map.map_err(system("map a memory file"))?
            }
        };
        let awaits_queues = journal.restored.is_some();
        self.journal = Some(journal);
        let saved = saved.into_iter().map(|it| {
            let rules = Arc::clone(rules);
            let SavedQueuePair { pair, bytes, fds } = it;
            (pair, SavedDevice { bytes, fds, rules })
        });
        Ok(MemberState {
            memory: Some(memory),
            awaits_queues,
            saved: saved.collect(),
        })
    }

    /// What the control thread needs to accept the front-end of the device of `port`.
    pub(super) fn into_spec(
        self,
        name: String,
        sealed_memory: bool,
        registry: &DeviceRegistry,
        port: Box<dyn DevicePort>,
    ) -> VmSpec {
        VmSpec {
            name,
            model: registry.model(self.cid),
            socket: FrontendSocket::Listener(self.listener),
            max_queue_size: self.queue_size,
            sealed_memory: sealed_memory || self.require_sealed_memory,
            account: self.account,
            port,
            journal: self.journal,
        }
    }

    /// Takes the host side out, to be called once, and leaves the part for connections of guests. Makes its listeners
    /// non-blocking and, where the kernel can, makes them refuse descriptors from programs that connect from now on.
    fn take_host(&mut self) -> Result<HostAccess, StartError> {
        let outward = self.host.outward();
        let mut host = std::mem::replace(&mut self.host, outward);
        match &mut host {
            HostAccess::Hybrid {
                listener, messages, ..
            } => {
                let of_messages = messages.iter().flat_map(|(_, listener)| listener);
                for listener in listener.iter().chain(of_messages) {
                    let ready = rustix::io::ioctl_fionbio(listener, true).map_err(Into::into);
                    let ready = ready.and_then(|()| fd_passing::refuse_rights(listener));
                    ready.map_err(system("prepare a host socket"))?;
                }
            }
            HostAccess::Forward { listeners, .. } => {
                for port in std::mem::take(&mut self.listen) {
                    let listener = forward::listen(port)
                        .map_err(|source| StartError::Forward { port, source })?;
                    listeners.push((port, listener));
                }
            }
            HostAccess::None => {}
        }
        Ok(host)
    }
}

#[cfg(test)]
#[path = "new_vm_tests.rs"]
mod tests;
