//! The control thread with the server, and a stand-in for workers and devices: the test receives what they are sent, and
//! reports what it wants.

use std::collections::{HashMap, HashSet, VecDeque};
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::spawn;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tempfile::TempDir;
use zerosock_proto::vsock::QueuePairs;
use zerosock_proto::{Cid, Port};
use zerosock_ring::Extent;
use zerosock_sys::PeerFd;
use zerosock_sys::account::Budget;
use zerosock_sys::mailbox::Mailbox;
use zerosock_vhost_user::{Control, FrontendSocket, VmSpec};
use zerosock_virtio::device::WorkerDevice;
use zerosock_virtio::outbox::DeviceAddr;

use super::super::super::key::{GuestKey, Nonce};
use super::super::super::options::GuestEndpoints;
use super::super::super::wire::{
    Answer, AttachmentId, Reason, Refusal, Register, Request, RequestWriter, Start, Token,
    decode_answer,
};
use super::super::{GuestServer, GuestShare, TimeLimits};
use crate::control::attach::directory::Directory;
use crate::control::attach::server::Server;
use crate::control::attach::{self, AttachConfig, AttachRequest, Attached, Client};
use crate::control::config::{Reload, ReloadError};
use crate::control::registry::{DeviceRegistry, RouteEntry};
use crate::control::reload::{ConfiguredVm, ControlOrder, Order, ReloadHandler, VmStage};
use crate::device::factory::Terms;
use crate::device::guest_orders::{AttachmentKey, GuestEvent, GuestOrder, GuestReports};
use crate::device::state::sibling_message::SiblingMessage;
use crate::device::{HostAccess, WorkerMessage};
use crate::stats::Stats;

/// Longer than any step takes on a machine that is busy.
const PATIENCE: Duration = Duration::from_secs(60);
pub(super) const VM: Cid = Cid::new(3);
pub(super) const OTHER_VM: Cid = Cid::new(4);
pub(super) const CIDS: std::ops::RangeInclusive<u32> = 1000..=1099;
/// The name of the attach socket.
const ATTACH: &str = "attach";
pub(super) const HUGE: u64 = Extent::HUGE_PAGE;

pub(super) fn key() -> GuestKey {
    GuestKey::new(b"a key of this VM, shared").unwrap()
}

pub(super) fn options() -> GuestEndpoints {
    GuestEndpoints {
        most: 4,
        memory: 16 * HUGE,
        names: vec!["db".parse().unwrap(), "web".parse().unwrap()],
        ..GuestEndpoints::new(key())
    }
}

/// A request for an endpoint of one huge page, with this number of the attachment.
pub(super) fn register(id: u8) -> Register {
    Register {
        attachment: AttachmentId([id; 16]),
        endpoint: AttachRequest {
            cid: None,
            name: None,
            ports: Vec::new(),
        },
        extents: vec![Extent {
            addr: u64::from(id) * HUGE,
            len: HUGE,
        }],
    }
}

/// Of a VM with this device.
pub(super) fn share(addr: DeviceAddr) -> GuestShare {
    GuestShare {
        addr,
        host: HostAccess::None,
        buf_alloc: 1 << 16,
        groups: vec!["default".into()],
        account: Budget::unlimited().account(),
        stopped_timeout: None,
        options: Some(options()),
    }
}

pub(super) fn start() -> Start {
    Start {
        features: 0x1_0000_0000,
        queue_size: 256,
        rings: [0, 0x4000, 0x8000],
    }
}

pub(super) fn refused(reason: Reason) -> Option<Answer> {
    Some(Answer::Refused(Refusal::from(reason)))
}

/// See the module.
pub(super) struct Lab {
    control: Option<Control>,
    changes: Sender<ControlOrder>,
    workers: Vec<Mailbox<WorkerMessage>>,
    reports: GuestReports,
    pub(super) directory: Arc<Directory>,
    /// Orders to the device of the first VM, in their order.
    orders: VecDeque<GuestOrder>,
    /// Attachments of the first VM with a check that was ordered and not answered.
    checking: HashSet<AttachmentKey>,
    /// What opens the doorbell of an attachment, as the device was told.
    tokens: HashMap<AttachmentKey, Token>,
    /// Devices that were added and removed.
    pub(super) added: Vec<DeviceAddr>,
    pub(super) removed: Vec<DeviceAddr>,
    /// Routes that are kept from a worker while `holds_routes`.
    held: Vec<WorkerMessage>,
    pub(super) holds_routes: bool,
    /// Commands to devices that are not answered while `holds_commands`. Without an answer the front-end stays.
    commands: Vec<WorkerMessage>,
    pub(super) holds_commands: bool,
    pub(super) addrs: Vec<DeviceAddr>,
    dir: TempDir,
}

