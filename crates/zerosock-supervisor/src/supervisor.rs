//! The loop: starts the worker process, executes its messages, and starts its successor.
//!
//! # Invariants
//! - All messages of a worker process are executed before its successor is started, so the successor gets
//!   what the last complete batch has left.
//! - After a message that breaks a rule no further message of that worker process is executed.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, RecvFlags, SendFlags, Shutdown, SocketType, sockopt};
use rustix::process::{Resource, Signal, getrlimit};
use tracing::{debug, error, info, warn};

use crate::background::{Closer, ServiceManager};
use crate::message::{Limits, MAX_DATAGRAM, Operation, decode};
use crate::restarts::{RestartPolicy, Restarts};
use crate::signals::Signals;
use crate::store::{PendingWrite, Store};
use crate::upgrade::{Executable, Said, Upgrade};
use crate::worker::Worker;
use crate::{Error, HANDOVER_PREFIX, socket};

/// Entries with this prefix, the listening sockets, remain when the store is reduced.
pub const LISTEN_PREFIX: &str = "listen/";
/// Most messages received in one turn of the loop.
const MESSAGES_PER_TURN: usize = 64;
/// Pause before the next attempt to start a program that could not be started.
const RETRY: Duration = Duration::from_secs(1);
/// How often the loop looks whether enough descriptors have been closed.
const BACKLOG_CHECK: Duration = Duration::from_millis(10);

/// What the supervisor starts, and its bounds.
#[derive(Clone, Debug)]
pub struct Config {
    /// The executable. `/proc/self/exe` is that of the supervisor, also after its file was replaced.
    pub program: PathBuf,
    /// The executable of upgrades, at SIGUSR2; `None`: there are none.
    pub upgrade: Option<PathBuf>,
    /// The arguments, of which the first is the name.
    pub argv: Vec<OsString>,
    /// Bounds of the store.
    pub limits: Limits,
    /// The worker process is killed if it has sent no `Alive` for this time.
    pub alive_limit: Duration,
    /// It is killed, too, if it has not sent the first `Alive` within this time.
    pub start_limit: Duration,
    /// What deaths lead to.
    pub policy: RestartPolicy,
}

impl Config {
    /// With 65 536 entries, 64 MiB, half of the descriptors that this process can have, an `Alive` every
    /// 10 s, and the first within 60 s.
    pub fn new(program: impl Into<PathBuf>, argv: Vec<OsString>) -> Config {
        let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(1 << 20) / 2;
        Config {
            program: program.into(),
            upgrade: None,
            argv,
            limits: Limits {
                entries: 1 << 16,
                bytes: 64 << 20,
                descriptors,
            },
            alive_limit: Duration::from_secs(10),
            start_limit: Duration::from_secs(60),
            policy: RestartPolicy::default(),
        }
    }
}

/// Keeps a worker process running.
#[derive(Debug)]
pub struct Supervisor {
    config: Config,
    store: Store<OwnedFd>,
    closer: Closer,
    signals: Signals,
    service_manager: ServiceManager,
    restarts: Restarts,
    /// A worker process has notified READY=1.
    ready: bool,
    upgrade: Option<Upgrade>,
    /// An upgrade begins when the worker process is ready.
    wants_upgrade: bool,
    /// That of the last upgrade, which successors run too.
    executable: Option<Executable>,
    buffer: Vec<u8>,
}

/// What there is to do.
#[derive(Debug, Default)]
struct Came {
    /// The worker process has ended.
    ended: bool,
    /// Its socket is ready.
    readable: bool,
    /// The same of the process that is to take over.
    upgrade_ended: bool,
    upgrade_readable: bool,
}

impl Supervisor {
    /// Catches signals from this call on, and starts threads.
    ///
    /// # Errors
    /// The system has no descriptors or threads left.
    pub fn new(config: Config) -> io::Result<Supervisor> {
        Ok(Supervisor {
            store: Store::new(config.limits),
            closer: Closer::start()?,
            signals: Signals::catch()?,
            service_manager: ServiceManager::from_environment()?,
            restarts: Restarts::default(),
            ready: false,
            upgrade: None,
            wants_upgrade: false,
            executable: None,
            buffer: vec![0; MAX_DATAGRAM],
            config,
        })
    }

    /// Adds an entry before the first start, such as a socket that the service manager has passed.
    ///
    /// # Errors
    /// The store is full.
    pub fn put(&mut self, key: &str, bytes: &[u8], fds: Vec<OwnedFd>) -> Result<(), Error> {
        self.store
            .apply(&[Operation::Put(key, bytes, fds.len())], fds, |_| Ok(()))
    }

