//! The journal of a VM's front-end, kept by the supervisor.

use std::os::fd::BorrowedFd;

use rustix::rand::{GetRandomFlags, getrandom};
use zerosock_supervisor::Batch;
use zerosock_vhost_user::journal::{Change, Journal, Key};

use super::connection::send;

/// See the [module](self).
#[derive(Debug)]
pub(super) struct SupervisorJournal {
    front: String,
    pending: String,
    /// A change could not be recorded: the connection is in no journal any more.
    has_gap: bool,
}

impl SupervisorJournal {
    pub(super) fn new(cid: u32) -> SupervisorJournal {
        let front = format!("vm/{cid}/front");
        let pending = format!("{front}/pending");
        SupervisorJournal {
            front,
            pending,
            has_gap: false,
        }
    }

    /// Sends a batch. After one that fails the connection is in no journal any more.
    fn record(&mut self, batch: &Batch<'_>) -> bool {
        if !self.has_gap && !send(&self.front, batch) {
            self.has_gap = true;
            send(&self.front, &Batch::default().remove(&self.front));
        }
        !self.has_gap
    }

    fn key(&self, Key { request, index }: Key) -> String {
        format!("{}/{request}/{index}", self.front)
    }

    /// The key of a change.
    fn changed(&self, change: &Change<'_>) -> String {
        match change {
            Change::Keep { key, .. } | Change::Drop(key) => self.key(*key),
            Change::DropAll(request) => format!("{}/{request}", self.front),
        }
    }
}

impl Journal for SupervisorJournal {
    fn connected(&mut self, socket: BorrowedFd<'_>) -> u64 {
        self.has_gap = false;
        let front = self.front.clone();
        self.record(&Batch::default().remove(&front).put(&front, &[], &[socket]));
        random()
    }

    fn begin(&mut self, request: &[u8], fds: &[BorrowedFd<'_>]) {
        let pending = self.pending.clone();
        self.record(&Batch::default().put(&pending, request, fds));
    }

    fn finish(&mut self, place: Option<Key>, changes: &[Change<'_>], reply: &[u8]) -> bool {
        let place = place.map(|key| self.key(key));
        let keys: Vec<String> = changes.iter().map(|it| self.changed(it)).collect();
        let (front, pending) = (self.front.clone(), self.pending.clone());
        let mut batch = match &place {
            Some(key) => Batch::default().rename(&pending, key),
            None => Batch::default().remove(&pending),
        };
        for (change, key) in changes.iter().zip(&keys) {
            batch = match change {
                Change::Keep { bytes, fds, .. } => batch.put(key, bytes, fds),
                Change::Drop(_) | Change::DropAll(_) => batch.remove(key),
            };
        }
        if !reply.is_empty() {
            batch = batch.write(&front, reply);
        }
        self.record(&batch)
    }

    fn disconnected(&mut self) {
        send(&self.front, &Batch::default().remove(&self.front));
    }
}

/// A random number.
pub(super) fn random() -> u64 {
    let mut bytes = [0; 8];
    // Eight bytes never fail once the system has started.
    let _ = getrandom(&mut bytes, GetRandomFlags::empty());
    u64::from_ne_bytes(bytes)
}
