//! One VM on the control thread: the connection of its front-end.
//!
//! ```text
//!  Idle --accept--> Live --connection ends--> Draining --worker answers Disconnected--> Idle
//! ```
//!
//! A VM without a listener begins with the connection of its only front-end, and is removed when it
//! is idle again.
//!
//! # Invariants
//!
//! - `Disconnected` is submitted once for each `Connected`.
//! - The next front-end is connected only after the worker has answered `Disconnected`.
//! - An answer of the worker counts only if its sequence number is the one awaited.

mod accept;
mod connection;
mod deadlines;
mod driver;
mod record;

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use zerosock_sys::account::Account;
use zerosock_sys::notify::ThreadCount;
use zerosock_sys::{LogLimit, PeerFd, fd_passing};

use self::connection::{Connection, Driver, Replay, Request, has_hung_up, peer};
use super::codec::{DecodeError, Decoder, encode_config_change};
use super::journal::{Journal, VmJournal};
use super::link::FrontendLink;
use super::mailbox::{ConfigChange, MailSender, Reply};
use super::session::{Outcome, Session, Step};
use super::stats::{Counters, FrontendFault};
use super::{DeviceCommand, DeviceModel, DevicePort, DeviceReply, FrontendSocket, VmSpec};

/// Messages of one front-end, and descriptors in them, handled before the other descriptors are polled
/// again. To examine a file on disk takes as long as the kernel needs to list all mounts.
const BUDGET: usize = 16;

/// See the [module](self).
pub(super) struct Vm {
    name: String,
    model: Arc<dyn DeviceModel>,
    index: usize,
    /// `None`: no further front-end can connect.
    listener: Option<PeerFd>,
    /// Until then the listener is not watched: the system had no descriptor for a connection, or
    /// too many descriptors of earlier front-ends wait to be closed.
    accept_paused_until: Option<Instant>,
    listener_watched: bool,
    max_queue_size: u16,
    sealed_memory: bool,
    account: Account,
    /// Threads that write to call descriptors of this VM's front-ends.
    threads: ThreadCount,
    port: Box<dyn DevicePort>,
    journal: Option<Box<dyn Journal>>,
    mail: MailSender,
    counters: Arc<Counters>,
    front: Front,
    /// The next front-end: it waits until the device of the previous one is drained, or until the
    /// connected one, which has sent no message, reaches [`SILENCE`].
    next: Option<PeerFd>,
    /// Sequence number of the last command.
    sequence: u64,
    /// Number of the last connection.
    connection: u64,
    /// Limits for faults of front-ends, and for connects and disconnects. They are separate so that
    /// none hides another.
    warnings: Arc<LogLimit>,
    arrivals: Arc<LogLimit>,
    /// A limit for lines about the driver, which a guest can cause without its front-end.
    drivers: Arc<LogLimit>,
}

enum Front {
    Idle,
    Live(Box<Connection>),
    /// `Disconnected` was submitted with this sequence number.
    Draining(u64),
}

impl Vm {
    pub(super) fn new(
        spec: VmSpec,
        index: usize,
        mail: MailSender,
        counters: Arc<Counters>,
        [warnings, arrivals, drivers]: [Arc<LogLimit>; 3],
    ) -> io::Result<Vm> {
        let (listener, only) = match spec.socket {
            FrontendSocket::Listener(listener) => {
                rustix::io::ioctl_fionbio(&listener, true)?;
                (Some(listener.owned_by(&spec.account)), None)
            }
            FrontendSocket::Connected(socket) => {
                socket.set_nonblocking(true)?;
                fd_passing::receive_urgent_inline(&socket)?;
                let socket = PeerFd::from(OwnedFd::from(socket));
                (None, Some(socket.owned_by(&spec.account)))
            }
        };
        let (journal, restored) = match spec.journal {
            Some(VmJournal { writer, restored }) => (Some(writer), restored),
            None => (None, None),
        };
        let mut vm = Vm {
            name: spec.name,
            model: spec.model,
            index,
            listener,
            accept_paused_until: None,
            listener_watched: true,
            max_queue_size: spec.max_queue_size,
            sealed_memory: spec.sealed_memory,
            account: spec.account,
            threads: ThreadCount::default(),
            port: spec.port,
            journal,
            mail,
            counters,
            front: Front::Idle,
            next: None,
            sequence: 0,
            connection: 0,
            warnings,
            arrivals,
            drivers,
        };
        if let Some(socket) = only {
            vm.connect(socket);
        }
        if let Some(restored) = restored {
            vm.continue_connection(restored);
        }
        Ok(vm)
    }

