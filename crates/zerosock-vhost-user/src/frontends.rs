//! What the control thread has charge of: the epoll instance, the VMs, and a place for a extension.
//!
//! A [`ControlExtension`] is something else that lives on the thread, with descriptors of its own in the
//! same epoll instance, and adds VMs while it runs: the attach server. What must hold for it is
//! what holds for the rest of the thread: it never blocks, and works to a budget.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use rustix::event::epoll::{self, EventData, EventFlags};

use super::VmSpec;
use super::log_limit::LogLimit;
use super::mailbox::{MailSender, Notice};
use super::stats::Counters;
use super::vm::Vm;

/// See the module. All its calls are made on the control thread.
pub trait ControlExtension: Send {
    /// Moves in, before anything else.
    fn begin(&mut self, frontends: &mut FrontendRegistry) -> io::Result<()>;

    /// A descriptor that it watches under `key` is ready. May be about one that is not watched any
    /// more.
    fn ready(&mut self, key: u32, flags: EventFlags, frontends: &mut FrontendRegistry);

    /// It will be dropped, and watches nothing any more.
    fn end(&mut self, frontends: &mut FrontendRegistry);

    /// Somebody has [woken](super::Control::wake_extension).
    fn woken(&mut self, frontends: &mut FrontendRegistry) {
        let _ = frontends;
    }

    /// A VM that it added is over: its front-end has gone and the worker has let go.
    fn vm_over(&mut self, vm: usize, frontends: &mut FrontendRegistry);

    /// All who held the notice of this number have dropped it.
    fn noticed(&mut self, number: u64, frontends: &mut FrontendRegistry);

    /// When it wants to be called next, if nothing happens before.
    fn deadline(&self) -> Option<Instant>;

    /// Its time has come; may be called before.
    fn time_passed(&mut self, now: Instant, frontends: &mut FrontendRegistry);
}

/// What an event is about.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) enum Token {
    Mail,
    Listener(usize),
    /// Of a VM, the connection of this number, modulo 2^32: an event that was taken before the
    /// connection ended must not be taken for one of the next.
    Frontend(usize, u32),
    /// The extension's descriptor of this key.
    ControlExtension(u32),
}

/// VMs have numbers below this.
const VMS: usize = 1 << 30;

impl Token {
    pub(super) fn encode(self) -> EventData {
        let (kind, vm, number) = match self {
            Token::Mail => (0, 0, 0),
            Token::Listener(vm) => (1, vm, 0),
            Token::Frontend(vm, number) => (2, vm, number),
            Token::ControlExtension(key) => (3, 0, key),
        };
        EventData::new_u64(kind << 62 | ((vm % VMS) as u64) << 32 | u64::from(number))
    }

    pub(super) fn decode(data: EventData) -> Token {
        let data = data.u64();
        let vm = (data >> 32) as usize % VMS;
        match data >> 62 {
            0 => Token::Mail,
            1 => Token::Listener(vm),
            2 => Token::Frontend(vm, data as u32),
            _ => Token::ControlExtension(data as u32),
        }
    }
}

/// See the module.
pub struct FrontendRegistry {
    pub(super) epoll: Arc<OwnedFd>,
    pub(super) vms: BTreeMap<usize, Vm>,
    mail: MailSender,
    /// The number of the next VM. Numbers are used again only after all others.
    next_vm: usize,
    notices: u64,
    /// Of all VMs that are added at run time.
    dynamic_counters: Arc<Counters>,
    /// VMs that were closed and have not been looked at since.
    pub(super) closed: Vec<usize>,
    /// When a VM has something to do of itself; may be too early.
    pub(super) deadline: Option<Instant>,
    limits: [Arc<LogLimit>; 2],
}

impl FrontendRegistry {
    pub(super) fn new(
        epoll: OwnedFd,
        mail: MailSender,
        dynamic_counters: Arc<Counters>,
    ) -> FrontendRegistry {
        FrontendRegistry {
            epoll: Arc::new(epoll),
            vms: BTreeMap::new(),
            mail,
            next_vm: 0,
            notices: 0,
            dynamic_counters,
            closed: Vec::new(),
            deadline: None,
            limits: Default::default(),
        }
    }

    /// Adds a VM that was there from the start.
    pub(super) fn add_static(
        &mut self,
        spec: VmSpec,
        counters: Arc<Counters>,
    ) -> io::Result<usize> {
        self.insert(spec, counters, Default::default())
    }

    /// Adds a VM at run time.
    ///
    /// # Errors
    /// When its socket cannot be watched.
    pub fn add(&mut self, spec: VmSpec) -> io::Result<usize> {
        self.insert(
            spec,
            Arc::clone(&self.dynamic_counters),
            self.limits.clone(),
        )
    }

