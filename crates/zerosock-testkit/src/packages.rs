//! Programs of Debian's packages for guests.

use std::path::PathBuf;

use zerosock_cli::vm::cache::Cache;
use zerosock_cli::vm::initramfs::Builder;

/// Adds socat, as `/bin/socat`, and its libraries that this machine may lack.
///
/// # Errors
/// Why it cannot be had.
pub fn add_socat(cache: &Cache, builder: &mut Builder) -> Result<(), String> {
    let packages = ["socat", "libwrap0", "libssl3", "libnsl2", "libtirpc3"];
    add_program(cache, builder, &packages, "usr/bin/socat", "bin/socat")
}

/// Adds a program of the first package, with libraries of the others.
///
/// # Errors
/// Why it cannot be had.
pub fn add_program(
    cache: &Cache,
    builder: &mut Builder,
    packages: &[&str],
    file: &str,
    name: &str,
) -> Result<(), String> {
    let text = |error: &dyn std::error::Error| error.to_string();
    let mut roots = Vec::new();
    for package in packages {
        roots.push(cache.package(package).map_err(|error| text(&error))?);
    }
    let libraries: Vec<PathBuf> = roots
        .iter()
        .flat_map(|root| ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"].map(|d| root.join(d)))
        .collect();
    builder
        .program(name, &roots[0].join(file), &libraries)
        .map_err(|error| text(&error))
}
