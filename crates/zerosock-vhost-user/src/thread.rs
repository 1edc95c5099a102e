//! The control thread: listeners, sessions and workers' answers of all VMs, in one epoll loop.
//!
//! # Invariants
//!
//! - The thread never waits for a front-end or a worker.
//! - A connection is not read while its worker has a command, or while a reply is not fully
//!   written.
//! - Each connection is served within a budget. Events of sockets are level-triggered, so the rest is
//!   reported again.

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventFlags};

use super::VmSpec;
use super::frontends::{ControlExtension, FrontendRegistry, Token};
use super::mailbox::{Mail, MailSender};
use super::stats::{ControlStats, Counters, FaultCounts};
use super::vm::Vm;
use crate::liveness::LivenessQuery;
use zerosock_sys::mailbox::Mailbox;

/// How long `shutdown` waits for workers' answers.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(5);
/// Events received by one epoll_wait.
const EVENTS: usize = 64;

/// The running control thread. Dropping it shuts it down as [`Control::shutdown`] does.
#[derive(Debug)]
pub struct Control {
    mail: MailSender,
    counters: Vec<Arc<Counters>>,
    /// Counters shared by all VMs that are added at run time.
    dynamic_counters: Arc<Counters>,
    thread: Option<JoinHandle<()>>,
}

impl Control {
    /// Starts the thread. VMs are numbered in the order of `vms`.
    ///
    /// # Errors
    /// The system has no thread, epoll instance or eventfd left.
    pub fn spawn(vms: Vec<VmSpec>) -> io::Result<Control> {
        Control::spawn_with(vms, None)
    }

    /// As [`Control::spawn`], with an extension on the thread.
    pub fn spawn_with(
        vms: Vec<VmSpec>,
        extension: Option<Box<dyn ControlExtension>>,
    ) -> io::Result<Control> {
        let (mail, mailbox) = MailSender::new()?;
        let dynamic_counters: Arc<Counters> = Arc::default();
        let mut reactor = Reactor::new(
            mailbox,
            mail.clone(),
            Arc::clone(&dynamic_counters),
            extension,
        )?;
        let mut counters = Vec::with_capacity(vms.len());
        for spec in vms {
            let own: Arc<Counters> = Arc::default();
            reactor.frontends.add_static(spec, Arc::clone(&own))?;
            counters.push(own);
        }
        let thread = std::thread::Builder::new()
            .name("zerosock-control".into())
            .spawn(move || reactor.run())?;
        Ok(Control {
            mail,
            counters,
            dynamic_counters,
            thread: Some(thread),
        })
    }

    /// The sum for all VMs added at run time.
    pub fn dynamic_stats(&self) -> ControlStats {
        self.dynamic_counters.snapshot()
    }

    /// A live view of the faults of all front-ends.
    pub fn fault_counts(&self) -> FaultCounts {
        let all = self.counters.iter().chain([&self.dynamic_counters]);
        FaultCounts::new(all.cloned().collect())
    }

    /// Makes the thread call [`ControlExtension::woken`].
    pub fn wake_extension(&self) {
        self.mail.send(Mail::WakeExtension);
    }

    /// Sends a liveness query; the thread answers it if it makes progress.
    pub fn send_liveness_query(&self, query: LivenessQuery) {
        self.mail.send(Mail::Liveness(query));
    }

    /// The counters of a VM, by its index in the `vms` given to `spawn`.
    pub fn stats(&self, vm: usize) -> Option<ControlStats> {
        self.counters.get(vm).map(|counters| counters.snapshot())
    }

    /// Disconnects all front-ends, waits until the workers have answered (five seconds at most),
    /// and joins the thread. The workers must still run, so a worker must not call this.
    pub fn shutdown(mut self) {
        self.end();
    }

    fn end(&mut self) {
        if let Some(thread) = self.thread.take() {
            self.mail.send(Mail::Shutdown);
            if thread.join().is_err() {
                tracing::error!("the control thread has panicked");
            }
        }
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.end();
    }
}

/// The state of the control thread.
struct Reactor {
    frontends: FrontendRegistry,
    mailbox: Mailbox<Mail>,
    extension: Option<Box<dyn ControlExtension>>,
    /// Set on shutdown: the time at which the thread ends even if workers have not answered.
    ending: Option<Instant>,
}

