//! Members: which CID, name and ports somebody gets, and how a device comes and goes on his account.
//!
//! What must hold: a CID, a name and a place are given to one at a time, and are free again only
//! when every worker has forgotten who had them.

use std::io::{self, IoSlice};
use std::ops::RangeInclusive;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Instant;

use zerosock_proto::{Cid, Port};
use zerosock_sys::account::Permit;
use zerosock_sys::fd_passing;

use super::super::HOST;
use super::super::codec::{Answer, AttachRequest, ServiceRequest, Status, VERSION, encode_answer};
use super::super::directory::Process;
use super::claims::Shown;
use super::clients::has_hung_up;
use super::{Server, State, granted};
use crate::control::registry::{DeviceRegistry, Entry, Member as Device};
use crate::control::socket_file::SocketFile;
use crate::device::HostEnd;
use crate::routing::DeviceAddr;
use crate::routing::name::Name;
use zerosock_vhost_user::{FrontendRegistry, FrontendSocket, VmSpec};

/// Descriptors of a member, beside its lease and those of its front-end and host sockets: both ends of
/// its device's connection until it has its own, and the listeners of host programs that call it.
const EACH: u64 = 4;

/// What a client wants to be.
#[derive(Debug)]
pub(super) enum JoinRequest {
    Process(AttachRequest),
    Service(ServiceRequest),
}

impl JoinRequest {
    fn name(&self) -> Option<&Name> {
        match self {
            JoinRequest::Process(request) => request.name.as_ref(),
            JoinRequest::Service(request) => request.name.as_ref(),
        }
    }
}

/// Where there is room for it.
#[derive(Copy, Clone, Debug)]
pub(super) enum AddressSlot {
    /// This CID.
    Cid(Cid),
    /// The host, connecting from the block of ports of this number.
    Block(u32),
}

/// The first of the ports from which services connect, how many each has, and how many can.
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

pub(super) struct Member {
    pub(super) cid: Cid,
    /// A service, and the number of its block of ports.
    pub(super) service: Option<u32>,
    pub(super) name: Option<Name>,
    pub(super) addr: DeviceAddr,
    /// The client whose it is, while that one is there.
    pub(super) client: Option<u32>,
    pub(super) stage: Stage,
    /// Of the socket by which host programs call it; gone when its worker has forgotten it.
    pub(super) _file: Option<SocketFile>,
    /// For its connections and listeners.
    pub(super) _permit: Permit,
}

#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) enum Stage {
    /// The workers get to know it; the number of the notice.
    Joining(u64),
    In,
    /// Its front-end is seen off.
    Leaving,
    /// The workers forget it.
    Removing(u64),
}

impl Stage {
    pub(super) fn is_leaving(self) -> bool {
        matches!(self, Stage::Leaving | Stage::Removing(_))
    }
}

/// Why a request cannot be granted.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) enum ClaimConflict {
    /// For good.
    Refused(Answer),
    /// Until someone has left who is about to.
    Passing(Answer),
}

impl ClaimConflict {
    fn refused(status: Status) -> ClaimConflict {
        ClaimConflict::Refused(Answer::refusal(status, VERSION))
    }

    fn passing(status: Status) -> ClaimConflict {
        ClaimConflict::Passing(Answer::refusal(status, VERSION))
    }
}

impl Server {
    /// Where the client can go, if all that it wants is free.
    pub(super) fn slot(
        &mut self,
        request: &JoinRequest,
        registry: &mut DeviceRegistry,
        frontends: &mut FrontendRegistry,
    ) -> Result<AddressSlot, ClaimConflict> {
        if let Some(name) = request.name()
            && let Some(&vm) = self.by_name.get(name)
        {
            return Err(self.conflict(vm, Status::NameTaken, frontends));
        }
        match request {
            JoinRequest::Process(request) => self
                .free_cid(request, registry, frontends)
                .map(AddressSlot::Cid),
            JoinRequest::Service(request) => {
                self.check_ports(&request.ports, 0, frontends)?;
                self.check_room(true, self.config.max_services)?;
                let block = self
                    .free_block()
                    .ok_or(ClaimConflict::refused(Status::Full))?;
                Ok(AddressSlot::Block(block))
            }
        }
    }

