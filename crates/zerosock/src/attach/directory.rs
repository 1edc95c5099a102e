//! Who is attached, for threads other than the control thread. The server writes, others look.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use zerosock_proto::Cid;

use super::codec::Name;
use crate::stats::Stats;

/// An attached process.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Process {
    /// Its CID.
    pub cid: Cid,
    /// Its name, if it has one.
    pub name: Option<Name>,
    /// Its user when it connected.
    pub uid: u32,
    /// Its process number when it connected.
    pub pid: i32,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Directory {
    processes: Mutex<BTreeMap<Cid, Process>>,
    refused: AtomicU64,
}

impl Directory {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<Cid, Process>> {
        // Each change is one insert or remove: a panic elsewhere leaves nothing half done.
        self.processes
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn insert(&self, process: Process) {
        self.lock().insert(process.cid, process);
    }

    pub(super) fn remove(&self, cid: Cid) {
        self.lock().remove(&cid);
    }

    pub(super) fn refuse(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn processes(&self) -> Vec<Process> {
        self.lock().values().cloned().collect()
    }

    pub(crate) fn resolve(&self, name: &Name) -> Option<Cid> {
        let processes = self.lock();
        let found = processes.values().find(|p| p.name.as_ref() == Some(name));
        found.map(|process| process.cid)
    }

    pub(crate) fn add_to(&self, sum: &mut Stats) {
        sum.attached += self.lock().len() as u64;
        sum.attach_refused += self.refused.load(Ordering::Relaxed);
    }
}
