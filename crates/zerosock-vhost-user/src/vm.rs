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

use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{Shutdown, SocketFlags, accept_with, shutdown};
use zerosock_sys::account::Account;
use zerosock_sys::notify::ThreadCount;
use zerosock_sys::{LogLimit, PeerFd, fd_passing};

use super::codec::{DecodeError, Decoder, encode_config_change};
use super::mailbox::{ConfigChange, FrontendLink, MailSender, Reply};
use super::session::{Outcome, Session, Step};
use super::stats::{Counters, FrontendFault};
use super::{DeviceCommand, DeviceModel, DevicePort, DeviceReply, FrontendSocket, VmSpec};

/// Messages of one front-end, and descriptors in them, handled before the other descriptors are polled
/// again. To examine a file on disk takes as long as the kernel needs to list all mounts.
const BUDGET: usize = 16;
/// Connections accepted before the other descriptors are polled again. Most are turned away.
const ACCEPT_BUDGET: usize = 8;
/// How long accepting pauses after no connection could be taken.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);
/// How long a front-end that has sent no message keeps another one waiting.
const SILENCE: Duration = Duration::from_secs(10);
/// How long a driver has to put the first buffer into a queue, before the log says that its memory is
/// probably not shared.
const FIRST_BUFFER: Duration = Duration::from_secs(2);
/// How long a front-end may leave a reply unread.
const REPLY_LIMIT: Duration = Duration::from_secs(10);

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
    mail: MailSender,
    counters: Arc<Counters>,
    front: Front,
    /// The next front-end: it waits until the device of the previous one is drained, or until the
    /// connected one, which has sent no message, reaches [`SILENCE`].
    next: Option<PeerFd>,
    /// Whether the control thread ends.
    ending: bool,
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

/// A front-end's connection.
pub(super) struct Connection {
    pub(super) socket: PeerFd,
    pub(super) number: u64,
    /// The events that the epoll instance watches for; `None` before the socket was added.
    pub(super) watched: Option<EventFlags>,
    /// The epoll instance, once it watches the socket.
    pub(super) epoll: Option<Arc<OwnedFd>>,
    decoder: Decoder,
    session: Session,
    /// The current reply, and how much of it is written. Nothing is read while a part of it is
    /// left, so there is never more than one.
    output: Vec<u8>,
    written: usize,
    /// Since when the socket has had no room for the rest of the reply.
    stalled_since: Option<Instant>,
    /// Sequence number of the command that the worker is to answer. Nothing is read until then.
    waiting: Option<u64>,
    /// Whether the front-end has sent a message.
    has_sent_message: bool,
    /// Since when the connection is read; `None` until the worker has answered `Connected`.
    read_since: Option<Instant>,
    driver: Driver,
}

/// The driver, for the log.
enum Driver {
    /// The queues that it needs do not run.
    Away,
    /// They run since then, and whether there is a buffer in one is not known yet.
    Began(Instant),
    Ready,
}

impl Drop for Connection {
    fn drop(&mut self) {
        // The reaper closes the socket later, perhaps after descriptors that do not close. Without
        // this, epoll would report it until then, and the front-end would not see the end.
        hang_up(&self.socket);
        if let Some(epoll) = &self.epoll {
            let _ = epoll::delete(epoll, &self.socket);
        }
    }
}

impl Connection {
    /// The events to watch for now. The end of the connection is always reported.
    pub(super) fn interest(&self) -> EventFlags {
        if self.waiting.is_some() {
            EventFlags::empty()
        } else if self.written < self.output.len() {
            EventFlags::OUT
        } else {
            EventFlags::IN
        }
    }

