//! Images of guests: a kernel, and a first file system with this program in it.

use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;
use zerosock_cli::vm::accel::Choice;
use zerosock_cli::vm::cache::Cache;
use zerosock_cli::vm::initramfs::Builder;
use zerosock_cli::vm::kernel::Kernel;
use zerosock_cli::vm::{program, qemu};
use zerosock_testkit::remote::{Guest, agent};

use crate::processes::own_program;
use crate::report::line;

/// Debian's package that names the kernel of guests under QEMU.
const KERNEL: &str = "linux-image-6.12-cloud-amd64";

/// A kernel and its first file system, for any number of guests.
pub(crate) struct Image {
    pub(crate) kernel: Kernel,
    pub(crate) initramfs: PathBuf,
    _dir: TempDir,
}

impl Image {
    /// For guests under QEMU, with Debian's kernel. `add` adds programs.
    pub(crate) fn qemu(
        modules: &[&'static str],
        add: impl FnOnce(&Cache, &mut Builder) -> Result<(), String>,
    ) -> Result<Image, String> {
        if qemu::version().is_none() {
            return Err(line(qemu::BootError::NoQemu));
        }
        let kernel = Kernel::debian(&Cache::find(), KERNEL).map_err(line)?;
        Image::new(kernel, qemu::TTY, modules, add)
    }

    /// For guests with this kernel, whose agent has the terminal `tty`.
    pub(crate) fn new(
        kernel: Kernel,
        tty: &str,
        modules: &[&'static str],
        add: impl FnOnce(&Cache, &mut Builder) -> Result<(), String>,
    ) -> Result<Image, String> {
        let (cache, own) = (Cache::find(), own_program()?);
        let inside = program::for_guest(&own, &|note| eprintln!("{note}"));
        let image = Builder::new(&cache, &kernel, &inside, &agent(tty), modules);
        let mut image = image.map_err(line)?;
        add(&cache, &mut image)?;
        let dir = short_dir()?;
        let initramfs = dir.path().join("initramfs");
        fs::write(&initramfs, image.finish()).map_err(line)?;
        Ok(Image {
            kernel,
            initramfs,
            _dir: dir,
        })
    }

    /// Boots a guest under QEMU with these arguments for memory and devices; its control socket is
    /// in `dir`.
    pub(crate) fn boot(
        &self,
        cpus: u32,
        machine: Vec<String>,
        dir: &Path,
        accel: Choice,
    ) -> Result<Guest, String> {
        let config = qemu::Config {
            kernel: &self.kernel,
            initramfs: &self.initramfs,
            cpus,
            machine,
            dir,
            reboots: false,
            accel,
            zerosock: &own_program()?,
            echo: None,
        };
        Guest::boot(config).map_err(line)
    }
}

/// A directory with a short name: socket addresses are short.
pub(crate) fn short_dir() -> Result<TempDir, String> {
    let dir = tempfile::Builder::new().prefix("zs").tempdir_in("/tmp");
    dir.map_err(line)
}
