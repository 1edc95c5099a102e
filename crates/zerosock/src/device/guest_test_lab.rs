//! For tests: a VM with guest endpoints, on a worker that the test steps. The test is the control thread, the front-end
//! of the VM, the kernel of the guest, and the programs on the pages.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;
use zerosock_proto::wire::vsock::{Op, Repr};
use zerosock_proto::{Address, Cid, Port};
use zerosock_ring::{Extent, Memory};
use zerosock_sys::account::Budget;
use zerosock_sys::socket_path;
use zerosock_vhost_user::session::F_VERSION_1;
use zerosock_vhost_user::{DeviceCommand, DeviceReply, FrontendLink, Reply};
use zerosock_virtio::mailbox::{Mailbox, Sender};
use zerosock_virtio::outbox::DeviceAddr;

use super::factory::{Member, MemberState, Terms};
use super::guest_orders::{AttachmentKey, GuestEvent, GuestOrder, GuestReports};
use super::test_guest::{self, Guest};
use super::traffic::TrafficBoard;
use super::{DriverKind, EVENT, HostAccess, Limits, RX, Shared, TX, Worker, WorkerMessage};
use crate::device::host_sockets::hybrid::OkConvention;
use crate::device::state::sibling_message::SiblingMessage;
use crate::registration::key::Nonce;
use crate::registration::page_value::{PAGE, write_values};
use crate::registration::{DOORBELL_PORT, page_value};
use crate::registration::{Reason, Refusal, Start, Token};
use crate::routing::Routes;

pub(crate) const HUGE: u64 = Extent::HUGE_PAGE;
/// Memory of the VM. Its kernel has the first three huge pages.
pub(crate) const RAM: u64 = 12 * HUGE;
/// Pages for an endpoint, in an order that is not theirs.
pub(crate) const PAGES: [u64; 3] = [6, 4, 5];
pub(crate) const OTHER_PAGES: [u64; 3] = [9, 10, 8];
/// The number of the VM's device.
pub(crate) const VM: u32 = 0;
const VM_CID: Cid = Cid::new(3);
const PATIENCE: Duration = Duration::from_secs(120);
const RINGS: [u64; 3] = [test_guest::RX, test_guest::TX, test_guest::EVENT];

pub(crate) fn host(port: Port) -> Address {
    Address::new(Cid::HOST, port)
}

pub(crate) struct GuestLab {
    dir: tempfile::TempDir,
    pub(crate) worker: Worker,
    sender: Sender<WorkerMessage>,
    events: Mailbox<(Cid, GuestEvent)>,
    pub(crate) ram: OwnedFd,
    /// The kernel of the VM.
    pub(crate) vm: Guest,
    /// What it has received.
    packets: Vec<(Repr, Vec<u8>)>,
    next: u32,
    /// Resets of the VM that were reported.
    pub(crate) resets: u32,
}

/// An endpoint, and the program on its pages.
pub(crate) struct TestEndpoint {
    pub(crate) key: AttachmentKey,
    pub(crate) number: u32,
    pub(crate) extents: Vec<Extent>,
    /// The pages as the guest has them.
    pub(crate) view: Arc<Memory>,
    pub(crate) guest: Guest,
    pub(crate) token: Token,
    /// The guest's port of the doorbell.
    pub(crate) doorbell: u32,
}

/// A stream between the program on the pages and one on the host.
pub(crate) struct Stream {
    port: u32,
    program: UnixStream,
    /// Bytes written by the program on the host, and by that on the pages; and how many of them were read.
    to_endpoint: usize,
    read_by_endpoint: usize,
    from_endpoint: usize,
    read_by_program: usize,
}

impl Stream {
    fn unread(&self) -> usize {
        self.to_endpoint - self.read_by_endpoint
    }

    /// The program on the host writes.
    pub(crate) fn write(&mut self, count: usize) {
        self.program
            .write_all(&bytes(self.to_endpoint, count))
            .unwrap();
        self.to_endpoint += count;
    }

