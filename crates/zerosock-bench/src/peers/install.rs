//! Where the programs of peers are installed, and how.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// `$ZEROSOCK_CACHE/peers`, else `peers` in the user's cache directory for zerosock.
pub(crate) fn root() -> PathBuf {
    let named = std::env::var_os("ZEROSOCK_CACHE").map(PathBuf::from);
    let cache = || {
        let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
        std::env::var_os("XDG_CACHE_HOME")
            .map(PathBuf::from)
            .or_else(home)
            .unwrap_or_else(std::env::temp_dir)
            .join("zerosock")
    };
    named.unwrap_or_else(cache).join("peers")
}

/// A peer's program: the one that `variable` names, else the installed one, else one on the PATH.
/// The error says what to do.
pub(crate) fn find(variable: &str, program: &str) -> Result<PathBuf, String> {
    if let Some(named) = std::env::var_os(variable).map(PathBuf::from) {
        return if named.is_file() {
            Ok(named)
        } else {
            Err(format!("{variable} names {}: no file", named.display()))
        };
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::iter::once(root().join("bin"))
        .chain(std::env::split_paths(&path))
        .map(|dir| dir.join(program))
        .find(|program| program.is_file())
        .ok_or_else(|| {
            format!(
                "{program} is not installed: add --install-peers, or set {variable} to its path"
            )
        })
}

/// As [`find`], for a program of a package of Debian with the same name.
pub(crate) fn find_packaged(variable: &str, program: &str) -> Result<PathBuf, String> {
    // Users' PATH often lacks the directory of daemons.
    let daemon = Path::new("/usr/sbin").join(program);
    match find(variable, program) {
        Err(_) if std::env::var_os(variable).is_none() && daemon.is_file() => Ok(daemon),
        Err(_) if std::env::var_os(variable).is_none() => Err(format!(
            "{program} is not installed: add --install-peers, or run as root: apt-get install \
             {program}, or set {variable} to its path"
        )),
        found => found,
    }
}

/// Runs `cargo install` with the root below the cache; its output goes to standard error.
pub(crate) fn cargo_install(what: &str, arguments: &[&OsStr]) -> Result<(), String> {
    eprintln!(
        "installing {what} with cargo install into {}",
        root().display()
    );
    let status = Command::new("cargo")
        .args(["install", "--locked", "--root"])
        .arg(root())
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .status()
        .map_err(|error| format!("cargo install {what}: {error}"))?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("cargo install {what}: {status}"))
    }
}

/// Installs packages of Debian, as root or with sudo without a password; the output goes to
/// standard error. Daemons among them are not started.
pub(crate) fn apt_get(packages: &[&str]) -> Result<(), String> {
    if packages.is_empty() {
        return Ok(());
    }
    let line = format!(
        "apt-get update -qq && apt-get install -y -qq --no-install-recommends {}",
        packages.join(" ")
    );
    let mut command = if rustix::process::geteuid().is_root() {
        Command::new("sh")
    } else {
        let mut command = Command::new("sudo");
        command.args(["-n", "--preserve-env=DEBIAN_FRONTEND,RUNLEVEL", "sh"]);
        command
    };
    eprintln!("installing {}: {line}", packages.join(" "));
    let status = command
        .args(["-c", &format!("({line}) >&2")])
        .env("DEBIAN_FRONTEND", "noninteractive")
        // In this run level invoke-rc.d starts nothing.
        .env("RUNLEVEL", "1")
        .stdin(Stdio::null())
        .status()
        .map_err(|error| format!("apt-get: {error}; run as root: {line}"))?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("apt-get: {status}; run as root: {line}"))
    }
}
