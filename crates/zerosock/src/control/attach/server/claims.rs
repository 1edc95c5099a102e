//! Claims: which service has which port of the host, and how one gets more of them or gives some
//! up on its lease.
//!
//! What must hold: a port belongs to one service at a time, and is free again only when every
//! worker has forgotten whose it was; who is told that it has a port can be reached there at once;
//! a request gets all of its ports or none.

use std::collections::BTreeSet;
use std::time::Instant;

use zerosock_proto::Port;

use super::super::codec::{Answer, Status, VERSION, encode_answer};
use super::super::{HOST, LAST_CLAIMABLE, MAX_CLAIMS};
use super::clients::{has_hung_up, is_allowed};
use super::places::{ClaimConflict, Stage};
use super::{PATIENCE, Server, State, granted};
use crate::control::registry::DeviceRegistry;
use zerosock_vhost_user::FrontendRegistry;

/// A port that belongs to a service.
#[derive(Debug)]
pub(super) struct Claim {
    /// The service's device.
    pub(super) vm: usize,
    /// The workers forget it; the number of the notice.
    pub(super) going: Option<u64>,
}

/// What a service has asked for on its lease, and has not been answered.
#[derive(Debug)]
pub(super) enum PendingClaim {
    /// It wants ports of which some are about to be free.
    Waiting { until: Instant, ports: Vec<Port> },
    /// The workers are told; the number of the notice.
    Telling(u64),
}

impl Server {
    /// Whether a service may have these ports beside the `held` that it has: they are claimable,
    /// not too many, and nobody's.
    pub(super) fn check_ports(
        &mut self,
        ports: &[Port],
        held: usize,
        frontends: &mut FrontendRegistry,
    ) -> Result<(), ClaimConflict> {
        if let Some(&port) = ports.iter().find(|&&port| port > LAST_CLAIMABLE) {
            return Err(ClaimConflict::Refused(Answer::about(
                Status::PortReserved,
                port,
            )));
        }
        let wanted: BTreeSet<Port> = ports.iter().copied().collect();
        if held + wanted.len() > MAX_CLAIMS {
            return Err(ClaimConflict::Refused(Answer::refusal(
                Status::Full,
                VERSION,
            )));
        }
        let mut passing = None;
        for &port in &wanted {
            match self.check_port(port, frontends) {
                Err(ClaimConflict::Passing(answer)) => passing = Some(answer),
                other => other?,
            }
        }
        passing.map_or(Ok(()), |answer| Err(ClaimConflict::Passing(answer)))
    }

    fn check_port(
        &mut self,
        port: Port,
        frontends: &mut FrontendRegistry,
    ) -> Result<(), ClaimConflict> {
        let Some(claim) = self.claims.get(&port) else {
            return Ok(());
        };
        let taken = Answer::about(Status::PortTaken, port);
        let Some(member) = self.members.get(&claim.vm) else {
            return Err(ClaimConflict::Refused(taken));
        };
        if claim.going.is_some() || self.is_leaving(claim.vm, member, frontends) {
            return Err(ClaimConflict::Passing(taken));
        }
        // Its process may be gone without anybody having noticed.
        if let Some(key) = member.client
            && let Some(client) = self.clients.get(&key)
            && has_hung_up(&client.socket)
        {
            self.lose(key, "it closed its lease, and another one came", frontends);
            return Err(ClaimConflict::Passing(taken));
        }
        let owner = member.client.and_then(|key| self.clients.get(&key));
        if let Some(owner) = owner {
            let (pid, uid) = (owner.pid, owner.uid);
            self.warn(&format!(
                "port {port} is claimed once more; it is process {pid}'s, of user {uid}"
            ));
        }
        Err(ClaimConflict::Refused(taken))
    }

    /// A service that is in wants more ports.
    pub(super) fn claim(
        &mut self,
        key: u32,
        ports: Vec<Port>,
        until: Instant,
        registry: &mut DeviceRegistry,
        frontends: &mut FrontendRegistry,
    ) {
        let Some(vm) = self.service_of(key) else {
            return;
        };
        let held = self.claims_of(vm).count();
        let client = self.clients.get(&key);
        let allowed = client.is_some_and(|c| is_allowed(&self.config.service_uids, c.uid));
        let conflict = if allowed {
            self.check_ports(&ports, held, frontends).err()
        } else {
            // Its user has been taken off the list meanwhile: it keeps what it has.
            let refusal = Answer::refusal(Status::NotPermitted, VERSION);
            Some(ClaimConflict::Refused(refusal))
        };
        let pending_claim = match conflict {
            Some(ClaimConflict::Passing(_)) if Instant::now() < until => {
                PendingClaim::Waiting { until, ports }
            }
            Some(ClaimConflict::Passing(answer) | ClaimConflict::Refused(answer)) => {
                self.directory.refuse();
                return self.answer(key, &answer);
            }
            None => {
                let Some(addr) = self.members.get(&vm).map(|member| member.addr) else {
                    return;
                };
                let (number, notice) = frontends.notice();
                self.take_ports(vm, &ports);
                registry.claim(addr, &ports, &notice);
                self.note_claims(key, vm);
                PendingClaim::Telling(number)
            }
        };
        if let Some(client) = self.clients.get_mut(&key) {
            client.pending_claim = Some(pending_claim);
        }
    }