    fn insert(
        &mut self,
        spec: VmSpec,
        counters: Arc<Counters>,
        limits: [Arc<LogLimit>; 2],
    ) -> io::Result<usize> {
        while self.vms.contains_key(&self.next_vm) {
            self.next_vm = (self.next_vm + 1) % VMS;
        }
        let index = self.next_vm;
        self.next_vm = (index + 1) % VMS;
        let vm = Vm::new(spec, index, self.mail.clone(), counters, limits)?;
        if let Some(listener) = vm.listener() {
            let token = Token::Listener(index).encode();
            epoll::add(&self.epoll, listener, token, EventFlags::IN)?;
        }
        self.vms.insert(index, vm);
        self.update_watch(index);
        Ok(index)
    }

    /// Whether the VM has a front-end that has not gone. If a VM that was added at run time has
    /// none, [`ControlExtension::vm_over`] follows.
    pub fn has_frontend(&self, vm: usize) -> bool {
        self.vms.get(&vm).is_some_and(Vm::has_frontend)
    }

    /// Ends a VM's connection; [`ControlExtension::vm_over`] follows.
    pub fn disconnect(&mut self, vm: usize, reason: &str) {
        if let Some(vm) = self.vms.get_mut(&vm) {
            vm.disconnect(reason);
        }
    }

    /// Ends a VM's connection, lets no other front-end in, and closes its listener;
    /// [`ControlExtension::vm_over`] follows.
    pub fn close(&mut self, vm: usize, reason: &str) {
        if let Some(closed) = self.vms.get_mut(&vm) {
            if let Some(listener) = closed.listener() {
                let _ = epoll::delete(&self.epoll, listener);
            }
            closed.close(reason);
            self.closed.push(vm);
        }
    }

    /// A notice, and the number by which it will be known when it comes back.
    pub fn notice(&mut self) -> (u64, Arc<Notice>) {
        self.notices += 1;
        let notice = Notice::new(self.mail.clone(), self.notices);
        (self.notices, Arc::new(notice))
    }

    /// The epoll instance, which a peer's socket has to leave before it is handed to the reaper.
    pub fn epoll(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.epoll)
    }

    /// Watches a descriptor of the extension's.
    pub fn watch(&self, fd: impl AsFd, key: u32, flags: EventFlags) -> io::Result<()> {
        Ok(epoll::add(
            &self.epoll,
            fd,
            Token::ControlExtension(key).encode(),
            flags,
        )?)
    }

    /// Watches a descriptor that is watched already for something else.
    pub fn watch_for(&self, fd: impl AsFd, key: u32, flags: EventFlags) -> io::Result<()> {
        Ok(epoll::modify(
            &self.epoll,
            fd,
            Token::ControlExtension(key).encode(),
            flags,
        )?)
    }

    /// Makes the epoll instance watch what the VM's connection and listener want watched now. A
    /// connection leaves it when it is dropped.
    pub(super) fn update_watch(&mut self, index: usize) {
        let Some(vm) = self.vms.get_mut(&index) else {
            return;
        };
        if let Some(at) = vm.deadline() {
            self.deadline = Some(self.deadline.map_or(at, |other| other.min(at)));
        }
        if let Some(flags) = vm.listener_change()
            && let Some(listener) = vm.listener()
        {
            let data = Token::Listener(index).encode();
            if let Err(error) = epoll::modify(&self.epoll, listener, data, flags) {
                tracing::error!(%error, "cannot change what is watched");
            }
        }
        let Some(connection) = vm.connection() else {
            return;
        };
        let wanted = connection.interest();
        if connection.watched == Some(wanted) {
            return;
        }
        let data = Token::Frontend(index, connection.number as u32).encode();
        let result = match connection.watched {
            None => epoll::add(&self.epoll, &connection.socket, data, wanted),
            Some(_) => epoll::modify(&self.epoll, &connection.socket, data, wanted),
        };
        match result {
            Ok(()) => {
                connection.watched = Some(wanted);
                connection.epoll = Some(Arc::clone(&self.epoll));
            }
            Err(error) => vm.disconnect(&format!("cannot watch the connection: {error}")),
        }
    }

    /// Lets the listeners be watched, or not.
    pub(super) fn watch_listeners(&self, flags: EventFlags) {
        for (&index, vm) in &self.vms {
            let data = Token::Listener(index).encode();
            let Some(listener) = vm.listener() else {
                continue;
            };
            if let Err(error) = epoll::modify(&self.epoll, listener, data, flags) {
                tracing::error!(%error, "cannot change what is watched");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_survive_the_epoll_instance() {
        let tokens = [
            Token::Mail,
            Token::Listener(0),
            Token::Listener(70_000),
            Token::Frontend(0, 0),
            Token::Frontend(VMS - 1, u32::MAX),
            Token::ControlExtension(0),
            Token::ControlExtension(u32::MAX),
        ];
        for token in tokens {
            assert_eq!(Token::decode(token.encode()), token);
        }
    }
}
