//! What is counted for a rule while it is in effect, and after that while its connections last.
//!
//! # Invariants
//! - A rule never has more connections than its limit: [`RuleState::admit`] counts a connection before
//!   it is made, and dropping [`Admitted`] ends the count. Connections of the rules that it has
//!   [replaced](RuleState::new) count, too.
//! - Once three quarters of the limit are used, a guest gets no connection beyond an equal share, one share
//!   being left for a guest that has none. The last eighth is for the first connections of guests:
//!   [`RuleState::admit_guest`].

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use zerosock_proto::Cid;

/// The counters of one forwarding rule since it took effect.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct RuleStats {
    /// The rule in one line, as in the access log: its kind and its name, or its text.
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

/// A rule, with its counters.
#[derive(Debug)]
pub(crate) struct RuleState {
    /// The rule in one line.
    text: String,
    counts: Arc<Counts>,
}

/// Connections, counters and the limit of one rule, by all the names that it has had.
#[derive(Debug)]
struct Counts {
    limit: u64,
    removed: AtomicBool,
    /// Connections that count against the limit: those of this rule and of the ones that it has replaced.
    admitted: Arc<Mutex<Taken>>,
    active: AtomicU64,
    opened: AtomicU64,
    refused: AtomicU64,
    bytes_sent: AtomicU64,
    bytes_received: AtomicU64,
    datagrams_dropped: AtomicU64,
}

/// The places of a rule that are taken.
#[derive(Debug, Default)]
struct Taken {
    all: u64,
    /// Those of guests that share the rule; a guest without one has no entry.
    by_guest: BTreeMap<Cid, u64>,
}

impl Taken {
    /// Whether `guest` has an equal share of `limit`, and little is left for others.
    fn exceeds_share(&self, guest: Cid, limit: u64) -> bool {
        let own = self.by_guest.get(&guest).copied().unwrap_or(0);
        let others = self.by_guest.len() - usize::from(own > 0);
        // The guest, the others, and one that may come.
        let share = limit / (others as u64 + 2);
        self.all >= limit - limit / 4 && own >= share.max(1)
            || self.all >= limit - limit / 8 && own > 0
    }
}

/// One connection that counts against the limit of its rule.
#[derive(Debug)]
pub(crate) struct Admitted {
    state: Arc<RuleState>,
    /// The guest among those that share the rule.
    guest: Option<Cid>,
}

impl RuleState {
    /// The state of a rule that may take the place of an old one, whose connections continue.
    pub(crate) fn new(text: String, limit: Option<u32>, old: Option<&RuleState>) -> Arc<RuleState> {
        let admitted = old.map_or_else(Arc::default, |old| Arc::clone(&old.counts.admitted));
        let counts = Counts {
            limit: limit.map_or(u64::MAX, u64::from),
            removed: AtomicBool::new(false),
            admitted,
            active: AtomicU64::new(0),
            opened: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            bytes_sent: AtomicU64::new(0),
            bytes_received: AtomicU64::new(0),
            datagrams_dropped: AtomicU64::new(0),
        };
        let counts = Arc::new(counts);
        Arc::new(RuleState { text, counts })
    }

    /// The state of the same rule with another name.
    pub(crate) fn renamed(&self, text: String) -> Arc<RuleState> {
        let counts = Arc::clone(&self.counts);
        Arc::new(RuleState { text, counts })
    }

    /// Whether both are of one rule, which may have changed its name.
    pub(crate) fn is_same_rule(&self, other: &RuleState) -> bool {
        Arc::ptr_eq(&self.counts, &other.counts)
    }

