//! The attach server: a part of the extension on the control thread, which lends it the registry. Processes get CIDs of their own from it, and
//! services ports of the host's.
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
//! `clients` has the connections, `places` the members, `claims` the ports of services; here is
//! what is said between them.
//!
//! What must hold: nothing blocks; a client whose user is not allowed never becomes one; what has
//! not become a member in [`PATIENCE`] is dropped, and there are at most [`MAX_CLIENTS`] such.

mod claims;
mod clients;
mod places;

use std::collections::BTreeMap;
use std::io::{self};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;
use zerosock_proto::{Cid, Port};
use zerosock_sys::account::{Account, Budget, Limits};
use zerosock_sys::fd_passing;

use super::codec::{
    Answer, MAX_REQUEST, Request, Status, VERSION, Version, decode_request, encode_answer,
};
use super::directory::Directory;
use super::{AttachConfig, AttachTerms, HOST};
use crate::control::registry::DeviceRegistry;
use crate::routing::name::Name;
use claims::{Claim, PendingClaim};
use clients::{Client, State, dismiss, is_allowed};
use places::{ClaimConflict, JoinRequest, Member, Stage};
use zerosock_vhost_user::{FrontendRegistry, LogLimit};

/// How long a client may take to say what it wants, and to wait for what is about to be free.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long a client may leave an answer in its socket: it may have gone and have left its own end of
/// the connection in a message that nothing reads before the answer is taken.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// Clients that have no place yet.
const MAX_CLIENTS: usize = 64;
/// Connections of all users together that are turned away, or about to be, and not closed yet.
pub(crate) const MAX_TURNED_AWAY: u64 = 64;
/// Connections accepted, and messages of one client handled, before others get their turn.
const BUDGET: usize = 16;
/// How long the listener rests when there is no descriptor for a connection.
const ACCEPT_REST: Duration = Duration::from_millis(200);
/// The listener's key; clients have others.
const LISTENER: u32 = 0;

/// See the module.
pub(crate) struct Server {
    config: AttachConfig,
    directory: Arc<Directory>,
    clients: BTreeMap<u32, Client>,
    last_key: u32,
    members: BTreeMap<usize, Member>,
    by_cid: BTreeMap<Cid, usize>,
    by_name: BTreeMap<Name, usize>,
    /// Ports of the host that belong to services, those included that are being given up.
    claims: BTreeMap<Port, Claim>,
    /// The CID to try first for a process that wants any: the one after the last that was given,
    /// so that one that has just become free rests for long.
    next_cid: u32,
    /// As for CIDs, the block of ports to try first for a service.
    next_block: u32,
    /// The listener is not watched until then.
    rest: Option<Instant>,
    log: LogLimit,
    /// What the processes of each user may have of descriptors and memory, together.
    accounts: BTreeMap<u32, Account>,
    /// For connections until their user is known, and for those that are turned away: they cannot use
    /// up what VMs and users are guaranteed.
    turned_away: Account,
}

impl Server {
    pub(crate) fn new(config: AttachConfig, directory: Arc<Directory>) -> io::Result<Server> {
        rustix::io::ioctl_fionbio(&config.listener, true)?;
        // No request has any. Where the kernel cannot refuse them, they are received and closed.
        fd_passing::refuse_rights(&config.listener)?;
        let limits = Limits {
            descriptors: MAX_TURNED_AWAY,
            mapped: 0,
            mapped_each: 0,
        };
        let next_cid = *config.cids.start();
        Ok(Server {
            config,
            directory,
            clients: BTreeMap::new(),
            last_key: LISTENER,
            members: BTreeMap::new(),
            by_cid: BTreeMap::new(),
            by_name: BTreeMap::new(),
            claims: BTreeMap::new(),
            next_cid,
            next_block: 0,
            rest: None,
            log: LogLimit::default(),
            accounts: BTreeMap::new(),
            turned_away: Budget::new(limits, 1).account(),
        })
    }

    /// The account of a user's processes.
    fn account(&mut self, uid: u32, registry: &DeviceRegistry) -> Account {
        let budget = registry.budget();
        let account = self.accounts.entry(uid);
        account.or_insert_with(|| budget.account()).clone()
    }

    /// Goes by other terms from now on. Whoever is attached stays; the groups are those of all
    /// processes, also of those who are there. The workers are not told.
    pub(crate) fn set_terms(&mut self, terms: AttachTerms, registry: &mut DeviceRegistry) {
        for &cid in self.by_cid.keys() {
            registry.set_groups(cid, &terms.groups);
        }
        self.config.set_terms(terms);
    }

