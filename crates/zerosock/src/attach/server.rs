//! The attach server: a lodger on the control thread.
//!
//! ```text
//!  client:  Silent --attach--> Waiting? --> Joining --workers know--> Attached --resolve--> …
//!  member:                                  Joining -----------------> In --> Leaving --> Removing
//! ```
//!
//! A client is a connection to the attach socket, a member a device on its account. The answer
//! goes out only when every worker goes by the new routes, so that whoever is told a CID can be
//! reached at it. A member leaves when either of its sockets closes; its CID, name and place are
//! free when its front-end is seen off and every worker has forgotten it. Who asks for something
//! that is about to be free waits for that moment.
//!
//! What must hold: nothing blocks; a client whose user is not allowed never becomes one; what has
//! not become a member in [`PATIENCE`] is dropped, and there are at most [`MAX_CLIENTS`] such.

use std::collections::BTreeMap;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{SocketFlags, accept_with};
use zerosock_proto::Cid;
use zerosock_sys::fd_passing;

use super::codec::{
    Answer, AttachRequest, MAX_REQUEST, Name, Request, Status, VERSION, Version, decode_request,
    encode_answer,
};
use super::directory::{Directory, Process};
use super::{AttachConfig, HOST};
use crate::device::HostEnd;
use crate::device::control::{FrontendSocket, House, Lodger, LogLimit, VmSpec};
use crate::plane::roster::{Member as Device, Roster};
use crate::switch::DeviceAddr;

/// How long a client may take to say what it wants, and to wait for what is about to be free.
const PATIENCE: Duration = Duration::from_secs(5);
/// Clients that have no place yet.
const MAX_CLIENTS: usize = 64;
/// Connections accepted, and messages of one client handled, before others get their turn.
const BUDGET: usize = 16;
/// How long the listener rests when the system has no descriptor for a connection.
const ACCEPT_REST: Duration = Duration::from_millis(200);
/// The listener's key; clients have others.
const LISTENER: u32 = 0;

/// The terms, and how a process meets the host.
pub(crate) struct AttachPlan {
    pub(crate) config: AttachConfig,
    pub(crate) host: Box<dyn Fn() -> HostEnd + Send>,
}

/// See the module.
pub(crate) struct Server {
    plan: AttachPlan,
    roster: Roster,
    directory: Arc<Directory>,
    clients: BTreeMap<u32, Client>,
    last_key: u32,
    members: BTreeMap<usize, Member>,
    by_cid: BTreeMap<Cid, usize>,
    by_name: BTreeMap<Name, usize>,
    /// The CID to try first for a process that wants any: the one after the last that was given,
    /// so that one that has just become free rests for long.
    next_cid: u32,
    /// The listener is not watched until then.
    rest: Option<Instant>,
    log: LogLimit,
}

struct Client {
    socket: OwnedFd,
    uid: u32,
    pid: i32,
    state: State,
    /// An answer that the socket did not take. While there is one, nothing is read.
    answer: Option<[u8; super::codec::ANSWER_LEN]>,
    watched: EventFlags,
}

enum State {
    Silent {
        until: Instant,
    },
    Waiting {
        until: Instant,
        request: AttachRequest,
    },
    Joining {
        vm: usize,
        theirs: UnixStream,
    },
    Attached {
        vm: usize,
    },
}

struct Member {
    cid: Cid,
    name: Option<Name>,
    addr: DeviceAddr,
    /// The client whose it is, while that one is there.
    client: Option<u32>,
    stage: Stage,
}

#[derive(Copy, Clone, Debug, Eq, PartialEq)]
enum Stage {
    /// The workers get to know it; the number of the notice.
    Joining(u64),
    In,
    /// Its front-end is seen off.
    Leaving,
    /// The workers forget it.
    Removing(u64),
}

impl Stage {
    fn is_leaving(self) -> bool {
        matches!(self, Stage::Leaving | Stage::Removing(_))
    }
}

/// Why a request cannot be granted.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
enum Obstacle {
    /// For good.
    Refused(Status),
    /// Until someone has left who is about to.
    Passing(Status),
}

/// Whether a user may attach.
fn is_allowed(allowed: &[u32], uid: u32) -> bool {
    allowed.contains(&uid)
}

impl Server {
    pub(crate) fn new(
        plan: AttachPlan,
        roster: Roster,
        directory: Arc<Directory>,
    ) -> io::Result<Server> {
        rustix::io::ioctl_fionbio(&plan.config.listener, true)?;
        let next_cid = *plan.config.cids.start();
        Ok(Server {
            plan,
            roster,
            directory,
            clients: BTreeMap::new(),
            last_key: LISTENER,
            members: BTreeMap::new(),
            by_cid: BTreeMap::new(),
            by_name: BTreeMap::new(),
            next_cid,
            rest: None,
            log: LogLimit::default(),
        })
    }