impl Reactor {
    fn new(
        mailbox: Mailbox<Mail>,
        mail: MailSender,
        dynamic_counters: Arc<Counters>,
        extension: Option<Box<dyn ControlExtension>>,
    ) -> io::Result<Reactor> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let edges = EventFlags::IN | EventFlags::ET;
        epoll::add(&epoll, mailbox.fd(), Token::Mail.encode(), edges)?;
        let mut reactor = Reactor {
            frontends: FrontendRegistry::new(epoll, mail, dynamic_counters),
            mailbox,
            extension,
            ending: None,
        };
        if let Some(extension) = &mut reactor.extension {
            extension.begin(&mut reactor.frontends)?;
        }
        Ok(reactor)
    }

    fn run(&mut self) {
        let mut events = Vec::with_capacity(EVENTS);
        loop {
            let now = Instant::now();
            if let Some(limit) = self.ending {
                let vms = self.frontends.vms.values();
                let busy = vms.filter(|vm| !vm.is_idle()).count();
                if busy == 0 {
                    return;
                }
                if now >= limit {
                    tracing::error!(
                        busy,
                        "workers do not answer: the control thread ends anyway"
                    );
                    return;
                }
            }
            if let Some(extension) = &mut self.extension
                && extension.deadline().is_some_and(|at| now >= at)
            {
                extension.time_passed(now, &mut self.frontends);
            }
            if self.frontends.deadline.is_some_and(|at| now >= at) {
                self.time_passed(now);
            }
            match self.wait(&mut events, now) {
                Ok(()) => {}
                Err(error) => {
                    // Only a broken epoll instance fails here; no VM can cause it.
                    tracing::error!(%error, "the control thread cannot wait and ends");
                    return;
                }
            }
            for event in events.drain(..) {
                self.handle_event(event);
            }
        }
    }

    fn wait(&self, events: &mut Vec<Event>, now: Instant) -> io::Result<()> {
        let extension = self
            .extension
            .as_ref()
            .and_then(|extension| extension.deadline());
        let deadlines = [self.ending, extension, self.frontends.deadline];
        let deadline = deadlines.into_iter().flatten().min();
        let timeout = deadline.map(|deadline| {
            // Rounded up, so that the deadline has passed when the wait ends.
            let left = deadline.saturating_duration_since(now) + Duration::from_millis(1);
            Timespec {
                tv_sec: left.as_secs() as i64,
                tv_nsec: left.subsec_nanos().into(),
            }
        });
        match epoll::wait(
            &self.frontends.epoll,
            spare_capacity(events),
            timeout.as_ref(),
        ) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Calls every VM that has a deadline, and collects the next deadlines.
    fn time_passed(&mut self, now: Instant) {
        self.frontends.deadline = None;
        let with_deadline = |(&index, vm): (&usize, &Vm)| vm.deadline().map(|_| index);
        let vms: Vec<usize> = self
            .frontends
            .vms
            .iter()
            .filter_map(with_deadline)
            .collect();
        for index in vms {
            if let Some(vm) = self.frontends.vms.get_mut(&index) {
                vm.time_passed(now);
            }
            self.update_watch(index);
        }
    }

    fn handle_event(&mut self, event: Event) {
        self.handle(event);
        while let Some(index) = self.frontends.closed.pop() {
            self.update_watch(index);
        }
    }

    fn handle(&mut self, event: Event) {
        let flags = event.flags;
        match Token::decode(event.data) {
            Token::Mail => {
                let mails: Vec<Mail> = self.mailbox.drain().collect();
                for mail in mails {
                    self.handle_mail(mail);
                }
            }
            Token::Listener(index) => {
                if self.ending.is_some() {
                    return;
                }
                let Some(vm) = self.frontends.vms.get_mut(&index) else {
                    return;
                };
                vm.accept();
                self.update_watch(index);
            }
            Token::Frontend(index, number) => {
                let Some(vm) = self.frontends.vms.get_mut(&index) else {
                    return;
                };
                if vm.connection().is_some_and(|c| c.number as u32 == number) {
                    vm.handle_ready(flags.intersects(EventFlags::HUP | EventFlags::ERR));
                    self.update_watch(index);
                }
            }
            Token::ControlExtension(key) => {
                if let Some(extension) = &mut self.extension {
                    extension.ready(key, flags, &mut self.frontends);
                }
            }
        }
    }

    fn handle_mail(&mut self, mail: Mail) {
        let index = match mail {
            Mail::Reply {
                vm: index,
                sequence,
                reply,
            } => {
                let Some(vm) = self.frontends.vms.get_mut(&index) else {
                    return;
                };
                vm.handle_reply(sequence, reply);
                index
            }
            Mail::Close {
                vm: index,
                connection,
                reason,
            } => {
                let Some(vm) = self.frontends.vms.get_mut(&index) else {
                    return;
                };
                vm.handle_close(connection, &reason);
                index
            }
            Mail::ConfigChange {
                vm: index,
                connection,
                change,
            } => {
                if let Some(vm) = self.frontends.vms.get_mut(&index) {
                    vm.change_config(connection, &change);
                }
                return;
            }
            Mail::Notice(number) => {
                if let Some(extension) = &mut self.extension {
                    extension.notice_dropped(number, &mut self.frontends);
                }
                return;
            }
            Mail::WakeExtension => {
                if let Some(extension) = &mut self.extension {
                    extension.woken(&mut self.frontends);
                }
                return;
            }
            Mail::Liveness(query) => return query.answer(),
            Mail::Shutdown => {
                // No front-end or process is admitted any more; those connected are disconnected
                // below.
                if let Some(mut extension) = self.extension.take() {
                    extension.end(&mut self.frontends);
                }
                self.frontends.watch_listeners(EventFlags::empty());
                self.ending = Some(Instant::now() + SHUTDOWN_LIMIT);
                for vm in self.frontends.vms.values_mut() {
                    vm.end();
                }
                return;
            }
        };
        self.update_watch(index);
    }

    /// Updates the watches of a VM after its state has changed, and removes it if it is over.
    fn update_watch(&mut self, index: usize) {
        self.frontends.update_watch(index);
        if self.frontends.vms.get(&index).is_some_and(Vm::is_over) {
            self.frontends.vms.remove(&index);
            if let Some(extension) = &mut self.extension {
                extension.vm_removed(index, &mut self.frontends);
            }
        }
    }
}
