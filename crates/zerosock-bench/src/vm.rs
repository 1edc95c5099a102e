//! The other side of the tables `rx`, `local` and `relay` with `--vm`: a stock guest on a device in this process, and
//! programs in the guest that use its kernel's AF_VSOCK.
//!
//! # Invariants
//! - The guest boots once for a table. In `rx` and `local` it stays on the sender's core, this process on the receiver's.
//! - What the machine lacks is reported as a reason; no row is left out.

mod endpoint;
mod relay;

use std::cell::Cell;
use std::io::{Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use tempfile::TempDir;
use zerosock::daemon::{GuestEndpoints, GuestKey};
use zerosock::vsock::{Host, Listener, Stream};
use zerosock::{Cid, Port};
use zerosock_cli::vm::accel::Choice;
use zerosock_cli::vm::qemu;
use zerosock_testkit::packages;
use zerosock_testkit::protocol::{Command, Outcome as Done};
use zerosock_testkit::remote::{Guest, Pending};

use crate::bench::Bench;
use crate::binary::WORKER;
use crate::image::{Image, short_dir};
use crate::pair::Cores;
use crate::peers::ours::{self, Ours, WINDOW};
use crate::peers::{dequeue, vsock as guest_side};
use crate::processes::own_cpu_time;
use crate::report::line;
use crate::worker::order::{Job, Order, Outcome, Wait};
use crate::worker::touch::{Fault, Message};
use crate::worker::{self, Link, jobs};
pub(crate) use relay::{Relayed, Relaying};

const CID: u32 = 3;
/// The key of the VM, for guest endpoints.
const KEY: &str = "0123456789abcdef0123456789abcdef";
/// Where programs of the guest attach.
const SOCKET: &str = "/run/zerosock/attach.sock";
const MEMORY_MIB: u64 = 448;
/// Timeout of each step: the guest may be emulated on a busy machine.
const STEP: Duration = Duration::from_secs(60);

/// How the host sends.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Sending {
    /// From a separate buffer.
    Copy,
    /// Each piece is written into the guest's receive buffer.
    Loan,
}

/// What a program of the guest uses.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Side {
    /// Its kernel's AF_VSOCK.
    Kernel,
    /// An endpoint on pages of the guest.
    Endpoint,
}

impl Side {
    /// For the tables.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Side::Kernel => "kernel",
            Side::Endpoint => "endpoint",
        }
    }

    /// The order of the program; `how` an endpoint receives.
    fn order(self, order: &Order, job: Job, how: Option<&str>) -> Order {
        let (peer, how) = match self {
            Side::Kernel => (guest_side::NAME, None),
            Side::Endpoint => (ours::IN_GUEST, how.map(str::to_owned)),
        };
        Order {
            peer: peer.to_owned(),
            job,
            place: SOCKET.to_owned(),
            how,
            ..order.clone()
        }
    }
}

/// Result of one measurement.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Figures {
    /// The receiver's.
    pub(crate) outcome: Outcome,
    /// The sender's, where there is one.
    pub(crate) sent: Option<Outcome>,
    /// CPU time of the host's thread for each piece, in nanoseconds, when the host sends.
    pub(crate) sender_cpu: Option<f64>,
    /// CPU time of the guest for each piece, in nanoseconds, where it was measured.
    pub(crate) guest_cpu: Option<f64>,
}

impl Figures {
    pub(crate) fn of(outcome: Outcome) -> Figures {
        Figures {
            outcome,
            sent: None,
            sender_cpu: None,
            guest_cpu: None,
        }
    }
}

/// What a guest has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setup {
    cores: Cores,
    cpus: u32,
    /// It has socat, vsock on the loopback CID, and a loopback device for its sockets.
    relays: bool,
    /// Its programs may have endpoints on its pages.
    endpoints: bool,
}

impl Setup {
    /// One processor, on the sender's core; its programs have endpoints.
    fn endpoints(cores: Cores) -> Setup {
        Setup {
            cores,
            cpus: 1,
            relays: false,
            endpoints: true,
        }
    }

    /// Two processors, on any cores.
    pub(crate) const RELAY: Setup = Setup {
        cores: Cores::ANY,
        cpus: 2,
        relays: true,
        endpoints: false,
    };
}

/// A guest in software emulation needs this multiple of the warm-up time.
const WARM_UP_FACTOR: u32 = 3;

/// Boots a guest with endpoints, if it can have them, and lets `run` measure over it, on a thread of its own, because
/// that is on the receiver's core. The table says what is missing.
pub(crate) fn measure_over(bench: &mut Bench<'_>, run: impl FnOnce(&mut Bench<'_>, &Vm) + Send) {
    let measure = || {
        let vm = match Vm::boot(Setup::endpoints(bench.cores)) {
            Ok(vm) => vm,
            Err(reason) => return bench.table.note_missing("VM", &reason),
        };
        bench.table.method = format!("{} {}", bench.table.method, vm.describe());
        if let Some(reason) = vm.no_endpoints() {
            bench.table.note_missing("endpoints in the VM", reason);
        }
        run(bench, &vm);
    };
    thread::scope(|scope| {
        if scope.spawn(measure).join().is_err() {
            panic!("the measurement of the VM panicked");
        }
    });
}

