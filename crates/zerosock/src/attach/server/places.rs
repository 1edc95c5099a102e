//! Members: which CID and name somebody gets, and how a device comes and goes on his account.
//!
//! What must hold: a CID, a name and a place are given to one at a time, and are free again only
//! when every worker has forgotten who had them.

use std::io::{self, IoSlice};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Instant;

use zerosock_proto::Cid;
use zerosock_sys::fd_passing;

use super::super::codec::{AttachRequest, Name, Status, encode_answer};
use super::super::directory::Process;
use super::clients::has_hung_up;
use super::{Server, State, granted};
use crate::device::control::{FrontendSocket, House, VmSpec};
use crate::plane::roster::{Entry, Member as Device};
use crate::switch::DeviceAddr;

pub(super) struct Member {
    pub(super) cid: Cid,
    pub(super) name: Option<Name>,
    pub(super) addr: DeviceAddr,
    /// The client whose it is, while that one is there.
    pub(super) client: Option<u32>,
    pub(super) stage: Stage,
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
pub(super) enum Obstacle {
    /// For good.
    Refused(Status),
    /// Until someone has left who is about to.
    Passing(Status),
}

impl Server {
    /// The CID that the request can have, if all that it wants is free.
    pub(super) fn free_cid(
        &mut self,
        request: &AttachRequest,
        house: &mut House,
    ) -> Result<Cid, Obstacle> {
        if let Some(name) = &request.name
            && let Some(&vm) = self.by_name.get(name)
        {
            return Err(self.obstacle(vm, Status::NameTaken, house));
        }
        if let Some(cid) = request.cid {
            if let Some(&vm) = self.by_cid.get(&cid) {
                return Err(self.obstacle(vm, Status::CidTaken, house));
            }
            if self.roster.contains(cid) {
                return Err(Obstacle::Refused(Status::CidTaken));
            }
        }
        if self.members.len() >= self.plan.config.max_processes {
            let mut members = self.members.values();
            return Err(match members.any(|member| member.stage.is_leaving()) {
                true => Obstacle::Passing(Status::Full),
                false => Obstacle::Refused(Status::Full),
            });
        }
        match request.cid {
            Some(cid) => Ok(cid),
            None => self.any_cid().ok_or(Obstacle::Refused(Status::Full)),
        }
    }

    /// What member `vm` has is wanted. If its process is gone, which may not have been noticed
    /// yet, it is sent off.
    pub(super) fn obstacle(&mut self, vm: usize, status: Status, house: &mut House) -> Obstacle {
        let Some(member) = self.members.get(&vm) else {
            return Obstacle::Refused(status);
        };
        let client = member.client.and_then(|key| self.clients.get(&key));
        if let (Some(key), Some(client)) = (member.client, client)
            && has_hung_up(&client.socket)
        {
            self.lose(key, "it closed its lease, and another one came", house);
            return Obstacle::Passing(status);
        }
        match member.stage.is_leaving() {
            true => Obstacle::Passing(status),
            false => Obstacle::Refused(status),
        }
    }

    pub(super) fn any_cid(&mut self) -> Option<Cid> {
        let cids = self.plan.config.cids.clone();
        let taken = |cid: Cid| {
            !cid.is_guest() || self.by_cid.contains_key(&cid) || self.roster.contains(cid)
        };
        let later = self.next_cid.max(*cids.start())..=*cids.end();
        let found = later.chain(cids.clone()).map(Cid::new);
        // More than are taken need not be looked at; reserved ones are four.
        let most = 2 * (self.members.len() + self.roster.len()) + 8;
        let cid = found.take(most).find(|&cid| !taken(cid))?;
        self.next_cid = cid.get().wrapping_add(1);
        Some(cid)
    }

    /// Makes the device, and lets the workers know.
    pub(super) fn join(
        &mut self,
        key: u32,
        cid: Cid,
        request: &AttachRequest,
        house: &mut House,
    ) -> io::Result<()> {
        let (ours, theirs) = UnixStream::pair()?;
        let config = &self.plan.config;
        let device = Device {
            cid,
            host: (self.plan.host)(),
            buf_alloc: config.buf_alloc,
        };
        let entry = Entry {
            groups: &config.groups,
            ports: &request.ports,
            name: request.name.as_ref(),
        };
        let (number, notice) = house.notice();
        let addr = self
            .roster
            .add(device, entry, &notice)
            .ok_or_else(|| io::Error::other("all places are taken"))?;
        drop(notice);
        let port = self.roster.port(addr);
        let spec = port.map(|port| VmSpec {
            name: match &request.name {
                Some(name) => format!("process {name}"),
                None => format!("process {cid}"),
            },
            cid,
            socket: FrontendSocket::Connected(ours),
            max_queue_size: config.queue_size,
            sealed_memory: true,
            port,
        });
        let no_worker = || io::Error::other("no such worker");
        let vm = match spec.ok_or_else(no_worker).and_then(|spec| house.add(spec)) {
            Ok(vm) => vm,
            Err(error) => {
                // The place is not given out again: this happens when memory is at its end.
                let (_, notice) = house.notice();
                self.roster.remove(cid, addr, &notice);
                return Err(error);
            }
        };
        let member = Member {
            cid,
            name: request.name.clone(),
            addr,
            client: Some(key),
            stage: Stage::Joining(number),
        };
        self.by_cid.insert(cid, vm);
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
    pub(super) fn joined(&mut self, vm: usize, house: &mut House) {
        let Some(member) = self.members.get_mut(&vm) else {
            return;
        };
        member.stage = Stage::In;
        let (cid, name) = (member.cid, member.name.clone());
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
        let answer = encode_answer(&granted(cid));
        let sent = fd_passing::send(&client.socket, &[IoSlice::new(&answer)], &[theirs.as_fd()]);
        if let Err(error) = sent {
            return self.lose(key, &format!("it takes no answer: {error}"), house);
        }
        let (uid, pid) = (client.uid, client.pid);
        if let Some(suppressed) = self.log.admit(Instant::now()) {
            let name = name.as_ref().map_or("", Name::as_str);
            tracing::info!(%cid, name, pid, uid, suppressed, "process attached");
        }
        self.directory.insert(Process {
            cid,
            name,
            uid,
            pid,
        });
    }

    /// A member is to leave.
    pub(super) fn send_off(&mut self, vm: usize, reason: &str, house: &mut House) {
        let Some(member) = self.members.get_mut(&vm) else {
            return;
        };
        member.client = None;
        if !member.stage.is_leaving() {
            member.stage = Stage::Leaving;
            self.directory.remove(member.cid);
            house.disconnect(vm, reason);
        }
    }
}