impl Lab {
    pub(super) fn new() -> Lab {
        Lab::with(TimeLimits::default())
    }

    pub(super) fn with(limits: TimeLimits) -> Lab {
        let dir = tempfile::tempdir().unwrap();
        let (senders, workers) = (0..2).map(|_| Mailbox::new().unwrap()).unzip();
        let terms = Terms {
            max_connections: 8,
            connect_timeout: PATIENCE,
            queue_pairs: QueuePairs::ONE,
            traffic: Default::default(),
        };
        let mut registry = DeviceRegistry::new(senders, terms, Budget::unlimited());
        let directory = Arc::new(Directory::default());
        let mut guests = GuestServer::new(CIDS, limits, Arc::clone(&directory)).unwrap();
        let reports = guests.reports().clone();
        let (mut specs, mut vms, mut addrs) = (Vec::new(), Vec::new(), Vec::new());
        for (n, cid) in [VM, OTHER_VM].into_iter().enumerate() {
            let addr = registry.assign(cid, RouteEntry::default()).unwrap();
            addrs.push(addr);
            guests.add_vm(cid, share(addr));
            let listener = UnixListener::bind(dir.path().join(cid.to_string())).unwrap();
            specs.push(VmSpec {
                name: format!("vm {cid}"),
                model: registry.model(cid),
                socket: FrontendSocket::Listener(OwnedFd::from(listener).into()),
                max_queue_size: 256,
                sealed_memory: false,
                account: Budget::unlimited().account(),
                port: registry.port(addr).unwrap(),
                journal: None,
            });
            let stage = VmStage::Active;
            vms.push((cid, ConfiguredVm { vm: n, addr, stage }));
        }
        let vms = vms.into_iter().collect();
        let mut attach = AttachConfig::new(attach::listen(&dir.path().join(ATTACH)).unwrap());
        attach.cids = CIDS;
        let server = Some(Server::new(attach, Arc::clone(&directory)).unwrap());
        let (handler, changes) = ReloadHandler::new(registry, server, guests, vms, false);
        let control = Control::spawn_with(specs, Some(Box::new(handler))).unwrap();
        Lab {
            control: Some(control),
            changes,
            workers,
            reports,
            directory,
            orders: VecDeque::new(),
            checking: HashSet::new(),
            tokens: HashMap::new(),
            added: Vec::new(),
            removed: Vec::new(),
            held: Vec::new(),
            holds_routes: false,
            commands: Vec::new(),
            holds_commands: false,
            addrs,
            dir,
        }
    }

    pub(super) fn report(&mut self, event: GuestEvent) {
        if let GuestEvent::Checked { key, .. } = event {
            self.checking.remove(&key);
        }
        self.reports.send((VM, event)).unwrap();
    }

    /// The device of the first VM ends an attachment.
    pub(super) fn report_end(&mut self, key: AttachmentKey, reason: Reason) {
        self.report(match self.checking.contains(&key) {
            true => GuestEvent::Checked {
                key,
                result: Err(reason.into()),
            },
            false => GuestEvent::Ended { key, reason },
        });
    }

    /// An agent of this VM, and the first answer that it gets.
    pub(super) fn connect(&mut self, vm: Cid) -> (Agent, Option<Answer>) {
        self.connect_before(vm, || {})
    }

    /// An agent of the first VM. Calls `then` when its stream is in the inbox.
    pub(super) fn agent_beside(&mut self, then: impl FnOnce()) -> Agent {
        self.connect_before(VM, then).0
    }

    fn connect_before(&mut self, vm: Cid, then: impl FnOnce()) -> (Agent, Option<Answer>) {
        let (theirs, ours) = UnixStream::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        ours.set_nonblocking(true).unwrap();
        let socket = PeerFd::from(OwnedFd::from(ours));
        let socket = socket.owned_by(&Budget::unlimited().account());
        self.reports.send((vm, GuestEvent::Stream(socket))).unwrap();
        then();
        let mut agent = Agent {
            socket: theirs,
            received: Vec::new(),
            writer: RequestWriter::new(&key(), &Nonce([0; 32])),
            nonce: Nonce([0; 32]),
        };
        let first = self.answer(&mut agent);
        if let Some(Answer::Hello(nonce)) = first {
            agent.writer = RequestWriter::new(&key(), &nonce);
            agent.nonce = nonce;
        }
        (agent, first)
    }

    /// An agent of the first VM.
    pub(super) fn agent(&mut self) -> Agent {
        let (agent, hello) = self.connect(VM);
        assert!(matches!(hello, Some(Answer::Hello(_))), "{hello:?}");
        agent
    }