    /// Handles what a client has said.
    fn serve(&mut self, key: u32, registry: &mut DeviceRegistry, frontends: &mut FrontendRegistry) {
        for _ in 0..BUDGET {
            let Some(client) = self.clients.get_mut(&key) else {
                return;
            };
            match client.flush() {
                Ok(true) => {}
                Ok(false) => break,
                Err(_) => return self.lose(key, "it does not take answers", frontends),
            }
            if client.pending_claim.is_some() {
                break;
            }
            let mut bytes = [0; MAX_REQUEST + 1];
            let mut fds = Vec::new();
            let len = match fd_passing::recv_owned(&client.socket, &mut bytes, &mut fds) {
                Ok(received) => received.bytes,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => return self.lose(key, "its socket failed", frontends),
            };
            if len == 0 {
                return self.lose(key, "it closed its lease", frontends);
            }
            // Descriptors have no place in a request.
            let request = match fds.is_empty() {
                true => decode_request(bytes.get(..len).unwrap_or_default()),
                false => Err(Answer::refusal(Status::BadRequest, Version::default())),
            };
            self.handle(key, request, registry, frontends);
        }
        self.settle(key, frontends);
    }

    fn handle(
        &mut self,
        key: u32,
        request: Result<Request, Answer>,
        registry: &mut DeviceRegistry,
        frontends: &mut FrontendRegistry,
    ) {
        let Some(client) = self.clients.get_mut(&key) else {
            return;
        };
        match (&client.state, request) {
            (&State::Silent { until }, Ok(Request::Attach(request))) => {
                self.attach(
                    key,
                    JoinRequest::Process(request),
                    until,
                    registry,
                    frontends,
                );
            }
            (&State::Silent { until }, Ok(Request::Serve(request))) => {
                self.attach(
                    key,
                    JoinRequest::Service(request),
                    until,
                    registry,
                    frontends,
                );
            }
            (State::Attached { .. }, Ok(Request::Claim(ports))) => {
                self.claim(key, ports, Self::patience(), registry, frontends);
            }
            (State::Attached { .. }, Ok(Request::Release(ports))) => {
                self.give_up(key, ports, registry, frontends);
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
            (State::Attached { .. }, Ok(Request::Attach(_) | Request::Serve(_))) => {
                let refusal = Answer::refusal(Status::BadRequest, VERSION);
                client.answer = Some(encode_answer(&refusal));
            }
            (State::Silent { .. }, Err(refusal)) => self.refuse(key, &refusal),
            // A place first; and one thing after the other.
            (State::Silent { .. }, Ok(_)) => {
                self.refuse(key, &Answer::refusal(Status::BadRequest, VERSION));
            }
            (&State::Joining { vm, .. }, _) => {
                self.refuse(key, &Answer::refusal(Status::BadRequest, VERSION));
                self.send_off(vm, "it spoke out of turn", frontends);
            }
            (State::Waiting { .. }, _) => {
                self.refuse(key, &Answer::refusal(Status::BadRequest, VERSION));
            }
        }
    }

    /// Grants a request, refuses it, or lets it wait. Who may make it is asked each time: it may have
    /// changed while the client waited.
    fn attach(
        &mut self,
        key: u32,
        request: JoinRequest,
        until: Instant,
        registry: &mut DeviceRegistry,
        frontends: &mut FrontendRegistry,
    ) {
        let uids = match request {
            JoinRequest::Process(_) => &self.config.allowed_uids,
            JoinRequest::Service(_) => &self.config.service_uids,
        };
        let client = self.clients.get(&key);
        let allowed = client.is_some_and(|client| is_allowed(uids, client.uid));
        let slot = match allowed {
            true => self.slot(&request, registry, frontends),
            false => Err(ClaimConflict::Refused(Answer::refusal(
                Status::NotPermitted,
                VERSION,
            ))),
        };
        let slot = match slot {
            Ok(slot) => slot,
            Err(ClaimConflict::Passing(_)) if Instant::now() < until => {
                if let Some(client) = self.clients.get_mut(&key) {
                    client.state = State::Waiting { until, request };
                }
                return;
            }
            Err(ClaimConflict::Passing(answer) | ClaimConflict::Refused(answer)) => {
                return self.refuse(key, &answer);
            }
        };
        if let Err(error) = self.join(key, slot, &request, registry, frontends) {
            self.warn(&format!("cannot attach a process: {error}"));
            self.refuse(key, &Answer::refusal(Status::ServerFailed, VERSION));
        }
    }

    /// Something may be free now: those who wait for it try again.
    fn retry(&mut self, registry: &mut DeviceRegistry, frontends: &mut FrontendRegistry) {
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
                self.attach(key, request, until, registry, frontends);
            }
        }
        self.retry_claims(registry, frontends, |_| true);
    }

    /// Logs what processes do wrong, but does not let them fill the log.
    fn warn(&self, text: &str) {
        if let Some(suppressed) = self.log.admit(Instant::now()) {
            tracing::warn!(suppressed, "{text}");
        }
    }

    pub(crate) fn begin(&mut self, frontends: &mut FrontendRegistry) -> io::Result<()> {
        frontends.watch(&self.config.listener, LISTENER, EventFlags::IN)
    }

    pub(crate) fn end(&mut self, frontends: &mut FrontendRegistry) {
        // The reaper closes it later, which until then would be reported again and again.
        self.watch_listener(frontends, EventFlags::empty());
    }

    pub(crate) fn ready(
        &mut self,
        key: u32,
        flags: EventFlags,
        registry: &mut DeviceRegistry,
        frontends: &mut FrontendRegistry,
    ) {
        match key {
            LISTENER => self.accept(registry, frontends),
            // It is not read while it waits, so nothing else would notice.
            key if self
                .clients
                .get(&key)
                .is_some_and(|c| c.pending_claim.is_some())
                && flags.intersects(EventFlags::HUP | EventFlags::ERR) =>
            {
                self.lose(key, "it closed its lease", frontends);
            }
            key => self.serve(key, registry, frontends),
        }
    }

    pub(crate) fn vm_over(
        &mut self,
        vm: usize,
        registry: &mut DeviceRegistry,
        frontends: &mut FrontendRegistry,
    ) {
        let Some(member) = self.members.get_mut(&vm) else {
            return;
        };
        let (number, notice) = frontends.notice();
        member.stage = Stage::Removing(number);
        let (cid, addr, service) = (member.cid, member.addr, member.service.is_some());
        let name = member.name.as_ref().map_or("", Name::as_str).to_owned();
        if let Some(key) = member.client.take()
            && let Some(client) = self.clients.remove(&key)
            && matches!(client.state, State::Joining { .. })
        {
            dismiss(
                &client.socket,
                &Answer::refusal(Status::ServerFailed, VERSION),
            );
        }
        self.directory.remove(vm);
        if service {
            let ports: Vec<Port> = self.claims_of(vm).collect();
            self.let_go(ports.iter().copied(), number);
            // Those that it had begun to give up are on their way already.
            registry.remove_service(addr, ports, &notice);
        } else {
            registry.remove(cid, addr, &notice);
        }
        if let Some(suppressed) = self.log.admit(Instant::now()) {
            match service {
                true => tracing::info!(name, suppressed, "service gone"),
                false => tracing::info!(%cid, name, suppressed, "process gone"),
            }
        }
    }

    pub(crate) fn noticed(
        &mut self,
        number: u64,
        registry: &mut DeviceRegistry,
        frontends: &mut FrontendRegistry,
    ) {
        self.claims_noticed(number, frontends);
        let stages = [Stage::Joining(number), Stage::Removing(number)];
        let found = self.members.iter().find(|(_, m)| stages.contains(&m.stage));
        let Some((&vm, member)) = found else {
            return self.retry(registry, frontends);
        };
        if member.stage == Stage::Joining(number) {
            return self.joined(vm, frontends);
        }
        if let Some(member) = self.members.remove(&vm) {
            if member.service.is_none() {
                self.by_cid.remove(&member.cid);
            }
            if let Some(name) = &member.name {
                self.by_name.remove(name);
            }
            registry.release(member.addr);
        }
        self.retry(registry, frontends);
    }

    pub(crate) fn deadline(&self) -> Option<Instant> {
        let clients = self.clients.values().filter_map(|c| c.state.until());
        let pending_claims = self.clients.values().filter_map(|c| match c.pending_claim {
            Some(PendingClaim::Waiting { until, .. }) => Some(until),
            _ => None,
        });
        let stalled = self.clients.values().filter_map(|c| c.stalled_until);
        clients
            .chain(pending_claims)
            .chain(stalled)
            .chain(self.rest)
            .min()
    }

    pub(crate) fn time_passed(
        &mut self,
        now: Instant,
        registry: &mut DeviceRegistry,
        frontends: &mut FrontendRegistry,
    ) {
        if self.rest.is_some_and(|until| now >= until) {
            self.rest = None;
            self.watch_listener(frontends, EventFlags::IN);
        }
        self.retry_claims(registry, frontends, |until| now >= until);
        let stalled = self.clients.iter();
        let stalled = stalled.filter(|(_, c)| c.stalled_until.is_some_and(|until| now >= until));
        let stalled: Vec<u32> = stalled.map(|(&key, _)| key).collect();
        for key in stalled {
            self.lose(key, "it takes no answer", frontends);
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
                State::Waiting { until, request } => {
                    self.attach(key, request, until, registry, frontends)
                }
                _ => {
                    self.warn("a process said nothing for too long");
                    self.clients.remove(&key);
                }
            }
        }
    }
}

fn granted(cid: Cid) -> Answer {
    Answer {
        version: VERSION,
        status: Status::Ok,
        cid,
        host: HOST,
        asked: VERSION,
        port: Port::new(0),
        ports: 0,
    }
}
