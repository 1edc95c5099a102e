//! The control thread: listeners, sessions and workers' answers of all VMs, in one epoll loop.
//!
//! What must hold: nothing here waits for a front-end or a worker. A session that waits for its
//! worker is not read; one whose front-end takes no reply is not read; one that has much to say
//! gives way after a few messages. All events are level-triggered, so what is left over is
//! reported again.

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventFlags};

use super::VmSpec;
use super::house::{House, Lodger, Token};
use super::mailbox::{Mail, MailSender, Mailbox};
use super::stats::{ControlStats, Counters, FaultCounts};
use super::vm::Vm;
use crate::pulse::Question;

/// How long `shutdown` waits for workers that do not answer.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(5);
/// Events that are taken at once.
const EVENTS: usize = 64;

/// The running control thread. Dropping it shuts it down as [`Control::shutdown`] does.
#[derive(Debug)]
pub struct Control {
    mail: MailSender,
    counters: Vec<Arc<Counters>>,
    /// Of all VMs that came at run time.
    visitors: Arc<Counters>,
    thread: Option<JoinHandle<()>>,
}

impl Control {
    /// Starts the thread. VMs are numbered as they come in `vms`.
    ///
    /// # Errors
    /// When the system has no thread, epoll instance or eventfd to give.
    pub fn spawn(vms: Vec<VmSpec>) -> io::Result<Control> {
        Control::spawn_with(vms, None)
    }

    /// As [`Control::spawn`], with a lodger on the thread.
    pub fn spawn_with(vms: Vec<VmSpec>, lodger: Option<Box<dyn Lodger>>) -> io::Result<Control> {
        let (mailbox, mail) = Mailbox::new()?;
        let visitors: Arc<Counters> = Arc::default();
        let mut reactor = Reactor::new(mailbox, mail.clone(), Arc::clone(&visitors), lodger)?;
        let mut counters = Vec::with_capacity(vms.len());
        for spec in vms {
            let own: Arc<Counters> = Arc::default();
            reactor.house.settle_in(spec, Arc::clone(&own))?;
            counters.push(own);
        }
        let thread = std::thread::Builder::new()
            .name("zerosock-control".into())
            .spawn(move || reactor.run())?;
        Ok(Control {
            mail,
            counters,
            visitors,
            thread: Some(thread),
        })
    }

    /// The counters of all VMs together that came at run time.
    pub fn visitor_stats(&self) -> ControlStats {
        self.visitors.snapshot()
    }

    /// What all front-ends together do wrong, for other threads to look at.
    pub fn fault_counts(&self) -> FaultCounts {
        let all = self.counters.iter().chain([&self.visitors]);
        FaultCounts::new(all.cloned().collect())
    }

    /// Has the lodger look at what it is wanted for.
    pub fn knock(&self) {
        self.mail.send(Mail::Knock);
    }

    /// Asks the thread whether it makes progress.
    pub fn ask(&self, question: Question) {
        self.mail.send(Mail::Pulse(question));
    }

    /// The counters of a VM, by its place in what was given to `spawn`.
    pub fn stats(&self, vm: usize) -> Option<ControlStats> {
        self.counters.get(vm).map(|counters| counters.snapshot())
    }

