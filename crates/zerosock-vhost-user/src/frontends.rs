//! The control thread's epoll instance and its VMs, and the trait of an extension of the thread.
//!
//! A [`ControlExtension`] runs on the control thread, watches descriptors of its own in the same
//! epoll instance, and adds and closes VMs at run time.
//!
//! # Invariants
//!
//! - An extension never blocks, and limits the work of each call, as the rest of the thread does.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use rustix::event::epoll::{self, EventData, EventFlags};

use zerosock_sys::LogLimit;

use super::VmSpec;
use super::mailbox::{MailSender, Notice};
use super::stats::Counters;
use super::vm::Vm;

/// Code that runs on the control thread beside the VMs.
pub trait ControlExtension: Send {
    /// Called once, before the thread handles any event. An error keeps the thread from starting.
    fn begin(&mut self, frontends: &mut FrontendRegistry) -> io::Result<()>;

    /// The descriptor watched under `key` is ready. May be called once more after the descriptor
    /// was removed from the epoll instance.
    fn ready(&mut self, key: u32, flags: EventFlags, frontends: &mut FrontendRegistry);

    /// The thread shuts down and drops the extension. The extension stops watching its descriptors.
    fn end(&mut self, frontends: &mut FrontendRegistry);

    /// Called after [`Control::wake_extension`](super::Control::wake_extension).
    fn woken(&mut self, frontends: &mut FrontendRegistry) {
        let _ = frontends;
    }

    /// A VM that was added or closed at run time is removed: its front-end has disconnected and the
    /// worker has answered `Disconnected`.
    fn vm_removed(&mut self, vm: usize, frontends: &mut FrontendRegistry);

    /// All clones of the [`Notice`] with this number were dropped.
    fn notice_dropped(&mut self, number: u64, frontends: &mut FrontendRegistry);

    /// When [`time_passed`](Self::time_passed) is to be called next, if ever.
    fn deadline(&self) -> Option<Instant>;

    /// The deadline has passed. May be called early.
    fn time_passed(&mut self, now: Instant, frontends: &mut FrontendRegistry);
}

/// The source of an event, as encoded in its epoll data.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) enum Token {
    Mail,
    Listener(usize),
    /// VM, and the number of its connection modulo 2^32. The number tells a stale event of an
    /// earlier connection from one of the current connection.
    Frontend(usize, u32),
    /// The extension's descriptor with this key.
    ControlExtension(u32),
}

/// VM numbers are below this.
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

/// The VMs on the control thread and its epoll instance. Used on that thread only.
pub struct FrontendRegistry {
    pub(super) epoll: Arc<OwnedFd>,
    pub(super) vms: BTreeMap<usize, Vm>,
    mail: MailSender,
    /// The number to try first for the next VM: numbers are reused as late as possible.
    next_vm: usize,
    notices: u64,
    /// Counters shared by all VMs that are added at run time.
    dynamic_counters: Arc<Counters>,
    /// VMs that were closed since their watches were last updated.
    pub(super) closed: Vec<usize>,
    /// The earliest deadline of a VM, or an earlier time.
    pub(super) deadline: Option<Instant>,
    limits: [Arc<LogLimit>; 3],
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

    /// Adds a VM before the thread starts, with counters of its own.
    pub(super) fn add_static(
        &mut self,
        spec: VmSpec,
        counters: Arc<Counters>,
    ) -> io::Result<usize> {
        self.insert(spec, counters, Default::default())
    }

    /// Adds a VM at run time and returns its number.
    ///
    /// # Errors
    /// Its socket cannot be watched.
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
        limits: [Arc<LogLimit>; 3],
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

    /// Whether a front-end is connected and has not hung up. If a VM that was added at run time has
    /// none, [`ControlExtension::vm_removed`] follows.
    pub fn has_frontend(&self, vm: usize) -> bool {
        self.vms.get(&vm).is_some_and(Vm::has_frontend)
    }

    /// Closes the connection of a VM's front-end. For a VM without a listener,
    /// [`ControlExtension::vm_removed`] follows.
    pub fn disconnect(&mut self, vm: usize, reason: &str) {
        if let Some(vm) = self.vms.get_mut(&vm) {
            vm.disconnect(reason);
        }
    }

    /// Closes the connection of a VM's front-end and the VM's listener;
    /// [`ControlExtension::vm_removed`] follows.
    pub fn close(&mut self, vm: usize, reason: &str) {
        if let Some(closed) = self.vms.get_mut(&vm) {
            if let Some(listener) = closed.listener() {
                let _ = epoll::delete(&self.epoll, listener);
            }
            closed.close(reason);
            self.closed.push(vm);
        }
    }

    /// Makes a notice; returns its number for [`ControlExtension::notice_dropped`].
    pub fn notice(&mut self) -> (u64, Arc<Notice>) {
        self.notices += 1;
        let notice = Notice::new(self.mail.clone(), self.notices);
        (self.notices, Arc::new(notice))
    }

    /// The epoll instance. A peer's socket must be removed from it before the reaper gets the
    /// socket.
    pub fn epoll(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.epoll)
    }

    /// Watches a descriptor of the extension.
    pub fn watch(&self, fd: impl AsFd, key: u32, flags: EventFlags) -> io::Result<()> {
        Ok(epoll::add(
            &self.epoll,
            fd,
            Token::ControlExtension(key).encode(),
            flags,
        )?)
    }

    /// Changes the events that a watched descriptor is watched for.
    pub fn watch_for(&self, fd: impl AsFd, key: u32, flags: EventFlags) -> io::Result<()> {
        Ok(epoll::modify(
            &self.epoll,
            fd,
            Token::ControlExtension(key).encode(),
            flags,
        )?)
    }

    /// Updates the epoll instance to the current interest of the VM's connection and listener. A
    /// connection removes itself when it is dropped.
    pub(super) fn update_watch(&mut self, index: usize) {
        let Some(vm) = self.vms.get_mut(&index) else {
            return;
        };
        if let Some(at) = vm.deadline() {
            self.deadline = Some(self.deadline.map_or(at, |other| other.min(at)));
        }
        if let Some(flags) = vm.listener_change() {
            watch_listener(&self.epoll, index, vm, flags);
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

    /// Sets the events that all listeners are watched for.
    pub(super) fn watch_listeners(&self, flags: EventFlags) {
        for (&index, vm) in &self.vms {
            watch_listener(&self.epoll, index, vm, flags);
        }
    }
}

/// Sets the events that the listener of a VM is watched for, if it has one.
fn watch_listener(epoll: &OwnedFd, index: usize, vm: &Vm, flags: EventFlags) {
    let data = Token::Listener(index).encode();
    if let Some(listener) = vm.listener()
        && let Err(error) = epoll::modify(epoll, listener, data, flags)
    {
        let vm = vm.name();
        tracing::error!(vm, %error, "cannot watch the socket: no VMM can connect; restart the daemon");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decoding_an_encoded_token_returns_it() {
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
