//! Associations of datagrams on a worker.

use std::os::fd::OwnedFd;

use rustix::io::Errno;
use zerosock_proto::Instant;
use zerosock_sys::mmsg::KernelAddress;
use zerosock_virtio::poller::{Interest, Poller, Token};
use zerosock_virtio::worker::WorkerMessage;

use super::log::log_association;
use super::{ASSOCIATION, Context, Message, RelayDevice, SENDER};
use crate::associations::AssociationId;
use crate::connector::{ConnectError, Connected, PendingConnect};
use crate::relay::associations::{
    self, Associations, Ended, OpenError, Opener, SenderAssociation, TurnCounts,
};
use crate::relay::counters::WorkerCounters;
use crate::relay::joined::Joined;
use crate::relay::open::Opened;
use crate::relay::pair::SocketStage;
use crate::relay::plan::RelayPlan;
use crate::relay::socket::Socket;
use crate::relay::store::Store;
use crate::sockmap::Directions;
use crate::target::Target;

/// Opens the sockets of associations.
struct Targets<'a> {
    plan: &'a RelayPlan,
    counters: &'a WorkerCounters,
    own: &'a zerosock_virtio::mailbox::Sender<WorkerMessage<RelayDevice>>,
    device: u32,
    poller: &'a Poller,
}

impl Targets<'_> {
    fn register(&self, socket: &Socket, key: u32) -> std::io::Result<()> {
        let token = Token {
            device: self.device,
            kind: ASSOCIATION,
            key,
        };
        self.poller.add(socket.fd()?, token, Interest::All)
    }

    fn ask(&self, target: Target, id: AssociationId) -> Option<PendingConnect> {
        let (own, number) = (self.own.clone(), self.device);
        let answer = move |result| {
            let message = Message::Associated { id, result };
            let _ = own.send(WorkerMessage::Device { number, message });
        };
        self.plan.ask(target, Box::new(answer))
    }

    /// Gives an association its socket. The error is why it cannot have it.
    fn opened(
        &self,
        associations: &mut Associations,
        id: AssociationId,
        connected: Connected,
    ) -> Result<(), String> {
        let destination = self.plan.destinations[1].as_ref().ok_or("no target")?;
        let adopted = destination.adopt(connected.socket);
        let (socket, _) = adopted.map_err(|errno| errno.to_string())?;
        let Some(association) = associations.connected(id, socket) else {
            return Ok(());
        };
        association.answered(connected.address, connected.has_alternative);
        let registered = self.register(association.socket(), id.key);
        registered.map_err(|error| error.to_string())
    }

    fn count(&self, done: &TurnCounts) {
        self.counters.add_bytes([0; 2], done.bytes);
        self.counters.dropped.add(done.dropped);
        self.counters.refused.add(done.refused);
    }

    fn end_association(
        &self,
        mut association: SenderAssociation,
        reason: &dyn std::fmt::Display,
        now: Instant,
    ) {
        association.dropped += association.unsent();
        self.counters.dropped.add(association.unsent());
        log_association(self.plan, &association, now, reason);
        let socket = association.socket();
        if socket.carries_rights()
            && let Ok(fd) = socket.fd()
        {
            self.poller.remove(fd);
        }
        self.counters.ended.add(1);
        self.plan.dismiss();
    }
}

