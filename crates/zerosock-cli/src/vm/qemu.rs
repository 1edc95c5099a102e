//! A guest under QEMU with devices over vhost-user.

use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::accel::{self, Accel, Choice};
use super::children::{self, Guarded, Log};
use super::hybrid;
use super::kernel::Kernel;

/// The guest's serial line to the program that init starts: the second serial port.
pub const TTY: &str = "/dev/ttyS1";

/// QEMU's name of a vsock device over vhost-user.
pub const VSOCK: &str = "vhost-user-vsock-pci";

const QEMU: &str = "qemu-system-x86_64";

/// A guest under KVM prints something well within this time, even on a loaded machine.
const KVM_DEADLINE: Duration = Duration::from_secs(6);
/// One in software emulation boots in about two seconds; a machine may be much slower.
const TCG_DEADLINE: Duration = Duration::from_secs(90);

/// What to boot.
pub struct Config<'c> {
    /// The kernel.
    pub kernel: &'c Kernel,
    /// The file with the initramfs.
    pub initramfs: &'c Path,
    /// Processors of the guest.
    pub cpus: u32,
    /// QEMU's arguments for memory and devices, such as those of [`memory`] and [`device`].
    pub machine: Vec<String>,
    /// A directory for this guest's control socket.
    pub dir: &'c Path,
    /// Whether a reboot of the guest reboots it (else it ends QEMU).
    pub reboots: bool,
    /// Accelerators allowed.
    pub accel: Choice,
    /// A program with `zerosock parent-watchdog`, which starts QEMU so that it ends with this
    /// process.
    pub zerosock: &'c Path,
    /// Repeats the guest's console on stderr under this name.
    pub echo: Option<&'c str>,
}

/// The host's end of the serial line to the program that init starts.
pub trait Control: Sized {
    /// Connects to the program over `line`.
    ///
    /// # Errors
    /// As duplicating a descriptor.
    fn new(line: UnixStream) -> io::Result<Self>;

    /// Waits until the program reports that it runs; returns the release of its kernel.
    fn wait_for_boot(&mut self, timeout: Duration) -> Option<String>;

    /// Whether the line has ended.
    fn is_gone(&self) -> bool;
}

/// A running guest; dropping it ends it.
pub struct Guest<C> {
    /// The line to its program.
    pub remote: C,
    /// The guest's console, and QEMU's own output.
    pub console: Log,
    /// What runs it.
    pub accel: Accel,
    /// The release of its kernel.
    pub release: String,
    process: Guarded,
}

/// Why the guest did not boot.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// QEMU is not installed.
    #[error("{QEMU} is not installed\n  to get it, run: sudo apt-get install -y qemu-system-x86")]
    NoQemu,
    /// Starting failed.
    #[error("cannot start QEMU: {0}")]
    Start(io::Error),
    /// The program in the guest did not report that it runs.
    #[error("the guest did not boot under {accel}: {what}; the end of its console:\n{console}")]
    NoReport {
        /// The accelerator.
        accel: Accel,
        /// Exit or deadline.
        what: String,
        /// The last lines of its console.
        console: String,
    },
}

/// A guest that has been started and has not reported yet.
pub struct Booting<'c> {
    config: Config<'c>,
    untried: Vec<Accel>,
    accel: Accel,
    started: Started,
    /// An emulated kernel has already crashed once.
    again: bool,
}

struct Started {
    process: Guarded,
    console: Log,
    listener: UnixListener,
    since: Instant,
}

impl<C: Control> Guest<C> {
    /// Boots and waits for the guest's program.
    ///
    /// # Errors
    /// See [`BootError`].
    pub fn boot(config: Config<'_>) -> Result<Guest<C>, BootError> {
        start(config)?.wait()
    }

    /// The process id of QEMU.
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// Whether QEMU still runs.
    pub fn is_running(&mut self) -> bool {
        self.process.try_wait().is_none()
    }

    /// Waits for QEMU's end, at most so long.
    pub fn wait(&mut self, timeout: Duration) {
        self.process.wait(timeout);
    }

    /// Kills it, as a power failure would.
    pub fn kill(&mut self) {
        self.process.kill();
    }
}

/// QEMU's arguments for memory of the guest that devices can map: it must be a shared file.
pub fn memory(mib: u64) -> Vec<String> {
    let object = format!("memory-backend-memfd,id=mem,size={mib}M,share=on");
    let size = format!("{mib}M");
    ["-m", &size, "-object", &object, "-numa", "node,memdev=mem"]
        .map(str::to_owned)
        .into()
}

/// QEMU's arguments for [`memory`] and one device. `kind` is QEMU's name of the device, such as
/// [`VSOCK`]; `socket` is its vhost-user socket, already listening.
pub fn device(memory_mib: u64, kind: &str, socket: &Path) -> Vec<String> {
    let mut machine = memory(memory_mib);
    machine.push("-chardev".to_owned());
    machine.push(format!("socket,id=device,path={}", socket.display()));
    machine.push("-device".to_owned());
    machine.push(format!("{kind},chardev=device"));
    machine
}