    /// The program on the host writes, if the stream has not ended.
    pub(super) fn try_write(&mut self, count: usize) {
        let _ = self.program.write(&bytes(self.to_endpoint, count));
    }

    fn read(&mut self) {
        let mut buffer = vec![0; 1 << 16];
        match self.program.read(&mut buffer) {
            Ok(0) => panic!("the stream has ended"),
            Ok(more) => {
                assert_eq!(buffer[..more], bytes(self.read_by_program, more));
                self.read_by_program += more;
            }
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
    }

    /// Waits for the end of the stream.
    pub(crate) fn ended(&mut self, lab: &mut GuestLab) {
        lab.until("the end of the stream", |_| {
            let mut buffer = vec![0; 1 << 16];
            match self.program.read(&mut buffer) {
                Ok(0) => Some(()),
                Ok(_) => None,
                Err(error) if error.kind() == ErrorKind::WouldBlock => None,
                Err(_) => Some(()),
            }
        });
    }
}

fn byte(at: usize) -> u8 {
    (at * 7 + at / 251) as u8
}

pub(crate) fn bytes(from: usize, count: usize) -> Vec<u8> {
    (from..from + count).map(byte).collect()
}

fn map(ram: &OwnedFd, len: u64) -> Arc<Memory> {
    Arc::new(Memory::of_file(ram, len).unwrap())
}

pub(crate) fn terms() -> Terms {
    Terms {
        traffic: TrafficBoard::default(),
        max_connections: 1024,
        connect_timeout: Duration::from_secs(3600),
        queue_pairs: zerosock_proto::vsock::QueuePairs::ONE,
    }
}

pub(crate) fn addr(number: u32) -> DeviceAddr {
    let worker = 0;
    DeviceAddr { worker, number }
}

impl GuestLab {
    pub(crate) fn new() -> GuestLab {
        GuestLab::with(true)
    }

    /// `sealed`: the VM's memory cannot shrink.
    pub(crate) fn with(sealed: bool) -> GuestLab {
        GuestLab::build(sealed, None)
    }

    /// The device of the VM reports there, and not to the test.
    pub(crate) fn reporting_to(reports: GuestReports) -> GuestLab {
        GuestLab::build(true, Some(reports))
    }

    fn build(sealed: bool, reports_to: Option<GuestReports>) -> GuestLab {
        let dir = tempfile::tempdir().unwrap();
        let (sender, mailbox) = Mailbox::new().unwrap();
        // Else the first connect to a path waits for the connector.
        socket_path::learn_mounts().unwrap();
        let hour = Duration::from_secs(3600);
        let limits = Limits {
            handshake: hour,
            connect: hour,
            hold: Duration::from_millis(20),
            overflow: 1 << 30,
            old_memory: 0,
            handshakes: 1,
            lingering: 1,
            linger: hour,
            ok: OkConvention::GuestPort,
        };
        let mut routes = Routes::default();
        for number in 0..8 {
            routes.add(cid(number), addr(number), &["default".to_owned()]);
        }
        let shared = Shared {
            routes: Arc::new(routes),
            counters: Default::default(),
            limits,
            connector: None,
            mailbox: Some(sender.clone()),
            app: None,
        };
        let worker = Worker::new(0, vec![sender.clone()], mailbox, shared).unwrap();
        let ram = zerosock_sys::memfd::create("vm", RAM, sealed).unwrap();
        let vm = Guest::on(VM_CID, map(&ram, RAM), |_| true);
        let (reports, events) = Mailbox::new().unwrap();
        let mut lab = GuestLab {
            dir,
            worker,
            sender,
            events,
            ram,
            vm,
            packets: Vec::new(),
            next: 1,
            resets: 0,
        };
        let reports = reports_to.unwrap_or(reports);
        lab.add_device(VM, DriverKind::Vm, Some(reports));
        lab.worker.start().unwrap();
        lab.connect_vm();
        lab
    }

    pub(crate) fn senders(&self) -> Vec<Sender<WorkerMessage>> {
        vec![self.sender.clone()]
    }

