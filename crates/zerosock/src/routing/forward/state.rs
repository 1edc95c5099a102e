//! What is counted for a rule while it is in effect, and after that while its connections last.
//!
//! # Invariants
//! - A rule never has more connections than its limit: [`RuleState::admit`] counts a connection before
//!   it is made, and dropping [`Admitted`] ends the count. Connections of the rules that it has
//!   [replaced](RuleState::new) count, too.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// The counters of one forwarding rule since it took effect.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct RuleStats {
    /// The rule in one line, as in the access log.
    pub rule: String,
    /// The rule was removed or changed; its connections continue.
    pub removed: bool,
    /// Connections that exist now, including those being established.
    pub active: u64,
    /// Connections established.
    pub opened: u64,
    /// Connections refused: by a limit, the address policy, the target, or the guest.
    pub refused: u64,
    /// Payload bytes passed on to the side that was connected to. Up to 1 MiB of each open connection
    /// is counted later.
    pub bytes_sent: u64,
    /// The same for bytes to the side that connected.
    pub bytes_received: u64,
    /// Datagrams that did not fit or could not be sent.
    pub datagrams_dropped: u64,
}

/// The rule, and its counters as `name=value`, on one line.
impl fmt::Display for RuleStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: removed={} active={} opened={} refused={} bytes_sent={} bytes_received={} datagrams_dropped={}",
            self.rule,
            self.removed,
            self.active,
            self.opened,
            self.refused,
            self.bytes_sent,
            self.bytes_received,
            self.datagrams_dropped,
        )
    }
}

/// Connections, counters and the limit of one rule.
#[derive(Debug)]
pub(crate) struct RuleState {
    /// The rule in one line.
    text: String,
    limit: u64,
    removed: AtomicBool,
    /// Connections that count against the limit: those of this rule and of the ones that it has replaced.
    admitted: Arc<AtomicU64>,
    active: AtomicU64,
    opened: AtomicU64,
    refused: AtomicU64,
    bytes_sent: AtomicU64,
    bytes_received: AtomicU64,
    datagrams_dropped: AtomicU64,
}

/// One connection that counts against the limit of its rule.
#[derive(Debug)]
pub(crate) struct Admitted(Arc<RuleState>);

impl RuleState {
    /// The state of a rule that may take the place of an old one, whose connections continue.
    pub(crate) fn new(text: String, limit: Option<u32>, old: Option<&RuleState>) -> Arc<RuleState> {
        let admitted = old.map_or_else(Arc::default, |old| Arc::clone(&old.admitted));
        Arc::new(RuleState {
            text,
            limit: limit.map_or(u64::MAX, u64::from),
            removed: AtomicBool::new(false),
            admitted,
            active: AtomicU64::new(0),
            opened: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            bytes_sent: AtomicU64::new(0),
            bytes_received: AtomicU64::new(0),
            datagrams_dropped: AtomicU64::new(0),
        })
    }

    /// The rule in one line.
    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// Counts a connection. `None`: the rule has as many as it may have.
    pub(crate) fn admit(self: &Arc<RuleState>) -> Option<Admitted> {
        // Relaxed, here and below: the counters guard no other data.
        let step = |admitted: u64| (admitted < self.limit).then_some(admitted + 1);
        let counted = self
            .admitted
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, step);
        counted.ok()?;
        self.active.fetch_add(1, Ordering::Relaxed);
        Some(Admitted(Arc::clone(self)))
    }

    /// Counts a connection as refused.
    pub(crate) fn count_refused(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a connection as established.
    pub(crate) fn count_opened(&self) {
        self.opened.fetch_add(1, Ordering::Relaxed);
    }

    /// Adds payload bytes.
    pub(crate) fn add_bytes(&self, sent: u64, received: u64) {
        self.bytes_sent.fetch_add(sent, Ordering::Relaxed);
        self.bytes_received.fetch_add(received, Ordering::Relaxed);
    }

    /// Counts a datagram as dropped.
    pub(crate) fn count_dropped(&self) {
        self.datagrams_dropped.fetch_add(1, Ordering::Relaxed);
    }

    /// Connections that exist now.
    pub(crate) fn active(&self) -> u64 {
        self.active.load(Ordering::Relaxed)
    }

    #[cfg(test)]
    pub(crate) fn bytes(&self) -> (u64, u64) {
        let stats = self.stats();
        (stats.bytes_sent, stats.bytes_received)
    }

    fn stats(&self) -> RuleStats {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        RuleStats {
            rule: self.text.clone(),
            removed: self.removed.load(Ordering::Relaxed),
            active: self.active(),
            opened: get(&self.opened),
            refused: get(&self.refused),
            bytes_sent: get(&self.bytes_sent),
            bytes_received: get(&self.bytes_received),
            datagrams_dropped: get(&self.datagrams_dropped),
        }
    }
}