    /// The next answer to an agent; `None`: the stream has ended.
    pub(super) fn answer(&mut self, agent: &mut Agent) -> Option<Answer> {
        let until = Instant::now() + PATIENCE;
        loop {
            self.take_messages();
            if let Some((answer, len)) = decode_answer(&agent.received).unwrap() {
                agent.received.drain(..len);
                return Some(answer);
            }
            let mut bytes = [0; 256];
            match agent.socket.read(&mut bytes) {
                Ok(0) => {
                    assert_eq!(agent.received, [], "half an answer");
                    return None;
                }
                Ok(len) => agent.received.extend(&bytes[..len]),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    self.wait(Some(&agent.socket), until);
                }
                // With unread bytes of the agent.
                Err(_) => return None,
            }
        }
    }

    /// The last answer to an agent: the stream ends behind it.
    pub(super) fn last_answer(&mut self, agent: &mut Agent) -> Option<Answer> {
        let answer = self.answer(agent);
        assert!(answer.is_some(), "the stream has ended without an answer");
        assert_eq!(self.answer(agent), None, "behind {answer:?}");
        answer
    }

    /// The next order to the device of the first VM.
    pub(super) fn order(&mut self) -> GuestOrder {
        let order = self.until(|lab| lab.orders.pop_front());
        if let GuestOrder::Check { key, token, .. } = order {
            self.checking.insert(key);
            self.tokens.insert(key, token);
        }
        order
    }

    /// Whether the control thread has given no order so far. What it was sent before, it has handled.
    pub(super) fn has_no_order(&mut self) -> bool {
        // Answered by way of the inbox and of the stream, behind all that was sent before.
        let (mut probe, _) = self.connect(OTHER_VM);
        probe.send(&Request::End);
        assert_eq!(
            self.last_answer(&mut probe),
            Some(Answer::Ended(Reason::REQUESTED))
        );
        self.take_messages();
        self.orders.is_empty()
    }

    /// Takes messages to the workers until `found` finds something.
    pub(super) fn until<T>(&mut self, mut found: impl FnMut(&mut Lab) -> Option<T>) -> T {
        let until = Instant::now() + PATIENCE;
        loop {
            self.take_messages();
            if let Some(found) = found(self) {
                return found;
            }
            self.wait(None, until);
        }
    }

    fn wait(&self, socket: Option<&UnixStream>, until: Instant) {
        let now = Instant::now();
        assert!(now < until, "nothing has come");
        let mut fds: Vec<_> = self
            .workers
            .iter()
            .map(|worker| PollFd::from_borrowed_fd(worker.fd(), PollFlags::IN))
            .chain(socket.map(|it| PollFd::from_borrowed_fd(it.as_fd(), PollFlags::IN)))
            .collect();
        // Short, because other things than descriptors may be waited for.
        let most = Timespec {
            tv_sec: 0,
            tv_nsec: 5_000_000,
        };
        poll(&mut fds, Some(&most)).unwrap();
        for worker in &self.workers {
            let _ = rustix::io::read(worker.fd(), &mut [0; 8]);
        }
    }

    fn take_messages(&mut self) {
        if !self.holds_routes {
            self.held.clear();
        }
        if !self.holds_commands {
            self.commands.clear();
        }
        for n in 0..self.workers.len() {
            let messages: Vec<_> = self.workers[n].drain().collect();
            for message in messages {
                self.take_message(n as u32, message);
            }
        }
    }

    fn take_message(&mut self, worker: u32, message: WorkerMessage) {
        match message {
            WorkerMessage::AddDevice(device) => self.added.push(device.addr()),
            WorkerMessage::RemoveDevice { number } => {
                self.removed.push(DeviceAddr { worker, number });
            }
            WorkerMessage::Device {
                number,
                message: SiblingMessage::Guest(order),
            } if (DeviceAddr { worker, number }) == self.addrs[0] => {
                self.orders.push_back(*order);
            }
            update if self.holds_routes && worker != self.addrs[0].worker => {
                self.held.push(update);
            }
            // The worker has the new routes.
            WorkerMessage::Update(_) => {}
            command if self.holds_commands => self.commands.push(command),
            _ => {}
        }
    }

    /// Applies a change of the configuration.
    pub(super) fn change(&mut self, reload: Reload) {
        self.try_change(reload).unwrap();
    }

    pub(super) fn try_change(&mut self, reload: Reload) -> Result<(), ReloadError> {
        let (answer, answered) = channel();
        let order = Order {
            add: Vec::new(),
            reload,
            answer,
        };
        let order = ControlOrder::Reload(Box::new(order));
        self.changes.send(order).unwrap();
        self.control.as_ref().unwrap().wake_extension();
        self.until(|_| answered.try_recv().ok())
    }

    /// Attaches a process of the host at this CID.
    pub(super) fn attach(&mut self, cid: Cid) -> Attached {
        let path = self.dir.path().join(ATTACH);
        let request = AttachRequest {
            cid: Some(cid),
            ..AttachRequest::default()
        };
        let process = spawn(move || Client::connect_within(&path, &request, PATIENCE));
        self.until(|_| process.is_finished().then_some(()));
        process.join().unwrap().unwrap()
    }

    pub(super) fn stats(&self) -> Stats {
        let mut sum = Stats::default();
        self.directory.add_to(&mut sum);
        sum
    }

    /// Registers until the pages are to be checked.
    pub(super) fn check(&mut self, request: Register) -> (Agent, AttachmentKey) {
        let mut agent = self.agent();
        agent.send(&Request::Register(request.clone()));
        let GuestOrder::Check {
            key,
            extents,
            nonce,
            ..
        } = self.order()
        else {
            panic!("no check");
        };
        assert_eq!((extents, nonce), (request.extents, agent.nonce));
        (agent, key)
    }

    /// Registers until the endpoint is accepted. Returns its CID too.
    pub(super) fn accept(&mut self, request: Register) -> (Agent, AttachmentKey, Cid) {
        let (mut agent, key) = self.check(request);
        self.report(GuestEvent::Checked {
            key,
            result: Ok(()),
        });
        let token = self.joined(key);
        match self.answer(&mut agent) {
            Some(Answer::Accepted { cid, token: told }) if told == token => (agent, key, cid),
            other => panic!("{other:?}"),
        }
    }

    /// Waits until one more device of an endpoint is added than were removed. Returns the token of the attachment.
    pub(super) fn joined(&mut self, key: AttachmentKey) -> Token {
        let device = self.until(|lab| {
            let added = lab.added.len() > lab.removed.len();
            lab.added.last().copied().filter(|_| added)
        });
        assert_eq!(device.worker, self.addrs[0].worker);
        self.tokens[&key]
    }

    /// Registers and starts an endpoint.
    pub(super) fn run(&mut self, request: Register) -> (Agent, AttachmentKey, Cid) {
        let (mut agent, wanted, cid) = self.accept(request);
        agent.send(&Request::Start(start()));
        match self.order() {
            GuestOrder::Start {
                key,
                device,
                start: told,
            } => {
                assert_eq!((key, told), (wanted, start()));
                assert_eq!(self.added.last(), Some(&device));
            }
            other => panic!("{other:?}"),
        }
        self.report(GuestEvent::Started { key: wanted });
        let features = start().features;
        assert_eq!(self.answer(&mut agent), Some(Answer::Started { features }));
        (agent, wanted, cid)
    }

    /// The order to end an attachment, which the device carries out. Returns the reason.
    pub(super) fn end_ordered(&mut self, wanted: AttachmentKey) -> Reason {
        match self.order() {
            GuestOrder::End { key, reason } if key == wanted => {
                self.report_end(key, reason);
                reason
            }
            other => panic!("{other:?}"),
        }
    }

    /// The answer to a query of the first VM.
    pub(super) fn knows(&mut self, id: u8) -> bool {
        let mut agent = self.agent();
        agent.send(&Request::Query(AttachmentId([id; 16])));
        match self.last_answer(&mut agent) {
            Some(Answer::Known(known)) => known,
            other => panic!("{other:?}"),
        }
    }

    /// Waits until the daemon has forgotten an attachment.
    pub(super) fn await_forgotten(&mut self, id: u8) {
        let until = Instant::now() + PATIENCE;
        while self.knows(id) {
            assert!(Instant::now() < until, "the attachment stays");
        }
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        // Commands that nothing answers fail with it.
        self.workers.clear();
        self.commands.clear();
        drop(self.control.take());
    }
}

/// The guest's side of a stream.
pub(super) struct Agent {
    socket: UnixStream,
    writer: RequestWriter,
    received: Vec<u8>,
    pub(super) nonce: Nonce,
}

impl Agent {
    pub(super) fn encode(&mut self, request: &Request) -> Vec<u8> {
        self.writer.encode(request).unwrap()
    }

    pub(super) fn send(&mut self, request: &Request) {
        let bytes = self.encode(request);
        self.send_bytes(&bytes);
    }

    pub(super) fn send_bytes(&mut self, bytes: &[u8]) {
        self.socket.write_all(bytes).unwrap();
    }

    /// Whether no answer has arrived that was not read.
    pub(super) fn has_no_answer(&mut self) -> bool {
        let read = self.socket.read(&mut [0; 1]);
        read.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock)
    }

    /// Uses another key from now on.
    pub(super) fn set_key(&mut self, key: &GuestKey) {
        self.writer = RequestWriter::new(key, &self.nonce);
    }
}

/// A request with these ports and this name.
pub(super) fn named(id: u8, name: &str) -> Register {
    let mut request = register(id);
    request.endpoint.name = Some(name.parse().unwrap());
    request.endpoint.ports = vec![Port::new(80)];
    request
}
