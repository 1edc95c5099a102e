//! The other side of the table `rx` with `--vm`: a stock guest on a device in this process, and a
//! program in the guest that sends and receives by its kernel's AF_VSOCK.
//!
//! # Invariants
//! - The guest boots once and stays on the sender's core, this process on the receiver's.
//! - What the machine lacks is reported as a reason; no row is left out.

use std::cell::Cell;
use std::fs;
use std::io::{Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use tempfile::TempDir;
use zerosock::vsock::{self, Host, Listener, Stream};
use zerosock::{Cid, Port};
use zerosock_cli::vm::accel::Choice;
use zerosock_cli::vm::cache::Cache;
use zerosock_cli::vm::initramfs::Builder;
use zerosock_cli::vm::kernel::Kernel;
use zerosock_cli::vm::program;
use zerosock_cli::vm::qemu;
use zerosock_testkit::protocol::{Command, Outcome as Done};
use zerosock_testkit::remote::{Guest, Pending, agent};

use crate::pair::Cores;
use crate::peers::ours::{Ours, WINDOW};
use crate::peers::{WORKER, dequeue, vsock as guest_side};
use crate::worker::order::{Job, Order, Outcome, Wait};
use crate::worker::touch::{Fault, Message};
use crate::worker::{self, Link, jobs};

/// Debian's package that names the kernel.
const KERNEL: &str = "linux-image-6.12-cloud-amd64";
const CID: u64 = 3;
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

/// Result of one measurement.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Figures {
    /// The receiver's.
    pub(crate) outcome: Outcome,
    /// CPU time of the host's thread for each piece, in nanoseconds, when the host sends.
    pub(crate) sender_cpu: Option<f64>,
}

/// A running guest, and the host in this process.
pub(crate) struct Vm {
    guest: Guest,
    host: Host,
    ports: Cell<u32>,
    // Dropped last: contains the sockets of the others.
    _dir: TempDir,
}

impl Vm {
    /// Boots the guest. The calling thread is on the receiver's core afterwards.
    pub(crate) fn boot(cores: Cores) -> Result<Vm, Fault> {
        if qemu::version().is_none() {
            return Err(line(qemu::BootError::NoQemu));
        }
        let cache = Cache::find();
        let kernel = Kernel::debian(&cache, KERNEL).map_err(line)?;
        let own = std::env::current_exe().map_err(line)?;
        let inside = program::for_guest(&own, &|note| eprintln!("{note}"));
        let image = Builder::new(&cache, &kernel, &inside, &agent(qemu::TTY), &[])
            .map_err(line)?
            .finish();
        // The name must be short: socket addresses are.
        let dir = tempfile::Builder::new()
            .prefix("zs")
            .tempdir_in("/tmp")
            .map_err(line)?;
        let initramfs = dir.path().join("initramfs");
        fs::write(&initramfs, image).map_err(line)?;
        let socket = dir.path().join("vhost");
        let host = Host::builder()
            .vm(Cid::guest(CID).map_err(line)?, &socket)
            .window(WINDOW)
            .start()
            .map_err(line)?;
        eprintln!("booting Linux {} under QEMU", kernel.release);
        // All threads of QEMU inherit the affinity of the one started here.
        worker::pin(cores.sender)?;
        let config = qemu::Config {
            kernel: &kernel,
            initramfs: &initramfs,
            memory_mib: MEMORY_MIB,
            cpus: 1,
            kind: qemu::VSOCK,
            device: &socket,
            dir: dir.path(),
            reboots: false,
            accel: Choice::Auto,
            zerosock: &own,
            echo: None,
        };
        let guest = driving(&host, || Guest::boot(config));
        worker::pin(cores.receiver)?;
        Ok(Vm {
            guest: guest.map_err(line)?,
            host,
            ports: Cell::new(1000),
            _dir: dir,
        })
    }

    /// Description for the tables.
    pub(crate) fn describe(&self) -> String {
        format!(
            "VM: a guest with Linux {} and one processor under {}, on the sender's core; a program \
             in it sends and receives by its kernel's sockets. The host is this process. A VM is \
             not trusted: what lies in its memory is read and written by way of 8 KiB.",
            self.guest.release, self.guest.accel
        )
    }

    /// The guest's program sends, the host dequeues.
    pub(crate) fn to_host(&self, order: &Order, how: &str) -> Result<Figures, Fault> {
        let how = how.parse()?;
        self.with_program(order, Job::Send, |stream, there| {
            let outcome = dequeue::run(&stream, how, order)?;
            leave(&stream)?;
            result(there)?;
            Ok(Figures {
                outcome,
                sender_cpu: None,
            })
        })
    }

    /// The host sends, the guest's program dequeues.
    pub(crate) fn to_guest(&self, order: &Order, how: Sending) -> Result<Figures, Fault> {
        let send = Order {
            job: Job::Send,
            ..order.clone()
        };
        self.with_program(order, Job::Receive, |stream, there| {
            let before = cpu_time()?;
            let mut sending = match how {
                Sending::Loan => Either::Loan(Box::new(Ours::over(stream))),
                Sending::Copy => Either::Copy(stream, vec![0; order.size]),
            };
            let sent = jobs::run(&mut sending, &send)?;
            let cpu = cpu_time()? - before;
            leave(sending.stream())?;
            Ok(Figures {
                outcome: result(there)?.parse()?,
                sender_cpu: Some(cpu as f64 / sent.messages.max(1) as f64),
            })
        })
    }

    /// Lets a program in the guest connect to the host and do `job`.
    fn with_program(
        &self,
        order: &Order,
        job: Job,
        run: impl FnOnce(Stream, Pending) -> Result<Figures, Fault>,
    ) -> Result<Figures, Fault> {
        let port = self.ports.get() + 1;
        self.ports.set(port);
        let listener = self.host.listen(Port::new(port), 1).map_err(line)?;
        let there = Order {
            peer: guest_side::NAME.to_owned(),
            job,
            to: Some(port.to_string()),
            ..order.clone()
        };
        let there = there.to_string();
        let argv = ["/bin/zerosock", WORKER]
            .into_iter()
            .chain(there.split(' '));
        let there = self.guest.remote.start(Command::Run {
            argv: argv.map(str::to_owned).collect(),
        });
        let stream = accept(&listener, order.wait)?;
        run(stream, there)
    }
}

/// Drives the host during another wait: without it the VMM gets no answer.
fn driving<T>(host: &Host, wait: impl FnOnce() -> T) -> T {
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) && host.turn().is_ok() {
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
    stream.set_wait(match wait {
        Wait::Spin => vsock::Wait::Spin,
        Wait::Sleep => vsock::Wait::Sleep,
    });
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

/// CPU time of this thread, in nanoseconds.
fn cpu_time() -> Result<u64, Fault> {
    let text = fs::read_to_string("/proc/thread-self/schedstat").map_err(line)?;
    let first = text.split_whitespace().next();
    let time = first.and_then(|time| time.parse().ok());
    time.ok_or_else(|| format!("/proc/thread-self/schedstat: {text:?}"))
}

/// In one line, as tables show it.
fn line(error: impl ToString) -> Fault {
    let text = error.to_string();
    let lines = text.lines().map(str::trim);
    lines.collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_threads_time_on_the_processor_is_its_own() {
        let before = cpu_time().unwrap();
        let begin = std::time::Instant::now();
        // CPU time is updated at scheduler ticks, so run until it changes.
        while cpu_time().unwrap() == before {
            assert!(begin.elapsed() < STEP);
        }
    }

    #[test]
    fn a_reason_is_one_line() {
        assert_eq!(line("one\n  two"), "one; two");
    }
}
