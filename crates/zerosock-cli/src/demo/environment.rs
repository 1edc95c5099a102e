//! The environment of a demo: a device, and a guest that uses it.

use std::os::unix::net::UnixListener;
use std::path::Path;

use tempfile::TempDir;
use zerosock::Cid;
use zerosock::daemon::{Daemon, DaemonConfig, GuestEndpoints, GuestKey, HostSide, Stats, VmConfig};

use super::args::DemoArgs;
use super::guest::{DATA, ENDPOINT, ENDPOINT_MIB};
use super::line::Line;
use crate::failure::Failure;
use crate::vm::accel::kvm_failure;
use crate::vm::cache::Cache;
use crate::vm::hybrid;
use crate::vm::initramfs::Builder;
use crate::vm::kernel::Kernel;
use crate::vm::program;
use crate::vm::qemu::{self, Guest};

const GUEST_CID: u32 = 3;
/// Guest memory for kernel, program and endpoint, besides the file.
const MEMORY_MIB: u64 = 448 + ENDPOINT_MIB;
/// Defaults of vhost-device-vsock, for a comparable load.
const BUF_ALLOC: u32 = 256 << 10;
const QUEUE_SIZE: u16 = 1024;

/// A running guest and the device that serves it.
pub(super) struct Environment {
    pub(super) guest: Guest<Line>,
    /// Where connections of the guest by AF_VSOCK arrive.
    pub(super) data: UnixListener,
    /// Where connections from the guest's endpoint arrive.
    pub(super) endpoint: UnixListener,
    /// The device that the demo started; `None` if it uses one that was running (`--socket`).
    daemon: Option<Daemon>,
    // Holds the socket files of guest and device, so it is dropped last.
    _dir: TempDir,
}

impl Environment {
    /// Starts a device, unless `args` name one, and boots a guest with memory for `payload` bytes.
    /// `progress` prints a line.
    pub(super) fn boot(
        args: &DemoArgs,
        payload: u64,
        progress: &dyn Fn(String),
    ) -> Result<Environment, Failure> {
        let cache = Cache::find();
        let kernel = match &args.kernel {
            Some(image) => Kernel::custom(image, args.modules.as_deref()),
            None => Kernel::debian(&cache, &args.kernel_package),
        }
        .map_err(Failure::runtime)?;
        if qemu::version().is_none() {
            return Err(Failure::runtime(qemu::BootError::NoQemu));
        }
        let program = std::env::current_exe().map_err(Failure::runtime)?;
        let guest_program = program::for_guest(&program, progress);
        let arguments = format!("demo-guest --tty {}", qemu::TTY);
        let initramfs = Builder::new(&cache, &kernel, &guest_program, &arguments, &[])
            .map_err(Failure::runtime)?
            .finish();

        // The path must be short: a socket address has room for 107 bytes.
        let dir = tempfile::Builder::new()
            .prefix("zs")
            .tempdir_in("/tmp")
            .map_err(Failure::runtime)?;
        let image = dir.path().join("initramfs");
        std::fs::write(&image, initramfs).map_err(Failure::runtime)?;
        let (socket, uds, daemon) = match (&args.socket, &args.uds_path) {
            (Some(socket), Some(uds)) => (socket.clone(), uds.clone(), None),
            _ => {
                let (socket, uds) = (dir.path().join("vhost"), dir.path().join("vsock"));
                let daemon = start_device(&socket, &uds)?;
                (socket, uds, Some(daemon))
            }
        };
        // Before the guest connects.
        let data = hybrid::listen(&uds, DATA).map_err(Failure::runtime)?;
        let endpoint = hybrid::listen(&uds, ENDPOINT).map_err(Failure::runtime)?;
        progress(format!("booting Linux {} under QEMU", kernel.release));
        let guest = Guest::boot(qemu::Config {
            kernel: &kernel,
            initramfs: &image,
            cpus: 2,
            machine: qemu::device(MEMORY_MIB + 2 * (payload >> 20), qemu::VSOCK, &socket),
            dir: dir.path(),
            reboots: false,
            accel: args.accel,
            zerosock: &program,
            echo: args.verbose.then_some("guest"),
        })
        .map_err(Failure::runtime)?;
        if let Some(reason) = kvm_failure() {
            progress(format!(
                "KVM does not work here ({reason}); QEMU emulates the CPU, which is slower"
            ));
        }
        Ok(Environment {
            guest,
            data,
            endpoint,
            daemon,
            _dir: dir,
        })
    }

    /// Counters of the device that the demo started; `None` if it started none.
    pub(super) fn stats(&self) -> Option<Stats> {
        self.daemon.as_ref().map(Daemon::stats)
    }

    /// Kills the guest, and shuts down the device if the demo started it.
    pub(super) fn shutdown(mut self) {
        self.guest.kill();
        if let Some(daemon) = self.daemon {
            daemon.shutdown();
        }
    }
}

fn start_device(socket: &Path, uds: &Path) -> Result<Daemon, Failure> {
    let bind = |path: &Path| {
        UnixListener::bind(path)
            .map_err(|error| Failure::runtime(format!("{}: {error}", path.display())))
    };
    let vm = VmConfig {
        cid: Cid::new(GUEST_CID),
        listener: bind(socket)?,
        host: HostSide::Hybrid {
            path: uds.to_owned(),
            listener: bind(uds)?,
            messages: None,
        },
        buf_alloc: BUF_ALLOC,
        queue_size: QUEUE_SIZE,
        groups: Vec::new(),
        require_sealed_memory: false,
        stopped_timeout: None,
        // Only the demo's program runs in the guest.
        guest_endpoints: Some(GuestEndpoints::new(GuestKey::none())),
        succession: None,
    };
    let config = DaemonConfig {
        vms: vec![vm],
        ..DaemonConfig::default()
    };
    Daemon::start(config).map_err(Failure::runtime)
}
