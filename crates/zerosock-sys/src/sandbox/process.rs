//! Capabilities, user and dumps.

use std::{fs, io};

use rustix::process::{
    DumpableBehavior, Gid, Resource, Rlimit, Uid, getrlimit, set_dumpable_behavior, setrlimit,
};
use rustix::thread::{
    CapabilitySet, capabilities, capability_is_in_bounding_set, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities, set_keep_capabilities, set_no_new_privs,
    set_thread_groups, set_thread_res_gid, set_thread_res_uid,
};

/// A user to become.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct User {
    /// Its number.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// The other groups.
    pub groups: Vec<u32>,
}

/// Becomes a user, and keeps the capabilities of this process, except those that stand for permissions of files.
///
/// # Errors
/// EPERM without CAP_SETUID and CAP_SETGID.
pub fn become_user(user: &User) -> io::Result<()> {
    let groups: Vec<Gid> = user.groups.iter().copied().map(Gid::from_raw).collect();
    let (uid, gid) = (Uid::from_raw(user.uid), Gid::from_raw(user.gid));
    set_keep_capabilities(true)?;
    set_thread_groups(&groups)?;
    set_thread_res_gid(gid, gid, gid)?;
    set_thread_res_uid(uid, uid, uid)?;
    let mut sets = capabilities(None)?;
    sets.permitted -= CapabilitySet::DAC_OVERRIDE
        | CapabilitySet::DAC_READ_SEARCH
        | CapabilitySet::FOWNER
        | CapabilitySet::FSETID
        | CapabilitySet::CHOWN;
    sets.effective = sets.permitted;
    sets.inheritable = CapabilitySet::empty();
    Ok(set_capabilities(None, sets)?)
}

/// Whether the calling thread can use a capability.
fn has_capability(capability: CapabilitySet) -> bool {
    capabilities(None).is_ok_and(|sets| sets.effective.contains(capability))
}

/// Takes all capabilities but those of `keep` from the calling thread and from the programs that it executes, and
/// lets no program that it executes have more.
///
/// # Errors
/// Errors of prctl(2) and capset(2).
pub fn drop_capabilities(keep: CapabilitySet) -> io::Result<()> {
    limit_capabilities(keep)?;
    let mut sets = capabilities(None)?;
    sets.inheritable = CapabilitySet::empty();
    set_capabilities(None, sets)?;
    clear_bounding_set(CapabilitySet::empty())
}

/// As [`drop_capabilities`], and programs that root executes have those of `keep` again.
///
/// # Errors
/// As [`drop_capabilities`].
pub fn limit_capabilities(keep: CapabilitySet) -> io::Result<()> {
    // Kernels before 4.3 have no ambient set.
    let _ = clear_ambient_capability_set();
    clear_bounding_set(keep)?;
    let mut sets = capabilities(None)?;
    sets.effective &= keep;
    sets.permitted &= keep;
    sets.inheritable &= keep;
    set_capabilities(None, sets)?;
    Ok(set_no_new_privs(true)?)
}

/// Takes capabilities from the bounding set. Without CAP_SETPCAP it stays, and no_new_privs has the same effect.
fn clear_bounding_set(keep: CapabilitySet) -> io::Result<()> {
    for number in 0..64 {
        let capability = CapabilitySet::from_bits_retain(1 << number);
        // EINVAL ends the list of the kernel.
        let Ok(has) = capability_is_in_bounding_set(capability) else {
            break;
        };
        if has && !keep.contains(capability) && has_capability(CapabilitySet::SETPCAP) {
            remove_capability_from_bounding_set(capability)?;
        }
    }
    Ok(())
}

/// The threads of this process that have capabilities beyond those of `keep`, by name.
pub fn threads_with_capabilities(keep: CapabilitySet) -> Vec<String> {
    let threads = fs::read_dir("/proc/self/task").into_iter().flatten();
    let status =
        threads.filter_map(|thread| fs::read_to_string(thread.ok()?.path().join("status")).ok());
    let with_more = status.filter_map(|status| {
        let field = |name: &str| {
            let value = status.lines().find_map(|line| line.strip_prefix(name));
            value.map(|value| value.trim().to_owned())
        };
        let permitted = u64::from_str_radix(&field("CapPrm:")?, 16).ok()?;
        (permitted & !keep.bits() != 0).then(|| field("Name:"))?
    });
    with_more.collect()
}

/// Lets this process leave no core dump, which would have the memory of guests, and lets no process of its user
/// without CAP_SYS_PTRACE trace it or read its memory.
///
/// # Errors
/// Errors of prctl(2) and setrlimit(2).
pub fn refuse_dumps() -> io::Result<()> {
    let none = Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    setrlimit(Resource::Core, none)?;
    Ok(set_dumpable_behavior(DumpableBehavior::NotDumpable)?)
}

/// Lets this process lock as much memory without CAP_IPC_LOCK as it may with it. Returns false if that is not
/// permitted: it takes CAP_SYS_RESOURCE.
pub fn raise_locked_memory() -> bool {
    let unlimited = Rlimit {
        current: None,
        maximum: None,
    };
    !has_capability(CapabilitySet::IPC_LOCK)
        || getrlimit(Resource::Memlock) == unlimited
        || setrlimit(Resource::Memlock, unlimited).is_ok()
}

/// Makes this process a member of a group, so that it can give files to the group. Without CAP_SETGID the groups stay.
pub fn join_group(gid: u32) {
    let Ok(mut groups) = rustix::process::getgroups() else {
        return;
    };
    let gid = Gid::from_raw(gid);
    if !groups.contains(&gid) {
        groups.push(gid);
        let _ = set_thread_groups(&groups);
    }
}