    /// A path in the directory of the programs on the host.
    pub(crate) fn path(&self, name: &str) -> std::path::PathBuf {
        self.dir.path().join(name)
    }

    /// Connects the front-end of the VM, and starts its queues.
    pub(crate) fn connect_vm(&mut self) {
        let link = FrontendLink::discarded().unwrap();
        self.done(DeviceCommand::Connected { link });
        self.done(DeviceCommand::SetFeatures(F_VERSION_1));
        self.set_memory(RAM);
        for index in [RX, TX, EVENT] {
            self.start_queue(index, 0);
        }
    }

    pub(crate) fn set_memory(&mut self, len: u64) {
        let memory = map(&self.ram, len);
        self.done(DeviceCommand::SetMemory(memory));
    }

    fn add_device(&mut self, number: u32, driver: DriverKind, guests: Option<GuestReports>) {
        let member = Member {
            cid: cid(number),
            host: HostAccess::Hybrid {
                services: self.dir.path().join(format!("vm{}", cid(number))).into(),
                listener: None,
                messages: None,
            },
            buf_alloc: 1 << 20,
            service: None,
            driver,
            account: Budget::unlimited().account(),
            stopped_timeout: (number == VM).then_some(Duration::from_millis(1)),
            guests,
            state: MemberState::default(),
        };
        let queue_pairs: Arc<[DeviceAddr]> = Arc::new([addr(number)]);
        let [device] = terms().devices(&queue_pairs, member).try_into().unwrap();
        let message = WorkerMessage::AddDevice(Box::new(device));
        self.sender.send(message).unwrap();
    }

    /// Adds a device for a process, or for another VM.
    pub(crate) fn add_plain_device(&mut self, number: u32, driver: DriverKind) {
        self.add_device(number, driver, None);
    }

    pub(crate) fn remove_device(&mut self, number: u32) {
        let message = WorkerMessage::RemoveDevice { number };
        self.sender.send(message).unwrap();
        self.settle();
    }

    /// Sends a command to the VM's device.
    pub(crate) fn command(&mut self, command: DeviceCommand) -> Receiver<DeviceReply> {
        let (reply, answer) = Reply::channel();
        let command = WorkerMessage::Command {
            number: VM,
            command,
            reply,
        };
        self.sender.send(command).unwrap();
        answer
    }

    pub(crate) fn answered(&mut self, command: DeviceCommand) -> DeviceReply {
        let answer = self.command(command);
        self.until("an answer", |_| answer.try_recv().ok())
    }

    #[track_caller]
    pub(crate) fn done(&mut self, command: DeviceCommand) {
        assert_eq!(self.answered(command), DeviceReply::Done);
    }

    #[track_caller]
    pub(crate) fn start_queue(&mut self, index: u16, base: u16) {
        let config = test_guest::config(RINGS[usize::from(index)]);
        let config = zerosock_ring::QueueConfig { base, ..config };
        let kick = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        self.done(DeviceCommand::StartQueue {
            index,
            config,
            kick: kick.into(),
            call: None,
            err: None,
            used_log: None,
            enabled: true,
            start: 0,
        });
    }

    #[track_caller]
    pub(crate) fn stop_queue(&mut self, index: u16) -> u16 {
        match self.answered(DeviceCommand::StopQueue { index }) {
            DeviceReply::Base(base) => base,
            other => panic!("{other:?}"),
        }
    }

    /// Stops the queues of the VM.
    pub(crate) fn pause(&mut self) -> [u16; 3] {
        [RX, TX, EVENT].map(|index| self.stop_queue(index))
    }

    pub(crate) fn resume(&mut self, bases: [u16; 3]) {
        for (index, base) in (0..).zip(bases) {
            self.start_queue(index, base);
        }
    }

    pub(crate) fn order(&mut self, order: GuestOrder) {
        let message = SiblingMessage::Guest(Box::new(order));
        let number = VM;
        let message = WorkerMessage::Device { number, message };
        self.sender.send(message).unwrap();
    }

