//! A worker that only answers, and a front-end that sends any message.
// Each test binary uses only some of these.
#![allow(dead_code, reason = "two test programs use it, each its part")]

use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use zerosock_sys::account::Budget;
use zerosock_vhost_user::session::{F_EVENT_IDX, F_INDIRECT_DESC, F_VERSION_1};
use zerosock_vhost_user::{
    Control, DeviceCommand, DeviceModel, DevicePort, DeviceReply, FrontendSocket, Reply, VmSpec,
};

/// A wait that takes longer fails the test.
pub(crate) const DEADLINE: Duration = Duration::from_secs(20);
pub(crate) const MAX_QUEUE_SIZE: u16 = 1024;

/// Sends commands to the test's [`Worker`].
struct Port(Sender<(DeviceCommand, Reply)>);

impl DevicePort for Port {
    fn submit(&mut self, command: DeviceCommand, reply: Reply) {
        // Without a worker the reply is dropped, which answers that the command failed.
        let _ = self.0.send((command, reply));
    }
}

/// Receives commands; the test answers them.
pub(crate) struct Worker(Receiver<(DeviceCommand, Reply)>);

impl Worker {
    /// Waits for the next command, which must have this name.
    pub(crate) fn expect(&self, name: &str) -> (DeviceCommand, Reply) {
        let (command, reply) = self.0.recv_timeout(DEADLINE).expect(name);
        assert_eq!(command.name(), name);
        (command, reply)
    }

    /// Waits for the next command, which must have this name, and answers `Done`.
    pub(crate) fn done(&self, name: &str) -> DeviceCommand {
        let (command, reply) = self.expect(name);
        reply.done();
        command
    }

    /// Whether no command has arrived.
    pub(crate) fn is_quiet(&self) -> bool {
        self.0.try_recv().is_err()
    }

    /// Answers all further commands; queues stop at index 77. The channel returns each command
    /// after it was answered.
    pub(crate) fn answer_all(self) -> Receiver<DeviceCommand> {
        let (sender, commands) = channel();
        std::thread::spawn(move || {
            for (command, reply) in self.0 {
                match command {
                    DeviceCommand::StopQueue { .. } => reply.base(77),
                    _ => reply.send(DeviceReply::Done),
                }
                let _ = sender.send(command);
            }
        });
        commands
    }
}

/// Waits for the next command of this name and drops those before it.
pub(crate) fn wait_for(commands: &Receiver<DeviceCommand>, name: &str) -> DeviceCommand {
    loop {
        let command = commands.recv_timeout(DEADLINE).expect(name);
        if command.name() == name {
            return command;
        }
    }
}

/// A device like virtio-vsock: some feature bits of its own, three queues, and a CID in the
/// configuration space.
#[derive(Debug)]
struct TestModel(u64);

impl DeviceModel for TestModel {
    fn features(&self) -> u64 {
        1 << 22 | 0b1011 | F_INDIRECT_DESC | F_EVENT_IDX | F_VERSION_1
    }

    fn max_queues(&self) -> u16 {
        3
    }

    fn config(&self) -> Vec<u8> {
        self.0.to_le_bytes().to_vec()
    }
}

/// A control thread with some VMs and their sockets in a temporary directory.
pub(crate) struct Harness {
    pub(crate) control: Control,
    dir: tempfile::TempDir,
}

impl Harness {
    pub(crate) fn new(vms: usize) -> (Harness, Vec<Worker>) {
        Harness::with_limits(vms, false, &Budget::unlimited())
    }

    pub(crate) fn with_limits(
        vms: usize,
        sealed_memory: bool,
        budget: &Budget,
    ) -> (Harness, Vec<Worker>) {
        let model = |index| Arc::new(TestModel(3 + index as u64)) as Arc<dyn DeviceModel>;
        Harness::of_models((0..vms).map(model), sealed_memory, budget)
    }

    /// One VM with a device of this model.
    pub(crate) fn of_model(model: impl DeviceModel + 'static) -> (Harness, Worker) {
        let models = std::iter::once(Arc::new(model) as Arc<dyn DeviceModel>);
        let (lab, mut workers) = Harness::of_models(models, false, &Budget::unlimited());
        (lab, workers.remove(0))
    }

    fn of_models(
        models: impl Iterator<Item = Arc<dyn DeviceModel>>,
        sealed_memory: bool,
        budget: &Budget,
    ) -> (Harness, Vec<Worker>) {
        let dir = tempfile::tempdir().unwrap();
        let mut workers = Vec::new();
        let mut specs = Vec::new();
        for (index, model) in models.enumerate() {
            let (sender, receiver) = channel();
            workers.push(Worker(receiver));
            specs.push(VmSpec {
                name: format!("vm{index}"),
                model,
                socket: FrontendSocket::Listener(
                    OwnedFd::from(UnixListener::bind(socket_path(dir.path(), index)).unwrap())
                        .into(),
                ),
                max_queue_size: MAX_QUEUE_SIZE,
                sealed_memory,
                account: budget.account(),
                port: Box::new(Port(sender)),
                journal: None,
            });
        }
        (
            Harness {
                control: Control::spawn(specs).unwrap(),
                dir,
            },
            workers,
        )
    }

    pub(crate) fn one() -> (Harness, Worker) {
        let (lab, mut workers) = Harness::new(1);
        (lab, workers.remove(0))
    }

    pub(crate) fn connect(&self, vm: usize) -> UnixStream {
        let socket = UnixStream::connect(socket_path(self.dir.path(), vm)).unwrap();
        socket.set_read_timeout(Some(DEADLINE)).unwrap();
        socket.set_write_timeout(Some(DEADLINE)).unwrap();
        socket
    }

