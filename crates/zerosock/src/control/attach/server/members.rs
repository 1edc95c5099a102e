//! Members: assigns CIDs, names and source ports, and adds and removes members' devices.
//!
//! # Invariants
//!
//! - A CID, a name and an address belong to one member at a time, and become free only when every
//!   worker has removed the member's device.

use std::io::{self, IoSlice};
use std::ops::RangeInclusive;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Instant;

use zerosock_proto::{Cid, Port};
use zerosock_sys::fd_passing;

use super::super::HOST;
use super::super::codec::{Answer, AttachRequest, Status, VERSION, encode_answer};
use super::super::directory::Process;
use super::super::places::has_place;
use super::claims::PortList;
use super::clients::has_hung_up;
use super::state::{
    AttachedMember, ClientState, Conflict, JoinRequest, MemberStage, Server, granted,
};
use crate::control::registry::{DeviceRegistry, RouteEntry};
use crate::device::factory::{Member, MemberState};
use crate::device::{DriverKind, HostAccess};
use crate::routing::name::Name;
use zerosock_vhost_user::{FrontendRegistry, FrontendSocket, VmSpec};

/// Descriptors of a member beside its control connection, its front-end and its host connections:
/// both ends of its vhost-user connection until the process has its own, and its hybrid listeners.
const DESCRIPTORS_PER_MEMBER: u64 = 4;

/// The address that a member will have.
#[derive(Copy, Clone, Debug)]
pub(super) enum AddressSlot {
    /// A process at this CID.
    Cid(Cid),
    /// A service at CID 2. Its connections use the block of source ports with this number.
    Block(u32),
}

/// The first source port of services, the size of a block, and the number of blocks.
const FIRST_SOURCE: u32 = 0x8000_0000;
const BLOCK: u32 = 0x1_0000;
const BLOCKS: u32 = 0x7fff;

impl AddressSlot {
    fn sources(block: u32) -> (Port, RangeInclusive<Port>) {
        let first = FIRST_SOURCE + block % BLOCKS * BLOCK;
        let last = first + (BLOCK - 1);
        (Port::new(first), Port::new(first)..=Port::new(last))
    }
}

impl Server {
    /// Finds an address for a member of this user, if everything that it requests is free.
    pub(super) fn slot(
        &mut self,
        request: &JoinRequest,
        uid: u32,
        registry: &mut DeviceRegistry,
        frontends: &mut FrontendRegistry,
    ) -> Result<AddressSlot, Conflict> {
        if let Some(name) = request.name()
            && registry.has_name(name)
        {
            return Err(match self.by_name.get(name) {
                Some(&vm) => {
                    let taken = Answer::refusal(Status::NameTaken, VERSION);
                    self.conflict(vm, taken, frontends)
                }
                // A guest endpoint has it.
                None => Conflict::refused(Status::NameTaken),
            });
        }
        match request {
            JoinRequest::Process(request) => self
                .free_cid(request, uid, registry, frontends)
                .map(AddressSlot::Cid),
            JoinRequest::Service(request) => {
                self.check_ports(&request.ports, 0, frontends)?;
                self.check_limit(true, uid)?;
                let block = self.free_block().ok_or(Conflict::refused(Status::Full))?;
                Ok(AddressSlot::Block(block))
            }
        }
    }

    fn free_cid(
        &mut self,
        request: &AttachRequest,
        uid: u32,
        registry: &mut DeviceRegistry,
        frontends: &mut FrontendRegistry,
    ) -> Result<Cid, Conflict> {
        if let Some(cid) = request.cid {
            if let Some(&vm) = self.by_cid.get(&cid) {
                let taken = Answer::refusal(Status::CidTaken, VERSION);
                return Err(self.conflict(vm, taken, frontends));
            }
            if registry.contains(cid) {
                return Err(Conflict::refused(Status::CidTaken));
            }
        }
        self.check_limit(false, uid)?;
        match request.cid {
            Some(cid) => Ok(cid),
            None => registry
                .free_cid(&self.config.cids, &mut self.next_cid)
                .ok_or(Conflict::refused(Status::Full)),
        }
    }

