//! Claims: which service has which ports of the host, and requests to claim and release ports.
//!
//! # Invariants
//!
//! - A port belongs to one service at a time. It becomes free only when every worker has removed
//!   its route.
//! - When a claim is answered, connections to its ports reach the service.
//! - A request gets all of its ports or none.
//! - A service has CID 2, as host programs have. The routes find it by the port that it has claimed,
//!   and its device refuses connections from other ports, so that a reply has one place to go.

use std::collections::BTreeSet;
use std::time::Instant;

use zerosock_proto::Port;

use super::super::codec::{Answer, Status, VERSION, encode_answer};
use super::super::{HOST, LAST_CLAIMABLE, MAX_CLAIMS};
use super::clients::is_allowed;
use super::state::{
    AttachedClient, Claim, ClientState, Conflict, MemberStage, PendingClaim, REQUEST_TIMEOUT,
    Server, granted,
};
use crate::control::registry::DeviceRegistry;
use zerosock_vhost_user::FrontendRegistry;

impl Server {
    /// Whether a service with `held` ports may have these as well: all are claimable and free, and
    /// the limit is kept.
    pub(super) fn check_ports(
        &mut self,
        ports: &[Port],
        held: usize,
        frontends: &mut FrontendRegistry,
    ) -> Result<(), Conflict> {
        if let Some(&port) = ports.iter().find(|&&port| port > LAST_CLAIMABLE) {
            return Err(Conflict::Refused(Answer::about(Status::PortReserved, port)));
        }
        let wanted: BTreeSet<Port> = ports.iter().copied().collect();
        if held + wanted.len() > MAX_CLAIMS {
            return Err(Conflict::refused(Status::Full));
        }
        let mut temporary = None;
        for &port in &wanted {
            match self.check_port(port, frontends) {
                Err(Conflict::Temporary(answer)) => temporary = Some(answer),
                other => other?,
            }
        }
        temporary.map_or(Ok(()), |answer| Err(Conflict::Temporary(answer)))
    }

    fn check_port(&mut self, port: Port, frontends: &mut FrontendRegistry) -> Result<(), Conflict> {
        let Some(claim) = self.claims.get(&port) else {
            return Ok(());
        };
        let taken = Answer::about(Status::PortTaken, port);
        if claim.releasing.is_some() {
            return Err(Conflict::Temporary(taken));
        }
        let vm = claim.vm;
        let conflict = self.conflict(vm, taken, frontends);
        let owner = self.members.get(&vm).and_then(|member| member.client);
        if let (Conflict::Refused(_), Some(key)) = (conflict, owner)
            && let Some(AttachedClient { pid, uid, .. }) = self.clients.get(&key)
        {
            self.warn(&format!(
                "a claim of port {port} is refused: process {pid} of user {uid} has it"
            ));
        }
        Err(conflict)
    }

