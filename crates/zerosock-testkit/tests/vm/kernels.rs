//! Kernels of guests, by release.

use zerosock_cli::vm::kernel::Kernel;
use zerosock_cli::vm::qemu;
use zerosock_testkit::uml;

use crate::lab::{Skipped, cache};

/// Debian's packages.
const PACKAGES: &[(&str, &str)] = &[
    ("6.1", "linux-image-cloud-amd64"),
    ("6.12", "linux-image-6.12-cloud-amd64"),
];

/// Debian's kernel of a package in [`PACKAGES`], for QEMU. Other versions of Debian have another release in it.
pub(crate) fn debian(release: &str) -> Result<Kernel, Skipped> {
    if qemu::version().is_none() {
        return Err(Skipped(qemu::BootError::NoQemu.to_string()));
    }
    let (_, package) = PACKAGES
        .iter()
        .find(|it| it.0 == release)
        .expect("a kernel");
    Kernel::debian(&cache(), package).map_err(|error| Skipped(error.to_string()))
}

/// User-mode Linux of any release.
pub(crate) fn user_mode() -> Result<Kernel, Skipped> {
    uml::kernel().ok_or_else(|| Skipped("install the package user-mode-linux".to_owned()))
}

/// Skips if the kernel is of another release.
pub(crate) fn of_release(release: &str, kernel: Kernel) -> Result<Kernel, Skipped> {
    if kernel.release.starts_with(&format!("{release}.")) {
        return Ok(kernel);
    }
    let reason = format!("the package has Linux {} here", kernel.release);
    Err(Skipped(reason))
}
