//! Which front-end is connected: accepting, waiting and turning away.

use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use zerosock_sys::{PeerFd, fd_passing};

use super::connection::{hang_up, has_hung_up, peer};
use super::{Front, Vm};
use crate::stats::FrontendFault;

/// Connections accepted before the other descriptors are polled again. Most are turned away.
const ACCEPT_BUDGET: usize = 8;
/// How long accepting pauses after no connection could be taken.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);

impl Vm {
    /// Accepts connections. Accepting pauses if the system has no descriptor or memory for a
    /// connection, or if too many descriptors of earlier ones wait to be closed.
    pub(in super::super) fn accept(&mut self) {
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

    /// The events to watch the listener for, if they have changed.
    pub(in super::super) fn listener_change(&mut self) -> Option<EventFlags> {
        let watched = self.accept_paused_until.is_none();
        if std::mem::replace(&mut self.listener_watched, watched) == watched {
            return None;
        }
        Some(match watched {
            true => EventFlags::IN,
            false => EventFlags::empty(),
        })
    }

    /// Records the first message of the connected front-end, and turns away one that waits.
    pub(super) fn note_message(&mut self) {
        if let Front::Live(connection) = &mut self.front
            && !std::mem::replace(&mut connection.has_sent_message, true)
            && let Some(socket) = self.next.take()
        {
            self.turn_away(socket);
        }
    }
}