    /// The rule in one line.
    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// Counts a connection.
    ///
    /// # Errors
    /// The reason for a refusal: the rule has as many as it may have.
    pub(crate) fn admit(self: &Arc<RuleState>) -> Result<Admitted, &'static str> {
        self.admit_one(None)
    }

    /// As [`admit`](Self::admit), of one of the guests that share the rule.
    ///
    /// # Errors
    /// The reason for a refusal: the rule has as many as it may have, or the guest its share.
    pub(crate) fn admit_guest(self: &Arc<RuleState>, guest: Cid) -> Result<Admitted, &'static str> {
        self.admit_one(Some(guest))
    }

    fn admit_one(self: &Arc<RuleState>, guest: Option<Cid>) -> Result<Admitted, &'static str> {
        let taken = self.taken();
        if taken.all >= self.counts.limit {
            return Err("the rule has as many connections as it may have");
        }
        if guest.is_some_and(|guest| taken.exceeds_share(guest, self.counts.limit)) {
            return Err("the guest has its share of the connections that the rule may have");
        }
        Ok(self.count(taken, guest))
    }

    fn count(
        self: &Arc<RuleState>,
        mut taken: MutexGuard<'_, Taken>,
        guest: Option<Cid>,
    ) -> Admitted {
        if let Some(guest) = guest {
            *taken.by_guest.entry(guest).or_default() += 1;
        }
        taken.all += 1;
        // Relaxed, here and below: the counters guard no other data.
        self.counts.active.fetch_add(1, Ordering::Relaxed);
        let state = Arc::clone(self);
        Admitted { state, guest }
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        // No update panics half-way, so a poisoned lock guards consistent values.
        self.counts
            .admitted
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a connection as refused.
    pub(crate) fn count_refused(&self) {
        self.counts.refused.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a connection as established.
    pub(crate) fn count_opened(&self) {
        self.counts.opened.fetch_add(1, Ordering::Relaxed);
    }

    /// Adds payload bytes.
    pub(crate) fn add_bytes(&self, sent: u64, received: u64) {
        self.counts.bytes_sent.fetch_add(sent, Ordering::Relaxed);
        self.counts
            .bytes_received
            .fetch_add(received, Ordering::Relaxed);
    }

    /// Counts a datagram as dropped.
    pub(crate) fn count_dropped(&self) {
        self.counts
            .datagrams_dropped
            .fetch_add(1, Ordering::Relaxed);
    }

    /// Connections that exist now.
    pub(crate) fn active(&self) -> u64 {
        self.counts.active.load(Ordering::Relaxed)
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
            removed: self.counts.removed.load(Ordering::Relaxed),
            active: self.active(),
            opened: get(&self.counts.opened),
            refused: get(&self.counts.refused),
            bytes_sent: get(&self.counts.bytes_sent),
            bytes_received: get(&self.counts.bytes_received),
            datagrams_dropped: get(&self.counts.datagrams_dropped),
        }
    }
}

impl Admitted {
    /// The rule of the connection.
    pub(crate) fn rule(&self) -> &RuleState {
        &self.state
    }

    /// The guest that it counts for, among those that share the rule.
    pub(crate) fn guest(&self) -> Option<Cid> {
        self.guest
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        self.state.counts.active.fetch_sub(1, Ordering::Relaxed);
        let mut taken = self.state.taken();
        taken.all -= 1;
        if let Some(guest) = self.guest
            && let Some(own) = taken.by_guest.get_mut(&guest)
        {
            *own -= 1;
            if *own == 0 {
                taken.by_guest.remove(&guest);
            }
        }
    }
}

/// The states of all rules in effect, and of removed ones that still have connections.
#[derive(Debug, Default)]
pub(crate) struct RuleBoard(Mutex<Vec<Arc<RuleState>>>);

impl RuleBoard {
    /// Replaces the rules in effect. Removed rules without connections are forgotten.
    pub(crate) fn set(&self, now: impl IntoIterator<Item = Arc<RuleState>>) {
        let mut states: Vec<_> = now.into_iter().collect();
        let is_in_effect = |state: &Arc<RuleState>| states.iter().any(|it| it.is_same_rule(state));
        // Every update is a single assignment, so a poisoned lock guards a consistent value.
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut removed: Vec<_> = std::mem::take(&mut *all);
        removed.retain(|state| !is_in_effect(state) && state.active() > 0);
        for state in &removed {
            state.counts.removed.store(true, Ordering::Relaxed);
        }
        states.append(&mut removed);
        *all = states;
    }

    /// Counts a connection that a former process has made by the rule with this text. A rule that is not in
    /// effect any more is one that was removed.
    pub(crate) fn readmit(&self, text: &str, guest: Option<Cid>) -> Admitted {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(state) = all.iter().find(|state| state.text() == text) {
            return state.count(state.taken(), guest);
        }
        let state = RuleState::new(text.to_owned(), None, None);
        state.counts.removed.store(true, Ordering::Relaxed);
        all.push(Arc::clone(&state));
        state.count(state.taken(), guest)
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
#[path = "state_tests.rs"]
mod tests;
