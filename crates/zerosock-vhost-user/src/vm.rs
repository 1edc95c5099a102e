//! One VM on the control thread: its front-end's connection, and who may connect when.
//!
//! ```text
//!  Idle --accept--> Live --end of connection--> Draining --worker let go--> Idle
//! ```
//!
//! A VM without a listener begins with its only front-end's connection, and is over when it is
//! idle again.
//!
//! What must hold: `Disconnected` is submitted once for each `Connected`; the next front-end is
//! let in only when the worker has answered it; of the answers of a worker, only the one that is
//! waited for counts.

use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{SocketFlags, accept_with};
use zerosock_sys::account::Account;
use zerosock_sys::notify::ThreadCount;
use zerosock_sys::{PeerFd, fd_passing};

use super::codec::{DecodeError, Decoder};
use super::log_limit::LogLimit;
use super::mailbox::{FrontendLink, MailSender, Reply};
use super::session::{Session, Step, Turn};
use super::stats::{Counters, Fault};
use super::{DeviceCommand, DeviceModel, DevicePort, DeviceReply, FrontendSocket, VmSpec};

/// Messages of one front-end that are handled before others get their turn.
const BUDGET: usize = 16;
/// Connections that are accepted, mostly to be turned away, before others get their turn.
const ACCEPT_BUDGET: usize = 8;
/// How long the listener rests when no connection can be taken.
const ACCEPT_REST: Duration = Duration::from_millis(200);
/// How long a front-end that has sent no message keeps another one waiting.
const SILENCE: Duration = Duration::from_secs(10);
/// How long a front-end may leave a reply in the socket.
const REPLY_LIMIT: Duration = Duration::from_secs(10);

/// See the module.
pub(super) struct Vm {
    name: String,
    model: Arc<dyn DeviceModel>,
    index: usize,
    /// `None`: nobody comes after the front-end that is there.
    listener: Option<PeerFd>,
    /// The listener is not watched until then: the system had no descriptor for a connection, or too
    /// many of its front-ends' wait to be closed.
    rest_until: Option<Instant>,
    listener_watched: bool,
    max_queue_size: u16,
    sealed_memory: bool,
    account: Account,
    /// Threads that write to call descriptors of its front-ends.
    threads: ThreadCount,
    port: Box<dyn DevicePort>,
    mail: MailSender,
    counters: Arc<Counters>,
    front: Front,
    /// A front-end that came before the last one's end was known, or over with, or that waits for
    /// the first message of a silent one.
    next: Option<PeerFd>,
    /// Number of the last command.
    sequence: u64,
    /// Number of the last connection.
    connection: u64,
    /// For what front-ends do wrong, and for their coming and going: each has a limit of its own,
    /// so that neither hides the other.
    warnings: Arc<LogLimit>,
    arrivals: Arc<LogLimit>,
}

enum Front {
    Idle,
    Live(Box<Connection>),
    /// `Disconnected` was submitted as the command of this number.
    Draining(u64),
}

/// A front-end's connection.
pub(super) struct Connection {
    pub(super) socket: PeerFd,
    pub(super) number: u64,
    /// What the epoll instance has been told to watch for, if it has been told.
    pub(super) watched: Option<EventFlags>,
    /// The epoll instance, once it watches the socket.
    pub(super) epoll: Option<Arc<OwnedFd>>,
    decoder: Decoder,
    session: Session,
    /// A reply, and how much of it is written. While there is some, nothing is read: so there is
    /// never more than one.
    output: Vec<u8>,
    written: usize,
    /// Since when the socket takes no more of the reply.
    stalled_since: Option<Instant>,
    /// The command whose answer is awaited. Until then nothing is read.
    waiting: Option<u64>,
    /// It has sent a message.
    has_spoken: bool,
    /// Since when it is read; `None` while the worker has not let it in.
    read_since: Option<Instant>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        // The reaper closes the socket later, which until then would be reported again and again.
        if let Some(epoll) = &self.epoll {
            let _ = epoll::delete(epoll, &self.socket);
        }
    }
}

impl Connection {
    /// What is to be watched for now. The end of the connection is always reported.
    pub(super) fn interest(&self) -> EventFlags {
        if self.waiting.is_some() {
            EventFlags::empty()
        } else if self.written < self.output.len() {
            EventFlags::OUT
        } else {
            EventFlags::IN
        }
    }

