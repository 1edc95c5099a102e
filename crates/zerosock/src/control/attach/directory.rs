//! A list of the attached processes for threads other than the control thread. The server writes
//! it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use zerosock_proto::{Cid, Port};

use crate::routing::name::Name;
use crate::stats::Stats;

/// An attached process, or a host service.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Process {
    /// The CID; that of the host for a service.
    pub cid: Cid,
    /// The name, if it has one.
    pub name: Option<Name>,
    /// The user at the time of connect(2).
    pub uid: u32,
    /// The process id at the time of connect(2).
    pub pid: i32,
    /// The ports of the host that it has claimed; empty unless it is a service.
    pub claims: Vec<Port>,
}

impl Process {
    /// Whether it is a host service.
    pub fn is_service(&self) -> bool {
        self.cid == Cid::HOST
    }
}

/// See the [module](self).
#[derive(Debug, Default)]
pub(crate) struct Directory {
    /// By number on the control thread.
    processes: Mutex<BTreeMap<usize, Process>>,
    refused: AtomicU64,
}

impl Directory {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<usize, Process>> {
        // Each change is one insert or remove, so a poisoned lock guards a consistent value.
        self.processes
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn insert(&self, vm: usize, process: Process) {
        self.lock().insert(vm, process);
    }

    pub(super) fn remove(&self, vm: usize) {
        self.lock().remove(&vm);
    }

    pub(super) fn set_claims(&self, vm: usize, claims: Vec<Port>) {
        if let Some(process) = self.lock().get_mut(&vm) {
            process.claims = claims;
        }
    }

    pub(super) fn count_refusal(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn processes(&self) -> Vec<Process> {
        let mut processes: Vec<Process> = self.lock().values().cloned().collect();
        processes.sort_by_key(|process| (process.cid, process.pid));
        processes
    }

    pub(crate) fn resolve(&self, name: &Name) -> Option<Cid> {
        let processes = self.lock();
        let found = processes.values().find(|p| p.name.as_ref() == Some(name));
        found.map(|process| process.cid)
    }

    pub(crate) fn add_to(&self, sum: &mut Stats) {
        let processes = self.lock();
        let services = processes.values().filter(|p| p.is_service());
        let claims = services.clone().map(|service| service.claims.len() as u64);
        sum.claimed_ports += claims.sum::<u64>();
        let services = services.count() as u64;
        sum.services += services;
        sum.attached += processes.len() as u64 - services;
        sum.attach_refused += self.refused.load(Ordering::Relaxed);
    }
}
