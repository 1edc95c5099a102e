//! The server with the device of a VM. The test is the rest: the front-end of the VM, the kernel of the guest with its
//! agent, the program on the pages, and one on the host.

use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use zerosock_proto::wire::vsock::Op;
use zerosock_proto::{Cid, Port};
use zerosock_ring::{Extent, Memory};
use zerosock_sys::account::Budget;
use zerosock_vhost_user::session::F_VERSION_1;
use zerosock_vhost_user::{Control, DeviceCommand};

use super::super::super::key::Nonce;
use super::super::super::options::GuestEndpoints;
use super::super::super::page_value::{PAGE, write_values};
use super::super::super::wire::{
    Answer, AttachmentId, Reason, Register, Request, RequestWriter, Start, decode_answer,
};
use super::super::super::{DOORBELL_PORT, REGISTRATION_PORT};
use super::super::{GuestServer, GuestShare, TimeLimits};
use super::lab::{self, CIDS, VM};
use crate::control::attach::AttachRequest;
use crate::control::attach::directory::Directory;
use crate::control::config::Reload;
use crate::control::registry::{DeviceRegistry, RouteEntry};
use crate::control::reload::{ConfiguredVm, ControlOrder, Order, ReloadHandler, VmStage};
use crate::device::HostAccess;
use crate::device::guest_test_lab::{GuestLab, HUGE, PAGES, bytes, fill, host, read, terms};
use crate::device::test_guest::{self, Guest};

/// The guest's port of the doorbell.
const DOORBELL: u32 = 2000;

/// A VM with the server, and the agent's stream from a port below 1024.
struct World {
    lab: GuestLab,
    directory: Arc<Directory>,
    received: Vec<u8>,
    writer: RequestWriter,
    nonce: Nonce,
    port: u32,
    changes: Sender<ControlOrder>,
    control: Control,
}

impl World {
    fn new(limits: TimeLimits) -> World {
        let directory: Arc<Directory> = Arc::default();
        let mut guests = GuestServer::new(CIDS, limits, directory.clone()).unwrap();
        let lab = GuestLab::reporting_to(guests.reports().clone());
        let mut registry = DeviceRegistry::new(lab.senders(), terms(), Budget::unlimited());
        let addr = registry.assign(VM, RouteEntry::default()).unwrap();
        let services = lab.path("vm");
        let share = GuestShare {
            addr,
            host: HostAccess::Hybrid {
                services: services.into(),
                listener: None,
                messages: None,
            },
            buf_alloc: 1 << 20,
            groups: Vec::new(),
            account: Budget::unlimited().account(),
            stopped_timeout: None,
            options: Some(lab::options()),
        };
        guests.add_vm(VM, share);
        let vm = ConfiguredVm {
            vm: 0,
            addr,
            stage: VmStage::Active,
        };
        let vms = [(VM, vm)].into();
        let (handler, changes) = ReloadHandler::new(registry, None, guests, vms, false);
        let control = Control::spawn_with(Vec::new(), Some(Box::new(handler))).unwrap();
        World {
            lab,
            directory,
            received: Vec::new(),
            writer: RequestWriter::new(&lab::key(), &Nonce([0; 32])),
            nonce: Nonce([0; 32]),
            port: 900,
            changes,
            control,
        }
    }

    /// Opens a stream from the next port, and returns the first answer.
    fn connect(&mut self) -> Answer {
        self.port += 1;
        let to = host(REGISTRATION_PORT);
        self.lab.vm.send(self.port, to, Op::Request, 0);
        self.lab.expect(self.port, Op::Response);
        self.received.clear();
        let first = self.answer();
        if let Answer::Hello(nonce) = first {
            self.nonce = nonce;
            self.writer = RequestWriter::new(&lab::key(), &nonce);
        }
        first
    }

    fn send(&mut self, request: &Request) {
        let bytes = self.writer.encode(request).unwrap();
        let (port, to) = (self.port, host(REGISTRATION_PORT));
        let lab = &mut self.lab;
        lab.until("room", |lab| lab.vm.is_drained().then_some(()));
        lab.vm.send_bytes(port, to, &bytes);
    }