    /// One step, in which the VM has kicked.
    fn step(&mut self) {
        self.worker.activate(VM);
        assert!(self.worker.step(Some(Duration::ZERO)).unwrap());
        for (header, payload) in self.vm.received_bytes() {
            if header.op.known() == Some(Op::CreditRequest) {
                // As kernels do.
                let port = header.dst.port.get();
                self.vm.send(port, header.src, Op::CreditUpdate, 0);
            } else {
                self.packets.push((header, payload));
            }
        }
    }

    #[track_caller]
    pub(crate) fn until<T>(
        &mut self,
        what: &str,
        mut look: impl FnMut(&mut GuestLab) -> Option<T>,
    ) -> T {
        let deadline = Instant::now() + PATIENCE;
        loop {
            self.step();
            if let Some(found) = look(self) {
                return found;
            }
            assert!(Instant::now() < deadline, "{what} does not come");
            std::thread::yield_now();
        }
    }

    /// Steps until nothing is to be done, for longer than a notification or a timer of some milliseconds takes.
    pub(crate) fn settle(&mut self) {
        let mut quiet = Instant::now();
        let end = quiet + PATIENCE;
        while quiet.elapsed() < Duration::from_millis(30) {
            self.step();
            if !self.worker.is_idle() || self.worker.has_messages() {
                quiet = Instant::now();
            }
            assert!(Instant::now() < end, "the worker is never idle");
        }
    }

    #[track_caller]
    pub(crate) fn event(&mut self) -> GuestEvent {
        self.until("an event", |lab| lab.try_event())
    }

    /// The next event of a stream or an attachment. Resets of the VM before it are in `resets` then.
    pub(crate) fn try_event(&mut self) -> Option<GuestEvent> {
        loop {
            let (cid, event) = self.events.drain().next()?;
            assert_eq!(cid, VM_CID);
            match event {
                GuestEvent::Reset => self.resets += 1,
                event => return Some(event),
            }
        }
    }

    #[track_caller]
    pub(crate) fn no_event(&mut self) {
        self.settle();
        let event = self.try_event();
        assert!(event.is_none(), "{event:?}");
    }

    /// The next packet for this port of the guest's kernel.
    #[track_caller]
    pub(crate) fn packet(&mut self, port: u32) -> (Repr, Vec<u8>) {
        self.until("a packet", |lab| lab.take_packet(port))
    }

    pub(crate) fn take_packet(&mut self, port: u32) -> Option<(Repr, Vec<u8>)> {
        let mut all = self.packets.iter();
        let at = all.position(|(header, _)| header.dst.port.get() == port)?;
        Some(self.packets.remove(at))
    }

    #[track_caller]
    pub(crate) fn expect(&mut self, port: u32, op: Op) {
        let (header, _) = self.packet(port);
        assert_eq!(header.op.known(), Some(op));
    }

    pub(crate) fn next_number(&mut self) -> u32 {
        self.next += 1;
        self.next - 1
    }

    /// The memory of these huge pages, in a mapping of the guest.
    pub(crate) fn view(&self, pages: &[u64]) -> (Vec<Extent>, Arc<Memory>) {
        let extents = pages.iter().map(|page| Extent {
            addr: page * HUGE,
            len: HUGE,
        });
        let extents: Vec<_> = extents.collect();
        let view = Memory::of_extents(&map(&self.ram, RAM), &extents).unwrap();
        (extents, Arc::new(view))
    }

    /// Orders a check of pages with these values, and returns what is reported.
    pub(crate) fn check(&mut self, pages: &[u64]) -> (AttachmentKey, GuestEvent) {
        let key = self.order_check(pages);
        (key, self.event())
    }

    pub(crate) fn order_check(&mut self, pages: &[u64]) -> AttachmentKey {
        let number = self.next_number();
        let (extents, view) = self.view(pages);
        let nonce = Nonce([number as u8; 32]);
        let all = 0..view.size() / PAGE;
        assert_eq!(write_values(&view, &nonce, all), None);
        let key = AttachmentKey(number.into());
        let token = Token([number as u8; 16]);
        self.order(GuestOrder::Check {
            key,
            extents,
            nonce,
            token,
        });
        key
    }