    /// A service that is in gives ports up.
    pub(super) fn give_up(
        &mut self,
        key: u32,
        ports: Vec<Port>,
        registry: &mut DeviceRegistry,
        frontends: &mut FrontendRegistry,
    ) {
        let Some(vm) = self.service_of(key) else {
            return;
        };
        let has = |port: &Port| {
            let claim = self.claims.get(port);
            claim.is_some_and(|claim| claim.vm == vm && claim.going.is_none())
        };
        if let Some(&port) = ports.iter().find(|port| !has(port)) {
            return self.answer(key, &Answer::about(Status::NotClaimed, port));
        }
        let (number, notice) = frontends.notice();
        self.let_go(ports.iter().copied(), number);
        registry.unclaim(ports, &notice);
        self.note_claims(key, vm);
        if let Some(client) = self.clients.get_mut(&key) {
            client.pending_claim = Some(PendingClaim::Telling(number));
        }
    }

    /// Ports of a service that it has and keeps.
    pub(super) fn claims_of(&self, vm: usize) -> impl Iterator<Item = Port> + '_ {
        let own = move |(_, claim): &(&Port, &Claim)| claim.vm == vm && claim.going.is_none();
        self.claims.iter().filter(own).map(|(&port, _)| port)
    }

    /// The ports belong to this service from now on.
    pub(super) fn take_ports(&mut self, vm: usize, ports: &[Port]) {
        for &port in ports {
            self.claims.insert(port, Claim { vm, going: None });
        }
    }

    /// The ports are nobody's when the notice of this number comes back.
    pub(super) fn let_go(&mut self, ports: impl IntoIterator<Item = Port>, number: u64) {
        for port in ports {
            if let Some(claim) = self.claims.get_mut(&port) {
                claim.going = Some(number);
            }
        }
    }

    /// The workers know what the notice of this number was about, if it was about claims. Those
    /// who have asked for it are answered.
    pub(super) fn claims_noticed(&mut self, number: u64, frontends: &mut FrontendRegistry) {
        self.claims.retain(|_, claim| claim.going != Some(number));
        let asked = |(&key, client): (&u32, &super::Client)| match client.pending_claim {
            Some(PendingClaim::Telling(told)) if told == number => Some(key),
            _ => None,
        };
        if let Some(key) = self.clients.iter().find_map(asked) {
            if let Some(client) = self.clients.get_mut(&key) {
                client.pending_claim = None;
            }
            self.answer(key, &granted(HOST));
            self.settle(key, frontends);
        }
    }

    /// Something may be free now, or it is too late: those services try again whom `which` names.
    pub(super) fn retry_claims(
        &mut self,
        registry: &mut DeviceRegistry,
        frontends: &mut FrontendRegistry,
        which: impl Fn(Instant) -> bool,
    ) {
        let waiting = |(&key, client): (&u32, &super::Client)| match client.pending_claim {
            Some(PendingClaim::Waiting { until, .. }) if which(until) => Some(key),
            _ => None,
        };
        let keys: Vec<u32> = self.clients.iter().filter_map(waiting).collect();
        for key in keys {
            let client = self.clients.get_mut(&key);
            if let Some(PendingClaim::Waiting { until, ports }) =
                client.and_then(|client| client.pending_claim.take())
            {
                self.claim(key, ports, until, registry, frontends);
                self.settle(key, frontends);
            }
        }
    }

    /// Until when a claim may wait that is made now.
    pub(super) fn patience() -> Instant {
        Instant::now() + PATIENCE
    }

    /// The device of a client that is a service and is in; else the client is told that it asks
    /// for what it cannot have.
    fn service_of(&mut self, key: u32) -> Option<usize> {
        let client = self.clients.get(&key)?;
        let member = match client.state {
            State::Attached { vm } => self.members.get(&vm).map(|member| (vm, member)),
            _ => None,
        };
        match member {
            Some((vm, member)) if member.service.is_some() && member.stage == Stage::In => Some(vm),
            _ => {
                self.answer(key, &Answer::refusal(Status::BadRequest, VERSION));
                None
            }
        }
    }

    fn answer(&mut self, key: u32, answer: &Answer) {
        if let Some(client) = self.clients.get_mut(&key) {
            client.answer = Some(encode_answer(answer));
        }
    }

    /// Lists and logs what a service has now.
    fn note_claims(&mut self, key: u32, vm: usize) {
        let ports: Vec<Port> = self.claims_of(vm).collect();
        if let Some(client) = self.clients.get(&key)
            && let Some(suppressed) = self.log.admit(Instant::now())
        {
            let (pid, uid) = (client.pid, client.uid);
            let ports = Shown(&ports);
            tracing::info!(pid, uid, %ports, suppressed, "service changes its claims");
        }
        self.directory.set_claims(vm, ports);
    }
}

/// Ports for the log.
pub(super) struct Shown<'a>(pub(super) &'a [Port]);

impl std::fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (index, port) in self.0.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            write!(f, "{comma}{port}")?;
        }
        Ok(())
    }
}
