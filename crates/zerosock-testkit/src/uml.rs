//! A guest under user-mode Linux: a kernel in a process, with one device over vhost-user.
//!
//! Unlike QEMU it needs no accelerator, and its front-end is Linux's own `virtio_uml`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use zerosock_cli::vm::children::{self, Guarded, Log};
use zerosock_cli::vm::kernel::Kernel;

use super::guest;
use super::remote::Remote;

/// The guest's serial line to the agent.
pub const TTY: &str = "/dev/ttyS0";

/// With hidden extended state (`test-guest hide-xstate`), a process in the guest may lose its wide
/// registers at any moment, so the C library must not use them. The kernel passes unknown options
/// to init as its environment.
const TUNABLES: &str = "GLIBC_TUNABLES=glibc.cpu.hwcaps=\
    -AVX,-AVX2,-AVX512F,-AVX512VL,-AVX512BW,-AVX_Fast_Unaligned_Load";

const DEADLINE: Duration = Duration::from_secs(300);
/// The virtio device id of vsock.
pub const VSOCK: u32 = 19;
/// That of network devices.
pub const NET: u32 = 1;

/// A running guest; dropping it ends it.
pub struct Guest {
    /// Its agent.
    pub remote: Remote,
    /// Its console.
    pub console: Log,
    /// The release of its kernel.
    pub release: String,
    process: Guarded,
}

/// Why the guest did not boot.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// Starting failed.
    #[error("cannot start user-mode Linux: {0}")]
    Start(#[from] io::Error),
    /// The program in the guest did not report that it runs.
    #[error("user-mode Linux did not boot: {what}; the end of its console:\n{console}")]
    NoReport {
        /// Exit or deadline.
        what: String,
        /// The last lines of its console.
        console: String,
    },
}

/// User-mode Linux as Debian's package `user-mode-linux` installs it.
pub fn kernel() -> Option<Kernel> {
    let image = PathBuf::from("/usr/bin/linux.uml");
    let modules = fs::read_dir("/usr/lib/uml/modules")
        .ok()?
        .find_map(|dir| Some(dir.ok()?.path()))?;
    let release = modules.file_name()?.to_string_lossy().into_owned();
    image.is_file().then_some(Kernel {
        image,
        modules,
        release,
    })
}

/// The kernel's arguments for 256 MiB of memory and one device: its vhost-user socket, already
/// listening, and its virtio id.
pub fn device(socket: &Path, id: u32) -> Vec<String> {
    let device = format!("virtio_uml.device={}:{id}", socket.display());
    vec!["mem=256M".to_owned(), device]
}

impl Guest {
    /// Boots and waits for the agent. `machine` is the kernel's arguments for memory and devices, such
    /// as those of [`device`]; `zerosock` is a program with the agent and `parent-watchdog`, which starts the guest so that it
    /// ends with this process.
    ///
    /// # Errors
    /// See [`BootError`].
    pub fn boot(
        kernel: &Kernel,
        initramfs: &Path,
        machine: &[String],
        zerosock: &Path,
        echo: Option<&str>,
    ) -> Result<Guest, BootError> {
        let mut command = children::with_parent_watchdog(zerosock, zerosock);
        command
            .args([guest::NAME, "hide-xstate", "--"])
            .arg(&kernel.image);
        command.args(machine);
        command.args([
            "quiet",
            "panic=-1",
            "stderr=1",
            "con=null",
            "ssl0=fd:0,fd:1",
        ]);
        command.arg(TUNABLES);
        command.arg(format!("initrd={}", initramfs.display()));
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut process = Guarded::spawn(&mut command)?;
        let console = Log::default();
        let child = process.child();
        let missing = || io::Error::from(io::ErrorKind::BrokenPipe);
        console.follow(
            child.stderr.take().ok_or_else(missing)?,
            echo.map(str::to_owned),
        );
        let remote = Remote::new(
            child.stdout.take().ok_or_else(missing)?,
            child.stdin.take().ok_or_else(missing)?,
        );
        let start = Instant::now();
        let what = loop {
            if let Some(release) = remote.wait_for_boot(1, Duration::from_millis(50)) {
                return Ok(Guest {
                    remote,
                    console,
                    release,
                    process,
                });
            }
            if let Some(status) = process.try_wait() {
                break format!("it ended with {status}");
            }
            if start.elapsed() > DEADLINE {
                break format!("the kernel has not started within {} s", DEADLINE.as_secs());
            }
        };
        process.kill();
        Err(BootError::NoReport {
            what,
            console: console.tail(15),
        })
    }

    /// Kills it, as a power failure would.
    pub fn kill(&mut self) {
        self.process.kill();
    }

    /// Whether it still runs.
    pub fn is_running(&mut self) -> bool {
        self.process.try_wait().is_none()
    }
}