    fn answer(&mut self) -> Answer {
        loop {
            if let Some((answer, len)) = decode_answer(&self.received).unwrap() {
                self.received.drain(..len);
                return answer;
            }
            let (header, bytes) = self.lab.packet(self.port);
            match header.op.known() {
                Some(Op::Rw) => self.received.extend(bytes),
                Some(Op::CreditUpdate) => {}
                other => panic!("{other:?} instead of an answer"),
            }
        }
    }

    /// Registers pages of the guest with the values of this nonce.
    fn register(&mut self, id: u8, nonce: Nonce) -> Arc<Memory> {
        let (extents, view): (Vec<Extent>, _) = self.lab.view(&PAGES);
        assert_eq!(write_values(&view, &nonce, 0..view.size() / PAGE), None);
        self.send(&Request::Register(Register {
            attachment: AttachmentId([id; 16]),
            endpoint: AttachRequest {
                cid: None,
                name: Some("db".parse().unwrap()),
                ports: Vec::new(),
            },
            extents,
        }));
        view
    }

    /// An endpoint that runs, and the program on its pages.
    fn run(&mut self, id: u8) -> (Guest, Arc<Memory>, Cid) {
        assert!(matches!(self.connect(), Answer::Hello(_)));
        let view = self.register(id, self.nonce);
        let (cid, token) = match self.answer() {
            Answer::Accepted { cid, token } => (cid, token),
            other => panic!("{other:?}"),
        };
        for page in 0..PAGES.len() as u64 {
            fill(&view, page * HUGE, HUGE - 64, 0);
        }
        let guest = Guest::on(cid, view.clone(), |end| end % HUGE != 0);
        self.lab.open_doorbell(DOORBELL + self.port, &token.0);
        let rings = [test_guest::RX, test_guest::TX, test_guest::EVENT];
        self.send(&Request::Start(Start {
            features: F_VERSION_1,
            queue_size: test_guest::SIZE,
            rings,
        }));
        let features = F_VERSION_1;
        assert_eq!(self.answer(), Answer::Started { features });
        (guest, view, cid)
    }

    /// Passes bytes between the program on the pages and one on the host, both ways.
    fn exchange(&mut self, guest: &mut Guest, port: u32) {
        let path = self.lab.path(&format!("vm_{port}"));
        let listener = UnixListener::bind(path).unwrap();
        let doorbell = DOORBELL + self.port;
        guest.send(port, host(Port::new(port)), Op::Request, 0);
        self.lab.ring(doorbell, &[1]);
        let answers = self.lab.until("an answer", |_| {
            let packets = guest.received();
            (!packets.is_empty()).then_some(packets)
        });
        assert_eq!(answers[0].op.known(), Some(Op::Response));
        let (mut program, _) = listener.accept().unwrap();
        program.set_nonblocking(true).unwrap();
        let sent = bytes(0, 10_000);
        let lab = &mut self.lab;
        lab.until("room", |_| guest.is_drained().then_some(()));
        guest.send_bytes(port, host(Port::new(port)), &sent);
        self.lab.ring(doorbell, &[1]);
        let mut got = Vec::new();
        self.lab.until("the bytes of the endpoint", |_| {
            let _ = program.read_to_end(&mut got);
            (got.len() == sent.len()).then_some(())
        });
        assert_eq!(got, sent);
        program.write_all(&sent).unwrap();
        let mut got = Vec::new();
        self.lab.until("the bytes of the host", |_| {
            for (_, payload) in guest.received_bytes() {
                got.extend(payload);
            }
            (got.len() == sent.len()).then_some(())
        });
        assert_eq!(got, sent);
    }

    /// Another driver starts in the VM.
    fn reset_vm(&mut self) {
        self.lab.done(DeviceCommand::Disconnected);
        self.lab.vm = Guest::on(VM, self.lab.view(&[0, 1, 2]).1, |_| true);
        self.lab.connect_vm();
    }

