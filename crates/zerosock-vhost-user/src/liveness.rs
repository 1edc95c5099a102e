//! A liveness check of a thread by a message through its ordinary queue.
//!
//! The probe makes a query, the thread answers it when it takes it out of the queue. The query
//! wakes an idle thread; a thread that is stuck in a call or a loop leaves it unanswered.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Tracks whether a thread has answered its last query.
#[derive(Debug, Default)]
pub struct LivenessProbe(Arc<AtomicBool>);

/// A query that was not answered yet.
#[derive(Debug)]
pub struct LivenessQuery(Arc<AtomicBool>);

impl LivenessProbe {
    /// The next query, or `None` while the last one is unanswered.
    pub fn query(&self) -> Option<LivenessQuery> {
        let unanswered = self.0.swap(true, Ordering::Relaxed);
        (!unanswered).then(|| LivenessQuery(self.0.clone()))
    }
}

impl LivenessQuery {
    /// Called by the queried thread. A query that is dropped stays unanswered.
    pub fn answer(self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_query_is_made_only_after_the_last_one_is_answered() {
        let probe = LivenessProbe::default();
        let query = probe.query().unwrap();
        assert!(probe.query().is_none());
        query.answer();
        let query = probe.query().unwrap();
        drop(query);
        assert!(probe.query().is_none(), "a thread that has ended");
    }
}