    /// Checks the limit of services, or of processes, for one more of this user.
    fn check_limit(&self, services: bool, uid: u32) -> Result<(), Conflict> {
        let (most, users) = match services {
            true => (self.config.max_services, &self.config.service_uids),
            false => (self.config.max_processes, &self.config.allowed_uids),
        };
        let members = self.members.values();
        let mut members = members.filter(|member| member.service.is_some() == services);
        if has_place(members.clone().map(|member| member.uid), uid, users, most) {
            return Ok(());
        }
        Err(match members.any(|member| member.stage.is_leaving()) {
            true => Conflict::temporary(Status::Full),
            false => Conflict::refused(Status::Full),
        })
    }

    /// A free block of source ports, reused as late as possible.
    fn free_block(&mut self) -> Option<u32> {
        let taken = |block: &u32| {
            let mut members = self.members.values();
            members.any(|member| member.service == Some(*block))
        };
        let blocks = (0..BLOCKS).map(|n| (self.next_block + n) % BLOCKS);
        // With n members, one of n + 1 blocks is free.
        let block = blocks
            .take(self.members.len() + 1)
            .find(|block| !taken(block))?;
        self.next_block = (block + 1) % BLOCKS;
        Some(block)
    }

    /// The conflict with member `vm`, which leads to this answer. If its process has exited, which
    /// may not have been detected yet, the member is disconnected.
    pub(super) fn conflict(
        &mut self,
        vm: usize,
        answer: Answer,
        frontends: &mut FrontendRegistry,
    ) -> Conflict {
        let Some(member) = self.members.get(&vm) else {
            return Conflict::Refused(answer);
        };
        let client = member.client.and_then(|key| self.clients.get(&key));
        if let (Some(key), Some(client)) = (member.client, client)
            && has_hung_up(&client.socket)
        {
            self.drop_client(
                key,
                "it closed its control connection, and another process requests the same",
                frontends,
            );
            return Conflict::Temporary(answer);
        }
        match self.is_leaving(vm, member, frontends) {
            true => Conflict::Temporary(answer),
            false => Conflict::Refused(answer),
        }
    }

    /// Whether the member's CID, name and ports are about to become free.
    pub(super) fn is_leaving(
        &self,
        vm: usize,
        member: &AttachedMember,
        frontends: &FrontendRegistry,
    ) -> bool {
        member.stage.is_leaving() || !frontends.has_frontend(vm)
    }

    /// Makes the member's device and sends it to the workers.
    pub(super) fn join(
        &mut self,
        key: u32,
        slot: AddressSlot,
        request: &JoinRequest,
        registry: &mut DeviceRegistry,
        frontends: &mut FrontendRegistry,
    ) -> io::Result<()> {
        let uid = self.clients.get(&key).map_or(u32::MAX, |client| client.uid);
        let account = self.account(uid, registry);
        let permit = account
            .take_descriptors(DESCRIPTORS_PER_MEMBER)
            .map_err(io::Error::other)?;
        let (ours, theirs) = UnixStream::pair()?;
        let config = &self.config;
        let (host, file) = match slot {
            AddressSlot::Cid(cid) => config.host.host_end(cid, &account)?,
            // A service is the host itself.
            AddressSlot::Block(_) => (HostAccess::None, None),
        };
        let (cid, service) = match slot {
            AddressSlot::Cid(cid) => (cid, None),
            AddressSlot::Block(block) => (HOST, Some(block)),
        };
        let device = Member {
            cid,
            host,
            buf_alloc: config.buf_alloc,
            service: service.map(|block| AddressSlot::sources(block).1),
            driver: DriverKind::Process,
            stopped_timeout: None,
            guests: None,
            state: MemberState::default(),
            account: account.clone(),
        };
        let (number, notice) = frontends.notice();
        let ports = match request {
            JoinRequest::Process(request) => &request.ports,
            JoinRequest::Service(request) => &request.ports,
        };
        let addr = match request {
            JoinRequest::Process(_) => {
                let entry = RouteEntry {
                    groups: &config.groups,
                    ports,
                    name: request.name(),
                };
                registry.add(device, entry, &notice)
            }
            JoinRequest::Service(_) => registry.add_service(device, ports, &notice),
        };
        let addr = addr.ok_or_else(|| io::Error::other("the workers have no free address"))?;
        drop(notice);
        let port = registry.port(addr);
        let spec = port.map(|port| VmSpec {
            name: match (request.name(), service) {
                (Some(name), Some(_)) => format!("service {name}"),
                (None, Some(block)) => format!("service {block}"),
                (Some(name), None) => format!("process {name} (cid {cid})"),
                (None, None) => format!("process (cid {cid})"),
            },
            model: registry.model(cid),
            socket: FrontendSocket::Connected(ours),
            max_queue_size: config.queue_size,
            sealed_memory: true,
            account,
            port,
            journal: None,
        });
        let no_worker = || io::Error::other("no such worker");
        let vm = match spec
            .ok_or_else(no_worker)
            .and_then(|spec| frontends.add(spec))
        {
            Ok(vm) => vm,
            Err(error) => {
                // The address is not reused: this happens only when the system is out of memory.
                let (_, notice) = frontends.notice();
                match request {
                    JoinRequest::Process(_) => registry.remove(cid, addr, &notice),
                    JoinRequest::Service(_) => {
                        registry.remove_service(addr, ports.iter().copied(), &notice);
                    }
                }
                return Err(error);
            }
        };
        let member = AttachedMember {
            cid,
            uid,
            service,
            name: request.name().cloned(),
            addr,
            client: Some(key),
            stage: MemberStage::Joining(number),
            _file: file,
            _permit: permit,
        };
        match request {
            JoinRequest::Process(_) => {
                self.by_cid.insert(cid, vm);
                registry.reserve(cid);
            }
            JoinRequest::Service(request) => self.take_ports(vm, &request.ports),
        }
        if let Some(name) = &member.name {
            self.by_name.insert(name.clone(), vm);
            registry.take_name(name);
        }
        self.members.insert(vm, member);
        if let Some(client) = self.clients.get_mut(&key) {
            client.state = ClientState::Joining { vm, theirs };
        }
        Ok(())
    }

