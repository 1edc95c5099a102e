//! A device with two guests, and the steps that scenarios are made of.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

use tempfile::TempDir;
use zerosock::Cid;
use zerosock::vsock::Host;
use zerosock_cli::vm::accel::Choice;
use zerosock_cli::vm::cache::Cache;
use zerosock_cli::vm::children::Log;
use zerosock_cli::vm::hybrid;
use zerosock_cli::vm::initramfs::Builder;
use zerosock_cli::vm::kernel::Kernel;
use zerosock_cli::vm::pattern::{Pattern, sha256};
use zerosock_cli::vm::qemu;
use zerosock_testkit::device::{Device, Endpoint, Program};
use zerosock_testkit::packages::{add_program, add_socat};
use zerosock_testkit::protocol::{Command, Outcome, Socket, Source};
use zerosock_testkit::remote::{self, Pending, Remote, agent};
use zerosock_testkit::uml;

use crate::behaviour::library::Library;
use crate::kernels;
use crate::scenarios::guide::Network;

/// Timeout of each step; generous, because the guest may be emulated on a busy machine.
pub(crate) const STEP: Duration = Duration::from_secs(40);

/// A refusal must arrive well before the 2 s after which a connect times out.
pub(crate) const AT_ONCE: Duration = Duration::from_secs(1);

/// Modules that scenarios need besides those of every guest: loopback vsock, and TLS.
const EXTRA_MODULES: &[&str] = &[
    "vsock_loopback",
    "tls",
    "gcm",
    "ctr",
    "ghash_generic",
    "gf128mul",
    "crypto_null",
];

/// Why a scenario cannot run on this machine.
#[derive(Debug)]
pub(crate) struct Skipped(pub(crate) String);

/// Most queue pairs of a device. A stock guest uses one.
pub(crate) const QUEUE_PAIRS: u16 = 3;