    /// An attachment that was accepted behind the check of its pages.
    pub(crate) fn accepted(&mut self, pages: &[u64]) -> TestEndpoint {
        let (key, event) = self.check(pages);
        let GuestEvent::Checked { result, .. } = event else {
            panic!("{event:?}");
        };
        assert_eq!(result, Ok(()));
        let number = key.0 as u32;
        self.add_device(number, DriverKind::GuestEndpoint { vm: addr(VM) }, None);
        let token = Token([number as u8; 16]);
        let (extents, view) = self.view(pages);
        for page in 0..pages.len() as u64 {
            fill(&view, page * HUGE, HUGE - 64, 0);
        }
        let guest = Guest::on(cid(number), view.clone(), |end| end % HUGE != 0);
        TestEndpoint {
            key,
            number,
            extents,
            view,
            guest,
            token,
            doorbell: 2000 + number,
        }
    }

    /// Connects to the doorbell's port and sends these bytes.
    pub(crate) fn open_doorbell(&mut self, port: u32, bytes: &[u8]) {
        self.vm.send(port, host(DOORBELL_PORT), Op::Request, 0);
        self.expect(port, Op::Response);
        self.ring(port, bytes);
    }

    /// Sends bytes on a doorbell.
    pub(crate) fn ring(&mut self, port: u32, bytes: &[u8]) {
        self.until("room for a packet", |lab| lab.vm.is_drained().then_some(()));
        self.vm.send_bytes(port, host(DOORBELL_PORT), bytes);
    }

    pub(crate) fn order_start(&mut self, endpoint: &TestEndpoint) {
        self.order(GuestOrder::Start {
            key: endpoint.key,
            device: addr(endpoint.number),
            start: Start {
                features: F_VERSION_1,
                queue_size: test_guest::SIZE,
                rings: RINGS,
            },
        });
    }

    /// An endpoint that runs.
    pub(crate) fn endpoint(&mut self, pages: &[u64]) -> TestEndpoint {
        let endpoint = self.accepted(pages);
        self.open_doorbell(endpoint.doorbell, &endpoint.token.0);
        self.order_start(&endpoint);
        let event = self.event();
        assert!(
            matches!(event, GuestEvent::Started { key } if key == endpoint.key),
            "{event:?}"
        );
        endpoint
    }

    /// A connection of the endpoint to a program on the host.
    pub(crate) fn stream(&mut self, endpoint: &mut TestEndpoint) -> Stream {
        let port = 5000 + self.next_number();
        let path = self
            .dir
            .path()
            .join(format!("vm{}_{port}", cid(endpoint.number)));
        let listener = UnixListener::bind(path).unwrap();
        let to = host(Port::new(port));
        endpoint.guest.send(port, to, Op::Request, 0);
        self.ring(endpoint.doorbell, &[1]);
        let answers = self.until("an answer", |_| {
            let packets = endpoint.guest.received();
            (!packets.is_empty()).then_some(packets)
        });
        assert_eq!(answers[0].op.known(), Some(Op::Response));
        let (program, _) = listener.accept().unwrap();
        program.set_nonblocking(true).unwrap();
        Stream {
            port,
            program,
            to_endpoint: 0,
            read_by_endpoint: 0,
            from_endpoint: 0,
            read_by_program: 0,
        }
    }

    /// Waits for a wake-up of the guest by this doorbell.
    #[track_caller]
    pub(crate) fn woken(&mut self, port: u32) {
        let (header, bytes) = self.packet(port);
        assert_eq!(header.op.known(), Some(Op::Rw));
        assert_eq!(bytes, [1]);
    }

    /// Both programs send so many bytes, and get those that have been sent before as well.
    #[track_caller]
    pub(crate) fn exchange(&mut self, endpoint: &mut TestEndpoint, stream: &mut Stream, n: usize) {
        stream.write(n);
        self.finish_to_endpoint(endpoint, stream);
        self.send(endpoint, stream, n);
        self.ring(endpoint.doorbell, &[1]);
        self.finish_from_endpoint(stream);
    }