    /// Every worker knows the member: sends the process its end of the vhost-user connection.
    pub(super) fn joined(&mut self, vm: usize, frontends: &mut FrontendRegistry) {
        let claims: Vec<Port> = self.claims_of(vm).collect();
        let Some(member) = self.members.get_mut(&vm) else {
            return;
        };
        member.stage = MemberStage::Active;
        let (cid, name, service) = (member.cid, member.name.clone(), member.service);
        let Some((key, client)) = member
            .client
            .and_then(|key| Some((key, self.clients.get_mut(&key)?)))
        else {
            return;
        };
        let state = std::mem::replace(&mut client.state, ClientState::Attached { vm });
        let ClientState::Joining { theirs, .. } = state else {
            return;
        };
        let mut answer = granted(cid);
        if let Some(block) = service {
            (answer.port, answer.ports) = (AddressSlot::sources(block).0, BLOCK);
        }
        let answer = encode_answer(&answer);
        let (uid, pid) = (client.uid, client.pid);
        // Before the answer, so that a process that has its answer is in the directory.
        let process = Process {
            cid,
            name: name.clone(),
            uid,
            pid,
            claims: claims.clone(),
        };
        self.directory.insert(vm, process);
        let sent = fd_passing::send(&client.socket, &[IoSlice::new(&answer)], &[theirs.as_fd()]);
        if let Err(error) = sent {
            return self.drop_client(
                key,
                &format!("it does not read its answer: {error}"),
                frontends,
            );
        }
        if let Some(suppressed) = self.log.admit(Instant::now()) {
            let name = name.as_ref().map_or("", Name::as_str);
            match service {
                None => tracing::info!(%cid, name, pid, uid, suppressed, "process attached"),
                Some(_) => {
                    let ports = PortList(&claims);
                    tracing::info!(name, pid, uid, %ports, suppressed, "service attached");
                }
            }
        }
    }

    /// Disconnects a member.
    pub(super) fn disconnect_member(
        &mut self,
        vm: usize,
        reason: &str,
        frontends: &mut FrontendRegistry,
    ) {
        let Some(member) = self.members.get_mut(&vm) else {
            return;
        };
        member.client = None;
        if !member.stage.is_leaving() {
            member.stage = MemberStage::Leaving;
            self.directory.remove(vm);
            frontends.disconnect(vm, reason);
        }
    }
}