/// What runs the guests of a lab, and the release of their kernel.
#[derive(Copy, Clone)]
pub(crate) enum Platform {
    Qemu(&'static str),
    UserMode(&'static str),
}

/// A device with guests `a` and `b`. Guest `b` may be rebooted and killed.
pub(crate) struct Lab {
    pub(crate) a: Vm,
    pub(crate) b: Vm,
    /// A place at the device for a process of this machine.
    pub(crate) process: Endpoint,
    /// Where processes attach, unless the device is another program.
    pub(crate) attach: PathBuf,
    pub(crate) device: Mutex<Device>,
    pub(crate) release: String,
    image: Image,
    /// With one queue pair, and with [`QUEUE_PAIRS`].
    embedded: [OnceLock<Embedded>; 2],
    /// Why the guests have no QEMU guest agent.
    pub(crate) qemu_ga: Option<String>,
    /// Why the guests have no socat.
    pub(crate) socat: Option<String>,
    /// Servers that rules lead to, unless the device is another program.
    pub(crate) network: Option<Network>,
    _dir: TempDir,
}

/// A device in this process, which is the host for a guest of its own.
pub(crate) struct Embedded {
    pub(crate) guest: Vm,
    pub(crate) host: Library,
    /// Ends the thread that started the guest.
    _keep: Sender<()>,
    _dir: TempDir,
}

/// One guest of the lab.
pub(crate) struct Vm {
    pub(crate) endpoint: Endpoint,
    dir: PathBuf,
    guest: Mutex<Guest>,
}

/// What guests boot.
#[derive(Clone)]
struct Image {
    platform: Platform,
    kernel: Kernel,
    initramfs: PathBuf,
}

/// A guest that has been started.
enum Booting<'i> {
    Qemu(qemu::Booting<'i>),
    UserMode(uml::Guest),
}

/// A running guest.
pub(crate) enum Guest {
    Qemu(remote::Guest),
    UserMode(uml::Guest),
}

static NEXT_PORT: AtomicU32 = AtomicU32::new(2000);

/// A port that no scenario has used.
pub(crate) fn port() -> u32 {
    NEXT_PORT.fetch_add(1, Ordering::Relaxed)
}

pub(crate) fn cache() -> Cache {
    // Tests run in the crate's directory; find the checkout from there.
    Cache::find()
}

pub(crate) fn zerosock() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_zerosock-testkit"))
}

/// The program that serves where a process is replaced: a release build is much faster.
pub(crate) fn serving() -> PathBuf {
    std::env::var_os("ZEROSOCK_SERVE").map_or_else(|| zerosock().to_owned(), PathBuf::from)
}

pub(crate) fn guest_program() -> PathBuf {
    std::env::var_os("ZEROSOCK_GUEST").map_or_else(|| zerosock().to_owned(), PathBuf::from)
}

/// The device under test.
pub(crate) fn device_program() -> Program {
    let zerosock = zerosock().to_owned();
    match std::env::var_os("ZEROSOCK_DEVICE") {
        Some(path) => Program {
            path: path.into(),
            arguments: Vec::new(),
            zerosock,
        },
        None => Program {
            path: zerosock.clone(),
            arguments: vec!["serve".into(), "--no-supervisor".into()],
            zerosock,
        },
    }
}

pub(crate) fn echo(name: &str) -> Option<&str> {
    std::env::var_os("ZEROSOCK_ECHO").map(|_| name)
}

pub(crate) fn accel() -> Choice {
    match std::env::var("ZEROSOCK_ACCEL").as_deref() {
        Ok("kvm") => Choice::Kvm,
        Ok("tcg") => Choice::Tcg,
        _ => Choice::Auto,
    }
}

/// A temporary directory with a name short enough for socket addresses.
pub(crate) fn short_dir() -> TempDir {
    tempfile::Builder::new()
        .prefix("zs")
        .tempdir_in("/tmp")
        .expect("a directory in /tmp")
}

impl Lab {
    /// Boots both guests. Returns [`Skipped`] for what the machine lacks; panics on failures.
    pub(crate) fn start(platform: Platform) -> Result<Lab, Skipped> {
        let cache = cache();
        let kernel = platform.kernel()?;
        let dir = short_dir();
        let mut builder = Builder::new(
            &cache,
            &kernel,
            &guest_program(),
            &agent(platform.tty()),
            EXTRA_MODULES,
        )
        .expect("an initramfs");
        let qemu_ga = add_qemu_ga(&cache, &mut builder).err();
        let socat = add_socat(&cache, &mut builder).err();
        let initramfs = dir.path().join("initramfs");
        std::fs::write(&initramfs, builder.finish()).expect("the initramfs written");
        let image = Image {
            platform,
            kernel,
            initramfs,
        };

        let mut endpoints = [3, 4, 5].map(|cid| Endpoint::new(dir.path(), cid));
        let attach = dir.path().join("attach");
        let mut program = device_program();
        let mut network = None;
        if std::env::var_os("ZEROSOCK_DEVICE").is_none() {
            program.arguments.push("--attach-socket".into());
            program.arguments.push(attach.clone().into());
            program.arguments.push("--queue-pairs".into());
            program.arguments.push(QUEUE_PAIRS.to_string().into());
            endpoints = endpoints.map(Endpoint::with_messages);
            let network = network.insert(Network::new());
            program.arguments.extend(network.rules());
        }
        let device = Device::start(&program, &endpoints, echo("device")).expect("a device");
        let [a, b, _] = &endpoints;
        let dirs = [dir.path().join("a"), dir.path().join("b")];
        for dir in &dirs {
            std::fs::create_dir(dir).expect("a directory");
        }
        let first = image.start(a, &dirs[0], false);
        let second = image.start(b, &dirs[1], true);
        let [first, second] = [first.wait(), second.wait()];
        let release = first.release().to_owned();
        println!(
            "booted Linux {release} twice under {}{}",
            first.accel(),
            zerosock_cli::vm::accel::kvm_failure()
                .map(|reason| format!(" (kvm: {reason})"))
                .unwrap_or_default()
        );
        let [dir_a, dir_b] = dirs;
        let [a, b, process] = endpoints;
        Ok(Lab {
            a: Vm {
                endpoint: a,
                dir: dir_a,
                guest: Mutex::new(first),
            },
            b: Vm {
                endpoint: b,
                dir: dir_b,
                guest: Mutex::new(second),
            },
            process,
            attach,
            device: Mutex::new(device),
            release,
            image,
            embedded: Default::default(),
            qemu_ga,
            socat,
            network,
            _dir: dir,
        })
    }

    /// The device in this process, with one queue pair or [`QUEUE_PAIRS`]; its guest boots on first use.
    pub(crate) fn embedded(&self, pairs: u16) -> &Embedded {
        self.embedded[usize::from(pairs != 1)].get_or_init(|| {
            let dir = short_dir();
            let endpoint = Endpoint::new(dir.path(), 6);
            let cid = Cid::new(endpoint.cid);
            let mut host = Host::builder().queue_pairs(pairs).vm(cid, &endpoint.vhost);
            if matches!(self.image.platform, Platform::UserMode(_)) {
                // It does not seal its memory.
                host = host.allow_unsealed_memory();
            }
            let host = Library::new(host.start().expect("a host"));
            let vm = (self.image.clone(), endpoint.clone());
            let (boot, booted) = channel();
            let (keep, keeps) = channel();
            // The guest ends with the thread that starts it, and the threads of scenarios are
            // short-lived.
            thread::spawn(move || {
                let (image, endpoint) = vm;
                let dir = endpoint.vhost.parent().expect("a directory");
                let _ = boot.send(image.start(&endpoint, dir, false).wait());
                let _ = keeps.recv();
            });
            let guest = Mutex::new(booted.recv().expect("a guest of the host"));
            Embedded {
                guest: Vm {
                    endpoint,
                    dir: dir.path().to_owned(),
                    guest,
                },
                host,
                _keep: keep,
                _dir: dir,
            }
        })
    }