impl Admitted {
    /// The rule of the connection.
    pub(crate) fn rule(&self) -> &RuleState {
        &self.0
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        self.0.active.fetch_sub(1, Ordering::Relaxed);
        self.0.admitted.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The states of all rules in effect, and of removed ones that still have connections.
#[derive(Debug, Default)]
pub(crate) struct RuleBoard(Mutex<Vec<Arc<RuleState>>>);

impl RuleBoard {
    /// Replaces the rules in effect. Removed rules without connections are forgotten.
    pub(crate) fn set(&self, now: impl IntoIterator<Item = Arc<RuleState>>) {
        let mut states: Vec<_> = now.into_iter().collect();
        let is_in_effect = |state: &Arc<RuleState>| states.iter().any(|it| Arc::ptr_eq(it, state));
        // Every update is a single assignment, so a poisoned lock guards a consistent value.
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut removed: Vec<_> = std::mem::take(&mut *all);
        removed.retain(|state| !is_in_effect(state) && state.active() > 0);
        for state in &removed {
            state.removed.store(true, Ordering::Relaxed);
        }
        states.append(&mut removed);
        *all = states;
    }

    /// The counters of all rules.
    pub(crate) fn stats(&self) -> Vec<RuleStats> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let shown = all
            .iter()
            .map(|state| state.stats())
            .filter(|stats| !stats.removed || stats.active > 0);
        shown.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_connections_than_the_limit_exist_at_once() {
        let state = RuleState::new("rule".into(), Some(2), None);
        let (one, two) = (state.admit().unwrap(), state.admit().unwrap());
        assert!(state.admit().is_none());
        drop(one);
        let three = state.admit().unwrap();
        assert!(state.admit().is_none());
        drop((two, three));
        assert_eq!(state.active(), 0);
    }

    #[test]
    fn connections_of_a_replaced_rule_count_against_its_successor() {
        let old = RuleState::new("old".into(), None, None);
        let (one, two) = (old.admit().unwrap(), old.admit().unwrap());
        let new = RuleState::new("new".into(), Some(2), Some(&old));
        assert!(new.admit().is_none());
        drop(one);
        let three = new.admit().unwrap();
        assert!(new.admit().is_none());
        // Each shows its own.
        assert_eq!((old.active(), new.active()), (1, 1));
        drop((two, three));
        assert!(new.admit().is_some());
    }

    #[test]
    fn a_removed_rule_is_shown_while_it_has_connections() {
        let board = RuleBoard::default();
        let (old, idle) = (
            RuleState::new("old".into(), None, None),
            RuleState::new("idle".into(), None, None),
        );
        board.set([old.clone(), idle]);
        let connection = old.admit().unwrap();
        board.set([RuleState::new("new".into(), None, None)]);
        let shown = |board: &RuleBoard| {
            let stats = board.stats();
            let shown = stats.into_iter().map(|stats| (stats.rule, stats.removed));
            shown.collect::<Vec<_>>()
        };
        let (new, removed) = (("new".to_owned(), false), ("old".to_owned(), true));
        assert_eq!(shown(&board), [new.clone(), removed]);
        drop(connection);
        assert_eq!(shown(&board), [new]);
    }
}
