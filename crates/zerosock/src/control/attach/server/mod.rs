//! The attach server: a part of the control thread's extension. It assigns CIDs to processes and
//! ports of the host to services.
//!
//! ```text
//!  client: AwaitingRequest --attach--> Waiting? -> Joining --routes used--> Attached --resolve--> …
//!  member:                                         Joining --> Active --> Leaving --> Removing
//! ```
//!
//! A client is a connection to the attach socket; a member is a device that was made for a client.
//! The client gets its answer when every worker uses the new routes, so the process can be reached
//! at its CID from then on. A member leaves when its control connection or its vhost-user connection
//! closes. Its CID, name and address become free when its front-end is disconnected and every worker
//! has removed it. A request for something that is about to become free waits for that.
//!
//! `clients` handles the connections, `members` the members, `claims` the ports of services, all of
//! which are in `state`; this file handles requests and the events of the control thread. The owner of the [`DeviceRegistry`]
//! passes it to each call.
//!
//! # Invariants
//!
//! - No call blocks.
//! - A connection of a user that is not allowed never becomes a client.
//! - A client that does not become a member within [`REQUEST_TIMEOUT`] is dropped; each user has at
//!   most [`MAX_CLIENTS`] such clients.
//! - No user can take the places that are guaranteed to another one.

mod claims;
mod clients;
mod members;
mod state;

use std::io;
use std::time::Instant;

use rustix::event::epoll::EventFlags;
use zerosock_proto::Port;
use zerosock_sys::account::Account;
use zerosock_sys::fd_passing;

use super::AttachTerms;
use super::codec::{
    Answer, MAX_REQUEST, Request, Status, VERSION, Version, decode_request, encode_answer,
};
use crate::control::registry::DeviceRegistry;
use crate::routing::name::Name;
use clients::{is_allowed, send_last_answer};
use state::{
    AttachedClient, BUDGET, ClientState, Conflict, JoinRequest, LISTENER, MemberStage,
    PendingClaim, granted,
};
use zerosock_vhost_user::FrontendRegistry;

pub(crate) use state::{MAX_TURNED_AWAY, Server};

impl Server {
    /// Replaces the terms. Members stay; the groups apply to them too. Does not publish the routes.
    pub(crate) fn set_terms(&mut self, terms: AttachTerms, registry: &mut DeviceRegistry) {
        for &cid in self.by_cid.keys() {
            registry.set_groups(cid, &terms.groups);
        }
        self.config.set_terms(terms);
    }