    fn accept(&mut self, house: &mut House) {
        for _ in 0..BUDGET {
            let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
            match accept_with(&self.plan.config.listener, flags) {
                Ok(socket) => self.admit(socket, house),
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(error) => {
                    self.warn(&format!("cannot accept a process: {error}"));
                    self.rest = Some(Instant::now() + ACCEPT_REST);
                    self.watch_listener(house, EventFlags::empty());
                    return;
                }
            }
        }
    }

    fn watch_listener(&self, house: &House, flags: EventFlags) {
        if let Err(error) = house.watch_for(&self.plan.config.listener, LISTENER, flags) {
            tracing::error!(%error, "cannot change what is watched");
        }
    }

    /// Lets a process say what it wants, or turns it away.
    fn admit(&mut self, socket: OwnedFd, house: &mut House) {
        let (uid, pid) = match socket_peercred(&socket) {
            Ok(cred) => (cred.uid.as_raw(), cred.pid.as_raw_nonzero().get()),
            Err(error) => return self.warn(&format!("a process without a user: {error}")),
        };
        let status = if !is_allowed(&self.plan.config.allowed_uids, uid) {
            Status::NotPermitted
        } else if self.newcomers() >= MAX_CLIENTS {
            Status::Full
        } else {
            let until = Instant::now() + PATIENCE;
            let key = self.free_key();
            let watched = EventFlags::IN;
            if let Err(error) = house.watch(&socket, key, watched) {
                return self.warn(&format!("cannot watch a process: {error}"));
            }
            let client = Client {
                socket,
                uid,
                pid,
                state: State::Silent { until },
                answer: None,
                watched,
            };
            self.clients.insert(key, client);
            return;
        };
        self.directory.refuse();
        self.warn(&format!(
            "process {pid} of user {uid} is turned away: {status:?}"
        ));
        dismiss(&socket, &Answer::refusal(status, Version::default()));
    }

    fn newcomers(&self) -> usize {
        let clients = self.clients.values();
        let attached = clients.filter(|c| matches!(c.state, State::Attached { .. }));
        self.clients.len() - attached.count()
    }

    fn free_key(&mut self) -> u32 {
        loop {
            self.last_key = self.last_key.wrapping_add(1);
            if self.last_key != LISTENER && !self.clients.contains_key(&self.last_key) {
                return self.last_key;
            }
        }
    }

    /// Handles what a client has said.
    fn serve(&mut self, key: u32, house: &mut House) {
        for _ in 0..BUDGET {
            let Some(client) = self.clients.get_mut(&key) else {
                return;
            };
            match client.flush() {
                Ok(true) => {}
                Ok(false) => break,
                Err(_) => return self.lose(key, "it does not take answers", house),
            }
            let mut bytes = [0; MAX_REQUEST + 1];
            let mut fds: Vec<OwnedFd> = Vec::new();
            let len = match fd_passing::recv(&client.socket, &mut bytes, &mut fds) {
                Ok(received) => received.bytes,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => return self.lose(key, "its socket failed", house),
            };
            if len == 0 {
                return self.lose(key, "it closed its lease", house);
            }
            // Descriptors have no place in a request.
            let request = match fds.is_empty() {
                true => decode_request(bytes.get(..len).unwrap_or_default()),
                false => Err(Answer::refusal(Status::BadRequest, Version::default())),
            };
            self.handle(key, request, house);
        }
        self.settle(key, house);
    }

    fn handle(&mut self, key: u32, request: Result<Request, Answer>, house: &mut House) {
        let Some(client) = self.clients.get_mut(&key) else {
            return;
        };
        match (&client.state, request) {
            (&State::Silent { until }, Ok(Request::Attach(request))) => {
                self.attach(key, request, until, house);
            }
            (State::Attached { .. }, Ok(Request::Resolve(name))) => {
                let vm = self.by_name.get(&name);
                let member = vm.and_then(|vm| self.members.get(vm));
                let member = member.filter(|member| member.stage == Stage::In);
                let answer = match member {
                    Some(member) => granted(member.cid),
                    None => Answer::refusal(Status::UnknownName, VERSION),
                };
                client.answer = Some(encode_answer(&answer));
            }
            // It can go on with its place: what it asked for is all that it does not get.
            (State::Attached { .. }, Err(refusal)) => {
                client.answer = Some(encode_answer(&refusal));
            }
            (State::Attached { .. }, Ok(Request::Attach(_))) => {
                let refusal = Answer::refusal(Status::BadRequest, VERSION);
                client.answer = Some(encode_answer(&refusal));
            }
            (State::Silent { .. }, Err(refusal)) => self.refuse(key, &refusal),
            // A place first; and one thing after the other.
            (State::Silent { .. }, Ok(Request::Resolve(_))) => {
                self.refuse(key, &Answer::refusal(Status::BadRequest, VERSION));
            }
            (&State::Joining { vm, .. }, _) => {
                self.refuse(key, &Answer::refusal(Status::BadRequest, VERSION));
                self.send_off(vm, "it spoke out of turn", house);
            }
            (State::Waiting { .. }, _) => {
                self.refuse(key, &Answer::refusal(Status::BadRequest, VERSION));
            }
        }
    }