    /// Runs until a worker process ends on purpose, by SIGTERM or SIGINT, or before one was ready. Returns
    /// its exit code, 128 and the number of the signal that ended it, or 0 if none runs. Call it on the main
    /// thread: the kernel kills a worker process when the thread that started it ends.
    ///
    /// # Errors
    /// The first worker process cannot be started, or a system call fails. No worker process runs.
    pub fn run(mut self) -> io::Result<i32> {
        loop {
            let executable = self.executable.as_ref().map(Executable::path);
            let program = self.command(executable.as_ref().unwrap_or(&self.config.program));
            let pause = match Worker::start(program, &self.store) {
                Ok(mut worker) => {
                    let status = self.attend(&mut worker)?;
                    if worker.ending || !self.ready {
                        info!("the worker process has ended, {status}: no successor is started");
                        let signal = status.signal().unwrap_or_default();
                        // It had been told to end, and had not caught the signal yet.
                        let is_stopped = worker.ending && signal == Signal::TERM.as_raw();
                        let otherwise = if is_stopped { 0 } else { 128 + signal };
                        return Ok(status.code().unwrap_or(otherwise));
                    }
                    error!("the worker process died, {status}: a successor takes over");
                    self.remove_handover();
                    match worker.ended_for_other_reasons(status) {
                        true if worker.ready => Duration::ZERO,
                        true => RETRY,
                        false => self.prepare_successor(),
                    }
                }
                Err(error) if !self.ready => return Err(error),
                Err(error) => {
                    error!("cannot start a worker process, next attempt in {RETRY:?}: {error}");
                    RETRY
                }
            };
            let start = Instant::now() + pause;
            while Instant::now() < start {
                self.wait(None, Some(start))?;
                let signals = self.signals.take();
                if signals.contains(&Signal::TERM) || signals.contains(&Signal::INT) {
                    return Ok(0);
                }
            }
        }
    }

    fn command(&self, executable: &Path) -> Command {
        let mut program = Command::new(executable);
        if let Some((name, arguments)) = self.config.argv.split_first() {
            program.arg0(name).args(arguments);
        }
        program
    }

