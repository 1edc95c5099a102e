//! What a configuration needs of the sandbox.

use std::path::{Path, PathBuf};

use rustix::fs::Gid;
use zerosock::forward::{ListenAddress, TargetTemplate};
use zerosock::{Cid, Port};

use super::args::ServeArgs;
use super::settings::Settings;
use super::vm::Host;
use crate::sandbox::Needs;

/// What these settings need while they are served, and to read the file again.
pub(super) fn of(settings: &Settings, args: &ServeArgs) -> Needs {
    let mut needs = Needs::new(settings.access.gid.map(Gid::as_raw));
    for vm in &settings.vms {
        needs.socket(&vm.socket);
        match &vm.host {
            Host::Hybrid { path, messages } => {
                needs.socket(path);
                messages.iter().for_each(|path| needs.socket(path));
            }
            Host::Forward { .. } => needs.kernel_vsock(),
        }
    }
    if let Some(attach) = &settings.attach {
        needs.socket(&attach.socket);
        let hybrid = attach.hybrid.iter();
        hybrid.for_each(|hybrid| needs.socket(hybrid.path()));
    }
    for rule in &settings.forward {
        match common_path(&rule.to) {
            Some(path) => needs.socket(&path),
            None => needs.network_target(),
        }
    }
    for rule in &settings.listen {
        match &rule.on {
            ListenAddress::Tcp(_) => needs.network_listener(),
            ListenAddress::Unix(path) | ListenAddress::UnixSeqpacket(path) => needs.socket(path),
        }
    }
    for network in &settings.net {
        network.needs(&mut needs);
    }
    if args.config.is_some() || !settings.key_files.is_empty() {
        // A group by name is looked up again.
        needs.reads_now(Path::new("/etc/group"));
    }
    let files = settings.key_files.iter().chain(&args.config);
    files.for_each(|path| needs.reads(path));
    needs
}

/// What the paths of a target have in common, whatever the guest and its port are; `None` for TCP and UDP.
fn common_path(target: &TargetTemplate) -> Option<PathBuf> {
    let first = target.path(Cid::new(3), Port::new(1))?;
    let second = target.path(Cid::new(4), Port::new(2))?;
    let both = first.components().zip(second.components());
    let common: PathBuf = both.take_while(|(a, b)| a == b).map(|(a, _)| a).collect();
    // With a placeholder in the name, the directory is what they have in common.
    Some(match first == second {
        true => first,
        false => common.join("{}"),
    })
}