    /// Writes the rest of the reply. Returns false if the socket has no room for all of it.
    fn flush(&mut self) -> io::Result<bool> {
        while let Some(rest) = self
            .output
            .get(self.written..)
            .filter(|rest| !rest.is_empty())
        {
            match fd_passing::send(&self.socket, &[IoSlice::new(rest)], &[]) {
                Ok(bytes) => {
                    self.written += bytes;
                    self.stalled_since = None;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.stalled_since.get_or_insert_with(Instant::now);
                    return Ok(false);
                }
                Err(error) => return Err(error),
            }
        }
        self.output.clear();
        self.written = 0;
        Ok(true)
    }
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
            mail,
            counters,
            front: Front::Idle,
            next: None,
            ending: false,
            sequence: 0,
            connection: 0,
            warnings,
            arrivals,
            drivers,
        };
        if let Some(socket) = only {
            vm.connect(socket);
        }
        Ok(vm)
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

    /// Accepts connections. Accepting pauses if the system has no descriptor or memory for a
    /// connection, or if too many descriptors of earlier ones wait to be closed.
    pub(super) fn accept(&mut self) {
        for _ in 0..ACCEPT_BUDGET {
            let Some(listener) = &self.listener else {
                return;
            };
            if self.account.is_clogged() {
                self.warn("accepts no front-end: descriptors of earlier ones cannot be closed yet");
                return self.pause_accepting();
            }
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            match accept_with(listener, flags) {
                Ok(socket) => self.admit(PeerFd::from(socket).owned_by(&self.account)),
                Err(Errno::AGAIN) => return,
                // The front-end closed the connection before it was accepted.
                Err(Errno::CONNABORTED | Errno::INTR) => {}
                Err(error) => {
                    self.warn(&format!("cannot accept a front-end: {error}"));
                    return self.pause_accepting();
                }
            }
        }
    }

    fn pause_accepting(&mut self) {
        self.accept_paused_until = Some(Instant::now() + ACCEPT_PAUSE);
    }

    /// Connects the front-end, or lets it wait for the previous one (see [`Vm::next`]), or turns it
    /// away.
    fn admit(&mut self, socket: PeerFd) {
        if let Err(error) = fd_passing::receive_urgent_inline(&socket) {
            // The reaper closes it.
            return self.warn(&format!(
                "cannot prepare the socket of a front-end: {error}"
            ));
        }
        if let Front::Live(connection) = &self.front
            && has_hung_up(&connection.socket)
        {
            self.disconnect("the front-end hung up and another one connected");
        }
        let room = self.next.as_ref().is_none_or(has_hung_up);
        match &self.front {
            Front::Idle => self.connect(socket),
            Front::Draining(_) if room => self.next = Some(socket),
            Front::Live(connection) if room && !connection.has_sent_message => {
                self.next = Some(socket);
            }
            Front::Live(_) | Front::Draining(_) => self.turn_away(socket),
        }
    }

    fn turn_away(&mut self, socket: PeerFd) {
        self.counters.fault(FrontendFault::Busy);
        let peer = peer(&socket);
        hang_up(&socket);
        // Counted until the reaper has closed it. If the account is full, only `is_clogged` bounds
        // it.
        if let Ok(permit) = self.account.take_descriptors(1) {
            drop(socket.with_permit(permit));
        }
        self.warn(&format!(
            "a second front-end ({peer}) is turned away while one is connected"
        ));
    }

    /// When [`Vm::time_passed`] is to be called next: accepting resumes, a silent front-end gives
    /// way to another one, a reply has not been read for too long, or a driver has had the time to put
    /// a buffer into its queues.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let deadlines = [
            self.front_deadline(),
            self.driver_deadline(),
            self.accept_paused_until,
        ];
        deadlines.into_iter().flatten().min()
    }

    /// When the log is to say that the driver has put nothing into its queues.
    fn driver_deadline(&self) -> Option<Instant> {
        match &self.front {
            Front::Live(connection) => match connection.driver {
                Driver::Began(since) => Some(since + FIRST_BUFFER),
                Driver::Away | Driver::Ready => None,
            },
            Front::Idle | Front::Draining(_) => None,
        }
    }

    fn front_deadline(&self) -> Option<Instant> {
        let Front::Live(connection) = &self.front else {
            return None;
        };
        match &self.next {
            Some(_) if !connection.has_sent_message => Some(connection.read_since? + SILENCE),
            _ => Some(connection.stalled_since? + REPLY_LIMIT),
        }
    }

    /// The events to watch the listener for, if they have changed.
    pub(super) fn listener_change(&mut self) -> Option<EventFlags> {
        let watched = self.accept_paused_until.is_none();
        if std::mem::replace(&mut self.listener_watched, watched) == watched {
            return None;
        }
        Some(match watched {
            true => EventFlags::IN,
            false => EventFlags::empty(),
        })
    }

    /// Resumes accepting if it is due. Closes the connection of a front-end that has been silent
    /// for too long while another one waits, or that has not read a reply for too long. The latter
    /// may have sent its own end of the connection in a message that is not read: then the
    /// connection stays open although the front-end has exited.
    pub(super) fn time_passed(&mut self, now: Instant) {
        if self.accept_paused_until.is_some_and(|until| now >= until) {
            self.accept_paused_until = None;
        }
        if self.driver_deadline().is_some_and(|at| now >= at) {
            self.check_first_buffer();
        }
        if let Front::Live(connection) = &self.front
            && let Some(since) = connection.stalled_since
            && now >= since + REPLY_LIMIT
        {
            self.counters.fault(FrontendFault::Silent);
            return self.disconnect("the front-end does not read a reply");
        }
        let is_due = |vm: &Vm| vm.front_deadline().is_some_and(|at| now >= at);
        if is_due(self) {
            // It may have sent a message since the socket was read last.
            self.serve();
        }
        if is_due(self) {
            self.counters.fault(FrontendFault::Silent);
            self.disconnect("the front-end has sent no message, and another one waits");
        }
    }

    /// Records the first message of the connected front-end, and turns away one that waits.
    fn note_message(&mut self) {
        if let Front::Live(connection) = &mut self.front
            && !std::mem::replace(&mut connection.has_sent_message, true)
            && let Some(socket) = self.next.take()
        {
            self.turn_away(socket);
        }
    }

    fn connect(&mut self, socket: PeerFd) {
        self.counters.connection();
        self.connection += 1;
        let peer = peer(&socket);
        if let Some(suppressed) = self.arrivals.admit(Instant::now()) {
            tracing::info!(vm = %self.name, %peer, suppressed, "front-end connected");
        }
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
            has_sent_message: false,
            read_since: None,
            driver: Driver::Away,
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
        self.ending = true;
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
                } else if let DeviceReply::Failed(reason) = reply {
                    // The answer to `Connected`.
                    self.counters.fault(FrontendFault::Worker);
                    self.warn(&format!("the worker refuses the front-end: {reason}"));
                    self.disconnect("the worker refuses the front-end");
                } else {
                    connection.read_since = Some(Instant::now());
                }
            }
            Front::Draining(last) if *last == sequence => {
                // A worker that has ended before does not answer, and has released all devices.
                if let DeviceReply::Failed(reason) = reply
                    && !self.ending
                {
                    self.warn(&format!(
                        "the worker failed to release the device: {reason}"
                    ));
                }
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
        while handled < BUDGET {
            let Front::Live(connection) = &mut self.front else {
                return;
            };
            if connection.waiting.is_some() {
                return;
            }
            match connection.flush() {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => return self.disconnect(&format!("cannot write a reply: {error}")),
            }
            match connection.decoder.read(&connection.socket, &self.account) {
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
        if let Some(refusal) = refusal {
            self.counters.fault(refusal.fault);
            self.warn(&format!("refused {}", refusal.text));
        }
        match step {
            Step::Next => {}
            Step::Reply(bytes) => {
                if let Front::Live(connection) = &mut self.front {
                    connection.output = bytes;
                    if let Err(error) = connection.flush() {
                        self.disconnect(&format!("cannot write a reply: {error}"));
                    }
                }
            }
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

    /// Logs that the driver has become ready, or has gone.
    fn note_driver(&mut self) {
        let Front::Live(connection) = &mut self.front else {
            return;
        };
        let session = &connection.session;
        match (&connection.driver, session.is_driver_ready()) {
            (Driver::Away, true) => {
                connection.driver = Driver::Began(Instant::now());
                if let Some(suppressed) = self.drivers.admit(Instant::now()) {
                    let features = session.accepted_features();
                    let queues = session.running_queues();
                    tracing::info!(
                        vm = %self.name, features, queues, suppressed, "driver ready"
                    );
                }
            }
            (Driver::Began(_) | Driver::Ready, false) => {
                connection.driver = Driver::Away;
                self.log_driver_gone("a queue was stopped, or the device was reset");
            }
            _ => {}
        }
    }

    fn log_driver_gone(&self, reason: &str) {
        if let Some(suppressed) = self.drivers.admit(Instant::now()) {
            tracing::info!(vm = %self.name, reason, suppressed, "driver gone");
        }
    }

    /// Warns if the driver has put nothing into its queues.
    fn check_first_buffer(&mut self) {
        let Front::Live(connection) = &mut self.front else {
            return;
        };
        connection.driver = Driver::Ready;
        if connection.session.is_driver_silent() {
            self.warn(&format!(
                "the queues run, and there has been no buffer in them for {} s: the guest's memory is \
                 probably not shared; with QEMU add share=on to -object memory-backend-file, or use \
                 memory-backend-memfd",
                FIRST_BUFFER.as_secs()
            ));
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

/// Ends both directions of a connection without waiting. The peer can still read what was sent to
/// it.
fn hang_up(socket: &PeerFd) {
    // Fails only if the connection has ended.
    let _ = shutdown(socket, Shutdown::Both);
}

/// Whether the peer has closed its end or the socket has failed.
fn has_hung_up(socket: &PeerFd) -> bool {
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let mut fds = [PollFd::new(socket, PollFlags::empty())];
    let [fd] = match poll(&mut fds, Some(&now)) {
        Ok(_) => fds,
        Err(_) => return false,
    };
    fd.revents().intersects(PollFlags::HUP | PollFlags::ERR)
}

/// The peer's process and user, for the log.
fn peer(socket: &PeerFd) -> String {
    match socket_peercred(socket) {
        Ok(cred) => format!(
            "pid {}, uid {}",
            cred.pid.as_raw_nonzero(),
            cred.uid.as_raw()
        ),
        Err(_) => "unknown".into(),
    }
}

#[cfg(test)]
mod tests;
