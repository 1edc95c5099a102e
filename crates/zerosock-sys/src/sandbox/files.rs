//! Which files this process reaches: by a mount namespace, and by Landlock.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetError, Scope, path_beneath_rules,
};

use super::namespace;

/// Paths that this process needs. Those that do not exist are left out.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Files {
    /// Directories in which it makes, removes and connects to sockets.
    pub write: BTreeSet<PathBuf>,
    /// Directories and files that it reads.
    pub read: BTreeSet<PathBuf>,
    /// Devices that it opens.
    pub devices: BTreeSet<PathBuf>,
    /// It listens on TCP ports.
    pub tcp_listen: bool,
    /// It connects to TCP ports.
    pub tcp_connect: bool,
}

/// Leaves the files of `files`, and /proc, to this process, which has one thread. Returns what is in effect, and for
/// the rest why it is not.
pub fn confine_files(files: &Files) -> (Vec<&'static str>, Vec<String>) {
    let (mut in_effect, mut missing) = (Vec::new(), Vec::new());
    match namespace::enter(files) {
        Ok(()) => in_effect.push("a mount namespace"),
        Err(error) => missing.push(format!("no mount namespace: {error}")),
    }
    match restrict(files) {
        Ok(()) => in_effect.push("Landlock"),
        Err(error) => missing.push(format!("no Landlock: {error}")),
    }
    (in_effect, missing)
}

/// Without the right to move files between directories (Linux 5.19) no socket could be put at its path, so there is
/// no Landlock then. The other rights are handled as far as the kernel knows them.
fn restrict(files: &Files) -> Result<(), RulesetError> {
    let reading = AccessFs::ReadFile | AccessFs::ReadDir;
    let connecting = BitFlags::from(AccessFs::ResolveUnix);
    let writing = reading
        | connecting
        | AccessFs::WriteFile
        | AccessFs::MakeSock
        | AccessFs::MakeDir
        | AccessFs::RemoveFile
        | AccessFs::RemoveDir
        | AccessFs::Refer;
    let devices = AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::IoctlDev;
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(AccessFs::Refer)?
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(ABI::V9))?
        .scope(Scope::from_all(ABI::V6))?;
    if !files.tcp_listen {
        rules = rules.handle_access(AccessNet::BindTcp)?;
    }
    if !files.tcp_connect {
        rules = rules.handle_access(AccessNet::ConnectTcp)?;
    }
    rules
        .create()?
        .no_new_privs(true)
        .add_rules(path_beneath_rules(&files.write, writing))?
        .add_rules(path_beneath_rules(&files.read, reading | connecting))?
        .add_rules(path_beneath_rules(&files.devices, devices))?
        .add_rules(path_beneath_rules([Path::new("/proc")], reading))?
        .restrict_self()
        .map(drop)
}