    fn free_cid(
        &mut self,
        request: &AttachRequest,
        registry: &mut DeviceRegistry,
        frontends: &mut FrontendRegistry,
    ) -> Result<Cid, ClaimConflict> {
        if let Some(cid) = request.cid {
            if let Some(&vm) = self.by_cid.get(&cid) {
                return Err(self.conflict(vm, Status::CidTaken, frontends));
            }
            if registry.contains(cid) {
                return Err(ClaimConflict::refused(Status::CidTaken));
            }
        }
        self.check_room(false, self.config.max_processes)?;
        match request.cid {
            Some(cid) => Ok(cid),
            None => self
                .any_cid(registry)
                .ok_or(ClaimConflict::refused(Status::Full)),
        }
    }

    /// Whether there may be one more service, or process.
    fn check_room(&self, services: bool, most: usize) -> Result<(), ClaimConflict> {
        let members = self.members.values();
        let mut members = members.filter(|member| member.service.is_some() == services);
        if members.clone().count() < most {
            return Ok(());
        }
        Err(match members.any(|member| member.stage.is_leaving()) {
            true => ClaimConflict::passing(Status::Full),
            false => ClaimConflict::refused(Status::Full),
        })
    }

    /// A block of ports that nobody connects from; the one that has rested for longest.
    fn free_block(&mut self) -> Option<u32> {
        let taken = |block: &u32| {
            let mut members = self.members.values();
            members.any(|member| member.service == Some(*block))
        };
        let blocks = (0..BLOCKS).map(|n| (self.next_block + n) % BLOCKS);
        // More than are taken need not be looked at.
        let block = blocks
            .take(self.members.len() + 1)
            .find(|block| !taken(block))?;
        self.next_block = (block + 1) % BLOCKS;
        Some(block)
    }

    /// What member `vm` has is wanted. If its process is gone, which may not have been noticed
    /// yet, it is sent off.
    pub(super) fn conflict(
        &mut self,
        vm: usize,
        status: Status,
        frontends: &mut FrontendRegistry,
    ) -> ClaimConflict {
        let Some(member) = self.members.get(&vm) else {
            return ClaimConflict::refused(status);
        };
        let client = member.client.and_then(|key| self.clients.get(&key));
        if let (Some(key), Some(client)) = (member.client, client)
            && has_hung_up(&client.socket)
        {
            self.lose(key, "it closed its lease, and another one came", frontends);
            return ClaimConflict::passing(status);
        }
        match self.is_leaving(vm, member, frontends) {
            true => ClaimConflict::passing(status),
            false => ClaimConflict::refused(status),
        }
    }

    /// Whether what the member has is about to be free: it is seen off, or has closed its device.
    pub(super) fn is_leaving(
        &self,
        vm: usize,
        member: &Member,
        frontends: &FrontendRegistry,
    ) -> bool {
        member.stage.is_leaving() || !frontends.has_frontend(vm)
    }

    pub(super) fn any_cid(&mut self, registry: &DeviceRegistry) -> Option<Cid> {
        let cids = self.config.cids.clone();
        let taken =
            |cid: Cid| !cid.is_guest() || self.by_cid.contains_key(&cid) || registry.contains(cid);
        let later = self.next_cid.max(*cids.start())..=*cids.end();
        let found = later.chain(cids.clone()).map(Cid::new);
        // More than are taken need not be looked at; reserved ones are four.
        let most = 2 * (self.members.len() + registry.len()) + 8;
        let cid = found.take(most).find(|&cid| !taken(cid))?;
        self.next_cid = cid.get().wrapping_add(1);
        Some(cid)
    }