/// The order of a measurement over a VM.
///
/// # Errors
/// A spinning host takes the guest's only core.
pub(crate) fn order(bench: &Bench<'_>, size: usize, wait: Wait) -> Result<Order, Fault> {
    if wait == Wait::Spin && bench.cores.sender.is_none() {
        return Err("a spinning host needs a core beside the guest's".to_owned());
    }
    Ok(Order {
        peer: String::new(),
        job: Job::Receive,
        wait,
        size,
        warm: bench.settings.warm * WARM_UP_FACTOR,
        time: bench.settings.time,
        cpu: None,
        other_cpu: None,
        place: "-".to_owned(),
        to: None,
        how: None,
    })
}

/// A running guest, and the host in this process.
pub(crate) struct Vm {
    /// Why there is no socat in the guest.
    socat: Option<String>,
    /// Why programs of the guest have no endpoints.
    no_endpoints: Option<String>,
    guest: Guest,
    host: Host,
    ports: Cell<u32>,
    // Dropped last: contains the sockets of the others.
    _dir: TempDir,
}

impl Vm {
    /// Boots the guest. The calling thread is on the receiver's core afterwards.
    pub(crate) fn boot(setup: Setup) -> Result<Vm, Fault> {
        let cores = setup.cores;
        let modules: &[_] = if setup.relays {
            &["vsock_loopback"]
        } else {
            &[]
        };
        let mut socat = None;
        let image = Image::qemu(modules, |cache, image| {
            if setup.relays {
                socat = packages::add_socat(cache, image).err();
            }
            Ok(())
        })?;
        let dir = short_dir()?;
        let socket = dir.path().join("vhost");
        let mut host = Host::builder().vm(Cid::new(CID), &socket).window(WINDOW);
        if setup.endpoints {
            let key = GuestKey::new(KEY.as_bytes()).map_err(line)?;
            host = host.guest_endpoints(Cid::new(CID), GuestEndpoints::new(key));
        }
        let host = host.start().map_err(line)?;
        eprintln!("booting Linux {} under QEMU", image.kernel.release);
        // All threads of QEMU inherit the affinity of the one started here.
        worker::pin(cores.sender)?;
        let machine = qemu::device(MEMORY_MIB, qemu::VSOCK, &socket);
        let guest = driving(&host, || {
            image.boot(setup.cpus, machine, dir.path(), Choice::Auto)
        });
        worker::pin(cores.receiver)?;
        let mut vm = Vm {
            socat,
            no_endpoints: None,
            guest: guest?,
            host,
            ports: Cell::new(1000),
            _dir: dir,
        };
        if setup.relays {
            let up = vm.run("/bin/busybox ifconfig lo 127.0.0.1 up");
            let Done { bytes, text, .. } = up.wait(STEP).map_err(line)?;
            if bytes != 0 {
                return Err(format!("the guest's loopback device: {text:?}"));
            }
        }
        if setup.endpoints {
            vm.no_endpoints = vm.start_agent().err();
        }
        Ok(vm)
    }

    /// Why programs of the guest have no endpoints; `None`: they may have.
    pub(crate) fn no_endpoints(&self) -> Option<&str> {
        self.no_endpoints.as_deref()
    }

    fn port(&self) -> u32 {
        let port = self.ports.get() + 1;
        self.ports.set(port);
        port
    }

    /// Description for the tables.
    pub(crate) fn describe(&self) -> String {
        format!(
            "VM: a guest with Linux {} and one processor under {}, on the sender's core; a program \
             in it sends and receives by its kernel's sockets, or on pages of its own (\"endpoint\"). \
             The host is this process. A VM is not trusted: what lies in its memory is read and \
             written by way of 8 KiB.",
            self.guest.release, self.guest.accel
        )
    }

    /// A program of the guest sends, the host dequeues.
    pub(crate) fn to_host(&self, order: &Order, side: Side, how: &str) -> Result<Figures, Fault> {
        let how = how.parse()?;
        let there = side.order(order, Job::Send, None);
        self.with_cpu(|| {
            self.with_program(there, order.wait, |stream, there| {
                let outcome = dequeue::run(&stream, how, order)?;
                leave(&stream)?;
                let mut figures = Figures::of(outcome);
                figures.sent = Some(result(there)?.parse()?);
                Ok(figures)
            })
        })
    }

