//! The forwarding rules of a daemon, and the threads that serve them.
//!
//! # Invariants
//! - Rules change as a whole: [`RuleSet::check`] finds everything that can fail before the first change.
//! - The threads exist once there have been rules that need them, or host programs at paths: no worker starts
//!   one.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use zerosock_relay::connector::{Connector, ConnectorConfig};
use zerosock_sys::account::Budget;
use zerosock_vhost_user::Notice;
use zerosock_virtio::mailbox::Sender;

use super::listeners::{ActiveListener, Listeners, NewListeners};
use crate::device::{WorkerMessage, all_dials};
use crate::routing::Routes;
use crate::routing::forward::{
    ForwardRule, ForwardRules, ListenRule, RuleBoard, RuleError, check_listeners,
};

/// The rules that a configuration wants.
#[derive(Debug, Default)]
pub(crate) struct WantedRules {
    pub(crate) forward: Vec<ForwardRule>,
    pub(crate) listen: Vec<ListenRule>,
}

/// Why rules cannot take effect.
#[derive(Debug)]
pub(super) enum RuleSetError {
    Rules(RuleError),
    System(io::Error),
}

/// Rules that can take effect.
#[derive(Debug)]
pub(super) struct CheckedRules {
    forward: ForwardRules,
    listen: NewListeners,
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct RuleSet {
    workers: Vec<Sender<WorkerMessage>>,
    budget: Budget,
    /// Name servers to ask instead of those of the system.
    name_servers: Vec<SocketAddr>,
    listen: Vec<Arc<ActiveListener>>,
    /// Rules that the thread of the listeners does not have yet.
    unpublished: Option<NewListeners>,
    listeners: Option<Listeners>,
    connector: Option<Connector>,
    board: Arc<RuleBoard>,
}

impl RuleSet {
    pub(super) fn new(workers: Vec<Sender<WorkerMessage>>, budget: Budget) -> RuleSet {
        RuleSet {
            workers,
            budget,
            name_servers: Vec::new(),
            listen: Vec::new(),
            unpublished: None,
            listeners: None,
            connector: None,
            board: Arc::default(),
        }
    }

    /// Sets the name servers to ask instead of those of the system.
    pub(super) fn set_name_servers(&mut self, name_servers: Vec<SocketAddr>) {
        self.name_servers = name_servers;
    }

    /// The counters of all rules.
    pub(super) fn board(&self) -> &Arc<RuleBoard> {
        &self.board
    }

    /// The thread that makes connections, if it is needed.
    pub(super) fn connector(&self) -> Option<&Connector> {
        self.connector.as_ref()
    }

    /// Checks rules, starts the threads that they need, and prepares their sockets. Those in effect are
    /// unchanged. `has_paths`: a VM or a process connects to host programs by path, for which it may need the
    /// connector.
    pub(super) fn check(
        &mut self,
        now: &ForwardRules,
        wanted: WantedRules,
        has_paths: bool,
    ) -> Result<CheckedRules, RuleSetError> {
        let forward = now.replaced(wanted.forward).map_err(RuleSetError::Rules)?;
        check_listeners(&wanted.listen).map_err(RuleSetError::Rules)?;
        for (rule, wanted) in wanted.listen.iter().enumerate() {
            let known = self.listen.iter().any(|it| it.rule.on == wanted.on);
            if wanted.socket.is_none() && !known {
                let on = wanted.on.clone();
                return Err(RuleSetError::Rules(RuleError::NoSocket { rule, on }));
            }
        }
        if (has_paths || !forward.is_empty()) && self.connector.is_none() {
            let config = ConnectorConfig {
                name_servers: self.name_servers.clone(),
                max_requests: all_dials(self.budget.accounts()),
                ..ConnectorConfig::default()
            };
            let connector = Connector::start(config).map_err(RuleSetError::System)?;
            self.connector = Some(connector);
        }
        if !wanted.listen.is_empty() && self.listeners.is_none() {
            let account = self.budget.account();
            let listeners = Listeners::start(self.workers.clone(), account);
            self.listeners = Some(listeners.map_err(RuleSetError::System)?);
        }
        let mut listen = Vec::new();
        for mut rule in wanted.listen {
            let prepared = match &self.listeners {
                Some(listeners) => listeners.prepare(&mut rule),
                None => Ok(None),
            };
            let prepared = prepared.map_err(RuleSetError::System)?;
            let old = self.listen.iter().find(|it| it.rule.on == rule.on);
            let active = match old {
                Some(old) if old.rule.is_same(&rule) && old.rule.name == rule.name => {
                    Arc::clone(old)
                }
                old => Arc::new(ActiveListener::new(rule, old.map(|old| &**old))),
            };
            listen.push((active, prepared));
        }
        Ok(CheckedRules { forward, listen })
    }

    /// Lets rules take effect. Returns the forwarding rules, for the routes.
    pub(super) fn set(&mut self, checked: CheckedRules) -> ForwardRules {
        let CheckedRules { forward, listen } = checked;
        self.listen = listen.iter().map(|(rule, _)| Arc::clone(rule)).collect();
        let listening = self.listen.iter().map(|rule| Arc::clone(&rule.state));
        self.board.set(forward.states().chain(listening));
        self.unpublished = Some(listen);
        forward
    }

    /// Sends the routes, and rules that have changed, to the thread of the listeners.
    pub(super) fn publish(&mut self, routes: &Arc<Routes>, taken: Option<&Arc<Notice>>) {
        let Some(listeners) = &self.listeners else {
            return;
        };
        listeners.publish(routes, self.unpublished.take(), taken);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_connector_is_there_before_a_worker_can_need_it() {
        for has_paths in [false, true] {
            let mut rules = RuleSet::new(Vec::new(), Budget::unlimited());
            let none = ForwardRules::default();
            let checked = rules.check(&none, WantedRules::default(), has_paths);
            checked.unwrap();
            assert_eq!(rules.connector().is_some(), has_paths);
        }
    }
}
