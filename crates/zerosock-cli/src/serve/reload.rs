//! SIGHUP: reads the configuration file again and applies what can change.
//!
//! # Invariants
//! - A file with an error, or a socket that cannot be made, changes nothing; the log says why.
//! - Settings that need a restart keep their values and are named in the log.
//! - Existing connections continue.

use std::collections::BTreeMap;
use std::fmt::Write;

use rustix::fs::Mode;
use tracing::{error, info, warn};
use zerosock::Cid;
use zerosock::daemon::{Daemon, GuestEndpoints, Reload};
use zerosock::forward::ListenRule;
use zerosock_sys::reaper;

use super::activation::Inherited;
use super::announce::{announce, announce_guest_endpoints, warn_about_missing_cids};
use super::args::ServeArgs;
use super::attach::Attach;
use super::backend;
use super::claim::{Claim, ListenClaims, claim_listener, claim_vm};
use super::error::ServeError;
use super::report::{report_denied, report_rule};
use super::settings::Settings;
use super::vm::{Host, Vm};
use super::{needs, networks};
use crate::sandbox::Sandbox;
use crate::supervised::Predecessor;

/// The settings in effect, which may differ from the file, and the claims on their sockets.
pub(super) struct SettingsInEffect {
    pub(super) settings: Settings,
    /// By the VM's CID.
    pub(super) claims: BTreeMap<u32, Vec<Claim>>,
    pub(super) listen_claims: ListenClaims,
    /// What this process may still do.
    pub(super) sandbox: Sandbox,
}

/// Differences between the file and the settings in effect.
#[derive(Debug, Default, Eq, PartialEq)]
struct Changes {
    add: Vec<Vm>,
    remove: Vec<u32>,
    groups: BTreeMap<u32, Vec<String>>,
    guest_endpoints: BTreeMap<u32, Option<GuestEndpoints>>,
    /// The new settings of the attach socket.
    attach: Option<Attach>,
    /// Settings that need a restart, with the values they keep.
    fixed: Vec<String>,
}

impl SettingsInEffect {
    /// Reads the file again and applies it.
    pub(super) fn reload(
        &mut self,
        args: &ServeArgs,
        daemon: &Daemon,
        networks: &mut networks::RunningNetworks,
    ) {
        match self.try_reload(args, daemon, networks) {
            Ok(()) => {}
            Err(reason) => error!("configuration not reloaded, nothing was changed: {reason}"),
        }
    }

