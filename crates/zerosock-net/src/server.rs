//! Devices with their threads: a worker, and the control thread of the front-ends.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use zerosock_proto::wire::net::Mac;
use zerosock_sys::PeerFd;
use zerosock_sys::account::Budget;
pub use zerosock_sys::account::Limits;
use zerosock_vhost_user::{Control, FrontendSocket, VmSpec};
use zerosock_virtio::device::WorkerDevice;
use zerosock_virtio::mailbox::{Mailbox, Sender};
use zerosock_virtio::outbox::DeviceAddr;
use zerosock_virtio::worker::{Worker, WorkerMessage, WorkerPort};

use crate::backend::{Backend, Never};
use crate::device::{BackendGoneEvent, Device, DeviceConfig};
use crate::model::{MAX_PAIRS, NetModel};
use crate::stats::{Counters, NetStats};
use crate::switch::{Switch, SwitchDevice, SwitchPort, Uplink, UplinkConfig};

/// The largest queue that a front-end may set up: the largest of QEMU.
const MAX_QUEUE_SIZE: u16 = 1024;

/// What to serve to one guest.
#[derive(Debug)]
pub struct GuestConfig {
    /// The name in the log.
    pub name: String,
    /// The vhost-user socket. It serves one front-end at a time.
    pub listener: UnixListener,
    /// The guest's MAC address; `None`: the front-end or the driver chooses one.
    pub mac: Option<Mac>,
    /// Drop frames of the guest with a source address other than `mac`.
    pub mac_filter: bool,
    /// The MTU that the driver is told.
    pub mtu: Option<u16>,
    /// Refuse memory that can shrink.
    pub sealed_memory: bool,
    /// Limits of the front-end: descriptors and mapped memory.
    pub limits: Limits,
}

/// Running devices. Dropping it leaves their threads alone; see [`Server::shutdown`].
pub struct Server {
    control: Control,
    stop: Box<dyn FnOnce() + Send>,
    worker: JoinHandle<()>,
    counters: Vec<(String, Arc<Counters>)>,
    over: Arc<BackendGoneEvent>,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").finish_non_exhaustive()
    }
}

/// Reports the end of the worker, also by a panic.
struct ReportEnd(Arc<BackendGoneEvent>);

impl Drop for ReportEnd {
    fn drop(&mut self) {
        self.0.report();
    }
}

/// A server before its threads start.
struct Setup<D: WorkerDevice> {
    worker: Worker<D>,
    sender: Sender<WorkerMessage<D>>,
    specs: Vec<VmSpec>,
    counters: Vec<(String, Arc<Counters>)>,
    over: Arc<BackendGoneEvent>,
}

impl<D> Setup<D>
where
    D: WorkerDevice<Shared = ()> + Send + 'static,
    D::Message: 'static,
{
    fn new() -> io::Result<Setup<D>> {
        zerosock_sys::sigbus::install()?;
        let (sender, mailbox) = Mailbox::new()?;
        Ok(Setup {
            worker: Worker::new(0, vec![Sender::clone(&sender)], mailbox, ())?,
            sender,
            specs: Vec::new(),
            counters: Vec::new(),
            over: Arc::new(BackendGoneEvent::new()?),
        })
    }

    /// The address and the counters of the next device.
    fn next(&mut self, name: &str) -> (DeviceAddr, Arc<Counters>) {
        let addr = DeviceAddr {
            worker: 0,
            number: self.counters.len() as u32,
        };
        let counters = Arc::<Counters>::default();
        self.counters.push((name.to_owned(), Arc::clone(&counters)));
        (addr, counters)
    }

    /// Adds a guest with a device on `backend`; `wrap` makes it a device of the worker. `max_mtu`: see
    /// [`NetModel`].
    fn add_guest<B: Backend>(
        &mut self,
        config: GuestConfig,
        max_mtu: Option<u16>,
        backend: B,
        wrap: impl FnOnce(Device<B>) -> D,
    ) -> io::Result<()> {
        let model = NetModel {
            mac: config.mac,
            mtu: config.mtu,
            max_mtu,
            pairs: backend.queues(),
            offloads: backend.features(),
        };
        let (addr, counters) = self.next(&config.name);
        let device = DeviceConfig {
            addr,
            name: config.name.clone(),
            mtu: config.mtu,
            only_mac: config.mac.filter(|_| config.mac_filter),
            counters,
            gone: Arc::clone(&self.over),
        };
        self.worker.add(wrap(Device::new(device, backend)?));
        let account = Budget::new(config.limits, 1).account();
        let listener = PeerFd::from(OwnedFd::from(config.listener)).owned_by(&account);
        self.specs.push(VmSpec {
            name: config.name,
            model: Arc::new(model),
            socket: FrontendSocket::Listener(listener),
            max_queue_size: MAX_QUEUE_SIZE,
            sealed_memory: config.sealed_memory,
            account,
            port: Box::new(WorkerPort {
                number: addr.number,
                worker: self.sender.clone(),
            }),
            journal: None,
        });
        Ok(())
    }

    fn start(self, spin: Duration) -> io::Result<Server> {
        let end = ReportEnd(Arc::clone(&self.over));
        let (worker, sender) = (self.worker, self.sender);
        let worker = Builder::new().name("net-worker".into()).spawn(move || {
            let _end = end;
            if let Err(error) = worker.run(spin) {
                tracing::error!("the event loop has failed: {error}");
            }
        })?;
        let stop = Box::new(move || {
            let _ = sender.send(WorkerMessage::Shutdown);
        });
        match Control::spawn(self.specs) {
            Ok(control) => Ok(Server {
                control,
                stop,
                worker,
                counters: self.counters,
                over: self.over,
            }),
            Err(error) => {
                stop();
                let _ = worker.join();
                Err(error)
            }
        }
    }
}

