//! For tests of the journal: what a supervisor holds, a worker that answers at once, and a process that can be
//! killed at any step.

use std::collections::BTreeMap;
use std::io::IoSlice;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use zerosock_sys::account::Budget;
use zerosock_sys::fd_passing;

use crate::journal::{Change, Journal, Key, Record, RestoredFrontend, VmJournal};
use crate::session::{F_EVENT_IDX, F_VERSION_1};
use crate::{DeviceCommand, DeviceModel, DevicePort, FrontendFault, FrontendSocket, Reply, VmSpec};

/// What a supervisor holds.
#[derive(Default)]
pub(super) struct Held {
    pub(super) socket: Option<OwnedFd>,
    pub(super) kept: BTreeMap<Key, Record>,
    pub(super) pending: Option<Record>,
    /// Replies written.
    pub(super) replies: usize,
}

impl Held {
    /// What a successor gets: the requests that are kept, in any order, and the one that was begun.
    pub(super) fn restore(&self, socket: OwnedFd) -> RestoredFrontend {
        let copy = |it: &Record| {
            let fds: Vec<_> = it.fds.iter().map(AsFd::as_fd).collect();
            record(&it.bytes, &fds)
        };
        RestoredFrontend {
            socket: socket.into(),
            next_number: 1000,
            kept: self.kept.values().rev().map(copy).collect(),
            pending: self.pending.as_ref().map(copy),
        }
    }
}

/// How many more steps the process makes.
#[derive(Clone)]
pub(super) struct Steps(pub(super) Arc<AtomicUsize>);

impl Steps {
    /// A process that is not killed.
    pub(super) fn endless() -> Steps {
        Steps(Arc::new(AtomicUsize::new(usize::MAX)))
    }

    pub(super) fn step(&self) {
        if self.0.fetch_sub(1, Ordering::Relaxed) == 1 {
            std::panic::resume_unwind(Box::new("killed"));
        }
    }
}

/// Writes replies while the supervisor has the socket.
struct TestJournal(Arc<Mutex<Held>>, Steps);

pub(super) fn record(bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Record {
    let fds = fds.iter().map(|fd| fd.try_clone_to_owned().unwrap().into());
    Record {
        bytes: bytes.to_vec(),
        fds: fds.collect(),
    }
}

impl Journal for TestJournal {
    fn connected(&mut self, socket: BorrowedFd<'_>) -> u64 {
        lock(&self.0).socket = Some(socket.try_clone_to_owned().unwrap());
        self.1.step();
        1
    }

    fn begin(&mut self, request: &[u8], fds: &[BorrowedFd<'_>]) {
        self.1.step();
        let before = lock(&self.0).pending.replace(record(request, fds));
        assert!(before.is_none(), "the request before was not finished");
        self.1.step();
    }

    fn finish(&mut self, place: Option<Key>, changes: &[Change<'_>], reply: &[u8]) -> bool {
        self.1.step();
        {
            let mut held = lock(&self.0);
            let done = held.pending.take().expect("it was begun");
            if let Some(key) = place {
                held.kept.insert(key, done);
            }
            for change in changes {
                match change {
                    Change::Keep { key, bytes, fds } => {
                        held.kept.insert(*key, record(bytes, fds));
                    }
                    Change::Drop(key) => drop(held.kept.remove(key)),
                    Change::DropAll(request) => held.kept.retain(|key, _| key.request != *request),
                }
            }
            let Some(socket) = &held.socket else {
                return false;
            };
            if !reply.is_empty() {
                fd_passing::send(socket, &[IoSlice::new(reply)], &[]).unwrap();
                held.replies += 1;
            }
        }
        self.1.step();
        true
    }

    fn disconnected(&mut self) {
        *lock(&self.0) = Held::default();
    }
}

pub(super) fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the front-end has made of the device.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct State {
    features: u64,
    memory: u64,
    config: Vec<u8>,
    /// Base, size, and whether it is enabled and has descriptors for calls and errors.
    pub(super) queues: BTreeMap<u16, (u16, u16, bool, bool, bool)>,
}

struct Port(Arc<Mutex<State>>, Option<Arc<zerosock_ring::Memory>>, Steps);

impl DevicePort for Port {
    fn submit(&mut self, command: DeviceCommand, reply: Reply) {
        let mut state = lock(&self.0);
        match command {
            DeviceCommand::SetFeatures(features) => state.features = features,
            DeviceCommand::SetConfig(config) => state.config = config.to_vec(),
            DeviceCommand::SetMemory(memory) => {
                state.memory = memory.end();
                self.1 = Some(memory);
            }
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
                assert!(state.queues.insert(index, queue).is_none(), "it runs");
            }
            DeviceCommand::SetCall { index, call } => {
                state.queues.get_mut(&index).unwrap().3 = call.is_some();
            }
            DeviceCommand::SetErr { index, err } => {
                state.queues.get_mut(&index).unwrap().4 = err.is_some();
            }
            DeviceCommand::EnableQueue { index, enabled } => {
                state.queues.get_mut(&index).unwrap().2 = enabled;
            }
            DeviceCommand::ResetDevice => state.queues.clear(),
            DeviceCommand::Disconnected => *state = State::default(),
            DeviceCommand::StopQueue { index } => {
                state.queues.remove(&index);
                drop(state);
                reply.base(700 + index);
                return self.2.step();
            }
            _ => {}
        }
        drop(state);
        reply.done();
        self.2.step();
    }
}

#[derive(Debug)]
struct TestModel;

impl DeviceModel for TestModel {
    fn features(&self) -> u64 {
        F_VERSION_1 | F_EVENT_IDX
    }

    fn max_queues(&self) -> u16 {
        2
    }

    fn config(&self) -> Vec<u8> {
        vec![0; 4]
    }

    fn write_config(
        &self,
        config: &mut [u8],
        write: crate::ConfigWrite<'_>,
    ) -> Result<(), (FrontendFault, String)> {
        let places = config.iter_mut().skip(write.offset);
        places.zip(write.bytes).for_each(|(old, new)| *old = *new);
        Ok(())
    }
}

/// A VM with this state and journal.
pub(super) fn spec(
    state: Arc<Mutex<State>>,
    held: Arc<Mutex<Held>>,
    steps: Steps,
    restored: Option<RestoredFrontend>,
) -> VmSpec {
    // In the place of a listener: nothing connects to it.
    let (listener, _) = UnixStream::pair().unwrap();
    VmSpec {
        name: "vm0".into(),
        model: Arc::new(TestModel),
        socket: FrontendSocket::Listener(OwnedFd::from(listener).into()),
        max_queue_size: 128,
        sealed_memory: false,
        account: Budget::unlimited().account(),
        port: Box::new(Port(state, None, steps.clone())),
        journal: Some(VmJournal {
            writer: Box::new(TestJournal(held, steps)),
            restored,
        }),
    }
}