    fn try_reload(
        &mut self,
        args: &ServeArgs,
        daemon: &Daemon,
        networks: &mut networks::RunningNetworks,
    ) -> Result<(), String> {
        let mut wanted = Settings::new(args.clone()).map_err(|error| error.to_string())?;
        self.sandbox.permits(&needs::of(&wanted, args))?;
        let changes = Changes::between(&self.settings, &wanted);
        let mut claims = BTreeMap::new();
        let mut add = Vec::new();
        for vm in &changes.add {
            let mut none = Inherited::default();
            let claimed = claim_vm(vm, &mut none, self.settings.access, false);
            let (listeners, made) = match claimed {
                Ok(claimed) => claimed,
                Err(error) => {
                    // Closing a listener also closes the connections in its backlog, which may
                    // block.
                    reaper::run(move || drop(add), None);
                    return Err(ServeError::to_string(&error));
                }
            };
            add.push(backend::convert(vm, listeners, &mut Predecessor::default()));
            claims.insert(vm.cid, made);
        }
        let (listen, mut listen_claims) = match self.claim_listeners(&wanted) {
            Ok(claimed) => claimed,
            Err(error) => {
                reaper::run(move || drop(add), None);
                return Err(error.to_string());
            }
        };
        let opened = match networks.open_new(&wanted.net) {
            Ok(opened) => opened,
            Err(error) => {
                reaper::run(move || drop((add, listen)), None);
                return Err(error.to_string());
            }
        };
        // A list in which only names have changed keeps its counters.
        let is_same_list = wanted.rules.continue_counters(&self.settings.rules);
        let order = Reload {
            add,
            remove: changes.remove.iter().copied().map(Cid::new).collect(),
            groups: changes
                .groups
                .iter()
                .map(|(&cid, groups)| (Cid::new(cid), groups.clone()))
                .collect(),
            guest_endpoints: changes
                .guest_endpoints
                .iter()
                .map(|(&cid, options)| (Cid::new(cid), options.clone()))
                .collect(),
            access: wanted.rules.clone(),
            attach: changes.attach.as_ref().map(backend::terms),
            forward: wanted.forward.clone(),
            listen,
        };
        if let Err(error) = daemon.reload(order) {
            reaper::run(move || drop(opened), None);
            return Err(error.to_string());
        }
        networks.change(&wanted.net, opened);
        for fixed in &changes.fixed {
            warn!("{fixed}");
        }
        changes.add.iter().for_each(announce);
        for (&cid, options) in &changes.guest_endpoints {
            announce_guest_endpoints(cid, options.as_ref());
        }
        // An attach socket stays.
        let can_attach = self.settings.attach.is_some();
        warn_about_missing_cids(&wanted.listen, &wanted.vms, can_attach);
        self.listen_claims.extend(listen_claims.drain());
        let listens = |on: &_| wanted.listen.iter().any(|rule| rule.on == *on);
        self.listen_claims.retain(|on, _| listens(on));
        // Connections of removed rules continue.
        let stats = daemon.forward_stats();
        stats.iter().filter(|it| it.removed).for_each(report_rule);
        info!(
            added = ?changes.add.iter().map(|vm| vm.cid).collect::<Vec<_>>(),
            removed = ?changes.remove,
            regrouped = ?changes.groups.keys().collect::<Vec<_>>(),
            guest_endpoints = ?changes.guest_endpoints.keys().collect::<Vec<_>>(),
            attach = changes.attach.is_some(),
            rules = wanted.rules.rules().len(),
            forward = wanted.forward.len(),
            listen = wanted.listen.len(),
            net = wanted.net.len(),
            "reloaded"
        );
        self.claims.append(&mut claims);
        for cid in &changes.remove {
            self.claims.remove(cid);
        }
        if !is_same_list {
            report_denied(&self.settings.rules);
        }
        self.settings.rules = wanted.rules;
        self.settings.forward = wanted.forward;
        self.settings.listen = wanted.listen;
        self.settings.net = wanted.net;
        changes.note_in(&mut self.settings);
        Ok(())
    }

    /// The listening rules, with sockets for new addresses, and the claims on these.
    fn claim_listeners(
        &self,
        wanted: &Settings,
    ) -> Result<(Vec<ListenRule>, ListenClaims), ServeError> {
        let (mut none, mut rules) = (Inherited::default(), Vec::new());
        let mut claims = ListenClaims::new();
        for rule in &wanted.listen {
            let known = self.settings.listen.iter().any(|it| it.on == rule.on);
            let socket = match known {
                true => None,
                false => match claim_listener(rule, &mut none, self.settings.access) {
                    Ok((socket, made)) => {
                        claims.insert(rule.on.clone(), made);
                        Some(socket)
                    }
                    Err(error) => {
                        // As above.
                        reaper::run(move || drop(rules), None);
                        return Err(error);
                    }
                },
            };
            rules.push(rule.rule(socket));
        }
        Ok((rules, claims))
    }
}

impl Changes {
    fn between(now: &Settings, wanted: &Settings) -> Changes {
        let mut changes = Changes::default();
        for vm in &now.vms {
            match wanted.vms.iter().find(|other| other.cid == vm.cid) {
                None => changes.remove.push(vm.cid),
                Some(other) => changes.compare(vm, other),
            }
        }
        let is_new = |vm: &&Vm| !now.vms.iter().any(|other| other.cid == vm.cid);
        changes
            .add
            .extend(wanted.vms.iter().filter(is_new).cloned());
        let micros = |settings: &Settings| settings.spin.as_micros();
        changes.keep("spin_us", &micros(now), &micros(wanted));
        changes.keep("max_memory", &now.max_memory, &wanted.max_memory);
        let (a, b) = (now.max_memory_total, wanted.max_memory_total);
        changes.keep("max_memory_total", &a, &b);
        for rule in &now.listen {
            let other = wanted.listen.iter().find(|other| other.on == rule.on);
            let shown = |mode: Option<Mode>| match mode {
                Some(mode) => format!("{:04o}", mode.as_raw_mode()),
                None => "that of the other sockets".into(),
            };
            if let Some(other) = other {
                let what = format!("listen {}: mode", other.shown());
                changes.keep(&what, &shown(rule.mode), &shown(other.mode));
            }
        }
        match (&now.attach, &wanted.attach) {
            (None, None) => {}
            (Some(attach), Some(other)) => changes.compare_attach(attach, other),
            (None, Some(_)) => changes.fix("attach", "there is none", "an attach socket"),
            (Some(attach), None) => {
                let path = attach.socket.display();
                changes.fix("attach", &format!("socket {path}"), "none");
            }
        }
        changes
    }