    /// Reads and handles requests of a client.
    fn serve(&mut self, key: u32, registry: &mut DeviceRegistry, frontends: &mut FrontendRegistry) {
        for _ in 0..BUDGET {
            let Some(client) = self.clients.get_mut(&key) else {
                return;
            };
            match client.flush() {
                Ok(true) => {}
                Ok(false) => break,
                Err(_) => return self.drop_client(key, "it does not take answers", frontends),
            }
            if client.pending_claim.is_some() {
                break;
            }
            if client.socket.account().is_some_and(Account::is_clogged) {
                let reason = "descriptors that its user has sent cannot be closed yet";
                return self.drop_client(key, reason, frontends);
            }
            let mut bytes = [0; MAX_REQUEST + 1];
            let mut fds = Vec::new();
            let received = match fd_passing::recv_owned(&client.socket, &mut bytes, &mut fds) {
                Ok(received) => received,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => return self.drop_client(key, "its socket failed", frontends),
            };
            if received.bytes == 0 {
                return self.drop_client(key, "it closed its control connection", frontends);
            }
            // A request carries no descriptors. Each message could bring more of them, so no client
            // stays that has sent any.
            if received.truncated_fds || !fds.is_empty() {
                if let ClientState::Attached { .. } = client.state {
                    return self.drop_client(key, "it sent descriptors", frontends);
                }
                let refusal = Answer::refusal(Status::BadRequest, Version::default());
                return self.handle(key, Err(refusal), registry, frontends);
            }
            let request = decode_request(bytes.get(..received.bytes).unwrap_or_default());
            self.handle(key, request, registry, frontends);
        }
        self.update_interest(key, frontends);
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
            // Memory is for those whose server has no vhost-user connection for them.
            (
                &ClientState::AwaitingRequest { until },
                Ok(Request::Attach(request) | Request::AttachMemory(request, _)),
            ) => {
                self.attach(
                    key,
                    JoinRequest::Process(request),
                    until,
                    registry,
                    frontends,
                );
            }
            (&ClientState::AwaitingRequest { until }, Ok(Request::Serve(request))) => {
                self.attach(
                    key,
                    JoinRequest::Service(request),
                    until,
                    registry,
                    frontends,
                );
            }
            (ClientState::Attached { .. }, Ok(Request::Claim(ports))) => {
                self.claim(key, ports, Self::claim_deadline(), registry, frontends);
            }
            (ClientState::Attached { .. }, Ok(Request::Release(ports))) => {
                self.give_up(key, ports, registry, frontends);
            }
            (ClientState::Attached { .. }, Ok(Request::Resolve(name))) => {
                let answer = match self.directory.resolve(&name) {
                    Some(cid) => granted(cid),
                    None => Answer::refusal(Status::UnknownName, VERSION),
                };
                client.answer = Some(encode_answer(&answer));
            }
            // A member stays attached after a bad request.
            (ClientState::Attached { .. }, Err(refusal)) => {
                client.answer = Some(encode_answer(&refusal));
            }
            (ClientState::Attached { .. }, Ok(_)) => {
                let refusal = Answer::refusal(Status::BadRequest, VERSION);
                client.answer = Some(encode_answer(&refusal));
            }
            (ClientState::AwaitingRequest { .. }, Err(refusal)) => self.refuse(key, &refusal),
            // The first request must attach, and only one request may be under way before that.
            (ClientState::AwaitingRequest { .. }, Ok(_)) => {
                self.refuse(key, &Answer::refusal(Status::BadRequest, VERSION));
            }
            (&ClientState::Joining { vm, .. }, _) => {
                self.refuse(key, &Answer::refusal(Status::BadRequest, VERSION));
                self.disconnect_member(vm, "it sent a request before it was answered", frontends);
            }
            (ClientState::Waiting { .. }, _) => {
                self.refuse(key, &Answer::refusal(Status::BadRequest, VERSION));
            }
        }
    }

    /// Grants a request to attach, refuses it, or lets it wait. The permission is checked each time,
    /// because the terms may have changed while the client waited.
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
        let uid = client.map(|client| client.uid);
        let slot = match uid.filter(|&uid| is_allowed(uids, uid)) {
            Some(uid) => self.slot(&request, uid, registry, frontends),
            None => Err(Conflict::refused(Status::NotPermitted)),
        };
        let slot = match slot {
            Ok(slot) => slot,
            Err(Conflict::Temporary(_)) if Instant::now() < until => {
                if let Some(client) = self.clients.get_mut(&key) {
                    client.state = ClientState::Waiting { until, request };
                }
                return;
            }
            Err(Conflict::Temporary(answer) | Conflict::Refused(answer)) => {
                return self.refuse(key, &answer);
            }
        };
        if let Err(error) = self.join(key, slot, &request, registry, frontends) {
            self.warn(&format!("cannot attach a process: {error}"));
            self.refuse(key, &Answer::refusal(Status::ServerFailed, VERSION));
        }
    }

    /// Retries requests that wait for something to become free.
    fn retry(&mut self, registry: &mut DeviceRegistry, frontends: &mut FrontendRegistry) {
        let waiting = |(&key, client): (&u32, &AttachedClient)| match client.state {
            ClientState::Waiting { .. } => Some(key),
            _ => None,
        };
        let keys: Vec<u32> = self.clients.iter().filter_map(waiting).collect();
        for key in keys {
            let Some(client) = self.clients.get_mut(&key) else {
                continue;
            };
            let placeholder = ClientState::AwaitingRequest {
                until: Instant::now(),
            };
            if let ClientState::Waiting { until, request } =
                std::mem::replace(&mut client.state, placeholder)
            {
                self.attach(key, request, until, registry, frontends);
            }
        }
        self.retry_claims(registry, frontends, |_| true);
    }

    pub(crate) fn begin(&mut self, frontends: &mut FrontendRegistry) -> io::Result<()> {
        frontends.watch(&self.config.listener, LISTENER, EventFlags::IN)
    }

    pub(crate) fn end(&mut self, frontends: &mut FrontendRegistry) {
        // The reaper closes the listener later. Without this, epoll would report it until then.
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
            // The socket is not read while a claim is pending, so only epoll reports the hang-up.
            key if self
                .clients
                .get(&key)
                .is_some_and(|c| c.pending_claim.is_some())
                && flags.intersects(EventFlags::HUP | EventFlags::ERR) =>
            {
                self.drop_client(key, "it closed its control connection", frontends);
            }
            key => self.serve(key, registry, frontends),
        }
    }

    pub(crate) fn vm_removed(
        &mut self,
        vm: usize,
        registry: &mut DeviceRegistry,
        frontends: &mut FrontendRegistry,
    ) {
        let Some(member) = self.members.get_mut(&vm) else {
            return;
        };
        let (number, notice) = frontends.notice();
        member.stage = MemberStage::Removing(number);
        let (cid, addr, service) = (member.cid, member.addr, member.service.is_some());
        let name = member.name.as_ref().map_or("", Name::as_str).to_owned();
        if let Some(key) = member.client.take()
            && let Some(client) = self.clients.remove(&key)
            && matches!(client.state, ClientState::Joining { .. })
        {
            send_last_answer(
                &client.socket,
                &Answer::refusal(Status::ServerFailed, VERSION),
            );
        }
        self.directory.remove(vm);
        if service {
            let ports: Vec<Port> = self.claims_of(vm).collect();
            self.mark_releasing(ports.iter().copied(), number);
            // The routes of ports being released are removed already.
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

    pub(crate) fn notice_dropped(
        &mut self,
        number: u64,
        registry: &mut DeviceRegistry,
        frontends: &mut FrontendRegistry,
    ) {
        self.claims_notice_dropped(number, frontends);
        let stages = [MemberStage::Joining(number), MemberStage::Removing(number)];
        let found = self.members.iter().find(|(_, m)| stages.contains(&m.stage));
        let Some((&vm, member)) = found else {
            return self.retry(registry, frontends);
        };
        if member.stage == MemberStage::Joining(number) {
            return self.joined(vm, frontends);
        }
        if let Some(member) = self.members.remove(&vm) {
            if member.service.is_none() {
                self.by_cid.remove(&member.cid);
                registry.release_cid(member.cid);
            }
            if let Some(name) = &member.name {
                self.by_name.remove(name);
                registry.release_name(name);
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
            .chain(self.accept_paused_until)
            .min()
    }

    pub(crate) fn time_passed(
        &mut self,
        now: Instant,
        registry: &mut DeviceRegistry,
        frontends: &mut FrontendRegistry,
    ) {
        if self.accept_paused_until.is_some_and(|until| now >= until) {
            self.accept_paused_until = None;
            self.watch_listener(frontends, EventFlags::IN);
        }
        self.retry_claims(registry, frontends, |until| now >= until);
        let stalled = self.clients.iter();
        let stalled = stalled.filter(|(_, c)| c.stalled_until.is_some_and(|until| now >= until));
        let stalled: Vec<u32> = stalled.map(|(&key, _)| key).collect();
        for key in stalled {
            self.drop_client(key, "it does not read its answer", frontends);
        }
        let late = self.clients.iter();
        let late = late.filter(|(_, c)| c.state.until().is_some_and(|until| now >= until));
        let late: Vec<u32> = late.map(|(&key, _)| key).collect();
        for key in late {
            let Some(client) = self.clients.get_mut(&key) else {
                continue;
            };
            let placeholder = ClientState::AwaitingRequest { until: now };
            match std::mem::replace(&mut client.state, placeholder) {
                // Time is up: `attach` answers with the conflict.
                ClientState::Waiting { until, request } => {
                    self.attach(key, request, until, registry, frontends)
                }
                _ => {
                    self.warn("a process sent no request in time");
                    self.clients.remove(&key);
                }
            }
        }
    }
}
