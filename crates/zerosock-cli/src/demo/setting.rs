//! The device and the guest of one demo.

use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use tempfile::TempDir;
use zerosock::Cid;
use zerosock::daemon::{Daemon, DaemonConfig, HostSide, Stats, VmConfig};

use super::args::DemoArgs;
use super::line::Line;
use crate::failure::Failure;
use crate::vm::accel::kvm_failure;
use crate::vm::cache::Cache;
use crate::vm::initramfs::Builder;
use crate::vm::kernel::Kernel;
use crate::vm::program;
use crate::vm::qemu::{self, Guest};

const GUEST_CID: u32 = 3;
/// Guest memory for kernel and program, besides the file.
const MEMORY_MIB: u64 = 448;
/// Defaults of vhost-device-vsock, for a comparable load.
const BUF_ALLOC: u32 = 256 << 10;
const QUEUE_SIZE: u16 = 1024;

/// A booted guest and its device.
pub(super) struct Setting {
    pub(super) guest: Guest<Line>,
    /// The device's hybrid vsock socket.
    pub(super) uds: PathBuf,
    /// The demo's own device; `None` with another one.
    daemon: Option<Daemon>,
    // Dropped last: contains the sockets of the others.
    _dir: TempDir,
}

impl Setting {
    pub(super) fn boot(
        args: &DemoArgs,
        payload: u64,
        note: &dyn Fn(String),
    ) -> Result<Setting, Failure> {
        let cache = Cache::find();
        let kernel = match &args.kernel {
            Some(image) => Kernel::custom(image, args.modules.as_deref()),
            None => Kernel::debian(&cache, &args.kernel_package),
        }
        .map_err(Failure::runtime)?;
        if qemu::version().is_none() {
            return Err(Failure::runtime(qemu::BootError::NoQemu));
        }
        let own = std::env::current_exe().map_err(Failure::runtime)?;
        let inside = program::for_guest(&own, note);
        let arguments = format!("demo-guest --tty {}", qemu::TTY);
        let initramfs = Builder::new(&cache, &kernel, &inside, &arguments, &[])
            .map_err(Failure::runtime)?
            .finish();

        // The name must be short: socket addresses are.
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
                let daemon = own_device(&socket, &uds)?;
                (socket, uds, Some(daemon))
            }
        };
        note(format!("booting Linux {} under QEMU", kernel.release));
        let guest = Guest::boot(qemu::Config {
            kernel: &kernel,
            initramfs: &image,
            memory_mib: MEMORY_MIB + 2 * (payload >> 20),
            cpus: 2,
            kind: qemu::VSOCK,
            device: &socket,
            dir: dir.path(),
            reboots: false,
            accel: args.accel.into(),
            zerosock: &own,
            echo: args.verbose.then_some("guest"),
        })
        .map_err(Failure::runtime)?;
        if let Some(reason) = kvm_failure() {
            note(format!(
                "no KVM for it here ({reason}): software emulation, which is slower"
            ));
        }
        Ok(Setting {
            guest,
            uds,
            daemon,
            _dir: dir,
        })
    }

    /// Counters of the demo's own device; `None` for another one.
    pub(super) fn stats(&self) -> Option<Stats> {
        self.daemon.as_ref().map(Daemon::stats)
    }

    /// Ends the guest and the demo's own device.
    pub(super) fn end(mut self) {
        self.guest.kill();
        if let Some(daemon) = self.daemon {
            daemon.shutdown();
        }
    }
}

fn own_device(socket: &Path, uds: &Path) -> Result<Daemon, Failure> {
    let bind = |path: &Path| {
        UnixListener::bind(path)
            .map_err(|error| Failure::runtime(format!("{}: {error}", path.display())))
    };
    let vm = VmConfig {
        cid: Cid::guest(GUEST_CID.into()).map_err(Failure::runtime)?,
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
    };
    let config = DaemonConfig {
        vms: vec![vm],
        ..DaemonConfig::default()
    };
    Daemon::start(config).map_err(Failure::runtime)
}