    fn compare(&mut self, vm: &Vm, other: &Vm) {
        let name = |key: &str| format!("VM {}: {key}", vm.cid);
        let (a, b) = (vm.socket.display(), other.socket.display());
        self.keep(&name("socket"), &a, &b);
        self.keep(
            &name("its way to the host"),
            &shown(&vm.host),
            &shown(&other.host),
        );
        let (a, b) = (vm.tx_buffer_size, other.tx_buffer_size);
        self.keep(&name("tx_buffer_size"), &a, &b);
        self.keep(&name("queue_size"), &vm.queue_size, &other.queue_size);
        let (a, b) = (vm.require_sealed_memory, other.require_sealed_memory);
        self.keep(&name("require_sealed_memory"), &a, &b);
        let seconds = |vm: &Vm| vm.stopped_timeout.unwrap_or_default().as_secs_f64();
        self.keep(&name("stopped_timeout"), &seconds(vm), &seconds(other));
        if vm.groups != other.groups {
            self.groups.insert(vm.cid, other.groups.clone());
        }
        if vm.guest_endpoints != other.guest_endpoints {
            let wanted = other.guest_endpoints.clone();
            self.guest_endpoints.insert(vm.cid, wanted);
        }
    }

    fn compare_attach(&mut self, attach: &Attach, other: &Attach) {
        let (a, b) = (attach.socket.display(), other.socket.display());
        self.keep("attach: socket", &a, &b);
        let mode = |attach: &Attach| match attach.mode {
            Some(mode) => format!("{:04o}", mode.as_raw_mode()),
            None => "that of the other sockets".into(),
        };
        self.keep("attach: mode", &mode(attach), &mode(other));
        let path = |attach: &Attach| match &attach.hybrid {
            Some(hybrid) => hybrid.path().display().to_string(),
            None => "none".into(),
        };
        self.keep("attach: uds_path", &path(attach), &path(other));
        let changed = Attach {
            socket: attach.socket.clone(),
            mode: attach.mode,
            hybrid: attach.hybrid.clone(),
            ..other.clone()
        };
        self.attach = (changed != *attach).then_some(changed);
    }

    /// Finds changes that need a restart.
    fn keep(&mut self, what: &str, now: &dyn std::fmt::Display, wanted: &dyn std::fmt::Display) {
        let (now, wanted) = (now.to_string(), wanted.to_string());
        if now != wanted {
            self.fix(what, &now, &wanted);
        }
    }

    fn fix(&mut self, what: &str, now: &str, wanted: &str) {
        self.fixed.push(format!(
            "{what} cannot change while it runs: it stays {now}, not {wanted}; for that, start anew"
        ));
    }

    /// The settings after the changes.
    fn note_in(self, settings: &mut Settings) {
        settings.vms.retain(|vm| !self.remove.contains(&vm.cid));
        for vm in &mut settings.vms {
            if let Some(groups) = self.groups.get(&vm.cid) {
                vm.groups = groups.clone();
            }
            if let Some(options) = self.guest_endpoints.get(&vm.cid) {
                vm.guest_endpoints = options.clone();
            }
        }
        settings.vms.extend(self.add);
        if self.attach.is_some() {
            settings.attach = self.attach;
        }
    }
}

fn shown(host: &Host) -> String {
    match host {
        Host::Hybrid { path, messages } => {
            let messages = messages.as_deref();
            let messages = messages.map(|path| format!(", uds_path_seqpacket {}", path.display()));
            format!(
                "uds_path {}{}",
                path.display(),
                messages.unwrap_or_default()
            )
        }
        Host::Forward { cid, listen } => {
            let mut text = format!("forward_cid {cid}");
            for port in listen {
                // Writing to a string does not fail.
                let _ = write!(text, " and port {port}");
            }
            text
        }
    }
}

#[cfg(test)]
#[path = "reload_tests.rs"]
mod tests;
