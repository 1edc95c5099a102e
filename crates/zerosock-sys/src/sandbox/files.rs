//! Which files this process reaches: by a mount namespace, and by Landlock.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf, absolute};

use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, PathBeneath, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetError, Scope, path_beneath_rules,
};
use rustix::fs::FileType;

use super::namespace;
use super::place::{Place, Use};
use crate::socket_path::walk;

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
    let all = [
        (Use::Write, &files.write),
        (Use::Device, &files.devices),
        (Use::Read, &files.read),
    ];
    let left = namespace::leave();
    let mut places = Vec::new();
    for (used_for, paths) in all {
        // What does not exist is not there later, either.
        let traced = paths
            .iter()
            .filter_map(|path| walk::trace(&absolute(path).ok()?).ok());
        places.extend(traced.map(|traced| Place { used_for, traced }));
    }
    let (mut in_effect, mut missing) = (Vec::new(), Vec::new());
    match left.and_then(|()| namespace::empty(&places)) {
        Ok(()) => in_effect.push("a mount namespace"),
        Err(error) => missing.push(format!("no mount namespace: {error}")),
    }
    match restrict(files, &places) {
        Ok(()) => in_effect.push("Landlock"),
        Err(error) => missing.push(format!("no Landlock: {error}")),
    }
    (in_effect, missing)
}

/// Without the right to move files between directories (Linux 5.19) no socket could be put at its path, so there is
/// no Landlock then. The other rights are handled as far as the kernel knows them.
fn restrict(files: &Files, places: &[Place]) -> Result<(), RulesetError> {
    let reading = AccessFs::ReadFile | AccessFs::ReadDir | AccessFs::ResolveUnix;
    let writing = reading
        | AccessFs::WriteFile
        | AccessFs::MakeSock
        | AccessFs::MakeDir
        | AccessFs::RemoveFile
        | AccessFs::RemoveDir
        | AccessFs::Refer;
    let mut handled = Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(AccessFs::Refer)?
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(ABI::V9))?
        .scope(Scope::from_all(ABI::V6))?;
    if !files.tcp_listen {
        handled = handled.handle_access(AccessNet::BindTcp)?;
    }
    if !files.tcp_connect {
        handled = handled.handle_access(AccessNet::ConnectTcp)?;
    }
    let proc = path_beneath_rules([Path::new("/proc")], reading);
    let mut rules = handled.create()?.no_new_privs(true).add_rules(proc)?;
    for Place { used_for, traced } in places {
        let access = match used_for {
            Use::Write => writing,
            Use::Device => AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::IoctlDev,
            Use::Read if traced.entry.kind() == FileType::Directory => reading,
            Use::Read => AccessFs::ReadFile | AccessFs::ResolveUnix,
        };
        rules = rules.add_rule(PathBeneath::new(&traced.entry.file, access))?;
    }
    rules.restrict_self().map(drop)
}