    /// The host sends, a program of the guest dequeues: of an endpoint in the way `how`.
    pub(crate) fn to_guest(
        &self,
        order: &Order,
        sending: Sending,
        side: Side,
        how: &str,
    ) -> Result<Figures, Fault> {
        let send = Order {
            job: Job::Send,
            ..order.clone()
        };
        let there = side.order(order, Job::Receive, Some(how));
        self.with_cpu(|| {
            self.with_program(there, order.wait, |stream, there| {
                let before = own_cpu_time()?;
                let mut sending = match sending {
                    Sending::Loan => Either::Loan(Box::new(Ours::over(stream))),
                    Sending::Copy => Either::Copy(stream, vec![0; order.size]),
                };
                let sent = jobs::run(&mut sending, &send)?;
                let cpu = own_cpu_time()? - before;
                leave(sending.stream())?;
                let mut figures = Figures::of(result(there)?.parse()?);
                figures.sender_cpu = Some(cpu as f64 / sent.messages.max(1) as f64);
                figures.sent = Some(sent);
                Ok(figures)
            })
        })
    }

    /// A program of the guest pings, and the host answers.
    pub(crate) fn ping(&self, order: &Order, side: Side) -> Result<Figures, Fault> {
        let there = side.order(order, Job::Ping, None);
        self.with_program(there, order.wait, |stream, there| {
            let mut ours = Ours::over(stream);
            let pong = Order {
                job: Job::Pong,
                ..order.clone()
            };
            jobs::run(&mut ours, &pong)?;
            leave(ours.stream())?;
            Ok(Figures::of(result(there)?.parse()?))
        })
    }

    /// Lets a program in the guest connect to the host and carry out an order.
    fn with_program(
        &self,
        there: Order,
        wait: Wait,
        run: impl FnOnce(Stream, Pending) -> Result<Figures, Fault>,
    ) -> Result<Figures, Fault> {
        let port = self.port();
        let listener = self.host.listen(Port::new(port), 1).map_err(line)?;
        let there = Order {
            to: Some(port.to_string()),
            ..there
        };
        let there = there.to_string();
        let argv = ["/bin/zerosock", WORKER]
            .into_iter()
            .chain(there.split(' '));
        let there = self.guest.remote.start(Command::Run {
            argv: argv.map(str::to_owned).collect(),
        });
        match accept(&listener, wait) {
            Ok(stream) => run(stream, there),
            Err(fault) => Err(result(there).err().unwrap_or(fault)),
        }
    }
}

/// Drives the host during another wait: without it the VMM gets no answer.
fn driving<T>(host: &Host, wait: impl FnOnce() -> T) -> T {
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) && host.drive().is_ok() {
                thread::sleep(Duration::from_millis(1));
            }
        });
        let result = wait();
        done.store(true, Ordering::Relaxed);
        result
    })
}

fn accept(listener: &Listener, wait: Wait) -> Result<Stream, Fault> {
    let (stream, _) = listener
        .accept_timeout(STEP)
        .map_err(|error| format!("the guest's program does not connect: {error}"))?;
    stream.set_wait(wait.into());
    // A hanging guest ends the measurement, not the table.
    stream.set_read_timeout(Some(STEP)).map_err(line)?;
    stream.set_write_timeout(Some(STEP)).map_err(line)?;
    Ok(stream)
}

/// Waits until the guest's program has closed its end and so has received everything.
fn leave(mut stream: &Stream) -> Result<(), Fault> {
    match stream.read(&mut [0; 16]) {
        Ok(0) => Ok(()),
        Ok(_) => Err("the guest's program said something".to_owned()),
        Err(error) => Err(format!("the guest's program does not end: {error}")),
    }
}

/// The measurement of the guest's program, as it printed it.
fn result(there: Pending) -> Result<String, Fault> {
    let Done { bytes, text, .. } = there.wait(STEP).map_err(line)?;
    let said = text.unwrap_or_default();
    let word = |word| said.lines().find_map(|line| line.strip_prefix(word));
    if let Some(fault) = word("fault ") {
        return Err(format!("in the guest: {fault}"));
    }
    match word("result ") {
        Some(result) if bytes == 0 => Ok(result.to_owned()),
        _ => Err(format!("in the guest: {}", said.replace('\n', " "))),
    }
}

/// The two ways to send.
enum Either {
    Loan(Box<Ours>),
    Copy(Stream, Vec<u8>),
}

impl Either {
    fn stream(&self) -> &Stream {
        match self {
            Either::Loan(ours) => ours.stream(),
            Either::Copy(stream, _) => stream,
        }
    }
}

impl Link for Either {
    fn send(&mut self, message: Message) -> Result<(), Fault> {
        match self {
            Either::Loan(ours) => ours.send(message),
            Either::Copy(stream, buffer) => {
                message.write(buffer);
                stream.write_all(buffer).map_err(line)
            }
        }
    }

    fn recv(&mut self, _: worker::touch::Check) -> Result<worker::touch::Seen, Fault> {
        Err("a one-way link was used both ways".to_owned())
    }
}