    /// The name for the log.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn listener(&self) -> Option<&PeerFd> {
        self.listener.as_ref()
    }

    /// Whether the VM is idle and no further front-end can connect.
    pub(super) fn is_over(&self) -> bool {
        self.listener.is_none() && self.is_idle()
    }

    /// Whether a front-end is connected and has not hung up.
    pub(super) fn has_frontend(&self) -> bool {
        match &self.front {
            Front::Live(connection) => !has_hung_up(&connection.socket),
            Front::Idle | Front::Draining(_) => false,
        }
    }

    pub(super) fn connection(&mut self) -> Option<&mut Connection> {
        match &mut self.front {
            Front::Live(connection) => Some(connection),
            Front::Idle | Front::Draining(_) => None,
        }
    }

    /// Whether there is no front-end and the worker has answered `Disconnected`.
    pub(super) fn is_idle(&self) -> bool {
        matches!(self.front, Front::Idle)
    }

    fn connect(&mut self, socket: PeerFd) {
        self.counters.connection();
        self.connection += 1;
        let peer = peer(&socket);
        if let Some(suppressed) = self.arrivals.admit(Instant::now()) {
            tracing::info!(vm = %self.name, %peer, suppressed, "front-end connected");
        }
        let next_number = self.journal.as_mut().map(|it| it.connected(socket.as_fd()));
        self.begin(socket, next_number, Replay::default());
    }

    /// Begins a session with the front-end, with these requests.
    fn begin(&mut self, socket: PeerFd, next_number: Option<u64>, replay: Replay) {
        let link = FrontendLink::new(self.mail.clone(), self.index, self.connection);
        let waiting = self.submit(DeviceCommand::Connected { link });
        let mut session = Session::new(
            Arc::clone(&self.model),
            self.max_queue_size,
            self.account.clone(),
            &self.threads,
        );
        if self.sealed_memory {
            session.require_sealed_memory();
        }
        self.front = Front::Live(Box::new(Connection {
            socket,
            number: self.connection,
            watched: None,
            epoll: None,
            decoder: Decoder::new(),
            session,
            output: Vec::new(),
            written: 0,
            stalled_since: None,
            waiting: Some(waiting),
            has_sent_message: !replay.requests.is_empty(),
            read_since: None,
            driver: Driver::Away,
            next_number,
            request: Request::default(),
            replay,
        }));
    }

    /// Closes the connection, if there is one, and submits `Disconnected`.
    pub(super) fn disconnect(&mut self, reason: &str) {
        if let Front::Live(connection) = &mut self.front {
            if !matches!(connection.driver, Driver::Away) {
                connection.driver = Driver::Away;
                self.log_driver_gone(reason);
            }
            if let Some(suppressed) = self.arrivals.admit(Instant::now()) {
                tracing::info!(
                    vm = %self.name, reason, suppressed, "front-end disconnected"
                );
            }
            // Drop the session first: its files must be closed before the worker answers.
            self.front = Front::Idle;
            if let Some(journal) = &mut self.journal {
                journal.disconnected();
            }
            self.front = Front::Draining(self.submit(DeviceCommand::Disconnected));
        }
    }

    /// As `disconnect`; the VM is removed afterwards.
    pub(super) fn close(&mut self, reason: &str) {
        self.listener = None;
        self.next = None;
        self.disconnect(reason);
    }

    /// As `disconnect`, without a next front-end.
    pub(super) fn end(&mut self) {
        (self.accept_paused_until, self.listener_watched) = (None, true);
        self.next = None;
        self.disconnect("the device is shut down");
    }

    /// Handles readiness of the connection; `hung_up`: it has ended.
    pub(super) fn handle_ready(&mut self, hung_up: bool) {
        match &self.front {
            // Nothing is read while a command is under way; unread messages are dropped.
            Front::Live(connection) if connection.waiting.is_some() => {
                if hung_up {
                    self.disconnect("the front-end hung up while a request was carried out");
                }
            }
            Front::Live(_) => self.serve(),
            Front::Idle | Front::Draining(_) => {}
        }
    }

    /// Handles a worker's answer to the command with this sequence number.
    pub(super) fn handle_reply(&mut self, sequence: u64, reply: DeviceReply) {
        match &mut self.front {
            Front::Live(connection) if connection.waiting == Some(sequence) => {
                connection.waiting = None;
                if connection.session.is_waiting() {
                    let turn = connection.session.handle_reply(reply);
                    self.apply(turn);
                    self.repeat_requests();
                } else if let DeviceReply::Failed(reason) = reply {
                    // The answer to `Connected`.
                    self.counters.fault(FrontendFault::Worker);
                    self.warn(&format!("the worker refuses the front-end: {reason}"));
                    self.disconnect("the worker refuses the front-end");
                } else {
                    connection.read_since = Some(Instant::now());
                    self.repeat_requests();
                }
            }
            Front::Draining(last) if *last == sequence => {
                // Failed: the worker ended before it answered, as in a shutdown, and has released all devices.
                self.front = Front::Idle;
                if let Some(socket) = self.next.take() {
                    self.connect(socket);
                }
            }
            // The answer to a command of an earlier connection.
            Front::Live(_) | Front::Draining(_) | Front::Idle => {}
        }
    }

    /// Closes the connection with this number at the worker's request.
    pub(super) fn handle_close(&mut self, number: u64, reason: &str) {
        if let Front::Live(connection) = &self.front
            && connection.number == number
        {
            self.disconnect(reason);
        }
    }

    /// Changes the configuration space of the connection with this number at the worker's request.
    pub(super) fn change_config(&mut self, number: u64, change: &ConfigChange) {
        let Front::Live(connection) = &mut self.front else {
            return;
        };
        if connection.number != number {
            return;
        }
        let channel = connection.session.change_config(change);
        if let Some(channel) = channel {
            // A front-end that does not read its channel, or has closed it, learns of the change
            // when it reads the configuration space.
            let _ = fd_passing::send(channel, &[IoSlice::new(&encode_config_change())], &[]);
        }
    }

    /// Reads and handles messages until none is left, a command is under way, or the budget is used
    /// up.
    fn serve(&mut self) {
        let mut handled = 0;
        loop {
            let Front::Live(connection) = &mut self.front else {
                return;
            };
            // No event follows for requests that are repeated.
            let has_budget = handled < BUDGET || !connection.replay.requests.is_empty();
            if connection.waiting.is_some() || !has_budget {
                return;
            }
            match connection.flush() {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => return self.disconnect(&format!("cannot write a reply: {error}")),
            }
            match connection.receive(self.journal.as_deref_mut(), &self.account) {
                Ok(None) => return,
                Ok(Some(message)) => {
                    handled += 1 + message.fds.len();
                    self.counters.message();
                    tracing::trace!(vm = %self.name, request = message.name(), "message");
                    let turn = connection.session.handle_message(message);
                    self.note_message();
                    self.apply(turn);
                }
                Err(DecodeError::End) => {
                    return self.disconnect("the front-end closed the connection");
                }
                Err(error) => {
                    let text = error.to_string();
                    if let Some(fault) = error.fault() {
                        self.counters.fault(fault);
                        self.warn(&text);
                    }
                    return self.disconnect(&text);
                }
            }
        }
    }

    fn apply(&mut self, turn: Outcome) {
        let Outcome { step, refusal } = turn;
        let is_refused = refusal.is_some();
        if let Some(refusal) = refusal {
            self.counters.fault(refusal.fault);
            self.warn(&format!("refused {}", refusal.text));
        }
        match step {
            Step::Next => self.record(is_refused, &[]),
            Step::Reply(bytes) if self.journal.is_some() => self.record(is_refused, &bytes),
            Step::Reply(bytes) => self.reply(bytes),
            Step::Command(command) => {
                let sequence = self.submit(command);
                if let Front::Live(connection) = &mut self.front {
                    connection.waiting = Some(sequence);
                }
            }
            Step::Close => self.disconnect("a request with a reply of its own failed"),
        }
        self.note_driver();
    }

    /// Writes a reply.
    fn reply(&mut self, bytes: Vec<u8>) {
        if let Front::Live(connection) = &mut self.front {
            connection.output = bytes;
            if let Err(error) = connection.flush() {
                self.disconnect(&format!("cannot write a reply: {error}"));
            }
        }
    }

    fn submit(&mut self, command: DeviceCommand) -> u64 {
        self.sequence += 1;
        tracing::debug!(vm = %self.name, command = command.name(), "to the worker");
        let reply = Reply::new(self.mail.clone(), self.index, self.sequence);
        self.port.submit(command, reply);
        self.sequence
    }

    /// Logs a fault of the front-end, subject to the limit.
    fn warn(&mut self, text: &str) {
        if let Some(suppressed) = self.warnings.admit(Instant::now()) {
            tracing::warn!(vm = %self.name, suppressed, "{text}");
        }
    }
}

#[cfg(fuzzing)]
pub mod fuzz;
#[cfg(test)]
mod record_tests;
#[cfg(any(test, fuzzing))]
mod test_lab;
#[cfg(test)]
mod tests;
