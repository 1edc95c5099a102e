//! The device and the guest of one demo.

use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::Duration;

use crate::vm::accel::kvm_failure;
use crate::vm::cache::Cache;
use crate::vm::device::{Device, Endpoint, Program};
use crate::vm::initramfs::Builder;
use crate::vm::kernel::Kernel;
use crate::vm::program;
use crate::vm::protocol::Command;
use crate::vm::qemu::{self, Guest};
use tempfile::TempDir;
use zerosock::Cid;
use zerosock::daemon::{Daemon, DaemonConfig, HostSide, Stats, VmConfig};

use super::args::DemoArgs;
use crate::failure::Failure;

const GUEST_CID: u32 = 3;
/// What kernel and agent need besides the file.
const MEMORY_MIB: u64 = 448;
/// As vhost-device-vsock's defaults, so that both do the same work.
const BUF_ALLOC: u32 = 256 << 10;
const QUEUE_SIZE: u16 = 1024;

enum Running {
    /// Our device, in this process.
    Own(Daemon),
    /// Another one, as a process.
    Other(Device),
}

/// A booted guest and its device.
pub(super) struct Setting {
    pub(super) guest: Guest,
    pub(super) endpoint: Endpoint,
    device: Running,
    // Dropped last: the others have their sockets in it.
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
        let initramfs = Builder::new(&cache, &kernel, &inside, qemu::TTY, &[])
            .map_err(Failure::runtime)?
            .finish();

        // Socket addresses are short, and so must be the directory's name.
        let dir = tempfile::Builder::new()
            .prefix("zs")
            .tempdir_in("/tmp")
            .map_err(Failure::runtime)?;
        let image = dir.path().join("initramfs");
        std::fs::write(&image, initramfs).map_err(Failure::runtime)?;
        let endpoint = Endpoint::new(dir.path(), GUEST_CID);
        let device = match &args.device {
            None => own_device(&endpoint)?,
            Some(path) => {
                note(format!("device: {}", path.display()));
                let program = Program {
                    path: path.clone(),
                    arguments: Vec::new(),
                    zerosock: own.clone(),
                };
                let device = Device::start(&program, std::slice::from_ref(&endpoint), None)
                    .map_err(Failure::runtime)?;
                Running::Other(device)
            }
        };
        note(format!("booting Linux {} under QEMU", kernel.release));
        let guest = Guest::boot(qemu::Config {
            kernel: &kernel,
            initramfs: &image,
            memory_mib: MEMORY_MIB + 2 * (payload >> 20),
            cpus: 2,
            device: &endpoint.vhost,
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
            endpoint,
            device,
            _dir: dir,
        })
    }

    /// What our device has counted; nothing for another one.
    pub(super) fn stats(&self) -> Option<Stats> {
        match &self.device {
            Running::Own(daemon) => Some(daemon.stats()),
            Running::Other(_) => None,
        }
    }

    /// Powers the guest off and stops the device.
    pub(super) fn end(mut self) {
        drop(self.guest.remote.start(Command::PowerOff));
        self.guest.wait(Duration::from_secs(3));
        self.guest.kill();
        match self.device {
            Running::Own(daemon) => daemon.shutdown(),
            Running::Other(mut device) => device.kill(),
        }
    }
}

fn own_device(endpoint: &Endpoint) -> Result<Running, Failure> {
    let bind = |path: &Path| {
        UnixListener::bind(path)
            .map_err(|error| Failure::runtime(format!("{}: {error}", path.display())))
    };
    let vm = VmConfig {
        cid: Cid::guest(GUEST_CID.into()).map_err(Failure::runtime)?,
        listener: bind(&endpoint.vhost)?,
        host: HostSide::Hybrid {
            path: endpoint.uds.clone(),
            listener: bind(&endpoint.uds)?,
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
    Daemon::start(config)
        .map(Running::Own)
        .map_err(Failure::runtime)
}