/// The device of one guest without a thread for its worker: the caller steps it.
pub struct SteppedServer<B: Backend> {
    control: Control,
    worker: Worker<Device<B>>,
}

impl<B: Backend> std::fmt::Debug for SteppedServer<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SteppedServer").finish_non_exhaustive()
    }
}

impl<B: Backend> SteppedServer<B> {
    /// Starts the device and the control thread.
    ///
    /// # Errors
    /// As [`Server::start`].
    pub fn start(config: GuestConfig, backend: B) -> io::Result<SteppedServer<B>> {
        let mut setup = Setup::new()?;
        let max_mtu = backend.max_mtu();
        setup.add_guest(config, max_mtu, backend, |device| device)?;
        let Setup {
            mut worker, specs, ..
        } = setup;
        worker.start()?;
        let control = Control::spawn(specs)?;
        Ok(SteppedServer { control, worker })
    }

    /// Handles the work that there is. If there is none, first sleeps for at most `wait`.
    ///
    /// # Errors
    /// The system cannot wait.
    pub fn step(&mut self, wait: Duration) -> io::Result<()> {
        self.worker.step(Some(wait)).map(drop)
    }

    /// Disconnects the front-end and ends the control thread.
    pub fn shutdown(mut self) {
        let control = self.control;
        let ending = std::thread::spawn(move || control.shutdown());
        let turn = Some(Duration::from_millis(1));
        // After an error the control thread gives up by itself.
        while !ending.is_finished() && matches!(self.worker.step(turn), Ok(true)) {}
    }
}

impl Server {
    /// Starts the device of one guest, with one queue pair for each queue of the back-end. The worker
    /// polls for more work for `spin` before it sleeps.
    ///
    /// # Errors
    /// `InvalidInput` with no queue, or more than [`MAX_PAIRS`]. Otherwise the system refuses a
    /// descriptor, a signal handler or a thread.
    pub fn start(config: GuestConfig, backend: impl Backend, spin: Duration) -> io::Result<Server> {
        if !(1..=MAX_PAIRS).contains(&backend.queues()) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut setup = Setup::new()?;
        let max_mtu = backend.max_mtu();
        setup.add_guest(config, max_mtu, backend, |device| device)?;
        setup.start(spin)
    }

    /// Starts a switch between guests, with an uplink if there is a back-end for it. An address of a
    /// guest's configuration is that of its port alone.
    ///
    /// # Errors
    /// As [`start`](Self::start); `AddrInUse` when two guests have the same address.
    pub fn start_switch(
        guests: Vec<GuestConfig>,
        uplink: Option<(String, impl Backend<Message = Never>)>,
        spin: Duration,
    ) -> io::Result<Server> {
        let switch = Switch::new();
        let mut setup = Setup::new()?;
        let max_mtu = uplink.as_ref().and_then(|(_, backend)| backend.max_mtu());
        for config in guests {
            let port = SwitchPort::new(Arc::clone(&switch), config.mac);
            let wrap = |device| SwitchDevice::Port(Box::new(device));
            setup.add_guest(config, max_mtu, port, wrap)?;
        }
        if let Some((name, backend)) = uplink {
            let (addr, counters) = setup.next(&name);
            let config = UplinkConfig {
                addr,
                name,
                counters,
                gone: Arc::clone(&setup.over),
            };
            let uplink = Uplink::new(config, &switch, backend)?;
            setup.worker.add(SwitchDevice::Uplink(Box::new(uplink)));
        }
        setup.start(spin)
    }

    /// The counters of each device, with its name.
    pub fn stats(&self) -> Vec<(&str, NetStats)> {
        let counters = self.counters.iter();
        counters
            .map(|(name, of)| (name.as_str(), of.get()))
            .collect()
    }

    /// Readable when the service has ended by itself: a back-end has gone or the worker has failed.
    pub fn over(&self) -> BorrowedFd<'_> {
        self.over.as_fd()
    }

    /// Disconnects the front-ends and ends the threads. Returns the last values of the counters.
    pub fn shutdown(self) -> Vec<(String, NetStats)> {
        self.control.shutdown();
        (self.stop)();
        let _ = self.worker.join();
        let counters = self.counters.into_iter();
        counters.map(|(name, of)| (name, of.get())).collect()
    }
}