    /// Grants a request, refuses it, or lets it wait.
    fn attach(&mut self, key: u32, request: AttachRequest, until: Instant, house: &mut House) {
        let free = self.free_cid(&request, house);
        let cid = match free {
            Ok(cid) => cid,
            Err(Obstacle::Passing(_)) if Instant::now() < until => {
                if let Some(client) = self.clients.get_mut(&key) {
                    client.state = State::Waiting { until, request };
                }
                return;
            }
            Err(Obstacle::Passing(status) | Obstacle::Refused(status)) => {
                return self.refuse(key, &Answer::refusal(status, VERSION));
            }
        };
        if let Err(error) = self.join(key, cid, &request, house) {
            self.warn(&format!("cannot attach a process: {error}"));
            self.refuse(key, &Answer::refusal(Status::ServerFailed, VERSION));
        }
    }

    /// The CID that the request can have, if all that it wants is free.
    fn free_cid(&mut self, request: &AttachRequest, house: &mut House) -> Result<Cid, Obstacle> {
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
    fn obstacle(&mut self, vm: usize, status: Status, house: &mut House) -> Obstacle {
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

    fn any_cid(&mut self) -> Option<Cid> {
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
    fn join(
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
        let (number, notice) = house.notice();
        let addr = self
            .roster
            .add(device, &config.groups, &request.ports, &notice)
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
    fn joined(&mut self, vm: usize, house: &mut House) {
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

    /// Tells a client that has no place why not, and is done with it.
    fn refuse(&mut self, key: u32, answer: &Answer) {
        let Some(client) = self.clients.remove(&key) else {
            return;
        };
        self.directory.refuse();
        let (pid, uid, status) = (client.pid, client.uid, answer.status);
        self.warn(&format!(
            "process {pid} of user {uid} is refused: {status:?}"
        ));
        dismiss(&client.socket, answer);
    }

    /// A client is gone, or given up.
    fn lose(&mut self, key: u32, reason: &str, house: &mut House) {
        let Some(client) = self.clients.remove(&key) else {
            return;
        };
        if let State::Joining { vm, .. } | State::Attached { vm } = client.state {
            self.send_off(vm, reason, house);
        }
    }

    /// A member is to leave.
    fn send_off(&mut self, vm: usize, reason: &str, house: &mut House) {
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

    /// Something may be free now: those who wait for it try again.
    fn retry(&mut self, house: &mut House) {
        let waiting = |(&key, client): (&u32, &Client)| match client.state {
            State::Waiting { .. } => Some(key),
            _ => None,
        };
        let keys: Vec<u32> = self.clients.iter().filter_map(waiting).collect();
        for key in keys {
            let Some(client) = self.clients.get_mut(&key) else {
                continue;
            };
            let silent = State::Silent {
                until: Instant::now(),
            };
            if let State::Waiting { until, request } = std::mem::replace(&mut client.state, silent)
            {
                self.attach(key, request, until, house);
            }
        }
    }

    /// Watches a client for what it is waited for now.
    fn settle(&mut self, key: u32, house: &mut House) {
        let Some(client) = self.clients.get_mut(&key) else {
            return;
        };
        let wanted = match client.answer {
            Some(_) => EventFlags::OUT,
            None => EventFlags::IN,
        };
        if wanted == client.watched {
            return;
        }
        client.watched = wanted;
        if let Err(error) = house.watch_for(&client.socket, key, wanted) {
            self.lose(key, &format!("cannot watch it: {error}"), house);
        }
    }

    /// Logs what processes do wrong, but does not let them fill the log.
    fn warn(&self, text: &str) {
        if let Some(suppressed) = self.log.admit(Instant::now()) {
            tracing::warn!(suppressed, "{text}");
        }
    }
}

impl Lodger for Server {
    fn begin(&mut self, house: &mut House) -> io::Result<()> {
        house.watch(&self.plan.config.listener, LISTENER, EventFlags::IN)
    }

    fn ready(&mut self, key: u32, _: EventFlags, house: &mut House) {
        match key {
            LISTENER => self.accept(house),
            key => self.serve(key, house),
        }
    }

    fn vm_over(&mut self, vm: usize, house: &mut House) {
        let Some(member) = self.members.get_mut(&vm) else {
            return;
        };
        let (number, notice) = house.notice();
        member.stage = Stage::Removing(number);
        let (cid, addr) = (member.cid, member.addr);
        if let Some(key) = member.client.take()
            && let Some(client) = self.clients.remove(&key)
            && matches!(client.state, State::Joining { .. })
        {
            dismiss(
                &client.socket,
                &Answer::refusal(Status::ServerFailed, VERSION),
            );
        }
        self.directory.remove(cid);
        self.roster.remove(cid, addr, &notice);
        if let Some(suppressed) = self.log.admit(Instant::now()) {
            tracing::info!(%cid, suppressed, "process gone");
        }
    }

    fn noticed(&mut self, number: u64, house: &mut House) {
        let stages = [Stage::Joining(number), Stage::Removing(number)];
        let found = self.members.iter().find(|(_, m)| stages.contains(&m.stage));
        let Some((&vm, member)) = found else {
            return;
        };
        if member.stage == Stage::Joining(number) {
            return self.joined(vm, house);
        }
        if let Some(member) = self.members.remove(&vm) {
            self.by_cid.remove(&member.cid);
            if let Some(name) = &member.name {
                self.by_name.remove(name);
            }
            self.roster.release(member.addr);
        }
        self.retry(house);
    }

    fn deadline(&self) -> Option<Instant> {
        let clients = self.clients.values().filter_map(|c| c.state.until());
        clients.chain(self.rest).min()
    }

    fn time_passed(&mut self, now: Instant, house: &mut House) {
        if self.rest.is_some_and(|until| now >= until) {
            self.rest = None;
            self.watch_listener(house, EventFlags::IN);
        }
        let late = self.clients.iter();
        let late = late.filter(|(_, c)| c.state.until().is_some_and(|until| now >= until));
        let late: Vec<u32> = late.map(|(&key, _)| key).collect();
        for key in late {
            let Some(client) = self.clients.get_mut(&key) else {
                continue;
            };
            let silent = State::Silent { until: now };
            match std::mem::replace(&mut client.state, silent) {
                // What it waits for has not become free in time: it is told what that was.
                State::Waiting { until, request } => self.attach(key, request, until, house),
                _ => {
                    self.warn("a process said nothing for too long");
                    self.clients.remove(&key);
                }
            }
        }
    }
}

impl State {
    /// When patience is at its end.
    fn until(&self) -> Option<Instant> {
        match self {
            State::Silent { until } | State::Waiting { until, .. } => Some(*until),
            State::Joining { .. } | State::Attached { .. } => None,
        }
    }
}

impl Client {
    /// Sends the answer that is left over. False: not now.
    fn flush(&mut self) -> io::Result<bool> {
        if let Some(answer) = &self.answer {
            match fd_passing::send(&self.socket, &[IoSlice::new(answer)], &[]) {
                Ok(_) => self.answer = None,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }
}

fn granted(cid: Cid) -> Answer {
    Answer {
        version: VERSION,
        status: Status::Ok,
        cid,
        host: HOST,
        asked: VERSION,
    }
}

/// The last word to someone whose socket is about to be closed.
fn dismiss(socket: &OwnedFd, answer: &Answer) {
    let bytes = encode_answer(answer);
    // It may have gone, or may not want to hear.
    let _ = fd_passing::send(socket, &[IoSlice::new(&bytes)], &[]);
    // What it has said and nobody read would make the kernel speak of a reset before the answer.
    let mut bytes = [0; 1];
    for _ in 0..BUDGET {
        let mut fds: Vec<OwnedFd> = Vec::new();
        match fd_passing::recv(socket, &mut bytes, &mut fds) {
            Ok(received) if received.bytes > 0 => {}
            _ => return,
        }
    }
}

/// Whether nobody is at the other end any more.
fn has_hung_up(socket: &OwnedFd) -> bool {
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let mut fds = [PollFd::new(socket, PollFlags::empty())];
    poll(&mut fds, Some(&now)).is_ok() && fds[0].revents().intersects(PollFlags::HUP)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_users_named_may_attach() {
        assert!(is_allowed(&[1000, 7], 7));
        assert!(!is_allowed(&[1000, 7], 8));
        // Root is a user like any other.
        assert!(!is_allowed(&[1000], 0));
        assert!(!is_allowed(&[], 0));
    }
}