    /// The program on the pages puts a packet into its queue.
    pub(crate) fn send(&mut self, endpoint: &mut TestEndpoint, stream: &mut Stream, count: usize) {
        self.until("room", |_| endpoint.guest.is_drained().then_some(()));
        let to = host(Port::new(stream.port));
        let bytes = bytes(stream.from_endpoint, count);
        endpoint.guest.send_bytes(stream.port, to, &bytes);
        stream.from_endpoint += count;
    }

    #[track_caller]
    pub(crate) fn finish_to_endpoint(&mut self, endpoint: &mut TestEndpoint, stream: &mut Stream) {
        let mut left = stream.unread();
        self.until("the program's bytes", |_| {
            for (header, payload) in endpoint.guest.received_bytes() {
                assert_eq!(header.op.known(), Some(Op::Rw));
                assert_eq!(payload, bytes(stream.to_endpoint - left, payload.len()));
                left -= payload.len();
            }
            (left == 0).then_some(())
        });
        stream.read_by_endpoint = stream.to_endpoint;
    }

    #[track_caller]
    pub(crate) fn finish_from_endpoint(&mut self, stream: &mut Stream) {
        self.until("the endpoint's bytes", |_| {
            stream.read();
            (stream.read_by_program == stream.from_endpoint).then_some(())
        });
    }
}

pub(crate) fn cid(number: u32) -> Cid {
    Cid::new(3 + number)
}

/// Overwrites bytes of a memory.
pub(crate) fn fill(memory: &Memory, at: u64, len: u64, byte: u8) {
    let mut pieces = Vec::new();
    memory.translate(at, len as u32, &mut pieces).unwrap();
    assert_eq!(
        memory.write(&pieces, 0, &vec![byte; len as usize]),
        len as usize
    );
}

pub(crate) fn read(memory: &Memory) -> Vec<u8> {
    let mut pieces = Vec::new();
    let mut bytes = vec![0; memory.size() as usize];
    memory
        .translate(0, memory.size() as u32, &mut pieces)
        .unwrap();
    assert_eq!(memory.read(&pieces, 0, &mut bytes), bytes.len());
    bytes
}

impl TestEndpoint {
    /// Overwrites the value in a huge page of its memory.
    pub(crate) fn lose_value(&self, page: u64) {
        let at = page * HUGE + HUGE - PAGE + page_value::VALUE_AT;
        fill(&self.view, at, 1, 0xee);
    }
}

#[track_caller]
pub(crate) fn assert_ended(event: GuestEvent, of: AttachmentKey, why: Reason) {
    match event {
        GuestEvent::Ended { key, reason } => assert_eq!((key, reason), (of, why)),
        other => panic!("{other:?}"),
    }
}

#[track_caller]
pub(crate) fn assert_refused(event: GuestEvent, of: AttachmentKey, reason: Reason, index: u32) {
    let refusal = Err(Refusal { reason, index });
    match event {
        GuestEvent::Checked { key, result } => assert_eq!((key, result), (of, refusal)),
        other => panic!("{other:?}"),
    }
}

/// Whatever the programs and the worker do, no byte of the pages changes.
#[track_caller]
pub(crate) fn assert_still(lab: &mut GuestLab, endpoint: &TestEndpoint, before: &[u8], when: &str) {
    lab.settle();
    let after = read(&endpoint.view);
    let changed = before.iter().zip(&after).position(|(a, b)| a != b);
    assert_eq!(changed, None, "{when}");
}

/// An endpoint and its stream, with bytes of both sides on their way.
pub(crate) fn busy(lab: &mut GuestLab) -> (TestEndpoint, Stream) {
    let mut endpoint = lab.endpoint(&PAGES);
    let mut stream = lab.stream(&mut endpoint);
    lab.exchange(&mut endpoint, &mut stream, 10_000);
    lab.send(&mut endpoint, &mut stream, 1000);
    stream.write(100_000);
    (endpoint, stream)
}
