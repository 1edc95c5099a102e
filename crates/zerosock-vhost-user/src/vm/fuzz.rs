//! Entry point of the fuzz target `vhost_user` (docs/fuzzing.md): a front-end and its VM, with a worker that answers at
//! once, a journal, and successors.

use std::collections::BTreeMap;
use std::io::{IoSlice, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use zerosock_ring::Memory;
use zerosock_sys::account::Budget;
use zerosock_sys::fd_passing;
use zerosock_sys::mailbox::Mailbox;

use super::super::mailbox::{Mail, MailSender};
use super::{Front, Vm};
use crate::journal::{Change, Journal, Key, Record, RestoredFrontend, VmJournal};
use crate::{DeviceCommand, DeviceModel, DevicePort, FrontendSocket, Reply, VmSpec};

/// Calls that a VM may need until it waits for the front-end.
const CALLS: usize = 1000;

/// What a supervisor holds of the front-end.
#[derive(Debug, Default)]
struct Held {
    kept: BTreeMap<Key, Record>,
    pending: Option<Record>,
}

/// What the front-end has made of the device.
#[derive(Debug, Default)]
struct State {
    features: u64,
    config: Vec<u8>,
    memory: Option<Arc<Memory>>,
    /// Base, size, and whether it is enabled and has descriptors for calls and errors.
    queues: BTreeMap<u16, (u16, u16, bool, bool, bool)>,
}

impl State {
    /// What a successor has to come to.
    fn summary(&self) -> String {
        let end = self.memory.as_ref().map(|memory| memory.size());
        format!(
            "{:x} {:?} {end:?} {:?}",
            self.features, self.config, self.queues
        )
    }
}

type Shared<T> = Arc<Mutex<T>>;

fn lock<T>(shared: &Shared<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

fn record(bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Record {
    let copies = fds
        .iter()
        .map(|fd| fd.try_clone_to_owned().expect("a descriptor is left"));
    Record {
        bytes: bytes.to_vec(),
        fds: copies.map(Into::into).collect(),
    }
}

struct TestJournal(Shared<Held>);

impl Journal for TestJournal {
    fn connected(&mut self, _: BorrowedFd<'_>) -> u64 {
        1
    }

    fn begin(&mut self, request: &[u8], fds: &[BorrowedFd<'_>]) {
        let before = lock(&self.0).pending.replace(record(request, fds));
        assert!(before.is_none(), "the request before was not finished");
    }

    fn finish(&mut self, place: Option<Key>, changes: &[Change<'_>], _: &[u8]) -> bool {
        let mut held = lock(&self.0);
        let done = held.pending.take().expect("it was begun");
        if let Some(key) = place {
            held.kept.insert(key, done);
        }
        for change in changes {
            match change {
                Change::Keep { key, bytes, fds } => {
                    drop(held.kept.insert(*key, record(bytes, fds)))
                }
                Change::Drop(key) => drop(held.kept.remove(key)),
                Change::DropAll(request) => held.kept.retain(|key, _| key.request != *request),
            }
        }
        // The caller writes the reply.
        false
    }

    fn disconnected(&mut self) {
        *lock(&self.0) = Held::default();
    }
}

struct Port(Shared<State>);

impl DevicePort for Port {
    fn submit(&mut self, command: DeviceCommand, reply: Reply) {
        let mut state = lock(&self.0);
        match command {
            DeviceCommand::SetFeatures(features) => state.features = features,
            DeviceCommand::SetConfig(config) => state.config = config.to_vec(),
            DeviceCommand::SetMemory(memory) => state.memory = Some(memory),
            DeviceCommand::StartQueue {
                index,
                config,
                call,
                err,
                enabled,
                ..
            } => {
                let queue = (
                    config.base,
                    config.size,
                    enabled,
                    call.is_some(),
                    err.is_some(),
                );
                assert!(
                    state.queues.insert(index, queue).is_none(),
                    "it runs already"
                );
            }
            DeviceCommand::SetCall { index, call } => {
                state.queues.get_mut(&index).expect("it runs").3 = call.is_some();
            }
            DeviceCommand::SetErr { index, err } => {
                state.queues.get_mut(&index).expect("it runs").4 = err.is_some();
            }
            DeviceCommand::EnableQueue { index, enabled } => {
                state.queues.get_mut(&index).expect("it runs").2 = enabled;
            }
            DeviceCommand::ResetDevice => state.queues.clear(),
            DeviceCommand::Disconnected => *state = State::default(),
            DeviceCommand::StopQueue { index } => {
                state.queues.remove(&index).expect("it runs");
                return reply.base(700 + index);
            }
            _ => {}
        }
        reply.done();
    }
}

/// A front-end's connection to a VM.
pub struct World {
    model: Arc<dyn DeviceModel>,
    front_end: UnixStream,
    vm: Vm,
    mailbox: Mailbox<Mail>,
    held: Shared<Held>,
    state: Shared<State>,
}

impl std::fmt::Debug for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("World")
    }
}

impl World {
    /// A VM with this kind of device, with a journal or without.
    pub fn new(model: Arc<dyn DeviceModel>, has_journal: bool) -> World {
        World::begin(model, has_journal, None)
    }

    fn begin(
        model: Arc<dyn DeviceModel>,
        has_journal: bool,
        kept: Option<BTreeMap<Key, Record>>,
    ) -> World {
        let (front_end, ours) = UnixStream::pair().expect("a descriptor is left");
        front_end.set_nonblocking(true).expect("a socket");
        let (mail, mailbox) = MailSender::new().expect("a descriptor is left");
        let (held, state) = (Shared::<Held>::default(), Shared::<State>::default());
        let mut ours = Some(ours);
        let restored = kept.map(|kept| {
            let copy = |it: &Record| {
                let fds: Vec<_> = it.fds.iter().map(AsFd::as_fd).collect();
                record(&it.bytes, &fds)
            };
            lock(&held).kept = kept.iter().map(|(key, it)| (*key, copy(it))).collect();
            RestoredFrontend {
                socket: OwnedFd::from(ours.take().expect("it was not used")).into(),
                next_number: 1000,
                kept: kept.into_values().collect(),
                pending: None,
            }
        });
        // An end of a pair in the place of a listener: nothing connects to it.
        let (listener, _) = UnixStream::pair().expect("a descriptor is left");
        let spec = VmSpec {
            name: "vm0".into(),
            model: Arc::clone(&model),
            socket: FrontendSocket::Listener(OwnedFd::from(listener).into()),
            max_queue_size: 128,
            sealed_memory: false,
            account: Budget::unlimited().account(),
            port: Box::new(Port(Arc::clone(&state))),
            journal: has_journal.then(|| VmJournal {
                writer: Box::new(TestJournal(Arc::clone(&held))),
                restored,
            }),
        };
        let vm = Vm::new(spec, 0, mail, Arc::default(), Default::default());
        let mut world = World {
            model,
            front_end,
            vm: vm.expect("a socket"),
            mailbox,
            held,
            state,
        };
        if let Some(ours) = ours {
            ours.set_nonblocking(true).expect("a socket");
            world.vm.connect(OwnedFd::from(ours).into());
        }
        world.run();
        world
    }

    /// Whether the front-end is connected.
    pub fn is_connected(&self) -> bool {
        matches!(self.vm.front, Front::Live(_))
    }

    /// The front-end sends bytes and descriptors, which the VM handles.
    pub fn send(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        // Fails when the VM has disconnected.
        let _ = fd_passing::send(&self.front_end, &[IoSlice::new(bytes)], fds);
        self.run();
    }

    /// The VM handles what there is. Each reply has the version of the protocol, and the length that it says.
    fn run(&mut self) {
        for call in 0.. {
            assert!(call < CALLS, "the VM never waits for its front-end");
            let mut any = false;
            for mail in self.mailbox.drain() {
                if let Mail::Reply {
                    sequence, reply, ..
                } = mail
                {
                    any = true;
                    self.vm.handle_reply(sequence, reply);
                }
            }
            let queued = |vm: &Vm| match &vm.front {
                Front::Live(it) => rustix::io::ioctl_fionread(&it.socket).unwrap_or(0),
                _ => 0,
            };
            let before = queued(&self.vm);
            self.vm.handle_ready(false);
            let mut replies = Vec::new();
            let _ = self.front_end.read_to_end(&mut replies);
            while let Some((header, rest)) = replies.split_first_chunk::<12>() {
                assert_eq!(header[4] & 3, 1, "a reply of another version");
                let len = u32::from_ne_bytes([header[8], header[9], header[10], header[11]]);
                let (_, rest) = rest.split_at_checked(len as usize).expect("a reply is cut");
                replies = rest.to_vec();
            }
            assert!(replies.is_empty(), "a reply is cut");
            if !any && queued(&self.vm) == before {
                return;
            }
        }
    }

    /// A successor gets the journal: it accepts all that is kept, and comes to the same state.
    pub fn succeed(&mut self) {
        if !self.is_connected() || lock(&self.held).pending.is_some() {
            return;
        }
        let wanted = lock(&self.state).summary();
        let kept = std::mem::take(&mut lock(&self.held).kept);
        *self = World::begin(Arc::clone(&self.model), true, Some(kept));
        assert!(
            self.is_connected(),
            "the successor refuses the journal; before: {wanted}"
        );
        assert_eq!(
            lock(&self.state).summary(),
            wanted,
            "the successor has another state"
        );
    }

    /// As `succeed`, with a byte of a record changed. It may be refused.
    pub fn succeed_forged(&mut self, record: usize, at: usize, byte: u8) {
        let mut kept = std::mem::take(&mut lock(&self.held).kept);
        let count = kept.len().max(1);
        if let Some(it) = kept.values_mut().nth(record % count) {
            let len = it.bytes.len().max(1);
            if let Some(place) = it.bytes.get_mut(at % len) {
                *place = byte;
            }
        }
        *self = World::begin(Arc::clone(&self.model), true, Some(kept));
    }

    /// The front-end disconnects.
    pub fn end(mut self) {
        self.vm.handle_ready(true);
        self.vm.close("the input has ended");
        self.run();
        assert!(self.vm.is_over(), "the VM is not over");
    }
}