    /// Boots guest `b` again after it was killed.
    pub(crate) fn boot_b(&self) {
        let Vm { endpoint, dir, .. } = &self.b;
        let guest = self.image.start(endpoint, dir, true).wait();
        *self.b.guest.lock().unwrap_or_else(PoisonError::into_inner) = guest;
    }

    /// Boots a third guest at the device of another process.
    pub(crate) fn boot_at(&self, vhost: &Path) -> (Guest, TempDir) {
        let dir = short_dir();
        let endpoint = Endpoint {
            vhost: vhost.to_owned(),
            ..Endpoint::new(dir.path(), 6)
        };
        (self.image.start(&endpoint, dir.path(), false).wait(), dir)
    }

    /// Prints the last output of device and guests.
    pub(crate) fn report(&self) {
        let device = self.device.lock().unwrap_or_else(PoisonError::into_inner);
        print!("  the device's last words:\n{}", device.log.tail(20));
        let embedded = self.embedded.iter().filter_map(OnceLock::get);
        let embedded = embedded.map(|it| ("of the host", &it.guest));
        for (name, vm) in [("a", &self.a), ("b", &self.b)].into_iter().chain(embedded) {
            let guest = vm.guest.lock().unwrap_or_else(PoisonError::into_inner);
            print!("  guest {name}'s last words:\n{}", guest.console().tail(10));
        }
    }

    /// Ends everything, also while a scenario hangs.
    pub(crate) fn stop(&self) {
        let embedded = self.embedded.iter().filter_map(OnceLock::get);
        let embedded = embedded.map(|it| &it.guest);
        for vm in [&self.a, &self.b].into_iter().chain(embedded) {
            vm.kill();
        }
        self.device
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .kill();
    }
}

impl Platform {
    fn kernel(self) -> Result<Kernel, Skipped> {
        let (release, kernel) = match self {
            Platform::Qemu(release) => (release, kernels::debian(release)?),
            Platform::UserMode(release) => (release, kernels::user_mode()?),
        };
        kernels::of_release(release, kernel)
    }

    /// The serial line of the agent.
    fn tty(self) -> &'static str {
        match self {
            Platform::Qemu(_) => qemu::TTY,
            Platform::UserMode(_) => uml::TTY,
        }
    }
}

impl Image {
    /// `reboots`: whether a reboot does not end the guest.
    fn start<'i>(&'i self, endpoint: &'i Endpoint, dir: &'i Path, reboots: bool) -> Booting<'i> {
        let (kernel, initramfs) = (&self.kernel, &self.initramfs);
        match self.platform {
            Platform::Qemu(_) => {
                let config = qemu::Config {
                    kernel,
                    initramfs,
                    cpus: 2,
                    machine: qemu::device(512, qemu::VSOCK, &endpoint.vhost),
                    dir,
                    reboots,
                    accel: accel(),
                    zerosock: zerosock(),
                    echo: echo("guest"),
                };
                Booting::Qemu(qemu::start(config).expect("QEMU"))
            }
            Platform::UserMode(_) => {
                let device = uml::device(&endpoint.vhost, uml::VSOCK);
                let guest = uml::Guest::boot(kernel, initramfs, &device, zerosock(), echo("guest"));
                Booting::UserMode(guest.expect("a guest"))
            }
        }
    }
}

impl Booting<'_> {
    fn wait(self) -> Guest {
        match self {
            Booting::Qemu(booting) => Guest::Qemu(booting.wait().expect("a guest")),
            Booting::UserMode(guest) => Guest::UserMode(guest),
        }
    }
}

impl Guest {
    pub(crate) fn remote(&self) -> &Remote {
        match self {
            Guest::Qemu(guest) => &guest.remote,
            Guest::UserMode(guest) => &guest.remote,
        }
    }

    fn console(&self) -> &Log {
        match self {
            Guest::Qemu(guest) => &guest.console,
            Guest::UserMode(guest) => &guest.console,
        }
    }

    fn release(&self) -> &str {
        match self {
            Guest::Qemu(guest) => &guest.release,
            Guest::UserMode(guest) => &guest.release,
        }
    }

    /// What runs it.
    fn accel(&self) -> String {
        match self {
            Guest::Qemu(guest) => guest.accel.to_string(),
            Guest::UserMode(_) => "user-mode Linux".to_owned(),
        }
    }

    fn kill(&mut self) {
        match self {
            Guest::Qemu(guest) => guest.kill(),
            Guest::UserMode(guest) => guest.kill(),
        }
    }
}