    /// Makes the device, and lets the workers know.
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
        let permit = account.take_descriptors(EACH).map_err(io::Error::other)?;
        let (ours, theirs) = UnixStream::pair()?;
        let config = &self.config;
        let (host, file) = match slot {
            AddressSlot::Cid(cid) => config.host.end_of(cid, &account)?,
            // It is the host.
            AddressSlot::Block(_) => (HostEnd::None, None),
        };
        let (cid, service) = match slot {
            AddressSlot::Cid(cid) => (cid, None),
            AddressSlot::Block(block) => (HOST, Some(block)),
        };
        let device = Device {
            cid,
            host,
            buf_alloc: config.buf_alloc,
            service: service.map(|block| AddressSlot::sources(block).1),
            process: true,
            account: account.clone(),
        };
        let (number, notice) = frontends.notice();
        let ports = match request {
            JoinRequest::Process(request) => &request.ports,
            JoinRequest::Service(request) => &request.ports,
        };
        let addr = match request {
            JoinRequest::Process(_) => {
                let entry = Entry {
                    groups: &config.groups,
                    ports,
                    name: request.name(),
                };
                registry.add(device, entry, &notice)
            }
            JoinRequest::Service(_) => registry.add_service(device, ports, &notice),
        };
        let addr = addr.ok_or_else(|| io::Error::other("all places are taken"))?;
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
        });
        let no_worker = || io::Error::other("no such worker");
        let vm = match spec
            .ok_or_else(no_worker)
            .and_then(|spec| frontends.add(spec))
        {
            Ok(vm) => vm,
            Err(error) => {
                // The place is not given out again: this happens when memory is at its end.
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
        let member = Member {
            cid,
            service,
            name: request.name().cloned(),
            addr,
            client: Some(key),
            stage: Stage::Joining(number),
            _file: file,
            _permit: permit,
        };
        match request {
            JoinRequest::Process(_) => {
                self.by_cid.insert(cid, vm);
            }
            JoinRequest::Service(request) => self.take_ports(vm, &request.ports),
        }
        if let Some(name) = &member.name {
            self.by_name.insert(name.clone(), vm);
        }
        self.members.insert(vm, member);
        if let Some(client) = self.clients.get_mut(&key) {
            client.state = State::Joining { vm, theirs };
        }
        Ok(())
    }

    /// Every worker knows the member: its process gets its end.
    pub(super) fn joined(&mut self, vm: usize, frontends: &mut FrontendRegistry) {
        let claims: Vec<Port> = self.claims_of(vm).collect();
        let Some(member) = self.members.get_mut(&vm) else {
            return;
        };
        member.stage = Stage::In;
        let (cid, name, service) = (member.cid, member.name.clone(), member.service);
        let Some((key, client)) = member
            .client
            .and_then(|key| Some((key, self.clients.get_mut(&key)?)))
        else {
            return;
        };
        let state = std::mem::replace(&mut client.state, State::Attached { vm });
        let State::Joining { theirs, .. } = state else {
            return;
        };
        let mut answer = granted(cid);
        if let Some(block) = service {
            (answer.port, answer.ports) = (AddressSlot::sources(block).0, BLOCK);
        }
        let answer = encode_answer(&answer);
        let (uid, pid) = (client.uid, client.pid);
        // Before the answer: who has that can be found.
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
            return self.lose(key, &format!("it takes no answer: {error}"), frontends);
        }
        if let Some(suppressed) = self.log.admit(Instant::now()) {
            let name = name.as_ref().map_or("", Name::as_str);
            match service {
                None => tracing::info!(%cid, name, pid, uid, suppressed, "process attached"),
                Some(_) => {
                    let ports = Shown(&claims);
                    tracing::info!(name, pid, uid, %ports, suppressed, "service attached");
                }
            }
        }
    }

    /// A member is to leave.
    pub(super) fn send_off(&mut self, vm: usize, reason: &str, frontends: &mut FrontendRegistry) {
        let Some(member) = self.members.get_mut(&vm) else {
            return;
        };
        member.client = None;
        if !member.stage.is_leaving() {
            member.stage = Stage::Leaving;
            self.directory.remove(vm);
            frontends.disconnect(vm, reason);
        }
    }
}
