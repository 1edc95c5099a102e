//! An entropy device (virtio 1.3, 5.4): a complete example of a second kind of device.
//!
//! The driver posts buffers in its only queue and the device fills them. This one fills them with a
//! byte that the host chooses, so that a test can recognise what a guest has read.

use std::io;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use zerosock_virtio::command::{self, QueueStarted, VirtioDevice};
use zerosock_virtio::device::{Context, Event, Message, WorkerDevice};
use zerosock_virtio::mailbox::{Mailbox, Sender};
use zerosock_virtio::outbox::{DeviceAddr, Outbox};
use zerosock_virtio::queues::{QueueSet, Quiesced, Scope};
use zerosock_virtio::ring::Ring;
use zerosock_virtio::worker::{Worker, WorkerMessage, WorkerPort};
use zerosock_virtio::{
    Budget, Control, DeviceCommand, DeviceModel, F_EVENT_IDX, F_INDIRECT_DESC, F_VERSION_1,
    FrontendSocket, Instant, PeerFd, Reply, VmSpec, sigbus,
};

/// Buffers filled in one turn.
const BUDGET: usize = 64;
/// Bytes written to one buffer.
const MOST: usize = 4096;

/// What the driver sees: one queue and no configuration space.
#[derive(Debug)]
struct EntropyModel;

impl DeviceModel for EntropyModel {
    fn features(&self) -> u64 {
        F_INDIRECT_DESC | F_EVENT_IDX | F_VERSION_1
    }

    fn max_queues(&self) -> u16 {
        1
    }

    fn config(&self) -> Vec<u8> {
        Vec::new()
    }
}

/// The worker's side of the device.
struct Entropy {
    addr: DeviceAddr,
    queues: QueueSet<[Option<Ring>; 1]>,
}

/// Entropy devices send each other no messages.
enum Never {}

impl Message for Never {}

/// What a test sets and reads.
#[derive(Debug, Default)]
pub struct State {
    /// Fills all buffers from now on.
    pub byte: AtomicU8,
    /// Bytes written to buffers.
    pub written: AtomicU64,
    /// How often the queue was started.
    pub starts: AtomicU64,
    /// How often a front-end has disconnected.
    pub disconnects: AtomicU64,
}

impl WorkerDevice for Entropy {
    type Shared = Arc<State>;
    type Message = Never;

    fn addr(&self) -> DeviceAddr {
        self.addr
    }

    fn on_event(&mut self, _: Event, _: &mut Context<'_, Self>) {
        // A kick. The turn that follows handles it.
    }

    fn on_message(&mut self, message: Never, _: &mut Context<'_, Self>) {
        match message {}
    }

    fn undeliverable(message: Never, _: &mut Outbox<Never>) {
        match message {}
    }

    fn command(&mut self, command: DeviceCommand, reply: Reply, cx: &mut Context<'_, Self>) {
        if matches!(command, DeviceCommand::Disconnected) {
            cx.shared.disconnects.fetch_add(1, Ordering::Relaxed);
        }
        command::command(self, command, reply, cx);
    }

    fn turn(&mut self, cx: &mut Context<'_, Self>) -> bool {
        let bytes = [cx.shared.byte.load(Ordering::Relaxed); MOST];
        let mut filled = 0;
        if let [Some(ring)] = &mut self.queues.rings {
            while filled < BUDGET
                && let Some(chain) = ring.pop()
            {
                let memory = ring.queue.memory();
                let written = memory.write(chain.writable(), 0, &bytes);
                ring.complete(chain, written as u32);
                cx.shared
                    .written
                    .fetch_add(written as u64, Ordering::Relaxed);
                filled += 1;
            }
            ring.publish(cx.notifier);
        }
        command::finish(self, cx);
        if self.queues.is_memory_lost() {
            command::give_up(self, "guest memory vanished under the device", cx);
            return false;
        }
        filled == BUDGET || (!cx.spins && self.enable_kicks())
    }

    fn next_timeout(&self) -> Option<Instant> {
        self.queues.next_timeout()
    }

    fn has_available_chains(&mut self) -> bool {
        let ring = self.queues.rings[0].as_mut();
        ring.is_some_and(|ring| ring.live() && ring.queue.available() > 0)
    }

    fn enable_kicks(&mut self) -> bool {
        let ring = self.queues.rings[0].as_mut();
        ring.is_some_and(|ring| ring.live() && ring.queue.enable_notifications())
    }

    fn retire(&mut self, cx: &mut Context<'_, Self>) {
        command::disconnect(self, cx);
    }

    fn end(&mut self, _: &mut Context<'_, Self>) {}
}

impl VirtioDevice for Entropy {
    type Rings = [Option<Ring>; 1];

    fn queues(&mut self) -> &mut QueueSet<Self::Rings> {
        &mut self.queues
    }

    fn set_features(&mut self, _: u64) {
        // The rings get theirs with their configuration.
    }

    fn queue_started(&mut self, _: u16, _: QueueStarted, cx: &mut Context<'_, Self>) {
        cx.shared.starts.fetch_add(1, Ordering::Relaxed);
    }

    fn quiesce(&mut self, _: Scope, _: &mut Context<'_, Self>) -> Quiesced {
        // No buffer is kept from one turn to the next.
        Quiesced::Done
    }

    fn reset(&mut self, _: bool, _: &mut Context<'_, Self>) {
        // The device keeps no state of the driver.
    }
}

/// A running device, with a thread for its worker and one for its front-end.
pub struct Device {
    /// What a test sets and reads.
    pub state: Arc<State>,
    control: Control,
    sender: Sender<WorkerMessage<Entropy>>,
    worker: JoinHandle<io::Result<()>>,
}

impl Device {
    /// Starts a device that serves front-ends which connect to the socket at `path`.
    ///
    /// # Errors
    /// As binding the socket, or the system refuses a descriptor or a thread.
    pub fn start(path: &Path) -> io::Result<Device> {
        sigbus::install()?;
        let state = Arc::new(State::default());
        let (sender, mailbox) = Mailbox::new()?;
        let senders = vec![sender.clone()];
        let mut worker = Worker::new(0, senders, mailbox, state.clone())?;
        let addr = DeviceAddr {
            worker: 0,
            number: 0,
        };
        worker.add(Entropy {
            addr,
            queues: QueueSet::new(0),
        });
        let account = Budget::unlimited().account();
        let listener = UnixListener::bind(path)?;
        let socket = PeerFd::from(std::os::fd::OwnedFd::from(listener));
        let spec = VmSpec {
            name: "entropy".to_owned(),
            model: Arc::new(EntropyModel),
            socket: FrontendSocket::Listener(socket.owned_by(&account)),
            max_queue_size: 256,
            sealed_memory: false,
            account,
            port: Box::new(WorkerPort {
                number: addr.number,
                worker: sender.clone(),
            }),
            journal: None,
        };
        let worker = std::thread::spawn(move || worker.run(Duration::ZERO));
        Ok(Device {
            state,
            control: Control::spawn(vec![spec])?,
            sender,
            worker,
        })
    }

    /// Disconnects the front-end and ends the threads.
    ///
    /// # Errors
    /// The worker's event loop has failed.
    pub fn shutdown(self) -> io::Result<()> {
        self.control.shutdown();
        let _ = self.sender.send(WorkerMessage::Shutdown);
        self.worker.join().unwrap_or_else(|_| {
            let text = "the worker has panicked";
            Err(io::Error::other(text))
        })
    }
}