    /// Disconnects all front-ends, waits until the workers have answered (five seconds at most),
    /// and joins the thread. The workers must still run. Not to be called by a worker.
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

/// The state of the thread.
struct Reactor {
    house: House,
    mailbox: Mailbox,
    lodger: Option<Box<dyn Lodger>>,
    /// Set when the thread is to end: at the latest then.
    ending: Option<Instant>,
}

impl Reactor {
    fn new(
        mailbox: Mailbox,
        mail: MailSender,
        visitors: Arc<Counters>,
        lodger: Option<Box<dyn Lodger>>,
    ) -> io::Result<Reactor> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &mailbox, Token::Mail.encode(), EventFlags::IN)?;
        let mut reactor = Reactor {
            house: House::new(epoll, mail, visitors),
            mailbox,
            lodger,
            ending: None,
        };
        if let Some(lodger) = &mut reactor.lodger {
            lodger.begin(&mut reactor.house)?;
        }
        Ok(reactor)
    }

    fn run(&mut self) {
        let mut events = Vec::with_capacity(EVENTS);
        loop {
            let now = Instant::now();
            if let Some(limit) = self.ending {
                let vms = self.house.vms.values();
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
            if let Some(lodger) = &mut self.lodger
                && lodger.deadline().is_some_and(|at| now >= at)
            {
                lodger.time_passed(now, &mut self.house);
            }
            if self.house.deadline.is_some_and(|at| now >= at) {
                self.time_passed(now);
            }
            match self.wait(&mut events, now) {
                Ok(()) => {}
                Err(error) => {
                    // Only a broken epoll instance gets here; no VM can cause it.
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
        let lodger = self.lodger.as_ref().and_then(|lodger| lodger.deadline());
        let deadlines = [self.ending, lodger, self.house.deadline];
        let deadline = deadlines.into_iter().flatten().min();
        let timeout = deadline.map(|deadline| {
            // Rounded up, so that it has passed when the wait is over.
            let left = deadline.saturating_duration_since(now) + Duration::from_millis(1);
            Timespec {
                tv_sec: left.as_secs() as i64,
                tv_nsec: left.subsec_nanos().into(),
            }
        });
        match epoll::wait(&self.house.epoll, spare_capacity(events), timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Gives every VM its turn that has reached its deadline; the house notes the next deadline.
    fn time_passed(&mut self, now: Instant) {
        self.house.deadline = None;
        let with_deadline = |(&index, vm): (&usize, &Vm)| vm.deadline().map(|_| index);
        let vms: Vec<usize> = self.house.vms.iter().filter_map(with_deadline).collect();
        for index in vms {
            if let Some(vm) = self.house.vms.get_mut(&index) {
                vm.time_passed(now);
            }
            self.settle(index);
        }
    }

    fn handle_event(&mut self, event: Event) {
        self.handle(event);
        while let Some(index) = self.house.closed.pop() {
            self.settle(index);
        }
    }

    fn handle(&mut self, event: Event) {
        let flags = event.flags;
        match Token::decode(event.data) {
            Token::Mail => {
                self.mailbox.clear();
                while let Some(mail) = self.mailbox.next() {
                    self.handle_mail(mail);
                }
            }
            Token::Listener(index) => {
                if self.ending.is_some() {
                    return;
                }
                let Some(vm) = self.house.vms.get_mut(&index) else {
                    return;
                };
                vm.accept();
                self.settle(index);
            }
            Token::Frontend(index, number) => {
                let Some(vm) = self.house.vms.get_mut(&index) else {
                    return;
                };
                if vm.connection().is_some_and(|c| c.number as u32 == number) {
                    vm.handle_ready(flags.intersects(EventFlags::HUP | EventFlags::ERR));
                    self.settle(index);
                }
            }
            Token::Lodger(key) => {
                if let Some(lodger) = &mut self.lodger {
                    lodger.ready(key, flags, &mut self.house);
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
                let Some(vm) = self.house.vms.get_mut(&index) else {
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
                let Some(vm) = self.house.vms.get_mut(&index) else {
                    return;
                };
                vm.handle_close(connection, &reason);
                index
            }
            Mail::Notice(number) => {
                if let Some(lodger) = &mut self.lodger {
                    lodger.noticed(number, &mut self.house);
                }
                return;
            }
            Mail::Knock => {
                if let Some(lodger) = &mut self.lodger {
                    lodger.knocked(&mut self.house);
                }
                return;
            }
            Mail::Pulse(question) => return question.answer(),
            Mail::Shutdown => {
                // Nobody is let in any more; who is in is seen off with the rest.
                if let Some(mut lodger) = self.lodger.take() {
                    lodger.end(&mut self.house);
                }
                self.house.watch_listeners(EventFlags::empty());
                self.ending = Some(Instant::now() + SHUTDOWN_LIMIT);
                for vm in self.house.vms.values_mut() {
                    vm.end();
                }
                return;
            }
        };
        self.settle(index);
    }

    /// After something has happened to a VM: watches what is to be watched now, and forgets it if
    /// it is over.
    fn settle(&mut self, index: usize) {
        self.house.settle(index);
        if self.house.vms.get(&index).is_some_and(Vm::is_over) {
            self.house.vms.remove(&index);
            if let Some(lodger) = &mut self.lodger {
                lodger.vm_over(index, &mut self.house);
            }
        }
    }
}
