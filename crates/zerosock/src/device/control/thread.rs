//! The control thread: listeners, sessions and workers' answers of all VMs, in one epoll loop.
//!
//! What must hold: nothing here waits for a front-end or a worker. A session that waits for its
//! worker is not read; one whose front-end takes no reply is not read; one that has much to say
//! gives way after a few messages. All events are level-triggered, so what is left over is
//! reported again.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};

use super::VmSpec;
use super::mailbox::{Mail, MailSender, Mailbox};
use super::stats::{ControlStats, Counters};
use super::vm::Vm;

/// How long `shutdown` waits for workers that do not answer.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(5);
/// How long the listeners rest when the system has no descriptor for a connection.
const ACCEPT_REST: Duration = Duration::from_millis(200);
/// Events that are taken at once.
const EVENTS: usize = 64;

/// The running control thread. Dropping it shuts it down as [`Control::shutdown`] does.
#[derive(Debug)]
pub struct Control {
    mail: MailSender,
    counters: Vec<Arc<Counters>>,
    thread: Option<JoinHandle<()>>,
}

impl Control {
    /// Starts the thread. VMs are numbered as they come in `vms`.
    ///
    /// # Errors
    /// When the system has no thread, epoll instance or eventfd to give.
    pub fn spawn(vms: Vec<VmSpec>) -> io::Result<Control> {
        let (mailbox, mail) = Mailbox::new()?;
        let counters: Vec<Arc<Counters>> = vms.iter().map(|_| Arc::default()).collect();
        let vms = vms
            .into_iter()
            .zip(&counters)
            .enumerate()
            .map(|(index, (spec, counters))| {
                Vm::new(spec, index, mail.clone(), Arc::clone(counters))
            })
            .collect::<io::Result<Vec<Vm>>>()?;
        let mut reactor = Reactor::new(mailbox, vms)?;
        let thread = std::thread::Builder::new()
            .name("zerosock-control".into())
            .spawn(move || reactor.run())?;
        Ok(Control {
            mail,
            counters,
            thread: Some(thread),
        })
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

/// What an event is about.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
enum Token {
    Mail,
    Listener(usize),
    /// Of a VM, the connection of this number, modulo 2^32: an event that was taken before the
    /// connection ended must not be taken for one of the next.
    Frontend(usize, u32),
}

impl Token {
    fn encode(self) -> EventData {
        let (kind, vm, number) = match self {
            Token::Mail => (0, 0, 0),
            Token::Listener(vm) => (1, vm, 0),
            Token::Frontend(vm, number) => (2, vm, number),
        };
        EventData::new_u64(kind << 62 | (vm as u64 & 0x3fff_ffff) << 32 | u64::from(number))
    }

    fn decode(data: EventData) -> Token {
        let data = data.u64();
        let vm = (data >> 32 & 0x3fff_ffff) as usize;
        match data >> 62 {
            0 => Token::Mail,
            1 => Token::Listener(vm),
            _ => Token::Frontend(vm, data as u32),
        }
    }
}

/// The state of the thread.
struct Reactor {
    epoll: OwnedFd,
    mailbox: Mailbox,
    vms: Vec<Vm>,
    /// The listeners are not watched until then.
    rest: Option<Instant>,
    /// Set when the thread is to end: at the latest then.
    ending: Option<Instant>,
}

impl Reactor {
    fn new(mailbox: Mailbox, vms: Vec<Vm>) -> io::Result<Reactor> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &mailbox, Token::Mail.encode(), EventFlags::IN)?;
        for (index, vm) in vms.iter().enumerate() {
            epoll::add(
                &epoll,
                vm.listener(),
                Token::Listener(index).encode(),
                EventFlags::IN,
            )?;
        }
        Ok(Reactor {
            epoll,
            mailbox,
            vms,
            rest: None,
            ending: None,
        })
    }

    fn run(&mut self) {
        let mut events = Vec::with_capacity(EVENTS);
        loop {
            let now = Instant::now();
            if let Some(limit) = self.ending {
                let busy = self.vms.iter().filter(|vm| !vm.is_idle()).count();
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
            if self.rest.is_some_and(|until| now >= until) {
                self.watch_listeners(EventFlags::IN);
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
        let deadline = [self.rest, self.ending].into_iter().flatten().min();
        let timeout = deadline.map(|deadline| {
            // Rounded up, so that it has passed when the wait is over.
            let left = deadline.saturating_duration_since(now) + Duration::from_millis(1);
            Timespec {
                tv_sec: left.as_secs() as i64,
                tv_nsec: left.subsec_nanos().into(),
            }
        });
        match epoll::wait(&self.epoll, spare_capacity(events), timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn handle_event(&mut self, event: Event) {
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
                let Some(vm) = self.vms.get_mut(index) else {
                    return;
                };
                if vm.accept().is_err() {
                    self.rest = Some(Instant::now() + ACCEPT_REST);
                    self.watch_listeners(EventFlags::empty());
                }
                self.settle(index);
            }
            Token::Frontend(index, number) => {
                let Some(vm) = self.vms.get_mut(index) else {
                    return;
                };
                if vm.connection().is_some_and(|c| c.number as u32 == number) {
                    vm.handle_ready(flags.intersects(EventFlags::HUP | EventFlags::ERR));
                    self.settle(index);
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
                let Some(vm) = self.vms.get_mut(index) else {
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
                let Some(vm) = self.vms.get_mut(index) else {
                    return;
                };
                vm.handle_close(connection, &reason);
                index
            }
            Mail::Notice(_) => return,
            Mail::Shutdown => {
                self.watch_listeners(EventFlags::empty());
                self.rest = None;
                self.ending = Some(Instant::now() + SHUTDOWN_LIMIT);
                for vm in &mut self.vms {
                    vm.end();
                }
                return;
            }
        };
        self.settle(index);
    }

    /// Makes the epoll instance watch what the VM's connection wants watched now. One that is
    /// closed has left it of itself.
    fn settle(&mut self, index: usize) {
        let Some(vm) = self.vms.get_mut(index) else {
            return;
        };
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
            Ok(()) => connection.watched = Some(wanted),
            Err(error) => vm.disconnect(&format!("cannot watch the connection: {error}")),
        }
    }

    /// Lets the listeners be watched, or not.
    fn watch_listeners(&mut self, flags: EventFlags) {
        if flags.contains(EventFlags::IN) {
            self.rest = None;
        }
        for (index, vm) in self.vms.iter().enumerate() {
            let data = Token::Listener(index).encode();
            if let Err(error) = epoll::modify(&self.epoll, vm.listener(), data, flags) {
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
            Token::Frontend(70_000, u32::MAX),
        ];
        for token in tokens {
            assert_eq!(Token::decode(token.encode()), token);
        }
    }
}