    /// Serves a worker process, or the one that takes over from it, until it has ended.
    fn attend(&mut self, worker: &mut Worker) -> io::Result<ExitStatus> {
        match self.ready {
            true => info!("started worker process {}", worker.child.id()),
            false => debug!("started worker process {}", worker.child.id()),
        }
        loop {
            let id = worker.child.id();
            let deadline = worker.deadline(self.config.start_limit, self.config.alive_limit);
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                error!("worker process {id} makes no progress and is killed");
                worker.kill();
            }
            if self.wants_upgrade && (worker.ready || worker.ending) {
                self.wants_upgrade = false;
                self.begin_upgrade(worker);
            }
            let came = self.wait(Some(worker), deadline)?;
            for signal in self.signals.take() {
                if signal == Signal::USR2 {
                    self.wants_upgrade = true;
                } else {
                    // SIGUSR1 only has the counters logged.
                    if signal != Signal::USR1 {
                        self.cancel_upgrade(worker, &format!("{signal:?} came"));
                    }
                    worker.signal(signal);
                }
            }
            if came.ended {
                self.cancel_upgrade(worker, "the worker process died");
                worker.unsent = None;
                // A process that has inherited the other end sends nothing more.
                if let Some(socket) = &worker.socket {
                    let _ = net::shutdown(socket, Shutdown::Read);
                }
                while self.receive(worker) {}
                self.closer.close(worker.socket.take());
                return worker.child.wait();
            }
            self.attend_upgrade(worker, &came);
            if came.readable && worker.unsent.is_none() {
                let _ = (0..MESSAGES_PER_TURN).all(|_| self.receive(worker));
            } else if came.readable
                && let Err(error) = worker.send_entries(&self.store)
            {
                error!("cannot send entries to worker process {id}, which is killed: {error}");
                worker.kill();
                self.closer.close(worker.socket.take());
            }
        }
    }

    /// Starts the process that is to take over.
    fn begin_upgrade(&mut self, worker: &Worker) {
        let Some(path) = self.config.upgrade.as_deref() else {
            return warn!("no upgrade: there is no executable for it");
        };
        if self.upgrade.is_some() || worker.ending {
            return warn!("no upgrade: the worker process is ending, or being replaced already");
        }
        let begin = || {
            let executable = Executable::open(path)?;
            // It gets the entries later.
            let started = Worker::start(self.command(&executable.path()), &self.store)?;
            io::Result::Ok(Upgrade::new(started, executable))
        };
        match begin() {
            Ok(upgrade) => {
                let id = upgrade.worker.child.id();
                info!("upgrade to {}: started process {id}", path.display());
                self.upgrade = Some(upgrade);
            }
            Err(error) => error!("no upgrade to {}: {error}", path.display()),
        }
    }

    /// Ends the process that was to take over, if there is one. The worker process goes on.
    fn cancel_upgrade(&mut self, worker: &mut Worker, reason: &str) {
        if let Some(upgrade) = self.upgrade.take() {
            error!("the upgrade has failed, the worker process goes on: {reason}");
            let has_given = upgrade.has_given();
            upgrade.worker.retire(&self.closer);
            if has_given {
                self.resume(worker);
            }
        }
    }

    /// Tells a worker process that has stopped to go on.
    fn resume(&mut self, worker: &mut Worker) {
        if let Err(error) = worker.resume() {
            error!("cannot resume the worker process, which is killed: {error}");
            worker.kill();
        }
    }

    /// Does what the process that is to take over needs, and makes it the worker process.
    fn attend_upgrade(&mut self, worker: &mut Worker, came: &Came) {
        let Some(upgrade) = &mut self.upgrade else {
            return;
        };
        let said = if came.upgrade_readable && upgrade.worker.unsent.is_some() {
            let sent = upgrade.worker.send_entries(&self.store);
            sent.map(|()| Said::Nothing).map_err(Error::System)
        } else if came.upgrade_readable {
            upgrade.receive(&mut self.buffer)
        } else if came.upgrade_ended {
            Err(Error::Invalid("the new process has ended"))
        } else if Instant::now() >= upgrade.until {
            Err(Error::Invalid("it takes too long"))
        } else {
            Ok(Said::Nothing)
        };
        match said {
            Ok(Said::Nothing) => {}
            Ok(Said::Waits) => worker.signal(Signal::USR2),
            Ok(Said::TakesOver) => {
                let Some(upgrade) = self.upgrade.take() else {
                    return;
                };
                std::mem::replace(worker, upgrade.worker).retire(&self.closer);
                self.executable = Some(upgrade.executable);
                self.remove_handover();
                info!("process {} has taken over", worker.child.id());
            }
            Err(error) => self.cancel_upgrade(worker, &error.to_string()),
        }
    }

    /// Removes the entries for a process that takes over.
    fn remove_handover(&mut self) {
        let remove = [Operation::Remove(HANDOVER_PREFIX)];
        // Such an operation is always possible.
        let _ = self.store.apply(&remove, Vec::new(), |_| Ok(()));
        self.closer.close(self.store.take_removed());
    }

    /// Waits for a signal, for the end of a process or for its socket, and until a time.
    fn wait(&mut self, worker: Option<&Worker>, until: Option<Instant>) -> io::Result<Came> {
        let now = Instant::now();
        let watchdog = self.service_manager.answer_watchdog(now);
        // A worker process that removes descriptors faster than they are closed waits.
        let busy = self.closer.backlog() as u64 > self.config.limits.descriptors / 2;
        let upgrade = self.upgrade.as_ref();
        let mut fds = vec![PollFd::new(&self.signals, PollFlags::IN)];
        let processes = [worker, upgrade.map(|upgrade| &upgrade.worker)];
        let added = processes.map(|worker| {
            let worker = worker?;
            fds.push(PollFd::new(&worker.process, PollFlags::IN));
            let events = match &worker.unsent {
                Some(_) => PollFlags::OUT,
                None => PollFlags::IN,
            };
            let socket = worker.socket.as_ref();
            let socket = socket.filter(|_| !busy || worker.unsent.is_some());
            fds.extend(socket.map(|socket| PollFd::new(socket, events)));
            Some((
                fds.len() - 1 - usize::from(socket.is_some()),
                socket.is_some(),
            ))
        });
        let limit = upgrade.map(|upgrade| upgrade.until);
        let times = [until, watchdog, limit, busy.then_some(now + BACKLOG_CHECK)];
        let timeout = times.into_iter().flatten().min();
        let timeout = timeout.map(|time| time.saturating_duration_since(now));
        let timeout = timeout.and_then(|time| Timespec::try_from(time).ok());
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            // It passes, and an end would take all devices along.
            Err(Errno::NOMEM) => thread::sleep(Duration::from_millis(10)),
            Err(errno) => return Err(errno.into()),
        }
        let came = |index: usize| {
            fds.get(index)
                .is_some_and(|fd: &PollFd<'_>| !fd.revents().is_empty())
        };
        let [(ended, readable), (upgrade_ended, upgrade_readable)] = added.map(|added| {
            added.map_or((false, false), |(process, has_socket)| {
                (came(process), has_socket && came(process + 1))
            })
        });
        Ok(Came {
            ended,
            readable,
            upgrade_ended,
            upgrade_readable,
        })
    }

    /// Receives and executes one message. Returns false if there is none.
    fn receive(&mut self, worker: &mut Worker) -> bool {
        let Some(socket) = &worker.socket else {
            return false;
        };
        let mut fds = Vec::new();
        let received = socket::receive(socket, &mut self.buffer, &mut fds, RecvFlags::DONTWAIT);
        let result = match received {
            Err(Errno::AGAIN) => return false,
            Err(errno) => Err(Error::System(errno.into())),
            Ok(0) => {
                self.closer.close(worker.socket.take());
                Ok(())
            }
            Ok(length) => self.execute(worker, length, &mut fds),
        };
        self.closer.close(fds);
        if let Err(error) = &result {
            let id = worker.child.id();
            error!("worker process {id} broke a rule and is killed: {error}");
            worker.kill();
            self.closer.close(worker.socket.take());
        }
        result.is_ok()
    }

    /// Executes the message in the buffer. A batch takes the descriptors.
    fn execute(
        &mut self,
        worker: &mut Worker,
        length: usize,
        fds: &mut Vec<OwnedFd>,
    ) -> Result<(), Error> {
        let operations = decode(self.buffer.get(..length).unwrap_or_default(), fds.len())?;
        match operations[..] {
            [Operation::Alive] => worker.last_alive = Some(Instant::now()),
            [Operation::Notify(text)] => {
                if text.split('\n').any(|line| line == "READY=1") {
                    self.ready = true;
                    worker.set_ready();
                }
                self.service_manager.notify(text);
            }
            [Operation::Stopping] => worker.ending = true,
            // Of a worker process that takes over from none.
            [Operation::Take | Operation::TakeOver] => {}
            [Operation::HandedOver] => {
                let upgrade = self.upgrade.as_mut();
                if !upgrade.is_some_and(|upgrade| upgrade.give(&self.store)) {
                    self.resume(worker);
                }
            }
            _ => {
                let result = self
                    .store
                    .apply(&operations, std::mem::take(fds), |writes| {
                        writes.iter().for_each(write);
                        Ok(())
                    });
                self.closer.close(self.store.take_removed());
                return result;
            }
        }
        Ok(())
    }

    /// Counts a death, and returns the pause after which a successor is started.
    fn prepare_successor(&mut self) -> Duration {
        let policy = &self.config.policy;
        let (reduce, pause) = self.restarts.record_death(policy, Instant::now());
        if reduce {
            let (count, time) = policy.reduce;
            error!("{count} deaths within {time:?}: the successor gets only listening sockets");
            self.store.retain(LISTEN_PREFIX);
            self.closer.close(self.store.take_removed());
        }
        pause
    }
}

/// Writes to a Unix stream socket without waiting. A peer that does not take all bytes would never get the
/// rest, so its connection is shut down.
fn write((value, bytes): &PendingWrite<'_, OwnedFd>) {
    let is_stream = |fd: &&OwnedFd| {
        sockopt::socket_domain(fd) == Ok(AddressFamily::UNIX)
            && sockopt::socket_type(fd) == Ok(SocketType::STREAM)
    };
    let Some(socket) = value.fds.first().filter(is_stream) else {
        warn!("the worker process asked to write to what is not a Unix stream socket");
        // If it is a socket for all that, its peer must not wait for the rest for ever.
        if let Some(fd) = value.fds.first() {
            let _ = net::shutdown(fd, Shutdown::Both);
        }
        return;
    };
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    let written = rustix::io::retry_on_intr(|| net::send(socket, bytes, flags));
    if written != Ok(bytes.len()) {
        debug!(
            "a peer took {written:?} of {} bytes and is disconnected",
            bytes.len()
        );
        let _ = net::shutdown(socket, Shutdown::Both);
    }
}