impl Opener for Targets<'_> {
    fn open(
        &mut self,
        id: AssociationId,
        source: &KernelAddress,
    ) -> Result<associations::AssociationSocket, OpenError> {
        if !self.plan.admit() {
            return Err(OpenError::Full);
        }
        let destination = self.plan.destinations[1].as_ref();
        let opened = match destination.ok_or(Errno::INVAL).and_then(|to| to.open()) {
            Ok(Opened::Socket(socket, stage)) => self
                .register(&socket, id.key)
                .map(|()| (socket, stage, None)),
            Ok(Opened::Ask(target)) => match self.ask(target, id) {
                None => Err(Errno::HOSTUNREACH.into()),
                asked => Ok((
                    Socket::absent(self.plan.kind(1)),
                    SocketStage::Absent,
                    asked,
                )),
            },
            Err(errno) => Err(errno.into()),
        };
        let error = match opened {
            Ok(opened) => {
                self.counters.opened.add(1);
                return Ok(opened);
            }
            Err(error) => error,
        };
        tracing::debug!(%source, "cannot open a socket to the target: {error}");
        self.plan.dismiss();
        // The last one: the limit on epoll watches.
        if let Some(Errno::MFILE | Errno::NFILE | Errno::NOSPC) = Errno::from_io_error(&error) {
            return Err(OpenError::Full);
        }
        self.counters.unreachable.add(1);
        Err(OpenError::Unreachable)
    }

    fn end(&mut self, association: SenderAssociation, reason: Ended, now: Instant) {
        match reason {
            Ended::Closed => {}
            Ended::Failed(_) => self.counters.failed.add(1),
            Ended::Refused(address) => {
                self.counters.failed.add(1);
                self.plan.refused(address);
            }
            Ended::Idle => self.counters.idle.add(1),
            Ended::Replaced => self.counters.replaced.add(1),
        }
        self.end_association(association, &reason, now);
    }

    fn join(&mut self, sockets: [OwnedFd; 2], key: u32) -> Result<Joined, [OwnedFd; 2]> {
        let Some(map) = &self.plan.config.sockmap else {
            return Err(sockets);
        };
        let token = Token {
            device: self.device,
            kind: SENDER,
            key,
        };
        if self.poller.add(&sockets[0], token, Interest::End).is_err() {
            return Err(sockets);
        }
        match Joined::new(map, sockets, Directions::Both) {
            Ok(joined) => {
                self.counters.joined.add(1);
                Ok(joined)
            }
            Err(refused) => {
                self.plan.say_refusal(&refused.error);
                Err(refused.sockets)
            }
        }
    }

    fn watch(&mut self, joined: &mut Joined, key: u32) {
        let tokens = [SENDER, ASSOCIATION].map(|kind| Token {
            device: self.device,
            kind,
            key,
        });
        joined.watch(self.poller, tokens, false);
    }
}

impl RelayDevice {
    /// The associations, with what opens their sockets.
    fn associations<'a>(
        &'a mut self,
        cx: &Context<'a>,
    ) -> Option<(&'a mut Associations, &'a mut Store, Targets<'a>)> {
        let targets = Targets {
            plan: &self.plan,
            counters: &self.counters,
            own: &self.own,
            device: self.addr.number,
            poller: cx.poller,
        };
        Some((self.associations.as_mut()?, &mut self.store, targets))
    }

    /// Relays datagrams, within a budget. Returns whether there is more to do.
    pub(super) fn run_associations(&mut self, cx: &mut Context<'_>) -> bool {
        let Some((associations, store, mut targets)) = self.associations(cx) else {
            return false;
        };
        let done = associations.run(store, &mut targets, cx.now);
        targets.count(&done);
        done.more
    }

    /// The connector has answered for an association.
    pub(super) fn on_associated(
        &mut self,
        id: AssociationId,
        result: Result<Connected, ConnectError>,
        cx: &mut Context<'_>,
    ) {
        let Some((associations, _, targets)) = self.associations(cx) else {
            return;
        };
        let opened = result.map_err(|error| error.to_string());
        let opened = opened.and_then(|it| targets.opened(associations, id, it));
        if let Err(reason) = opened
            && let Some(association) = associations.failed(id)
        {
            targets.counters.unreachable.add(1);
            targets.end_association(association, &reason, cx.now);
        }
    }

    /// Ends all associations.
    pub(super) fn end_associations(&mut self, cx: &mut Context<'_>) {
        let Some((associations, _, targets)) = self.associations(cx) else {
            return;
        };
        let mut done = TurnCounts::default();
        let all = associations.drain(&mut done);
        targets.count(&done);
        for association in all {
            targets.end_association(association, &"stopped", cx.now);
        }
    }
}