    /// Handles a request of a service to claim ports.
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
            // The user was removed from the list since: the service keeps its ports.
            Some(Conflict::refused(Status::NotPermitted))
        };
        let pending_claim = match conflict {
            Some(Conflict::Temporary(_)) if Instant::now() < until => {
                PendingClaim::Waiting { until, ports }
            }
            Some(Conflict::Temporary(answer) | Conflict::Refused(answer)) => {
                self.directory.count_refusal();
                return self.answer(key, &answer);
            }
            None => {
                let Some(addr) = self.members.get(&vm).map(|member| member.addr) else {
                    return;
                };
                let (number, notice) = frontends.notice();
                self.take_ports(vm, &ports);
                registry.claim(addr, &ports, &notice);
                self.publish_claims(key, vm);
                PendingClaim::Publishing(number)
            }
        };
        if let Some(client) = self.clients.get_mut(&key) {
            client.pending_claim = Some(pending_claim);
        }
    }

    /// Handles a request of a service to release ports.
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
            claim.is_some_and(|claim| claim.vm == vm && claim.releasing.is_none())
        };
        if let Some(&port) = ports.iter().find(|port| !has(port)) {
            return self.answer(key, &Answer::about(Status::NotClaimed, port));
        }
        let (number, notice) = frontends.notice();
        self.mark_releasing(ports.iter().copied(), number);
        registry.unclaim(ports, &notice);
        self.publish_claims(key, vm);
        if let Some(client) = self.clients.get_mut(&key) {
            client.pending_claim = Some(PendingClaim::Publishing(number));
        }
    }

    /// Ports of a service, without those being released.
    pub(super) fn claims_of(&self, vm: usize) -> impl Iterator<Item = Port> + '_ {
        let own = move |(_, claim): &(&Port, &Claim)| claim.vm == vm && claim.releasing.is_none();
        self.claims.iter().filter(own).map(|(&port, _)| port)
    }

    /// Assigns the ports to a service.
    pub(super) fn take_ports(&mut self, vm: usize, ports: &[Port]) {
        for &port in ports {
            self.claims.insert(
                port,
                Claim {
                    vm,
                    releasing: None,
                },
            );
        }
    }

    /// Marks the ports as being released; they are free when the notice with this number is
    /// dropped.
    pub(super) fn mark_releasing(&mut self, ports: impl IntoIterator<Item = Port>, number: u64) {
        for port in ports {
            if let Some(claim) = self.claims.get_mut(&port) {
                claim.releasing = Some(number);
            }
        }
    }

    /// Handles the end of the notice with this number: frees the ports that were being released,
    /// and answers the client that claimed or released ports.
    pub(super) fn claims_notice_dropped(&mut self, number: u64, frontends: &mut FrontendRegistry) {
        self.claims
            .retain(|_, claim| claim.releasing != Some(number));
        let asked = |(&key, client): (&u32, &AttachedClient)| match client.pending_claim {
            Some(PendingClaim::Publishing(notice)) if notice == number => Some(key),
            _ => None,
        };
        if let Some(key) = self.clients.iter().find_map(asked) {
            if let Some(client) = self.clients.get_mut(&key) {
                client.pending_claim = None;
            }
            self.answer(key, &granted(HOST));
            self.update_interest(key, frontends);
        }
    }

    /// Retries pending claims if `which` returns true for their deadline.
    pub(super) fn retry_claims(
        &mut self,
        registry: &mut DeviceRegistry,
        frontends: &mut FrontendRegistry,
        which: impl Fn(Instant) -> bool,
    ) {
        let waiting = |(&key, client): (&u32, &AttachedClient)| match client.pending_claim {
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
                self.update_interest(key, frontends);
            }
        }
    }

    /// The deadline of a claim that is made now.
    pub(super) fn claim_deadline() -> Instant {
        Instant::now() + REQUEST_TIMEOUT
    }

    /// The number of a client's service, if it is attached. Otherwise answers that the request is
    /// bad.
    fn service_of(&mut self, key: u32) -> Option<usize> {
        let client = self.clients.get(&key)?;
        let member = match client.state {
            ClientState::Attached { vm } => self.members.get(&vm).map(|member| (vm, member)),
            _ => None,
        };
        match member {
            Some((vm, member))
                if member.service.is_some() && member.stage == MemberStage::Active =>
            {
                Some(vm)
            }
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

    /// Updates the directory with the ports of a service, and logs them.
    fn publish_claims(&mut self, key: u32, vm: usize) {
        let ports: Vec<Port> = self.claims_of(vm).collect();
        if let Some(client) = self.clients.get(&key)
            && let Some(suppressed) = self.log.admit(Instant::now())
        {
            let (pid, uid) = (client.pid, client.uid);
            let ports = PortList(&ports);
            tracing::info!(pid, uid, %ports, suppressed, "service changes its claims");
        }
        self.directory.set_claims(vm, ports);
    }
}

/// Ports, separated by commas, for the log.
pub(super) struct PortList<'a>(pub(super) &'a [Port]);

impl std::fmt::Display for PortList<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (index, port) in self.0.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            write!(f, "{comma}{port}")?;
        }
        Ok(())
    }
}
