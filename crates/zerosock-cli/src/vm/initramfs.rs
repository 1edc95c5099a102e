//! The first and only file system of a guest, made in memory: busybox, a program, the
//! modules, and a script that loads them and starts the program.

use std::fs;
use std::path::{Path, PathBuf};

use super::cache::Cache;
use super::cpio::Archive;
use super::error::ImageError;
use super::kernel::Kernel;
use super::program;

/// Modules of vsock, in an order in which most of them load at once. A kernel may have any of them
/// built in.
const MODULES: &[&str] = &[
    "virtio",
    "virtio_ring",
    "virtio_pci_legacy_dev",
    "virtio_pci_modern_dev",
    "virtio_pci",
    "vsock",
    "vmw_vsock_virtio_transport_common",
    "vmw_vsock_virtio_transport",
];

/// `@arguments@` is replaced. Modules are loaded repeatedly until all are loaded or none of the
/// rest can be.
const INIT: &str = r#"#!/bin/busybox sh
B=/bin/busybox
$B mkdir -p /proc /sys /dev /tmp /run
$B mount -t proc proc /proc
$B mount -t sysfs sys /sys
$B mount -t devtmpfs dev /dev
$B mount -t tmpfs tmp /tmp
left=$(cd /modules 2>/dev/null && $B ls)
while [ -n "$left" ]; do
    again=
    for module in $left; do
        $B insmod /modules/$module 2>/dev/null || again="$again $module"
    done
    if [ "$again" = "$left" ]; then
        echo "zerosock: modules that do not load:$left"
        break
    fi
    left=$again
done
/bin/zerosock @arguments@
echo "zerosock: the guest's program ended with status $?"
$B poweroff -f
"#;

/// A file system under construction.
pub struct Builder {
    archive: Archive,
    libraries: Vec<String>,
}

impl Builder {
    /// Contains busybox, the program `zerosock` (usually this one), and the modules of `kernel`
    /// plus `extra_modules`. Init runs the program with `arguments`; its end ends the guest.
    ///
    /// # Errors
    /// See [`ImageError`].
    pub fn new(
        cache: &Cache,
        kernel: &Kernel,
        zerosock: &Path,
        arguments: &str,
        extra_modules: &[&'static str],
    ) -> Result<Builder, ImageError> {
        let mut archive = Archive::default();
        // The kernel opens /dev/console for init before devtmpfs is mounted.
        archive.device("dev/console", 5, 1);
        archive.program("init", INIT.replace("@arguments@", arguments).as_bytes());
        let mut builder = Builder {
            archive,
            libraries: Vec::new(),
        };
        builder.program("bin/busybox", &busybox(cache)?, &[])?;
        builder.archive.symlink("bin/sh", "busybox");
        builder.program("bin/zerosock", zerosock, &[])?;
        builder.archive.directory("modules");
        for name in MODULES.iter().chain(extra_modules) {
            match kernel.module(name)? {
                Some(module) => builder
                    .archive
                    .program(&format!("modules/{name}.ko"), &module),
                None if is_built_in(kernel, name) => {}
                // Kernels divide virtio into modules differently; without these two there is no
                // vsock device.
                None if name.starts_with("vmw_vsock") || *name == "vsock" => {
                    return Err(ImageError::Missing(kernel.release.clone(), name));
                }
                None => {}
            }
        }
        Ok(builder)
    }

    /// Adds a program, with its shared libraries if it is not static. Libraries are searched in the
    /// directories `extra` first.
    ///
    /// # Errors
    /// When it or a library cannot be read.
    pub fn program(
        &mut self,
        name: &str,
        path: &Path,
        extra: &[PathBuf],
    ) -> Result<(), ImageError> {
        let read = |path: &Path| fs::read(path).map_err(|e| ImageError::Read(path.to_owned(), e));
        self.archive.program(name, &read(path)?);
        for (library, file) in program::libraries(path, extra)? {
            if !self.libraries.contains(&library) {
                self.archive
                    .program(library.trim_start_matches('/'), &read(&file)?);
                self.libraries.push(library);
            }
        }
        Ok(())
    }

    /// The archive for the boot loader.
    pub fn finish(self) -> Vec<u8> {
        self.archive.finish()
    }
}

fn is_built_in(kernel: &Kernel, name: &str) -> bool {
    fs::read_to_string(kernel.modules.join("modules.builtin")).is_ok_and(|list| {
        list.lines().any(|line| {
            line.rsplit('/').next().is_some_and(|file| {
                file.replace('-', "_")
                    .strip_suffix(".ko")
                    .is_some_and(|stem| stem == name)
            })
        })
    })
}

/// A static busybox: the installed one, else Debian's package `busybox-static`.
fn busybox(cache: &Cache) -> Result<PathBuf, ImageError> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let installed = std::env::split_paths(&path)
        .chain(["/bin".into(), "/usr/bin".into()])
        .map(|dir| dir.join("busybox"))
        .find(|file| matches!(program::interpreter(file), Ok(None)));
    match installed {
        Some(file) => Ok(file),
        None => Ok(cache.package("busybox-static")?.join("bin/busybox")),
    }
}