    fn set_options(&mut self, options: Option<GuestEndpoints>) {
        let (answer, answered) = channel();
        let reload = Reload {
            guest_endpoints: [(VM, options)].into(),
            ..Reload::default()
        };
        let add = Vec::new();
        let order = Order {
            add,
            reload,
            answer,
        };
        let order = ControlOrder::Reload(Box::new(order));
        self.changes.send(order).unwrap();
        self.control.wake_extension();
        let done = self
            .lab
            .until("the new options", |_| answered.try_recv().ok());
        done.unwrap();
    }

    fn knows(&mut self, id: u8) -> bool {
        assert!(matches!(self.connect(), Answer::Hello(_)));
        self.send(&Request::Query(AttachmentId([id; 16])));
        match self.answer() {
            Answer::Known(known) => known,
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_stream_passes_between_an_endpoint_on_pages_of_the_guest_and_the_host() {
    let mut world = World::new(TimeLimits::default());
    let (mut guest, view, cid) = world.run(1);
    assert_eq!(world.directory.guests.endpoints()[0].cid, cid);
    world.exchange(&mut guest, 5000);
    world.send(&Request::End);
    assert_eq!(world.answer(), Answer::Ended(Reason::REQUESTED));
    // The pages are the guest's again.
    fill(&view, 0, view.size(), 0x5a);
    world.lab.settle();
    assert!(read(&view).iter().all(|&byte| byte == 0x5a));
    assert!(!world.knows(1));
    // All of it is free, for the same pages.
    let (mut guest, ..) = world.run(1);
    world.exchange(&mut guest, 5001);
}

#[test]
fn an_endpoint_ends_with_the_stream_of_its_agent() {
    let mut world = World::new(TimeLimits::default());
    let (_guest, view, _) = world.run(1);
    world
        .lab
        .vm
        .send(world.port, host(REGISTRATION_PORT), Op::Rst, 0);
    while world.knows(1) {}
    assert_eq!(world.directory.guests.endpoints(), []);
    fill(&view, 0, view.size(), 0x5a);
    world.lab.settle();
    assert!(read(&view).iter().all(|&byte| byte == 0x5a));
}

#[test]
fn pages_with_other_values_are_refused_and_shut_the_port_until_a_reset() {
    let limits = TimeLimits {
        failure: Duration::from_millis(50),
        ..TimeLimits::default()
    };
    let mut world = World::new(limits);
    for n in 0..5 {
        assert!(matches!(world.connect(), Answer::Hello(_)));
        // The values of an earlier stream.
        world.register(1, Nonce([n; 32]));
        assert_eq!(
            world.answer(),
            Answer::Refused(Reason::FAILED.into()),
            "{n}"
        );
    }
    assert_eq!(world.connect(), Answer::Refused(Reason::FAILED.into()));
    // A pause is no reset.
    let bases = world.lab.pause();
    world.lab.resume(bases);
    assert_eq!(world.connect(), Answer::Refused(Reason::FAILED.into()));
    world.reset_vm();
    let (mut guest, ..) = world.run(1);
    world.exchange(&mut guest, 5000);
}

/// The option is removed from a VM that runs: its ports are as any other, and open again with the option.
#[test]
fn a_reload_closes_and_opens_the_ports_of_a_vm_that_runs() {
    let mut world = World::new(TimeLimits::default());
    let _running = world.run(1);
    world.set_options(None);
    assert_eq!(world.answer(), Answer::Ended(Reason::REMOVED));
    for (port, from) in [(REGISTRATION_PORT, 800), (DOORBELL_PORT, 3000)] {
        world.lab.vm.send(from, host(port), Op::Request, 0);
        world.lab.expect(from, Op::Rst);
    }
    world.set_options(Some(lab::options()));
    let (mut guest, ..) = world.run(1);
    world.exchange(&mut guest, 5000);
}