/// Debian's guest agent, and its libraries that this machine lacks.
fn add_qemu_ga(cache: &Cache, builder: &mut Builder) -> Result<(), String> {
    let packages = [
        "qemu-guest-agent",
        "libglib2.0-0",
        "libnuma1",
        "libudev1",
        "liburing2",
    ];
    add_program(cache, builder, &packages, "usr/sbin/qemu-ga", "bin/qemu-ga")
}

impl Vm {
    pub(crate) fn remote(&self) -> Remote {
        let guest = self.guest.lock().unwrap_or_else(PoisonError::into_inner);
        guest.remote().clone()
    }

    /// Ends the guest as a power failure would.
    pub(crate) fn kill(&self) {
        self.guest
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .kill();
    }

    pub(crate) fn start(&self, command: Command) -> Pending {
        self.remote().start(command)
    }

    pub(crate) fn run(&self, command: Command) -> Outcome {
        self.remote().run(command, STEP).expect("an outcome")
    }

    pub(crate) fn listen(&self, port: u32) -> Socket {
        self.remote()
            .socket(Command::Listen { port }, STEP)
            .expect("a listener in the guest")
    }

    /// Sends a pattern from the guest without waiting.
    pub(crate) fn send(&self, socket: Socket, seed: u64, len: u64, chunks: &[usize]) -> Pending {
        let source = Source::Pattern { seed, len };
        self.start(Command::Send {
            socket,
            source,
            chunks: chunks.to_vec(),
        })
    }

    /// Receives in the guest without waiting: the given number of bytes, or to the end.
    pub(crate) fn receive(&self, socket: Socket, limit: Option<u64>) -> Pending {
        self.start(Command::Receive {
            socket,
            limit,
            keep: false,
            acknowledge: false,
        })
    }

    pub(crate) fn close(&self, socket: Socket) {
        self.run(Command::Close { socket });
    }

    /// A host listener for the guest's connections.
    pub(crate) fn host_listener(&self, port: u32) -> UnixListener {
        hybrid::listen(&self.endpoint.uds, port).expect("a listener on the host")
    }

    /// A connection that the guest made.
    pub(crate) fn to_host(&self) -> (Socket, UnixStream) {
        let port = port();
        let listener = self.host_listener(port);
        let connecting = self.start(Command::Connect { cid: 2, port });
        let stream = hybrid::accept(&listener, STEP).expect("the guest's connection");
        deadlines(&stream);
        (
            connecting.socket(STEP).expect("connected in the guest"),
            stream,
        )
    }

    /// A connection that the host made.
    pub(crate) fn to_guest(&self) -> (Socket, UnixStream) {
        let port = port();
        let listener = self.listen(port);
        let accepting = self.start(Command::Accept { socket: listener });
        let stream = self.connect(port).expect("connected to the guest");
        let socket = accepting.socket(STEP).expect("accepted in the guest");
        self.close(listener);
        (socket, stream)
    }

    pub(crate) fn connect(&self, port: u32) -> Result<UnixStream, hybrid::HybridError> {
        let (stream, _) = hybrid::connect(&self.endpoint.uds, port, STEP)?;
        deadlines(&stream);
        Ok(stream)
    }
}

/// Timeout of reads and writes of tests.
pub(crate) fn deadlines(stream: &UnixStream) {
    stream
        .set_read_timeout(Some(STEP))
        .expect("a read deadline");
    stream
        .set_write_timeout(Some(STEP))
        .expect("a write deadline");
}

/// The digest of the pattern that both ends make from `seed`.
pub(crate) fn expected(seed: u64, len: u64) -> String {
    sha256(&Pattern::bytes(seed, len as usize))
}

/// Reads to the end of the stream; the bytes' digest and number.
pub(crate) fn read_to_end(mut stream: &UnixStream) -> (String, u64) {
    let mut all = Vec::new();
    stream
        .read_to_end(&mut all)
        .expect("the stream up to its end");
    (sha256(&all), all.len() as u64)
}

/// Reads exactly `len` bytes; their digest.
pub(crate) fn read_exact(mut stream: &UnixStream, len: u64) -> String {
    let mut all = vec![0; len as usize];
    stream.read_exact(&mut all).expect("all bytes");
    sha256(&all)
}

/// Writes the pattern of `seed` in writes of `chunks`; its digest.
pub(crate) fn write(mut stream: &UnixStream, seed: u64, len: u64, chunks: &[usize]) -> String {
    let data = Pattern::bytes(seed, len as usize);
    let mut rest = &data[..];
    for size in chunks.iter().cycle() {
        if rest.is_empty() {
            break;
        }
        let (now, later) = rest.split_at((*size).min(rest.len()));
        stream.write_all(now).expect("written");
        rest = later;
    }
    sha256(&data)
}