    /// Writes what is left of the reply. False: the socket takes no more now.
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
        [warnings, arrivals]: [Arc<LogLimit>; 2],
    ) -> io::Result<Vm> {
        let (listener, only) = match spec.socket {
            FrontendSocket::Listener(listener) => {
                rustix::io::ioctl_fionbio(&listener, true)?;
                (Some(listener.owned_by(&spec.account)), None)
            }
            FrontendSocket::Connected(socket) => {
                socket.set_nonblocking(true)?;
                let socket = PeerFd::from(OwnedFd::from(socket));
                (None, Some(socket.owned_by(&spec.account)))
            }
        };
        let mut vm = Vm {
            name: spec.name,
            model: spec.model,
            index,
            listener,
            rest_until: None,
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
            sequence: 0,
            connection: 0,
            warnings,
            arrivals,
        };
        if let Some(socket) = only {
            vm.connect(socket);
        }
        Ok(vm)
    }

    pub(super) fn listener(&self) -> Option<&PeerFd> {
        self.listener.as_ref()
    }

    /// Idle, and nobody will come any more.
    pub(super) fn is_over(&self) -> bool {
        self.listener.is_none() && self.is_idle()
    }

    /// Whether a front-end is connected that has not gone, noticed or not.
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

    /// No front-end, and the worker knows it.
    pub(super) fn is_idle(&self) -> bool {
        matches!(self.front, Front::Idle)
    }

    /// Takes connections from the listener. If the system has no descriptor or memory for one, or too
    /// many descriptors of earlier ones wait to be closed, the listener rests.
    pub(super) fn accept(&mut self) {
        for _ in 0..ACCEPT_BUDGET {
            let Some(listener) = &self.listener else {
                return;
            };
            if self.account.is_clogged() {
                self.warn("takes no front-end: descriptors of earlier ones cannot be closed");
                return self.rest();
            }
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            match accept_with(listener, flags) {
                Ok(socket) => self.admit(PeerFd::from(socket).owned_by(&self.account)),
                Err(Errno::AGAIN) => return,
                // A front-end that gave up before it was accepted.
                Err(Errno::CONNABORTED | Errno::INTR) => {}
                Err(error) => {
                    self.warn(&format!("cannot accept a front-end: {error}"));
                    return self.rest();
                }
            }
        }
    }

    fn rest(&mut self) {
        self.rest_until = Some(Instant::now() + ACCEPT_REST);
    }

    /// Lets a front-end in, makes it wait for the end of a dead one or for a silent one to speak,
    /// or turns it away.
    fn admit(&mut self, socket: PeerFd) {
        if let Front::Live(connection) = &self.front
            && has_hung_up(&connection.socket)
        {
            self.disconnect("the front-end has gone and another one came");
        }
        let room = self.next.as_ref().is_none_or(has_hung_up);
        match &self.front {
            Front::Idle => self.connect(socket),
            Front::Draining(_) if room => self.next = Some(socket),
            Front::Live(connection) if room && !connection.has_spoken => {
                self.next = Some(socket);
            }
            Front::Live(_) | Front::Draining(_) => self.turn_away(socket),
        }
    }

    fn turn_away(&mut self, socket: PeerFd) {
        self.counters.fault(Fault::Busy);
        let peer = peer(&socket);
        // Until it is closed. One that finds no room is bounded by `is_clogged` alone.
        if let Ok(permit) = self.account.take_descriptors(1) {
            drop(socket.with_permit(permit));
        }
        self.warn(&format!(
            "a second front-end ({peer}) is turned away while one is connected"
        ));
    }

    /// When [`Vm::time_passed`] has something to do: another front-end waits for the end of a
    /// silent one, or a reply is not taken.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let of_front = self.front_deadline();
        of_front.into_iter().chain(self.rest_until).min()
    }

    fn front_deadline(&self) -> Option<Instant> {
        let Front::Live(connection) = &self.front else {
            return None;
        };
        match &self.next {
            Some(_) if !connection.has_spoken => Some(connection.read_since? + SILENCE),
            _ => Some(connection.stalled_since? + REPLY_LIMIT),
        }
    }

    /// What the listener is to be watched for from now on, if that has changed.
    pub(super) fn listener_change(&mut self) -> Option<EventFlags> {
        let watched = self.rest_until.is_none();
        if std::mem::replace(&mut self.listener_watched, watched) == watched {
            return None;
        }
        Some(match watched {
            true => EventFlags::IN,
            false => EventFlags::empty(),
        })
    }

    /// Ends the connection of a front-end that has been silent for too long while another waits, or
    /// that has not taken a reply for too long: it may have gone and have left its own end of the
    /// connection in a message behind, which nothing reads and which keeps the connection open.
    pub(super) fn time_passed(&mut self, now: Instant) {
        if self.rest_until.is_some_and(|until| now >= until) {
            self.rest_until = None;
        }
        if let Front::Live(connection) = &self.front
            && let Some(since) = connection.stalled_since
            && now >= since + REPLY_LIMIT
        {
            self.counters.fault(Fault::Silent);
            return self.disconnect("the front-end takes no reply");
        }
        let is_due = |vm: &Vm| vm.front_deadline().is_some_and(|at| now >= at);
        if is_due(self) {
            // It may have spoken since it was read last.
            self.serve();
        }
        if is_due(self) {
            self.counters.fault(Fault::Silent);
            self.disconnect("the front-end has sent no message, and another one waits");
        }
    }

    /// The front-end that is connected has sent its first message.
    fn note_message(&mut self) {
        if let Front::Live(connection) = &mut self.front
            && !std::mem::replace(&mut connection.has_spoken, true)
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
            has_spoken: false,
            read_since: None,
        }));
    }

    /// Ends the connection, if there is one, and tells the worker.
    pub(super) fn disconnect(&mut self, reason: &str) {
        if let Front::Live(_) = self.front {
            if let Some(suppressed) = self.arrivals.admit(Instant::now()) {
                tracing::info!(
                    vm = %self.name, reason, suppressed, "front-end disconnected"
                );
            }
            // The session goes first: the front-end's files are closed when the worker lets go.
            self.front = Front::Idle;
            self.front = Front::Draining(self.submit(DeviceCommand::Disconnected));
        }
    }

    /// As `disconnect`, and this VM is over.
    pub(super) fn close(&mut self, reason: &str) {
        self.listener = None;
        self.next = None;
        self.disconnect(reason);
    }

    /// As `disconnect`, and nobody comes after.
    pub(super) fn end(&mut self) {
        (self.rest_until, self.listener_watched) = (None, true);
        self.next = None;
        self.disconnect("the device is shut down");
    }

    /// The connection can be read or written, or has ended (`hung_up`).
    pub(super) fn handle_ready(&mut self, hung_up: bool) {
        match &self.front {
            // What the front-end may still have said is of no interest when it is gone.
            Front::Live(connection) if connection.waiting.is_some() => {
                if hung_up {
                    self.disconnect("the front-end is gone, while a request was carried out");
                }
            }
            Front::Live(_) => self.serve(),
            Front::Idle | Front::Draining(_) => {}
        }
    }

    /// A worker has answered a command.
    pub(super) fn handle_reply(&mut self, sequence: u64, reply: DeviceReply) {
        match &mut self.front {
            Front::Live(connection) if connection.waiting == Some(sequence) => {
                connection.waiting = None;
                if connection.session.is_waiting() {
                    let turn = connection.session.handle_reply(reply);
                    self.apply(turn);
                } else if let DeviceReply::Failed(reason) = reply {
                    // The answer to `Connected`.
                    self.counters.fault(Fault::Worker);
                    self.warn(&format!("the worker takes no front-end: {reason}"));
                    self.disconnect("the worker takes no front-end");
                } else {
                    connection.read_since = Some(Instant::now());
                }
            }
            Front::Draining(last) if *last == sequence => {
                if let DeviceReply::Failed(reason) = reply {
                    self.warn(&format!(
                        "the worker could not let go of the device: {reason}"
                    ));
                }
                self.front = Front::Idle;
                if let Some(socket) = self.next.take() {
                    self.connect(socket);
                }
            }
            // To a command of a connection that is gone.
            Front::Live(_) | Front::Draining(_) | Front::Idle => {}
        }
    }

    /// A worker wants this connection closed.
    pub(super) fn handle_close(&mut self, number: u64, reason: &str) {
        if let Front::Live(connection) = &self.front
            && connection.number == number
        {
            self.disconnect(reason);
        }
    }

    /// Handles what the front-end has sent, until there is no more, a command is under way, or it
    /// is another one's turn.
    fn serve(&mut self) {
        for _ in 0..BUDGET {
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
                    self.counters.message();
                    tracing::trace!(vm = %self.name, request = message.name(), "message");
                    let turn = connection.session.handle_message(message);
                    self.note_message();
                    self.apply(turn);
                }
                Err(DecodeError::End) => return self.disconnect("the front-end closed it"),
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

    fn apply(&mut self, turn: Turn) {
        let Turn { step, refusal } = turn;
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
            Step::Close => self.disconnect("a request that must be answered could not be"),
        }
    }

    fn submit(&mut self, command: DeviceCommand) -> u64 {
        self.sequence += 1;
        tracing::debug!(vm = %self.name, command = command.name(), "to the worker");
        let reply = Reply::new(self.mail.clone(), self.index, self.sequence);
        self.port.submit(command, reply);
        self.sequence
    }

    /// Logs what a front-end did wrong, but does not let it fill the log.
    fn warn(&mut self, text: &str) {
        if let Some(suppressed) = self.warnings.admit(Instant::now()) {
            tracing::warn!(vm = %self.name, suppressed, "{text}");
        }
    }
}

/// Whether nobody is at the other end any more.
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

/// Who is at the other end, for the log.
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
