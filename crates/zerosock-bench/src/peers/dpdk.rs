//! DPDK: a program of one page on its ethernet devices, which is compiled when it is needed.
//!
//! `dpdk.c` says what it does. It needs no huge pages and no device of PCI.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use tempfile::TempDir;

use crate::namespace::run;

const SOURCE: &str = include_str!("dpdk.c");
/// Memory of a process, MiB.
const MEMORY_MIB: u32 = 128;
/// Commands, and the packages that have them.
const NEEDED: [(&str, &str); 2] = [("gcc", "gcc"), ("pkg-config", "pkg-config")];
const LIBRARY: &str = "libdpdk-dev";

/// The compiled program, once for a process.
static PROGRAM: OnceLock<Result<(TempDir, PathBuf), String>> = OnceLock::new();

/// Its name with the version of the library.
pub(crate) fn title() -> String {
    match pkg_config("--modversion") {
        Ok(version) => format!("DPDK {}", version.join(" ")),
        Err(_) => "DPDK".to_owned(),
    }
}

/// Packages that are missing.
pub(crate) fn missing_packages() -> Vec<&'static str> {
    let is_missing = |program: &str| Command::new(program).arg("--version").output().is_err();
    let tools = NEEDED
        .into_iter()
        .filter(|(program, _)| is_missing(program));
    let mut missing: Vec<_> = tools.map(|(_, package)| package).collect();
    if pkg_config("--modversion").is_err() {
        missing.push(LIBRARY);
    }
    missing
}

/// The program, and its arguments for these devices (`--vdev`), up to those of `dpdk.c`. The thread
/// that polls is on core `cpu`; `name` is that of the process among those of DPDK.
pub(crate) fn command(
    name: &str,
    cpu: Option<usize>,
    devices: &[&str],
) -> Result<(PathBuf, Vec<String>), String> {
    let program = program()?;
    let line = format!(
        "-l {} --no-huge -m {MEMORY_MIB} --no-pci --no-shconf --file-prefix zerosock-{}-{name}",
        cpu.unwrap_or(0),
        std::process::id()
    );
    let mut arguments: Vec<_> = line.split(' ').map(str::to_owned).collect();
    for device in devices {
        arguments.extend(["--vdev".to_owned(), (*device).to_owned()]);
    }
    arguments.push("--".to_owned());
    Ok((program, arguments))
}

fn program() -> Result<PathBuf, String> {
    let made = PROGRAM.get_or_init(|| {
        let missing = missing_packages();
        if !missing.is_empty() {
            return Err(format!(
                "DPDK's libraries or a compiler are not installed: add --install-peers, or run as \
                 root: apt-get install {}",
                missing.join(" ")
            ));
        }
        let dir = tempfile::tempdir().map_err(|error| error.to_string())?;
        let program = compile(dir.path())?;
        Ok((dir, program))
    });
    let (_, program) = made.as_ref().map_err(Clone::clone)?;
    Ok(program.clone())
}

fn compile(dir: &Path) -> Result<PathBuf, String> {
    let (source, program) = (dir.join("dpdk.c"), dir.join("dpdk"));
    std::fs::write(&source, SOURCE).map_err(|error| error.to_string())?;
    let mut command = Command::new("gcc");
    command
        .args(["-O3", "-Wall", "-o"])
        .arg(&program)
        .arg(&source);
    command
        .args(pkg_config("--cflags")?)
        .args(pkg_config("--libs")?);
    run(&mut command).map_err(|said| format!("compile dpdk.c: {said}"))?;
    Ok(program)
}

fn pkg_config(what: &str) -> Result<Vec<String>, String> {
    let output = Command::new("pkg-config").args([what, "libdpdk"]).output();
    let output = output.map_err(|error| format!("pkg-config: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    match output.status.success() {
        true => Ok(text.split_whitespace().map(str::to_owned).collect()),
        false => Err(format!("pkg-config does not know {LIBRARY}")),
    }
}