/// Starts a guest without waiting for it, so that several can boot at once.
///
/// # Errors
/// See [`BootError`].
pub fn start(config: Config<'_>) -> Result<Booting<'_>, BootError> {
    let mut untried = accel::candidates(config.accel);
    let accel = untried.remove(0);
    let started = spawn(&config, accel)?;
    Ok(Booting {
        config,
        untried,
        accel,
        started,
        again: false,
    })
}

impl Booting<'_> {
    /// Waits until the guest's program reports; falls back from KVM to software by itself.
    ///
    /// # Errors
    /// See [`BootError`].
    pub fn wait<C: Control>(mut self) -> Result<Guest<C>, BootError> {
        loop {
            let last = self.untried.is_empty();
            let limit = if last { TCG_DEADLINE } else { KVM_DEADLINE };
            match wait_for_boot(&mut self.started, limit) {
                Ok((remote, release)) => {
                    let Started {
                        process, console, ..
                    } = self.started;
                    return Ok(Guest {
                        remote,
                        console,
                        accel: self.accel,
                        release,
                        process,
                    });
                }
                Err(what) => {
                    let console = self.started.console.tail(15);
                    let died = self.started.console.tail(200).contains("Kernel panic");
                    self.started.process.kill();
                    if died && self.accel == Accel::Tcg && !std::mem::replace(&mut self.again, true)
                    {
                        // On a busy machine an emulated kernel may crash by executing its own code
                        // while another of its CPUs patches it.
                        eprintln!("an emulated kernel died; it boots again, once:\n{console}");
                        self.started = spawn(&self.config, self.accel)?;
                    } else if last {
                        return Err(BootError::NoReport {
                            accel: self.accel,
                            what,
                            console,
                        });
                    } else {
                        accel::remember_kvm_failure(&what);
                        self.accel = self.untried.remove(0);
                        self.started = spawn(&self.config, self.accel)?;
                    }
                }
            }
        }
    }
}

fn spawn(config: &Config<'_>, accel: Accel) -> Result<Started, BootError> {
    let control = config.dir.join("ctl");
    let _ = std::fs::remove_file(&control);
    let listener = UnixListener::bind(&control).map_err(BootError::Start)?;
    let qemu = find_qemu().ok_or(BootError::NoQemu)?;
    let mut command = children::with_parent_watchdog(config.zerosock, &qemu);
    command.args(accel.options());
    command.args(["-nodefaults", "-no-user-config", "-display", "none"]);
    // With room for one processor only, TCG leaves out the guest's memory barriers, and wake-ups of devices in other
    // processes get lost.
    let most = config.cpus.max(2);
    command.arg("-smp");
    command.arg(format!("{},maxcpus={most}", config.cpus));
    command.args(&config.machine);
    command.args([
        "-chardev",
        "stdio,id=console,signal=off",
        "-serial",
        "chardev:console",
    ]);
    command
        .arg("-chardev")
        .arg(format!("socket,id=control,path={}", control.display()));
    command.args(["-serial", "chardev:control"]);
    command.arg("-kernel").arg(&config.kernel.image);
    command.arg("-initrd").arg(config.initramfs);
    command.args([
        "-append",
        "console=ttyS0 quiet panic=-1 reboot=t no_timer_check",
    ]);
    if !config.reboots {
        command.arg("-no-reboot");
    }
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut process = Guarded::spawn(&mut command).map_err(BootError::Start)?;
    let console = Log::default();
    let echo = config.echo.map(str::to_owned);
    if let Some(out) = process.child().stdout.take() {
        console.follow(out, echo.clone());
    }
    if let Some(err) = process.child().stderr.take() {
        console.follow(err, echo);
    }
    Ok(Started {
        process,
        console,
        listener,
        since: Instant::now(),
    })
}

/// Waits until the guest's program reports on the control line, QEMU ends, or `limit` has passed.
fn wait_for_boot<C: Control>(
    started: &mut Started,
    limit: Duration,
) -> Result<(C, String), String> {
    let step = Duration::from_millis(50);
    let mut control: Option<C> = None;
    loop {
        if let Some(status) = started.process.try_wait() {
            return Err(format!("QEMU ended with {status}"));
        }
        if started.since.elapsed() > limit {
            return Err(format!(
                "the program in the guest has not reported within {} s",
                limit.as_secs()
            ));
        }
        match control.take() {
            None => {
                let line = hybrid::accept(&started.listener, step).and_then(C::new);
                control = line.ok();
            }
            Some(mut remote) => {
                if let Some(release) = remote.wait_for_boot(step) {
                    return Ok((remote, release));
                }
                if remote.is_gone() {
                    let status = started.process.wait(Duration::from_secs(5));
                    return Err(match status {
                        Some(status) => format!("QEMU ended with {status}"),
                        None => "QEMU closed the serial line".to_owned(),
                    });
                }
                control = Some(remote);
            }
        }
    }
}

fn find_qemu() -> Option<PathBuf> {
    std::env::split_paths(&std::env::var_os("PATH")?)
        .map(|dir| dir.join(QEMU))
        .find(|file| file.is_file())
}

/// The version line of the installed QEMU.
pub fn version() -> Option<String> {
    let output = Command::new(find_qemu()?).arg("--version").output().ok()?;
    Some(
        String::from_utf8_lossy(&output.stdout)
            .lines()
            .next()?
            .to_owned(),
    )
}