    pub(crate) fn raw(&self, vm: usize) -> Raw {
        Raw(self.connect(vm))
    }
}

fn socket_path(dir: &Path, vm: usize) -> PathBuf {
    dir.join(format!("vm{vm}"))
}

pub(crate) const NEED_REPLY: u32 = 0x8;

/// A front-end that sends raw messages.
pub(crate) struct Raw(pub(crate) UnixStream);

impl Raw {
    pub(crate) fn send(&self, request: u32, flags: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        let mut bytes = header(request, 1 | flags, payload.len() as u32).to_vec();
        bytes.extend_from_slice(payload);
        self.send_bytes(&bytes, fds).unwrap();
    }

    /// Sends at most 253 descriptors, the kernel's limit.
    pub(crate) fn send_bytes(
        &self,
        bytes: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> rustix::io::Result<usize> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        }
        sendmsg(
            &self.0,
            &[IoSlice::new(bytes)],
            &mut control,
            SendFlags::NOSIGNAL,
        )
    }

    /// Receives a reply: request and payload.
    pub(crate) fn reply(&self) -> (u32, Vec<u8>) {
        let mut header = [0; 12];
        (&self.0).read_exact(&mut header).unwrap();
        let word = |at: usize| u32::from_ne_bytes(header[at..at + 4].try_into().unwrap());
        assert_eq!(word(4), 0x5, "version 1, reply");
        let mut payload = vec![0; word(8) as usize];
        (&self.0).read_exact(&mut payload).unwrap();
        (word(0), payload)
    }

    /// Receives a reply, which must be to this request, with a u64.
    pub(crate) fn reply_u64(&self, request: u32) -> u64 {
        let (got, payload) = self.reply();
        assert_eq!(got, request);
        u64::from_ne_bytes(payload.try_into().unwrap())
    }

    /// Sends GET_FEATURES and waits: all earlier messages have been handled when the reply arrives.
    pub(crate) fn ping(&self) {
        self.send(1, 0, &[], &[]);
        assert_ne!(self.reply_u64(1), 0);
    }

    /// The control thread has closed the connection.
    pub(crate) fn expect_end(&self) {
        assert_eq!((&self.0).read(&mut [0; 64]).unwrap_or(0), 0);
    }
}

pub(crate) fn header(request: u32, flags: u32, size: u32) -> [u8; 12] {
    let mut header = [0; 12];
    for (at, word) in [request, flags, size].into_iter().enumerate() {
        header[at * 4..][..4].copy_from_slice(&word.to_ne_bytes());
    }
    header
}

pub(crate) fn u64s(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// A vring state: index and number.
pub(crate) fn state(index: u32, number: u32) -> Vec<u8> {
    [index.to_ne_bytes(), number.to_ne_bytes()].concat()
}

/// A memory table: count, then guest address, size, user address, offset of each region.
pub(crate) fn table(regions: &[[u64; 4]]) -> Vec<u8> {
    let mut bytes = state(regions.len() as u32, 0);
    regions.iter().for_each(|region| bytes.extend(u64s(region)));
    bytes
}

/// A vring address message.
pub(crate) fn addresses(index: u32, desc: u64, used: u64, avail: u64) -> Vec<u8> {
    let mut bytes = state(index, 0);
    bytes.extend(u64s(&[desc, used, avail, 0]));
    bytes
}

pub(crate) fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC).unwrap()
}

pub(crate) fn memory(len: u64) -> OwnedFd {
    zerosock_sys::memfd::create("guest", len, true).unwrap()
}

pub(crate) const MEMORY: u64 = 1 << 20;
pub(crate) const USER: u64 = 0x7000_0000_0000;
/// Features: version 1, protocol features, event index.
pub(crate) const FEATURES: u64 = 1 << 32 | 1 << 30 | 1 << 29;
/// Protocol features: MQ, LOG_SHMFD, REPLY_ACK, BACKEND_REQ, CONFIG, RESET_DEVICE,
/// CONFIGURE_MEM_SLOTS.
pub(crate) const PROTOCOL: u64 = 1 | 1 << 1 | 1 << 3 | 1 << 5 | 1 << 9 | 1 << 13 | 1 << 15;

/// Request, payload and descriptors.
pub(crate) type Prepared = (u32, Vec<u8>, Vec<OwnedFd>);

/// The messages that start queues 0 and 1, in the order of QEMU.
pub(crate) fn start_sequence() -> Vec<Prepared> {
    let mut messages: Vec<Prepared> = vec![
        (16, u64s(&[PROTOCOL]), vec![]),
        (3, vec![], vec![]),
        (21, vec![], vec![event()]),
        (2, u64s(&[FEATURES]), vec![]),
        (5, table(&[[0, MEMORY, USER, 0]]), vec![memory(MEMORY)]),
    ];
    for index in 0..2 {
        let at = USER + u64::from(index) * 0x10000;
        messages.extend([
            (8, state(index, 128), vec![]),
            (10, state(index, 0), vec![]),
            (9, addresses(index, at, at + 0x2000, at + 0x1000), vec![]),
            (13, u64s(&[index.into()]), vec![event()]),
            (14, u64s(&[index.into()]), vec![event()]),
            (12, u64s(&[index.into()]), vec![event()]),
            (18, state(index, 1), vec![]),
        ]);
    }
    messages
}

/// Sends the sequence with NEED_REPLY; each message must be acknowledged.
pub(crate) fn start(raw: &Raw) {
    for (request, payload, fds) in start_sequence() {
        let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        raw.send(request, NEED_REPLY, &payload, &fds);
        assert_eq!(raw.reply_u64(request), 0, "request {request}");
    }
}
